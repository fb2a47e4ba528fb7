"""The statistics of methods over learning rates and seeds: each at its best rate, and how sure a difference is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from bandpo_lab.study.interval import Interval

ResampledScores = Callable[[np.ndarray], np.ndarray]
"""A function from the counts of seeds in bootstrap samples, of shape (draws, seeds), to mean scores, (draws,)."""


def interquartile_mean(values: np.ndarray) -> float:
    """Compute the mean of the middle half of values."""
    return float(stats.trim_mean(values, 0.25))


def fell_by_half(values: ArrayLike) -> bool:
    """Return True if values in time fell by at least half after their maximum so far, even if they recovered.

    >>> fell_by_half([0.1, 0.2, 0.11]), fell_by_half([0.1, 0.2, 0.1, 0.3])
    (False, True)
    """
    array = np.asarray(values)
    return bool((array <= np.maximum.accumulate(array) / 2).any())


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Compute Spearman's rank correlation; NaN if the first or the second numbers of all pairs are equal.

    >>> rank_correlation([(1, 3), (2, 7), (3, 8)])
    1.0
    """
    ranks = stats.rankdata(np.array(pairs), axis=0)
    if (np.ptp(ranks, axis=0) == 0).any():
        return float("nan")
    return round(float(np.corrcoef(ranks.T)[0, 1]), 9)


@dataclass(frozen=True)
class Curve:
    """The scores of a method over learning rates and seeds."""

    rates: Sequence[float]
    scores: np.ndarray
    """The scores, of shape (rates, seeds)."""

    @property
    def best(self) -> int:
        """The index of the rate with the best mean over all seeds."""
        return int(self.scores.mean(1).argmax())

    @property
    def best_scores(self) -> np.ndarray:
        """The score of each seed at the best rate, which is biased upwards, as these seeds chose the rate."""
        return self.scores[self.best]

    @property
    def at_edge(self) -> bool:
        """True if the best rate is the smallest or the largest of all."""
        return self.best in (0, len(self.rates) - 1)

    def at_rate(self, index: int) -> Curve:
        """Return the curve of a single rate."""
        return Curve(self.rates[index : index + 1], self.scores[index : index + 1])

    def resampled_scores(self, counts: np.ndarray, chosen_by: Curve | None = None) -> np.ndarray:
        """Compute the mean score of bootstrap samples of seeds, each at the rate that is best on other seeds.

        A rate that is chosen on a few seeds looks better on them than it is, so each half of the seeds is scored at the
        rate that is best on the other half. (If single seeds were left out, a seed would be scored at the worse of two
        rates that are nearly equal.)

        Args:
            counts: The number of times that each seed is in a sample, of shape (draws, seeds).
            chosen_by: The curve by which rates are chosen, by default this one. For example, entropy is reported at the
                rate that is best by AUC.

        Returns:
            The mean scores, of shape (draws,).

        >>> curve = Curve([1, 2], np.array([[0, 1], [1, 0]]))
        >>> curve.resampled_scores(np.ones((1, 2)))  # each seed chooses the rate that is worse for the other
        array([0.])
        """
        total = np.zeros(len(counts))
        draws = np.arange(len(counts))
        splits = _halves(self.scores.shape[1])
        for half in splits:
            halves = [counts * half, counts * ~half]
            # Sums over the seeds of each half, of shape (draws, rates).
            sums = [half_counts @ self.scores.T for half_counts in halves]
            choosing_sums = sums
            if chosen_by is not None:
                choosing_sums = [half_counts @ chosen_by.scores.T for half_counts in halves]
            # Each half chooses the rate for the other.
            total += sums[1][draws, choosing_sums[0].argmax(1)]
            total += sums[0][draws, choosing_sums[1].argmax(1)]
        return total / (len(splits) * counts.sum(1))


def _halves(seeds: int, splits: int = 20) -> np.ndarray:
    """Return random halves of the seeds, always the same, as masks of shape (splits, seeds)."""
    rng = np.random.default_rng(0)
    return np.array([rng.permutation(seeds) < seeds // 2 for _ in range(splits)])


def remembering(scores: ResampledScores) -> ResampledScores:
    """Return a function that computes the scores of the same samples once.

    It is for a method that several others are compared with by `difference`, which always draws the same samples.

    Args:
        scores: The scores of a method: `Curve.resampled_scores`.
    """
    remembered: dict[bytes, np.ndarray] = {}

    def remembering_scores(counts: np.ndarray) -> np.ndarray:
        samples = counts.tobytes()
        if samples not in remembered:
            remembered[samples] = scores(counts)
        return remembered[samples]

    return remembering_scores


def difference(
    scores: ResampledScores,
    baseline: ResampledScores,
    groups: Sequence[int],
    draws: int = 1000,
    level: float = 0.95,
) -> Interval:
    """Compute the difference of two methods, each at its best learning rate, with a nested bootstrap interval.

    In each draw, seeds are resampled within their groups (such as base models), and learning rates are chosen again.
    With few seeds the percentiles of a bootstrap are too narrow, so they are widened by the factor by which Student's t
    is wider.

    Args:
        scores: The scores of a method: `Curve.resampled_scores`.
        baseline: The same for the method to subtract, on the same seeds.
        groups: The group of each seed.
        draws: The number of bootstrap samples.
        level: The nominal coverage of the interval.
    """
    rng = np.random.default_rng(0)
    labels = np.array(groups)
    seeds = len(labels)
    counts = np.zeros((draws, seeds))
    for group in set(groups):
        members = np.flatnonzero(labels == group)
        counts[:, members] = rng.multinomial(len(members), np.full(len(members), 1 / len(members)), draws)
    reach = np.sqrt(seeds / (seeds - 1)) * stats.t.ppf((1 + level) / 2, seeds - len(set(groups)))
    low, high = np.quantile(scores(counts) - baseline(counts), stats.norm.cdf([-reach, reach]))
    all_seeds = np.ones((1, seeds))
    value = (scores(all_seeds) - baseline(all_seeds))[0]
    return Interval(float(value), float(low), float(high))


def simulated_coverage(curve: Curve, baseline: Curve, groups: Sequence[int], repeats: int = 200) -> float:
    """Simulate how often the interval of `difference` contains the true value.

    Seeds are simulated as by `simulate_seeds`, so the true difference is that of the maxima of the mean curves.
    """
    rng = np.random.default_rng(0)
    truth = curve.scores.mean(1).max() - baseline.scores.mean(1).max()
    covered = 0
    for _ in range(repeats):
        ours, theirs = simulate_seeds(curve, baseline, len(groups), rng)
        interval = difference(ours.resampled_scores, theirs.resampled_scores, groups, draws=300)
        covered += interval.low <= truth <= interval.high
    return covered / repeats


class Power(NamedTuple):
    """The shares of simulated studies, with a known difference of two methods, that come to a verdict."""

    greater: float
    """The share of studies whose interval is above 0."""
    equal: float
    """The share of studies whose interval is within ± the smallest effect of interest."""


def simulated_power(
    curve: Curve, baseline: Curve, gain: float, seeds: int, smallest: float, repeats: int = 200
) -> Power:
    """Simulate how often `difference` would find that a method is better, or that two methods are equal.

    Seeds are simulated as by `simulate_seeds`, after the scores of the method were shifted by a constant so that the
    true difference, of the maxima of the mean curves, is ``gain``.

    Args:
        curve: The scores of the method in a pilot study.
        baseline: The scores of the method to subtract, on the same seeds.
        gain: The true difference.
        seeds: The number of seeds of the simulated studies.
        smallest: The smallest effect of interest.
        repeats: The number of simulated studies.
    """
    rng = np.random.default_rng(0)
    shift = gain - (curve.scores.mean(1).max() - baseline.scores.mean(1).max())
    shifted = Curve(curve.rates, curve.scores + shift)
    greater = 0
    equal = 0
    for _ in range(repeats):
        ours, theirs = simulate_seeds(shifted, baseline, seeds, rng)
        interval = difference(ours.resampled_scores, theirs.resampled_scores, [0] * seeds, draws=300)
        greater += interval.low > 0
        equal += -smallest < interval.low and interval.high < smallest
    return Power(greater / repeats, equal / repeats)


def simulate_seeds(
    curve: Curve, baseline: Curve, seeds: int, rng: np.random.Generator
) -> tuple[Curve, Curve]:
    """Simulate the scores of two methods on new seeds, around their mean curves.

    The scores are normal, with the observed covariance over methods and rates.
    """
    # Shape (rates of both methods, observed seeds).
    scores = np.concatenate([curve.scores, baseline.scores])
    means = scores.mean(1, keepdims=True)
    observed = scores.shape[1]
    noise = (scores - means) @ rng.normal(size=(observed, seeds)) / np.sqrt(observed - 1)
    simulated = means + noise
    rates = len(curve.rates)
    return Curve(curve.rates, simulated[:rates]), Curve(baseline.rates, simulated[rates:])
