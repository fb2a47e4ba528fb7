"""Read a CSV."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlvet.errors import InvalidValue
from rlvet.runs.formats._content import by_run, decode
from rlvet.runs.formats._format import Format, NoLog, RawLog
from rlvet.runs.limits import MOST_CELLS, MOST_COLUMNS, MOST_ROWS
from rlvet.runs.tables import csv_rows
from rlvet.runs.unread import Unread

WANDB_COLUMN = re.compile(r"(.+?) - (.+?)(__MIN|__MAX)?", re.DOTALL)
"""The name of a column in an export of wandb: run, key, and a suffix for the smallest or largest value."""


def read_table(file: Path) -> RawLog:
    """Read a CSV: the log of a custom training loop, or an export of trackio or wandb.

    The columns of a wandb export are named ``RUN - KEY``.
    """
    text = decode(file)
    if text.count("\n") > MOST_ROWS:
        raise InvalidValue(
            f"{file} takes more than {MOST_ROWS:,} lines, the limit; give the part with the metrics"
        )
    first_line = text.partition("\n")[0]
    delimiter = max(",;\t", key=first_line.count)
    if first_line.count(delimiter) >= MOST_COLUMNS:
        raise InvalidValue(
            f"{file} has {first_line.count(delimiter) + 1:,} columns, and at most {MOST_COLUMNS:,} are read; give the "
            "part with the metrics"
        )
    unread = Unread()
    rows = csv_rows(text, delimiter, unread)
    if not rows:
        raise NoLog(f"{file} is a table without rows")
    # wandb adds columns RUN - KEY__MIN and RUN - KEY__MAX.
    keys: dict[str, None] = {}
    for row in rows:
        keys.update(dict.fromkeys(row))
    headers = [WANDB_COLUMN.fullmatch(name) for name in keys]
    if not any(headers):
        return RawLog(by_run(rows, unread), unread=unread)

    # The columns of each run, and for each of them the key that was logged.
    columns_by_run: dict[str, dict[str, str]] = {}
    for match in headers:
        if match:
            columns = columns_by_run.setdefault(match[1], {})
            if not match[3]:
                columns[match[0]] = match[2]
    step_columns = {key: key for key in keys if " - " not in key}
    cells = len(rows) * (len(headers) + len(columns_by_run) * len(step_columns))
    if cells > MOST_CELLS:
        raise InvalidValue(
            f"{file} has {len(columns_by_run):,} runs with {cells:,} cells, and at most {MOST_CELLS:,} are read; give "
            "the part with the runs that you mean"
        )
    runs: dict[str, list[dict[str, Any]]] = {}
    for name, columns in sorted(columns_by_run.items()):
        names = columns | step_columns
        rows_of_run = [row for row in rows if any(column in row for column in columns)]
        runs[name] = [_rename_keys(row, names) for row in rows_of_run]
    return RawLog(runs, unread=unread)


def _rename_keys(row: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the cells of some columns of a row under other keys."""
    return {name: row[column] for column, name in names.items() if column in row}


FORMAT = Format(
    kind="a table",
    patterns=("*.csv", "*.tsv"),
    read=read_table,
    example="a CSV",
    described="a CSV",
    written_by="your own, trackio's, and wandb's export",
)
