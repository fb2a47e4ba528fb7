"""Check that advantages differ between sequences, and that they are of a usual size."""

from __future__ import annotations

import numpy as np

from rlvet._numbers import format_number, format_share
from rlvet.checks.findings import Finding, Kind
from rlvet.checks.log.length import TRUNCATED
from rlvet.checks.log.reward import REWARD_FLAT
from rlvet.checks.log.signal import NO_SIGNAL
from rlvet.records.advantages.masks import share_of_identical
from rlvet.records.advantages.statistics import (
    FEWEST_SEQUENCES,
    MAJORITY,
    NEARLY_ALL,
    distinct_index,
    means_by_index,
)
from rlvet.records.recorded_advantages import RecordCase
from rlvet.records.registry import ADVANTAGES

NO_SIGNAL_SHARE = 0.98
"""Share of sequences with an advantage of 0 from which a batch has no signal."""

FEWEST_PROMPTS = 8
"""Number of prompts with several answers from which identical answers are reported."""

ADVANTAGE_LIMIT = 100.0
"""Advantage above which its scale is wrong. A normalised group of G sequences gives √G at most."""

ADVANTAGE_SCALE = Kind(
    code="advantage-scale",
    severity="fix",
    meaning="advantages are very large",
    condition=f"an advantage is above {ADVANTAGE_LIMIT:g}",
    remedy=(
        "check the divisor of the advantages: a standard deviation near 0, or a missing division by a count"
    ),
    evidence=("advantages",),
    source="a normalised group of G answers has advantages of √G at most",
    scenarios=("advantages times 4000",),
)


@ADVANTAGES.check(
    "advantages that are 0",
    after="prompts in the mask",
    tested="advantages carry signal (share that is 0)",
    explained="in a record, advantages differ, and are of a usual size",
    reports=(NO_SIGNAL, REWARD_FLAT, TRUNCATED, ADVANTAGE_SCALE),
)
def check_signal(case: RecordCase) -> Finding:
    """Check that advantages differ between sequences, and that they are of a usual size."""
    recorded = case.recorded
    has_advantage = ~np.isnan(recorded.advantage)
    if not has_advantage.any():
        return Finding("ok", None, "")

    data = recorded.select(has_advantage)
    zero_shares = means_by_index(data.advantage == 0, distinct_index(data.batch))
    passed = Finding.of("", zero_shares, int(has_advantage.sum()), "share of advantages that are 0")

    identical_share, prompts = share_of_identical(recorded)
    if identical_share >= NEARLY_ALL and prompts >= FEWEST_PROMPTS:
        measure = "share of prompts whose answers are all the same"
        passed = passed._replace(figure=identical_share, error=None, n=prompts, measure=measure)
        cause = (
            f"all answers to a prompt are the same in {format_share(identical_share)} of prompts, as at a sampling "
            "temperature near 0: there is nothing to compare"
        )
        return passed.failed(NO_SIGNAL, cause)

    rewards = data.reward[~np.isnan(data.reward)]
    rewards_are_equal = len(rewards) > 1 and bool((rewards == rewards[0]).all())
    advantages_are_equal = bool((data.advantage == data.advantage[0]).all())
    # If answers below the mean were left out, the others may have equal rewards, with different advantages above 0.
    only_positive = bool((data.advantage > 0).all()) and not advantages_are_equal
    if rewards_are_equal and not only_positive:
        cause = f"every reward is {format_number(float(rewards[0]), 6)}"
        truncated_share = float((data.truncated == 1).mean())
        if truncated_share > MAJORITY:
            measure = "share of answers cut off"
            passed = passed._replace(figure=truncated_share, error=None, measure=measure)
            cause = f"{format_share(truncated_share)} of answers are cut off, and {cause}"
            return passed.failed(TRUNCATED, cause)
        return passed.failed(REWARD_FLAT, f"{cause}, so nothing can be learned")

    if bool((zero_shares >= NO_SIGNAL_SHARE).all()):
        cause = f"{format_share(float(zero_shares.mean()))} of advantages are 0"
        alternatives = () if len(rewards) else (REWARD_FLAT,)
        return passed.failed(NO_SIGNAL, cause, *alternatives)
    if advantages_are_equal and has_advantage.sum() >= FEWEST_SEQUENCES:
        value = float(data.advantage[0])
        cause = f"every advantage is {format_number(value, 6)}, whatever the reward: no answer is preferred"
        passed = passed._replace(figure=value, error=None, measure="value of every advantage")
        return passed.failed(NO_SIGNAL, cause)

    largest = float(np.abs(data.advantage).max())
    if largest > ADVANTAGE_LIMIT:
        cause = (
            f"the largest advantage is {format_number(largest)}; a normalised group gives √(its size) at most"
        )
        passed = passed._replace(figure=largest, error=None, measure="largest absolute advantage")
        return passed.failed(ADVANTAGE_SCALE, cause)
    return passed
