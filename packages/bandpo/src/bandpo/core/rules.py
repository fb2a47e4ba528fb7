"""Clip rules, which give the bounds of each token's probability ratio.

`FixedClip` is PPO's clip, with the same bounds for all tokens. `Band` computes the bounds from a trust region and the
token's old probability. Rules are immutable and share one interface, so losses, trainers and audits accept any of them.
The ``repr`` of a rule is its text form for YAML files and command lines; `bandpo.parse` reads it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import NoneType
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch.nn.functional import softplus

from . import _checks
from .bounds import RatioBounds, ratio_bounds
from .divergences import KL, Divergence
from .divergences._table import bounds_table
from .errors import InvalidType, InvalidValue
from .schedules import Radius, Varies

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from .token_data import TokenData

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
    """The tokens whose ratio is outside of a rule's bounds, one mask for each bound."""

    clipped_low: Bool[Tensor, "*shape"]
    """True if the ratio is below the lower bound."""
    clipped_high: Bool[Tensor, "*shape"]
    """True if the ratio is above the upper bound."""

    @classmethod
    def outside(
        cls, log_ratio: Float[Tensor, "*shape"], log_lower: float | Tensor, log_upper: float | Tensor
    ) -> ClipMask:
        """Compare log-ratios with two bounds, which are numbers or tensors of their shape."""
        return cls(log_ratio < log_lower, log_ratio > log_upper)


@dataclass(frozen=True)
class ClipRule(Varies, ABC):
    """The base class of clip rules: an interval of allowed ratios for each token."""

    @abstractmethod
    def bounds(self, logp_old: Float[Tensor, "*shape"]) -> RatioBounds:
        """Compute the bounds for tokens with the old log-probabilities ``logp_old`` (nats, any shape)."""

    def clip_mask(self, log_ratio: Float[Tensor, "*shape"], logp_old: Float[Tensor, "*shape"]) -> ClipMask:
        """Compute which tokens have a log-ratio outside of their bounds.

        The gradient of a clipped loss depends on this mask only.

        Args:
            log_ratio: ``logp − logp_old`` (nats).
            logp_old: The old log-probabilities (nats).

        Raises:
            ValueError: if a log-probability is NaN or above 0, on the CPU.
        """
        return self.compare(log_ratio, _checks.as_logp("logp_old", logp_old))

    def compare(self, log_ratio: Float[Tensor, "*shape"], logp_old: Float[Tensor, "*shape"]) -> ClipMask:
        """Compute `clip_mask` for the log-probabilities of a batch, which are valid.

        The default compares the ratio with `bounds`. A rule with a cheaper test overrides this method and `solves`.

        Args:
            log_ratio: ``logp − logp_old`` (nats).
            logp_old: The old log-probabilities (nats) of a batch; above 0 only by rounding.
        """
        if self.interval is not None:
            return ClipMask.outside(log_ratio, *self.interval)
        bounds = self.bounds(logp_old)
        return ClipMask.outside(log_ratio, bounds.log_lower, bounds.log_upper)

    def log_bound(
        self, logp_old: Float[Tensor, "*shape"], above: Bool[Tensor, "*shape"]
    ) -> Float[Tensor, "*shape"]:
        """Compute one bound of each token, as a log-ratio: the upper one where ``above``, else the lower one.

        The value of a clipped loss depends on one bound only. The default computes both. A rule that can compute one of
        them for less overrides this method. The result is a new tensor, which the caller may overwrite.

        Args:
            logp_old: The old log-probabilities (nats) of a batch, which are valid.
            above: True for the upper bound.
        """
        bounds = self.bounds(logp_old)
        return torch.where(above, bounds.log_upper, bounds.log_lower)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The bounds as log-ratios if they are the same for all tokens, else None."""
        return None

    @property
    def has_tensors(self) -> bool:
        """True if a number of the rule is a tensor, such as a radius per token. Its tokens cannot be reordered."""
        values = self.arguments().values()
        has_own = any(isinstance(value, torch.Tensor) for value in values)
        return has_own or any(rule.has_tensors for rule in self._inner_rules())

    @property
    def solves(self) -> bool:
        """True if `bounds` is costly, as with a root search. The loss then calls `compare` instead if it can."""
        return any(rule.solves for rule in self._inner_rules())

    @property
    def one_pass(self) -> bool:
        """True if a compiler may recompute intermediate tensors instead of storing them, see `bandpo.compile_loss`."""
        return all(rule.one_pass for rule in self._inner_rules())

    def settle(self, tokens: TokenData) -> ClipRule:
        """Return the rule for the given tokens, with bounds that depend on p only.

        It replaces each `TokenRule` by the rule or the bounds that `TokenRule.for_tokens` returns. Other rules are
        returned unchanged.
        """
        arguments = self.arguments()
        changed: dict[str, ClipRule] = {}
        for name, value in arguments.items():
            if isinstance(value, ClipRule):
                settled = value.settle(tokens)
                if settled is not value:
                    changed[name] = settled
        return self.__class__(**{**arguments, **changed}) if changed else self

    @property
    def depends_on_tokens(self) -> bool:
        """True if the rule is or contains a `TokenRule`. `bounds` is then only available after `settle`."""
        return any(rule.depends_on_tokens for rule in self._inner_rules())

    @property
    def whole_sequence(self) -> bool:
        """True if a token's bounds depend on other tokens of its sequence. A row must then hold one sequence."""
        return any(rule.whole_sequence for rule in self._inner_rules())

    @property
    def whole_batch(self) -> bool:
        """True if a token's bounds depend on other sequences. The loss then needs all of an update at once."""
        return any(rule.whole_batch for rule in self._inner_rules())

    @property
    def within_process(self) -> bool:
        """True if a token's bounds depend on other sequences, but only on those of its own process.

        A rule that includes the batches of ``TrainingState(processes=…)`` returns False. Trainers that divide an update
        among processes refuse the others.
        """
        inner_rules = self._inner_rules()
        is_inner = any(rule.within_process for rule in inner_rules)
        return is_inner or (self.whole_batch and not any(rule.whole_batch for rule in inner_rules))

    def _inner_rules(self) -> list[ClipRule]:
        """Return the rules that are fields of this rule."""
        return [value for value in self.arguments().values() if isinstance(value, ClipRule)]


@dataclass(frozen=True)
class TokenRule(ClipRule):
    """A clip rule that depends on more than p: on advantages, positions, ages, or the other tokens of the batch.

    A subclass implements one method, `for_tokens`. It is called once per batch and level, before the bounds are
    computed. Such a rule can be combined with `TwoSided`, `Loosest` and `Tightest`, and with any objective.

    If a token's bounds depend on other tokens, override `whole_sequence` (tokens of its sequence) or `whole_batch`
    (other sequences). Packed rows without a layout then raise an error, and so do trainers that
    compute the loss of an update in several parts. Those that divide it among processes do so too, unless the rule
    includes the other processes and overrides `within_process`.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class NarrowerWithAge(TokenRule):
    ...     width: float = 0.4
    ...
    ...     def for_tokens(self, tokens):
    ...         width = self.width / (1 + tokens.age)
    ...         return RatioBounds(log_lower=-width, log_upper=width)
    >>> batch = Batch.read(
    ...     torch.tensor([[0.11], [0.11]]).log(),
    ...     torch.tensor([[0.08], [0.08]]).log(),
    ...     torch.ones(2),
    ...     state=TrainingState(age=torch.tensor([0.0, 3.0])),
    ... )
    >>> batch.tokens(NarrowerWithAge()).blocked
    tensor([[False],
            [ True]])
    """

    @abstractmethod
    def for_tokens(self, tokens: TokenData) -> RatioBounds | ClipRule:
        """Return the bounds of the given tokens, or a clip rule for them, such as a `Band` with a tensor as radius.

        Bounds are log-ratios of a shape that broadcasts to the tokens'. Like ``tokens.log_ratio_anchor``, with which
        they are compared, they are relative to the anchor, ``tokens.logp_anchor``. Do not read values on the host, as
        ``.item()`` and ``if`` do: that synchronises an accelerator and breaks the graph of ``torch.compile``.

        Args:
            tokens: The tokens, with ratios at the level of the method.
        """

    def settle(self, tokens: TokenData) -> ClipRule:
        rule = self.for_tokens(tokens)
        if isinstance(rule, RatioBounds):
            return _TensorBounds(rule.log_lower, rule.log_upper)
        if not _checks.is_a(rule, ClipRule):
            raise InvalidType(
                f"{type(self).__name__}.for_tokens must return RatioBounds or a clip rule, got {type(rule).__name__}"
            )
        return rule.settle(tokens)

    def bounds(self, logp_old: Tensor) -> RatioBounds:
        raise InvalidValue(
            f"the bounds of {self!r} depend on more than logp_old; read those of a batch from "
            "method.tokens(batch).bounds"
        )

    @property
    def depends_on_tokens(self) -> bool:
        return True


@dataclass(frozen=True, eq=False)
class _TensorBounds(ClipRule):
    """Bounds that were computed for the tokens of one batch, as log-ratios that broadcast to the tokens."""

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
    """A clip rule that allows the ratios within an f-divergence trust region around the token's old probability.

    The bounds are the smallest and the largest ratio r with ``p·f(r) + (1 − p)·f((1 − p·r)/(1 − p)) ≤ radius``.
    `compare` evaluates this constraint at the token's ratio, without solving for the bounds.

    Args:
        divergence: The divergence, which gives f.
        radius: Size of the trust region, in the divergence's own unit; ``divergence.default_radius`` if not given. A
            number, a tensor (one value per token, or one per sequence with a trailing dimension of 1), or a schedule
            or controller of `bandpo.core.schedules`. A rule with a tensor has no text form.
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
                _checks.check_radius(x)
        else:
            _checks.check_radius(self.radius)
        _check_cap(self.max_ratio)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Band) or type(other) is not type(self):
            return NotImplemented
        if isinstance(self.radius, torch.Tensor) or isinstance(other.radius, torch.Tensor):
            # Tensors are compared by identity, as by their hash: comparing elements would read the device.
            same_radius = self.radius is other.radius
        else:
            same_radius = self.radius == other.radius
        return same_radius and (self.divergence, self.max_ratio) == (other.divergence, other.max_ratio)

    def radius_for(self, logp_old: Float[Tensor, "*shape"]) -> float | Tensor:
        """Return the radius for tokens with the old log-probabilities ``logp_old``: a number, or a tensor like them.

        Raises:
            ValueError: if the radius depends on the training state (see `resolve`), does not broadcast, or is not above
                0 everywhere.
        """
        logp = _checks.as_float("logp_old", logp_old)
        radius = cast("float | Tensor | Radius", self.radius)  # not None: __post_init__ sets the default
        if isinstance(radius, Radius):
            raise radius.unknown()
        return _checks.as_radius(radius, logp) if isinstance(radius, torch.Tensor) else radius

    def bounds(self, logp_old: Tensor) -> RatioBounds:
        logp = _checks.as_logp("logp_old", logp_old)
        bounds = ratio_bounds(logp, self.divergence, self.radius_for(logp))
        return RatioBounds(bounds.log_lower, bounds.log_upper.clamp(max=math.log(self.max_ratio)))

    def log_bound(self, logp_old: Tensor, above: Tensor) -> Tensor:
        # No value is checked: it was in the batch.
        radius = self.radius_for(logp_old)
        table = bounds_table(self.divergence, logp_old, radius)
        if table is None:
            bound = self.divergence.log_bound(logp_old.clamp(max=0.0), radius, above)
        else:
            bound = table.log_bound(logp_old, above)
        # The lower bound is below the cap too.
        return bound.clamp_(max=math.log(self.max_ratio))

    def compare(self, log_ratio: Tensor, logp_old: Tensor) -> ClipMask:
        logp = logp_old.clamp(max=0.0)
        if self.max_ratio <= 1e30:
            divergence = self.divergence.divergence_of_moderate_ratio(log_ratio, logp)
        else:
            divergence = self.divergence.divergence_of_ratio(log_ratio, logp)
        # The log-ratio of tokens outside of the trust region, else 0. A compiled graph stores this one tensor for both
        # masks; storing boolean tensors is slower.
        outside = torch.where(divergence > self.radius_for(logp), log_ratio, 0.0)
        return ClipMask(outside < 0, (outside > 0) | (log_ratio > math.log(self.max_ratio)))

    @property
    def solves(self) -> bool:
        return True

    @property
    def one_pass(self) -> bool:
        return self.divergence.one_pass


@dataclass(frozen=True)
class FixedClip(ClipRule):
    """PPO's clip: ratios in ``[1 − low, 1 + high]`` for every token.

    PPO and GRPO use 0.2; DAPO's Clip-Higher uses 0.2 and 0.28. ``high=inf`` removes the upper bound.

    Args:
        low: Distance of the lower bound from 1, in [0, 1].
        high: Distance of the upper bound from 1, ≥ 0; ``low`` if not given.

    >>> FixedClip(0.1)
    FixedClip(low=0.1, high=0.1)
    >>> FixedClip(0.2, 0.28).bounds(torch.tensor([0.08]).log()).upper
    tensor([1.2800])
    """

    low: float = 0.2
    high: float = cast("float", None)  # __post_init__ replaces None by low

    def __post_init__(self) -> None:
        if _checks.is_a(self.high, NoneType):
            object.__setattr__(self, "high", self.low)
        _checks.number("low", self.low, "in [0, 1] (the lower bound is 1 - low)", lambda x: 0 <= x <= 1)
        _checks.number("high", self.high, "at least 0 (the upper bound is 1 + high)", lambda x: x >= 0)

    @property
    def interval(self) -> tuple[float, float]:
        log_lower = math.log1p(-self.low) if self.low < 1 else -math.inf
        return log_lower, math.log1p(self.high)

    def bounds(self, logp_old: Tensor) -> RatioBounds:
        return _equal_bounds(logp_old, self.interval)


@dataclass(frozen=True)
class LogClip(ClipRule):
    """A clip of the log-ratio: ratios in ``[e^−low, e^high]`` for every token.

    Args:
        low: Distance of the lower bound from 0 in log r, ≥ 0; ``inf`` for no lower bound.
        high: Distance of the upper bound from 0 in log r, ≥ 0; ``inf`` for no upper bound.

    >>> LogClip(0.4, 0.4).bounds(torch.tensor([0.08]).log()).upper
    tensor([1.4918])
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        _checks.number("low", self.low, "at least 0 (the lower bound is exp(-low))", lambda x: x >= 0)
        _checks.number("high", self.high, "at least 0 (the upper bound is exp(high))", lambda x: x >= 0)

    @property
    def interval(self) -> tuple[float, float]:
        return -self.low, self.high

    def bounds(self, logp_old: Tensor) -> RatioBounds:
        return _equal_bounds(logp_old, self.interval)


@dataclass(frozen=True)
class Unclipped(ClipRule):
    """A rule without bounds: every ratio is allowed.

    >>> Unclipped().bounds(torch.tensor([0.08]).log()).upper
    tensor([inf])
    """

    @property
    def interval(self) -> tuple[float, float]:
        return -math.inf, math.inf

    def bounds(self, logp_old: Tensor) -> RatioBounds:
        return _equal_bounds(logp_old, self.interval)


def _equal_bounds(logp_old: Tensor, interval: tuple[float, float]) -> RatioBounds:
    """Return the same bounds for all tokens, from two log-ratios."""
    logp = _checks.as_logp("logp_old", logp_old)
    log_lower, log_upper = interval
    return RatioBounds(torch.full_like(logp, log_lower), torch.full_like(logp, log_upper))


def bands(rule: ClipRule, within: str = "") -> dict[str, Band]:
    """Return every `Band` in a rule by the path of fields that leads to it, ``""`` for the rule itself.

    >>> bands(Tightest(TwoSided(FixedClip(), Band()), FixedClip(1.0, 3.0)))
    {'a.upper': Band(divergence=KL(), radius=0.05, max_ratio=10.0)}
    """
    by_path = {within: rule} if isinstance(rule, Band) else {}
    for name, value in rule.arguments().items():
        if isinstance(value, ClipRule):
            by_path |= bands(value, f"{within}.{name}".lstrip("."))
    return by_path


@dataclass(frozen=True)
class DCPO(ClipRule):
    """DCPO's dynamic clip: the ratios with ``(1 − r)·r·p ≤ low`` below 1 and ``(r − 1)·r·p ≤ high`` above.

        ½ + ½·√max(1 − 4·low/p, 0)  ≤  r  ≤  min(½ + ½·√(1 + 4·high/p), max_ratio)

    The lower bound is ½ for every token with ``p ≤ 4·low``. For common tokens, p > 1 − high, the upper bound is above
    ``1/p``, which no ratio exceeds, so it has no effect on them.

    Args:
        low: Limit of ``(1 − r)·r·p``, ≥ 0.
        high: Limit of ``(r − 1)·r·p``, ≥ 0.
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
    """Compute ``log(x/p)``, which is −inf for x = 0."""
    return math.log(x) - logp if x else torch.full_like(logp, -math.inf)


def _check_cap(max_ratio: float) -> None:
    """Raise ValueError unless a cap on the ratio is above 1."""
    _checks.number("max_ratio", max_ratio, "above 1 (inf for no cap)", lambda x: x > 1)


def _check_rules(**rules: object) -> None:
    """Raise TypeError if an argument, passed by its name, is not a clip rule."""
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

    def compare(self, log_ratio: Tensor, logp_old: Tensor) -> ClipMask:
        return ClipMask(
            self.lower.compare(log_ratio, logp_old).clipped_low,
            self.upper.compare(log_ratio, logp_old).clipped_high,
        )

    def log_bound(self, logp_old: Tensor, above: Tensor) -> Tensor:
        return torch.where(
            above, self.upper.log_bound(logp_old, above), self.lower.log_bound(logp_old, above)
        )


@dataclass(frozen=True)
class _Combined(ClipRule):
    """Base of rules whose bounds are each taken from one of two rules."""

    a: ClipRule
    b: ClipRule

    def __post_init__(self) -> None:
        _check_rules(a=self.a, b=self.b)

    @staticmethod
    @abstractmethod
    def _lower(a: Tensor, b: Tensor, /) -> Tensor:
        """Combine the lower bounds of both rules."""

    @staticmethod
    @abstractmethod
    def _upper(a: Tensor, b: Tensor, /) -> Tensor:
        """Combine the upper bounds of both rules."""

    @staticmethod
    @abstractmethod
    def _clipped(a: Tensor, b: Tensor, /) -> Tensor:
        """Combine the clip masks of both rules."""

    def bounds(self, logp_old: Tensor) -> RatioBounds:
        a = self.a.bounds(logp_old)
        b = self.b.bounds(logp_old)
        return RatioBounds(self._lower(a.log_lower, b.log_lower), self._upper(a.log_upper, b.log_upper))

    def compare(self, log_ratio: Tensor, logp_old: Tensor) -> ClipMask:
        a = self.a.compare(log_ratio, logp_old)
        b = self.b.compare(log_ratio, logp_old)
        return ClipMask(
            self._clipped(a.clipped_low, b.clipped_low),
            self._clipped(a.clipped_high, b.clipped_high),
        )

    def log_bound(self, logp_old: Tensor, above: Tensor) -> Tensor:
        a = self.a.log_bound(logp_old, above)
        b = self.b.log_bound(logp_old, above)
        return torch.where(above, self._upper(a, b), self._lower(a, b))


@dataclass(frozen=True)
class Loosest(_Combined):
    """A clip rule that allows each ratio that either of two rules allows.

    The lower bound is the smaller of the two, the upper bound the greater.

    >>> Loosest(Band(KL(), 0.05), FixedClip(0.2, 0.28)).bounds(torch.tensor([0.9]).log()).upper
    tensor([1.2800])
    """

    _lower = staticmethod(torch.minimum)
    _upper = staticmethod(torch.maximum)
    _clipped = staticmethod(torch.logical_and)


@dataclass(frozen=True)
class Tightest(_Combined):
    """A clip rule that allows the ratios that both of two rules allow.

    The lower bound is the greater of the two, the upper bound the smaller.

    >>> Tightest(Band(KL(), 0.05), FixedClip(0.2, 0.28)).bounds(torch.tensor([0.9]).log()).upper
    tensor([1.0764])
    """

    _lower = staticmethod(torch.maximum)
    _upper = staticmethod(torch.minimum)
    _clipped = staticmethod(torch.logical_or)
