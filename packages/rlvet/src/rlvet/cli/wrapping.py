"""Lines that are as wide as the terminal."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap


def wrapped(text: str) -> str:
    """Return text whose lines are at most as wide as the terminal; unchanged if the output is no terminal.

    A line goes on below its first word, or below the text after a number such as ``1.``. No word is divided, so a path
    can be copied.
    """
    if not sys.stdout.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return "\n".join(_wrap_line(line, width) for line in text.split("\n"))


def _wrap_line(line: str, width: int) -> str:
    """Return a line as several of at most a width.

    >>> print(_wrap_line("1. clip-heavy: most of the gradient is dropped", 24))
    1. clip-heavy: most of
       the gradient is
       dropped
    """
    start = re.match(r"\s*(?:\d+\. |- )?", line)
    assert start is not None
    parts = textwrap.wrap(
        line,
        width,
        subsequent_indent=" " * len(start[0]),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(parts)
