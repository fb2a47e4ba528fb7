"""Check that a run lives to its end: its metrics are logged, and its reward and its gradient are not those of death."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Container, Sequence
from statistics import fmean, median

from rlvet._numbers import format_number, format_step
from rlvet.checks.course import Case, Course, Series, noise_of_differences, tenth_blocks, tenths
from rlvet.checks.findings import Finding, Kind
from rlvet.checks.liveness import (
    ALONE,
    FAMILIES,
    FEWEST_LIVE,
    LOSS,
    SHORTEST,
    SHORTEST_FROZEN,
    TOGETHER,
    Death,
    Streak,
    deaths_of,
    is_solved,
    is_usual_loss,
    streaks_by_name,
)
from rlvet.checks.log.length import TRUNCATED
from rlvet.checks.log.movement import NO_STEP
from rlvet.checks.log.numbers import NOT_A_NUMBER
from rlvet.checks.log.results import undecided_check
from rlvet.checks.log.reward import COLLAPSE, REWARD_FLAT, check_fall, start_of_fall
from rlvet.checks.log.signal import NO_SIGNAL, is_of_batches
from rlvet.checks.registry import LOGS
from rlvet.runs.quantities import QUANTITIES

FEWEST_ROWS = 20
"""Number of log steps below which it is not said that a run lives."""

WORDS = {
    "reward": "the reward",
    "dead": "the share of groups with equal rewards",
    "reward_std": "the standard deviation of rewards",
    "cut": "the share of answers cut off",
    "length": "the mean length",
    "kl": "KL to the reference",
    "grad_norm": "the gradient norm",
    LOSS: "the loss",
    "mismatch_kl": "KL between engine and trainer",
    "mismatch": "the distance of engine and trainer",
    "mismatch_probs": "the distance of engine and trainer",
}
"""The names of metrics in a sentence; others have their own."""

RUN_DIED = Kind(
    code="run-died",
    severity="stop",
    meaning="the run died: from a step on, its metrics are those of a run that learns nothing",
    condition=(
        f"for {TOGETHER} log steps in a row two of reward, groups, answers, entropy, KL, gradient and engine are "
        f"missing, repeat one value, or are far from all values before; or the reward alone for {ALONE}, from "
        f"{TOGETHER} on as `fix`. If they have other values again, `look`"
    ),
    remedy="look at the log and the answers of the step before",
    resume=", and",
    is_in_the_weights=True,
    is_effect_of_large_steps=True,
    evidence=(
        "reward",
        "dead",
        "reward_std",
        "cut",
        "length",
        "kl",
        "entropy",
        "grad_norm",
        "mismatch_kl",
        "mismatch",
        "mismatch_probs",
    ),
    source="simulated deaths of `benchmarks/doctor/deaths.py`",
    scenarios=("dies late",),
)


def _values_in_rows(streak: Streak, death: Death, course: Course) -> list[float]:
    """Return the values of the metric of a streak in the rows of a death, which may be shorter."""
    first, last = (course.rows[row]["step"] for row in (death.first, death.last))
    return [value for step, value in course.series(streak.name).points if first <= step <= last]


def _first_row(death: Death, course: Course) -> int:
    """Return the first row of a death, also if it is among the rows that tell what is usual, which are not judged."""
    row = death.first
    if row > FEWEST_LIVE:
        return row
    metrics = []
    for streak in death.streaks[:2]:
        if streak.state == "missing":
            return row
        values = dict(course.series(streak.name).points)
        dead = [
            values[step]
            for step in course.rows.column("step")[death.first : death.last + 1]
            if step in values
        ]
        if not dead:
            # The loss, whose key differs from framework to framework.
            return row
        low = -math.inf if streak.state == "low" else min(dead)
        high = math.inf if streak.state == "high" else max(dead)
        metrics.append((values, low, high))
    while row > 0:
        step = course.rows[row - 1]["step"]
        if not all(low <= values.get(step, math.nan) <= high for values, low, high in metrics):
            break
        row -= 1
    return row


def _describe(streak: Streak, case: Case, values: Sequence[float] = ()) -> str:
    """Return what a metric does in a streak, in a clause.

    Args:
        streak: The streak.
        case: The run.
        values: The values of the rows that are told; by default all of it.
    """
    name = WORDS.get(streak.name, streak.name)
    if streak.name == "dead" and is_of_batches(case.setup):
        name = name.replace("groups", "batches")
    if streak.state == "missing":
        return f"{name} is not logged"
    value = format_number(median(values) if values else streak.value)
    if streak.state != "frozen":
        return f"{name} {format_number(streak.before)} → {value}"
    if len(set(values)) > 1:
        return f"{name} repeats {', '.join(format_number(one) for one in sorted(set(values)))}"
    return f"{name} is {value} in each row"


def _streaks(case: Case) -> dict[str, list[Streak]]:
    """Return the streaks in which each metric is dead."""
    return streaks_by_name(case.course)


def _deaths(case: Case) -> list[Death]:
    """Return the parts of a run in which it is dead."""
    return deaths_of(case.course, case.of(_streaks))


SIGNS_OF_LIFE = ("reward", "reward_std", "grad_norm", "kl", "entropy")
"""Quantities of which one that learns has several values."""


def _is_constant(metric: Series) -> bool:
    """Return whether a metric has one value in all log steps."""
    return len(set(metric.values)) == 1


USUAL_AT_THE_END = 0.5
"""Share of the rows before with a value, from which the same value in all rows up to the end is no sign of death."""

USUAL_IN_PASSING = 0.1
"""The same, of all other rows, for a value that a metric repeats for some rows in passing."""


def _live_steps(deaths: Sequence[Death], course: Course) -> set[float]:
    """Return the steps of the rows that are in no streak of a death."""
    dead_rows: set[int] = set()
    for death in deaths:
        for streak in death.streaks:
            dead_rows.update(range(streak.first, streak.last + 1))
    return {step for row, step in enumerate(course.rows.column("step")) if row not in dead_rows}


def _is_sure(death: Death, live_steps: set[float], course: Course) -> bool:
    """Return whether a death is one also by the values of all rows in which no metric is dead.

    Few answers give few different mean rewards and spreads, and the mean length of answers that are all cut off is the
    cap, so that such values repeat for some rows by chance.

    Args:
        death: The part of the run in which it may be dead.
        live_steps: The steps of the rows in which no metric is dead.
        course: The metrics of the run.
    """
    most = USUAL_AT_THE_END if death.lasts else USUAL_IN_PASSING
    signs = []
    for streak in death.streaks:
        live_values = [value for step, value in course.series(streak.name).points if step in live_steps]
        dead_values = {streak.value, *_values_in_rows(streak, death, course)}
        is_usual = [_is_as_far_out(value, streak, dead_values) for value in live_values]
        if sum(is_usual) <= most * len(live_values):
            signs.append(streak)
    if len(signs) == 1 and not death.lasts:
        return signs[0].name == "reward" and death.rows >= ALONE
    return bool(signs)


def _is_as_far_out(value: float, streak: Streak, dead_values: Container[float]) -> bool:
    """Return whether a value would be a sign of death as those of a streak are."""
    if streak.state == "low":
        return value <= streak.value
    if streak.state == "high":
        return value >= streak.value
    return streak.state == "frozen" and value in dead_values


@LOGS.check(
    "the life of the run",
    after="a fall of the reward",
    tested="metrics live to the last log step",
    explained="no two metrics are dead at once, and the reward is not for long",
    reports=(RUN_DIED,),
)
def check_life(case: Case) -> Finding:
    """Check that no two metrics are dead for some rows, and that the reward is not for more."""
    course = case.course
    possible = case.of(_deaths)
    live_steps = _live_steps(possible, course)
    deaths = [death for death in possible if _is_sure(death, live_steps, course)]
    rewards = course.series("reward")
    if not deaths:
        if len(rewards.values) < FEWEST_ROWS:
            return undecided_check(f"needs at least {FEWEST_ROWS} log steps with a reward")
        constant = [name for name in SIGNS_OF_LIFE if _is_constant(course.series(name))]
        if "reward" in constant and len(constant) > 1:
            return undecided_check(f"one value in all log steps: {', '.join(constant)}")
        if case.of(check_fall).ok is False:
            # Rows near the start are taken for live ones.
            return undecided_check("the reward is lost, which another finding reports")
        return Finding("ok", True, "")
    # The death at the end, or the longest one.
    death = deaths[-1] if deaths[-1].lasts else max(deaths, key=lambda one: one.rows)
    first = _first_row(death, course)
    death = death._replace(first=first)
    start = course.rows[first]["step"]
    end = course.rows[death.last]["step"]
    clauses = "; ".join(
        _describe(streak, case, _values_in_rows(streak, death, course)) for streak in death.streaks[:2]
    )
    steps = (
        f"from step {format_step(start)} on"
        if death.lasts
        else f"from step {format_step(start)} to {format_step(end)}"
    )
    cause = f"{clauses}, {steps}" + ("" if death.lasts else "; after that they have other values again")
    finding = Finding(
        "ok", True, "", death.rows, None, death.rows, steps=(start, end), measure="dead log steps"
    )
    if _is_told(case, death, start):
        return undecided_check("reported by another finding")
    quantities = [streak.name for streak in death.streaks if streak.name in QUANTITIES]
    severity = "look"
    if death.lasts:
        severity = "stop" if death.is_sure else "fix"
        fall = _fall_into(death, course)
        if fall is not None and fall < start:
            start = fall
            cause = f"{cause}; the reward falls from step {format_step(start)} on"
    return finding.failed(RUN_DIED, cause, severity=severity, onset=start, quantities=quantities)


NEAR_ROWS = 3
"""Number of log steps right before a death whose mean reward shows whether it fell slowly."""


def _fall_into(death: Death, course: Course) -> float | None:
    """Return the step from which on the reward fell slowly to that of a dead run; None if it did not."""
    streak = death.streaks[0]
    if streak.name != "reward" or not streak.value < streak.before:
        return None
    reward = course.series("reward")
    live = bisect.bisect_left(reward.steps, course.rows[death.first]["step"])
    if live < FEWEST_ROWS:
        return None
    means = tenths(reward.values[:live])
    best = max(range(10), key=lambda tenth: means[tenth])
    loss = means[best] - streak.value
    # Most of the reward is still there right before a sudden death.
    if fmean(reward.values[live - NEAR_ROWS : live]) > means[best] - loss / 2:
        return None
    first = sum(len(block) for block in tenth_blocks(reward.values[:live])[:best])
    noise = noise_of_differences(reward.values[:live]) / math.sqrt(live / 10)
    end = live + streak.rows
    since_best = Series(reward.steps[first:end], reward.values[first:end])
    return start_of_fall(since_best, means[best], loss, 2 * noise)


def _is_told(case: Case, death: Death, start: float) -> bool:
    """Return whether a fault before has told the loss of the reward."""
    for finding in case.findings:
        is_loss = finding.kind in (COLLAPSE, REWARD_FLAT) and finding.ok is False
        if is_loss and finding.onset is not None and finding.onset <= start:
            return death.streaks[0].name == "reward"
    return False


TOLD_BY = {
    REWARD_FLAT: {"reward"},
    # Answers that are all cut off have the cap as their length.
    TRUNCATED: {"cut", "length", "length_finished"},
    NO_SIGNAL: {"dead", "reward_std"},
}
"""The kinds of findings that tell of metrics with one value, each with these metrics."""

CLEAR_FOR_ONE = math.log(50)
"""Logarithm of the number of courses, of which one has as many equal rows by chance, from which a metric is lost."""

METRIC_LOST = Kind(
    code="metric-lost",
    severity="look",
    meaning="a metric is no longer logged, or repeats one value",
    condition=(
        f"a quantity or the loss is null, absent or NaN in the last {SHORTEST} or more log steps, more than twice as "
        f"long as ever before; or it repeats one value in the last {SHORTEST_FROZEN} or more, as it never did"
    ),
    remedy="check what writes it: a reward function or a loss that fails leaves no other trace in a log",
    evidence=("all quantities",),
    source="runs whose grader failed for every answer, with a reward of null",
    scenarios=("grader fails",),
)


@LOGS.check(
    "metrics up to the end",
    after="the life of the run",
    tested="metrics are logged to the end, and those that changed still do",
    explained="no quantity is missing or repeats one value from a step on",
    reports=(METRIC_LOST,),
)
def check_metrics(case: Case) -> Finding:
    """Check that each metric that was ever logged is logged to the end, and does not repeat one value there."""
    course = case.course
    streaks = itertools.chain.from_iterable(case.of(_streaks).values())
    lost = [streak for streak in streaks if _is_lost(streak, case)]
    if not lost:
        if len(course.rows) < FEWEST_ROWS:
            return undecided_check(f"needs at least {FEWEST_ROWS} log steps")
        return Finding("ok", True, "")
    deaths = case.of(_deaths)
    dead = {FAMILIES[streak.name] for death in deaths if death.lasts for streak in death.streaks}
    told = {name for name, family in FAMILIES.items() if family in dead}
    for finding in case.findings:
        if finding.kind is NOT_A_NUMBER:
            told |= {*finding.quantities, LOSS}
        elif finding.kind is NO_STEP:
            told |= {*finding.quantities}
        elif finding.kind is not None:
            told |= TOLD_BY.get(finding.kind, set())
    lost = [streak for streak in lost if streak.name not in told]
    if not lost:
        return undecided_check("reported by another finding")
    clauses = []
    starts = {streak.name: _first_step(streak, course) for streak in lost}
    for streak in lost[:3]:
        clauses.append(f"{_describe(streak, case)} from step {format_step(starts[streak.name])} on")
    more = f"; and {len(lost) - 3} more" if len(lost) > 3 else ""
    first = min(lost, key=lambda streak: streak.first)
    steps = (starts[first.name], course.rows[-1]["step"])
    rows = len(course.rows) - first.first
    finding = Finding("ok", True, "", rows, None, rows, steps=steps, measure="log steps since then")
    quantities = [streak.name for streak in lost if streak.name in QUANTITIES]
    return finding.failed(METRIC_LOST, f"{'; '.join(clauses)}{more}", onset=steps[0], quantities=quantities)


def _first_step(streak: Streak, course: Course) -> float:
    """Return the first step of a streak, with the first of the equal values of one that repeats its value."""
    step = course.rows[streak.first]["step"]
    if streak.state != "frozen":
        return step
    series = course.series(streak.name)
    row = bisect.bisect_left(series.steps, step) - 1
    return series.steps[row] if row >= 0 and series.values[row] == streak.value else step


def _is_lost(streak: Streak, case: Case) -> bool:
    """Return whether a metric is lost to the end.

    A reward at its best, and what follows from it, is not; nor is a loss of 0 beside a gradient that lives.
    """
    if is_usual_loss(streak, case.course, case.of(_streaks)):
        return False
    if not streak.lasts or streak.state not in ("missing", "frozen") or streak.evidence < CLEAR_FOR_ONE:
        return False
    if streak.state == "missing":
        return streak.name != "length_finished"
    return not is_solved(streak, case.course)
