"""Objectives whose weight falls smoothly with the ratio, in place of a clip."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from .. import _checks
from ..batch import Tokens, limit, limit_weight
from ..divergences import scaled_expm1
from ..objectives._products import log_product
from ..objectives.base import Objective, check_positive

__all__ = [
    "DecoupledDecay",
    "GammaWeight",
    "HazardGate",
    "MassAdaptiveGate",
    "ProbabilityPenalty",
    "Quadratic",
    "SigmoidGate",
    "Smoothed",
]


@dataclass(frozen=True)
class Quadratic(Objective):
    """SPO's objective: a quadratic penalty in place of a clip, with a gradient of 0 at the rule's bound.

    ``w = r·(1 − s·u)``, where ``s`` is the sign of A and ``u`` the position of the ratio in the rule's interval: 0 at
    r = 1, 1 at the upper bound, −1 at the lower one. A token beyond the bound is pulled back.

    Derivation: subtract from the surrogate ``r·A`` the penalty ``abs(A)·(r − 1)²/(2·h)``, where ``h`` is the width of
    the interval on that side, ``upper − 1`` or ``1 − lower``. The derivative with respect to r is
    ``A·(1 − s·(r − 1)/h)``, which is 0 at the bound that A pushes r to. So the surrogate is maximal at the edge of the
    trust region, instead of flat beyond it. Multiplied by ``dr/dlogp = r`` and divided by A, it is the weight above.

    With `FixedClip` it is SPO (arXiv 2401.16025; token by token CFPO, 2601.22801). With ``Band(TotalVariation(), δ)``
    u is ``(π − π_old)/δ``, and it is DRPO's penalty, see `ProbabilityPenalty`. With ``Band(KL(), δ)`` the gradient
    falls to 0 at the edge of the KL trust region; this form is our own, and we know of no paper that has it.

    >>> old, advantages = torch.full((1, 2), 0.08).log(), torch.ones(1, 2)
    >>> tokens = Batch.read(torch.tensor([[0.10, 0.16]]).log(), old, advantages).tokens(FixedClip(0.5, 0.5))
    >>> Quadratic().weight(tokens)  # the ratios 1.25 and 2 are at u = 0.5 and 2
    tensor([[ 0.6250, -2.0000]])
    """

    def weight(self, tokens: Tokens) -> Tensor:
        return limit_weight(tokens.ratio * (1 - tokens.advantages.sign() * tokens.interval_used))

    def surrogate(self, tokens: Tokens) -> Tensor:
        change = limit(torch.expm1(tokens.log_ratio_anchor))  # r − 1
        penalty = limit(change * tokens.interval_used / 2)
        return limit(tokens.ratio - tokens.advantages.sign() * penalty)


@dataclass(frozen=True)
class ProbabilityPenalty(Objective):
    """DRPO's objective: a quadratic penalty on the change of the token's probability.

    ``w = r·(1 − s·(π − π_old)/delta)``, where ``s`` is the sign of A. No clip rule is used. The objective equals
    `Quadratic` with ``Band(TotalVariation(), delta)`` if delta is below p and below 1 − p.

    Args:
        delta: Change of probability at which the gradient is 0, > 0. The paper uses 12.5. No probability changes by
            more than 1, so this lowers the gradient by at most 8 %.

    Source: arXiv 2606.09821.

    >>> old = torch.tensor([[0.08]]).log()
    >>> tokens = Batch.read(torch.tensor([[0.58]]).log(), old, torch.ones(1, 1)).tokens(Unclipped())
    >>> ProbabilityPenalty(1.0).weight(tokens) / tokens.ratio
    tensor([[0.5000]])
    """

    delta: float = 12.5

    def __post_init__(self) -> None:
        check_positive(delta=self.delta)

    def weight(self, tokens: Tokens) -> Tensor:
        return limit_weight(tokens.ratio * (1 - tokens.advantages.sign() * self._relative_change(tokens)))

    def surrogate(self, tokens: Tokens) -> Tensor:
        change = limit(torch.expm1(tokens.log_ratio_anchor))  # r − 1
        penalty = limit(change * self._relative_change(tokens) / 2)
        return limit(tokens.ratio - tokens.advantages.sign() * penalty)

    def _relative_change(self, tokens: Tokens) -> Tensor:
        """Compute (π − π_anchor)/delta of each token."""
        return limit(scaled_expm1(tokens.logp_anchor, tokens.log_ratio_anchor) / self.delta)


@dataclass(frozen=True)
class SigmoidGate(Objective):
    """SAPO's objective: a smooth gate in place of a clip, ``w = r·4·σ·(1 − σ)`` with ``σ = sigmoid(τ·(r − 1))``.

    The gate is 1 at r = 1 and falls smoothly on both sides. No clip rule is used.

    Args:
        positive: Temperature τ > 0 of tokens with A > 0.
        negative: Temperature τ > 0 of the others; larger than ``positive`` in the paper, so that they fade faster.

    Source: arXiv 2511.20347.

    >>> old, advantages = torch.full((1, 2), 0.08).log(), torch.ones(1, 2)
    >>> tokens = Batch.read(torch.tensor([[0.08, 0.16]]).log(), old, advantages).tokens(Unclipped())
    >>> SigmoidGate().weight(tokens)
    tensor([[1.0000, 1.5729]])
    """

    positive: float = 1.0
    negative: float = 1.05

    def __post_init__(self) -> None:
        check_positive(positive=self.positive, negative=self.negative)

    def weight(self, tokens: Tokens) -> Tensor:
        x = self._temperature(tokens) * (tokens.ratio - 1)
        # sigmoid(−x) is 1 − σ without the cancellation near σ = 1.
        # The factor 4 comes last, as 4·r may overflow where the product is 0.
        return tokens.ratio * torch.sigmoid(x) * torch.sigmoid(-x) * 4

    def surrogate(self, tokens: Tokens) -> Tensor:
        temperature = self._temperature(tokens)
        return torch.sigmoid(temperature * (tokens.ratio - 1)) * 4 / temperature

    def _temperature(self, tokens: Tokens) -> Tensor:
        """Return the temperature of each token by the sign of its advantage."""
        temperature = torch.full_like(tokens.ratio, self.negative)
        return temperature.masked_fill(tokens.advantages > 0, self.positive)


@dataclass(frozen=True)
class Smoothed(Objective):
    """PSPO's objective: the ratio of a mixture with the old policy, ``(1 − alpha)·r + alpha``, without a clip.

    ``w = (1 − alpha)·r``.

    Args:
        alpha: Share of the old policy in the mixture, in [0, 1).

    Source: arXiv 2509.21282.
    """

    alpha: float = 0.1

    def __post_init__(self) -> None:
        _checks.number("alpha", self.alpha, "in [0, 1)", lambda x: 0 <= x < 1)

    def weight(self, tokens: Tokens) -> Tensor:
        return (1 - self.alpha) * tokens.ratio

    def surrogate(self, tokens: Tokens) -> Tensor:
        return self.weight(tokens) + self.alpha


@dataclass(frozen=True)
class DecoupledDecay(Objective):
    """DGPO's objective: the weight of blocked tokens is a power of the ratio, continuous at the bound.

    With the bound c, ``w = r·(r/c)^power`` for tokens blocked below, ``r·(c/r)^(1/root)`` for those blocked above, and
    ``r`` otherwise.

    Args:
        power: Exponent below the lower bound, > 0.
        root: Root above the upper bound, > 0. With 1 the weight stays c; with a larger root it grows with the ratio.

    Source: arXiv 2603.14389.
    """

    power: float = 1.0
    root: float = 2.0

    def __post_init__(self) -> None:
        check_positive(power=self.power, root=self.root)

    def weight(self, tokens: Tokens) -> Tensor:
        log_ratio = tokens.log_ratio_anchor
        excess = log_ratio - log_ratio.clamp(tokens.bounds.log_lower, tokens.bounds.log_upper)
        powers = torch.full_like(log_ratio, self.power).masked_fill(tokens.blocked_high, -1 / self.root)
        return torch.where(tokens.blocked, tokens.ratio * (powers * excess).exp(), tokens.ratio)


@dataclass(frozen=True)
class MassAdaptiveGate(Objective):
    """MASPO's objective: a Gaussian of the ratio in place of a clip, wider for rare tokens and large advantages.

    ``w = r·exp(−(r − 1)²/(2·σ²))`` if the ratio has moved the way A pushes, else ``r``. With the old probability p, the
    width is ``σ = min(sigma·p^(−rarity), max_sigma)``, multiplied by ``1 + gain·A`` if A > 0 and divided by
    ``1 + loss·abs(A)`` if A < 0. No clip rule is used. All numbers are > 0.

    Args:
        sigma: Width for a token with p = 1.
        rarity: Exponent with which the width grows for rare tokens.
        gain: Increase of the width with A > 0.
        loss: Decrease of the width with A < 0.
        max_sigma: Largest width before the factor of A.

    Source: arXiv 2602.17550. ``max_sigma`` is that of its authors' code. The code also keeps the factor of A within
    [0.1, 10]; with the default ``gain`` and ``loss`` this has no effect up to an advantage of 300.
    """

    sigma: float = 1.0
    rarity: float = 0.3
    gain: float = 0.03
    loss: float = 0.03
    max_sigma: float = 10.0

    def __post_init__(self) -> None:
        check_positive(**{name: getattr(self, name) for name in self.__dataclass_fields__})

    def weight(self, tokens: Tokens) -> Tensor:
        sigma = (self.sigma * (-self.rarity * tokens.logp_old).exp()).clamp(max=self.max_sigma)
        positive = tokens.advantages.clamp(min=0.0)
        negative = tokens.advantages.clamp(max=0.0)
        sigma = sigma * (1 + self.gain * positive) / (1 - self.loss * negative)
        change = torch.expm1(tokens.log_ratio)  # r − 1
        gate = (-(change / sigma).square() / 2).exp()
        return torch.where(change * tokens.advantages > 0, tokens.ratio * gate, tokens.ratio)


@dataclass(frozen=True)
class HazardGate(Objective):
    """MHPO's objective: a bounded log-ratio ψ and a penalty ζ, the hazard, in place of a clip.

    ``w = exp(ψ − ζ)/cosh²(log r/reach)`` with ``ψ = reach·tanh(log r/reach)``. The hazard
    ``ζ = (softplus(ψ)/rise_scale)^rise_shape + (softplus(−ψ)/fall_scale)^fall_shape`` grows on both sides. It is not
    differentiated: a loss that differentiates ζ has another gradient at 97 % of the tokens. At r = 1 the weight is
    0.265, not 1. No clip rule is used. All numbers are > 0.

    Args:
        reach: Limit of ``abs(ψ)``.
        rise_shape: Exponent of the hazard for r > 1.
        rise_scale: Scale of the hazard for r > 1.
        fall_shape: Exponent of the hazard for r < 1.
        fall_scale: Scale of the hazard for r < 1.

    Source: arXiv 2603.16929.
    """

    reach: float = 1.5
    rise_shape: float = 1.5
    rise_scale: float = 1.0
    fall_shape: float = 2.0
    fall_scale: float = 0.8

    def __post_init__(self) -> None:
        check_positive(**{name: getattr(self, name) for name in self.__dataclass_fields__})

    def weight(self, tokens: Tokens) -> Tensor:
        return self.surrogate(tokens) / torch.cosh(tokens.log_ratio / self.reach).square()

    def surrogate(self, tokens: Tokens) -> Tensor:
        psi = self.reach * torch.tanh(tokens.log_ratio / self.reach)
        rise = (softplus(psi) / self.rise_scale) ** self.rise_shape
        fall = (softplus(-psi) / self.fall_scale) ** self.fall_shape
        return (psi - rise - fall).exp()


@dataclass(frozen=True)
class GammaWeight(Objective):
    """VESPO's objective: every token of a sequence has the weight ``φ(W) = e^λ·W^k·e^(−λ·W)``.

    ``W = exp(sum of log(r·c))`` is the product over the sequence's tokens, where ``c`` is the token's importance weight
    if there are any. φ is 1 at W = 1 and falls to 0 on both sides of its maximum at k/λ. No clip rule is used.

    Args:
        k_positive: k of sequences with A ≥ 0, > 0.
        lambda_positive: λ of sequences with A ≥ 0, > 0.
        k_negative: k of the others, > 0.
        lambda_negative: λ of the others, > 0.

    Source: arXiv 2602.10693.

    >>> old, advantages = torch.full((1, 2), 0.08).log(), torch.ones(1, 2)
    >>> tokens = Batch.read(torch.tensor([[0.16, 0.08]]).log(), old, advantages).tokens(Unclipped())
    >>> GammaWeight().weight(tokens)  # e³ · 2² · e⁻⁶
    tensor([[0.1991, 0.1991]])
    """

    k_positive: float = 2.0
    lambda_positive: float = 3.0
    k_negative: float = 3.0
    lambda_negative: float = 2.0

    def __post_init__(self) -> None:
        check_positive(**{name: getattr(self, name) for name in self.__dataclass_fields__})

    @property
    def weights_inside(self) -> bool:
        return True

    @property
    def whole_sequence(self) -> bool:
        return True

    def weight(self, tokens: Tokens) -> Tensor:
        # Clamp as TRL does, so that W does not overflow.
        log_w = log_product(tokens, tokens.log_ratio.clamp(-20.0, 20.0)).clamp(math.log(1e-8), 20.0)

        # k and λ by the sign of the advantage
        negative = tokens.advantages < 0
        k = torch.full_like(log_w, self.k_positive).masked_fill(negative, self.k_negative)
        rate = torch.full_like(log_w, self.lambda_positive).masked_fill(negative, self.lambda_negative)
        return (rate + k * log_w - rate * log_w.exp()).exp()
