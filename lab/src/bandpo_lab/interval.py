"""Intervals: how far a figure may be off, given how it varies over batches, seeds or problems. All use scipy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats


class Interval(NamedTuple):
    """A figure, and the interval of 95 % around it."""

    value: float
    low: float
    high: float

    @property
    def half(self) -> float:
        """Half of the interval's width, for "value ± half"."""
        return (self.high - self.low) / 2


def bootstrap(
    samples: Sequence[ArrayLike],
    statistic: Callable[..., Any] = np.mean,
    *,
    paired: bool = False,
    resamples: int = 9999,
) -> Interval:
    """The percentile bootstrap: it stays within the range of the values, so a share stays in [0, 1].

    With few values it is too narrow: of 8 normal ones it holds the mean in 89 % of cases, not 95 %.

    Args:
        samples: One or more samples, each of shape (values,). Draw what is independent: batches, seeds or problems,
            not tokens.
        statistic: Of the samples, as numpy has it, with an ``axis`` argument.
        paired: Whether the samples belong together, value by value, and are drawn together.
        resamples: How many are drawn, always the same ones.

    >>> bootstrap([[0.5, 0.75]])
    Interval(value=0.625, low=0.5, high=0.75)
    """
    arrays = [np.asarray(sample, dtype=np.float64) for sample in samples]
    value = float(statistic(*arrays, axis=-1))
    if all(len(array) < 2 or not np.ptp(array) for array in arrays):
        return Interval(value, value, value)
    drawn: Any = stats.bootstrap(
        arrays,
        statistic,
        paired=paired,
        method="percentile",
        n_resamples=resamples,
        batch=100,
        rng=np.random.default_rng(0),
    )
    return Interval(value, *map(float, drawn.confidence_interval))
