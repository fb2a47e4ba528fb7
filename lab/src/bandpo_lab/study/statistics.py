"""What can be said of arms from their seeds: intervals, paired differences, and the choice among tuned values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats
from statsmodels.stats.multitest import multipletests

from bandpo.errors import InvalidValue
from bandpo_lab.study.collect import Record
from bandpo_lab.study.plan import Study

LOWER_IS_BETTER = ("batches to half",)


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and its interval of 95 % (the mean alone, where there is one seed)."""

    mean: float
    low: float
    high: float

    @classmethod
    def from_values(cls, values: Sequence[float]) -> Interval:
        """By percentile bootstrap, which stays within the range of the values: a share stays in [0, 1].

        With few seeds it is too narrow; `coverage` says by how much.

        >>> Interval.from_values([0.5, 0.75])
        Interval(mean=0.625, low=0.5, high=0.75)
        """
        if not np.ptp(values):
            return cls(values[0], values[0], values[0])
        drawn: Any = stats.bootstrap((values,), np.mean, method="percentile", rng=np.random.default_rng(0))
        return cls(float(np.mean(values)), *map(float, drawn.confidence_interval))

    @classmethod
    def from_gaps(cls, gaps: Sequence[float]) -> tuple[Interval, float]:
        """Student's, of paired differences, with the p of the t-test that they are 0 on average.

        >>> interval, p = Interval.from_gaps([0.1, 0.2, 0.3])
        >>> round(interval.low, 3), round(interval.high, 3), round(p, 3)
        (-0.048, 0.448, 0.074)
        """
        mean = float(np.mean(gaps))
        if not np.ptp(gaps):  # the interval is undefined where all gaps are equal
            return cls(mean, mean, mean), float(not any(gaps))
        test: Any = stats.ttest_1samp(gaps, 0.0)
        return cls(mean, *map(float, test.confidence_interval(0.95))), float(test.pvalue)


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
    p: float
    """Of the paired t-test, corrected after Holm for all comparisons of the study."""

    @property
    def claimed(self) -> bool:
        """Whether a difference may be claimed: at 5 % over all comparisons of the study together."""
        return self.p < 0.05


def by_seed(records: Sequence[Record], experiment: str, arm: str, metric: str) -> dict[int, float]:
    """One figure for each reported seed."""
    return {
        r.seed: r.metric(metric)
        for r in records
        if r.experiment == experiment and r.arm == arm and r.tuning is None
    }


def gaps(
    records: Sequence[Record], experiment: str, arm: str, minus: str, metric: str, without: Sequence[int] = ()
) -> dict[int, float]:
    """One arm minus another, for each seed that both have and that is not in ``without``."""
    ours, theirs = by_seed(records, experiment, arm, metric), by_seed(records, experiment, minus, metric)
    return {s: ours[s] - theirs[s] for s in sorted(ours.keys() & theirs.keys() - set(without))}


def differences(
    study: Study, records: Sequence[Record], metric: str, without: Mapping[str, Sequence[int]] | None = None
) -> list[ArmDifference]:
    """Every arm against the baseline in every experiment, paired by seed, corrected for their number after Holm.

    Args:
        study: Says which arms meet in which experiments.
        records: The runs.
        metric: What is compared.
        without: Seeds to leave out, by experiment.
    """
    found: list[tuple[str, str, Interval, float]] = []
    for e in study.experiments.values():
        for arm in [] if e.identical else study.arms_of(e):
            apart = gaps(records, e.name, arm, study.baseline, metric, (without or {}).get(e.name, ()))
            if arm != study.baseline and len(apart) > 1:
                found.append((e.name, arm, *Interval.from_gaps(list(apart.values()))))
    corrected: Any = multipletests([p for *_, p in found], method="holm")[1]
    return [
        ArmDifference(experiment, arm, interval, float(p))
        for (experiment, arm, interval, _), p in zip(found, corrected, strict=True)
    ]


@dataclass(frozen=True)
class Comparisons:
    """All that a report says of every arm against the baseline, computed once."""

    decided: Sequence[ArmDifference]
    """By what the study is decided by, over all seeds."""
    unseen: Sequence[ArmDifference]
    """The same over the seeds that had not been seen before the study was extended."""
    early: Sequence[ArmDifference]
    """By AUC."""

    @classmethod
    def from_records(
        cls, study: Study, records: Sequence[Record], seen: Mapping[str, Sequence[int]] | None = None
    ) -> Comparisons:
        """Over all experiments.

        Args:
            study: Says which arms meet in which experiments.
            records: The runs.
            seen: Seeds that had been seen before others were added, by experiment.
        """
        decided = differences(study, records, study.primary)
        return cls(
            decided,
            differences(study, records, study.primary, seen) if seen else decided,
            decided if study.primary == "AUC" else differences(study, records, "AUC"),
        )


@dataclass(frozen=True)
class Contrast:
    """One arm minus another in several experiments, paired by seed."""

    by_experiment: Mapping[str, Interval]
    overall: Interval
    """Over seeds, of each seed's mean over the experiments."""
    above: int
    """Pairs in which the first arm has the greater figure."""
    pairs: int

    @classmethod
    def from_records(
        cls, study: Study, records: Sequence[Record], arm: str, minus: str, metric: str
    ) -> Contrast:
        """Over all experiments in which both arms took part, on the seeds that all of these have."""
        found = {
            e.name: apart
            for e in study.experiments.values()
            if not e.identical and (apart := gaps(records, e.name, arm, minus, metric))
        }
        seeds = sorted(set.intersection(*map(set, found.values())))
        table = np.array([[apart[seed] for seed in seeds] for apart in found.values()])
        by_experiment = [Interval.from_gaps(row)[0] for row in table.tolist()]
        return cls(
            dict(zip(found, by_experiment, strict=True)),
            Interval.from_gaps(table.mean(axis=0).tolist())[0],
            int((table > 0).sum()),
            table.size,
        )


def choose(study: Study, records: Sequence[Record]) -> dict[tuple[str, str], dict[str, Any]]:
    """For each experiment that tunes and each arm: the values with the best mean of the primary metric.

    Raises:
        ValueError: an arm none of whose tuning runs ended.
    """
    sign = -1 if study.primary in LOWER_IS_BETTER else 1
    chosen: dict[tuple[str, str], dict[str, Any]] = {}
    for e in study.experiments.values():
        for arm in study.arms_of(e) if e.tune else []:
            scores = [
                (sign * score, choice)
                for choice in (e.tune.choices() if e.tune else [])
                if (score := tuning_score(records, e.name, arm, choice, study.primary)) is not None
            ]
            if not scores:
                raise InvalidValue(f"{e.name}: all tuning runs of {arm!r} failed; see the lines above")
            chosen[e.name, arm] = max(scores, key=lambda pair: pair[0])[1]
    return chosen


def tuning_score(
    records: Sequence[Record], experiment: str, arm: str, choice: Mapping[str, Any], metric: str
) -> float | None:
    """Mean of the metric over the tuning seeds of one choice; None where no run ended."""
    values = [
        r.metric(metric)
        for r in records
        if r.experiment == experiment
        and r.arm == arm
        and r.tuning is not None
        and dict(r.tuning) == dict(choice)
    ]
    return float(np.mean(values)) if values else None


def differing(records: Sequence[Record], experiment: str) -> list[str]:
    """Runs of an experiment that are not what another arm's run of the same seed is, number for number."""
    first: dict[int, Record] = {}
    return [
        f"{r.arm}, seed {r.seed}"
        for r in records
        if r.experiment == experiment
        and (r.curves["reward"], r.curves["entropy"], r.after)
        != ((f := first.setdefault(r.seed, r)).curves["reward"], f.curves["entropy"], f.after)
    ]
