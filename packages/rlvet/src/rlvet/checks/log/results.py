"""Results of checks of a log: a passed check with its figure, a check that shows nothing, and changes in words."""

from __future__ import annotations

import math

from rlvet._numbers import format_number, format_step
from rlvet.checks.course import Course, Series, lasting_row, lasting_row_below, noise_of_differences, tenths
from rlvet.checks.findings import Finding

ALL_ROWS = slice(None)
"""All rows of a metric."""

MOST = 0.5
"""Share above which a property is that of most answers, groups or tokens."""

FEW_STEPS = 8
"""Number of log steps below which trends of a metric are not checked."""


TENTHS = "from the first tenth of the run to the last"
"""The rows whose means are the two values of a change. A sentence with a change names them, once for all changes of the
same rows, so that two changes in it can be compared."""

THIRDS = "from the first third of the run to the last"
"""The same for thirds."""

TENTHS_OF_STEPS = "from the first tenth of these steps to the last"
"""The same for tenths of the steps that the sentence has named."""

THIRDS_OF_STEPS = "from the first third of these steps to the last"
"""The same for thirds of them."""

FIRST_ROW_TO_LAST_TENTH = "from the first log step to the last tenth"
"""The same for a change since before training."""


def change_text(before: float, after: float) -> str:
    """Return two values of a metric as a change. The sentence names their rows, as by `TENTHS`.

    >>> change_text(0.25, 1200)
    '0.25 → 1200'
    """
    return f"{format_number(before)} → {format_number(after)}"


def half_step(metric: Series) -> float:
    """Return the step by which half of the change of a metric was over; infinity if it did not change.

    >>> half_step(Series(range(20), [5.0] * 8 + [4.0, 3.0] + [0.0] * 10))
    10
    """
    if not metric.values or metric.first == metric.last:
        return math.inf
    middle = (metric.first + metric.last) / 2
    row_of = lasting_row_below if metric.last < metric.first else lasting_row
    return metric.steps[row_of(metric.values, middle)]


def before_the_limit(name: str, metric: Series, start: float | None) -> str:
    """Return a clause on the step by which half of a fall was over, if that was before its limit was passed.

    Args:
        name: The name of the metric.
        metric: The metric, whose last tenth is below the first.
        start: The step at which it passed the limit.
    """
    half = half_step(metric)
    if start is None or half >= start:
        return ""
    return f"; the {name} had lost half of this by step {format_step(half)}"


HIGHER = 3.0
"""Standard errors by which a tenth of a run must be above its first and its last, to be told between them."""


def higher_between(reward: Series) -> str:
    """Return a clause on a tenth of the run whose mean reward is clearly above those of the first and the last."""
    if len(reward.values) < 10:
        return ""
    means = tenths(reward.values)
    best = max(means)
    error = noise_of_differences(reward.values) / math.sqrt(len(reward.values) / 10)
    if best - max(means[0], means[-1]) <= HIGHER * error:
        return ""
    return f"; in the best tenth of the run, the reward was {format_number(best)}"


def passed_check(metric: Series, figure: float | None = None, measure: str = "", *parts: slice) -> Finding:
    """Return a check of a metric that passed, with the number of log steps and their range.

    Args:
        metric: The metric.
        figure: The measured quantity.
        measure: Its name.
        *parts: The rows that the figure was computed from, in parts; by default all rows.
    """
    steps = [part for rows in parts or (ALL_ROWS,) if len(part := metric.steps[rows])]
    ends = (steps[0][0], steps[-1][-1])
    return Finding("ok", True, "", figure, None, sum(map(len, steps)), steps=ends, measure=measure)


def undecided_check(advice: str) -> Finding:
    """Return a check that neither passed nor failed: the rows do not show that the property holds.

    A check that finds no fault passes only if its property is true of the rows. Between the two, nothing is claimed.

    Args:
        advice: The data to log for it, or the reason in a few words.
    """
    return Finding("ok", None, "", advice=advice)


def near_limit(advice: str) -> Finding:
    """Return a check that neither passed nor failed, as what it measures is near its limit.

    Args:
        advice: What was measured, in a few words.
    """
    return undecided_check(advice)._replace(is_near=True)


def lacks_rows(course: Course, rows: int, *names: str) -> Finding:
    """Return an undecided check of metrics that are not logged, or in fewer rows than it needs.

    Args:
        course: The metrics of the run.
        rows: The number of rows that the check needs.
        *names: The metrics, of which at least one has fewer.
    """
    missing = [name for name in names if not course.series(name).values]
    if missing:
        return undecided_check(f"not logged: {', '.join(missing)}")
    named = next((name for name in names if len(course.series(name).values) < len(course.rows)), "")
    return undecided_check(f"needs at least {rows} log steps{' with ' + named if named else ''}")


def first_tenth(metric: Series) -> slice:
    """Return the rows of the first tenth of a metric."""
    return slice(max(1, len(metric.values) // 10))


def last_tenth(metric: Series) -> slice:
    """Return the rows of the last tenth of a metric."""
    return slice(-max(1, len(metric.values) // 10), None)


def later_half(metric: Series) -> slice:
    """Return the rows of the second half of a metric."""
    return slice(len(metric.values) // 2, None)
