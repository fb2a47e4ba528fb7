"""Objectives that choose what a token or a sequence gets."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from bandpo import _checks
from bandpo.batch import Tokens
from bandpo.errors import InvalidValue
from bandpo.objectives.base import Objective, above_0, is_objective
from bandpo.objectives.clipped import Surrogate

__all__ = [
    "Balanced", "CovariancePenalty", "DualClip", "FutureKL", "LogRatioPenalty", "RatioCap", "SelfAnchored",
    "SequenceMask", "Unweighted",
]  # fmt: skip


class _Around(Objective):
    """Another objective, changed."""

    objective: Objective

    def __post_init__(self) -> None:
        is_objective(self.objective)

    def weight(self, tokens: Tokens) -> Tensor:
        return self.objective.weight(tokens)

    def surrogate(self, tokens: Tokens) -> Tensor:
        return self.objective.surrogate(tokens)

    def bias(self, tokens: Tokens) -> Tensor | None:
        return self.objective.bias(tokens)

    def regularizer(self, tokens: Tokens) -> Tensor | None:
        return self.objective.regularizer(tokens)

    @property
    def weights_inside(self) -> bool:
        return self.objective.weights_inside

    @property
    def whole_sequence(self) -> bool:
        return self.objective.whole_sequence

    @property
    def one_pass(self) -> bool:
        return self.objective.one_pass

    @property
    def whole_batch(self) -> bool:
        return self.objective.whole_batch


class _Apart(_Around):
    """Another objective, but for some tokens, which get one weight and one reported ratio."""

    @abstractmethod
    def _apart(self, tokens: Tokens) -> tuple[Tensor, float, float]:
        """Which tokens, their weight, and what stands for their ratio in the reported loss."""

    def weight(self, tokens: Tokens) -> Tensor:
        these, weight, _ = self._apart(tokens)
        return self.objective.weight(tokens).masked_fill(these, weight)

    def surrogate(self, tokens: Tokens) -> Tensor:
        these, _, value = self._apart(tokens)
        return self.objective.surrogate(tokens).masked_fill(these, value)


@dataclass(frozen=True)
class DualClip(_Apart):
    """Another objective without the gradient of tokens with A < 0 and ``r > max_ratio``; they report ``−max_ratio·A``.

    Args:
        max_ratio: c > 1; ``inf`` for none. The paper of Band uses 10, verl 3.
        objective: What holds for the other tokens.

    Source: arXiv 1912.09729.

    >>> old, advantages = torch.full((1, 2), 0.08).log(), -torch.ones(1, 2)
    >>> tokens = Tokens.from_batch(torch.tensor([[0.72, 0.16]]).log(), old, advantages, rule=Unclipped())
    >>> DualClip(3.0).weight(tokens)
    tensor([[0., 2.]])
    """

    max_ratio: float = 3.0
    objective: Objective = Surrogate()

    def __post_init__(self) -> None:
        _checks.number("DualClip's max_ratio", self.max_ratio, "above 1", lambda x: x > 1)
        super().__post_init__()

    def _apart(self, tokens: Tokens) -> tuple[Tensor, float, float]:
        return (tokens.advantages < 0) & (tokens.ratio > self.max_ratio), 0.0, self.max_ratio


@dataclass(frozen=True)
class RatioCap(Objective):
    """TRL's ``delta``: PPO's surrogate, whose unclipped ratio is at most ``max_ratio``, for both signs of A.

    A token beyond it loses its gradient with A > 0, and with A < 0 where the rule's upper bound is below ``r`` too.

    Args:
        max_ratio: TRL's ``delta``, > 0.

    >>> old, advantages = torch.full((1, 2), 0.08).log(), -torch.ones(1, 2)
    >>> tokens = Tokens.from_batch(torch.tensor([[0.16, 0.09]]).log(), old, advantages, rule=FixedClip(0.2))
    >>> RatioCap(1.1).weight(tokens)
    tensor([[0.0000, 1.1250]])
    """

    max_ratio: float

    def __post_init__(self) -> None:
        above_0(max_ratio=self.max_ratio)

    def weight(self, tokens: Tokens) -> Tensor:
        beyond = (tokens.ratio > self.max_ratio) & ((tokens.advantages > 0) | tokens.clip_mask.clipped_high)
        return tokens.ratio.masked_fill(tokens.blocked | beyond, 0.0)

    def surrogate(self, tokens: Tokens) -> Tensor:
        cut, clipped = tokens.ratio.clamp(max=self.max_ratio), tokens.reported_ratio
        return torch.where(tokens.advantages > 0, torch.minimum(cut, clipped), torch.maximum(cut, clipped))


@dataclass(frozen=True)
class SequenceMask(_Apart):
    """Another objective without the sequences that have A < 0 and have drifted too far from the anchor.

    The anchor is the policy that sampled, where `bandpo.policy_loss` is told of it, else the old one. A mean over
    tokens still counts those of a masked sequence, as in TRL; verl takes them out of the number.

    Args:
        max_kl: Largest drift (nats), > 0.
        objective: What holds for the sequences that are kept.
        drift: Of a sequence, with ``l = log π − log π_anchor``: ``mean_k1``, the mean of ``−l`` over its tokens;
            ``mean_k3``, that of ``e^l − 1 − l``; ``max_k2``, the largest ``l²/2``. The names are verl's.
        both_signs: Whether sequences with A ≥ 0 are masked as well.

    Source: off-policy sequence masking of DeepSeek-V3.2, arXiv 2512.02556; the other drifts, arXiv 2512.23075.

    >>> old, advantages = torch.full((1, 2), 0.08).log(), -torch.ones(1, 2)
    >>> tokens = Tokens.from_batch(torch.tensor([[0.02, 0.08]]).log(), old, advantages, rule=Unclipped())
    >>> SequenceMask(0.5).weight(tokens), SequenceMask(1.0).weight(tokens)
    (tensor([[0., 0.]]), tensor([[0.2500, 1.0000]]))
    """

    max_kl: float
    objective: Objective = Surrogate()
    drift: str = "mean_k1"
    both_signs: bool = False

    def __post_init__(self) -> None:
        above_0(max_kl=self.max_kl)
        super().__post_init__()
        if self.drift not in ("mean_k1", "mean_k3", "max_k2"):
            raise InvalidValue(f"drift must be 'mean_k1', 'mean_k3' or 'max_k2', got {self.drift!r}")

    @property
    def whole_sequence(self) -> bool:
        return True

    def _apart(self, tokens: Tokens) -> tuple[Tensor, float, float]:
        moved = tokens.log_ratio_anchor
        if self.drift == "max_k2":
            largest = tokens.sequences.max(tokens.mask * moved.square() / 2)
            drift = tokens.sequences.at_tokens(largest)
        else:
            drift = tokens.sequence_mean(-moved if self.drift == "mean_k1" else torch.expm1(moved) - moved)
        masked = drift > self.max_kl
        return masked if self.both_signs else masked & (tokens.advantages < 0), 0.0, 0.0


@dataclass(frozen=True)
class SelfAnchored(_Apart):
    """UP's form: tokens with A > 0 have weight 1, as if the old policy were the current one.

    Args:
        objective: What holds for tokens with A ≤ 0.

    Source: arXiv 2607.06987.

    >>> old, advantages = torch.full((1, 2), 0.08).log(), torch.tensor([[1.0, -1.0]])
    >>> tokens = Tokens.from_batch(torch.tensor([[0.16, 0.16]]).log(), old, advantages, rule=FixedClip(0.2))
    >>> SelfAnchored().weight(tokens)
    tensor([[1., 2.]])
    """

    objective: Objective = Surrogate()

    def _apart(self, tokens: Tokens) -> tuple[Tensor, float, float]:
        return tokens.advantages > 0, 1.0, 1.0


@dataclass(frozen=True)
class LogRatioPenalty(_Around):
    """Another objective, and a loss of ``coefficient·(log r)²`` on every token: ``b = −2·coefficient·log r``.

    Source: Kimi-K2.5, arXiv 2602.02276.

    >>> old = torch.tensor([[0.08]]).log()
    >>> tokens = Tokens.from_batch(torch.tensor([[0.16]]).log(), old, torch.zeros(1, 1), rule=Unclipped())
    >>> LogRatioPenalty(0.5).bias(tokens), LogRatioPenalty(0.5).regularizer(tokens)  # −log 2 and ½·log² 2
    (tensor([[-0.6931]]), tensor([[0.2402]]))
    """

    coefficient: float
    objective: Objective = Surrogate()

    def __post_init__(self) -> None:
        above_0(coefficient=self.coefficient)
        super().__post_init__()

    def bias(self, tokens: Tokens) -> Tensor:
        mine, other = -2 * self.coefficient * tokens.log_ratio, self.objective.bias(tokens)
        return mine if other is None else mine + other

    def regularizer(self, tokens: Tokens) -> Tensor:
        mine, other = self.coefficient * tokens.log_ratio.square(), self.objective.regularizer(tokens)
        return mine if other is None else mine + other


@dataclass(frozen=True)
class FutureKL(_Around):
    """FIPO's form: another objective, its weights multiplied by what the rest of the response has gained.

    The factor is ``e^F`` within [1, 1 + boost], where F is the sum of ``2^(−d/decay)·log r`` over the token and those
    after it, d the distance in positions. Tokens with ``r > max_ratio`` and those that do not count add nothing.

    Args:
        decay: Distance at which a later token counts half, in tokens, > 0.
        boost: Largest gain of a weight, > 0.
        max_ratio: Ratio above which a token adds nothing, > 0.
        objective: The other objective.
        safety_ratio: Ratio above which a token with A < 0 is not raised, > 0; ``inf`` for none. ms-swift's
            ``fipo_safety_threshold``, 4 there by default. The authors' script for 32B has 10, the ratio from which its
            dual clip drops these tokens anyway.

    Source: arXiv 2603.19835. The authors' code also drops sequences with several tokens above ``max_ratio``.

    >>> old, advantages = torch.full((1, 2), 0.08).log(), torch.ones(1, 2)
    >>> tokens = Tokens.from_batch(torch.tensor([[0.08, 0.084]]).log(), old, advantages, rule=Unclipped())
    >>> FutureKL(decay=1.0).weight(tokens)  # √1.05 and 1.05·1.05
    tensor([[1.0247, 1.1025]])
    """

    decay: float = 32.0
    boost: float = 0.2
    max_ratio: float = 10.0
    objective: Objective = Surrogate()
    safety_ratio: float = math.inf

    def __post_init__(self) -> None:
        above_0(decay=self.decay, boost=self.boost, max_ratio=self.max_ratio, safety_ratio=self.safety_ratio)
        super().__post_init__()

    @property
    def whole_sequence(self) -> bool:
        return True

    @property
    def one_pass(self) -> bool:
        return False

    def _factor(self, tokens: Tokens) -> Tensor:
        left_out = (tokens.ratio > self.max_ratio) | (tokens.mask == 0)
        gained = tokens.log_ratio.masked_fill(left_out, 0.0)
        # Each round doubles how far the sums reach: until a token counts 2^−64, below the rounding of float64.
        for doubling in range(math.ceil(math.log2(64 * self.decay))):
            distance = 2**doubling
            gained = gained + 2 ** (-distance / self.decay) * tokens.sequences.ahead(gained, distance)
        factor = gained.clamp(0.0, math.log1p(self.boost)).exp()
        unsafe = (tokens.ratio > self.safety_ratio) & (tokens.advantages < 0)
        return factor.masked_fill(unsafe, 1.0)

    def weight(self, tokens: Tokens) -> Tensor:
        return self._factor(tokens) * super().weight(tokens)

    def surrogate(self, tokens: Tokens) -> Tensor:
        return self._factor(tokens) * super().surrogate(tokens)


@dataclass(frozen=True)
class Unweighted(Objective):
    """REINFORCE: ``w = 1`` for every token, whatever the ratio.

    Source: GPG, arXiv 2504.02546.

    >>> old = torch.tensor([[0.08]]).log()
    >>> tokens = Tokens.from_batch(torch.tensor([[0.16]]).log(), old, torch.ones(1, 1), rule=Unclipped())
    >>> Unweighted().weight(tokens)
    tensor([[1.]])
    """

    def weight(self, tokens: Tokens) -> Tensor:
        return torch.ones_like(tokens.ratio)


@dataclass(frozen=True)
class CovariancePenalty(Objective):
    """KL-Cov's form: no clip, ``w = r``, and a loss of ``coefficient·abs(log r)`` on the tokens that cost most entropy.

    They are the ``share`` (in (0, 1]) with the largest ``(A − mean A)·(log π − mean log π)``, one token at least.

    Source: arXiv 2505.22617, and its authors' script for 7B. For 32B it has a share of 0.0002; verl's defaults are
    0.0002 and a coefficient of 0.1.

    >>> old, advantages = torch.full((1, 2), 0.08).log(), torch.eye(2)[:1]
    >>> tokens = Tokens.from_batch(torch.tensor([[0.16, 0.04]]).log(), old, advantages, rule=Unclipped())
    >>> CovariancePenalty(0.5).bias(tokens)
    tensor([[-1.,  0.]])
    """

    share: float = 0.002
    coefficient: float = 1.0

    def __post_init__(self) -> None:
        _checks.number("share", self.share, "in (0, 1]", lambda x: 0 < x <= 1)
        above_0(coefficient=self.coefficient)

    @property
    def whole_batch(self) -> bool:
        return True

    def weight(self, tokens: Tokens) -> Tensor:
        return tokens.ratio

    def bias(self, tokens: Tokens) -> Tensor:
        return -self._chosen(tokens) * tokens.log_ratio.sign()

    def regularizer(self, tokens: Tokens) -> Tensor:
        return self._chosen(tokens) * tokens.log_ratio.abs()

    def _chosen(self, tokens: Tokens) -> Tensor:
        """The coefficient at the tokens that are pulled back, else 0."""
        count = tokens.mask.sum()
        advantage, logp = (
            x - (x * tokens.mask).sum() / count
            for x in (tokens.advantages, tokens.logp_old + tokens.log_ratio)
        )
        order = (advantage * logp).masked_fill(tokens.mask == 0, -math.inf).flatten().argsort(descending=True)
        place = torch.arange(len(order), device=order.device)
        largest = (place < (self.share * count).floor().clamp(min=1)).to(logp) * self.coefficient
        return torch.empty_like(largest).scatter(0, order, largest).view_as(logp)


@dataclass(frozen=True)
class Balanced(Objective):
    """BAPO's form: PPO's surrogate on bounds that widen for this batch until gains carry enough of the loss.

    The bounds start at ``[lower, upper]``. The lower one rises by ``step`` up to ``max_lower``, then the upper one up
    to ``max_upper``. They stop once tokens with A > 0 carry at least ``share`` of the sum of ``abs(clip(r)·A)``. It
    looks at no clip rule. The batch is the one that the loss is given, of all processes in
    ``TrainingState(processes=…)``. An update made of several micro-batches has no such sums.

    Args:
        share: Wanted share ρ₀ of positive advantages, in (0, 1).
        lower: First lower bound.
        upper: First upper bound.
        max_lower: Last lower bound, ≤ 1.
        max_upper: Last upper bound.
        step: What one widening adds, > 0.

    Source: arXiv 2510.18927 and the page of its authors' code for the share and the ranges; the settings file of that
    code ends at 0.8 and 2.0. Order (lower bound first), step and sums are the authors' code's; the paper
    moves the upper bound first, by 0.05, then the lower one by 0.02, weighs tokens in its sums by their old
    probability, and wants a share of 0.4.

    >>> old, advantages = torch.full((1, 2), 0.08).log(), torch.tensor([[1.0, -1.0]])
    >>> tokens = Tokens.from_batch(torch.tensor([[0.16, 0.056]]).log(), old, advantages, rule=Unclipped())
    >>> Balanced().weight(tokens)  # 1.2 against 0.7: the first bounds, [0.6, 1.2], will do
    tensor([[0.0000, 0.7000]])
    """

    share: float = 0.5
    lower: float = 0.6
    upper: float = 1.2
    max_lower: float = 0.9
    max_upper: float = 3.0
    step: float = 0.05

    def __post_init__(self) -> None:
        _checks.number("share", self.share, "in (0, 1)", lambda x: 0 < x < 1)
        if not (0 <= self.lower <= self.max_lower <= 1 <= self.upper <= self.max_upper < math.inf):
            raise InvalidValue(
                "0 <= lower <= max_lower <= 1 <= upper <= max_upper must hold, got "
                f"{self.lower!r}, {self.max_lower!r}, {self.upper!r}, {self.max_upper!r}"
            )
        above_0(step=self.step)

    @property
    def whole_batch(self) -> bool:
        return True

    def _bounds(self, tokens: Tokens) -> tuple[Tensor, ...]:
        """The lower and the upper bound that this batch gets, each of shape (1,)."""
        lowers = _steps(self.lower, self.max_lower, self.step)
        uppers = _steps(self.upper, self.max_upper, self.step)
        gain = (tokens.advantages * tokens.mask).clamp(min=0.0)
        loss = (-tokens.advantages * tokens.mask).clamp(min=0.0)
        gains = torch.stack([(tokens.ratio.clamp(max=upper) * gain).sum() for upper in uppers])
        losses = torch.stack([(tokens.ratio.clamp(min=lower) * loss).sum() for lower in lowers])
        if tokens.state.processes is not None:
            for sums in (gains, losses):
                torch.distributed.all_reduce(sums, group=tokens.state.processes)  # pyright: ignore

        # The pairs of bounds in their order: the lower bound rises to its end, then the upper one.
        pairs = len(lowers) + len(uppers) - 1
        gains = torch.cat([gains[:1].expand(len(lowers)), gains[1:]])
        losses = torch.cat([losses, losses[-1:].expand(len(uppers) - 1)])
        enough = gains >= self.share * (gains + losses)
        # The widest pair is taken if none is enough.
        enough = enough | (torch.arange(pairs, device=enough.device) == pairs - 1)
        # Kept a tensor, as a Python number would be read from the device, and computed, as a table of the bounds would
        # be copied to it.
        first = enough.byte().argmax().view(1).to(tokens.ratio.dtype)
        lower = self.lower + self.step * first.clamp(max=len(lowers) - 1)
        upper = self.upper + self.step * (first - (len(lowers) - 1)).clamp(min=0)
        return lower.clamp(max=self.max_lower), upper.clamp(max=self.max_upper)

    def _blocked(self, tokens: Tokens) -> Tensor:
        lower, upper = self._bounds(tokens)
        below = (tokens.ratio < lower) & (tokens.advantages < 0)
        return below | ((tokens.ratio > upper) & (tokens.advantages > 0))

    def weight(self, tokens: Tokens) -> Tensor:
        return tokens.ratio.masked_fill(self._blocked(tokens), 0.0)

    def surrogate(self, tokens: Tokens) -> Tensor:
        lower, upper = self._bounds(tokens)
        return torch.where(self._blocked(tokens), tokens.ratio.clamp(lower, upper), tokens.ratio)


def _steps(start: float, end: float, step: float) -> list[float]:
    """From ``start`` by ``step`` to ``end``, which is the last."""
    count = math.ceil((end - start) / step - 1e-9)  # 0.3/0.05 is 5.999… or 6.000… in floats
    return [start + k * step for k in range(count)] + [end]
