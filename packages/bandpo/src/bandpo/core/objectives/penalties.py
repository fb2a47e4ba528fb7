"""Objectives with a penalty on the change of each token's probability."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..batch import Tokens, limit, limit_weight
from ..objectives._around import Wrapper
from ..objectives.base import Objective, check_positive
from ..objectives.clipped import Surrogate

__all__ = ["LogRatioPenalty"]


@dataclass(frozen=True)
class LogRatioPenalty(Wrapper):
    """Another objective with a penalty of ``coefficient·(log r)²`` on every token: ``b = −2·coefficient·log r``.

    Args:
        coefficient: Factor of the penalty, > 0.
        objective: The objective, which gives the weights.

    Source: Kimi-K2.5, arXiv 2602.02276.

    >>> old = torch.tensor([[0.08]]).log()
    >>> tokens = Batch.read(torch.tensor([[0.16]]).log(), old, torch.zeros(1, 1)).tokens(Unclipped())
    >>> LogRatioPenalty(0.5).bias(tokens), LogRatioPenalty(0.5).regularizer(tokens)  # −log 2 and ½·log² 2
    (tensor([[-0.6931]]), tensor([[0.2402]]))
    """

    coefficient: float
    objective: Objective = Surrogate()

    def __post_init__(self) -> None:
        check_positive(coefficient=self.coefficient)
        super().__post_init__()

    def bias(self, tokens: Tokens) -> Tensor:
        bias = limit_weight(-2 * self.coefficient * tokens.log_ratio)
        inner_bias = self.objective.bias(tokens)
        return bias if inner_bias is None else bias + inner_bias

    def regularizer(self, tokens: Tokens) -> Tensor:
        penalty = limit(self.coefficient * tokens.log_ratio.square())
        inner_penalty = self.objective.regularizer(tokens)
        return penalty if inner_penalty is None else penalty + inner_penalty
