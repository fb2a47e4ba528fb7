"""Objectives with a weight of 1, as in REINFORCE, for some tokens or for all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..batch import Tokens
from ..objectives._around import TokenOverride
from ..objectives.base import Objective
from ..objectives.clipped import Surrogate

__all__ = ["SelfAnchored", "Unweighted"]


@dataclass(frozen=True)
class SelfAnchored(TokenOverride):
    """UP's objective: tokens with A > 0 have the weight 1, as if the old policy were the current one.

    Args:
        objective: The objective of tokens with A ≤ 0.

    Source: arXiv 2607.06987.

    >>> old, advantages = torch.full((1, 2), 0.08).log(), torch.tensor([[1.0, -1.0]])
    >>> tokens = Batch.read(torch.tensor([[0.16, 0.16]]).log(), old, advantages).tokens(FixedClip(0.2))
    >>> SelfAnchored().weight(tokens)
    tensor([[1., 2.]])
    """

    objective: Objective = Surrogate()

    def _override(self, tokens: Tokens) -> tuple[Tensor, float, float]:
        return tokens.advantages > 0, 1.0, 1.0


@dataclass(frozen=True)
class Unweighted(Objective):
    """The objective of REINFORCE: ``w = 1`` for every token.

    Source: GPG, arXiv 2504.02546.

    >>> old = torch.tensor([[0.08]]).log()
    >>> tokens = Batch.read(torch.tensor([[0.16]]).log(), old, torch.ones(1, 1)).tokens(Unclipped())
    >>> Unweighted().weight(tokens)
    tensor([[1.]])
    """

    def weight(self, tokens: Tokens) -> Tensor:
        return torch.ones_like(tokens.ratio)
