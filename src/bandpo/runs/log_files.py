"""Read logs of every kind of file into rows as they were logged, a list for each run that the file holds."""

from __future__ import annotations

import ast
import csv
import io
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bandpo.errors import BandpoError, InvalidValue
from bandpo.runs.consoles import LONGEST_ROW, ROUNDED_AWAY, console_rows, own_loop_rows, table_rows
from bandpo.runs.files import check_size, read_jsonl
from bandpo.runs.quantities import STEP_KEYS
from bandpo.runs.trackers import read_tensorboard, read_trackio, read_wandb

RawRows = Sequence[Mapping[str, Any]]
"""Rows as they were logged."""


@dataclass(frozen=True)
class RawLog:
    """The rows in a file, as they were logged."""

    runs: Mapping[str, RawRows]
    """The rows of each run, by its name; it is empty where the file names none."""
    notes: tuple[str, ...] = ()
    """What was left out, in sentences."""


LARGEST_TEXT = 2**28
"""Bytes above which a text that is held as a whole is not read."""

MOST_COLUMNS = 2**16
"""Columns of a table that are read."""

MOST_CELLS = 2**26
"""Cells that the runs of a table may have together; each run has the columns of steps."""

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
"""What files begin with that are no log, and what they are thought to be."""

WHAT_TO_GIVE = (
    "give the folder of the run, or one of: metrics.jsonl, trainer_state.json, the .jsonl of a file logger, a CSV, the "
    "console output of a trainer, or what wandb (run-….wandb), trackio (PROJECT.db) or TensorBoard (events.out.…) "
    "left"
)


def read_raw(file: Path) -> RawLog:
    """Read the rows of each run in a file.

    Raises:
        ValueError: if the file is no log; the message says what it is thought to be.
    """
    try:
        reader = _reader_of(file)
        return reader(file)
    except (BandpoError, OSError):
        raise
    except Exception as error:  # whatever damaged bytes, or those of another kind, lead to
        raise InvalidValue(f"{file} is no log of its kind, or a damaged one ({error!r:.300})") from error


def kind_of(file: Path) -> str:
    """Return what kind of log a file's name says that it is, in words."""
    for pattern, kind in KINDS.items():
        if file.match(pattern):
            return kind
    return "text"


KINDS: Mapping[str, str] = {
    "events.out.tfevents.*": "TensorBoard's events",
    "*.wandb": "wandb's history",
    "*.db": "trackio's store",
    "trainer_state.json": "a trainer's state",
    "*.jsonl": "JSON lines",
    "*.ndjson": "JSON lines",
    "*.jsonl.gz": "JSON lines",
    "*.json": "JSON",
    "*.csv": "a table",
    "*.tsv": "a table",
    "*.log": "console output",
    "*.out": "console output",
    "*.txt": "console output",
}
"""For each kind of file its description."""


def _reader_of(file: Path) -> Callable[[Path], RawLog]:
    if file.match("events.out.tfevents.*"):
        check_size(file, LARGEST_TEXT)
        return lambda path: RawLog({"": list(read_tensorboard(path))})
    if file.match("*.wandb"):
        check_size(file, LARGEST_TEXT)
        return lambda path: RawLog({"": list(read_wandb(path))})
    if file.match("*.db"):
        return lambda path: RawLog(read_trackio(path))
    if any(file.match(pattern) for pattern in ("*.gz", "*.jsonl", "*.ndjson")):
        return _read_json_lines
    with file.open("rb") as opened:
        start = opened.read(4096)
    kind = next((kind for magic, kind in MAGIC.items() if start.startswith(magic)), None)
    if kind is None and b"\0" in start and not start.startswith((b"\xff\xfe", b"\xfe\xff")):
        kind = "a binary file"
    if kind is not None:
        raise InvalidValue(f"{file} is thought to be {kind}, and no log of a run; {WHAT_TO_GIVE}")
    if file.match("*.json"):
        return _read_json
    if file.match("*.csv") or file.match("*.tsv"):
        return _read_table
    return _read_text


def _finite(text: str) -> float | None:
    """Return a whole number of a log as a float; None if it is beyond all floats.

    Raises:
        ValueError: if it has more digits than Python reads.
    """
    number = float(text)
    if math.isfinite(number):
        return number
    int(text)  # which refuses thousands of digits
    return None


DECODER = json.JSONDecoder(parse_int=_finite)


def _parse_line(line: bytes) -> Any:
    """Parse a line in UTF-8; `json.loads` would look for the encoding of each."""
    text = line.decode()
    value, end = DECODER.raw_decode(text)
    if end < len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    return value


def _read_json_lines(file: Path) -> RawLog:
    """Read JSON lines, in which verl's file logger keeps the metrics of a line under ``data``."""
    rows = []
    notes: list[str] = []
    for number, row in read_jsonl(file, parse=_parse_line, notes=notes):
        data: Any = row.get("data", row)
        if not isinstance(data, dict):
            raise InvalidValue(f"{file}, line {number}: data is no object")
        if data is not row and "step" in row:
            data = {**data, "step": row["step"]}
        rows.append(data)
    return RawLog(by_run(rows), tuple(notes))


def _read_json(file: Path) -> RawLog:
    """Read one JSON value: a trainer's state, a list of rows, or an object that holds rows or columns."""
    check_size(file, LARGEST_TEXT)
    try:
        content = json.loads(file.read_bytes(), parse_int=_finite)
    except (ValueError, RecursionError) as error:
        if file.name == "trainer_state.json":
            raise InvalidValue(
                f"{file} is no trainer_state.json, or only a part of one ({error!r})"
            ) from error
        with file.open("rb") as opened:
            if opened.readline().rstrip().endswith(b"}"):
                return _read_json_lines(file)
        raise InvalidValue(f"{file} is no JSON, or only a part of one ({error!r}); {WHAT_TO_GIVE}") from error
    if isinstance(content, dict):
        runs = _runs_of_object(content)
        if runs:
            return RawLog(runs)
        lists = [value for value in content.values() if isinstance(value, list) and value]
        rows = next((value for value in lists if isinstance(value[0], dict)), None)
        if isinstance(content.get("log_history"), list):
            content = content["log_history"]
        elif rows is not None:
            content = rows
        elif lists:
            content = _rows_of_columns(content)
    if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
        raise InvalidValue(
            f"{file} is no trainer_state.json, or only a part of one, and holds no list of rows either; {WHAT_TO_GIVE}"
        )
    return RawLog(by_run(content))


def _runs_of_object(content: Mapping[str, Any]) -> dict[str, RawRows]:
    """Return the rows of each run in an object whose values are all of runs, by their names; empty if it is another."""
    runs: dict[str, RawRows] = {}
    for name, value in content.items():
        lists = [rows for rows in value.values() if isinstance(rows, list)] if isinstance(value, dict) else []
        rows = next((rows for rows in lists if rows and all(isinstance(row, dict) for row in rows)), None)
        if rows is None:
            return {}
        runs[name] = rows
    return runs


def _rows_of_columns(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return rows of the longest lists in an object that are of one length."""
    lists = {key: value for key, value in columns.items() if isinstance(value, list)}
    length = max(len(value) for value in lists.values())
    lists = {key: value for key, value in lists.items() if len(value) == length}
    return [{key: value[row] for key, value in lists.items()} for row in range(length)]


def _read_table(file: Path) -> RawLog:
    """Read a CSV: a log of one's own, trackio's, or wandb's export, whose columns are ``RUN - KEY``."""
    text = _text_of(file)
    first_line = text.partition("\n")[0]
    delimiter = max(",;\t", key=first_line.count)
    if first_line.count(delimiter) >= MOST_COLUMNS:
        raise InvalidValue(
            f"{file} has {first_line.count(delimiter) + 1:,} columns, and at most {MOST_COLUMNS:,} are read; give the "
            "part with the metrics"
        )
    table = csv.DictReader(io.StringIO(text), delimiter=delimiter)
    rows = [_numbers_of(row) for row in table]
    if not rows:
        raise InvalidValue(f"{file} is a table without rows; {WHAT_TO_GIVE}")
    exported = [re.fullmatch(r"(.+?) - (.+?)(__MIN|__MAX)?", name) for name in table.fieldnames or ()]
    if not any(exported):
        return RawLog(by_run(rows))

    runs: dict[str, list[dict[str, Any]]] = {}
    by_run_name: dict[str, dict[str, str]] = {}
    for match in exported:
        if match:
            columns = by_run_name.setdefault(match[1], {})
            if not match[3]:
                columns[match[0]] = match[2]
    steps = {key: key for key in rows[0] if " - " not in key}
    cells = len(rows) * (len(exported) + len(by_run_name) * len(steps))
    if cells > MOST_CELLS:
        raise InvalidValue(
            f"{file} has {len(by_run_name):,} runs with {cells:,} cells, and at most {MOST_CELLS:,} are read; give the "
            "part with the runs that you mean"
        )
    for name, columns in sorted(by_run_name.items()):
        runs[name] = [
            {to: row[key] for key, to in (columns | steps).items() if key in row}
            for row in rows
            if any(key in row for key in columns)
        ]
    return RawLog(runs)


def _numbers_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cells of a row, numbers as numbers; empty cells are left out."""
    result: dict[str, Any] = {}
    for key, text in row.items():
        if not isinstance(key, str) or not isinstance(text, str) or not text.strip():
            continue
        # A notebook's table has ``completions / mean_length``.
        key = key.strip().replace(" / ", "/")
        try:
            result[key] = float(text)
        except ValueError:
            result[key] = text
    return result


def _text_of(file: Path) -> str:
    check_size(file, LARGEST_TEXT)
    data = file.read_bytes()
    encoding = "utf-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    return data.decode(encoding, errors="replace")


def _read_text(file: Path) -> RawLog:
    """Read console output, or a table or JSON lines with another ending."""
    text = _text_of(file)
    rows = verl_rows(text) or console_rows(text) or trl_rows(text) or table_rows(text) or own_loop_rows(text)
    if rows:
        return RawLog({"": rows})
    start = text.lstrip()[:1]
    if start == "{":
        return _read_json_lines(file)
    if start == "[":
        return _read_json(file)
    header = text.partition("\n")[0]
    if re.fullmatch(r"[\w./@ -]+([,;\t][\w./@ -]+)+\s*", header):
        return _read_table(file)
    raise InvalidValue(
        f"{file} is thought to be {_guess(file, text)}: no row of metrics is in it, as a trainer prints them; "
        f"{WHAT_TO_GIVE}"
    )


def _guess(file: Path, text: str) -> str:
    """Return what a text is thought to be."""
    start = text.lstrip()[:200].lower()
    if start.startswith(("<!doctype html", "<html")):
        return "a page of HTML"
    if file.suffix in (".py", ".sh", ".yaml", ".yml", ".toml", ".md", ".ipynb"):
        return f"a file {file.suffix}"
    if re.match(r"(import|from|def|class) ", start):
        return "source code"
    return "a text"


# --- Console output ---

VERL_STEP = re.compile(r"\bstep:(\d+) - ([^\n]*)")
"""A line of verl's console logger: ``step:3 - actor/entropy:0.424 - …``."""

PRINTED_NUMBER = re.compile(r"(?:np\.\w+\()?(-?(?:\d[\d_]*\.?\d*(?:e[+-]?\d+)?|nan|inf))\)?", re.I)

SCALED_KEY = re.compile(r"(.+)\((1e-?\d+)\)")
"""A key whose value is printed in units: ``actor/lr(1e-4):0.010``."""


def verl_rows(text: str) -> list[dict[str, Any]]:
    """Return the rows in verl's console output.

    verl rounds to three decimals there, so a learning rate that is printed as 0.000 is left out.

    >>> verl_rows("(TaskRunner pid=1) step:2 - actor/lr:0.000 - critic/score/mean:np.float64(0.5)")
    [{'step': 2, 'critic/score/mean': 0.5}]
    """
    rows = []
    for line in VERL_STEP.finditer(text):
        row: dict[str, Any] = {"step": int(line[1])}
        for part in line[2].split(" - "):
            key, _, printed = part.strip().rpartition(":")
            number = PRINTED_NUMBER.fullmatch(printed.strip())
            if not key or number is None:
                continue
            scaled = SCALED_KEY.fullmatch(key)
            unit = 1.0
            if scaled is not None:
                key, unit = scaled[1], float(scaled[2])
            if re.fullmatch(r"-?0\.000", printed.strip()) and ROUNDED_AWAY.search(key):
                continue
            row[key] = float(number[1]) * unit
        if len(row) > 1:
            rows.append(row)
    return rows


TRL_ROW_OR_PROGRESS = re.compile(r"\{['\"][^{}\n]*\}|\b(\d+)/(\d+) \[")
"""A row that a trainer printed as a dictionary, or the steps on its progress bar."""

PAIR_OF_ROW = re.compile(r"""(['"])[^'"\n]+\1: (?:'[^'\n]*'|"[^"\n]*"|[^\s,'"{}]+)(?=\s*[,}])""")
"""A key and its value in a row; a last value that may be cut off is none, as neither a comma nor a brace follows it."""

FEWEST_PAIRS = 4
"""Pairs from which a line is a part of a row, as it is pasted where its start or its end was cut off."""


def trl_rows(text: str) -> list[dict[str, Any]]:
    """Return the rows in the console output of TRL, ms-swift or another trainer of transformers.

    A row has the step that it names, or else that of the progress bar before it, where there is one that advances.

    >>> trl_rows("{'loss': '0.1', 'reward': nan}")
    [{'loss': 0.1, 'reward': 'NaN', 'step': 1}]
    """
    rows: list[dict[str, Any]] = []
    steps: list[int] = []
    progress = 0
    total = 0
    for line in text.split("\n"):
        has_row = False
        for match in TRL_ROW_OR_PROGRESS.finditer(line):
            if match[1] is not None:
                # Shards and data sets have bars of their own; that of training is the last that began before a row.
                progress, total = int(match[1]), int(match[2])
                continue
            has_row = True
            row = _parse_row(match[0])
            if row:
                rows.append(row)
                steps.append(progress if total > 1 else 0)
        row = {} if has_row else _part_of_row(line)
        if row:
            rows.append(row)
            steps.append(progress if total > 1 else 0)
    advances = len(steps) > 1 and all(before < after for before, after in itertools.pairwise(steps))
    if advances and steps[0] < 1:
        advances = False
    for number, row in enumerate(rows, 1):
        if not any(key in row for key in STEP_KEYS):
            row["step"] = steps[number - 1] if advances else number
    return rows


def _part_of_row(line: str) -> dict[str, Any]:
    """Return the metrics in a line that is a row without its start or its end; empty if it is none."""
    if len(line) > LONGEST_ROW or not ("reward'" in line or 'reward"' in line or "loss" in line):
        return {}
    pairs = [match[0] for match in PAIR_OF_ROW.finditer(line)]
    row = _parse_row("{" + ", ".join(pairs) + "}") if len(pairs) >= FEWEST_PAIRS else {}
    return row if "reward" in row or "loss" in row else {}


def _parse_row(text: str) -> dict[str, Any]:
    """Return a printed dictionary of metrics; empty if it is none."""
    text = re.sub(r"(?<=: )(nan|-?inf)(?=[,}])", lambda match: repr(match[1]), text)
    try:
        row = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return {}
    if not isinstance(row, dict):
        return {}
    result: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, str):
            value = _number_in(value)
        if isinstance(key, str) and isinstance(value, (int, float, str)):
            result[key] = value
    numbers = [value for value in result.values() if not isinstance(value, str)]
    is_metrics = len(numbers) >= 3 or "loss" in result or "reward" in result
    return result if is_metrics else {}


def _number_in(text: str) -> float | str:
    """Return the number that a text is; of ``240/960`` the first; else the text."""
    text = text.strip()
    if text in ("nan", "inf", "-inf"):
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[text]
    count = re.fullmatch(r"(\d+)/\d+", text)
    try:
        return float(count[1] if count else text)
    except ValueError:
        return text


# --- Several runs in one file ---

RUN_KEYS = ("run", "run_id", "run_name", "run_number", "Run", "Name", "experiment", "experiment_name")
"""Keys by which a row names its run."""


def by_run(rows: Iterable[Mapping[str, Any]]) -> Mapping[str, RawRows]:
    """Return the rows of each run, by the name that the rows have for it.

    ms-swift writes its step as ``240/960``, of which the first number is kept.
    """
    rows = list(rows)
    logged: set[str] = set().union(*set(map(tuple, rows)))
    for key in logged & set(RUN_KEYS):
        names = {str(row[key]) for row in rows if isinstance(row.get(key), str)}
        if len(names) > 1:
            return {name: [row for row in rows if str(row.get(key)) == name] for name in sorted(names)}
    progress = "global_step/max_steps"
    if progress in logged:
        rows = [{**row, progress: _number_in(str(row.get(progress, "")))} for row in rows]
    return {"": rows}
