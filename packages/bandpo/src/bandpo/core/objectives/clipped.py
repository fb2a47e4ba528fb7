"""Objectives that change the weight of tokens outside of a clip rule's bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import _checks
from .._ranges import largest
from ..batch import Tokens, limit
from ..objectives._products import log_product
from ..objectives.base import Objective, check_positive

__all__ = [
    "ClippedWeight",
    "DropOutside",
    "GeometricMean",
    "InverseRatio",
    "KeepBound",
    "RolloutSurrogate",
    "SequenceProduct",
    "Surrogate",
]


@dataclass(frozen=True)
class Surrogate(Objective):
    """PPO's surrogate ``min(r·A, clip(r)·A)``, with an optional slope beyond the bounds.

    ``w = r``, and ``beyond·r`` for a blocked token: one whose ratio is outside of the bounds on the side that its
    advantage pushes to.

    Args:
        beyond: Share of the gradient that blocked tokens keep, < 1. 0 is PPO's hard clip, and a value in (0, 1) a soft
            clip. With a value below 0, the rollback of PPO-RB (arXiv 1903.07940), they are pulled back towards the
            bound.

    Source: arXiv 1707.06347.

    >>> old, advantages = torch.full((1, 2), 0.08).log(), torch.ones(1, 2)
    >>> tokens = Batch.read(torch.tensor([[0.16, 0.09]]).log(), old, advantages).tokens(FixedClip(0.2))
    >>> Surrogate().weight(tokens), Surrogate(beyond=0.25).weight(tokens)
    (tensor([[0.0000, 1.1250]]), tensor([[0.5000, 1.1250]]))
    """

    beyond: float = 0.0

    def __post_init__(self) -> None:
        _checks.number("beyond", self.beyond, "a finite number below 1", lambda x: -math.inf < x < 1)

    def weight(self, tokens: Tokens) -> Tensor:
        blocked = tokens.blocked
        if self.beyond == 0:
            return tokens.ratio.masked_fill(blocked, 0.0)
        return torch.where(blocked, self.beyond * tokens.ratio, tokens.ratio)

    def surrogate(self, tokens: Tokens) -> Tensor:
        at_bound = tokens.ratio_at_bound(tokens.blocked)
        if self.beyond != 0:
            at_bound = at_bound.lerp(tokens.ratio, self.beyond)
        return torch.where(tokens.blocked, at_bound, tokens.ratio)


@dataclass(frozen=True)
class DropOutside(Objective):
    """An objective that drops tokens outside of the bounds: ``w = min(r, max_weight)`` inside, 0 outside.

    With `Band` and ``max_weight=inf`` this is DPPO's binary mask, and the gradient equals that of `Surrogate`.

    Args:
        max_weight: Largest weight, > 0; ``inf`` for none. 20 is the argument of verl's loss.
        both_sides: True to drop all tokens outside of the bounds, as in IcePop and GLM-5. False to drop only those that
            the advantage pushes further out, as in DPPO.

    Source: arXiv 2602.04879; both sides: arXiv 2510.18855.

    >>> old, advantages = torch.full((1, 2), 0.08).log(), torch.tensor([[1.0, -1.0]])
    >>> tokens = Batch.read(torch.tensor([[0.16, 0.16]]).log(), old, advantages).tokens(FixedClip(0.2))
    >>> DropOutside(1.5).weight(tokens), DropOutside(both_sides=True).weight(tokens)
    (tensor([[0.0000, 1.5000]]), tensor([[0., 0.]]))
    """

    max_weight: float = 20.0
    both_sides: bool = False

    def __post_init__(self) -> None:
        check_positive(max_weight=self.max_weight)

    def weight(self, tokens: Tokens) -> Tensor:
        outside = tokens.clip_mask.clipped_low | tokens.clip_mask.clipped_high
        dropped = outside if self.both_sides else tokens.blocked
        return tokens.ratio.clamp(max=self.max_weight).masked_fill(dropped, 0.0)


@dataclass(frozen=True)
class RolloutSurrogate(Objective):
    """MiniRL's objective: PPO's mask, and the ratio to the policy that sampled as weight.

    ``w = min(r·c, max_weight)``, where ``c`` is the token's importance weight ``π_old/π_rollout`` if there are any, and
    0 for blocked tokens. So the bounds refer to the old policy and the weight to the rollout engine's.

    Args:
        max_weight: Largest weight, > 0; ``inf`` for none.

    Source: arXiv 2512.01374.

    >>> old, advantages = torch.full((1, 3), 0.08).log(), torch.tensor([[1.0, 1.0, -1.0]])
    >>> tokens = Batch.read(torch.tensor([[0.16, 0.09, 0.8]]).log(), old, advantages).tokens(FixedClip(0.2))
    >>> RolloutSurrogate().weight(tokens)
    tensor([[0.0000, 1.1250, 5.0000]])
    """

    max_weight: float = 5.0

    def __post_init__(self) -> None:
        check_positive(max_weight=self.max_weight)

    @property
    def weights_inside(self) -> bool:
        return True

    def weight(self, tokens: Tokens) -> Tensor:
        ratio = tokens.ratio
        if tokens.weights is not None:
            ratio = ratio * tokens.sequences.at_tokens(tokens.weights)
        largest_weight = min(self.max_weight, largest(ratio.dtype))
        return ratio.clamp(max=largest_weight).masked_fill(tokens.blocked, 0.0)


@dataclass(frozen=True)
class ClippedWeight(Objective):
    """CISPO's objective: the weight is the clipped ratio for both signs of A, so no token loses its gradient.

    ``w = min(clip(r), max_weight)``.

    Args:
        max_weight: Largest weight, > 0. Unlike a clip rule's upper bound it may be below 1.

    Source: arXiv 2506.13585.

    >>> old, advantages = torch.full((1, 2), 0.08).log(), torch.ones(1, 2)
    >>> tokens = Batch.read(torch.tensor([[0.16, 0.04]]).log(), old, advantages).tokens(FixedClip(0.2))
    >>> ClippedWeight().weight(tokens)
    tensor([[1.2000, 0.8000]])
    """

    max_weight: float = math.inf

    def __post_init__(self) -> None:
        check_positive(max_weight=self.max_weight)

    def weight(self, tokens: Tokens) -> Tensor:
        return tokens.clipped.clamp(max=self.max_weight)


@dataclass(frozen=True)
class KeepBound(Objective):
    """GPPO's objective: blocked tokens have a share of the bound as weight.

    ``w = keep_low·lower`` for tokens blocked below, ``keep_high·upper`` for those blocked above, and ``r`` otherwise.

    Args:
        keep_low: Share of the lower bound that tokens with A < 0 keep, ≥ 0. CE-GPPO uses 0.75.
        keep_high: Share of the upper bound that tokens with A > 0 keep, ≥ 0.

    Source: GPPO, arXiv 2508.07629 (both shares 1); CE-GPPO, arXiv 2509.20712.

    >>> old, advantages = torch.full((1, 2), 0.08).log(), torch.tensor([[1.0, -1.0]])
    >>> tokens = Batch.read(torch.tensor([[0.16, 0.04]]).log(), old, advantages).tokens(FixedClip(0.2))
    >>> KeepBound(keep_low=0.75).weight(tokens)
    tensor([[1.2000, 0.6000]])
    """

    keep_low: float = 1.0
    keep_high: float = 1.0

    def __post_init__(self) -> None:
        for name in ("keep_low", "keep_high"):
            _checks.number(
                name, getattr(self, name), "a finite number of at least 0", lambda x: 0 <= x < math.inf
            )

    def weight(self, tokens: Tokens) -> Tensor:
        at_upper = self.keep_high * tokens.clipped
        at_lower = self.keep_low * tokens.clipped
        blocked_weight = torch.where(tokens.advantages > 0, at_upper, at_lower)
        return torch.where(tokens.blocked, blocked_weight, tokens.ratio)


@dataclass(frozen=True)
class InverseRatio(Objective):
    """ASPO's objective: tokens with A > 0 have the weight ``1/r`` instead of ``r``; blocked tokens are dropped.

    ``w = min(1/r, max_weight)`` if A > 0, ``min(r, max_weight)`` otherwise, and 0 for blocked tokens.

    Args:
        max_weight: Largest weight, > 0.

    Source: arXiv 2510.06062.

    >>> old, advantages = torch.full((1, 3), 0.08).log(), torch.ones(1, 3)
    >>> tokens = Batch.read(torch.tensor([[0.16, 0.04, 0.01]]).log(), old, advantages).tokens(FixedClip(0.2))
    >>> InverseRatio().weight(tokens)
    tensor([[0., 2., 3.]])
    """

    max_weight: float = 3.0

    def __post_init__(self) -> None:
        check_positive(max_weight=self.max_weight)

    def weight(self, tokens: Tokens) -> Tensor:
        weight = torch.where(tokens.advantages > 0, 1 / tokens.ratio, tokens.ratio)
        return weight.clamp(max=self.max_weight).masked_fill(tokens.blocked, 0.0)


@dataclass(frozen=True)
class GeometricMean(Objective):
    """GMPO's objective: the weight is the geometric mean of the sequence's clipped token ratios.

    ``w = exp(mean of log clip(r))`` over the sequence, and 0 for a blocked token. A ratio is clipped only on the side
    that its advantage pushes to. With the aggregation ``seq-mean-token-mean``, this is the gradient of the mean of
    these geometric means over sequences.

    Source: arXiv 2507.20673.

    >>> old, advantages = torch.full((1, 2), 0.08).log(), torch.ones(1, 2)
    >>> tokens = Batch.read(torch.tensor([[0.16, 0.09]]).log(), old, advantages).tokens(FixedClip(0.2))
    >>> GeometricMean().weight(tokens)  # √(1.2 · 1.125)
    tensor([[0.0000, 1.1619]])
    """

    @property
    def whole_sequence(self) -> bool:
        return True

    def weight(self, tokens: Tokens) -> Tensor:
        return self.surrogate(tokens).masked_fill(tokens.blocked, 0.0)

    def surrogate(self, tokens: Tokens) -> Tensor:
        ratio = torch.where(tokens.blocked, tokens.clipped, tokens.ratio)
        mean = tokens.sequence_mean(ratio.log()).exp()
        # The exponential of the logarithm of the largest ratio may be above it by rounding.
        return limit(mean)


@dataclass(frozen=True)
class SequenceProduct(Objective):
    """The objective of TOPR's losers: every token has the product of its sequence's ratios as weight, up to a limit.

    ``w = min(W, max_weight)`` with ``W = exp(sum of log(r·c))`` over the sequence, where ``c`` is the token's
    importance weight if there are any. No clip rule is used.

    Args:
        max_weight: Largest weight, > 0; ``inf`` for none.

    Source: arXiv 2503.14286.

    >>> old, advantages = torch.full((2, 2), 0.08).log(), -torch.ones(2)
    >>> logp = torch.tensor([[0.04, 0.12], [0.16, 0.12]]).log()
    >>> tokens = Batch.read(logp, old, advantages).tokens(Unclipped())
    >>> SequenceProduct(1.0).weight(tokens)  # ½ · 1½, and 2 · 1½
    tensor([[0.7500, 0.7500],
            [1.0000, 1.0000]])
    """

    max_weight: float = math.inf

    def __post_init__(self) -> None:
        check_positive(max_weight=self.max_weight)

    @property
    def weights_inside(self) -> bool:
        return True

    @property
    def whole_sequence(self) -> bool:
        return True

    def weight(self, tokens: Tokens) -> Tensor:
        product = log_product(tokens, tokens.log_ratio).exp()
        return product.clamp(max=min(self.max_weight, largest(product.dtype)))
