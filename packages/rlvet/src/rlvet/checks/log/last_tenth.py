"""Check that the last tenth of a run is like the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

from rlvet.checks.course import Case, noise_of_differences, tenth_blocks, tenths
from rlvet.checks.findings import Finding, Kind
from rlvet.checks.log.data import DATA_CHANGE
from rlvet.checks.log.distance import KL_DRIFT, OTHER_REFERENCE, STEP_TOO_LARGE
from rlvet.checks.log.engine import DISTANCES, ENGINE_MISMATCH
from rlvet.checks.log.entropy import ENTROPY_COLLAPSE, ENTROPY_RISES, LOW_ENTROPY_AT_START
from rlvet.checks.log.gradient import GRADIENT_SPIKES
from rlvet.checks.log.length import LENGTH_GROWTH, TRUNCATED
from rlvet.checks.log.numbers import NOT_A_NUMBER
from rlvet.checks.log.results import change_text, passed_check, undecided_check
from rlvet.checks.registry import LOGS

LATE_QUANTITIES = {
    "entropy": (STEP_TOO_LARGE, ENTROPY_RISES, ENTROPY_COLLAPSE, LOW_ENTROPY_AT_START),
    "cut": (TRUNCATED,),
    "kl": (KL_DRIFT, OTHER_REFERENCE, STEP_TOO_LARGE),
    "length": (LENGTH_GROWTH, DATA_CHANGE, TRUNCATED),
    "mismatch": (ENGINE_MISMATCH,),
    "mismatch_kl": (ENGINE_MISMATCH,),
    "grad_norm": (GRADIENT_SPIKES,),
}
"""The quantities whose last tenth is compared with the others. For each, the kinds of findings that already report a
change of it."""

SMALL_QUANTITIES = {"cut": 0.1} | {name: distance.floor for name, distance in DISTANCES.items()}
"""Values of quantities up to which a change of them is no finding."""

OUTLIER_ERRORS = 4.0
"""Standard errors of a tenth's mean by which the last tenth must lie outside the range of the others."""

OUTLIER_FACTOR = 1.5
"""Factor by which the last tenth must lie outside the range of the others."""

LATE_CHANGE = Kind(
    code="late-change",
    severity="look",
    meaning="the last tenth of the run differs from the rest",
    condition=(
        f"a quantity in the last tenth is {OUTLIER_FACTOR:g} times the largest of the nine tenths before it, "
        "or as much below the smallest, and moved there at once"
    ),
    remedy=(
        "check what changed at that step, in the logged metrics and in the settings; keep a checkpoint from "
        "before it"
    ),
    evidence=("entropy", "cut", "kl", "length", "mismatch", "mismatch_kl", "grad_norm"),
    source="log 1767730664 of alexchilton/CAS_NLP_MODULE4_GRPO",
    scenarios=("cut off in the last tenth",),
)


@LOGS.check(
    "the last tenth of the run",
    after="metrics up to the end",
    tested="entropy, KL, answers, gradient and engine do not change suddenly in the last tenth of the run",
    explained="none of these quantities is suddenly different there",
    reports=(LATE_CHANGE,),
)
def check_last_tenth(case: Case) -> Finding:
    """Check that the last tenth of a run is like the nine before it, but for changes that are reported already."""
    course = case.course
    kinds = {finding.kind for finding in case.findings if finding.kind}
    changes = {}
    starts: list[float] = []
    # True if a quantity differs there, but by a change that is reported by another finding, or that is not sudden.
    is_unlike = False
    finding = undecided_check("needs at least 40 log steps")
    for name, explained_by in LATE_QUANTITIES.items():
        metric = course.series(name)
        if len(metric.values) < 40:
            continue
        if finding.ok is None:
            finding = passed_check(metric)
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
        is_reported = not kinds.isdisjoint(explained_by)
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
        if is_unlike:
            return undecided_check("a part of it differs, slowly or as another finding says")
        if NOT_A_NUMBER in kinds:
            return undecided_check("values are NaN or infinite, which another finding reports")
        return finding
    step = tenth_blocks(course.rows.column("step"))[-1][0]
    cause = (
        f"from step {step:.0f} on the run differs from its first nine tenths: {', '.join(changes.values())}, from the "
        "ninth tenth to the last"
    )
    finding = finding._replace(figure=len(changes), measure="quantities that differ in the last tenth")
    return finding.failed(LATE_CHANGE, cause, onset=min(starts), quantities=[*changes])


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
