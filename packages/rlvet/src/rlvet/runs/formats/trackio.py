"""Read trackio's ``PROJECT.db`` with the standard library."""

from __future__ import annotations

import json
import sqlite3
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from rlvet.errors import InvalidValue
from rlvet.runs.files import check_file
from rlvet.runs.formats._format import Format, HeldSettings, RawLog
from rlvet.runs.limits import LONGEST_LINE, LONGEST_READING


def read_trackio(file: Path) -> RawLog:
    """Return the rows of each run of a project, by its name, from a file ``PROJECT.db``.

    Raises:
        ValueError: if the file takes longer to read than `LONGEST_READING`, or its ``metrics`` are not a table. They
            could be a view whose computation never ends.
    """
    runs: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    with _opened(file) as store:
        if not _has_table(store, "metrics"):
            raise InvalidValue(f"{file} is no store of trackio: its metrics are no table")
        for name, logged_step, text in store.execute(
            "SELECT run_name, step, metrics FROM metrics ORDER BY id"
        ):
            if not isinstance(name, str):
                raise InvalidValue(f"{file} is no store of trackio: a run's name is no text")
            runs[name].append({"_step": logged_step, **json.loads(text)})
    return RawLog(runs)


def read_settings(file: Path) -> Iterator[HeldSettings]:
    """Yield the settings of each run of a project."""
    with _opened(file) as store:
        if not _has_table(store, "configs"):
            return
        for name, text in store.execute("SELECT run_name, config FROM configs ORDER BY id"):
            content = text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)
            yield HeldSettings("configs", content, run=str(name))


@contextmanager
def _opened(file: Path) -> Iterator[sqlite3.Connection]:
    """Open a store for reading, which ends with an error after `LONGEST_READING`."""
    check_file(file)
    deadline = time.monotonic() + LONGEST_READING
    with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as store:
        store.execute("PRAGMA trusted_schema = OFF")
        store.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_LINE)
        store.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
        yield store


def _has_table(store: sqlite3.Connection, name: str) -> bool:
    """Return whether a store has a table of a name, and no view."""
    definitions = store.execute("SELECT type, sql FROM sqlite_master WHERE name = ?", (name,)).fetchall()
    return [(kind, str(sql)[:12].upper()) for kind, sql in definitions] == [("table", "CREATE TABLE")]


FORMAT = Format(
    kind="trackio's store",
    patterns=("*.db",),
    read=read_trackio,
    settings=read_settings,
    example="trackio's PROJECT.db",
    described="`PROJECT.db`",
    written_by="trackio, for any framework; its package is not needed",
)
