"""Objectives with a penalty on how far each token's probability has moved."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bandpo.batch import Tokens
from bandpo.objectives._around import Around
from bandpo.objectives.base import Objective, above_0
from bandpo.objectives.clipped import Surrogate

__all__ = ["LogRatioPenalty"]


@dataclass(frozen=True)
class LogRatioPenalty(Around):
    """Another objective, and a loss of ``coefficient·(log r)²`` on every token: ``b = −2·coefficient·log r``.

    Source: Kimi-K2.5, arXiv 2602.02276.

    >>> old = torch.tensor([[0.08]]).log()
    >>> tokens = Tokens.from_batch(torch.tensor([[0.16]]).log(), old, torch.zeros(1, 1), rule=Unclipped())
    >>> LogRatioPenalty(0.5).bias(tokens), LogRatioPenalty(0.5).regularizer(tokens)  # −log 2 and ½·log² 2
    (tensor([[-0.6931]]), tensor([[0.2402]]))
    """

    coefficient: float
    objective: Objective = Surrogate()

    def __post_init__(self) -> None:
        above_0(coefficient=self.coefficient)
        super().__post_init__()

    def bias(self, tokens: Tokens) -> Tensor:
        mine, other = -2 * self.coefficient * tokens.log_ratio, self.objective.bias(tokens)
        return mine if other is None else mine + other

    def regularizer(self, tokens: Tokens) -> Tensor:
        mine, other = self.coefficient * tokens.log_ratio.square(), self.objective.regularizer(tokens)
        return mine if other is None else mine + other
