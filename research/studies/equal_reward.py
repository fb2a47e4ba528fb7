"""Entropy at equal reward and at equal step, and how many intervals of a study exclude 0.

At equal step runs are compared after the same number of batches. A rule that learns sooner has less entropy there,
whatever it does to entropy. So runs are also compared at equal reward: what is left of the entropy when a given share
of the answers is right. That leaves out the runs that never come so far. The comparison at equal reward was found after
the runs of SmolLM2 and of stale data had ended, and was not predicted for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from bandpo_lab.output.tables import Table
from bandpo_lab.study.interval import Interval, signed, student

LEVELS = (0.3, 0.6, 0.9)
"""The mean rewards at which entropies are compared."""
WINDOW = 5
"""The number of batches over which reward and entropy are averaged."""
EQUAL_STEP: Mapping[str, float] = {"all batches": 1.0, "second half": 0.5, "last tenth": 0.1}
"""The part of the batches, counted from the end, of which the mean is the entropy at equal step."""


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


def differences_by_seed(entropies: np.ndarray, baseline: np.ndarray) -> list[float]:
    """Return the difference of two arms' entropies by seed, each the mean over the rates at which both are known.

    Args:
        entropies: The entropy of an arm, shape (rates, seeds); NaN where the reward was not reached.
        baseline: The same for the arm to subtract.
    """
    differences = np.asarray(entropies) - np.asarray(baseline)
    known = np.isfinite(differences)
    return [
        float(seed[finite].mean())
        for seed, finite in zip(differences.T, known.T, strict=True)
        if finite.any()
    ]


def compare_at_equal_reward(entropies: np.ndarray, baseline: np.ndarray) -> EqualReward | None:
    """Return the difference of two arms' entropies at equal reward; None if fewer than two seeds have a pair.

    Args:
        entropies: The entropy of an arm at a reward, shape (rates, seeds); NaN where the reward was not reached.
        baseline: The same for the arm to subtract.

    >>> compare_at_equal_reward(np.array([[1.0, 2.0, np.nan]]), np.array([[0.5, 1.5, 1.0]]))
    EqualReward(interval=Interval(value=0.5, low=0.5, high=0.5), pairs=2, seeds=2)
    """
    by_seed = differences_by_seed(entropies, baseline)
    if len(by_seed) < 2:
        return None
    pairs = int(np.isfinite(np.asarray(entropies) - np.asarray(baseline)).sum())
    return EqualReward(student(by_seed), pairs, len(by_seed))


def entropy_at_equal_step(entropies: ArrayLike, part: str) -> float:
    """Return the mean entropy over a part of the batches.

    Args:
        entropies: The entropy of each batch in nats a token, shape (batches,).
        part: A part of `EQUAL_STEP`.

    >>> entropies = [4.0, 3.0, 2.0, 1.0]
    >>> [entropy_at_equal_step(entropies, part) for part in EQUAL_STEP]
    [2.5, 1.5, 1.0]
    """
    values = np.asarray(entropies, dtype=np.float64)
    batches = max(1, round(EQUAL_STEP[part] * len(values)))
    return float(values[-batches:].mean())


class Looked(NamedTuple):
    """How many intervals were looked at, and how many of them exclude 0."""

    intervals: int
    """The number of intervals."""
    above: int
    """The number of those above 0."""
    below: int
    """The number of those below 0."""

    def __str__(self) -> str:
        return f"{self.above} above, {self.below} below"


def look(differences: Sequence[ArrayLike], comparisons: int = 1) -> Looked:
    """Count the intervals of mean differences that exclude 0.

    Args:
        differences: The paired differences of each comparison, each of shape (seeds,).
        comparisons: The number of comparisons for which the intervals are adjusted, after Bonferroni: each has a
            coverage of 1 - 0.05 / comparisons.

    >>> look([[0.1, 0.2, 0.3, 0.2], [-0.1, 0.1, 0.0, 0.2]])
    Looked(intervals=2, above=1, below=0)
    >>> look([[0.1, 0.2, 0.3, 0.2], [-0.1, 0.1, 0.0, 0.2]], comparisons=20).above
    0
    """
    intervals = [student(values, 1 - 0.05 / comparisons) for values in differences]
    above = sum(interval.low > 0 for interval in intervals)
    below = sum(interval.high < 0 for interval in intervals)
    return Looked(len(intervals), above, below)


def metric_name(level: float) -> str:
    """Return the name of the metric in the reports of the studies.

    >>> metric_name(0.3)
    'entropy at reward 0.3'
    """
    return f"entropy at reward {level:g}"


def equal_step_name(part: str) -> str:
    """Return the name of the metric of a part of `EQUAL_STEP` in the reports of the studies.

    >>> equal_step_name("last tenth")
    'entropy at equal step, last tenth'
    """
    return f"entropy at equal step, {part}"


Scores = Callable[[str], np.ndarray]
"""A function of a metric that returns it by rate and seed for one arm, shape (rates, seeds)."""


def entropies_table(rows: Mapping[str, tuple[Scores, Scores]], minus: str) -> Table:
    """Return differences in entropy, at equal step and at equal reward, with the number that exclude 0 in the caption.

    Args:
        rows: For each row its name, with the scores of an arm and of the arm to subtract.
        minus: The name of the arm to subtract.
    """
    metrics = [*map(equal_step_name, EQUAL_STEP), *map(metric_name, LEVELS)]
    cells: list[list[str]] = []
    looked: list[list[float]] = []
    for name, (ours, theirs) in rows.items():
        texts = [name]
        for metric in metrics:
            entropies, baseline = ours(metric), theirs(metric)
            comparison = compare_at_equal_reward(entropies, baseline)
            if comparison is None:
                texts.append("–")
                continue
            looked.append(differences_by_seed(entropies, baseline))
            texts.append(f"{signed(comparison.interval)} ({comparison.pairs}, {comparison.seeds})")
        cells.append(texts)
    plain, adjusted = look(looked), look(looked, max(1, len(looked)))
    caption = (
        f"Entropy in nats a token minus that of {minus}, at equal step (the mean over a part of the batches) and at "
        "equal reward (of the first five batches with this mean reward). In parentheses how many pairs of runs with "
        "equal rate and seed reached it, and of how many seeds; Student's intervals over seeds, each the mean over its "
        "rates. Of "
        f"{len(looked)} intervals {plain.above} are above 0 and {plain.below} below; adjusted for their number after "
        f"Bonferroni, {adjusted.above} and {adjusted.below}."
    )
    header = [f"minus {minus}", *EQUAL_STEP, *(f"at reward {level:g}" for level in LEVELS)]
    return Table(header, cells, caption)
