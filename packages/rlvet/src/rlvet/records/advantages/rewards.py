"""Check that rewards depend on the answer."""

from __future__ import annotations

import math

import numpy as np

from rlvet._numbers import format_number, format_share
from rlvet.checks.findings import Finding, Kind
from rlvet.records.advantages.groups import group_index, unusual_sizes
from rlvet.records.advantages.statistics import MIN_PAIRS, distinct_index, means_by_index
from rlvet.records.recorded_advantages import NO_TOKEN, RecordCase
from rlvet.records.registry import ADVANTAGES

NOISE_SHARE = 0.5
"""Variance of the rewards of equal answers, as a share of that of all answers to a prompt, from which the reward is
noise. The share is 1 if the reward does not depend on the answer."""

NOISE_OF_RANGE = 0.1
"""Standard deviation of the rewards of equal answers, as a share of the range of all rewards, below which their noise
is small."""

REWARD_NOISE = Kind(
    code="reward-noise",
    severity="fix",
    meaning="rewards hardly depend on the answer",
    condition=(
        f"rewards of the same answer to one prompt have at least {NOISE_SHARE:.0%} of the variance of all "
        "answers to it"
    ),
    remedy="score the same answers twice: a reward that does not depend on them cannot be learned",
    evidence=("reward", "group", "tokens"),
    source="the definition of a variance",
    scenarios=("random reward",),
)


@ADVANTAGES.check(
    "noise of the rewards",
    after="formula of the advantages",
    tested="rewards depend on the answer (share of their variance that equal answers have)",
    explained="in a record, equal answers get equal rewards",
    reports=(REWARD_NOISE,),
)
def check_rewards(case: RecordCase) -> Finding:
    """Check that rewards of equal answers to one prompt differ less than those of different answers."""
    recorded = case.recorded
    has_data = (
        ~np.isnan(recorded.reward + recorded.group) & (recorded.answer != NO_TOKEN) & (recorded.length > 0)
    )
    data = recorded.select(has_data)
    prompt = group_index(data)
    answer = distinct_index(prompt, data.answer)
    sizes = np.bincount(answer) if len(answer) else np.zeros(0, np.int64)
    pairs = int((sizes * (sizes - 1) // 2).sum())
    if pairs < MIN_PAIRS:
        return Finding("ok", None, "", advice="needs reward=, group=, tokens= and answers that are equal")

    # Variance of the rewards of equal answers, and of all answers to a prompt.
    is_repeated = sizes[answer] > 1
    answer_freedom = float((sizes[sizes > 1] - 1).sum())
    answer_squares = np.square(data.reward - means_by_index(data.reward, answer)[answer])
    noise = float(answer_squares[is_repeated].sum()) / answer_freedom
    prompt_freedom = float((np.bincount(prompt) - 1).sum())
    prompt_squares = np.square(data.reward - means_by_index(data.reward, prompt)[prompt])
    variance = float(prompt_squares.sum()) / max(1.0, prompt_freedom)
    share = noise / variance if variance > 0 else 0.0
    value_range = float(data.reward.max() - data.reward.min())
    measure = "share of the variance of rewards that answers with the same text have"
    passed = Finding("ok", True, "", share, None, pairs, measure=measure)
    if share < NOISE_SHARE or math.sqrt(noise) < NOISE_OF_RANGE * value_range:
        return passed
    split = case.of(unusual_sizes)
    if split:  # equal answers to different prompts
        return Finding("ok", None, "", advice=split)
    cause = (
        f"rewards of the same answer to one prompt differ by {format_number(math.sqrt(noise), 2)} (standard "
        f"deviation), which is {format_share(share)} of the variance among all answers to it"
    )
    return passed.failed(REWARD_NOISE, cause)
