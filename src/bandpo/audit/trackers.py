"""What wandb, TensorBoard and trackio leave on the disk, read without their packages."""

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
BLOCK, HEADER = 2**15, 7
"""Bytes of a block in LevelDB's log, of which wandb's file is one, and of the header of a file and of a record."""
WHOLE, LAST = 1, 4
"""The parts that end a record there."""


def protobuf(message: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a protocol buffer: an int, or the bytes of all else.

    >>> list(protobuf(bytes([8, 150, 1, 18, 2, 104, 105])))
    [(1, 150), (2, b'hi')]
    """
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte, at = message[at], at + 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        key = varint()
        if key & 7:
            size = {1: 8, 5: 4}.get(key & 7) or varint()
            at += size
            yield key >> 3, message[at - size : at]
        else:
            yield key >> 3, varint()


def _fields(message: bytes, number: int) -> list[Any]:
    return [value for n, value in protobuf(message) if n == number]


def wandb(file: Path) -> Raw:
    """The history of a run, of a file ``run-….wandb``, which wandb writes offline and online."""
    data, at, record = file.read_bytes(), HEADER, b""
    while at + HEADER <= len(data):
        if (left := BLOCK - at % BLOCK) < HEADER:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + HEADER : at + HEADER + size]
        at += HEADER + size
        if kind not in (WHOLE, LAST):
            continue
        for history in _fields(record, 2):
            items = (dict(protobuf(item)) for item in _fields(history, 1))
            row = {(item.get(1) or item[2]).decode(): json.loads(item[16]) for item in items}
            yield _with_step(row, row.get("_step"))
        record = b""


def _with_step(row: Mapping[str, Any], counted: Any) -> Mapping[str, Any]:
    """With the trainer's step, or how often was logged before."""
    told = (row[k] for k in ("train/global_step", "trainer/global_step") if k in row)
    return {**row, "step": next(told, counted)}


def trackio(file: Path) -> Raw:
    """The newest run of a project, of a file ``PROJECT.db``."""
    query = """SELECT step, metrics FROM metrics
        WHERE run_name = (SELECT run_name FROM metrics ORDER BY id DESC LIMIT 1) ORDER BY id"""
    with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as store:
        for counted, text in store.execute(query):
            row = json.loads(text)
            yield _with_step(row, counted)


def tensorboard(file: Path) -> Raw:
    """The scalars of all event files that lie beside one."""
    rows: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for path in sorted(file.parent.glob("events.out.tfevents.*")):
        data, at = path.read_bytes(), 0
        while at + 12 <= len(data):
            (size,) = struct.unpack_from("<Q", data, at)
            event, at = data[at + 12 : at + 12 + size], at + 16 + size
            if len(event) < size:
                break  # cut off
            for summary in _fields(event, 5):
                for value in map(dict, map(protobuf, _fields(summary, 1))):
                    if 2 in value:
                        step = next(iter(_fields(event, 2)), 0)
                        rows[step][value[1].decode()] = struct.unpack("<f", value[2])[0]
    yield from ({**row, "step": step} for step, row in sorted(rows.items()))


TRACKERS: Mapping[str, Callable[[Path], Raw]] = {
    "*.wandb": wandb,
    "*.db": trackio,
    "events.out.tfevents.*": tensorboard,
}
"""For each kind of file what reads it."""
