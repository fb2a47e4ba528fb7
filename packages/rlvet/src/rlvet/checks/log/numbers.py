"""Check that the log holds numbers."""

from __future__ import annotations

from rlvet.checks.course import Case
from rlvet.checks.findings import Finding, Kind
from rlvet.checks.registry import LOGS
from rlvet.runs.quantities import QUANTITIES

NOT_A_NUMBER = Kind(
    code="nan",
    severity="stop",
    meaning="values are NaN or infinite, or a probability exceeds 1",
    condition=(
        "a row of the log holds NaN or infinity; a recorded sequence holds one, or a log-probability above 0"
    ),
    remedy=(
        "look at the batch of the first such step, and at the log steps before it: large norms or KLs there are of a "
        "policy that diverged. Other common causes are a reward function that returns NaN, an overflow in half "
        "precision and a sequence without tokens"
    ),
    is_in_the_weights=True,
    is_effect_of_large_steps=True,
    evidence=("all quantities",),
    source="AgentR1/Agent-R1 issue 30, verl-project/verl issue 498",
    scenarios=("values are NaN", "NaN rows"),
)


@LOGS.check(
    "values that are no numbers",
    after="",
    tested="the log holds numbers",
    explained="the log has no NaN and no infinite value",
    reports=(NOT_A_NUMBER,),
)
def check_numbers(case: Case) -> Finding:
    """Check that the log has no NaN and no infinite values."""
    course = case.course
    bad_steps = [step for step, is_bad in course.series("not_finite").points if is_bad]
    share = len(bad_steps) / len(course.rows)
    measure = "share of log steps with NaN or infinite values"
    finding = Finding("ok", True, "", share, None, len(course.rows), measure=measure)
    if not bad_steps:
        return finding
    first_step = min(bad_steps)
    bad_layouts = [layout for layout in course.rows.layouts if "not_finite" in layout]
    cause = f"{len(bad_steps)} of {len(course.rows)} log steps hold NaN or infinite values, first step {first_step:.0f}"
    # The reader leaves values out that are not finite.
    missing = []
    for name in QUANTITIES:
        if course.series(name).values and any(name not in layout for layout in bad_layouts):
            missing.append(name)
    # Weights of NaN leave the reward a number.
    if "reward" in missing:
        cause += ", the reward among them"
    return finding.failed(NOT_A_NUMBER, cause, onset=first_step, quantities=missing)
