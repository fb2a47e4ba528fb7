"""Run the checks of a log's metrics, causes before their effects. Only the standard library is needed.

The checks are in the files of `rlvet.checks.log`. Their thresholds were chosen on the scenarios and logs of
``benchmarks/doctor``, and tested on others.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import Any

from rlvet._numbers import format_number, format_setting, format_step
from rlvet.checks.course import SPIKE_REACH, Case, Course
from rlvet.checks.findings import Finding, Kind
from rlvet.checks.log.components import COMPONENT_CONSTANT
from rlvet.checks.log.distance import KL_DRIFT, STEP_TOO_LARGE, TEN_TIMES_SMALLER
from rlvet.checks.log.entropy import ENTROPY_COLLAPSE, ENTROPY_RISES
from rlvet.checks.log.gradient import GRADIENT_SPIKES, with_jump_before_fault
from rlvet.checks.log.length import (
    CUT_FOR_A_WHILE,
    LENGTH_COLLAPSE,
    THEY_NO_LONGER_END,
    with_cut_answers_after_cause,
)
from rlvet.checks.log.life import METRIC_LOST, RUN_DIED
from rlvet.checks.log.numbers import NOT_A_NUMBER
from rlvet.checks.log.results import half_step
from rlvet.checks.log.reward import COLLAPSE, REWARD_FLAT
from rlvet.checks.log.signal import NO_ANSWER_IS_RIGHT, NO_SIGNAL
from rlvet.checks.registry import LOGS
from rlvet.lint.learning_rate import (
    LARGEST_RATE_LORA,
    LARGEST_RATE_UNKNOWN,
    describe_high_rate,
    largest_rate,
)
from rlvet.runs.checkpoints import describe_saved
from rlvet.runs.compact_rows import CompactRows
from rlvet.runs.quantities import Row
from rlvet.runs.setup import Setup


def log_findings(
    rows: Sequence[Row],
    setup: Setup | None = None,
    *,
    are_steps_counted: bool = False,
    saved: Sequence[int] = (),
) -> list[Finding]:
    """Check the metrics of a run.

    Args:
        rows: The log, one row per log step, as `rlvet.runs.logs.read_log` returns it.
        setup: The framework, method and settings of the run, as far as they are known.
        are_steps_counted: Whether a step is the number of a row, which may stand for several; times are then unknown.
        saved: The steps of the checkpoints of which it is known that they were saved.

    Returns:
        The result of each check, passed or failed, with the related settings of the run. Checks for a cause come before
        those for its effects, and the checks for a plateau of the reward and for the clip come last.
    """
    setup = setup or Setup()
    case = Case(Course(rows), setup)
    for check in LOGS.checks():
        case.findings.append(case.of(check.function))
    findings = [_with_half(finding, case.course) for finding in case.findings]
    findings = _with_numbers_after_large_steps(findings)
    findings = _with_fall_before_effects(_with_lost_signal_last(findings), case.course.rows)
    findings = with_jump_before_fault(findings, case.course)
    findings = with_cut_answers_after_cause(findings, case.course)
    findings = _with_full_advice(findings, case, saved)
    findings = _with_constant_component(findings)
    findings = [_with_cost(finding, case.course.rows, are_steps_counted) for finding in findings]
    findings = [_with_usual_rate(finding, case) for finding in findings]
    return [finding._replace(settings=_related_settings(finding.kind, setup)) for finding in findings]


GRADUAL = (LENGTH_COLLAPSE, ENTROPY_COLLAPSE, ENTROPY_RISES, KL_DRIFT)
"""Kinds of faults whose metric may have changed for long when it passes the limit at which the fault begins."""


def _with_half(finding: Finding, course: Course) -> Finding:
    """Return a finding of a kind in `GRADUAL` with the step by which half of the change of its metric was over."""
    if finding.kind not in GRADUAL or finding.onset is None:
        return finding
    half = half_step(course.series(finding.quantities[0]))
    return finding._replace(half_by=half) if half < finding.onset else finding


def _of_kind(findings: Sequence[Finding], kind: Kind) -> Finding | None:
    """Return the finding of a kind; None if there is none."""
    return next((finding for finding in findings if finding.code == kind.code), None)


def _begun_by(findings: Sequence[Finding], kinds: Sequence[Kind], onset: float) -> list[Finding]:
    """Return the findings of some kinds that began at an onset or before."""
    found = []
    for finding in findings:
        if finding.kind in kinds and finding.onset is not None and finding.onset <= onset:
            found.append(finding)
    return found


CAUSES_OF_NAN = (STEP_TOO_LARGE, KL_DRIFT)
"""Kinds of faults of which values that are no numbers are an effect, if they come later."""


def _with_numbers_after_large_steps(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings with values that are no numbers after the faults of `CAUSES_OF_NAN` that began before."""
    numbers = _of_kind(findings, NOT_A_NUMBER)
    if numbers is None or numbers.onset is None:
        return list(findings)
    begun = _begun_by(findings, CAUSES_OF_NAN, numbers.onset)
    # A KL divergence that is large from the same step on may be the infinite one.
    causes = [finding for finding in begun if finding.ok is False and finding.onset != numbers.onset]
    if not causes:
        return list(findings)
    others = [finding for finding in findings if finding is not numbers]
    position = others.index(causes[-1]) + 1
    return [*others[:position], numbers, *others[position:]]


CAUSES_OF_LOST_SIGNAL = (LENGTH_COLLAPSE, ENTROPY_COLLAPSE)
"""Kinds of faults that make the answers of a group alike, so that their rewards are equal."""


def _with_lost_signal_last(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings with lost signal after its causes: those of `CAUSES_OF_LOST_SIGNAL` that began before it."""
    signal = _of_kind(findings, NO_SIGNAL)
    if signal is None or signal.onset is None:
        return list(findings)
    causes = _begun_by(findings, CAUSES_OF_LOST_SIGNAL, signal.onset)
    others = [finding for finding in findings if finding not in causes]
    position = others.index(signal)
    return [*others[:position], *causes, *others[position:]]


NEAR_ROWS = 3
"""Number of rows after a fall of the reward within which a fault began at about the same time."""


def _soon_after(step: float, rows: CompactRows) -> float:
    """Return the last step of the rows that follow soon after a step."""
    steps = rows.column("step")
    return steps[min(len(steps) - 1, bisect.bisect_left(steps, step) + NEAR_ROWS)]


def _with_fall_before_effects(findings: Sequence[Finding], rows: CompactRows) -> list[Finding]:
    """Return the findings with the fall of the reward before what follows from it.

    Args:
        findings: The findings.
        rows: The rows of the log.
    """
    fall = _of_kind(findings, COLLAPSE)
    if fall is None:
        return list(findings)
    position = findings.index(fall)
    before, effects = [], []
    for finding in findings[:position]:
        if not _is_effect_of_fall(finding, fall, rows):
            before.append(finding)
        elif finding.kind is NO_SIGNAL:
            advice = f"follow the advice on {fall.code} first; then {finding.advice}"
            effects.append(finding._replace(advice=advice))
        else:
            effects.append(finding)
    return [*before, fall, *effects, *findings[position + 1 :]]


def _is_effect_of_fall(finding: Finding, fall: Finding, rows: CompactRows) -> bool:
    """Return whether a finding follows from a fall of the reward.

    That is the floor to which the reward fell, groups whose rewards are equal as the run lost most of them, and any
    fault that began long after such a loss, of whose change not half was over before.
    """
    is_large = fall.ok is False
    if finding.kind is NO_SIGNAL:
        return is_large
    if finding.onset is None or fall.onset is None:
        return False
    if finding.kind is REWARD_FLAT:
        return fall.onset <= finding.onset
    return is_large and _soon_after(fall.onset, rows) < finding.first_sign


EARLY_SHARE = 0.1
"""Share of a run up to which an onset is so early that there may be no checkpoint from before it."""


def _first_onset(findings: Sequence[Finding], rows: CompactRows) -> float:
    """Return the first step of a run that is broken, from which on no checkpoint helps; infinity if there is none.

    It is the first onset of all faults that are in the weights and of a steady fall of the reward, or that of gradients
    that jump right before it. A checkpoint from after the onset of another fault, such as lost signal, is as good as
    one from before it.
    """
    onsets = []
    for finding in findings:
        is_damage = finding.kind is not None and finding.kind.is_in_the_weights
        is_sure = finding.ok is False or finding.kind is COLLAPSE
        if is_damage and is_sure and finding.onset is not None:
            onsets.append(finding.onset)
    if not onsets:
        return math.inf
    first = min(onsets)
    steps = rows.column("step")
    near = steps[max(0, bisect.bisect_left(steps, first) - SPIKE_REACH)]
    jumps = [
        finding.onset
        for finding in findings
        if finding.kind is GRADIENT_SPIKES and finding.onset is not None and near <= finding.onset
    ]
    return min([first, *jumps])


def _with_cause_of_fall(
    fall: Finding, findings: Sequence[Finding], faults: Sequence[Finding], rows: CompactRows
) -> Finding:
    """Return a fall of the reward with advice on what may be its cause, which nothing is that changed after it.

    Args:
        fall: The finding.
        findings: All findings.
        faults: The faults that are told before it.
        rows: The rows of the log.
    """
    start = math.inf if fall.onset is None else _soon_after(fall.onset, rows)
    if any(fault.onset is None or fault.first_sign <= start for fault in faults):
        return fall._replace(advice=f"look at the faults above first, which may be its cause; {fall.advice}")
    told_beside = [
        finding
        for finding in findings
        if finding.cause and finding.severity != "note" and finding.kind is not fall.kind
    ]
    clauses = [fall.advice]
    if all(finding.onset is not None and finding.first_sign > start for finding in told_beside):
        clauses.insert(0, "no check found anything that passed its limit before it, so no cause is known")
    if faults:
        clauses.insert(0, "the faults above passed their limits only after it began")
    return fall._replace(advice="; ".join(clauses))


def _with_full_advice(findings: Sequence[Finding], case: Case, saved: Sequence[int]) -> list[Finding]:
    """Return the findings with the parts of their advice that depend on the onsets and on the findings before them."""
    rows = case.course.rows
    saving = case.setup.values.get("saving")
    saves_none = saving is not None and saving.value == "no" and not saved
    first = rows[0]["step"]
    early_end = first + EARLY_SHARE * (rows[-1]["step"] - first)
    broken_from = _first_onset(findings, rows)
    fall = _of_kind(findings, COLLAPSE)
    lost_from = math.inf
    if fall is not None and fall.ok is False and fall.onset is not None:
        lost_from = _soon_after(fall.onset, rows)
    result = []
    faults: list[Finding] = []
    for finding in findings:
        kind = finding.kind
        # A run that lives again needs no earlier checkpoint.
        is_over = kind is RUN_DIED and finding.severity == "look"
        if kind is not None and finding.onset is not None and not is_over:
            step = min(finding.onset, broken_from)
            if step > early_end:
                checkpoint = f"before step {format_step(step)}{describe_saved(saved, step)}"
                if saves_none and saving is not None:
                    checkpoint = f"{checkpoint}, or begin again: by {saving.name}=no, the trainer saved none"
                resumption = kind.resumption(checkpoint)
                if finding.cause.endswith(THEY_NO_LONGER_END):
                    resumption = f"; then resume from a checkpoint {checkpoint}"
                finding = finding._replace(advice=f"{finding.advice}{resumption}")
        is_fault = finding.ok is False or kind is METRIC_LOST
        began_later = finding.onset is not None and finding.first_sign > lost_from
        # Of lost signal and cut answers it is said already.
        if is_fault and began_later and COLLAPSE.code not in finding.advice:
            finding = finding._replace(
                advice=f"look at {COLLAPSE.code} first, which began before this passed its limit; {finding.advice}"
            )
        if kind is COLLAPSE:
            finding = _with_cause_of_fall(finding, findings, faults, rows)
        if finding.ok is False:
            faults.append(finding)
        result.append(finding)
    return result


def _with_constant_component(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings, one on lost signal where no answer is right with a component that is always 0."""
    constant = next((finding for finding in findings if finding.kind is COMPONENT_CONSTANT), None)
    if constant is None or " is 0 in every" not in constant.cause:
        return [*findings]
    name = constant.quantities[0].removeprefix("rewards/")
    told = []
    for finding in findings:
        if finding.kind is NO_SIGNAL and finding.severity != "look" and NO_ANSWER_IS_RIGHT in finding.cause:
            finding = finding._replace(advice=f"see first why {name} is always 0; {finding.advice}")
        told.append(finding)
    return told


def _with_cost(finding: Finding, rows: CompactRows, are_steps_counted: bool) -> Finding:
    """Return a finding with its cost: the time, or the number of log steps, since its onset."""
    if not finding.cause or finding.onset is None:
        return finding
    steps = rows.column("step")
    last = steps[-1]
    is_over = finding.kind is RUN_DIED or finding.measure == CUT_FOR_A_WHILE
    up_to = ""
    if is_over and finding.steps is not None:
        # The run may have come back.
        last = finding.steps[1]
        if last < steps[-1]:
            up_to = f", up to step {format_step(last)}"
    times = [*rows.values("step_time", 0.0)]
    seconds = sum(time for step, time in zip(steps, times, strict=True) if finding.onset <= step <= last)
    total_seconds = sum(times)
    if total_seconds and not are_steps_counted:
        # A row may stand for several training steps, each of which took that time.
        steps_per_row = max(1.0, (steps[-1] - steps[0]) / max(1, len(rows) - 1))
        cost = _format_times(seconds * steps_per_row, total_seconds * steps_per_row)
        return finding._replace(cost=f"{cost} on each GPU{up_to}")
    # A record has several rows of one step.
    different = set(steps)
    since_onset = sum(finding.onset <= step <= last for step in different)
    return finding._replace(cost=f"{since_onset} of {len(different)} log steps{up_to}")


def _format_times(seconds: float, total_seconds: float) -> str:
    """Return a time and the total time in the largest unit in which the total is at least 1."""
    unit, size = next(
        ((u, n) for u, n in (("hours", 3600), ("minutes", 60)) if total_seconds >= n), ("seconds", 1)
    )
    return f"{format_number(seconds / size, 2)} of {format_number(total_seconds / size, 2)} {unit}"


def _related_settings(kind: Kind | None, setup: Setup) -> tuple[str, ...]:
    """Return the settings that are related to a kind of finding, as texts with their values."""
    if kind is None:
        return ()
    texts = []
    for name in kind.settings:
        value = setup.number(name)
        # A LoRA rank of 0 means that there is no adapter.
        has_no_adapter = name == "LoRA rank" and value == 0
        if value is not None and not has_no_adapter:
            texts.append(str(setup.values[name]))
    if kind.is_effect_of_large_steps:
        texts += _high_rate(setup)
    return tuple(texts)


RANK_IN_CONFIGURATION = ("verl", "openrlhf", "skyrl", "prime-rl")
"""Frameworks whose configuration has the rank of LoRA, so that one without it trains all weights. TRL's trainer gets
the adapter beside its configuration."""


def _with_usual_rate(finding: Finding, case: Case) -> Finding:
    """Return a finding with advice that leads to a usual learning rate, where a tenth of the run's is none."""
    setup = case.setup
    rate = setup.number("learning rate") or max(case.course.series("learning_rate").values, default=None)
    if rate is None or TEN_TIMES_SMALLER not in finding.advice or not _describe_rate(rate / 10, setup):
        return finding
    largest = largest_rate(_trains_adapter(setup), _model(setup))
    rates = format_setting(largest)
    if _trains_adapter(setup) is None:
        rates = f"{rates}, or {format_setting(LARGEST_RATE_LORA)} with LoRA"
    # The rates of lint's advice. Small models have larger ones.
    usual = "1e-6, or 1e-5 with LoRA, as is usual, and of " if largest <= LARGEST_RATE_UNKNOWN else ""
    advice = finding.advice.replace(TEN_TIMES_SMALLER, f"use a learning rate of {usual}at most {rates}")
    return finding._replace(advice=advice)


def _model(setup: Setup) -> Any:
    return setup.values["model"].value if "model" in setup.values else None


def _trains_adapter(setup: Setup) -> bool | None:
    """Return whether only a LoRA adapter is trained; None if this is not known."""
    rank = setup.number("LoRA rank")
    if rank is None:
        return False if setup.framework in RANK_IN_CONFIGURATION else None
    return rank > 0


def _describe_rate(rate: float, setup: Setup) -> str:
    """Return what a learning rate is above in a run; an empty text if it is usual."""
    optimizer = setup.values["optimizer"].value if "optimizer" in setup.values else "adamw"
    return describe_high_rate(rate, _trains_adapter(setup), _model(setup), str(optimizer))


def _high_rate(setup: Setup) -> list[str]:
    """Return the learning rate as a text, if it is far above usual ones."""
    rate = setup.number("learning rate")
    description = "" if rate is None else _describe_rate(rate, setup)
    return [f"{setup.values['learning rate']}, {description}"] if description else []
