"""Clip rates that have been reported, each with its source, and what a run's own rate is beside them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bandpo.audit.files import shipped
from bandpo.divergences import KL
from bandpo.methods import Method
from bandpo.objectives import DualClip, Surrogate
from bandpo.rules import Band, FixedClip


@dataclass(frozen=True)
class Reported:
    """A share of tokens that were clipped, both sides together, or its range over a run or over seeds."""

    rule: str
    """``fixed``, for a fixed interval, or ``Band-KL``."""
    level: str
    """``token``, or ``sequence`` (GSPO): there all tokens of a clipped sequence count."""
    low: float
    high: float
    updates: int | None
    """Optimiser steps on each batch; None for an asynchronous run."""
    of: str
    """The model and the settings."""
    source: str


REPORTED = [Reported(**entry) for entry in shipped("clip_rates")]
"""Nothing was found of other methods, nor of Band on sequences."""

FAR = 10.0
"""How many times the highest reported rate is far above it: a rule of thumb. Reports of one rule, level and number of
updates differ by 3 to 12 times among themselves."""
WIDE_FOR_SEQUENCES = 0.02
"""A fixed clip from which a sequence's ratio, a geometric mean, hardly ever leaves: 50 times GSPO's 4e-4."""


def closest(rate: float, known: Sequence[Reported]) -> Reported:
    """The one of several reports that a rate above 0 lies in, or that it lies nearest to by its factor."""
    return min(known, key=lambda entry: abs(math.log(rate / min(max(rate, entry.low), entry.high))))


def kind(method: Method) -> str | None:
    """``fixed`` or ``Band-KL``, as in `Reported`; None for any other method: nothing was found of it."""
    inner = method.objective.objective if isinstance(method.objective, DualClip) else method.objective
    if inner != Surrogate():
        return None
    if isinstance(method.clip, Band):
        return "Band-KL" if isinstance(method.clip.divergence, KL) else None
    return "fixed" if isinstance(method.clip, FixedClip) else None


def reported(rule: str | None, level: str, updates: float | None) -> Sequence[Reported]:
    """What compares best with a run: of its rule and level, and of its number of updates or the nearest there is.

    Args:
        rule: See `Reported`; None if there is nothing to compare with.
        level: See `Reported`.
        updates: Optimiser steps on each batch. If None, reports on language models are taken: four updates, or
            asynchronous.
    """
    found = [entry for entry in REPORTED if (entry.rule, entry.level) == (rule, level)]
    if updates is None:
        return [entry for entry in found if entry.updates in (4, None)]

    def distance(entry: Reported) -> float:
        return abs(math.log(updates / entry.updates)) if entry.updates else math.inf

    nearest = min(map(distance, found), default=math.inf)
    return [entry for entry in found if distance(entry) == nearest]
