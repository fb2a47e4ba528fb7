"""Compare two models by one metric that is fixed beforehand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bandpo_lab.errors import InvalidValue
from bandpo_lab.evals.metrics import Estimate, estimate, holm
from bandpo_lab.evals.report import Scores

PRIMARY = "mean@"


@dataclass(frozen=True)
class ScoreDifference:
    """The difference of two models, second minus first, in one metric of one data source.

    Attributes:
        first: The mean of the first model.
        second: The mean of the second model.
        interval: The difference with its interval at 95 %, not corrected for other metrics.
        p: The p-value of the difference, corrected for the other metrics (Holm).
    """

    data_source: str
    metric: str
    first: float
    second: float
    interval: Estimate
    p: float

    @property
    def primary(self) -> bool:
        """True if this is the metric that decides, ``mean@n``, which is fixed before the results are known."""
        return self.metric.startswith(PRIMARY)

    @property
    def verdict(self) -> str:
        """The conclusion in words."""
        if self.p >= 0.05:
            return "no difference can be claimed"
        return "the second is better" if self.interval.value > 0 else "the first is better"


def compare_scores(
    first: Sequence[Mapping[str, Scores]], second: Sequence[Mapping[str, Scores]]
) -> list[ScoreDifference]:
    """Compare two models on every data source and metric that all of their runs have.

    ``mean@n`` is the primary metric of a source. P-values are corrected for multiple comparisons (Holm) in two
    families: the primary metrics of all sources, and all other metrics.

    Args:
        first: The scores of the first model by data source, one mapping per seed.
        second: The scores of the second model by data source, one mapping per seed.

    Raises:
        ValueError: The runs have nothing in common, or different problems in a data source.
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
            if not all(metric in run[source].values for run in runs):
                continue
            # Each of shape (seeds, problems).
            first_values = [run[source].values[metric] for run in first]
            second_values = [run[source].values[metric] for run in second]
            interval = estimate(second_values, minus=first_values, smooth=metric.startswith(PRIMARY))
            difference = ScoreDifference(
                data_source=source,
                metric=metric,
                first=float(np.mean(first_values)),
                second=float(np.mean(second_values)),
                interval=interval,
                p=interval.p,
            )
            differences.append(difference)
    if not differences:
        raise InvalidValue(
            "the runs have no data source and metric in common: evaluate both on the same data with one n"
        )
    # Correct the primary metrics for each other, then all other metrics.
    for primary in (True, False):
        family = [i for i, difference in enumerate(differences) if difference.primary is primary]
        corrected = holm([differences[i].p for i in family])
        for i, p in zip(family, corrected, strict=True):
            differences[i] = replace(differences[i], p=p)
    return differences
