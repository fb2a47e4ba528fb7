"""Checks of the metrics in a run's log. Only the standard library is needed.

The checks are ordered: causes come before their effects. The thresholds above each group of checks were chosen on the
scenarios and logs of ``benchmarks/doctor``, and tested on others.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise
from statistics import fmean, median

from rlvet._numbers import format_number, format_share
from rlvet.checks.course import (
    Course,
    Series,
    deviation,
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
from rlvet.checks.distance_checks import check_divergence, check_reference, check_step_size
from rlvet.checks.engine_checks import DISTANCES, engine_findings
from rlvet.checks.findings import Finding
from rlvet.checks.log_results import (
    FEW_STEPS,
    change_text,
    last_tenth,
    later_half,
    passed_check,
    undecided_check,
)
from rlvet.runs.quantities import EVALUATION, QUANTITIES, Row, component_name
from rlvet.runs.setup import Setup
from rlvet.runs.summary import summarize


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

    reference = check_reference(course, setup)
    findings = [
        _check_numbers(course),
        _check_movement(course),
        reference,
        *engine_findings(course, setup),
        check_step_size(course),
        _check_gradient_spikes(course, fell=fell),
        _check_clip_share(course, setup),
        check_divergence(course, reference_is_wrong=reference.ok is False),
        _check_baseline(course, setup),
        _check_truncation(course, setup),
        _check_constant_reward(course),
        _check_signal(course, setup, solved=solved),
        _check_data(course),
        *_check_components(course),
        _check_length(course),
        _check_short_answers(course),
        _check_entropy(course, flat_since, solved=solved),
        _check_evaluation(course),
        _check_small_steps(course),
        fall,
    ]
    findings = _with_lost_signal_last(findings)
    codes = {finding.code for finding in findings if finding.cause}
    findings.append(_check_last_tenth(course, codes))
    findings.append(_check_plateau(course, flat, fell=fell, solved=solved))
    # The clip is judged only if there is no fault.
    if all(finding.ok is not False for finding in findings):
        findings.append(_check_clip(course, setup.updates))
    return [_with_cost(finding, rows) for finding in findings]


CAUSES_OF_LOST_SIGNAL = ("length-collapse", "entropy-collapse")
"""Codes of faults that make the answers of a group alike, so that their rewards are equal."""


def _with_lost_signal_last(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings with lost signal after its causes: those of `CAUSES_OF_LOST_SIGNAL` that began before it."""
    signal = next((finding for finding in findings if finding.code == "no-signal"), None)
    if signal is None or signal.onset is None:
        return list(findings)
    causes = []
    for finding in findings:
        began_before = finding.onset is not None and finding.onset <= signal.onset
        if finding.code in CAUSES_OF_LOST_SIGNAL and began_before:
            causes.append(finding)
    others = [finding for finding in findings if finding not in causes]
    position = others.index(signal)
    return [*others[:position], *causes, *others[position:]]


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
                finding = passed_check(tested, metric, 0.0, f"largest {name}")
                return finding.failed("no-step", cause, onset=metric.steps[0], quantities=[name])
            continue
        largest = max(metric.values)
        if largest > limit:
            # If the gradient is 0, a learning rate above 0 shows no movement.
            if finding.ok is None or name == "grad_norm":
                finding = passed_check(tested, metric, largest, f"largest {name}")
            continue
        if name == "learning_rate":
            is_warm_up = metric.values[-1] == largest and largest > metric.values[0]
            is_fault = not is_warm_up
        else:
            is_fault = _rewards_differ(course)
        if is_fault:
            cause = f"{name} never exceeds {format_number(largest, 6)}"
            finding = passed_check(tested, metric, largest, f"largest {name}")
            return finding.failed("no-step", cause, onset=metric.steps[0], quantities=[name])
        # The weights rest, as in a warm-up, or if all rewards are equal.
        return undecided_check(tested, f"{name} is {format_number(largest, 6)} so far")
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
    tested = "spikes of the gradient norm are few"
    norm = course.series("grad_norm")
    if len(norm.values) < 4 * FEW_STEPS:
        return Finding("ok", None, tested)
    spikes = find_spikes(norm.values, SPIKE)
    finding = passed_check(tested, norm, len(spikes), "log steps with a spike")
    # If many rows are far from their neighbours, the norm has a wide spread and no spikes.
    if len(spikes) < FEWEST_SPIKES:
        return finding
    if len(spikes) > len(norm.values) / 10:
        return undecided_check(tested, "the norm has a wide spread")
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
    finding = passed_check(
        tested, shares, shares.last, "share of tokens clipped in the last tenth", last_tenth(shares)
    )
    look_limit = SOME_CLIPPED
    fix_limit = MUCH_CLIPPED
    if setup.level == "sequence" or (setup.method or "").startswith("GSPO"):
        look_limit = MUCH_CLIPPED_SEQUENCES
        fix_limit = MUCH_CLIPPED_SEQUENCES
    share = max(shares.last, fmean(shares.later_half))
    if share <= look_limit:
        return finding if share <= MOST else undecided_check(tested)
    change = f"{shares.first:.1%} → {shares.last:.1%}"
    cause = (
        f"{format_share(share)} of tokens are clipped ({change}): their gradient is lost, and updates go far from the "
        "sampling policy"
    )
    if share > shares.last:
        measure = "share of tokens clipped in the later half"
        finding = passed_check(tested, shares, share, measure, later_half(shares))
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

ROWS_PER_EXCEPTION = 20
"""Number of rows with equal rewards among which one may have another, so that one row does not hide the others."""

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
    equal_rows, others = _equal_rows_at_the_end(reward.values)
    last = reward.values[-equal_rows]
    finding = passed_check(tested, reward, equal_rows, "log steps at the end with equal rewards")
    spreads = course.series("reward_std").values[-equal_rows:]
    is_best = last >= SOLVED and max(reward.values) <= 1
    is_short = equal_rows < CONSTANT_ROWS or equal_rows < CONSTANT_SHARE * len(reward.values)
    if is_short or is_best or any(spreads):
        # The mean reward has not changed for some log steps, but that is no fault yet.
        if equal_rows >= min(FEW_STEPS, len(reward.values)):
            return undecided_check(tested, f"needs at least {CONSTANT_ROWS} log steps" if is_short else "")
        return finding
    start = reward.steps[-equal_rows]
    value = format_number(last)
    cause = f"the reward is {value} in every one of the last {equal_rows} log steps, from step {start:.0f} on"
    if others:
        cause = (
            f"the reward is {value} in {equal_rows - others} of the last {equal_rows} log steps, from step "
            f"{start:.0f} on"
        )
    return finding.failed("reward-flat", cause, onset=start, quantities=["reward"])


def _equal_rows_at_the_end(values: Sequence[float]) -> tuple[int, int]:
    """Return the number of rows at the end that have the same value, and how many of these have another one.

    One row in `ROWS_PER_EXCEPTION` may have another value, so that a single one does not hide a constant reward.
    """
    usual = Counter(values[-FEW_STEPS:]).most_common(1)[0][0]
    others = 0
    best = (0, 0)
    for count, value in enumerate(reversed(values), 1):
        if value != usual:
            others += 1
        if others * ROWS_PER_EXCEPTION > max(count, ROWS_PER_EXCEPTION):
            break
        if value == usual:
            best = (count, others)
    return best


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
        finding = passed_check(tested, first_component)
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
    finding = passed_check(tested, reward)

    # A log does not contain the weights of the components, so they are fitted.
    fit = fit_weights(reward.values, [metric.values for metric in varying.values()])
    if fit is None:
        return undecided_check(tested)
    weights, explained = fit
    if explained < EXPLAINED:
        return undecided_check(tested, "the weights of the components are not known")
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
    finding = passed_check(tested, reward, shares[largest], measure, later_half(reward))
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
    changes = ", ".join(
        f"{name} {change_text(jump.before, jump.after)}" for name, jump in simultaneous.items()
    )
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
    finding = passed_check(tested, shares, mean, measure, later_half(shares))
    if len(late) > 1:
        finding = finding._replace(error=standard_error(late))
    if mean - 2 * standard_error(late) > MOST:
        cause = f"{format_share(mean)} of answers are cut off{at_cap}"
        start = onset(shares, lambda share: share > MOST)
        return finding.failed("truncated", cause, onset=start, quantities=quantities)
    if len(shares.values) < 2 * FEW_STEPS:
        if mean <= SOME_CUT:
            return finding if max(shares.values) <= MOST else undecided_check(tested)
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
        finding = passed_check(
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
    if max(blocks) <= MOST < _largest_mean(shares.values, max(1, len(shares.values) // 10)):
        return undecided_check(tested, "most are cut off in some log steps")
    if max(blocks) > MOST:
        worst = blocks.index(max(blocks))
        steps = tenth_blocks(shares.steps)[worst]
        first_row = sum(len(block) for block in tenth_blocks(shares.steps)[:worst])
        start = _first_step_above(shares, MOST, first_row)
        rows = slice(first_row, first_row + len(steps))
        finding = passed_check(
            tested, shares, max(blocks), "share of answers cut off in these log steps", rows
        )
        share = format_share(max(blocks))
        cause = f"{share} of answers were cut off{at_cap} from step {steps[0]:.0f} to {steps[-1]:.0f}"
        return finding.failed("truncated", cause, severity="look", onset=start, quantities=quantities)
    return finding


def _largest_mean(values: Sequence[float], window: int) -> float:
    """Return the largest mean of consecutive values."""
    sums = [0.0, *accumulate(values)]
    return max((after - before) / window for before, after in zip(sums, sums[window:], strict=False))


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
        return undecided_check(tested, "log the share of answers cut off")
    if known_cap:
        return _compare_length_with_cap(course, tested, known_cap)

    # The cap is not known. If the largest mean length is a whole number and occurs in several steps, it is the length
    # of every answer in these steps: the cap.
    cap = max(length.values)
    rows_at_cap = sum(value == cap for value in length.values)
    mean = fmean(length.values)
    measure = "share of the largest length that is the mean length"
    finding = passed_check(tested, length, mean / cap if cap else 0.0, measure)
    if rows_at_cap < 3 or cap != int(cap) or mean < AT_THE_CAP * cap:
        share = rows_at_cap / len(length.values)
        if share < 0.1 or cap != int(cap) or mean < 0.75 * cap:
            # Mean lengths below a cap that is not known show nothing.
            return undecided_check(tested, "log the share of answers cut off")
    cause = (
        f"the mean length is {mean:.0f} tokens, and exactly {cap:.0f} in {rows_at_cap} of {len(length.values)} log "
        "steps: that is the cap, and every answer of these steps was cut off"
    )
    return finding.failed("truncated", cause, onset=length.steps[0], quantities=["length"])


def _compare_length_with_cap(course: Course, tested: str, cap: float) -> Finding:
    """Check that answers are not cut off, by their length and the cap in the run's configuration."""
    length = course.series("length")
    late = fmean(length.later_half)
    measure = "share of the cap that is the mean length in the later half"
    finding = passed_check(tested, length, late / cap, measure, later_half(length))
    if late >= AT_THE_CAP * cap:
        cause = (
            f"the mean length is {late:.0f} tokens in the later half, {format_share(late / cap)} of the cap of "
            f"{format_number(cap, 6)} tokens, so that many answers are cut off"
        )
        start = onset(length, lambda mean: mean >= AT_THE_CAP * cap)
        return finding.failed("truncated", cause, onset=start, quantities=["length"])
    longest = course.series("length_max")
    if longest.values and max(longest.values) < cap:
        return finding
    # An answer has at most as many tokens as the cap, so that the share that is cut off is at most mean / cap.
    if max(length.values) <= MOST * cap:
        return finding
    return undecided_check(tested, "log the share of answers cut off")


def _check_signal(course: Course, setup: Setup, *, solved: bool) -> Finding:
    """Check that the rewards of most groups differ, so that their advantages are not all 0."""
    tested = "most groups carry signal"
    shares = course.series("dead")
    if not shares.values:
        return _check_spread(course, setup, tested, solved=solved)
    if len(shares.values) < FEW_STEPS:
        return undecided_check(tested, f"needs at least {FEW_STEPS} log steps")
    late = shares.later_half
    mean = fmean(late)
    error = standard_error(late)
    measure = "share of groups without signal in the later half"
    finding = passed_check(tested, shares, mean, measure, later_half(shares))._replace(error=error)
    # The shares of single steps are noisy, so the means in which the onset is searched may be below the limit by
    # chance.
    window = max(1, len(shares.values) // 20)
    noise = error * math.sqrt(len(late) / window)
    start = onset(shares, lambda share: share > MOST - 2 * noise, lambda share: share > MOST)
    last_rows = late[-max(FEW_STEPS, len(late) // 5) :]
    end = fmean(last_rows)
    if mean - 2 * error <= MOST and not (solved and end > MOST):
        if max(mean, end, shares.last) > MOST:
            return undecided_check(tested, "about half of the groups carry none")
        return finding
    if end > mean:
        rows = slice(-len(last_rows), None)
        finding = passed_check(
            tested, shares, end, "share of groups without signal in the last log steps", rows
        )
    groups = "groups"
    group_size = setup.number("group size")
    if group_size:
        unit = "answers" if group_size > 1 else "answer"
        groups = f"groups of {format_number(group_size, 6)} {unit}"
    cause = f"{format_share(max(mean, end))} of {groups} carry no signal{_why_alike(setup)}"
    reward = course.series("reward")
    if solved:
        cause = f"{cause}, as these prompts are solved (reward {format_number(reward.last)})"
        return finding.failed("no-signal", cause, severity="look", onset=start, quantities=["dead"])
    later_rewards = reward.values[len(reward.values) // 3 :]
    still_learns = len(later_rewards) >= 20 and rises(later_rewards)
    severity = "look" if still_learns else "fix"
    return finding.failed("no-signal", cause, severity=severity, onset=start, quantities=["dead"])


BASELINE_ROWS = 3
"""Number of log steps with rewards other than 0 from which advantages are compared with them."""

NEARLY_ALL = 0.9
"""Share of these log steps in which advantages must equal rewards for a finding."""

RELATIVE_DIFFERENCE = 1e-4
"""Relative difference up to which a largest advantage equals a largest reward. GRPO divides the reward of a group of
one by 1 + 1e-6, and verl computes in float32."""


def _check_baseline(course: Course, setup: Setup) -> Finding:
    """Check that the largest and smallest advantages are not those of the rewards, as without a baseline."""
    tested = "a baseline is subtracted from rewards"
    steps = []
    equal_steps = []
    for row in course.rows:
        if any(name not in row for name in ("reward_max", "reward_min", "advantage_max", "advantage_min")):
            continue
        # Rewards of ±1 have the mean 0 in a group of one of each. Rewards of 0 show nothing.
        if row["reward_min"] == -row["reward_max"]:
            continue
        steps.append(row["step"])
        largest_is_equal = math.isclose(row["advantage_max"], row["reward_max"], rel_tol=RELATIVE_DIFFERENCE)
        smallest_is_equal = math.isclose(row["advantage_min"], row["reward_min"], rel_tol=RELATIVE_DIFFERENCE)
        if largest_is_equal and smallest_is_equal:
            equal_steps.append(row["step"])
    if len(steps) < BASELINE_ROWS:
        return undecided_check(tested)
    share = len(equal_steps) / len(steps)
    finding = Finding(
        "ok",
        True,
        tested,
        share,
        None,
        len(steps),
        steps=(steps[0], steps[-1]),
        measure="share of log steps in which the largest and the smallest advantage equal those of the rewards",
    )
    if share < NEARLY_ALL:
        return undecided_check(tested) if equal_steps else finding
    cause = (
        f"the largest and the smallest advantage equal the largest and the smallest reward in {len(equal_steps)} of "
        f"{len(steps)} log steps: no baseline is subtracted"
    )
    group_size = setup.number("group size")
    if group_size == 1:
        cause = f"{cause}, as each prompt has one answer"
    elif group_size:
        cause = f"{cause}, though the settings name {format_number(group_size, 6)} answers to each prompt"
    quantities = ["advantage_max", "advantage_min", "reward_max", "reward_min"]
    return finding.failed("no-baseline", cause, onset=equal_steps[0], quantities=quantities)


SPREAD_LEFT = 0.1
"""Share of the spread of rewards at the start below which nearly all rewards are equal. A reward of 0 or 1 whose mean
rises from 0.5 to 0.99 keeps 0.2 of its standard deviation."""


def _check_spread(course: Course, setup: Setup, tested: str, *, solved: bool) -> Finding:
    """Check that the spread of rewards is not lost, if the log has no share of groups with equal rewards."""
    spread = course.series("reward_std")
    if len(spread.values) < FEW_STEPS:
        return undecided_check(tested, f"needs at least {FEW_STEPS} log steps" if spread.values else "")
    limit = SPREAD_LEFT * spread.first
    quarter = spread.values[-max(3, len(spread.values) // 4) :]
    if spread.last >= limit or median(quarter) >= limit:
        return undecided_check(tested, "log the share of groups whose rewards are all equal")
    measure = "standard deviation of rewards, last tenth"
    finding = passed_check(tested, spread, spread.last, measure, last_tenth(spread))
    cause = (
        f"the standard deviation of rewards went {change_text(spread.first, spread.last)}: nearly all answers get the "
        f"same reward{_why_alike(setup)}"
    )
    reward = course.series("reward")
    rose = len(reward.values) >= FEW_STEPS and _rise(reward) > 3
    severity = "look" if solved or rose else "fix"
    start = onset(spread, lambda mean: mean < limit)
    return finding.failed("no-signal", cause, severity=severity, onset=start, quantities=["reward_std"])


LOW_TEMPERATURE = 0.1
"""Sampling temperature up to which the answers of a group are nearly identical."""


def _why_alike(setup: Setup) -> str:
    """Return a clause with the sampling temperature, if it explains that answers are alike."""
    temperature = setup.number("temperature")
    if temperature is None or temperature > LOW_TEMPERATURE:
        return ""
    return f", as answers sampled at temperature {format_number(temperature)} are nearly identical"


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
    finding = passed_check(
        tested, length, growth, "mean length of the last tenth, divided by that of the first"
    )
    reward = course.series("reward")
    score = course.series(EVALUATION)
    change = f"mean length {change_text(length.first, length.last)} tokens"
    start = onset(length, lambda mean: mean >= LONGER * length.first)

    if len(score.values) >= 6 and len(reward.values) >= 6:
        if growth < LONGER or _score_follows_reward(reward, score):
            return finding
        if _rise(reward) < 3:
            return finding if _grew_better(reward) else undecided_check(tested)
        before, after = end_means(score.values, 3)
        cause = f"{change}, while the score on other prompts went {change_text(before, after)}"
        # The relative rise of a reward that may be negative is not comparable.
        severity = "look" if min(reward.values) < 0 else "fix"
        quantities = ["length", EVALUATION]
        return finding.failed("length-growth", cause, severity=severity, onset=start, quantities=quantities)

    if growth < MUCH_LONGER or len(reward.values) < 30 or _rise(reward) > 2:
        return finding if growth < LONGER or _grew_better(reward) else undecided_check(tested)
    cause = f"{change}, and the reward does not rise"
    start = onset(length, lambda mean: mean >= MUCH_LONGER * length.first)
    return finding.failed(
        "length-growth", cause, severity="look", onset=start, quantities=["length", "reward"]
    )


def _grew_better(reward: Series) -> bool:
    """Return whether the mean of the last third of the rewards is above that of the first."""
    before, after = end_means(reward.values, 3) if reward.values else (0.0, 0.0)
    return after > before


def _score_follows_reward(reward: Series, score: Series) -> bool:
    """Check whether the score on other prompts rises by 15 %, or by a third of the relative rise of the reward."""
    reward_before, reward_after = end_means(reward.values, 3)
    score_before, score_after = end_means(score.values, 3)
    score_rise = (score_after - score_before) / max(abs(score_after), abs(score_before), 1e-12)
    reward_rise = (reward_after - reward_before) / max(abs(reward_after), abs(reward_before), 1e-12)
    return score_rise > MUCH_BETTER or score_rise > max(0.0, reward_rise / 3)


LENGTH_LEFT = 0.2
"""Share of the mean length at the start below which answers have collapsed, unless the reward rose. Runs that learn
shorter answers keep a third or more, and their reward rises."""


def _check_short_answers(course: Course) -> Finding:
    """Check that answers do not shrink to a few tokens without a higher reward."""
    tested = "answers keep their length, or shorten as the reward rises"
    length = course.series("length")
    reward = course.series("reward")
    if len(length.values) < 2 * FEW_STEPS or length.first <= 0 or len(reward.values) < 2 * FEW_STEPS:
        return undecided_check(tested)
    left = length.last / length.first
    measure = "mean length of the last tenth, divided by that of the first"
    finding = passed_check(tested, length, left, measure)
    end = median(length.values[-max(3, len(length.values) // 10) :])
    if left >= LENGTH_LEFT and end >= LENGTH_LEFT * length.first:
        return finding
    rose = _rise(reward) > 3 and _reward_rose(reward.values)
    if left >= LENGTH_LEFT or end >= LENGTH_LEFT * length.first or rose:
        return finding if _grew_better(reward) else undecided_check(tested)
    before, after = end_means(reward.values, 3)
    cause = (
        f"mean length {change_text(length.first, length.last)} tokens, while the reward went "
        f"{change_text(before, after)}: answers have shrunk to a few tokens"
    )
    start = onset(length, lambda mean: mean < LENGTH_LEFT * length.first)
    return finding.failed("length-collapse", cause, onset=start, quantities=["length", "reward"])


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
    change = f"entropy {change_text(first, last)} nats per token"

    reward = course.series("reward")
    late_rewards = [value for step, value in zip(*reward, strict=True) if step >= flat_since]
    reason = "no reward is known"
    rose = False
    if len(late_rewards) > 1:
        before, after = end_means(late_rewards, 3)
        change += f", while the reward went {change_text(before, after)}"
        reason = "the reward did not rise"
        rose = _reward_rose(late_rewards)

    measure = "entropy of the last tenth, divided by that of the first"
    finding = passed_check(ENTROPY_KEPT, entropy, last / first if first else 1.0, measure)
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
        finding = passed_check(
            ENTROPY_KEPT, entropy, first, "entropy of the first tenth (nats per token)", rows
        )
        start = next(step for step, value in zip(*entropy, strict=True) if value < LOW_ENTROPY)
        return finding.failed("low-entropy", cause, onset=start, quantities=["entropy"])
    if last < ENTROPY_LEFT * first and not rose and not _grew_better(reward):
        return undecided_check(ENTROPY_KEPT, "it has fallen, but is not low")
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
    noise = _noise_without_single_rows(score.values) / math.sqrt(window)
    loss = means[best] - last
    finding = passed_check(tested, score, loss, "fall of the score on other prompts from its best mean")
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
        f"the score on other prompts fell {change_text(means[best], last)} since step {start:.0f}, while the reward "
        f"rose {change_text(reward_before, reward_after)}: the policy exploits the reward"
    )
    after_best = Series(score.steps[best:], score.values[best:])
    fall_start = onset(after_best, lambda mean: mean < means[best] - largest_loss)
    return finding.failed("reward-hacked", cause, onset=fall_start, quantities=[EVALUATION, "reward"])


def _noise_without_single_rows(values: Sequence[float]) -> float:
    """Compute the noise of a score, which one value far from the others hardly changes."""
    noise = noise_of_differences(values)
    if len(values) < FEW_STEPS:
        return noise
    # The median distance between neighbours is 0.954 standard deviations of their values for normal noise.
    usual = median(abs(after - before) for before, after in pairwise(values)) / 0.954
    return min(noise, 2 * math.sqrt(2) * usual)


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
        finding = passed_check(tested, kl, kl.last, "KL to the reference in the last tenth", last_tenth(kl))
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
        if not is_small:
            # A learning rate alone shows no movement.
            return undecided_check(tested, "log the KL to the reference")
        evidence = f"the learning rate is at most {format_number(max(rates), 2)}, over {steps:.0f} steps"
    else:
        return Finding("ok", None, tested)

    entropy = course.series("entropy")
    same_entropy = not entropy.values or 0.75 < entropy.last / (entropy.first or 1.0) < 1.33
    if not is_small or rises(reward.values) or _rise(reward) > 3 or not same_entropy:
        return finding if not is_small or _grew_better(reward) else undecided_check(tested)
    before, after = end_means(reward.values, 3)
    cause = f"{evidence}, and the reward went {change_text(before, after)}: the policy has hardly moved"
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

SMALL_QUANTITIES = {"cut": 0.1} | {name: distance.floor for name, distance in DISTANCES.items()}
"""Values of quantities up to which a change of them is no finding."""

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
    # True if a quantity differs there, but by a change that is reported by another finding, or that is not sudden.
    is_unlike = False
    finding = Finding("ok", None, tested)
    for name, explained_by in LATE_QUANTITIES.items():
        metric = course.series(name)
        if len(metric.values) < 40:
            continue
        if finding.ok is None:
            finding = passed_check(tested, metric)
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
        if not is_outside and not _ends_outside(metric.values):
            continue
        is_reported = bool(codes & set(explained_by.split()))
        is_small = last <= SMALL_QUANTITIES.get(name, -math.inf)
        if is_reported or is_small or not is_sudden or not is_outside:
            is_unlike = True
        else:
            changes[name] = f"{name} {change_text(earlier[-1], last)}"
            last_steps = tenth_blocks(metric.steps)[-1]
            last_values = tenth_blocks(metric.values)[-1]
            steps = zip(last_steps, last_values, strict=True)
            starts.append(next(step for step, value in steps if _is_outside(value, low, high)))
    if not changes:
        return undecided_check(tested) if is_unlike else finding
    step = tenth_blocks([row["step"] for row in course.rows])[-1][0]
    cause = (
        f"from step {step:.0f} on the run differs from its first nine tenths: {', '.join(changes.values())}"
    )
    return finding.failed("late-change", cause, onset=min(starts), quantities=[*changes])


def _ends_outside(values: Sequence[float]) -> bool:
    """Return whether the last rows are outside of the range of those before, by splits that begin at other rows."""
    size = len(values) // 10
    for count in (size, size + 1):
        means = [fmean(values[end - count : end]) for end in range(len(values), count - 1, -count)]
        last, *earlier = means
        if _is_outside(last, min(earlier), max(earlier)):
            return True
    return False


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
    finding = passed_check(tested, reward, means[-1], "mean reward of the last tenth", last_tenth(reward))
    # The height of the best tenth is measured from 0, or from the lowest tenth if rewards are negative.
    lowest = min(0.0, *means)
    height = means[best] - lowest
    # If the reward wanders, neighbouring tenths differ by more than the noise of single steps explains.
    wandering = sorted(abs(after - before) for before, after in pairwise(means))[len(means) // 2]
    largest_loss = max(height / 2, STANDARD_ERRORS * noise, WANDERING * wandering)
    if means[best] - means[-1] <= largest_loss:
        # The best and the last part by other splits, so that the limits between tenths do not decide.
        size = len(reward.values) // 10
        last_mean = min(means[-1], reward.last, fmean(reward.values[-size - 1 :]))
        is_lost = _largest_mean(reward.values, size) - last_mean > 0.4 * height
        return undecided_check(tested, "its noise is too large") if is_lost else finding

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

    changes = [f"reward {change_text(means[best], means[-1])}"]
    for name in changed_names:
        before, after = ends[name]
        changes.append(f"{name} {change_text(before, after)}")
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
    finding = passed_check(
        tested, reward, fmean(reward.later_half), "mean reward of the later half", later_half(reward)
    )
    if flat is None:
        is_constant = len(set(reward.later_half)) == 1
        return undecided_check(tested) if is_constant else finding

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
    before, after = end_means(late_rewards, 3)
    if slope.rise < -2 * slope.error or before - after > deviation(late_rewards):
        cause = f"{cause}, where it falls {change_text(before, after)}"
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

SAME_POLICY = 1e-4
"""KL to the policy before the update (nats per token) up to which it is rounding."""

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

    distances = course.series("kl_old").values
    if one_update and updates is not None and updates > 1:
        cause = (
            f"every ratio is 1, though the settings make {format_number(updates, 6)} updates on each batch"
        )
        return finding.failed("on-policy", cause, severity="look")
    if one_update and any(abs(distance) > SAME_POLICY for distance in distances):
        return undecided_check("the clip")
    if one_update:
        return finding.failed("on-policy", "each batch gets one update, so every ratio is 1", severity="note")
    is_same = len(distances) >= FEW_STEPS and not any(distances)
    if summary.clipped == 0 and updates is not None and updates > 1 and is_same:
        cause = (
            "no token was clipped, and the KL to the policy before the update is 0 in every log step, though the "
            f"settings make {format_number(updates, 6)} updates on each batch: logp_old may be computed before each"
        )
        return finding.failed("on-policy", cause, severity="look")
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
