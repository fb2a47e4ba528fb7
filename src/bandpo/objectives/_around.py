"""Bases of objectives that change another objective."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from bandpo.batch import Tokens
from bandpo.objectives.base import Objective, is_objective


class Around(Objective):
    """Another objective, changed."""

    objective: Objective

    def __post_init__(self) -> None:
        is_objective(self.objective)

    def weight(self, tokens: Tokens) -> Tensor:
        return self.objective.weight(tokens)

    def surrogate(self, tokens: Tokens) -> Tensor:
        return self.objective.surrogate(tokens)

    def bias(self, tokens: Tokens) -> Tensor | None:
        return self.objective.bias(tokens)

    def regularizer(self, tokens: Tokens) -> Tensor | None:
        return self.objective.regularizer(tokens)

    @property
    def weights_inside(self) -> bool:
        return self.objective.weights_inside

    @property
    def whole_sequence(self) -> bool:
        return self.objective.whole_sequence

    @property
    def one_pass(self) -> bool:
        return self.objective.one_pass

    @property
    def whole_batch(self) -> bool:
        return self.objective.whole_batch


class Apart(Around):
    """Another objective, but for some tokens, which get one weight and one reported ratio."""

    @abstractmethod
    def _apart(self, tokens: Tokens) -> tuple[Tensor, float, float]:
        """Which tokens, their weight, and what stands for their ratio in the reported loss."""

    def weight(self, tokens: Tokens) -> Tensor:
        these, weight, _ = self._apart(tokens)
        return self.objective.weight(tokens).masked_fill(these, weight)

    def surrogate(self, tokens: Tokens) -> Tensor:
        these, _, value = self._apart(tokens)
        return self.objective.surrogate(tokens).masked_fill(these, value)
