"""Files that survive a kill or a full disk: written whole or not at all, and read up to where they were cut."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

UNFINISHED = ".unfinished"
"""How the names of files and folders begin that are still being written."""


@contextmanager
def replacing(path: Path) -> Generator[Path, None, None]:
    """A path to write a file or a folder to, which takes the place of ``path`` when the block ends.

    If the block raises, ``path`` stays as it was. A folder can take the place of nothing or of an empty folder.

    Raises:
        ValueError: ``path`` lies in no folder.

    >>> import tempfile
    >>> notes = Path(tempfile.mkdtemp()) / "notes.txt"
    >>> with replacing(notes) as unfinished:
    ...     _ = unfinished.write_text("all of it")
    >>> notes.read_text()
    'all of it'
    """
    if not path.parent.is_dir():
        raise ValueError(f"{path} cannot be written: there is no folder {path.parent}")
    unfinished = path.with_name(f"{UNFINISHED}-{os.getpid()}-{path.name}")  # the suffix tells the format
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        remove(unfinished)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSONL file, each with the number of its line, from 1; empty lines are skipped.

    A last line without its end was cut by a kill or is still being written. If it cannot be read, it is left out with
    a warning.

    Raises:
        ValueError: another line is no JSON object; the message names the file and the line.

    >>> import tempfile
    >>> log = Path(tempfile.mkdtemp()) / "metrics.jsonl"
    >>> _ = log.write_text('{"step": 1}\\n\\n{"step": 3}\\n')
    >>> list(read_jsonl(log))
    [(1, {'step': 1}), (3, {'step': 3})]
    """
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row: Any = json.loads(line.decode("utf-8"))
            fault = "" if isinstance(row, dict) else f"a {type(row).__name__}, not an object"
        except (ValueError, RecursionError) as error:
            row, fault = None, str(error)
        if not fault:
            yield number, row
            continue
        said = f"{path}, line {number}", f"{line[:60]!r}"
        if number < len(lines):
            raise ValueError(f"{said[0]} is no JSON object: {said[1]} ({fault})")
        warnings.warn(f"{said[0]}: the last line is cut off and is left out: {said[1]}", stacklevel=2)
