"""Read the log of a run, of any framework or tracker, with one name for each quantity."""

from __future__ import annotations

import json
import math
import re
import sqlite3
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bandpo.errors import InvalidValue
from bandpo.runs.files import read_jsonl, shipped
from bandpo.runs.trackers import TRACKERS, Raw

Row = Mapping[str, float]
"""The metrics of one log step."""

NAMES: Mapping[str, Sequence[str]] = shipped("names")
"""For each quantity the keys under which TRL, verl, SkyRL, prime-rl, slime and bandpo log it, the best source first.
A tracker may put a prefix before a key: ``train/reward``. ``dead`` is the share of groups without spread, ``cut`` of
answers that were cut off."""

NO_NUMBERS = ("NaN", "Infinity", "-Infinity")
"""Texts by which trackers write a value that is not finite."""

MUST_BE_FINITE = re.compile(r"(^|/)(reward|entropy|\w*loss|grad_norm|kl)$")
"""Keys whose values are finite in a healthy run. Others may be NaN, such as a mean over no tokens."""

DETAIL = "audit_detail"
"""The key of a row of TRL's log that holds the ``audit/…`` metrics which were not sent to the trackers."""


def find_log(path: Path) -> Path:
    """Return the file of a run's log.

    Args:
        path: A run folder (its ``metrics.jsonl``, else the newest ``trainer_state.json`` in it or in its checkpoints,
            else what a tracker left there), or the file itself.

    Raises:
        ValueError: if there is no log, or the folder holds several runs.
    """
    if path.is_dir():
        runs = sorted({file.parent for file in path.rglob("metrics.jsonl")})
        if len(runs) > 1 and path not in runs:
            raise InvalidValue(
                f"{path} holds {len(runs)} runs: name those that you mean, such as {runs[0]}, or if it is a study, "
                f"bandpo-lab study page {path}"
            )
        candidates = [path / "metrics.jsonl", path / "trainer_state.json"]
        candidates += sorted(path.glob("checkpoint-*/trainer_state.json"), key=_checkpoint_step, reverse=True)
        for pattern in ("*.jsonl", *TRACKERS):
            candidates += sorted(path.rglob(pattern), key=lambda file: file.stat().st_mtime, reverse=True)
        path = next((candidate for candidate in candidates if candidate.is_file()), path)
    if not path.is_file():
        raise InvalidValue(
            f"{path} is no log of a run; give a run folder with metrics.jsonl, trainer_state.json, or what wandb, "
            "trackio or TensorBoard left there, one of these files, or the .jsonl of verl's file logger"
        )
    return path


def read_log(path: str | Path) -> Sequence[Row]:
    """Read the logged metrics of a run, one row per log step with its ``step``.

    A last line that is cut off, as a kill or a run still at work leaves it, is left out with a warning.

    Args:
        path: A run folder or a log, see `find_log`: TRL's ``trainer_state.json``, the JSONL of verl's or prime-rl's
            file logger, wandb's ``run-….wandb``, trackio's ``PROJECT.db``, TensorBoard's events.

    Raises:
        ValueError: if there is no such log, it holds no metrics, the folder holds several runs, or a line cannot be
            read; the message names it.
    """
    file = find_log(Path(path))
    readers = {"*.json": _read_trainer_state, **TRACKERS}
    reader = next((read for pattern, read in readers.items() if file.match(pattern)), _read_lines)
    try:
        rows = named_rows(reader(file))
    except (LookupError, sqlite3.Error, struct.error, UnicodeDecodeError) as error:
        raise InvalidValue(f"{file} is no log of its kind, or a damaged one ({error!r})") from error
    if not rows:
        raise InvalidValue(
            f"{file} logs none of {', '.join(NAMES)}; set logging_steps (TRL) or the file logger (verl)"
        )
    return rows


def _read_trainer_state(path: Path) -> Raw:
    try:
        history = json.loads(path.read_bytes())["log_history"]
        yield from map(dict, history)
    except (ValueError, LookupError, TypeError) as error:
        raise InvalidValue(f"{path} is no trainer_state.json, or only a part of one ({error!r})") from error


def _read_lines(path: Path) -> Raw:
    for number, row in read_jsonl(path):
        data: Any = row.get("data", row)  # verl's file logger keeps the metrics under this key
        if not isinstance(data, dict):
            raise InvalidValue(f"{path}, line {number}: data is a {type(data).__name__}, not an object")
        yield {**data, "step": row.get("step")}


def named_rows(raw: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Return logged rows with the names of `NAMES` added.

    Values that are no numbers are left out, and so are rows that hold none of the quantities. The metrics that a row
    holds under `DETAIL` are added to the row.
    """
    rows: list[Row] = []
    for logged in raw:
        detail = logged.get(DETAIL)
        everything = {**logged, **detail} if isinstance(detail, dict) else logged
        values = {}
        for key, value in everything.items():
            if isinstance(value, int | float) or value in NO_NUMBERS:
                values[key] = float(value)
        row = {key: value for key, value in values.items() if math.isfinite(value)}

        for name, keys in NAMES.items():
            source = _source_of(keys, row)
            if source is not None:
                row[name] = row[source]
        if any(not math.isfinite(value) and MUST_BE_FINITE.search(key) for key, value in values.items()):
            row["not_finite"] = 1.0
        if "step" in row and any(key in NAMES or "@" in key for key in row):
            rows.append(row)
    return rows


def _source_of(keys: Sequence[str], row: Row) -> str | None:
    """Return the logged key that is the best source of a quantity; None if the row has none."""
    for key in keys:
        for logged_key in row:
            if _is_named(logged_key, key):
                return logged_key
    return None


def _is_named(logged_key: str, key: str) -> bool:
    """Check whether a logged key is a key of training, with or without a prefix."""
    if logged_key == key:
        return True
    return logged_key.endswith(f"/{key}") and not logged_key.startswith(("eval", "val"))


def _checkpoint_step(state: Path) -> int:
    step = state.parent.name.rpartition("-")[2]
    return int(step) if step.isdigit() else -1
