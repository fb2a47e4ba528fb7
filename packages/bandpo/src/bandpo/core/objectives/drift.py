"""Objectives that drop whole sequences whose policy has drifted too far."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..batch import Tokens
from ..errors import InvalidValue
from ..objectives._around import TokenOverride
from ..objectives.base import Objective, check_positive
from ..objectives.clipped import Surrogate

__all__ = ["SequenceMask"]


@dataclass(frozen=True)
class SequenceMask(TokenOverride):
    """Another objective that drops the sequences with A < 0 whose drift from the anchor policy is above a limit.

    The anchor is the policy of ``logp_anchor`` in `bandpo.policy_loss`, else the old policy. A mean over tokens still
    counts the tokens of a dropped sequence, as in TRL; verl does not count them.

    Args:
        max_kl: Largest drift (nats), > 0.
        objective: The objective of the other sequences.
        drift: The measure of drift, with ``l = log π − log π_anchor``: ``mean_k1`` is the mean of ``−l`` over the
            sequence, ``mean_k3`` the mean of ``e^l − 1 − l``, and ``max_k2`` the maximum of ``l²/2``. The names are
            verl's.
        both_signs: True to drop sequences with A ≥ 0 as well.

    Source: off-policy sequence masking of DeepSeek-V3.2, arXiv 2512.02556; the other drifts, arXiv 2512.23075.

    >>> old, advantages = torch.full((1, 2), 0.08).log(), -torch.ones(1, 2)
    >>> tokens = Batch.read(torch.tensor([[0.02, 0.08]]).log(), old, advantages).tokens(Unclipped())
    >>> SequenceMask(0.5).weight(tokens), SequenceMask(1.0).weight(tokens)
    (tensor([[0., 0.]]), tensor([[0.2500, 1.0000]]))
    """

    max_kl: float
    objective: Objective = Surrogate()
    drift: str = "mean_k1"
    both_signs: bool = False

    def __post_init__(self) -> None:
        check_positive(max_kl=self.max_kl)
        super().__post_init__()
        if self.drift not in ("mean_k1", "mean_k3", "max_k2"):
            raise InvalidValue(f"drift must be 'mean_k1', 'mean_k3' or 'max_k2', got {self.drift!r}")

    @property
    def whole_sequence(self) -> bool:
        return True

    def _override(self, tokens: Tokens) -> tuple[Tensor, float, float]:
        log_ratio = tokens.log_ratio_anchor
        if self.drift == "max_k2":
            largest = tokens.sequences.max(tokens.mask * log_ratio.square() / 2)
            drift = tokens.sequences.at_tokens(largest)
        elif self.drift == "mean_k3":
            drift = tokens.sequence_mean(torch.expm1(log_ratio) - log_ratio)
        else:
            drift = tokens.sequence_mean(-log_ratio)

        dropped = drift > self.max_kl
        if not self.both_signs:
            dropped = dropped & (tokens.advantages < 0)
        # Dropped tokens have the weight 0, and 0 in place of r in the reported loss.
        return dropped, 0.0, 0.0
