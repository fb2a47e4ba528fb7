"""Checks of files, and readers of JSONL files and pickles.

JSONL files may end in an incomplete line. Pickles are read without importing the classes that they name.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import pickle
import stat
import time
import warnings
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar

from rlvet.errors import InvalidValue
from rlvet.runs.limits import (
    DEEPEST_PICKLE,
    LARGEST_LOG,
    LONGEST_LINE,
    LONGEST_READING,
    MOST_PICKLED,
    MOST_ROWS,
)

KINDS_OF_FILE: Mapping[int, str] = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
"""A description of each kind of file that is not a regular one."""


on_reading: Callable[[Path, int], None] | None = None
"""A function that is called with each file that is read, and its size in bytes."""

_folder: ContextVar[Path | None] = ContextVar("folder", default=None)
"""The folder of the run that is read, without links; None outside of `reading_in`."""


class OutsideLink(InvalidValue):
    """The error for a link to a file outside of the run's folder."""


@contextmanager
def reading_in(path: Path) -> Iterator[None]:
    """Refuse links to files outside of a run's folder in the block, as a stranger's folder may name any file.

    Args:
        path: The folder, or a log, which itself may be a link.
    """
    folder = (path if path.is_dir() else path.parent).absolute()
    # Files in a snapshot of the Hugging Face hub's cache are links to ../../blobs.
    root = folder.parent.parent if folder.parent.name == "snapshots" else folder
    token = _folder.set(root)
    try:
        yield
    finally:
        _folder.reset(token)


def check_link(path: Path, name: object = None) -> None:
    """Check that a file in the folder of `reading_in` is no link to a file outside of it.

    Args:
        path: The file.
        name: Its name in the error message, by default the path.

    Raises:
        OutsideLink: if it is.
    """
    folder = _folder.get()
    if folder is None or not path.absolute().is_relative_to(folder):
        return
    target = path.resolve()
    if not target.is_relative_to(folder.resolve()):
        raise OutsideLink(
            f"{name or path} is a link to {target}, outside of the run's folder, and such links are not read; if it "
            "belongs to the run, copy the file into the folder"
        )


def is_leaf(path: Path) -> bool:
    """Return True if a path exists and is no folder. If it is no regular file, `check_regular` refuses it."""
    return path.exists() and not path.is_dir()


def check_regular(path: Path, name: object = None) -> None:
    """Check that a path is a regular file. Another, such as a named pipe, may wait for ever or have no end.

    Args:
        path: The path.
        name: Its name in the error message, by default the path.

    Raises:
        ValueError: if it is not.
    """
    state = path.stat()
    kind = stat.S_IFMT(state.st_mode)
    if kind != stat.S_IFREG:
        raise InvalidValue(
            f"{name or path} is {KINDS_OF_FILE.get(kind, 'no file')}, and only regular files are read"
        )
    check_link(path, name)
    if on_reading is not None:
        on_reading(path, state.st_size)


def check_file(path: Path, largest: int = LARGEST_LOG) -> None:
    """Check that a path is a regular file, and that it is not larger than a limit in bytes.

    Raises:
        ValueError: if it is not.
    """
    check_regular(path)
    size = path.stat().st_size
    if size > largest:
        raise InvalidValue(
            f"{path} has {size / 2**20:,.0f} MiB, and at most {largest / 2**20:,.0f} are read; give the part with the "
            "metrics"
        )


def _check_limits(file: io.BufferedIOBase, path: Path, deadline: float) -> None:
    """Check that an open file is within the limits, before any line of it is parsed.

    Raises:
        ValueError: if a limit is exceeded; the message names it.
    """
    lines = 0
    total = 0
    line_length = 0
    while chunk := file.read(2**20):
        lines += chunk.count(b"\n")
        total += len(chunk)
        last_newline = chunk.rfind(b"\n")
        if last_newline < 0:
            line_length += len(chunk)
        else:
            line_length = len(chunk) - last_newline - 1

        limit = ""
        if lines > MOST_ROWS:
            limit = f"{MOST_ROWS:,} lines"
        elif line_length > LONGEST_LINE:
            limit = f"{LONGEST_LINE / 2**20:,.0f} MiB in line {lines + 1}"
        elif total > LARGEST_LOG:
            limit = f"{LARGEST_LOG / 2**20:,.0f} MiB"
        elif time.monotonic() > deadline:
            limit = f"{LONGEST_READING:g} seconds of reading"
        if limit:
            raise InvalidValue(f"{path} takes more than {limit}, the limit; give the part with the metrics")


def _read_lines(path: Path) -> Generator[bytes]:
    """Yield the lines of a file, which may be a .gz.

    Raises:
        ValueError: if a limit is exceeded, or the archive is damaged; the message names the limit.
    """
    check_regular(path)
    is_compressed = path.suffix == ".gz"
    if not is_compressed:
        check_file(path)
    deadline = time.monotonic() + LONGEST_READING
    with gzip.open(path) if is_compressed else path.open("rb") as file:
        try:
            _check_limits(file, path, deadline)
        except (zlib.error, EOFError, gzip.BadGzipFile) as error:
            raise InvalidValue(f"{path} is no gzip archive, or a damaged one ({error})") from error
        file.seek(0)
        for number in range(1, MOST_ROWS + 2):
            line = file.readline(LONGEST_LINE + 1)
            if not line:
                return
            if not number % 1024 and time.monotonic() > deadline:
                raise InvalidValue(
                    f"{path} takes more than {LONGEST_READING:g} seconds of reading, the limit; give the part with the "
                    "metrics"
                )
            yield line


def read_jsonl(
    path: Path,
    *,
    growing: bool = True,
    parse: Callable[[bytes], Any] = json.loads,
    notes: list[str] | None = None,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read the objects of a JSONL file, each with the number of its line, from 1; empty lines are skipped.

    Args:
        path: The file, which may be a .gz. It is read lazily.
        growing: True if a process writes to the file, or did until it was killed. The last line may then be
            incomplete, and is left out with a warning if it cannot be parsed.
        parse: The function that parses a line, which raises a ValueError if it cannot.
        notes: A list to which a sentence is added if the last line is left out.

    Raises:
        ValueError: a line is no JSON object; the message names the file and the line.
    """
    with closing(_read_lines(path)) as lines:
        for number, line in enumerate(lines, 1):
            is_complete = line.endswith(b"\n")
            line = line.removeprefix(codecs.BOM_UTF8).strip()
            if line:
                row: Any = None
                problem = ""
                try:
                    row = parse(line)
                except (ValueError, RecursionError) as error:
                    problem = str(error)
                else:
                    if not isinstance(row, dict):
                        problem = f"but a {type(row).__name__}"

                if not problem:
                    yield number, row
                elif growing and not is_complete:
                    if notes is not None:
                        notes.append(_describe_incomplete_line(path))
                    warnings.warn(
                        f"{path}, line {number}: the last line is cut off and is left out: {line[:60]!r}",
                        stacklevel=2,
                    )
                else:
                    raise InvalidValue(f"{path}, line {number}: not a JSON object, {problem}: {line[:60]!r}")
            if not is_complete:
                return  # a process may have appended the remainder of this line in the meantime


STILL_WRITING = 600.0
"""The largest number of seconds since a file's last change for which its run counts as still running."""


def _describe_incomplete_line(path: Path) -> str:
    """Return a sentence about the incomplete last line of a file, with the likely reason.

    The reason is a process that is writing the file, or one that was killed while it did.
    """
    seconds = time.time() - path.stat().st_mtime
    if seconds <= STILL_WRITING:
        reason = f"the run is thought to be still at work, as it wrote {max(0.0, seconds):.0f} seconds ago"
    else:
        date = time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime))
        reason = f"the run was killed, or this is not the whole file; it was last written to on {date}"
    return f"the last line of {path.name} is incomplete and is left out: {reason}"


class PickledObject(dict[Any, Any]):
    """A placeholder for an object, class or function that a pickle names, with its arguments and state."""

    state: Any = None

    def __init__(self, *arguments: Any):
        super().__init__()
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


_SCALARS = (type(None), bool, int, float, complex, str, bytes)


def _check_keys(keys: Iterable[Any]) -> None:
    """Check that keys are numbers, texts, or tuples of these.

    Raises:
        ValueError: if one is not.
    """
    for key in keys:
        if type(key) in _SCALARS or (type(key) is tuple and all(type(one) in _SCALARS for one in key)):
            continue
        raise InvalidValue(f"a key or an element of a set is a {type(key).__name__}, and no number or text")


def _parts(value: Any) -> list[Any]:
    """Return the lists, tuples, sets, dictionaries and objects that one of them contains."""
    values: Iterable[Any] = value
    if isinstance(value, dict):
        values = value.values()
        if isinstance(value, PickledObject):
            values = [*values, getattr(value, "arguments", ()), value.state]
    return [one for one in values if type(one) in (list, tuple, set, frozenset, dict, PickledObject)]


def _check_size(value: Any) -> None:
    """Check the number of objects and the depth of a pickle's value.

    Each object is visited once. One that stands in several places counts in each of them, as for a reader that walks
    through the value: sixty pairs, each of which has the one before twice, would have 2**60.

    Raises:
        ValueError: if a limit is exceeded, or an object contains itself.
    """
    if type(value) in _SCALARS:
        return
    sizes: dict[int, int] = {}
    # The objects around the one that is visited.
    around: set[int] = set()
    # Objects to visit, and those whose parts have been visited, to add up their sizes.
    stack = [(value, False)]
    while stack:
        container, is_visited = stack.pop()
        if is_visited:
            around.discard(id(container))
            size = len(container) + 1 + sum(sizes[id(part)] for part in _parts(container))
            if size > MOST_PICKLED:
                raise InvalidValue(f"it has more than {MOST_PICKLED:,} objects")
            sizes[id(container)] = size
        elif id(container) in around:
            raise InvalidValue("an object contains itself")
        elif id(container) not in sizes:
            around.add(id(container))
            if len(around) > DEEPEST_PICKLE:
                raise InvalidValue(f"more than {DEEPEST_PICKLE} lists or objects are within each other")
            stack.append((container, True))
            stack += [(part, False) for part in _parts(container)]


_Unpickler: Any = pickle._Unpickler  # type stubs do not have its methods


class _SafeUnpickler(_Unpickler):
    """An unpickler that creates a `PickledObject` for everything that a pickle names, and imports nothing.

    It derives from Python's unpickler, as the one in C allocates gigabytes for a forged index of the memo. Keys and
    elements of sets are numbers, texts, or tuples of these: the hash of a tuple of tuples may take time without end.
    """

    # The methods of the base class, which takes them from this table.
    dispatch: ClassVar[dict[int, Any]] = dict(_Unpickler.dispatch)

    def load_setitem(self) -> None:
        _check_keys(self.stack[-2:-1])
        super().load_setitem()

    def load_setitems(self) -> None:
        _check_keys(self.stack[::2])
        super().load_setitems()

    def load_dict(self) -> None:
        _check_keys(self.stack[::2])
        super().load_dict()

    def load_additems(self) -> None:
        _check_keys(self.stack)
        super().load_additems()

    def load_frozenset(self) -> None:
        _check_keys(self.stack)
        super().load_frozenset()

    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    dispatch[pickle.DICT[0]] = load_dict
    dispatch[pickle.ADDITEMS[0]] = load_additems
    dispatch[pickle.FROZENSET[0]] = load_frozenset

    def find_class(self, module: str, name: str) -> Any:
        return PickledObject

    def persistent_load(self, pid: Any) -> Any:  # a tensor's values, in torch's archives
        return PickledObject(pid)


def read_pickle(data: bytes, name: object = "it") -> Any:
    """Read a pickle with a `PickledObject` for each object, class or function that it names.

    Args:
        data: The pickle.
        name: Its name in the error message.

    Raises:
        ValueError: it is no pickle or a damaged one, or it has too many objects, each counted wherever it stands.

    >>> import argparse
    >>> read_pickle(pickle.dumps(argparse.Namespace(epsilon=0.2))).state
    {'epsilon': 0.2}
    """
    try:
        value = _SafeUnpickler(io.BytesIO(data)).load()
        _check_size(value)
    except MemoryError:
        raise
    except Exception as error:  # other bytes can raise errors of any type
        raise InvalidValue(
            f"{name} is no pickle, or a damaged one ({type(error).__name__}: {error!s:.200})"
        ) from error
    return value


@cache
def load_table(name: str) -> Any:
    """Return the content of a JSON file in ``rlvet/data``, such as each framework's names of settings."""
    return json.loads((resources.files("rlvet") / "data" / f"{name}.json").read_text(encoding="utf-8"))


def has_table(name: str) -> bool:
    """Return whether ``rlvet/data`` has a JSON file of this name."""
    return (resources.files("rlvet") / "data" / f"{name}.json").is_file()
