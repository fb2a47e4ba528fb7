"""Checks of the metrics in a run's log. Only the standard library is needed.

The checks are ordered: causes come before their effects. The thresholds above each group of checks were chosen on the
scenarios and logs of ``benchmarks/doctor``, and tested on others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import accumulate, pairwise
from statistics import fmean

from rlvet._numbers import format_number, format_share
from rlvet.checks.course import (
    Course,
    Series,
    end_means,
    find_change_point,
    find_jump,
    find_spikes,
    fit_slope,
    fit_weights,
    noise_of_differences,
    onset,
    rises,
    standard_error,
    tenth_blocks,
    tenths,
)
from rlvet.checks.findings import Finding
from rlvet.runs.quantities import EVALUATION, QUANTITIES, Row, component_name
from rlvet.runs.setup import Setup
from rlvet.runs.summary import summarize

ALL_ROWS = slice(None)
"""All rows of a metric."""

FEW_STEPS = 8
"""Number of log steps below which trends of a metric are not checked."""


def log_findings(rows: Sequence[Row], setup: Setup | None = None) -> list[Finding]:
    """Check the metrics of a run.

    Args:
        rows: The log, one row per log step, as `rlvet.runs.logs.read_log` returns it.
        setup: The framework, method and settings of the run, as far as they are known.

    Returns:
        The result of each check, passed or failed. Checks for a cause come before those for its effects, and the checks
        for a plateau of the reward and for the clip come last.
    """
    setup = setup or Setup()
    course = Course(rows)

    # The course of the reward, on which the other checks depend.
    fall = _check_fall(course)
    fell = fall.ok is False
    flat = _find_flat_part(course)
    flat_since = -math.inf
    if flat is not None:
        reward, turn = flat
        flat_since = reward.steps[turn]
    solved = _is_solved(course)

    findings = [
        _check_numbers(course),
        _check_movement(course),
        _check_reference(course, setup),
        _check_engine(course),
        _check_step_size(course),
        _check_gradient_spikes(course, fell=fell),
        _check_clip_share(course, setup),
        _check_divergence(course),
        _check_truncation(course, setup),
        _check_constant_reward(course),
        _check_signal(course, setup, solved=solved),
        _check_data(course),
        *_check_components(course),
        _check_length(course),
        _check_entropy(course, flat_since, solved=solved),
        _check_evaluation(course),
        _check_small_steps(course),
        fall,
    ]
    codes = {finding.code for finding in findings if finding.cause}
    findings.append(_check_last_tenth(course, codes))
    findings.append(_check_plateau(course, flat, fell=fell, solved=solved))
    # The clip is judged only if there is no fault.
    if all(finding.ok is not False for finding in findings):
        findings.append(_check_clip(course, setup.updates))
    return [_with_cost(finding, rows) for finding in findings]


def _with_cost(finding: Finding, rows: Sequence[Row]) -> Finding:
    """Return a finding with its cost: the time, or the number of log steps, since its onset."""
    if not finding.cause or finding.onset is None:
        return finding
    rows_since_onset = [row for row in rows if row["step"] >= finding.onset]
    seconds = sum(row.get("step_time", 0.0) for row in rows_since_onset)
    total_seconds = sum(row.get("step_time", 0.0) for row in rows)
    if total_seconds:
        # A row may stand for several training steps, each of which took that time.
        steps_per_row = max(1.0, (rows[-1]["step"] - rows[0]["step"]) / max(1, len(rows) - 1))
        cost = _format_times(seconds * steps_per_row, total_seconds * steps_per_row)
        return finding._replace(cost=f"{cost}, times the GPUs")
    # A record has several rows of one step.
    steps_since_onset = {row["step"] for row in rows_since_onset}
    steps = {row["step"] for row in rows}
    return finding._replace(cost=f"{len(steps_since_onset)} of {len(steps)} log steps")


def _format_times(seconds: float, total_seconds: float) -> str:
    """Return a time and the total time in the largest unit in which the total is at least 1."""
    unit, size = next(
        ((u, n) for u, n in (("hours", 3600), ("minutes", 60)) if total_seconds >= n), ("seconds", 1)
    )
    return f"{format_number(seconds / size, 2)} of {format_number(total_seconds / size, 2)} {unit}"


def _change(before: float, after: float) -> str:
    """Return two values of a metric as a change."""
    return f"{format_number(before)} → {format_number(after)}"


def _passed(
    tested: str, metric: Series, figure: float | None = None, measure: str = "", rows: slice = ALL_ROWS
) -> Finding:
    """Return a check of a metric that passed, with the number of log steps and their range.

    Args:
        tested: The property of a correct run that is checked.
        metric: The metric.
        figure: The measured quantity.
        measure: Its name.
        rows: The rows that the figure was computed from.
    """
    steps = metric.steps[rows]
    return Finding("ok", True, tested, figure, None, len(steps), steps=(steps[0], steps[-1]), measure=measure)


def _last_tenth(metric: Series) -> slice:
    """Return the rows of the last tenth of a metric."""
    return slice(-max(1, len(metric.values) // 10), None)


def _later_half(metric: Series) -> slice:
    """Return the rows of the second half of a metric."""
    return slice(len(metric.values) // 2, None)


# --- Numbers and movement ---

NO_MOVEMENT = {"learning_rate": 1e-9, "grad_norm": 0.0}
"""For each quantity, the value up to which weights do not change. Adam changes them by about the learning rate, and in
float32 0.02 + 1e-9 is rounded to 0.02."""


def _check_numbers(course: Course) -> Finding:
    """Check that the log has no NaN and no infinite values."""
    bad_rows = [row for row in course.rows if row.get("not_finite")]
    share = len(bad_rows) / len(course.rows)
    measure = "share of log steps with NaN or infinite values"
    finding = Finding("ok", True, "the log holds numbers", share, None, len(course.rows), measure=measure)
    if not bad_rows:
        return finding
    first_step = min(row["step"] for row in bad_rows)
    cause = f"{len(bad_rows)} of {len(course.rows)} log steps hold NaN or infinite values, first step {first_step:.0f}"
    # The reader leaves values out that are not finite.
    missing = []
    for name in QUANTITIES:
        if course.series(name).values and any(name not in row for row in bad_rows):
            missing.append(name)
    return finding.failed("nan", cause, onset=first_step, quantities=missing)


def _rewards_differ(course: Course) -> bool:
    """Check whether the rewards of some group differ, so that there must be a gradient; True if this is not known."""
    dead = course.series("dead").values
    if dead:
        return min(dead) < 1
    rewards = course.series("reward").values
    return not rewards or len(set(rewards)) > 1 or any(course.series("reward_std").values)


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


def _check_movement(course: Course) -> Finding:
    """Check that the learning rate is above 0, and the gradient too if rewards differ."""
    tested = "weights move"
    finding = Finding("ok", None, tested)
    for name, limit in NO_MOVEMENT.items():
        metric = course.series(name)
        # A few steps are no evidence, since a warm-up begins at 0.
        if len(metric.values) < FEW_STEPS:
            if name == "grad_norm" and _has_signal_without_gradient(course):
                cause = (
                    f"grad_norm is 0 in all {len(metric.values)} log steps, though rewards of a group differ"
                )
                finding = _passed(tested, metric, 0.0, f"largest {name}")
                return finding.failed("no-step", cause, onset=metric.steps[0], quantities=[name])
            continue
        largest = max(metric.values)
        finding = _passed(tested, metric, largest, f"largest {name}")
        if largest > limit:
            continue
        if name == "learning_rate":
            is_warm_up = metric.values[-1] == largest and largest > metric.values[0]
            is_fault = not is_warm_up
        else:
            is_fault = _rewards_differ(course)
        if is_fault:
            cause = f"{name} never exceeds {format_number(largest, 6)}"
            return finding.failed("no-step", cause, onset=metric.steps[0], quantities=[name])
    return finding


# --- Distance of the policy from the reference and from the sampling policy ---

REFERENCE_KL = 0.1
"""KL to the reference (nats per token) at the first step, before any update, above which the reference is another model
than the one that training began with."""

EARLY_ROWS = 10
"""Number of rows at the start in which the KL to the reference must stay below `EARLY_KL`."""

EARLY_KL = 1.0
"""KL to the reference (nats per token) that shows updates that are too large if it is reached in the first rows."""

GROWTH = 4.0
"""Factor by which the KL of the first rows grows if updates are its cause. A KL to another model is large at once."""

LARGE_KL = 1.0
"""KL to the reference (nats per token) at the end of a run above which the policy has drifted away from it."""

UNBOUNDED_KL = 100.0
"""KL to the reference (nats per token) above which the drift has severity ``stop``."""

TOO_FAR = 2.5
"""Mean abs log-ratio (nats) at the last update on a batch above which steps are too large. Tokens are then twelve times
as likely or unlikely as when they were sampled, so that the effective sample size is close to 0."""

LATE_EPOCH = 0.1
"""Epoch of the first row from which a log of a few rows is an excerpt from the middle of a run, whatever its steps."""

LARGE_RATE = 1e-4
"""Learning rate from which the finding on too large steps mentions it."""


def _check_reference(course: Course, setup: Setup) -> Finding:
    """Check that the KL to the reference begins near 0."""
    tested = "the reference is the model that training began with"
    kl = course.series("kl")
    if not kl.values:
        return Finding("ok", None, tested)
    finding = _passed(tested, kl, kl.values[0], "KL to the reference in the first log step", slice(1))

    early = kl.values[:EARLY_ROWS]
    # The first row may be a mean over several steps, and then its KL is above 0 in any run. It is evidence if it is as
    # large as that of later rows.
    is_as_large_as_later = (
        len(early) >= EARLY_ROWS and early[0] > 0.5 * fmean(kl.values) and early[0] > 3 * REFERENCE_KL
    )
    is_evidence = is_as_large_as_later or _begins_before_updates(course, setup)
    # If the KL grows from step to step, the reference may be right, and the policy moves away from it fast.
    grows = max(early) > GROWTH * kl.values[0]
    if kl.values[0] <= REFERENCE_KL or grows or not is_evidence:
        return finding

    cause = (
        f"KL to the reference is {format_number(kl.values[0])} at step {kl.steps[0]:.0f}, before any update could move "
        "the policy"
    )
    if setup.number("LoRA rank"):
        # A new adapter has no effect, so its KL to the base model would be 0.
        cause = f"{cause}: with LoRA the reference is the base model, without the adapter that training began with"
    else:
        model = "another model, such as the base model of a LoRA run that began with an adapter"
        cause = f"{cause}: the reference is {model}"
    return finding.failed("reference-kl", cause, onset=kl.steps[0], quantities=["kl"])


def _begins_before_updates(course: Course, setup: Setup) -> bool:
    """Check whether the first KL of the log was measured before the first update of the run."""
    kl = course.series("kl")
    epochs = course.series("epoch").values
    if len(kl.values) < EARLY_ROWS and epochs and epochs[0] >= LATE_EPOCH:
        return False
    # verl logs the mean over all updates of a step, and only the first of these comes before any update.
    if setup.framework == "verl" and (setup.updates or 1) > 1:
        return False
    return kl.steps[0] <= 1


def _check_step_size(course: Course) -> Finding:
    """Check that one batch does not move the policy too far, nor the first steps of the run."""
    tested = "updates stay near the sampling policy"
    movement = course.series("moved")
    kl = course.series("kl")
    if movement.values:
        largest = max(movement.values)
        measure = "largest mean movement of log-probabilities by the last update on a batch (nats)"
        finding = _passed(tested, movement, largest, measure)
        if largest > TOO_FAR:
            cause = (
                "by the last update on a batch, log-probabilities of its tokens had moved by "
                f"{format_number(largest, 2)} nats on average"
            )
            step = movement.steps[movement.values.index(largest)]
            return finding.failed("step-too-large", cause, onset=step, quantities=["moved"])
        return finding
    if not kl.values:
        return Finding("ok", None, tested, advice="record the tokens")

    early = kl.values[:EARLY_ROWS]
    measure = f"largest KL to the reference in the first {len(early)} log steps"
    finding = _passed(tested, kl, max(early), measure, slice(len(early)))
    # In a log of few rows, the first ten may be most of the run.
    is_short = len(kl.values) < 3 * EARLY_ROWS
    # The first row that is large and has grown. A first row that is large by itself shows no growth.
    row = next((row for row, value in enumerate(early) if value >= max(EARLY_KL, GROWTH * early[0])), None)
    if is_short or row is None:
        # A KL that is large and does not grow says nothing of the updates.
        return Finding("ok", None, tested) if max(early) >= EARLY_KL else finding
    rate = max(course.series("learning_rate").values, default=0.0)
    at_rate = f", at a learning rate of {format_number(rate)}" if rate >= LARGE_RATE else ""
    change = _change(early[0], early[row])
    cause = f"KL to the reference went {change} in the first {row + 1} log steps{at_rate}"
    return finding.failed("step-too-large", cause, onset=kl.steps[row], quantities=["kl"])


def _check_divergence(course: Course) -> Finding:
    """Check that the KL to the reference is not large at the end."""
    tested = "the policy stays near the reference"
    kl = course.series("kl")
    if len(kl.values) < FEW_STEPS:
        return Finding("ok", None, tested)
    finding = _passed(tested, kl, kl.last, "KL to the reference in the last tenth", _last_tenth(kl))
    grew = kl.last > 3 * abs(kl.values[0]) + 0.1
    if kl.last <= LARGE_KL:
        return finding
    if not grew:
        # The policy is far from the reference, but was so at the first log step: it may not have drifted.
        return Finding("ok", None, tested)
    severity = "stop" if kl.last > UNBOUNDED_KL else "fix"
    cause = f"KL to the reference {_change(kl.values[0], kl.last)} nats per token"
    start = onset(kl, lambda mean: mean > LARGE_KL)
    return finding.failed("kl-drift", cause, severity=severity, onset=start, quantities=["kl"])


# --- Engine and trainer ---

MISMATCHES = {
    "mismatch_kl": (0.05, "KL between engine and trainer"),
    "mismatch": (0.1, "mean distance of the engine's log-probabilities from the trainer's"),
    "mismatch_probs": (0.05, "mean distance of the engine's probabilities from the trainer's"),
}
"""For each quantity, the value at the end above which engine and trainer differ by more than rounding, and its
description."""

FAR_WEIGHT = 2.0
"""Factor by which the mean importance weight between engine and trainer may differ from 1."""

STALE = 4.0
"""Mean age of the data, in updates, above which it is reported."""


def _check_engine(course: Course) -> Finding:
    """Check that engine and trainer have about the same probabilities, and that data is not too old."""
    tested = "engine and trainer agree, as logged"
    finding = Finding("ok", None, tested)
    ages = course.series("staleness").values
    mean_age = fmean(ages) if ages else 0.0
    age_text = ""
    age_quantities = []
    if mean_age >= 1:
        age_text = f"; data is {format_number(mean_age, 2)} updates old on average"
        age_quantities = ["staleness"]

    for name, (limit, description) in MISMATCHES.items():
        metric = course.series(name)
        if not metric.values:
            continue
        finding = _passed(tested, metric, metric.last, f"{description}, last tenth", _last_tenth(metric))
        if metric.last > limit and fmean(metric.later_half) > limit / 2:
            cause = f"{description}: {_change(metric.first, metric.last)}{age_text}"
            start = onset(metric, lambda mean, limit=limit: mean > limit)
            quantities = [name, *age_quantities]
            return finding.failed("engine-mismatch", cause, "stale", onset=start, quantities=quantities)

    weight = course.series("importance_weight")
    is_far = len(weight.values) >= FEW_STEPS and not 1 / FAR_WEIGHT <= weight.last <= FAR_WEIGHT
    if weight.values and (finding.ok is None or is_far):
        finding = _passed(
            tested, weight, weight.last, "mean importance weight, last tenth", _last_tenth(weight)
        )
    if is_far:
        cause = (
            f"the mean importance weight between engine and trainer is {format_number(weight.last)}{age_text}"
        )
        start = onset(weight, lambda mean: not 1 / FAR_WEIGHT <= mean <= FAR_WEIGHT)
        quantities = ["importance_weight", *age_quantities]
        return finding.failed("engine-mismatch", cause, "stale", onset=start, quantities=quantities)

    if mean_age > STALE:
        cause = f"data is {format_number(mean_age, 2)} updates old on average"
        finding = _passed(tested, course.series("staleness"), mean_age, "mean age of the data in updates")
        return finding.failed("stale", cause, severity="look", quantities=["staleness"])
    return finding


# --- Gradient and clip ---

SPIKE = 15.0
"""A gradient norm is a spike if it is more than this many times the norms around it."""

FEWEST_SPIKES = 3
"""Number of spikes below which they are not reported."""

MUCH_CLIPPED = 0.3
"""Share of clipped tokens at the end above which a fault is reported, since much of the gradient is lost."""

SOME_CLIPPED = 0.2
"""Share of clipped tokens at the end above which the clip is worth a look."""

MUCH_CLIPPED_SEQUENCES = 0.6
"""The same for sequence-level ratios. Methods such as GSPO clip many sequences by design."""


def _check_gradient_spikes(course: Course, *, fell: bool) -> Finding:
    """Check that no gradient norm is many times larger than those around it.

    Args:
        course: The metrics of the run.
        fell: True if the reward fell at the end, which makes spikes a fault.
    """
    tested = "gradient norms have no spikes"
    norm = course.series("grad_norm")
    if len(norm.values) < 4 * FEW_STEPS:
        return Finding("ok", None, tested)
    spikes = find_spikes(norm.values, SPIKE)
    finding = _passed(tested, norm, len(spikes), "log steps with a spike")
    # If many rows are far from their neighbours, the norm has a wide spread and no spikes.
    if not FEWEST_SPIKES <= len(spikes) <= len(norm.values) / 10:
        return finding
    largest = max(norm.values[row] for row in spikes)
    usual = sorted(norm.values)[len(norm.values) // 2]
    steps = ", ".join(f"{norm.steps[row]:.0f}" for row in spikes[:5])
    if len(spikes) > 5:
        steps = f"{steps}, …"
    cause = (
        f"in {len(spikes)} log steps (step {steps}) the gradient norm is more than {SPIKE:.0f} times the norms around "
        f"it, up to {format_number(largest)} where {format_number(usual)} is usual"
    )
    severity = "fix" if fell else "look"
    start = norm.steps[spikes[0]]
    return finding.failed("gradient-spikes", cause, severity=severity, onset=start, quantities=["grad_norm"])


def _clip_shares(course: Course) -> Series:
    """Return the share of clipped tokens at each step; the sum of both sides, if the log has one share for each."""
    if "clip" in course.names:
        return course.series("clip")
    names = [name for name in ("clip_high", "clip_low") if name in course.names]
    steps = []
    shares = []
    for row in course.rows:
        values = [row[name] for name in names if name in row]
        if values:
            steps.append(row["step"])
            shares.append(sum(values))
    return Series(steps, shares)


def _check_clip_share(course: Course, setup: Setup) -> Finding:
    """Check that most tokens, or sequences, are not clipped."""
    tested = "the clip keeps most of the gradient"
    shares = _clip_shares(course)
    if len(shares.values) < FEW_STEPS:
        return Finding("ok", None, tested)
    finding = _passed(
        tested, shares, shares.last, "share of tokens clipped in the last tenth", _last_tenth(shares)
    )
    look_limit = SOME_CLIPPED
    fix_limit = MUCH_CLIPPED
    if setup.level == "sequence" or (setup.method or "").startswith("GSPO"):
        look_limit = MUCH_CLIPPED_SEQUENCES
        fix_limit = MUCH_CLIPPED_SEQUENCES
    share = max(shares.last, fmean(shares.later_half))
    if share <= look_limit:
        return finding
    change = f"{shares.first:.1%} → {shares.last:.1%}"
    cause = (
        f"{format_share(share)} of tokens are clipped ({change}): their gradient is lost, and updates go far from the "
        "sampling policy"
    )
    if share > shares.last:
        measure = "share of tokens clipped in the later half"
        finding = _passed(tested, shares, share, measure, _later_half(shares))
    severity = "fix" if share > fix_limit else "look"
    start = onset(shares, lambda mean: mean > look_limit)
    quantities = [name for name in ("clip", "clip_high", "clip_low") if name in course.names]
    return finding.failed("clip-heavy", cause, severity=severity, onset=start, quantities=quantities)


# --- Rewards ---

SOLVED = 0.95
"""Mean of rewards between 0 and 1 from which their prompts are as good as solved."""

CONSTANT_ROWS = 20
"""Number of rows with equal rewards from which this is a fault, if they are also `CONSTANT_SHARE` of all rows."""

CONSTANT_SHARE = 0.25
"""Share of a log's rows with equal rewards from which this is a fault."""

LEVEL_PART = 0.03
"""Relative spread of the means of a component's tenths up to which the component is constant."""

FULL = 0.9
"""Mean of a component between 0 and 1 from which nearly every answer reaches its maximum."""

MOST_OF_REWARD = 0.6
"""Share of the reward above which one component dominates it."""

EXPLAINED = 0.8
"""Share of the reward's variance that its components must explain for their fitted weights to be used."""

MOST_COMPONENTS = 8
"""Largest number of components whose weights are fitted."""

JUMP_ERRORS = 6.0
"""Standard errors above which a change of level is significant."""

NEAR_ROWS = 3
"""Largest distance, in rows, of jumps of two metrics that count as one event."""


def _is_solved(course: Course) -> bool:
    """Check whether nearly every answer has the best reward, so that groups have no spread."""
    reward = course.series("reward")
    if len(reward.values) < FEW_STEPS:
        return False
    late = fmean(reward.later_half)
    if min(reward.values) >= 0 and max(reward.values) <= 1.0 and late >= SOLVED:
        return True

    # The largest reward is not known. The prompts are solved if the reward has risen to its best, and more and more
    # groups have equal rewards.
    dead = course.series("dead")
    if len(dead.values) < 2 * FEW_STEPS or len(reward.values) < 2 * FEW_STEPS:
        return False
    noise = noise_of_differences(reward.values)
    rose = reward.last - reward.first > max(2 * noise, 0.2 * abs(reward.last))
    value_range = max(reward.values) - min(reward.values)
    is_at_best = reward.last > max(reward.values) - 0.1 * value_range - noise
    return rose and is_at_best and dead.last > 0.5 and dead.last > dead.first


def _check_constant_reward(course: Course) -> Finding:
    """Check that the mean reward is not the same in many log steps up to the end."""
    tested = "rewards differ"
    reward = course.series("reward")
    if len(reward.values) < FEW_STEPS:
        return Finding("ok", None, tested)
    last = reward.values[-1]
    equal_rows = 0
    for value in reversed(reward.values):
        if value != last:
            break
        equal_rows += 1
    finding = _passed(tested, reward, equal_rows, "log steps at the end with equal rewards")
    spreads = course.series("reward_std").values[-equal_rows:]
    is_best = last >= SOLVED and max(reward.values) <= 1
    is_short = equal_rows < CONSTANT_ROWS or equal_rows < CONSTANT_SHARE * len(reward.values)
    if equal_rows == len(reward.values) and is_short and not any(spreads):
        # All rewards are equal, in too few log steps for a finding.
        return Finding("ok", None, tested, advice=f"needs at least {CONSTANT_ROWS} log steps")
    if is_short or is_best or any(spreads):
        return finding
    start = reward.steps[-equal_rows]
    value = format_number(last)
    cause = f"the reward is {value} in every one of the last {equal_rows} log steps, from step {start:.0f} on"
    return finding.failed("reward-flat", cause, onset=start, quantities=["reward"])


def _components(course: Course) -> dict[str, Series]:
    """Return the components of the reward by name, over the rows that have a reward."""
    rows = [row for row in course.rows if "reward" in row]
    keys: dict[str, str] = {}
    for row in rows[:100]:
        for key in row:
            name = component_name(key)
            if name is not None:
                keys.setdefault(name, key)
    course_with_reward = Course(rows)
    components = {}
    for name, key in keys.items():
        metric = course_with_reward.series(key)
        if len(metric.values) >= CONSTANT_ROWS:
            components[name] = metric
    return components


def _check_components(course: Course) -> list[Finding]:
    """Check that every component of the reward varies, and that no constant one dominates."""
    tested = "every component of the reward varies"
    components = _components(course)
    if len(components) < 2:
        return [Finding("ok", None, tested)]
    first_component = next(iter(components.values()))
    findings = []
    constant = {name: metric for name, metric in components.items() if len(set(metric.values)) == 1}
    varying = {name: metric for name, metric in components.items() if name not in constant}
    if constant and varying:
        constants = ", ".join(
            f"{name} is {format_number(metric.values[0])}" for name, metric in constant.items()
        )
        means = ", ".join(f"{name} {format_number(fmean(metric.values))}" for name, metric in varying.items())
        cause = (
            f"{constants} in every one of {len(first_component.values)} log steps; means of the other components: "
            f"{means}"
        )
        finding = _passed(tested, first_component)
        quantities = [f"rewards/{name}" for name in constant]
        start = first_component.steps[0]
        findings.append(finding.failed("component-constant", cause, onset=start, quantities=quantities))
    findings.append(_check_largest_component(course, components))
    return findings


def _check_largest_component(course: Course, components: dict[str, Series]) -> Finding:
    """Check that no component that has stopped changing makes up most of the reward."""
    tested = "most of the reward comes from components that still change"
    reward = course.series("reward")
    varying = {}
    for name, metric in components.items():
        if len(metric.values) == len(reward.values) and len(set(metric.values)) > 1:
            varying[name] = metric
    if not 2 <= len(varying) <= MOST_COMPONENTS:
        return Finding("ok", None, tested)
    finding = _passed(tested, reward)

    # A log does not contain the weights of the components, so they are fitted.
    fit = fit_weights(reward.values, [metric.values for metric in varying.values()])
    if fit is None:
        return finding
    weights, explained = fit
    if explained < EXPLAINED:
        return finding
    contributions = {}
    for weight, (name, metric) in zip(weights, varying.items(), strict=True):
        contributions[name] = weight * fmean(metric.later_half)
    total = sum(abs(value) for value in contributions.values())
    if not total:
        return finding
    shares = {name: value / total for name, value in contributions.items()}
    largest = max(contributions, key=lambda name: contributions[name])

    means = tenths(varying[largest].values)[5:]
    is_level = max(means) - min(means) <= LEVEL_PART * abs(fmean(means))
    # A component that is constant below its maximum may be the goal of the run. That would be a plateau.
    is_full = max(means) <= 1.0 and fmean(means) >= FULL
    if shares[largest] < MOST_OF_REWARD or not is_level or not is_full:
        return finding
    other_shares = ", ".join(
        f"{name} {format_share(share)}" for name, share in shares.items() if name != largest
    )
    cause = (
        f"{format_share(shares[largest])} of the reward is {largest}, which stays at {format_number(fmean(means))} in "
        f"the later half, so that the reward hardly shows the other components ({other_shares})"
    )
    measure = f"share of the reward that is {largest}, later half"
    finding = _passed(tested, reward, shares[largest], measure, _later_half(reward))
    return finding.failed("component-dominates", cause, quantities=[f"rewards/{largest}", "reward"])


def _check_data(course: Course) -> Finding:
    """Check that reward and length do not jump at the same step, as they do when the prompts change."""
    tested = "reward and length do not jump together"
    jumps = {}
    if min(len(course.series(name).values) for name in ("reward", "length")) < 40:
        return Finding("ok", None, tested)
    for name in ("reward", "length", "reward_std"):
        metric = course.series(name)
        jump = find_jump(metric.values) if len(metric.values) >= 40 else None
        if jump is not None and jump.errors > JUMP_ERRORS:
            jumps[name] = jump
    finding = Finding(
        "ok", True, tested, len(jumps), None, len(course.rows), measure="quantities with a jump"
    )
    if "reward" not in jumps or "length" not in jumps:
        return finding
    row = jumps["length"].row
    simultaneous = {name: jump for name, jump in jumps.items() if abs(jump.row - row) <= NEAR_ROWS}
    if "reward" not in simultaneous:
        return finding
    step = course.series("length").steps[row]
    changes = ", ".join(f"{name} {_change(jump.before, jump.after)}" for name, jump in simultaneous.items())
    cause = f"at step {step:.0f}, {changes}, all at once: the prompts, the reward or a setting changed there"
    return finding.failed("data-change", cause, onset=step, quantities=[*simultaneous])


# --- Answers ---

MOST = 0.5
"""Share of answers cut off, or of groups without signal, above which this is a fault."""

MANY_CUT = 0.3
"""Share of answers cut off in the last tenth above which this is a fault, if it has tripled since the first half."""

SOME_CUT = 0.25
"""Share of answers cut off in the later half above which it is worth a look."""

AT_THE_CAP = 0.9
"""Mean length, as a share of the cap, from which most answers are cut off."""

LONGER = 1.8
"""Growth of the length from which it is reported, if the score on other prompts does not rise with the reward."""

MUCH_BETTER = 0.15
"""Relative rise of the score on other prompts above which the growth of the length is not reported."""

MUCH_LONGER = 3.0
"""Growth of the length from which it is reported without a score on other prompts, if the reward does not rise."""


def _check_truncation(course: Course, setup: Setup) -> Finding:
    """Check that few answers are cut off at the cap on length."""
    tested = "most answers are finished"
    cap = setup.number("length cap")
    at_cap = f" at the cap of {format_number(cap, 6)} tokens" if cap else ""
    quantities = ["cut", "length"]
    shares = course.series("cut")
    if not shares.values:
        return _check_length_at_cap(course, tested, cap)

    # Most answers are cut off in the later half.
    late = shares.later_half
    mean = fmean(late)
    measure = "share of answers cut off in the later half"
    finding = _passed(tested, shares, mean, measure, _later_half(shares))
    if len(late) > 1:
        finding = finding._replace(error=standard_error(late))
    if mean - 2 * standard_error(late) > MOST:
        cause = f"{format_share(mean)} of answers are cut off{at_cap}"
        start = onset(shares, lambda share: share > MOST)
        return finding.failed("truncated", cause, onset=start, quantities=quantities)
    if len(shares.values) < 2 * FEW_STEPS:
        if mean <= SOME_CUT:
            return finding
        part = " in the later half" if len(late) > 1 else ""
        cause = f"{format_share(mean)} of answers are cut off{at_cap}{part}"
        start = _first_step_above(shares, SOME_CUT, len(shares.values) // 2)
        return finding.failed("truncated", cause, severity="look", onset=start, quantities=quantities)

    # The share has grown towards the end.
    end = shares.values[-max(3, len(shares.values) // 10) :]
    last = fmean(end)
    before = fmean(shares.values[: len(shares.values) // 2])
    if last - 2 * standard_error(end) > MANY_CUT and last > 3 * before:
        cause = (
            f"{format_share(last)} of answers are cut off{at_cap} in the last tenth, {format_share(before)} in the "
            "first half"
        )
        start = onset(shares, lambda share: share > MANY_CUT / 2, lambda share: share > MANY_CUT)
        finding = _passed(
            tested, shares, last, "share of answers cut off in the last tenth", slice(-len(end), None)
        )
        finding = finding._replace(error=standard_error(end))
        return finding.failed("truncated", cause, onset=start, quantities=quantities)

    # Many answers are cut off in the later half.
    if mean > SOME_CUT:
        cause = f"{format_share(mean)} of answers are cut off{at_cap} in the later half"
        severity = "fix" if mean > 3 * before else "look"
        start = _first_step_above(shares, SOME_CUT, len(shares.steps) // 2)
        return finding.failed("truncated", cause, severity=severity, onset=start, quantities=quantities)

    # Most answers were cut off in some tenth of the run.
    blocks = tenths(shares.values)
    if max(blocks) > MOST:
        worst = blocks.index(max(blocks))
        steps = tenth_blocks(shares.steps)[worst]
        first_row = sum(len(block) for block in tenth_blocks(shares.steps)[:worst])
        start = _first_step_above(shares, MOST, first_row)
        rows = slice(first_row, first_row + len(steps))
        finding = _passed(tested, shares, max(blocks), "share of answers cut off in these log steps", rows)
        share = format_share(max(blocks))
        cause = f"{share} of answers were cut off{at_cap} from step {steps[0]:.0f} to {steps[-1]:.0f}"
        return finding.failed("truncated", cause, severity="look", onset=start, quantities=quantities)
    return finding


def _first_step_above(metric: Series, limit: float, first_row: int) -> float | None:
    """Return the first step from a row on at which a metric is above a limit; None if there is none."""
    for step, value in zip(metric.steps[first_row:], metric.values[first_row:], strict=True):
        if value > limit:
            return step
    return None


def _check_length_at_cap(course: Course, tested: str, known_cap: float | None) -> Finding:
    """Check that answers are not cut off, by their mean length, if the log has no share of truncated answers.

    Args:
        course: The metrics of the run.
        tested: The property of a correct run that is checked.
        known_cap: The cap in the run's configuration; None if it is not known.
    """
    length = course.series("length")
    if len(length.values) < 2 * FEW_STEPS:
        return Finding("ok", None, tested)
    if known_cap:
        late = fmean(length.later_half)
        measure = "share of the cap that is the mean length in the later half"
        finding = _passed(tested, length, late / known_cap, measure, _later_half(length))
        if late < AT_THE_CAP * known_cap:
            return finding
        cause = (
            f"the mean length is {late:.0f} tokens in the later half, at the cap of {format_number(known_cap, 6)} "
            "tokens, at which most answers are cut off"
        )
        start = onset(length, lambda mean: mean >= AT_THE_CAP * known_cap)
        return finding.failed("truncated", cause, onset=start, quantities=["length"])

    # The cap is not known. If the largest mean length is a whole number and occurs in several steps, it is the length
    # of every answer in these steps: the cap.
    cap = max(length.values)
    rows_at_cap = sum(value == cap for value in length.values)
    mean = fmean(length.values)
    measure = "share of the largest length that is the mean length"
    finding = _passed(tested, length, mean / cap if cap else 0.0, measure)
    if rows_at_cap < 3 or cap != int(cap) or mean < AT_THE_CAP * cap:
        share = rows_at_cap / len(length.values)
        if share < 0.1 or cap != int(cap) or mean < 0.75 * cap:
            return finding
    cause = (
        f"the mean length is {mean:.0f} tokens, and exactly {cap:.0f} in {rows_at_cap} of {len(length.values)} log "
        "steps: that is the cap, at which most answers are cut off"
    )
    return finding.failed("truncated", cause, onset=length.steps[0], quantities=["length"])


def _check_signal(course: Course, setup: Setup, *, solved: bool) -> Finding:
    """Check that the rewards of most groups differ, so that their advantages are not all 0."""
    tested = "most groups carry signal"
    shares = course.series("dead")
    if len(shares.values) < FEW_STEPS:
        advice = f"needs at least {FEW_STEPS} log steps" if shares.values else ""
        return Finding("ok", None, tested, advice=advice)
    late = shares.later_half
    mean = fmean(late)
    error = standard_error(late)
    measure = "share of groups without signal in the later half"
    finding = _passed(tested, shares, mean, measure, _later_half(shares))._replace(error=error)
    # The shares of single steps are noisy, so the means in which the onset is searched may be below the limit by
    # chance.
    window = max(1, len(shares.values) // 20)
    noise = error * math.sqrt(len(late) / window)
    start = onset(shares, lambda share: share > MOST - 2 * noise, lambda share: share > MOST)
    last_rows = late[-max(FEW_STEPS, len(late) // 5) :]
    end = fmean(last_rows)
    if mean - 2 * error <= MOST and not (solved and end > MOST):
        return finding
    if end > mean:
        rows = slice(-len(last_rows), None)
        finding = _passed(tested, shares, end, "share of groups without signal in the last log steps", rows)
    groups = "groups"
    group_size = setup.number("group size")
    if group_size:
        unit = "answers" if group_size > 1 else "answer"
        groups = f"groups of {format_number(group_size, 6)} {unit}"
    cause = f"{format_share(max(mean, end))} of {groups} carry no signal"
    reward = course.series("reward")
    if solved:
        cause = f"{cause}, as these prompts are solved (reward {format_number(reward.last)})"
        return finding.failed("no-signal", cause, severity="look", onset=start, quantities=["dead"])
    later_rewards = reward.values[len(reward.values) // 3 :]
    still_learns = len(later_rewards) >= 20 and rises(later_rewards)
    severity = "look" if still_learns else "fix"
    return finding.failed("no-signal", cause, severity=severity, onset=start, quantities=["dead"])


def _rise(metric: Series) -> float:
    """Compute by how many standard errors the mean of the last third of a metric is above that of the first third."""
    third = max(1, len(metric.values) // 3)
    noise = noise_of_differences(metric.values) / math.sqrt(third)
    before, after = end_means(metric.values, 3)
    return (after - before) / (noise + 1e-12)


def _check_length(course: Course) -> Finding:
    """Check that answers become much longer only if the score on other prompts, or else the reward, rises."""
    tested = "answers do not grow longer without growing better"
    length = course.series("length")
    if len(length.values) < 4 * FEW_STEPS or length.first <= 0:
        return Finding("ok", None, tested)
    growth = length.last / length.first
    finding = _passed(tested, length, growth, "mean length of the last tenth, divided by that of the first")
    reward = course.series("reward")
    score = course.series(EVALUATION)
    change = f"mean length {length.first:.0f} → {length.last:.0f} tokens"
    start = onset(length, lambda mean: mean >= LONGER * length.first)

    if len(score.values) >= 6 and len(reward.values) >= 6:
        if growth < LONGER or _rise(reward) < 3 or _score_follows_reward(reward, score):
            return finding
        before, after = end_means(score.values, 3)
        cause = f"{change}, while the score on other prompts went {_change(before, after)}"
        # The relative rise of a reward that may be negative is not comparable.
        severity = "look" if min(reward.values) < 0 else "fix"
        quantities = ["length", EVALUATION]
        return finding.failed("length-growth", cause, severity=severity, onset=start, quantities=quantities)

    if growth < MUCH_LONGER or len(reward.values) < 30 or _rise(reward) > 2:
        return finding
    cause = f"{change}, and the reward does not rise"
    start = onset(length, lambda mean: mean >= MUCH_LONGER * length.first)
    return finding.failed(
        "length-growth", cause, severity="look", onset=start, quantities=["length", "reward"]
    )


def _score_follows_reward(reward: Series, score: Series) -> bool:
    """Check whether the score on other prompts rises by 15 %, or by a third of the relative rise of the reward."""
    reward_before, reward_after = end_means(reward.values, 3)
    score_before, score_after = end_means(score.values, 3)
    score_rise = (score_after - score_before) / max(abs(score_after), abs(score_before), 1e-12)
    reward_rise = (reward_after - reward_before) / max(abs(reward_after), abs(reward_before), 1e-12)
    return score_rise > MUCH_BETTER or score_rise > reward_rise / 3


# --- Entropy ---

ENTROPY_LEFT = 0.25
"""Share of the entropy at the start below which it has collapsed, unless the reward rose."""

NEARLY_NO_ENTROPY = 0.1
"""Share of the entropy at the start up to which its collapse is a fault even if the reward has risen before."""

LEAST_ENTROPY = 0.04
"""Share of the entropy at the start below which next to nothing is left of it."""

NO_ENTROPY = 0.15
"""Entropy (nats per token) above which it has not collapsed, whatever it was at the start."""

LOW_ENTROPY = 0.1
"""Entropy (nats per token) below which a policy hardly explores from the start."""

NEARLY_SOLVED = 0.9
"""Mean of late rewards between 0 and 1 from which a policy may keep no entropy: little is left to explore."""

ENTROPY_RISE = 2.0
"""Growth of the entropy above which this is a fault, if it is also more than one nat per token."""

ENTROPY_KEPT = "entropy is kept, or falls as the reward rises"
"""The property that `_check_entropy` checks."""


def _reward_rose(rewards: Sequence[float]) -> bool:
    """Check whether the last third of the rewards is above the first by 10 % and by two standard errors."""
    # The noise of one step is estimated from neighbouring steps; a third of the steps is averaged at either end.
    error = noise_of_differences(rewards) / math.sqrt(max(1, len(rewards) // 3))
    before, after = end_means(rewards, 3)
    return after - before > max(0.1 * abs(before), 2 * error)


def _is_nearly_solved(reward: Series) -> bool:
    """Check whether rewards between 0 and 1 are near 1 in the last third of the log."""
    is_share = min(reward.values) >= 0 and max(reward.values) <= 1
    return is_share and fmean(reward.values[-max(1, len(reward.values) // 3) :]) >= NEARLY_SOLVED


def _check_entropy(course: Course, flat_since: float, *, solved: bool) -> Finding:
    """Check that entropy does not collapse, or rise without bound.

    A policy rightly loses entropy as it learns which answers are rewarded. A collapse is therefore a fault only if the
    reward does not rise. If the reward becomes flat, only the steps after that count.

    Args:
        course: The metrics of the run.
        flat_since: The step from which the reward is flat; minus infinity if it is not.
        solved: True if the prompts are solved, so that a policy of low entropy is right.
    """
    entropy = course.series("entropy")
    if len(entropy.values) < 2:
        return Finding("ok", None, ENTROPY_KEPT, advice="log the entropy")
    first = entropy.first
    last = entropy.last
    change = f"entropy {_change(first, last)} nats per token"

    reward = course.series("reward")
    late_rewards = [value for step, value in zip(*reward, strict=True) if step >= flat_since]
    reason = "no reward is known"
    rose = False
    if len(late_rewards) > 1:
        before, after = end_means(late_rewards, 3)
        change += f", while the reward went {_change(before, after)}"
        reason = "the reward did not rise"
        rose = _reward_rose(late_rewards)

    measure = "entropy of the last tenth, divided by that of the first"
    finding = _passed(ENTROPY_KEPT, entropy, last / first if first else 1.0, measure)
    if last > max(ENTROPY_RISE * first, first + 1):
        start = onset(entropy, lambda mean: mean > max(ENTROPY_RISE * first, first + 1))
        cause = f"{change}: the policy becomes random"
        return finding.failed("entropy-rise", cause, onset=start, quantities=["entropy"])

    collapsed = last < min(ENTROPY_LEFT * first, NO_ENTROPY)
    if collapsed and rose and last < LEAST_ENTROPY * first:
        # Next to nothing is left of the entropy, so the reward must have risen after it was lost.
        collapse_step = onset(entropy, lambda mean: mean < LEAST_ENTROPY * 3 * first)
        rewards_after: list[float] = []
        if collapse_step is not None:
            rewards_after = [value for step, value in zip(*reward, strict=True) if step >= collapse_step]
        if len(rewards_after) >= 3 * FEW_STEPS and not _reward_rose(rewards_after):
            rose = False
            reason = f"the reward did not rise after step {collapse_step:.0f}"
    if collapsed and not rose and not solved:
        start = onset(entropy, lambda mean: mean < ENTROPY_LEFT * first)
        cause = f"{change}: the policy has stopped exploring, and {reason}"
        # If the reward rose earlier, and some entropy is left or the reward is nearly at its largest, the collapse may
        # be the price of learning.
        rose_earlier = len(reward.values) >= 30 and _rise(reward) > 3
        learned = rose_earlier and (last > NEARLY_NO_ENTROPY * first or _is_nearly_solved(reward))
        severity = "look" if learned else "fix"
        return finding.failed(
            "entropy-collapse", cause, severity=severity, onset=start, quantities=["entropy"]
        )

    is_low = first < LOW_ENTROPY and fmean(entropy.values) < LOW_ENTROPY
    if len(entropy.values) >= 4 * FEW_STEPS and is_low and not solved:
        cause = (
            f"entropy is {format_number(first, 2)} nats per token at the start, so that the answers of a group are "
            "nearly alike"
        )
        rows = slice(max(1, len(entropy.values) // 10))
        finding = _passed(ENTROPY_KEPT, entropy, first, "entropy of the first tenth (nats per token)", rows)
        start = next(step for step, value in zip(*entropy, strict=True) if value < LOW_ENTROPY)
        return finding.failed("low-entropy", cause, onset=start, quantities=["entropy"])
    return finding


# --- Evaluation ---


def _check_evaluation(course: Course) -> Finding:
    """Check that the score on other prompts does not fall while the reward rises."""
    tested = "the score on other prompts does not fall while the reward rises"
    score = course.series(EVALUATION)
    reward = course.series("reward")
    if len(score.values) < 5 or len(reward.values) < 5:
        return Finding("ok", None, tested)
    # Running means of the score: the best, and the last.
    window = max(2, len(score.values) // 6)
    sums = [0.0, *accumulate(score.values)]
    means = [(after - before) / window for before, after in zip(sums, sums[window:], strict=False)]
    best = means.index(max(means))
    last = means[-1]
    noise = noise_of_differences(score.values) / math.sqrt(window)
    loss = means[best] - last
    finding = _passed(tested, score, loss, "fall of the score on other prompts from its best mean")
    largest_loss = max(3 * noise, 0.1 * abs(means[best]))
    fell = loss > largest_loss

    # The reward since the best score.
    start = score.steps[min(best + window - 1, len(score.steps) - 1)]
    points = [(step, value) for step, value in zip(*reward, strict=True) if step >= start]
    later_reward = Series([step for step, _ in points], [value for _, value in points])
    if not fell or len(later_reward.values) < 6 or _rise(later_reward) < 3:
        return finding
    reward_before, reward_after = end_means(later_reward.values, 3)
    cause = (
        f"the score on other prompts fell {_change(means[best], last)} since step {start:.0f}, while the reward rose "
        f"{_change(reward_before, reward_after)}: the policy exploits the reward"
    )
    after_best = Series(score.steps[best:], score.values[best:])
    fall_start = onset(after_best, lambda mean: mean < means[best] - largest_loss)
    return finding.failed("reward-hacked", cause, onset=fall_start, quantities=[EVALUATION, "reward"])


# --- Updates that are too small ---

LITTLE_KL = 0.01
"""KL to the reference (nats per token) below which the policy has hardly moved."""

LITTLE_RATE = 5e-7
"""Learning rate up to which updates are small."""

MANY_STEPS = 100
"""Number of training steps from which a policy should have moved."""


def _check_small_steps(course: Course) -> Finding:
    """Check that after many steps the policy has moved, unless the reward has risen."""
    tested = "the policy moves"
    kl = course.series("kl")
    reward = course.series("reward")
    rates = course.series("learning_rate").values
    steps = course.rows[-1]["step"] - course.rows[0]["step"] + 1
    if len(reward.values) < 30 or steps < MANY_STEPS:
        return Finding("ok", None, tested)
    if kl.values and max(kl.values) > 0:
        finding = _passed(tested, kl, kl.last, "KL to the reference in the last tenth", _last_tenth(kl))
        quantity = "kl"
        is_small = False
        if len(kl.values) >= 30:
            # Absolute values, since some loops log the KL with the opposite sign.
            means = [kl.last, *tenths(kl.values)]
            is_small = max(abs(mean) for mean in means) < LITTLE_KL
        evidence = f"KL to the reference is {format_number(kl.last, 2)} after {steps:.0f} steps"
    elif rates:
        finding = Finding("ok", True, tested, max(rates), None, len(rates), measure="largest learning rate")
        quantity = "learning_rate"
        is_small = 0 < max(rates) <= LITTLE_RATE
        evidence = f"the learning rate is at most {format_number(max(rates), 2)}, over {steps:.0f} steps"
    else:
        return Finding("ok", None, tested)

    entropy = course.series("entropy")
    same_entropy = not entropy.values or 0.75 < entropy.last / (entropy.first or 1.0) < 1.33
    if not is_small or rises(reward.values) or _rise(reward) > 3 or not same_entropy:
        return finding
    before, after = end_means(reward.values, 3)
    cause = f"{evidence}, and the reward went {_change(before, after)}: the policy has hardly moved"
    return finding.failed("hardly-moves", cause, quantities=[quantity, "reward"])


# --- The end of a run ---

LATE_QUANTITIES = {
    "entropy": "step-too-large entropy-rise entropy-collapse low-entropy",
    "cut": "truncated",
    "kl": "kl-drift reference-kl step-too-large",
    "length": "length-growth data-change truncated",
    "mismatch": "engine-mismatch",
    "mismatch_kl": "engine-mismatch",
    "grad_norm": "gradient-spikes",
}
"""The quantities whose last tenth is compared with the others. For each, the codes of findings that already report a
change of it."""

OUTLIER_ERRORS = 4.0
"""Standard errors of a tenth's mean by which the last tenth must lie outside the range of the others."""

OUTLIER_FACTOR = 1.5
"""Factor by which the last tenth must lie outside the range of the others."""

STANDARD_ERRORS = 4.0
"""Standard errors above which a change of a mean is significant."""

WANDERING = 3.0
"""A fall of the reward must be this many times its median change from tenth to tenth."""

COMPARED_AT_A_FALL = r"(^|/)(kl|ppo_kl|kl_loss|grad_norm|mean_length|\w*length/mean|clip(ped)?_ratio)$"
"""A pattern for the names of the metrics that are compared before and after a fall of the reward."""


def _check_last_tenth(course: Course, codes: set[str]) -> Finding:
    """Check that the last tenth of a run is like the nine before it.

    Args:
        course: The metrics of the run.
        codes: The codes of the findings so far.
    """
    tested = "the last tenth of the run is like the rest"
    changes = {}
    starts: list[float] = []
    finding = Finding("ok", None, tested)
    for name, explained_by in LATE_QUANTITIES.items():
        metric = course.series(name)
        if len(metric.values) < 40 or codes & set(explained_by.split()):
            continue
        finding = _passed(tested, metric)
        *earlier, last = tenths(metric.values)
        low = min(earlier)
        high = max(earlier)
        distance = max(low - last, last - high)
        is_outside = _is_outside(last, low, high)
        # The last tenth of a curve with a trend is always outside the range of the others, so it must also differ by
        # more than the curve usually changes from tenth to tenth.
        usual_change = max(abs(after - before) for before, after in pairwise(earlier[1:]))
        noise = noise_of_differences(metric.values) / math.sqrt(len(metric.values) / 10)
        is_sudden = distance > max(2 * usual_change, OUTLIER_ERRORS * noise)
        if is_sudden and is_outside and (name != "cut" or last > 0.1):
            changes[name] = f"{name} {_change(earlier[-1], last)}"
            last_steps = tenth_blocks(metric.steps)[-1]
            last_values = tenth_blocks(metric.values)[-1]
            steps = zip(last_steps, last_values, strict=True)
            starts.append(next(step for step, value in steps if _is_outside(value, low, high)))
    if not changes:
        return finding
    step = tenth_blocks([row["step"] for row in course.rows])[-1][0]
    cause = (
        f"from step {step:.0f} on the run differs from its first nine tenths: {', '.join(changes.values())}"
    )
    return finding.failed("late-change", cause, onset=min(starts), quantities=[*changes])


def _is_outside(value: float, low: float, high: float) -> bool:
    """Return whether a value lies outside of a range by `OUTLIER_FACTOR`."""
    return value * OUTLIER_FACTOR < low or value > OUTLIER_FACTOR * high


def _check_fall(course: Course) -> Finding:
    """Check that the last tenth of a run keeps at least half of the reward of the best tenth.

    The finding names the metrics that have doubled or halved by then. A log does not show whether they are the cause.
    """
    tested = "the reward does not collapse"
    reward = course.series("reward")
    if len(reward.values) < PLATEAU_STEPS:
        return Finding("ok", None, tested, advice=f"needs at least {PLATEAU_STEPS} log steps")
    means = tenths(reward.values)
    best = max(range(10), key=lambda tenth: means[tenth])
    noise = noise_of_differences(reward.values) / math.sqrt(len(reward.values) / 10)
    finding = _passed(tested, reward, means[-1], "mean reward of the last tenth", _last_tenth(reward))
    # The height of the best tenth is measured from 0, or from the lowest tenth if rewards are negative.
    lowest = min(0.0, *means)
    height = means[best] - lowest
    # If the reward wanders, neighbouring tenths differ by more than the noise of single steps explains.
    wandering = sorted(abs(after - before) for before, after in pairwise(means))[len(means) // 2]
    largest_loss = max(height / 2, STANDARD_ERRORS * noise, WANDERING * wandering)
    if means[best] - means[-1] <= largest_loss:
        return finding

    # Values in the best and in the last tenth of the metrics that may explain the fall.
    ends = {}
    ratios = {}
    for name in course.names:
        if not re.search(COMPARED_AT_A_FALL, name):
            continue
        values = course.series(name).values
        if len(values) == len(reward.values):
            blocks = tenths(values)
            before = blocks[best]
            after = blocks[-1]
            ends[name] = (before, after)
            larger = max(abs(before), abs(after))
            smaller = min(abs(before), abs(after))
            ratios[name] = (larger + 0.01) / (smaller + 0.01)
    names = sorted(ratios, key=lambda name: ratios[name], reverse=True)
    changed_names = [name for name in names if ratios[name] > 2][:3]

    changes = [f"reward {_change(means[best], means[-1])}"]
    for name in changed_names:
        before, after = ends[name]
        changes.append(f"{name} {_change(before, after)}")
    step = tenth_blocks(reward.steps)[best][-1]
    cause = f"from step {step:.0f} on {', '.join(changes)}"
    first_row = sum(len(block) for block in tenth_blocks(reward.values)[:best])
    after_best = Series(reward.steps[first_row:], reward.values[first_row:])
    start = onset(after_best, lambda mean: means[best] - mean > largest_loss)
    quantities = ["reward", *(name for name in changed_names if name in QUANTITIES)]
    return finding.failed("collapse", cause, onset=start, quantities=quantities)


# --- A plateau ---

PLATEAU_STEPS = 30
"""Number of log steps below which a plateau is not looked for."""

FLAT_SHARE = 0.5
"""Share of a run that must be flat to be a plateau."""

UNLOGGED = {
    EVALUATION: "a score on other prompts",
    "dead": "the share of groups without spread",
    "cut": "the share of answers cut off",
    "entropy": "entropy",
    "kl": "KL to the reference",
}
"""Quantities that are needed to exclude causes of a plateau, with a description of each."""


def _find_flat_part(course: Course) -> tuple[Series, int] | None:
    """Return the reward, and the row from which it is flat; None if it is not flat, or if there are few log steps."""
    reward = course.series("reward")
    n = len(reward.values)
    if n < PLATEAU_STEPS:
        return None
    turn, rise, noise = find_change_point(reward.values)
    if rise < STANDARD_ERRORS * noise / math.sqrt(max(turn, 1)):
        turn = 0  # the rise is not significant, so all of the run is flat
    late_rewards = reward.values[turn:]
    if len(late_rewards) < FLAT_SHARE * n or rises(late_rewards):
        return None
    return reward, turn


def _check_plateau(course: Course, flat: tuple[Series, int] | None, *, fell: bool, solved: bool) -> Finding:
    """Report the steps in which the reward is flat. This is no fault by itself.

    Args:
        course: The metrics of the run.
        flat: The reward, and the row from which it is flat, see `_find_flat_part`.
        fell: True if the reward fell at the end.
        solved: True if the prompts are solved.
    """
    tested = "the reward is not flat for half of the run"
    reward = course.series("reward")
    if len(reward.values) < PLATEAU_STEPS:
        return Finding("ok", None, tested, advice=f"needs at least {PLATEAU_STEPS} log steps")
    if fell:
        # `_check_fall` has reported it.
        return Finding("ok", None, tested)
    finding = _passed(
        tested, reward, fmean(reward.later_half), "mean reward of the later half", _later_half(reward)
    )
    if flat is None:
        return finding

    _, turn = flat
    late_rewards = reward.values[turn:]
    slope = fit_slope(late_rewards)
    largest_unseen_rise = max(0.0, slope.rise) + 2 * slope.error
    start = reward.steps[turn]
    end = reward.steps[-1]
    share = len(late_rewards) / len(reward.values)
    cause = (
        f"reward {format_number(fmean(late_rewards))} from step {start:.0f} to {end:.0f}, {format_share(share)} of the "
        "run"
    )
    # Of a constant reward only rounding errors are left.
    if largest_unseen_rise > 1e-9 * max(1.0, abs(fmean(late_rewards))):
        cause = f"{cause}; a rise below {format_number(largest_unseen_rise, 2)} could not be seen"
    if solved:
        cause = f"{cause}; these prompts are solved"
    else:
        unlogged = [description for name, description in UNLOGGED.items() if name not in course.names]
        if unlogged:
            cause = f"{cause}; not logged, so not excluded: {', '.join(unlogged)}"
    return finding.failed("plateau", cause, onset=start, quantities=["reward"])


# --- Remarks on the clip ---

HARMLESS_BLOCKED_SHARE = 0.11
"""Share of the gradient on rare winners up to which blocking it had no effect in our study of small networks."""


def _check_clip(course: Course, updates: float | None) -> Finding:
    """Describe the effect of the clip, for a run without a fault.

    Args:
        course: The metrics of the run.
        updates: Number of optimizer steps on each batch; None if it is not known.
    """
    summary = summarize(course.rows)
    on_policy = summary.metrics.get("on_policy")
    one_update = on_policy == 1 or (updates is not None and updates <= 1 and not summary.clipped)
    if summary.clipped is None and not one_update:
        return Finding("ok", None, "the clip")
    tokens = int(summary.metrics.get("tokens", 0))
    finding = Finding(
        "ok", True, "the clip", summary.clipped, None, tokens, measure="share of tokens clipped"
    )

    if one_update:
        return finding.failed("on-policy", "each batch gets one update, so every ratio is 1", severity="note")
    if summary.clipped == 0 and updates is None and on_policy is None:
        cause = "no token was clipped, as with one update on each batch"
        return finding.failed("on-policy", cause, "clip-idle", severity="note")
    if summary.clipped == 0 and summary.metrics.get("inert", 1) == 1:
        cause = "no token was clipped: steps are smaller than the rule allows"
        return finding.failed("clip-idle", cause, severity="note")

    interval = summary.blocked_interval()
    if interval is not None and interval[0] > HARMLESS_BLOCKED_SHARE:
        share = summary.metrics["blocked_mass_below_0.1"]
        cause = (
            f"the clip blocks {format_share(share)} [{format_share(interval[0])}, {format_share(interval[1])}] of the "
            "gradient that would raise tokens below p = 0.1"
        )
        return finding.failed("rare-tokens-blocked", cause, severity="note")
    return finding
