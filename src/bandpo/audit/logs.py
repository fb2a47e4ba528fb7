"""Read the log of a run, of any framework or tracker, with one name for each quantity, and sum it up."""

from __future__ import annotations

import json
import math
import re
import sqlite3
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bandpo.audit.files import read_jsonl, shipped
from bandpo.audit.metrics import BINS, COUNTERFACTUALS
from bandpo.audit.trackers import TRACKERS, Raw
from bandpo.errors import InvalidValue

Row = Mapping[str, float]

NAMES: Mapping[str, Sequence[str]] = shipped("names")
"""What TRL, verl, SkyRL, prime-rl, slime and bandpo call one quantity, the best source first, whatever a tracker puts
before it: ``train/reward``. ``dead`` is the share of groups without spread, ``cut`` of answers cut off."""
NO_NUMBERS = ("NaN", "Infinity", "-Infinity")
JUDGED = re.compile(r"(^|/)(reward|entropy|\w*loss|grad_norm|kl)$")
"""What must be a number, at the end of its name; other values are NaN in healthy runs, as a mean over no tokens is."""
DETAIL = "audit_detail"
"""Where a row of TRL's log holds those ``audit/…`` metrics that were not sent to the console and to trackers."""
FEW_STEPS = 10
"""Log steps with rare tokens below which no interval is given: so few do not show how much steps differ."""


def read_log(path: str | Path) -> Sequence[Row]:
    """The logged metrics of a run, one row per log step with its ``step``.

    Args:
        path: A run folder (its ``metrics.jsonl``, else the newest ``trainer_state.json`` in it or its checkpoints,
            else what a tracker left there), or one such file: TRL's ``trainer_state.json``, the JSONL of verl's or
            prime-rl's file logger, wandb's ``run-….wandb``, trackio's ``PROJECT.db``, TensorBoard's events.

    A last line that is cut off, as a kill or a run still at work leaves it, is left out with a warning.

    Raises:
        ValueError: there is no such log, or it holds no metrics, or the folder holds several runs; the message says
            what was looked for. A line that cannot be read; the message names it.
    """
    path = Path(path)
    if path.is_dir():
        runs = sorted({file.parent for file in path.rglob("metrics.jsonl")})
        if len(runs) > 1 and path not in runs:
            raise InvalidValue(
                f"{path} holds {len(runs)} runs: name those that you mean, such as {runs[0]}, or if it is a study, "
                f"bandpo-lab study page {path}"
            )
        candidates = [path / "metrics.jsonl", path / "trainer_state.json"]
        candidates += sorted(path.glob("checkpoint-*/trainer_state.json"), key=_checkpoint_step, reverse=True)
        for kind in ("*.jsonl", *TRACKERS):
            candidates += sorted(path.rglob(kind), key=lambda file: file.stat().st_mtime, reverse=True)
        path = next((c for c in candidates if c.is_file()), path)
    if not path.is_file():
        raise InvalidValue(
            f"{path} is no log of a run; give a run folder with metrics.jsonl, trainer_state.json, or what wandb, "
            "trackio or TensorBoard left there, one of these files, or the .jsonl of verl's file logger"
        )
    readers = {"*.json": _trainer_state, **TRACKERS}
    try:
        rows = named_rows(next((read for kind, read in readers.items() if path.match(kind)), _lines)(path))
    except (LookupError, sqlite3.Error, struct.error, UnicodeDecodeError) as error:
        raise InvalidValue(f"{path} is no log of its kind, or a damaged one ({error!r})") from error
    if not rows:
        raise InvalidValue(
            f"{path} logs none of {', '.join(NAMES)}; set logging_steps (TRL) or the file logger (verl)"
        )
    return rows


def _trainer_state(path: Path) -> Raw:
    try:
        history = json.loads(path.read_bytes())["log_history"]
        yield from map(dict, history)
    except (ValueError, LookupError, TypeError) as error:
        raise InvalidValue(f"{path} is no trainer_state.json, or only a part of one ({error!r})") from error


def _lines(path: Path) -> Raw:
    for number, row in read_jsonl(path):
        data: Any = row.get("data", row)  # verl keeps them there
        if not isinstance(data, dict):
            raise InvalidValue(f"{path}, line {number}: data is a {type(data).__name__}, not an object")
        yield {**data, "step": row.get("step")}


def named_rows(raw: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Logged rows with the names of `NAMES` added, without what is no number and without rows that tell nothing.

    What a row holds under `DETAIL` is laid beside the rest.
    """
    rows: list[Row] = []
    for row in raw:
        detail = row.get(DETAIL)
        everything = {**row, **detail} if isinstance(detail, dict) else row
        # trackers write what is no number as text
        values = {k: float(v) for k, v in everything.items() if isinstance(v, int | float) or v in NO_NUMBERS}
        told = {k: v for k, v in values.items() if math.isfinite(v)}
        for name, keys in NAMES.items():
            source = next((found for key in keys for found in told if _is_of(found, key)), None)
            if source is not None:
                told[name] = told[source]
        if any(not math.isfinite(v) and JUDGED.search(k) for k, v in values.items()):
            told["not_finite"] = 1.0
        if "step" in told and any(key in NAMES or "@" in key for key in told):
            rows.append(told)
    return rows


def _is_of(key: str, name: str) -> bool:
    """Whether a logged key is a quantity of training of that name, whatever stands before it."""
    return key == name or (key.endswith(f"/{name}") and not key.startswith(("eval", "val")))


def _checkpoint_step(state: Path) -> int:
    tail = state.parent.name.rpartition("-")[2]
    return int(tail) if tail.isdigit() else -1


@dataclass(frozen=True)
class Summary:
    """What a whole run's log amounts to; fields are None where the log does not tell."""

    steps: int
    metrics: Mapping[str, float]
    """Named as by `Audit.metrics`. A rate is the mean over log steps, each weighted with what it was taken over; what
    rates were taken over is added up. Of another log than the audit's: ``clip_high`` and ``clip_low``, as far as it
    tells them."""
    blocked: Sequence[tuple[float, float]]
    """Of positive-advantage tokens below p = 0.1, for each log step that had any: how much of their gradient was
    blocked, of how much."""

    @property
    def clipped(self) -> float | None:
        """Share of tokens clipped on either side."""
        high = self.metrics.get("clip_high")
        return None if high is None else high + self.metrics.get("clip_low", 0.0)

    @property
    def rare(self) -> tuple[float, float]:
        """How many positive-advantage tokens lie below p = 0.1, each counted once for every update on its batch; and
        how many of them were clipped."""
        tokens = self.metrics.get("tokens_positive_below_0.1", 0.0)
        return tokens, tokens * self.metrics.get("clip_high_below_0.1", 0.0)

    def blocked_interval(self) -> tuple[float, float] | None:
        """Of 95 %, for the share of rare tokens' gradient that is blocked; None with fewer steps than `FEW_STEPS`.

        Tokens of one batch are no independent draws, and a few of them carry most of the gradient, so log steps are
        drawn anew, not tokens. That cannot see what has not happened yet: the upper end is at least the exact binomial
        bound on the share of tokens.
        """
        if len(self.blocked) < FEW_STEPS:
            return None
        from scipy import stats

        from bandpo.audit.interval import bootstrap

        def share(blocked: Any, mass: Any, axis: int) -> Any:
            return blocked.sum(axis) / mass.sum(axis)

        drawn = bootstrap(tuple(zip(*self.blocked, strict=True)), share, paired=True)
        tokens, clipped = self.rare
        exact: Any = stats.binomtest(round(clipped), round(tokens))
        return drawn.low, max(drawn.high, float(exact.proportion_ci(method="exact").high))


_OF_EACH_RULE = {
    **dict.fromkeys(("clip_high", "clip_low"), "tokens"),
    "blocked_mass_below_0.1": "mass_positive_below_0.1",
}
_TAKEN_OVER: Mapping[str, str] = {
    **_OF_EACH_RULE,
    **{f"if/{rule}/{name}": over for rule in COUNTERFACTUALS for name, over in _OF_EACH_RULE.items()},
    **{f"clip_high/{name}": f"tokens_positive/{name}" for name in BINS},
    "clip_high_below_0.1": "tokens_positive_below_0.1",
    **dict.fromkeys(("inert", "on_policy"), "calls"),
    "radius_used": "tokens",
}
"""For each rate that a summary has, what it is taken over."""


def summarize(rows: Sequence[Row]) -> Summary:
    """Sum up a log, weighting every rate with what it was taken over.

    >>> rows = [{"step": k, "clip_high": 0.1 * k, "clip_low": 0.0} for k in (1, 2, 3)]
    >>> round(summarize(rows).clipped, 6)
    0.2
    """

    def column(key: str) -> list[float]:
        default = 1.0 if key in ("tokens", "calls") else 0.0  # logs of others do not tell these two
        return [row.get(f"audit/{key}", default) for row in rows]

    def mean(key: str, over: str) -> float | None:
        """Over the rows that have it; None if none does, or if they weigh nothing."""
        pairs = [(row[key], weight) for row, weight in zip(rows, column(over), strict=True) if key in row]
        total = sum(weight for _, weight in pairs)
        return sum(value * weight for value, weight in pairs) / total if total else None

    found = {
        name: mean(name if name in NAMES else f"audit/{name}", over) for name, over in _TAKEN_OVER.items()
    }
    if found["clip_high"] is None and found["clip_low"] is None:
        found["clip_high"] = mean("clip", "tokens")  # of either side
    if any("audit/tokens" in row for row in rows):
        found |= {name: sum(column(name)) for name in _TAKEN_OVER.values()}
    lost, mass = column("blocked_mass_below_0.1"), column("mass_positive_below_0.1")
    return Summary(
        int(rows[-1]["step"]),
        {name: x for name, x in found.items() if x is not None},
        [(share * m, m) for share, m in zip(lost, mass, strict=True) if m],
    )
