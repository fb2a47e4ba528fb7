"""The metrics mean@k, pass@k and maj@k, and their intervals.

Every metric maps scores in [0, 1] of shape ``(problems, n)``, 0 for wrong and 1 for right, to one value per problem,
``(problems,)``. The mean of these values is the metric, and `estimate` computes its interval, or that of the difference
of two evaluations. Scores of another shape or range raise a ValueError, and so does a k that is not from 1 to n.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from numbers import Integral
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from bandpo_lab.errors import InvalidType, InvalidValue

Values = NDArray[np.float64]


def _scores(correct: ArrayLike) -> Values:
    """Return scores as an array of shape (problems, n), after checking their shape and range."""
    scores = np.asarray(correct, dtype=np.float64)
    if scores.ndim != 2 or scores.size == 0:
        raise InvalidValue(f"scores must have shape (problems, n) and not be empty, got shape {scores.shape}")
    if not np.all((scores >= 0) & (scores <= 1)):
        raise InvalidValue("scores must lie in [0, 1]: 0 for wrong, 1 for right")
    return scores


def _check_k(k: int, n: int) -> None:
    if not isinstance(k, Integral):
        raise InvalidType(f"k = {k!r} must be a whole number of samples")
    if not 1 <= k <= n:
        raise InvalidValue(
            f"k = {k} needs between k and n samples per problem, and there are n = {n}: draw more samples"
        )


def mean_at_k(correct: ArrayLike) -> Values:
    """Compute the average score over the samples of each problem (mean@k with k = n; also called avg@k).

    >>> mean_at_k([[1, 0, 0, 0], [1, 1, 0, 0]]).tolist()
    [0.25, 0.5]
    """
    return _scores(correct).mean(axis=1)


def pass_at_k(correct: ArrayLike, k: int) -> Values:
    """Compute the probability that at least one of k samples is right, by the unbiased estimator.

    The k samples are drawn without replacement from the n samples of a problem. For c right ones of n, the estimator is
    1 - C(n-c, k) / C(n, k). It is computed here as the expected *best* score of the k drawn, the sum over ranks i,
    ascending, of score_(i) C(i-1, k-1) / C(n, k), which also covers scores between 0 and 1.

    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code", arXiv 2107.03374, 2.1.

    >>> pass_at_k([[1, 0, 0, 0], [1, 1, 0, 0]], 2).round(4).tolist()
    [0.5, 0.8333]
    """
    scores = np.sort(_scores(correct), axis=1)
    n = scores.shape[1]
    _check_k(k, n)
    # The top rank has weight k/n, and the rank below rank i has (i-k)/(i-1) of rank i's weight. Binomials could
    # overflow.
    ranks = np.arange(n, 1, -1)
    weights = k / n * np.cumprod(np.concatenate([[1.0], (ranks - k) / (ranks - 1)]))
    return np.clip(scores @ weights[::-1], 0.0, 1.0)


def maj_at_k(correct: ArrayLike, answers: Sequence[Sequence[Hashable]]) -> Values:
    """Compute the score of the most frequent answer among the k = n samples (majority voting, self-consistency).

    A sample without an answer (``None``) does not vote. If answers are tied, their scores are averaged, so the order of
    samples is irrelevant.

    Args:
        correct: Scores of shape (problems, n).
        answers: One answer per score. Answers that mean the same must compare equal.

    Source: Wang et al. 2022, "Self-Consistency Improves Chain of Thought Reasoning", arXiv 2203.11171.

    >>> maj_at_k([[1, 1, 0, 0, 0]], [["7", "7", "3", "4", None]]).tolist()
    [1.0]
    """
    scores = _scores(correct)
    if len(answers) != len(scores) or any(len(row) != scores.shape[1] for row in answers):
        raise InvalidValue(f"answers must have the shape of the scores, {scores.shape}")
    return np.array([_vote(row, votes) for row, votes in zip(scores, answers, strict=True)])


def _vote(scores: Values, votes: Sequence[Hashable]) -> float:
    """Return the mean score of the most frequent vote, averaged over tied votes; 0 without votes."""
    counts = Counter(vote for vote in votes if vote is not None)
    if not counts:
        return 0.0
    winners = {vote for vote, count in counts.items() if count == max(counts.values())}
    winner_scores = [
        np.mean([score for score, vote in zip(scores, votes, strict=True) if vote == winner])
        for winner in winners
    ]
    return float(np.mean(winner_scores))


class Estimate(NamedTuple):
    """A value with its interval at 95 % and the p-value of the hypothesis that the true value is 0."""

    value: float
    low: float
    high: float
    p: float


def estimate(values: ArrayLike, minus: ArrayLike | None = None, *, smooth: bool = False) -> Estimate:
    """Compute a mean, or a difference of two means, with Student's interval at 95 % over problems and seeds.

    Differences are computed per problem, so that the difficulty of problems cancels. All seeds have the same problems.
    The variance between seeds is estimated for each side, and the degrees of freedom follow Satterthwaite.

    If all problems had the same score, the interval would have no width. So two problems are added for the interval.
    For a mean, they have the scores 0 and 1 (Agresti and Coull 1998, for shares). For a difference, they have the
    differences -1 and 1, or if ``smooth``, minus and plus the largest observed one. Each then has the weight s²/2 of a
    problem, where s is the share of problems without a difference. `scripts/evaluation_tables.py coverage` simulates
    the coverage of the interval.

    Args:
        values: One value in [0, 1] per problem, shape (problems,), or per seed and problem, shape (seeds, problems).
        minus: The values to subtract, of the same problems in the same order; the number of seeds may differ.
        smooth: True if each sample changes a problem's value a little, as for mean@n, so that a problem without an
            observed difference cannot have a large one.

    Raises:
        ValueError: The values are malformed, or the two sides do not have the same problems.

    >>> e = estimate(mean_at_k([[1, 0], [1, 1], [0, 0]]))
    >>> e.value, round(e.low, 2), round(e.high, 2)
    (0.5, 0.0, 1.0)
    """
    tables = [_by_seed(values)]
    if minus is not None:
        tables.append(_by_seed(minus))
        if tables[0].shape[1] != tables[1].shape[1]:
            sizes = " and ".join(str(table.shape[1]) for table in tables)
            raise InvalidValue(f"the two sides have {sizes} problems: compare runs on the same data")

    # One value per problem, and the two added problems: shape (problems + 2,).
    if minus is None:
        problem_values = tables[0].mean(axis=0)
        added_values = [0.0, 1.0]
        added_weight = 1.0
        lowest = 0.0
    else:
        problem_values = tables[0].mean(axis=0) - tables[1].mean(axis=0)
        largest = float(np.abs(problem_values).max()) if smooth and problem_values.any() else 1.0
        added_values = [-largest, largest]
        added_weight = float(np.mean(problem_values == 0)) ** 2 / 2
        lowest = -1.0
    value = float(problem_values.mean())
    points = np.append(problem_values, added_values)
    weights = np.append(np.ones(len(problem_values)), [added_weight, added_weight])

    # The variance over problems, and over the seeds of each side that has several.
    total = weights.sum()
    center = float(weights @ points / total)
    variances = [float(weights @ (points - center) ** 2) / max(total - 1, 1) / total]
    degrees_of_freedom = [max(total - 1, 1)]
    for table in tables:
        if len(table) > 1:
            variances.append(_variance_of_seeds(table))
            degrees_of_freedom.append(len(table) - 1)
    variance = sum(variances)
    if not variance:
        return Estimate(value, value, value, float(value == 0))

    # Satterthwaite's degrees of freedom of the sum.
    terms = [v**2 / df for v, df in zip(variances, degrees_of_freedom, strict=True)]
    student = stats.t(variance**2 / sum(terms))
    half_width = float(student.ppf(0.975)) * variance**0.5
    p = 2 * float(student.sf(abs(center) / variance**0.5))
    low = max(center - half_width, lowest)
    high = min(center + half_width, 1.0)
    return Estimate(value, min(low, value), max(high, value), p)


def _variance_of_seeds(table: Values) -> float:
    """Estimate the variance of the mean over seeds that is due to the seeds, of values of shape (seeds, problems)."""
    seeds, problems = table.shape
    means = table.mean(axis=1)
    # The variance of the interaction of seeds and problems is subtracted.
    residuals = table - means[:, None] - table.mean(axis=0) + means.mean()
    noise = (residuals**2).sum() / max((seeds - 1) * (problems - 1), 1) / table.size
    return max(float(means.var(ddof=1)) / seeds - noise, 0.0)


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct the p-values of several tests for each other (Holm 1979).

    With corrected p-values below 0.05, the chance of a false claim among all tests is at most 5 %.

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    >>> holm([0.04, 0.01, 0.02])
    [0.04, 0.03, 0.04]
    """
    order = np.argsort(p_values)
    scaled = np.asarray(p_values)[order] * np.arange(len(p_values), 0, -1)
    corrected = np.empty(len(p_values))
    corrected[order] = np.minimum(np.maximum.accumulate(scaled), 1)
    return corrected.tolist()


def _by_seed(values: ArrayLike) -> Values:
    """Return values as an array of shape (seeds, problems)."""
    table = np.atleast_2d(np.asarray(values, dtype=np.float64))
    if table.ndim != 2 or table.size == 0:
        raise InvalidValue(f"values must have shape (problems,) or (seeds, problems), got {np.shape(values)}")
    return table


def per_problem(correct: ArrayLike, answers: Sequence[Sequence[Hashable]] | None = None) -> dict[str, Values]:
    """Compute every metric of one evaluation, one value per problem.

    The metrics are ``mean@n`` (which equals pass@1), ``pass@2, 4 … n``, and ``maj@n`` if there are answers.

    Args:
        correct: Scores of shape (problems, n).
        answers: One answer per score.

    Returns:
        The values of each metric, of shape (problems,), by its name.

    >>> list(per_problem([[1, 0, 0]]))
    ['mean@3', 'pass@2', 'pass@3']
    """
    n = _scores(correct).shape[1]
    metrics = {f"mean@{n}": mean_at_k(correct)}
    powers_of_two = {2**i for i in range(1, n.bit_length())}
    metrics |= {f"pass@{k}": pass_at_k(correct, k) for k in sorted(powers_of_two | {n} - {1})}
    if answers is not None:
        metrics[f"maj@{n}"] = maj_at_k(correct, answers)
    return metrics
