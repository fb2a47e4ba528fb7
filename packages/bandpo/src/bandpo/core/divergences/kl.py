"""The Kullback–Leibler divergence in both directions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..divergences import _solver
from ..divergences._exact import expm1, expm1_minus, scaled_expm1
from ..divergences.base import Divergence

__all__ = ["KL", "ReverseKL"]


@dataclass(frozen=True)
class KL(Divergence):
    """Kullback–Leibler divergence, ``D = KL(π_old ‖ π)``, ``f(u) = u − 1 − log u``: the paper's choice.

    The radius is in nats. The bounds never saturate. As an equation for the tilt ``y`` of the rarer event, with
    probability ``m``, the constraint is ``log(1 + m·(e^y − 1)) − m·y = radius``: the cumulant generating function of a
    centred Bernoulli(m) variable. It also defines the KL-UCB index.

    >>> bounds = ratio_bounds(torch.tensor([0.08, 0.5, 0.9]).log(), KL(), radius=0.05)
    >>> [round(u, 3) for u in bounds.upper.tolist()]
    [2.411, 1.308, 1.076]
    """

    one_pass = True

    def f(self, log_u: Tensor) -> Tensor:
        return torch.where(log_u.isinf(), math.inf, expm1_minus(log_u))

    def df(self, log_u: Tensor) -> Tensor:
        return expm1(log_u)

    def divergence_of_ratio(self, log_ratio: Tensor, logp: Tensor) -> Tensor:
        return self._with_gain(scaled_expm1(logp, log_ratio), log_ratio, logp, torch.exp(logp))

    def divergence_of_moderate_ratio(self, log_ratio: Tensor, logp: Tensor) -> Tensor:
        if type(self).divergence_of_ratio is not KL.divergence_of_ratio:
            return self.divergence_of_ratio(log_ratio, logp)
        p = torch.exp(logp)
        return self._with_gain(p * expm1(log_ratio), log_ratio, logp, p)

    @staticmethod
    def _with_gain(gain: Tensor, log_ratio: Tensor, logp: Tensor, p: Tensor) -> Tensor:
        """Compute the divergence from the change ``p·(r − 1)`` of the probability, which is overwritten."""
        # p − 1 has the same digits as 1 − p, and one operation less.
        others = expm1(logp).clamp(max=-torch.finfo(logp.dtype).tiny)
        log_c = gain.div_(others).clamp_(min=-1.0).log1p_()
        return torch.addcmul(p * log_ratio, others, log_c, value=-1.0).neg()

    def log_bounds(self, logp: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
        # m is the probability of the rarer of the events "this token" and "any other token", n that of the other one.
        p = torch.exp(logp)
        one_minus_p = -expm1(logp)
        smallest = math.exp(_solver.floor(logp.dtype))
        m = torch.minimum(p, one_minus_p).clamp(min=smallest)
        n = torch.maximum(p, one_minus_p)
        quadratic = (2 * radius / (m * n)).sqrt()
        rarer_up, common_down = _log_ratios_up(m, n, radius, quadratic)
        rarer_down, common_up = _log_ratios_down(m, n, radius, quadratic)
        is_rarer = p < one_minus_p
        log_lower = torch.where(is_rarer, rarer_down, common_down)
        log_upper = torch.where(is_rarer, rarer_up, common_up)
        # For small p, p·upper tends to 1 − e^−radius. Tokens with p below the smallest m are scaled accordingly.
        return log_lower, log_upper + (math.log(smallest) - logp).clamp(min=0.0)

    def log_bound(self, logp: Tensor, radius: float | Tensor, above: Tensor) -> Tensor:
        if torch.compiler.is_compiling() and logp.device.type != "cpu":
            # One step for each of two roots. Each of the three steps below refers eight times to the step before it,
            # and a compiler that stores nothing follows all 8³ paths, for minutes. On a CPU it stores each step.
            return super().log_bound(logp, radius, above)
        # One of the events "this token" and "any other token" gains probability. With the odds o of that event and its
        # log-ratio l, the constraint gives its ratio as a function of l,
        #     1 + w = 1 + (1 − e^−t)/o   with   t = o·l + (1 + o)·radius,   and the other event's log-ratio is −t.
        # This is Newton's method for l = log(1 + w), which converges from above. It takes fewer operations than
        # `log_bounds`. It is as exact for the ratio, but not for its distance from 1. Operations are in place, and
        # tensors are deleted early, because this is the peak of the loss's memory in eager mode.
        tiny = torch.finfo(logp.dtype).tiny
        # exp2, because on a CPU the compiler also stores each tensor that has an exp and is used twice.
        p = torch.exp2(logp * math.log2(math.e)).clamp_(min=tiny)
        del logp
        odds = p / (p - 1).clamp_(max=-tiny)
        del p
        minus_odds = torch.where(above, odds, odds.reciprocal())
        del odds
        inverse = minus_odds.reciprocal()
        log_ratio = torch.log1p(-inverse)
        log_ratio = torch.minimum(log_ratio, inverse.mul_(-2 * radius).sqrt_())
        del inverse
        constant = (minus_odds - 1).mul_(radius)
        for _ in range(5 if constant.dtype == torch.float64 else 3):
            change = expm1(torch.addcmul(constant, minus_odds, log_ratio))
            w = change / minus_odds
            step = torch.log1p(w).sub_(log_ratio)
            log_ratio.addcdiv_(step.addcmul_(step, w), w.sub_(change))
            del change, w, step
        return torch.where(above, log_ratio, torch.addcmul(constant, minus_odds, log_ratio))


# The two functions below compute the log-ratios of an event of probability m ≤ ½ and of its complement, n = 1 − m, at
# the two roots y of the constraint. At a root
#     ℓ = log(1 + m·(e^y − 1)) = radius + m·y,   and the log-ratios are   y − ℓ = n·y − radius   and   −ℓ.
# The iteration starts from the root of the quadratic approximation, corrected to third order, or from the line that the
# constraint approaches for large |y|. Then float32 takes one step and float64 two: of Newton's method for the negative
# root, whose start has an error below 1e−2, and of Halley's method for the positive root, whose start is less exact. If
# the radius is so small that rounding exceeds the error of the start, the step is limited to that error.
#
# The coefficients of the start: ℓ − m·y is the cumulant series of a Bernoulli event,
# v·y²/2 + v·s·y³/6 + v·(1 − 6v)·y⁴/24 + …, with v = m·n and s = n − m. With the root q = √(2·radius/v) of the quadratic
# term, inverting the series in q gives
#     y = −q·(1 + s·q/6 + (1 − v)·q²/36 + s·(2 + v)·q³/540 + (1 − v)²·q⁴/4320 + …)   for the negative root,
# and the same with −q for the positive one. The reciprocal of the latter converges better:
#     y = q / (1 + s·q/6 − v·q²/12 − s·(1 + 8v)·q³/1080 + c·q⁴ + …),   where v·q²/12 = radius/6 and 0 < c < 1/3290.
# There the radius is limited to 5.5, which keeps the denominator above 0. A step is limited to q⁴/1000 of y, which is
# three times the larger of the first omitted terms.


def _log_ratios_up(m: Tensor, n: Tensor, radius: Tensor, quadratic: Tensor) -> tuple[Tensor, Tensor]:
    """Compute both log-ratios at the positive root, from ``y = log(1 + (e^(radius + m·y) − 1)/m)``.

    This map is a contraction, so the start may be less exact than for the negative root.
    """
    # For a larger radius the rarer event's log-ratio, log(1 − n·e^−ℓ) − log m, equals its limit up to rounding.
    enough = radius.clamp(max=-1 - math.log(torch.finfo(m.dtype).eps))
    skew = n - m
    variance = m * n
    near = quadratic.clamp(max=1.0)
    third = skew * (1 + 8 * variance) / 1080 * near * near * near
    start = quadratic / (1 + skew * quadratic / 6 - radius.clamp(max=5.5) / 6 - third)
    y = torch.minimum(start, (enough - torch.log(m)) / n)
    fixed = excess = y
    for _ in range(_steps(m)):
        tilted = expm1(enough + m * y) / m
        fixed = torch.log1p(tilted)
        newton = (fixed - y) / n * ((1 + tilted) / tilted)
        halley = newton / (1 + newton * (1 + m * tilted) / (1 + tilted) / (2 * tilted))
        step = _limit_step(halley, y, quadratic)
        excess = step - (fixed - y)
        y = y + step
    # The first is n·y − radius with y = fixed + excess. For the rarest tokens y itself is rounded to multiples of 1e−5.
    return n * fixed + (n * excess - enough), -radius - m * (y + (radius - enough) / n)


def _log_ratios_down(m: Tensor, n: Tensor, radius: Tensor, quadratic: Tensor) -> tuple[Tensor, Tensor]:
    """Compute both log-ratios at the negative root."""
    skew = n - m
    variance = m * n
    third = skew * (2 + variance) / 540
    start = quadratic * (1 + quadratic * (skew / 6 + quadratic * ((1 - variance) / 36 + quadratic * third)))
    line = (radius + m * (6 - m) / (6 - 4 * m)) / m  # the fraction is a Padé approximant of −log n
    y = -torch.minimum(start, line)
    log_norm = y
    for _ in range(_steps(m)):
        tilted = m * expm1(y)
        log_norm = torch.log1p(tilted)
        new_m = (m + tilted) / (1 + tilted)  # the rarer event's new probability
        newton = (radius + m * y - log_norm) / n * ((1 + tilted) / tilted)
        step = _limit_step(newton, y, quadratic)
        y = y + step
        log_norm = log_norm + new_m * step * (1 + (1 - new_m) * step / 2)
    return n * y - radius, -log_norm


def _steps(x: Tensor) -> int:
    """Return the number of steps for a dtype."""
    return 2 if x.dtype == torch.float64 else 1


def _limit_step(step: Tensor, y: Tensor, quadratic: Tensor) -> Tensor:
    """Limit a step to the error of the start."""
    limit = quadratic.square().square() / 1000 * y.abs()
    return torch.clamp(step, -limit, limit)


@dataclass(frozen=True)
class ReverseKL(Divergence):
    """Reverse Kullback–Leibler divergence, ``D = KL(π ‖ π_old)``, ``f(u) = u·log u − u + 1``.

    The radius is in nats. The upper bound saturates at ``1/p`` for ``−log p ≤ radius``, the lower one at 0 for
    ``−log(1 − p) ≤ radius``.

    >>> bounds = ratio_bounds(torch.tensor([0.04, 0.08, 0.5]).log(), ReverseKL(), radius=0.05)
    >>> [round(u, 3) for u in bounds.upper.tolist()]
    [2.887, 2.228, 1.314]
    >>> [round(u, 3) for u in bounds.lower.tolist()]
    [0.0, 0.136, 0.686]
    """

    def f(self, log_u: Tensor) -> Tensor:
        u = torch.exp(log_u)
        near = u * expm1_minus(-log_u)
        far = torch.where(u > 0, u * (log_u - 1), 0.0) + 1
        return torch.where(log_u.abs() < 0.5, near, far)

    def df(self, log_u: Tensor) -> Tensor:
        return torch.exp(log_u) * log_u
