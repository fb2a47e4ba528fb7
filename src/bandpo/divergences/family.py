"""Divergences whose bounds come from the generic solver."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bandpo.divergences._exact import expm1, expm1_minus
from bandpo.divergences.base import Divergence
from bandpo.errors import InvalidValue

__all__ = ["AlphaDivergence", "JensenShannon"]


@dataclass(frozen=True)
class JensenShannon(Divergence):
    """Jensen–Shannon, the mean KL of ``π`` and ``π_old`` to their mixture. Radius in nats, at most ``log 2``.

    ``f(u) = ½·[u·log u − (1 + u)·log((1 + u)/2)]``. Both bounds can saturate.

    >>> bounds = ratio_bounds(torch.tensor([0.01, 0.08, 0.5]).log(), JensenShannon(), radius=0.0125)
    >>> [round(u, 3) for u in bounds.upper.tolist()]
    [6.788, 2.326, 1.312]
    >>> [round(u, 3) for u in bounds.lower.tolist()]
    [0.0, 0.193, 0.688]
    """

    @property
    def curvature(self) -> float:
        return 0.25

    def f(self, log_u: Tensor) -> Tensor:
        # With h = ½·log u:  f = ½·(1 + u)·(h·tanh h − log cosh h), even in h up to the factor.
        h = log_u.abs() / 2
        near = h.clamp(max=2.0)
        # sinh² h comes from e^2h − 1: torch.sinh gives other digits in another place of a tensor.
        a, grown = torch.exp(-2 * h), expm1(2 * near)
        bend = torch.where(
            h < 2,
            near * torch.tanh(near) - torch.log1p(grown * grown / (4 * (1 + grown))) / 2,
            math.log(2) - torch.log1p(a) - torch.where(a > 0, 2 * h * a, 0.0) / (1 + a),
        )
        return (1 + torch.exp(log_u)) * bend / 2

    def df(self, log_u: Tensor) -> Tensor:
        # −½·u·log((1 + 1/u)/2); below the clamp u itself is 0 to rounding.
        return -torch.exp(log_u) * torch.log1p(expm1(-log_u.clamp(min=-80.0)) / 2) / 2


@dataclass(frozen=True)
class AlphaDivergence(Divergence):
    """The Cressie–Read family, ``f(u) = (u^α − α·u + α − 1) / (α·(α − 1))``.

    α = 0 is KL and α = 1 reverse KL (the limits, taken exactly), α = 2 is half of Pearson's χ², α = −1 half of
    Neyman's, α = ½ four times the squared Hellinger distance. The upper bound can saturate for α > 0, and so can the
    lower: ``f(0) = 1/α``.

    Args:
        alpha: The exponent, between −8 and 8.

    >>> bounds = ratio_bounds(torch.tensor([0.08, 0.5]).log(), AlphaDivergence(0.5), radius=0.05)
    >>> [round(u, 3) for u in bounds.upper.tolist()]
    [2.317, 1.311]
    """

    alpha: float

    def __post_init__(self) -> None:
        if not -8 <= self.alpha <= 8:
            raise InvalidValue(f"alpha must be between -8 and 8, got {self.alpha!r}")

    def f(self, log_u: Tensor) -> Tensor:
        a = self.alpha
        # f_α(u) = u·f_{1−α}(1/u): around u = 1 the smaller exponent's form does not cancel.
        near = log_u.clamp(-0.5, 0.5)
        if a <= 0.5:
            around = (expm1_minus(near) - _power_minus(near, a)) / (1 - a)
            away = (expm1(log_u) - _power(log_u, a)) / (1 - a)
        else:
            around = torch.exp(near) * (expm1_minus(-near) - _power_minus(-near, 1 - a)) / a
            away = (torch.exp(log_u) * _power(log_u, a - 1) - expm1(log_u)) / a
        value = torch.where(log_u.abs() < 0.5, around, away)
        value = torch.where(log_u == -math.inf, 1 / a if a > ZERO else math.inf, value)
        return torch.where(log_u == math.inf, math.inf, value)

    def df(self, log_u: Tensor) -> Tensor:
        # u·(u^(α−1) − 1)/(α − 1), the larger of the two powers taken out so that neither overflows before f.
        x = (self.alpha - 1) * log_u
        size = -expm1(-x.abs()) / abs(self.alpha - 1) if self.alpha != 1 else log_u.abs()
        return torch.sign(log_u) * torch.exp(log_u + x.clamp(min=0.0)) * size


ZERO = 1e-30
"""An α up to here changes nothing in float64's digits; smaller, α·log u would lose its own, first in float32."""


def _power(x: Tensor, a: float) -> Tensor:
    """``(e^(a·x) − 1)/a``, which is ``x`` for a = 0."""
    return expm1(a * x) / a if abs(a) > ZERO else x


def _power_minus(x: Tensor, a: float) -> Tensor:
    """``(e^(a·x) − 1)/a − x``."""
    return expm1_minus(a * x) / a if abs(a) > ZERO else torch.zeros_like(x)
