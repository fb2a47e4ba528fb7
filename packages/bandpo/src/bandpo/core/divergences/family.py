"""Divergences whose bounds are computed by the generic solver."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..divergences._exact import expm1, expm1_minus
from ..divergences.base import Divergence
from ..errors import InvalidValue

__all__ = ["AlphaDivergence", "JensenShannon"]


@dataclass(frozen=True)
class JensenShannon(Divergence):
    """Jensen–Shannon divergence, the mean KL of ``π`` and ``π_old`` to their mixture.

    ``f(u) = ½·[u·log u − (1 + u)·log((1 + u)/2)]``. The radius is in nats, at most ``log 2``. Both bounds can
    saturate: the lower one at 0, the upper one at 1/p.

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
        # With h = ½·log u:  f = ½·(1 + u)·(h·tanh h − log cosh h). The last factor is even in h. It is computed as
        # h·tanh h − ½·log(1 + sinh² h) for h < 2, and from a = e^−2h for larger h.
        h = log_u.abs() / 2
        near = h.clamp(max=2.0)
        # sinh² h is computed from e^2h − 1, because torch.sinh depends in its last digits on the position in a tensor.
        a = torch.exp(-2 * h)
        expm1_2h = expm1(2 * near)
        sinh2 = expm1_2h * expm1_2h / (4 * (1 + expm1_2h))
        small = near * torch.tanh(near) - torch.log1p(sinh2) / 2
        large = math.log(2) - torch.log1p(a) - torch.where(a > 0, 2 * h * a, 0.0) / (1 + a)
        return (1 + torch.exp(log_u)) * torch.where(h < 2, small, large) / 2

    def df(self, log_u: Tensor) -> Tensor:
        # −½·u·log((1 + 1/u)/2). Below the clamp u is 0 up to rounding.
        return -torch.exp(log_u) * torch.log1p(expm1(-log_u.clamp(min=-80.0)) / 2) / 2


@dataclass(frozen=True)
class AlphaDivergence(Divergence):
    """The Cressie–Read family, ``f(u) = (u^α − α·u + α − 1) / (α·(α − 1))``.

    α = 0 is KL and α = 1 is reverse KL (the exact limits), α = 2 is half of Pearson's χ², α = −1 half of Neyman's χ²,
    and α = ½ four times the squared Hellinger distance. For α > 0, where ``f(0) = 1/α`` is finite, both bounds can
    saturate: the lower one at 0, the upper one at 1/p.

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
        # f_α(u) = u·f_{1−α}(1/u). Around u = 1 the form with the smaller exponent has no cancellation.
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
        # u·(u^(α−1) − 1)/(α − 1), with the larger of the two powers factored out, so that neither overflows before f.
        x = (self.alpha - 1) * log_u
        size = -expm1(-x.abs()) / abs(self.alpha - 1) if self.alpha != 1 else log_u.abs()
        return torch.sign(log_u) * torch.exp(log_u + x.clamp(min=0.0)) * size


ZERO = 1e-30
"""Largest |α| that is treated as 0. The difference is below the rounding of float64, and for a smaller α, α·log u would
underflow, first in float32."""


def _power(x: Tensor, a: float) -> Tensor:
    """Compute ``(e^(a·x) − 1)/a``, which is ``x`` for a = 0."""
    return expm1(a * x) / a if abs(a) > ZERO else x


def _power_minus(x: Tensor, a: float) -> Tensor:
    """Compute ``(e^(a·x) − 1)/a − x``."""
    return expm1_minus(a * x) / a if abs(a) > ZERO else torch.zeros_like(x)
