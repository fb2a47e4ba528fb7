"""Read console output, and the tables in a text."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlvet._numbers import format_share
from rlvet.runs.checkpoints import saved_steps
from rlvet.runs.consoles import CONSOLES, printed_trainings
from rlvet.runs.consoles._printed import ESCAPES
from rlvet.runs.endings import LOST, ending_of
from rlvet.runs.formats._content import decode
from rlvet.runs.formats._format import Format, NoLog, RawLog, RawRows
from rlvet.runs.formats.csv_table import read_table
from rlvet.runs.formats.json_lines import read_json_lines
from rlvet.runs.formats.json_object import read_json
from rlvet.runs.lookalikes import count_lookalikes
from rlvet.runs.tables import Rows, table_rows
from rlvet.runs.unread import STEPS_COUNTED, Unread

FEWEST_ZEROS = 16
"""The smallest number of zero bytes in a text that are told."""

CONFIGURATIONS = (".py", ".sh", ".toml", ".yaml", ".yml")
"""The suffixes of scripts and configurations, which start a run."""

HEADER_OF_TABLE = re.compile(
    r"<table\b|(?:^|[|│┃\t])[ *`]*(?:global[ _])?(?:step|iteration)[ *`]*(?:[|│┃\t]|  |$)", re.I | re.M
)
"""A part of a table with a column of steps, in HTML or in a text."""


def _trainings_of_parts(text: str) -> tuple[Sequence[RawRows], Unread]:
    """Return the trainings in a text, those before and after a lost part of it each for themselves.

    Another run may have written what follows.
    """
    parts = [*map(printed_trainings, LOST.split(text))]
    if len(parts) == 1:
        return parts[0]
    trainings: list[RawRows] = []
    unread = Unread()
    for of_part, unread_of_part in parts:
        if STEPS_COUNTED in unread_of_part.remarks:
            # The rows of another part may have steps.
            unread_of_part.remarks.remove(STEPS_COUNTED)
            of_part = [[_without_step(row) for row in rows] for rows in of_part]
        trainings += of_part
        unread.add_all(unread_of_part)
    return trainings, unread


def _without_step(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "step"}


def runs_of_text(text: str) -> tuple[dict[str, RawRows], Unread]:
    """Return the runs in console output or in a text with tables, and the rows that are not read.

    Trainings that follow each other have numbers as names. If a text has printed rows and tables, those with more
    values are read. The others, of the same training or of another one, are counted, and so are the lines that look
    like rows and that no reader knows.
    """
    trainings, unread = _trainings_of_parts(text)
    printed = list(itertools.chain.from_iterable(trainings))
    runs: dict[str, RawRows] = {str(number): rows for number, rows in enumerate(trainings, 1)}
    if len(trainings) == 1:
        runs = {"": trainings[0]}
    tables: Rows = []
    if not runs or HEADER_OF_TABLE.search(text):
        unread_of_tables = Unread()
        tables = table_rows(text, unread_of_tables)
        if sum(map(len, tables)) > sum(map(len, printed)):
            runs = {"": tables}
            if printed:
                unread.add("printed row", "the tables of the file have more values", "", len(printed))
            unread.add_all(unread_of_tables)
        elif tables:
            unread.add("row of a table", "the printed rows have more values", "", len(tables))
            unread.add_all(unread_of_tables)
    count_lookalikes(text, [*printed, *tables], unread)
    return runs, unread


def _notes_on_lost_part(text: str, size: int) -> tuple[str, ...]:
    """Return a sentence on zero bytes, which a file system leaves where a part of a file was lost.

    Args:
        text: The text.
        size: The size of the file in bytes.
    """
    zeros = text.count("\0")
    if zeros < FEWEST_ZEROS:
        return ()
    return (f"{format_share(zeros / size)} of the file are zero bytes, as of a part that was lost",)


def read_text(file: Path) -> RawLog:
    """Read console output, or a table or JSON lines with another suffix."""
    text = decode(file)
    runs, unread = runs_of_text(text)
    notes = _notes_on_lost_part(text, file.stat().st_size)
    plain = ESCAPES.sub("", text)
    ending = ending_of(plain, _has_rows)
    if runs:
        return RawLog(runs, notes, unread=unread, ending=ending, saved=saved_steps(plain))

    if text.lstrip().startswith("{"):
        return read_json_lines(file)
    # A line of a console may begin with a bracket too: "[INFO] ...".
    if re.match(r"\s*\[\s*[\[{]", text):
        return read_json(file)
    header = text.partition("\n")[0]
    if re.fullmatch(r"[\w./@ -]++([,;\t][\w./@ -]++)++\s*+", header):
        return read_table(file)
    message = f"{file} is thought to be {_guess_kind(file, text)}: no row of metrics is in it, as a trainer prints them"
    if ending.error:
        message += f"; it ends with an error: {ending.error!r}"
    if file.suffix in CONFIGURATIONS:
        message += "; a configuration or a script is checked by rlvet lint, and is no run"
    raise NoLog(message)


def _has_rows(text: str) -> bool:
    """Return True if a trainer has printed a row of metrics in this text."""
    trainings, _ = printed_trainings(text)
    return bool(trainings)


def _guess_kind(file: Path, text: str) -> str:
    """Return a description of the likely kind of a text."""
    start = text.lstrip()[:200].lower()
    if start.startswith(("<!doctype html", "<html")):
        return "a page of HTML"
    if file.suffix in (".py", ".sh", ".yaml", ".yml", ".toml", ".md", ".ipynb"):
        return f"a file {file.suffix}"
    if re.match(r"(import|from|def|class) ", start):
        return "source code"
    return "a text"


FORMAT = Format(
    kind="console output",
    patterns=("*.log", "*.out", "*.txt"),
    read=read_text,
    example="the console output of a trainer",
    described="console output that was saved or copied",
    written_by=", ".join(console.written_by for console in CONSOLES.values()),
)
