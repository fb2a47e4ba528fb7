"""The one door for a trainer's tensors: checked and cleaned once, then seen as a clip rule and an objective see them.

The loss and the audit take a batch through `Batch.read`. What stands where the mask is 0 never matters,
NaN included. What is wrong at a counted token is refused. The precision is kept, from float32 up. The recorder shares
the check of the mask alone: it keeps what is wrong, to be shown.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from bandpo import _checks
from bandpo._lazy import lazy_property
from bandpo.bounds import RatioBounds
from bandpo.errors import InvalidValue
from bandpo.rules import ClipMask, ClipRule
from bandpo.schedules import TrainingState
from bandpo.sequences import Sequences, read_layout
from bandpo.token_data import AnchorRatio, TokenData

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor


__all__ = ["Batch", "Tokens"]

LEVELS = ("token", "sequence")


class Batch(NamedTuple):
    """The tensors of a batch, detached, in at least float32, and 0 where the mask is 0."""

    log_ratio: Float[Tensor, "batch time"]
    """log(π/π_old), nats, of the sampled tokens."""
    logp_old: Float[Tensor, "batch time"]
    """Log-probabilities (nats) under the policy that the ratio refers to."""
    advantages: Float[Tensor, "batch time"]
    """One per token. On an accelerator NaN at a counted token that another tensor has a wrong value for."""
    mask: Float[Tensor, "batch time"]
    """1 for tokens that count, else 0."""
    sequences: Sequences
    """Which tokens form a sequence."""
    logp_anchor: Float[Tensor, "batch time"] | None = None
    """Log-probabilities that a rule's bounds surround, where these are not ``logp_old``."""
    entropy: Float[Tensor, "batch time"] | None = None
    """Entropy (nats) of the policy at each token, where it is known."""
    weights: Tensor | None = None
    """Importance weights, where there are any: per token, or per sequence as `bandpo.sequences.Sequences` has it."""
    state: TrainingState = TrainingState()
    """What else is known of the tokens and of the training."""

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
        """Return a batch of what a trainer has: in any precision, padded or packed, with anything where the mask is 0.

        Args:
            logp: Log-probabilities (nats) under the policy in training.
            logp_old: Under the policy that the ratio refers to.
            advantages: One per token, or one per sequence.
            mask: 1 (or True) for tokens that count; all if omitted.
            logp_anchor: What a rule's bounds surround, if not ``logp_old``.
            entropy: Entropy (nats) at each token, where it is known.
            weights: Importance weights ≥ 0, one per token or sequence.
            state: What else is known of the tokens and of the training.
            segments: In a packed batch the number of each token's sequence, see `bandpo.policy_loss`.
            cu_seqlens: In a packed batch where each sequence begins, see `bandpo.policy_loss`.

        Advantages, entropy and weights have the shape (batch, time), (batch,) or (batch, 1). A batch of several
        sequences does not take those of one sequence: (1,) or (1, time). In a packed batch they have one value per
        token, or the shape (sequences,).

        Raises:
            TypeError: a tensor is not floating-point, or only some tensors are nested.
            ValueError: shapes differ; the mask holds another value than 0 and 1; at a counted token a log-probability
                is NaN, infinite or above 0, an advantage or an entropy is not finite, or a weight is negative or not
                finite. Values are read on the CPU only. Elsewhere, and under ``torch.compile``, such a token gets the
                advantage NaN, so the loss and the gradient are NaN.

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
        mask = normalize_mask(tensors["logp"], tensors["mask"])
        padding = mask == 0
        sequences = Sequences.read(
            mask,
            segments=layout.segments,
            cu_seqlens=layout.cu_seqlens,
            count=_count_of_sequences(tensors, state) if layout.packed else None,
        )

        logps: dict[str, Tensor] = {}
        for name in ("logp", "logp_old", "logp_anchor"):
            if tensors[name] is not None:
                logps[name] = _validate_logp(name, tensors[name], padding)

        # Values that must be finite at tokens that count.
        finite: dict[str, Tensor] = {}
        for name in ("advantages", "entropy"):
            if tensors[name] is not None:
                values = sequences.at_tokens(_validate_shape(name, tensors[name], sequences))
                finite[name] = values.masked_fill(padding, 0.0)
        weights = None
        if tensors["weights"] is not None:
            weights = _validate_shape("weights", tensors["weights"], sequences)
            unused = padding if weights.shape == padding.shape else sequences.length == 0
            weights = finite["weights"] = weights.masked_fill(unused, 0.0)

        advantages = finite["advantages"]
        if _checks.values_can_be_read(mask):
            _refuse(logps, finite, weights)
        else:
            advantages = _poisoned(advantages, tensors["mask"], logps, finite, weights)
            if sequences.index is not None:
                advantages = advantages.masked_fill(sequences.lost, math.nan)
        # torch 2.6 cannot trace dataclasses.replace.
        state = TrainingState(
            state.progress, state.controller_state, state.group, state.age, sequences, state.processes
        )
        return cls(
            logps["logp"] - logps["logp_old"],
            logps["logp_old"],
            advantages,
            mask,
            sequences,
            logps.get("logp_anchor"),
            finite.get("entropy"),
            weights,
            state,
        )

    @property
    def logp(self) -> Float[Tensor, "batch time"]:
        """Log-probabilities (nats) under the policy in training."""
        return self.logp_old + self.log_ratio

    @property
    def token_weights(self) -> Float[Tensor, "batch time"] | None:
        """The importance weight of each token; None where there are none."""
        return None if self.weights is None else self.sequences.at_tokens(self.weights)

    def tokens(self, rule: ClipRule, level: str = "token", bound_level: str | None = None) -> Tokens:
        """The batch as a rule sees it, with ratios per ``token`` or per ``sequence``, see `bandpo.policy_loss`.

        Args:
            rule: The clip rule. What varies in it is read from the batch's state, and then from the view itself, see
                `bandpo.rules.TokenRule`.
            level: Of the ratio that a loss weights with.
            bound_level: Of the ratio that the rule's bounds are for, if another.

        Raises:
            ValueError: a level is unknown, or a number of the rule needs what the state does not tell.
        """
        data = self._data(level, bound_level)
        return Tokens(
            data.log_ratio,
            data.logp_old,
            data.advantages,
            data.mask,
            data.sequences,
            data.anchor_ratio,
            data.entropy,
            data.weights,
            data.state,
            rule=rule.resolve(self.state).settle(data),
        )

    def _data(self, level: str, bound_level: str | None) -> TokenData:
        """Return what a rule may look at, at the levels of `tokens`."""
        anchor = self.logp_old if self.logp_anchor is None else self.logp_anchor
        anchor_ratio = None
        if self.logp_anchor is not None or bound_level not in (None, level):
            log_ratio = self.log_ratio
            if self.logp_anchor is not None:
                log_ratio = self.log_ratio + (self.logp_old - anchor)
            anchor_ratio = AnchorRatio(
                self._at_level(anchor, bound_level or level),
                self._at_level(log_ratio, bound_level or level),
            )
        return TokenData(
            self._at_level(self.log_ratio, level),
            self._at_level(self.logp_old, level),
            self.advantages,
            self.mask,
            self.sequences,
            anchor_ratio,
            self.entropy,
            self.weights,
            self.state,
        )

    def _at_level(self, logp: Tensor, level: str) -> Tensor:
        """Return log-probabilities at the level that ratios are formed on, see `reduce_to_level`."""
        return logp if known_level(level) == "token" else self.sequences.mean(logp).contiguous()


def normalize_mask(logp: Tensor, mask: Tensor | None) -> Tensor:
    """1 where a token counts, else 0; of the shape of ``logp``. Refuses a mask of another shape, and shares."""
    if mask is None:
        return torch.ones_like(logp, dtype=torch.float32, requires_grad=False)
    if mask.shape != logp.shape:
        raise InvalidValue(
            f"mask has shape {tuple(mask.shape)}, logp {tuple(logp.shape)}; they must be equal"
        )
    if not _checks.values_can_be_read(mask):
        return (mask != 0).float()
    if mask.dtype != torch.bool and not torch.equal(mask, mask * mask):
        other = mask[mask != mask * mask][0].item()
        raise InvalidValue(
            f"mask holds {other:g}, but a token counts (1) or not (0); put shares into weights="
        )
    return mask.float()


def validate_logps(logps: Mapping[str, Tensor], padding: Tensor) -> dict[str, Tensor]:
    """Return log-probabilities detached, in at least float32, and 0 in the padding; a wrong one is refused, or NaN."""
    validated = {name: _validate_logp(name, logp, padding) for name, logp in logps.items()}
    if _checks.values_can_be_read(padding):
        _refuse(validated, {}, None)
    else:
        poison = _poisoned(torch.zeros_like(next(iter(validated.values()))), None, validated, {}, None)
        validated = {name: logp + poison for name, logp in validated.items()}
    return validated


def _validate_logp(name: str, logp: Tensor, padding: Tensor) -> Tensor:
    if logp.shape != padding.shape:
        raise InvalidValue(
            f"{name} has shape {tuple(logp.shape)}, logp {tuple(padding.shape)}; they must be equal"
        )
    return _checks.as_float(name, logp).detach().masked_fill(padding, 0.0)


def _validate_shape(name: str, x: Any, sequences: Sequences) -> Tensor:
    """Return a tensor per token, or a tensor per sequence in the form that `Sequences` gives it."""
    return sequences.values(name, _checks.as_float(name, x).detach())


def _count_of_sequences(tensors: Mapping[str, Any], state: TrainingState) -> int | None:
    """Return the number of sequences of a packed batch, from a tensor that has one entry for each; None without one."""
    candidates = [tensors["advantages"], tensors["weights"], tensors["entropy"], state.group, state.age]
    for x in candidates:
        if isinstance(x, torch.Tensor) and x.dim() == 1:
            return len(x)
    return None


def _refuse(logps: Mapping[str, Tensor], finite: Mapping[str, Tensor], weights: Tensor | None) -> None:
    """Refuse wrong values, by the cheapest look at all of them: a greatest, a least, a sum."""
    for name, logp in logps.items():
        _checks.check_logp(name, logp)
        if logp.numel() and torch.isneginf(least := logp.min()):
            raise InvalidValue(
                f"{name} holds {least.item()} at a counted token, but a sampled token has p > 0"
            )
    for name, x in finite.items():
        # A sum is not finite where one of the values is not, or where it overflows.
        if not x.sum().isfinite() and not x.isfinite().all():
            raise InvalidValue(
                f"{name} hold {x[~x.isfinite()][0].item():g} at a counted token; they must be finite"
            )
    if weights is not None and weights.numel() and not weights.min() >= 0:
        raise InvalidValue(f"weights must be at least 0 at counted tokens, got {weights.min().item():g}")


def _poisoned(
    advantages: Tensor,
    mask: Tensor | None,
    logps: Mapping[str, Tensor],
    finite: Mapping[str, Tensor],
    weights: Tensor | None,
) -> Tensor:
    """The advantages, NaN where one of the tensors has a wrong value: `_refuse` where values cannot be read.

    In few operations: a greatest and a least keep a NaN, and x − x is NaN where x is not finite.
    """
    greatest, least = (functools.reduce(of, logps.values()) for of in (torch.maximum, torch.minimum))
    poison = torch.where(greatest <= _checks.LOGP_SLACK, least - least, math.nan)
    for x in finite.values():
        poison = poison + (x - x)
    if weights is not None:
        poison = torch.where(weights >= 0, poison, math.nan)
    if mask is not None and mask.dtype != torch.bool:
        poison = torch.where(mask == mask * mask, poison, math.nan)
    return advantages + poison


@dataclass(frozen=True, eq=False)
class Tokens(TokenData):
    """One view of a batch under a rule: what an objective may look at. Nothing in it carries a gradient.

    Each property is computed when first asked for, so a method pays only for what it uses.

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
    """The clip rule, settled for these tokens: its bounds depend on p alone."""

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
        """Return `Batch.read` of a trainer's tensors, as ``rule`` sees them at ``level``.

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
        """Masks of the tokens whose ratio to the anchor is below the rule's lower bound, and above its upper bound."""
        if self.rule.solves:
            return self.rule.clip_mask(self.log_ratio_anchor, self.logp_anchor)
        # The metrics need the bounds of a rule in closed form anyway.
        return ClipMask(
            self.log_ratio_anchor < self.bounds.log_lower,
            self.log_ratio_anchor > self.bounds.log_upper,
        )

    @lazy_property
    def blocked_low(self) -> Bool[Tensor, "batch time"]:
        """Below the lower bound, with a negative advantage that pushes further down."""
        return self.clip_mask.clipped_low & (self.advantages < 0)

    @lazy_property
    def blocked_high(self) -> Bool[Tensor, "batch time"]:
        """Above the upper bound, with a positive advantage that pushes further up."""
        return self.clip_mask.clipped_high & (self.advantages > 0)

    @lazy_property
    def blocked(self) -> Bool[Tensor, "batch time"]:
        """Outside on the side that the advantage pushes to: where PPO's surrogate has no gradient."""
        return self.blocked_low | self.blocked_high

    @lazy_property
    def bounds(self) -> RatioBounds:
        """The rule's bounds on the ratio to the anchor; for a Band this solves for them."""
        return self.rule.bounds(self.logp_anchor)

    @lazy_property
    def clipped(self) -> Float[Tensor, "batch time"]:
        """The ratio π/π_old after the rule."""
        return self._shift_ratio(self.log_ratio_anchor.clamp(self.bounds.log_lower, self.bounds.log_upper))

    @lazy_property
    def reported_ratio(self) -> Float[Tensor, "batch time"]:
        """The ratio that a loss reports of a blocked token: clipped, or at most the cap where bounds are costly."""
        if not self.rule.solves:
            return self.clipped
        # The root keeps sums of the loss finite.
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
        """Share of the rule's interval that the ratio uses: 0 at the anchor, 1 at the upper bound, −1 at the lower."""
        smallest = torch.finfo(self.log_ratio.dtype).tiny
        to_upper = torch.expm1(self.bounds.log_upper).clamp(min=smallest)
        to_lower = -torch.expm1(self.bounds.log_lower).clamp(max=-smallest)
        moved = torch.expm1(self.log_ratio_anchor)
        return torch.where(moved > 0, moved / to_upper, moved / to_lower)


def reduce_to_level(
    logp: Float[Tensor, "batch time"], mask: Float[Tensor, "batch time"], level: str
) -> Float[Tensor, "batch time"]:
    """Log-probabilities at the level that ratios are formed on.

    ``token`` leaves them alone; ``sequence`` gives every token its sequence's mean over counted tokens, the logarithm
    of the geometric mean probability.

    Raises:
        ValueError: another level.

    >>> reduce_to_level(torch.tensor([[-1.0, -3.0, -9.0]]), torch.tensor([[1.0, 1.0, 0.0]]), "sequence")
    tensor([[-2., -2., -2.]])
    """
    if known_level(level) == "token":
        return logp
    return Sequences(mask).mean(logp).contiguous()


def known_level(level: str) -> str:
    """``level``; refused if there is none of that name."""
    if level not in LEVELS:
        raise InvalidValue(f"level must be 'token' or 'sequence', got {level!r}")
    return level
