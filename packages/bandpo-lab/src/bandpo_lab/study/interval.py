"""Intervals of a statistic over batches, seeds or problems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats


class Interval(NamedTuple):
    """A value with its interval, at 95 % unless another coverage is named."""

    value: float
    low: float
    high: float

    @property
    def half(self) -> float:
        """Half of the width of the interval, for "value ± half"."""
        return (self.high - self.low) / 2


def signed(interval: Interval, digits: int = 3) -> str:
    """Return a difference with its interval as text.

    >>> signed(Interval(0.095, 0.081, 0.11), 2)
    '+0.10 [+0.08, +0.11]'
    """
    value, low, high = (f"{x:+.{digits}f}" for x in interval)
    return f"{value} [{low}, {high}]"


def bootstrap(
    samples: Sequence[ArrayLike],
    statistic: Callable[..., Any] = np.mean,
    *,
    paired: bool = False,
    resamples: int = 9999,
) -> Interval:
    """Compute a statistic with its interval from the percentile bootstrap.

    The interval stays within the range of the statistic, so that of a share stays in [0, 1]. With few values it is too
    narrow: for 8 normal values the coverage of the mean is 89 %, not 95 %.

    Args:
        samples: One or more samples, each of shape (values,). The values must be independent: batches, seeds or
            problems, but not tokens.
        statistic: The statistic, a function of the samples with an ``axis`` argument, as in numpy.
        paired: If True, the samples are paired value by value and are resampled together.
        resamples: The number of bootstrap samples, which are the same in every call.

    >>> bootstrap([[0.5, 0.75]])
    Interval(value=0.625, low=0.5, high=0.75)
    """
    arrays = [np.asarray(sample, dtype=np.float64) for sample in samples]
    value = float(statistic(*arrays, axis=-1))
    if all(len(array) < 2 or not np.ptp(array) for array in arrays):
        return Interval(value, value, value)
    result: Any = stats.bootstrap(
        arrays,
        statistic,
        paired=paired,
        method="percentile",
        n_resamples=resamples,
        batch=100,
        rng=np.random.default_rng(0),
    )
    return Interval(value, *map(float, result.confidence_interval))


def student(values: ArrayLike, level: float = 0.95) -> Interval:
    """Compute Student's interval of a mean, for few values that are roughly normal, as paired differences are.

    Args:
        values: The values, of shape (values,).
        level: The coverage of the interval.

    >>> interval = student([0.1, 0.2, 0.3])
    >>> round(interval.low, 3), round(interval.high, 3)
    (-0.048, 0.448)
    """
    array = np.asarray(values, dtype=np.float64)
    mean = float(array.mean())
    if len(array) < 2 or not np.ptp(array):  # the interval is undefined if all values are equal
        return Interval(mean, mean, mean)
    standard_error = float(array.std(ddof=1)) / len(array) ** 0.5
    half_width = float(stats.t.ppf((1 + level) / 2, len(array) - 1)) * standard_error
    return Interval(mean, mean - half_width, mean + half_width)
