"""Means of rewards and advantages by group, and limits that several checks of advantages share."""

from __future__ import annotations

import math

import numpy as np

from rlvet.records.recorded_advantages import Flags, Floats, Integers

NEARLY_ALL = 0.98
"""Share of sequences from which a property counts as that of all sequences."""

MAJORITY = 0.5
"""Share above which a property counts as that of most sequences, answers or batches."""

FEWEST_SEQUENCES = 8
"""Number of sequences with an advantage other than 0 below which advantages are not compared with an estimator."""

FEWEST_CORRELATED = 60
"""Number of sequences from which such a correlation, or the ends of answers, are judged."""

MIN_PAIRS = 20
"""Number of pairs of equal answers from which their rewards, or their advantages, are compared."""


def distinct_index(*columns: Floats | Integers) -> Integers:
    """Return the index of each row's distinct combination of values, counted from 0, (rows,)."""
    index = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        _, column_index = np.unique(column, return_inverse=True)
        distinct = int(column_index.max(initial=0)) + 1
        _, index = np.unique(index * distinct + column_index, return_inverse=True)
    return index


def means_by_index(values: Floats | Flags, index: Integers, weights: Floats | None = None) -> Floats:
    """Compute the mean of the values with each index, NaN left out; NaN if there are none.

    Args:
        values: The values, (n,).
        index: Index of each value's group, (n,).
        weights: Weight of each value, (n,); 1 if not given.
    """
    recorded = ~np.isnan(values)
    if weights is None:
        weights = np.ones(len(values))
    count = int(index.max(initial=-1)) + 1
    sums = np.bincount(index[recorded], weights=(values * weights)[recorded], minlength=count)
    totals = np.bincount(index[recorded], weights=weights[recorded], minlength=count)
    return np.divide(sums, totals, out=np.full(count, math.nan), where=totals > 0)
