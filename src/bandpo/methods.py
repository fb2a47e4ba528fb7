"""Methods: the names that papers give to a clip rule and an objective together.

A method is used and written like a rule: ``policy_loss(..., method=DPPO())``, ``method="SAPO(1.0, 1.05)"``. A clip rule
alone is a method too: PPO's surrogate on its interval.

| method | source | clip rule | objective |
|---|---|---|---|
| PPO | arXiv 1707.06347 | ``FixedClip(0.2, 0.2)`` | `Surrogate` |
| `GRPO` | 2402.03300 | ``FixedClip(0.2, 0.2)`` | `Surrogate` |
| `DAPO` (Clip-Higher) | 2503.14476 | ``FixedClip(0.2, 0.28)`` | `Surrogate` |
| `BandPO` | 2603.04918 | ``Band(KL(), 0.05, 10)`` | ``DualClip(10)`` |
| `BandAbove` | 2603.04918, in part | ``Sides(FixedClip(0.2), Band(KL(), 0.05, 10))`` | `Surrogate` |
| DCPO | 2509.02333 | ``DCPO(0.16, 0.2)`` | `Surrogate` |
| TRGPPO | 1901.10314 | ``Union(Band(KL(), 0.05, inf), FixedClip(0.2))`` | `Surrogate` |
| dual clip | 1912.09729 | any | ``DualClip(3)`` |
| unbounded positive | | ``FixedClip(0.2, inf)`` | `Surrogate` |
| soft clip | | any | ``Surrogate(beyond=0.1)`` |
| rollback (PPO-RB) | 1903.07940 | ``FixedClip(0.2)`` | ``Surrogate(beyond=-0.3)`` |
| tanh clip | OpenMOSS/BandPO | any | ``SoftClip(0.9)`` |
| tanh from bound to bound | OpenMOSS/BandPO | any | `MiddleTanh` |
| tanh rollback | OpenMOSS/BandPO | any | ``Rollback(0.05, 0.2)`` |
| `DPPO` | 2602.04879 | ``Band(KL(), 0.05, inf)`` | ``Masked(20)`` |
| `IcePop` | 2510.18855 | ``FixedClip(0.5, 4)`` | ``Masked(inf, both_sides=True)`` |
| prime-rl's ``ipo`` | | ``Band(TotalVariation(), 0.1, inf)`` | ``Masked(inf, both_sides=True)`` |
| `CISPO` | 2506.13585 | ``FixedClip(1, 4)`` | `ClippedWeight` |
| `GPPO`, `CEGPPO` | 2508.07629, 2509.20712 | ``FixedClip(0.2, 0.28)`` | `KeepBound` |
| `ASPO` | 2510.06062 | ``FixedClip(0.2)`` | `InverseRatio` |
| `UPGRPO` | 2607.06987 | ``FixedClip(0.2)`` | `SelfAnchored` |
| `SPO` (CFPO) | 2401.16025, 2601.22801 | ``FixedClip(0.2)`` | `Quadratic` |
| `DRPO` | 2606.09821 | none | `ProbabilityPenalty` |
| Band-KL with a penalty | ours | ``Band(KL(), 0.05)`` | `Quadratic` |
| `SAPO` | 2511.20347 | none | `SigmoidGate` |
| `BAPO` | 2510.18927 | its own, for each batch | `Balanced` |
| `GPG` | 2504.02546 | none | `Unweighted` |
| `GSPO` | 2507.18071 | ``FixedClip(3e-4, 4e-4)``, per sequence | `Surrogate` |
| `GMPO` | 2507.20673 | ``[e^−0.4, e^0.4]`` | `GeometricMean` |
| `VESPO` | 2602.10693 | none | `GammaWeight` |
| off-policy sequence mask | 2512.02556 | any | ``SequenceMask(0.5)`` around any |
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

from bandpo.divergences import KL, Divergence
from bandpo.objectives import (
    Balanced,
    ClippedWeight,
    DualClip,
    GammaWeight,
    GeometricMean,
    InverseRatio,
    KeepBound,
    Masked,
    Objective,
    ProbabilityPenalty,
    Quadratic,
    SelfAnchored,
    SigmoidGate,
    Surrogate,
    Unweighted,
)
from bandpo.rules import Band, ClipRule, FixedClip, Sides, Unclipped

__all__ = [
    "ASPO", "BAPO", "CEGPPO", "CISPO", "DAPO", "DPPO", "DRPO", "GMPO", "GPG", "GPPO", "GRPO", "GSPO", "SAPO", "SPO",
    "UPGRPO", "VESPO", "BandAbove", "BandPO", "IcePop", "Method", "Parts",
]  # fmt: skip


class Parts(NamedTuple):
    """What a method is made of."""

    clip: ClipRule = Band()
    """Which ratios are inside."""
    objective: Objective = Surrogate()
    """What the loss makes of them."""
    level: str = "token"
    """Whether ratios are formed per ``token`` or per ``sequence``, see `bandpo.policy_loss`."""
    aggregation: str = "token-mean"
    """How `bandpo.policy_loss` averages where it is not told; trainers average in their own way."""


class Method(ABC):
    """A named combination; a frozen dataclass with one method."""

    def __post_init__(self) -> None:
        self.parts()  # refuses a bad value where it is written, not at the first batch

    @abstractmethod
    def parts(self) -> Parts:
        """The rule, the objective, the level and the average that the paper fixes."""


@dataclass(frozen=True)
class GRPO(Method):
    """PPO's clip, averaged per sequence.

    Source: arXiv 2402.03300.
    """

    low: float = 0.2
    high: float = 0.2

    def parts(self) -> Parts:
        return Parts(FixedClip(self.low, self.high), aggregation="seq-mean-token-mean")


@dataclass(frozen=True)
class DAPO(Method):
    """Clip-Higher: a wider upper side.

    Source: arXiv 2503.14476.
    """

    low: float = 0.2
    high: float = 0.28

    def parts(self) -> Parts:
        return Parts(FixedClip(self.low, self.high))


@dataclass(frozen=True)
class BandPO(Method):
    """Band as its paper runs it, with a cap and a dual clip of 10.

    Source: arXiv 2603.04918.
    """

    divergence: Divergence = KL()
    radius: float | None = None  # None: the divergence's own
    max_ratio: float = 10.0
    dual_clip: float = 10.0

    def parts(self) -> Parts:
        return Parts(
            Band(self.divergence, self.radius, self.max_ratio),
            DualClip(self.dual_clip),
            aggregation="seq-mean-token-mean",
        )


@dataclass(frozen=True)
class BandAbove(Method):
    """Band above, a fixed clip below: room for rare winners, and none for rare losers to vanish in.

    Made for many updates on a batch: more than momentum outlasts, about ten with Adam. docs/when.md has what was
    measured and its limits. With fewer updates it brings nothing that shows.

    Source: the upper side is that of arXiv 2603.04918; one side alone is our own.

    >>> bounds = BandAbove().parts().clip.bounds(torch.tensor([0.08]).log())
    >>> bounds.lower, bounds.upper
    (tensor([0.8000]), tensor([2.4106]))
    """

    divergence: Divergence = KL()
    radius: float | None = None  # None: the divergence's own
    low: float = 0.2
    max_ratio: float = 10.0

    def parts(self) -> Parts:
        return Parts(
            Sides(lower=FixedClip(self.low), upper=Band(self.divergence, self.radius, self.max_ratio)),
            aggregation="seq-mean-token-mean",
        )


@dataclass(frozen=True)
class DPPO(Method):
    """Drop the gradient outside of a divergence's trust region; bounds surround the rollout engine's policy.

    Source: arXiv 2602.04879; 20 as in verl.
    """

    divergence: Divergence = KL()
    radius: float | None = None  # None: the divergence's own
    max_weight: float = 20.0

    def parts(self) -> Parts:
        return Parts(
            Band(self.divergence, self.radius, math.inf),
            Masked(self.max_weight),
        )


@dataclass(frozen=True)
class IcePop(Method):
    """Drop a token wherever its ratio to the rollout engine is outside, whatever the advantage's sign.

    This is the form on the moving ratio, with the engine's log-probabilities as ``logp_old``. The paper's own form is a
    constant factor π_old/π_engine, 0 outside of the interval: give that as ``weights``.

    Source: arXiv 2510.18855; the interval [0.5, 5] as in verl.
    """

    low: float = 0.5
    high: float = 4.0

    def parts(self) -> Parts:
        return Parts(FixedClip(self.low, self.high), Masked(math.inf, both_sides=True))


@dataclass(frozen=True)
class CISPO(Method):
    """Weight with the clipped ratio; no token loses its gradient.

    Source: arXiv 2506.13585.
    """

    low: float = 1.0
    high: float = 4.0

    def parts(self) -> Parts:
        return Parts(FixedClip(self.low, self.high), ClippedWeight())


@dataclass(frozen=True)
class GPPO(Method):
    """Blocked tokens keep a gradient of the bound's size.

    Source: arXiv 2508.07629.
    """

    low: float = 0.2
    high: float = 0.28

    def parts(self) -> Parts:
        return Parts(FixedClip(self.low, self.high), KeepBound())


@dataclass(frozen=True)
class CEGPPO(Method):
    """CE-GPPO: blocked tokens keep a share of the bound, ``keep_low`` below and ``keep_high`` above.

    Source: arXiv 2509.20712.
    """

    keep_low: float = 0.75
    keep_high: float = 1.0
    low: float = 0.2
    high: float = 0.28

    def parts(self) -> Parts:
        return Parts(FixedClip(self.low, self.high), KeepBound(self.keep_low, self.keep_high))


@dataclass(frozen=True)
class ASPO(Method):
    """Weight tokens with a positive advantage by the inverse ratio.

    Source: arXiv 2510.06062.
    """

    epsilon: float = 0.2
    max_weight: float = 3.0

    def parts(self) -> Parts:
        return Parts(FixedClip(self.epsilon, self.epsilon), InverseRatio(self.max_weight))


@dataclass(frozen=True)
class UPGRPO(Method):
    """UP-GRPO: positive advantages without ratio, PPO's lower clip for the others.

    Source: arXiv 2607.06987.
    """

    epsilon: float = 0.2

    def parts(self) -> Parts:
        return Parts(FixedClip(self.epsilon, self.epsilon), SelfAnchored(), aggregation="seq-mean-token-mean")


@dataclass(frozen=True)
class SPO(Method):
    """A quadratic penalty in place of the clip; per token also known as CFPO (arXiv 2601.22801).

    Source: arXiv 2401.16025.
    """

    epsilon: float = 0.2

    def parts(self) -> Parts:
        return Parts(FixedClip(self.epsilon, self.epsilon), Quadratic())


@dataclass(frozen=True)
class DRPO(Method):
    """A quadratic penalty on the move of the probability.

    Source: arXiv 2606.09821.
    """

    delta: float = 12.5

    def parts(self) -> Parts:
        return Parts(Unclipped(), ProbabilityPenalty(self.delta))


@dataclass(frozen=True)
class SAPO(Method):
    """A smooth gate in place of the clip, with a temperature for each sign of the advantage.

    Source: arXiv 2511.20347.
    """

    positive: float = 1.0
    negative: float = 1.05

    def parts(self) -> Parts:
        return Parts(
            Unclipped(), SigmoidGate(self.positive, self.negative), aggregation="seq-mean-token-mean"
        )


@dataclass(frozen=True)
class BAPO(Method):
    """Bounds that widen until positive advantages carry ``share`` of the loss.

    Source: arXiv 2510.18927.
    """

    share: float = 0.5

    def parts(self) -> Parts:
        return Parts(Unclipped(), Balanced(self.share))


@dataclass(frozen=True)
class GPG(Method):
    """REINFORCE: no ratio, no clip.

    Source: arXiv 2504.02546.
    """

    def parts(self) -> Parts:
        return Parts(Unclipped(), Unweighted())


@dataclass(frozen=True)
class GSPO(Method):
    """PPO's clip on the sequence's geometric mean ratio.

    Source: arXiv 2507.18071.
    """

    low: float = 3e-4
    high: float = 4e-4

    def parts(self) -> Parts:
        return Parts(FixedClip(self.low, self.high), level="sequence", aggregation="seq-mean-token-mean")


@dataclass(frozen=True)
class GMPO(Method):
    """The geometric mean of clipped token ratios; ``width`` is that of the interval in log r, to both sides.

    Source: arXiv 2507.20673.
    """

    width: float = 0.4

    def parts(self) -> Parts:
        return Parts(
            FixedClip(-math.expm1(-self.width), math.expm1(self.width)),
            GeometricMean(),
            aggregation="seq-mean-token-mean",
        )


@dataclass(frozen=True)
class VESPO(Method):
    """A smooth weight of the whole sequence's ratio.

    Source: arXiv 2602.10693.
    """

    k_positive: float = 2.0
    lambda_positive: float = 3.0
    k_negative: float = 3.0
    lambda_negative: float = 2.0

    def parts(self) -> Parts:
        return Parts(
            Unclipped(),
            GammaWeight(self.k_positive, self.lambda_positive, self.k_negative, self.lambda_negative),
        )
