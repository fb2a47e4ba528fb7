"""Whether one model is better than another, by one metric that is named beforehand; said in plain words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bandpo.errors import InvalidValue
from bandpo_lab.evals.metrics import Estimate, estimate, holm
from bandpo_lab.evals.report import Scores

PRIMARY = "mean@"


@dataclass(frozen=True)
class ScoreDifference:
    """Second minus first, for one metric of one data source.

    Attributes:
        interval: Of this metric alone, at 95 %.
        p: The interval's, corrected for the metrics beside it (Holm).
    """

    data_source: str
    metric: str
    first: float
    second: float
    interval: Estimate
    p: float

    @property
    def primary(self) -> bool:
        """Whether this is the metric that decides: ``mean@n``, whatever was found."""
        return self.metric.startswith(PRIMARY)

    @property
    def verdict(self) -> str:
        """In plain words, what can be claimed."""
        if self.p >= 0.05:
            return "no difference can be claimed"
        return "the second is better" if self.interval.value > 0 else "the first is better"


def compare_scores(
    first: Sequence[Mapping[str, Scores]], second: Sequence[Mapping[str, Scores]]
) -> list[ScoreDifference]:
    """Compares two models, each with scores by seed, on every data source and metric that both have.

    The first metric of a source, ``mean@n``, is the primary one. The p-values of the primary ones of all sources are
    corrected for each other, and those of the others too.

    Raises:
        ValueError: Nothing in common, or a data source with other problems on one side.
    """
    if not first or not second:
        raise InvalidValue("give at least one run for each side")
    runs = [*first, *second]
    differences = []
    for source in first[0]:
        if not all(source in run for run in runs):
            continue
        if len({run[source].problems for run in runs}) > 1:
            raise InvalidValue(f"{source}: the runs have different problems: evaluate both on the same file")
        for metric in first[0][source].values:
            if all(metric in run[source].values for run in runs):
                a, b = ([run[source].values[metric] for run in side] for side in (first, second))
                means = float(np.mean(a)), float(np.mean(b))
                found = estimate(b, minus=a, smooth=metric.startswith(PRIMARY))
                differences.append(ScoreDifference(source, metric, *means, found, found.p))
    if not differences:
        raise InvalidValue(
            "the runs have no data source and metric in common: evaluate both on the same data with one n"
        )
    for primary in (True, False):
        family = [i for i, difference in enumerate(differences) if difference.primary is primary]
        for i, p in zip(family, holm([differences[i].p for i in family]), strict=True):
            differences[i] = replace(differences[i], p=p)
    return differences
