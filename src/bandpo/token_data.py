"""What a clip rule and an objective may look at: one view of a batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from bandpo._lazy import lazy_property
from bandpo.errors import InvalidValue
from bandpo.schedules import TrainingState
from bandpo.sequences import Sequences

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

__all__ = ["TokenData"]


class AnchorRatio(NamedTuple):
    """The ratio that a rule's bounds apply to, where it is not the ratio that a loss weights with."""

    logp: Float[Tensor, "batch time"]
    """Log-probability (nats) that the bounds surround."""
    log_ratio: Float[Tensor, "batch time"]
    """log(π/π_anchor), nats, which is compared with the bounds."""


@dataclass(frozen=True, eq=False)
class TokenData:
    """One view of a batch, without a rule. Nothing in it carries a gradient.

    Log-probabilities and ratios are at the level of the method: a token's own, or its sequence's mean. What stands
    where the mask is 0 is finite and means nothing.
    """

    log_ratio: Float[Tensor, "batch time"]
    """log(π/π_old), nats."""
    logp_old: Float[Tensor, "batch time"]
    """log π_old, nats: what the ratio refers to."""
    advantages: Float[Tensor, "batch time"]
    mask: Float[Tensor, "batch time"]
    """1 for tokens that count, else 0."""
    sequences: Sequences
    """Which tokens form a sequence, and sums over them."""
    anchor_ratio: AnchorRatio | None = None
    """The ratio that a rule bounds, where that is not ``ratio``."""
    entropy: Float[Tensor, "batch time"] | None = None
    """Entropy (nats) of the policy at each token, where it is known."""
    weights: Tensor | None = None
    """Importance weights per token or per sequence, where there are any; see `Objective.weights_inside`."""
    state: TrainingState = field(default_factory=TrainingState)
    """What else is known: position and length of sequences, their group, the age of their weights, the progress."""

    @property
    def position(self) -> Float[Tensor, "batch time"]:
        """The number of counted tokens of the sequence before each token."""
        return self.sequences.position

    @property
    def length(self) -> Float[Tensor, "batch time"]:
        """The number of counted tokens of each token's sequence."""
        return self.sequences.token_length

    @property
    def age(self) -> Float[Tensor, "batch time"]:
        """The number of versions that the weights which sampled each token were behind.

        Raises:
            ValueError: the training state does not tell.
        """
        return self._known("age").to(self.log_ratio.dtype)

    @property
    def group(self) -> Int[Tensor, "batch time"]:
        """The number of each token's prompt.

        Raises:
            ValueError: the training state does not tell.
        """
        return self._known("group")

    def _known(self, name: str) -> Tensor:
        """Return at each token a quantity that the training state has per token or per sequence."""
        x = getattr(self.state, name)
        if x is None:
            raise InvalidValue(
                f"the {name} of the tokens is not known: give policy_loss state=TrainingState({name}=...)"
            )
        return self.sequences.at_tokens(self.sequences.values(name, x))

    @lazy_property
    def ratio(self) -> Float[Tensor, "batch time"]:
        """π/π_old, kept finite and above 0 so that a weight can be compared with it."""
        limits = torch.finfo(self.log_ratio.dtype)
        return self.log_ratio.exp().clamp(limits.tiny, limits.max)

    @property
    def logp_anchor(self) -> Float[Tensor, "batch time"]:
        """Log-probability (nats) that the rule's bounds surround."""
        return self.logp_old if self.anchor_ratio is None else self.anchor_ratio.logp

    @property
    def log_ratio_anchor(self) -> Float[Tensor, "batch time"]:
        """log(π/π_anchor): what the rule compares with its bounds."""
        return self.log_ratio if self.anchor_ratio is None else self.anchor_ratio.log_ratio

    def sequence_before(self, x: Float[Tensor, "batch time"]) -> Float[Tensor, "batch time"]:
        """Return the sum of ``x`` over the counted tokens of a sequence that come before each of its tokens."""
        return self.sequences.before(x)

    def sequence_sum(self, x: Float[Tensor, "batch time"]) -> Float[Tensor, "batch time"]:
        """Return the sum of ``x`` over the counted tokens of a sequence, at each of its tokens."""
        return self.sequences.at_tokens(self.sequences.sum(x * self.mask)).to(x.dtype)

    def sequence_mean(self, x: Float[Tensor, "batch time"]) -> Float[Tensor, "batch time"]:
        """Return the mean of ``x`` over the counted tokens of a sequence, at each of its tokens."""
        return self.sequences.mean(x)
