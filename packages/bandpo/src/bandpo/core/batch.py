"""Validation of a trainer's tensors, and the quantities that clip rules and objectives compute from them.

`Batch.read` validates the tensors for the loss and the audit. Padding (mask == 0) is ignored and may contain NaN.
Invalid values at counted tokens raise an error. Half precision becomes float32; float32 and float64 are kept. The
recorder uses the check of the mask only, because it records invalid values for later diagnosis.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from . import _checks
from ._lazy import lazy_property
from ._limits import LOGP_SLACK
from .bounds import RatioBounds
from .errors import InvalidValue
from .rules import ClipMask, ClipRule
from .schedules import TrainingState
from .sequences import Sequences, read_layout
from .token_data import AnchorRatio, TokenData

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor


__all__ = ["Batch", "Tokens"]

LEVELS = ("token", "sequence")


class Batch(NamedTuple):
    """The validated tensors of a batch: detached, in at least float32, and 0 in the padding."""

    log_ratio: Float[Tensor, "batch time"]
    """log(π/π_old), nats, of the sampled tokens."""
    logp_old: Float[Tensor, "batch time"]
    """Log-probabilities (nats) under the old policy, the denominator of the ratio."""
    advantages: Float[Tensor, "batch time"]
    """One per token. On an accelerator, NaN at a counted token for which another tensor has an invalid value."""
    mask: Float[Tensor, "batch time"]
    """1 for tokens that count, 0 for padding."""
    sequences: Sequences
    """The assignment of tokens to sequences."""
    logp_anchor: Float[Tensor, "batch time"] | None = None
    """Log-probabilities (nats) that a rule's bounds surround, if these are not ``logp_old``."""
    entropy: Float[Tensor, "batch time"] | None = None
    """Entropy (nats) of the policy at each token, if known."""
    weights: Tensor | None = None
    """Importance weights, if any: per token, or per sequence in the form of `bandpo.core.sequences.Sequences`."""
    state: TrainingState = TrainingState()
    """Further quantities of the tokens and of the training."""

    @classmethod
    def read(
        cls,
        logp: Float[Tensor, "batch time"],
        logp_old: Float[Tensor, "batch time"],
        advantages: Float[Tensor, "batch time"] | Float[Tensor, "batch 1"] | Float[Tensor, " batch"],
        mask: Tensor | None = None,
        *,
        logp_anchor: Float[Tensor, "batch time"] | None = None,
        entropy: Float[Tensor, "batch time"] | None = None,
        weights: Float[Tensor, "batch time"] | Float[Tensor, " batch"] | None = None,
        state: TrainingState | None = None,
        segments: Int[Tensor, "batch time"] | None = None,
        cu_seqlens: Int[Tensor, " ends"] | None = None,
    ) -> Batch:
        """Validate a trainer's tensors, of any precision, padded or packed, and return them as a batch.

        Args:
            logp: Log-probabilities (nats) of the sampled tokens under the policy in training, (batch, time).
            logp_old: The same under the old policy, the denominator of the ratio.
            advantages: One per token, or one per sequence.
            mask: 1 (or True) for tokens that count, 0 for padding. All tokens count if not given.
            logp_anchor: Log-probabilities (nats) that a rule's bounds surround, if these are not ``logp_old``.
            entropy: Entropy (nats) at each token, if known.
            weights: Importance weights ≥ 0, one per token or per sequence.
            state: Further quantities of the tokens and of the training.
            segments: Index of each token's sequence in a packed batch, see `bandpo.policy_loss`.
            cu_seqlens: Start of each sequence in a packed batch, see `bandpo.policy_loss`.

        Advantages, entropy and weights have the shape (batch, time), (batch,) or (batch, 1). They are not broadcast
        over the batch: (1,) or (1, time) is an error if the batch has several sequences. In a packed batch they have
        one value per token, or the shape (sequences,).

        Raises:
            TypeError: if a tensor is not floating-point, or only some tensors are nested.
            ValueError: if shapes differ; if the mask holds another value than 0 and 1; or if, at a counted token, a
                log-probability is NaN, infinite or above 0, an advantage or an entropy is not finite, or a weight is
                negative or not finite. Values are read on the CPU only. On an accelerator, and under
                ``torch.compile``, the advantage of such a token is NaN, and so are the loss and the gradient.

        >>> logp, logp_old = torch.tensor([[-1.0, 5.0]]), torch.tensor([[-2.0, 5.0]])
        >>> batch = Batch.read(logp, logp_old, torch.ones(1), mask=torch.tensor([[1, 0]]))
        >>> batch.log_ratio, batch.advantages
        (tensor([[1., 0.]]), tensor([[1., 0.]]))
        """
        layout = read_layout(
            {
                "logp": logp,
                "logp_old": logp_old,
                "advantages": advantages,
                "mask": mask,
                "logp_anchor": logp_anchor,
                "entropy": entropy,
                "weights": weights,
            },
            segments,
            cu_seqlens,
        )
        tensors = layout.tensors
        state = TrainingState() if state is None else state

        # The mask and the sequences, which determine the shapes of the other tensors.
        mask = normalize_mask(tensors["logp"], tensors["mask"])
        padding = mask == 0
        sequences = Sequences.read(
            mask,
            segments=layout.segments,
            cu_seqlens=layout.cu_seqlens,
            count=_count_of_sequences(tensors, state) if layout.packed else None,
        )

        # Log-probabilities, (batch, time), 0 in the padding.
        logps: dict[str, Tensor] = {}
        for name in ("logp", "logp_old", "logp_anchor"):
            if tensors[name] is not None:
                logps[name] = _validate_logp(name, tensors[name], padding)

        # Tensors that must be finite at counted tokens. Advantages and entropies are expanded to (batch, time), weights
        # stay per sequence if they are.
        finite: dict[str, Tensor] = {}
        for name in ("advantages", "entropy"):
            if tensors[name] is not None:
                values = sequences.at_tokens(_validate_shape(name, tensors[name], sequences))
                finite[name] = values.masked_fill(padding, 0.0)
        weights = None
        if tensors["weights"] is not None:
            weights = _validate_shape("weights", tensors["weights"], sequences)
            unused = padding if weights.shape == padding.shape else sequences.length == 0
            weights = weights.masked_fill(unused, 0.0)
            finite["weights"] = weights

        # Invalid values raise an error, or make the advantage NaN if values cannot be read.
        advantages = finite["advantages"]
        if _checks.values_can_be_read(mask):
            _check_values(logps, finite, weights)
        else:
            advantages = _mark_invalid(advantages, tensors["mask"], logps, finite, weights)
            if sequences.index is not None:
                advantages = advantages.masked_fill(sequences.unassigned, math.nan)

        # torch 2.6 cannot trace dataclasses.replace.
        state = TrainingState(
            progress=state.progress,
            controller_state=state.controller_state,
            group=state.group,
            age=state.age,
            sequences=sequences,
            processes=state.processes,
        )
        return cls(
            log_ratio=logps["logp"] - logps["logp_old"],
            logp_old=logps["logp_old"],
            advantages=advantages,
            mask=mask,
            sequences=sequences,
            logp_anchor=logps.get("logp_anchor"),
            entropy=finite.get("entropy"),
            weights=weights,
            state=state,
        )

    @property
    def logp(self) -> Float[Tensor, "batch time"]:
        """Log-probabilities (nats) under the policy in training."""
        return self.logp_old + self.log_ratio

    @property
    def token_weights(self) -> Float[Tensor, "batch time"] | None:
        """The importance weight of each token; None if there are none."""
        return None if self.weights is None else self.sequences.at_tokens(self.weights)

    def tokens(self, rule: ClipRule, level: str = "token", bound_level: str | None = None) -> Tokens:
        """Return the tokens of the batch with a clip rule, with ratios per token or per sequence.

        Args:
            rule: The clip rule. Its schedules and controllers are resolved with the batch's training state, and a
                `bandpo.core.rules.TokenRule` in it with the tokens.
            level: The level of the ratio in the loss: ``token``, or ``sequence`` for the geometric mean over a
                sequence.
            bound_level: The level of the ratio that the rule bounds, if that is not ``level``.

        Raises:
            ValueError: if a level is unknown, or a number of the rule depends on something that the state lacks.
        """
        data = self._data(level, bound_level)
        return Tokens(
            log_ratio=data.log_ratio,
            logp_old=data.logp_old,
            advantages=data.advantages,
            mask=data.mask,
            sequences=data.sequences,
            anchor_ratio=data.anchor_ratio,
            entropy=data.entropy,
            weights=data.weights,
            state=data.state,
            rule=rule.resolve(self.state).settle(data),
        )

    def _data(self, level: str, bound_level: str | None) -> TokenData:
        """Return the quantities that a rule may depend on, at the levels of `tokens`."""
        anchor = self.logp_old if self.logp_anchor is None else self.logp_anchor
        anchor_ratio = None
        if self.logp_anchor is not None or bound_level not in (None, level):
            log_ratio = self.log_ratio
            if self.logp_anchor is not None:
                log_ratio = self.log_ratio + (self.logp_old - anchor)
            anchor_ratio = AnchorRatio(
                logp=self._at_level(anchor, bound_level or level),
                log_ratio=self._at_level(log_ratio, bound_level or level),
            )
        return TokenData(
            log_ratio=self._at_level(self.log_ratio, level),
            logp_old=self._at_level(self.logp_old, level),
            advantages=self.advantages,
            mask=self.mask,
            sequences=self.sequences,
            anchor_ratio=anchor_ratio,
            entropy=self.entropy,
            weights=self.weights,
            state=self.state,
        )

    def _at_level(self, logp: Tensor, level: str) -> Tensor:
        """Return log-probabilities at the level that ratios are formed on, see `reduce_to_level`."""
        if check_level(level) == "token":
            return logp
        return self.sequences.mean(logp).contiguous()


def normalize_mask(logp: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mask in float32, 1 for counted tokens and 0 for padding; all ones if it is None.

    The values are only checked on the CPU. On an accelerator, every value other than 0 counts as 1.

    Raises:
        ValueError: if the mask has another shape than ``logp``, or, on the CPU, holds a value other than 0 and 1.
    """
    if mask is None:
        return torch.ones_like(logp, dtype=torch.float32, requires_grad=False)
    if mask.shape != logp.shape:
        raise InvalidValue(
            f"mask has shape {tuple(mask.shape)}, logp {tuple(logp.shape)}; they must be equal"
        )
    if not _checks.values_can_be_read(mask):
        return (mask != 0).float()
    if mask.dtype != torch.bool and not torch.equal(mask, mask * mask):
        invalid = mask[mask != mask * mask][0].item()
        raise InvalidValue(f"mask holds {invalid:g}, but must be 0 or 1; pass fractional weights as weights=")
    return mask.float()


def validate_logps(logps: Mapping[str, Tensor], padding: Tensor) -> dict[str, Tensor]:
    """Return log-probabilities detached, in at least float32, and 0 in the padding.

    An invalid value at a counted token raises ValueError on the CPU, and becomes NaN elsewhere.
    """
    validated = {name: _validate_logp(name, logp, padding) for name, logp in logps.items()}
    if _checks.values_can_be_read(padding):
        _check_values(validated, {}, None)
        return validated
    zeros = torch.zeros_like(next(iter(validated.values())))
    nan_if_invalid = _mark_invalid(zeros, None, validated, {}, None)
    return {name: logp + nan_if_invalid for name, logp in validated.items()}


def _validate_logp(name: str, logp: Tensor, padding: Tensor) -> Tensor:
    """Return a log-probability tensor detached, in at least float32, and 0 in the padding; values are not checked."""
    if logp.shape != padding.shape:
        raise InvalidValue(
            f"{name} has shape {tuple(logp.shape)}, logp {tuple(padding.shape)}; they must be equal"
        )
    return _checks.as_float(name, logp).detach().masked_fill(padding, 0.0)


def _validate_shape(name: str, x: Any, sequences: Sequences) -> Tensor:
    """Return a tensor per token, or a tensor per sequence in the form that `Sequences` gives it."""
    return sequences.values(name, _checks.as_float(name, x).detach())


def _count_of_sequences(tensors: Mapping[str, Any], state: TrainingState) -> int | None:
    """Return the number of sequences of a packed batch from a tensor per sequence; None if there is no such tensor."""
    candidates = [tensors["advantages"], tensors["weights"], tensors["entropy"], state.group, state.age]
    for x in candidates:
        if isinstance(x, torch.Tensor) and x.dim() == 1:
            return len(x)
    return None


def _check_values(logps: Mapping[str, Tensor], finite: Mapping[str, Tensor], weights: Tensor | None) -> None:
    """Raise ValueError if a value at a counted token is invalid.

    Args:
        logps: Log-probabilities, which must be finite and at most 0.
        finite: Tensors that must be finite.
        weights: Importance weights, which must be at least 0.
    """
    # One reduction per tensor (a maximum, a minimum or a sum) costs much less than elementwise comparisons.
    for name, logp in logps.items():
        _checks.check_logp(name, logp)
        if not logp.numel():
            continue
        smallest = logp.min()
        if torch.isneginf(smallest):
            raise InvalidValue(
                f"{name} holds {smallest.item()} at a counted token, but a sampled token has p > 0"
            )
    for name, x in finite.items():
        # A sum is not finite if one of the values is not, or if it overflows.
        if not x.sum().isfinite() and not x.isfinite().all():
            raise InvalidValue(
                f"{name} hold {x[~x.isfinite()][0].item():g} at a counted token; they must be finite"
            )
    if weights is not None and weights.numel() and not weights.min() >= 0:
        raise InvalidValue(f"weights must be at least 0 at counted tokens, got {weights.min().item():g}")


def _mark_invalid(
    advantages: Tensor,
    mask: Tensor | None,
    logps: Mapping[str, Tensor],
    finite: Mapping[str, Tensor],
    weights: Tensor | None,
) -> Tensor:
    """Return the advantages, NaN at tokens for which a tensor has an invalid value.

    It replaces `_check_values` where values cannot be read on the host. Arguments are as there; ``mask`` is the mask as
    passed by the caller.
    """
    # Few operations are needed: maximum and minimum propagate NaN, and x − x is NaN if x is not finite, else 0.
    largest = functools.reduce(torch.maximum, logps.values())
    smallest = functools.reduce(torch.minimum, logps.values())
    nan_if_invalid = torch.where(largest <= LOGP_SLACK, smallest - smallest, math.nan)
    for x in finite.values():
        nan_if_invalid = nan_if_invalid + (x - x)
    if weights is not None:
        nan_if_invalid = torch.where(weights >= 0, nan_if_invalid, math.nan)
    if mask is not None and mask.dtype != torch.bool:
        nan_if_invalid = torch.where(mask == mask * mask, nan_if_invalid, math.nan)
    return advantages + nan_if_invalid


@dataclass(frozen=True, eq=False)
class Tokens(TokenData):
    """The tokens of a batch with a clip rule: the quantities that an objective may depend on, without gradients.

    Each property is computed on first access, so a method computes only the quantities that it uses.

    >>> tokens = Tokens.from_batch(
    ...     torch.tensor([[0.16, 0.04]]).log(),
    ...     torch.tensor([[0.08, 0.08]]).log(),
    ...     torch.tensor([[1.0, 1.0]]),
    ...     rule=FixedClip(0.2),
    ... )
    >>> tokens.ratio, tokens.blocked
    (tensor([[2.0000, 0.5000]]), tensor([[ True, False]]))
    """

    rule: ClipRule = field(kw_only=True)
    """The clip rule for these tokens, after `ClipRule.settle`: its bounds depend on p only."""

    @classmethod
    def from_batch(
        cls,
        logp: Float[Tensor, "batch time"],
        logp_old: Float[Tensor, "batch time"],
        advantages: Float[Tensor, "batch time"] | Float[Tensor, "batch 1"] | Float[Tensor, " batch"],
        mask: Tensor | None = None,
        *,
        rule: ClipRule,
        level: str = "token",
        logp_anchor: Float[Tensor, "batch time"] | None = None,
        entropy: Float[Tensor, "batch time"] | None = None,
        state: TrainingState | None = None,
        segments: Int[Tensor, "batch time"] | None = None,
        cu_seqlens: Int[Tensor, " ends"] | None = None,
    ) -> Tokens:
        """Validate a trainer's tensors and return their tokens with a clip rule.

        Arguments and errors are those of `Batch.read` and `Batch.tokens`.
        """
        batch = Batch.read(
            logp,
            logp_old,
            advantages,
            mask,
            logp_anchor=logp_anchor,
            entropy=entropy,
            state=state,
            segments=segments,
            cu_seqlens=cu_seqlens,
        )
        return batch.tokens(rule, level)

    @lazy_property
    def clip_mask(self) -> ClipMask:
        """Mark the tokens whose ratio to the anchor is below the lower bound, and those above the upper bound."""
        if self.rule.solves:
            return self.rule.clip_mask(self.log_ratio_anchor, self.logp_anchor)
        # Bounds with a closed form are cheap, and other properties use them too.
        return ClipMask(
            self.log_ratio_anchor < self.bounds.log_lower,
            self.log_ratio_anchor > self.bounds.log_upper,
        )

    @lazy_property
    def blocked_low(self) -> Bool[Tensor, "batch time"]:
        """Mark the tokens below the lower bound whose advantage is negative, and so pushes them further down."""
        return self.clip_mask.clipped_low & (self.advantages < 0)

    @lazy_property
    def blocked_high(self) -> Bool[Tensor, "batch time"]:
        """Mark the tokens above the upper bound whose advantage is positive, and so pushes them further up."""
        return self.clip_mask.clipped_high & (self.advantages > 0)

    @lazy_property
    def blocked(self) -> Bool[Tensor, "batch time"]:
        """Mark the tokens outside of the bounds on the side that the advantage pushes to: PPO's gradient is 0."""
        return self.blocked_low | self.blocked_high

    @lazy_property
    def bounds(self) -> RatioBounds:
        """Compute the rule's bounds on the ratio to the anchor. For a `Band` without a closed form this is costly."""
        return self.rule.bounds(self.logp_anchor)

    @lazy_property
    def clipped(self) -> Float[Tensor, "batch time"]:
        """Compute the ratio π/π_old clipped to the rule's bounds."""
        return self._shift_ratio(self.log_ratio_anchor.clamp(self.bounds.log_lower, self.bounds.log_upper))

    @lazy_property
    def reported_ratio(self) -> Float[Tensor, "batch time"]:
        """Compute the ratio of blocked tokens in the value of the loss. It has no effect on the gradient.

        It is the ratio clipped to the bounds. If the bounds need a numerical solver, it is the ratio itself, limited to
        the rule's cap.
        """
        if not self.rule.solves:
            return self.clipped
        # The square root of the largest float, so that sums of the loss stay finite.
        highest = min(self.rule.cap, torch.finfo(self.log_ratio.dtype).max ** 0.5)
        if self.anchor_ratio is None:
            return self.ratio.clamp(max=highest)
        return self._shift_ratio(self.log_ratio_anchor.clamp(max=math.log(highest)))

    def _shift_ratio(self, log_ratio_anchor: Tensor) -> Tensor:
        """Return π/π_old at another value of log(π/π_anchor)."""
        log_ratio = log_ratio_anchor
        if self.anchor_ratio is not None:
            log_ratio = self.log_ratio + (log_ratio_anchor - self.log_ratio_anchor)
        return log_ratio.exp().clamp(max=torch.finfo(log_ratio.dtype).max)

    @lazy_property
    def interval_used(self) -> Float[Tensor, "batch time"]:
        """Compute the ratio's position in the interval: 0 at the anchor, 1 at the upper bound, −1 at the lower."""
        smallest = torch.finfo(self.log_ratio.dtype).tiny
        to_upper = torch.expm1(self.bounds.log_upper).clamp(min=smallest)
        to_lower = -torch.expm1(self.bounds.log_lower).clamp(max=-smallest)
        change = torch.expm1(self.log_ratio_anchor)  # r − 1
        return torch.where(change > 0, change / to_upper, change / to_lower)


def reduce_to_level(
    logp: Float[Tensor, "batch time"], mask: Float[Tensor, "batch time"], level: str
) -> Float[Tensor, "batch time"]:
    """Return log-probabilities at the level of the ratio, (batch, time).

    ``token`` returns them unchanged. ``sequence`` returns at every token the mean over the counted tokens of its
    sequence, which is the logarithm of their geometric mean probability.

    Raises:
        ValueError: if the level is neither.

    >>> reduce_to_level(torch.tensor([[-1.0, -3.0, -9.0]]), torch.tensor([[1.0, 1.0, 0.0]]), "sequence")
    tensor([[-2., -2., -2.]])
    """
    if check_level(level) == "token":
        return logp
    return Sequences(mask).mean(logp).contiguous()


def check_level(level: str) -> str:
    """Return ``level``, or raise ValueError if it is neither ``token`` nor ``sequence``."""
    if level not in LEVELS:
        raise InvalidValue(f"level must be 'token' or 'sequence', got {level!r}")
    return level
