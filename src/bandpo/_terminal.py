"""Text of others on a terminal: control characters are shown instead of obeyed."""

from __future__ import annotations

import unicodedata
import warnings
from typing import Any

HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
"""Categories of Unicode that are no visible text: controls, formats such as those of the writing direction, lone
surrogates, private and unassigned code points, and ends of lines and paragraphs."""
JOINERS = ("\u200c", "\u200d")
"""Formats that ordinary words and emoji contain: the zero-width non-joiner and joiner."""


def printable(text: object) -> str:
    r"""Return text in one line, with each character that a terminal would obey or hide as a visible escape.

    Args:
        text: Any object; its ``str`` is taken. Letters of all scripts, spaces and emoji stay as they are.

    >>> printable("\x1b[31mred\n")
    '\\x1b[31mred\\n'
    >>> printable("naïve 🙂")
    'naïve 🙂'
    """
    return "".join(map(_visible, str(text)))


def printable_lines(text: object) -> str:
    """Return text of several lines, each as `printable` has it."""
    return "\n".join(map(printable, str(text).split("\n")))


def _visible(letter: str) -> str:
    if letter in JOINERS or unicodedata.category(letter) not in HIDDEN:
        return letter
    return letter.encode("unicode_escape").decode("ascii")


def escape_warnings() -> None:
    """Print every warning of this process from now on as `printable_lines` has it."""
    before = warnings.formatwarning

    def formatted(*arguments: Any, **options: Any) -> str:
        return printable_lines(before(*arguments, **options))

    warnings.formatwarning = formatted
