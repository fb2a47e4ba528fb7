"""Write files atomically, lock folders, and detect changes by digests."""

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

from bandpo_lab.errors import FileProblem, InvalidValue, is_reported
from rlvet._atomic import naming, sync
from rlvet.runs.files import check_file
from rlvet.runs.limits import LARGEST_CONFIG

LOCK = ".lock"
"""The beginning of the names of lock files."""
SEAL = "manifest.json"
"""The file with the digests of a folder's files."""
UNFINISHED = ".unfinished"
"""The beginning of the names of files and folders that are being written."""

PATHS = {"model_name_or_path": "folder", "dataset_name": "file or folder"}
"""The options of `bandpo-lab train` that name a path or something on a hub, with the kind of path."""


WRITE_ERRORS = ("PytorchStreamWriter", "inline_container", "iostream error", "I/O error", "os error")
"""Parts of the error messages of torch.save, safetensors and tokenizers if the disk is full, which are no OSError."""


def is_write_error(error: Exception) -> bool:
    """Return True if an error, which is no OSError, says that a library could not write a file."""
    if is_reported(error) or isinstance(error, OSError):
        return False
    return any(part in str(error) for part in WRITE_ERRORS)


@contextmanager
def replacing(path: Path) -> Generator[Path, None, None]:
    """Yield a temporary path for a file or a folder, which replaces ``path`` when the block ends.

    If the block raises an error, ``path`` is not changed. A folder can only replace an empty folder, or nothing.
    Unfinished files of processes of this machine that have ended are removed.

    Raises:
        ValueError: The folder of ``path`` does not exist.
        OSError: A file cannot be written; the error names it.
        FileProblem: A library cannot write the file.
    """
    if not path.parent.is_dir():
        raise InvalidValue(f"{path} cannot be written: there is no folder {path.parent}")
    remove_strays(path.parent)
    unfinished = _unfinished(path)
    try:
        with naming(path):
            yield unfinished
            put_in_place(unfinished, path)
    except Exception as error:
        if not is_write_error(error):
            raise
        raise FileProblem(
            f"{path} cannot be written: {' '.join(str(error).split())}; see whether the disk is full or fails"
        ) from error
    finally:
        # An error of this cleanup would hide the error of the block.
        with suppress(OSError):
            remove(unfinished)


def _unfinished(path: Path) -> Path:
    """Return the temporary path of a file or a folder while this process writes or removes it, with the same suffix."""
    return path.with_name(f"{UNFINISHED}-{socket.gethostname()}-{os.getpid()}-{path.name}")


def remove_strays(folder: Path) -> None:
    """Remove the unfinished files in a folder of processes of this machine that have ended."""
    if os.name != "posix":  # on Windows, os.kill with signal 0 would end the process
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
    except PermissionError:  # the process is of another user
        return True
    return True


def put_in_place(unfinished: Path, path: Path) -> None:
    """Sync a file or a folder to the disk, rename it to its final path, and sync the new name."""
    sync(*unfinished.rglob("*"), unfinished)
    unfinished.replace(path)
    sync(path.parent)


def remove(path: Path) -> None:
    """Remove a file, or a folder with its content, if it exists.

    A folder is first renamed as unfinished, so that no part of it keeps its name if the process is killed.
    """
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    if not path.name.startswith(UNFINISHED):
        renamed = _unfinished(path)
        shutil.rmtree(renamed, ignore_errors=True)
        path.replace(renamed)
        sync(renamed.parent)
        path = renamed
    shutil.rmtree(path, ignore_errors=True)


@contextmanager
def locked(folder: Path) -> Generator[None, None, None]:
    """Lock a folder until the block or the process ends.

    Raises:
        FileProblem: Another process has locked it; the message names the process.
    """
    holder = folder / f"{LOCK}-holder"
    try:
        lock = FileLock(folder / LOCK, timeout=0).acquire()
    except Timeout as error:
        text = holder.read_text(encoding="utf-8") if holder.exists() else ""
        process = f" ({text})" if text else ""
        raise FileProblem(
            f"another process is writing to {folder}{process}: wait for it, or choose another folder"
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
            # An error of this cleanup would hide the error of the block.
            with suppress(OSError):
                remove(holder)


def check_writable(folder: Path) -> None:
    """Check that files can be written to a folder, or to its first existing parent, before slow work begins.

    Raises:
        ValueError: Files cannot be written there.
    """
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise InvalidValue(f"{folder} cannot be written: {error.strerror}; choose another folder") from error


def is_path(name: str) -> bool:
    """Return True if the name of a model or a data set cannot be a name on a hub, so that it is a path.

    >>> [is_path(name) for name in ("./qwen", "/models/qwen", "~/qwen", "qwen/", "Qwen/Qwen3-4B")]
    [True, True, True, True, False]
    """
    return name.startswith((".", "/", "~")) or name.endswith("/")


def check_path(option: str, name: str, kind: str = "folder") -> None:
    """Check that a name which can only be a path exists; names on a hub are not looked up.

    Args:
        option: The option with the name, for the message.
        name: The name of a model or a data set.
        kind: The kind of path, ``folder`` or ``file or folder``.

    Raises:
        ValueError: The path does not exist.
    """
    if not is_path(name):
        return
    path = Path(name).expanduser()
    exists = path.is_dir() if kind == "folder" else path.exists()
    if not exists:
        raise InvalidValue(
            f"{option} {name}: there is no such {kind} (it would be {path.resolve()}); correct the path, or give a "
            "name of the hub"
        )


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def seal(folder: Path, files: Iterable[Path]) -> None:
    """Sync files to the disk, and write their SHA-256 to the folder's manifest."""
    digests: dict[str, str] = {}
    for file in sorted(files):
        sync(file)
        digests[file.relative_to(folder).as_posix()] = digest(file)
    with replacing(folder / SEAL) as unfinished:
        unfinished.write_text(json.dumps(digests, indent=1) + "\n", encoding="utf-8")


def sealed(folder: Path) -> dict[str, str]:
    """Return the digests in a folder's manifest by the path of the file; empty if there is no valid manifest.

    Raises:
        OSError: The manifest cannot be read from the disk.
    """
    file = folder / SEAL
    try:
        check_file(file, LARGEST_CONFIG)
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError, RecursionError):
        return {}


def drop_unfinished_line(path: Path) -> None:
    """Remove an incomplete last line of a file, which a killed process may have left."""
    end = path.read_bytes().rfind(b"\n") + 1
    with path.open("r+b") as file:
        file.truncate(end)
