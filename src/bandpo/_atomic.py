"""Files that are there whole or not at all, whenever the process or the machine stops."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def naming(path: Path) -> Generator[None, None, None]:
    """Add a path to errors of the disk that name no file, as those of writing do."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync(*paths: Path) -> None:
    """Have the disk take files and folders: a power cut loses what is in memory only."""
    for path in paths if os.name == "posix" else ():  # Windows opens no folders
        opened = os.open(path, os.O_RDONLY)
        try:
            with naming(path):
                os.fsync(opened)
        finally:
            os.close(opened)


def write_whole(path: Path, text: str) -> None:
    """Write a text file under another name, have the disk take it, and give it its own name last.

    Raises:
        OSError: it cannot be written; what was there before is unchanged.
    """
    unfinished = path.with_name(f".unfinished-{os.getpid()}-{path.name}")
    try:
        with naming(path):
            with unfinished.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
            sync(path.parent)
    finally:
        # An error of cleaning up would hide the error of writing.
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
