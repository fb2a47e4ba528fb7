"""Checks of a log: what the course of a run's metrics says, with the standard library alone."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import chain, pairwise
from statistics import fmean, pstdev
from typing import NamedTuple

from bandpo.doctor.findings import Finding
from bandpo.runs.logs import Row
from bandpo.runs.summary import summarize

ENTROPY_LEFT = 0.25
"""Share of its start below which entropy has collapsed, unless the reward rose."""

ENTROPY_RISE = 2.0
"""Times its start, and at least a nat more, from which entropy drifts away."""

TOO_FAR = 2.5
"""Mean abs log-ratio (nats) at the last update on a batch: tokens twelve times as likely or unlikely as when they were
sampled, so that the effective sample is next to nothing."""

LITTLE_CLIPPED = 0.1
"""Share of tokens clipped up to which the clip is no cause of a plateau."""

HARMLESS_BLOCKED_SHARE = 0.11
"""Share of the gradient on rare winners up to which blocking it changed nothing in networks at the same rate."""

FEW_STEPS = 8
"""Log steps below which groups are not judged. Where half of them have no signal and a step has one, the four of the
later half have none by chance once in 16."""

PLATEAU_STEPS = 30
"""Log steps below which no plateau is looked for."""

FLAT_SHARE = 0.5
"""Share of a run that is flat from which it is a plateau."""

SOLVED = 0.95
"""Mean of rewards between 0 and 1 from which their prompts are as good as solved."""

MOST = 0.5
"""Share of answers cut off, or of groups without signal, that is a cause."""

STANDARD_ERRORS = 4.0
"""Standard errors beyond which a mean is no accident."""

ROUNDING = 1e-3
"""Relative slope that rounding may give a flat curve."""

LEAST_MOVEMENT = {r"(^|/)(learning_rate|lr|policy_lr)$": 1e-9, r"(^|/)grad_norm$": 0.0}
"""For each quantity, by the end of its name, the value up to which weights stand still: Adam moves them by the rate,
and float32 rounds 0.02 + 1e-9."""

COMPARED_AT_A_FALL = r"(^|/)(kl|ppo_kl|kl_loss|grad_norm|mean_length|\w*length/mean|clip(ped)?_ratio)$"
"""Ends of names of the metrics that are compared before and after a fall of the reward."""

ENTROPY_KEPT = "entropy is kept, or falls as the reward rises"


class Series(NamedTuple):
    """A metric over a run."""

    steps: Sequence[float]
    values: Sequence[float]


def log_findings(rows: Sequence[Row], updates: float | None = None) -> list[Finding]:
    """Return what the metrics of a run show, causes before their effects.

    Args:
        rows: The log, one row per log step, as `bandpo.runs.logs.read_log` returns it.
        updates: Optimiser steps on each batch, if they are known.
    """
    plateau, flat_since = _check_plateau(rows)
    checks = [
        _check_numbers(rows),
        _check_movement(rows),
        _check_step_size(rows),
        _check_share(rows, "cut", "truncated", "answers are finished", "of answers are cut off"),
        _check_share(
            rows, "dead", "no-signal", "groups carry signal", "of groups carry no signal", FEW_STEPS
        ),
        _check_entropy(rows, flat_since),
    ]
    solved = plateau.code == "plateau" and plateau.ok is None
    if solved:
        # Groups without signal and a sure policy are right then.
        checks = [check for check in checks if check.code not in ("no-signal", "entropy-collapse")]
    causes = [check.cause for check in checks if check.ok is False]
    if plateau.ok is False:
        return [_explain_plateau(plateau, causes, _check_clip(rows, updates)), *checks]
    if causes:
        return [*checks, plateau]
    return [*checks, plateau, _check_clip(rows, updates)]


def _explain_plateau(plateau: Finding, causes: Sequence[str], clip: Finding) -> Finding:
    """Return a plateau or a collapse with what the other checks say of its cause."""
    reasons = list(causes)
    if not reasons and plateau.code == "plateau":
        reasons.append("nothing that is logged explains it")
    if clip.figure:
        verdict = "is not" if clip.figure < LITTLE_CLIPPED else "may be"
        reasons.append(f"the clip drops {clip.figure:.1%} and {verdict} the cause")
    elif clip.code == "on-policy" and not clip.or_else:
        reasons.append(clip.cause)
    cause = ": ".join(part for part in (plateau.cause, "; ".join(reasons)) if part)
    return plateau._replace(cause=cause)


def _series(rows: Sequence[Row], name: str) -> Series:
    """Return the steps and values of a metric, of the rows that have it."""
    logged = [row for row in rows if name in row]
    return Series([row["step"] for row in logged], [row[name] for row in logged])


def _names(rows: Sequence[Row], pattern: str) -> list[str]:
    """Return the names of logged metrics that match a pattern."""
    return [name for name in dict.fromkeys(chain.from_iterable(rows)) if re.search(pattern, name)]


def _end_means(values: Sequence[float], parts: int) -> tuple[float, float]:
    """Compute the means of the first and of the last part of a curve, such as a tenth."""
    count = max(1, len(values) // parts)
    return fmean(values[:count]), fmean(values[-count:])


def _check_numbers(rows: Sequence[Row]) -> Finding:
    steps = [int(row["step"]) for row in rows if row.get("not_finite")]
    finding = Finding("ok", True, "the log holds numbers", len(steps) / len(rows), None, len(rows))
    if not steps:
        return finding
    cause = f"{len(steps)} of {len(rows)} log steps hold NaN or infinite values, first step {min(steps)}"
    return finding.failed("nan", cause)


def _check_movement(rows: Sequence[Row]) -> Finding:
    finding = Finding("ok", None, "weights move")
    for pattern, least in LEAST_MOVEMENT.items():
        logged = []
        for name in _names(rows, pattern):
            logged += [(value, name) for value in _series(rows, name).values]
        # A warm-up begins at 0, so a few steps say nothing.
        if len(logged) < FEW_STEPS:
            continue
        largest, name = max(logged)
        finding = Finding("ok", True, finding.tested, largest, None, len(logged))
        if largest <= least:
            return finding.failed("no-step", f"{name} never exceeds {largest:g}")
    return finding


def _check_step_size(rows: Sequence[Row]) -> Finding:
    tested = "steps stay near the policy that sampled"
    moved = _series(rows, "moved").values
    if not moved:
        return Finding("ok", None, tested, advice="record the tokens")
    largest = max(moved)
    finding = Finding("ok", True, tested, largest, None, len(moved))
    if largest <= TOO_FAR:
        return finding
    cause = f"by the last update on a batch its tokens had moved by {largest:.2g} nats on average"
    return finding.failed("step-too-large", cause)


def _check_share(
    rows: Sequence[Row], name: str, code: str, tested: str, description: str, least_steps: int = 1
) -> Finding:
    """Check that a share is not most of the later half of a run of at least ``least_steps`` log steps."""
    shares = _series(rows, name).values
    if len(shares) < least_steps:
        return Finding("ok", None, tested, advice=f"{least_steps} log steps and more" if shares else "")
    late = shares[len(shares) // 2 :]
    mean = fmean(late)
    error = pstdev(late) / math.sqrt(len(late))
    finding = Finding("ok", True, tested, mean, error, len(late))
    return finding.failed(code, f"{mean:.0%} {description}") if mean - 2 * error > MOST else finding


def _check_entropy(rows: Sequence[Row], flat_since: float) -> Finding:
    """Check whether entropy is lost, or drifts away.

    A policy that becomes sure of what is rewarded rightly loses entropy. So the reward must not have risen, and only
    the reward after it has turned flat counts.

    Args:
        rows: The log.
        flat_since: The step from which the reward is flat; minus infinity if it is not.
    """
    entropy = _series(rows, "entropy").values
    if len(entropy) < 2:
        return Finding("ok", None, ENTROPY_KEPT, advice="log the entropy")
    first, last = _end_means(entropy, 10)
    course = f"entropy {first:.3g} → {last:.3g} nats per token"

    steps, reward = _series(rows, "reward")
    late_reward = [value for step, value in zip(steps, reward, strict=True) if step >= flat_since]
    reason = "no reward is known"
    rose = False
    if len(late_reward) > 1:
        # Neighbouring steps differ by the noise of two; a third of the steps is averaged at either end.
        error = _noise_of_differences(late_reward) / math.sqrt(max(1, len(late_reward) // 3))
        before, after = _end_means(late_reward, 3)
        course += f", while the reward went {before:.3g} → {after:.3g}"
        reason = "the reward did not rise"
        rose = after - before > max(0.1 * abs(before), 2 * error)

    finding = Finding("ok", True, ENTROPY_KEPT, last / first if first else 1.0, None, len(entropy))
    if last > max(ENTROPY_RISE * first, first + 1):
        return finding.failed("step-too-large", f"{course}: it drifts towards noise")
    if last >= ENTROPY_LEFT * first or rose:
        return finding
    return finding.failed("entropy-collapse", f"{course}: the policy has stopped exploring, and {reason}")


def _noise_of_differences(values: Sequence[float]) -> float:
    """Compute the standard deviation of the differences between neighbouring values."""
    return pstdev([after - before for before, after in pairwise(values)])


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
    best = ChangePoint(0, 0.0, math.sqrt(variance))

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
        rise = covariance / hinge_variance
        noise = math.sqrt(max(0.0, variance - covariance * rise))
        if noise < best.noise:
            best = ChangePoint(turn, rise, noise)
    return best


def _check_plateau(rows: Sequence[Row]) -> tuple[Finding, float]:
    """Check whether the reward is flat, or has fallen.

    Returns:
        The finding, and the step since which the reward is flat; minus infinity if it is not.
    """
    tested = "the reward still rises"
    steps, reward = _series(rows, "reward")
    n = len(reward)
    if n < PLATEAU_STEPS:
        return Finding("ok", None, tested, advice=f"{PLATEAU_STEPS} log steps and more"), -math.inf

    turn, rise, noise = find_change_point(reward)
    if rise < STANDARD_ERRORS * noise / math.sqrt(max(turn, 1)):
        turn = 0  # no rise that is more than noise
    late = reward[turn:]
    late_mean = fmean(late)
    finding = Finding("ok", True, tested, late_mean, noise, n)

    fall = _find_fall(rows, steps, reward)
    if fall is not None:
        cause, step = fall
        return finding.failed("collapse", cause), step
    if len(late) < FLAT_SHARE * n or _rises(late):
        return finding, -math.inf

    since = f"since step {steps[turn]:.0f}" if turn else "from the start"
    cause = f"reward {late_mean:.3g}, flat {since}"
    within_unit = min(reward) >= 0 and max(reward) <= 1
    if late_mean >= SOLVED and within_unit:
        cause = f"{cause}: if 1 is the most that it gives, these prompts are solved"
        return finding.failed("plateau", cause, ok=None), steps[turn]
    return finding.failed("plateau", cause), steps[turn]


def _find_fall(
    rows: Sequence[Row], steps: Sequence[float], reward: Sequence[float]
) -> tuple[str, float] | None:
    """Describe what happened if the last tenth of a run has lost half of its best tenth's reward.

    Metrics that have doubled or halved by then are named. A log does not tell whether they are the cause.

    Returns:
        The description, and the step of the best reward; None without such a fall.
    """
    means = _tenths(reward)
    best = max(range(10), key=lambda tenth: means[tenth])
    noise = _noise_of_differences(reward) / math.sqrt(len(reward) / 10)
    height = means[best] - min(0.0, *reward)
    if means[best] - means[-1] <= max(height / 2, STANDARD_ERRORS * noise):
        return None

    changes = {}
    ends = {}
    for name in _names(rows, COMPARED_AT_A_FALL):
        values = _series(rows, name).values
        if len(values) == len(reward):
            tenths = _tenths(values)
            before, after = tenths[best], tenths[-1]
            ends[name] = before, after
            larger, smaller = max(abs(before), abs(after)), min(abs(before), abs(after))
            changes[name] = (larger + 0.01) / (smaller + 0.01)
    largest_changes = sorted(changes, key=lambda name: changes[name], reverse=True)
    largest_changes = [name for name in largest_changes if changes[name] > 2][:3]

    courses = [f"reward {means[best]:.3g} → {means[-1]:.3g}"]
    for name in largest_changes:
        before, after = ends[name]
        courses.append(f"{name} {before:.3g} → {after:.3g}")
    step = _tenth_blocks(steps)[best][-1]
    return f"from step {step:.0f} on {', '.join(courses)}", step


def _tenth_blocks(values: Sequence[float]) -> list[Sequence[float]]:
    """Split a curve into ten blocks, of which the first are longer by one if need be."""
    size, longer = divmod(len(values), 10)
    blocks = []
    start = 0
    for tenth in range(10):
        end = start + size + (tenth < longer)
        blocks.append(values[start:end])
        start = end
    return blocks


def _tenths(values: Sequence[float]) -> list[float]:
    """Compute the means of ten blocks."""
    return [fmean(block) for block in _tenth_blocks(values)]


def _rises(values: Sequence[float]) -> bool:
    """Check whether a curve rises by two standard errors of a line's slope.

    The line is fitted to the means of ten blocks, since neighbouring steps are alike.
    """
    means = _tenths(values)
    offsets = [tenth - 4.5 for tenth in range(10)]
    square_sum = sum(offset**2 for offset in offsets)
    slope = sum(offset * mean for offset, mean in zip(offsets, means, strict=True)) / square_sum
    centre = fmean(means)
    residuals = [mean - centre - slope * offset for offset, mean in zip(offsets, means, strict=True)]
    slope_error = math.sqrt(sum(residual**2 for residual in residuals) / 8 / square_sum)
    return slope > 2 * slope_error + ROUNDING * max(abs(value) for value in values)


def _check_clip(rows: Sequence[Row], updates: float | None) -> Finding:
    """Describe what the clip does, which is never a fault."""
    summary = summarize(rows)
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
