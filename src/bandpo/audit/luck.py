"""How much of the winners' advantages lies on common tokens of answers to prompts that mostly fail."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from bandpo.batch import Batch

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

HARD = 0.25
"""A group is hard if no greater share of its answers wins."""
COMMON = 0.1
"""A token is common if its old probability is at least this."""


def hard_advantages(batch: Batch, group: Int[Tensor, " sequences"]) -> Float[Tensor, 2]:
    """Compute the sum of the advantages above 0 in hard groups, and the part of the sum on common tokens.

    Where advantages are rewards minus the group's mean, winners of mean advantage ``a`` and losers of mean ``−b``
    balance, so that the winners are a share ``b/(a + b)`` of the group. This also holds, on average, for the part of a
    group that a micro-batch has. A part without a winner or without a loser says nothing and is left out.

    Args:
        batch: The batch.
        group: Index of each sequence's prompt.
    """
    sequences = batch.sequences
    length = sequences.length.flatten()
    by_sequence = sequences.sum(batch.advantages * batch.mask).flatten() / length.clamp(min=1.0)
    index = _dense_index(group)
    if sequences.packed:
        # The last entry is of tokens that are in no sequence: it has no length, so it neither wins nor loses.
        index = torch.cat([index, index.new_zeros(1)])

    def by_group(values: Tensor) -> Tensor:
        return values.new_zeros(len(values)).index_add(0, index, values)

    gain, loss = by_sequence.clamp(min=0.0), (-by_sequence).clamp(min=0.0)
    mean_gain = by_group(gain) / by_group((gain > 0).to(gain))
    mean_loss = by_group(loss) / by_group((loss > 0).to(loss))
    # 0/0 in a group without a winner or a loser is NaN, which is not hard.
    is_hard = mean_loss / (mean_gain + mean_loss) <= HARD + 1e-6
    hard = sequences.at_tokens(is_hard[index].view(sequences.length.shape))
    advantages = batch.advantages.clamp(min=0.0) * batch.mask * hard
    common = advantages * (batch.logp_old >= math.log(COMMON))
    return torch.stack([advantages.sum(), common.sum()])


def _dense_index(group: Int[Tensor, " sequences"]) -> Int[Tensor, " sequences"]:
    """Return the number of each sequence's group, from 0, without reading how many groups there are."""
    ordered, order = group.sort()
    is_next = torch.cat([torch.zeros_like(ordered[:1]), (ordered[1:] != ordered[:-1]).to(ordered)])
    return torch.empty_like(order).scatter(0, order, is_next.long().cumsum(0))
