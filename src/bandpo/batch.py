"""The tokens of a batch, as a clip rule and an objective see them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, get_args

import torch

from bandpo.bounds import RatioBounds
from bandpo.errors import InvalidValue
from bandpo.rules import ClipRule, Outside

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

__all__ = ["Tokens"]

Level = Literal["token", "sequence"]
LEVELS = get_args(Level)  # here, because older compilers break the graph at get_args


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
    def build(
        cls,
        logp: Float[Tensor, "batch time"],
        logp_old: Float[Tensor, "batch time"],
        advantages: Float[Tensor, "batch time"],
        mask: Float[Tensor, "batch time"] | None = None,
        *,
        rule: ClipRule,
        level: str = "token",
        logp_anchor: Float[Tensor, "batch time"] | None = None,
        entropy: Float[Tensor, "batch time"] | None = None,
    ) -> Tokens:
        """The view of a batch whose log-probabilities (nats) are finite everywhere.

        Args:
            logp: Under the policy in training, detached.
            logp_old: Under the policy that the ratio refers to.
            advantages: One per token.
            mask: 1 for tokens that count; all if omitted.
            rule: The clip rule.
            level: ``token`` or ``sequence``, see `bandpo.policy_loss`.
            logp_anchor: What the rule's bounds surround, if not ``logp_old``.
            entropy: Entropy (nats) at each token, where it is known.

        Raises:
            ValueError: ``level`` is unknown.
        """
        mask = torch.ones_like(logp) if mask is None else mask
        old = at_level(logp_old, mask, level)
        anchor = None if logp_anchor is None else at_level(logp_anchor, mask, level)
        return cls(at_level(logp, mask, level) - old, old, advantages, mask, rule, anchor, entropy)

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
        """The view of a batch as a trainer has it: in any precision, with anything where the mask is 0.

        Args:
            logp: As for `build`; detached here.
            logp_old: As for `build`.
            advantages: One per token, or one per sequence.
            mask: 1 (or True) for tokens that count; all if omitted.
            rule: As for `build`.
            level: As for `build`.
            logp_anchor: As for `build`.
            entropy: As for `build`.

        Raises:
            ValueError: ``level`` is unknown.
        """
        counted = torch.ones_like(logp, dtype=torch.bool) if mask is None else mask != 0

        def clean(x: Tensor) -> Tensor:
            return x.detach().float().masked_fill(~counted, 0.0)

        return cls.build(
            clean(logp),
            clean(logp_old),
            (advantages if advantages.dim() == logp.dim() else advantages.unsqueeze(-1))
            .float()
            .expand_as(logp),
            counted.float(),
            rule=rule,
            level=level,
            logp_anchor=None if logp_anchor is None else clean(logp_anchor),
            entropy=None if entropy is None else clean(entropy),
        )

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
