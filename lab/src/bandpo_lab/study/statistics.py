"""What can be said of arms from their seeds: intervals, paired differences, and the choice among tuned values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from bandpo.errors import InvalidValue
from bandpo_lab.evals.metrics import holm
from bandpo_lab.file_models import checked
from bandpo_lab.interval import Interval
from bandpo_lab.study.collect import RunResult
from bandpo_lab.study.plan import Study, parse_study

Drawn = Callable[[np.ndarray], np.ndarray]
LOWER_IS_BETTER = ("batches to half",)


def student(values: ArrayLike) -> Interval:
    """Student's interval of a mean, right for few values that are roughly normal, such as paired differences.

    >>> interval = student([0.1, 0.2, 0.3])
    >>> round(interval.low, 3), round(interval.high, 3)
    (-0.048, 0.448)
    """
    array = np.asarray(values, dtype=np.float64)
    mean = float(array.mean())
    if len(array) < 2 or not np.ptp(array):  # undefined where all are equal
        return Interval(mean, mean, mean)
    error = float(array.std(ddof=1)) / len(array) ** 0.5
    reach = float(stats.t.ppf(0.975, len(array) - 1)) * error
    return Interval(mean, mean - reach, mean + reach)


@dataclass(frozen=True)
class ArmDifference:
    """An arm minus the baseline, over the seeds that both have."""

    experiment: str
    arm: str
    interval: Interval
    """Student's."""
    p: float
    """Of the paired t-test, corrected after Holm for all comparisons of the study."""

    @property
    def claimed(self) -> bool:
        """Whether a difference may be claimed: at 5 % over all comparisons of the study together."""
        return self.p < 0.05


@dataclass(frozen=True)
class Results:
    """A study and those of its runs that have ended."""

    study: Study
    runs: Sequence[RunResult]

    @classmethod
    def from_file(cls, content: Mapping[str, Any]) -> Results:
        """From what a ``results.json`` holds.

        Raises:
            ValueError: a run lacks something, or has it in another form.
        """
        return cls(parse_study(content["study"]), checked(list[RunResult], content["runs"], "runs"))

    def of(self, experiment: str, arm: str) -> list[RunResult]:
        """The reported runs of an arm, one a seed."""
        return [r for r in self.runs if (r.experiment, r.arm, r.tuning) == (experiment, arm, None)]

    def by_seed(self, experiment: str, arm: str, metric: str) -> dict[int, float]:
        """One figure for each reported seed."""
        return {run.seed: run.metric(metric) for run in self.of(experiment, arm)}

    def gaps(self, experiment: str, arm: str, metric: str) -> dict[int, float]:
        """An arm minus the baseline, for each seed that both have."""
        ours, theirs = (self.by_seed(experiment, name, metric) for name in (arm, self.study.baseline))
        return {seed: ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())}

    def differences(self, metric: str) -> list[ArmDifference]:
        """Every arm against the baseline in every experiment, paired by seed, corrected for their number after Holm."""
        found: list[tuple[str, str, list[float]]] = []
        for e in self.study.experiments.values():
            for arm in self.study.arms_of(e):
                apart = self.gaps(e.name, arm, metric)
                if arm != self.study.baseline and len(apart) > 1:
                    found.append((e.name, arm, list(apart.values())))
        corrected = holm([_p_of_no_difference(apart) for *_, apart in found])
        return [
            ArmDifference(experiment, arm, student(apart), p)
            for (experiment, arm, apart), p in zip(found, corrected, strict=True)
        ]

    def tuning_score(self, experiment: str, arm: str, choice: Mapping[str, Any]) -> float | None:
        """Mean of the primary metric over the tuning seeds of one choice; None where no run ended."""
        values = [
            r.metric(self.study.primary)
            for r in self.runs
            if (r.experiment, r.arm) == (experiment, arm)
            and r.tuning is not None
            and dict(r.tuning) == dict(choice)
        ]
        return float(np.mean(values)) if values else None

    @cached_property
    def chosen(self) -> dict[tuple[str, str], dict[str, Any]]:
        """For each experiment that tunes and each arm: the values with the best mean of the primary metric.

        Raises:
            ValueError: an arm none of whose tuning runs ended.
        """
        sign = -1 if self.study.primary in LOWER_IS_BETTER else 1
        chosen: dict[tuple[str, str], dict[str, Any]] = {}
        for e in self.study.experiments.values():
            for arm in self.study.arms_of(e) if e.tune else []:
                scores = [
                    (sign * score, choice)
                    for choice in (e.tune.choices() if e.tune else [])
                    if (score := self.tuning_score(e.name, arm, choice)) is not None
                ]
                if not scores:
                    raise InvalidValue(f"{e.name}: all tuning runs of {arm!r} failed; see the lines above")
                chosen[e.name, arm] = max(scores, key=lambda pair: pair[0])[1]
        return chosen


def _p_of_no_difference(gaps: Sequence[float]) -> float:
    """Of the t-test; 1 or 0 where all gaps are equal, and it is undefined."""
    if not np.ptp(gaps):
        return float(not any(gaps))
    t = np.mean(gaps) / (np.std(gaps, ddof=1) / np.sqrt(len(gaps)))
    return float(2 * stats.t.sf(abs(t), len(gaps) - 1))


def interquartile_mean(values: np.ndarray) -> float:
    """The mean of the middle half."""
    return float(stats.trim_mean(values, 0.25))


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Return Spearman's rank correlation of pairs; NaN where the first or the second of all pairs are equal.

    >>> rank_correlation([(1, 3), (2, 7), (3, 8)])
    1.0
    """
    ranks = stats.rankdata(np.array(pairs), axis=0)
    if (np.ptp(ranks, axis=0) == 0).any():
        return float("nan")
    return round(float(np.corrcoef(ranks.T)[0, 1]), 9)


# Learning rates -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """A rule in one place, over learning rates."""

    rates: Sequence[float]
    scores: np.ndarray
    """(rates, seeds)."""

    @property
    def best(self) -> int:
        """Place of the rate that is best over all seeds."""
        return int(self.scores.mean(1).argmax())

    @property
    def best_scores(self) -> np.ndarray:
        """Each seed's, at that rate: a little too good."""
        return self.scores[self.best]

    @property
    def at_edge(self) -> bool:
        """Whether no greater, or no smaller, rate was tried than the best."""
        return self.best in (0, len(self.rates) - 1)

    def at(self, place: int) -> Curve:
        """The curve of one of its rates alone."""
        return Curve(self.rates[place : place + 1], self.scores[place : place + 1])

    def drawn(self, times: np.ndarray, by: Curve | None = None) -> np.ndarray:
        """Mean scores of seeds drawn so many times, each at the rate that is best on the other half of the seeds.

        The best rate of a few seeds looks better on them than it is. (Left out alone, a seed would be scored at the
        worse of two rates that are nearly even.)

        Args:
            times: How often each seed is drawn (draws, seeds).
            by: The curve that chooses, if not this one: AUC chooses the rate at which entropy is read.

        >>> curve = Curve([1, 2], np.array([[0, 1], [1, 0]]))
        >>> curve.drawn(np.ones((1, 2)))  # each seed prefers the rate that is the worse one for the other
        array([0.])
        """
        gained, counted = np.zeros((2, len(times)))
        for choosing in _halves(self.scores.shape[1]):
            best = ((times * choosing) @ (by or self).scores.T).argmax(1)
            scored = times * ~choosing
            gained += (scored * self.scores[best]).sum(1)
            counted += scored.sum(1)
        return gained / counted


def _halves(seeds: int, splits: int = 20) -> np.ndarray:
    """Random halves of the seeds, always the same, and after them the other halves: (2 splits, seeds)."""
    rng = np.random.default_rng(0)
    first = np.array([rng.permutation(seeds) < seeds // 2 for _ in range(splits)])
    return np.concatenate([first, ~first])


def difference(
    ours: Drawn, theirs: Drawn, groups: Sequence[int], draws: int = 1000, level: float = 0.95
) -> Interval:
    """One rule minus another, each at its own best rate: the nested bootstrap.

    Seeds are drawn anew within their groups, base models say, and rates are chosen anew each time. Percentiles of a
    bootstrap lie too close together where seeds are few; they are taken as far out as Student's t would have them.

    Args:
        ours: From how often seeds are drawn (draws, seeds) to mean scores: `Curve.drawn`.
        theirs: The same of the other rule, on the same seeds.
        groups: The group of each seed.
        draws: Of the bootstrap.
        level: How often the interval is to hold the truth.
    """
    rng, labels = np.random.default_rng(0), np.array(groups)
    times = np.zeros((draws, len(labels)))
    for group in set(groups):
        mine = np.flatnonzero(labels == group)
        times[:, mine] = rng.multinomial(len(mine), np.full(len(mine), 1 / len(mine)), draws)
    seeds, every = len(labels), np.ones((1, len(labels)))
    reach = np.sqrt(seeds / (seeds - 1)) * stats.t.ppf((1 + level) / 2, seeds - len(set(groups)))
    low, high = np.quantile(ours(times) - theirs(times), stats.norm.cdf([-reach, reach]))
    return Interval(float((ours(every) - theirs(every))[0]), float(low), float(high))


def simulated_coverage(ours: Curve, theirs: Curve, groups: Sequence[int], repeats: int = 200) -> float:
    """How often `difference` holds the truth where the truth is known.

    Seeds are made up around the mean curves of both rules, normal and with the covariance that the real ones have over
    rules and rates, so the true difference is that of the means' maxima.
    """
    rng, seeds = np.random.default_rng(0), len(groups)
    both = np.concatenate([ours.scores, theirs.scores])
    means = both.mean(1, keepdims=True)
    truth, held = ours.scores.mean(1).max() - theirs.scores.mean(1).max(), 0
    for _ in range(repeats):
        made = means + (both - means) @ rng.normal(size=(seeds, seeds)) / np.sqrt(seeds - 1)
        curves = (Curve(ours.rates, made[: len(ours.rates)]), Curve(theirs.rates, made[len(ours.rates) :]))
        found = difference(curves[0].drawn, curves[1].drawn, groups, draws=300)
        held += found.low <= truth <= found.high
    return held / repeats
