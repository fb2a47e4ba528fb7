"""The base of all objectives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bandpo import _checks
from bandpo.errors import InvalidType
from bandpo.schedules import Varies

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from bandpo.batch import Tokens

__all__ = ["Objective"]


@dataclass(frozen=True)
class Objective(Varies, ABC):
    """The form of a policy-gradient loss; immutable, and written like a clip rule: ``DropOutside(20.0)``.

    A token's gradient is ``−(w·A + b)·∇logp``.
    """

    @abstractmethod
    def weight(self, tokens: Tokens) -> Float[Tensor, "batch time"]:
        """The weight ``w`` of each token."""

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
        """Whether `weight` holds the importance weights itself. If not they are a factor of the token's loss."""
        return False

    @property
    def whole_sequence(self) -> bool:
        """Whether a token's weight depends on other tokens of its sequence: a row must then hold one sequence."""
        return False

    @property
    def one_pass(self) -> bool:
        """Whether a compiler may compute its expressions again in place of storing them, see `bandpo.compile_loss`.

        False for sums whose every term would be computed anew from all terms before it.
        """
        return True

    @property
    def whole_batch(self) -> bool:
        """Whether a token's weight depends on other sequences: the loss then needs all of an update at once."""
        return False


def above_0(**settings: float) -> None:
    """Refuse a setting that is not a number above 0."""
    for name, value in settings.items():
        _checks.number(name, value, "above 0", lambda x: x > 0)


def is_objective(objective: Objective) -> None:
    """Refuse what is no objective."""
    if not isinstance(objective, Objective):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidType(f"objective must be an Objective such as Surrogate(), got {objective!r}")
