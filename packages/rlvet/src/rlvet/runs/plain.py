"""Write results as JSON and bytes of arrays, and read them again without executing anything.

The process that reads a stranger's files answers in this form, see `rlvet.runs.gate`. JSON has no tuples, paths, bytes
or classes, so each of these is an object with a single key, its kind. Only the classes that the caller lists are built.
"""

from __future__ import annotations

import dataclasses
import json
from array import array
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from rlvet.errors import InvalidValue
from rlvet.runs.compact_rows import CompactRows, Layout
from rlvet.runs.limits import MOST_VALUES


class Plain(NamedTuple):
    """A value as JSON, and the bytes of its arrays."""

    text: str
    """The JSON, in ASCII."""
    buffers: Sequence[bytes | bytearray | array[Any]]
    """The bytes of the arrays, in the order in which the JSON refers to them."""


def to_plain(value: Any) -> Plain:
    """Return a value as JSON and bytes.

    Args:
        value: A number, text, bytes, path, list, tuple, set, dictionary, `CompactRows`, numpy array, dataclass or named
            tuple, nested. Any other object is written as None.

    Raises:
        TooManyValues: if it contains more than `MOST_VALUES` values, without those of arrays and columns of numbers.

    >>> to_plain({"step": 1, "names": ("a", "b")}).text
    '{"dict": {"step": 1, "names": {"tuple": ["a", "b"]}}}'
    """
    writer = _Writer()
    content = writer.write(value)
    return Plain(json.dumps(content), writer.buffers)


def from_plain(plain: Plain, types: Iterable[type] = ()) -> Any:
    """Return the value of `to_plain`.

    Args:
        plain: The JSON and the bytes.
        types: The dataclasses and named tuples that the value may contain.

    Raises:
        ValueError: if it is no such JSON, or has another class.

    >>> from_plain(to_plain({"step": 1, "names": ("a", "b")}))
    {'step': 1, 'names': ('a', 'b')}
    """
    by_name = {one.__name__: one for one in types}
    try:
        return _Reader(plain.buffers, by_name).read(json.loads(plain.text))
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidValue(f"an answer of another form ({error!r:.200})") from error


class TooManyValues(InvalidValue):
    """The error for a value with more than `MOST_VALUES` values."""


class _Writer:
    """The state of `to_plain`: the arrays, and the number of values so far."""

    def __init__(self) -> None:
        self.buffers: list[bytes | array[Any]] = []
        self._count = 0

    def write(self, value: Any) -> Any:
        """Return a value in the form of JSON."""
        self._count += 1
        if self._count > MOST_VALUES:
            raise TooManyValues(f"it has more than {MOST_VALUES:,} values, and at most as many are read")
        # Subclasses of these, such as bool, str enums and named tuples, are not written as their base.
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is list:
            return [self.write(item) for item in value]
        if kind is CompactRows:
            return self._write_rows(value)
        if isinstance(value, dict):
            return self._write_dict(value)
        if kind is tuple:
            return {"tuple": [self.write(item) for item in value]}
        if kind in (set, frozenset):
            return {"set": [self.write(item) for item in value]}
        if kind is bytes:
            return {"bytes": b64encode(value).decode()}
        if isinstance(value, PurePath):
            return {"path": str(value)}
        if dataclasses.is_dataclass(kind):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            return {kind.__name__: {name: self.write(item) for name, item in fields.items()}}
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            fields = dict(zip(kind._fields, value, strict=True))
            return {kind.__name__: {name: self.write(item) for name, item in fields.items()}}
        if hasattr(value, "dtype") and hasattr(value, "tobytes"):
            return self._write_array(value)
        return {"object": None}

    def _write_dict(self, value: Mapping[Any, Any]) -> dict[str, Any]:
        if all(type(key) is str for key in value):
            return {"dict": {key: self.write(item) for key, item in value.items()}}
        return {"pairs": [[self.write(key), self.write(item)] for key, item in value.items()]}

    def _write_rows(self, rows: CompactRows) -> dict[str, Any]:
        """Return rows, with the numbers of all columns as one array."""
        numbers = array("d")
        # The places of columns in that array. A metric under two names has one column.
        starts: dict[int, int] = {}
        parts = []
        for part in rows.parts:
            columns = []
            for column in part.columns:
                if isinstance(column, array):
                    start = starts.setdefault(id(column), len(numbers))
                    if start == len(numbers):
                        numbers.extend(column)
                    columns.append({"start": start, "count": len(column)})
                else:
                    columns.append(self.write(column))
            parts.append([list(part.keys), columns])
        self.buffers += [rows.part_of_row, numbers]
        return {"rows": {"parts": parts, "buffer": len(self.buffers) - 2}}

    def _write_array(self, value: Any) -> dict[str, Any]:
        """Return an array of numpy, or one of its numbers, by the number of its bytes."""
        if value.dtype.kind not in "biuf":
            return {"object": None}
        self.buffers.append(value.tobytes())
        layout = {"dtype": value.dtype.str, "shape": list(value.shape), "buffer": len(self.buffers) - 1}
        return {"array": layout}


class _Reader:
    """The state of `from_plain`: the arrays, and the classes by name."""

    def __init__(self, buffers: Sequence[bytes | bytearray | array[Any]], types: Mapping[str, type]):
        self._buffers = buffers
        self._types = types

    def read(self, content: Any) -> Any:
        """Return the value of its form in JSON."""
        if isinstance(content, list):
            return [self.read(item) for item in content]
        if not isinstance(content, dict):
            return content
        ((kind, inner),) = content.items()
        if kind == "dict":
            return {name: self.read(item) for name, item in inner.items()}
        if kind == "pairs":
            return {self.read(key): self.read(item) for key, item in inner}
        if kind == "tuple":
            return tuple(self.read(item) for item in inner)
        if kind == "set":
            return {self.read(item) for item in inner}
        if kind == "bytes":
            return b64decode(inner)
        if kind == "path":
            return Path(inner)
        if kind == "rows":
            return self._read_rows(**inner)
        if kind == "array":
            return self._read_array(**inner)
        if kind == "object":
            return None
        return self._types[kind](**{name: self.read(item) for name, item in inner.items()})

    def _read_rows(self, parts: list[Any], buffer: int) -> CompactRows:
        part_of_row = array("I")
        part_of_row.frombytes(memoryview(self._buffers[buffer]).cast("B"))
        numbers = memoryview(self._buffers[buffer + 1]).cast("B")
        read: dict[tuple[int, int], array[float]] = {}
        layouts = []
        for keys, columns in parts:
            layout = []
            for column in columns:
                if isinstance(column, list):
                    layout.append([self.read(item) for item in column])
                    continue
                place = (column["start"], column["count"])
                if place not in read:
                    start, count = place
                    values = read[place] = array("d")
                    values.frombytes(numbers[values.itemsize * start : values.itemsize * (start + count)])
                layout.append(read[place])
            layouts.append(Layout(tuple(keys), layout))
        return CompactRows.of_parts(layouts, part_of_row)

    def _read_array(self, dtype: str, shape: list[int], buffer: int) -> Any:
        import numpy as np

        kind = np.dtype(dtype)
        if kind.kind not in "biuf":
            raise InvalidValue(f"an array of the type {dtype}")
        return np.frombuffer(self._buffers[buffer], kind).reshape(shape)
