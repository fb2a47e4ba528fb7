"""The one door for a trainer's tensors: checked and cleaned once, then seen as a clip rule and an objective see them.

The loss, the audit and the mismatch take a batch through `Batch.read`. What stands where the mask is 0 never matters,
NaN included. What is wrong at a counted token is refused. The precision is kept, from float32 up. The recorder shares
the check of the mask alone: it keeps what is wrong, to be shown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar, get_args

import torch

from bandpo import _checks
from bandpo.bounds import RatioBounds
from bandpo.errors import InvalidValue
from bandpo.rules import ClipRule, Outside

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


__all__ = ["Batch", "Tokens"]

Level = Literal["token", "sequence"]
LEVELS = get_args(Level)  # here, because older compilers break the graph at get_args


class Batch(NamedTuple):
    """The tensors of a batch, detached, in at least float32, and 0 where the mask is 0."""

    logp: Float[Tensor, "batch time"]
    """Log-probabilities (nats) of the sampled tokens under the policy in training."""
    logp_old: Float[Tensor, "batch time"]
    """The same under the policy that the ratio refers to."""
    advantages: Float[Tensor, "batch time"]
    """One per token, times its importance weight where there is one."""
    mask: Float[Tensor, "batch time"]
    """1 for tokens that count, else 0."""
    logp_anchor: Float[Tensor, "batch time"] | None = None
    """Log-probabilities that a rule's bounds surround, where these are not ``logp_old``."""
    entropy: Float[Tensor, "batch time"] | None = None
    """Entropy (nats) of the policy at each token, where it is known."""

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
    ) -> Batch:
        """A batch as a trainer has it: in any precision, with anything where the mask is 0.

        Args:
            logp: Log-probabilities (nats) under the policy in training.
            logp_old: Under the policy that the ratio refers to.
            advantages: One per token, or one per sequence.
            mask: 1 (or True) for tokens that count; all if omitted.
            logp_anchor: What a rule's bounds surround, if not ``logp_old``.
            entropy: Entropy (nats) at each token, where it is known.
            weights: Importance weights ≥ 0, one per token or sequence; the advantages are multiplied by them.

        Raises:
            TypeError: a tensor is not floating-point.
            ValueError: shapes differ; the mask holds another value than 0 and 1; at a counted token a log-probability
                is NaN, infinite or above 0, an advantage or an entropy is not finite, or a weight is negative or NaN.
                (Values are read on the CPU only.)

        >>> logp, logp_old = torch.tensor([[-1.0, 5.0]]), torch.tensor([[-2.0, 5.0]])
        >>> batch = Batch.read(logp, logp_old, torch.ones(1), mask=torch.tensor([[1, 0]]))
        >>> batch.logp, batch.advantages
        (tensor([[-1.,  0.]]), tensor([[1., 0.]]))
        """
        mask = full_mask(logp, mask)
        padding = mask == 0
        advantages = _finite("advantages", _per_token("advantages", advantages, padding))
        if weights is not None:
            advantages = advantages * _checked_weights(_per_token("weights", weights, padding))
        return cls(
            _counted_logp("logp", logp, padding),
            _counted_logp("logp_old", logp_old, padding),
            advantages,
            mask,
            None if logp_anchor is None else _counted_logp("logp_anchor", logp_anchor, padding),
            None if entropy is None else _finite("entropy", _per_token("entropy", entropy, padding)),
        )

    def tokens(self, rule: ClipRule, level: str = "token") -> Tokens:
        """The batch as a rule sees it, with ratios per ``token`` or per ``sequence``, see `bandpo.policy_loss`.

        Raises:
            ValueError: ``level`` is unknown.
        """
        old = at_level(self.logp_old, self.mask, level)
        anchor = None if self.logp_anchor is None else at_level(self.logp_anchor, self.mask, level)
        log_ratio = at_level(self.logp, self.mask, level) - old
        return Tokens(log_ratio, old, self.advantages, self.mask, rule, anchor, self.entropy)


def full_mask(logp: Tensor, mask: Tensor | None) -> Tensor:
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


def _counted_logp(name: str, logp: Tensor, padding: Tensor) -> Tensor:
    if logp.shape != padding.shape:
        raise InvalidValue(
            f"{name} has shape {tuple(logp.shape)}, logp {tuple(padding.shape)}; they must be equal"
        )
    logp = _checks.as_float(name, logp).detach().masked_fill(padding, 0.0)
    _checks.check_logp(name, logp)
    if _checks.values_can_be_read(logp) and logp.numel() and torch.isneginf(worst := logp.min()):
        raise InvalidValue(f"{name} holds {worst.item()} at a counted token, but a sampled token has p > 0")
    return logp


def _per_token(name: str, x: Tensor, padding: Tensor) -> Tensor:
    """What is given per token or per sequence, for each token."""
    x = _checks.as_float(name, x).detach()
    given = tuple(x.shape)
    if x.dim() == padding.dim() - 1:
        x = x.unsqueeze(-1)
    if x.dim() != padding.dim() or not _checks.broadcasts_to(x, padding.shape):
        raise InvalidValue(
            f"{name} of shape {given} fit neither the tokens {tuple(padding.shape)} "
            f"nor the sequences {tuple(padding.shape[:-1])}"
        )
    return x.expand_as(padding).masked_fill(padding, 0.0)


def _finite(name: str, x: Tensor) -> Tensor:
    # A sum is the cheapest look at all values: it is not finite where one of them is not, or where it overflows.
    if _checks.values_can_be_read(x) and not x.sum().isfinite() and not x.isfinite().all():
        raise InvalidValue(
            f"{name} hold {x[~x.isfinite()][0].item():g} at a counted token; they must be finite"
        )
    return x


def _checked_weights(weights: Tensor) -> Tensor:
    if _checks.values_can_be_read(weights) and weights.numel() and not weights.min() >= 0:
        raise InvalidValue(f"weights must be at least 0 at counted tokens, got {weights.min().item():g}")
    return weights


T = TypeVar("T")


class _Once(Generic[T]):
    """A property that is computed when first asked for. (functools.cached_property has a lock: it breaks the graph.)"""

    def __init__(self, compute: Callable[[Any], T]):
        self.compute, self.__doc__ = compute, compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, tokens: Any, owner: Any = None) -> T:
        value = self.compute(tokens)
        object.__setattr__(tokens, self.name, value)  # later reads find it before this descriptor
        return value


@dataclass(frozen=True, eq=False)
class Tokens:
    """One view of a batch: what a rule and an objective may look at. Nothing in it carries a gradient.

    Log-probabilities and ratios are at the level of the method: a token's own, or its sequence's mean. What stands
    where the mask is 0 is finite and means nothing. Each property is computed when first asked for, so a method pays
    only for what it uses.

    >>> tokens = Tokens.from_batch(
    ...     torch.tensor([[0.16, 0.04]]).log(),
    ...     torch.tensor([[0.08, 0.08]]).log(),
    ...     torch.tensor([[1.0, 1.0]]),
    ...     rule=FixedClip(0.2),
    ... )
    >>> tokens.ratio, tokens.blocked
    (tensor([[2.0000, 0.5000]]), tensor([[ True, False]]))
    """

    log_ratio: Float[Tensor, "batch time"]
    """log(π/π_old), nats."""
    logp_old: Float[Tensor, "batch time"]
    """log π_old, nats: what the ratio refers to."""
    advantages: Float[Tensor, "batch time"]
    mask: Float[Tensor, "batch time"]
    """1 for tokens that count, else 0."""
    rule: ClipRule
    other_anchor: Float[Tensor, "batch time"] | None = None
    """Log-probability (nats) that the rule's bounds surround, where that is not ``logp_old``."""
    entropy: Float[Tensor, "batch time"] | None = None
    """Entropy (nats) of the policy at each token, where it is known."""

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
    ) -> Tokens:
        """`Batch.read` of a trainer's tensors, as ``rule`` sees them at ``level``; arguments and errors are theirs."""
        batch = Batch.read(logp, logp_old, advantages, mask, logp_anchor=logp_anchor, entropy=entropy)
        return batch.tokens(rule, level)

    def with_rule(self, rule: ClipRule) -> Tokens:
        """The same tokens under another rule."""
        return replace(self, rule=rule)

    @_Once
    def ratio(self) -> Float[Tensor, "batch time"]:
        """π/π_old, kept finite and above 0 so that a weight can be compared with it."""
        limits = torch.finfo(self.log_ratio.dtype)
        return self.log_ratio.exp().clamp(limits.tiny, limits.max)

    @property
    def logp_anchor(self) -> Float[Tensor, "batch time"]:
        """Log-probability (nats) that the rule's bounds surround."""
        return self.logp_old if self.other_anchor is None else self.other_anchor

    @_Once
    def log_ratio_anchor(self) -> Float[Tensor, "batch time"]:
        """log(π/π_anchor): what the rule compares with its bounds."""
        if self.other_anchor is None:
            return self.log_ratio
        return self.log_ratio + (self.logp_old - self.other_anchor)

    @_Once
    def outside(self) -> Outside:
        """Where the ratio to the anchor lies under the rule's lower bound, and where over its upper bound."""
        if self.rule.solves:
            return self.rule.outside(self.log_ratio_anchor, self.logp_anchor)
        # The metrics need the bounds of a rule in closed form anyway.
        return Outside(
            self.log_ratio_anchor < self.bounds.log_lower, self.log_ratio_anchor > self.bounds.log_upper
        )

    @_Once
    def blocked_low(self) -> Bool[Tensor, "batch time"]:
        """Below the lower bound, with a negative advantage that pushes further down."""
        return self.outside.below & (self.advantages < 0)

    @_Once
    def blocked_high(self) -> Bool[Tensor, "batch time"]:
        """Above the upper bound, with a positive advantage that pushes further up."""
        return self.outside.above & (self.advantages > 0)

    @_Once
    def blocked(self) -> Bool[Tensor, "batch time"]:
        """Outside on the side that the advantage pushes to: where PPO's surrogate has no gradient."""
        return self.blocked_low | self.blocked_high

    @_Once
    def bounds(self) -> RatioBounds:
        """The rule's bounds on the ratio to the anchor; for a Band this solves for them."""
        return self.rule.bounds(self.logp_anchor)

    @_Once
    def clipped(self) -> Float[Tensor, "batch time"]:
        """The ratio π/π_old after the rule."""
        log_clipped = self.log_ratio_anchor.clamp(self.bounds.log_lower, self.bounds.log_upper)
        if self.other_anchor is not None:
            log_clipped = log_clipped + (self.other_anchor - self.logp_old)
        return log_clipped.exp().clamp(max=torch.finfo(log_clipped.dtype).max)

    @_Once
    def reported(self) -> Float[Tensor, "batch time"]:
        """The ratio that a loss reports of a blocked token: clipped, or as it is where that would need a solver."""
        return self.ratio if self.rule.solves else self.clipped

    @_Once
    def interval_used(self) -> Float[Tensor, "batch time"]:
        """Share of the rule's interval that the ratio uses: 0 at the anchor, 1 at the upper bound, −1 at the lower."""
        smallest = torch.finfo(self.log_ratio.dtype).tiny
        to_upper = torch.expm1(self.bounds.log_upper).clamp(min=smallest)
        to_lower = -torch.expm1(self.bounds.log_lower).clamp(max=-smallest)
        moved = torch.expm1(self.log_ratio_anchor)
        return torch.where(moved > 0, moved / to_upper, moved / to_lower)

    def sequence_sum(self, x: Float[Tensor, "batch time"]) -> Float[Tensor, "batch time"]:
        """The sum of ``x`` over the counted tokens of a sequence, at each of its tokens."""
        return (x * self.mask).sum(-1, keepdim=True).expand_as(x)

    def sequence_mean(self, x: Float[Tensor, "batch time"]) -> Float[Tensor, "batch time"]:
        """The mean of ``x`` over the counted tokens of a sequence, at each of its tokens."""
        return at_level(x, self.mask, "sequence")


def at_level(
    logp: Float[Tensor, "batch time"], mask: Float[Tensor, "batch time"], level: str
) -> Float[Tensor, "batch time"]:
    """Log-probabilities at the level that ratios are formed on.

    ``token`` leaves them alone; ``sequence`` gives every token its sequence's mean over counted tokens, the logarithm
    of the geometric mean probability.

    Raises:
        ValueError: another level.

    >>> at_level(torch.tensor([[-1.0, -3.0, -9.0]]), torch.tensor([[1.0, 1.0, 0.0]]), "sequence")
    tensor([[-2., -2., -2.]])
    """
    if known_level(level) == "token":
        return logp
    mean = (logp * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1.0)
    return mean.expand_as(logp).contiguous()


def known_level(level: str) -> str:
    """``level``, unless there is none of that name.

    Raises:
        ValueError: see above.
    """
    if level not in LEVELS:
        raise InvalidValue(f"level must be 'token' or 'sequence', got {level!r}")
    return level
