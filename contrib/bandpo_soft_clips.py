"""Soft clips: the surrogate flattens towards the bound, or turns back beyond it, along a tanh.

The authors' code has them beside Band; no paper names them, so they are a file to copy. Put it on PYTHONPATH and write
``method="Method(Band(KL(), 0.05), bandpo_soft_clips.SoftClip())"``. In PPO's ``min(r·A, clip(r)·A)`` the clipped ratio
becomes a smooth function ``y(r)``. So the weight is ``r·y′(r)`` where the minimum is y's, and r elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bandpo import _checks
from bandpo.batch import Tokens
from bandpo.objectives.base import Objective, above_0

__all__ = ["MiddleTanh", "Rollback", "SoftClip"]


@dataclass(frozen=True)
class SoftClip(Objective):
    """The ratio itself up to a share of the way to the bound, from there a tanh that reaches the bound at infinity.

    ``w = r·cosh²(g)/cosh²(g + κ·(u − linear))`` with ``κ = 1/((1 − linear)·(1 + tanh(g)))`` where y is the smaller, and
    ``w = r`` elsewhere; u > linear is the share of the rule's interval that the ratio uses on its side, and g where on
    the tanh the bend starts. At first ``w = r``, whatever g is.

    With g ≥ 0, as by default, the slope of y falls at once. Then y is the smaller on the side that A pushes to, and the
    weight has no jump. With g < 0 the slope rises to cosh²(g) first, y crosses the ratio, and the weight jumps there.
    No token loses its gradient. The authors' code has the default and ``SoftClip(0.9, -1, 1)``.

    Args:
        linear: Share of the way that is left alone, in [0, 1). 0 is one tanh on each side of r = 1.
        start_low: g below r = 1; artanh(linear) if not given, the point of a tanh whose middle is at r = 1. In
            [−19, 19], where tanh is not yet ±1 in float64.
        start_high: The same above.

    >>> tokens = Tokens.from_batch(
    ...     torch.tensor([[0.11, 0.12, 0.128]]).log(),
    ...     torch.full((1, 3), 0.08).log(),
    ...     torch.ones(1, 3),
    ...     rule=FixedClip(0.5, 0.5),
    ... )
    >>> SoftClip(0.75).weight(tokens) / tokens.ratio  # 3/4 of the way to the bound, all of it, 6/5 of it
    tensor([[1.0000, 0.3810, 0.1610]])
    >>> SoftClip(0.75, 0.0, 0.0).weight(tokens) / tokens.ratio  # from the middle of the tanh
    tensor([[1.0000, 0.4200, 0.1036]])
    """

    linear: float = 0.9
    start_low: float | None = None
    start_high: float | None = None

    def __post_init__(self) -> None:
        _checks.number(
            "linear", self.linear, "in [0, 1), a share of the way to the bound", lambda x: 0 <= x < 1
        )
        for name, start in (("start_low", self.start_low), ("start_high", self.start_high)):
            if start is not None:
                _checks.number(name, start, "between -19 and 19", lambda x: -19 <= x <= 19)

    def _curve(self, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor]:
        """Where y is the smaller, y in units of the way to the bound, and its slope."""
        used = tokens.interval_used.abs()
        above = tokens.interval_used > 0
        low, high = (
            _tail(used, self.linear, math.atanh(self.linear) if start is None else start)
            for start in (self.start_low, self.start_high)
        )
        reached, slope = torch.where(above, high[0], low[0]), torch.where(above, high[1], low[1])
        pushed_out = above == (tokens.advantages > 0)
        smaller = torch.where(pushed_out, reached < used, reached > used)
        return (used > self.linear) & smaller, reached, slope

    def weight(self, tokens: Tokens) -> Tensor:
        bent, _, slope = self._curve(tokens)
        return torch.where(bent, tokens.ratio * slope, tokens.ratio)

    def value(self, tokens: Tokens) -> Tensor:
        bent, reached, _ = self._curve(tokens)
        return torch.where(bent, _ratio_at(tokens, reached), tokens.ratio)


def _tail(used: Tensor, linear: float, start: float) -> tuple[Tensor, Tensor]:
    """The curve that goes on from ``(linear, linear)`` with slope 1 and tends to 1, and its slope."""
    moved = (used - linear).clamp(min=0.0) * (1 + math.exp(-2 * start)) / (2 * (1 - linear))
    # (tanh(start + moved) − tanh(start))/(1 − tanh(start)) and 1 − tanh², without the differences that rounding eats.
    gone = -torch.expm1(-2 * moved) / (1 + torch.exp(-2 * (start + moved)))
    slope = (math.cosh(start) / torch.cosh(start + moved)) ** 2
    return linear + (1 - linear) * gone, slope


def _ratio_at(tokens: Tokens, share: Tensor) -> Tensor:
    """The ratio that uses this share of the rule's interval, on the side where the token's own lies."""
    moved = torch.expm1(tokens.log_ratio_anchor)
    smallest = torch.finfo(share.dtype).tiny
    there = 1 + moved * share / tokens.interval_used.abs().clamp(min=smallest)
    return tokens.ratio * there / (1 + moved)


@dataclass(frozen=True)
class MiddleTanh(Objective):
    """One tanh from bound to bound, of slope 1 at their middle m; it bends inside of the interval too.

    ``w = r·(1 − tanh²((r − m)/h))``, where h is half of the interval, for tokens beyond the middle on the side that A
    pushes to; ``w = r`` elsewhere. A rule without an upper bound leaves the ratio alone.

    >>> tokens = Tokens.from_batch(
    ...     torch.tensor([[0.08, 0.12]]).log(),
    ...     torch.full((1, 2), 0.08).log(),
    ...     torch.ones(1, 2),
    ...     rule=FixedClip(0.5, 0.5),
    ... )
    >>> MiddleTanh().weight(tokens) / tokens.ratio
    tensor([[1.0000, 0.4200]])
    """

    @staticmethod
    def _curve(tokens: Tokens) -> tuple[Tensor, Tensor, Tensor]:
        """Where y is the smaller, y as a ratio to the anchor, and its slope."""
        lower, upper = tokens.bounds.log_lower.exp(), tokens.bounds.log_upper.exp()
        middle, half = (lower + upper) / 2, (upper - lower) / 2
        moved = tokens.log_ratio_anchor.exp() - middle
        bent = (tokens.advantages.sign() * moved > 0) & half.isfinite()
        reached = torch.tanh(moved / half)
        return bent, middle + half * reached, 1 - reached**2

    def weight(self, tokens: Tokens) -> Tensor:
        bent, _, slope = self._curve(tokens)
        return torch.where(bent, tokens.ratio * slope, tokens.ratio)

    def value(self, tokens: Tokens) -> Tensor:
        bent, y, _ = self._curve(tokens)
        return torch.where(bent, tokens.ratio * y / tokens.log_ratio_anchor.exp(), tokens.ratio)


@dataclass(frozen=True)
class Rollback(Objective):
    """PPO's surrogate inside; beyond the bound it turns back along a tanh, which pulls blocked tokens to the bound.

    ``w = −r·a·speed·(1 − tanh²(speed·(r − c)))`` for blocked tokens, ``a`` the depth on that side and c the bound;
    ``w = r`` elsewhere. The pull vanishes far away, unlike that of ``Surrogate(beyond=-0.3)``, whose slope is constant
    (PPO-RB, arXiv 1903.07940).

    With ``inner`` the surrogate bends inside too: ``w = r·inner/tanh(inner)·(1 − tanh²(inner·u))`` for tokens that A
    pushes back to r = 1, u the share of the interval that the ratio uses. PPO's minimum leaves the others as they are.
    The authors' code gives tokens of r = 1 the mean of both weights, 1.54 for ``inner=2``; here they have 1.

    Args:
        depth: How far the surrogate can fall below its value at the bound, > 0; 0.05 as in the authors' code.
        speed: > 0; 0.2 as there.
        depth_high: The same above; ``depth·(upper − 1)/(1 − lower)`` if not given.
        from_one: Whether c is 1 instead of the bound. It is the form that the authors had first, with speed 1 and
            ``depth·(upper/lower)²`` above. With a Band that depth has no limit, so it is to be given as a number.
        inner: 0 for no bend inside; 2 in the authors' code, where it is "activate".

    >>> tokens = Tokens.from_batch(
    ...     torch.tensor([[0.08, 0.12, 0.16]]).log(),
    ...     torch.full((1, 3), 0.08).log(),
    ...     torch.ones(1, 3),
    ...     rule=FixedClip(0.25, 0.25),
    ... )
    >>> Rollback(0.5, 1.0).weight(tokens) / tokens.ratio
    tensor([[ 1.0000, -0.4700, -0.2983]])
    >>> Rollback(0.5, 1.0, from_one=True).weight(tokens) / tokens.ratio
    tensor([[ 1.0000, -0.3932, -0.2100]])
    """

    depth: float = 0.05
    speed: float = 0.2
    depth_high: float | None = None
    from_one: bool = False
    inner: float = 0.0

    def __post_init__(self) -> None:
        above_0(depth=self.depth, speed=self.speed)
        if self.depth_high is not None:
            above_0(depth_high=self.depth_high)
        _checks.number("inner", self.inner, "a finite number of at least 0", lambda x: 0 <= x < math.inf)

    def _beyond(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """y beyond the bound, as a ratio to the anchor, and its slope."""
        log_lower, log_upper = tokens.bounds.log_lower, tokens.bounds.log_upper
        bound = torch.where(tokens.blocked_high, log_upper, log_lower).exp()
        if self.depth_high is None:
            smallest = torch.finfo(tokens.log_ratio.dtype).tiny
            above = self.depth * torch.expm1(log_upper) / -torch.expm1(log_lower).clamp(max=-smallest)
        else:
            above = torch.full_like(log_upper, self.depth_high)
        depth = torch.where(tokens.blocked_high, above, self.depth)
        centre = torch.ones_like(bound) if self.from_one else bound
        position = self.speed * (tokens.log_ratio_anchor.exp() - centre)
        fallen = torch.tanh(position) - torch.tanh(self.speed * (bound - centre))
        return bound - depth * fallen, -depth * self.speed / torch.cosh(position) ** 2

    def _inside(self, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens inside that A pushes back, the share of the interval at which y is, and its slope."""
        used = tokens.interval_used
        back = (used * tokens.advantages < 0) & (used.abs() < 1)
        reached = torch.tanh(self.inner * used.abs())
        steepest = self.inner / math.tanh(self.inner)
        return back, reached / math.tanh(self.inner), steepest * (1 - reached**2)

    def weight(self, tokens: Tokens) -> Tensor:
        weight = torch.where(tokens.blocked, tokens.ratio * self._beyond(tokens)[1], tokens.ratio)
        if not self.inner:
            return weight
        back, _, slope = self._inside(tokens)
        return torch.where(back, tokens.ratio * slope, weight)

    def value(self, tokens: Tokens) -> Tensor:
        y = self._beyond(tokens)[0] * tokens.ratio / tokens.log_ratio_anchor.exp()
        value = torch.where(tokens.blocked, y, tokens.ratio)
        if not self.inner:
            return value
        back, share, _ = self._inside(tokens)
        return torch.where(back, _ratio_at(tokens, share), value)
