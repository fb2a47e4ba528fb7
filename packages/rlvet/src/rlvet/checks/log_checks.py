"""Run the checks of a log's metrics, causes before their effects. Only the standard library is needed.

The checks are in the files of `rlvet.checks.log`. Their thresholds were chosen on the scenarios and logs of
``benchmarks/doctor``, and tested on others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlvet._numbers import format_number
from rlvet.checks.course import Course
from rlvet.checks.findings import Finding
from rlvet.checks.log.clip import check_clip, check_clip_share
from rlvet.checks.log.components import check_components
from rlvet.checks.log.data import check_data
from rlvet.checks.log.distance import check_divergence, check_reference, check_step_size
from rlvet.checks.log.engine import engine_findings
from rlvet.checks.log.entropy import ENTROPY_COLLAPSE, check_entropy
from rlvet.checks.log.evaluation import check_evaluation
from rlvet.checks.log.gradient import check_gradient_spikes
from rlvet.checks.log.last_tenth import check_last_tenth
from rlvet.checks.log.length import LENGTH_COLLAPSE, check_length, check_short_answers, check_truncation
from rlvet.checks.log.movement import check_movement, check_small_steps
from rlvet.checks.log.numbers import check_numbers
from rlvet.checks.log.reward import (
    check_constant_reward,
    check_fall,
    check_plateau,
    find_flat_part,
    is_solved,
)
from rlvet.checks.log.signal import NO_SIGNAL, check_baseline, check_signal
from rlvet.runs.quantities import Row
from rlvet.runs.setup import Setup


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
    fall = check_fall(course)
    fell = fall.ok is False
    flat = find_flat_part(course)
    flat_since = -math.inf
    if flat is not None:
        reward, turn = flat
        flat_since = reward.steps[turn]
    solved = is_solved(course)

    reference = check_reference(course, setup)
    agreement, weights = engine_findings(course, setup)
    findings = [
        ("NaN", check_numbers(course)),
        ("weights", check_movement(course)),
        ("reference", reference),
        ("engine", agreement),
        ("importance weights", weights),
        ("step size", check_step_size(course)),
        ("gradient norm", check_gradient_spikes(course, fell=fell)),
        ("clip", check_clip_share(course, setup)),
        ("KL", check_divergence(course, reference_is_wrong=reference.ok is False)),
        ("baseline", check_baseline(course, setup)),
        ("truncation", check_truncation(course, setup)),
        ("constant reward", check_constant_reward(course)),
        ("signal of groups", check_signal(course, setup, solved=solved)),
        ("change of data", check_data(course)),
        *(("reward components", finding) for finding in check_components(course)),
        ("length", check_length(course)),
        ("length", check_short_answers(course)),
        ("entropy", check_entropy(course, flat_since, solved=solved)),
        ("other prompts", check_evaluation(course)),
        ("movement", check_small_steps(course)),
        ("fall of the reward", fall),
    ]
    findings = _with_lost_signal_last([finding._replace(subject=subject) for subject, finding in findings])
    kinds = {finding.kind for finding in findings if finding.kind}
    findings.append(check_last_tenth(course, kinds)._replace(subject="last tenth"))
    findings.append(check_plateau(course, flat, fell=fell, solved=solved)._replace(subject="plateau"))
    # The clip is judged only if there is no fault.
    if all(finding.ok is not False for finding in findings):
        findings.append(check_clip(course, setup.updates)._replace(subject="clip"))
    return [_with_cost(finding, rows) for finding in findings]


CAUSES_OF_LOST_SIGNAL = (LENGTH_COLLAPSE, ENTROPY_COLLAPSE)
"""Kinds of faults that make the answers of a group alike, so that their rewards are equal."""


def _with_lost_signal_last(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings with lost signal after its causes: those of `CAUSES_OF_LOST_SIGNAL` that began before it."""
    signal = next((finding for finding in findings if finding.code == NO_SIGNAL.code), None)
    if signal is None or signal.onset is None:
        return list(findings)
    causes = []
    for finding in findings:
        began_before = finding.onset is not None and finding.onset <= signal.onset
        if finding.kind in CAUSES_OF_LOST_SIGNAL and began_before:
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
