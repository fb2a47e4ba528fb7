"""The quantities of a batch's tokens that clip rules and objectives may depend on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from ._lazy import lazy_property
from ._ranges import largest
from .errors import InvalidValue
from .schedules import TrainingState
from .sequences import Sequences

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

__all__ = ["TokenData"]


class AnchorRatio(NamedTuple):
    """The ratio that a rule's bounds apply to, if it differs from the ratio of the loss."""

    logp: Float[Tensor, "batch time"]
    """Log-probabilities (nats) under the anchor policy, which the bounds surround."""
    log_ratio: Float[Tensor, "batch time"]
    """log(π/π_anchor), nats, which is compared with the bounds."""


@dataclass(frozen=True, eq=False)
class TokenData:
    """The tokens of a batch without a clip rule. No tensor carries a gradient.

    Log-probabilities and ratios are at the level of the method: per token, or the mean over the sequence. Values in the
    padding are finite and have no meaning.
    """

    log_ratio: Float[Tensor, "batch time"]
    """log(π/π_old), nats."""
    logp_old: Float[Tensor, "batch time"]
    """log π_old, nats, of the old policy."""
    advantages: Float[Tensor, "batch time"]
    """The advantage of each token."""
    mask: Float[Tensor, "batch time"]
    """1 for tokens that count, 0 for padding."""
    sequences: Sequences
    """The assignment of tokens to sequences, and sums over them."""
    anchor_ratio: AnchorRatio | None = None
    """The ratio that a rule bounds, if that is not ``ratio``."""
    entropy: Float[Tensor, "batch time"] | None = None
    """Entropy (nats) of the policy at each token, if known."""
    weights: Tensor | None = None
    """Importance weights per token or per sequence, if any; see `Objective.weights_inside`."""
    state: TrainingState = field(default_factory=TrainingState)
    """Further quantities: the groups of sequences, the age of the weights that sampled, the progress of training."""

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
        """The number of versions by which the weights that sampled each token were behind.

        Raises:
            ValueError: if the training state lacks ``age``.
        """
        return self._known("age").to(self.log_ratio.dtype)

    @property
    def group(self) -> Int[Tensor, "batch time"]:
        """The index of each token's prompt.

        Raises:
            ValueError: if the training state lacks ``group``.
        """
        return self._known("group")

    def _known(self, name: str) -> Tensor:
        """Return a quantity of the training state at each token."""
        x = getattr(self.state, name)
        if x is None:
            raise InvalidValue(
                f"the {name} of the tokens is not known: pass state=TrainingState({name}=...) to policy_loss"
            )
        return self.sequences.at_tokens(self.sequences.values(name, x))

    @lazy_property
    def ratio(self) -> Float[Tensor, "batch time"]:
        """Compute π/π_old, within the smallest normal number and the largest ratio of which sums are finite.

        Weights are divided by it, so it is not 0. The largest ratio is 2^104 = e^72.1 in float32, e^693 in float64.
        """
        dtype = self.log_ratio.dtype
        return self.log_ratio.exp().clamp_(torch.finfo(dtype).tiny, largest(dtype))

    @property
    def logp_anchor(self) -> Float[Tensor, "batch time"]:
        """Log-probabilities (nats) that the rule's bounds surround."""
        return self.logp_old if self.anchor_ratio is None else self.anchor_ratio.logp

    @property
    def log_ratio_anchor(self) -> Float[Tensor, "batch time"]:
        """The log-ratio log(π/π_anchor), nats, which is compared with the rule's bounds."""
        return self.log_ratio if self.anchor_ratio is None else self.anchor_ratio.log_ratio

    def sequence_before(self, x: Float[Tensor, "batch time"]) -> Float[Tensor, "batch time"]:
        """Compute the sum of ``x`` over the counted tokens of the sequence before each token."""
        return self.sequences.before(x)

    def sequence_sum(self, x: Float[Tensor, "batch time"]) -> Float[Tensor, "batch time"]:
        """Compute the sum of ``x`` over the counted tokens of each sequence, at each of its tokens."""
        return self.sequences.at_tokens(self.sequences.sum(x * self.mask)).to(x.dtype)

    def sequence_mean(self, x: Float[Tensor, "batch time"]) -> Float[Tensor, "batch time"]:
        """Compute the mean of ``x`` over the counted tokens of each sequence, at each of its tokens."""
        return self.sequences.mean(x)
