"""The curves of a report: the charts in their order, and the points of each curve, thinned without losing extremes.

This module needs only the standard library.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from statistics import median
from typing import Any, NamedTuple

from rlvet.checks.course import Series, tenth_blocks
from rlvet.runs.quantities import EVALUATION, STEP_KEYS, Row, component_name


class Chart(NamedTuple):
    """The heading and axis of a quantity's chart."""

    title: str
    """The title."""
    unit: str
    """The unit or statistic."""
    may_span_decades: bool = False
    """True if the axis is logarithmic when the values span decades."""


COMPONENTS = "rewards/"
"""The prefix of the names of reward components."""

CHARTS: Mapping[str, Chart] = {
    "reward": Chart("Reward", "mean"),
    EVALUATION: Chart("Score on other prompts", "evaluation"),
    COMPONENTS: Chart("Reward: {}", "mean"),
    "reward_std": Chart("Spread of rewards", "standard deviation"),
    "dead": Chart("Without signal: all rewards equal", "share of groups, or of batches"),
    "length": Chart("Length of answers", "tokens, mean"),
    "length_max": Chart("Longest answer", "tokens"),
    "cut": Chart("Answers cut off", "share"),
    "kl": Chart("KL to the reference", "nats per token", True),
    "kl_old": Chart("KL to the old policy", "nats per token", True),
    "entropy": Chart("Entropy", "nats per token"),
    "grad_norm": Chart("Gradient norm", "before clipping", True),
    "learning_rate": Chart("Learning rate", "", True),
    "mismatch_kl": Chart("KL between engine and trainer", "nats per token", True),
    "mismatch": Chart("Log-probabilities of engine and trainer", "mean distance, nats", True),
    "mismatch_probs": Chart("Probabilities of engine and trainer", "mean distance", True),
    "importance_weight": Chart("Importance weight", "engine to trainer, mean", True),
    "staleness": Chart("Age of data", "updates"),
    "clip_high": Chart("Tokens clipped, A > 0", "share of all"),
    "clip_low": Chart("Tokens clipped, A < 0", "share of all"),
    "clip": Chart("Tokens clipped, either side", "share"),
    "audit/blocked_mass_below_0.1": Chart("Gradient of rare winners blocked", "A > 0, p < 0.1; share"),
    "moved": Chart("Move by the last update on a batch", "nats, mean", True),
    "audit/approx_kl": Chart("KL from the policy that sampled", "nats, estimate", True),
    "audit/radius_used": Chart("Radius spent by a token's move", "share, mean"),
}
"""The charts of a page in their order."""

SCORES = re.compile(r"^(mean|pass)@\d+$")
"""Names of further scores on evaluation prompts."""

EXPECTED = ("reward", EVALUATION, "dead", "length", "cut", "kl", "entropy", "grad_norm")
"""Quantities that the page lists as missing if no run logs them."""

MOST_COMPONENTS = 12
"""The largest number of reward components with a chart. The others are among the other curves."""

NOT_CURVES = {*STEP_KEYS, "epoch", "not_finite"}
"""Keys of rows that are no curves."""


Curves = dict[str, Series]
"""The curves of a run, by name."""

Columns = dict[str, tuple[list[float], list[float]]]
"""The steps and values of each curve during construction, by name."""


def collect_curves(
    log_rows: Sequence[Row], token_rows: Sequence[Row], read: Mapping[str, Sequence[str]]
) -> Curves:
    """Return the curves of a run, by name.

    Args:
        log_rows: The rows of its log.
        token_rows: Rows computed from its recorded tokens. They replace metrics of the same names in the log.
        read: The log's keys for each quantity, see `rlvet.runs.logs.Log.read`. They are no curves of their own.
    """
    token_names = set().union(*token_rows)
    columns: Columns = {}
    _add_rows(columns, log_rows, NOT_CURVES | token_names)
    _add_rows(columns, sorted(token_rows, key=lambda row: row["step"]), NOT_CURVES)
    curves = {name: Series(steps, values) for name, (steps, values) in columns.items()}

    # Rename components of the reward, which frameworks log under different keys.
    components: dict[str, str] = {}
    for key in curves:
        name = component_name(key)
        if name is not None:
            components.setdefault(COMPONENTS + name, key)
    for name, key in components.items():
        curves[name] = curves.pop(key)

    for keys in read.values():
        for key in keys:
            if key not in read:
                curves.pop(key, None)
    return curves


def _add_rows(columns: Columns, rows: Sequence[Row], excluded: Collection[str]) -> None:
    """Add the metrics of rows, which are in the order of their steps. The last row of a step replaces earlier ones."""
    for row in rows:
        step = row["step"]
        for name, value in row.items():
            if name in excluded or not math.isfinite(value):
                continue
            column = columns.get(name)
            if column is None:
                column = ([], [])
                columns[name] = column
            steps, values = column
            if steps and steps[-1] == step:
                values[-1] = value
            else:
                steps.append(step)
                values.append(value)


# --- Points ---

SEGMENTS = 500
"""The largest number of segments of a thinned curve, of which each has its minimum and maximum as points."""

FEWEST_SEGMENTS = 20
"""The smallest number of segments of a thinned curve."""

POINTS = 60_000
"""The number of points of all charts of a page, about 1 MB, and again of all other curves."""

MEDIAN_ROWS = 30
"""The smallest number of rows of a curve with a running median."""

MEDIAN_SHARE = 25
"""The window of a running median is the number of rows divided by this number."""

MEDIAN_REACH = 250
"""The largest number of rows on either side in the window of a running median."""

MEDIAN_POINTS = 250
"""The largest number of points of a running median."""


def segments_per_curve(curves: int) -> int:
    """Return the number of segments of each thinned curve, so that all curves have at most `POINTS` points."""
    return max(FEWEST_SEGMENTS, min(SEGMENTS, POINTS // (2 * max(1, curves))))


def thin(curve: Series, segments: int) -> Series:
    """Return the first and last point of a curve, and the minimum and maximum of each segment.

    >>> thin(Series([1, 2, 3, 4, 5, 6, 7, 8], [0, 3, 2, 1, 9, 5, 4, 6]), 2)
    Series(steps=[1, 2, 5, 7, 8], values=[0, 3, 9, 4, 6])
    """
    n = len(curve.values)
    if n <= 2 * segments:
        return curve
    rows = {0, n - 1}
    for segment in range(segments):
        start = segment * n // segments
        end = (segment + 1) * n // segments
        values = curve.values[start:end]
        rows |= {start + values.index(min(values)), start + values.index(max(values))}
    sorted_rows = sorted(rows)
    return Series([curve.steps[row] for row in sorted_rows], [curve.values[row] for row in sorted_rows])


def running_median(curve: Series) -> Series:
    """Return the running median of a curve at up to `MEDIAN_POINTS` rows; empty for a short curve."""
    n = len(curve.values)
    if n < MEDIAN_ROWS:
        return Series([], [])
    reach = min(MEDIAN_REACH, max(2, n // MEDIAN_SHARE // 2))
    count = min(n, MEDIAN_POINTS)
    rows = [point * (n - 1) // (count - 1) for point in range(count)]
    medians = [median(curve.values[max(0, row - reach) : row + reach + 1]) for row in rows]
    return Series([curve.steps[row] for row in rows], medians)


def as_json(curve: Series, segments: int) -> dict[str, Any]:
    """Return the points of a curve, its running median, and its values at the start and end, for a page's data.

    Args:
        curve: The curve.
        segments: The number of segments, if it has to be thinned.
    """
    points = thin(curve, segments)
    medians = running_median(curve)
    return {
        "rows": len(curve.values),
        "segments": 0 if points is curve else segments,
        "steps": points.steps,
        "values": points.values,
        "median_steps": medians.steps,
        "medians": medians.values,
        "first": curve.first,
        "last": curve.last,
    }


def start_of_last_tenth(curves: Curves) -> float | None:
    """Return the first step of the last tenth of a run; None for a short run."""
    longest = max(curves.values(), key=lambda curve: len(curve.steps), default=None)
    if longest is None or len(longest.steps) < MEDIAN_ROWS:
        return None
    return tenth_blocks(longest.steps)[-1][0]


# --- Charts ---

DECADES = 100.0
"""The smallest ratio of maximum to minimum for a logarithmic axis."""

ABOVE_USUAL = 10.0
"""The smallest ratio of maximum to median for a logarithmic axis. Below it, a linear axis shows the curve well."""

NEAR_ZERO = 0.001
"""Share of the median up to which values below 0 are noise of an estimator, and left out of a logarithmic axis."""


def charts(runs: Sequence[Curves], evidence: Collection[str]) -> dict[str, Any]:
    """Return the charts of a page, and the names of curves without a chart.

    Args:
        runs: The curves of each run.
        evidence: The names of curves to which findings refer. They have a chart even if they are constant.

    Returns:
        ``charts``; ``constant``, curves with a single value, with the value in each run; ``same_as_reward``, titles of
        reward components that are equal to the reward; ``others``, names of all other curves; and ``missing``, titles
        of expected charts that no run has.
    """
    names = list(dict.fromkeys(chain.from_iterable(runs)))
    drawn: list[dict[str, Any]] = []
    constant: list[dict[str, Any]] = []
    same_as_reward: list[str] = []
    for name, chart in _ordered_charts(names, evidence):
        curves_of_name = [curves[name] for curves in runs if name in curves]
        heading = {"name": name, "title": chart.title, "unit": chart.unit}
        is_constant = all(len(set(curve.values)) == 1 for curve in curves_of_name)
        if name.startswith(COMPONENTS) and all(_equals_reward(curves, name) for curves in runs):
            same_as_reward.append(chart.title)
        elif is_constant and name not in evidence:
            values = [curves[name].values[0] if name in curves else None for curves in runs]
            constant.append({**heading, "values": values})
        else:
            is_log = chart.may_span_decades and _spans_decades(curves_of_name)
            drawn.append({**heading, "log": is_log})

    shown = {chart["name"] for chart in (*drawn, *constant)}
    others: list[str] = []
    for name in names:
        is_counterfactual = name.startswith("audit/if/")
        if name not in shown and not is_counterfactual and not _is_redundant(name, shown):
            others.append(name)
    return {
        "charts": drawn,
        "constant": constant,
        "same_as_reward": same_as_reward,
        "others": others,
        "missing": [CHARTS[name].title for name in EXPECTED if name not in names],
    }


def _ordered_charts(names: Sequence[str], evidence: Collection[str]) -> list[tuple[str, Chart]]:
    """Return the names and charts of curves in the order of `CHARTS`, and then of other curves that are evidence."""
    ordered: list[tuple[str, Chart]] = []
    for name, chart in CHARTS.items():
        if name == COMPONENTS:
            # Other keys may have the same prefix, such as ``rewards/format/std``.
            components = [key for key in names if key == f"{COMPONENTS}{component_name(key)}"]
            for key in components[:MOST_COMPONENTS]:
                title = chart.title.format(key.removeprefix(COMPONENTS))
                ordered.append((key, chart._replace(title=title)))
        elif name in names and not _is_redundant(name, names):
            ordered.append((name, chart))
        if name == EVALUATION:
            ordered += [(key, Chart(key, "share")) for key in names if SCORES.match(key)]
    titled = {name for name, _ in ordered}
    others = [name for name in names if name in evidence and name not in titled and name not in CHARTS]
    return ordered + [(name, Chart(name.replace("_", " ").capitalize(), "")) for name in others]


def _is_redundant(name: str, names: Collection[str]) -> bool:
    """Return True for the clip rate of both sides, if there is one for each side."""
    return name == "clip" and "clip_high" in names


def _equals_reward(curves: Curves, name: str) -> bool:
    """Return True if a component is equal to the reward, or the run does not have it."""
    return name not in curves or ("reward" in curves and curves[name] == curves["reward"])


def _spans_decades(curves: Sequence[Series]) -> bool:
    """Return True if a logarithmic axis is needed to see the small values of curves."""
    values = list(chain.from_iterable(curve.values for curve in curves))
    positive = [value for value in values if value > 0]
    if not positive or min(values) < -NEAR_ZERO * median(positive):
        return False
    highest = max(positive)
    return highest > DECADES * min(positive) and highest > ABOVE_USUAL * median(positive)
