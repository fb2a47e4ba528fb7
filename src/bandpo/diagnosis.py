"""What the log of a finished or running run says about its clip: read from any of three formats, judged, and drawn."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bandpo._files import read_jsonl
from bandpo.audit import BINS, COUNTERFACTUALS, RARE
from bandpo.watch import ENTROPY_LEFT, ENTROPY_RISE

Row = Mapping[str, float]

NAMES = {
    "entropy": ("entropy", "actor/entropy", "actor/entropy_loss", "audit/entropy"),
    "reward": ("reward", "critic/score/mean", "critic/rewards/mean"),
    "clip_high": ("audit/clip_high", "actor/clip_high", "clip_ratio/high_mean", "cispo_clip_ratio"),
    "clip_low": ("audit/clip_low", "actor/clip_low", "clip_ratio/low_mean"),
    "clip": ("clip_ratio/region_mean", "actor/pg_clipfrac"),
}
"""What bandpo, TRL and verl call one quantity, the best source first."""
STARVED = 0.05
"""Share of the gradient on rare tokens from which blocking it is called a fault: a rule of thumb."""
FEW_STEPS = 10
"""Log steps with rare tokens below which no interval is given: so few do not show how much steps differ."""
RESAMPLED = 0
"""Seed of the bootstrap: one log always gets the same verdict."""


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
        raise ValueError(
            f"{path} is no log of a run; give a run folder with metrics.jsonl or trainer_state.json, one of these "
            "files, or the .jsonl of verl's file logger"
        )
    rows = named_rows(_trainer_state(path) if path.suffix == ".json" else _lines(path))
    if not rows:
        raise ValueError(
            f"{path} logs none of {', '.join(NAMES)}; set logging_steps (TRL) or the file logger (verl)"
        )
    return rows


def _trainer_state(path: Path) -> Sequence[Mapping[str, Any]]:
    try:
        history = json.loads(path.read_bytes())["log_history"]
        return [dict(row) for row in history]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is no trainer_state.json, or only a part of one ({error!r})") from error


def _lines(path: Path) -> Iterator[Mapping[str, Any]]:
    for number, row in read_jsonl(path):
        data: Any = row.get("data", row)  # verl keeps them there
        if not isinstance(data, dict):
            raise ValueError(f"{path}, line {number}: data is a {type(data).__name__}, not an object")
        yield {**data, "step": row.get("step")}


def named_rows(raw: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Logged rows with the names of `NAMES` added, without what is no number and without rows that tell nothing."""
    rows = [_numbers(row) for row in raw]
    rows = [row | {name: value for name in NAMES if (value := _named(row, name)) is not None} for row in rows]
    return [
        row for row in rows if "step" in row and (row.keys() & NAMES.keys() or any("@" in k for k in row))
    ]


def _checkpoint_step(state: Path) -> int:
    tail = state.parent.name.rpartition("-")[2]
    return int(tail) if tail.isdigit() else -1


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {k: float(v) for k, v in row.items() if isinstance(v, int | float) and math.isfinite(v)}


def _named(row: Row, name: str) -> float | None:
    return next((row[key] for key in NAMES[name] if key in row), None)


@dataclass(frozen=True)
class Rare:
    """Positive-advantage tokens below p = 0.1, each counted once for every update on its batch."""

    tokens: float
    blocked: float
    steps: Sequence[tuple[float, float]]
    """For each log step that had any: how much of their gradient was blocked, of how much."""

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Rare:
        """What a log says of them."""
        bins = BINS[: RARE["below_0.1"]]
        counts = [
            (row.get(f"audit/tokens_positive/{name}", 0.0), row.get(f"audit/clip_high/{name}", 0.0))
            for row in rows
            for name in bins
        ]
        masses = [sum(row.get(f"audit/mass_positive/{name}", 0.0) for name in bins) for row in rows]
        return cls(
            sum(tokens for tokens, _ in counts),
            sum(tokens * rate for tokens, rate in counts),
            [
                (row.get("audit/blocked_mass_below_0.1", 0.0) * mass, mass)
                for row, mass in zip(rows, masses, strict=True)
                if mass
            ],
        )

    def interval(self) -> tuple[float, float] | None:
        """Of 95 %, for the share of their gradient that is blocked; None where log steps are fewer than `FEW_STEPS`.

        Tokens of one batch are no independent draws, and a few of them carry most of the gradient, so log steps are
        drawn anew, not tokens (percentile bootstrap). That cannot see what has not happened yet: the upper end is at
        least the exact binomial bound on the share of tokens.
        """
        if len(self.steps) < FEW_STEPS:
            return None
        stats: Any = importlib.import_module("scipy.stats")  # has no types

        def share(blocked: Any, mass: Any, axis: int) -> Any:
            return blocked.sum(axis) / mass.sum(axis)

        columns = tuple(zip(*self.steps, strict=True))
        drawn = stats.bootstrap(columns, share, paired=True, method="percentile", batch=100, rng=RESAMPLED)
        tokens = stats.binomtest(round(self.blocked), round(self.tokens)).proportion_ci(method="exact")
        return float(drawn.confidence_interval.low), float(max(drawn.confidence_interval.high, tokens.high))


@dataclass(frozen=True)
class Diagnosis:
    """What a whole run's log amounts to; fields are None where the log does not tell."""

    steps: int
    clip_high: float | None
    clip_low: float | None
    inert: float | None
    """Share of losses without a clipped token."""
    on_policy: float | None
    radius_used: float | None
    entropy: tuple[float, float] | None
    """At the start and at the end."""
    reward: tuple[float, float] | None
    clip_high_by_bin: Mapping[str, tuple[float, float]]
    """For each bin of old probability the clip-high rate, and the positive tokens it was taken over."""
    blocked_mass: Mapping[str, Mapping[str, float]]
    """For each rule ("" for the run's own) and each of `RARE`: share of the positive gradient that it blocks."""
    rare: Rare
    """What the run's own share in ``blocked_mass`` below p = 0.1 is taken over."""
    counterfactuals: Mapping[str, tuple[float, float]]
    """For each rule tried on the run's tensors: its clip-high and clip-low rates."""

    @property
    def audited(self) -> bool:
        """Whether the log holds the audit's metrics."""
        return bool(self.blocked_mass)


def diagnose(rows: Sequence[Row]) -> Diagnosis:
    """Sum up a log, weighting every rate with what it was taken over.

    >>> rows = [{"step": k, "entropy": 1 / k, "clip_high": 0.0, "clip_low": 0.0} for k in (1, 2, 3, 4)]
    >>> diagnose(rows).entropy
    (1.0, 0.25)
    """
    tokens = [row.get("audit/tokens", 1.0) for row in rows]
    calls = [row.get("audit/calls", 1.0) for row in rows]

    def mass(rare: int) -> list[float]:
        return [sum(row.get(f"audit/mass_positive/{name}", 0.0) for name in BINS[:rare]) for row in rows]

    def blocked(prefix: str) -> dict[str, float]:
        found = {
            name: _mean(rows, f"audit/{prefix}blocked_mass_{name}", mass(count))
            for name, count in RARE.items()
        }
        return {name: share for name, share in found.items() if share is not None}

    by_bin: dict[str, tuple[float, float]] = {}
    for name in BINS:
        positive = [row.get(f"audit/tokens_positive/{name}", 0.0) for row in rows]
        rate = _mean(rows, f"audit/clip_high/{name}", positive)
        if rate is not None:
            by_bin[name] = (rate, sum(positive))
    would = {
        name: (high, low)
        for name in COUNTERFACTUALS
        if (high := _mean(rows, f"audit/if/{name}/clip_high", tokens)) is not None
        and (low := _mean(rows, f"audit/if/{name}/clip_low", tokens)) is not None
    }
    either = _mean(rows, "clip", tokens)
    high, low = _mean(rows, "clip_high", tokens), _mean(rows, "clip_low", tokens)
    return Diagnosis(
        steps=int(rows[-1]["step"]),
        clip_high=either if high is None and low is None else high,
        clip_low=low,
        inert=_mean(rows, "audit/inert", calls),
        on_policy=_mean(rows, "audit/on_policy", calls),
        radius_used=_mean(rows, "audit/radius_used", tokens),
        entropy=_ends(rows, "entropy"),
        reward=_ends(rows, "reward"),
        clip_high_by_bin=by_bin,
        blocked_mass={
            rule: shares
            for rule, prefix in {"": "", **{name: f"if/{name}/" for name in would}}.items()
            if (shares := blocked(prefix))
        },
        rare=Rare.of(rows),
        counterfactuals=would,
    )


def _mean(rows: Sequence[Row], key: str, weights: Sequence[float]) -> float | None:
    """Mean of ``key`` over the rows that have it; None if none does, or if they weigh nothing."""
    pairs = [(row[key], weight) for row, weight in zip(rows, weights, strict=True) if key in row]
    total = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / total if total else None


def _ends(rows: Sequence[Row], key: str) -> tuple[float, float] | None:
    """Means over the first and the last tenth of the run (at least one row)."""
    values = [row[key] for row in rows if key in row]
    n = max(1, len(values) // 10)
    return (sum(values[:n]) / n, sum(values[-n:]) / n) if values else None


@dataclass(frozen=True)
class Finding:
    """One answer: a question, the verdict on it, and what to try."""

    question: str
    ok: bool | None
    """None where the log cannot tell."""
    answer: str
    try_next: str = ""


def findings(d: Diagnosis) -> list[Finding]:
    """The answers to: does the clip act, does it suppress rare tokens, is entropy lost, is the step the right size."""
    return [check(d) for check in CHECKS]


def _acts(d: Diagnosis) -> Finding:
    question = "Does the clip act?"
    clipped = None if d.clip_high is None else d.clip_high + (d.clip_low or 0.0)
    if clipped is None:
        return Finding(question, None, "no clip rate was logged")
    if d.on_policy == 1:
        return Finding(
            question,
            False,
            "never: every ratio was exactly 1, the old policy is the current one",
            "use each batch for more than one optimiser step; until then no rule makes a difference",
        )
    if clipped == 0:
        return Finding(
            question,
            False,
            "never: no token was clipped",
            "more updates per batch (TRL's default is one), a larger learning rate, or a tighter rule",
        )
    idle = "" if d.inert is None else f"; {d.inert:.0%} of losses had no clipped token"
    return Finding(question, True, f"yes, on {clipped:.2%} of tokens{idle}")


def _rare(d: Diagnosis) -> Finding:
    question = "Does it suppress rare tokens?"
    if not d.audited:
        return Finding(
            question,
            None,
            "the log does not say",
            "train with AuditedGRPOTrainer in place of GRPOTrainer, which logs it and changes nothing else",
        )
    own = d.blocked_mass[""].get("below_0.1")
    if own is None:
        return Finding(question, None, "no token below p = 0.1 had a positive advantage")
    band = d.blocked_mass.get("Band", {}).get("below_0.1")
    beside = "" if band is None else f"; Band, on the same tensors, {band:.1%}"
    interval = d.rare.interval()
    within = f" [{interval[0]:.1%}, {interval[1]:.1%}]" if interval else ""
    answer = f"it blocks {own:.1%}{within} of the gradient that would raise tokens below p = 0.1{beside}"
    answer += f" ({d.rare.blocked:.0f} of {d.rare.tokens:.0f} such tokens)"
    if interval is None:
        return Finding(question, None, f"{answer}, in {len(d.rare.steps)} log steps: too few to tell")
    if interval[0] > STARVED:
        wider = band is not None and band < 0.5 * own
        smaller = "smaller steps (learning rate, fewer updates per batch) before a wider rule"
        return Finding(question, False, answer, "clip='Band(KL(), 0.05)'" if wider else smaller)
    if interval[1] > STARVED:
        return Finding(question, None, f"{answer}: too few to tell whether it is more than {STARVED:.0%}")
    return Finding(question, True, answer)


def _entropy(d: Diagnosis) -> Finding:
    question = "Is it losing entropy?"
    if d.entropy is None:
        return Finding(question, None, "no entropy was logged")
    first, last = d.entropy
    answer = f"{first:.3g} → {last:.3g} nats per token"
    earned = d.reward is not None and d.reward[1] > d.reward[0] + 0.1 * abs(d.reward[0])
    if d.reward is not None:
        answer += f", while the reward went {d.reward[0]:.3g} → {d.reward[1]:.3g}"
    if last > max(ENTROPY_RISE * first, first + 1):
        return Finding(
            question,
            False,
            answer + ": it drifts towards noise",
            "a smaller radius, max_ratio, or learning rate",
        )
    if last < ENTROPY_LEFT * first:
        if earned:
            return Finding(
                question,
                True,
                answer + ": nearly all spent, but it was earned; little exploration is left",
                "if the reward should still rise: a tighter lower bound, or an entropy bonus",
            )
        return Finding(
            question,
            False,
            answer + ": collapsed, and nothing was earned",
            "a wider upper bound for rare tokens (Band), a tighter lower bound, a smaller learning rate",
        )
    return Finding(question, True, answer)


def _movement(d: Diagnosis) -> Finding:
    question = "Is the step the right size?"
    if d.radius_used is None:
        return Finding(question, None, "the log does not say")
    answer = f"a token spends on average {d.radius_used:.1%} of the radius"
    if d.radius_used > 1:
        return Finding(
            question, False, answer, "smaller steps: the updates leave the trust region before the clip acts"
        )
    if d.radius_used < 1e-3:
        return Finding(
            question, False, answer, "larger steps or a smaller radius: the rule hardly matters here"
        )
    return Finding(question, True, answer)


CHECKS: tuple[Callable[[Diagnosis], Finding], ...] = (_acts, _rare, _entropy, _movement)
