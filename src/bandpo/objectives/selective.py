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

__all__ = ["Balanced", "DualClip", "SelfAnchored", "SequenceMask", "TwoSided", "Unweighted"]


class _Around(Objective):
    """Another objective, but for some tokens, which get one weight and one reported ratio."""

    objective: Objective

    @abstractmethod
    def _apart(self, tokens: Tokens) -> tuple[Tensor, float, float]:
        """Which tokens, their weight, and what stands for their ratio in the reported loss."""

    def weight(self, tokens: Tokens) -> Tensor:
        these, weight, _ = self._apart(tokens)
        return self.objective.weight(tokens).masked_fill(these, weight)

    def value(self, tokens: Tokens) -> Tensor:
        these, _, value = self._apart(tokens)
        return self.objective.value(tokens).masked_fill(these, value)

    def pull(self, tokens: Tokens) -> Tensor | None:
        return self.objective.pull(tokens)

    def penalty(self, tokens: Tokens) -> Tensor | None:
        return self.objective.penalty(tokens)

    @property
    def weights_inside(self) -> bool:
        return self.objective.weights_inside

    @property
    def whole_batch(self) -> bool:
        return self.objective.whole_batch


@dataclass(frozen=True)
class DualClip(_Around):
    """Another objective without the gradient of tokens with A < 0 and ``r > max_ratio``; they report ``−max_ratio·A``.

    Args:
        max_ratio: c > 1. The paper of Band uses 10, verl 3.
        objective: What holds for the other tokens.

    Source: arXiv 1912.09729.

    >>> tokens = Tokens.from_batch(
    ...     torch.tensor([[0.72, 0.16]]).log(), torch.full((1, 2), 0.08).log(), -torch.ones(1, 2), rule=Unclipped()
    ... )
    >>> DualClip(3.0).weight(tokens)
    tensor([[0., 2.]])
    """

    max_ratio: float = 3.0
    objective: Objective = Surrogate()

    def __post_init__(self) -> None:
        _checks.number("dual_clip", self.max_ratio, "above 1", lambda x: x > 1)
        is_objective(self.objective)

    def _apart(self, tokens: Tokens) -> tuple[Tensor, float, float]:
        return (tokens.advantages < 0) & (tokens.ratio > self.max_ratio), 0.0, self.max_ratio


@dataclass(frozen=True)
class TwoSided(Objective):
    """TRL's ``delta``: PPO's surrogate, whose unclipped ratio is at most ``max_ratio``, for both signs of A.

    A token beyond it loses its gradient with A > 0, and with A < 0 where the rule's upper bound is below ``r`` too.

    Args:
        max_ratio: TRL's ``delta``, > 0.

    >>> tokens = Tokens.from_batch(
    ...     torch.tensor([[0.16, 0.09]]).log(), torch.full((1, 2), 0.08).log(), -torch.ones(1, 2), rule=FixedClip(0.2)
    ... )
    >>> TwoSided(1.1).weight(tokens)
    tensor([[0.0000, 1.1250]])
    """

    max_ratio: float

    def __post_init__(self) -> None:
        above_0(max_ratio=self.max_ratio)

    def weight(self, tokens: Tokens) -> Tensor:
        beyond = (tokens.ratio > self.max_ratio) & ((tokens.advantages > 0) | tokens.outside.above)
        return tokens.ratio.masked_fill(tokens.blocked | beyond, 0.0)

    def value(self, tokens: Tokens) -> Tensor:
        cut, clipped = tokens.ratio.clamp(max=self.max_ratio), tokens.reported
        return torch.where(tokens.advantages > 0, torch.minimum(cut, clipped), torch.maximum(cut, clipped))


@dataclass(frozen=True)
class SequenceMask(_Around):
    """Another objective without the sequences that have A < 0 and have drifted too far.

    A sequence has drifted where the mean of ``log π_anchor − log π`` over its tokens is above ``max_kl``. The anchor is
    the policy that sampled, where `bandpo.policy_loss` is told of it, else the old one.

    Args:
        max_kl: Largest mean drift (nats per token), > 0.
        objective: What holds for the sequences that are kept.

    Source: off-policy sequence masking of DeepSeek-V3.2, arXiv 2512.02556.

    >>> tokens = Tokens.from_batch(
    ...     torch.tensor([[0.02, 0.08]]).log(), torch.full((1, 2), 0.08).log(), -torch.ones(1, 2), rule=Unclipped()
    ... )
    >>> SequenceMask(0.5).weight(tokens), SequenceMask(1.0).weight(tokens)
    (tensor([[0., 0.]]), tensor([[0.2500, 1.0000]]))
    """

    max_kl: float
    objective: Objective = Surrogate()

    def __post_init__(self) -> None:
        above_0(max_kl=self.max_kl)
        is_objective(self.objective)

    def _apart(self, tokens: Tokens) -> tuple[Tensor, float, float]:
        drifted = tokens.sequence_mean(-tokens.log_ratio_anchor) > self.max_kl
        return (tokens.advantages < 0) & drifted, 0.0, 0.0


@dataclass(frozen=True)
class SelfAnchored(_Around):
    """UP's form: tokens with A > 0 have weight 1, as if the old policy were the current one.

    Args:
        objective: What holds for tokens with A ≤ 0.

    Source: arXiv 2607.06987.

    >>> tokens = Tokens.from_batch(
    ...     torch.tensor([[0.16, 0.16]]).log(),
    ...     torch.full((1, 2), 0.08).log(),
    ...     torch.tensor([[1.0, -1.0]]),
    ...     rule=FixedClip(0.2),
    ... )
    >>> SelfAnchored().weight(tokens)
    tensor([[1., 2.]])
    """

    objective: Objective = Surrogate()

    def __post_init__(self) -> None:
        is_objective(self.objective)

    def _apart(self, tokens: Tokens) -> tuple[Tensor, float, float]:
        return tokens.advantages > 0, 1.0, 1.0


@dataclass(frozen=True)
class Unweighted(Objective):
    """REINFORCE: ``w = 1`` for every token, whatever the ratio.

    Source: GPG, arXiv 2504.02546.

    >>> tokens = Tokens.from_batch(
    ...     torch.tensor([[0.16]]).log(), torch.tensor([[0.08]]).log(), torch.ones(1, 1), rule=Unclipped()
    ... )
    >>> Unweighted().weight(tokens)
    tensor([[1.]])
    """

    def weight(self, tokens: Tokens) -> Tensor:
        return torch.ones_like(tokens.ratio)


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

    Source: arXiv 2510.18927. The order (lower bound first) is that of the authors' code.

    >>> tokens = Tokens.from_batch(
    ...     torch.tensor([[0.16, 0.056]]).log(),
    ...     torch.full((1, 2), 0.08).log(),
    ...     torch.tensor([[1.0, -1.0]]),
    ...     rule=Unclipped(),
    ... )
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
        lowers, uppers = (
            _steps(self.lower, self.max_lower, self.step),
            _steps(self.upper, self.max_upper, self.step),
        )
        wider = len(uppers) - 1  # the upper bound's steps, which follow the lower bound's
        pairs = tokens.ratio.new_tensor(
            [(lower, self.upper) for lower in lowers] + [(lowers[-1], x) for x in uppers[1:]]
        )
        gain, loss = ((tokens.advantages * sign * tokens.mask).clamp(min=0.0) for sign in (1, -1))
        gains = torch.stack([(tokens.ratio.clamp(max=upper) * gain).sum() for upper in uppers])
        losses = torch.stack([(tokens.ratio.clamp(min=lower) * loss).sum() for lower in lowers])
        if tokens.state.processes is not None:
            for sums in (gains, losses):
                torch.distributed.all_reduce(sums, group=tokens.state.processes)  # pyright: ignore
        gains = torch.cat([gains[:1].expand(len(lowers)), gains[1:]])
        losses = torch.cat([losses, losses[-1:].expand(wider)])
        enough = gains >= self.share * (gains + losses)
        enough[-1] = True  # the widest pair is taken if none is enough
        first = enough.byte().argmax().view(1)  # kept a tensor: a Python index would be read from the device
        return pairs.index_select(0, first).unbind(-1)

    def _blocked(self, tokens: Tokens) -> Tensor:
        lower, upper = self._bounds(tokens)
        below = (tokens.ratio < lower) & (tokens.advantages < 0)
        return below | ((tokens.ratio > upper) & (tokens.advantages > 0))

    def weight(self, tokens: Tokens) -> Tensor:
        return tokens.ratio.masked_fill(self._blocked(tokens), 0.0)

    def value(self, tokens: Tokens) -> Tensor:
        lower, upper = self._bounds(tokens)
        return torch.where(self._blocked(tokens), tokens.ratio.clamp(lower, upper), tokens.ratio)


def _steps(start: float, end: float, step: float) -> list[float]:
    """From ``start`` by ``step`` to ``end``, which is the last."""
    count = math.ceil((end - start) / step - 1e-9)  # 0.3/0.05 is 5.999… or 6.000… in floats
    return [start + k * step for k in range(count)] + [end]
