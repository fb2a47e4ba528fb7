"""Policy-gradient methods by the names of their papers.

A method consists of a clip rule, an objective, the level of its ratios (token or sequence) and the aggregation of its
loss. Pass it to the loss as an object or as text: ``policy_loss(..., method=DPPO())``, ``method="SAPO(1.0, 1.05)"``. A
clip rule alone is a method too: PPO's surrogate with the bounds of the rule. `METHODS` lists all methods by name. To
add one of your own, write a function that returns a `Method`.

The docstrings use these symbols:

- ``r = π/π_old`` is the ratio of a token's new to its old probability, ``p = π_old`` its old probability, and ``A`` its
  advantage.
- ``w`` is the weight of a token: the derivative of its loss with respect to ``log π`` is ``−w·A``, or ``−(w·A + b)``
  for methods with a bias ``b``.
- A token is *blocked* if its ratio is outside of the bounds on the side to which the advantage pushes it: above the
  upper bound with A > 0, or below the lower bound with A < 0.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec

import torch

from . import _checks
from ._loss import LossOutputs, loss_metrics, with_derivative
from ._rows import check_rows
from .aggregation import aggregate_sequences, canonical_aggregation
from .batch import Batch, Tokens, check_level
from .divergences import KL, Divergence, TotalVariation
from .errors import InvalidType, InvalidValue
from .layout import as_row
from .objectives import (
    ClippedWeight,
    CovarianceMask,
    CovariancePenalty,
    DecoupledDecay,
    DropOutside,
    DualClip,
    FutureKL,
    GammaWeight,
    GeometricMean,
    HazardGate,
    InverseRatio,
    KeepBound,
    LogRatioPenalty,
    MassAdaptiveGate,
    Objective,
    ProbabilityPenalty,
    Quadratic,
    RolloutSurrogate,
    SelfAnchored,
    SequenceMask,
    SequenceProduct,
    SigmoidGate,
    Smoothed,
    Surrogate,
    Unweighted,
)
from .objectives.base import check_objective
from .rules import Band, ClipRule, FixedClip, LogClip, TwoSided, Unclipped
from .schedules import Varies
from .token_rules import BalancedBounds, PrefixBudget, SecondMoment

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

__all__ = [
    "ASPO",
    "BAPO",
    "CEGPPO",
    "CISPO",
    "CPPO",
    "DAPO",
    "DGPO",
    "DPPO",
    "DRO",
    "DRPO",
    "FIPO",
    "GMPO",
    "GPG",
    "GPPO",
    "GRPO",
    "GSPO",
    "IPO",
    "M2PO",
    "MASPO",
    "METHODS",
    "MHPO",
    "PPO",
    "PSPO",
    "SAPO",
    "SPO",
    "TOPR",
    "TRM",
    "UPGRPO",
    "VESPO",
    "BandAbove",
    "BandPO",
    "ClipCov",
    "DeepSeekV32",
    "IcePop",
    "KLCov",
    "Method",
    "MiniRL",
    "PrimeRL",
    "TokenTOPR",
]

PER_SEQUENCE = "seq-mean-token-mean"
P = ParamSpec("P")


@dataclass(frozen=True)
class Method(Varies):
    """A policy-gradient method: a clip rule, an objective, the level of the ratios and the aggregation of the loss.

    Methods are immutable, and equal if these fields are equal, whatever their names. A dual clip and the use of
    importance weights are part of the objective.

    Raises:
        TypeError: if ``clip`` is not a clip rule, or ``objective`` is not an objective.
        ValueError: if ``level``, ``bound_level`` or ``old_policy`` is unknown.

    >>> Method(FixedClip(0.2), DropOutside())
    Method(clip=FixedClip(low=0.2, high=0.2), objective=DropOutside(max_weight=20.0, both_sides=False))
    >>> CISPO()
    CISPO(low=1.0, high=4.0)
    """

    # A factory: older versions of torch.compile break the graph at defaults that are instances of these classes.
    clip: ClipRule = field(default_factory=Band)
    """The clip rule, which gives the bounds of each token's ratio."""
    objective: Objective = None  # pyright: ignore  (set in __post_init__: torch.compile breaks the graph at a factory)
    """The objective, which gives each token's weight from its ratio and the bounds; `Surrogate` by default."""
    level: str = "token"
    """The level of the ratio: ``token``, or ``sequence`` for the geometric mean over a sequence as in `GSPO`."""
    aggregation: str | None = None
    """The aggregation of the loss, see `bandpo.aggregate`; None leaves it to the training loop or the trainer."""
    bound_level: str | None = None
    """The level of the ratio that the rule bounds, if that is not ``level``."""
    old_policy: str = "trainer"
    """The policy that ``logp_old`` comes from: the ``trainer``'s own, or the ``rollout`` engine's."""
    call: tuple[str, dict[str, Any]] | None = field(default=None, init=False, repr=False, compare=False)
    """The function of this module that built the method, by name, and its arguments; None if there is none."""

    def __post_init__(self) -> None:
        if _checks.is_a(self.objective, NoneType):
            object.__setattr__(self, "objective", Surrogate())
        if not _checks.is_a(self.clip, ClipRule):
            raise InvalidType(f"clip must be a clip rule such as FixedClip(0.2), got {self.clip!r}")
        check_objective(self.objective)
        check_level(self.level)
        check_level(self.bound_level or self.level)
        if self.old_policy not in ("trainer", "rollout"):
            raise InvalidValue(f"old_policy must be 'trainer' or 'rollout', got {self.old_policy!r}")

    def __repr__(self) -> str:
        return self.to_text(repr)

    def to_text(self, format_value: Callable[[Any], str]) -> str:
        """Return the text form: ``DAPO(low=0.2, high=0.28)``, the clip rule's if that is all, or ``Method(…)``.

        Args:
            format_value: The function that formats an argument, such as ``repr``.
        """
        if self.call is None and self.only_rule:
            return format_value(self.clip)
        name, arguments = self.call or ("Method", self._changed_fields())
        formatted = [f"{key}={format_value(value)}" for key, value in arguments.items()]
        return f"{name}({', '.join(formatted)})"

    def _changed_fields(self) -> dict[str, Any]:
        """Return the clip rule, and the other fields whose values are not the defaults."""
        plain = Method(self.clip)
        changed: dict[str, Any] = {"clip": self.clip}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.compare and value != getattr(plain, f.name):
                changed[f.name] = value
        return changed

    def tokens(self, batch: Batch) -> Tokens:
        """Return the tokens of a batch with the method's clip rule, at its levels.

        Raises:
            ValueError: if a number of the rule depends on something that the batch's training state lacks.
        """
        return batch.tokens(self.clip, self.level, self.bound_level)

    def weight(self, tokens: Tokens) -> Float[Tensor, "batch time"]:
        """Compute the weight ``w`` of each token, 0 for a dropped one.

        Raises:
            ValueError: if a number of the objective depends on something that the training state lacks.
        """
        return self.objective.resolve(tokens.state).weight(tokens)

    def loss(
        self,
        batch: Batch,
        *,
        aggregation: str | Callable[[Tensor], Tensor] | None = None,
        normalizer: float | Tensor | None = None,
        metrics: bool = True,
    ) -> LossOutputs:
        """Compute the loss of a batch, as `bandpo.policy_loss` does.

        The derivative of each token's loss with respect to its ``logp``, ``−(w·A + b)``, is computed directly and
        handed to autograd, so no graph is built over the ratios. If the bounds have no closed form, one root per token
        beyond a bound is solved for, and only for the value.

        Args:
            batch: The batch, from `Batch.read`.
            aggregation: As for `bandpo.policy_loss`.
            normalizer: As for `bandpo.policy_loss`.
            metrics: As for `bandpo.policy_loss`.

        Raises:
            ValueError: if a row plainly holds several sequences, see `bandpo.policy_loss`; or a number of the method
                depends on something that the batch's training state lacks.

        >>> logp, logp_old = torch.tensor([[0.2, 0.5]]).log().requires_grad_(), torch.tensor([[0.08, 0.5]]).log()
        >>> batch = Batch.read(logp, logp_old, torch.tensor([1.0]), entropy=torch.tensor([[1.5, 0.7]]))
        >>> loss, metrics = GRPO().loss(batch)
        >>> loss
        tensor(-1.1000, grad_fn=<DivBackward0>)
        """
        if batch.logp is None:
            raise InvalidValue("the log-probabilities of the batch are not known, so it has no loss")
        reduction = aggregation or self.aggregation or "token-mean"
        self.check_rows(batch, None if callable(reduction) else reduction)
        logp = as_row(batch.logp) if batch.sequences.packed else batch.logp

        # The value of each token's loss and its derivative with respect to logp, both (batch, time).
        with torch.no_grad():
            tokens = self.tokens(batch)
            objective = self.objective.resolve(batch.state)
            surrogate = weight = objective.weight(tokens)
            # The derivative of −r·A by r. It is 0 in the padding, so the derivative and the value are 0 there too.
            slope = -batch.advantages
            if slope.dtype != weight.dtype:
                slope = slope.to(torch.promote_types(slope.dtype, weight.dtype))
            values = loss_metrics(batch, tokens, weight, slope, self.level) if metrics else {}
            derivative = slope.mul_(weight)
            del slope
            bias = objective.bias(tokens)
            if bias is not None:
                derivative = derivative - bias * batch.mask
            if not metrics:
                # The value is not computed, and no other number takes its place.
                value = torch.full_like(derivative, math.nan)
            else:
                if type(objective).surrogate is not Objective.surrogate:
                    del weight, surrogate
                    surrogate = objective.surrogate(tokens)
                value = (batch.advantages * surrogate).neg_()
                regularizer = objective.regularizer(tokens)
                if regularizer is not None:
                    value = value + regularizer * batch.mask
            token_weights = batch.token_weights
            if token_weights is not None and not objective.weights_inside:
                derivative = derivative * token_weights
                value = value * token_weights
        token_losses = with_derivative(_checks.as_float("logp", logp), value, derivative)

        if callable(reduction):
            loss = reduction(token_losses)
        else:
            loss = aggregate_sequences(token_losses, batch.sequences, reduction, normalizer)
        return LossOutputs(loss, values)

    def check_rows(self, batch: Batch, aggregation: str | None) -> None:
        """Raise ValueError if the method takes a row for one sequence that plainly holds several.

        Args:
            batch: The batch.
            aggregation: The name of the loss's aggregation; None if it is unknown or does not matter.
        """
        if not batch.rows_assumed:
            return
        check_rows(
            batch, "sequence" in (self.level, self.bound_level), self._reason_of_sequences(aggregation)
        )

    def _reason_of_sequences(self, aggregation: str | None) -> str | None:
        """Return the part of the method, besides its levels, that takes a row for one sequence; None for none."""
        if aggregation is not None and canonical_aggregation(aggregation).startswith("seq-"):
            return f"the average {aggregation!r}"
        if self.clip.whole_sequence:
            return f"the clip rule {self.clip!r}"
        if self.objective.whole_sequence:
            return f"the objective {self.objective!r}"
        for number in self.varying().values():
            if number.needs in ("position", "length"):
                return f"{number!r}, which depends on the {number.needs},"
        return None

    @property
    def whole_sequence(self) -> bool:
        """True if a token's gradient depends on other tokens of its sequence, by the rule or by the objective."""
        return self.clip.whole_sequence or self.objective.whole_sequence

    @property
    def whole_batch(self) -> bool:
        """True if a token's gradient depends on other sequences. The loss then needs all of an update at once."""
        return self.clip.whole_batch or self.objective.whole_batch

    @property
    def within_process(self) -> bool:
        """True if a token's gradient depends on other sequences, but only on those of its own process."""
        return self.clip.within_process or self.objective.within_process

    @property
    def only_rule(self) -> bool:
        """True if only the clip rule is set. A trainer then applies its own level, aggregation and dual clip."""
        return self == Method(self.clip)


class Paper(NamedTuple):
    """An entry of `METHODS`."""

    source: str
    """The arXiv number of the paper; empty for a method without one."""
    method: Callable[..., Method]


METHODS: dict[str, Paper] = {}
"""All methods of this module by name."""


def _published(source: str) -> Callable[[Callable[P, Method]], Callable[P, Method]]:
    """Register a function that builds a method in `METHODS`, and record its name and arguments in the result."""

    def decorate(function: Callable[P, Method]) -> Callable[P, Method]:
        name = function.__name__
        signature = inspect.signature(function)
        defaults = {key: parameter.default for key, parameter in signature.parameters.items()}

        def method(*args: P.args, **kwargs: P.kwargs) -> Method:
            result = function(*args, **kwargs)
            values = defaults | dict(zip(defaults, args, strict=False)) | kwargs
            object.__setattr__(result, "call", (name, values))
            return result

        method.__name__ = name
        method.__qualname__ = name
        method.__doc__ = function.__doc__
        method.__module__ = function.__module__
        method.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
        METHODS[name] = Paper(source, method)
        return method

    return decorate


@_published("1707.06347")
def PPO(low: float = 0.2, high: float = 0.2) -> Method:
    """Clip token ratios to [1 − low, 1 + high], and average the loss over all tokens.

    ``w = r``, and 0 for a blocked token: A > 0 and r > 1 + high, or A < 0 and r < 1 − low.

    Args:
        low: Distance of the lower bound from 1, in [0, 1]. 0.2 is the paper's.
        high: Distance of the upper bound from 1, at least 0. 0.2 is the paper's.

    Source: https://arxiv.org/abs/1707.06347

    >>> bounds = PPO().clip.bounds(torch.tensor([0.08]).log())
    >>> bounds.lower, bounds.upper
    (tensor([0.8000]), tensor([1.2000]))
    """
    return Method(FixedClip(low, high), aggregation="token-mean")


@_published("2402.03300")
def GRPO(low: float = 0.2, high: float = 0.2) -> Method:
    """Clip token ratios to [1 − low, 1 + high], and average the loss per sequence, then over sequences.

    ``w = r``, and 0 for a blocked token: A > 0 and r > 1 + high, or A < 0 and r < 1 − low.

    Args:
        low: Distance of the lower bound from 1, in [0, 1]. 0.2 is PPO's.
        high: Distance of the upper bound from 1, at least 0. 0.2 is PPO's.

    Source: https://arxiv.org/abs/2402.03300
    """
    return Method(FixedClip(low, high), aggregation=PER_SEQUENCE)


@_published("2503.14476")
def DAPO(low: float = 0.2, high: float = 0.28) -> Method:
    """Clip token ratios to [1 − low, 1 + high] with a wider upper side (Clip-Higher).

    ``w = r``, and 0 for a blocked token: A > 0 and r > 1 + high, or A < 0 and r < 1 − low. The loss is averaged over
    all tokens.

    Args:
        low: Distance of the lower bound from 1, in [0, 1]. 0.2 is the paper's.
        high: Distance of the upper bound from 1, at least 0. 0.28 is the paper's.

    Source: https://arxiv.org/abs/2503.14476

    >>> DAPO().clip.bounds(torch.tensor([0.08]).log()).upper
    tensor([1.2800])
    """
    return Method(FixedClip(low, high), aggregation="token-mean")


@_published("2603.04918")
def BandPO(
    divergence: Divergence = KL(),
    radius: float | None = None,
    max_ratio: float = 10.0,
    dual_clip: float = 10.0,
) -> Method:
    """Clip each token's ratio to the bounds that an f-divergence trust region gives at its old probability p.

    The bounds are the smallest and the largest r with ``p·f(r) + (1 − p)·f((1 − p·r)/(1 − p)) ≤ radius``; the upper
    one is at most ``max_ratio``. ``w = r``, and 0 for a blocked token, or if A < 0 and r > dual_clip. The loss is
    averaged per sequence, then over sequences.

    Args:
        divergence: The f-divergence. `KL` is the paper's choice.
        radius: Size of the trust region in the divergence's unit, above 0; ``divergence.default_radius`` if not given.
            That of `KL` is 0.05, the paper's.
        max_ratio: Largest upper bound, above 1; ``inf`` for none. 10 is the paper's.
        dual_clip: Ratio above which tokens with A < 0 lose their gradient, above 1; ``inf`` for none. 10 is that of the
            paper's experiments.

    Source: https://arxiv.org/abs/2603.04918

    >>> bounds = BandPO().clip.bounds(torch.tensor([0.08]).log())
    >>> bounds.lower, bounds.upper
    (tensor([0.2617]), tensor([2.4106]))
    """
    return Method(
        Band(divergence, radius, max_ratio), DualClip(dual_clip, Surrogate()), aggregation=PER_SEQUENCE
    )


@_published("2603.04918")
def BandAbove(
    divergence: Divergence = KL(), radius: float | None = None, low: float = 0.2, max_ratio: float = 10.0
) -> Method:
    """Clip each token's ratio to the upper bound of `BandPO` and to a fixed lower bound, 1 − low.

    The upper bound is the largest r with ``p·f(r) + (1 − p)·f((1 − p·r)/(1 − p)) ≤ radius``, at most ``max_ratio``.
    ``w = r``, and 0 for a blocked token. The loss is averaged per sequence, then over sequences.

    It is made for stale data and for many updates on one batch, if a fixed clip blocks much of what rare tokens with
    A > 0 could gain; docs/when.md has measurements. The upper side is the paper's, the combination is our own.

    Args:
        divergence: The f-divergence of the upper bound. `KL` is the paper's choice.
        radius: Size of the trust region in the divergence's unit, above 0; ``divergence.default_radius`` if not given.
            That of `KL` is 0.05, the paper's.
        low: Distance of the lower bound from 1, in [0, 1]. 0.2 is PPO's.
        max_ratio: Largest upper bound, above 1; ``inf`` for none. 10 is the paper's.

    Source: https://arxiv.org/abs/2603.04918

    >>> bounds = BandAbove().clip.bounds(torch.tensor([0.08]).log())
    >>> bounds.lower, bounds.upper
    (tensor([0.8000]), tensor([2.4106]))
    """
    return Method(TwoSided(FixedClip(low), Band(divergence, radius, max_ratio)), aggregation=PER_SEQUENCE)


@_published("2602.04879")
def DPPO(divergence: Divergence = KL(), radius: float | None = None, max_weight: float = 20.0) -> Method:
    """Drop tokens that leave a divergence's trust region around the rollout engine's policy.

    ``w = min(r, max_weight)``, and 0 for a token with ``p·f(r) + (1 − p)·f((1 − p·r)/(1 − p)) > radius`` on the side to
    which the advantage pushes it. p and r refer to the rollout engine's policy. The loss is averaged over all tokens.

    Args:
        divergence: The f-divergence; `KL` by default. The paper also has `TotalVariation`.
        radius: Size of the trust region in the divergence's unit, above 0; ``divergence.default_radius`` if not given.
        max_weight: Largest weight, above 0; ``inf`` for none. 20 is the argument of verl's loss, whose setting
            ``clip_ratio_c`` is 3 by default. The authors' own code has 10 and their example in verl 10,000. SkyRL and
            prime-rl have no limit.

    Source: https://arxiv.org/abs/2602.04879
    """
    clip = Band(divergence, radius, math.inf)
    return Method(clip, DropOutside(max_weight), aggregation="token-mean", old_policy="rollout")


@_published("2510.18855")
def IcePop(low: float = 0.5, high: float = 4.0) -> Method:
    """Drop tokens whose ratio to the rollout engine's policy is outside of [1 − low, 1 + high], for both signs of A.

    ``w = r`` if 1 − low ≤ r ≤ 1 + high, else 0. The loss is averaged per sequence, then over sequences.

    In this form, the loss of GLM-5 (https://arxiv.org/abs/2602.15763), r is the ratio of the policy in training to the
    rollout engine's. The IcePop paper has PPO's clip and multiplies the loss by the constant factor π_old/π_engine, 0
    outside of the interval. For that write ``GRPO()``, and pass the factor as ``weights``.

    Args:
        low: Distance of the lower limit from 1, in [0, 1]. 0.5 is the paper's.
        high: Distance of the upper limit from 1, at least 0. 4 is the paper's: a ratio of 5.

    Source: https://arxiv.org/abs/2510.18855
    """
    objective = DropOutside(math.inf, both_sides=True)
    return Method(FixedClip(low, high), objective, aggregation=PER_SEQUENCE, old_policy="rollout")


@_published("2506.13585")
def CISPO(low: float = 1.0, high: float = 4.0) -> Method:
    """Weight each token with its clipped ratio, so that no token loses its gradient.

    ``w = min(max(r, 1 − low), 1 + high)`` for both signs of A. The loss is averaged over all tokens.

    Args:
        low: Distance of the lower bound from 1, in [0, 1]. 1 is no lower bound, as in the paper.
        high: Distance of the upper bound from 1, at least 0. 4 is the upper bound of 5 that verl and TRL use.

    Source: https://arxiv.org/abs/2506.13585

    >>> logp_old = torch.full((1, 2), 0.08).log()
    >>> logp = torch.tensor([[0.64, 0.04]]).log()
    >>> tokens = Batch.read(logp, logp_old, torch.ones(1, 2)).tokens(CISPO().clip)
    >>> CISPO().weight(tokens)  # the ratios are 8 and 0.5
    tensor([[5.0000, 0.5000]])
    """
    return Method(FixedClip(low, high), ClippedWeight(), aggregation="token-mean")


@_published("2508.07629")
def GPPO(low: float = 0.2, high: float = 0.28, dual_clip: float = 10.0) -> Method:
    """Clip token ratios, and let blocked tokens keep a gradient with the bound as weight.

    ``w = 1 + high`` if A > 0 and r > 1 + high, ``1 − low`` if A < 0 and r < 1 − low, 0 if A < 0 and r > dual_clip, and
    ``r`` otherwise. The loss is averaged over all tokens.

    Args:
        low: Distance of the lower bound from 1, in [0, 1]. 0.2 is the paper's.
        high: Distance of the upper bound from 1, at least 0. 0.28 is the paper's.
        dual_clip: Ratio above which tokens with A < 0 lose their gradient, above 1. 10 is that of the authors' scripts;
            ``inf`` gives the paper's formula, which has no dual clip.

    Source: https://arxiv.org/abs/2508.07629
    """
    return Method(FixedClip(low, high), DualClip(dual_clip, KeepBound()), aggregation="token-mean")


@_published("2509.20712")
def CEGPPO(
    keep_low: float = 0.75,
    keep_high: float = 1.0,
    low: float = 0.2,
    high: float = 0.2,
    dual_clip: float = 10.0,
) -> Method:
    """Clip token ratios, and let blocked tokens keep a gradient with a share of the bound as weight (CE-GPPO).

    ``w = keep_high·(1 + high)`` if A > 0 and r > 1 + high, ``keep_low·(1 − low)`` if A < 0 and r < 1 − low, 0 if A < 0
    and r > dual_clip, and ``r`` otherwise. The loss is averaged over all tokens.

    Args:
        keep_low: Share of the lower bound, at least 0. 0.75 is that of the authors' script for 7B; the one for 1.5B
            has 0.5.
        keep_high: Share of the upper bound, at least 0. 1 is that of the authors' script for 7B.
        low: Distance of the lower bound from 1, in [0, 1]. 0.2 is that of the authors' scripts.
        high: Distance of the upper bound from 1, at least 0. 0.2 is that of the authors' scripts.
        dual_clip: Ratio above which tokens with A < 0 lose their gradient, above 1. 10 is that of the authors' scripts;
            ``inf`` gives the paper's formula, which has no dual clip.

    Source: https://arxiv.org/abs/2509.20712
    """
    objective = DualClip(dual_clip, KeepBound(keep_low, keep_high))
    return Method(FixedClip(low, high), objective, aggregation="token-mean")


@_published("2510.06062")
def ASPO(epsilon: float = 0.2, max_weight: float = 3.0) -> Method:
    """Weight tokens with A > 0 by the inverse of their ratio.

    ``w = min(1/r, max_weight)`` if A > 0, else ``min(r, max_weight)``; 0 for a blocked token: A > 0 and
    r > 1 + epsilon, or A < 0 and r < 1 − epsilon. The loss is averaged over all tokens.

    Args:
        epsilon: Distance of both bounds from 1, in [0, 1]. 0.2 is the paper's.
        max_weight: Largest weight, above 0; ``inf`` for none. 3 by default.

    Source: https://arxiv.org/abs/2510.06062
    """
    return Method(FixedClip(epsilon), InverseRatio(max_weight), aggregation="token-mean")


@_published("2607.06987")
def UPGRPO(epsilon: float = 0.2) -> Method:
    """Train on tokens with A > 0 without a ratio, and clip the others below as PPO does (UP-GRPO).

    ``w = 1`` if A > 0, 0 if A < 0 and r < 1 − epsilon, and ``r`` otherwise. The loss is averaged per sequence, then
    over sequences.

    Args:
        epsilon: Distance of the lower bound from 1, in [0, 1]. 0.2 is PPO's.

    Source: https://arxiv.org/abs/2607.06987
    """
    return Method(FixedClip(epsilon), SelfAnchored(Surrogate()), aggregation=PER_SEQUENCE)


@_published("2401.16025")
def SPO(epsilon: float = 0.2) -> Method:
    """Replace the clip by a quadratic penalty on the ratio. Token by token it is also known as CFPO.

    ``w = r·(1 − sign(A)·(r − 1)/epsilon)``: 0 at the bound 1 ± epsilon to which the advantage pushes, and below 0
    beyond it. The loss is averaged over all tokens.

    Args:
        epsilon: Distance from 1 of the ratio at which the gradient is 0, in (0, 1]. 0.2 is the paper's.

    Source: https://arxiv.org/abs/2401.16025; as CFPO, https://arxiv.org/abs/2601.22801

    >>> logp_old = torch.full((1, 3), 0.08).log()
    >>> logp = torch.tensor([[0.088, 0.096, 0.104]]).log()
    >>> tokens = Batch.read(logp, logp_old, torch.ones(1, 3)).tokens(SPO().clip)
    >>> print([round(w, 2) + 0.0 for w in SPO().weight(tokens)[0].tolist()])  # the ratios are 1.1, 1.2 and 1.3
    [0.55, 0.0, -0.65]
    """
    return Method(FixedClip(epsilon), Quadratic(), aggregation="token-mean")


@_published("2606.09821")
def DRPO(delta: float = 12.5) -> Method:
    """Replace the clip by a quadratic penalty on the change of the token's probability.

    ``w = r·(1 − sign(A)·(π − π_old)/delta)``. The loss is averaged over all tokens.

    Args:
        delta: Change of probability at which the gradient is 0, above 0. 12.5 is the paper's. No probability changes
            by more than 1, so this lowers the weight by at most 8 %.

    Source: https://arxiv.org/abs/2606.09821
    """
    return Method(Unclipped(), ProbabilityPenalty(delta), aggregation="token-mean")


@_published("2511.20347")
def SAPO(positive: float = 1.0, negative: float = 1.05) -> Method:
    """Replace the clip by a smooth gate, the derivative of a sigmoid, with a temperature for each sign of A.

    ``w = 4·r·σ·(1 − σ)`` with ``σ = sigmoid(τ·(r − 1))``. The gate is 1 at r = 1 and falls on both sides. The loss is
    averaged per sequence, then over sequences.

    Args:
        positive: Temperature τ of tokens with A > 0, above 0. 1 is TRL's default (1.16).
        negative: Temperature τ of the other tokens, above 0. 1.05 is TRL's default (1.16).

    Source: https://arxiv.org/abs/2511.20347

    >>> logp_old = torch.full((1, 2), 0.08).log()
    >>> logp = torch.tensor([[0.08, 0.16]]).log()
    >>> tokens = Batch.read(logp, logp_old, torch.ones(1, 2)).tokens(SAPO().clip)
    >>> SAPO().weight(tokens)  # the ratios are 1 and 2
    tensor([[1.0000, 1.5729]])
    """
    return Method(Unclipped(), SigmoidGate(positive, negative), aggregation=PER_SEQUENCE)


@_published("2510.18927")
def BAPO(share: float = 0.5, dual_clip: float = 3.0) -> Method:
    """Clip token ratios to bounds that widen for each batch until tokens with A > 0 carry a share of the loss.

    ``w = r``, and 0 for a blocked token, or if A < 0 and r > dual_clip. The bounds are the first [l, u] with
    ``Σ min(r, u)·A ≥ share·(Σ min(r, u)·A + Σ max(r, l)·|A|)``, where the sums of ``min`` run over tokens with A > 0
    and those of ``max`` over tokens with A < 0. From [0.6, 1.2] first the lower bound moves to 0.9, then the upper one
    to 3, by 0.05 at a time. The loss is averaged over all tokens.

    The ranges are the paper's. Order, step, sums and dual clip are those of the authors' code; see `BalancedBounds`.

    Args:
        share: Share of the loss that tokens with A > 0 should carry, in (0, 1). 0.5 by default. The authors' setting
            ``adv_ratio_target`` is ``share/(1 − share)``.
        dual_clip: Ratio above which tokens with A < 0 lose their gradient, above 1; ``inf`` for none. 3 is that of the
            authors' code.

    Source: https://arxiv.org/abs/2510.18927
    """
    return Method(BalancedBounds(share), DualClip(dual_clip, Surrogate()), aggregation="token-mean")


@_published("2510.01161")
def M2PO(threshold: float = 0.04) -> Method:
    """Drop the tokens with the largest log-ratios until the mean of their squares is small enough.

    ``w = r``, and 0 for a token with ``|log r| > τ`` on the side to which the advantage pushes it. τ is the largest
    bound under which the mean of ``(log r)²`` is at most ``threshold``, over the tokens of the batch that have moved
    as the advantage pushes and are not dropped; see `SecondMoment`. The loss is averaged over all tokens.

    Args:
        threshold: Largest mean of ``(log r)²``, above 0. 0.04 is the paper's.

    Source: https://arxiv.org/abs/2510.01161
    """
    return Method(SecondMoment(threshold), DropOutside(math.inf), aggregation="token-mean")


@_published("2606.10968")
def CPPO(radius: float = 0.15, budget: float = 0.02, last_weight: float = 0.8) -> Method:
    """Drop tokens that leave a trust region which is narrower for early tokens and after a prefix that has moved far.

    ``w = r``, and 0 for a token that moved to the side to which the advantage pushes with
    ``v·D > min(radius, radius + b·V − S)``. ``D = |π − π_old|``, and the factor ``v`` falls linearly from 1 at the
    first token of the sequence to ``last_weight`` at its last. ``V`` and ``S`` are the sums of ``v`` and of ``v·D``
    over the tokens before it, and ``b`` is the 90th percentile of D over the sequence, within [budget, 2·budget]. The
    old policy is the rollout engine's. The loss is averaged over all tokens, as in the authors' code.

    Args:
        radius: Largest change of a token's probability, above 0. 0.15 is the paper's for dense models; for mixtures of
            experts it has 0.2.
        budget: Change of probability per token that a prefix may have on average, above 0. 0.02 is the paper's.
        last_weight: Factor of a sequence's last token, in (0, 1]. 0.8 is the paper's.

    Source: https://arxiv.org/abs/2606.10968
    """
    band = Band(TotalVariation(), radius, math.inf)
    clip = PrefixBudget(band, budget, last_weight)
    return Method(clip, DropOutside(math.inf), aggregation="token-mean", old_policy="rollout")


@_published("2504.02546")
def GPG() -> Method:
    """Use the plain policy gradient (REINFORCE), without a ratio and without a clip.

    ``w = 1``. The loss is averaged over all tokens.

    Source: https://arxiv.org/abs/2504.02546
    """
    return Method(Unclipped(), Unweighted(), aggregation="token-mean")


@_published("2507.18071")
def GSPO(low: float = 3e-4, high: float = 4e-4) -> Method:
    """Clip the ratio of the whole sequence, the geometric mean of its tokens' ratios, to [1 − low, 1 + high].

    ``w = s = (π(y)/π_old(y))^(1/|y|)`` for every token of the sequence y, and 0 if the sequence is blocked: A > 0 and
    s > 1 + high, or A < 0 and s < 1 − low. The loss is averaged per sequence, then over sequences.

    Args:
        low: Distance of the lower bound from 1, in [0, 1]. 3e-4 is the paper's.
        high: Distance of the upper bound from 1, at least 0. 4e-4 is the paper's.

    Source: https://arxiv.org/abs/2507.18071
    """
    return Method(FixedClip(low, high), level="sequence", aggregation=PER_SEQUENCE)


@_published("2507.20673")
def GMPO(width: float = 0.4) -> Method:
    """Weight tokens with the geometric mean of their sequence's clipped ratios.

    ``w = exp(mean of log clip(r))`` over the tokens of the sequence, and 0 for a blocked token. ``clip`` limits r to
    ``e^width`` if A > 0, and to ``e^−width`` from below if A < 0. The loss is averaged per sequence, then over
    sequences.

    Args:
        width: Largest distance of log r from 0, at least 0. 0.4 is the paper's.

    Source: https://arxiv.org/abs/2507.20673
    """
    return Method(LogClip(width, width), GeometricMean(), aggregation=PER_SEQUENCE)


@_published("2602.10693")
def VESPO(
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> Method:
    """Weight tokens with a smooth function of the product W of their sequence's ratios.

    ``w = W^k·e^(λ·(1 − W))``, which is 1 at W = 1. Importance weights, if there are any, are factors of W. The loss is
    averaged over all tokens.

    Args:
        k_positive: k of sequences with A ≥ 0, above 0. 2 is TRL's default (1.16).
        lambda_positive: λ of sequences with A ≥ 0, above 0. 3 is TRL's default (1.16).
        k_negative: k of sequences with A < 0, above 0. 3 is TRL's default (1.16).
        lambda_negative: λ of sequences with A < 0, above 0. 2 is TRL's default (1.16).

    Source: https://arxiv.org/abs/2602.10693
    """
    weight = GammaWeight(k_positive, lambda_positive, k_negative, lambda_negative)
    return Method(Unclipped(), weight, aggregation="token-mean")


@_published("2509.21282")
def PSPO(alpha: float = 0.1) -> Method:
    """Use the ratio of a mixture of the policy with the old policy, without a clip.

    The ratio is ``(1 − alpha)·r + alpha``, so ``w = (1 − alpha)·r``. The loss is averaged over all tokens.

    Args:
        alpha: Share of the old policy in the mixture, in [0, 1). 0.1 by default.

    Source: https://arxiv.org/abs/2509.21282
    """
    return Method(Unclipped(), Smoothed(alpha), aggregation="token-mean")


@_published("2603.14389")
def DGPO(power: float = 1.0, root: float = 2.0, low: float = 0.2, high: float = 0.2) -> Method:
    """Let the weight of blocked tokens continue as a power of the ratio, in place of dropping them.

    ``w = r·(r/(1 − low))^power`` if A < 0 and r < 1 − low, ``r·((1 + high)/r)^(1/root)`` if A > 0 and r > 1 + high,
    and ``r`` otherwise. The loss is averaged over all tokens.

    Args:
        power: Exponent below the lower bound, above 0. 1 by default.
        root: Root above the upper bound, above 0. 2 by default; 1 keeps the weight 1 + high.
        low: Distance of the lower bound from 1, in [0, 1]. 0.2 is verl's default (0.9), which the script leaves.
        high: Distance of the upper bound from 1, at least 0. 0.2 is verl's default (0.9), which the script leaves.

    Source: https://arxiv.org/abs/2603.14389
    """
    return Method(FixedClip(low, high), DecoupledDecay(power, root), aggregation="token-mean")


@_published("2602.17550")
def MASPO(sigma: float = 1.0, rarity: float = 0.3, gain: float = 0.03, loss: float = 0.03) -> Method:
    """Replace the clip by a Gaussian of the ratio that is wider for rare tokens and large advantages.

    ``w = r·exp(−(r − 1)²/(2·s²))`` if the ratio has moved the way the advantage pushes, else ``r``. The width is
    ``s = min(sigma·p^(−rarity), 10)``, multiplied by ``1 + gain·A`` if A > 0 and divided by ``1 + loss·|A|`` if A < 0.
    The loss is averaged over all tokens.

    Args:
        sigma: Width for a token with p = 1, above 0. 1 by default.
        rarity: Exponent with which the width grows for rare tokens, above 0. 0.3 by default.
        gain: Increase of the width with A > 0, above 0. 0.03 by default.
        loss: Decrease of the width with A < 0, above 0. 0.03 by default.

    Source: https://arxiv.org/abs/2602.17550; the limit of 10 is that of the authors' code
    """
    return Method(Unclipped(), MassAdaptiveGate(sigma, rarity, gain, loss), aggregation="token-mean")


@_published("2603.16929")
def MHPO() -> Method:
    """Replace the clip by a bounded log-ratio ψ and a penalty ζ, the hazard, that grows as ψ moves away from 0.

    ``w = exp(ψ − ζ)/cosh²(log r/1.5)`` with ``ψ = 1.5·tanh(log r/1.5)`` and
    ``ζ = softplus(ψ)^1.5 + (softplus(−ψ)/0.8)²``. It is 0.265 at r = 1. The loss is averaged per sequence, then over
    sequences. For other numbers write ``Method(Unclipped(), HazardGate(...), aggregation="seq-mean-token-mean")``.

    Source: https://arxiv.org/abs/2603.16929
    """
    return Method(Unclipped(), HazardGate(), aggregation=PER_SEQUENCE)


@_published("2503.14286")
def TOPR() -> Method:
    """Use the plain policy gradient for A > 0, and weight the others with their sequence's ratio, at most 1.

    ``w = 1`` if A > 0, else ``min(W, 1)``, where ``W = π(y)/π_old(y)`` is the product of the ratios of all tokens of
    the sequence y. Importance weights, if there are any, are factors of W. The loss is averaged per sequence, then over
    sequences.

    `TokenTOPR` is ROLL's form, with the ratio of each token. A form with the geometric mean over the sequence, as
    proposed for verl (#6986), is ``Method(FixedClip(1.0, 0.0), SelfAnchored(ClippedWeight()), "sequence",
    "seq-mean-token-mean")``.

    Source: https://arxiv.org/abs/2503.14286, equation 8; the average is that of its experiments

    >>> logp_old = torch.full((1, 2), 0.08).log()
    >>> logp = torch.tensor([[0.04, 0.12]]).log()
    >>> tokens = Batch.read(logp, logp_old, -torch.ones(1)).tokens(TOPR().clip)
    >>> TOPR().weight(tokens)  # the product of ½ and 1½
    tensor([[0.7500, 0.7500]])
    """
    return Method(Unclipped(), SelfAnchored(SequenceProduct(1.0)), aggregation=PER_SEQUENCE)


@_published("2503.14286")
def TokenTOPR() -> Method:
    """Use the plain policy gradient for A > 0, and limit the ratio of each other token to at most 1.

    ``w = 1`` if A > 0, else ``min(r, 1)``. The loss is averaged per sequence, then over sequences.

    This is the ``topr`` of ROLL (version 0.2.0, February 2026), which takes the sign of the sequence's score in place
    of that of A. The paper's method, with the ratio of the whole sequence, is `TOPR`.

    Source: https://arxiv.org/abs/2503.14286, in the form of ROLL's ``pg_variant: topr``

    >>> logp_old = torch.full((1, 2), 0.08).log()
    >>> logp = torch.tensor([[0.04, 0.12]]).log()
    >>> tokens = Batch.read(logp, logp_old, -torch.ones(1)).tokens(TokenTOPR().clip)
    >>> TokenTOPR().weight(tokens)  # the ratios are ½ and 1½
    tensor([[0.5000, 1.0000]])
    """
    return Method(FixedClip(1.0, 0.0), SelfAnchored(ClippedWeight()), aggregation=PER_SEQUENCE)


@_published("2512.01374")
def MiniRL(low: float = 0.2, high: float = 0.27, max_weight: float = 5.0) -> Method:
    """Clip token ratios to [1 − low, 1 + high], and weight with the ratio to the policy that sampled.

    ``w = min(π/π_rollout, max_weight)``, and 0 for a blocked token: A > 0 and r > 1 + high, or A < 0 and r < 1 − low.
    The bounds refer to ``r = π/π_old``, the weight to the rollout engine's policy. The loss is summed over the tokens
    of a sequence, then averaged over sequences.

    The engine enters by importance weights ``c = π_old/π_rollout``, one per token: ``π/π_rollout = r·c``. Pass
    ``weights=rollout_weights(logp_old, logp_rollout, upper=inf)`` to `policy_loss`. In TRL set
    ``vllm_importance_sampling_mode="token_truncate"``, in verl ``rollout_correction.rollout_is=token``, each with a
    threshold of 5. Without weights, the two policies count as one. The paper's advantage is the reward minus the
    group's mean, not divided by its standard deviation.

    Args:
        low: Distance of the lower bound from 1, in [0, 1]. 0.2 is the paper's.
        high: Distance of the upper bound from 1, at least 0. 0.27 is the paper's.
        max_weight: Largest weight, above 0; ``inf`` for none. 5 is the paper's.

    Source: https://arxiv.org/abs/2512.01374, equation 7 and section 4.2

    >>> logp_old, logp_rollout = torch.tensor([[0.08, 0.08]]).log(), torch.tensor([[0.04, 0.08]]).log()
    >>> logp = torch.tensor([[0.1, 0.1]]).log().requires_grad_()
    >>> weights = rollout_weights(logp_old, logp_rollout, upper=float("inf"))
    >>> loss = policy_loss(logp, logp_old, torch.tensor([1.0]), method=MiniRL(), weights=weights).loss
    >>> loss.backward()
    >>> logp.grad  # the ratios to the engine's policy are 2.5 and 1.25
    tensor([[-2.5000, -1.2500]])
    """
    return Method(FixedClip(low, high), RolloutSurrogate(max_weight), aggregation="seq-mean-token-sum")


@_published("2505.22617")
def KLCov(share: float = 0.002, coefficient: float = 1.0) -> Method:
    """Add a penalty on ``|log r|`` to the tokens that lower the entropy most, without a clip (KL-Cov).

    ``w = r``, and ``b = −coefficient·sign(log r)`` for the share of counted tokens with the largest
    ``(A − mean A)·(log π − mean log π)``, one token at least. The loss is averaged over all tokens.

    Args:
        share: Share of the tokens that have the penalty, in (0, 1]. 0.002 is that of the authors' script for 7B.
        coefficient: Factor of the penalty, above 0. 1 is that of the authors' script for 7B.

    Source: https://arxiv.org/abs/2505.22617
    """
    return Method(Unclipped(), CovariancePenalty(share, coefficient), aggregation="token-mean")


@_published("2505.22617")
def ClipCov(
    share: float = 0.0002,
    min_covariance: float = 1.0,
    max_covariance: float = 5.0,
    low: float = 1.0,
    high: float = 1.0,
) -> Method:
    """Drop a few randomly drawn tokens among those that lower the entropy much (Clip-Cov).

    ``w = r``, and 0 for a blocked or a drawn token. Tokens are drawn from those whose
    ``(A − mean A)·(log π − mean log π)`` lies between ``min_covariance`` and ``max_covariance`` and which are not
    blocked; see `CovarianceMask`. The loss is averaged over all tokens.

    All defaults are those of the authors' script, which clips ratios to [0, 2]. verl's ``clip_cov`` takes the clip from
    its configuration, [0.8, 1.2] by default.

    Args:
        share: Number of drawn tokens as a share of the counted tokens, in (0, 1]; one token at least.
        min_covariance: Lower limit of the product, exclusive.
        max_covariance: Upper limit of the product, exclusive; above ``min_covariance``.
        low: Distance of the lower bound from 1, in [0, 1].
        high: Distance of the upper bound from 1, at least 0.

    Source: https://arxiv.org/abs/2505.22617
    """
    objective = CovarianceMask(share, min_covariance, max_covariance, Surrogate())
    return Method(FixedClip(low, high), objective, aggregation="token-mean")


@_published("2405.19107")
def DRO(beta: float = 0.1) -> Method:
    """Use the plain policy gradient with a penalty of ``beta/2·(log r)²`` on every token.

    ``w = 1`` and ``b = −beta·log r``. The loss is averaged over all tokens. This is the form of verl and ROLL. The
    paper's has a learned value function, and one log-ratio per sequence.

    Args:
        beta: Twice the factor of the penalty, above 0. 0.1 is ROLL's default (0.2); verl 0.9 has none.

    Source: https://arxiv.org/abs/2405.19107
    """
    return Method(Unclipped(), LogRatioPenalty(beta / 2, Unweighted()), aggregation="token-mean")


@_published("2602.02276")
def PrimeRL(radius: float = 0.2, coefficient: float = 1e-3) -> Method:
    """Use prime-rl's default loss of April to August 2026: `DPPO`'s mask by total variation, Kimi-K2.5's penalty.

    ``w = r``, and 0 for a token with ``|π − π_old| > radius`` on the side to which the advantage pushes it. Every token
    has the penalty ``coefficient·(log r)²``, so ``b = −2·coefficient·log r``. The old policy is the rollout engine's.
    The loss is averaged over all tokens.

    It was prime-rl's default from 6 April 2026 (#2187; releases 0.6.0 to 0.8.0) to 27 August 2026, when #3418 removed
    it. The default since then is `IPO`.

    Args:
        radius: Largest change of a token's probability, above 0. 0.2 is that of these releases.
        coefficient: Factor of the penalty, above 0. 1e-3 is that of these releases.

    Source: https://arxiv.org/abs/2602.02276 for the penalty; for the mask, https://arxiv.org/abs/2602.04879
    """
    objective = LogRatioPenalty(coefficient, DropOutside(math.inf))
    clip = Band(TotalVariation(), radius, math.inf)
    return Method(clip, objective, aggregation="token-mean", old_policy="rollout")


@_published("2602.02276")
def IPO(radius: float = 0.1, coefficient: float = 1e-3) -> Method:
    """Use prime-rl's IPO: drop tokens whose probability has moved far, for both signs of A, and penalise ``log² r``.

    ``w = r``, and 0 for a token with ``|π − π_old| > radius``. Every token has the penalty ``coefficient·(log r)²``, so
    ``b = −2·coefficient·log r``. The old policy is the rollout engine's. The loss is averaged over all tokens.

    It has been prime-rl's default since 27 August 2026 (#3418), with the defaults below. Since 18 September 2026
    (#3586) prime-rl's own defaults are 0.3 and no penalty: ``IPO(0.3, 0)``. In March 2026 (#1930; the release 0.5.0) a
    first form was the default: ``IPO(0.2)``. The letters stand for INTELLECT policy optimization. Identity preference
    optimisation, which trains on pairs of answers, is another method.

    Args:
        radius: Largest change of a token's probability, above 0; prime-rl's ``eps``, formerly ``ipo_threshold``.
        coefficient: Factor of the penalty, at least 0; prime-rl's ``kl_tau``. 0 is no penalty.

    Source: prime-rl, https://github.com/PrimeIntellect-ai/prime-rl/pull/3418; for the penalty,
    https://arxiv.org/abs/2602.02276

    >>> logp_old = torch.full((1, 2), 0.08).log()
    >>> logp = torch.tensor([[0.16, 0.2]]).log()
    >>> tokens = Batch.read(logp, logp_old, -torch.ones(1)).tokens(IPO().clip)
    >>> IPO().weight(tokens)  # the probabilities moved by 0.08 and 0.12
    tensor([[2., 0.]])
    """
    _checks.number("coefficient", coefficient, "a finite number of at least 0", lambda x: 0 <= x < math.inf)
    objective: Objective = DropOutside(math.inf, both_sides=True)
    if coefficient != 0:
        objective = LogRatioPenalty(coefficient, objective)
    clip = Band(TotalVariation(), radius, math.inf)
    return Method(clip, objective, aggregation="token-mean", old_policy="rollout")


@_published("2512.02556")
def DeepSeekV32(max_kl: float = 0.5, low: float = 0.2, high: float = 0.2) -> Method:
    """Use GRPO without the sequences that have A < 0 and have drifted too far from the old policy.

    ``w = r``, and 0 for a blocked token, or if A < 0 and the mean of ``log π_old − log π`` over the sequence is above
    ``max_kl``. If the log-probabilities of the policy that sampled are passed as ``logp_anchor``, they replace
    ``log π_old`` in the mean and at the bounds; see `SequenceMask`. The loss is averaged per sequence, then over
    sequences.

    Args:
        max_kl: Largest mean (nats), above 0. The paper names none; 0.5 is the example in TRL's documentation, and slime
            has 1e-4.
        low: Distance of the lower bound from 1, in [0, 1]. 0.2 is PPO's.
        high: Distance of the upper bound from 1, at least 0. 0.2 is PPO's.

    Source: https://arxiv.org/abs/2512.02556
    """
    return Method(FixedClip(low, high), SequenceMask(max_kl, Surrogate()), aggregation=PER_SEQUENCE)


@_published("2512.23075")
def TRM(max_kl: float = 0.01, drift: str = "mean_k3") -> Method:
    """Drop whole sequences that have drifted too far from the rollout engine's policy, without a clip.

    ``w = r``, and 0 for all tokens of a sequence whose drift is above ``max_kl``. With ``l = log r``, the drift is the
    mean of ``e^l − 1 − l`` over the sequence for ``mean_k3``, the mean of ``−l`` for ``mean_k1``, and the maximum of
    ``l²/2`` for ``max_k2``. The loss is averaged over all tokens.

    Args:
        max_kl: Largest drift (nats), above 0. 0.01 is that of verl's preset.
        drift: ``mean_k1``, ``mean_k3`` or ``max_k2``. ``mean_k3`` is that of verl's preset; ``max_k2`` is closer to
            the paper's bound on every token.

    Source: https://arxiv.org/abs/2512.23075
    """
    objective = SequenceMask(max_kl, Surrogate(), drift, both_signs=True)
    return Method(Unclipped(), objective, aggregation="token-mean", old_policy="rollout")


@_published("2603.19835")
def FIPO(
    low: float = 0.2,
    high: float = 0.28,
    dual_clip: float = 10.0,
    decay: float = 32.0,
    boost: float = 0.2,
    safety_ratio: float = math.inf,
) -> Method:
    """Clip token ratios, and raise the weight of tokens if they and the tokens after them have gained probability.

    The weight is ``w = c·r``, and 0 for a blocked token, or if A < 0 and r > dual_clip. The factor is ``c = e^F``,
    clamped to [1, 1 + boost], where F is the sum of ``2^(−d/decay)·log r`` over the token and those after it in the
    sequence, and d is the distance in tokens. Tokens with r > dual_clip add nothing to F; see `FutureKL`. The loss is
    averaged over all tokens. The defaults are those of the authors' script for 32B.

    Args:
        low: Distance of the lower bound from 1, in [0, 1].
        high: Distance of the upper bound from 1, at least 0.
        dual_clip: Ratio above which tokens with A < 0 lose their gradient, above 1.
        decay: Distance, in tokens, at which a later token counts half, above 0.
        boost: Largest relative increase of a weight, above 0.
        safety_ratio: Ratio above which the weight of a token with A < 0 is not raised, above 0. The authors' script has
            10, which is also its dual clip, so it has no effect there, and the default is ``inf``. ms-swift has 4 by
            default.

    Source: https://arxiv.org/abs/2603.19835
    """
    objective = FutureKL(decay, boost, dual_clip, DualClip(dual_clip, Surrogate()), safety_ratio)
    return Method(FixedClip(low, high), objective, aggregation="token-mean")
