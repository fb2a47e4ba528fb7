"""Read JSONL files up to where they were cut off, and pickles without importing what they name."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import pickle
import time
import warnings
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from bandpo.errors import InvalidValue

LARGEST_LOG = 2**29
"""Bytes of a log that are read, once it is decompressed."""

LONGEST_LINE = 2**24
"""Bytes of a line that are read."""

MOST_ROWS = 2**21
"""Lines of a log that are read."""

LONGEST_READING = 120.0
"""Seconds for which a log is read."""


def check_size(path: Path, largest: int = LARGEST_LOG) -> None:
    """Check that a file is not larger than what is read.

    Raises:
        ValueError: if it is.
    """
    size = path.stat().st_size
    if size > largest:
        raise InvalidValue(
            f"{path} has {size / 2**20:,.0f} MiB, and at most {largest / 2**20:,.0f} are read; give the part with the "
            "metrics"
        )


def _check_amount(file: io.BufferedIOBase, path: Path, deadline: float) -> None:
    """Check that an open file is within the limits, before a line of it is parsed and kept.

    Raises:
        ValueError: if a limit is met; the message names it.
    """
    lines = 0
    total = 0
    line_length = 0
    while chunk := file.read(2**20):
        lines += chunk.count(b"\n")
        total += len(chunk)
        last_end = chunk.rfind(b"\n")
        line_length = line_length + len(chunk) if last_end < 0 else len(chunk) - last_end - 1
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


def _lines_of(path: Path) -> Generator[bytes]:
    """Read the lines of a file, which may be a .gz, within the limits.

    Raises:
        ValueError: if a limit is met, or the archive is damaged; the message names the limit.
    """
    is_packed = path.suffix == ".gz"
    if not is_packed:
        check_size(path)
    deadline = time.monotonic() + LONGEST_READING
    with gzip.open(path) if is_packed else path.open("rb") as file:
        try:
            _check_amount(file, path, deadline)
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
        path: The file, which may be a .gz; it is read as far as it is asked for.
        growing: Whether a process writes to it, or did until it was killed. A last line without its end that cannot be
            read is then left out, with a warning.
        parse: What makes an object of a line; a ValueError says why it cannot.
        notes: A list that gets a sentence on a last line that is left out: that it is, and why.

    Raises:
        ValueError: a line is no JSON object; the message names the file and the line.
    """
    with closing(_lines_of(path)) as lines:
        for number, line in enumerate(lines, 1):
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
                    if notes is not None:
                        notes.append(_note_of_incomplete_line(path))
                    warnings.warn(
                        f"{path}, line {number}: the last line is cut off and is left out: {line[:60]!r}",
                        stacklevel=2,
                    )
                else:
                    raise InvalidValue(f"{path}, line {number}: not a JSON object, {fault}: {line[:60]!r}")
            if not ended:
                return  # what is written later belongs to this line


STILL_WRITING = 600.0
"""Seconds since a file was last written to, up to which its run is thought to be still at work."""


def _note_of_incomplete_line(path: Path) -> str:
    """Return in a sentence that the last line of a file is incomplete, and why.

    A process that writes the file at this moment leaves such a line, and so does one that was killed.
    """
    seconds = time.time() - path.stat().st_mtime
    if seconds <= STILL_WRITING:
        why = f"the run is thought to be still at work, as it wrote {max(0.0, seconds):.0f} seconds ago"
    else:
        written = time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime))
        why = f"the run was killed, or this is not the whole file; it was last written to on {written}"
    return f"the last line of {path.name} is incomplete and is left out: {why}"


class Foreign(dict[Any, Any]):
    """A stand-in for an object, class or function that a pickle names, with its arguments and its state."""

    state: Any = None

    def __init__(self, *arguments: Any):
        super().__init__()
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _NoImports(pickle._Unpickler):  # the one in Python: in C, a forged index of the memo takes gigabytes
    def find_class(self, module: str, name: str) -> Any:
        return Foreign

    def persistent_load(self, pid: Any) -> Any:  # a tensor's values, in torch's archives
        return Foreign(pid)


def unpickled(data: bytes, name: object = "it") -> Any:
    """Read a pickle without importing or calling what it names; a `Foreign` stands for each of these.

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
    """Return one of the tables in ``bandpo/data``, such as the names of settings in each framework."""
    return json.loads((resources.files("bandpo") / "data" / f"{name}.json").read_text(encoding="utf-8"))
