"""Whether one model is better than another: paired bootstrap over problems, said in plain words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from bandpo.lab.evals.metrics import Estimate, resampled_means
from bandpo.lab.evals.report import Scores


@dataclass(frozen=True)
class ScoreDifference:
    """Second minus first, for one metric of one data source.

    Attributes:
        data_source: Name of the data.
        metric: Name of the metric.
        first: Mean of the first.
        second: Mean of the second.
        estimate: Their difference and its interval.
    """

    data_source: str
    metric: str
    first: float
    second: float
    estimate: Estimate

    @property
    def verdict(self) -> str:
        """In plain words, what can be claimed."""
        if self.estimate.low > 0:
            return "the second is better"
        if self.estimate.high < 0:
            return "the first is better"
        return "no difference can be claimed"


def paired_difference(
    first: ArrayLike, second: ArrayLike, *, level: float = 0.95, resamples: int = 5000, seed: int = 0
) -> Estimate:
    """Difference of means, second minus first, with a paired bootstrap interval.

    Problems are drawn once for both sides, which takes out how hard they are; seeds, where there are several,
    are drawn for each side of its own.

    Args:
        first: One value per problem, shape (problems,), or per seed and problem, shape (seeds, problems).
        second: Likewise, of the same problems in the same order; the number of seeds may differ.
        level: Coverage in (0, 1).
        resamples: Bootstrap draws.
        seed: Of the draws.

    Returns:
        The difference and its interval.

    Raises:
        ValueError: The two do not have the same problems, or `level` is outside (0, 1).

    >>> print(paired_difference([0.0, 0.5, 1.0], [0.25, 0.75, 1.25]))
    0.2500 [0.2500, 0.2500]
    """
    a, b = (np.atleast_2d(np.asarray(side, dtype=np.float64)) for side in (first, second))
    if a.shape[1] != b.shape[1] or a.size == 0:
        raise ValueError(
            f"the two sides have {a.shape[1]} and {b.shape[1]} problems: compare runs on the same data"
        )
    if not 0 < level < 1:
        raise ValueError(f"level = {level} must lie between 0 and 1, for example 0.95")
    generator = np.random.default_rng(seed)
    draws = generator.integers(a.shape[1], size=(resamples, a.shape[1]), dtype=np.int32)
    differences = resampled_means(b, draws, generator) - resampled_means(a, draws, generator)
    low, high = np.quantile(differences, [(1 - level) / 2, (1 + level) / 2])
    return Estimate(float(b.mean() - a.mean()), float(low), float(high))


def compare_scores(
    first: Sequence[Mapping[str, Scores]], second: Sequence[Mapping[str, Scores]], *, level: float = 0.95
) -> list[ScoreDifference]:
    """Compares two models on every data source and metric that both have.

    Args:
        first: Scores of one model, one entry per seed.
        second: Of the other.
        level: Coverage of the intervals.

    Returns:
        One difference for each data source and metric.

    Raises:
        ValueError: Nothing in common, or a data source with other problems on one side.
    """
    if not first or not second:
        raise ValueError("give at least one run for each side")
    runs = [*first, *second]
    differences = []
    for source in first[0]:
        if not all(source in run for run in runs):
            continue
        if len({run[source].problems for run in runs}) > 1:
            raise ValueError(f"{source}: the runs have different problems: evaluate both on the same file")
        for metric in first[0][source].values:
            if all(metric in run[source].values for run in runs):
                a, b = ([run[source].values[metric] for run in side] for side in (first, second))
                e = paired_difference(a, b, level=level)
                differences.append(ScoreDifference(source, metric, float(np.mean(a)), float(np.mean(b)), e))
    if not differences:
        raise ValueError(
            "the runs have no data source and metric in common: evaluate both on the same data with one n"
        )
    return differences
