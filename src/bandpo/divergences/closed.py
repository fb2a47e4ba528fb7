"""Divergences whose bounds have a closed form."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bandpo.divergences._exact import expm1, log1mexp, one_minus_exp
from bandpo.divergences.base import Divergence

__all__ = ["NeymanChi2", "PearsonChi2", "SquaredHellinger", "TotalVariation"]


@dataclass(frozen=True)
class TotalVariation(Divergence):
    """Total variation, ``D = ½·‖π − π_old‖₁``, ``f(u) = ½·|u − 1|``: ``r = 1 ± radius/p``. Radius in probability.

    The upper bound saturates at ``1/p`` for ``p ≥ 1 − radius``, the lower at 0 for ``p ≤ radius``.

    >>> bounds = ratio_bounds(torch.tensor([0.08, 0.5]).log(), TotalVariation(), radius=0.05)
    >>> [round(u, 3) for u in bounds.upper.tolist()]
    [1.625, 1.1]
    """

    closed = True

    @property
    def default_radius(self) -> float:
        return 0.15  # at p = ½ as wide as KL 0.05; f has a kink and no curvature

    def f(self, log_u: Tensor) -> Tensor:
        return expm1(log_u).abs() / 2

    def df(self, log_u: Tensor) -> Tensor:
        return torch.exp(log_u) * torch.sign(log_u) / 2

    def divergence_of_ratio(self, log_ratio: Tensor, logp: Tensor) -> Tensor:
        return torch.exp(logp) * expm1(log_ratio).abs()

    def log_bounds(self, logp: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
        return _one_plus_minus(radius.log() - logp, logp)


@dataclass(frozen=True)
class PearsonChi2(Divergence):
    """Pearson's χ², ``f(u) = (u − 1)²``: ``r = 1 ± √(radius·(1 − p)/p)``. Radius without unit, about twice a KL's.

    The upper bound saturates at ``1/p`` for ``p ≥ 1/(1 + radius)``, the lower at 0 for ``p ≤ radius/(1 + radius)``.

    >>> bounds = ratio_bounds(torch.tensor([0.08, 0.5]).log(), PearsonChi2(), radius=0.05)
    >>> [round(u, 3) for u in bounds.upper.tolist()]
    [1.758, 1.224]
    """

    closed = True

    @property
    def curvature(self) -> float:
        return 2.0

    def f(self, log_u: Tensor) -> Tensor:
        return expm1(log_u).square()

    def df(self, log_u: Tensor) -> Tensor:
        return 2 * torch.exp(log_u) * expm1(log_u)

    def divergence_of_ratio(self, log_ratio: Tensor, logp: Tensor) -> Tensor:
        return torch.exp(logp) * expm1(log_ratio).square() / one_minus_exp(logp)

    def log_bounds(self, logp: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
        return _one_plus_minus((radius.log() + log1mexp(logp) - logp) / 2, logp)


@dataclass(frozen=True)
class NeymanChi2(Divergence):
    """Neyman's χ², ``D = χ²(π_old ‖ π)``, ``f(u) = (u − 1)²/u``: the Wilson interval. Radius without unit.

    With ``q = p·r`` the constraint is ``(q − p)² = radius·q·(1 − q)``, a quadratic whose roots multiply to
    ``p²/(1 + radius)``: so ``lower·upper = 1/(1 + radius)``. Its bounds never saturate.

    >>> bounds = ratio_bounds(torch.tensor([0.08, 0.5]).log(), NeymanChi2(), radius=0.1)
    >>> [round(u, 3) for u in bounds.upper.tolist()]
    [2.606, 1.302]
    """

    closed = True

    @property
    def curvature(self) -> float:
        return 2.0

    def f(self, log_u: Tensor) -> Tensor:
        return -expm1(log_u) * expm1(-log_u)

    def df(self, log_u: Tensor) -> Tensor:
        return torch.exp(log_u) - torch.exp(-log_u)

    def log_bounds(self, logp: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
        # The root q − p without cancellation: half the sum where p ≤ ½, product over the other root where p > ½.
        log1mp = log1mexp(logp)
        p, rest = torch.exp(logp), -expm1(logp)
        larger = (radius * (rest - p).abs() + (radius * (radius + 4 * p * rest)).sqrt()) / 2
        log_margin = torch.where(
            p <= rest, larger.log() - torch.log1p(radius) - logp, radius.log() + log1mp - larger.log()
        )
        log_upper = _log_one_plus(log_margin)
        return -torch.log1p(radius) - log_upper, log_upper


@dataclass(frozen=True)
class SquaredHellinger(Divergence):
    """Squared Hellinger distance, ``D = 1 − Σ√(π·π_old)``, ``f(u) = ½·(√u − 1)²``. Radius in [0, 1].

    With ``p = sin²θ`` and ``1 − radius = cos φ`` the bounds are ``sin²(θ ± φ) / p``: saturated at ``1/p`` for
    ``1 − p ≤ radius·(2 − radius)``, at 0 for ``p ≤ radius·(2 − radius)``.

    >>> bounds = ratio_bounds(torch.tensor([0.02, 0.08, 0.5]).log(), SquaredHellinger(), radius=0.0125)
    >>> [round(u, 3) for u in bounds.upper.tolist()]
    [4.372, 2.317, 1.311]
    >>> [round(u, 3) for u in bounds.lower.tolist()]
    [0.0, 0.205, 0.689]
    """

    closed = True

    @property
    def curvature(self) -> float:
        return 0.25

    def f(self, log_u: Tensor) -> Tensor:
        return expm1(log_u / 2).square() / 2

    def df(self, log_u: Tensor) -> Tensor:
        return torch.exp(log_u / 2) * expm1(log_u / 2) / 2

    def log_bounds(self, logp: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
        # √r = sin(θ ± φ)/sin θ = (1 − radius) ± cot θ·sin φ
        radius = radius.clamp(max=1.0)
        sine2, log1mp = radius * (2 - radius), log1mexp(logp)
        log_swing = (log1mp - logp + sine2.log()) / 2
        swing = torch.exp(log_swing)
        log_lower = 2 * torch.log1p((-radius - swing).clamp(min=-1.0))
        large = log_swing + torch.log1p((1 - radius) / swing)
        log_upper = 2 * torch.where(log_swing > 0, large, torch.log1p(swing - radius))
        return log_lower, torch.where(log1mp <= sine2.log(), -logp, torch.minimum(log_upper, -logp))


def _one_plus_minus(log_margin: Tensor, logp: Tensor) -> tuple[Tensor, Tensor]:
    """Logarithms of ``1 − margin``, at least 0, and ``1 + margin``, at most ``1/p``."""
    return log1mexp(log_margin.clamp(max=0.0)), torch.minimum(_log_one_plus(log_margin), -logp)


def _log_one_plus(log_margin: Tensor) -> Tensor:
    """``log(1 + margin)``, however large the margin."""
    return log_margin.clamp(min=0.0) + torch.log1p(torch.exp(-log_margin.abs()))
