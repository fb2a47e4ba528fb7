"""Validation of a trainer's tensors, and the quantities that clip rules and objectives compute from them.

`Batch.read` validates the tensors once, for the loss, the audit, the gradient check and the recorder. Padding
(mask == 0) is ignored and may contain NaN. Invalid values at counted tokens raise an error. Half precision becomes
float32; float32 and float64 are kept.
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
from ._ranges import largest, largest_weight
from .bounds import RatioBounds
from .errors import InvalidValue
from .layout import Packed, Rows, read_layout
from .rules import ClipMask, ClipRule
from .schedules import TrainingState
from .sequences import Sequences
from .token_data import AnchorRatio, TokenData

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


__all__ = ["Batch", "Tokens"]

LEVELS = ("token", "sequence")
FEW_TOKENS = 4096
"""The number of tokens below which selecting some of them costs more than a root for all of them."""


class Batch(NamedTuple):
    """The validated tensors of a batch, made once by `Batch.read` for the loss, the audit, the check and the recorder.

    Except for ``logp`` they are detached, in at least float32, and 0 in the padding.

    >>> logp, logp_old = torch.tensor([[0.2, 0.5]]).log().requires_grad_(), torch.tensor([[0.08, 0.5]]).log()
    >>> batch = Batch.read(logp, logp_old, torch.tensor([1.0]))
    >>> FixedClip(0.2).clip_mask(batch.log_ratio, batch.logp_old).clipped_high
    tensor([[ True, False]])
    >>> parse("GRPO()").loss(batch).loss
    tensor(-1.1000, grad_fn=<DivBackward0>)
    """

    logp: Float[Tensor, "batch time"] | None
    """The caller's log-probabilities (nats) of the sampled tokens, unchanged, with their gradient; None if unknown."""
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
    rows_assumed: bool = False
    """True if no layout was given and advantages may change within a row. The loss then checks the rows."""

    @classmethod
    def read(
        cls,
        logp: Float[Tensor, "batch time"],
        logp_old: Float[Tensor, "batch time"],
        advantages: Float[Tensor, "batch time"] | Float[Tensor, "batch 1"] | Float[Tensor, " batch"],
        mask: Tensor | None = None,
        *,
        layout: Rows | Packed | None = None,
        logp_anchor: Float[Tensor, "batch time"] | None = None,
        entropy: Float[Tensor, "batch time"] | None = None,
        weights: Float[Tensor, "batch time"] | Float[Tensor, " batch"] | None = None,
        state: TrainingState | None = None,
    ) -> Batch:
        """Validate a trainer's tensors, of any precision, padded or packed, and return them as a batch.

        Args:
            logp: Log-probabilities (nats) of the sampled tokens under the policy in training, (batch, time).
            logp_old: The same under the old policy, the denominator of the ratio.
            advantages: One per token, or one per sequence.
            mask: 1 (or True) for tokens that count, 0 for padding. All tokens count if not given.
            layout: ``Packed(cu_seqlens=…)`` or ``Packed(segments=…)`` for several sequences in a row, ``Rows()`` to
                state that each row is one sequence. Jagged nested tensors contain their layout. Otherwise each row is
                taken for one sequence, and checked as described in `bandpo.policy_loss`.
            logp_anchor: Log-probabilities (nats) of the policy that the rule's bounds surround, if that is not
                ``logp_old``: the rollout engine's, for instance. The new probability is then kept within
                ``[lower(p), upper(p)]·p`` of the anchor's probability p. The ratio still refers to ``logp_old``.
            entropy: Entropy (nats) of the policy at each token, for objectives and audits that use it.
            weights: Importance weights ≥ 0, one per token or per sequence.
            state: Further quantities of the tokens and of the training.

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
        tensors, layout, stated = read_layout(
            {
                "logp": logp,
                "logp_old": logp_old,
                "advantages": advantages,
                "mask": mask,
                "logp_anchor": logp_anchor,
                "entropy": entropy,
                "weights": weights,
            },
            layout,
        )
        state = TrainingState() if state is None else state

        # The mask and the sequences, which determine the shapes of the other tensors.
        mask = normalize_mask(tensors["logp"], tensors["mask"])
        padding = None if tensors["mask"] is None else mask == 0
        is_packed = isinstance(layout, Packed)
        count = _count_of_sequences(tensors, state) if is_packed else None
        sequences = Sequences.read(mask, layout, count=count)

        # In at least float32, with the padding as it is: log-probabilities (batch, time), advantages and entropies
        # expanded to it, weights per token or per sequence.
        logps: dict[str, Tensor] = {}
        for name in ("logp", "logp_old", "logp_anchor"):
            if tensors[name] is not None:
                logps[name] = _validate_logp(name, tensors[name], mask)
        finite: dict[str, Tensor] = {}
        for name in ("advantages", "entropy"):
            if tensors[name] is not None:
                finite[name] = sequences.at_tokens(_validate_shape(name, tensors[name], sequences))
        weights = None
        if tensors["weights"] is not None:
            weights = _validate_shape("weights", tensors["weights"], sequences)
            finite["weights"] = sequences.at_tokens(weights)

        # Advantages that are NaN at tokens with an invalid value; on the CPU an error.
        log_ratio = logps["logp"] - logps["logp_old"]
        advantages = finite["advantages"]
        marked = _mark_invalid(tensors["mask"], log_ratio, logps, finite)
        if sequences.index is not None and not _checks.values_can_be_read(mask):
            marked = marked.masked_fill(sequences.unassigned, math.nan)
        marked = _zero_padding(marked, padding)
        if _checks.values_can_be_read(mask):
            # A sum of finite numbers can overflow, which this takes for no error.
            if math.isnan(marked.sum().item()):
                _raise_invalid(logps, finite, padding)
            marked = _zero_padding(advantages, padding)
        if weights is not None and padding is not None:
            weights = weights.masked_fill(
                padding if weights.shape == padding.shape else sequences.length == 0, 0.0
            )

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
            logp=logp,
            log_ratio=_zero_padding(log_ratio, padding),
            logp_old=_zero_padding(logps["logp_old"], padding),
            advantages=marked,
            mask=mask,
            sequences=sequences,
            logp_anchor=_zero_padding(logps["logp_anchor"], padding) if "logp_anchor" in logps else None,
            entropy=_zero_padding(finite["entropy"], padding) if "entropy" in finite else None,
            weights=weights,
            state=state,
            rows_assumed=not stated
            and _checks.values_can_be_read(mask)
            and not _constant_by_shape(tensors["advantages"], mask),
        )

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

    The values are only checked on the CPU. On an accelerator they are returned as they are, see `_mark_invalid`.

    Raises:
        ValueError: if the mask has another shape than ``logp``, or, on the CPU, holds a value other than 0 and 1.
    """
    if mask is None:
        return torch.ones_like(logp, dtype=torch.float32, requires_grad=False)
    if mask.shape != logp.shape:
        raise InvalidValue(
            f"mask has shape {tuple(mask.shape)}, logp {tuple(logp.shape)}; they must be equal"
        )
    is_read = mask.dtype != torch.bool and _checks.values_can_be_read(mask)
    if is_read and not torch.equal(mask, mask * mask):
        invalid = mask[mask != mask * mask][0].item()
        raise InvalidValue(f"mask holds {invalid:g}, but must be 0 or 1; pass fractional weights as weights=")
    return mask.float()


def validate_logps(logps: Mapping[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
    """Return log-probabilities detached, in at least float32, and 0 in the padding, where the mask is 0.

    An invalid value at a counted token raises ValueError on the CPU, and becomes NaN elsewhere.
    """
    padding = mask == 0
    validated: dict[str, Tensor] = {}
    for name, logp in logps.items():
        validated[name] = _zero_padding(_validate_logp(name, logp, mask), padding)
    if _checks.values_can_be_read(mask):
        _check_logps(validated)
        return validated
    total = functools.reduce(torch.add, validated.values())
    nan_if_invalid = _mark_invalid(None, total, validated, {"zero": torch.zeros_like(total)})
    return {name: logp + nan_if_invalid for name, logp in validated.items()}


def _validate_logp(name: str, logp: Tensor, mask: Tensor) -> Tensor:
    """Return a log-probability tensor detached, in at least float32; values are not checked."""
    if logp.shape != mask.shape:
        raise InvalidValue(
            f"{name} has shape {tuple(logp.shape)}, logp {tuple(mask.shape)}; they must be equal"
        )
    return _checks.as_float(name, logp).detach()


def _validate_shape(name: str, x: Any, sequences: Sequences) -> Tensor:
    """Return a tensor per token, or a tensor per sequence in the form that `Sequences` gives it."""
    return sequences.values(name, _checks.as_float(name, x).detach())


def _zero_padding(x: Tensor, padding: Tensor | None) -> Tensor:
    """Return a tensor per token with 0 in the padding; unchanged if there is none."""
    return x if padding is None else x.masked_fill(padding, 0.0)


def _constant_by_shape(advantages: Tensor, mask: Tensor) -> bool:
    """Return True if the caller's advantages are one per sequence, expanded to the tokens or not."""
    if advantages.dim() < mask.dim() or advantages.shape[-1] <= 1:
        return True
    return advantages.stride(-1) == 0


def _count_of_sequences(tensors: Mapping[str, Any], state: TrainingState) -> int | None:
    """Return the number of sequences of a packed batch from a tensor per sequence; None if there is no such tensor."""
    candidates = [tensors["advantages"], tensors["weights"], tensors["entropy"], state.group, state.age]
    for x in candidates:
        if isinstance(x, torch.Tensor) and x.dim() == 1:
            return len(x)
    return None


def _mark_invalid(
    mask: Tensor | None, log_ratio: Tensor, logps: Mapping[str, Tensor], finite: Mapping[str, Tensor]
) -> Tensor:
    """Return the first tensor of ``finite``, NaN at tokens for which a tensor has an invalid value.

    Nothing is read on the host. Entries in the padding have no meaning.

    Args:
        mask: The mask as passed by the caller; None if all tokens count.
        log_ratio: The difference of the first two log-probabilities, or another sum that is not finite if one is not.
        logps: Log-probabilities, which must be finite and at most 0.
        finite: Further tensors per token, which must be finite; one that is called ``weights`` must be at least 0.
    """
    # Few operations are needed: a maximum propagates NaN, and x − x is NaN if x is not finite, else 0.
    valid = functools.reduce(torch.maximum, logps.values()) <= LOGP_SLACK
    if mask is not None and mask.dtype != torch.bool:
        valid = valid & (mask == 1)
    if "weights" in finite:
        valid = valid & (finite["weights"] >= 0)
    total = log_ratio
    for x in [*finite.values(), *(logps[name] for name in logps if name == "logp_anchor")]:
        total = total + x
    first, *_ = finite.values()
    return torch.where(valid, first + (total - total), math.nan)


def _raise_invalid(logps: Mapping[str, Tensor], finite: Mapping[str, Tensor], padding: Tensor | None) -> None:
    """Raise ValueError for the first invalid value at a counted token; do nothing if there is none.

    Args:
        logps: Log-probabilities, which must be finite and at most 0.
        finite: Tensors that must be finite; one that is called ``weights`` must be at least 0.
        padding: True for the tokens that do not count; None if there are none.
    """
    _check_logps({name: _zero_padding(logp, padding) for name, logp in logps.items()})
    for name, padded in finite.items():
        x = _zero_padding(padded, padding)
        if not x.isfinite().all():
            raise InvalidValue(
                f"{name} hold {x[~x.isfinite()][0].item():g} at a counted token; they must be finite"
            )
        if name == "weights" and not x.min() >= 0:
            raise InvalidValue(f"weights must be at least 0 at counted tokens, got {x.min().item():g}")


def _check_logps(logps: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a log-probability is not finite, or above 0."""
    for name, logp in logps.items():
        _checks.check_logp(name, logp)
        if not logp.numel():
            continue
        smallest = logp.min()
        if torch.isneginf(smallest):
            raise InvalidValue(
                f"{name} holds {smallest.item()} at a counted token, but a sampled token has p > 0"
            )


@dataclass(frozen=True, eq=False)
class Tokens(TokenData):
    """The tokens of a batch with a clip rule: the quantities that an objective may depend on, without gradients.

    Each property is computed on first access, so a method computes only the quantities that it uses.

    >>> old, advantages = torch.full((1, 2), 0.08).log(), torch.ones(1, 2)
    >>> tokens = Batch.read(torch.tensor([[0.16, 0.04]]).log(), old, advantages).tokens(FixedClip(0.2))
    >>> tokens.ratio, tokens.blocked
    (tensor([[2.0000, 0.5000]]), tensor([[ True, False]]))
    """

    rule: ClipRule = field(kw_only=True)
    """The clip rule for these tokens, after `ClipRule.settle`: its bounds depend on p only."""

    @lazy_property
    def clip_mask(self) -> ClipMask:
        """Mark the tokens whose ratio to the anchor is below the lower bound, and those above the upper bound."""
        if self.rule.solves:
            return self.rule.compare(self.log_ratio_anchor, self.logp_anchor)
        # Bounds with a closed form are cheap, and other properties use them too.
        log_lower, log_upper = self.rule.interval or (self.bounds.log_lower, self.bounds.log_upper)
        return ClipMask.outside(self.log_ratio_anchor, log_lower, log_upper)

    @lazy_property
    def above(self) -> Bool[Tensor, "batch time"]:
        """Mark the tokens whose ratio to the anchor is above 1."""
        return self.log_ratio_anchor > 0

    @lazy_property
    def negative(self) -> Bool[Tensor, "batch time"]:
        """Mark the tokens whose advantage is negative."""
        return self.advantages < 0

    @lazy_property
    def blocked_low(self) -> Bool[Tensor, "batch time"]:
        """Mark the tokens below the lower bound whose advantage is negative, and so pushes them further down."""
        return self.clip_mask.clipped_low & self.negative

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
        return self._shift_ratio(self._clamped_log_ratio())

    def ratio_at_bound(self, outside: Bool[Tensor, "batch time"]) -> Float[Tensor, "batch time"]:
        """Compute the ratio π/π_old at the bound that a token is beyond, for the value of the loss.

        If the bounds have no closed form, one root is solved for: that on the side of the ratio. On the CPU it is
        solved for the given tokens only.

        Args:
            outside: True for tokens whose ratio is outside of the bounds. The entries of other tokens have no meaning.
        """
        if not self.rule.solves:
            return self._shift_ratio(self._clamped_log_ratio())
        logp = self.logp_anchor
        above = self.above
        is_few = logp.numel() < FEW_TOKENS
        if is_few or self.rule.has_tensors or not _checks.values_can_be_read(outside):
            return self._shift_ratio(self.rule.log_bound(logp, above))
        index = outside.flatten().nonzero().squeeze(-1)
        bound = self.rule.log_bound(logp.flatten()[index], above.flatten()[index])
        bounds = torch.zeros_like(logp).flatten().index_copy_(0, index, bound)
        return self._shift_ratio(bounds.view(logp.shape))

    def _clamped_log_ratio(self) -> Tensor:
        """Return the log-ratio to the anchor, clamped to the rule's bounds."""
        if self.rule.interval is not None:
            return self.log_ratio_anchor.clamp(*self.rule.interval)
        return self.log_ratio_anchor.clamp(self.bounds.log_lower, self.bounds.log_upper)

    def _shift_ratio(self, log_ratio_anchor: Tensor) -> Tensor:
        """Return π/π_old, at most the largest `ratio`, at another value of log(π/π_anchor).

        That value is overwritten.
        """
        log_ratio = log_ratio_anchor
        if self.anchor_ratio is not None:
            log_ratio = self.log_ratio + (log_ratio_anchor - self.log_ratio_anchor)
        return log_ratio.exp_().clamp_(max=largest(log_ratio.dtype))

    @lazy_property
    def interval_used(self) -> Float[Tensor, "batch time"]:
        """Compute the ratio's position in the interval: 0 at the anchor, 1 at the upper bound, −1 at the lower.

        Its absolute value is at most that of the largest `ratio`.
        """
        smallest = torch.finfo(self.log_ratio.dtype).tiny
        to_upper = torch.expm1(self.bounds.log_upper).clamp(min=smallest)
        to_lower = -torch.expm1(self.bounds.log_lower).clamp(max=-smallest)
        change = torch.expm1(self.log_ratio_anchor)  # r − 1
        return limit(torch.where(change > 0, change / to_upper, change / to_lower))


def limit(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return values of tokens, such as parts of their loss, limited to the largest ratio and to its negative.

    Their sum over many tokens is then finite. The tensor is overwritten.
    """
    bound = largest(x.dtype)
    return x.clamp_(-bound, bound)


def limit_weight(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return weights of tokens, limited so that their products with advantages are finite.

    The tensor is overwritten.
    """
    bound = largest_weight(x.dtype)
    return x.clamp_(-bound, bound)


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
