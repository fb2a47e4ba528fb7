"""Rows of metrics in columns: a number takes 8 bytes, and a dictionary of four numbers takes more than 300.

Only the standard library is needed.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress, repeat
from typing import Any, NamedTuple, overload

from rlvet.errors import InvalidValue

Column = Sequence[Any]
"""The values of a key: an array of doubles if all are floats, else a list."""

MOST_TEXTS = 4096
"""The largest number of different texts of which equal ones are kept once."""

MOST_COLLECTED = 2**14
"""The largest number of numbers that are collected before they are distributed to columns."""

FLOATS = frozenset((float,))


class Layout(NamedTuple):
    """The rows that have the same keys in the same order, and floats under the same of them."""

    keys: tuple[str, ...]
    columns: Sequence[Column]

    @property
    def has_only_floats(self) -> bool:
        """True if all values are floats."""
        return not any(type(column) is list for column in self.columns)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a dictionary for each row; dictionaries without end if there is no key."""
        values = zip(*self.columns, strict=True) if self.columns else repeat(())
        return map(dict, map(zip, repeat(self.keys), values))

    def column(self, key: str) -> Column:
        """Return the column of a key."""
        return self.columns[self.keys.index(key)]


class CompactRows(Sequence[dict[str, Any]]):
    """A sequence of rows, each of which becomes a dictionary when it is asked for. To change that changes no row here.

    The rows of each sequence of keys have columns of their own, so that a key takes memory only in rows that have it.

    Args:
        rows: The rows.

    >>> rows = CompactRows([{"step": 1.0, "reward": 0.5}, {"step": 2.0}, {"step": 3.0, "reward": 0.7}])
    >>> rows[1], rows.layouts, list(rows.column("reward"))
    ({'step': 2.0}, [('step', 'reward'), ('step',)], [0.5, 0.7])
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()):
        self._parts: list[Layout] = []
        # The place in `_parts` of each row's layout.
        self._part_of_row = array("I")
        self._known: dict[tuple[tuple[str, ...], tuple[bool, ...]], int] = {}
        self._texts: dict[str, str] = {}
        # The place of each row in its layout, once it is needed.
        self._places: array[int] | None = None
        self.extend(rows)

    @classmethod
    def of_parts(cls, parts: Iterable[Layout], part_of_row: Iterable[int]) -> CompactRows:
        """Return rows with columns that exist.

        Args:
            parts: The layouts, in the order of their first rows. No row is appended to them.
            part_of_row: The place of each row's layout among them.

        Raises:
            ValueError: if a layout has another number of rows than its columns.
        """
        rows = cls()
        rows._parts = list(parts)
        rows._part_of_row = part_of_row if isinstance(part_of_row, array) else array("I", part_of_row)
        if max(rows._part_of_row, default=-1) >= len(rows._parts):
            raise InvalidValue("a row has no layout")
        counts = Counter(rows._part_of_row) if len(rows._parts) > 1 else {0: len(rows._part_of_row)}
        for number, part in enumerate(rows._parts):
            if any(len(column) != counts.get(number, 0) for column in part.columns):
                raise InvalidValue("a column has another number of values than there are rows")
        return rows

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row."""
        self.extend((row,))

    def extend(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows."""
        # Numbers are collected row by row, and then distributed to the columns: this takes half the time.
        collected: dict[tuple[str, ...], tuple[int, array[float]]] = {}
        for row in rows:
            values = row.values()
            if not FLOATS.issuperset(map(type, values)):
                self._append_mixed(row)
                continue
            keys = tuple(row)
            if keys not in collected:
                collected[keys] = (self._part_of(keys, (True,) * len(keys)), array("d"))
            part, numbers = collected[keys]
            self._part_of_row.append(part)
            numbers.extend(values)
            if len(numbers) > MOST_COLLECTED:
                self._distribute(part, numbers)
        for part, numbers in collected.values():
            self._distribute(part, numbers)
        self._places = None

    def _append_mixed(self, row: Mapping[str, Any]) -> None:
        """Add a row with a value that is no float."""
        part = self._part_of(tuple(row), tuple([type(value) is float for value in row.values()]))
        self._part_of_row.append(part)
        for column, value in zip(self._parts[part].columns, row.values(), strict=True):
            column.append(self._without_copies(value) if type(value) is str else value)  # type: ignore[attr-defined]

    def _part_of(self, keys: tuple[str, ...], are_floats: tuple[bool, ...]) -> int:
        """Return the place of a layout to which rows are added."""
        layout = (keys, are_floats)
        if layout not in self._known:
            columns = [array("d") if is_float else [] for is_float in are_floats]
            self._known[layout] = self.add_part(keys, columns)
        return self._known[layout]

    def _distribute(self, part: int, numbers: array[float]) -> None:
        """Add the collected numbers of rows of a layout to its columns."""
        columns = self._parts[part].columns
        for place, column in enumerate(columns):
            column.extend(numbers[place :: len(columns)])  # type: ignore[attr-defined]
        del numbers[:]

    def _without_copies(self, text: str) -> str:
        """Return a text, and the same object for equal ones."""
        if len(self._texts) < MOST_TEXTS:
            return self._texts.setdefault(text, text)
        return self._texts.get(text, text)

    def add_part(self, keys: Sequence[str], columns: Sequence[Column]) -> int:
        """Add a layout with columns that exist, to whose rows `append_row_of` refers, and return its place."""
        self._parts.append(Layout(tuple(keys), columns))
        return len(self._parts) - 1

    def append_row_of(self, part: int) -> None:
        """Add the next row of a layout of `add_part`."""
        self._part_of_row.append(part)

    # --- A sequence of dictionaries ---

    def __len__(self) -> int:
        return len(self._part_of_row)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        readers = [part.rows() for part in self._parts]
        if len(readers) == 1 and self._parts[0].columns:
            return readers[0]
        return (next(readers[part]) for part in self._part_of_row)

    @overload
    def __getitem__(self, place: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, place: slice) -> CompactRows: ...

    def __getitem__(self, place: int | slice) -> dict[str, Any] | CompactRows:
        if isinstance(place, slice):
            first, end, step = place.indices(len(self))
            if step != 1:
                return CompactRows(self[number] for number in range(first, end, step))
            return self._between(first, max(first, end))
        count = len(self)
        number = place + count if place < 0 else place
        if not 0 <= number < count:
            raise IndexError(place)
        part = self._parts[self._part_of_row[number]]
        at = self._place_in_part(number)
        return {key: column[at] for key, column in zip(part.keys, part.columns, strict=True)}

    def _place_in_part(self, number: int) -> int:
        """Return the place of a row in its layout."""
        if len(self._parts) == 1:
            return number
        if number == len(self) - 1:
            columns = self._parts[self._part_of_row[number]].columns
            return len(columns[0]) - 1 if columns else 0
        if self._places is None:
            counts = [0] * len(self._parts)
            places = array("I")
            for part in self._part_of_row:
                places.append(counts[part])
                counts[part] += 1
            self._places = places
        return self._places[number]

    def _between(self, first: int, end: int) -> CompactRows:
        """Return the rows from one up to another."""
        part_of_row = self._part_of_row[first:end]
        starts = Counter(self._part_of_row[:first])
        counts = Counter(part_of_row)
        parts = []
        for part, count in counts.items():
            start = starts[part]
            columns = [column[start : start + count] for column in self._parts[part].columns]
            parts.append(Layout(self._parts[part].keys, columns))
        if len(parts) == 1:
            return CompactRows.of_parts(parts, array("I", bytes(4 * (end - first))))
        numbers = {part: number for number, part in enumerate(counts)}
        return CompactRows.of_parts(parts, array("I", map(numbers.__getitem__, part_of_row)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(row == one for row, one in zip(self, other, strict=True))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)!r})"

    # --- Columns ---

    @property
    def parts(self) -> Sequence[Layout]:
        """The columns of each layout."""
        return self._parts

    @property
    def part_of_row(self) -> array[int]:
        """The place in `parts` of each row's layout."""
        return self._part_of_row

    @property
    def layouts(self) -> list[tuple[str, ...]]:
        """The different sequences of keys, in the order of their first rows."""
        return list(dict.fromkeys(part.keys for part in self._parts))

    def column(self, key: str, *beside: str) -> Column:
        """Return the values of a key in the rows that have it, which are not to be changed.

        Args:
            key: The key.
            beside: Other keys that the rows have too.
        """
        readers = {
            number: part.column(key)
            for number, part in enumerate(self._parts)
            if {key, *beside}.issubset(part.keys)
        }
        if len(readers) <= 1:
            return next(iter(readers.values()), array("d"))
        iterators = {number: iter(column) for number, column in readers.items()}
        values = (next(iterators[part]) for part in self._part_of_row if part in iterators)
        return (
            list(values) if any(type(column) is list for column in readers.values()) else array("d", values)
        )

    def values(self, key: str, default: Any = None) -> Iterator[Any]:
        """Yield the value of a key in each row.

        Args:
            key: The key.
            default: The value for a row without it.
        """
        readers = [iter(part.column(key)) if key in part.keys else repeat(default) for part in self._parts]
        if len(readers) == 1 and key in self._parts[0].keys:
            return readers[0]
        return (next(readers[part]) for part in self._part_of_row)

    def numbers_of_rows(self, key: str) -> Sequence[int]:
        """Return the numbers of the rows that have a key."""
        has_key = [key in part.keys for part in self._parts]
        if all(has_key):
            return range(len(self))
        return array("I", compress(range(len(self)), map(has_key.__getitem__, self._part_of_row)))

    def different_rows(self) -> Iterator[dict[str, Any]]:
        """Yield, in their order, the first row of each layout of floats, and each row that has another value."""
        is_known = [part.has_only_floats for part in self._parts]
        if all(is_known):
            yield from (next(part.rows()) for part in self._parts)
            return
        readers = [part.rows() for part in self._parts]
        seen: set[int] = set()
        for part in self._part_of_row:
            if part not in seen:
                yield next(readers[part])
                if is_known[part]:
                    seen.add(part)

    def has_values_of(self, kind: type) -> bool:
        """Return whether a value has a type, which is not that of floats."""
        columns = chain.from_iterable(part.columns for part in self._parts)
        return any(type(column) is list and kind in map(type, column) for column in columns)

    def renamed(self, names: Mapping[str, str]) -> CompactRows:
        """Return the rows with other keys, and without keys that have no name."""
        parts = []
        for part in self._parts:
            columns = {
                names[key]: column
                for key, column in zip(part.keys, part.columns, strict=True)
                if key in names
            }
            parts.append(Layout(tuple(columns), [*columns.values()]))
        return CompactRows.of_parts(parts, self._part_of_row)


def compact(rows: Iterable[Mapping[str, Any]]) -> CompactRows:
    """Return rows in columns; the same object if they are so already."""
    return rows if isinstance(rows, CompactRows) else CompactRows(rows)


def layouts_of(rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return the different sequences of keys of rows, in the order of their first rows."""
    return rows.layouts if isinstance(rows, CompactRows) else list(dict.fromkeys(map(tuple, rows)))
