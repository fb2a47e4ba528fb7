"""Files that are there whole or not at all, whenever the process or the machine stops."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a text file under another name, have the disk take it, and give it its own name last.

    Raises:
        OSError: it cannot be written; what was there before is unchanged.
    """
    unfinished = path.with_name(f".unfinished-{os.getpid()}-{path.name}")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        if os.name == "posix":  # Windows opens no folders
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        # An error of cleaning up would hide the error of writing.
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
