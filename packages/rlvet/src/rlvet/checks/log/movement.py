"""Check that weights move, and by enough to learn."""

from __future__ import annotations

from decimal import Decimal
from itertools import groupby

from rlvet._numbers import format_number
from rlvet.checks.course import Case, Course, Series, end_means, ends_higher, rise_in_errors, rises, tenths
from rlvet.checks.findings import Finding, Kind
from rlvet.checks.log.results import (
    FEW_STEPS,
    THIRDS,
    change_text,
    lacks_rows,
    last_tenth,
    passed_check,
    undecided_check,
)
from rlvet.checks.registry import LOGS

NO_MOVEMENT = {"learning_rate": 1e-9, "grad_norm": 0.0}
"""For each quantity, the value up to which weights do not change. Adam changes them by about the learning rate, and in
float32 0.02 + 1e-9 is rounded to 0.02."""

MOST_PLACES = 4
"""Number of decimals up to which a metric may have been rounded, so that its 0 is only a small number."""

NO_STEP = Kind(
    code="no-step",
    severity="stop",
    meaning="the weights do not move",
    condition=(
        f"the learning rate never exceeds {NO_MOVEMENT['learning_rate']:g}, as float32 weights do not change "
        "by less; or the gradient is 0 although rewards differ, in all log steps or from one on: the last "
        f"{FEW_STEPS} or more, more than twice as many as ever before (`fix` if they may be rounded to 0), while it is "
        "`no-signal` if all rewards are equal; or ratios stay 1 after updates"
    ),
    remedy=(
        "if the learning rate is 0, raise it{learning rate} or check its schedule; if the gradient is 0, "
        "check that the loss depends on trainable weights"
    ),
    settings=("learning rate",),
    evidence=("learning_rate", "grad_norm"),
    source="modelscope/ms-swift issues 5571 and 5890",
    scenarios=("learning rate 0", "no step"),
)


def _rewards_differ(course: Course) -> bool:
    """Check whether the rewards of some group differ, so that there must be a gradient; True if this is not known."""
    dead = course.series("dead").values
    if dead:
        return min(dead) < 1
    spreads = course.series("reward_std").values
    if spreads:
        # Rewards that differ from prompt to prompt, and not within a group, give no gradient.
        return any(spreads)
    rewards = course.series("reward").values
    return not rewards or len(set(rewards)) > 1


def _has_signal_without_gradient(course: Course) -> bool:
    """Check whether every gradient is 0 although the rewards of some group are known to differ."""
    dead = course.series("dead").values
    spreads = course.series("reward_std").values
    if dead:
        has_signal = min(dead) < 1
    else:
        has_signal = bool(spreads) and min(spreads) > 0
    norms = course.series("grad_norm").values
    return has_signal and bool(norms) and not any(norms)


def rows_at_0(metric: Series) -> int:
    """Return the number of last values that are 0; 0 if all are, or earlier ones were for half as long.

    Some loops log a row for each part of a batch, and a gradient only in the row of the update.

    >>> rows_at_0(Series(range(9), [0.3, 0.2, 0.3, 0, 0.3, 0, 0, 0, 0])), rows_at_0(Series(range(4), [0, 0.3, 0, 0]))
    (4, 0)
    """
    streaks = [(is_0, sum(1 for _ in rows)) for is_0, rows in groupby(metric.values, lambda value: not value)]
    *earlier, (is_0, rows) = streaks
    longest = max((length for was_0, length in earlier if was_0), default=0)
    return rows if is_0 and earlier and rows > 2 * longest else 0


def _places(metric: Series) -> int:
    """Return the largest number of decimals of the values.

    >>> _places(Series([1, 2], [0.25, 0.0])), _places(Series([1], [1e-7]))
    (2, 7)
    """
    return max(-int(Decimal(repr(value)).as_tuple().exponent) for value in metric.values if value)


def _have_signal(course: Course, since: float) -> bool:
    """Check whether rewards of a group differ in several log steps from one on.

    Without a metric that shows it, rewards that change from step to step take its place.
    """
    shares = course.series("dead").since(since).values
    spreads = course.series("reward_std").since(since).values
    if shares:
        return sum(share < 1 for share in shares) >= FEW_STEPS
    if spreads:
        return sum(spread > 0 for spread in spreads) >= FEW_STEPS
    return len(set(course.series("reward").since(since).values)) > 1


def _check_last_rows(course: Course, name: str) -> Finding | None:
    """Check that a metric is not 0 in the last log steps; return None if it is not."""
    metric = course.series(name)
    rows = rows_at_0(metric)
    if rows < FEW_STEPS:
        return None
    places = _places(metric)
    is_rounded = places <= MOST_PLACES
    start = metric.steps[-rows]
    decimals = f", to {places} decimals," if is_rounded else ""
    cause = f"{name} is 0{decimals} in the last {rows} log steps"
    # A learning rate of 0 may be the end of a schedule that is shorter than the run.
    if name == "learning_rate" or not _have_signal(course, start):
        return undecided_check(cause)
    has_groups = course.series("dead").values or course.series("reward_std").values
    cause = f"{cause}, though {'rewards of a group differ' if has_groups else 'the reward changes'}"
    finding = passed_check(metric, rows, f"last log steps with a {name} of 0", slice(-rows, None))
    severity = "fix" if is_rounded else "stop"
    return finding.failed(NO_STEP, cause, severity=severity, onset=start, quantities=[name])


NEARLY_ALL = 0.95
"""Share of the log steps with a gradient of 0 from which the others do not show that weights move."""


@LOGS.check(
    "whether weights move",
    after="values that are no numbers",
    tested="weights move",
    explained="learning rate and gradient norm are above 0",
    reports=(NO_STEP,),
)
def check_movement(case: Case) -> Finding:
    """Check that the learning rate is above 0, and the gradient too if rewards differ."""
    course = case.course
    finding = lacks_rows(course, FEW_STEPS, *NO_MOVEMENT)
    for name, limit in NO_MOVEMENT.items():
        metric = course.series(name)
        # A few steps are no evidence, since a warm-up begins at 0.
        if len(metric.values) < FEW_STEPS:
            if name == "grad_norm" and _has_signal_without_gradient(course):
                cause = (
                    f"grad_norm is 0 in all {len(metric.values)} log steps, though rewards of a group differ"
                )
                finding = passed_check(metric, 0.0, f"largest {name}")
                return finding.failed(NO_STEP, cause, onset=metric.steps[0], quantities=[name])
            continue
        largest = max(metric.values)
        if largest > limit:
            of_last_rows = _check_last_rows(course, name)
            if of_last_rows is not None:
                return of_last_rows
            zeros = sum(value == 0 for value in metric.values)
            if name == "grad_norm" and zeros > NEARLY_ALL * len(metric.values):
                return undecided_check(f"{name} is 0 in {zeros} of {len(metric.values)} log steps")
            # If the gradient is 0, a learning rate above 0 shows no movement.
            if finding.ok is None or name == "grad_norm":
                finding = passed_check(metric, largest, f"largest {name}")
            continue
        if name == "learning_rate":
            is_warm_up = metric.values[-1] == largest and largest > metric.values[0]
            is_fault = not is_warm_up
        else:
            is_fault = _rewards_differ(course)
        if is_fault:
            cause = f"{name} never exceeds {format_number(largest, 6)}"
            finding = passed_check(metric, largest, f"largest {name}")
            return finding.failed(NO_STEP, cause, onset=metric.steps[0], quantities=[name])
        # The weights rest, as in a warm-up, or if all rewards are equal.
        return undecided_check(f"{name} is {format_number(largest, 6)} so far")
    return finding


LITTLE_KL = 0.01
"""KL to the reference (nats per token) below which the policy has hardly moved."""

LITTLE_RATE = 5e-7
"""Learning rate up to which updates are small."""

NEAR_REFERENCE = 0.1
"""KL to the reference (nats per token) of the first log step up to which training began near the reference."""

MANY_STEPS = 100
"""Number of training steps from which a policy should have moved."""

HARDLY_MOVES = Kind(
    code="hardly-moves",
    severity="look",
    meaning="the policy has hardly changed",
    condition=(
        f"after {MANY_STEPS} steps without a higher reward, the KL divergence to the reference is below "
        f"{LITTLE_KL:g}; or, without a KL or with one that was large from the start and does not change, the learning "
        f"rate is at most {LITTLE_RATE:g}"
    ),
    remedy="use a learning rate three to ten times larger{learning rate}",
    settings=("learning rate",),
    evidence=("kl", "learning_rate", "reward"),
    source="logs of Coicozoi/minimind-from-scratch and adv06/WidgetAnchor",
    scenarios=("policy hardly moves", "learning rate too small"),
)


NO_KL = "log the KL to the reference"
"""The advice if nothing shows whether the policy moves."""

LARGE_FROM_THE_START = (
    "the KL to the reference does not begin near 0 and does not change, so it shows no movement"
)
"""The reason why a KL decides nothing."""

CLEAR_CHANGE = 3.0
"""Standard errors above which a KL that was large from the start has changed."""


def _shows_movement(kl: Series) -> bool:
    """Return whether a KL to the reference shows if the policy moves: it began near 0, or has clearly changed."""
    if not kl.values or max(kl.values) <= 0:
        return False
    return abs(kl.values[0]) <= NEAR_REFERENCE or abs(rise_in_errors(kl)) > CLEAR_CHANGE


@LOGS.check(
    "whether the policy moves",
    after="a score on other prompts",
    tested="the policy moves",
    explained="after many steps, the KL or the reward shows a change",
    reports=(HARDLY_MOVES,),
)
def check_small_steps(case: Case) -> Finding:
    """Check that after many steps the policy has moved, unless the reward has risen."""
    course = case.course
    kl = course.series("kl")
    reward = course.series("reward")
    rates = course.series("learning_rate").values
    steps = course.rows[-1]["step"] - course.rows[0]["step"] + 1
    if len(reward.values) < 30 or steps < MANY_STEPS:
        return undecided_check(f"judged after {MANY_STEPS} training steps, of which 30 have a reward")
    if _shows_movement(kl):
        finding = passed_check(kl, kl.last, "mean KL to the reference in the last tenth", last_tenth(kl))
        quantity = "kl"
        is_small = False
        if len(kl.values) >= 30:
            # Absolute values, since some loops log the KL with the opposite sign.
            means = [kl.last, *tenths(kl.values)]
            is_small = max(abs(mean) for mean in means) < LITTLE_KL
        evidence = f"KL to the reference is {format_number(kl.last, 2)} after {steps:.0f} steps"
    elif rates:
        finding = passed_check(course.series("learning_rate"), max(rates), "largest learning rate")
        quantity = "learning_rate"
        is_small = 0 < max(rates) <= LITTLE_RATE
        if not is_small:
            # A learning rate alone shows no movement.
            return undecided_check(NO_KL if not kl.values else LARGE_FROM_THE_START)
        evidence = f"the learning rate is at most {format_number(max(rates), 2)}, over {steps:.0f} steps"
    else:
        return undecided_check(NO_KL if not kl.values else LARGE_FROM_THE_START)

    entropy = course.series("entropy")
    same_entropy = not entropy.values or 0.75 < entropy.last / (entropy.first or 1.0) < 1.33
    if not is_small or rises(reward.values) or rise_in_errors(reward) > 3 or not same_entropy:
        if not is_small or ends_higher(reward):
            return finding
        return undecided_check("the KL is small, but the reward or the entropy shows a change")
    if quantity == "learning_rate" and rise_in_errors(reward) < -3:
        # A small learning rate is no evidence against a change that the reward shows.
        return undecided_check("the reward fell, so that something has changed")
    before, after = end_means(reward.values, 3)
    # The reward has not risen by three standard errors.
    course_of_reward = f"did not surely rise ({change_text(before, after)}, {THIRDS})"
    if after <= before:
        course_of_reward = "did not rise"
    # A small learning rate makes small updates likely. A small KL shows them.
    has_moved = "has hardly moved" if quantity == "kl" else "has probably hardly moved"
    cause = f"{evidence}, and the reward {course_of_reward}: the policy {has_moved}"
    if quantity == "kl" and rates:
        cause = f"{cause}; the learning rate is at most {format_number(max(rates), 2)}"
    start = course.series(quantity).steps[0]
    return finding.failed(HARDLY_MOVES, cause, onset=start, quantities=[quantity, "reward"])
