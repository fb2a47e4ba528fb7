"""Clip rules that look at the tokens of a batch, and not at their old probability alone.

Each is a `bandpo.rules.TokenRule`: it is settled for a batch before its bounds are asked for, and combines with any
objective and with other rules as every clip rule does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from bandpo import _checks
from bandpo.bounds import RatioBounds
from bandpo.divergences import TotalVariation
from bandpo.errors import InvalidType, InvalidValue
from bandpo.rules import Band, TokenRule

if TYPE_CHECKING:
    from bandpo.token_data import TokenData

__all__ = ["BalancedBounds", "PrefixBudget", "SecondMoment"]


@dataclass(frozen=True)
class BalancedBounds(TokenRule):
    """BAPO's bounds, which widen for this batch until gains carry enough of the loss.

    The bounds start at ``[lower, upper]``. The lower one rises by ``step`` up to ``max_lower``, then the upper one up
    to ``max_upper``. They stop once tokens with A > 0 carry at least ``share`` of the sum of ``abs(clip(r)·A)``, where
    the ratios of tokens with A > 0 are clipped above and the others below. The batch is the one that the loss is given,
    of all processes in ``TrainingState(processes=…)``. An update made of several micro-batches has no such sums.

    Args:
        share: Wanted share ρ₀ of positive advantages, in (0, 1).
        lower: First lower bound.
        upper: First upper bound.
        max_lower: Last lower bound, ≤ 1.
        max_upper: Last upper bound.
        step: What one widening adds, > 0.

    Source: arXiv 2510.18927 and the page of its authors' code for the share and the ranges; the settings file of that
    code ends at 0.8 and 2.0. Order (lower bound first), step and sums are the authors' code's; the paper moves the
    upper bound first, by 0.05, then the lower one by 0.02, weighs tokens in its sums by their old probability, and
    wants a share of 0.4.

    >>> old, advantages = torch.full((1, 2), 0.08).log(), torch.tensor([[1.0, -1.0]])
    >>> tokens = Tokens.from_batch(torch.tensor([[0.16, 0.056]]).log(), old, advantages, rule=BalancedBounds())
    >>> tokens.bounds.upper  # min(2, 1.2) against 0.7: the first bounds, [0.6, 1.2], will do
    tensor([[1.2000, 1.2000]])
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
        _checks.number("step", self.step, "above 0", lambda x: x > 0)

    @property
    def whole_batch(self) -> bool:
        return True

    def for_tokens(self, tokens: TokenData) -> RatioBounds:
        lowers = _steps(self.lower, self.max_lower, self.step)
        uppers = _steps(self.upper, self.max_upper, self.step)
        moved = tokens.log_ratio_anchor
        ratio = moved.exp().clamp(max=torch.finfo(moved.dtype).max)
        gain = (tokens.advantages * tokens.mask).clamp(min=0.0)
        loss = (-tokens.advantages * tokens.mask).clamp(min=0.0)
        gains = torch.stack([(ratio.clamp(max=upper) * gain).sum() for upper in uppers])
        losses = torch.stack([(ratio.clamp(min=lower) * loss).sum() for lower in lowers])
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
        first = enough.byte().argmax().view(1).to(moved.dtype)
        lower = self.lower + self.step * first.clamp(max=len(lowers) - 1)
        upper = self.upper + self.step * (first - (len(lowers) - 1)).clamp(min=0)
        return RatioBounds(
            log_lower=lower.clamp(max=self.max_lower).log(),
            log_upper=upper.clamp(max=self.max_upper).log(),
        )


def _steps(start: float, end: float, step: float) -> list[float]:
    """Return the numbers from ``start`` by ``step`` to ``end``, which is the last."""
    count = math.ceil((end - start) / step - 1e-9)  # 0.3/0.05 is 5.999… or 6.000… in floats
    return [start + k * step for k in range(count)] + [end]


@dataclass(frozen=True)
class SecondMoment(TokenRule):
    """M2PO's bounds ``[e^−τ, e^τ]``, the widest under which the second moment of log-ratios is small enough.

    The second moment is the mean of ``(log r)²`` over the tokens that the bounds let pass and could block: those with
    A > 0 and r > 1, or A < 0 and r < 1. The largest ``abs(log r)`` are left out, one after the other, until it is at
    most ``threshold``; τ is then the largest that remains. The batch is the one that the loss is given.

    Args:
        threshold: Largest second moment, > 0. The paper uses 0.04 throughout.

    Source: arXiv 2510.01161. Its authors' code is another rule: it takes the mean over all of these tokens, with
    ``(log r)²`` no larger than τ², and gives no bound narrower than [0.7, 1.5]. Tokens of exactly equal ``abs(log r)``
    are left out together.

    >>> old, advantages = torch.full((1, 3), 0.08).log(), torch.ones(1, 3)
    >>> tokens = Tokens.from_batch(torch.tensor([[0.088, 0.096, 0.16]]).log(), old, advantages, rule=SecondMoment())
    >>> tokens.bounds.upper, tokens.blocked
    (tensor([[1.2000, 1.2000, 1.2000]]), tensor([[False, False,  True]]))
    """

    threshold: float = 0.04

    def __post_init__(self) -> None:
        _checks.number("threshold", self.threshold, "above 0", lambda x: x > 0)

    @property
    def whole_batch(self) -> bool:
        return True

    def for_tokens(self, tokens: TokenData) -> RatioBounds:
        moved = tokens.log_ratio_anchor
        outward = (tokens.advantages * moved > 0) & (tokens.mask > 0)
        distance, _ = moved.abs().masked_fill(~outward, math.inf).flatten().sort()
        # The mean of the first squares rises with their number, so those that may remain are a beginning.
        squares = distance.to(_checks.widest_float(distance.device)).square()
        means = squares.cumsum(0) / torch.arange(1, len(squares) + 1, device=squares.device)
        number = (means <= self.threshold).sum().view(1)
        # The nearest that must go; those of the same distance go with it, as the tokens of a sequence do at its level.
        nearest = distance.gather(0, number.clamp(max=len(distance) - 1))
        largest = distance.masked_fill(distance >= nearest, 0.0).max()
        bound = torch.where(number == outward.sum(), math.inf, largest)
        return RatioBounds(log_lower=-bound, log_upper=bound)


@dataclass(frozen=True)
class PrefixBudget(TokenRule):
    """CPPO's trust region: narrower for early tokens, and for those after a prefix that has moved far.

    A token is inside of the region where its divergence D satisfies ``w·D ≤ min(δ, δ + b·W − S)``. δ is the band's
    radius, and ``w`` falls in a straight line from 1 at the sequence's first token to ``last_weight`` at its last.
    ``W`` and ``S`` are the sums of ``w`` and of ``w·D`` over the tokens before it. ``b`` is the 90th percentile of D
    over the sequence, within ``[budget, 2·budget]``.

    Args:
        band: The trust region of a token with weight 1 and an unspent budget.
        budget: Divergence per token that a prefix may spend on average, > 0.
        last_weight: Weight of a sequence's last token, in (0, 1].

    Source: arXiv 2606.10968, with the total variation of the sampled token as D and a radius of 0.15 for dense models,
    0.2 for a mixture of experts; the percentile as in its authors' code.

    >>> old, advantages = torch.full((1, 3), 0.2).log(), torch.ones(1, 3)
    >>> tokens = Tokens.from_batch(torch.tensor([[0.5, 0.3, 0.3]]).log(), old, advantages, rule=PrefixBudget())
    >>> tokens.blocked  # moved by 0.3, 0.1 and 0.1; of 0.15 too little is left
    tensor([[True, True, True]])
    """

    band: Band = field(default_factory=lambda: Band(TotalVariation(), 0.15, math.inf))
    budget: float = 0.02
    last_weight: float = 0.8

    def __post_init__(self) -> None:
        if type(self.band) is not Band:
            raise InvalidType(f"band must be a Band such as Band(TotalVariation(), 0.15), got {self.band!r}")
        _checks.number("budget", self.budget, "above 0", lambda x: x > 0)
        _checks.number("last_weight", self.last_weight, "in (0, 1]", lambda x: 0 < x <= 1)

    @property
    def whole_sequence(self) -> bool:
        return True

    def for_tokens(self, tokens: TokenData) -> RatioBounds:
        logp = tokens.logp_anchor
        divergence = self.band.divergence.divergence_of_ratio(tokens.log_ratio_anchor, logp)
        weight = 1 - (1 - self.last_weight) * tokens.position / (tokens.length - 1).clamp(min=1.0)
        weight = weight.to(logp.dtype)
        per_sequence = tokens.sequences.quantile(divergence, 0.9).clamp(self.budget, 2 * self.budget)
        budget = tokens.sequences.at_tokens(per_sequence)
        left = budget * tokens.sequence_before(weight) - tokens.sequence_before(weight * divergence)
        radius = self.band.radius_for(logp) + left.clamp(max=0.0)
        # A radius must be above 0. The smallest one blocks every ratio but 1, which no advantage pushes out of it.
        radius = (radius / weight).clamp(min=torch.finfo(logp.dtype).tiny)
        # Bounds, and not a band: the share of a spent radius that a token uses would be infinite in the audit.
        return Band(self.band.divergence, radius, self.band.max_ratio).bounds(logp)
