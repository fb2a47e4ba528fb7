"""Read protocol buffers, which wandb and TensorBoard write."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Raw = Iterator[Mapping[str, Any]]
"""Metrics as they were logged, with their ``step``."""

# Wire types of protocol buffers. Values of all other types are a length and as many bytes.
VARINT = 0

FIXED_64 = 1

FIXED_32 = 5


def parse_protobuf(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each field of a protocol buffer, as an int or as bytes.

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
    """Return an integer that is stored in seven bits per byte, and the position after it."""
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


def fields(message: bytes, number: int) -> list[Any]:
    """Return the values of all fields with a number."""
    return [value for field, value in parse_protobuf(message) if field == number]


def warn(file: Path, problem: str) -> None:
    """Warn of a problem with a file."""
    warnings.warn(f"{file}: {problem}", stacklevel=2)


def ignore(file: Path, problem: str) -> None:
    """Say nothing of a problem, of which another reader of the same file warns."""
