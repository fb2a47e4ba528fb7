"""What several formats share: the first bytes of a file, its text, and the runs in its rows."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlvet.runs.compact_rows import CompactRows, compact
from rlvet.runs.consoles.trl import parse_number
from rlvet.runs.files import check_file
from rlvet.runs.formats._format import NoLog, RawRows
from rlvet.runs.limits import LARGEST_TEXT
from rlvet.runs.quantities import RUN_KEYS
from rlvet.runs.unread import Unread

MAGIC = {
    b"\x89PNG": "an image (PNG)",
    b"\xff\xd8\xff": "an image (JPEG)",
    b"%PDF": "a PDF document",
    b"PK\x03\x04": "a zip archive, such as a checkpoint of torch",
    b"\x1f\x8b": "a gzip archive",
    b"PAR1": "a Parquet table, such as a data set",
    b"ARROW1": "an Arrow file",
    b"GGUF": "weights of a model (GGUF)",
    b"\x80\x02": "a pickle",
    b"\x80\x04": "a pickle",
    b"\x7fELF": "a program",
}
"""The first bytes of files that are no log, with a description of each kind."""


EVENT = b"brain.Event:"
"""What the first record of an events file of TensorBoard has."""


LOST = re.compile(rb"\0{16,}")
"""A part of a text that a file system lost."""


def check_content(file: Path) -> None:
    """Check that a file is a text.

    Raises:
        NoLog: if its first bytes are those of another kind of file.
    """
    with file.open("rb") as stream:
        start = stream.read(4096)
    if EVENT in start[:64]:
        raise NoLog(
            f"{file} is an events file of TensorBoard under another name: rename it to events.out.tfevents.1"
        )
    kind = next((kind for magic, kind in MAGIC.items() if start.startswith(magic)), None)
    # A text in UTF-16, which begins with a byte order mark, contains zero bytes too, and so does one of which the file
    # system lost a part.
    rest = LOST.sub(b"", start)
    is_binary = b"\0" in rest or len(rest) < len(start) / 16
    if kind is None and is_binary and not start.startswith((b"\xff\xfe", b"\xfe\xff")):
        kind = "a binary file"
    if kind is not None:
        raise NoLog(f"{file} is thought to be {kind}, and no log of a run")


def decode(file: Path) -> str:
    """Return the text of a file in UTF-8 or UTF-16.

    Raises:
        NoLog: if its first bytes are those of another kind of file.
    """
    check_content(file)
    check_file(file, LARGEST_TEXT)
    data = file.read_bytes()
    encoding = "utf-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    return data.decode(encoding, errors="replace")


def parse_int(text: str) -> float | None:
    """Return an integer of a log as a float; None if it is larger than every float.

    Raises:
        ValueError: if it has more digits than Python parses.
    """
    number = float(text)
    if math.isfinite(number):
        return number
    int(text)  # raises the ValueError
    return None


def by_run(rows: Iterable[Mapping[str, Any]], unread: Unread) -> Mapping[str, RawRows]:
    """Return the rows of each run, by its name; all rows under an empty name if they do not name several runs.

    ms-swift's step, such as ``240/960``, becomes the number 240.

    Args:
        rows: The rows.
        unread: The object to which rows are added that name no run, if others do.
    """
    rows = compact(rows)
    logged: set[str] = set().union(*rows.layouts)
    for key in logged & set(RUN_KEYS):
        runs: dict[str, CompactRows] = {}
        others: list[Mapping[str, Any]] = []
        for row in rows:
            if isinstance(row.get(key), str):
                runs.setdefault(row[key], CompactRows()).append(row)
            else:
                others.append(row)
        if len(runs) > 1:
            if others:
                unread.add("row", f"it names no run under {key}", str(dict(others[0])), len(others))
            return dict(sorted(runs.items()))
    progress = "global_step/max_steps"
    if progress in logged:
        rows = CompactRows({**row, progress: parse_number(str(row.get(progress, "")))} for row in rows)
    return {"": rows}
