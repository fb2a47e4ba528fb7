"""Read what wandb, TensorBoard and trackio leave on the disk, with the standard library alone.

wandb's package has had no reader of its own files in Python since its core was rewritten in Go, so the two formats are
read here: records of a LevelDB log and of TFRecord, which hold protocol buffers.
"""

from __future__ import annotations

import json
import sqlite3
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

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
            yield _with_step(row, row.get("_step"))


def _leveldb_records(data: bytes) -> Iterator[bytes]:
    """Read the records of a LevelDB log, whose parts never cross the end of a block."""
    position = HEADER_SIZE
    record = b""
    while position + HEADER_SIZE <= len(data):
        left_in_block = BLOCK_SIZE - position % BLOCK_SIZE
        if left_in_block < HEADER_SIZE:
            position += left_in_block
            continue
        _, size, part = struct.unpack_from("<IHB", data, position)
        position += HEADER_SIZE
        record += data[position : position + size]
        position += size
        if part in (WHOLE_RECORD, LAST_PART):
            yield record
            record = b""


def _with_step(row: Mapping[str, Any], logged_step: Any) -> Mapping[str, Any]:
    """Return the row with the trainer's step, or the tracker's own count if there is none."""
    for key in ("train/global_step", "trainer/global_step"):
        if key in row:
            return {**row, "step": row[key]}
    return {**row, "step": logged_step}


def read_trackio(file: Path) -> Raw:
    """Read the newest run of a project from a file ``PROJECT.db``."""
    query = """SELECT step, metrics FROM metrics
        WHERE run_name = (SELECT run_name FROM metrics ORDER BY id DESC LIMIT 1) ORDER BY id"""
    with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as store:
        for logged_step, text in store.execute(query):
            yield _with_step(json.loads(text), logged_step)


def read_tensorboard(file: Path) -> Raw:
    """Read the scalars of all event files that lie beside one."""
    rows: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for path in sorted(file.parent.glob("events.out.tfevents.*")):
        for event in _tfrecords(path.read_bytes()):
            step = next(iter(_fields(event, 2)), 0)
            for summary in _fields(event, 5):
                for message in _fields(summary, 1):
                    value = dict(parse_protobuf(message))
                    if 2 in value:  # a scalar
                        rows[step][value[1].decode()] = struct.unpack("<f", value[2])[0]
    for step in sorted(rows):
        yield {**rows[step], "step": step}


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


TRACKERS: Mapping[str, Callable[[Path], Raw]] = {
    "*.wandb": read_wandb,
    "*.db": read_trackio,
    "events.out.tfevents.*": read_tensorboard,
}
"""For each kind of file its reader."""
