"""Objectives whose weight falls smoothly in place of a clip."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from bandpo import _checks
from bandpo.batch import Tokens
from bandpo.objectives.base import Objective, above_0

__all__ = [
    "DecoupledDecay", "GammaWeight", "HazardGate", "MassAdaptiveGate", "ProbabilityPenalty", "Quadratic", "SigmoidGate",
    "Smoothed",
]  # fmt: skip


@dataclass(frozen=True)
class Quadratic(Objective):
    """A quadratic penalty in place of a clip: the gradient falls in a straight line and is 0 at the rule's bound.

    ``w = r·(1 − s·u)``. ``s`` is the sign of A and ``u`` the share of the rule's interval that the ratio uses: 0 at
    r = 1, 1 at the upper bound, −1 at the lower one. A token beyond the bound is pulled back.

    Derivation: take from the surrogate ``r·A`` the penalty ``abs(A)·(r − 1)²/(2·h)``, where ``h`` is the interval's
    width on that side, ``upper − 1`` or ``1 − lower``. The slope in r is ``A·(1 − s·(r − 1)/h)``; it is 0 where ``r``
    reaches the bound on the side that A pushes to. The loss is then maximal on the edge of the trust region, instead of
    flat beyond it. Multiplied by ``dr/dlogp = r`` this is the weight above.

    With `FixedClip` it is SPO (arXiv 2401.16025; token by token CFPO, 2601.22801). With ``Band(TotalVariation(), δ)``,
    where ``u = (π − π_old)/δ``, it is DRPO's penalty, see `ProbabilityPenalty`. With ``Band(KL(), δ)`` the gradient
    falls to 0 at the edge of the KL trust region. That form is ours; we know of no paper that has it.

    >>> old, advantages = torch.full((1, 2), 0.08).log(), torch.ones(1, 2)
    >>> tokens = Tokens.from_batch(torch.tensor([[0.10, 0.16]]).log(), old, advantages, rule=FixedClip(0.5, 0.5))
    >>> Quadratic().weight(tokens)  # half of the interval used; twice as much as there is
    tensor([[ 0.6250, -2.0000]])
    """

    def weight(self, tokens: Tokens) -> Tensor:
        return tokens.ratio * (1 - tokens.advantages.sign() * tokens.interval_used)

    def surrogate(self, tokens: Tokens) -> Tensor:
        moved = torch.expm1(tokens.log_ratio_anchor)
        return tokens.ratio - tokens.advantages.sign() * moved * tokens.interval_used / 2


@dataclass(frozen=True)
class ProbabilityPenalty(Objective):
    """DRPO's form: a quadratic penalty on the move of the probability, ``w = r·(1 − s·(π − π_old)/delta)``.

    ``s`` is the sign of A. It looks at no clip rule. `Quadratic` with ``Band(TotalVariation(), delta)`` is the same
    wherever the simplex does not cut that band: for delta below p and below 1 − p.

    Args:
        delta: Move of probability at which the gradient is 0, > 0. The paper uses 12.5: more than any probability can
            move, so the gradient only shrinks, by 8 % at most.

    Source: arXiv 2606.09821.

    >>> old = torch.tensor([[0.08]]).log()
    >>> tokens = Tokens.from_batch(torch.tensor([[0.58]]).log(), old, torch.ones(1, 1), rule=Unclipped())
    >>> ProbabilityPenalty(1.0).weight(tokens) / tokens.ratio
    tensor([[0.5000]])
    """

    delta: float = 12.5

    def __post_init__(self) -> None:
        above_0(delta=self.delta)

    def weight(self, tokens: Tokens) -> Tensor:
        return tokens.ratio * (1 - tokens.advantages.sign() * self._moved(tokens) / self.delta)

    def surrogate(self, tokens: Tokens) -> Tensor:
        penalty = torch.expm1(tokens.log_ratio_anchor) * self._moved(tokens) / (2 * self.delta)
        return tokens.ratio - tokens.advantages.sign() * penalty

    @staticmethod
    def _moved(tokens: Tokens) -> Tensor:
        return tokens.logp_anchor.exp() * torch.expm1(tokens.log_ratio_anchor)


@dataclass(frozen=True)
class SigmoidGate(Objective):
    """SAPO's soft gate in place of a clip: ``w = r·4·σ(1 − σ)`` with ``σ = sigmoid(τ·(r − 1))``.

    The gate is 1 at r = 1 and falls smoothly to both sides. It looks at no clip rule.

    Args:
        positive: Temperature τ > 0 of tokens with A > 0.
        negative: Temperature τ > 0 of the others; larger than ``positive`` in the paper, so that they fade faster.

    Source: arXiv 2511.20347.

    >>> old, advantages = torch.full((1, 2), 0.08).log(), torch.ones(1, 2)
    >>> tokens = Tokens.from_batch(torch.tensor([[0.08, 0.16]]).log(), old, advantages, rule=Unclipped())
    >>> SigmoidGate().weight(tokens)
    tensor([[1.0000, 1.5729]])
    """

    positive: float = 1.0
    negative: float = 1.05

    def __post_init__(self) -> None:
        above_0(positive=self.positive, negative=self.negative)

    def weight(self, tokens: Tokens) -> Tensor:
        x = self._temperature(tokens) * (tokens.ratio - 1)
        return (
            tokens.ratio * 4 * torch.sigmoid(x) * torch.sigmoid(-x)
        )  # 1 − σ would lose its digits where σ is near 1

    def surrogate(self, tokens: Tokens) -> Tensor:
        temperature = self._temperature(tokens)
        return torch.sigmoid(temperature * (tokens.ratio - 1)) * 4 / temperature

    def _temperature(self, tokens: Tokens) -> Tensor:
        low = torch.full_like(tokens.ratio, self.negative)
        return low.masked_fill(tokens.advantages > 0, self.positive)


@dataclass(frozen=True)
class Smoothed(Objective):
    """PSPO's form: no clip, and the share ``alpha`` in [0, 1) of the old policy mixed in: ``w = (1 − alpha)·r``.

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
    """DGPO's form: beyond a bound c of the rule the weight goes on as a power of the ratio, without a jump.

    ``w = r·(r/c)^power`` for tokens blocked below, ``r·(c/r)^(1/root)`` for those blocked above, ``r`` elsewhere; both
    settings > 0. A root of 1 keeps the bound's weight; with a larger one it grows with the ratio.

    Source: arXiv 2603.14389.
    """

    power: float = 1.0
    root: float = 2.0

    def __post_init__(self) -> None:
        above_0(power=self.power, root=self.root)

    def weight(self, tokens: Tokens) -> Tensor:
        moved = tokens.log_ratio_anchor
        beyond = moved - moved.clamp(tokens.bounds.log_lower, tokens.bounds.log_upper)
        powers = torch.full_like(moved, self.power).masked_fill(tokens.blocked_high, -1 / self.root)
        return torch.where(tokens.blocked, tokens.ratio * (powers * beyond).exp(), tokens.ratio)


@dataclass(frozen=True)
class MassAdaptiveGate(Objective):
    """MASPO's form: ``w = r·exp(−(r − 1)²/(2·σ²))`` on the side that A pushes to, ``r`` on the other.

    The width is ``σ = min(sigma·p^(−rarity), max_sigma)``, p the old probability, times ``1 + gain·A`` where A > 0 and
    ``1/(1 + loss·abs(A))`` where A < 0. It looks at no clip rule.

    Source: arXiv 2602.17550. The limit on σ is that of its authors' code, which also keeps the factor of A within
    [0.1, 10]: where ``gain`` and ``loss`` are 0.03 it is, up to an advantage of 300.
    """

    sigma: float = 1.0
    rarity: float = 0.3
    gain: float = 0.03
    loss: float = 0.03
    max_sigma: float = 10.0

    def __post_init__(self) -> None:
        above_0(**{name: getattr(self, name) for name in self.__dataclass_fields__})

    def weight(self, tokens: Tokens) -> Tensor:
        sigma = (self.sigma * (-self.rarity * tokens.logp_old).exp()).clamp(max=self.max_sigma)
        up, down = tokens.advantages.clamp(min=0.0), tokens.advantages.clamp(max=0.0)
        sigma = sigma * (1 + self.gain * up) / (1 - self.loss * down)
        moved = torch.expm1(tokens.log_ratio)
        gate = (-(moved / sigma).square() / 2).exp()
        return torch.where(moved * tokens.advantages > 0, tokens.ratio * gate, tokens.ratio)


@dataclass(frozen=True)
class HazardGate(Objective):
    """MHPO's form: ``w = exp(ψ − ζ)/cosh²(log r/reach)``, the log-ratio bent to ``ψ = reach·tanh(log r/reach)``.

    The hazard ``ζ = (softplus(ψ)/rise_scale)^rise_shape + (softplus(−ψ)/fall_scale)^fall_shape`` grows to both sides.
    All settings are > 0. At r = 1 the weight is 0.265, not 1. It looks at no clip rule. The hazard multiplies the
    gradient and has none of its own: a loss that differentiates ζ too has another gradient at 97 % of the tokens.

    Source: arXiv 2603.16929.
    """

    reach: float = 1.5
    rise_shape: float = 1.5
    rise_scale: float = 1.0
    fall_shape: float = 2.0
    fall_scale: float = 0.8

    def __post_init__(self) -> None:
        above_0(**{name: getattr(self, name) for name in self.__dataclass_fields__})

    def weight(self, tokens: Tokens) -> Tensor:
        return self.surrogate(tokens) / torch.cosh(tokens.log_ratio / self.reach).square()

    def surrogate(self, tokens: Tokens) -> Tensor:
        bent = self.reach * torch.tanh(tokens.log_ratio / self.reach)
        rise = (softplus(bent) / self.rise_scale) ** self.rise_shape
        fall = (softplus(-bent) / self.fall_scale) ** self.fall_shape
        return (bent - rise - fall).exp()


@dataclass(frozen=True)
class GammaWeight(Objective):
    """VESPO's form: every token of a sequence has the weight ``φ(W) = e^λ·W^k·e^(−λ·W)``, W the sequence's ratio.

    ``W = exp(sum of log(r·c))`` over the sequence's tokens, a product and no mean, with ``c`` the token's importance
    weight if there are any. φ is 1 at W = 1 and falls to 0 on both sides of its peak at k/λ. It looks at no clip rule.

    Args:
        k_positive: k of sequences with A ≥ 0, > 0.
        lambda_positive: λ of sequences with A ≥ 0, > 0.
        k_negative: k of the others, > 0.
        lambda_negative: λ of the others, > 0.

    Source: arXiv 2602.10693.

    >>> old, advantages = torch.full((1, 2), 0.08).log(), torch.ones(1, 2)
    >>> tokens = Tokens.from_batch(torch.tensor([[0.16, 0.08]]).log(), old, advantages, rule=Unclipped())
    >>> GammaWeight().weight(tokens)  # e³ · 2² · e⁻⁶
    tensor([[0.1991, 0.1991]])
    """

    k_positive: float = 2.0
    lambda_positive: float = 3.0
    k_negative: float = 3.0
    lambda_negative: float = 2.0

    def __post_init__(self) -> None:
        above_0(**{name: getattr(self, name) for name in self.__dataclass_fields__})

    @property
    def weights_inside(self) -> bool:
        return True

    @property
    def whole_sequence(self) -> bool:
        return True

    def weight(self, tokens: Tokens) -> Tensor:
        # TRL's limits: beyond them φ is 0 to float32 precision, but W itself would overflow.
        log_w = tokens.sequence_sum(tokens.log_ratio.clamp(-20.0, 20.0))
        if tokens.weights is not None:
            log_c = tokens.weights.log().clamp(math.log(1e-8), 20.0)
            per_token = log_c.shape == log_w.shape
            log_w = log_w + (tokens.sequence_sum(log_c) if per_token else tokens.sequences.at_tokens(log_c))
        log_w = log_w.clamp(math.log(1e-8), 20.0)
        negative = tokens.advantages < 0
        k = torch.full_like(log_w, self.k_positive).masked_fill(negative, self.k_negative)
        rate = torch.full_like(log_w, self.lambda_positive).masked_fill(negative, self.lambda_negative)
        return (rate + k * log_w - rate * log_w.exp()).exp()
