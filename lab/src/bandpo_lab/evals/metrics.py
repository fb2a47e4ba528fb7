"""What a table of scores is worth: mean@k, pass@k, maj@k and their intervals.

Every metric maps scores in [0, 1] of shape ``(problems, n)``, 0 for wrong and 1 for right, to one value per problem,
``(problems,)``. Its mean is the metric, and `estimate` puts an interval around it, or around the difference of two
evaluations. Scores of another shape or range are refused with a ValueError, and so is a k that is not from 1 to n.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from numbers import Integral
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from bandpo.errors import InvalidType, InvalidValue

Values = NDArray[np.float64]


def _scores(correct: ArrayLike) -> Values:
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
    """Average score over the samples of each problem (mean@k with k = n; also called avg@k).

    >>> mean_at_k([[1, 0, 0, 0], [1, 1, 0, 0]]).tolist()
    [0.25, 0.5]
    """
    return _scores(correct).mean(axis=1)


def pass_at_k(correct: ArrayLike, k: int) -> Values:
    """Chance that k of the n samples, drawn without replacement, hold a right one: the unbiased estimator.

    For c right ones of n this is 1 - C(n-c, k) / C(n, k). It is written here as the expected *best* score of
    the k drawn, the sum over ranks i, ascending, of score_(i) C(i-1, k-1) / C(n, k), which also covers scores
    between 0 and 1.

    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code", arXiv 2107.03374, 2.1.

    >>> pass_at_k([[1, 0, 0, 0], [1, 1, 0, 0]], 2).round(4).tolist()
    [0.5, 0.8333]
    """
    scores = np.sort(_scores(correct), axis=1)
    n = scores.shape[1]
    _check_k(k, n)
    # The top rank weighs k/n, the rank below rank i (i-k)/(i-1) of rank i's weight. Binomials could overflow.
    ranks = np.arange(n, 1, -1)
    weights = k / n * np.cumprod(np.concatenate([[1.0], (ranks - k) / (ranks - 1)]))
    return np.clip(scores @ weights[::-1], 0.0, 1.0)


def maj_at_k(correct: ArrayLike, answers: Sequence[Sequence[Hashable]]) -> Values:
    """Score of the most frequent answer among the k = n samples (majority voting, self-consistency).

    A sample without an answer (``None``) abstains. Tied answers share the vote, so order is irrelevant.

    There is one answer per score, and answers that mean the same must compare equal.

    Source: Wang et al. 2022, "Self-Consistency Improves Chain of Thought Reasoning", arXiv 2203.11171.

    >>> maj_at_k([[1, 1, 0, 0, 0]], [["7", "7", "3", "4", None]]).tolist()
    [1.0]
    """
    scores = _scores(correct)
    if len(answers) != len(scores) or any(len(row) != scores.shape[1] for row in answers):
        raise InvalidValue(f"answers must have the shape of the scores, {scores.shape}")
    return np.array([_vote(row, votes) for row, votes in zip(scores, answers, strict=True)])


def _vote(scores: Values, votes: Sequence[Hashable]) -> float:
    counts = Counter(vote for vote in votes if vote is not None)
    if not counts:
        return 0.0
    winners = {vote for vote, count in counts.items() if count == max(counts.values())}
    return float(
        np.mean([np.mean([s for s, v in zip(scores, votes, strict=True) if v == w]) for w in winners])
    )


class Estimate(NamedTuple):
    """A figure with its interval of 95 %, and the chance of one as far from 0 if the truth is 0."""

    value: float
    low: float
    high: float
    p: float


def estimate(values: ArrayLike, minus: ArrayLike | None = None, *, smooth: bool = False) -> Estimate:
    """Mean, or difference of two means, with Student's interval at 95 % over problems and seeds.

    A difference is taken problem by problem, which takes out how hard they are. Seeds answer the same problems; what
    they add is estimated for each side, with few degrees of freedom where they are few (Satterthwaite).

    Thirty problems that all score alike do not say that all problems do. So the interval counts one problem more of
    score 0 and one of score 1 (Agresti and Coull 1998, for shares), and of a difference half a problem of -1 and half
    of 1, times the square of the share of problems without a difference; of a smooth one, of the largest difference in
    place of 1. `scripts/evaluation_tables.py coverage`
    simulates how often it holds the truth.

    Args:
        values: One value in [0, 1] per problem, shape (problems,), or per seed and problem, shape (seeds, problems).
        minus: What is subtracted, of the same problems in the same order; the number of seeds may differ.
        smooth: Whether each sample moves a problem's value a little, as it does mean@n, so that a problem that shows no
            difference hides no large one.

    Raises:
        ValueError: Malformed values, or two sides that do not have the same problems.

    >>> e = estimate(mean_at_k([[1, 0], [1, 1], [0, 0]]))
    >>> e.value, round(e.low, 2), round(e.high, 2)
    (0.5, 0.0, 1.0)
    """
    tables = [_by_seed(values), *([] if minus is None else [_by_seed(minus)])]
    if len({table.shape[1] for table in tables}) > 1:
        sizes = " and ".join(str(table.shape[1]) for table in tables)
        raise InvalidValue(f"the two sides have {sizes} problems: compare runs on the same data")
    each = tables[0].mean(axis=0) - (0 if minus is None else tables[1].mean(axis=0))
    far = float(np.abs(each).max()) if smooth and minus is not None and each.any() else 1.0
    added = 1.0 if minus is None else float(np.mean(each == 0)) ** 2 / 2
    points, weights = (
        np.append(each, [0.0 if minus is None else -far, far]),
        np.append(np.ones(len(each)), [added, added]),
    )
    total = weights.sum()
    center = float(weights @ points / total)
    variances = [float(weights @ (points - center) ** 2) / max(total - 1, 1) / total]
    freedom = [max(total - 1, 1)]
    for table in (table for table in tables if len(table) > 1):
        means = table.mean(axis=1)
        apart = table - means[:, None] - table.mean(axis=0) + means.mean()
        noise = (apart**2).sum() / max((len(table) - 1) * (len(each) - 1), 1) / table.size
        variances.append(max(float(means.var(ddof=1)) / len(table) - noise, 0.0))
        freedom.append(len(table) - 1)
    variance = sum(variances)
    value, lowest = float(each.mean()), 0.0 if minus is None else -1.0
    if not variance:
        return Estimate(value, value, value, float(value == 0))
    student = stats.t(variance**2 / sum(v**2 / df for v, df in zip(variances, freedom, strict=True)))
    half = float(student.ppf(0.975)) * variance**0.5
    p = 2 * float(student.sf(abs(center) / variance**0.5))
    return Estimate(value, min(max(center - half, lowest), value), max(min(center + half, 1.0), value), p)


def holm(chances: Sequence[float]) -> list[float]:
    """The p-values of several tests, corrected so that one of them misleads in at most 5 % of cases (Holm 1979).

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    >>> holm([0.04, 0.01, 0.02])
    [0.04, 0.03, 0.04]
    """
    order = np.argsort(chances)
    scaled = np.asarray(chances)[order] * np.arange(len(chances), 0, -1)
    corrected = np.empty(len(chances))
    corrected[order] = np.minimum(np.maximum.accumulate(scaled), 1)
    return corrected.tolist()


def _by_seed(values: ArrayLike) -> Values:
    table = np.atleast_2d(np.asarray(values, dtype=np.float64))
    if table.ndim != 2 or table.size == 0:
        raise InvalidValue(f"values must have shape (problems,) or (seeds, problems), got {np.shape(values)}")
    return table


def per_problem(correct: ArrayLike, answers: Sequence[Sequence[Hashable]] | None = None) -> dict[str, Values]:
    """Every metric of one evaluation, one value per problem.

    These are ``mean@n`` (pass@1 too), ``pass@2, 4 … n``, and ``maj@n`` where answers are given.

    >>> list(per_problem([[1, 0, 0]]))
    ['mean@3', 'pass@2', 'pass@3']
    """
    n = _scores(correct).shape[1]
    metrics = {f"mean@{n}": mean_at_k(correct)}
    powers = sorted({2**i for i in range(1, n.bit_length())} | {n} - {1})
    metrics |= {f"pass@{k}": pass_at_k(correct, k) for k in powers}
    if answers is not None:
        metrics[f"maj@{n}"] = maj_at_k(correct, answers)
    return metrics
