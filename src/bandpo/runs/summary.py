"""Sum up a log: rates over the whole run, and how sure the share of blocked gradient is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from bandpo.runs.metric_names import BINS, COUNTERFACTUALS
from bandpo.runs.quantities import QUANTITIES, Row

FEW_STEPS = 10
"""Log steps with rare tokens below which no interval is given: so few do not show how much steps differ."""


@dataclass(frozen=True)
class Summary:
    """Summary of the log of a whole run. A property is None where the log does not tell."""

    steps: int
    """The last step."""
    metrics: Mapping[str, float]
    """Named as by `bandpo.Audit.metrics`. A rate is the mean over log steps, each weighted with what it was taken over;
    what rates were taken over is added up. Of a log without the audit: ``clip_high`` and ``clip_low``, as far as it has
    them."""
    blocked: Sequence[tuple[float, float]]
    """For each log step with tokens of A > 0 below p = 0.1: the gradient on them that was blocked, and all of it."""

    @property
    def clipped(self) -> float | None:
        """Share of tokens clipped on either side."""
        high = self.metrics.get("clip_high")
        return None if high is None else high + self.metrics.get("clip_low", 0.0)

    @property
    def rare(self) -> tuple[float, float]:
        """Number of tokens of A > 0 below p = 0.1, and how many of them were clipped.

        A token counts once for every update on its batch.
        """
        tokens = self.metrics.get("tokens_positive_below_0.1", 0.0)
        return tokens, tokens * self.metrics.get("clip_high_below_0.1", 0.0)

    def blocked_interval(self) -> tuple[float, float] | None:
        """Compute a 95 % interval of the blocked share of the gradient on rare tokens.

        The share is Σ blocked / Σ all over log steps. Tokens of one batch are no independent draws, and a few of them
        carry most of the gradient, so its standard error is that of a ratio over log steps, not over tokens. That error
        cannot see what has not happened yet, so the upper end is at least Wilson's upper bound on the share of tokens
        that were clipped.

        Returns:
            The two ends; None with fewer log steps than `FEW_STEPS`.
        """
        n = len(self.blocked)
        if n < FEW_STEPS:
            return None
        total = sum(mass for _, mass in self.blocked)
        share = sum(blocked for blocked, _ in self.blocked) / total
        squares = sum((blocked - share * mass) ** 2 for blocked, mass in self.blocked)
        error = math.sqrt(n / (n - 1) * squares) / total
        reach = _student_quantile(n - 1) * error
        tokens, clipped = self.rare
        low = max(0.0, share - reach)
        high = min(1.0, share + reach)
        return low, max(high, _wilson_upper(clipped, tokens, NormalDist().inv_cdf(0.975)))


def _student_quantile(degrees: int) -> float:
    """Compute the 97.5 % quantile of Student's distribution by its expansion around the normal one.

    From 9 degrees of freedom on it is right to within 0.001.

    >>> round(_student_quantile(9), 3), round(_student_quantile(30), 3)
    (2.262, 2.042)
    """
    z = NormalDist().inv_cdf(0.975)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3


def _wilson_upper(successes: float, trials: float, z: float) -> float:
    """Compute the upper end of Wilson's interval for a share."""
    if not trials:
        return 0.0
    share = successes / trials
    centre = share + z**2 / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + z**2 / (4 * trials**2))
    return (centre + spread) / (1 + z**2 / trials)


_WEIGHTS_OF_A_RULE = {
    "clip_high": "tokens",
    "clip_low": "tokens",
    "blocked_mass_below_0.1": "mass_positive_below_0.1",
}
"""For each rate of a rule, what it is taken over."""

_WEIGHTS: Mapping[str, str] = {
    **_WEIGHTS_OF_A_RULE,
    **{f"if/{rule}/{name}": over for rule in COUNTERFACTUALS for name, over in _WEIGHTS_OF_A_RULE.items()},
    **{f"clip_high/{name}": f"tokens_positive/{name}" for name in BINS},
    "clip_high_below_0.1": "tokens_positive_below_0.1",
    "inert": "calls",
    "on_policy": "calls",
    "radius_used": "tokens",
}
"""For each rate of a summary, what it is taken over."""


def summarize(rows: Sequence[Row]) -> Summary:
    """Sum up a log, weighting every rate with what it was taken over.

    >>> rows = [{"step": k, "clip_high": 0.1 * k, "clip_low": 0.0} for k in (1, 2, 3)]
    >>> round(summarize(rows).clipped, 6)
    0.2
    """
    logged: set[str] = set().union(*set(map(tuple, rows)))
    metrics: dict[str, float | None] = {}
    for name, over in _WEIGHTS.items():
        key = name if name in QUANTITIES else f"audit/{name}"
        # Most logs have no audit, and a pass over 100,000 rows for each of its metrics takes seconds.
        metrics[name] = _weighted_mean(rows, key, over) if key in logged else None
    if metrics["clip_high"] is None and metrics["clip_low"] is None and "clip" in logged:
        metrics["clip_high"] = _weighted_mean(rows, "clip", "tokens")  # a rate of both sides
    if "audit/tokens" in logged:
        for name in _WEIGHTS.values():
            metrics[name] = sum(_column(rows, name))

    blocked = []
    if "audit/mass_positive_below_0.1" in logged:
        shares = _column(rows, "blocked_mass_below_0.1")
        masses = _column(rows, "mass_positive_below_0.1")
        blocked = [(share * mass, mass) for share, mass in zip(shares, masses, strict=True) if mass]
    return Summary(
        steps=int(rows[-1]["step"]),
        metrics={name: value for name, value in metrics.items() if value is not None},
        blocked=blocked,
    )


def _column(rows: Sequence[Row], name: str) -> list[float]:
    """Return a metric of the audit in each row; a log without the audit weights all rows alike."""
    default = 1.0 if name in ("tokens", "calls") else 0.0
    return [row.get(f"audit/{name}", default) for row in rows]


def _weighted_mean(rows: Sequence[Row], key: str, over: str) -> float | None:
    """Return the mean over the rows that have the key; None if none does, or if they weigh nothing."""
    weighted_sum = 0.0
    total = 0.0
    for row, weight in zip(rows, _column(rows, over), strict=True):
        if key in row:
            weighted_sum += row[key] * weight
            total += weight
    return weighted_sum / total if total else None
