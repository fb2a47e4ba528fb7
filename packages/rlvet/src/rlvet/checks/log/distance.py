"""Checks of how far the policy is from the reference, and from the policy that sampled the data.

All limits are levels in nats per token. A KL that is large in every log step is large, whatever it was at the first
one. Single log steps do not decide: k3, the usual estimator of the KL, has rare values that are a thousand times the
others.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rlvet._numbers import format_number, format_step
from rlvet.checks.course import (
    Case,
    Course,
    Series,
    begins_in_the_middle,
    earliest_onset,
    first_window,
    rises,
    tenths,
)
from rlvet.checks.findings import Finding, Kind
from rlvet.checks.log.movement import NEAR_REFERENCE
from rlvet.checks.log.results import (
    FEW_STEPS,
    FIRST_ROW_TO_LAST_TENTH,
    TENTHS_OF_STEPS,
    change_text,
    lacks_rows,
    last_tenth,
    later_half,
    near_limit,
    passed_check,
    undecided_check,
)
from rlvet.checks.registry import LOGS
from rlvet.runs.setup import Setup

REFERENCE_KL = NEAR_REFERENCE
"""KL to the reference (nats per token) at the first step, before any update, above which the reference is another model
than the one that training began with. A right reference has 0 there. The logs of ``benchmarks/doctor`` whose authors
used another one have 0.3 to 34."""

MOST_OF_ANOTHER_MODEL = 10.0
"""KL to the reference (nats per token) from which another reference does not explain it, unless it was measured before
any update: the mean over tokens of two models of one family is a few nats."""

EARLY_ROWS = 10
"""Number of rows at the start in which the KL to the reference must stay below `EARLY_KL`."""

GROWTH = 4.0
"""Factor by which the KL of the first rows grows if updates are its cause. A KL to another model is large at once."""

LATE_EPOCH = 0.1
"""Epoch of the first row from which a log of a few rows is an excerpt from the middle of a run, whatever its steps."""

OTHER_REFERENCE = Kind(
    code="reference-kl",
    severity="fix",
    meaning="the KL term refers to a model other than the one that training began with",
    condition=(
        f"the KL divergence to the reference is above {REFERENCE_KL:g} at step 1; or above {3 * REFERENCE_KL:g} "
        f"in the first row of a later step, but not above {MOST_OF_ANOTHER_MODEL:g}, nor below half of the median of "
        "all rows; undecided if the run had begun long before the log"
    ),
    remedy=(
        "use the model that training begins with as the reference: merge the adapter of supervised "
        "fine-tuning into the base model before RL, or set it as the reference"
    ),
    settings=("LoRA rank", "KL term"),
    evidence=("kl",),
    source="logs of qhy991/GRPO-Clean-2 and OmSPatel20/FinReason, NovaSky-AI/SkyRL issue 1864",
    scenarios=("reference is not the start",),
)


@LOGS.check(
    "the reference of the KL term",
    after="whether weights move",
    tested="the reference is the model that training began with",
    explained="the KL to the reference begins near 0",
    reports=(OTHER_REFERENCE,),
)
def check_reference(case: Case) -> Finding:
    """Check that the KL to the reference begins near 0."""
    course, setup = case.course, case.setup
    kl = course.series("kl")
    if not kl.values:
        return lacks_rows(course, 1, "kl")
    first = kl.values[0]
    finding = passed_check(kl, first, "KL to the reference in the first log step", slice(1))
    if first <= REFERENCE_KL:
        return finding
    if begins_in_the_middle(course):
        return undecided_check("the run had begun before the log")

    early = kl.values[:EARLY_ROWS]
    # The first row may be a mean over several steps, and then its KL is above 0 in any run. It is evidence if it is as
    # large as that of later rows.
    is_as_large_as_later = (
        len(early) >= EARLY_ROWS and first > 0.5 * median(kl.values) and first > 3 * REFERENCE_KL
    )
    begins_before_updates = _begins_before_updates(course, setup)
    # If the KL grows from step to step, the reference may be right, and the policy moves away from it fast.
    grows = median(early[1:] or early) > GROWTH * first
    is_too_large = first > MOST_OF_ANOTHER_MODEL and not begins_before_updates
    if grows or is_too_large or not (is_as_large_as_later or begins_before_updates):
        return undecided_check("needs the KL of the first step, before any update")

    step = format_step(kl.steps[0])
    cause = f"KL to the reference is {format_number(first)} at step {step}, before any update could move the policy"
    alternatives: tuple[Kind, ...] = ()
    if not begins_before_updates:
        cause = f"KL to the reference is {format_number(first)} at step {step}, the first that was logged"
        alternatives = (KL_DRIFT,)
    if setup.number("LoRA rank"):
        # A new adapter has no effect, so its KL to the base model would be 0.
        cause = f"{cause}: with LoRA the reference is the base model, without the adapter that training began with"
    else:
        model = "another model, such as the base model of a LoRA run that began with an adapter"
        cause = f"{cause}: the reference is {model}"
    if alternatives:
        cause = f"{cause}, or the policy had left it before"
    return finding.failed(OTHER_REFERENCE, cause, *alternatives, onset=kl.steps[0], quantities=["kl"])


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


EARLY_KL = 1.0
"""KL to the reference (nats per token) that shows updates that are too large if it is reached in the first rows."""

TOO_FAR = 2.5
"""Mean abs log-ratio (nats) at the last update on a batch above which steps are too large. Tokens are then twelve times
as likely or unlikely as when they were sampled, so that the effective sample size is close to 0."""

LARGE_RATE = 1e-4
"""Learning rate from which the finding on too large steps mentions it."""

TEN_TIMES_SMALLER = "use a learning rate ten times smaller"
"""The remedy for steps that are too large, if that rate is usual."""

STEP_TOO_LARGE = Kind(
    code="step-too-large",
    severity="stop",
    meaning="one batch, or a few steps, move the policy too far",
    condition=(
        f"at the last update on a batch, the log-probabilities of its tokens have moved by {TOO_FAR:g} nats "
        f"on average; or the KL divergence to the reference reaches {EARLY_KL:g} within the first ten log steps, "
        "which is `fix` if the reward rises after that"
    ),
    remedy=(f"{TEN_TIMES_SMALLER}{{learning rate}}[fewer updates|, or fewer updates per batch{{updates}}]"),
    is_in_the_weights=True,
    is_effect_of_large_steps=True,
    evidence=("kl", "ratios of a record"),
    source="log 1767733342 of alexchilton/CAS_NLP_MODULE4_GRPO, at a learning rate of 5e-4",
    scenarios=("learning rate 5e-4", "learning rate × 100"),
)


@LOGS.check(
    "size of the first updates",
    after="importance weights of sequences",
    tested="the first steps do not move the policy too far",
    explained="the policy stays near the one that sampled",
    reports=(STEP_TOO_LARGE,),
)
def check_step_size(case: Case) -> Finding:
    """Check that one batch does not move the policy too far, nor the first steps of the run."""
    course = case.course
    movement = course.series("moved")
    kl = course.series("kl")
    if movement.values:
        largest = max(movement.values)
        measure = "largest mean movement of log-probabilities by the last update on a batch (nats)"
        finding = passed_check(movement, largest, measure)
        if largest > TOO_FAR:
            cause = (
                "by the last update on a batch, log-probabilities of its tokens had moved by "
                f"{format_number(largest, 2)} nats on average"
            )
            step = movement.steps[movement.values.index(largest)]
            return finding.failed(STEP_TOO_LARGE, cause, onset=step, quantities=["moved"])
        return finding
    if not kl.values:
        return undecided_check("record the tokens")

    early = kl.values[:EARLY_ROWS]
    measure = f"largest KL to the reference in the first {len(early)} log steps"
    finding = passed_check(kl, max(early), measure, slice(len(early)))
    if max(early) < EARLY_KL:
        return finding
    # In a log of few rows, the first ten may be most of the run. A KL that is large at the first row shows no growth.
    is_short = len(kl.values) < 3 * EARLY_ROWS
    row = next((row for row, value in enumerate(early) if value >= max(EARLY_KL, GROWTH * early[0])), None)
    if is_short or row is None or early[0] >= EARLY_KL:
        return undecided_check("record the tokens")
    rate = max(course.series("learning_rate").values, default=0.0)
    at_rate = f", at a learning rate of {format_number(rate)}" if rate >= LARGE_RATE else ""
    change = change_text(early[0], early[row])
    cause = f"KL to the reference went {change} in the first {row + 1} log steps{at_rate}"
    measure = f"KL to the reference in log step {row + 1}"
    finding = passed_check(kl, early[row], measure, slice(row, row + 1))
    # A run that still learns need not be ended.
    reward = course.series("reward").since(kl.steps[row])
    severity = "fix" if len(reward.values) >= 2 * EARLY_ROWS and rises(reward.values) else None
    if severity:
        means = tenths(reward.values)
        change = change_text(means[0], means[-1])
        cause = f"{cause}; the reward rose after that ({change}, {TENTHS_OF_STEPS})"
    return finding.failed(STEP_TOO_LARGE, cause, severity=severity, onset=kl.steps[row], quantities=["kl"])


LARGE_KL = 1.0
"""KL to the reference (nats per token) at the end of a run above which the policy has drifted away from it."""

MANY_ABOVE = 0.1
"""Share of log steps above `LARGE_KL` from which it is not said that the policy stays near the reference."""

UNBOUNDED_KL = 100.0
"""KL to the reference (nats per token) above which the drift has severity ``stop``."""

PEAK = 10.0
"""Factor from which the largest KL is named beside that of the end."""

RECENT_ROWS = 3
"""Number of rows for which a KL that was above its limit is still mentioned."""

END_ROWS = 3
"""Smallest number of rows at the end whose median decides. One row may be a rare large value of the estimator."""

KL_DRIFT = Kind(
    code="kl-drift",
    severity="fix",
    meaning="the policy has drifted away from the reference",
    condition=(
        f"the KL divergence to the reference is above {LARGE_KL:g} nat per token: the median of the last "
        "tenth, or that of the later half, as single log steps can be a thousand times the others. If it was "
        f"above it up to {RECENT_ROWS} log steps ago, this is worth a look"
    ),
    remedy="lower the learning rate{learning rate} or raise the weight of the KL term{KL term}",
    resume=", and",
    settings=("KL term",),
    is_in_the_weights=True,
    is_effect_of_large_steps=True,
    evidence=("kl",),
    source="logs of Ning-Guo/hotpotqa-agent and alexchilton/CAS_NLP_MODULE4_GRPO",
    scenarios=("KL drifts to several nats", "KL leaves all bounds"),
)


@LOGS.check(
    "KL to the reference",
    after="share of clipped tokens",
    tested="the policy stays near the reference",
    explained="the policy stays near the reference",
    reports=(KL_DRIFT, OTHER_REFERENCE),
)
def check_divergence(case: Case) -> Finding:
    """Check that the KL to the reference is not large in the later half of the run, nor at its end."""
    kl = case.course.series("kl")
    if len(kl.values) < FEW_STEPS:
        return lacks_rows(case.course, FEW_STEPS, "kl")
    finding = passed_check(kl, kl.last, "mean KL to the reference in the last tenth", last_tenth(kl))
    if not _is_large(kl.values):
        lengths = range(len(kl.values) - 1, max(FEW_STEPS, len(kl.values) - RECENT_ROWS) - 1, -1)
        recent = next((length for length in lengths if _is_large(kl.values[:length])), None)
        if recent is not None:
            # A KL that hovers about its limit would otherwise be a fault in one log step and "ok" in the next.
            row = max(row for row in range(recent) if kl.values[row] > LARGE_KL)
            step = kl.steps[row]
            cause = (
                f"KL to the reference was {format_number(kl.values[row])} nats per token at step {format_step(step)}, "
                f"and is {format_number(kl.last)} in the last tenth"
            )
            measure = "KL to the reference in this log step"
            finding = passed_check(kl, kl.values[row], measure, slice(row, row + 1))
            return finding.failed(KL_DRIFT, cause, severity="look", onset=step, quantities=["kl"])
        rows_above = sum(value > LARGE_KL for value in kl.values)
        if kl.last > LARGE_KL or rows_above > MANY_ABOVE * len(kl.values):
            return near_limit(
                f"the KL to the reference of {rows_above} of {len(kl.values)} log steps is above {LARGE_KL:g}"
            )
        return finding

    grew = kl.last > 3 * abs(kl.values[0]) + 0.1 and kl.last > LARGE_KL
    if not grew and case.of(check_reference).ok is False:
        return undecided_check("the KL is large from the first log step on, which another finding reports")
    if kl.last <= LARGE_KL:
        late = median(kl.later_half)
        finding = passed_check(kl, late, "median KL to the reference in the later half", later_half(kl))
        if late <= LARGE_KL:
            rows = _end_rows(kl.values)
            measure = "median KL to the reference in the last log steps"
            finding = passed_check(kl, median(kl.values[rows]), measure, rows)
    start = earliest_onset(kl, lambda mean: mean > LARGE_KL)
    first = first_window(kl, lambda mean: mean > LARGE_KL)
    before = ""
    if first is not None and start is not None and first[0] < start:
        before = f"; the first mean of {first[1]} log steps above {LARGE_KL:g} begins at step {format_step(first[0])}"
    severity = "stop" if grew and kl.last > UNBOUNDED_KL else "fix"
    change = change_text(kl.values[0], kl.last)
    if grew:
        cause = f"KL to the reference {change} nats per token, {FIRST_ROW_TO_LAST_TENTH}"
        peak = max(kl.values)
        if peak > PEAK * kl.last:
            step = kl.steps[kl.values.index(peak)]
            cause = f"{cause}, and {format_number(peak)} at step {format_step(step)}"
        cause = f"{cause}{before}"
        return finding.failed(KL_DRIFT, cause, severity=severity, onset=start, quantities=["kl"])
    rows_above = sum(value > LARGE_KL for value in kl.values)
    cause = (
        f"KL to the reference is above {format_number(LARGE_KL)} in {rows_above} of {len(kl.values)} log steps "
        f"({change}, {FIRST_ROW_TO_LAST_TENTH}): the policy is far from the reference"
    )
    kinds = [KL_DRIFT]
    if _is_far_from_the_start(kl):
        # A distance that does not grow is more likely that of two models than a drift.
        is_of_models = kl.last <= kl.first and kl.values[0] <= MOST_OF_ANOTHER_MODEL
        kinds = [OTHER_REFERENCE, KL_DRIFT] if is_of_models else [KL_DRIFT, OTHER_REFERENCE]
    return finding.failed(kinds[0], cause, *kinds[1:], severity=severity, onset=start, quantities=["kl"])


def _end_rows(values: Sequence[float]) -> slice:
    """Return the rows at the end whose median decides: the last tenth, and at least `END_ROWS`."""
    return slice(-max(END_ROWS, len(values) // 10), None)


def _is_large(values: Sequence[float]) -> bool:
    """Return whether the KL is above its limit, at the end or in the later half."""
    end = median(values[_end_rows(values)])
    late = median(values[len(values) // 2 :])
    return max(end, late) > LARGE_KL


def _is_far_from_the_start(kl: Series) -> bool:
    """Return whether the KL is large in the first log step already, so that it may never have been small."""
    return kl.values[0] > LARGE_KL
