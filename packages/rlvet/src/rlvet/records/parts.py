"""The parts of a record's file, and their digests. Part 0 is the schema, and each loss is a further part.

Beside ``NAME.arrow`` there is a file ``NAME.sha256`` with one line per part: its number, the byte at which it ends, and
the SHA-256 of its bytes. Damage is therefore detected before Arrow reads the part, only affects the losses that it is
in, and never changes a result unnoticed.
"""

from __future__ import annotations

import hashlib
import re
import struct
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from rlvet.errors import InvalidValue
from rlvet.runs.files import check_regular, is_leaf
from rlvet.runs.limits import LARGEST_DIGESTS, LARGEST_PART, LONGEST_DIGEST

SUFFIX = ".sha256"
"""The suffix of the file of digests, which otherwise has the name of the record's file."""

LINE = re.compile(rb"(\d{1,15}) (\d{1,18}) ([0-9a-f]{64})\n")
"""A line of the digests: the number of a part, the byte at which it ends, and its digest."""

SHORTEST_LINE = 69
"""The smallest number of bytes in a line of the digests."""

MESSAGE_START = b"\xff\xff\xff\xff"
"""The first bytes of an Arrow stream, and of each message in it."""

STREAM_END = MESSAGE_START + bytes(4)
"""The last bytes of an Arrow stream that was closed."""

RECORD_BATCH = 3
"""The type of an Arrow message with rows."""


class Part(NamedTuple):
    """The number of a part of a record's file, the positions of its bytes, and its digest."""

    number: int
    """The number; 0 for the schema."""
    start: int
    """The position of its first byte."""
    end: int
    """The position after its last byte."""
    digest: str
    """The SHA-256 of its bytes."""


def read_parts(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the bytes of each intact part of a record's file. Part 0 is the schema.

    Damaged losses are left out with a warning, and so is an incomplete last loss, from a run that was killed or is
    still writing. A file without digests is read with a warning, and without the check.

    Raises:
        ValueError: if the schema is damaged, or every loss is.
    """
    check_regular(file)
    digests = file.with_suffix(SUFFIX)
    if not is_leaf(digests):
        yield from _parts_without_digests(file)
        return
    parts = _read_digests(digests)
    last = max(parts, default=0)
    damaged: list[int] = []
    incomplete: list[int] = []
    intact = 0
    with file.open("rb") as stream:
        size = stream.seek(0, 2)
        for number in range(max(parts, default=-1) + 1):
            part = parts.get(number)
            data = b"" if part is None else _read_part(stream, part, size)
            if part is not None and hashlib.sha256(data).hexdigest() == part.digest:
                if number:
                    intact += 1
                yield number, data
            elif not number:
                raise InvalidValue(
                    f"{file} is damaged in its first bytes, which say what the columns are: nothing of it can be read"
                )
            elif part is not None and part.end > size:
                incomplete.append(number)
            else:
                damaged.append(number)
        stream.seek(max((part.end for part in parts.values()), default=0))
        remainder = stream.read(len(STREAM_END) + 1)

    if damaged and not intact:
        raise InvalidValue(f"{file} is damaged: of its {last} calls none has the bytes that were written")
    for numbers, reason in (
        (damaged, f"is damaged and is left out: its bytes are not those that {digests.name} was written for"),
        (incomplete, "is cut off and is left out"),
    ):
        if numbers:
            warnings.warn(f"{file}: what was {_format_calls(numbers)} of {last} {reason}", stacklevel=2)
    if remainder not in (b"", STREAM_END):
        warnings.warn(f"{file}: what follows call {last} is cut off and is left out", stacklevel=2)


def _read_part(stream: BinaryIO, part: Part, size: int) -> bytes:
    """Return the bytes of a part; empty if they are beyond the end of the file.

    Args:
        stream: The open file.
        part: The part.
        size: The size of the file in bytes.

    Raises:
        ValueError: if the part is larger than the limit.
    """
    if part.start > part.end or part.end > size:
        return b""
    if part.end - part.start > LARGEST_PART:
        raise InvalidValue(
            f"{stream.name}, call {part.number} has {part.end - part.start:,} bytes, and at most {LARGEST_PART:,} are "
            "read"
        )
    stream.seek(part.start)
    return stream.read(part.end - part.start)


def _read_digests(file: Path) -> Mapping[int, Part]:
    """Return the parts in a file of digests, by their numbers.

    The start of a part is the end of the part before it. So if a line is damaged, two parts are missing.
    """
    check_regular(file)
    size = file.stat().st_size
    if size > LARGEST_DIGESTS:
        raise InvalidValue(f"{file} has {size:,} bytes, and at most {LARGEST_DIGESTS:,} are read")
    ends: dict[int, tuple[int, str]] = {-1: (0, "")}
    with file.open("rb") as lines:
        while line := lines.readline(LONGEST_DIGEST):
            match = LINE.fullmatch(line)
            # A number above the number of lines that fit into the file is damaged.
            if match is not None and int(match[1]) <= size // SHORTEST_LINE:
                ends[int(match[1])] = (int(match[2]), match[3].decode())
    parts: dict[int, Part] = {}
    for number, (end, digest) in ends.items():
        if number >= 0 and number - 1 in ends:
            parts[number] = Part(number, ends[number - 1][0], end, digest)
    return parts


def _format_calls(numbers: Sequence[int]) -> str:
    """Return the numbers of calls as text: ``calls 3, 5 to 7``."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    texts = [f"{first} to {last}" if first < last else str(first) for first, last in spans]
    text = ", ".join(texts[:10])
    if len(texts) > 10:
        text += f" and {len(texts) - 10} more"
    return f"call {text}" if len(numbers) == 1 else f"calls {text}"


def _parts_without_digests(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the bytes of each complete message of an Arrow stream without digests."""
    with file.open("rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(0)
        if not size:
            return  # the process was killed before it wrote the schema
        start = stream.read(len(MESSAGE_START))
        if not MESSAGE_START.startswith(start):
            raise InvalidValue(f"{file} is no record of bandpo.audit.Recorder: it is no Arrow stream")
        warnings.warn(
            f"{file} has no {file.with_suffix(SUFFIX).name} with its digests beside it, so that damage is not noticed",
            stacklevel=3,
        )
        position = 0
        number = 0
        while position < size:
            stream.seek(position)
            length = _message_length(stream, size - position)
            if length is None:
                warnings.warn(
                    f"{file}: what follows call {max(number - 1, 0)} is cut off and is left out", stacklevel=3
                )
                return
            if not length:
                return
            stream.seek(position)
            yield number, stream.read(length)
            position += length
            number += 1


def _message_length(stream: BinaryIO, available: int) -> int | None:
    """Return the size in bytes of the Arrow message at a file's position.

    Args:
        stream: The open file.
        available: The number of bytes from its position to its end.

    Returns:
        The size; 0 at the end of the Arrow stream; None if the message is incomplete.

    Raises:
        ValueError: if there is no message, or it is larger than the limit.
    """
    position = stream.tell()
    prefix = stream.read(8)
    if not MESSAGE_START.startswith(prefix[:4]):
        raise InvalidValue(f"{stream.name} is damaged at byte {position}, where no message of Arrow begins")
    if len(prefix) < 8:
        return None
    (size,) = struct.unpack_from("<i", prefix, 4)
    if not size:
        return 0
    if not 0 < size <= available - 8:
        return None
    metadata = stream.read(min(size, LARGEST_PART))
    try:
        length = 8 + size + _Message(metadata).body_length
    except (struct.error, IndexError) as error:
        raise InvalidValue(f"{stream.name} is damaged in the message at byte {position}") from error
    if not 8 + size <= length <= available:
        return None
    if length > LARGEST_PART:
        raise InvalidValue(
            f"{stream.name} has a message of {length:,} bytes, and at most {LARGEST_PART:,} are read"
        )
    return length


def decompressed_size(part: bytes) -> int:
    """Return the size in bytes that the buffers of a batch declare for their decompressed content.

    Raises:
        ValueError: if the part is no batch, or a buffer is outside of it.

    >>> decompressed_size(b"")
    Traceback (most recent call last):
    rlvet.errors.InvalidValue: no batch of Arrow
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
            # A compressed buffer begins with its decompressed size, or with -1 if it is not compressed after all.
            if message.is_compressed and length:
                (length,) = struct.unpack_from("<q", part, body + offset)
            total += max(length, 0)
    except (struct.error, IndexError) as error:
        raise InvalidValue("no batch of Arrow") from error
    return total


class _Message:
    """The type and sizes in the metadata of an Arrow message, a flatbuffer of Arrow's ``Message.fbs``.

    Numbers of fields are those of that schema. ``Message``: 1 header type, 2 header, 3 body length. ``RecordBatch``,
    the header: 2 buffers, 3 compression.

    Each access raises `struct.error` if an offset points outside of the metadata.
    """

    def __init__(self, metadata: bytes):
        self._metadata = metadata
        (self._message,) = struct.unpack_from("<I", metadata, 0)

    def _field(self, table: int, number: int) -> int:
        """Return the position of a field of a table; 0 if the table does not have it."""
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
        """The type of the message, such as `RECORD_BATCH`."""
        field = self._field(self._message, 1)
        return self._metadata[field] if field else 0

    @property
    def body_length(self) -> int:
        """The number of bytes after the metadata."""
        field = self._field(self._message, 3)
        return struct.unpack_from("<q", self._metadata, field)[0] if field else 0

    @property
    def is_compressed(self) -> bool:
        """True if the buffers of the batch are compressed."""
        return bool(self._field(self._target(self._field(self._message, 2)), 3))

    def buffers(self) -> Iterator[tuple[int, int]]:
        """Yield the offset of each buffer of the batch in the body, and its size in bytes."""
        field = self._field(self._target(self._field(self._message, 2)), 2)
        if not field:
            return
        # A vector of structs of two int64: offset and length.
        vector = self._target(field)
        (count,) = struct.unpack_from("<I", self._metadata, vector)
        for index in range(count):
            yield struct.unpack_from("<qq", self._metadata, vector + 4 + 16 * index)
