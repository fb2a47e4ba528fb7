"""The two Kullback–Leibler divergences."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bandpo.divergences import _solver
from bandpo.divergences._exact import expm1, expm1_minus, one_minus_exp
from bandpo.divergences.base import Divergence

__all__ = ["KL", "ReverseKL"]


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

    def divergence_of_ratio(self, log_ratio: Tensor, logp: Tensor) -> Tensor:
        p, rest = torch.exp(logp), one_minus_exp(logp)
        return -torch.addcmul(
            p * log_ratio, rest, torch.log1p((-p * expm1(log_ratio) / rest).clamp(min=-1.0))
        )

    def log_bounds(self, logp: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
        p, rest = torch.exp(logp), -expm1(logp)
        rarest = math.exp(_solver.floor(logp.dtype))
        m, n = torch.minimum(p, rest).clamp(min=rarest), torch.maximum(p, rest)
        quadratic = (2 * radius / (m * n)).sqrt()
        (rarer_up, other_down), (rarer_down, other_up) = (
            root(m, n, radius, quadratic) for root in (_log_ratios_up, _log_ratios_down)
        )
        is_rarer = p < rest
        log_lower = torch.where(is_rarer, rarer_down, other_down)
        log_upper = torch.where(is_rarer, rarer_up, other_up)
        # p·upper tends to 1 − e^−radius: where p is held at the rarest solved for, scale on from there.
        return log_lower, log_upper + (math.log(rarest) - logp).clamp(min=0.0)


# Log-ratios of an event of probability m ≤ ½ and of its complement, n = 1 − m, at the constraint's two roots: where
#     ℓ = log(1 + m·(e^y − 1)) = radius + m·y,   they are   y − ℓ = n·y − radius   and   −ℓ.
# Each root starts from the quadratic's, corrected to third order, or from the line that the constraint tends to. From
# there float32 takes one step and float64 two: of Newton's method below, where the start is within 1e−2, of Halley's
# above, where it is rougher. Where the radius is so small that rounding outweighs what the start leaves out, the step
# is held to the latter.
#
# The start's numbers. ℓ − m·y is the cumulant series of a Bernoulli event, v·y²/2 + v·s·y³/6 + v·(1 − 6v)·y⁴/24 + …,
# with v = m·n and s = n − m. With the quadratic's root q = √(2·radius/v), inverting the series in q gives
#     y = −q·(1 + s·q/6 + (1 − v)·q²/36 + s·(2 + v)·q³/540 + (1 − v)²·q⁴/4320 + …)   below,
# and above the same with −q. The reciprocal of the upper one converges better:
#     y = q / (1 + s·q/6 − v·q²/12 − s·(1 + 8v)·q³/1080 + c·q⁴ + …),   where v·q²/12 = radius/6 and 0 < c < 1/3290.
# The radius is held at 5.5 there, which keeps the denominator above 0. A step may be no larger than q⁴/1000 of y: three
# times the largest of the first terms left out.


def _log_ratios_up(m: Tensor, n: Tensor, radius: Tensor, quadratic: Tensor) -> tuple[Tensor, Tensor]:
    """At ``y > 0``, by ``y = log(1 + (e^(radius + m·y) − 1)/m)``: a contraction, so the start may be rougher."""
    # Beyond this radius the rarer event's log-ratio, log(1 − n·e^−ℓ) − log m, is at its limit to rounding.
    enough = radius.clamp(max=-1 - math.log(torch.finfo(m.dtype).eps))
    skew, variance, near = n - m, m * n, quadratic.clamp(max=1.0)
    third = skew * (1 + 8 * variance) / 1080 * near * near * near
    start = quadratic / (1 + skew * quadratic / 6 - radius.clamp(max=5.5) / 6 - third)
    y = torch.minimum(start, (enough - torch.log(m)) / n)
    fixed = excess = y
    for _ in range(_steps(m)):
        tilted = expm1(enough + m * y) / m
        fixed = torch.log1p(tilted)
        newton = (fixed - y) / n * ((1 + tilted) / tilted)
        halley = newton / (1 + newton * (1 + m * tilted) / (1 + tilted) / (2 * tilted))
        step = _held(halley, y, quadratic)
        y, excess = y + step, step - (fixed - y)
    # n·y − radius in which y, a multiple of 1e−5 for the rarest tokens, is not rounded again
    return n * fixed + (n * excess - enough), -radius - m * (y + (radius - enough) / n)


def _log_ratios_down(m: Tensor, n: Tensor, radius: Tensor, quadratic: Tensor) -> tuple[Tensor, Tensor]:
    """At ``y < 0``."""
    skew, variance = n - m, m * n
    third = skew * (2 + variance) / 540
    start = quadratic * (1 + quadratic * (skew / 6 + quadratic * ((1 - variance) / 36 + quadratic * third)))
    line = (radius + m * (6 - m) / (6 - 4 * m)) / m  # the fraction is a Padé approximant of −log n
    y = -torch.minimum(start, line)
    log_norm = y
    for _ in range(_steps(m)):
        tilted = m * expm1(y)
        log_norm = torch.log1p(tilted)
        share = (m + tilted) / (1 + tilted)
        step = _held((radius + m * y - log_norm) / n * ((1 + tilted) / tilted), y, quadratic)
        y = y + step
        log_norm = log_norm + share * step * (1 + (1 - share) * step / 2)
    return n * y - radius, -log_norm


def _steps(x: Tensor) -> int:
    return 2 if x.dtype == torch.float64 else 1


def _held(step: Tensor, y: Tensor, quadratic: Tensor) -> Tensor:
    limit = quadratic.square().square() / 1000 * y.abs()
    return torch.clamp(step, -limit, limit)


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
