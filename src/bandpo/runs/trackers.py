"""Read what wandb, TensorBoard and trackio leave on the disk, with the standard library alone.

wandb's package has had no reader of its own files in Python since its core was rewritten in Go, so the two formats are
read here: records of a LevelDB log and of TFRecord, which hold protocol buffers.
"""

from __future__ import annotations

import json
import sqlite3
import struct
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from bandpo.errors import InvalidValue
from bandpo.runs.files import LONGEST_LINE, LONGEST_READING, check_size

Raw = Iterator[Mapping[str, Any]]
"""Metrics as they were logged, with their ``step``."""

BLOCK_SIZE = 2**15
"""Bytes of a block in a LevelDB log."""

HEADER_SIZE = 7
"""Bytes of the header of a file of wandb, and of the header of each record in it."""

WHOLE_RECORD = 1
"""The type of a record that is stored in one part."""

LAST_PART = 4
"""The type of the last part of a record that is stored in several."""

# Wire types of a protocol buffer. The value of any other is a length and as many bytes.
VARINT = 0
FIXED_64 = 1
FIXED_32 = 5


def parse_protobuf(message: bytes) -> Iterator[tuple[int, Any]]:
    """Parse the fields of a protocol buffer: each one's number, and its value as an int or as bytes.

    >>> list(parse_protobuf(bytes([8, 150, 1, 18, 2, 104, 105])))
    [(1, 150), (2, b'hi')]
    """
    position = 0
    while position < len(message):
        key, position = _read_varint(message, position)
        number, wire_type = key >> 3, key & 7
        if wire_type == VARINT:
            value, position = _read_varint(message, position)
            yield number, value
            continue
        if wire_type == FIXED_64:
            size = 8
        elif wire_type == FIXED_32:
            size = 4
        else:
            size, position = _read_varint(message, position)
        yield number, message[position : position + size]
        position += size


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    """Return an integer of seven bits a byte, and the position after it."""
    value = 0
    shift = 0
    while True:
        byte = message[position]
        position += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, position
        if shift > 70:
            raise IndexError("an integer of more than ten bytes")


def _fields(message: bytes, number: int) -> list[Any]:
    """Return the values of all fields of a number."""
    return [value for field, value in parse_protobuf(message) if field == number]


def read_wandb(file: Path) -> Raw:
    """Read the history of a run from a file ``run-….wandb``, which wandb writes offline and online."""
    for record in _leveldb_records(file.read_bytes()):
        for history in _fields(record, 2):
            row = {}
            for item in _fields(history, 1):
                fields = dict(parse_protobuf(item))
                name = fields.get(1) or fields[2]  # the key, or the nested key
                row[name.decode()] = json.loads(fields[16])
            yield row


def _leveldb_records(data: bytes) -> Iterator[bytes]:
    """Read the records of a LevelDB log, whose parts never cross the end of a block."""
    position = HEADER_SIZE
    parts: list[bytes] = []
    while position + HEADER_SIZE <= len(data):
        left_in_block = BLOCK_SIZE - position % BLOCK_SIZE
        if left_in_block < HEADER_SIZE:
            position += left_in_block
            continue
        _, size, part = struct.unpack_from("<IHB", data, position)
        position += HEADER_SIZE
        parts.append(data[position : position + size])
        position += size
        if part in (WHOLE_RECORD, LAST_PART):
            yield b"".join(parts)
            parts.clear()


def read_trackio(file: Path) -> Mapping[str, list[Mapping[str, Any]]]:
    """Read the runs of a project from a file ``PROJECT.db``, by their names.

    Raises:
        ValueError: if the file takes longer to read than `LONGEST_READING`, or its ``metrics`` are no table: a view may
            compute for ever.
    """
    check_size(file)
    deadline = time.monotonic() + LONGEST_READING
    runs: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as store:
        store.execute("PRAGMA trusted_schema = OFF")
        store.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_LINE)
        store.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
        kinds = store.execute("SELECT type, sql FROM sqlite_master WHERE name = 'metrics'").fetchall()
        if [(kind, str(sql)[:12].upper()) for kind, sql in kinds] != [("table", "CREATE TABLE")]:
            raise InvalidValue(f"{file} is no store of trackio: its metrics are no table")
        for name, logged_step, text in store.execute(
            "SELECT run_name, step, metrics FROM metrics ORDER BY id"
        ):
            if not isinstance(name, str):
                raise InvalidValue(f"{file} is no store of trackio: a run's name is no text")
            runs[name].append({"_step": logged_step, **json.loads(text)})
    return runs


def read_tensorboard(file: Path) -> Raw:
    """Read the scalars of one event file, a row for each step."""
    rows: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for event in _tfrecords(file.read_bytes()):
        step = next(iter(_fields(event, 2)), 0)
        for summary in _fields(event, 5):
            for message in _fields(summary, 1):
                value = dict(parse_protobuf(message))
                scalar = _scalar(value)
                if scalar is not None:
                    rows[step][value[1].decode()] = scalar
    for step in sorted(rows):
        yield {**rows[step], "step": step}


def _scalar(value: Mapping[int, Any]) -> float | None:
    """Return the scalar of a summary's value, in its own field or as a tensor of one element; None if it is none."""
    if 2 in value:
        return struct.unpack("<f", value[2])[0]
    if 8 not in value:
        return None
    tensor = dict(parse_protobuf(value[8]))
    float_type = 1
    if tensor.get(1) != float_type:
        return None
    content = tensor.get(4) or tensor.get(5)  # the bytes of the elements, or the elements
    return struct.unpack("<f", content)[0] if isinstance(content, bytes) and len(content) == 4 else None


def _tfrecords(data: bytes) -> Iterator[bytes]:
    """Read the records of a TFRecord file: a length and its checksum, the data and their checksum."""
    position = 0
    while position + 12 <= len(data):
        (size,) = struct.unpack_from("<Q", data, position)
        record = data[position + 12 : position + 12 + size]
        if len(record) < size:
            return  # the file was cut off
        yield record
        position += 16 + size
