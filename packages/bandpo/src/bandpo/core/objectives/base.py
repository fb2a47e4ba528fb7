"""The base class of objectives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import _checks
from ..errors import InvalidType
from ..schedules import Varies

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from ..batch import Tokens

__all__ = ["Objective"]


@dataclass(frozen=True)
class Objective(Varies, ABC):
    """The base class of objectives. The gradient of a token's loss is ``−(w·A + b)·∇logp``.

    A subclass computes the weight ``w`` in `weight`, and the bias ``b`` in `bias` if it has one. Objectives are
    immutable, and their text form is like that of clip rules: ``DropOutside(20.0)``.
    """

    @abstractmethod
    def weight(self, tokens: Tokens) -> Float[Tensor, "batch time"]:
        """Compute the weight ``w`` of each token, (batch, time)."""

    def surrogate(self, tokens: Tokens) -> Float[Tensor, "batch time"]:
        """Return the value that replaces ``r`` in the reported loss ``−r·A``, by default the weight.

        It has no effect on training.
        """
        return self.weight(tokens)

    def bias(self, tokens: Tokens) -> Float[Tensor, "batch time"] | None:
        """Return ``b``, the part of each token's gradient that does not scale with its advantage; None for 0."""
        return None

    def regularizer(self, tokens: Tokens) -> Float[Tensor, "batch time"] | None:
        """Return the term of each token's loss whose gradient is `bias`; None for 0."""
        return None

    @property
    def weights_inside(self) -> bool:
        """True if `weight` includes the importance weights. Otherwise they multiply the token's loss."""
        return False

    @property
    def whole_sequence(self) -> bool:
        """True if a token's weight depends on other tokens of its sequence. A row must then hold one sequence."""
        return False

    @property
    def one_pass(self) -> bool:
        """True if a compiler may recompute intermediate tensors instead of storing them, see `bandpo.compile_loss`.

        False for nested sums, in which each term would be recomputed from all terms before it.
        """
        return True

    @property
    def whole_batch(self) -> bool:
        """True if a token's weight depends on other sequences. The loss then needs all of an update at once."""
        return False

    @property
    def within_process(self) -> bool:
        """True if a token's weight depends on other sequences, but only on those of its own process.

        An objective that includes the batches of ``TrainingState(processes=…)`` returns False.
        """
        return self.whole_batch


def check_positive(**settings: float) -> None:
    """Raise ValueError if an argument, passed by its name, is not a number above 0."""
    for name, value in settings.items():
        _checks.number(name, value, "above 0", lambda x: x > 0)


def check_objective(objective: Objective) -> None:
    """Raise TypeError if the argument is not an objective."""
    if not isinstance(objective, Objective):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidType(f"objective must be an Objective such as Surrogate(), got {objective!r}")
