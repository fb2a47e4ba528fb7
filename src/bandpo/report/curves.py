"""Curves of a run as a page draws them: which there are, and their points, thinned so that no extreme is lost.

This module needs the standard library alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from bandpo.doctor.course import Series, tenth_blocks
from bandpo.runs.quantities import EVALUATION, STEP_KEYS, Row, component_name


class Chart(NamedTuple):
    """What a page says of a quantity."""

    title: str
    unit: str
    may_span_decades: bool = False
    """Whether large values are drawn on a logarithmic axis where small ones would not be seen otherwise."""


COMPONENTS = "rewards/"
"""What the names of components of the reward begin with."""

CHARTS: Mapping[str, Chart] = {
    "reward": Chart("Reward", "mean"),
    EVALUATION: Chart("Score on other prompts", "evaluation"),
    COMPONENTS: Chart("Reward: {}", "mean"),
    "reward_std": Chart("Spread of rewards", "standard deviation"),
    "dead": Chart("Groups without signal", "share"),
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
"""Names of further scores on other prompts."""

WANTED = ("reward", EVALUATION, "dead", "length", "cut", "kl", "entropy", "grad_norm")
"""Quantities that a page names where no run logs them."""

MOST_COMPONENTS = 12
"""Components of the reward that have a chart; any others are among the further columns."""

NO_CURVES = {*STEP_KEYS, "epoch", "not_finite"}


Curves = dict[str, Series]
"""The curves of a run by their names."""

Columns = dict[str, tuple[list[float], list[float]]]
"""Steps and values of curves that are being gathered."""


def gather(log_rows: Sequence[Row], finer_rows: Sequence[Row], read: Mapping[str, Sequence[str]]) -> Curves:
    """Return the curves of a run by their names.

    Args:
        log_rows: The rows of its log.
        finer_rows: The rows computed from its tokens. What they have is not taken from the log.
        read: For each quantity the keys of the log that it was read from, which are no further columns.
    """
    finer_names = {name for row in finer_rows for name in row}
    components: dict[str, str] = {}
    columns: Columns = {}
    _add(columns, log_rows, NO_CURVES | finer_names)
    _add(columns, sorted(finer_rows, key=lambda row: row["step"]), NO_CURVES)
    curves = {name: Series(steps, values) for name, (steps, values) in columns.items()}
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


def _add(columns: Columns, rows: Sequence[Row], left_out: Collection[str]) -> None:
    """Add the metrics of rows, which are in the order of their steps. Of several rows of one step the last counts."""
    for row in rows:
        step = row["step"]
        for name, value in row.items():
            if name in left_out or not math.isfinite(value):
                continue
            column = columns.get(name)
            if column is None:
                column = columns[name] = ([], [])
            steps, values = column
            if steps and steps[-1] == step:
                values[-1] = value
            else:
                steps.append(step)
                values.append(value)


# --- Points ---

PARTS = 500
"""Parts of a curve of which the least and the greatest value are drawn."""

FEWEST_PARTS = 20

POINTS = 60_000
"""Points of a page's charts, about 1 MB, and again of its further columns."""

MEDIAN_ROWS = 30
"""Rows of a curve from which it has a running median."""

MEDIAN_SHARE = 25
"""A running median is over this part of the rows, such as a 25th."""

MEDIAN_REACH = 250
"""Rows on either side that a running median is over at most."""

MEDIAN_POINTS = 250


def parts_for(curves: int) -> int:
    """Return into how many parts each of so many curves is divided."""
    return max(FEWEST_PARTS, min(PARTS, POINTS // (2 * max(1, curves))))


def thinned(curve: Series, parts: int) -> Series:
    """Return a curve with the least and the greatest value of each part alone, and its first and last value.

    >>> thinned(Series([1, 2, 3, 4, 5, 6, 7, 8], [0, 3, 2, 1, 9, 5, 4, 6]), 2)
    Series(steps=[1, 2, 5, 7, 8], values=[0, 3, 9, 4, 6])
    """
    n = len(curve.values)
    if n <= 2 * parts:
        return curve
    rows = {0, n - 1}
    for part in range(parts):
        start = part * n // parts
        end = (part + 1) * n // parts
        values = curve.values[start:end]
        rows |= {start + values.index(min(values)), start + values.index(max(values))}
    kept = sorted(rows)
    return Series([curve.steps[row] for row in kept], [curve.values[row] for row in kept])


def running_median(curve: Series) -> Series:
    """Return the median of the rows around each of at most `MEDIAN_POINTS` rows; nothing of a short curve."""
    n = len(curve.values)
    if n < MEDIAN_ROWS:
        return Series([], [])
    reach = min(MEDIAN_REACH, max(2, n // MEDIAN_SHARE // 2))
    count = min(n, MEDIAN_POINTS)
    rows = [point * (n - 1) // (count - 1) for point in range(count)]
    medians = [median(curve.values[max(0, row - reach) : row + reach + 1]) for row in rows]
    return Series([curve.steps[row] for row in rows], medians)


def as_json(curve: Series, parts: int) -> dict[str, Any]:
    """Return what a page holds of a curve."""
    points = thinned(curve, parts)
    medians = running_median(curve)
    return {
        "rows": len(curve.values),
        "parts": 0 if points is curve else parts,
        "steps": points.steps,
        "values": points.values,
        "median_steps": medians.steps,
        "medians": medians.values,
        "first": curve.first,
        "last": curve.last,
    }


def start_of_last_tenth(curves: Curves) -> float | None:
    """Return the step at which the last tenth of a run begins; None if it is short."""
    longest = max(curves.values(), key=lambda curve: len(curve.steps), default=None)
    if longest is None or len(longest.steps) < MEDIAN_ROWS:
        return None
    return tenth_blocks(longest.steps)[-1][0]


# --- Charts ---

DECADES = 100.0
"""Times that the greatest value must be the least for a logarithmic axis."""

ABOVE_USUAL = 10.0
"""Times that it must be the median as well; otherwise a plain axis shows the curve."""


def charts(runs: Sequence[Curves], evidence: Collection[str]) -> dict[str, Any]:
    """Return the charts of a page, and what it says in words instead.

    Args:
        runs: The curves of each run.
        evidence: Names of the curves that findings rest on, which are drawn even if they are constant.
    """
    names = list(dict.fromkeys(name for curves in runs for name in curves))
    drawn: list[dict[str, Any]] = []
    constant: list[dict[str, Any]] = []
    same: list[str] = []
    for name, chart in _in_order(names):
        logged = [curves[name] for curves in runs if name in curves]
        heading = {"name": name, "title": chart.title, "unit": chart.unit}
        if name.startswith(COMPONENTS) and all(_is_the_reward(curves, name) for curves in runs):
            same.append(chart.title)
            continue
        if name not in evidence and all(len(set(curve.values)) == 1 for curve in logged):
            values = [curves[name].values[0] if name in curves else None for curves in runs]
            constant.append({**heading, "values": values})
            continue
        drawn.append({**heading, "log": chart.may_span_decades and _spans_decades(logged)})
    known = {chart["name"] for chart in (*drawn, *constant)}
    others = [
        name
        for name in names
        if name not in known and not name.startswith("audit/if/") and not _is_said_by(name, known)
    ]
    missing = [CHARTS[name].title for name in WANTED if name not in names]
    return {"charts": drawn, "constant": constant, "same": same, "others": others, "missing": missing}


def _in_order(names: Sequence[str]) -> list[tuple[str, Chart]]:
    """Return the charts of curves in the order of `CHARTS`."""
    ordered: list[tuple[str, Chart]] = []
    for name, chart in CHARTS.items():
        if name == COMPONENTS:
            # Another key may begin alike, such as ``rewards/format/std``.
            components = [key for key in names if key == f"{COMPONENTS}{component_name(key)}"]
            ordered += [
                (key, chart._replace(title=chart.title.format(key.removeprefix(COMPONENTS))))
                for key in components[:MOST_COMPONENTS]
            ]
        elif name in names and not _is_said_by(name, names):
            ordered.append((name, chart))
        if name == EVALUATION:
            ordered += [(key, Chart(key, "share")) for key in names if SCORES.match(key)]
    return ordered


def _is_said_by(name: str, names: Collection[str]) -> bool:
    """Return whether other curves say what a curve does: the clip of both sides, where each has its own."""
    return name == "clip" and "clip_high" in names


def _is_the_reward(curves: Curves, name: str) -> bool:
    """Return whether a component is all of the reward, or the run does not have it."""
    return name not in curves or ("reward" in curves and curves[name] == curves["reward"])


def _spans_decades(curves: Sequence[Series]) -> bool:
    values = [value for curve in curves for value in curve.values]
    above = [value for value in values if value > 0]
    if not above or min(values) < 0:
        return False
    return max(above) > DECADES * min(above) and max(above) > ABOVE_USUAL * median(above)
