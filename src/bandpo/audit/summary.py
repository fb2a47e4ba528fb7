"""What a run's log amounts to: rates over the whole run, and the gradient on rare tokens."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bandpo.audit.logs import Row
from bandpo.audit.metrics import BINS, COUNTERFACTUALS, RARE

FEW_STEPS = 10
"""Log steps with rare tokens below which no interval is given: so few do not show how much steps differ."""
BOOTSTRAP_SEED = 0
"""One log always gets the same interval."""


@dataclass(frozen=True)
class RareTokens:
    """Positive-advantage tokens below p = 0.1, each counted once for every update on its batch."""

    tokens: float
    blocked: float
    steps: Sequence[tuple[float, float]]
    """For each log step that had any: how much of their gradient was blocked, of how much."""

    @classmethod
    def from_rows(cls, rows: Sequence[Row]) -> RareTokens:
        """What a log says of them."""
        counts = [
            (row.get("audit/tokens_positive_below_0.1", 0.0), row.get("audit/clip_high_below_0.1", 0.0))
            for row in rows
        ]
        masses = [row.get("audit/mass_positive_below_0.1", 0.0) for row in rows]
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
        drawn = stats.bootstrap(
            columns, share, paired=True, method="percentile", batch=100, rng=BOOTSTRAP_SEED
        )
        tokens = stats.binomtest(round(self.blocked), round(self.tokens)).proportion_ci(method="exact")
        return float(drawn.confidence_interval.low), float(max(drawn.confidence_interval.high, tokens.high))


@dataclass(frozen=True)
class RunSummary:
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
    rare: RareTokens
    """What the run's own share in ``blocked_mass`` below p = 0.1 is taken over."""
    counterfactuals: Mapping[str, tuple[float, float]]
    """For each rule tried on the run's tensors: its clip-high and clip-low rates."""

    @property
    def clipped(self) -> float | None:
        """Share of tokens clipped on either side."""
        return None if self.clip_high is None else self.clip_high + (self.clip_low or 0.0)

    @property
    def updates(self) -> float | None:
        """Optimiser steps on each batch: of that many losses one is made before any step, with every ratio 1."""
        return 1 / self.on_policy if self.on_policy else None

    @property
    def audited(self) -> bool:
        """Whether the log holds the audit's metrics."""
        return bool(self.blocked_mass)


def summarize(rows: Sequence[Row]) -> RunSummary:
    """Sum up a log, weighting every rate with what it was taken over.

    >>> rows = [{"step": k, "entropy": 1 / k, "clip_high": 0.0, "clip_low": 0.0} for k in (1, 2, 3, 4)]
    >>> summarize(rows).entropy
    (1.0, 0.25)
    """
    tokens = [row.get("audit/tokens", 1.0) for row in rows]
    calls = [row.get("audit/calls", 1.0) for row in rows]

    mass = {name: [row.get(f"audit/mass_positive_{name}", 0.0) for row in rows] for name in RARE}

    def blocked(prefix: str) -> dict[str, float]:
        found = {name: _mean(rows, f"audit/{prefix}blocked_mass_{name}", mass[name]) for name in RARE}
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
    return RunSummary(
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
            for rule, prefix in {"": "", **{name: f"if/{name}/" for name in COUNTERFACTUALS}}.items()
            if (shares := blocked(prefix))
        },
        rare=RareTokens.from_rows(rows),
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
