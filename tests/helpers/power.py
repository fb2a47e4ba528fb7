"""A simulation of a loss of power: the writes, renames and flushes of a folder are logged, and replayed up to a point.

`PowerLog` scans a folder before each change of a name in it and before each flush (fsync), so that a write is known as
a file's content before the next such event. `PowerLog.cut` makes the folder as a disk may hold it after a loss of power
at one event:

- A file holds what it held at its last flush, or at any later event, or a half-written part of that.
- A folder has the names of its last flush, or those of any later event. So a rename is lost or kept as a whole, and
  the folders and files are independent of each other: what was written between two flushes may arrive in any order.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

NAMES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "open")
"""The audit events of Python that announce a change of a name or of a content."""

Content = bytes | dict[str, int]
"""The bytes of a file, or the inodes of a folder's entries by their names."""


class PowerLog:
    """The log of one folder, on a file system that uses no inode twice, such as a tmpfs.

    Args:
        folder: The folder; it exists.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.root = folder.stat().st_ino
        self.events = 0
        # For each inode, its contents with the number of the event before which they were found.
        self._versions: dict[int, list[tuple[int, Content]]] = {}
        self._flushes: dict[int, list[int]] = {}
        # The thread that scans: the files that it opens for that are not events.
        self._scanning: int | None = None
        self._active = False

    @contextmanager
    def recording(self) -> Generator[None, None, None]:
        """Log the changes that this process makes in the block."""
        fsync = os.fsync
        lock = threading.Lock()

        def logged_fsync(descriptor: int) -> None:
            with lock:
                self._scan()
                fsync(descriptor)
                self._flushes.setdefault(os.fstat(descriptor).st_ino, []).append(self.events)
                self.events += 1

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            if not self._active or event not in NAMES or self._scanning == threading.get_ident():
                return
            if self._is_here(arguments[0]):
                with lock:
                    self._scan()
                    self.events += 1

        sys.addaudithook(hook)  # it cannot be removed, so it is switched off
        os.fsync = logged_fsync
        self._active = True
        try:
            yield
        finally:
            self._active = False
            os.fsync = fsync
            with lock:
                self._scan()

    def _is_here(self, path: object) -> bool:
        # A path without a folder belongs to a removal of a folder's entries.
        return not isinstance(path, int) and (
            "/" not in os.fsdecode(path) or os.fsdecode(path).startswith(str(self.folder))
        )

    def _scan(self) -> None:
        self._scanning = threading.get_ident()
        try:
            found = self._found()
            while found is None:
                found = self._found()
        finally:
            self._scanning = None
        for inode, content in found.items():
            self._add(inode, content)

    def _found(self) -> dict[int, Content] | None:
        """Return what the folder holds; None if another thread removed a name meanwhile."""
        found: dict[int, Content] = {}
        folders = [self.folder]
        try:
            for folder in folders:
                entries: dict[str, int] = {}
                for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
                    entries[entry.name] = entry.inode()
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(Path(entry.path))
                    else:
                        found[entry.inode()] = Path(entry.path).read_bytes()
                found[folder.stat().st_ino] = entries
        except FileNotFoundError:
            return None
        return found

    def _add(self, inode: int, content: Content) -> None:
        versions = self._versions.setdefault(inode, [])
        if not versions or versions[-1][1] != content:
            versions.append((self.events, content))

    def flushed(self, inode: int, event: int) -> Content | None:
        """Return the content of an inode at its last flush before an event; None if there was none."""
        flushes = [flush for flush in self._flushes.get(inode, []) if flush < event]
        if not flushes:
            return None
        return [content for found, content in self._versions[inode] if found <= flushes[-1]][-1]

    def flushed_names(self, event: int) -> set[str]:
        """Return the names in the folder that are certain to be on the disk before an event."""
        names = self.flushed(self.root, event)
        return set(names) if isinstance(names, dict) else set()

    def cut(self, event: int, target: Path, chance: random.Random) -> None:
        """Make a folder as a disk may hold this one after a loss of power before an event.

        Args:
            event: The number of the event.
            target: The folder to make.
            chance: The source of the choices.
        """
        loses_all = chance.random() < 0.4  # everything since the last flush
        chosen: dict[int, Content] = {}

        def choose(inode: int) -> Content:
            if inode not in chosen:
                chosen[inode] = self._choose(inode, event, loses_all, chance)
            return chosen[inode]

        def make(inode: int, path: Path) -> None:
            content = choose(inode)
            if isinstance(content, bytes):
                path.write_bytes(content)
                return
            path.mkdir(exist_ok=True)
            for name, entry in content.items():
                make(entry, path / name)

        make(self.root, target)

    def _choose(self, inode: int, event: int, loses_all: bool, chance: random.Random) -> Content:
        flushed = self.flushed(inode, event)
        versions = [content for found, content in self._versions[inode] if found <= event]
        is_folder = isinstance(self._versions[inode][0][1], dict)
        empty: Content = {} if is_folder else b""
        if not versions:
            return empty
        oldest = empty if flushed is None else flushed
        if loses_all:
            return oldest
        later = versions if flushed is None else versions[versions.index(flushed) :]
        content = chance.choice([oldest, *later])
        if isinstance(content, bytes) and content != oldest and chance.random() < 0.4:
            return _half_written(content, oldest, chance)
        return content


def _half_written(content: bytes, before: Content, chance: random.Random) -> bytes:
    """Return a part of what was written after another content, of which the rest is cut off or holds zeros."""
    start = len(before) if isinstance(before, bytes) and content.startswith(before) else 0
    end = chance.randint(start, len(content))
    if chance.random() < 0.5:
        return content[:end]
    return content[:end].ljust(len(content), b"\0")
