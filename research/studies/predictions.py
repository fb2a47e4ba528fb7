"""Predictions of a study: a table in a page that is committed before the first run, and verdicts on its rows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from bandpo_lab.errors import InvalidValue
from bandpo_lab.study.interval import Interval


class Prediction(NamedTuple):
    """A predicted difference between two arms in one setting."""

    world: str
    arm: str
    minus: str
    metric: str
    expects: str
    """``greater`` or ``less`` by at least the smallest effect of interest, or ``equal`` to within it."""


def read_predictions(file: Path) -> list[Prediction]:
    """Return the rows of a page's table of predictions: world, arm, against, metric, expected, why.

    Raises:
        ValueError: if there is no table, or a row expects something other than ``greater``, ``less`` or ``equal``.
    """
    rows = [row.split(" | ") for row in re.findall(r"^\| (.*) \|$", file.read_text(encoding="utf-8"), re.M)]
    predictions = [Prediction(*row[:5]) for row in rows if len(row) == 6 and row[0] != "world"]
    if not predictions or {prediction.expects for prediction in predictions} - {"greater", "less", "equal"}:
        raise InvalidValue(f"{file} has no table of predictions with greater, less or equal")
    return predictions


def verdict(difference: Interval, expects: str, smallest: float) -> str:
    """Return the verdict on a prediction: ``held``, ``failed`` or ``undecided``.

    Args:
        difference: The measured difference of the two arms, with its interval.
        expects: ``greater``, ``less`` or ``equal``.
        smallest: The smallest effect of interest.

    >>> verdict(Interval(0.1, 0.02, 0.2), "greater", 0.05), verdict(Interval(0.01, -0.03, 0.04), "greater", 0.05)
    ('held', 'failed')
    >>> verdict(Interval(0.1, -0.02, 0.2), "greater", 0.05), verdict(Interval(0.1, 0.06, 0.2), "equal", 0.05)
    ('undecided', 'failed')
    """
    inside = difference.low > -smallest and difference.high < smallest
    if expects == "equal":
        beyond = difference.low > smallest or difference.high < -smallest
        if inside:
            return "held"
        return "failed" if beyond else "undecided"
    sign = 1 if expects == "greater" else -1
    nearest, farthest = sorted((sign * difference.low, sign * difference.high))
    if nearest > 0 and sign * difference.value >= smallest:
        return "held"
    return "failed" if inside or farthest < 0 else "undecided"
