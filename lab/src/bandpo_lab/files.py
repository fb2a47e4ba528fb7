"""Files that several processes, or a process and the one that resumes it, write to."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from bandpo.audit.files import remove, replacing
from bandpo.errors import FileProblem

LOCK = ".lock"
"""How the names of files begin that keep other processes out of a folder."""


@contextmanager
def locked(folder: Path) -> Generator[None, None, None]:
    """Keep other processes that lock a folder out of it, until the block or the process ends, however it ends.

    Raises:
        FileProblem: another process has locked it; the message says which.
    """
    holder = folder / f"{LOCK}-holder"
    try:
        lock = FileLock(folder / LOCK, timeout=0).acquire()
    except Timeout as error:
        who = f" ({holder.read_text()})" if holder.exists() else ""
        raise FileProblem(
            f"another process is writing to {folder}{who}: wait for it, or choose another folder"
        ) from error
    with lock:
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        with replacing(holder) as unfinished:
            unfinished.write_text(f"process {os.getpid()} on {socket.gethostname()}, since {now}")
        try:
            yield
        finally:
            remove(holder)


def digest(path: Path) -> str:
    """The SHA-256 of a file, or of a folder's files and their names."""
    if path.is_dir():
        parts = sorted(part for part in path.rglob("*") if part.is_file())
        listed = "".join(f"{part.relative_to(path).as_posix()} {digest(part)}\n" for part in parts)
        return hashlib.sha256(listed.encode()).hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def drop_unfinished_line(path: Path) -> None:
    """Remove what a kill has left of a file's last line, so that the next line starts on its own."""
    end = path.read_bytes().rfind(b"\n") + 1
    with path.open("r+b") as file:
        file.truncate(end)
