"""The base of all objectives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bandpo import _checks
from bandpo.errors import InvalidType, InvalidValue

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from bandpo.batch import Tokens

__all__ = ["Objective"]


@dataclass(frozen=True)
class Objective(ABC):
    """The form of a policy-gradient loss; immutable, and written like a clip rule: ``Masked(20.0)``."""

    @abstractmethod
    def weight(self, tokens: Tokens) -> Float[Tensor, "batch time"]:
        """The weight ``w`` in the gradient ``−w·A·∇logp`` of each token."""

    def value(self, tokens: Tokens) -> Float[Tensor, "batch time"]:
        """What stands for ``r`` in the reported loss ``−r·A``; by default the weight. It has no effect on training."""
        return self.weight(tokens)


def above_0(**settings: float) -> None:
    """Refuse a setting that is not a number above 0."""
    for name, value in settings.items():
        if not (_checks.is_number(value) and value > 0):
            raise InvalidValue(f"{name} must be above 0, got {value!r}")


def is_objective(objective: Objective) -> None:
    """Refuse what is no objective."""
    if not isinstance(objective, Objective):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidType(f"objective must be an Objective such as Surrogate(), got {objective!r}")
