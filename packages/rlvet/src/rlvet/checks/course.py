"""Statistics of a metric over a run: noise, means of ten equal parts, change points and jumps.

Only the standard library is needed.
"""

from __future__ import annotations

import bisect
import math
import operator
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, compress, groupby, islice, pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

from rlvet._numbers import format_number
from rlvet.runs.compact_rows import compact
from rlvet.runs.quantities import Row
from rlvet.runs.setup import Setup

if TYPE_CHECKING:
    from rlvet.checks.findings import Finding

Result = TypeVar("Result")


def _selected(values: Sequence[float], flags: Iterable[bool]) -> Sequence[float]:
    """Return the values whose flag is set, as an array if they are one."""
    selected = compress(values, flags)
    return array("d", selected) if isinstance(values, array) else list(selected)


@dataclass(frozen=True)
class Series:
    """A metric over a run: its values, and the training step of each. Means are computed once, as logs can be long."""

    steps: Sequence[float]
    values: Sequence[float]

    @property
    def points(self) -> Iterable[tuple[float, float]]:
        """Each step with its value."""
        return zip(self.steps, self.values, strict=True)

    def since(self, step: float) -> Series:
        """Return the part from a step on.

        >>> Series([1, 2, 3], [0.1, 0.2, 0.3]).since(2)
        Series(steps=[2, 3], values=[0.2, 0.3])
        """
        is_since = [one >= step for one in self.steps]
        return Series(_selected(self.steps, is_since), _selected(self.values, is_since))

    @cached_property
    def first(self) -> float:
        """The mean of the first tenth of the values."""
        return end_means(self.values, 10)[0]

    @cached_property
    def last(self) -> float:
        """The mean of the last tenth of the values."""
        return end_means(self.values, 10)[1]

    @cached_property
    def later_half(self) -> Sequence[float]:
        """The second half of the values."""
        return self.values[len(self.values) // 2 :]


class Course:
    """The metrics of a run over its steps. Each metric is collected from the rows once, when it is first used.

    Args:
        rows: The log, one row per log step.

    >>> Course([{"step": 1, "reward": 0.5}, {"step": 2}]).series("reward")
    Series(steps=[1], values=array('d', [0.5]))
    """

    def __init__(self, rows: Iterable[Row]):
        self.rows = compact(rows)
        self._series: dict[tuple[str, str], Series] = {}

    @cached_property
    def names(self) -> Sequence[str]:
        """The names of all metrics, in the order in which they were first logged."""
        return list(dict.fromkeys(chain.from_iterable(self.rows.layouts)))

    @cached_property
    def has_a_row_for_each_step(self) -> bool:
        """True if steps rise from row to row. A record has several rows of one step, each with some of the metrics."""
        steps = self.rows.column("step")
        return all(map(operator.lt, steps, islice(steps, 1, None)))

    def series(self, name: str, beside: str = "step") -> Series:
        """Return the steps and values of a metric in the rows that have it.

        Args:
            name: The metric.
            beside: Another metric that the rows have too.
        """
        key = (name, beside)
        if key not in self._series:
            self._series[key] = Series(self.rows.column("step", *key), self.rows.column(*key))
        return self._series[key]


class Examination:
    """What is examined, with what was concluded from it."""

    def __init__(self) -> None:
        self._conclusions: dict[Callable[..., Any], Any] = {}

    def of(self, function: Callable[[Self], Result]) -> Result:
        """Return what a check or another function concludes from this. It is called once.

        >>> case = Case(Course([{"step": 1, "reward": 0.5}]), Setup())
        >>> case.of(lambda case: len(case.course.rows))
        1
        """
        if function not in self._conclusions:
            self._conclusions[function] = function(self)
        return self._conclusions[function]


class Case(Examination):
    """A run under examination: its metrics and settings, and what was concluded from them.

    Args:
        course: The metrics.
        setup: The framework, method and settings, as far as they are known.
    """

    def __init__(self, course: Course, setup: Setup):
        super().__init__()
        self.course = course
        self.setup = setup
        self.findings: list[Finding] = []
        """The results of the checks before the one that is running."""


def end_means(values: Sequence[float], fraction: int) -> tuple[float, float]:
    """Compute the means of the first and of the last part of a curve.

    Args:
        values: The curve.
        fraction: The denominator of the size of each part, such as 10 for a tenth.
    """
    count = max(1, len(values) // fraction)
    return fmean(values[:count]), fmean(values[-count:])


BEGUN_BEFORE = 5
"""Step or epoch of the first row, in mean distances between rows, above which the run had begun before the log."""


def begins_in_the_middle(course: Course) -> bool:
    """Return whether a run had begun long before the first row of its log, by its steps or by its epochs.

    A run that was resumed may count its steps from 1, but its epoch goes on.

    >>> begins_in_the_middle(Course([{"step": 5.0 * row, "reward": 0.5} for row in range(1, 9)]))
    False
    >>> begins_in_the_middle(Course([{"step": float(row), "epoch": 0.8 + row / 100} for row in range(1, 9)]))
    True
    """
    return starts_late(course.rows.column("step")) or starts_late(course.series("epoch").values)


def starts_late(values: Sequence[float]) -> bool:
    """Return whether a counter has its first value many of its usual distances above 0.

    >>> starts_late([5.0, 10.0, 15.0]), starts_late([605.0, 610.0, 615.0])
    (False, True)
    """
    return len(values) > 1 and values[0] > BEGUN_BEFORE * (values[-1] - values[0]) / (len(values) - 1) > 0


def deviation(values: Sequence[float]) -> float:
    """Compute the standard deviation of a population.

    For long logs this is ten times faster than `statistics.pstdev`.

    >>> deviation([1.0, 3.0])
    1.0
    """
    n = len(values)
    return math.dist(values, [fmean(values)] * n) / math.sqrt(n)


def standard_error(values: Sequence[float]) -> float:
    """Compute the standard error of the mean of the values, ``√(Σ(x − mean)² / (n(n − 1)))``; 0 of a single one.

    >>> standard_error([1.0, 3.0])
    1.0
    """
    return deviation(values) / math.sqrt(max(1, len(values) - 1))


def noise_of_differences(values: Sequence[float]) -> float:
    """Compute the standard deviation of the differences between neighbouring values."""
    if len(values) < 2:
        return 0.0
    differences = list(map(operator.sub, values[1:], values))
    return deviation(differences)


def blocks(values: Sequence[float], count: int) -> list[Sequence[float]]:
    """Split a curve into consecutive blocks of nearly equal length. The longer blocks come first.

    >>> blocks([1, 2, 3, 4, 5], 2)
    [[1, 2, 3], [4, 5]]
    """
    size, longer_blocks = divmod(len(values), count)
    parts = []
    start = 0
    for block in range(count):
        end = start + size + (block < longer_blocks)
        parts.append(values[start:end])
        start = end
    return parts


def running_means(values: Sequence[float], window: int) -> list[float]:
    """Return the means of all windows of consecutive values.

    >>> running_means([1.0, 3.0, 5.0], 2)
    [2.0, 4.0]
    """
    sums = [0.0, *accumulate(values)]
    return [(end - start) / window for start, end in zip(sums, sums[window:], strict=False)]


def tenth_blocks(values: Sequence[float]) -> list[Sequence[float]]:
    """Split a curve into ten consecutive blocks of nearly equal length. The longer blocks come first."""
    return blocks(values, 10)


def tenths(values: Sequence[float]) -> list[float]:
    """Compute the means of the ten blocks of a curve of at least ten values."""
    return [fmean(block) for block in tenth_blocks(values)]


class Slope(NamedTuple):
    """The rise of a fitted line from the start of a curve to its end, with its standard error."""

    rise: float
    error: float

    @property
    def text(self) -> str:
        """The rise with two standard errors, in a sentence.

        >>> Slope(0.02, 0.011).text
        'a line through it rises by 0.02 ± 0.022 (two standard errors)'
        >>> Slope(-0.48, 0.18).text
        'a line through it falls by 0.48 ± 0.36 (two standard errors)'
        """
        change, two_errors = (format_number(number, 2) for number in (abs(self.rise), 2 * self.error))
        verb = "falls" if self.rise < 0 else "rises"
        return f"a line through it {verb} by {change} ± {two_errors} (two standard errors)"


ROUNDING = 1e-3
"""Relative rise per tenth that rounding may give to a flat curve."""


def fit_slope(values: Sequence[float]) -> Slope:
    """Fit a line to the means of the ten blocks of a curve.

    Block means are used because neighbouring steps are correlated.

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
    """Check whether a curve of at least ten values rises by more than two standard errors of the fitted slope."""
    slope = fit_slope(values)
    largest = max(abs(value) for value in tenths(values))
    return slope.rise > 2 * slope.error + 10 * ROUNDING * largest


def falls(values: Sequence[float]) -> bool:
    """Check whether a curve of at least ten values falls, as `rises` checks a rise, to a lower mean of the last third.

    >>> falls([1 - step / 50 for step in range(50)])
    True
    """
    before, after = end_means(values, 3)
    return after < before and rises([-value for value in values])


class ChangePoint(NamedTuple):
    """The point at which a curve stops rising linearly and becomes flat."""

    row: int
    """The row at which the curve becomes flat; 0 if a constant fits best."""
    rise: float
    """The rise of the curve up to that row."""
    noise: float
    """Standard deviation of the residuals."""


def find_change_point(values: Sequence[float]) -> ChangePoint:
    """Fit a line that becomes flat at some row, by least squares over all candidate rows.

    With ``h_t = min(t, turn)/turn`` the fit is ``values ≈ a + rise·h``, and its residual variance is
    ``var(values) − cov(h, values)²/var(h)``. Running sums give this variance for every turn in one pass.

    >>> find_change_point([min(t, 10.0) for t in range(40)]).row
    10
    """
    n = len(values)
    mean = fmean(values)
    centred = array("d", (value - mean for value in values))
    variance = math.fsum(map(operator.mul, centred, centred)) / n
    best_turn = 0
    best_rise = 0.0
    most_explained = 0.0  # the largest explained variance so far

    weighted_before = 0.0  # Σ t·v_t over the rows before the turn
    sum_before = 0.0  # Σ v_t over the rows before the turn
    first_turn = max(1, n // 20)
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
            best_turn = turn
            best_rise = covariance / hinge_variance
            most_explained = explained
    noise = math.sqrt(max(0.0, variance - most_explained))
    return ChangePoint(best_turn, best_rise, noise)


class Jump(NamedTuple):
    """A sudden change of a curve's level."""

    row: int
    """The first row after the jump."""
    before: float
    """The mean of the window before the jump."""
    after: float
    """The mean of the window after the jump."""
    errors: float
    """The size of the jump, in standard errors."""


class Dip(NamedTuple):
    """A part of a curve, as long as a tenth of it, that is below a part before it and another one after it.

    That of `find_hump` is above both.
    """

    rows: slice
    """The rows of the lowest such part."""
    before: float
    """The largest mean of as many rows before it."""
    within: float
    """Its mean."""
    after: float
    """The largest mean of as many rows after it."""
    errors: float
    """The smaller of both differences, in standard errors of a mean of its rows."""


def find_hump(values: Sequence[float]) -> Dip | None:
    """Find the part that is farthest above both a part before it and one after it; None if the curve is too short.

    >>> find_hump([0.1, 0.2] * 15 + [0.9] * 10 + [0.6, 0.5] * 30).rows
    slice(30, 40, None)
    """
    dip = find_dip([-value for value in values])
    if dip is None:
        return None
    return Dip(dip.rows, -dip.before, -dip.within, -dip.after, dip.errors)


def find_dip(values: Sequence[float], size: int = 0) -> Dip | None:
    """Find the part that is farthest below both a part before it and one after it; None if the curve is too short.

    Args:
        values: The curve.
        size: Number of rows of a part; by default a tenth of the curve, and at least five.

    >>> find_dip([0.9, 0.8] * 15 + [0.1] * 10 + [0.6, 0.5] * 30).rows
    slice(30, 40, None)
    """
    size = size or max(5, len(values) // 10)
    means = running_means(values, size)
    if len(means) < 2 * size + 1:
        return None
    largest_before = list(accumulate(means, max))
    largest_after = list(accumulate(reversed(means), max))[::-1]

    def depth(row: int) -> float:
        return min(largest_before[row - size], largest_after[row + size]) - means[row]

    row = max(range(size, len(means) - size), key=depth)
    errors = depth(row) / (noise_of_differences(values) / math.sqrt(size) + 1e-12)
    return Dip(
        slice(row, row + size), largest_before[row - size], means[row], largest_after[row + size], errors
    )


JUMP_SHARE = 0.6
"""Share of a change of level that must happen within a few rows for it to be a jump."""


def find_jump(values: Sequence[float]) -> Jump | None:
    """Find the largest change of level between two adjacent windows, if it is sudden.

    >>> find_jump([0.0, 0.1] * 20 + [5.0, 5.1] * 20).row
    40
    """
    n = len(values)
    window = max(5, n // 12)
    if n < 4 * window:
        return None
    sums = [0.0, *accumulate(values)]
    # The median distance between neighbours is 0.954 standard deviations for normal noise. Jumps hardly change it.
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

    # A gradual change differs little between the few rows on either side.
    near = 3
    change_nearby = fmean(values[best : best + near]) - fmean(values[best - near : best])
    if change_nearby / (after - before) < JUMP_SHARE:
        return None
    # The windows may fit best a row or two beside the largest step.
    direction = math.copysign(1.0, after - before)
    row = max(
        range(best - near, best + near + 1), key=lambda other: direction * (values[other] - values[other - 1])
    )
    return Jump(row, fmean(values[max(0, row - window) : row]), fmean(values[row : row + window]), errors)


def onset(
    metric: Series, condition: Callable[[float], bool], row_condition: Callable[[float], bool] | None = None
) -> float | None:
    """Return the first step from which on the running mean of a metric meets a condition.

    The value at that step meets the condition too, and short gaps do not count. If the running mean does not meet it up
    to the end, the longest part of the run in which it does counts. None if it never does.

    Args:
        metric: The metric.
        condition: Returns True for a mean that meets the condition.
        row_condition: The same for the value at the step, if that condition is another one.

    >>> onset(Series([1, 2, 3, 4, 5], [0.0, 0.0, 1.0, 0.0, 1.0]), lambda mean: mean > 0.5)
    5
    """
    window, parts = _parts(metric.values, condition)
    if not parts:
        return None
    first, last = parts[-1]
    if last < len(metric.values) - window:
        first, last = max(parts, key=lambda part: part[1] - part[0])
    else:
        first = _start_without_gaps(parts)
    return _first_step_in(metric, first, last, window, row_condition or condition)


def _start_without_gaps(parts: Sequence[tuple[int, int]]) -> int:
    """Return the start of the last part, with the parts before it that the gaps between them do not outweigh.

    >>> _start_without_gaps([(0, 0), (10, 19), (22, 30)]), _start_without_gaps([(0, 3), (10, 12)])
    (10, 10)
    """
    best = first, last = parts[-1]
    balance = largest = last - first + 1
    for earlier, end in reversed(parts[:-1]):
        balance += (end - earlier + 1) - (first - end - 1)
        first = earlier
        if balance > largest:
            best, largest = (earlier, end), balance
    return best[0]


def earliest_onset(metric: Series, condition: Callable[[float], bool]) -> float | None:
    """Return the first step of the earliest tenth or more of a run in which the running mean meets a condition.

    It is that of a fault that stays in the weights while its metric comes back for a time. If no part is so long, it is
    the `onset`.

    >>> earliest_onset(Series(range(1, 21), [0.0] * 4 + [1.0] * 6 + [0.0] * 5 + [1.0] * 5), lambda mean: mean > 0.5)
    5
    """
    window, parts = _parts(metric.values, condition)
    for first, last in parts:
        if last - first + 1 >= len(metric.values) / 10:
            return _first_step_in(metric, first, last, window, condition)
    return onset(metric, condition)


def first_window(metric: Series, condition: Callable[[float], bool]) -> tuple[float, int] | None:
    """Return the first step that meets a condition in the first window whose mean does, and the window's rows, or None.

    >>> first_window(Series(range(1, 41), [0.0] * 10 + [1.0] * 4 + [0.0] * 26), lambda mean: mean > 0.5)
    (11, 2)
    """
    window, parts = _parts(metric.values, condition)
    if not parts:
        return None
    row = next(row for row in range(parts[0][0], len(metric.values)) if condition(metric.values[row]))
    return metric.steps[row], window


def _parts(values: Sequence[float], condition: Callable[[float], bool]) -> tuple[int, list[tuple[int, int]]]:
    """Return the length of a window, and the first and last one of each part in which its mean meets a condition."""
    window = max(1, len(values) // 20)
    meets = map(condition, running_means(values, window))
    parts: list[tuple[int, int]] = []
    start = 0
    for window_meets, windows in groupby(meets):
        end = start + sum(1 for _ in windows)
        if window_meets:
            parts.append((start, end - 1))
        start = end
    return window, parts


def _first_step_in(
    metric: Series, first: int, last: int, window: int, row_condition: Callable[[float], bool]
) -> float | None:
    """Return the step at which a part begins: one whose value meets a condition too.

    It is the last row of the first window, unless the condition is met from the start on, or a row near it; and the
    first of the rows of that window up to it that meet the condition too.
    """
    middle = first + window - 1 if first else 0
    for row in chain(range(middle, last + window), range(first, middle)):
        if row_condition(metric.values[row]):
            while row > first and row_condition(metric.values[row - 1]):
                row -= 1
            return metric.steps[row]
    return None


def lasting_row(values: Sequence[float], limit: float) -> int:
    """Return the row from which on values are above a limit, but for dips that the values around them outweigh.

    The values must end above the limit. The row is that at which the sum of all earlier distances from the limit is the
    lowest, so that neither a single high value before it nor a low one after it counts.

    >>> lasting_row([0.0, 0.6, 0.0, 0.9, 0.4, 0.9, 0.9], 0.5)
    3
    """
    sums = [0.0, *accumulate(value - limit for value in values)]
    return len(values) - sums[::-1].index(min(sums))


def lasting_row_below(values: Sequence[float], limit: float) -> int:
    """Return the row from which on values are below a limit, as `lasting_row` does for those above one.

    >>> lasting_row_below([0.9, 0.4, 0.9, 0.1, 0.6, 0.1], 0.5)
    3
    """
    return lasting_row([-value for value in values], -limit)


SPIKE_REACH = 5
"""Number of rows before a spike, and after it, with which it is compared."""


def find_spikes(values: Sequence[float], factor: float) -> list[int]:
    """Return the rows whose value is many times the median of the rows before it, and of the rows after it.

    Args:
        values: The values. Zeros, as of steps without a gradient, are left out of the usual level.
        factor: A spike is more than this many times the values around it.
    """
    above_zero = sorted([value for value in values if value > 0])
    if len(above_zero) < 10:
        return []
    usual = above_zero[len(above_zero) // 2]
    spikes = []

    # Only large values can be spikes, so that medians are computed for few rows.
    first_candidate = bisect.bisect_right(above_zero, factor * usual / 2)
    if first_candidate == len(above_zero):
        return []
    smallest_candidate = above_zero[first_candidate]
    for row, value in enumerate(values):
        if value < smallest_candidate or row < SPIKE_REACH or row + SPIKE_REACH >= len(values):
            continue
        level_before = median(values[row - SPIKE_REACH : row])
        level_after = median(values[row + 1 : row + 1 + SPIKE_REACH])
        if value > factor * max(level_before, level_after, usual / 2):
            spikes.append(row)
    return spikes


def fit_weights(
    target: Sequence[float], curves: Sequence[Sequence[float]]
) -> tuple[list[float], float] | None:
    """Fit a curve by a weighted sum of other curves and a constant, by least squares.

    Args:
        target: The curve to fit, (n,).
        curves: The other curves, each (n,).

    Returns:
        The weights, and the share of the target's variance that they explain; None if the curves are linearly
        dependent.

    >>> weights, explained = fit_weights([1.0, 3.0, 5.0, 8.0], [[0.0, 1.0, 2.0, 3.0], [1.0, 1.0, 1.0, 2.0]])
    >>> [round(weight, 6) for weight in weights], round(explained, 6)
    ([2.0, 1.0], 1.0)
    """
    n = len(target)
    centred = []
    for curve in (*curves, target):
        mean = fmean(curve)
        centred.append([value - mean for value in curve])

    # The normal equations: covariances of the curves, with those of the target as the last column.
    size = len(curves)
    matrix = []
    for first in centred[:-1]:
        covariances = [sum(map(math.prod, zip(first, second, strict=True))) / n for second in centred]
        matrix.append(covariances)

    # Gauss-Jordan elimination.
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

    fitted = []
    for k in range(n):
        fitted.append(sum(weight * curve[k] for weight, curve in zip(weights, centred, strict=False)))
    variance = sum(value * value for value in centred[-1])
    residual = sum((value - fit) ** 2 for value, fit in zip(centred[-1], fitted, strict=True))
    explained = 1 - residual / variance if variance else 0.0
    return weights, explained


def rise_in_errors(metric: Series) -> float:
    """Compute by how many standard errors the mean of the last third of a metric is above that of the first third."""
    third = max(1, len(metric.values) // 3)
    noise = noise_of_differences(metric.values) / math.sqrt(third)
    before, after = end_means(metric.values, 3)
    return (after - before) / (noise + 1e-12)


def ends_higher(reward: Series) -> bool:
    """Return whether the mean of the last third of the rewards is above that of the first."""
    before, after = end_means(reward.values, 3) if reward.values else (0.0, 0.0)
    return after > before


def clearly_rises(rewards: Sequence[float]) -> bool:
    """Check whether the last third of the rewards is above the first by 10 % and by two standard errors.

    Of rewards between 0 and 1 it is enough that a tenth less is missing to 1, by four standard errors, as near 1 they
    cannot rise by 10 %.
    """
    # The noise of one step is estimated from neighbouring steps; a third of the steps is averaged at either end.
    error = noise_of_differences(rewards) / math.sqrt(max(1, len(rewards) // 3))
    before, after = end_means(rewards, 3)
    if after - before > max(0.1 * abs(before), 2 * error):
        return True
    is_share = min(rewards) >= 0 and max(rewards) <= 1
    return is_share and after - before > max(0.1 * (1 - before), 4 * error)


def largest_mean(values: Sequence[float], window: int) -> float:
    """Return the largest mean of consecutive values."""
    return max(running_means(values, window))
