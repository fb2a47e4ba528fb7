"""Summaries of logs: rates over the whole run, and a confidence interval of the share of blocked gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from rlvet.runs.compact_rows import CompactRows, compact
from rlvet.runs.metric_names import BINS, COUNTERFACTUALS
from rlvet.runs.quantities import QUANTITIES, Row

FEW_STEPS = 10
"""The smallest number of log steps with rare tokens for an interval. Fewer do not show the variance between steps."""


@dataclass(frozen=True)
class Summary:
    """A summary of a run's log. A property is None if the log does not have it."""

    steps: int
    """The last step."""
    metrics: Mapping[str, float]
    """Metrics of the whole run, with the names of `bandpo.audit.Audit.metrics`. Rates are means over log steps,
    weighted by their denominators. The denominators are sums. A log without the audit has only ``clip_high`` and
    ``clip_low``, or less."""
    blocked: Sequence[tuple[float, float]]
    """For each log step with tokens of A > 0 and p < 0.1: their blocked gradient, and their gradient."""

    @property
    def clipped(self) -> float | None:
        """The share of tokens clipped on either side."""
        high = self.metrics.get("clip_high")
        return None if high is None else high + self.metrics.get("clip_low", 0.0)

    @property
    def rare(self) -> tuple[float, float]:
        """The number of tokens of A > 0 and p < 0.1, and the number of clipped ones among them.

        A token counts once for every update on its batch.
        """
        tokens = self.metrics.get("tokens_positive_below_0.1", 0.0)
        return tokens, tokens * self.metrics.get("clip_high_below_0.1", 0.0)

    @property
    def blocked_share(self) -> float | None:
        """The share of the gradient on tokens of A > 0 and p < 0.1 that was blocked, Σ blocked / Σ gradient."""
        total = sum(mass for _, mass in self.blocked)
        return sum(blocked for blocked, _ in self.blocked) / total if total else None

    def blocked_interval(self) -> tuple[float, float] | None:
        """Compute a 95 % interval of the blocked share of the gradient on rare tokens.

        The share is the ratio Σ blocked / Σ gradient over log steps. Tokens of one batch are not independent, and a few
        of them have most of the gradient, so the standard error is that of a ratio over log steps, not over tokens. If
        no token was blocked so far, this error is 0. Therefore the upper end is at least Wilson's upper bound on the
        share of tokens that were clipped.

        Returns:
            The lower and upper end; None with fewer log steps than `FEW_STEPS`.
        """
        n = len(self.blocked)
        if n < FEW_STEPS:
            return None
        total = sum(mass for _, mass in self.blocked)
        share = self.blocked_share or 0.0
        squares = sum((blocked - share * mass) ** 2 for blocked, mass in self.blocked)
        error = math.sqrt(n / (n - 1) * squares) / total
        half_width = student_quantile(n - 1) * error

        tokens, clipped = self.rare
        low = max(0.0, share - half_width)
        high = min(1.0, share + half_width)
        return low, max(high, _wilson_upper(clipped, tokens, NormalDist().inv_cdf(0.975)))


def student_quantile(degrees: int) -> float:
    """Compute the 97.5 % quantile of Student's t distribution by its expansion around the normal quantile.

    The error is below 0.001 from 9 degrees of freedom on.

    >>> round(student_quantile(9), 3), round(student_quantile(30), 3)
    (2.262, 2.042)
    """
    z = NormalDist().inv_cdf(0.975)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3


def _wilson_upper(successes: float, trials: float, z: float) -> float:
    """Compute the upper end of Wilson's confidence interval of a share."""
    if not trials:
        return 0.0
    share = successes / trials
    centre = share + z**2 / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + z**2 / (4 * trials**2))
    return (centre + spread) / (1 + z**2 / trials)


_RULE_DENOMINATORS = {
    "clip_high": "tokens",
    "clip_low": "tokens",
    "blocked_mass_below_0.1": "mass_positive_below_0.1",
}
"""The denominator of each rate of a clip rule."""


def _denominators() -> dict[str, str]:
    """Return the denominator of each rate of a summary."""
    denominators = dict(_RULE_DENOMINATORS)
    for rule in COUNTERFACTUALS:
        for rate, denominator in _RULE_DENOMINATORS.items():
            denominators[f"if/{rule}/{rate}"] = denominator
    for name in BINS:
        denominators[f"clip_high/{name}"] = f"tokens_positive/{name}"
    return denominators | {
        "clip_high_below_0.1": "tokens_positive_below_0.1",
        "inert": "calls",
        "on_policy": "calls",
        "radius_used": "tokens",
    }


_DENOMINATORS = _denominators()


def summarize(rows: Sequence[Row]) -> Summary:
    """Summarize a log. Rates are means over log steps, weighted by their denominators.

    >>> rows = [{"step": k, "clip_high": 0.1 * k, "clip_low": 0.0} for k in (1, 2, 3)]
    >>> round(summarize(rows).clipped, 6)
    0.2
    """
    rows = compact(rows)
    logged: set[str] = set().union(*rows.layouts)
    metrics: dict[str, float | None] = {}
    for name, denominator in _DENOMINATORS.items():
        key = name if name in QUANTITIES else f"audit/{name}"
        # Skip keys that no row has: a pass over 100,000 rows for each metric of the audit takes seconds.
        metrics[name] = _weighted_mean(rows, key, denominator) if key in logged else None
    if metrics["clip_high"] is None and metrics["clip_low"] is None and "clip" in logged:
        # The log has a single rate for both sides.
        metrics["clip_high"] = _weighted_mean(rows, "clip", "tokens")
    if "audit/tokens" in logged:
        for name in _DENOMINATORS.values():
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


def _column(rows: CompactRows, name: str) -> list[float]:
    """Return a metric of the audit in each row. In a log without the audit all rows have the same weight."""
    default = 1.0 if name in ("tokens", "calls") else 0.0
    return [*rows.values(f"audit/{name}", default)]


def _weighted_mean(rows: CompactRows, key: str, denominator: str) -> float | None:
    """Return the weighted mean over the rows that have the key; None if the sum of their weights is 0."""
    weighted_sum = 0.0
    total = 0.0
    for value, weight in zip(rows.values(key), _column(rows, denominator), strict=True):
        if value is not None:
            weighted_sum += value * weight
            total += weight
    return weighted_sum / total if total else None
