"""Find the error with which a training ended, in what it printed."""

from __future__ import annotations

import re
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


def _lines_of_process(text: str, prefix: str) -> list[str]:
    """Return the lines with this prefix, without it."""
    return [line.removeprefix(prefix).rstrip() for line in text.splitlines()[1:] if line.startswith(prefix)]
