"""Compute the advantages of each known estimator from rewards and groups."""

from __future__ import annotations

import numpy as np

from rlvet._numbers import format_number
from rlvet.records.advantages.statistics import means_by_index
from rlvet.records.recorded_advantages import Floats, Integers

GROUP_ESTIMATORS = ("GRPO", "GRPO (standard deviation with n)", "Dr. GRPO", "RLOO")
"""The estimators that compare an answer only with the answers to the same prompt."""

BATCH_ESTIMATORS = ("batch normalisation", "batch normalisation over tokens", "the batch's mean as baseline")
"""The estimators that compare an answer with all answers of the batch."""

EPSILONS = (1e-4, 1e-6)
"""The constants that are added to a standard deviation: that of TRL, and that of verl and others."""


def estimators(reward: Floats, group: Integers, batch: Integers, length: Integers) -> dict[str, Floats]:
    """Compute the advantages of each known estimator.

    Args:
        reward: Reward of each sequence, (sequences,).
        group: Index of each sequence's group, (sequences,).
        batch: Index of each sequence's batch, (sequences,).
        length: Number of tokens of each sequence, (sequences,).

    Returns:
        For each estimator, by its name, the advantages, (sequences,).
    """
    # Rewards less the mean of their group, with 0 in place of rounding errors.
    sizes = np.bincount(group)[group].astype(np.float64)
    baseline = means_by_index(reward, group)[group]
    group_centred = reward - baseline
    group_centred = np.where(np.abs(group_centred) <= 1e-6 * np.abs(baseline), 0.0, group_centred)
    variance = means_by_index(group_centred**2, group)[group]
    sample_variance = variance * sizes / np.maximum(sizes - 1, 1)

    # Rewards less the mean of their batch, over sequences and over tokens.
    batch_sizes = np.bincount(batch)[batch].astype(np.float64)
    batch_centred = reward - means_by_index(reward, batch)[batch]
    batch_variance = (
        means_by_index(batch_centred**2, batch)[batch] * batch_sizes / np.maximum(batch_sizes - 1, 1)
    )
    tokens = length.astype(np.float64)
    token_centred = reward - means_by_index(reward, batch, tokens)[batch]
    token_variance = means_by_index(token_centred**2, batch, tokens)[batch]

    # The baseline of OPO: the mean reward of the group, weighted by length.
    opo_baseline = means_by_index(reward * tokens, group)[group] / np.maximum(
        means_by_index(tokens, group)[group], 1e-9
    )

    values: dict[str, Floats] = {}
    for epsilon in EPSILONS:
        text = "" if epsilon == EPSILONS[0] else f" (epsilon {format_number(epsilon, 6)})"
        values[f"GRPO{text}"] = group_centred / (np.sqrt(sample_variance) + epsilon)
        values[f"GRPO (standard deviation with n){text}"] = group_centred / (np.sqrt(variance) + epsilon)
    values["Dr. GRPO"] = group_centred
    values["RLOO"] = group_centred * sizes / np.maximum(sizes - 1, 1)
    batch_deviation = np.sqrt(batch_variance) + 1e-6
    values["the group's mean over the batch's standard deviation"] = group_centred / batch_deviation
    values["batch normalisation"] = batch_centred / batch_deviation
    values["batch normalisation over tokens"] = token_centred / (np.sqrt(token_variance) + 1e-6)
    values["the batch's mean as baseline"] = batch_centred
    values["OPO"] = reward - opo_baseline
    values["the reward without a baseline"] = reward
    return values


def estimator_family(name: str) -> str:
    """Return the name of an estimator without its epsilon, its factor and its scope."""
    scopes = (" over all processes", " in groups of several batches", " within each process")
    for addition in (" (epsilon", " times ", *scopes):
        name = name.partition(addition)[0]
    return name
