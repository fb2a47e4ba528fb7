"""Checks of a log: what the course of a run's metrics says, with the standard library alone.

They stand in the order of causes before their effects. The figures above each check were chosen on the scenarios and
logs of ``benchmarks/doctor``, and tested on others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import accumulate, pairwise
from statistics import fmean

from bandpo.doctor.course import (
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
from bandpo.doctor.findings import Finding
from bandpo.runs.quantities import EVALUATION, QUANTITIES, Row, component_name
from bandpo.runs.setup import Setup
from bandpo.runs.summary import summarize

FEW_STEPS = 8
"""Log steps below which a course is not judged."""


def log_findings(rows: Sequence[Row], setup: Setup | None = None) -> list[Finding]:
    """Return what the metrics of a run show, causes before their effects, and a plateau after them.

    Args:
        rows: The log, one row per log step, as `bandpo.runs.logs.read_log` returns it.
        setup: What the run was trained with, as far as it is known.
    """
    setup = setup or Setup()
    course = Course(rows)
    fall = _check_fall(course)
    flat = _flat_part(course)
    flat_since = -math.inf if flat is None else flat[0].steps[flat[1]]
    solved = _is_solved(course)
    constant_reward = _check_constant_reward(course)
    findings = [
        _check_numbers(course),
        _check_movement(course),
        _check_reference(course, setup),
        _check_engine(course),
        _check_step_size(course),
        _check_gradient_spikes(course, fell=fall.ok is False),
        _check_clip_share(course, setup),
        _check_divergence(course),
        _check_truncation(course, setup),
        constant_reward,
        _check_signal(course, setup, solved=solved),
        _check_data(course),
        *_check_components(course),
        _check_length(course),
        _check_entropy(course, flat_since, solved=solved),
        _check_evaluation(course),
        _check_small_steps(course),
        fall,
    ]
    found = {finding.code for finding in findings if finding.cause}
    findings.append(_check_last_tenth(course, found))
    plateau = _check_plateau(course, flat, fell=fall.ok is False, solved=solved)
    findings.append(plateau)
    if all(finding.ok is not False for finding in findings):
        findings.append(_check_clip(course, setup.updates))
    return [_with_cost(finding, rows) for finding in findings]


def _with_cost(finding: Finding, rows: Sequence[Row]) -> Finding:
    """Return a finding with what the run has cost since its onset."""
    if not finding.cause or finding.onset is None:
        return finding
    since = [row for row in rows if row["step"] >= finding.onset]
    seconds = sum(row.get("step_time", 0.0) for row in since)
    total = sum(row.get("step_time", 0.0) for row in rows)
    if total:
        gaps = (rows[-1]["step"] - rows[0]["step"]) / max(1, len(rows) - 1)
        # A row may be of several steps, each of which took that time.
        hours, all_hours = (time * max(1.0, gaps) / 3600 for time in (seconds, total))
        return finding._replace(cost=f"{hours:.2g} of {all_hours:.2g} hours, times the GPUs")
    return finding._replace(cost=f"{len(since)} of {len(rows)} log steps")


def _passed(tested: str, metric: Series, figure: float | None = None) -> Finding:
    """Return a check of a metric that passed, with the steps that it rests on."""
    steps = (metric.steps[0], metric.steps[-1])
    return Finding("ok", True, tested, figure, None, len(metric.values), steps=steps)


# --- Numbers and movement ---

LEAST_MOVEMENT = {"learning_rate": 1e-9, "grad_norm": 0.0}
"""For each quantity the value up to which weights stand still: Adam moves them by the rate, and float32 rounds
0.02 + 1e-9."""


def _check_numbers(course: Course) -> Finding:
    steps = [row["step"] for row in course.rows if row.get("not_finite")]
    finding = Finding(
        "ok", True, "the log holds numbers", len(steps) / len(course.rows), None, len(course.rows)
    )
    if not steps:
        return finding
    cause = f"{len(steps)} of {len(course.rows)} log steps hold NaN or infinite values, first step {min(steps):.0f}"
    broken = [row for row in course.rows if row.get("not_finite")]
    lost = [
        name for name in QUANTITIES if course.series(name).values and any(name not in row for row in broken)
    ]
    return finding.failed("nan", cause, onset=min(steps), quantities=lost)


def _rewards_differ(course: Course) -> bool:
    """Check whether some group's rewards differ, so that there must be a gradient; True where nothing is known."""
    dead = course.series("dead").values
    if dead:
        return min(dead) < 1
    rewards = course.series("reward").values
    return not rewards or len(set(rewards)) > 1 or any(course.series("reward_std").values)


def _has_signal_without_gradient(course: Course) -> bool:
    """Check whether every gradient is 0 though it is known that rewards of a group differ."""
    dead = course.series("dead").values
    spreads = course.series("reward_std").values
    known = min(dead) < 1 if dead else bool(spreads) and min(spreads) > 0
    norms = course.series("grad_norm").values
    return known and bool(norms) and not any(norms)


def _check_movement(course: Course) -> Finding:
    """Check that the learning rate is above 0, and the gradient too unless no reward could make one."""
    tested = "weights move"
    finding = Finding("ok", None, tested)
    for name, least in LEAST_MOVEMENT.items():
        metric = course.series(name)
        # A warm-up begins at 0, so a few steps say nothing.
        if len(metric.values) < FEW_STEPS:
            if name == "grad_norm" and _has_signal_without_gradient(course):
                cause = (
                    f"grad_norm is 0 in all {len(metric.values)} log steps, though rewards of a group differ"
                )
                finding = _passed(tested, metric, 0.0)
                return finding.failed("no-step", cause, onset=metric.steps[0], quantities=[name])
            continue
        largest = max(metric.values)
        finding = _passed(tested, metric, largest)
        is_warm_up = name == "learning_rate" and metric.values[-1] == largest > metric.values[0]
        if largest <= least and not is_warm_up and (name == "learning_rate" or _rewards_differ(course)):
            return finding.failed(
                "no-step", f"{name} never exceeds {largest:g}", onset=metric.steps[0], quantities=[name]
            )
    return finding


# --- The policy's distance from others ---

REFERENCE_KL = 0.1
"""KL to the reference at the first step, before any update, from which it is not the model that training began with."""

EARLY_ROWS = 10
"""Rows in which a KL to the reference of `EARLY_KL` shows steps that are too large."""

EARLY_KL = 1.0

GROWTH = 4.0
"""Times by which the KL of the first rows must grow for its cause to be steps, and not another model."""

LARGE_KL = 1.0
"""KL to the reference (nats per token) at the end of a run from which the policy has left it."""

UNBOUNDED_KL = 100.0
"""KL from which nothing is left of the reference."""

TOO_FAR = 2.5
"""Mean abs log-ratio (nats) at the last update on a batch: tokens twelve times as likely or unlikely as when they were
sampled, so that the effective sample is next to nothing."""

LATE_EPOCH = 0.1
"""Epoch from which a few rows are of the middle of a run, whose first row has a number that is not its step."""

LARGE_RATE = 1e-4
"""Learning rate from which it is named beside steps that are too large."""


def _check_reference(course: Course, setup: Setup) -> Finding:
    tested = "the reference is the model that training began with"
    kl = course.series("kl")
    if not kl.values:
        return Finding("ok", None, tested)
    finding = _passed(tested, kl, kl.values[0])
    begins = kl.steps[0] <= 1 or (len(kl.steps) > 1 and kl.steps[0] <= kl.steps[1] - kl.steps[0] == 1)
    epochs = course.series("epoch").values
    if len(kl.values) < EARLY_ROWS and epochs and epochs[0] >= LATE_EPOCH:
        begins = False
    if setup.framework == "verl" and (setup.updates or 1) > 1:
        # verl logs the mean over the updates of a step, and all but the first come after one.
        begins = False
    early = kl.values[:EARLY_ROWS]
    # A mean over several steps at the start is above 0 by itself, unless it is as large as ever after.
    level = len(early) >= EARLY_ROWS and early[0] > 0.5 * fmean(kl.values) and early[0] > 3 * REFERENCE_KL
    # What grows from step to step is the policy, that moves away fast.
    grows = max(early) > GROWTH * kl.values[0]
    if kl.values[0] <= REFERENCE_KL or grows or not (begins or level):
        return finding
    cause = (
        f"KL to the reference is {kl.values[0]:.3g} at step {kl.steps[0]:.0f}, before any update could move the "
        "policy"
    )
    if setup.number("LoRA rank"):
        # A new adapter changes nothing, and so has a KL of 0 to its base model.
        cause = f"{cause}: with LoRA the reference is its base model, without the adapter that training began with"
    else:
        model = "another model, such as the base model of a LoRA run that began with an adapter"
        cause = f"{cause}: the reference is {model}"
    return finding.failed("reference-kl", cause, onset=kl.steps[0], quantities=["kl"])


def _check_step_size(course: Course) -> Finding:
    tested = "steps stay near the policy that sampled"
    moved = course.series("moved")
    kl = course.series("kl")
    if moved.values:
        largest = max(moved.values)
        finding = _passed(tested, moved, largest)
        if largest > TOO_FAR:
            cause = f"by the last update on a batch its tokens had moved by {largest:.2g} nats on average"
            step = moved.steps[moved.values.index(largest)]
            return finding.failed("step-too-large", cause, onset=step, quantities=["moved"])
        return finding
    if not kl.values:
        return Finding("ok", None, tested, advice="record the tokens")
    finding = _passed(tested, kl, max(kl.values[:EARLY_ROWS]))
    early = kl.values[:EARLY_ROWS]
    # Few log steps may be all of a run, of which the first ten are not its beginning.
    if len(kl.values) < 3 * EARLY_ROWS or max(early) < EARLY_KL or max(early) <= GROWTH * early[0]:
        return finding
    row = next(row for row, value in enumerate(early) if value >= EARLY_KL)
    rate = max(course.series("learning_rate").values, default=0.0)
    at_rate = f", at a learning rate of {rate:.3g}" if rate >= LARGE_RATE else ""
    cause = f"KL to the reference went {early[0]:.3g} → {early[row]:.3g} in the first {row + 1} log steps{at_rate}"
    return finding.failed("step-too-large", cause, onset=kl.steps[row], quantities=["kl"])


def _check_divergence(course: Course) -> Finding:
    tested = "the policy stays within reach of the reference"
    kl = course.series("kl")
    if len(kl.values) < FEW_STEPS:
        return Finding("ok", None, tested)
    finding = _passed(tested, kl, kl.last)
    grew = kl.last > 3 * abs(kl.values[0]) + 0.1
    if kl.last <= LARGE_KL or not grew:
        return finding
    severity = "stop" if kl.last > UNBOUNDED_KL else "fix"
    cause = f"KL to the reference {kl.values[0]:.3g} → {kl.last:.3g} nats per token"
    start = onset(kl, lambda mean: mean > LARGE_KL)
    return finding.failed("kl-drift", cause, severity=severity, onset=start, quantities=["kl"])


# --- Engine and trainer ---

MISMATCHES = {
    "mismatch_kl": (0.05, "KL between engine and trainer"),
    "mismatch": (0.1, "mean distance of the engine's log-probabilities from the trainer's"),
    "mismatch_probs": (0.05, "mean distance of the engine's probabilities from the trainer's"),
}
"""For each quantity the value at the end from which engine and trainer differ by more than rounding."""

FAR_WEIGHT = 2.0
"""Times that the mean importance weight between engine and trainer may be away from 1."""

STALE = 4.0
"""Updates by which data may be old on average before it is named."""


def _check_engine(course: Course) -> Finding:
    tested = "engine and trainer agree, as logged"
    finding = Finding("ok", None, tested)
    ages = course.series("staleness").values
    old = fmean(ages) if ages else 0.0
    age = f"; data is {old:.2g} updates old on average" if old >= 1 else ""
    for name, (limit, description) in MISMATCHES.items():
        metric = course.series(name)
        if not metric.values:
            continue
        finding = _passed(tested, metric, metric.last)
        if metric.last > limit and fmean(metric.later_half) > limit / 2:
            cause = f"{description}: {metric.first:.3g} → {metric.last:.3g}{age}"
            start = onset(metric, lambda mean, limit=limit: mean > limit)
            shown = [name, "staleness"] if age else [name]
            return finding.failed("engine-mismatch", cause, "stale", onset=start, quantities=shown)
    weight = course.series("importance_weight")
    if weight.values and finding.ok is None:
        finding = _passed(tested, weight, weight.last)
    if len(weight.values) >= FEW_STEPS and not 1 / FAR_WEIGHT <= weight.last <= FAR_WEIGHT:
        cause = f"the mean importance weight between engine and trainer is {weight.last:.3g}{age}"
        start = onset(weight, lambda mean: not 1 / FAR_WEIGHT <= mean <= FAR_WEIGHT)
        shown = ["importance_weight", "staleness"] if age else ["importance_weight"]
        return finding.failed("engine-mismatch", cause, "stale", onset=start, quantities=shown)
    if old > STALE:
        cause = f"data is {old:.2g} updates old on average"
        return finding.failed("stale", cause, severity="look", quantities=["staleness"])
    return finding


# --- Gradient and clip ---

SPIKE = 15.0
"""Times the gradient norm around it from which one is a spike."""

FEWEST_SPIKES = 3

MUCH_CLIPPED = 0.3
"""Share of tokens clipped at the end from which most updates are thrown away."""

SOME_CLIPPED = 0.2

MUCH_CLIPPED_SEQUENCES = 0.6
"""The same for ratios of sequences, of which methods such as GSPO clip many by design."""


def _check_gradient_spikes(course: Course, *, fell: bool) -> Finding:
    tested = "gradients are of one size"
    norm = course.series("grad_norm")
    if len(norm.values) < 4 * FEW_STEPS:
        return Finding("ok", None, tested)
    spikes = find_spikes(norm.values, SPIKE)
    finding = _passed(tested, norm, len(spikes))
    # Many rows are no spikes, but a wide spread.
    if not FEWEST_SPIKES <= len(spikes) <= len(norm.values) / 10:
        return finding
    largest = max(norm.values[row] for row in spikes)
    usual = sorted(norm.values)[len(norm.values) // 2]
    steps = ", ".join(f"{norm.steps[row]:.0f}" for row in spikes[:5])
    cause = (
        f"the gradient norm is {SPIKE:.0f} times that of its neighbours and more in {len(spikes)} log steps "
        f"(step {steps}{', …' if len(spikes) > 5 else ''}), up to {largest:.3g} where {usual:.3g} is usual"
    )
    severity = "fix" if fell else "look"
    first = norm.steps[spikes[0]]
    return finding.failed("gradient-spikes", cause, severity=severity, onset=first, quantities=["grad_norm"])


def _clip_shares(course: Course) -> Series:
    """Return the share of tokens that was clipped on either side."""
    if "clip" in course.names:
        return course.series("clip")
    names = [name for name in ("clip_high", "clip_low") if name in course.names]
    if not names:
        return Series([], [])
    both = [
        (row["step"], sum(row.get(name, 0.0) for name in names))
        for row in course.rows
        if any(n in row for n in names)
    ]
    return Series([step for step, _ in both], [share for _, share in both])


def _check_clip_share(course: Course, setup: Setup) -> Finding:
    tested = "the clip leaves most of the gradient"
    shares = _clip_shares(course)
    if len(shares.values) < FEW_STEPS:
        return Finding("ok", None, tested)
    finding = _passed(tested, shares, shares.last)
    of_sequences = setup.level == "sequence" or (setup.method or "").startswith("GSPO")
    if of_sequences:
        much = some = MUCH_CLIPPED_SEQUENCES
    else:
        much, some = MUCH_CLIPPED, SOME_CLIPPED
    share = max(shares.last, fmean(shares.later_half))
    if share <= some:
        return finding
    change = f"{shares.first:.1%} → {shares.last:.1%}"
    cause = f"{share:.0%} of tokens are clipped ({change}): their gradient is lost, and steps are far from the policy"
    severity = "fix" if share > much else "look"
    start = onset(shares, lambda mean: mean > some)
    shown = [name for name in ("clip", "clip_high", "clip_low") if name in course.names]
    return finding.failed("clip-heavy", cause, severity=severity, onset=start, quantities=shown)


# --- Rewards ---

SOLVED = 0.95
"""Mean of rewards between 0 and 1 from which their prompts are as good as solved."""

CONSTANT_ROWS = 20
"""Rows with one and the same reward that are no accident."""

CONSTANT_SHARE = 0.25

LEVEL_PART = 0.03
"""Relative spread of a component's tenths up to which it is level."""

FULL = 0.9
"""Mean of a component between 0 and 1 from which nearly every answer has it."""

MOST_OF_REWARD = 0.6
"""Share of a reward from which one component is most of it."""

EXPLAINED = 0.8
"""Share of a reward's variance that its components must explain before their weights are believed."""

MOST_COMPONENTS = 8

JUMP_ERRORS = 6.0
"""Standard errors from which a change of level is no accident."""

NEAR_ROWS = 3
"""Rows within which jumps of several metrics are one event."""


def _is_solved(course: Course) -> bool:
    """Check whether groups have no spread since nearly every answer has the best reward."""
    reward = course.series("reward")
    if len(reward.values) < FEW_STEPS:
        return False
    late = fmean(reward.later_half)
    if min(reward.values) >= 0 and max(reward.values) <= 1.0 and late >= SOLVED:
        return True
    dead = course.series("dead")
    if len(dead.values) < 2 * FEW_STEPS or len(reward.values) < 2 * FEW_STEPS:
        return False
    noise = noise_of_differences(reward.values)
    rose = reward.last - reward.first > max(2 * noise, 0.2 * abs(reward.last))
    at_its_best = reward.last > max(reward.values) - 0.1 * (max(reward.values) - min(reward.values)) - noise
    return rose and at_its_best and dead.last > 0.5 and dead.last > dead.first


def _check_constant_reward(course: Course) -> Finding:
    tested = "rewards differ"
    reward = course.series("reward")
    if len(reward.values) < FEW_STEPS:
        return Finding("ok", None, tested)
    value = reward.values[-1]
    equal = 0
    for other in reversed(reward.values):
        if other != value:
            break
        equal += 1
    finding = _passed(tested, reward, equal)
    spread = course.series("reward_std").values[-equal:]
    is_best = value >= SOLVED and max(reward.values) <= 1
    if equal < CONSTANT_ROWS or equal < CONSTANT_SHARE * len(reward.values) or is_best or any(spread):
        return finding
    since = reward.steps[-equal]
    cause = f"the reward is {value:.3g} in every one of the last {equal} log steps, from step {since:.0f} on"
    return finding.failed("reward-flat", cause, onset=since, quantities=["reward"])


def _components(course: Course) -> dict[str, Series]:
    """Return the components of the reward by their names, of rows that have a reward."""
    logged = [row for row in course.rows if "reward" in row]
    keys = {}
    for key in dict.fromkeys(key for row in logged[:100] for key in row):
        name = component_name(key)
        if name is not None:
            keys.setdefault(name, key)
    rewarded = Course(logged)
    components = {name: rewarded.series(key) for name, key in keys.items()}
    return {name: metric for name, metric in components.items() if len(metric.values) >= CONSTANT_ROWS}


def _check_components(course: Course) -> list[Finding]:
    tested = "every component of the reward says something"
    components = _components(course)
    if len(components) < 2:
        return [Finding("ok", None, tested)]
    any_component = next(iter(components.values()))
    findings = []
    constant = {name: metric for name, metric in components.items() if len(set(metric.values)) == 1}
    if constant and len(constant) < len(components):
        names = ", ".join(f"{name} is {metric.values[0]:.3g}" for name, metric in constant.items())
        others = ", ".join(
            f"{name} {fmean(metric.values):.3g}"
            for name, metric in components.items()
            if name not in constant
        )
        cause = f"{names} in every one of {len(any_component.values)} log steps, beside {others}"
        finding = _passed(tested, any_component)
        shown = [f"rewards/{name}" for name in constant]
        start = any_component.steps[0]
        findings.append(finding.failed("component-constant", cause, onset=start, quantities=shown))
    findings.append(_check_largest_component(course, components))
    return findings


def _check_largest_component(course: Course, components: dict[str, Series]) -> Finding:
    """Check that the reward is not mostly of a component that is level."""
    tested = "the reward is of what still changes"
    reward = course.series("reward")
    parts = {name: metric for name, metric in components.items() if len(metric.values) == len(reward.values)}
    parts = {name: metric for name, metric in parts.items() if len(set(metric.values)) > 1}
    if not 2 <= len(parts) <= MOST_COMPONENTS:
        return Finding("ok", None, tested)
    finding = _passed(tested, reward)
    fit = fit_weights(reward.values, [metric.values for metric in parts.values()])
    if fit is None or fit[1] < EXPLAINED:
        return finding
    paid = {}
    for weight, (name, metric) in zip(fit[0], parts.items(), strict=True):
        paid[name] = weight * fmean(metric.later_half)
    total = sum(abs(value) for value in paid.values())
    largest = max(paid, key=lambda name: paid[name])
    means = tenths(parts[largest].values)[5:]
    level = max(means) - min(means) <= LEVEL_PART * abs(fmean(means))
    # A component that is level below its maximum may be what the run is for: that is a plateau.
    is_full = max(means) <= 1.0 and fmean(means) >= FULL
    if not total or paid[largest] / total < MOST_OF_REWARD or not level or not is_full:
        return finding
    others = ", ".join(f"{name} {paid[name] / total:.0%}" for name in paid if name != largest)
    cause = (
        f"{paid[largest] / total:.0%} of the reward is {largest}, which is level at {fmean(means):.3g} in the later "
        f"half, so that its curve says little of the rest ({others})"
    )
    return finding.failed("component-dominates", cause, quantities=[f"rewards/{largest}", "reward"])


def _check_data(course: Course) -> Finding:
    """Check whether reward, its spread and length change at one step, as when prompts change."""
    tested = "reward and length change gradually"
    jumps = {}
    for name in ("reward", "length", "reward_std"):
        metric = course.series(name)
        jump = find_jump(metric.values) if len(metric.values) >= 40 else None
        if jump is not None and jump.errors > JUMP_ERRORS:
            jumps[name] = (jump, metric)
    finding = Finding("ok", True, tested, len(jumps), None, len(course.rows))
    if "reward" not in jumps or "length" not in jumps:
        return finding
    row = jumps["length"][0].row
    together = {name: jump for name, (jump, _) in jumps.items() if abs(jump.row - row) <= NEAR_ROWS}
    if "reward" not in together:
        return finding
    step = jumps["length"][1].steps[row]
    change = ", ".join(f"{name} {jump.before:.3g} → {jump.after:.3g}" for name, jump in together.items())
    cause = f"at step {step:.0f} {change}, all at once: other prompts, another reward or another setting from there on"
    return finding.failed("data-change", cause, onset=step, quantities=[*together])


# --- Answers ---

MOST = 0.5
"""Share of answers cut off, or of groups without signal, that is a cause."""

MANY_CUT = 0.3
"""Share of answers cut off in the last tenth that is a cause where it was a third of that before."""

SOME_CUT = 0.25
"""Share of answers cut off all along that is worth a look."""

AT_THE_CAP = 0.9
"""Share of the longest mean length from which most answers are as long as they may be."""

LONGER = 1.8
"""Times the length at the start from which it is named if a score on other prompts does not follow."""

MUCH_BETTER = 0.15
"""Relative rise of the score on other prompts from which longer answers are better answers."""

MUCH_LONGER = 3.0
"""The same where there is no such score, and the reward does not rise."""


def _check_truncation(course: Course, setup: Setup) -> Finding:
    tested = "answers are finished"
    cap = setup.number("length cap")
    at_cap = f" at the cap of {cap:g} tokens" if cap else ""
    shares = course.series("cut")
    if not shares.values:
        return _check_length_at_cap(course, tested, cap)
    late = shares.later_half
    mean = fmean(late)
    finding = _passed(tested, shares, mean)._replace(error=standard_error(late))
    if mean - 2 * standard_error(late) > MOST:
        cause = f"{mean:.0%} of answers are cut off{at_cap}"
        start = onset(shares, lambda share: share > MOST)
        return finding.failed("truncated", cause, onset=start, quantities=["cut", "length"])
    if len(shares.values) < 2 * FEW_STEPS:
        return finding
    count = max(3, len(shares.values) // 10)
    end = shares.values[-count:]
    last = fmean(end)
    before = fmean(shares.values[: len(shares.values) // 2])
    if last - 2 * standard_error(end) > MANY_CUT and last > 3 * before:
        cause = f"{last:.0%} of answers are cut off{at_cap} in the last tenth, {before:.0%} in the first half"
        start = onset(shares, lambda share: share > MANY_CUT / 2)
        return finding.failed("truncated", cause, onset=start, quantities=["cut", "length"])
    if mean > SOME_CUT:
        cause = f"{mean:.0%} of answers are cut off{at_cap} in the later half"
        severity = "fix" if mean > 3 * before else "look"
        start = shares.steps[len(shares.steps) // 2]
        return finding.failed(
            "truncated", cause, severity=severity, onset=start, quantities=["cut", "length"]
        )
    blocks = tenths(shares.values)
    if max(blocks) > MOST:
        worst = blocks.index(max(blocks))
        steps = tenth_blocks(shares.steps)[worst]
        cause = (
            f"{max(blocks):.0%} of answers were cut off{at_cap} from step {steps[0]:.0f} to {steps[-1]:.0f}"
        )
        return finding.failed(
            "truncated", cause, severity="look", onset=steps[0], quantities=["cut", "length"]
        )
    return finding


def _check_length_at_cap(course: Course, tested: str, known_cap: float | None) -> Finding:
    """Check from their length whether answers are cut off, where their share is not logged.

    Args:
        course: The metrics.
        tested: The property that a correct run has.
        known_cap: The cap in the run's configuration; None if it is not known.
    """
    length = course.series("length")
    if len(length.values) < 2 * FEW_STEPS:
        return Finding("ok", None, tested)
    if known_cap:
        late = fmean(length.later_half)
        finding = _passed(tested, length, late / known_cap)
        if late < AT_THE_CAP * known_cap:
            return finding
        cause = (
            f"the mean length is {late:.0f} tokens in the later half, at the cap of {known_cap:g} tokens, at which "
            "most answers are cut off"
        )
        start = onset(length, lambda mean: mean >= AT_THE_CAP * known_cap)
        return finding.failed("truncated", cause, onset=start, quantities=["length"])
    cap = max(length.values)
    # A mean over a batch that is a whole number again and again is the length of every answer in it.
    at_cap = sum(value == cap for value in length.values)
    mean = fmean(length.values)
    finding = _passed(tested, length, mean / cap if cap else 0.0)
    if at_cap < 3 or cap != int(cap) or mean < AT_THE_CAP * cap:
        share = at_cap / len(length.values)
        if share < 0.1 or cap != int(cap) or mean < 0.75 * cap:
            return finding
    cause = (
        f"the mean length is {mean:.0f} tokens, and exactly {cap:.0f} in {at_cap} of {len(length.values)} log steps: "
        "that is the cap, at which most answers are cut off"
    )
    return finding.failed("truncated", cause, onset=length.steps[0], quantities=["length"])


def _check_signal(course: Course, setup: Setup, *, solved: bool) -> Finding:
    tested = "groups carry signal"
    shares = course.series("dead")
    if len(shares.values) < FEW_STEPS:
        advice = f"{FEW_STEPS} log steps and more" if shares.values else ""
        return Finding("ok", None, tested, advice=advice)
    late = shares.later_half
    mean = fmean(late)
    error = standard_error(late)
    finding = _passed(tested, shares, mean)._replace(error=error)
    start = onset(shares, lambda share: share > MOST)
    end = fmean(late[-max(FEW_STEPS, len(late) // 5) :])
    if mean - 2 * error <= MOST and not (solved and end > MOST):
        return finding
    cause = f"{max(mean, end):.0%} of groups carry no signal"
    group = setup.number("group size")
    if group:
        cause = f"{max(mean, end):.0%} of groups of {group:g} {'answers' if group > 1 else 'answer'} carry no signal"
    reward = course.series("reward")
    if solved:
        cause = f"{cause}, as these prompts are solved (reward {reward.last:.3g})"
        return finding.failed("no-signal", cause, severity="look", onset=start, quantities=["dead"])
    later = reward.values[len(reward.values) // 3 :]
    still_learns = len(later) >= 20 and rises(later)
    severity = "look" if still_learns else "fix"
    return finding.failed("no-signal", cause, severity=severity, onset=start, quantities=["dead"])


def _rise(metric: Series) -> float:
    """Compute by how many standard errors the later third of a metric is above the first."""
    third = max(1, len(metric.values) // 3)
    noise = noise_of_differences(metric.values) / math.sqrt(third)
    before, after = end_means(metric.values, 3)
    return (after - before) / (noise + 1e-12)


def _check_length(course: Course) -> Finding:
    tested = "longer answers are better answers"
    length = course.series("length")
    if len(length.values) < 4 * FEW_STEPS or length.first <= 0:
        return Finding("ok", None, tested)
    times = length.last / length.first
    finding = _passed(tested, length, times)
    reward = course.series("reward")
    score = course.series(EVALUATION)
    change = f"mean length {length.first:.0f} → {length.last:.0f} tokens"
    middle = (length.first + length.last) / 2
    start = onset(length, lambda mean: mean > middle)
    if len(score.values) >= 6 and len(reward.values) >= 6:
        if times < LONGER or _rise(reward) < 3 or _follows(reward, score):
            return finding
        before, after = end_means(score.values, 3)
        cause = f"{change}, while the score on other prompts went {before:.3g} → {after:.3g}"
        # A reward that may be negative has no unit in which its rise could be compared.
        severity = "look" if min(reward.values) < 0 else "fix"
        shown = ["length", EVALUATION]
        return finding.failed("length-growth", cause, severity=severity, onset=start, quantities=shown)
    if times < MUCH_LONGER or len(reward.values) < 30 or _rise(reward) > 2:
        return finding
    cause = f"{change}, and the reward does not rise"
    return finding.failed(
        "length-growth", cause, severity="look", onset=start, quantities=["length", "reward"]
    )


def _follows(reward: Series, score: Series) -> bool:
    """Check whether the score on other prompts rises by a good part of itself, or a good part of the reward's rise."""
    reward_before, reward_after = end_means(reward.values, 3)
    score_before, score_after = end_means(score.values, 3)
    score_rise = (score_after - score_before) / max(abs(score_after), abs(score_before), 1e-12)
    reward_rise = (reward_after - reward_before) / max(abs(reward_after), abs(reward_before), 1e-12)
    return score_rise > MUCH_BETTER or score_rise > reward_rise / 3


# --- Entropy ---

ENTROPY_LEFT = 0.25
"""Share of its start below which entropy has collapsed, unless the reward rose."""

NEARLY_NO_ENTROPY = 0.1
"""Share of its start up to which a loss of entropy is a fault even after the reward has risen."""

LEAST_ENTROPY = 0.04
"""Share of its start below which next to nothing of the entropy is left."""

NO_ENTROPY = 0.15
"""Nats per token above which entropy has not collapsed, whatever it was."""

LOW_ENTROPY = 0.1
"""Nats per token below which a policy hardly explores from the start."""

ENTROPY_RISE = 2.0
"""Times its start, and at least a nat more, from which entropy drifts away."""

ENTROPY_KEPT = "entropy is kept, or falls as the reward rises"


def _check_entropy(course: Course, flat_since: float, *, solved: bool) -> Finding:
    """Check whether entropy is lost, or drifts away.

    A policy that becomes sure of what is rewarded rightly loses entropy. So the reward must not have risen, and only
    the reward after it has turned flat counts.

    Args:
        course: The metrics.
        flat_since: The step from which the reward is flat; minus infinity if it is not.
        solved: Whether the prompts are solved, so that a sure policy is right.
    """
    entropy = course.series("entropy")
    if len(entropy.values) < 2:
        return Finding("ok", None, ENTROPY_KEPT, advice="log the entropy")
    first, last = entropy.first, entropy.last
    change = f"entropy {first:.3g} → {last:.3g} nats per token"

    reward = course.series("reward")
    late_reward = [value for step, value in zip(*reward, strict=True) if step >= flat_since]
    reason = "no reward is known"
    rose = False
    if len(late_reward) > 1:
        # Neighbouring steps differ by the noise of two; a third of the steps is averaged at either end.
        error = noise_of_differences(late_reward) / math.sqrt(max(1, len(late_reward) // 3))
        before, after = end_means(late_reward, 3)
        change += f", while the reward went {before:.3g} → {after:.3g}"
        reason = "the reward did not rise"
        rose = after - before > max(0.1 * abs(before), 2 * error)

    finding = _passed(ENTROPY_KEPT, entropy, last / first if first else 1.0)
    if last > max(ENTROPY_RISE * first, first + 1):
        start = onset(entropy, lambda mean: mean > max(ENTROPY_RISE * first, first + 1))
        cause = f"{change}: it drifts towards noise"
        return finding.failed("entropy-rise", cause, onset=start, quantities=["entropy"])
    lost = last < min(ENTROPY_LEFT * first, NO_ENTROPY)
    if lost and rose and last < LEAST_ENTROPY * first:
        # Next to nothing is left: what counts is whether the reward rises without it.
        gone = onset(entropy, lambda mean: mean < LEAST_ENTROPY * 3 * first)
        after = [value for step, value in zip(*reward, strict=True) if step >= gone]
        if len(after) >= 3 * FEW_STEPS:
            before, end = end_means(after, 3)
            error = noise_of_differences(after) / math.sqrt(len(after) // 3)
            rose = end - before > max(0.1 * abs(before), 2 * error)
    if lost and not rose and not solved:
        start = onset(entropy, lambda mean: mean < ENTROPY_LEFT * first)
        cause = f"{change}: the policy has stopped exploring, and {reason}"
        # What a run has learned before may have been worth that entropy, as long as some is left.
        learned = len(reward.values) >= 30 and _rise(reward) > 3 and last > NEARLY_NO_ENTROPY * first
        severity = "look" if learned else "fix"
        return finding.failed(
            "entropy-collapse", cause, severity=severity, onset=start, quantities=["entropy"]
        )
    is_low = (
        len(entropy.values) >= 4 * FEW_STEPS and first < LOW_ENTROPY and fmean(entropy.values) < LOW_ENTROPY
    )
    if is_low and not solved:
        cause = f"entropy is {first:.2g} nats per token at the start, so that the answers of a group are nearly alike"
        return finding.failed("low-entropy", cause, onset=entropy.steps[0], quantities=["entropy"])
    return finding


# --- Evaluation ---


def _check_evaluation(course: Course) -> Finding:
    """Check whether the score on other prompts falls, or stays, while the reward rises."""
    tested = "other prompts are solved better as well"
    score = course.series(EVALUATION)
    reward = course.series("reward")
    if len(score.values) < 5 or len(reward.values) < 5:
        return Finding("ok", None, tested)
    window = max(2, len(score.values) // 6)
    sums = [0.0, *accumulate(score.values)]
    means = [(after - before) / window for before, after in zip(sums, sums[window:], strict=False)]
    best = means.index(max(means))
    last = means[-1]
    noise = noise_of_differences(score.values) / math.sqrt(window)
    lost = means[best] - last
    finding = _passed(tested, score, lost)
    since = score.steps[min(best + window - 1, len(score.steps) - 1)]
    after = Series(*zip(*[pair for pair in zip(*reward, strict=True) if pair[0] >= since], strict=True))
    fell = lost > max(3 * noise, 0.1 * abs(means[best]))
    if not fell or len(after.values) < 6 or _rise(after) < 3:
        return finding
    before_reward, after_reward = end_means(after.values, 3)
    cause = (
        f"the score on other prompts fell {means[best]:.3g} → {last:.3g} since step {since:.0f}, while the reward rose "
        f"{before_reward:.3g} → {after_reward:.3g}: what is rewarded is not what is wanted"
    )
    return finding.failed("reward-hacked", cause, onset=since, quantities=[EVALUATION, "reward"])


# --- Too little ---

LITTLE_KL = 0.01
"""KL to the reference at the end of a run up to which the policy has hardly moved."""

LITTLE_RATE = 5e-7
"""Learning rate up to which steps are small."""

MANY_STEPS = 100
"""Steps after which a policy should have moved."""


def _check_small_steps(course: Course) -> Finding:
    """Check whether the policy has hardly moved after many steps without a higher reward."""
    tested = "the policy moves"
    kl = course.series("kl")
    reward = course.series("reward")
    rates = course.series("learning_rate").values
    steps = course.rows[-1]["step"] - course.rows[0]["step"] + 1
    if len(reward.values) < 30 or steps < MANY_STEPS:
        return Finding("ok", None, tested)
    if kl.values and max(kl.values) > 0:
        finding = _passed(tested, kl, kl.last)
        shown = "kl"
        # Some loops log it with the other sign.
        means = [kl.last, *tenths(kl.values)] if len(kl.values) >= 30 else [math.inf]
        little = max(abs(mean) for mean in means) < LITTLE_KL
        evidence = f"KL to the reference is {kl.last:.2g} after {steps:.0f} steps"
    elif rates:
        finding = Finding("ok", True, tested, max(rates), None, len(rates))
        shown = "learning_rate"
        little = 0 < max(rates) <= LITTLE_RATE
        evidence = f"the learning rate is at most {max(rates):.2g}, over {steps:.0f} steps"
    else:
        return Finding("ok", None, tested)
    entropy = course.series("entropy")
    same_entropy = not entropy.values or 0.75 < entropy.last / (entropy.first or 1.0) < 1.33
    if not little or rises(reward.values) or _rise(reward) > 3 or not same_entropy:
        return finding
    before, after = end_means(reward.values, 3)
    cause = f"{evidence}, and the reward went {before:.3g} → {after:.3g}: the policy has hardly moved"
    return finding.failed("hardly-moves", cause, quantities=[shown, "reward"])


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
"""For each quantity that is compared at the end, the codes that say it already."""

UNLIKE = 4.0
"""Standard deviations of the other tenths by which the last is unlike them."""

TIMES_UNLIKE = 1.5
"""Times by which it must differ from all of them as well."""

STANDARD_ERRORS = 4.0
"""Standard errors beyond which a mean is no accident."""

WANDERING = 3.0
"""Times the usual change from tenth to tenth that a fall must be."""

COMPARED_AT_A_FALL = r"(^|/)(kl|ppo_kl|kl_loss|grad_norm|mean_length|\w*length/mean|clip(ped)?_ratio)$"
"""Ends of names of the metrics that are compared before and after a fall of the reward."""


def _check_last_tenth(course: Course, codes: set[str]) -> Finding:
    """Check whether the last tenth of a run is unlike the nine before it."""
    tested = "the last tenth of the run is like the rest"
    changes = {}
    finding = Finding("ok", None, tested)
    for name, known in LATE_QUANTITIES.items():
        metric = course.series(name)
        if len(metric.values) < 40 or codes & set(known.split()):
            continue
        blocks = tenths(metric.values)
        others, last = blocks[:-1], blocks[-1]
        finding = _passed(tested, metric)
        # A curve that drifts ends beyond all of its past; only more than its usual change from tenth to tenth counts.
        usual = max(abs(after - before) for before, after in pairwise(others[1:]))
        noise = noise_of_differences(metric.values) / math.sqrt(len(metric.values) / 10)
        low, high = min(others), max(others)
        beyond = max(low - last, last - high)
        is_other = last * TIMES_UNLIKE < low or last > TIMES_UNLIKE * high
        if beyond > max(2 * usual, UNLIKE * noise) and is_other and (name != "cut" or last > 0.1):
            changes[name] = f"{name} {others[-1]:.3g} → {last:.3g}"
    if not changes:
        return finding
    step = tenth_blocks([row["step"] for row in course.rows])[-1][0]
    cause = f"from step {step:.0f} on the run is unlike its other nine tenths: {', '.join(changes.values())}"
    return finding.failed("late-change", cause, onset=step, quantities=[*changes])


def _check_fall(course: Course) -> Finding:
    """Check whether the last tenth of a run has lost half of its best tenth's reward.

    Metrics that have doubled or halved by then are named. A log does not tell whether they are the cause.
    """
    tested = "the reward is kept"
    reward = course.series("reward")
    if len(reward.values) < PLATEAU_STEPS:
        return Finding("ok", None, tested, advice=f"{PLATEAU_STEPS} log steps and more")
    means = tenths(reward.values)
    best = max(range(10), key=lambda tenth: means[tenth])
    noise = noise_of_differences(reward.values) / math.sqrt(len(reward.values) / 10)
    finding = _passed(tested, reward, means[-1])
    # Rewards may be below 0, or far from it: the height is over the least tenth or 0.
    lowest = min(0.0, *means) if min(means) < 0 else 0.0
    height = means[best] - lowest
    # Where the reward wanders, neighbouring tenths differ by more than the noise of single steps explains.
    wandering = sorted(abs(after - before) for before, after in pairwise(means))[len(means) // 2]
    if means[best] - means[-1] <= max(height / 2, STANDARD_ERRORS * noise, WANDERING * wandering):
        return finding

    changes = {}
    ends = {}
    for name in course.names:
        if not re.search(COMPARED_AT_A_FALL, name):
            continue
        values = course.series(name).values
        if len(values) == len(reward.values):
            blocks = tenths(values)
            before, after = blocks[best], blocks[-1]
            ends[name] = before, after
            larger, smaller = max(abs(before), abs(after)), min(abs(before), abs(after))
            changes[name] = (larger + 0.01) / (smaller + 0.01)
    largest_changes = sorted(changes, key=lambda name: changes[name], reverse=True)
    largest_changes = [name for name in largest_changes if changes[name] > 2][:3]

    courses = [f"reward {means[best]:.3g} → {means[-1]:.3g}"]
    for name in largest_changes:
        before, after = ends[name]
        courses.append(f"{name} {before:.3g} → {after:.3g}")
    step = tenth_blocks(reward.steps)[best][-1]
    cause = f"from step {step:.0f} on {', '.join(courses)}"
    shown = ["reward", *(name for name in largest_changes if name in QUANTITIES)]
    return finding.failed("collapse", cause, onset=step, quantities=shown)


# --- A plateau ---

PLATEAU_STEPS = 30
"""Log steps below which no plateau is looked for."""

FLAT_SHARE = 0.5
"""Share of a run that is flat from which it is a plateau."""

UNLOGGED = {
    EVALUATION: "a score on other prompts",
    "dead": "the share of groups without spread",
    "cut": "the share of answers cut off",
    "entropy": "entropy",
    "kl": "KL to the reference",
}
"""Quantities without which a plateau's causes cannot be excluded, in words."""


def _flat_part(course: Course) -> tuple[Series, int] | None:
    """Return the reward and the row from which it is flat; None if it is not, or there are too few log steps."""
    reward = course.series("reward")
    n = len(reward.values)
    if n < PLATEAU_STEPS:
        return None
    turn, rise, noise = find_change_point(reward.values)
    if rise < STANDARD_ERRORS * noise / math.sqrt(max(turn, 1)):
        turn = 0  # no rise that is more than noise
    late = reward.values[turn:]
    if len(late) < FLAT_SHARE * n or rises(late):
        return None
    return reward, turn


def _check_plateau(course: Course, flat: tuple[Series, int] | None, *, fell: bool, solved: bool) -> Finding:
    """Describe where the reward is flat, which is no fault by itself.

    Args:
        course: The metrics.
        flat: What `_flat_part` returns of them.
        fell: Whether the reward fell at the end.
        solved: Whether the prompts are solved.
    """
    tested = "the reward still rises"
    reward = course.series("reward")
    if len(reward.values) < PLATEAU_STEPS:
        return Finding("ok", None, tested, advice=f"{PLATEAU_STEPS} log steps and more")
    if fell:
        # The check of the fall has said so.
        return Finding("ok", None, tested)
    finding = _passed(tested, reward, fmean(reward.later_half))
    if flat is None:
        return finding
    _, turn = flat
    late = reward.values[turn:]
    slope = fit_slope(late)
    missed = max(0.0, slope.rise) + 2 * slope.error
    start, end = reward.steps[turn], reward.steps[-1]
    cause = (
        f"reward {fmean(late):.3g} from step {start:.0f} to {end:.0f}, {len(late) / len(reward.values):.0%} of the "
        f"run; a rise below {missed:.2g} could not be seen"
    )
    if solved:
        cause = f"{cause}; these prompts are solved"
    else:
        unlogged = [words for name, words in UNLOGGED.items() if name not in course.names]
        if unlogged:
            cause = f"{cause}; not logged, so not excluded: {', '.join(unlogged)}"
    return finding.failed("plateau", cause, onset=start, quantities=["reward"])


# --- Remarks on the clip ---

HARMLESS_BLOCKED_SHARE = 0.11
"""Share of the gradient on rare winners up to which blocking it changed nothing in networks at the same rate."""


def _check_clip(course: Course, updates: float | None) -> Finding:
    """Describe what the clip does where it is no fault."""
    summary = summarize(course.rows)
    on_policy = summary.metrics.get("on_policy")
    one_update = on_policy == 1 or (updates is not None and updates <= 1 and not summary.clipped)
    if summary.clipped is None and not one_update:
        return Finding("ok", None, "the clip")
    tokens = int(summary.metrics.get("tokens", 0))
    finding = Finding("ok", True, "the clip", summary.clipped, None, tokens)
    if one_update:
        return finding.failed("on-policy", "each batch gets one update, so every ratio is 1", ok=None)
    if summary.clipped == 0 and updates is None and on_policy is None:
        cause = "no token was clipped, as with one update on each batch"
        return finding.failed("on-policy", cause, "clip-idle", ok=None)
    if summary.clipped == 0 and summary.metrics.get("inert", 1) == 1:
        cause = "no token was clipped: steps are smaller than the rule allows"
        return finding.failed("clip-idle", cause, ok=None)

    interval = summary.blocked_interval()
    if interval is not None and interval[0] > HARMLESS_BLOCKED_SHARE:
        share = summary.metrics["blocked_mass_below_0.1"]
        cause = (
            f"it blocks {share:.0%} [{interval[0]:.0%}, {interval[1]:.0%}] of the gradient that would raise tokens "
            "below p = 0.1"
        )
        return finding.failed("rare-tokens-blocked", cause, ok=None)
    return finding
