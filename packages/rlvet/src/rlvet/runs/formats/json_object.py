"""Read one JSON value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlvet.errors import InvalidValue
from rlvet.runs.files import check_file
from rlvet.runs.formats._content import by_run, check_content, parse_int
from rlvet.runs.formats._format import Format, NoLog, RawLog, RawRows
from rlvet.runs.formats.json_lines import read_json_lines
from rlvet.runs.limits import LARGEST_TEXT
from rlvet.runs.unread import Unread


def read_json(file: Path) -> RawLog:
    """Read one JSON value: a trainer's state, a list of rows, or an object with rows or columns."""
    check_content(file)
    check_file(file, LARGEST_TEXT)
    try:
        content = json.loads(file.read_bytes(), parse_int=parse_int)
    except (ValueError, RecursionError) as error:
        if file.name == "trainer_state.json":
            raise InvalidValue(
                f"{file} is no trainer_state.json, or only a part of one ({error!r})"
            ) from error
        # It may be JSON lines with another suffix.
        with file.open("rb") as stream:
            if stream.readline().rstrip().endswith(b"}"):
                return read_json_lines(file)
        raise NoLog(f"{file} is no JSON, or only a part of one ({error!r})") from error

    unread = Unread()
    notes: list[str] = []
    if isinstance(content, dict):
        runs = _runs_of_object(content, unread)
        if runs:
            return RawLog(runs, unread=unread)
        content = _rows_of_object(content, unread, notes)
    if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
        raise NoLog(
            f"{file} is no trainer_state.json, or only a part of one, and holds no list of rows either"
        )
    return RawLog(by_run(content, unread), tuple(notes), unread)


def _is_rows(value: Any) -> bool:
    """Return True if a value is a list of objects."""
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _count_other_lists(content: Mapping[str, Any], rows: Any, unread: Unread) -> None:
    """Count the rows of all lists of objects but one."""
    for key, value in content.items():
        if value is not rows and _is_rows(value):
            unread.add("object of another list", "the log is another list", key, len(value))


def _runs_of_object(content: Mapping[str, Any], unread: Unread) -> dict[str, RawRows]:
    """Return the rows of each run in an object of runs, by their names; empty if a value is not a run.

    A run is an object with a list of rows.
    """
    runs: dict[str, RawRows] = {}
    for name, value in content.items():
        if not isinstance(value, dict):
            return {}
        rows = next(filter(_is_rows, value.values()), None)
        if rows is None:
            return {}
        runs[name] = rows
    for value, rows in zip(content.values(), runs.values(), strict=True):
        _count_other_lists(value, rows, unread)
    return runs


def _rows_of_object(content: Mapping[str, Any], unread: Unread, notes: list[str]) -> Any:
    """Return the list of rows in the object of a single run; the object itself if it has no lists.

    Args:
        content: The object.
        unread: The object to which the rows of other lists are added.
        notes: The list to which a sentence about columns of another length is added.
    """
    rows = content.get("log_history")
    lists = [value for value in content.values() if isinstance(value, list) and value]
    if not isinstance(rows, list):
        rows = next((value for value in lists if isinstance(value[0], dict)), None)
    if rows is not None:
        _count_other_lists(content, rows, unread)
        return rows
    return _rows_of_columns(content, notes) if lists else content


def _rows_of_columns(columns: Mapping[str, Any], notes: list[str]) -> list[dict[str, Any]]:
    """Return rows made of the longest lists in an object; shorter lists are left out, with a note."""
    lists = {key: value for key, value in columns.items() if isinstance(value, list)}
    length = max(len(value) for value in lists.values())
    shorter = [key for key, value in lists.items() if len(value) < length]
    if shorter:
        notes.append(f"lists with fewer than {length:,} values are not read: {', '.join(shorter[:12])}")
    lists = {key: value for key, value in lists.items() if len(value) == length}
    return [{key: value[row] for key, value in lists.items()} for row in range(length)]


FORMAT = Format(
    kind="JSON",
    patterns=("*.json",),
    read=read_json,
    example="rows as JSON",
    described="JSON: a list of rows, or an object with rows or columns",
    written_by="your own",
)
