"""The statistics of a study: paired differences over seeds, and the choice of tuned values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy import stats

from bandpo_lab.errors import InvalidValue
from bandpo_lab.evals.metrics import holm
from bandpo_lab.files.validation import validate_as
from bandpo_lab.study.collect import RunResult
from bandpo_lab.study.interval import Interval, student
from bandpo_lab.study.plan import Study, parse_study

LOWER_IS_BETTER = ("batches to half",)
"""The metrics of which lower values are better."""


@dataclass(frozen=True)
class ArmDifference:
    """The difference of an arm and the baseline, over the seeds that both have."""

    experiment: str
    arm: str
    interval: Interval
    """The mean difference with Student's interval at 95 %, not corrected."""
    p: float
    """The p-value of the paired t-test, corrected after Holm for all comparisons of the study."""

    @property
    def claimed(self) -> bool:
        """True if the difference is significant at 5 %, over all comparisons of the study."""
        return self.p < 0.05


@dataclass(frozen=True)
class Results:
    """A study with the runs that have ended."""

    study: Study
    runs: Sequence[RunResult]

    @classmethod
    def from_file(cls, content: Mapping[str, Any]) -> Results:
        """Read the content of a ``results.json``.

        Raises:
            ValueError: A field of a run is missing or has a wrong type.
        """
        return cls(parse_study(content["study"]), validate_as(list[RunResult], content["runs"], "runs"))

    def runs_of(self, experiment: str, arm: str) -> list[RunResult]:
        """Return the reported runs of an arm, one per seed."""
        return [run for run in self.runs if (run.experiment, run.arm, run.tuning) == (experiment, arm, None)]

    def by_seed(self, experiment: str, arm: str, metric: str) -> dict[int, float]:
        """Return a metric of an arm for each reported seed."""
        return {run.seed: run.metric(metric) for run in self.runs_of(experiment, arm)}

    def paired_differences(self, experiment: str, arm: str, metric: str) -> dict[int, float]:
        """Return the metric of an arm minus that of the baseline, for each seed that both have."""
        values = self.by_seed(experiment, arm, metric)
        baseline = self.by_seed(experiment, self.study.baseline, metric)
        return {seed: values[seed] - baseline[seed] for seed in sorted(values.keys() & baseline.keys())}

    def differences(self, metric: str) -> list[ArmDifference]:
        """Compare every arm with the baseline in every experiment, paired by seed and corrected after Holm."""
        comparisons: list[tuple[str, str, list[float]]] = []
        for experiment in self.study.experiments.values():
            for arm in self.study.arms_of(experiment):
                by_seed = self.paired_differences(experiment.name, arm, metric)
                if arm != self.study.baseline and len(by_seed) > 1:
                    comparisons.append((experiment.name, arm, list(by_seed.values())))
        corrected = holm([_p_value(differences) for *_, differences in comparisons])
        return [
            ArmDifference(experiment, arm, student(differences), p)
            for (experiment, arm, differences), p in zip(comparisons, corrected, strict=True)
        ]

    def tuning_score(self, experiment: str, arm: str, choice: Mapping[str, Any]) -> float | None:
        """Return the mean of the primary metric over the tuning seeds, for one choice of values.

        The score is None if no run with these values ended.
        """
        values = [
            run.metric(self.study.primary)
            for run in self.runs
            if (run.experiment, run.arm) == (experiment, arm)
            and run.tuning is not None
            and dict(run.tuning) == dict(choice)
        ]
        return float(np.mean(values)) if values else None

    @cached_property
    def tuned_values(self) -> dict[tuple[str, str], dict[str, Any]]:
        """The values with the best mean of the primary metric, by the experiment that tunes and the arm.

        Raises:
            ValueError: No tuning run of an arm ended.
        """
        sign = -1 if self.study.primary in LOWER_IS_BETTER else 1
        tuned_values: dict[tuple[str, str], dict[str, Any]] = {}
        for experiment in self.study.experiments.values():
            if not experiment.tune:
                continue
            for arm in self.study.arms_of(experiment):
                scores: list[tuple[float, dict[str, Any]]] = []
                for choice in experiment.tune.choices():
                    score = self.tuning_score(experiment.name, arm, choice)
                    if score is not None:
                        scores.append((sign * score, choice))
                if not scores:
                    raise InvalidValue(
                        f"{experiment.name}: all tuning runs of {arm!r} failed; see the lines above"
                    )
                tuned_values[experiment.name, arm] = max(scores, key=lambda pair: pair[0])[1]
        return tuned_values


def _p_value(differences: Sequence[float]) -> float:
    """Compute the p-value of the t-test; if all differences are equal, 1 if they are 0 and 0 if they are not."""
    if not np.ptp(differences):
        return float(not any(differences))
    t = np.mean(differences) / (np.std(differences, ddof=1) / np.sqrt(len(differences)))
    return float(2 * stats.t.sf(abs(t), len(differences) - 1))
