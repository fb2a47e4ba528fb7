"""Base classes of objectives that change another objective."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from ..batch import Tokens
from ..objectives.base import Objective, check_objective


class Wrapper(Objective):
    """Base of objectives that change an inner objective. By default everything is the inner objective's."""

    objective: Objective

    def __post_init__(self) -> None:
        check_objective(self.objective)

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

    @property
    def within_process(self) -> bool:
        is_own = self.whole_batch and not self.objective.whole_batch
        return is_own or self.objective.within_process


class TokenOverride(Wrapper):
    """Base of objectives that give some tokens a constant weight, and leave the others to an inner objective."""

    @abstractmethod
    def _override(self, tokens: Tokens) -> tuple[Tensor, float, float]:
        """Return the tokens whose weight this objective replaces.

        Returns:
            True for these tokens, (batch, time); their weight; and the value that replaces r in their reported loss.
        """

    def weight(self, tokens: Tokens) -> Tensor:
        inner = self.objective.weight(tokens)
        overridden, weight, _ = self._override(tokens)
        return inner.masked_fill(overridden, weight)

    def surrogate(self, tokens: Tokens) -> Tensor:
        inner = self.objective.surrogate(tokens)
        overridden, _, value = self._override(tokens)
        return inner.masked_fill(overridden, value)
