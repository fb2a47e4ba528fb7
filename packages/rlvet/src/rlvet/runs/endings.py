"""Find how the output of a training ends: with an error, after a summary, and where its progress bar stands."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from rlvet._terminal import printable
from rlvet.runs.quantities import SUMMARY

LOST = re.compile(r"\0{16,}")
"""A part of a file that was lost. What was before it may be of another process."""

TRACEBACK = re.compile(r"^(?P<prefix>[^\n]{0,100}?)Traceback \(most recent call last\):", re.M)
"""The head of a traceback, after what Ray or torchrun put before each line: ``[rank0]: ``."""

ERROR = re.compile(r"[A-Za-z_][\w.]*(?::|$)")
"""The start of the line with the error itself: its class, and most often a colon."""

CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
"""The starts of the lines between two errors of which the second was raised because of the first."""

LONGEST_ERROR = 160
"""The number of characters of an error that are told."""

MOST_TRACEBACKS = 16
"""The number of tracebacks at the end of a text that are looked at."""


KILLED = re.compile(
    r"^(?:[^\n]{0,200}: line \d+: +\d+ )?(?P<how>Killed|Terminated|Aborted|Segmentation fault|Bus error)"
    r"(?: \(core dumped\))?(?: {2,}[^\n]*)?$",
    re.M,
)
"""The line of a shell on a process that a signal ended: ``run.sh: line 108: 4707 Killed      python main.py``."""

BAR = re.compile(r"\b(\d{1,9})/(\d{1,9}) \[")
"""The step and the number of steps on a progress bar."""

END_WITH_BARS = 2**18
"""The number of characters at the end of a text in which bars are looked for."""

FEWEST_BARS = 3
"""The number of bars with one total from which it is that of the training. Shards and data sets have one or two."""


class Ending(NamedTuple):
    """How console output ends.

    >>> Ending("ValueError: no such prompt", (405, 1000)).text
    "after its last row, the output has an error: 'ValueError: no such prompt'; its progress bar stands at 405 of 1000"
    """

    error: str = ""
    """The error after its last row; empty without one."""
    bar: tuple[int, int] | None = None
    """The step on the progress bar of the training and its number of steps; None without a bar."""
    has_summary: bool = False
    """True if the summary of a training that had ended follows its last row."""
    rows_follow: bool = False
    """True if rows follow the error, which a process writes at its end."""
    errors: str = ""
    """A sentence on the lines that name an error, if they are many."""

    @property
    def is_early(self) -> bool:
        """True if it ends with an error, or before the end of its progress bar, and training had not ended."""
        return not self.has_summary and bool(self.error or self._bar_text)

    @property
    def _bar_text(self) -> str:
        """Where a bar stands that has not reached its end; empty without one."""
        if self.bar is None or self.bar[0] >= self.bar[1] or self.has_summary:
            return ""
        return f"stands at {self.bar[0]} of {self.bar[1]}"

    @property
    def text(self) -> str:
        """A sentence on an error, and on a bar that does not reach its end; empty without both."""
        if not self.error:
            return f"the progress bar of the output {self._bar_text}" if self._bar_text else ""
        after = "the training had ended" if self.has_summary else "its last row"
        if self.rows_follow and not self.has_summary:
            after = "the last step of its progress bar"
        bar = f"; its progress bar {self._bar_text}" if self._bar_text else ""
        return f"after {after}, the output has an error: {self.error!r}{bar}"


NO_ENDING = Ending()
"""The ending of what is no console output."""


def ending_of(text: str, has_rows: Callable[[str], bool]) -> Ending:
    r"""Return how an output ends.

    Args:
        text: The console output.
        has_rows: A function that returns True for a text with a row of metrics.

    >>> text = "reward: 0.5\nTraceback (most recent call last):\n  File 'a.py', line 1\nValueError: no such prompt\n"
    >>> ending_of(text, lambda rest: "reward:" in rest).error
    'ValueError: no such prompt'
    """
    bar = _bar_of(text)

    def goes_on(rest: str) -> bool:
        # Rows that had waited to be written may follow an error that ended the run. The bar does not go on then.
        return has_rows(rest) and (bar is None or any(int(total) == bar[1] for _, total in BAR.findall(rest)))

    start, error = _last_error(text, goes_on)
    if not error:
        start, error = _last_signal(text, goes_on)
    before = text[:start] if error else text
    _, summary, rest = before.rpartition(SUMMARY)
    rows_follow = bool(error) and has_rows(text[start:])
    return Ending(error, bar, bool(summary) and not has_rows(rest), rows_follow, _errors_of(text))


NAMED_ERROR = re.compile(r"\b([A-Z]\w*(?:Error|Exception))\b[^\n]{0,80}")
"""The name of an error, with what follows it in its line."""

FEWEST_ERRORS = 20
"""Number of lines that name one error from which they are told: one that ended the run has few."""


def _errors_of(text: str) -> str:
    r"""Return a sentence on the lines that name an error, if they are many; empty if they are not.

    >>> _errors_of("task 1 failed: RuntimeError('no page')\nreward: 0.5\n" * 20)
    "20 lines of the output name an error, most often RuntimeError('no page'): look at these first"
    """
    errors: Counter[str] = Counter()
    texts: Counter[str] = Counter()
    for match in NAMED_ERROR.finditer(text):
        errors[match[1]] += 1
        texts[match[0].strip()] += 1
    if not errors or errors.most_common(1)[0][1] < FEWEST_ERRORS:
        return ""
    most_often = printable(texts.most_common(1)[0][0])
    return f"{errors.total()} lines of the output name an error, most often {most_often}: look at these first"


def _last_error(text: str, goes_on: Callable[[str], bool]) -> tuple[int, str]:
    """Return where the first error is after which a training does not go on, and the error; an empty text without one.

    Of an error that was raised while another one was handled, it is the later one, of which a user reads. The processes
    of a run may each end with an error, and the first one is most often the cause of the others.
    """
    start = len(text)
    error = ""
    heads = [*TRACEBACK.finditer(text)][-MOST_TRACEBACKS:]
    for number in reversed(range(len(heads))):
        head = heads[number]
        end = heads[number + 1].start() if number + 1 < len(heads) else len(text)
        # After the next traceback there is none, or this one would not be reached.
        if goes_on(text[head.end() : end]):
            break
        lines = _lines_of_process(text[head.end() : end], head["prefix"])
        if not error or not any(line.startswith(CHAINED) for line in lines):
            error = next(filter(ERROR.match, lines), error).rstrip(": ")
            start = head.start()
    return start, error if len(error) <= LONGEST_ERROR else f"{error[:LONGEST_ERROR].rpartition(' ')[0]} …"


def _last_signal(text: str, goes_on: Callable[[str], bool]) -> tuple[int, str]:
    r"""Return where a shell tells last that a signal ended a process, and its words; an empty text without one.

    >>> _last_signal("reward: 0.5\nrun.sh: line 8: 4707 Killed      python main.py\n", lambda rest: False)
    (12, 'Killed')
    """
    begin = max(0, len(text) - END_WITH_BARS)
    matches = [*KILLED.finditer(text[begin:])]
    if not matches or goes_on(text[begin + matches[-1].end() :]):
        return len(text), ""
    return begin + matches[-1].start(), matches[-1]["how"]


def _bar_of(text: str) -> tuple[int, int] | None:
    """Return the last step on the progress bar of a training, and its number of steps; None without a bar.

    >>> _bar_of("".join(f"{step}/1000 [5:53:20<9:07:20]" for step in range(400, 406)))
    (405, 1000)
    """
    bars = [(int(step), int(total)) for step, total in BAR.findall(text[-END_WITH_BARS:])]
    if not bars:
        return None
    total, count = Counter(total for _, total in bars).most_common(1)[0]
    last = next(step for step, other in reversed(bars) if other == total)
    return (last, total) if count >= FEWEST_BARS else None


def _lines_of_process(text: str, prefix: str) -> list[str]:
    """Return the lines with this prefix, without it."""
    return [line.removeprefix(prefix).rstrip() for line in text.splitlines()[1:] if line.startswith(prefix)]
