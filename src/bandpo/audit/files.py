"""Files that survive a kill or a full disk: written whole or not at all, and read up to where they were cut."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from bandpo.errors import InvalidValue

UNFINISHED = ".unfinished"
"""How the names of files and folders begin that are still being written."""


@contextmanager
def replacing(path: Path) -> Generator[Path, None, None]:
    """A path to write a file or a folder to, which takes the place of ``path`` once it is on the disk.

    If the block raises, ``path`` stays as it was. A folder can take the place of nothing or of an empty folder.

    Raises:
        ValueError: ``path`` lies in no folder.
    """
    if not path.parent.is_dir():
        raise InvalidValue(f"{path} cannot be written: there is no folder {path.parent}")
    unfinished = path.with_name(f"{UNFINISHED}-{os.getpid()}-{path.name}")  # the suffix tells the format
    try:
        yield unfinished
        sync(unfinished, *unfinished.rglob("*"))
        unfinished.replace(path)
        sync(path.parent)
    finally:
        remove(unfinished)


def sync(*paths: Path) -> None:
    """Have the disk take files and folders: a power cut loses what is in memory only."""
    for path in paths if os.name == "posix" else ():  # Windows opens no folders
        opened = os.open(path, os.O_RDONLY)
        os.fsync(opened)
        os.close(opened)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def read_jsonl(
    path: Path, *, growing: bool = True, parse: Callable[[bytes], Any] = json.loads
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSONL file, each with the number of its line, from 1; empty lines are skipped.

    Args:
        path: The file, which may be a .gz; it is read as far as it is asked for.
        growing: Whether a process writes to it, or did until it was killed. A last line without its end that cannot be
            read is then left out, with a warning.
        parse: What makes an object of a line; a ValueError says why it cannot.

    Raises:
        ValueError: a line is no JSON object; the message names the file and the line.
    """
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        for number, line in enumerate(file, 1):
            ended = line.endswith(b"\n")
            line = line.removeprefix(codecs.BOM_UTF8).strip()
            if line:
                try:
                    row: Any = parse(line)
                    fault = "" if isinstance(row, dict) else f"but a {type(row).__name__}"
                except (ValueError, RecursionError) as error:
                    row, fault = None, str(error)
                if not fault:
                    yield number, row
                elif growing and not ended:
                    warnings.warn(
                        f"{path}, line {number}: the last line is cut off and is left out: {line[:60]!r}",
                        stacklevel=2,
                    )
                else:
                    raise InvalidValue(f"{path}, line {number}: not a JSON object, {fault}: {line[:60]!r}")
            if not ended:
                return  # what is written later belongs to this line


class Foreign(dict[Any, Any]):
    """Stands for an object, class or function that a pickle names: what it was called with, and its state."""

    state: Any = None

    def __init__(self, *arguments: Any):
        super().__init__()
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _NoImports(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return Foreign


def unpickled(data: bytes, name: object = "it") -> Any:
    """What a pickle holds, without importing or calling what it names; a `Foreign` stands for each of these.

    Raises:
        ValueError: it is no pickle, or a damaged one.

    >>> import argparse
    >>> unpickled(pickle.dumps(argparse.Namespace(epsilon=0.2))).state
    {'epsilon': 0.2}
    """
    try:
        return _NoImports(io.BytesIO(data)).load()
    except Exception as error:  # whatever bytes of another kind lead to
        raise InvalidValue(f"{name} is no pickle, or a damaged one ({error!r})") from error


@cache
def shipped(name: str) -> Any:
    """One of the package's data files: what was measured, reported, or is called so in other packages."""
    return json.loads((resources.files("bandpo") / "data" / f"{name}.json").read_text(encoding="utf-8"))
