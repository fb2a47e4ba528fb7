"""Statistics of a metric over a run: noise, blocks, change points and jumps, with the standard library alone."""

from __future__ import annotations

import bisect
import math
import operator
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate, chain, pairwise
from statistics import fmean, median
from typing import NamedTuple

from bandpo.runs.quantities import Row


class Series(NamedTuple):
    """A metric over a run."""

    steps: Sequence[float]
    values: Sequence[float]

    @property
    def first(self) -> float:
        """The mean of the first tenth."""
        return end_means(self.values, 10)[0]

    @property
    def last(self) -> float:
        """The mean of the last tenth."""
        return end_means(self.values, 10)[1]

    @property
    def later_half(self) -> Sequence[float]:
        """The values of the later half."""
        return self.values[len(self.values) // 2 :]


class Course:
    """The metrics of a run, each of which is gathered from the rows once.

    Args:
        rows: The log, one row per log step.

    >>> Course([{"step": 1, "reward": 0.5}, {"step": 2}]).series("reward")
    Series(steps=[1], values=[0.5])
    """

    def __init__(self, rows: Sequence[Row]):
        self.rows = rows
        self._series: dict[str, Series] = {}

    @cached_property
    def names(self) -> Sequence[str]:
        """The names of all metrics, in the order of logging."""
        return list(dict.fromkeys(chain.from_iterable(rows_of_each_layout(self.rows))))

    def series(self, name: str) -> Series:
        """Return the steps and values of a metric, of the rows that have it."""
        if name not in self._series:
            # Most quantities are logged by no run, and a pass over 100,000 rows takes a while.
            logged = [row for row in self.rows if name in row] if name in self.names else []
            self._series[name] = Series([row["step"] for row in logged], [row[name] for row in logged])
        return self._series[name]


def rows_of_each_layout(rows: Sequence[Row]) -> list[Row]:
    """Return a row of each set of keys."""
    return list({tuple(row): row for row in rows}.values())


def end_means(values: Sequence[float], parts: int) -> tuple[float, float]:
    """Compute the means of the first and of the last part of a curve, such as a tenth."""
    count = max(1, len(values) // parts)
    return fmean(values[:count]), fmean(values[-count:])


def deviation(values: Sequence[float]) -> float:
    """Compute the standard deviation; `statistics.pstdev` takes ten times as long for long logs.

    >>> deviation([1.0, 3.0])
    1.0
    """
    n = len(values)
    return math.dist(values, [fmean(values)] * n) / math.sqrt(n)


def standard_error(values: Sequence[float]) -> float:
    """Compute the standard error of a mean."""
    return deviation(values) / math.sqrt(len(values))


def noise_of_differences(values: Sequence[float]) -> float:
    """Compute the standard deviation of the differences between neighbouring values."""
    return deviation(list(map(operator.sub, values[1:], values))) if len(values) > 1 else 0.0


def tenth_blocks(values: Sequence[float]) -> list[Sequence[float]]:
    """Split a curve into ten blocks, of which the first are longer by one if need be."""
    size, longer = divmod(len(values), 10)
    blocks = []
    start = 0
    for tenth in range(10):
        end = start + size + (tenth < longer)
        blocks.append(values[start:end])
        start = end
    return blocks


def tenths(values: Sequence[float]) -> list[float]:
    """Compute the means of ten blocks of a curve of ten values and more."""
    return [fmean(block) for block in tenth_blocks(values)]


class Slope(NamedTuple):
    """The rise of a line over a curve, from its start to its end, with its standard error."""

    rise: float
    error: float


ROUNDING = 1e-3
"""Relative slope that rounding may give a flat curve."""


def fit_slope(values: Sequence[float]) -> Slope:
    """Fit a line to the means of ten blocks, since neighbouring steps are alike.

    >>> round(fit_slope(list(range(100))).rise)
    100
    """
    means = tenths(values)
    offsets = [tenth - 4.5 for tenth in range(10)]
    square_sum = sum(offset**2 for offset in offsets)
    slope = sum(offset * mean for offset, mean in zip(offsets, means, strict=True)) / square_sum
    centre = fmean(means)
    residuals = [mean - centre - slope * offset for offset, mean in zip(offsets, means, strict=True)]
    error = math.sqrt(sum(residual**2 for residual in residuals) / 8 / square_sum)
    return Slope(10 * slope, 10 * error)


def rises(values: Sequence[float]) -> bool:
    """Check whether a curve of ten values and more rises by two standard errors of a line's slope."""
    slope = fit_slope(values)
    return slope.rise > 2 * slope.error + 10 * ROUNDING * max(abs(value) for value in tenths(values))


class ChangePoint(NamedTuple):
    """Point at which a curve that rises in a line turns flat."""

    row: int
    """The row at which it turns; 0 if a constant fits best."""
    rise: float
    """Its rise until there."""
    noise: float
    """Standard deviation around the two lines."""


def find_change_point(values: Sequence[float]) -> ChangePoint:
    """Fit a line that turns flat to a curve, by least squares over all rows at which it may turn.

    With ``h_t = min(t, turn)/turn`` the fit is ``values ≈ a + rise·h``, and its residual variance is
    ``var(values) − cov(h, values)²/var(h)``. Sums over the rows before each turn give it in one pass.

    >>> find_change_point([min(t, 10.0) for t in range(40)]).row
    10
    """
    n = len(values)
    mean = fmean(values)
    centred = [value - mean for value in values]
    variance = fmean(value * value for value in centred)
    best_turn = 0
    best_rise = 0.0
    most_explained = 0.0  # of the variance

    weighted_before = 0.0  # Σ t·v_t over the rows before the turn
    sum_before = 0.0  # Σ v_t over them
    first_turn = n // 20 or 1
    for turn in range(1, n):
        weighted_before += (turn - 1) * centred[turn - 1]
        sum_before += centred[turn - 1]
        if turn < first_turn:
            continue
        after = n - turn
        hinge_mean = ((turn - 1) / 2 + after) / n
        # Σ_{t<turn} (t/turn)² = (turn − 1)(2·turn − 1)/(6·turn)
        hinge_square = ((turn - 1) * (2 * turn - 1) / (6 * turn) + after) / n
        hinge_variance = hinge_square - hinge_mean**2
        # The centred values sum to 0, so those from the turn on sum to −sum_before.
        covariance = (weighted_before / turn - sum_before) / n
        explained = covariance * covariance / hinge_variance
        if explained > most_explained:
            best_turn, best_rise, most_explained = turn, covariance / hinge_variance, explained
    return ChangePoint(best_turn, best_rise, math.sqrt(max(0.0, variance - most_explained)))


class Jump(NamedTuple):
    """A sudden change of a curve's level."""

    row: int
    """The first row after it."""
    before: float
    after: float
    errors: float
    """Its size, in standard errors."""


JUMP_SHARE = 0.6
"""Share of a change of level that must happen between neighbouring rows for it to be a jump."""


def find_jump(values: Sequence[float]) -> Jump | None:
    """Find the largest change of level between two windows that follow each other, if it is sudden.

    >>> find_jump([0.0, 0.1] * 20 + [5.0, 5.1] * 20).row
    40
    """
    n = len(values)
    window = max(5, n // 12)
    if n < 4 * window:
        return None
    sums = [0.0, *accumulate(values)]
    # Half of the median distance of neighbours over 0.954 would be their deviation; jumps do not move a median.
    noise = median(abs(after - before) for before, after in pairwise(values)) / 0.954
    best = max(
        range(window, n - window),
        key=lambda row: abs(sums[row + window] - 2 * sums[row] + sums[row - window]),
    )
    before = (sums[best] - sums[best - window]) / window
    after = (sums[best + window] - sums[best]) / window
    if before == after:
        return None
    errors = abs(after - before) / (noise * math.sqrt(2 / window) + 1e-12)
    near = 3
    sudden = fmean(values[best : best + near]) - fmean(values[best - near : best])
    if sudden / (after - before) < JUMP_SHARE:
        return None
    return Jump(best, before, after, errors)


def onset(metric: Series, is_reached: Callable[[float], bool]) -> float:
    """Return the step from which a metric's running mean stays where a finding says that it is at the end.

    Args:
        metric: The metric.
        is_reached: Whether a mean is there.
    """
    values = metric.values
    window = max(1, len(values) // 20)
    sums = [0.0, *accumulate(values)]
    for row in range(len(values) - window, -1, -1):
        if not is_reached((sums[row + window] - sums[row]) / window):
            return metric.steps[min(row + window, len(values) - 1)]
    return metric.steps[0]


def find_spikes(values: Sequence[float], times: float) -> list[int]:
    """Return the rows whose value is many times that of the rows before and of the rows after it.

    Args:
        values: The values; zeros, as of steps without a gradient, do not lower what is usual.
        times: How many times.
    """
    above_zero = sorted(value for value in values if value > 0)
    if len(above_zero) < 10:
        return []
    usual = above_zero[len(above_zero) // 2]
    near = 5
    spikes = []
    # Few values are candidates, so that medians are computed for few.
    first_candidate = bisect.bisect_right(above_zero, times * usual / 2)
    if first_candidate == len(above_zero):
        return []
    least = above_zero[first_candidate]
    for row, value in enumerate(values):
        if value < least or row < near or row + near >= len(values):
            continue
        level = max(median(values[row - near : row]), median(values[row + 1 : row + 1 + near]), usual / 2)
        if value > times * level:
            spikes.append(row)
    return spikes


def fit_weights(
    target: Sequence[float], parts: Sequence[Sequence[float]]
) -> tuple[list[float], float] | None:
    """Fit a curve by a weighted sum of others and a constant, by least squares.

    Returns:
        The weights, and the share of the variance that they explain; None if the others depend on each other.

    >>> weights, explained = fit_weights([1.0, 3.0, 5.0, 8.0], [[0.0, 1.0, 2.0, 3.0], [1.0, 1.0, 1.0, 2.0]])
    >>> [round(weight, 6) for weight in weights], round(explained, 6)
    ([2.0, 1.0], 1.0)
    """
    n = len(target)
    means = [fmean(part) for part in (*parts, target)]
    centred = [[value - mean for value in part] for part, mean in zip((*parts, target), means, strict=True)]
    size = len(parts)
    matrix = [
        [sum(map(math.prod, zip(row, column, strict=True))) / n for column in centred] for row in centred[:-1]
    ]
    scale = max((matrix[i][i] for i in range(size)), default=0.0)
    for pivot in range(size):
        if matrix[pivot][pivot] <= 1e-9 * scale or scale == 0:
            return None
        for row in range(size):
            if row == pivot:
                continue
            factor = matrix[row][pivot] / matrix[pivot][pivot]
            matrix[row] = [x - factor * y for x, y in zip(matrix[row], matrix[pivot], strict=True)]
    weights = [matrix[i][size] / matrix[i][i] for i in range(size)]
    fitted = [sum(weight * part[k] for weight, part in zip(weights, centred, strict=False)) for k in range(n)]
    variance = sum(value * value for value in centred[-1])
    residual = sum((value - fit) ** 2 for value, fit in zip(centred[-1], fitted, strict=True))
    return weights, 1 - residual / variance if variance else 0.0
