"""Read trackio's ``PROJECT.db`` with the standard library."""

from __future__ import annotations

import json
import sqlite3
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from rlvet.errors import InvalidValue
from rlvet.runs.files import check_file
from rlvet.runs.formats._format import Format, RawLog
from rlvet.runs.limits import LONGEST_LINE, LONGEST_READING


def read_trackio(file: Path) -> RawLog:
    """Return the rows of each run of a project, by its name, from a file ``PROJECT.db``.

    Raises:
        ValueError: if the file takes longer to read than `LONGEST_READING`, or its ``metrics`` are not a table. They
            could be a view whose computation never ends.
    """
    check_file(file)
    deadline = time.monotonic() + LONGEST_READING
    runs: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as store:
        store.execute("PRAGMA trusted_schema = OFF")
        store.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_LINE)
        store.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
        definitions = store.execute("SELECT type, sql FROM sqlite_master WHERE name = 'metrics'").fetchall()
        if [(kind, str(sql)[:12].upper()) for kind, sql in definitions] != [("table", "CREATE TABLE")]:
            raise InvalidValue(f"{file} is no store of trackio: its metrics are no table")
        for name, logged_step, text in store.execute(
            "SELECT run_name, step, metrics FROM metrics ORDER BY id"
        ):
            if not isinstance(name, str):
                raise InvalidValue(f"{file} is no store of trackio: a run's name is no text")
            runs[name].append({"_step": logged_step, **json.loads(text)})
    return RawLog(runs)


FORMAT = Format(
    kind="trackio's store",
    patterns=("*.db",),
    read=read_trackio,
    example="trackio's PROJECT.db",
    described="`PROJECT.db`",
    written_by="trackio, for any framework; its package is not needed",
)
