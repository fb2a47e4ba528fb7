"""Methods: what a paper's name stands for, as a clip rule, an objective, the level of its ratios and its average.

A method is used and written like a rule: ``policy_loss(..., method=DPPO())``, ``method="SAPO(1.0, 1.05)"``. A clip rule
alone is a method too: PPO's surrogate on its interval. `METHODS` is the table of papers, from which the page
docs/which-method.md and the tests come. A method of your own is a function that returns a `Method`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec

from bandpo import _checks
from bandpo.batch import Batch, Tokens, known_level
from bandpo.divergences import KL, Divergence, TotalVariation
from bandpo.errors import InvalidType, InvalidValue
from bandpo.objectives import (
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
    SelfAnchored,
    SequenceMask,
    SigmoidGate,
    Smoothed,
    Surrogate,
    Unweighted,
)
from bandpo.objectives.base import is_objective
from bandpo.rules import Band, ClipRule, FixedClip, LogClip, TwoSided, Unclipped
from bandpo.schedules import Varies
from bandpo.token_rules import BalancedBounds, PrefixBudget, SecondMoment

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

__all__ = [
    "ASPO", "BAPO", "CEGPPO", "CISPO", "CPPO", "DAPO", "DGPO", "DPPO", "DRO", "DRPO", "FIPO", "GMPO", "GPG", "GPPO",
    "GRPO", "GSPO", "M2PO", "MASPO", "METHODS", "MHPO", "PPO", "PSPO", "SAPO", "SPO", "TOPR", "TRM", "UPGRPO",
    "VESPO", "BandAbove", "BandPO", "ClipCov", "DeepSeekV32", "IcePop", "KLCov", "Method", "PrimeRL",
]  # fmt: skip

PER_SEQUENCE = "seq-mean-token-mean"
P = ParamSpec("P")


@dataclass(frozen=True)
class Method(Varies):
    """A whole method; immutable. Two are equal if they are made of the same, whatever they are called.

    The dual clip, how importance weights enter and over which tokens sums run are the objective's.

    Raises:
        TypeError: ``clip`` is no clip rule, or ``objective`` no objective.
        ValueError: ``level``, ``bound_level`` or ``old_policy`` is unknown.

    >>> Method(FixedClip(0.2), DropOutside())
    Method(clip=FixedClip(low=0.2, high=0.2), objective=DropOutside(max_weight=20.0, both_sides=False))
    >>> CISPO()
    CISPO(low=1.0, high=4.0)
    """

    # Made when asked for: older compilers break the graph at defaults that are objects of ours.
    clip: ClipRule = field(default_factory=Band)
    """Which ratios are inside."""
    objective: Objective = None  # pyright: ignore  (until __post_init__: compilers break the graph at a factory)
    """What the loss makes of them."""
    level: str = "token"
    """Whether ratios are formed per ``token`` or per ``sequence``, see `bandpo.policy_loss`."""
    aggregation: str | None = None
    """How the loss is averaged, see `bandpo.aggregate`; None leaves it to the loop or the trainer."""
    bound_level: str | None = None
    """The level of the ratio that the rule bounds, where that is not ``level``."""
    old_policy: str = "trainer"
    """Whose log-probabilities are ``logp_old``: the ``trainer``'s own, or the ``rollout`` engine's."""
    call: tuple[str, dict[str, Any]] | None = field(default=None, init=False, repr=False, compare=False)
    """The name and the arguments of a paper's method; None for one that no paper names."""

    def __post_init__(self) -> None:
        if _checks.is_a(self.objective, NoneType):
            object.__setattr__(self, "objective", Surrogate())
        if not _checks.is_a(self.clip, ClipRule):
            raise InvalidType(f"clip must be a clip rule such as FixedClip(0.2), got {self.clip!r}")
        is_objective(self.objective)
        known_level(self.level)
        known_level(self.bound_level or self.level)
        if self.old_policy not in ("trainer", "rollout"):
            raise InvalidValue(f"old_policy must be 'trainer' or 'rollout', got {self.old_policy!r}")

    def __repr__(self) -> str:
        return self.written(repr)

    def written(self, part: Callable[[Any], str]) -> str:
        """How it is written: by its name if it has one, else by its rule if that is all, else by its parts.

        Args:
            part: How an argument is written.
        """
        if self.call is None and self.only_rule:
            return part(self.clip)
        name, arguments = self.call or ("Method", self._changed())
        return f"{name}({', '.join(f'{key}={part(value)}' for key, value in arguments.items())})"

    def _changed(self) -> dict[str, Any]:
        """Its clip rule, and what else is not the default."""
        plain = Method(self.clip)
        names = (f.name for f in fields(self) if f.compare)
        rest = {name: getattr(self, name) for name in names if getattr(self, name) != getattr(plain, name)}
        return {"clip": self.clip, **rest}

    def tokens(self, batch: Batch) -> Tokens:
        """A batch as its rule sees it, at its levels.

        Raises:
            ValueError: a number of the rule needs what the batch's state does not tell.
        """
        return batch.tokens(self.clip, self.level, self.bound_level)

    def weight(self, tokens: Tokens) -> Float[Tensor, "batch time"]:
        """The weight ``w`` of each token.

        Raises:
            ValueError: a number of the objective needs what the tokens' state does not tell.
        """
        return self.objective.resolve(tokens.state).weight(tokens)

    @property
    def whole_sequence(self) -> bool:
        """Whether a token's gradient depends on other tokens of its sequence, by the rule or by the objective."""
        return self.clip.whole_sequence or self.objective.whole_sequence

    @property
    def whole_batch(self) -> bool:
        """Whether a token's gradient depends on other sequences: the loss then needs all of an update at once."""
        return self.clip.whole_batch or self.objective.whole_batch

    @property
    def only_rule(self) -> bool:
        """Whether a clip rule is all of it: a trainer's own level, average and dual clip then stand beside it."""
        return self == Method(self.clip)


class Paper(NamedTuple):
    """A row of the table: a method by its name."""

    source: str
    """arXiv number; empty for what no paper has."""
    method: Callable[..., Method]


METHODS: dict[str, Paper] = {}
"""Every method here by its name."""


def _published(source: str) -> Callable[[Callable[P, Method]], Callable[P, Method]]:
    """Put a method into the table, and have what it returns say its name."""

    def decorate(function: Callable[P, Method]) -> Callable[P, Method]:
        signature, name = inspect.signature(function), function.__name__
        defaults = {key: parameter.default for key, parameter in signature.parameters.items()}

        def method(*args: P.args, **kwargs: P.kwargs) -> Method:
            made = function(*args, **kwargs)
            values = defaults | dict(zip(defaults, args, strict=False)) | kwargs
            object.__setattr__(made, "call", (name, values))
            return made

        method.__name__ = method.__qualname__ = name
        method.__doc__, method.__module__ = function.__doc__, function.__module__
        method.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
        METHODS[name] = Paper(source, method)
        return method

    return decorate


@_published("1707.06347")
def PPO(low: float = 0.2, high: float = 0.2) -> Method:
    """The clipped surrogate, averaged over all tokens."""
    return Method(FixedClip(low, high), aggregation="token-mean")


@_published("2402.03300")
def GRPO(low: float = 0.2, high: float = 0.2) -> Method:
    """PPO's clip, averaged per sequence."""
    return Method(FixedClip(low, high), aggregation=PER_SEQUENCE)


@_published("2503.14476")
def DAPO(low: float = 0.2, high: float = 0.28) -> Method:
    """Clip-Higher: a wider upper side."""
    return Method(FixedClip(low, high), aggregation="token-mean")


@_published("2603.04918")
def BandPO(
    divergence: Divergence = KL(),
    radius: float | None = None,
    max_ratio: float = 10.0,
    dual_clip: float = 10.0,
) -> Method:
    """Band as its paper runs it, with a cap and a dual clip of 10. A radius of None is the divergence's own."""
    return Method(
        Band(divergence, radius, max_ratio), DualClip(dual_clip, Surrogate()), aggregation=PER_SEQUENCE
    )


@_published("2603.04918")
def BandAbove(
    divergence: Divergence = KL(), radius: float | None = None, low: float = 0.2, max_ratio: float = 10.0
) -> Method:
    """Band above, a fixed clip below: rare winners may rise further, rare losers fall no faster.

    Made for stale data, and for many updates on a batch: where a clip blocks much of what rare winners could gain.
    docs/when.md has what was measured. The upper side is the paper's; one side alone is our own.

    >>> bounds = BandAbove().clip.bounds(torch.tensor([0.08]).log())
    >>> bounds.lower, bounds.upper
    (tensor([0.8000]), tensor([2.4106]))
    """
    return Method(TwoSided(FixedClip(low), Band(divergence, radius, max_ratio)), aggregation=PER_SEQUENCE)


@_published("2602.04879")
def DPPO(divergence: Divergence = KL(), radius: float | None = None, max_weight: float = 20.0) -> Method:
    """Drop the gradient outside of a divergence's trust region; bounds surround the rollout engine's policy.

    The weight's limit of 20 is what verl's loss asks for; what runs there is ``clip_ratio_c``, 3 unless it is set. The
    authors' own code asks for 10, their example in verl for 10,000, and SkyRL and prime-rl have none: ``math.inf``.
    """
    clip = Band(divergence, radius, math.inf)
    return Method(clip, DropOutside(max_weight), aggregation="token-mean", old_policy="rollout")


@_published("2510.18855")
def IcePop(low: float = 0.5, high: float = 4.0) -> Method:
    """Drop a token wherever its ratio to the rollout engine is outside, whatever the advantage's sign.

    This is the form on the moving ratio, with the engine's log-probabilities as ``logp_old``: GLM-5's loss (arXiv
    2602.15763). Interval [0.5, 5] and average are IcePop's, whose paper has PPO's clip beside a constant factor
    π_old/π_engine, 0 outside of the interval: for that write ``GRPO()`` and give the factor as ``weights``.
    """
    objective = DropOutside(math.inf, both_sides=True)
    return Method(FixedClip(low, high), objective, aggregation=PER_SEQUENCE, old_policy="rollout")


@_published("2506.13585")
def CISPO(low: float = 1.0, high: float = 4.0) -> Method:
    """Weight with the clipped ratio; no token loses its gradient."""
    return Method(FixedClip(low, high), ClippedWeight(), aggregation="token-mean")


@_published("2508.07629")
def GPPO(low: float = 0.2, high: float = 0.28, dual_clip: float = 10.0) -> Method:
    """Blocked tokens keep a gradient of the bound's size.

    As its authors' scripts run it, with a dual clip of 10; the paper's formula has none (``math.inf``).
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
    """CE-GPPO: blocked tokens keep a share of the bound, ``keep_low`` below and ``keep_high`` above.

    As its authors' script for 7B runs it, with a dual clip of 10; the paper's formula has none (``math.inf``). For
    1.5B the script has ``keep_low=0.5``.
    """
    objective = DualClip(dual_clip, KeepBound(keep_low, keep_high))
    return Method(FixedClip(low, high), objective, aggregation="token-mean")


@_published("2510.06062")
def ASPO(epsilon: float = 0.2, max_weight: float = 3.0) -> Method:
    """Weight tokens with a positive advantage by the inverse ratio."""
    return Method(FixedClip(epsilon), InverseRatio(max_weight), aggregation="token-mean")


@_published("2607.06987")
def UPGRPO(epsilon: float = 0.2) -> Method:
    """UP-GRPO: positive advantages without ratio, PPO's lower clip for the others."""
    return Method(FixedClip(epsilon), SelfAnchored(Surrogate()), aggregation=PER_SEQUENCE)


@_published("2401.16025")
def SPO(epsilon: float = 0.2) -> Method:
    """A quadratic penalty in place of the clip; per token also known as CFPO (arXiv 2601.22801)."""
    return Method(FixedClip(epsilon), Quadratic(), aggregation="token-mean")


@_published("2606.09821")
def DRPO(delta: float = 12.5) -> Method:
    """A quadratic penalty on the move of the probability."""
    return Method(Unclipped(), ProbabilityPenalty(delta), aggregation="token-mean")


@_published("2511.20347")
def SAPO(positive: float = 1.0, negative: float = 1.05) -> Method:
    """A smooth gate in place of the clip, with a temperature for each sign of the advantage."""
    return Method(Unclipped(), SigmoidGate(positive, negative), aggregation=PER_SEQUENCE)


@_published("2510.18927")
def BAPO(share: float = 0.5, dual_clip: float = 3.0) -> Method:
    """Bounds that widen until positive advantages carry ``share`` of the loss.

    Ranges are the paper's; order, steps, sums and the dual clip of 3 its authors' code's, see `BalancedBounds`. Their
    ``adv_ratio_target`` is ``share/(1 − share)``.
    """
    return Method(BalancedBounds(share), DualClip(dual_clip, Surrogate()), aggregation="token-mean")


@_published("2510.01161")
def M2PO(threshold: float = 0.04) -> Method:
    """Drop the tokens that have moved furthest, until the mean of ``(log r)²`` is small enough, see `SecondMoment`."""
    return Method(SecondMoment(threshold), DropOutside(math.inf), aggregation="token-mean")


@_published("2606.10968")
def CPPO(radius: float = 0.15, budget: float = 0.02, last_weight: float = 0.8) -> Method:
    """DPPO's trust region by total variation, narrower for early tokens and as the prefix moves, see `PrefixBudget`.

    Numbers are the paper's for dense models; for a mixture of experts it has a radius of 0.2. The average is that of
    the authors' code.
    """
    band = Band(TotalVariation(), radius, math.inf)
    clip = PrefixBudget(band, budget, last_weight)
    return Method(clip, DropOutside(math.inf), aggregation="token-mean", old_policy="rollout")


@_published("2504.02546")
def GPG() -> Method:
    """REINFORCE: no ratio, no clip."""
    return Method(Unclipped(), Unweighted(), aggregation="token-mean")


@_published("2507.18071")
def GSPO(low: float = 3e-4, high: float = 4e-4) -> Method:
    """PPO's clip on the sequence's geometric mean ratio."""
    return Method(FixedClip(low, high), level="sequence", aggregation=PER_SEQUENCE)


@_published("2507.20673")
def GMPO(width: float = 0.4) -> Method:
    """The geometric mean of clipped token ratios; ``width`` is that of the interval in log r, to both sides."""
    return Method(LogClip(width, width), GeometricMean(), aggregation=PER_SEQUENCE)


@_published("2602.10693")
def VESPO(
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> Method:
    """A smooth weight of the whole sequence's ratio."""
    weight = GammaWeight(k_positive, lambda_positive, k_negative, lambda_negative)
    return Method(Unclipped(), weight, aggregation="token-mean")


@_published("2509.21282")
def PSPO(alpha: float = 0.1) -> Method:
    """The ratio of a policy mixed with the old one, and no clip: the unclipped gradient times ``1 − alpha``."""
    return Method(Unclipped(), Smoothed(alpha), aggregation="token-mean")


@_published("2603.14389")
def DGPO(power: float = 1.0, root: float = 2.0, low: float = 0.2, high: float = 0.2) -> Method:
    """Beyond the clip's bounds a weight that goes on as a power of the ratio, see `DecoupledDecay`."""
    return Method(FixedClip(low, high), DecoupledDecay(power, root), aggregation="token-mean")


@_published("2602.17550")
def MASPO(sigma: float = 1.0, rarity: float = 0.3, gain: float = 0.03, loss: float = 0.03) -> Method:
    """A Gaussian in place of a clip, wider for rare tokens and large advantages, see `MassAdaptiveGate`."""
    return Method(Unclipped(), MassAdaptiveGate(sigma, rarity, gain, loss), aggregation="token-mean")


@_published("2603.16929")
def MHPO() -> Method:
    """A bent log-ratio and a hazard in place of a clip, see `HazardGate`."""
    return Method(Unclipped(), HazardGate(), aggregation=PER_SEQUENCE)


@_published("2503.14286")
def TOPR(level: str = "token") -> Method:
    """REINFORCE where A > 0, and the ratio cut at 1 as weight elsewhere.

    Per token, as in ROLL and trinity; the paper's ratio is the product over a sequence, which no level here is.
    """
    objective = SelfAnchored(ClippedWeight())
    return Method(FixedClip(1.0, 0.0), objective, level, PER_SEQUENCE)


@_published("2505.22617")
def KLCov(share: float = 0.002, coefficient: float = 1.0) -> Method:
    """KL-Cov: no clip, and a pull back to the old policy for the tokens that cost most entropy."""
    return Method(Unclipped(), CovariancePenalty(share, coefficient), aggregation="token-mean")


@_published("2505.22617")
def ClipCov(
    share: float = 0.0002,
    min_covariance: float = 1.0,
    max_covariance: float = 5.0,
    low: float = 1.0,
    high: float = 1.0,
) -> Method:
    """Clip-Cov: drop a few of the tokens that cost much entropy, see `CovarianceMask`.

    All numbers are the authors' script's, which clips ratios to [0, 2]. verl's ``clip_cov`` has the clip of its
    configuration instead, [0.8, 1.2] by default.
    """
    objective = CovarianceMask(share, min_covariance, max_covariance, Surrogate())
    return Method(FixedClip(low, high), objective, aggregation="token-mean")


@_published("2405.19107")
def DRO(beta: float = 0.1) -> Method:
    """REINFORCE with a penalty of ``beta/2·(log r)²``.

    The form is verl's and ROLL's, whose default ``beta`` is. The paper's has a learned value, and one log-ratio for a
    sequence.
    """
    return Method(Unclipped(), LogRatioPenalty(beta / 2, Unweighted()), aggregation="token-mean")


@_published("2602.02276")
def PrimeRL(radius: float = 0.2, coefficient: float = 1e-3) -> Method:
    """prime-rl's default loss: DPPO's mask by total variation, and Kimi-K2.5's penalty on every token."""
    objective = LogRatioPenalty(coefficient, DropOutside(math.inf))
    clip = Band(TotalVariation(), radius, math.inf)
    return Method(clip, objective, aggregation="token-mean", old_policy="rollout")


@_published("2512.02556")
def DeepSeekV32(max_kl: float = 0.5, low: float = 0.2, high: float = 0.2) -> Method:
    """GRPO without sequences of A < 0 that have drifted too far, see `SequenceMask`.

    The paper names no ``max_kl``. That of 0.5 is the example in TRL's documentation; slime has 1e-4.
    """
    return Method(FixedClip(low, high), SequenceMask(max_kl, Surrogate()), aggregation=PER_SEQUENCE)


@_published("2512.23075")
def TRM(max_kl: float = 0.01, drift: str = "mean_k3") -> Method:
    """Trust Region Masking: no clip, and no sequence that has drifted from the rollout engine's policy.

    Limit and drift are those of verl's preset; ``max_k2`` is nearer to the paper's bound on every token.
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
    """PPO's clip, weights raised where the rest of the response gains, see `FutureKL`. As its script for 32B."""
    objective = FutureKL(decay, boost, dual_clip, DualClip(dual_clip, Surrogate()), safety_ratio)
    return Method(FixedClip(low, high), objective, aggregation="token-mean")
