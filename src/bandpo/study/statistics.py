"""What can be said of arms from their seeds: intervals, paired differences, and the choice among tuned values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from bandpo.study.collect import Record
from bandpo.study.plan import Study

LOWER_IS_BETTER = ("batches to half",)


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and its Student interval of 95 % (the mean alone, where there is one seed)."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """
        >>> Interval.of([0.5, 0.7])
        Interval(mean=0.6, low=-0.6706, high=1.8706)
        """
        mean = float(np.mean(values))
        error = float(stats.sem(values)) if len(values) > 1 else 0.0
        half = float(stats.t.ppf(0.975, len(values) - 1)) * error if error else 0.0
        return cls(round(mean, 4), round(mean - half, 4), round(mean + half, 4))


@dataclass(frozen=True)
class Difference:
    """An arm minus the baseline, over the seeds that both have."""

    arm: str
    interval: Interval
    p: float
    """Of the paired t-test, times what Holm's correction for all arms of the comparison asks."""

    @property
    def claimed(self) -> bool:
        """Whether a difference may be claimed: at 5 % over all arms of the comparison together."""
        return self.p < 0.05


def by_seed(records: Sequence[Record], experiment: str, arm: str, metric: str) -> dict[int, float]:
    """One figure for each reported seed."""
    return {
        r.seed: r.metric(metric)
        for r in records
        if r.experiment == experiment and r.arm == arm and r.tuning is None
    }


def differences(
    records: Sequence[Record], experiment: str, arms: Sequence[str], baseline: str, metric: str
) -> list[Difference]:
    """Every arm against the baseline, paired by seed, corrected for their number after Holm."""
    base = by_seed(records, experiment, baseline, metric)
    found: list[tuple[str, Interval, float]] = []
    for arm in arms:
        own = by_seed(records, experiment, arm, metric)
        gaps = [own[seed] - base[seed] for seed in sorted(own.keys() & base.keys())]
        if arm != baseline and len(gaps) > 1:
            test: Any = stats.ttest_1samp(gaps, 0.0)
            p = (
                float(test.pvalue) if np.ptp(gaps) else float(not any(gaps))
            )  # undefined where all gaps are one
            found.append((arm, Interval.of(gaps), p))
    corrected: dict[str, float] = {}
    largest = 0.0
    for rank, (arm, _, p) in enumerate(sorted(found, key=lambda each: each[2])):
        largest = max(largest, min(1.0, p * (len(found) - rank)))
        corrected[arm] = largest
    return [Difference(arm, interval, corrected[arm]) for arm, interval, _ in found]


def choose(study: Study, records: Sequence[Record]) -> dict[tuple[str, str], dict[str, Any]]:
    """For each experiment that tunes and each arm: the values with the best mean of the primary metric.

    Raises:
        ValueError: an arm none of whose tuning runs ended.
    """
    sign = -1 if study.primary in LOWER_IS_BETTER else 1
    chosen: dict[tuple[str, str], dict[str, Any]] = {}
    for e in study.experiments:
        for arm in study.arms_of(e) if e.tune else []:
            scores = [
                (sign * score, choice)
                for choice in (e.tune.choices() if e.tune else [])
                if (score := tuning_score(records, e.name, arm, choice, study.primary)) is not None
            ]
            if not scores:
                raise ValueError(f"{e.name}: all tuning runs of {arm!r} failed; see the lines above")
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
