"""Find the error with which a training ended, in what it printed, and the step at which its progress bar stands."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

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


def last_error(text: str, has_rows: Callable[[str], bool]) -> str:
    r"""Return the first error in a text that no row of metrics follows; an empty text if there is none.

    Of an error that was raised while another one was handled, it is the later one, of which a user reads. The processes
    of a run may each end with an error, and the first one is most often the cause of the others.

    Args:
        text: The console output.
        has_rows: A function that returns True for a text with a row of metrics.

    >>> text = "reward: 0.5\nTraceback (most recent call last):\n  File 'a.py', line 1\nValueError: no such prompt\n"
    >>> last_error(text, lambda rest: "reward:" in rest)
    'ValueError: no such prompt'
    """
    error = ""
    heads = [*TRACEBACK.finditer(text)][-MOST_TRACEBACKS:]
    for number in reversed(range(len(heads))):
        head = heads[number]
        end = heads[number + 1].start() if number + 1 < len(heads) else len(text)
        # After the next traceback there is none, or this one would not be reached.
        if has_rows(text[head.end() : end]):
            break
        lines = _lines_of_process(text[head.end() : end], head["prefix"])
        if not error or not any(line.startswith(CHAINED) for line in lines):
            error = next(filter(ERROR.match, lines), error)
    return error if len(error) <= LONGEST_ERROR else f"{error[:LONGEST_ERROR].rpartition(' ')[0]} …"


BAR = re.compile(r"\b(\d{1,9})/(\d{1,9}) \[")
"""The step and the number of steps on a progress bar."""

END_WITH_BARS = 2**18
"""The number of characters at the end of a text in which bars are looked for."""

FEWEST_BARS = 3
"""The number of bars with one total from which it is that of the training. Shards and data sets have one or two."""


def bar_at_the_end(text: str) -> str:
    """Return a sentence on a progress bar that does not reach its end; empty if it does, or there is none.

    >>> bar_at_the_end("".join(f"{step}/1000 [5:53:20<9:07:20]" for step in range(400, 406)))
    'the progress bar of the output stands at 405 of 1000'
    """
    bars = [(int(step), int(total)) for step, total in BAR.findall(text[-END_WITH_BARS:])]
    if not bars:
        return ""
    total, count = Counter(total for _, total in bars).most_common(1)[0]
    last = next(step for step, other in reversed(bars) if other == total)
    if count < FEWEST_BARS or last >= total:
        return ""
    return f"the progress bar of the output stands at {last} of {total}"


def _lines_of_process(text: str, prefix: str) -> list[str]:
    """Return the lines with this prefix, without it."""
    return [line.removeprefix(prefix).rstrip() for line in text.splitlines()[1:] if line.startswith(prefix)]
