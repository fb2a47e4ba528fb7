"""Check the norm of the gradient for spikes."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from rlvet._numbers import format_number, format_step
from rlvet.checks.course import SPIKE_REACH, Case, Course, Series, find_spikes
from rlvet.checks.findings import Finding, Kind
from rlvet.checks.liveness import HISTORY
from rlvet.checks.log.results import FEW_STEPS, lacks_rows, passed_check, undecided_check
from rlvet.checks.log.reward import check_fall
from rlvet.checks.registry import LOGS

SPIKE = 15.0
"""A gradient norm is a spike if it is more than this many times the norms around it."""

FEWEST_SPIKES = 3
"""Number of spikes below which they are not reported."""

MOST_BESIDE = 2
"""Number of the log steps around a spike that may have a third of its norm, as norms that alternate between two levels
have no spikes."""

JUMP = 10.0
"""Factor above the usual norm from which the norms of consecutive log steps may be the begin of another fault."""

ABOVE_START = 3.0
"""Factor above the usual norms of the start, without which a norm is no spike: if groups have equal rewards later, most
norms are near 0, and those of the others are as they were."""

JUMP_ROWS = 3
"""Number of such log steps from which they are told."""

ROWS_BEFORE = 10
"""Number of norms before them that are needed to know the usual one."""

RARELY_ABOVE = 0.95
"""Share of the norms before them that must be smaller. A norm that has gone up and down returns to an earlier level."""

GRADIENT_SPIKES = Kind(
    code="gradient-spikes",
    severity="look",
    meaning="some gradients are many times larger than those around them",
    condition=(
        f"at least {FEWEST_SPIKES} gradient norms are more than {SPIKE:g} times the median of the {SPIKE_REACH} "
        f"log steps before, of the {SPIKE_REACH} after, and half of that of the run; at most {MOST_BESIDE} of these "
        f"steps have a third of it, and they are {ABOVE_START:g} times the norms that were usual at the start. If more "
        f"than a tenth are, they are a wide spread and no spikes; or {JUMP_ROWS} in "
        f"a row are more than {JUMP:g} times the usual norm, and more "
        f"than {RARELY_ABOVE:.0%} of those before, as another fault begins"
    ),
    remedy="lower the gradient clipping norm{gradient clipping}, and look at the batches of these steps",
    is_in_the_weights=True,
    is_effect_of_large_steps=True,
    evidence=("grad_norm",),
    source="a log of Sunshine535/nips-grpo-dynamics",
    scenarios=("gradient spikes", "gradient spikes, then a fall"),
)


SPIKES_OF_GRADIENT = "spikes of the gradient norm"
"""The name of the check in the output."""


@LOGS.check(
    SPIKES_OF_GRADIENT,
    after="size of the first updates",
    tested="spikes of the gradient norm are few",
    explained="few norms are far above those around them",
    reports=(GRADIENT_SPIKES,),
)
def check_gradient_spikes(case: Case) -> Finding:
    """Check that no gradient norm is many times larger than those around it. It is a fault if the reward fell."""
    norm = case.course.series("grad_norm")
    if len(norm.values) < 4 * FEW_STEPS:
        return lacks_rows(case.course, 4 * FEW_STEPS, "grad_norm")
    spikes = find_spikes(norm.values, SPIKE)
    finding = passed_check(norm, len(spikes), "log steps with a spike")
    # If many rows are far from their neighbours, the norm has a wide spread and no spikes.
    if len(spikes) < FEWEST_SPIKES:
        return finding
    alone = [row for row in spikes if _is_alone(norm.values, row)]
    if len(spikes) > len(norm.values) / 10 or len(alone) < FEWEST_SPIKES:
        return undecided_check("the norm has a wide spread")
    largest_usual = _largest_usual_at_start(norm.values)
    spikes = [row for row in alone if norm.values[row] > ABOVE_START * largest_usual]
    if len(spikes) < FEWEST_SPIKES:
        return undecided_check(
            f"of its {len(alone)} spikes, {len(spikes)} far above the largest norms of the start"
        )
    finding = passed_check(norm, len(spikes), "log steps with a spike")
    largest = max(norm.values[row] for row in spikes)
    usual = sorted(norm.values)[len(norm.values) // 2]
    steps = ", ".join(f"{norm.steps[row]:.0f}" for row in spikes[:5])
    if len(spikes) > 5:
        steps = f"{steps}, …"
    cause = (
        f"in {len(spikes)} log steps (step {steps}) the gradient norm is more than {SPIKE:.0f} times the median around "
        f"it, up to {format_number(largest)} where {format_number(usual)} is usual in the run"
    )
    severity = "fix" if case.of(check_fall).ok is False else "look"
    start = norm.steps[spikes[0]]
    return finding.failed(GRADIENT_SPIKES, cause, severity=severity, onset=start, quantities=["grad_norm"])


def _largest_usual_at_start(norms: Sequence[float]) -> float:
    """Return the norm below which nine of ten are in the first quarter of a run."""
    first = sorted(norms[: len(norms) // 4])
    return first[int(0.9 * (len(first) - 1))]


def _is_alone(norms: Sequence[float], row: int) -> bool:
    """Return whether few of the log steps around a spike have norms of its size."""
    around = (*norms[row - SPIKE_REACH : row], *norms[row + 1 : row + 1 + SPIKE_REACH])
    return sum(norm > norms[row] / 3 for norm in around) <= MOST_BESIDE


def with_jump_before_fault(findings: Sequence[Finding], course: Course) -> list[Finding]:
    """Return the findings of a run, with that on its gradient norm if the norm jumps right before another fault.

    Args:
        findings: The results of all checks.
        course: The metrics.
    """
    norm = course.series("grad_norm")
    faults = [finding for finding in findings if finding.ok is False and finding.code != GRADIENT_SPIKES.code]
    # Onsets by their rows, the earliest first. Of several faults that begin together, a jump is before the first.
    begins = sorted(
        (bisect.bisect_right(norm.steps, fault.onset) - 1, place)
        for place, fault in enumerate(faults)
        if fault.onset is not None
    )
    firsts = begins[:1]
    firsts += [after for before, after in pairwise(begins) if after[0] > before[0] + 2 * SPIKE_REACH]
    jumps = [(rows, faults[place]) for row, place in firsts if (rows := _jump_at(norm, row)) is not None]
    if not jumps:
        return [*findings]
    rows, fault = jumps[0]
    return [
        _jump(finding, norm, rows, fault)
        if finding.subject == SPIKES_OF_GRADIENT and not finding.cause
        else finding
        for finding in findings
    ]


def _usual(norm: Series, row: int) -> float:
    """Return the median of the norms before a row; 0 if they are few."""
    before = norm.values[max(0, row - HISTORY) : row]
    return median(before) if len(before) >= ROWS_BEFORE else 0.0


def _limit(norm: Series, row: int) -> float:
    """Return the norm above which one at a row has jumped; infinity if the norms before it are few, or 0."""
    usual = _usual(norm, row)
    if usual <= 0:
        return math.inf
    before = sorted(norm.values[:row])
    return max(JUMP * usual, before[int(RARELY_ABOVE * len(before))])


def _jump_at(norm: Series, at: int) -> slice | None:
    """Return the rows of a jump of the norm that begins at most `SPIKE_REACH` rows before a row; None without one."""
    for start in range(max(0, at - SPIKE_REACH), at + 1):
        limit = _limit(norm, start)
        end = start
        while end < len(norm.values) and norm.values[end] > limit:
            end += 1
        if end - start >= JUMP_ROWS:
            return slice(start, end)
    return None


def _jump(finding: Finding, norm: Series, rows: slice, fault: Finding) -> Finding:
    """Return the finding on a jump of the norm before a fault. It is a remark, as either may cause the other."""
    values = norm.values[rows]
    steps = norm.steps[rows]
    ends = dict.fromkeys(map(format_number, (min(values), max(values))))
    until = "on" if rows.stop == len(norm.values) else f"to {format_step(steps[-1])}"
    cause = (
        f"from step {format_step(steps[0])} {until} the gradient norm is {' to '.join(ends)}, where "
        f"{format_number(_usual(norm, rows.start))} is usual, as {fault.code} begins"
    )
    measured = passed_check(norm, max(values), "largest gradient norm in these log steps", rows)
    measured = measured._replace(tested=finding.tested, subject=finding.subject)
    return measured.failed(GRADIENT_SPIKES, cause, onset=steps[0], quantities=["grad_norm"])
