"""What can be said of arms from their seeds: intervals, paired differences, and the choice among tuned values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from bandpo.audit.interval import Interval
from bandpo.errors import InvalidValue
from bandpo_lab.file_models import checked
from bandpo_lab.study.collect import RunResult
from bandpo_lab.study.plan import Study, parse_study

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


def coverage(seeds: int) -> float:
    """How often a bootstrap interval of 95 % holds the mean of normal scores.

    The bootstrap takes the normal quantile and the standard deviation with n in the denominator, where Student's
    interval takes its own quantile and n − 1.

    >>> round(coverage(8), 2), round(coverage(100), 2)
    (0.89, 0.95)
    """
    reach = stats.norm.ppf(0.975) * np.sqrt((seeds - 1) / seeds)
    return float(2 * stats.t.cdf(reach, seeds - 1) - 1)


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
class Contrast:
    """One arm minus another in several experiments, paired by seed."""

    by_experiment: Mapping[str, Interval]
    overall: Interval
    """Over seeds, of each seed's mean over the experiments."""
    above: int
    """Pairs in which the first arm has the greater figure."""
    pairs: int


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

    def gaps(
        self, experiment: str, arm: str, minus: str, metric: str, without: Sequence[int] = ()
    ) -> dict[int, float]:
        """One arm minus another, for each seed that both have and that is not in ``without``."""
        ours, theirs = (self.by_seed(experiment, name, metric) for name in (arm, minus))
        return {s: ours[s] - theirs[s] for s in sorted(ours.keys() & theirs.keys() - set(without))}

    def differences(
        self, metric: str, without: Mapping[str, Sequence[int]] | None = None
    ) -> list[ArmDifference]:
        """Every arm against the baseline in every experiment, paired by seed, corrected for their number after Holm.

        Without some seeds of an experiment, if so told.
        """
        found: list[tuple[str, str, list[float]]] = []
        for e in self.study.experiments.values():
            for arm in [] if e.identical else self.study.arms_of(e):
                apart = self.gaps(e.name, arm, self.study.baseline, metric, (without or {}).get(e.name, ()))
                if arm != self.study.baseline and len(apart) > 1:
                    found.append((e.name, arm, list(apart.values())))
        corrected = holm([_p_of_no_difference(apart) for *_, apart in found])
        return [
            ArmDifference(experiment, arm, student(apart), p)
            for (experiment, arm, apart), p in zip(found, corrected, strict=True)
        ]

    def contrast(self, arm: str, minus: str, metric: str) -> Contrast:
        """Two arms in all experiments in which both took part, on the seeds that all of these have."""
        found = {
            e.name: apart
            for e in self.study.experiments.values()
            if not e.identical and (apart := self.gaps(e.name, arm, minus, metric))
        }
        seeds = sorted(set.intersection(*map(set, found.values())))
        table = np.array([[apart[seed] for seed in seeds] for apart in found.values()])
        return Contrast(
            dict(zip(found, map(student, table), strict=True)),
            student(table.mean(axis=0)),
            int((table > 0).sum()),
            table.size,
        )

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

    def differing(self, experiment: str) -> list[str]:
        """Runs of an experiment that are not what another arm's run of the same seed is, number for number."""
        first: dict[int, RunResult] = {}
        return [
            f"{r.arm}, seed {r.seed}"
            for r in self.runs
            if r.experiment == experiment
            and (r.curves["reward"], r.curves["entropy"], r.after)
            != ((f := first.setdefault(r.seed, r)).curves["reward"], f.curves["entropy"], f.after)
        ]


def holm(p: Sequence[float]) -> list[float]:
    """The p of several tests, corrected after Holm for their number.

    >>> holm([0.04, 0.01, 0.02])
    [0.04, 0.03, 0.04]
    """
    order = np.argsort(p)
    scaled = np.array(p)[order] * np.arange(len(p), 0, -1)
    return np.minimum(np.maximum.accumulate(scaled), 1)[np.argsort(order)].tolist()


def _p_of_no_difference(gaps: Sequence[float]) -> float:
    """Of the t-test; 1 or 0 where all gaps are equal, and it is undefined."""
    if not np.ptp(gaps):
        return float(not any(gaps))
    t = np.mean(gaps) / (np.std(gaps, ddof=1) / np.sqrt(len(gaps)))
    return float(2 * stats.t.sf(abs(t), len(gaps) - 1))


# Learning rates -------------------------------------------------------------------------------------------------------


def halves(seeds: int) -> Iterator[tuple[Any, Any]]:
    """Two ways to part seeds into those that choose and those that are scored: even and odd."""
    odd = np.arange(seeds) % 2 == 1
    yield odd, ~odd
    yield ~odd, odd


def random_halves(seeds: int, splits: int = 200) -> Iterator[tuple[Any, Any]]:
    """Many ways to do so, the same every time."""
    rng = np.random.default_rng(0)
    for _ in range(splits):
        shuffled = rng.permutation(seeds)
        yield shuffled[: seeds // 2], shuffled[seeds // 2 :]


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
    def at_edge(self) -> bool:
        """Whether no greater, or no smaller, rate was tried than the best."""
        return self.best in (0, len(self.rates) - 1)

    def cross_fitted(self, splits: Iterator[tuple[Any, Any]], by: Curve | None = None) -> np.ndarray:
        """For each seed its mean score over the splits that score it, at the rate that is best on the choosing seeds.

        The best rate of a few seeds looks better on them than it is.

        Args:
            splits: Pairs of seeds that choose and seeds that are scored.
            by: The curve that chooses, if not this one: AUC chooses the rate at which entropy is read.

        >>> curve = Curve([1, 2], np.array([[0, 1], [1, 0]]))
        >>> curve.cross_fitted(halves(2))  # each seed prefers the rate that is the worse one for the other
        array([0., 0.])
        """
        chooser, (_, seeds) = by or self, self.scores.shape
        sums, counts = np.zeros(seeds), np.zeros(seeds)
        for choosing, scored in splits:
            sums[scored] += self.scores[chooser.scores[:, choosing].mean(1).argmax(), scored]
            counts[scored] += 1
        return sums / counts
