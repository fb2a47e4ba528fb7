"""Divergences whose bounds have a closed form."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..divergences._exact import expm1, log1mexp, one_minus_exp, scaled_expm1
from ..divergences.base import Divergence

__all__ = ["NeymanChi2", "PearsonChi2", "SquaredHellinger", "TotalVariation"]


@dataclass(frozen=True)
class TotalVariation(Divergence):
    """Total variation, ``D = ½·‖π − π_old‖₁``, ``f(u) = ½·|u − 1|``, with the bounds ``r = 1 ± radius/p``.

    The radius is a probability. The upper bound saturates at ``1/p`` for ``p ≥ 1 − radius``, the lower one at 0 for
    ``p ≤ radius``.

    >>> bounds = ratio_bounds(torch.tensor([0.08, 0.5]).log(), TotalVariation(), radius=0.05)
    >>> [round(u, 3) for u in bounds.upper.tolist()]
    [1.625, 1.1]
    """

    one_pass = True

    @property
    def default_radius(self) -> float:
        return 0.15  # the bounds of KL 0.05 at p = ½; f has a kink at 1, so no second derivative

    def f(self, log_u: Tensor) -> Tensor:
        return expm1(log_u).abs() / 2

    def df(self, log_u: Tensor) -> Tensor:
        return torch.exp(log_u) * torch.sign(log_u) / 2

    def divergence_of_ratio(self, log_ratio: Tensor, logp: Tensor) -> Tensor:
        return scaled_expm1(logp, log_ratio).abs()

    def divergence_of_moderate_ratio(self, log_ratio: Tensor, logp: Tensor) -> Tensor:
        return (torch.exp(logp) * expm1(log_ratio)).abs()

    def log_bounds(self, logp: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
        return _one_plus_minus(radius.log() - logp, logp)


@dataclass(frozen=True)
class PearsonChi2(Divergence):
    """Pearson's χ², ``f(u) = (u − 1)²``, with the bounds ``r = 1 ± √(radius·(1 − p)/p)``.

    The radius has no unit; it is about twice that of KL for equal bounds. The upper bound saturates at ``1/p`` for
    ``p ≥ 1/(1 + radius)``, the lower one at 0 for ``p ≤ radius/(1 + radius)``.

    >>> bounds = ratio_bounds(torch.tensor([0.08, 0.5]).log(), PearsonChi2(), radius=0.05)
    >>> [round(u, 3) for u in bounds.upper.tolist()]
    [1.758, 1.224]
    """

    one_pass = True

    @property
    def curvature(self) -> float:
        return 2.0

    def f(self, log_u: Tensor) -> Tensor:
        return expm1(log_u).square()

    def df(self, log_u: Tensor) -> Tensor:
        return 2 * torch.exp(log_u) * expm1(log_u)

    def divergence_of_ratio(self, log_ratio: Tensor, logp: Tensor) -> Tensor:
        return scaled_expm1(logp / 2, log_ratio).square() / one_minus_exp(logp)

    def divergence_of_moderate_ratio(self, log_ratio: Tensor, logp: Tensor) -> Tensor:
        change = expm1(log_ratio)  # r − 1
        return torch.exp(logp) * change * change / one_minus_exp(logp)

    def log_bounds(self, logp: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
        return _one_plus_minus((radius.log() + log1mexp(logp) - logp) / 2, logp)


@dataclass(frozen=True)
class NeymanChi2(Divergence):
    """Neyman's χ², ``D = χ²(π_old ‖ π)``, ``f(u) = (u − 1)²/u``. The bounds are the Wilson interval.

    The radius has no unit. With ``q = p·r`` the constraint is ``(q − p)² = radius·q·(1 − q)``, a quadratic equation.
    The product of its roots is ``p²/(1 + radius)``, so ``lower·upper = 1/(1 + radius)``. The bounds never saturate.

    >>> bounds = ratio_bounds(torch.tensor([0.08, 0.5]).log(), NeymanChi2(), radius=0.1)
    >>> [round(u, 3) for u in bounds.upper.tolist()]
    [2.606, 1.302]
    """

    one_pass = True

    @property
    def curvature(self) -> float:
        return 2.0

    def f(self, log_u: Tensor) -> Tensor:
        return -expm1(log_u) * expm1(-log_u)

    def df(self, log_u: Tensor) -> Tensor:
        return torch.exp(log_u) - torch.exp(-log_u)

    def divergence_of_ratio(self, log_ratio: Tensor, logp: Tensor) -> Tensor:
        # f(u) is the same for u and 1/u, and p·f(r) need not overflow with f(r).
        size = log_ratio.abs()
        of_others = one_minus_exp(logp) * self.f(_log_ratio_of_others(log_ratio, logp))
        return -expm1(-size) * scaled_expm1(logp, size) + of_others

    def log_bounds(self, logp: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
        # The roots in q − p, without cancellation: the larger one in absolute value directly, the other one as the
        # product of both divided by it. The first is the upper bound for p ≤ ½, the second for p > ½.
        log1mp = log1mexp(logp)
        p = torch.exp(logp)
        one_minus_p = -expm1(logp)
        root = (radius * (radius + 4 * p * one_minus_p)).sqrt()
        larger = (radius * (one_minus_p - p).abs() + root) / 2
        log_margin_rare = larger.log() - torch.log1p(radius) - logp
        log_margin_common = radius.log() + log1mp - larger.log()
        log_margin = torch.where(p <= one_minus_p, log_margin_rare, log_margin_common)
        log_upper = _log_one_plus(log_margin)
        return -torch.log1p(radius) - log_upper, log_upper


@dataclass(frozen=True)
class SquaredHellinger(Divergence):
    """Squared Hellinger distance, ``D = 1 − Σ√(π·π_old)``, ``f(u) = ½·(√u − 1)²``. The radius is in [0, 1].

    With ``p = sin²θ`` and ``1 − radius = cos φ`` the bounds are ``sin²(θ ± φ) / p``. They saturate at ``1/p`` for
    ``1 − p ≤ radius·(2 − radius)``, and at 0 for ``p ≤ radius·(2 − radius)``.

    >>> bounds = ratio_bounds(torch.tensor([0.02, 0.08, 0.5]).log(), SquaredHellinger(), radius=0.0125)
    >>> [round(u, 3) for u in bounds.upper.tolist()]
    [4.372, 2.317, 1.311]
    >>> [round(u, 3) for u in bounds.lower.tolist()]
    [0.0, 0.205, 0.689]
    """

    one_pass = True

    @property
    def curvature(self) -> float:
        return 0.25

    def f(self, log_u: Tensor) -> Tensor:
        return expm1(log_u / 2).square() / 2

    def df(self, log_u: Tensor) -> Tensor:
        return torch.exp(log_u / 2) * expm1(log_u / 2) / 2

    def divergence_of_ratio(self, log_ratio: Tensor, logp: Tensor) -> Tensor:
        of_token = scaled_expm1(logp / 2, log_ratio / 2).square() / 2
        return of_token + one_minus_exp(logp) * self.f(_log_ratio_of_others(log_ratio, logp))

    def log_bounds(self, logp: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
        # √r = sin(θ ± φ)/sin θ = (1 − radius) ± cot θ·sin φ
        radius = radius.clamp(max=1.0)
        sin2_phi = radius * (2 - radius)
        log1mp = log1mexp(logp)
        log_swing = (log1mp - logp + sin2_phi.log()) / 2  # of swing = cot θ·sin φ
        swing = torch.exp(log_swing)
        log_lower = 2 * torch.log1p((-radius - swing).clamp(min=-1.0))
        # Two forms of log(1 − radius + swing): for swing > 1, and for smaller ones.
        log_root_large = log_swing + torch.log1p((1 - radius) / swing)
        log_root_small = torch.log1p(swing - radius)
        log_upper = 2 * torch.where(log_swing > 0, log_root_large, log_root_small)
        log_upper = torch.where(log1mp <= sin2_phi.log(), -logp, torch.minimum(log_upper, -logp))
        return log_lower, log_upper


def _log_ratio_of_others(log_ratio: Tensor, logp: Tensor) -> Tensor:
    """Compute the log-ratio c of all other tokens, −inf if the token has all probability."""
    return torch.log1p((-scaled_expm1(logp, log_ratio) / one_minus_exp(logp)).clamp(min=-1.0))


def _one_plus_minus(log_margin: Tensor, logp: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the logarithms of ``1 − margin``, at least 0, and of ``1 + margin``, at most ``1/p``."""
    return log1mexp(log_margin.clamp(max=0.0)), torch.minimum(_log_one_plus(log_margin), -logp)


def _log_one_plus(log_margin: Tensor) -> Tensor:
    """Compute ``log(1 + margin)`` without overflow for large margins."""
    return log_margin.clamp(min=0.0) + torch.log1p(torch.exp(-log_margin.abs()))
