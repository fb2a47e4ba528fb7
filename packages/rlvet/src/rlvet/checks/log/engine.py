"""Checks of the engine that samples the data: its distance from the trainer, its weights, and importance weights.

Three causes of a distance are told apart by its course. Another precision, kernel or sampler gives a distance that is
there from the first step on and stays. Data of a bounded age gives one that grows for as many updates as the data is
old, and then stays. An engine that never receives new weights gives one that grows with the learning rate that was
spent, and that never falls back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from statistics import fmean, median
from typing import NamedTuple

from rlvet._numbers import format_number, format_step
from rlvet.checks.course import Case, Course, Series, first_window, onset
from rlvet.checks.findings import Finding, Kind
from rlvet.checks.liveness import Streak, streaks_of
from rlvet.checks.log.results import (
    FEW_STEPS,
    TENTHS,
    change_text,
    last_tenth,
    passed_check,
    undecided_check,
)
from rlvet.checks.registry import LOGS
from rlvet.runs.setup import Setup


class Distance(NamedTuple):
    """A logged distance between the probabilities of engine and trainer."""

    limit: float
    """The value at the end above which engine and trainer differ by more than rounding."""
    floor: float
    """The value up to which the distance may be rounding in bfloat16, so that its growth is not judged."""
    growth: float
    """The factor of its growth over a run from which the weights of the engine are in question."""
    description: str
    """Its name in a sentence."""


DISTANCES = {
    "mismatch_kl": Distance(0.05, 5e-4, 8.0, "KL between engine and trainer"),
    "mismatch": Distance(
        0.1, 0.01, 4.0, "mean distance of the engine's log-probabilities from the trainer's"
    ),
    "mismatch_probs": Distance(
        0.05, 0.005, 4.0, "mean distance of the engine's probabilities from the trainer's"
    ),
}
"""The distances by quantity. A KL grows with the square of a change of the weights, so its factor is larger. In the
logs and records of ``benchmarks/doctor`` with the same weights on both sides, ten parts of a run differ by a factor of
1.2 to 2.5. verl-project/verl issue 7495 reports a growth of the KL by a factor of 36, below its limit."""

FAR_WEIGHT = 2.0
"""Factor by which the mean importance weight per token between engine and trainer may differ from 1."""

ENGINE_MISMATCH = Kind(
    code="engine-mismatch",
    severity="fix",
    meaning="engine and trainer compute different probabilities from the same weights",
    condition=(
        "at the end of the run, the KL divergence between engine and trainer is above "
        f"{DISTANCES['mismatch_kl'].limit:g}, the mean distance of log-probabilities above "
        f"{DISTANCES['mismatch'].limit:g} or of probabilities above {DISTANCES['mismatch_probs'].limit:g}, "
        f"or the mean importance weight of a token is beyond a factor of {FAR_WEIGHT:g}; as `look` if a distance is "
        "ten times its usual value, and above its limit, in three or more log steps in a row"
    ),
    remedy="compute logp_old with the trainer, or run the engine in the trainer's precision",
    evidence=("mismatch_kl", "mismatch", "mismatch_probs", "importance_weight", "staleness"),
    source="arXiv:2510.26788; rounding to bfloat16 and to 8 bits in `benchmarks/doctor`",
    scenarios=("engine departs, reward falls", "bfloat16 bypass", "engine in 8 bits"),
)

STALE = 4.0
"""Mean age of the data, in updates, above which it is reported."""

STALE_WEIGHTS = Kind(
    code="stale",
    severity="fix",
    meaning="the engine samples from weights that are some updates old",
    condition=(
        f"data is more than {STALE:g} updates old on average; in a record, old data differs from the trainer "
        "and fresh data does not"
    ),
    remedy=(
        "push weights to the engine more often, or allow less lag; until then weight the loss by a "
        "truncated π_old/π_rollout"
    ),
    evidence=("staleness",),
    source=(
        "arXiv:2505.24298, thinking-machines-lab/tinker-cookbook pull request 822; "
        "simulated delays of `benchmarks/doctor`"
    ),
    scenarios=("stale by four, with versions", "stale"),
)


FEWEST_ROWS = 8
"""Smallest number of rows in which the growth of a distance is judged. huggingface/trl issue 5312 has ten."""

FEWEST_ROWS_OF_STALE_DATA = 24
"""The same if the data is known to be old and its age is not logged: the distance grows until that age is reached."""

START_ROWS = 3
"""Number of rows at the start whose median is the distance before training. A tenth of a run is much training."""

FULL_AGE = 0.9
"""Share of the largest age from which data has reached its age, so that the distance should not grow any more."""

LARGEST_FALL = 0.3
"""Share by which a part of the run may lie below an earlier part. New weights reset the distance to its start."""

RESET = 0.3
"""Share of the three values before it below which a value is a reset. The noise of batches, 0.15 in the logarithm in
the real loop of ``tests/helpers/sync_loop.py``, does not reach it."""

EARLY_PART = 0.1
"""Smallest share of the growth by half of the learning rate. A quadratic growth has a quarter of it there. A distance
that begins to grow later has another cause than weights that were old from the second step on."""

LATE_PART = 0.15
"""Smallest share of the growth after half of the learning rate. A growth with the square root has 0.29 of it there. A
distance to data of a bounded age has none."""

FEW_SAMPLES = 0.5
"""Effective sample size, as a share of all samples, below which its fall is mentioned."""

WEIGHT_SYNC = Kind(
    code="weight-sync",
    severity="fix",
    meaning="the engine never receives new weights",
    condition=(
        "a distance between engine and trainer grows with the learning rate that was spent, and never falls "
        "back"
    ),
    remedy=(
        "after a push of weights, compare a hash of one trained tensor in the engine with that in the "
        "trainer (docs/diagnose.md has the code); if they differ, the push fails: check its result, and "
        "with LoRA that the merged or newly named adapter is the one that samples"
    ),
    evidence=("mismatch_kl", "mismatch", "mismatch_probs", "effective_samples"),
    source=(
        "verl-project/verl issue 7495, huggingface/trl issue 5312, radixark/miles pull requests 684 and 1727"
    ),
    scenarios=("weights never synced", "adapters never synced", "weight sync dead, versions fresh"),
)


@LOGS.check(
    "agreement of the engine with the trainer",
    after="the reference of the KL term",
    tested="engine and trainer agree, as logged",
    explained="their probabilities are close, and data is not old",
    reports=(WEIGHT_SYNC, ENGINE_MISMATCH, STALE_WEIGHTS),
)
def check_agreement(case: Case) -> Finding:
    """Check that the logged distances are small, do not grow with training, and that data is not too old."""
    course, setup = case.course, case.setup
    synchronisation = _check_synchronisation(course, setup)
    if synchronisation is not None:
        return synchronisation

    finding = undecided_check("no distance of the two is logged")
    unclear = []
    ages = course.series("staleness").values
    mean_age = fmean(ages) if ages else 0.0
    age_text = ""
    age_quantities = []
    if mean_age >= 1:
        age_text = f"; data is {format_number(mean_age, 2)} updates old on average"
        age_quantities = ["staleness"]

    for name, distance in DISTANCES.items():
        metric = course.series(name)
        if not metric.values:
            continue
        finding = passed_check(metric, metric.last, f"{distance.description}, last tenth", last_tenth(metric))
        late = fmean(metric.later_half)
        if metric.last > distance.limit and late > distance.limit / 2:
            cause = f"{distance.description}: {change_text(metric.first, metric.last)}, {TENTHS}{age_text}"
            start = onset(metric, lambda mean, limit=distance.limit: mean > limit)
            quantities = [name, *age_quantities]
            return finding.failed(ENGINE_MISMATCH, cause, STALE_WEIGHTS, onset=start, quantities=quantities)
        if max(metric.last, late) > distance.limit:
            means = f"{format_number(late, 2)} in the later half, {format_number(metric.last, 2)} in the last tenth"
            unclear.append(f"{distance.description} is {means}, on both sides of {distance.limit:g}")
        elif _grew(metric, distance):
            change = change_text(metric.first, metric.last)
            unclear.append(f"{distance.description} grew {change}, {TENTHS}, and is still small")

    weight = course.series("importance_weight")
    if weight.values and set(weight.values) == {1.0} and finding.ok is None:
        finding = undecided_check("the importance weight is 1 in each row, as one that is not computed")
    elif weight.values and _weight_level(course, setup) == "token":
        if finding.ok is None:
            measure = "mean importance weight, last tenth"
            finding = passed_check(weight, weight.last, measure, last_tenth(weight))
        if not 1 / FAR_WEIGHT <= weight.last <= FAR_WEIGHT:
            if len(weight.values) >= FEW_STEPS:
                return _far_weight(weight, age_text, age_quantities)
            unclear.append(f"the mean importance weight is {format_number(weight.last, 2)} in few rows")

    if mean_age > STALE:
        cause = f"data is {format_number(mean_age, 2)} updates old on average"
        finding = passed_check(course.series("staleness"), mean_age, "mean age of the data in updates")
        start = onset(course.series("staleness"), lambda mean: mean > STALE)
        return finding.failed(STALE_WEIGHTS, cause, severity="look", onset=start, quantities=["staleness"])
    for name, distance in DISTANCES.items():
        for streak in streaks_of(course, name):
            if streak.state == "high" and streak.evidence >= CLEAR_PART:
                return _far_part(course, name, distance, streak)
    if unclear:
        return undecided_check("; ".join(unclear))
    return finding


CLEAR_PART = math.log(50)
"""Logarithm of the number of courses, of which one has as many far rows by chance, from which they are told."""


def _far_part(course: Course, name: str, distance: Distance, streak: Streak) -> Finding:
    """Return the finding on some rows in which engine and trainer were far apart, though they are near in others."""
    first, last = (course.rows[row]["step"] for row in (streak.first, streak.last))
    change = change_text(streak.before, streak.value)
    cause = f"{distance.description}: {change}, from step {format_step(first)} to {format_step(last)}"
    measure = f"{distance.description}, in these log steps"
    finding = Finding("ok", True, "", streak.value, None, streak.rows, steps=(first, last), measure=measure)
    return finding.failed(ENGINE_MISMATCH, cause, severity="look", onset=first, quantities=[name])


def _check_synchronisation(course: Course, setup: Setup) -> Finding | None:
    """Return a finding if a distance grows with training and never falls back; None if none does."""
    for name, distance in DISTANCES.items():
        metric = _without_single_rows(_rows_of_full_age(course.series(name), course.series("staleness")))
        fewest = FEWEST_ROWS
        if setup.stale and not course.series("staleness").values:
            fewest = FEWEST_ROWS_OF_STALE_DATA
        if len(metric.values) < fewest:
            continue
        means, spent = _parts(metric, course)
        start_rows = max(START_ROWS, len(metric.values) // 50)
        first = median(metric.values[:start_rows])
        is_growing = metric.last >= distance.growth * first and _grows_with_training(means, spent)
        if metric.last <= distance.floor or not is_growing or _is_reset(metric.values):
            continue
        factor = f"{metric.last / first:.0f}-fold, " if first > 0 else ""
        start_steps = f"{format_step(metric.steps[0])} to {format_step(metric.steps[start_rows - 1])}"
        cause = (
            f"{distance.description} grew {change_text(first, metric.last)}, {factor}from steps {start_steps} to the "
            "last tenth, in step with the training, and never fell back: the engine seems to keep its first weights"
        )
        quantities = [name]
        samples = course.series("effective_samples")
        if samples.values and samples.last < FEW_SAMPLES and samples.last < samples.first:
            cause = f"{cause}; the effective sample size fell {change_text(samples.first, samples.last)}, {TENTHS}"
            quantities.append("effective_samples")
        finding = passed_check(metric, metric.last, f"{distance.description}, last tenth", last_tenth(metric))
        # The first part of the run from which on all are above twice the start.
        part = next(row for row in range(len(means)) if min(means[row:]) > 2 * first)
        start = metric.steps[part * len(metric.values) // len(means)]
        return finding.failed(WEIGHT_SYNC, cause, ENGINE_MISMATCH, onset=start, quantities=quantities)
    return None


def _without_single_rows(metric: Series) -> Series:
    """Return a metric whose values are medians with both neighbours, without single rows far from the others."""
    values = list(metric.values)
    for row in range(1, len(values) - 1):
        values[row] = sorted(metric.values[row - 1 : row + 2])[1]
    return Series(metric.steps, values)


def _rows_of_full_age(metric: Series, ages: Series) -> Series:
    """Return the part of a metric from which on the data has about its largest age; all of it if no age is logged."""
    if not ages.values or max(ages.values) < 1:
        return metric
    limit = FULL_AGE * max(ages.values)
    start = next(step for step, age in ages.points if age >= limit)
    return metric.since(start)


def _parts(metric: Series, course: Course) -> tuple[list[float], list[float]]:
    """Return the means of up to ten parts of a metric, and the learning rate that was spent by the middle of each.

    The learning rate that was spent is the sum of learning rate × steps; the steps themselves if no rate is logged.
    """
    rates = course.series("learning_rate")
    rate_of_step = dict(rates.points)
    spent = [0.0]
    rate = 0.0
    for before, after in pairwise(metric.steps):
        rate = rate_of_step.get(after, rate) if rates.values else 1.0
        spent.append((after - before) * rate)
    spent = list(accumulate(spent))

    count = min(10, len(metric.values) // 2)
    edges = [part * len(metric.values) // count for part in range(count + 1)]
    means = [fmean(metric.values[a:b]) for a, b in pairwise(edges)]
    spent_means = [fmean(spent[a:b]) for a, b in pairwise(edges)]
    return means, spent_means


def _grows_with_training(means: Sequence[float], spent: Sequence[float]) -> bool:
    """Check whether a distance grows without a reset, in both halves of the learning rate that was spent."""
    first = means[0]
    last = means[-1]
    if last <= first or spent[-1] <= 0:
        return False
    highest = first
    for mean in means[1:]:
        if mean < (1 - LARGEST_FALL) * highest:
            return False
        highest = max(highest, mean)
    half = (spent[0] + spent[-1]) / 2
    middle = min(range(len(spent)), key=lambda part: abs(spent[part] - half))
    growth = last - first
    return means[middle] - first >= EARLY_PART * growth and last - means[middle] >= LATE_PART * growth


def _is_reset(values: Sequence[float]) -> bool:
    """Return whether a distance falls at once, as after a sync of the weights."""
    return any(values[row] < RESET * median(values[row - 3 : row]) for row in range(3, len(values)))


def _grew(metric: Series, distance: Distance) -> bool:
    """Return whether a distance grew by the factor from which it is not called small any more."""
    return metric.last > distance.floor and metric.last > distance.growth * metric.first / 2


UNEXPLAINED = 2.0
"""A mean weight is not that of tokens if its logarithm is more than this many times the mean distance of the tokens'
log-probabilities. The mean weight of tokens is at least exp(−distance), by Jensen's inequality."""

ROUNDING_OF_WEIGHTS = 0.05
"""Logarithm of a mean weight up to which it is 1 but for rounding and noise."""


def _weight_level(course: Course, setup: Setup) -> str:
    """Return the level of the logged importance weights, ``token`` or ``sequence``."""
    value = setup.values.get("weight level")
    if value is not None:
        return "sequence" if str(value.value).startswith("seq") else "token"
    weight = course.series("importance_weight")
    distance = course.series("mismatch")
    if not weight.values or not distance.values or weight.last <= 0:
        return "token"
    if distance.last > DISTANCES["mismatch"].limit:
        return "token"
    if _is_unexplained(weight.last, distance.last):
        return "sequence"
    pairs = zip(
        course.series("importance_weight", "mismatch").values,
        course.series("mismatch", "importance_weight").values,
        strict=True,
    )
    is_sequence = sum(one > 0 and _is_unexplained(one, of_tokens) for one, of_tokens in pairs) >= FEW_STEPS
    return "sequence" if is_sequence else "token"


def _is_unexplained(weight: float, distance: float) -> bool:
    """Return whether a mean weight is farther from 1 than the distance of tokens explains.

    >>> _is_unexplained(0.7, 0.01), _is_unexplained(0.99, 0.01)
    (True, False)
    """
    return abs(math.log(weight)) > UNEXPLAINED * distance + ROUNDING_OF_WEIGHTS


def _far_weight(weight: Series, age_text: str, age_quantities: Sequence[str]) -> Finding:
    """Return the finding on a mean importance weight of tokens that is far from 1."""
    cause = f"the mean importance weight between engine and trainer is {format_number(weight.last)}{age_text}"
    start = onset(weight, lambda mean: not 1 / FAR_WEIGHT <= mean <= FAR_WEIGHT)
    finding = passed_check(weight, weight.last, "mean importance weight, last tenth", last_tenth(weight))
    quantities = ["importance_weight", *age_quantities]
    return finding.failed(ENGINE_MISMATCH, cause, STALE_WEIGHTS, onset=start, quantities=quantities)


FAR_SEQUENCE_WEIGHT = 1.25
"""The same for the weight of a sequence. Its mean is 1 unless weights are truncated or masked, which is a loss of
gradient: huggingface/trl issue 5814 reports 0.4 to 0.7 where engine and trainer agree, and issue 4772 2.9."""

MOST_FAR = 1 / 3
"""Share of log steps with a weight beyond it up to which a run whose end has none passes."""

GROWN = 1.5
"""Growth of the distance of tokens from which it is told beside the weights of their sequences."""

SEQUENCE_WEIGHTS = Kind(
    code="sequence-weights",
    severity="look",
    meaning="the importance weights of sequences are far from 1, though their tokens agree",
    condition=(
        f"the mean importance weight of a sequence is beyond a factor of {FAR_SEQUENCE_WEIGHT:g}, though its "
        "tokens agree"
    ),
    remedy=(
        "weight each token by itself{importance weights}, in TRL by token_truncate, or each sequence by the geometric "
        "mean of its tokens, where the trainer has that; else truncated or masked answers lose gradient"
    ),
    evidence=("importance_weight", "mismatch"),
    source="huggingface/trl issues 4772 and 5814",
    scenarios=("truncated weights of sequences",),
)


@LOGS.check(
    "importance weights of sequences",
    after="agreement of the engine with the trainer",
    tested="importance weights of sequences keep the gradient",
    explained="the weights of whole sequences are near 1; only for a method that has them",
    reports=(SEQUENCE_WEIGHTS,),
)
def check_weights(case: Case) -> Finding:
    """Check that the importance weights of sequences keep the size of the gradient."""
    course, setup = case.course, case.setup
    weight = course.series("importance_weight")
    if not weight.values:
        return undecided_check("not logged")
    if _weight_level(course, setup) != "sequence":
        if "weight level" in setup.values:
            return undecided_check("the logged weights are of tokens")
        return undecided_check("neither values nor settings tell that the logged weights are of sequences")
    measure = "mean importance weight of a sequence, last tenth"
    finding = passed_check(weight, weight.last, measure, last_tenth(weight))
    if 1 / FAR_SEQUENCE_WEIGHT <= weight.last <= FAR_SEQUENCE_WEIGHT:
        far = sum(not 1 / FAR_SEQUENCE_WEIGHT <= value <= FAR_SEQUENCE_WEIGHT for value in weight.values)
        if far <= MOST_FAR * len(weight.values):
            return finding
        return undecided_check(
            f"{far} of {len(weight.values)} log steps have a mean weight beyond a factor of {FAR_SEQUENCE_WEIGHT:g}, "
            "but not the last ones"
        )
    if len(weight.values) < FEW_STEPS:
        return undecided_check(f"needs at least {FEW_STEPS} log steps")
    cause = f"the mean importance weight of a sequence is {format_number(weight.last)}"
    distance = course.series("mismatch")
    if distance.values:
        size = format_number(distance.last)
        if distance.last > GROWN * distance.first:
            size = f"{change_text(distance.first, distance.last)}, {TENTHS},"
        cause = f"{cause}, while log-probabilities of its tokens differ by {size} on average"
    cause = (
        f"{cause}: the weight of a sequence is the product of those of its tokens, so it leaves 1 as answers grow "
        "or engine and trainer part, and truncated or masked weights lose gradient"
    )

    def is_far(value: float) -> bool:
        return not 1 / FAR_SEQUENCE_WEIGHT <= value <= FAR_SEQUENCE_WEIGHT

    start = onset(weight, is_far, is_far)
    first = first_window(weight, is_far)
    if first is not None and start is not None and first[0] < start:
        mean = f"the first mean of {first[1]} log steps beyond a factor of {FAR_SEQUENCE_WEIGHT:g}"
        cause = f"{cause}; {mean} begins at step {format_step(first[0])}"
    return finding.failed(SEQUENCE_WEIGHTS, cause, onset=start, quantities=["importance_weight"])
