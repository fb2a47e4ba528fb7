"""Read JSON lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlvet.errors import InvalidValue
from rlvet.runs.files import read_jsonl
from rlvet.runs.formats._content import by_run, parse_int
from rlvet.runs.formats._format import Format, RawLog
from rlvet.runs.unread import Unread

DECODER = json.JSONDecoder(parse_int=parse_int)


def _parse_line(line: bytes) -> Any:
    """Parse a JSON line in UTF-8. This is faster than `json.loads`, which detects the encoding of each line."""
    text = line.decode()
    value, end = DECODER.raw_decode(text)
    if end < len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    return value


def read_json_lines(file: Path) -> RawLog:
    """Read JSON lines. In those of verl's file logger the metrics are under ``data``, beside ``step``."""
    rows = []
    notes: list[str] = []
    for number, row in read_jsonl(file, parse=_parse_line, notes=notes):
        data: Any = row.get("data", row)
        if not isinstance(data, dict):
            raise InvalidValue(f"{file}, line {number}: data is no object")
        if data is not row:
            data = {**data, **{key: value for key, value in row.items() if key != "data"}}
        rows.append(data)
    unread = Unread()
    return RawLog(by_run(rows, unread), tuple(notes), unread)


FORMAT = Format(
    kind="JSON lines",
    patterns=("*.jsonl", "*.ndjson", "*.jsonl.gz"),
    if_named=("*.gz",),
    read=read_json_lines,
    example="metrics.jsonl or the .jsonl of a file logger",
    described="JSON lines, such as `metrics.jsonl`, `logging.jsonl` and a file logger's; also compressed, `.jsonl.gz`",
    written_by="verl, prime-rl, ROLL, ms-swift, your own",
)
