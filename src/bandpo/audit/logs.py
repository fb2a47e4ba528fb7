"""Read the log of a run, of TRL, verl or bandpo, with one name for each quantity."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bandpo.audit.files import read_jsonl
from bandpo.errors import InvalidValue

Row = Mapping[str, float]

NAMES = {
    "entropy": ("entropy", "actor/entropy", "actor/entropy_loss", "audit/entropy"),
    "reward": ("reward", "critic/score/mean", "critic/rewards/mean"),
    "clip_high": ("audit/clip_high", "actor/clip_high", "clip_ratio/high_mean", "cispo_clip_ratio"),
    "clip_low": ("audit/clip_low", "actor/clip_low", "clip_ratio/low_mean"),
    "clip": ("clip_ratio/region_mean", "actor/pg_clipfrac"),
}
"""What bandpo, TRL and verl call one quantity, the best source first."""
DETAIL = "audit_detail"
"""Where a row of TRL's log holds those ``audit/…`` metrics that were not sent to the console and to trackers."""


def read_log(path: str | Path) -> Sequence[Row]:
    """The logged metrics of a run, one row per log step with its ``step``.

    Args:
        path: A run folder (its ``metrics.jsonl``, else the newest ``trainer_state.json`` in it or its checkpoints),
            a TRL ``trainer_state.json``, a ``metrics.jsonl``, or the JSONL of verl's file logger.

    A last line that is cut off, as a kill or a run still at work leaves it, is left out with a warning.

    Raises:
        ValueError: there is no such log, or it holds no metrics; the message says what was looked for. A line that
            cannot be read; the message names it.
    """
    path = Path(path)
    if path.is_dir():
        candidates = [path / "metrics.jsonl", path / "trainer_state.json"]
        candidates += sorted(path.glob("checkpoint-*/trainer_state.json"), key=_checkpoint_step, reverse=True)
        path = next((c for c in candidates if c.is_file()), path)
    if not path.is_file():
        raise InvalidValue(
            f"{path} is no log of a run; give a run folder with metrics.jsonl or trainer_state.json, one of these "
            "files, or the .jsonl of verl's file logger"
        )
    rows = named_rows(_trainer_state(path) if path.suffix == ".json" else _lines(path))
    if not rows:
        raise InvalidValue(
            f"{path} logs none of {', '.join(NAMES)}; set logging_steps (TRL) or the file logger (verl)"
        )
    return rows


def _trainer_state(path: Path) -> Sequence[Mapping[str, Any]]:
    try:
        history = json.loads(path.read_bytes())["log_history"]
        return [dict(row) for row in history]
    except (ValueError, LookupError, TypeError) as error:
        raise InvalidValue(f"{path} is no trainer_state.json, or only a part of one ({error!r})") from error


def _lines(path: Path) -> Iterator[Mapping[str, Any]]:
    for number, row in read_jsonl(path):
        data: Any = row.get("data", row)  # verl keeps them there
        if not isinstance(data, dict):
            raise InvalidValue(f"{path}, line {number}: data is a {type(data).__name__}, not an object")
        yield {**data, "step": row.get("step")}


def named_rows(raw: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Logged rows with the names of `NAMES` added, without what is no number and without rows that tell nothing.

    What a row holds under `DETAIL` is laid beside the rest.
    """
    rows = [_numbers(_unfolded(row)) for row in raw]
    rows = [row | {name: value for name in NAMES if (value := _named(row, name)) is not None} for row in rows]
    return [
        row for row in rows if "step" in row and (row.keys() & NAMES.keys() or any("@" in k for k in row))
    ]


def _checkpoint_step(state: Path) -> int:
    tail = state.parent.name.rpartition("-")[2]
    return int(tail) if tail.isdigit() else -1


def _unfolded(row: Mapping[str, Any]) -> Mapping[str, Any]:
    detail = row.get(DETAIL)
    return {**row, **detail} if isinstance(detail, dict) else row


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {k: float(v) for k, v in row.items() if isinstance(v, int | float) and math.isfinite(v)}


def _named(row: Row, name: str) -> float | None:
    return next((row[key] for key in NAMES[name] if key in row), None)
