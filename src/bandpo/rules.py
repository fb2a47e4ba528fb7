"""Clip rules: what bounds a probability ratio. PPO's clip is the constant case, Band the exact one.

Every rule is an immutable setting with one interface, so a loss, a trainer or an audit takes any of them. Its
``repr`` is also how it is written in a YAML file or on a command line; `bandpo.parse` reads it back.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import NoneType
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch.nn.functional import softplus

from bandpo import _checks
from bandpo.bounds import RatioBounds, ratio_bounds
from bandpo.divergences import KL, Divergence
from bandpo.errors import InvalidType, InvalidValue
from bandpo.schedules import Radius, Varies

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from bandpo.token_data import TokenData

__all__ = [
    "DCPO",
    "Band",
    "ClipMask",
    "ClipRule",
    "FixedClip",
    "LogClip",
    "Loosest",
    "Tightest",
    "TokenRule",
    "TwoSided",
    "Unclipped",
]


class ClipMask(NamedTuple):
    """The ratios that a rule clips, by the bound that they exceed."""

    clipped_low: Bool[Tensor, "*shape"]
    """True where the ratio is below the lower bound."""
    clipped_high: Bool[Tensor, "*shape"]
    """True where the ratio is above the upper bound."""


@dataclass(frozen=True)
class ClipRule(Varies, ABC):
    """An interval of allowed ratios for each token."""

    @abstractmethod
    def bounds(self, logp_old: Float[Tensor, "*shape"]) -> RatioBounds:
        """The interval for tokens of old log-probability ``logp_old`` (nats, any shape)."""

    def clip_mask(self, log_ratio: Float[Tensor, "*shape"], logp_old: Float[Tensor, "*shape"]) -> ClipMask:
        """Return where ``log_ratio = logp − logp_old`` (nats) lies outside of the interval.

        A gradient needs no more than this. By default the ratio is compared with `bounds`. A rule that has a cheaper
        test overrides this method and `solves`.
        """
        bounds = self.bounds(logp_old)
        return ClipMask(log_ratio < bounds.log_lower, log_ratio > bounds.log_upper)

    @property
    def solves(self) -> bool:
        """Whether `bounds` is costly, as a root search is. A loss then calls `clip_mask` alone where it can."""
        return any(part.solves for part in self._rules())

    @property
    def cap(self) -> float:
        """A ratio that no upper bound exceeds, known without solving: what a loss reports of a blocked token."""
        return math.inf

    def settle(self, tokens: TokenData) -> ClipRule:
        """Return the rule for these tokens alone, whose bounds depend on p and nothing else.

        It is the rule itself, unless it is a `TokenRule` or holds one. `Tokens.rule` is settled.
        """
        parts = self.parts()
        changed: dict[str, ClipRule] = {}
        for name, part in parts.items():
            if isinstance(part, ClipRule):
                settled = part.settle(tokens)
                if settled is not part:
                    changed[name] = settled
        return self.__class__(**{**parts, **changed}) if changed else self

    @property
    def looks_at_tokens(self) -> bool:
        """Whether the rule is a `TokenRule`, or holds one: then `bounds` are those of a settled rule only."""
        return any(part.looks_at_tokens for part in self._rules())

    @property
    def whole_sequence(self) -> bool:
        """Whether a token's bounds depend on other tokens of its sequence: a row must then hold one sequence."""
        return any(part.whole_sequence for part in self._rules())

    @property
    def whole_batch(self) -> bool:
        """Whether a token's bounds depend on other sequences: the loss then needs all of an update at once."""
        return any(part.whole_batch for part in self._rules())

    def _rules(self) -> list[ClipRule]:
        """Return the rules that this one is made of."""
        return [part for part in self.parts().values() if isinstance(part, ClipRule)]


@dataclass(frozen=True)
class TokenRule(ClipRule):
    """A clip rule that looks at more than p: advantages, positions, ages, or the other tokens of the batch.

    A subclass has one method, `for_tokens`. It is called once for each view of a batch, before any bound is asked for.
    Within `TwoSided`, `Loosest` and `Tightest`, and beside any objective, such a rule is used as any other.

    Where a token's bounds depend on other tokens, override `whole_sequence` (others of its sequence) or `whole_batch`
    (other sequences). Packed rows are then refused that say nothing of their sequences, and so are trainers that give a
    loss parts of an update.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class NarrowerWithAge(TokenRule):
    ...     width: float = 0.4
    ...
    ...     def for_tokens(self, tokens):
    ...         width = self.width / (1 + tokens.age)
    ...         return RatioBounds(log_lower=-width, log_upper=width)
    >>> tokens = Tokens.from_batch(
    ...     torch.tensor([[0.11], [0.11]]).log(),
    ...     torch.tensor([[0.08], [0.08]]).log(),
    ...     torch.ones(2),
    ...     rule=NarrowerWithAge(),
    ...     state=TrainingState(age=torch.tensor([0.0, 3.0])),
    ... )
    >>> tokens.blocked
    tensor([[False],
            [ True]])
    """

    @abstractmethod
    def for_tokens(self, tokens: TokenData) -> RatioBounds | ClipRule:
        """Return the bounds of these tokens, or a rule that holds for them alone, such as a `Band`.

        Bounds are log-ratios of a shape that broadcasts to the tokens'. They surround ``tokens.logp_anchor``, and
        ``tokens.log_ratio_anchor`` is compared with them. No value may be read on the host, as ``.item()`` and ``if``
        do: that would stop an accelerator, and break the graph of ``torch.compile``.

        Args:
            tokens: The tokens, at the levels of the method.
        """

    def settle(self, tokens: TokenData) -> ClipRule:
        rule = self.for_tokens(tokens)
        if isinstance(rule, RatioBounds):
            return _GivenBounds(rule.log_lower, rule.log_upper)
        if not _checks.is_a(rule, ClipRule):
            raise InvalidType(
                f"{type(self).__name__}.for_tokens must return RatioBounds or a clip rule, got {type(rule).__name__}"
            )
        return rule.settle(tokens)

    def bounds(self, logp_old: Tensor) -> RatioBounds:
        raise InvalidValue(
            f"{self!r} has no bounds but for the tokens of a batch: they depend on more than p. Read them from "
            "method.tokens(batch).bounds"
        )

    @property
    def looks_at_tokens(self) -> bool:
        return True


@dataclass(frozen=True, eq=False)
class _GivenBounds(ClipRule):
    """The bounds of certain tokens, whatever their probability."""

    log_lower: Tensor
    log_upper: Tensor

    def bounds(self, logp_old: Tensor) -> RatioBounds:
        for name, bound in (("log_lower", self.log_lower), ("log_upper", self.log_upper)):
            if not _checks.broadcasts_to(bound, logp_old.shape):
                raise InvalidValue(
                    f"{name} of shape {tuple(bound.shape)} does not broadcast to the tokens' {tuple(logp_old.shape)}"
                )
        shape = logp_old.shape
        return RatioBounds(
            self.log_lower.expand(shape).to(logp_old.dtype), self.log_upper.expand(shape).to(logp_old.dtype)
        )


@dataclass(frozen=True)
class Band(ClipRule):
    """Band: the ratios within an f-divergence trust region around the token's old probability.

    `clip_mask` evaluates the constraint once and solves for no bound. The gradient of a clipped loss needs no more.

    Args:
        divergence: The trust region's divergence.
        radius: Size of the trust region, in the divergence's own unit; by default ``divergence.default_radius``. A
            number, a tensor (one per token, or one per sequence with a trailing dimension of 1), or a schedule or
            controller of `bandpo.schedules`. A rule that holds a tensor has no text form.
        max_ratio: Cap on the upper bound, > 1; ``inf`` for none. The paper uses 10.

    Source: arXiv 2603.04918.

    >>> Band(KL(), radius=0.05).bounds(torch.tensor([0.001, 0.08, 0.9]).log()).upper
    tensor([10.0000,  2.4106,  1.0764])
    """

    divergence: Divergence = KL()
    radius: float | Tensor | Radius | None = None
    max_ratio: float = 10.0

    def __post_init__(self) -> None:
        if not _checks.is_a(self.divergence, Divergence):
            raise InvalidType(
                f"Band's first argument is the divergence, got {self.divergence!r}; write Band(KL(), 0.05), or "
                "bandpo.parse('Band(KL(), 0.05)') for text"
            )
        if self.radius is None:
            object.__setattr__(self, "radius", self.divergence.default_radius)
        if isinstance(self.radius, torch.Tensor):
            _checks.as_float("radius", self.radius)
        elif isinstance(self.radius, Radius):
            for x in self.radius.range:
                _checks.positive("radius", x)
        else:
            _checks.positive("radius", self.radius)
        _check_cap(self.max_ratio)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Band) or type(other) is not type(self):
            return NotImplemented
        mine, theirs = self.radius, other.radius
        if isinstance(mine, torch.Tensor) or isinstance(theirs, torch.Tensor):
            # A tensor equals only itself, as its hash says: comparing elements would read the device.
            same_radius = mine is theirs
        else:
            same_radius = mine == theirs
        return same_radius and (self.divergence, self.max_ratio) == (other.divergence, other.max_ratio)

    def radius_for(self, logp_old: Float[Tensor, "*shape"]) -> float | Tensor:
        """Return the radius for tokens of old log-probability ``logp_old``, a number or a tensor that broadcasts.

        Raises:
            ValueError: if the radius depends on the training state (see `resolve`), does not broadcast, or is not above
                0 everywhere.
        """
        logp = _checks.as_float("logp_old", logp_old)
        radius = cast("float | Tensor | Radius", self.radius)  # never None: __post_init__ filled it in
        if isinstance(radius, Radius):
            raise radius.unknown()
        return _checks.as_radius(radius, logp) if isinstance(radius, torch.Tensor) else radius

    def bounds(self, logp_old: Tensor) -> RatioBounds:
        logp = _checks.as_logp("logp_old", logp_old)
        bounds = ratio_bounds(logp, self.divergence, self.radius_for(logp))
        return RatioBounds(bounds.log_lower, bounds.log_upper.clamp(max=math.log(self.max_ratio)))

    @property
    def cap(self) -> float:
        return self.max_ratio

    def clip_mask(self, log_ratio: Tensor, logp_old: Tensor) -> ClipMask:
        logp = _checks.as_logp("logp_old", logp_old)
        # As a number, not a flag: a compiler keeps it for both sides, and flags are slow to keep.
        beyond = torch.where(
            self.divergence.divergence_of_ratio(log_ratio, logp) > self.radius_for(logp), log_ratio, 0.0
        )
        return ClipMask(beyond < 0, (beyond > 0) | (log_ratio > math.log(self.max_ratio)))

    @property
    def solves(self) -> bool:
        return not self.divergence.closed


@dataclass(frozen=True)
class FixedClip(ClipRule):
    """PPO's clip: ratios in ``[1 − low, 1 + high]`` whatever the token's probability.

    0.2 is PPO and GRPO, 0.2 and 0.28 DAPO's Clip-Higher. ``high=inf`` leaves positive advantages unbounded.

    Args:
        low: In [0, 1].
        high: ≥ 0; as ``low`` if not given.

    >>> FixedClip(0.1)
    FixedClip(low=0.1, high=0.1)
    >>> FixedClip(0.2, 0.28).bounds(torch.tensor([0.08]).log()).upper
    tensor([1.2800])
    """

    low: float = 0.2
    high: float = cast("float", None)  # until __post_init__ makes it low

    def __post_init__(self) -> None:
        if _checks.is_a(self.high, NoneType):
            object.__setattr__(self, "high", self.low)
        _checks.number("low", self.low, "in [0, 1] (the lower bound is 1 - low)", lambda x: 0 <= x <= 1)
        _checks.number("high", self.high, "at least 0 (the upper bound is 1 + high)", lambda x: x >= 0)

    @property
    def cap(self) -> float:
        return 1 + self.high

    def bounds(self, logp_old: Tensor) -> RatioBounds:
        logp = _checks.as_logp("logp_old", logp_old)
        log_lower = math.log1p(-self.low) if self.low < 1 else -math.inf
        return RatioBounds(torch.full_like(logp, log_lower), torch.full_like(logp, math.log1p(self.high)))


@dataclass(frozen=True)
class LogClip(ClipRule):
    """The same distance of ``log r`` whatever the token's probability: ratios in ``[e^−low, e^high]``.

    Args:
        low: ≥ 0; ``inf`` for no lower bound.
        high: ≥ 0; ``inf`` for no upper bound.

    >>> LogClip(0.4, 0.4).bounds(torch.tensor([0.08]).log()).upper
    tensor([1.4918])
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        _checks.number("low", self.low, "at least 0 (the lower bound is exp(-low))", lambda x: x >= 0)
        _checks.number("high", self.high, "at least 0 (the upper bound is exp(high))", lambda x: x >= 0)

    def bounds(self, logp_old: Tensor) -> RatioBounds:
        logp = _checks.as_logp("logp_old", logp_old)
        return RatioBounds(torch.full_like(logp, -self.low), torch.full_like(logp, self.high))


@dataclass(frozen=True)
class Unclipped(ClipRule):
    """No clip: every ratio is allowed.

    >>> Unclipped().bounds(torch.tensor([0.08]).log()).upper
    tensor([inf])
    """

    def bounds(self, logp_old: Tensor) -> RatioBounds:
        return FixedClip(low=1.0, high=math.inf).bounds(logp_old)


def bands(rule: ClipRule, within: str = "") -> dict[str, Band]:
    """Every band in a rule by the path of fields that leads to it; by ``""`` where it is the rule itself.

    >>> bands(Tightest(TwoSided(FixedClip(), Band()), FixedClip(1.0, 3.0)))
    {'a.upper': Band(divergence=KL(), radius=0.05, max_ratio=10.0)}
    """
    found = {within: rule} if isinstance(rule, Band) else {}
    for name, part in rule.parts().items():
        if isinstance(part, ClipRule):
            found |= bands(part, f"{within}.{name}".lstrip("."))
    return found


@dataclass(frozen=True)
class DCPO(ClipRule):
    """DCPO's dynamic clip: the ratios with ``|r − 1|·r·p`` within ``low`` below 1 and ``high`` above.

        ½ + ½·√max(1 − 4·low/p, 0)  ≤  r  ≤  min(½ + ½·√(1 + 4·high/p), max_ratio)

    The lower bound is ½ for every token with ``p ≤ 4·low``. The upper exceeds ``1/p``, the simplex, for common
    tokens (p > 1 − high), and so never binds on them.

    Args:
        low: ≥ 0.
        high: ≥ 0.
        max_ratio: Cap on the upper bound, > 1; ``inf`` for none.

    Source: arXiv 2509.02333.

    >>> DCPO().bounds(torch.tensor([0.001, 0.08, 0.9]).log()).upper
    tensor([10.0000,  2.1583,  1.1872])
    """

    low: float = 0.16
    high: float = 0.2
    max_ratio: float = 10.0

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            _checks.number(
                name, getattr(self, name), "a finite number of at least 0", lambda x: 0 <= x < math.inf
            )
        _check_cap(self.max_ratio)

    def bounds(self, logp_old: Tensor) -> RatioBounds:
        logp = _checks.as_logp("logp_old", logp_old)
        lower = 0.5 + 0.5 * (1 - torch.exp(_log_ratio(4 * self.low, logp))).clamp(min=0.0).sqrt()
        # √(1 + e^x) = exp(½·softplus(x)) holds where e^x overflows.
        log_root = softplus(_log_ratio(4 * self.high, logp)) / 2
        log_upper = torch.logaddexp(torch.zeros_like(logp), log_root) - math.log(2)
        return RatioBounds(lower.log(), log_upper.clamp(min=0.0, max=math.log(self.max_ratio)))


def _log_ratio(x: float, logp: Tensor) -> Tensor:
    """``log(x/p)``; −inf at x = 0, whatever p."""
    return math.log(x) - logp if x else torch.full_like(logp, -math.inf)


def _check_cap(max_ratio: float) -> None:
    _checks.number("max_ratio", max_ratio, "above 1 (inf for no cap)", lambda x: x > 1)


def _check_rules(**rules: object) -> None:
    for name, rule in rules.items():
        if not isinstance(rule, ClipRule):
            raise InvalidType(f"{name} must be a ClipRule such as FixedClip(0.2), got {rule!r}")


@dataclass(frozen=True)
class TwoSided(ClipRule):
    """A clip rule with the lower bound of one rule and the upper bound of another.

    Args:
        lower: The rule of the lower bound.
        upper: The rule of the upper bound.

    >>> bounds = TwoSided(lower=FixedClip(0.2), upper=Band(KL(), 0.05)).bounds(torch.tensor([0.08]).log())
    >>> print(f"{bounds.lower.item():.3f} {bounds.upper.item():.3f}")
    0.800 2.411
    """

    lower: ClipRule
    upper: ClipRule

    def __post_init__(self) -> None:
        _check_rules(lower=self.lower, upper=self.upper)

    def bounds(self, logp_old: Tensor) -> RatioBounds:
        return RatioBounds(self.lower.bounds(logp_old).log_lower, self.upper.bounds(logp_old).log_upper)

    def clip_mask(self, log_ratio: Tensor, logp_old: Tensor) -> ClipMask:
        return ClipMask(
            self.lower.clip_mask(log_ratio, logp_old).clipped_low,
            self.upper.clip_mask(log_ratio, logp_old).clipped_high,
        )

    @property
    def cap(self) -> float:
        return self.upper.cap


@dataclass(frozen=True)
class _Combined(ClipRule):
    """Two clip rules, of which each bound takes one rule's."""

    a: ClipRule
    b: ClipRule

    def __post_init__(self) -> None:
        _check_rules(a=self.a, b=self.b)

    @staticmethod
    @abstractmethod
    def _lower(a: Tensor, b: Tensor, /) -> Tensor:
        """Return the lower bound that holds, of two."""

    @staticmethod
    @abstractmethod
    def _upper(a: Tensor, b: Tensor, /) -> Tensor:
        """Return the upper bound that holds, of two."""

    @staticmethod
    @abstractmethod
    def _clipped(a: Tensor, b: Tensor, /) -> Tensor:
        """Return where the combined rule clips, from where ``a`` and ``b`` clip."""

    def bounds(self, logp_old: Tensor) -> RatioBounds:
        a = self.a.bounds(logp_old)
        b = self.b.bounds(logp_old)
        return RatioBounds(self._lower(a.log_lower, b.log_lower), self._upper(a.log_upper, b.log_upper))

    def clip_mask(self, log_ratio: Tensor, logp_old: Tensor) -> ClipMask:
        a = self.a.clip_mask(log_ratio, logp_old)
        b = self.b.clip_mask(log_ratio, logp_old)
        return ClipMask(
            self._clipped(a.clipped_low, b.clipped_low),
            self._clipped(a.clipped_high, b.clipped_high),
        )


@dataclass(frozen=True)
class Loosest(_Combined):
    """A clip rule that allows each ratio that either of two rules allows.

    The lower bound is the smaller of the two, the upper bound the greater.

    >>> Loosest(Band(KL(), 0.05), FixedClip(0.2, 0.28)).bounds(torch.tensor([0.9]).log()).upper
    tensor([1.2800])
    """

    _lower, _upper, _clipped = map(staticmethod, (torch.minimum, torch.maximum, torch.logical_and))

    @property
    def cap(self) -> float:
        return max(self.a.cap, self.b.cap)


@dataclass(frozen=True)
class Tightest(_Combined):
    """A clip rule that allows the ratios that both of two rules allow.

    The lower bound is the greater of the two, the upper bound the smaller.

    >>> Tightest(Band(KL(), 0.05), FixedClip(0.2, 0.28)).bounds(torch.tensor([0.9]).log()).upper
    tensor([1.0764])
    """

    _lower, _upper, _clipped = map(staticmethod, (torch.maximum, torch.minimum, torch.logical_or))

    @property
    def cap(self) -> float:
        return min(self.a.cap, self.b.cap)
