"""Tell the values of metrics that no check judges: those of a log without a verdict, and of an evaluation.

Needs only the standard library.
"""

from __future__ import annotations

from collections.abc import Collection

from rlvet._numbers import format_number, format_step
from rlvet.checks.course import Course, Series
from rlvet.runs.quantities import EVALUATION

TOLD = ("reward", EVALUATION, "length", "entropy", "kl", "grad_norm")
"""The metrics that are told of a log without a verdict."""

FEWEST_ROWS = 3
"""The number of log steps from which they are."""


def describe_values(name: str, metric: Series) -> str:
    """Return the first and the last value of a metric, and its largest and smallest one if they are others.

    >>> describe_values("reward", Series([1, 2, 3, 4], [0.5, 0.6, 0.1, 0.2]))
    'reward 0.5 → 0.2 (0.6 at step 2, 0.1 at step 3)'
    """
    values = metric.values
    if len(values) == 1:
        return f"{name} {format_number(values[0])} at step {format_step(metric.steps[0])}"
    ends = (values[0], values[-1])
    extremes = [
        f"{format_number(value)} at step {format_step(metric.steps[values.index(value)])}"
        for value in (max(values), min(values))
        if value not in ends
    ]
    between = f" ({', '.join(extremes)})" if extremes else ""
    return f"{name} {format_number(ends[0])} → {format_number(ends[1])}{between}"


def values_without_verdict(course: Course) -> str:
    """Return a sentence on the values of a log without a verdict; empty for one of few log steps."""
    if len(course.rows) < FEWEST_ROWS:
        return ""
    metrics = {name: course.series(name) for name in TOLD}
    texts = [describe_values(name, metric) for name, metric in metrics.items() if metric.values]
    title = "not judged, first → last log step (largest and smallest, if between)"
    return f"{title}: {'; '.join(texts)}" if texts else ""


MEASURED = ("entropy", "grad_norm", "length", "reward_std", "kl", "kl_old")
"""Quantities of which a measured one has several values."""

FEWEST_EQUAL = 20
"""The number of log steps with one value from which it is told."""


def constant_values(course: Course, told: Collection[str] = ()) -> str:
    """Return a sentence on measured quantities that have one value in all log steps, other than 0; empty without one.

    Args:
        course: The metrics.
        told: Quantities of which a finding tells, which are left out.

    >>> constant_values(Course([{"step": step, "entropy": 0.5} for step in range(20)]))
    'one value in all 20 log steps, so check that it is measured: entropy 0.5'
    """
    texts = []
    rows = 0
    for name in MEASURED:
        values = course.series(name).values
        if name not in told and len(values) >= FEWEST_EQUAL and min(values) == max(values) != 0:
            texts.append(f"{name} {format_number(values[0])}")
            rows = max(rows, len(values))
    if not texts:
        return ""
    are_measured = "it is" if len(texts) == 1 else "they are"
    return f"one value in all {rows} log steps, so check that {are_measured} measured: {', '.join(texts)}"


def values_of_evaluation(course: Course) -> str:
    """Return a sentence on the scores on other prompts; empty without them."""
    scores = course.series(EVALUATION)
    if not scores.values:
        return ""
    steps = f"{len(scores.values)} log steps" if len(scores.values) > 1 else "1 log step"
    return f"score on other prompts, in {steps}: {describe_values(EVALUATION, scores)}"
