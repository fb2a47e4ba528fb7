"""The two Kullback–Leibler divergences."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bandpo import _solver
from bandpo._exact import expm1, expm1_minus, one_minus_exp
from bandpo.divergences.base import Divergence


@dataclass(frozen=True)
class KL(Divergence):
    """Kullback–Leibler, ``D = KL(π_old ‖ π)``, ``f(u) = u − 1 − log u``: the paper's choice. Radius in nats.

    Its bounds never saturate. In the tilt ``y`` of the rarer event, of probability ``m``, the constraint is the
    cumulant function of a centred Bernoulli(m), ``log(1 + m·(e^y − 1)) − m·y = radius``: the KL-UCB index.

    >>> bounds = ratio_bounds(torch.tensor([0.08, 0.5, 0.9]).log(), KL(), radius=0.05)
    >>> [round(u, 3) for u in bounds.upper.tolist()]
    [2.411, 1.308, 1.076]
    """

    def f(self, log_u: Tensor) -> Tensor:
        return torch.where(log_u.isinf(), math.inf, expm1_minus(log_u))

    def df(self, log_u: Tensor) -> Tensor:
        return expm1(log_u)

    def spent(self, log_ratio: Tensor, logp: Tensor) -> Tensor:
        p, rest = torch.exp(logp), one_minus_exp(logp)
        return -torch.addcmul(
            p * log_ratio, rest, torch.log1p((-p * expm1(log_ratio) / rest).clamp(min=-1.0))
        )

    def log_bounds(self, logp: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
        p, rest = torch.exp(logp), -expm1(logp)
        rarest = math.exp(_solver.floor(logp.dtype))
        m, n = torch.minimum(p, rest).clamp(min=rarest), torch.maximum(p, rest)
        (rarer_up, other_down), (rarer_down, other_up) = _log_ratios(m, n, radius)
        is_rarer = p < rest
        log_lower = torch.where(is_rarer, rarer_down, other_down)
        log_upper = torch.where(is_rarer, rarer_up, other_up)
        # p·upper tends to 1 − e^−radius: where p is held at the rarest solved for, scale on from there.
        return log_lower, log_upper + (math.log(rarest) - logp).clamp(min=0.0)


def _log_ratios(m: Tensor, n: Tensor, radius: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Log-ratios of an event of probability ``m ≤ ½`` and of its complement, at the upper and at the lower root.

    At a root ``ℓ = radius + m·y`` and ``ℓ = log(1 + m·(e^y − 1))``; the log-ratios are ``y − ℓ = n·y − radius`` and
    ``−ℓ``. Both roots start from the quadratic's, corrected to fourth order, or from the line that the constraint
    tends to for large ``|y|``: to 1e-2 for y < 0, and the upper root, whose fixed point contracts, to a tenth of
    that after one round. Halley's method then cubes the error, so float32 takes one step and float64 two. Where the
    radius is so small that rounding outweighs the start's error, the step is held to that error.
    """
    exact = m.dtype == torch.float64
    quadratic = (2 * radius / (m * n)).sqrt()
    skew, variance = n - m, m * n
    c1, c2, c3 = skew / 6, (1 - variance) / 36, skew * (2 + variance) / 540
    start_error = quadratic.square().square() / 1000
    # Beyond this radius the upper root's log-ratio, log(1 − n·e^−ℓ) − log m, is at its limit to rounding.
    enough = radius.clamp(max=-1 - math.log(torch.finfo(m.dtype).eps))

    near = quadratic.clamp(max=1.0)
    flat = (
        1 + c1 * quadratic - radius.clamp(max=5.5) / 6 - skew * (1 + 8 * variance) / 1080 * near * near * near
    )
    y = torch.minimum(quadratic / flat, (enough - torch.log(m)) / n)
    fixed = excess = y
    for _ in range(2 if exact else 1):
        tilted = expm1(enough + m * y) / m
        fixed = torch.log1p(tilted)
        gap = fixed - y
        step = gap / n * ((1 + tilted) / tilted)
        step = step / (1 + step * (1 + m * tilted) / (1 + tilted) / (2 * tilted))
        limit = start_error * y
        step = torch.clamp(step, -limit, limit)
        y, excess = y + step, step - gap
    # For rare tokens y rounds to a multiple of 1e-5: one rounding less in n·y − radius.
    rarer_up, other_down = n * fixed + (n * excess - enough), -radius - m * (y + (radius - enough) / n)

    line = (radius + m * (6 - m) / (6 - 4 * m)) / m  # −log n, by its Padé approximant
    y = -torch.minimum(quadratic * (1 + quadratic * (c1 + quadratic * (c2 + quadratic * c3))), line)
    log_norm = y
    for _ in range(2 if exact else 1):
        tilted = m * expm1(y)
        share = (m + tilted) / (1 + tilted)
        log_norm = torch.log1p(tilted)
        step = (radius + m * y - log_norm) / n * ((1 + tilted) / tilted)
        step = step / (1 + step * share / (2 * tilted))
        limit = start_error * y
        step = torch.clamp(step, limit, -limit)
        y = y + step
        log_norm = log_norm + share * step * (1 + (1 - share) * step / 2)
    return (rarer_up, other_down), (n * y - radius, -log_norm)


@dataclass(frozen=True)
class ReverseKL(Divergence):
    """Reverse Kullback–Leibler, ``D = KL(π ‖ π_old)``, ``f(u) = u·log u − u + 1``. Radius in nats.

    The upper bound saturates at ``1/p`` for ``−log p ≤ radius``, the lower at 0 for ``−log(1 − p) ≤ radius``.

    >>> bounds = ratio_bounds(torch.tensor([0.04, 0.08, 0.5]).log(), ReverseKL(), radius=0.05)
    >>> [round(u, 3) for u in bounds.upper.tolist()]
    [2.887, 2.228, 1.314]
    >>> [round(u, 3) for u in bounds.lower.tolist()]
    [0.0, 0.136, 0.686]
    """

    def f(self, log_u: Tensor) -> Tensor:
        u = torch.exp(log_u)
        return torch.where(
            log_u.abs() < 0.5, u * expm1_minus(-log_u), torch.where(u > 0, u * (log_u - 1), 0.0) + 1
        )

    def df(self, log_u: Tensor) -> Tensor:
        return torch.exp(log_u) * log_u
