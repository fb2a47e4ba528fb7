"""Say what went wrong for a part of a run, and away again, of which no finding tells. Needs only the standard library.

A value is compared with those before it. The running median of five rows of a metric must leave a region around them,
and return, by far more than the metric otherwise differs between parts of that length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, groupby, islice, pairwise
from statistics import fmean, median
from typing import NamedTuple

from rlvet._numbers import format_number, format_step
from rlvet.checks.course import Course, Series
from rlvet.checks.findings import Finding
from rlvet.checks.liveness import ALL_GROUPS, FEWEST_LIVE, LARGEST_KL, NewestValues
from rlvet.checks.log.entropy import ENTROPY_LEFT, NO_ENTROPY
from rlvet.checks.log.gradient import GRADIENT_SPIKES
from rlvet.checks.log.life import RUN_DIED, WORDS
from rlvet.checks.log.numbers import NOT_A_NUMBER
from rlvet.checks.log.results import MOST
from rlvet.checks.log.reward import PLATEAU, describe_dip, dip_of
from rlvet.checks.log.signal import NO_SIGNAL

FEWEST_ROWS = 30
"""Number of log steps of a metric below which no part of it is told."""

SHORTEST = 5
"""Number of log steps of a part below which it is not told."""

SHORTEST_SHARE = 0.01
"""The same as a share of the log steps, so that a reader of the curve sees it."""

DIFFERENCES = 8.0
"""A part must differ from the values before by this many times the usual difference of two parts that follow."""

COMPARED_PARTS = 16
"""The longest part whose usual difference is known is this fraction of the run."""

REWARD_ROWS = 10
"""Smallest number of rows of the running mean that is the reward which was reached."""

MOST_TOLD = 3
"""Number of parts of a run, and of metrics in one, that are told."""


class Limits(NamedTuple):
    """The values below and above which a metric leaves its usual region, and those at which it is back."""

    low: float
    """The value below which it has left."""
    high: float
    """The value above which it has left."""
    back_from_low: float
    """The value above which it is back."""
    back_from_high: float
    """The value below which it is back."""
    reached: float = -math.inf
    """The largest mean so far, of a metric that may have fallen slowly."""


class _Past:
    """The values of a metric that were usual up to a row.

    Args:
        values: The first values.
        window: Number of values of a running mean.
    """

    def __init__(self, values: Sequence[float], window: int):
        self._newest = NewestValues(values)
        self._window = window
        self._sums = [0.0, *accumulate(values)]
        rows = min(window, len(values))
        self.best = self.lowest = (self._sums[-1] - self._sums[-1 - rows]) / rows

    def add(self, values: Sequence[float]) -> None:
        """Add the values of the next rows."""
        self._newest.add(values)
        start = len(self._sums)
        self._sums += islice(accumulate(values, initial=self._sums[-1]), 1, None)
        first = max(start, self._window)
        means = [
            (end - start) / self._window
            for start, end in zip(
                self._sums[first - self._window : -self._window], self._sums[first:], strict=True
            )
        ]
        if means:
            # The largest and the smallest running mean.
            self.best = max(self.best, *means)
            self.lowest = min(self.lowest, *means)

    @property
    def usual(self) -> float:
        """The median of the newest values."""
        return median(self._newest.ordered())


def _half_of_reward(past: _Past) -> Limits:
    """Return the limits of a reward, of which half is lost. A negative one is measured from the lowest so far."""
    height = past.best - min(0.0, past.lowest)
    low = past.best - height / 2
    return Limits(low, math.inf, past.best - height / 4, math.inf, past.best)


def _no_or_much_entropy(past: _Past) -> Limits:
    """Return the limits of an entropy that is lost, or three times as large."""
    usual = past.usual
    return Limits(min(ENTROPY_LEFT * usual, NO_ENTROPY), 3 * usual, usual / 2, 2 * usual)


def _shorter_or_longer(past: _Past) -> Limits:
    usual = past.usual
    return Limits(usual / 4, 4 * usual, usual / 2, 2 * usual)


def _above(factor: float, smallest: float) -> Callable[[_Past], Limits]:
    def limits(past: _Past) -> Limits:
        usual = abs(past.usual)
        high = max(factor * usual, smallest)
        return Limits(-math.inf, high, -math.inf, (usual + high) / 2)

    return limits


def _most(share: float, most_before: float) -> Callable[[_Past], Limits]:
    def limits(past: _Past) -> Limits:
        usual = past.usual
        high = share if usual <= most_before else math.inf
        return Limits(-math.inf, high, -math.inf, (usual + share) / 2)

    return limits


LIMITS: dict[str, Callable[[_Past], Limits]] = {
    "reward": _half_of_reward,
    "dead": _most(ALL_GROUPS, 0.6),
    "cut": _most(MOST, 0.25),
    "length": _shorter_or_longer,
    "kl": _above(5.0, LARGEST_KL),
    "entropy": _no_or_much_entropy,
    "grad_norm": _above(10.0, 0.0),
    "mismatch_kl": _above(10.0, 0.05),
    "mismatch": _above(10.0, 0.1),
    "mismatch_probs": _above(10.0, 0.05),
}
"""For each quantity, a function that returns its limits."""

NAMES = {**WORDS, "entropy": "entropy", "reward": "reward"}
"""The names of the quantities in the sentence."""


class Passing(NamedTuple):
    """A part of a run in which a metric had left its usual region."""

    name: str
    first: int
    """The first row of the metric."""
    last: int
    """The last row."""
    before: float
    """The mean of as many rows before; of a reward, the largest mean if that was higher."""
    value: float
    """The mean of its rows."""
    after: float
    """The mean of as many rows after it."""


def _median_around(values: Sequence[float], row: int) -> float:
    """Return the median of the five values around a row; of fewer at the ends."""
    return median(values[max(0, row - 2) : row + 3])


def _parts_outside(
    values: Sequence[float], limits_of: Callable[[_Past], Limits]
) -> list[tuple[int, int, Limits]]:
    """Return the first and the last row of each part outside the usual region that ends, with the limits."""
    past = _Past(values[:FEWEST_LIVE], max(REWARD_ROWS, len(values) // 20))
    limits = limits_of(past)
    parts: list[tuple[int, int, Limits]] = []
    start = 0
    is_low = False
    first = FEWEST_LIVE
    while first < len(values):
        block = values[first : first + max(4, min(64, first // 16))]
        usual_values = block
        # Most blocks have no value outside, so that few medians are computed.
        if start or min(block) < limits.low or max(block) > limits.high:
            usual_values = []
            for row in range(first, first + len(block)):
                value = _median_around(values, row)
                if start:
                    if value > limits.back_from_low if is_low else value < limits.back_from_high:
                        parts.append((start, row - 1, limits))
                        start = 0
                elif value < limits.low or value > limits.high:
                    start = row
                    is_low = value < limits.low
                if not start:
                    usual_values.append(values[row])
        if len(usual_values):
            past.add(usual_values)
            limits = limits_of(past)
        first += len(block)
    return parts


def _joined(parts: Sequence[tuple[int, int, Limits]]) -> list[tuple[int, int, Limits]]:
    """Return the parts, those that follow soon after another as one with it."""
    joined: list[tuple[int, int, Limits]] = []
    for first, last, limits in parts:
        if joined and first - joined[-1][1] - 1 < max(SHORTEST, (joined[-1][1] - joined[-1][0]) // 2):
            joined[-1] = (joined[-1][0], last, joined[-1][2])
        else:
            joined.append((first, last, limits))
    return joined


def _without(values: Sequence[float], parts: Sequence[tuple[int, int]]) -> list[float]:
    """Return the values outside some parts, which are in their order."""
    kept: list[float] = []
    start = 0
    for first, last in parts:
        kept += values[start:first]
        start = last + 1
    return [*kept, *values[start:]]


def _usual_difference(values: Sequence[float], rows: int) -> float:
    """Return the median difference of the means of two parts that follow, in standard deviations of normal noise.

    Args:
        values: The values outside the part.
        rows: Number of rows of a part.
    """
    size = max(1, min(rows, len(values) // COMPARED_PARTS))
    means = [fmean(values[row : row + size]) for row in range(0, len(values) - size + 1, size)]
    differences = [abs(after - before) for before, after in pairwise(means)]
    return median(differences) / 0.954 if differences else math.inf


def _passing_of(name: str, metric: Series) -> list[Passing]:
    """Return the parts of a metric to tell."""
    values = metric.values
    n = len(values)
    # A metric with one value never leaves its region.
    if n < FEWEST_ROWS or max(values) == min(values):
        return []
    parts = _joined(_parts_outside(values, LIMITS[name]))
    result = []
    for first, last, limits in parts:
        rows = last - first + 1
        if rows < max(SHORTEST, SHORTEST_SHARE * n) or n - 1 - last < SHORTEST:
            continue
        before = max(limits.reached, fmean(values[max(0, first - rows) : first]))
        value = fmean(values[first : last + 1])
        after = fmean(values[last + 1 : last + 1 + rows])
        # The median of a metric that is 0 or 1 in each row may be outside, and its mean not.
        is_outside = value < limits.low or value > limits.high
        is_back = (after - value) * (before - value) >= (before - value) ** 2 / 2
        # A reward of few answers leaves its region by noise, which the other parts show.
        left_out = [(first, last)] if name == "reward" else [part[:2] for part in parts]
        others = _without(values, left_out)
        if is_outside and is_back and abs(before - value) > DIFFERENCES * _usual_difference(others, rows):
            result.append(Passing(name, first, last, before, value, after))
    return result


def _has_told(finding: Finding, name: str, start: float, end: float) -> bool:
    """Return whether a finding tells of a metric in these steps, and that it has lived again."""
    if finding.onset is None or name not in finding.quantities:
        return False
    if finding.kind is GRADIENT_SPIKES:
        return True
    return finding.kind is RUN_DIED and start <= finding.onset <= end


SPIKE = 15.0
"""A value is told as a spike if it is this many times the median of its metric."""

ABOVE_MOST = 3.0
"""It must also be this many times what nine of ten values are below, as the norm of a step with equal rewards is near 0
and that of others is not."""


def _single_steps_above(metric: Series, limit: float) -> list[tuple[float, float]]:
    """Return the values above a limit with their steps, but for those of a part of the run, which has more rows."""
    singles: list[tuple[float, float]] = []
    for is_above, points in groupby(metric.points, key=lambda point: point[1] > limit):
        part = [*points]
        if is_above and len(part) < SHORTEST:
            singles += [(value, step) for step, value in part]
    return singles


def _usual(middle: float, most: float) -> str:
    """Return a clause on the usual values of a metric, by their median and what nine of ten are below."""
    return f"where its median is {format_number(middle)} and nine of ten are below {format_number(most)}"


def in_single_steps(course: Course, findings: Sequence[Finding]) -> str:
    """Return a sentence on the largest gradient norms and KLs of single log steps, far above usual; empty without one.

    Args:
        course: The metrics.
        findings: The findings, which are not repeated.
    """
    texts = []
    for name in ("grad_norm", "kl"):
        metric = course.series(name)
        positive = [value for value in metric.values if value > 0]
        # A row of NaN tells nothing of the others.
        is_told = any(name in one.quantities for one in findings if one.kind is not NOT_A_NUMBER)
        if len(positive) < FEWEST_ROWS or is_told:
            continue
        # Norms of 0 are of steps without a gradient.
        usual = median(metric.values) or median(positive)
        most = sorted(positive)[len(positive) * 9 // 10]
        spikes = sorted(_single_steps_above(metric, max(SPIKE * usual, ABOVE_MOST * most)), reverse=True)
        if not spikes:
            continue
        told = [f"{format_number(value)} at step {format_step(step)}" for value, step in spikes[:MOST_TOLD]]
        others = len(spikes) - len(told)
        if others:
            told.append(f"and {others} more such step{'s' if others > 1 else ''} of {len(metric.values)}")
        texts.append(f"{NAMES[name]} {', '.join(told)}, {_usual(usual, most)}")
    return f"in single log steps: {'; '.join(texts)}" if texts else ""


def _recovered_reward(
    course: Course, findings: Sequence[Finding], found: Sequence[tuple[float, float, Passing]]
) -> list[str]:
    """Return a line on a reward that was lost and came back; none if that is told elsewhere.

    Args:
        course: The metrics.
        findings: The findings, of which a plateau or a death tells it of its steps.
        found: The parts of metrics that are told, with their first and last steps.
    """
    reward = course.series("reward")
    dip = dip_of(reward)
    if dip is None:
        return []
    first, last = (reward.steps[row] for row in (dip.rows.start, dip.rows.stop - 1))
    for start, end, part in found:
        if part.name == "reward" and start <= last and first <= end:
            return []
    for finding in findings:
        if finding.onset is None or finding.onset > last:
            continue
        is_death = finding.kind is RUN_DIED and finding.steps is not None and first <= finding.steps[1]
        if is_death or finding.kind is PLATEAU:
            return []
    return [f"in passing, of the reward: {describe_dip(reward, dip)}"]


def describe_part(part: Passing) -> str:
    """Return the means of a metric before a part of a run, in it and after it."""
    means = (format_number(mean) for mean in (part.before, part.value, part.after))
    return "{} {} → {}, then {}".format(NAMES[part.name], *means)


def in_passing(course: Course, findings: Sequence[Finding]) -> list[str]:
    """Return a sentence on each part of a run in which metrics left their usual values, and returned.

    Args:
        course: The metrics.
        findings: The findings, which are not repeated.
    """
    # A record has several rows of one step.
    if not course.has_a_row_for_each_step:
        return []
    found: list[tuple[float, float, Passing]] = []
    for name in LIMITS:
        # Where most groups have no signal, the norm of the others is no change.
        if name == "grad_norm" and any(finding.kind is NO_SIGNAL for finding in findings):
            continue
        metric = course.series(name)
        for part in _passing_of(name, metric):
            start, end = metric.steps[part.first], metric.steps[part.last]
            if not any(_has_told(finding, name, start, end) for finding in findings):
                found.append((start, end, part))
    # The parts of several metrics that overlap are one of the run.
    spells: list[list[tuple[float, float, Passing]]] = []
    for start, end, part in sorted(found, key=lambda one: one[0]):
        if spells and start <= max(last for _, last, _ in spells[-1]):
            spells[-1].append((start, end, part))
        else:
            spells.append([(start, end, part)])
    lines = _recovered_reward(course, findings, found)
    for spell in spells[:MOST_TOLD]:
        texts = []
        steps = ""
        for start, end, part in spell[:MOST_TOLD]:
            before, steps = steps, f"from step {format_step(start)} to {format_step(end)}: "
            texts.append(describe_part(part) if steps == before else f"{steps}{describe_part(part)}")
        more = f"; and {len(spell) - MOST_TOLD} more" if len(spell) > MOST_TOLD else ""
        lines.append(
            f"in passing, {'; '.join(texts)}{more} (means of as many log steps before, in and after it)"
        )
    if len(spells) > MOST_TOLD:
        lines.append(f"in passing, {len(spells) - MOST_TOLD} more such parts of the run")
    return lines
