"""Objectives that limit the ratio in addition to a clip rule's bounds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import _checks
from ..batch import Tokens
from ..objectives._around import TokenOverride
from ..objectives.base import Objective, check_positive
from ..objectives.clipped import Surrogate

__all__ = ["DualClip", "RatioCap"]


@dataclass(frozen=True)
class DualClip(TokenOverride):
    """A dual clip around another objective: tokens with A < 0 and ``r > max_ratio`` have the weight 0.

    Their reported loss is ``−max_ratio·A``.

    Args:
        max_ratio: Largest ratio, > 1; ``inf`` for none. The paper of Band uses 10, verl 3.
        objective: The objective of the other tokens.

    Source: arXiv 1912.09729.

    >>> old, advantages = torch.full((1, 2), 0.08).log(), -torch.ones(1, 2)
    >>> tokens = Batch.read(torch.tensor([[0.72, 0.16]]).log(), old, advantages).tokens(Unclipped())
    >>> DualClip(3.0).weight(tokens)
    tensor([[0., 2.]])
    """

    max_ratio: float = 3.0
    objective: Objective = Surrogate()

    def __post_init__(self) -> None:
        _checks.number("DualClip's max_ratio", self.max_ratio, "above 1", lambda x: x > 1)
        super().__post_init__()

    def _override(self, tokens: Tokens) -> tuple[Tensor, float, float]:
        # Dropped tokens have the weight 0, and max_ratio in place of r in the reported loss.
        dropped = tokens.negative & (tokens.ratio > self.max_ratio)
        return dropped, 0.0, self.max_ratio


@dataclass(frozen=True)
class RatioCap(Objective):
    """PPO's surrogate with a limit on the unclipped ratio, for both signs of A: TRL's ``delta``.

    A token with ``r > max_ratio`` has the weight 0 if A > 0, or if A < 0 and r is above the rule's upper bound.

    Args:
        max_ratio: Largest unclipped ratio, > 0; TRL's ``delta``.

    >>> old, advantages = torch.full((1, 2), 0.08).log(), -torch.ones(1, 2)
    >>> tokens = Batch.read(torch.tensor([[0.16, 0.09]]).log(), old, advantages).tokens(FixedClip(0.2))
    >>> RatioCap(1.1).weight(tokens)
    tensor([[0.0000, 1.1250]])
    """

    max_ratio: float

    def __post_init__(self) -> None:
        check_positive(max_ratio=self.max_ratio)

    def weight(self, tokens: Tokens) -> Tensor:
        beyond = (tokens.ratio > self.max_ratio) & ((tokens.advantages > 0) | tokens.clip_mask.clipped_high)
        return tokens.ratio.masked_fill(tokens.blocked | beyond, 0.0)

    def surrogate(self, tokens: Tokens) -> Tensor:
        capped = tokens.ratio.clamp(max=self.max_ratio)
        outside = tokens.clip_mask.clipped_low | tokens.clip_mask.clipped_high
        clipped = torch.where(outside, tokens.ratio_at_bound(outside), tokens.ratio)
        smaller = torch.minimum(capped, clipped)
        larger = torch.maximum(capped, clipped)
        return torch.where(tokens.advantages > 0, smaller, larger)
