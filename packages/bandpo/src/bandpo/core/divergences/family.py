"""The Jensen–Shannon divergence and the Cressie–Read family, whose bounds have no closed form."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..divergences import _solver
from ..divergences._exact import expm1, expm1_minus, log1mexp
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

    def log_bounds(self, logp: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
        above = torch.ones_like(logp, dtype=torch.bool)
        return self.log_bound(logp, radius, ~above), self.log_bound(logp, radius, above)

    def log_bound(self, logp: Tensor, radius: float | Tensor, above: Tensor) -> Tensor:
        radius = _solver.as_tensor(radius, logp)
        rarer = _solver.rarer_event(logp, log1mexp(logp))
        sign = rarer.sign(above)
        rare, common = _jensen_shannon_root(rarer, radius, sign)
        root = torch.where(rarer.is_token, rare, common)
        # Where the constraint holds at the edge of the simplex, the bound is that edge.
        saturated = _solver.divergence_at_edge(self, rarer, sign) <= radius
        return torch.where(saturated, torch.where(above, -logp, -math.inf), root)


def _jensen_shannon_root(rarer: _solver.Rarer, radius: Tensor, sign: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the log-ratios of the rarer and of the other event at the root of the given sign.

    The variable is the change φ of an angle: the rarer event has the old probability m = sin² θ and the new one
    sin²(θ + φ). The root of the divergence is almost linear in φ, also at the edges of the simplex, so Newton's method
    for it needs few steps. It starts at the root of the squared Hellinger distance, to which the divergence is equal
    for small radii. The ratios are (1 + x)² with

        rarer event:  x = cot θ·sin φ − 2·sin²(φ/2),     other event:  x = −tan θ·sin φ − 2·sin²(φ/2),

    which has no cancellation for small φ.
    """
    m = rarer.log_m.exp()
    n = rarer.log_n.exp()
    tan = (m / n).sqrt()
    cot = 1 / tan
    theta = torch.atan(tan)
    # The largest |φ|: the new angle is ½π or 0.
    edge = torch.where(sign > 0, math.pi / 2 - theta, theta)

    def changes(size: Tensor) -> tuple[Tensor, Tensor]:
        """Compute x of the rarer and of the other event at |φ| = size."""
        half = torch.sin(size / 2)
        sine = 2 * sign * half * torch.cos(size / 2)
        cosine_loss = 2 * half * half
        return cot * sine - cosine_loss, -tan * sine - cosine_loss

    info = torch.finfo(m.dtype)
    root = radius.sqrt()
    # acos(1 − radius), by the half angle, so that a small radius keeps its digits.
    start = 2 * torch.asin((radius / 2).clamp(max=0.5).sqrt())
    size = torch.minimum(start, 0.98 * edge)
    for _ in range(14 if m.dtype == torch.float64 else 6):
        rare, common = (x.clamp(min=info.eps - 1) for x in changes(size))
        value_rare, slope_rare = _jensen_shannon_term(rare)
        value_common, slope_common = _jensen_shannon_term(common)
        value = (m * value_rare + n * value_common).sqrt()
        quotient = (1 + common) / (1 + rare)
        slope = sign * (m * slope_rare * cot * quotient - n * slope_common * tan / quotient)
        size = size - value * (value - root) / slope
        size = torch.minimum(size.clamp(min=0.0), (1 - 8 * info.eps) * edge)
    rare, common = (x.clamp(min=-1.0) for x in changes(size))
    return 2 * torch.log1p(rare), 2 * torch.log1p(common)


def _jensen_shannon_term(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``f(u)`` and ``u·f'(u)`` of the Jensen–Shannon divergence at ``u = (1 + x)²``."""
    u = (1 + x) * (1 + x)
    difference = x * (2 + x)  # u − 1
    log_mean = torch.log1p(-difference / (2 * u))  # log((1 + 1/u)/2)
    # Around u = 1, with h = ½·log u, this is ½·(1 + u)·(h·tanh h − log cosh h); elsewhere the formula with logarithms.
    sinh2 = difference * difference / (4 * u)
    near = (1 + u) * (torch.log1p(x) * difference / (1 + u) - torch.log1p(sinh2) / 2) / 2
    far = (math.log(2) - u * log_mean - torch.log1p(u)) / 2
    value = torch.where((u > 0.25) & (u < 4), near, far)
    return value, -u * log_mean / 2


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
