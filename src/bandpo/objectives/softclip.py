"""Soft clips: the surrogate flattens towards the bound, or turns back beyond it, along a tanh.

The authors' code has them beside Band; the paper does not name them. In PPO's ``min(r·A, clip(r)·A)`` the clipped ratio
becomes a smooth function ``y(r)``. So the weight is ``r·y′(r)`` where the minimum is y's, and r elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bandpo.objectives.base import Objective, above_0
from bandpo.tokens import Tokens


@dataclass(frozen=True)
class SoftClip(Objective):
    """The ratio itself up to a share of the way to the bound, from there a tanh that reaches the bound at infinity.

    ``w = r·κ·(1 − tanh²(κ·(u − linear) + artanh(linear)))`` with ``κ = 1/(1 − linear²)`` where ``u > linear``, and
    ``w = r`` elsewhere; u is the share of the rule's interval that the ratio uses, to the side that A pushes to. The
    weight has no jump. No token loses its gradient.

    Args:
        linear: Share of the way that is left alone, in [0, 1). 0 is one tanh on each side of r = 1.

    >>> tokens = Tokens.build(
    ...     torch.tensor([[0.11, 0.12, 0.128]]).log(),
    ...     torch.full((1, 3), 0.08).log(),
    ...     torch.ones(1, 3),
    ...     rule=FixedClip(0.5, 0.5),
    ... )
    >>> SoftClip(0.75).weight(tokens) / tokens.ratio  # 3/4 of the way to the bound, all of it, 6/5 of it
    tensor([[1.0000, 0.3810, 0.1610]])
    """

    linear: float = 0.9

    def __post_init__(self) -> None:
        if not 0 <= self.linear < 1:
            raise ValueError(
                f"linear must be in [0, 1), a share of the way to the bound, got {self.linear!r}"
            )

    def _bent(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Where y bends, and y in units of the way to the bound."""
        used = tokens.advantages.sign() * tokens.interval_used
        steepness = 1 / (1 - self.linear**2)
        return used > self.linear, torch.tanh(steepness * (used - self.linear) + math.atanh(self.linear))

    def weight(self, tokens: Tokens) -> Tensor:
        bent, reached = self._bent(tokens)
        return torch.where(bent, tokens.ratio * (1 - reached**2) / (1 - self.linear**2), tokens.ratio)

    def value(self, tokens: Tokens) -> Tensor:
        bent, reached = self._bent(tokens)
        moved = torch.expm1(tokens.log_ratio_anchor)
        share = reached / tokens.interval_used.abs().clamp(min=torch.finfo(reached.dtype).tiny)
        return torch.where(bent, tokens.ratio * (1 + moved * share) / (1 + moved), tokens.ratio)


@dataclass(frozen=True)
class MiddleTanh(Objective):
    """One tanh from bound to bound, of slope 1 at their middle m; it bends inside of the interval too.

    ``w = r·(1 − tanh²((r − m)/h))``, where h is half of the interval, for tokens beyond the middle on the side that A
    pushes to; ``w = r`` elsewhere. A rule without an upper bound leaves the ratio alone.

    >>> tokens = Tokens.build(
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

    ``w = −r·a·speed·(1 − tanh²(speed·(r − bound)))`` for blocked tokens, with ``a = depth`` below and
    ``depth·(upper − 1)/(1 − lower)`` above; ``w = r`` elsewhere. The pull vanishes far away, unlike that of
    ``Surrogate(beyond=-0.3)``, whose slope is constant (PPO-RB, arXiv 1903.07940).

    Args:
        depth: How far the surrogate can fall below its value at the bound, > 0; 0.05 as in the authors' code.
        speed: > 0; 0.2 as there.

    >>> tokens = Tokens.build(
    ...     torch.tensor([[0.08, 0.12, 0.16]]).log(),
    ...     torch.full((1, 3), 0.08).log(),
    ...     torch.ones(1, 3),
    ...     rule=FixedClip(0.25, 0.25),
    ... )
    >>> Rollback(0.5, 1.0).weight(tokens) / tokens.ratio
    tensor([[ 1.0000, -0.4700, -0.2983]])
    """

    depth: float = 0.05
    speed: float = 0.2

    def __post_init__(self) -> None:
        above_0(depth=self.depth, speed=self.speed)

    def _curve(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """y beyond the bound, as a ratio to the anchor, and its slope."""
        log_lower, log_upper = tokens.bounds.log_lower, tokens.bounds.log_upper
        bound = torch.where(tokens.blocked_high, log_upper, log_lower).exp()
        smallest = torch.finfo(tokens.log_ratio.dtype).tiny
        above = torch.expm1(log_upper) / -torch.expm1(log_lower).clamp(max=-smallest)
        depth = torch.where(tokens.blocked_high, self.depth * above, self.depth)
        beyond = torch.tanh(self.speed * (tokens.log_ratio_anchor.exp() - bound))
        return bound - depth * beyond, -depth * self.speed * (1 - beyond**2)

    def weight(self, tokens: Tokens) -> Tensor:
        return torch.where(tokens.blocked, tokens.ratio * self._curve(tokens)[1], tokens.ratio)

    def value(self, tokens: Tokens) -> Tensor:
        y = self._curve(tokens)[0] * tokens.ratio / tokens.log_ratio_anchor.exp()
        return torch.where(tokens.blocked, y, tokens.ratio)
