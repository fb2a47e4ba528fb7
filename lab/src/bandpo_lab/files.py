"""Files that survive a kill or a full disk, and those that several processes write to."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from bandpo._atomic import naming, sync
from bandpo.errors import FileProblem, InvalidValue

LOCK = ".lock"
"""How the names of files begin that keep other processes out of a folder."""
SEAL = "manifest.json"
"""The file of a folder's digests."""
UNFINISHED = ".unfinished"
"""How the names of files and folders begin that are still being written."""

PATHS = {"model_name_or_path": "folder", "dataset_name": "file or folder"}
"""Options of `bandpo-lab train` that name a path or something on a hub, and what the path has to lead to."""


@contextmanager
def replacing(path: Path) -> Generator[Path, None, None]:
    """A path to write a file or a folder to, which takes the place of ``path`` once it is on the disk.

    If the block raises, ``path`` stays as it was. A folder can take the place of nothing or of an empty folder. What
    processes of this machine left unfinished in the folder is removed, if they have ended.

    Raises:
        ValueError: ``path`` lies in no folder.
        OSError: it cannot be written; the error names a file.
    """
    if not path.parent.is_dir():
        raise InvalidValue(f"{path} cannot be written: there is no folder {path.parent}")
    remove_strays(path.parent)
    unfinished = _unfinished(path)
    try:
        with naming(path):
            yield unfinished
            put_in_place(unfinished, path)
    finally:
        # An error of cleaning up would hide that of the block.
        with suppress(OSError):
            remove(unfinished)


def _unfinished(path: Path) -> Path:
    """Return the name that a path has while this process writes or removes it; the suffix tells the format."""
    return path.with_name(f"{UNFINISHED}-{socket.gethostname()}-{os.getpid()}-{path.name}")


def remove_strays(folder: Path) -> None:
    """Remove what processes of this machine left unfinished in a folder, if they have ended."""
    if os.name != "posix":  # Windows has no way to ask whether a process runs that could not end it
        return
    pattern = re.compile(rf"{re.escape(UNFINISHED)}-{re.escape(socket.gethostname())}-(\d+)-.*")
    for entry in folder.iterdir():
        match = pattern.fullmatch(entry.name)
        if match and not _is_running(int(match[1])):
            remove(entry)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        return True
    return True


def put_in_place(unfinished: Path, path: Path) -> None:
    """Rename a file or a folder, once all of it is on the disk; then have the disk take the new name."""
    sync(*unfinished.rglob("*"), unfinished)
    unfinished.replace(path)
    sync(path.parent)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it, if it is there.

    A folder first gets the name of something unfinished, so that a kill leaves no part of it under its own name.
    """
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    if not path.name.startswith(UNFINISHED):
        leaving = _unfinished(path)
        shutil.rmtree(leaving, ignore_errors=True)
        path.replace(leaving)
        sync(leaving.parent)
        path = leaving
    shutil.rmtree(path, ignore_errors=True)


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
        text = holder.read_text(encoding="utf-8") if holder.exists() else ""
        who = f" ({text})" if text else ""
        raise FileProblem(
            f"another process is writing to {folder}{who}: wait for it, or choose another folder"
        ) from error
    with lock:
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        with replacing(holder) as unfinished:
            unfinished.write_text(
                f"process {os.getpid()} on {socket.gethostname()}, since {now}", encoding="utf-8"
            )
        remove_strays(folder)
        try:
            yield
        finally:
            # An error of cleaning up would hide that of the block.
            with suppress(OSError):
                remove(holder)


def check_writable(folder: Path) -> None:
    """See before slow work that files can be written into a folder, or into the one in which it is to be made.

    Raises:
        ValueError: They cannot.
    """
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise InvalidValue(f"{folder} cannot be written: {error.strerror}; choose another folder") from error


def is_path(name: str) -> bool:
    """Whether the name of a model or a data set can only be a path: no name of a hub begins or ends so.

    >>> [is_path(name) for name in ("./qwen", "/models/qwen", "~/qwen", "qwen/", "Qwen/Qwen3-4B")]
    [True, True, True, True, False]
    """
    return name.startswith((".", "/", "~")) or name.endswith("/")


def check_path(option: str, name: str, what: str = "folder") -> None:
    """Check that a name which can only be a path is there; names of a hub are not looked up.

    Args:
        option: The option that holds the name, for the message.
        name: The name of a model or a data set.
        what: What has to be there, ``folder`` or ``file or folder``.

    Raises:
        ValueError: it is not there.
    """
    if not is_path(name):
        return
    path = Path(name).expanduser()
    if not (path.is_dir() if what == "folder" else path.exists()):
        raise InvalidValue(
            f"{option} {name}: there is no such {what} (it would be {path.resolve()}); correct the path, or give a "
            "name of the hub"
        )


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def seal(folder: Path, files: Iterable[Path]) -> None:
    """Write the SHA-256 of files into the folder's manifest, once all of them are on the disk."""
    digests: dict[str, str] = {}
    for file in sorted(files):
        sync(file)
        digests[file.relative_to(folder).as_posix()] = digest(file)
    with replacing(folder / SEAL) as unfinished:
        unfinished.write_text(json.dumps(digests, indent=1) + "\n", encoding="utf-8")


def sealed(folder: Path) -> dict[str, str]:
    """The digests in a folder's manifest; empty if there is none, or it is not one.

    Raises:
        OSError: it is there, and the disk does not give it.
    """
    try:
        return dict(json.loads((folder / SEAL).read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return {}


def drop_unfinished_line(path: Path) -> None:
    """Remove what a kill has left of a file's last line, so that the next line starts on its own."""
    end = path.read_bytes().rfind(b"\n") + 1
    with path.open("r+b") as file:
        file.truncate(end)
