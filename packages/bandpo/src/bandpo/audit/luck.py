"""The share of positive advantages that lies on common tokens, for prompts whose answers mostly fail."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from bandpo.core.batch import Batch

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

HARD = 0.25
"""Largest share of answers with a positive advantage in a group that counts as hard."""
COMMON = 0.1
"""Smallest old probability of a token that counts as common."""


def hard_advantages(batch: Batch, group: Int[Tensor, " sequences"]) -> Float[Tensor, 2]:
    """Compute the sum of the positive advantages in hard groups, and the part of the sum on common tokens.

    A group is the answers to one prompt; winners are those with A > 0, losers those with A < 0. If advantages are
    rewards minus the group's mean, winners with the mean advantage ``a`` and losers with the mean ``−b`` are balanced,
    so the winners are a share ``b/(a + b)`` of the group. On average this also holds for the answers of a group that
    are in one micro-batch. Groups without a winner or without a loser in the batch are left out.

    Args:
        batch: The batch.
        group: Index of each sequence's prompt, (sequences,).
    """
    sequences = batch.sequences
    length = sequences.length.flatten()
    by_sequence = sequences.sum(batch.advantages * batch.mask).flatten() / length.clamp(min=1.0)
    index = _dense_index(group)
    if sequences.packed:
        # The last entry is for tokens of no sequence. Its length is 0, so it is neither a winner nor a loser.
        index = torch.cat([index, index.new_zeros(1)])

    def by_group(values: Tensor) -> Tensor:
        return values.new_zeros(len(values)).index_add(0, index, values)

    gain = by_sequence.clamp(min=0.0)
    loss = (-by_sequence).clamp(min=0.0)
    mean_gain = by_group(gain) / by_group((gain > 0).to(gain))
    mean_loss = by_group(loss) / by_group((loss > 0).to(loss))
    # In a group without a winner or a loser this compares NaN from 0/0, which is False.
    is_hard = mean_loss / (mean_gain + mean_loss) <= HARD + 1e-6
    hard = sequences.at_tokens(is_hard[index].view(sequences.length.shape))
    advantages = batch.advantages.clamp(min=0.0) * batch.mask * hard
    common = advantages * (batch.logp_old >= math.log(COMMON))
    return torch.stack([advantages.sum(), common.sum()])


def _dense_index(group: Int[Tensor, " sequences"]) -> Int[Tensor, " sequences"]:
    """Renumber the groups from 0, without reading the number of groups on the host."""
    ordered, order = group.sort()
    is_next = torch.cat([torch.zeros_like(ordered[:1]), (ordered[1:] != ordered[:-1]).to(ordered)])
    return torch.empty_like(order).scatter(0, order, is_next.long().cumsum(0))
