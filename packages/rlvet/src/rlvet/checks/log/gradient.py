"""Check the norm of the gradient for spikes."""

from __future__ import annotations

from rlvet._numbers import format_number
from rlvet.checks.course import SPIKE_REACH, Case, find_spikes
from rlvet.checks.findings import Finding, Kind
from rlvet.checks.log.results import FEW_STEPS, passed_check, undecided_check
from rlvet.checks.log.reward import check_fall
from rlvet.checks.registry import LOGS

SPIKE = 15.0
"""A gradient norm is a spike if it is more than this many times the norms around it."""

FEWEST_SPIKES = 3
"""Number of spikes below which they are not reported."""

GRADIENT_SPIKES = Kind(
    code="gradient-spikes",
    severity="look",
    meaning="some gradients are many times larger than those around them",
    condition=(
        f"at least {FEWEST_SPIKES} gradient norms are more than {SPIKE:g} times the median of the {SPIKE_REACH} "
        f"log steps before, and of the {SPIKE_REACH} after. If more than a tenth are, they are a wide "
        "spread and no spikes"
    ),
    remedy="lower the gradient clipping norm{gradient clipping}, and look at the batches of these steps",
    is_effect_of_large_steps=True,
    evidence=("grad_norm",),
    source="a log of Sunshine535/nips-grpo-dynamics",
    scenarios=("gradient spikes", "gradient spikes, then a fall"),
)


@LOGS.check(
    "spikes of the gradient norm",
    after="size of the first updates",
    tested="spikes of the gradient norm are few",
    explained="few norms are far above those around them",
    reports=(GRADIENT_SPIKES,),
)
def check_gradient_spikes(case: Case) -> Finding:
    """Check that no gradient norm is many times larger than those around it. It is a fault if the reward fell."""
    norm = case.course.series("grad_norm")
    if len(norm.values) < 4 * FEW_STEPS:
        return undecided_check()
    spikes = find_spikes(norm.values, SPIKE)
    finding = passed_check(norm, len(spikes), "log steps with a spike")
    # If many rows are far from their neighbours, the norm has a wide spread and no spikes.
    if len(spikes) < FEWEST_SPIKES:
        return finding
    if len(spikes) > len(norm.values) / 10:
        return undecided_check("the norm has a wide spread")
    largest = max(norm.values[row] for row in spikes)
    usual = sorted(norm.values)[len(norm.values) // 2]
    steps = ", ".join(f"{norm.steps[row]:.0f}" for row in spikes[:5])
    if len(spikes) > 5:
        steps = f"{steps}, …"
    cause = (
        f"in {len(spikes)} log steps (step {steps}) the gradient norm is more than {SPIKE:.0f} times the norms around "
        f"it, up to {format_number(largest)} where {format_number(usual)} is usual"
    )
    severity = "fix" if case.of(check_fall).ok is False else "look"
    start = norm.steps[spikes[0]]
    return finding.failed(GRADIENT_SPIKES, cause, severity=severity, onset=start, quantities=["grad_norm"])
