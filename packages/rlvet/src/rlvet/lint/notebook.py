"""Read the code in the cells of a notebook: Python, commands of a shell, and files that a cell writes."""

from __future__ import annotations

import ast
import json
import re
import warnings
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlvet.errors import InvalidValue


@dataclass(frozen=True)
class Part:
    """A text that is read as a file of its own."""

    name: str
    """The name of the file, whose suffix determines the format."""
    text: str
    lines: Sequence[int | None]
    """The line of the notebook's file for each line of the text; None if it is not known."""


_Line = tuple[str, int | None]

_WRITTEN = re.compile(r"%%(?:writefile|file)[ \t]+(?:-a[ \t]+)?(\S+)\s*")
_OF_SHELL = re.compile(r"%%(?:bash|sh|script[ \t]+(?:ba)?sh)\b.*")
_OF_PYTHON = re.compile(r"%%(?:time|timeit|capture|prun)\b.*")


def read_notebook(text: str, path: str) -> list[Part]:
    r"""Return the parts of a notebook: all cells of Python as one script, all commands as one, and each written file.

    A line ``!command`` is one of the shell. Cells that are no Python are left out.

    Args:
        text: The JSON of the notebook.
        path: Its path, for messages.

    Raises:
        ValueError: if it is no notebook.

    >>> cell = {"cell_type": "code", "source": ["a = 1\n", "!python train.py --beta 0.1"]}
    >>> parts = read_notebook(json.dumps({"cells": [cell]}, indent=1), "train.ipynb")
    >>> [(part.name, part.text, list(part.lines)) for part in parts]
    [('cells.py', 'a = 1\npass\n', [6, 7]), ('cells.sh', 'python train.py --beta 0.1\n', [7])]
    """
    try:
        content = json.loads(text)
    except ValueError as error:
        raise InvalidValue(f"{path}: no notebook, {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("cells"), list):
        raise InvalidValue(f"{path}: no notebook, since it has no list of cells")
    script: list[_Line] = []
    commands: list[_Line] = []
    written: list[Part] = []
    for lines in _code_cells(content["cells"], _Lines(text)):
        first = lines[0][0]
        file = _WRITTEN.fullmatch(first)
        if file is not None:
            written.append(_part(file[1], lines[1:]))
        elif _OF_SHELL.fullmatch(first):
            commands += lines[1:]
        elif not first.startswith("%%") or _OF_PYTHON.fullmatch(first):
            python, of_shell = _without_magic(lines)
            commands += of_shell
            script += python if _is_python(python) else []
    parts = [_part("cells.py", script), _part("cells.sh", commands), *written]
    return [part for part in parts if part.lines]


class _Lines:
    """The lines of a notebook's file, in which the lines of its cells are looked for in their order.

    Args:
        text: The text of the file.
    """

    def __init__(self, text: str):
        self._numbers: dict[str, list[int]] = {}
        for number, line in enumerate(text.split("\n"), 1):
            self._numbers.setdefault(line.strip().removesuffix(","), []).append(number)
        self._last = 0

    def find(self, line: str) -> int | None:
        """Return the number of the next line that is a line of a cell; None if there is none."""
        following: list[int] = []
        for end in ("\n", ""):
            for ascii_only in (True, False):
                numbers = self._numbers.get(json.dumps(line + end, ensure_ascii=ascii_only), [])
                place = bisect_right(numbers, self._last)
                following += numbers[place : place + 1]
        if not following:
            return None
        self._last = min(following)
        return self._last


def _code_cells(cells: list[Any], file: _Lines) -> Iterator[list[_Line]]:
    """Yield the lines of each cell of code that has any, with their numbers in the file."""
    for cell in cells:
        if not isinstance(cell, dict) or cell.get("cell_type", "code") != "code":
            continue
        source = cell.get("source", "")
        text = "".join(map(str, source)) if isinstance(source, list) else str(source)
        lines = [(line, file.find(line)) for line in text.split("\n")]
        while lines and not lines[0][0].strip():
            del lines[0]
        if lines:
            yield lines


def _without_magic(lines: Sequence[_Line]) -> tuple[list[_Line], list[_Line]]:
    """Return the lines of Python, with ``pass`` for commands and magic, and the commands ``!command``."""
    python: list[_Line] = []
    commands: list[_Line] = []
    in_command = False
    indentation = ""
    for text, number in lines:
        stripped = text.lstrip()
        is_command = in_command or stripped.startswith("!")
        if not in_command:
            indentation = text[: len(text) - len(stripped)]
        if is_command or stripped.startswith("%"):
            python.append((f"{indentation}pass", number))
        else:
            python.append((text, number))
        if is_command:
            commands.append((text if in_command else stripped[1:], number))
        in_command = is_command and text.rstrip().endswith("\\")
    return python, commands


def _is_python(lines: Sequence[_Line]) -> bool:
    """Return whether lines are Python."""
    try:
        with warnings.catch_warnings():
            # Python warns of invalid escapes in the strings.
            warnings.simplefilter("ignore")
            ast.parse("\n".join(text for text, _ in lines))
    except (SyntaxError, ValueError):
        return False
    return True


def _part(name: str, lines: Sequence[_Line]) -> Part:
    """Return a part of a notebook that consists of some lines."""
    return Part(name, "".join(f"{text}\n" for text, _ in lines), [number for _, number in lines])
