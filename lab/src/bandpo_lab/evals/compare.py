"""Whether one model is better than another: paired bootstrap over problems, said in plain words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bandpo.audit.interval import Interval
from bandpo.errors import InvalidValue
from bandpo_lab.evals.metrics import estimate
from bandpo_lab.evals.report import Scores


@dataclass(frozen=True)
class ScoreDifference:
    """Second minus first, for one metric of one data source."""

    data_source: str
    metric: str
    first: float
    second: float
    interval: Interval

    @property
    def verdict(self) -> str:
        """In plain words, what can be claimed."""
        if self.interval.low > 0:
            return "the second is better"
        if self.interval.high < 0:
            return "the first is better"
        return "no difference can be claimed"


def compare_scores(
    first: Sequence[Mapping[str, Scores]], second: Sequence[Mapping[str, Scores]]
) -> list[ScoreDifference]:
    """Compares two models, each with scores by seed, on every data source and metric that both have.

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
                differences.append(ScoreDifference(source, metric, *means, estimate(b, minus=a)))
    if not differences:
        raise InvalidValue(
            "the runs have no data source and metric in common: evaluate both on the same data with one n"
        )
    return differences
