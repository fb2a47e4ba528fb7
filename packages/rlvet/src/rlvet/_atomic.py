"""Atomic writes: a file is either complete or absent, even if the process or the machine stops."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def naming(path: Path) -> Generator[None, None, None]:
    """Add the path to an OSError that names no file, such as the error for a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync(*paths: Path) -> None:
    """Flush files and folders to the disk, so that they survive a power failure."""
    if os.name != "posix":  # Windows cannot open folders
        return
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            with naming(path):
                os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically: write a temporary file, flush it to the disk, and rename it to ``path``.

    Raises:
        OSError: if it cannot be written. A previous file is then unchanged.
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
        # An error here would hide the error of writing.
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
