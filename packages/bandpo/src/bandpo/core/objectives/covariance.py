"""Objectives that select tokens by the covariance of advantage and log-probability."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import _checks
from .._update import UpdateTokens
from ..batch import Tokens, limit
from ..errors import InvalidValue
from ..objectives._around import TokenOverride
from ..objectives.base import Objective, check_positive
from ..objectives.clipped import Surrogate

__all__ = ["CovarianceMask", "CovariancePenalty"]


@dataclass(frozen=True)
class CovariancePenalty(Objective):
    """KL-Cov's objective: no clip, and a penalty of ``coefficient·abs(log r)`` on the tokens that lower entropy most.

    ``w = r``, and ``b = −coefficient·sign(log r)`` for the tokens with the largest
    ``(A − mean A)·(log π − mean log π)``. Means and order run over the counted tokens of the update: of the batch of
    the loss, and of the batches of all processes in ``TrainingState(processes=…)``. Of tokens with equal products the
    first have the penalty.

    Args:
        share: Share of the counted tokens that have the penalty, in (0, 1]; one token at least.
        coefficient: Factor of the penalty, > 0.

    Source: arXiv 2505.22617. The defaults are those of its authors' script for 7B. For 32B the share is 0.0002; verl's
    defaults are a share of 0.0002 and a coefficient of 0.1.

    >>> old, advantages = torch.full((1, 2), 0.08).log(), torch.eye(2)[:1]
    >>> tokens = Batch.read(torch.tensor([[0.16, 0.04]]).log(), old, advantages).tokens(Unclipped())
    >>> CovariancePenalty(0.5).bias(tokens)
    tensor([[-1.,  0.]])
    """

    share: float = 0.002
    coefficient: float = 1.0

    def __post_init__(self) -> None:
        _checks.number("share", self.share, "in (0, 1]", lambda x: 0 < x <= 1)
        check_positive(coefficient=self.coefficient)

    @property
    def whole_batch(self) -> bool:
        return True

    @property
    def within_process(self) -> bool:
        return False

    def weight(self, tokens: Tokens) -> Tensor:
        return tokens.ratio

    def bias(self, tokens: Tokens) -> Tensor:
        return -self._coefficients(tokens) * tokens.log_ratio.sign()

    def regularizer(self, tokens: Tokens) -> Tensor:
        return limit(self._coefficients(tokens) * tokens.log_ratio.abs())

    def _coefficients(self, tokens: Tokens) -> Tensor:
        """Return the coefficient at the tokens that have the penalty, else 0."""
        update = UpdateTokens(tokens)
        covariance = _covariance(update, tokens).masked_fill(~update.counted, -math.inf)
        order = covariance.argsort(descending=True, stable=True)
        penalised = update.own(_first(order, self.share, update.counted))
        return penalised.to(covariance.dtype) * self.coefficient


@dataclass(frozen=True)
class CovarianceMask(TokenOverride):
    """Clip-Cov's objective: another objective that drops a few of the tokens that lower entropy much.

    The dropped tokens are drawn from those whose ``(A − mean A)·(log π − mean log π)`` lies between ``min_covariance``
    and ``max_covariance`` and which the clip rule does not block. Their weight and their reported loss are 0. Means and
    draw run over the counted tokens of the update: of the batch of the loss, and of the batches of all processes in
    ``TrainingState(processes=…)``.

    Args:
        share: Number of dropped tokens as a share of the counted tokens, in (0, 1]. One token at least is dropped, and
            at most all tokens between the limits.
        min_covariance: Lower limit of the product, exclusive.
        max_covariance: Upper limit of the product, exclusive.
        objective: The objective of the other tokens.

    Source: arXiv 2505.22617. Its authors, and verl, draw the tokens with a random number generator. Here a hash of
    their log-probabilities selects them, so the loss, the audit and the gradient check drop the same tokens.

    >>> old, advantages = torch.full((1, 2), 0.08).log(), torch.tensor([[3.0, -3.0]])
    >>> tokens = Batch.read(torch.tensor([[0.16, 0.08]]).log(), old, advantages).tokens(Unclipped())
    >>> CovarianceMask(0.5).weight(tokens)  # both products are 3·½·log 2; one of two tokens is dropped
    tensor([[0., 1.]])
    """

    share: float = 0.0002
    min_covariance: float = 1.0
    max_covariance: float = 5.0
    objective: Objective = Surrogate()

    def __post_init__(self) -> None:
        _checks.number("share", self.share, "in (0, 1]", lambda x: 0 < x <= 1)
        if not self.min_covariance < self.max_covariance:
            raise InvalidValue(
                f"min_covariance={self.min_covariance!r} must be below max_covariance={self.max_covariance!r}"
            )
        super().__post_init__()

    @property
    def whole_batch(self) -> bool:
        return True

    @property
    def within_process(self) -> bool:
        return self.objective.within_process

    def _override(self, tokens: Tokens) -> tuple[Tensor, float, float]:
        update = UpdateTokens(tokens)
        covariance = _covariance(update, tokens)
        between = (covariance > self.min_covariance) & (covariance < self.max_covariance)
        blocked = update.gather(tokens.blocked.to(covariance.dtype)) > 0
        candidates = between & update.counted & ~blocked
        last = torch.iinfo(torch.int64).max
        order = update.gather(_hash(tokens)).masked_fill(~candidates, last).argsort(stable=True)
        # Dropped tokens have the weight 0, and 0 in place of r in the reported loss.
        dropped = _first(order, self.share, update.counted) & candidates
        return update.own(dropped), 0.0, 0.0


def _covariance(update: UpdateTokens, tokens: Tokens) -> Tensor:
    """Compute the product of advantage and log-probability, each minus its mean over the update's counted tokens."""
    # The means are sums over all tokens of an update, in float64, so that their rounding does not depend on its split.
    wide = _checks.widest_float(tokens.mask.device)
    count = update.counted.sum()

    def centred(x: Tensor) -> Tensor:
        values = update.gather(x)
        total = (values.to(wide) * update.counted).sum()
        return values - (total / count).to(values.dtype)

    advantage = centred(tokens.advantages)
    logp = centred(tokens.logp_old + tokens.log_ratio)
    return advantage * logp


def _first(order: Tensor, share: float, counted: Tensor) -> Tensor:
    """Return the mask of the first tokens of an order: a share of the counted tokens, rounded down, at least one.

    Args:
        order: Indices of the tokens of the update.
        share: The share, in (0, 1].
        counted: True for the tokens that count.
    """
    # In float64, because in float32 a share of 0.0002 of 5,000 tokens is less than 1.
    count = counted.sum().to(_checks.widest_float(counted.device))
    number = (share * count).floor().clamp(min=1)
    first = torch.arange(len(order), device=order.device) < number
    return torch.empty_like(first).scatter(0, order, first)


def _hash(tokens: Tokens) -> Tensor:
    """Compute a 64-bit hash of each token's log-probabilities, which does not depend on its position."""

    # The bits of the float32 values, so that a loss that is recomputed in float64 selects the same tokens.
    def bits(x: Tensor) -> Tensor:
        return x.float().contiguous().view(torch.int32).long()

    # Multiplications by odd 64-bit factors, which overflow by design, and shifts that mix upper bits into lower ones.
    mixed = bits(tokens.logp_old) * 6364136223846793005 + bits(tokens.log_ratio) * 1442695040888963407
    for factor in (7046029254386353131, 2685821657736338717):
        mixed = (mixed ^ (mixed >> 32)) * factor
    return mixed ^ (mixed >> 32)
