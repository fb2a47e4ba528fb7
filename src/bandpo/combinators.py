"""Clip rules made of clip rules. All take and give intervals around 1, and none solves to tell what lies outside.

TRGPPO and the paper's "relaxed" Band are unions: ``Union(Band(KL(), 0.05), FixedClip(0.2, 0.28))``.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from bandpo.bounds import RatioBounds
from bandpo.clipping import ClipRule, FixedClip, Outside

__all__ = ["Capped", "Intersection", "Sides", "Union"]


def _check_rules(**rules: object) -> None:
    for name, rule in rules.items():
        if not isinstance(rule, ClipRule):
            raise TypeError(f"{name} must be a ClipRule such as FixedClip(0.2), got {rule!r}")


@dataclass(frozen=True)
class Sides(ClipRule):
    """The lower bound of one rule and the upper bound of another.

    >>> bounds = Sides(lower=FixedClip(0.2), upper=Band(KL(), 0.05)).bounds(torch.tensor([0.08]).log())
    >>> print(f"{bounds.lower.item():.3f} {bounds.upper.item():.3f}")
    0.800 2.411
    """

    lower: ClipRule
    upper: ClipRule

    def __post_init__(self) -> None:
        _check_rules(lower=self.lower, upper=self.upper)

    def bounds(self, logp_old: Tensor) -> RatioBounds:
        return RatioBounds(self.lower.bounds(logp_old).log_lower, self.upper.bounds(logp_old).log_upper)

    def outside(self, log_ratio: Tensor, logp_old: Tensor) -> Outside:
        below = self.lower.outside(log_ratio, logp_old).below
        return Outside(below, self.upper.outside(log_ratio, logp_old).above)


@dataclass(frozen=True)
class _Pair(ClipRule):
    a: ClipRule
    b: ClipRule

    def __post_init__(self) -> None:
        _check_rules(a=self.a, b=self.b)

    @staticmethod
    @abstractmethod
    def _lower(a: Tensor, b: Tensor, /) -> Tensor:
        """Of two lower bounds the one that holds."""

    @staticmethod
    @abstractmethod
    def _upper(a: Tensor, b: Tensor, /) -> Tensor:
        """Of two upper bounds the one that holds."""

    @staticmethod
    @abstractmethod
    def _outside(a: Tensor, b: Tensor, /) -> Tensor:
        """Outside of the pair, where ``a`` and ``b`` tell what is outside of each."""

    def bounds(self, logp_old: Tensor) -> RatioBounds:
        a, b = self.a.bounds(logp_old), self.b.bounds(logp_old)
        return RatioBounds(self._lower(a.log_lower, b.log_lower), self._upper(a.log_upper, b.log_upper))

    def outside(self, log_ratio: Tensor, logp_old: Tensor) -> Outside:
        a, b = self.a.outside(log_ratio, logp_old), self.b.outside(log_ratio, logp_old)
        return Outside(self._outside(a.below, b.below), self._outside(a.above, b.above))


@dataclass(frozen=True)
class Union(_Pair):
    """Ratios that either rule allows: the lesser lower and the greater upper bound.

    >>> Union(Band(KL(), 0.05), FixedClip(0.2, 0.28)).bounds(torch.tensor([0.9]).log()).upper
    tensor([1.2800])
    """

    _lower, _upper, _outside = map(staticmethod, (torch.minimum, torch.maximum, torch.logical_and))


@dataclass(frozen=True)
class Intersection(_Pair):
    """Ratios that both rules allow: the greater lower and the lesser upper bound.

    >>> Intersection(Band(KL(), 0.05), FixedClip(0.2, 0.28)).bounds(torch.tensor([0.9]).log()).upper
    tensor([1.0764])
    """

    _lower, _upper, _outside = map(staticmethod, (torch.maximum, torch.minimum, torch.logical_or))


@dataclass(frozen=True)
class Capped(ClipRule):
    """A rule whose upper bound is at most ``max_ratio``.

    >>> Capped(Unclipped(), 10.0).bounds(torch.tensor([0.08]).log()).upper
    tensor([10.])
    """

    rule: ClipRule
    max_ratio: float

    def __post_init__(self) -> None:
        _check_rules(rule=self.rule)
        if not 1 < self.max_ratio < math.inf:
            raise ValueError(f"max_ratio must be finite and above 1, got {self.max_ratio!r}")

    def bounds(self, logp_old: Tensor) -> RatioBounds:
        return self._both.bounds(logp_old)

    def outside(self, log_ratio: Tensor, logp_old: Tensor) -> Outside:
        return self._both.outside(log_ratio, logp_old)

    @property
    def _both(self) -> Intersection:
        return Intersection(self.rule, FixedClip(1.0, self.max_ratio - 1))
