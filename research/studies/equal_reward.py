"""Entropy at equal reward: what is left of it when a given share of the answers is right.

A rule that learns sooner has less entropy after the same number of batches, whatever it does to entropy. So runs are
compared where their rewards are equal. The comparison was found after the runs had ended, and was not predicted.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from bandpo_lab.interval import Interval, student

LEVELS = (0.3, 0.6, 0.9)
"""The mean rewards at which entropies are compared."""
WINDOW = 5
"""The number of batches over which reward and entropy are averaged."""


class EqualReward(NamedTuple):
    """The mean difference of two arms at equal reward, paired by learning rate and seed."""

    interval: Interval
    """The mean over seeds with Student's interval at 95 %, each seed being the mean over its rates."""
    pairs: int
    """The number of pairs in which both runs reached the reward."""
    seeds: int
    """The number of seeds with such a pair."""


def entropy_at(rewards: ArrayLike, entropies: ArrayLike, level: float) -> float:
    """Return the mean entropy of the first five batches whose mean reward is at least ``level``.

    Args:
        rewards: The mean reward of each batch, shape (batches,).
        entropies: The entropy of each batch in nats a token, shape (batches,).
        level: The reward to reach.

    Returns:
        The entropy in nats a token; NaN if no five consecutive batches reach the reward.

    >>> entropy_at([0, 0, 1, 1, 1, 1], [3.0, 3.0, 2.0, 2.0, 2.0, 1.0], 0.6)
    2.4
    """
    weights = np.full(WINDOW, 1 / WINDOW)
    means = np.convolve(np.asarray(rewards, dtype=np.float64), weights, "valid")
    reached = means >= level - 1e-9
    if not reached.any():
        return float("nan")
    first = int(reached.argmax())
    return float(np.mean(np.asarray(entropies)[first : first + WINDOW]))


def compare_at_equal_reward(entropies: np.ndarray, baseline: np.ndarray) -> EqualReward | None:
    """Return the difference of two arms' entropies at equal reward; None if fewer than two seeds have a pair.

    Args:
        entropies: The entropy of an arm at a reward, shape (rates, seeds); NaN where the reward was not reached.
        baseline: The same for the arm to subtract.

    >>> compare_at_equal_reward(np.array([[1.0, 2.0, np.nan]]), np.array([[0.5, 1.5, 1.0]]))
    EqualReward(interval=Interval(value=0.5, low=0.5, high=0.5), pairs=2, seeds=2)
    """
    differences = np.asarray(entropies) - np.asarray(baseline)
    known = np.isfinite(differences)
    by_seed = [
        float(seed[finite].mean())
        for seed, finite in zip(differences.T, known.T, strict=True)
        if finite.any()
    ]
    if len(by_seed) < 2:
        return None
    return EqualReward(student(by_seed), int(known.sum()), len(by_seed))


def metric_name(level: float) -> str:
    """Return the name of the metric in the reports of the studies.

    >>> metric_name(0.3)
    'entropy at reward 0.3'
    """
    return f"entropy at reward {level:g}"
