"""Objectives without the sequences that have drifted too far."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bandpo.batch import Tokens
from bandpo.errors import InvalidValue
from bandpo.objectives._around import Apart
from bandpo.objectives.base import Objective, above_0
from bandpo.objectives.clipped import Surrogate

__all__ = ["SequenceMask"]


@dataclass(frozen=True)
class SequenceMask(Apart):
    """Another objective without the sequences that have A < 0 and have drifted too far from the anchor.

    The anchor is the policy that sampled, where `bandpo.policy_loss` is told of it, else the old one. A mean over
    tokens still counts those of a masked sequence, as in TRL; verl takes them out of the number.

    Args:
        max_kl: Largest drift (nats), > 0.
        objective: What holds for the sequences that are kept.
        drift: Of a sequence, with ``l = log π − log π_anchor``: ``mean_k1``, the mean of ``−l`` over its tokens;
            ``mean_k3``, that of ``e^l − 1 − l``; ``max_k2``, the largest ``l²/2``. The names are verl's.
        both_signs: Whether sequences with A ≥ 0 are masked as well.

    Source: off-policy sequence masking of DeepSeek-V3.2, arXiv 2512.02556; the other drifts, arXiv 2512.23075.

    >>> old, advantages = torch.full((1, 2), 0.08).log(), -torch.ones(1, 2)
    >>> tokens = Tokens.from_batch(torch.tensor([[0.02, 0.08]]).log(), old, advantages, rule=Unclipped())
    >>> SequenceMask(0.5).weight(tokens), SequenceMask(1.0).weight(tokens)
    (tensor([[0., 0.]]), tensor([[0.2500, 1.0000]]))
    """

    max_kl: float
    objective: Objective = Surrogate()
    drift: str = "mean_k1"
    both_signs: bool = False

    def __post_init__(self) -> None:
        above_0(max_kl=self.max_kl)
        super().__post_init__()
        if self.drift not in ("mean_k1", "mean_k3", "max_k2"):
            raise InvalidValue(f"drift must be 'mean_k1', 'mean_k3' or 'max_k2', got {self.drift!r}")

    @property
    def whole_sequence(self) -> bool:
        return True

    def _apart(self, tokens: Tokens) -> tuple[Tensor, float, float]:
        moved = tokens.log_ratio_anchor
        if self.drift == "max_k2":
            largest = tokens.sequences.max(tokens.mask * moved.square() / 2)
            drift = tokens.sequences.at_tokens(largest)
        else:
            drift = tokens.sequence_mean(-moved if self.drift == "mean_k1" else torch.expm1(moved) - moved)
        masked = drift > self.max_kl
        return masked if self.both_signs else masked & (tokens.advantages < 0), 0.0, 0.0
