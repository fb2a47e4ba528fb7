"""The parts of a record's file, and their digests: the schema is part 0, and each loss a further one.

Beside ``NAME.arrow`` lies ``NAME.sha256`` with a line for each part: its number, the byte at which it ends, and the
SHA-256 of its bytes. Damage is thereby noticed before Arrow reads a byte of it, costs no more than the losses that it
is in, and cannot make another figure.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, NamedTuple

from bandpo.errors import InvalidValue

SUFFIX = ".sha256"
"""The ending of the file of digests, which otherwise has the name of the record's file."""

LINE = re.compile(rb"(\d{1,15}) (\d{1,18}) ([0-9a-f]{64})\n")
"""A line of the digests: the number of a part, the byte at which it ends, and its digest."""

SHORTEST_LINE, LONGEST_LINE = 69, 128
"""Bytes of a line of the digests."""

LARGEST_DIGESTS = 2**27
"""Bytes above which a file of digests is not read; they are the lines of more than a million losses."""

LARGEST_PART = 2**30
"""Bytes above which a part is not read. A loss of 1,024 answers of 32,768 tokens each takes less than 2**29."""

LARGEST_BATCH = 2**31
"""Bytes above which a batch is not decompressed."""

MESSAGE_START = b"\xff\xff\xff\xff"
"""The first bytes of an Arrow stream, and of each message in it."""

STREAM_END = MESSAGE_START + bytes(4)
"""The last bytes of an Arrow stream that was closed."""

RECORD_BATCH = 3
"""The type of a message that holds rows."""


class SealedFile:
    """A record's file in the making, with the digest of each part.

    Args:
        path: The file of tokens; it must not exist.

    Raises:
        FileExistsError: if it exists.
    """

    def __init__(self, path: Path):
        with ExitStack() as opened:
            self._file = opened.enter_context(path.open("xb"))
            self._digests = opened.enter_context(path.with_suffix(SUFFIX).open("wb"))
            self._opened = opened.pop_all()
        self._number = 0

    def write_part(self, data: bytes) -> None:
        """Hand a part to the operating system, then its digest."""
        self._file.write(data)
        self._file.flush()
        digest = hashlib.sha256(data).hexdigest()
        self._digests.write(f"{self._number} {self._file.tell()} {digest}\n".encode())
        self._digests.flush()
        self._number += 1

    def sync(self) -> None:
        """Have the disk take what was written."""
        os.fsync(self._file.fileno())
        os.fsync(self._digests.fileno())

    def close(self) -> None:
        """End the stream, and close both files."""
        with self._opened:
            self._file.write(STREAM_END)


class Part(NamedTuple):
    """A part of a file of a record: its number, the bytes between which it lies, and its digest."""

    number: int
    start: int
    end: int
    digest: str


def read_parts(file: Path) -> Iterator[tuple[int, bytes]]:
    """Read the parts of a file of a record that are whole, each with its number; the first is 0, the schema.

    A warning names the losses that are left out: those that are damaged, and those that are cut off, as a kill or a
    run still at work leaves the last. A file without digests is read as it is, with a warning.

    Raises:
        ValueError: if the schema is damaged, or each loss is.
    """
    digests = file.with_suffix(SUFFIX)
    if not digests.is_file():
        yield from _parts_without_digests(file)
        return
    parts = _read_digests(digests)
    damaged: list[int] = []
    cut_off: list[int] = []
    whole = 0
    with file.open("rb") as opened:
        size = opened.seek(0, 2)
        for number in range(max(parts, default=-1) + 1):
            part = parts.get(number)
            data = b"" if part is None else _bytes_of(opened, part, size)
            if part is None or hashlib.sha256(data).hexdigest() != part.digest:
                if not number:
                    raise InvalidValue(
                        f"{file} is damaged in its first bytes, which say what the columns are: nothing of it can be "
                        "read"
                    )
                (cut_off if part is not None and part.end > size else damaged).append(number)
                continue
            whole += number > 0
            yield number, data
        last = max(parts, default=0)
        opened.seek(max((part.end for part in parts.values()), default=0))
        rest = opened.read(len(STREAM_END) + 1)
    if damaged and not whole:
        raise InvalidValue(f"{file} is damaged: of its {last} calls none has the bytes that were written")
    for numbers, reason in (
        (damaged, f"is damaged and is left out: its bytes are not those that {digests.name} was written for"),
        (cut_off, "is cut off and is left out"),
    ):
        if numbers:
            warnings.warn(f"{file}: what was {_listed(numbers)} of {last} {reason}", stacklevel=2)
    if rest not in (b"", STREAM_END):
        warnings.warn(f"{file}: what follows call {last} is cut off and is left out", stacklevel=2)


def _bytes_of(opened: BinaryIO, part: Part, size: int) -> bytes:
    """Return the bytes of a part; none of one that the file does not hold."""
    if part.start > part.end or part.end > size:
        return b""
    if part.end - part.start > LARGEST_PART:
        raise InvalidValue(
            f"{opened.name}, call {part.number} has {part.end - part.start:,} bytes, and at most {LARGEST_PART:,} are "
            "read"
        )
    opened.seek(part.start)
    return opened.read(part.end - part.start)


def _read_digests(file: Path) -> Mapping[int, Part]:
    """Return the parts that a file of digests names, by their numbers.

    A part begins where the one before it ends, so that a damaged line costs two.
    """
    size = file.stat().st_size
    if size > LARGEST_DIGESTS:
        raise InvalidValue(f"{file} has {size:,} bytes, and at most {LARGEST_DIGESTS:,} are read")
    ends: dict[int, tuple[int, str]] = {-1: (0, "")}
    with file.open("rb") as opened:
        while line := opened.readline(LONGEST_LINE):
            match = LINE.fullmatch(line)
            # There are no more parts than lines fit into the file: such a number is damaged.
            if match is not None and int(match[1]) <= size // SHORTEST_LINE:
                ends[int(match[1])] = int(match[2]), match[3].decode()
    parts: dict[int, Part] = {}
    for number, (end, digest) in ends.items():
        if number >= 0 and number - 1 in ends:
            parts[number] = Part(number, ends[number - 1][0], end, digest)
    return parts


def _listed(numbers: Sequence[int]) -> str:
    """Return the numbers of calls in words: ``calls 3, 5 to 7``."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    texts = [f"{first} to {last}" if first < last else str(first) for first, last in spans]
    shown = ", ".join(texts[:10]) + (f" and {len(texts) - 10} more" if len(texts) > 10 else "")
    return f"call {shown}" if len(numbers) == 1 else f"calls {shown}"


def _parts_without_digests(file: Path) -> Iterator[tuple[int, bytes]]:
    """Read the messages of an Arrow stream that has no digests, as far as they are whole."""
    with file.open("rb") as opened:
        size = opened.seek(0, 2)
        opened.seek(0)
        if not size:
            return  # the process was killed before it wrote the schema
        start = opened.read(len(MESSAGE_START))
        if not MESSAGE_START.startswith(start):
            raise InvalidValue(f"{file} is no record of bandpo.Recorder: it is no Arrow stream")
        warnings.warn(
            f"{file} has no {file.with_suffix(SUFFIX).name} with its digests beside it, so that damage is not noticed",
            stacklevel=3,
        )
        position = 0
        number = 0
        while position < size:
            opened.seek(position)
            length = _message_length(opened, size - position)
            if length is None:
                warnings.warn(
                    f"{file}: what follows call {max(number - 1, 0)} is cut off and is left out", stacklevel=3
                )
                return
            if not length:
                return
            opened.seek(position)
            yield number, opened.read(length)
            position += length
            number += 1


def _message_length(opened: BinaryIO, left: int) -> int | None:
    """Return the bytes of the message at the position of a file, 0 at the end of the stream; None if it is cut off.

    Raises:
        ValueError: if there is no message, or one of more bytes than are read.
    """
    position = opened.tell()
    prefix = opened.read(8)
    if not MESSAGE_START.startswith(prefix[:4]):
        raise InvalidValue(f"{opened.name} is damaged at byte {position}, where no message of Arrow begins")
    if len(prefix) < 8:
        return None
    (size,) = struct.unpack_from("<i", prefix, 4)
    if not size:
        return 0
    if 0 < size <= left - 8:
        header = opened.read(min(size, LARGEST_PART))
        try:
            length = 8 + size + _Message(header).body_length
        except (struct.error, IndexError) as error:
            raise InvalidValue(f"{opened.name} is damaged in the message at byte {position}") from error
        if 8 + size <= length <= left:
            if length > LARGEST_PART:
                raise InvalidValue(
                    f"{opened.name} has a message of {length:,} bytes, and at most {LARGEST_PART:,} are read"
                )
            return length
    return None


def decompressed_size(part: bytes) -> int:
    """Return the bytes that the buffers of a batch say that they take once they are decompressed.

    Raises:
        ValueError: if the part is no batch, or a buffer lies outside of it.

    >>> decompressed_size(b"")
    Traceback (most recent call last):
    bandpo.errors.InvalidValue: no batch of Arrow
    """
    try:
        (size,) = struct.unpack_from("<i", part, 4)
        message = _Message(part[8 : 8 + size])
        if message.type != RECORD_BATCH:
            raise InvalidValue(f"a message of Arrow of the type {message.type}, and no batch")
        body = 8 + size
        total = 0
        for offset, length in message.buffers():
            if offset < 0 or length < 0 or body + offset + length > len(part):
                raise InvalidValue("a buffer lies outside of the batch")
            if message.is_compressed and length:
                (length,) = struct.unpack_from("<q", part, body + offset)
            # A buffer of size -1 is not compressed.
            total += max(length, 0)
    except (struct.error, IndexError) as error:
        raise InvalidValue("no batch of Arrow") from error
    return total


class _Message:
    """The fields of a message's metadata that tell sizes: a flatbuffer of Arrow's ``Message.fbs``.

    Each access raises `struct.error` where an offset points outside.
    """

    def __init__(self, metadata: bytes):
        self._metadata = metadata
        (self._message,) = struct.unpack_from("<I", metadata, 0)

    def _field(self, table: int, number: int) -> int:
        """Return the position of a field of a table; 0 if it is absent."""
        (distance,) = struct.unpack_from("<i", self._metadata, table)
        layout = table - distance
        if layout < 0:
            raise IndexError
        (size,) = struct.unpack_from("<H", self._metadata, layout)
        entry = 4 + 2 * number
        if entry + 2 > size:
            return 0
        (offset,) = struct.unpack_from("<H", self._metadata, layout + entry)
        return table + offset if offset else 0

    def _target(self, position: int) -> int:
        """Return the position to which the offset at a position points."""
        (offset,) = struct.unpack_from("<I", self._metadata, position)
        return position + offset

    @property
    def type(self) -> int:
        """What the message holds, such as `RECORD_BATCH`."""
        field = self._field(self._message, 1)
        return self._metadata[field] if field else 0

    @property
    def body_length(self) -> int:
        """Bytes that follow the metadata."""
        field = self._field(self._message, 3)
        return struct.unpack_from("<q", self._metadata, field)[0] if field else 0

    @property
    def is_compressed(self) -> bool:
        """Whether the buffers of a batch begin with their size."""
        return bool(self._field(self._target(self._field(self._message, 2)), 3))

    def buffers(self) -> Iterator[tuple[int, int]]:
        """Return the offset of each buffer of a batch in the body, and its bytes there."""
        field = self._field(self._target(self._field(self._message, 2)), 2)
        if not field:
            return
        vector = self._target(field)
        (count,) = struct.unpack_from("<I", self._metadata, vector)
        for index in range(count):
            yield struct.unpack_from("<qq", self._metadata, vector + 4 + 16 * index)
