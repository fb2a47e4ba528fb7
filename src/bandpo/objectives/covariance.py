"""Objectives that look at the covariance of advantage and log-probability."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bandpo import _checks
from bandpo.batch import Tokens
from bandpo.errors import InvalidValue
from bandpo.objectives._around import Apart
from bandpo.objectives.base import Objective, above_0
from bandpo.objectives.clipped import Surrogate

__all__ = ["CovarianceMask", "CovariancePenalty"]


@dataclass(frozen=True)
class CovariancePenalty(Objective):
    """KL-Cov's form: no clip, ``w = r``, and a loss of ``coefficient·abs(log r)`` on the tokens that cost most entropy.

    They are the ``share`` (in (0, 1]) with the largest ``(A − mean A)·(log π − mean log π)``, one token at least.

    Source: arXiv 2505.22617, and its authors' script for 7B. For 32B it has a share of 0.0002; verl's defaults are
    0.0002 and a coefficient of 0.1.

    >>> old, advantages = torch.full((1, 2), 0.08).log(), torch.eye(2)[:1]
    >>> tokens = Tokens.from_batch(torch.tensor([[0.16, 0.04]]).log(), old, advantages, rule=Unclipped())
    >>> CovariancePenalty(0.5).bias(tokens)
    tensor([[-1.,  0.]])
    """

    share: float = 0.002
    coefficient: float = 1.0

    def __post_init__(self) -> None:
        _checks.number("share", self.share, "in (0, 1]", lambda x: 0 < x <= 1)
        above_0(coefficient=self.coefficient)

    @property
    def whole_batch(self) -> bool:
        return True

    def weight(self, tokens: Tokens) -> Tensor:
        return tokens.ratio

    def bias(self, tokens: Tokens) -> Tensor:
        return -self._chosen(tokens) * tokens.log_ratio.sign()

    def regularizer(self, tokens: Tokens) -> Tensor:
        return self._chosen(tokens) * tokens.log_ratio.abs()

    def _chosen(self, tokens: Tokens) -> Tensor:
        """Return the coefficient at the tokens that are pulled back, else 0."""
        covariance = _covariance(tokens)
        order = covariance.masked_fill(tokens.mask == 0, -math.inf).flatten().argsort(descending=True)
        return _first(order, self.share, tokens).to(covariance.dtype) * self.coefficient


@dataclass(frozen=True)
class CovarianceMask(Apart):
    """Clip-Cov's form: another objective without the gradient of a few tokens that cost much entropy.

    They are drawn from the tokens whose ``(A − mean A)·(log π − mean log π)`` lies between ``min_covariance`` and
    ``max_covariance``, and which the clip rule does not block: the ``share`` of all counted tokens, one at least, or
    all of them where they are fewer. They report 0.

    Args:
        share: Share of the counted tokens that lose their gradient, in (0, 1].
        min_covariance: What the product must be above.
        max_covariance: What it must be below.
        objective: What holds for the other tokens.

    Source: arXiv 2505.22617. Its authors, and verl, draw the tokens from a random number generator. Here they are drawn
    by a hash of their log-probabilities, so the loss, the audit and the gradient check have the same ones.

    >>> old, advantages = torch.full((1, 2), 0.08).log(), torch.tensor([[3.0, -3.0]])
    >>> tokens = Tokens.from_batch(torch.tensor([[0.16, 0.08]]).log(), old, advantages, rule=Unclipped())
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

    def _apart(self, tokens: Tokens) -> tuple[Tensor, float, float]:
        covariance = _covariance(tokens)
        between = (covariance > self.min_covariance) & (covariance < self.max_covariance)
        candidates = between & (tokens.mask > 0) & ~tokens.blocked
        last = torch.iinfo(torch.int64).max
        order = _hash(tokens).masked_fill(~candidates, last).flatten().argsort(stable=True)
        return _first(order, self.share, tokens) & candidates, 0.0, 0.0


def _covariance(tokens: Tokens) -> Tensor:
    """Compute the product of advantage and log-probability, each without its mean over the counted tokens."""
    count = tokens.mask.sum()
    advantage, logp = (
        x - (x * tokens.mask).sum() / count for x in (tokens.advantages, tokens.logp_old + tokens.log_ratio)
    )
    return advantage * logp


def _first(order: Tensor, share: float, tokens: Tokens) -> Tensor:
    """Return which tokens come first in an order: a share of those that count, rounded down, and one at least."""
    # In float32 a share of 0.0002 of 5,000 tokens is less than 1.
    count = tokens.mask.sum().to(_checks.widest_float(tokens.mask.device))
    number = (share * count).floor().clamp(min=1)
    first = torch.arange(len(order), device=order.device) < number
    return torch.empty_like(first).scatter(0, order, first).view(tokens.mask.shape)


def _hash(tokens: Tokens) -> Tensor:
    """Return a number for each token, of which no pattern remains; the same wherever the token stands."""
    # Of their float32 values, so that a loss that is computed again in float64 draws the same tokens.
    old, moved = (
        x.float().contiguous().view(torch.int32).long() for x in (tokens.logp_old, tokens.log_ratio)
    )
    # Odd factors of 64 bits, and shifts that bring the upper bits down. Products overflow, as they should.
    mixed = old * 6364136223846793005 + moved * 1442695040888963407
    for factor in (7046029254386353131, 2685821657736338717):
        mixed = (mixed ^ (mixed >> 32)) * factor
    return mixed ^ (mixed >> 32)
