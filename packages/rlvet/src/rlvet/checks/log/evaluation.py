"""Check the score on other prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from statistics import median

from rlvet.checks.course import Case, Series, end_means, noise_of_differences, onset, rise_in_errors
from rlvet.checks.findings import Finding, Kind
from rlvet.checks.log.results import FEW_STEPS, change_text, lacks_rows, passed_check
from rlvet.checks.registry import LOGS
from rlvet.runs.quantities import EVALUATION

REWARD_HACKED = Kind(
    code="reward-hacked",
    severity="fix",
    meaning="the reward rises while the score on other prompts falls",
    condition=(
        "the score on other prompts falls by a tenth and by more than its noise, while the reward rises"
    ),
    remedy=(
        "read answers with a high reward from the end of the run, and use the checkpoint with the best "
        "score on other prompts"
    ),
    is_in_the_weights=True,
    evidence=("evaluation", "reward"),
    source="arXiv:2210.10760; simulated runs of `benchmarks/doctor` and of `rldoctor`",
    scenarios=("evaluation falls as reward rises",),
)


@LOGS.check(
    "a score on other prompts",
    after="entropy of the policy",
    tested="the score on other prompts does not fall while the reward rises",
    explained="while the reward rises, the score on prompts outside the training set does not fall",
    reports=(REWARD_HACKED,),
)
def check_evaluation(case: Case) -> Finding:
    """Check that the score on other prompts does not fall while the reward rises."""
    course = case.course
    score = course.series(EVALUATION)
    reward = course.series("reward")
    if len(score.values) < 5 or len(reward.values) < 5:
        return lacks_rows(course, 5, EVALUATION, "reward")
    # Running means of the score: the best, and the last.
    window = max(2, len(score.values) // 6)
    sums = [0.0, *accumulate(score.values)]
    means = [(after - before) / window for before, after in zip(sums, sums[window:], strict=False)]
    best = means.index(max(means))
    last = means[-1]
    noise = _noise_without_single_rows(score.values) / math.sqrt(window)
    loss = means[best] - last
    finding = passed_check(score, loss, "fall of the score on other prompts from its best mean")
    largest_loss = max(3 * noise, 0.1 * abs(means[best]))
    fell = loss > largest_loss

    # The reward since the best score.
    start = score.steps[min(best + window - 1, len(score.steps) - 1)]
    later_reward = reward.since(start)
    if not fell or len(later_reward.values) < 6 or rise_in_errors(later_reward) < 3:
        return finding
    reward_before, reward_after = end_means(later_reward.values, 3)
    cause = (
        f"the score on other prompts fell {change_text(means[best], last)} since step {start:.0f}, while the reward "
        f"rose {change_text(reward_before, reward_after)}: the policy exploits the reward (scores: the best mean of "
        f"{window} and the last; rewards: the first third of these steps and the last)"
    )
    after_best = Series(score.steps[best:], score.values[best:])
    fall_start = onset(after_best, lambda mean: mean < means[best] - largest_loss)
    return finding.failed(REWARD_HACKED, cause, onset=fall_start, quantities=[EVALUATION, "reward"])


def _noise_without_single_rows(values: Sequence[float]) -> float:
    """Compute the noise of a score, which one value far from the others hardly changes."""
    noise = noise_of_differences(values)
    if len(values) < FEW_STEPS:
        return noise
    # The median distance between neighbours is 0.954 standard deviations of their values for normal noise.
    usual = median(abs(after - before) for before, after in pairwise(values)) / 0.954
    return min(noise, 2 * math.sqrt(2) * usual)
