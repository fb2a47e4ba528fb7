"""Read JSON lines."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlvet.errors import InvalidValue
from rlvet.runs.compact_rows import CompactRows
from rlvet.runs.files import read_jsonl
from rlvet.runs.formats._content import by_run, parse_int
from rlvet.runs.formats._format import Format, RawLog
from rlvet.runs.unread import Unread

OF_FILE_LOGGER = {"step", "data"}
"""The keys of a row of verl's file logger, which writes NaN and infinite values as null: it uses orjson."""
DECODER: Any = json.JSONDecoder(parse_int=parse_int)  # type stubs do not have its method


def _parse_line(line: bytes) -> Any:
    """Parse a JSON line in UTF-8. This is faster than `json.loads`, which detects the encoding of each line."""
    text = line.decode()
    try:
        value, end = DECODER.scan_once(text, 0)
    except StopIteration as error:
        raise json.JSONDecodeError("Expecting value", text, error.value) from None
    if end < len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    return value


def read_json_lines(file: Path) -> RawLog:
    """Read JSON lines.

    In those of verl's file logger the metrics are under ``data``, beside ``step``, and null is a number that is not
    finite.
    """
    notes: list[str] = []
    rows = CompactRows(_rows(file, notes))
    unread = Unread()
    return RawLog(by_run(rows, unread), tuple(notes), unread)


def _rows(file: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the metrics of each line, and add a sentence to the notes if the last one is left out."""
    for number, row in read_jsonl(file, parse=_parse_line, notes=notes):
        if "data" not in row:
            yield row
            continue
        data: Any = row["data"]
        if not isinstance(data, dict):
            raise InvalidValue(f"{file}, line {number}: data is no object")
        if row.keys() == OF_FILE_LOGGER:
            data = {key: math.nan if value is None else value for key, value in data.items()}
        yield {**data, **{key: value for key, value in row.items() if key != "data"}}


FORMAT = Format(
    kind="JSON lines",
    patterns=("*.jsonl", "*.ndjson", "*.jsonl.gz"),
    if_named=("*.gz",),
    read=read_json_lines,
    example="metrics.jsonl or the .jsonl of a file logger",
    described="JSON lines, such as `metrics.jsonl`, `logging.jsonl` and a file logger's; also compressed, `.jsonl.gz`",
    written_by="verl, prime-rl, ROLL, ms-swift, your own",
)
