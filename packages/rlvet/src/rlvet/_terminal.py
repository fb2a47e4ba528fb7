"""Safe output of a command: untrusted text is escaped, and output that cannot be written changes nothing else."""

from __future__ import annotations

import io
import os
import sys
import unicodedata
import warnings
from pathlib import Path
from typing import Any

HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
"""Unicode categories of invisible characters: controls, formats such as those of the writing direction, lone
surrogates, private and unassigned code points, and line and paragraph separators."""
JOINERS = ("\u200c", "\u200d")
"""Format characters that ordinary words and emoji contain: the zero-width non-joiner and joiner."""


def printable(text: object) -> str:
    r"""Return text as one line, with control and invisible characters escaped.

    Args:
        text: Any object; its ``str`` is used. Letters of all scripts, spaces and emoji are unchanged.

    >>> printable("\x1b[31mred\n")
    '\\x1b[31mred\\n'
    >>> printable("naïve 🙂")
    'naïve 🙂'
    """
    return "".join(map(_visible, str(text)))


def printable_lines(text: object) -> str:
    """Return text with each of its lines escaped by `printable`."""
    return "\n".join(map(printable, str(text).split("\n")))


def _visible(letter: str) -> str:
    """Return a character, escaped if it is invisible."""
    if letter in JOINERS or unicodedata.category(letter) not in HIDDEN:
        return letter
    return letter.encode("unicode_escape").decode("ascii")


PACKAGES = ("rlvet", "bandpo", "bandpo_lab")
"""The packages whose warnings a command prints without the line of their source."""


def escape_warnings() -> None:
    """Escape all further warnings of this process with `printable_lines`.

    Those of `PACKAGES` are printed as a sentence, as the line of their source tells a user of a command nothing.
    """
    original = warnings.formatwarning

    def format_warning(
        message: Any, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        modules = [sys.modules[name].__file__ for name in PACKAGES if name in sys.modules]
        if any(file is not None and Path(filename).is_relative_to(Path(file).parent) for file in modules):
            return printable_lines(f"warning: {message}") + "\n"
        return printable_lines(original(message, category, filename, lineno, line))

    warnings.formatwarning = format_warning


class Output(io.FileIO):
    """A file that keeps the error when it cannot be written, and loses what follows."""

    error: OSError | None = None

    def write(self, data: Any) -> int | None:
        if self.error is None:
            try:
                return super().write(data)
            except OSError as error:
                self.error = error
        return len(data)


def open_outputs() -> Output:
    """Replace the standard output and the standard error of this process by an `Output` each, and return the first.

    The command goes on if its reader has gone, so that its result is that of the whole run. A stream that the caller
    closed is open afterwards, as its number would else be that of the next file, and cannot be written. A character
    that the stream's encoding does not have is a question mark.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The system takes the lowest free number.
            os.open(os.devnull, os.O_RDONLY)
    outputs = []
    for number, name in ((1, "stdout"), (2, "stderr")):
        before = getattr(sys, name)
        closed = os.open(os.devnull, os.O_RDONLY) if before is None else None
        output = Output(number if closed is None else closed, "w", closefd=False)
        outputs.append(output)
        # A program that calls a command may have replaced a stream already.
        if before is getattr(sys, f"__{name}__"):
            text = io.TextIOWrapper(
                io.BufferedWriter(output),
                encoding=getattr(before, "encoding", "utf-8"),
                errors="replace",
                line_buffering=number == 2 or output.isatty(),
            )
            setattr(sys, name, text)
    return outputs[0]
