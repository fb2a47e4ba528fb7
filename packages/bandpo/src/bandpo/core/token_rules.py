"""Clip rules with bounds that depend on the tokens of a batch, not only on their old probability.

Each is a `bandpo.core.rules.TokenRule`: `ClipRule.settle` computes its bounds for the tokens of a batch. It can be
combined with any objective and with other rules.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from . import _checks
from ._ranges import RADII, largest
from ._update import UpdateTokens
from .bounds import RatioBounds
from .divergences import TotalVariation
from .errors import InvalidType, InvalidValue
from .rules import Band, TokenRule

if TYPE_CHECKING:
    from .token_data import TokenData

__all__ = ["BalancedBounds", "PrefixBudget", "SecondMoment"]


@dataclass(frozen=True)
class BalancedBounds(TokenRule):
    """BAPO's bounds, which move for each batch until tokens with A > 0 carry a given share of the loss.

    The bounds start at ``[lower, upper]``. The lower bound rises by ``step`` up to ``max_lower``, then the upper bound
    up to ``max_upper``. They stop when tokens with A > 0 carry at least ``share`` of the sum of ``abs(clip(r)·A)``,
    where the ratios of tokens with A > 0 are clipped above and those of the others below. The sums run over the batch
    of the loss, and over the batches of all processes in ``TrainingState(processes=…)``. They are not available if an
    update consists of several micro-batches.

    Args:
        share: Target share ρ₀ of tokens with A > 0, in (0, 1).
        lower: First lower bound.
        upper: First upper bound.
        max_lower: Last lower bound, ≤ 1.
        max_upper: Last upper bound.
        step: Step of both bounds, > 0.

    Source: arXiv 2510.18927, and the page of its authors' code for the share and the ranges; the settings file of that
    code ends at 0.8 and 2.0. Order (lower bound first), step and sums are those of the authors' code. The paper moves
    the upper bound first, by 0.05, then the lower one by 0.02, weights the tokens in the sums by their old probability,
    and has a target of 0.4.

    >>> old, advantages = torch.full((1, 2), 0.08).log(), torch.tensor([[1.0, -1.0]])
    >>> tokens = Batch.read(torch.tensor([[0.16, 0.056]]).log(), old, advantages).tokens(BalancedBounds())
    >>> tokens.bounds.upper  # with [0.6, 1.2] the share is min(2, 1.2)/(min(2, 1.2) + 0.7) = 0.63
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

    @property
    def within_process(self) -> bool:
        return False

    def for_tokens(self, tokens: TokenData) -> RatioBounds:
        lowers = _steps(self.lower, self.max_lower, self.step)
        uppers = _steps(self.upper, self.max_upper, self.step)
        log_ratio = tokens.log_ratio_anchor
        ratio = log_ratio.exp().clamp_(max=largest(log_ratio.dtype))
        gain = (tokens.advantages * tokens.mask).clamp(min=0.0)
        loss = (-tokens.advantages * tokens.mask).clamp(min=0.0)
        # The sums of both signs for each bound, in float64, so that their rounding does not depend on the split of an
        # update among processes.
        wide = _checks.widest_float(log_ratio.device)
        gains = torch.stack([(ratio.clamp(max=upper) * gain).sum(dtype=wide) for upper in uppers])
        losses = torch.stack([(ratio.clamp(min=lower) * loss).sum(dtype=wide) for lower in lowers])
        if tokens.state.processes is not None:
            for sums in (gains, losses):
                torch.distributed.all_reduce(sums, group=tokens.state.processes)  # pyright: ignore

        # The sums for each pair of bounds, in the order in which pairs are tried: first the lower bound moves to
        # max_lower, then the upper one to max_upper.
        pairs = len(lowers) + len(uppers) - 1
        gains = torch.cat([gains[:1].expand(len(lowers)), gains[1:]])
        losses = torch.cat([losses, losses[-1:].expand(len(uppers) - 1)])
        enough = gains >= self.share * (gains + losses)
        # If no pair reaches the share, the last one is used.
        enough = enough | (torch.arange(pairs, device=enough.device) == pairs - 1)
        # The index of the first pair that reaches the share stays a tensor, since a Python number would have to be read
        # from the device. The bounds are computed from it, since a table of them would have to be copied to the device.
        first = enough.byte().argmax().view(1).to(log_ratio.dtype)
        lower = self.lower + self.step * first.clamp(max=len(lowers) - 1)
        upper = self.upper + self.step * (first - (len(lowers) - 1)).clamp(min=0)
        return RatioBounds(
            log_lower=lower.clamp(max=self.max_lower).log(),
            log_upper=upper.clamp(max=self.max_upper).log(),
        )


def _steps(start: float, end: float, step: float) -> list[float]:
    """Return the numbers from ``start`` in steps of ``step``, with ``end`` as the last."""
    count = math.ceil((end - start) / step - 1e-9)  # 0.3/0.05 is 5.999… or 6.000… in floating point
    return [start + k * step for k in range(count)] + [end]


@dataclass(frozen=True)
class SecondMoment(TokenRule):
    """M2PO's bounds ``[e^−τ, e^τ]``, the widest under which the second moment of log-ratios is small enough.

    The second moment is the mean of ``(log r)²`` over the tokens that have moved as the advantage pushes, A > 0 and
    r > 1 or A < 0 and r < 1, and that the bounds do not block. Tokens with the largest ``abs(log r)`` are left out, one
    after the other, until the mean is at most ``threshold``; τ is the largest ``abs(log r)`` that remains. The mean is
    taken over the update: the batch of the loss, and the batches of all processes in ``TrainingState(processes=…)``.

    Args:
        threshold: Largest second moment, > 0. The paper uses 0.04 throughout.

    Source: arXiv 2510.01161. Tokens with equal ``abs(log r)`` are left out together. The authors' code differs from the
    paper: its mean is that of ``min((log r)², τ²)`` over all tokens that have moved as the advantage pushes, and its
    bounds are never narrower than [0.7, 1.5].

    >>> old, advantages = torch.full((1, 3), 0.08).log(), torch.ones(1, 3)
    >>> tokens = Batch.read(torch.tensor([[0.088, 0.096, 0.16]]).log(), old, advantages).tokens(SecondMoment())
    >>> tokens.bounds.upper, tokens.blocked
    (tensor([[1.2000, 1.2000, 1.2000]]), tensor([[False, False,  True]]))
    """

    threshold: float = 0.04

    def __post_init__(self) -> None:
        _checks.number("threshold", self.threshold, "above 0", lambda x: x > 0)

    @property
    def whole_batch(self) -> bool:
        return True

    @property
    def within_process(self) -> bool:
        return False

    def for_tokens(self, tokens: TokenData) -> RatioBounds:
        update = UpdateTokens(tokens)
        log_ratio = update.gather(tokens.log_ratio_anchor)
        outward = (update.gather(tokens.advantages) * log_ratio > 0) & update.counted
        distance, _ = log_ratio.abs().masked_fill(~outward, math.inf).sort()
        # The mean of the n smallest squares increases with n, so the number that may remain is a count.
        squares = distance.to(_checks.widest_float(distance.device)).square()
        means = squares.cumsum(0) / torch.arange(1, len(squares) + 1, device=squares.device)
        number = (means <= self.threshold).sum().view(1)
        # The smallest distance that is left out. Tokens of equal distance are left out with it, such as all tokens of a
        # sequence at the level ``sequence``.
        smallest_excluded = distance.gather(0, number.clamp(max=len(distance) - 1))
        largest = distance.masked_fill(distance >= smallest_excluded, 0.0).max()
        bound = torch.where(number == outward.sum(), math.inf, largest)
        return RatioBounds(log_lower=-bound, log_upper=bound)


@dataclass(frozen=True)
class PrefixBudget(TokenRule):
    """CPPO's trust region, which is narrower for early tokens and after a prefix that has moved far.

    A token is inside of the region if its divergence D satisfies ``v·D ≤ min(δ, δ + b·V − S)``. δ is the band's radius,
    and the factor ``v`` falls linearly from 1 at the sequence's first token to ``last_weight`` at its last. ``V`` and
    ``S`` are the sums of ``v`` and of ``v·D`` over the tokens before it. ``b`` is the 90th percentile of D over the
    sequence, within ``[budget, 2·budget]``.

    Args:
        band: The trust region of a token with the factor 1 after a prefix within its budget.
        budget: Divergence per token that a prefix may have on average, > 0.
        last_weight: Factor of a sequence's last token, in (0, 1].

    Source: arXiv 2606.10968, with the total variation of the sampled token as D and a radius of 0.15 for dense models,
    0.2 for a mixture of experts; the percentile as in its authors' code.

    >>> old, advantages = torch.full((1, 3), 0.2).log(), torch.ones(1, 3)
    >>> tokens = Batch.read(torch.tensor([[0.5, 0.3, 0.3]]).log(), old, advantages).tokens(PrefixBudget())
    >>> tokens.blocked  # the divergences are 0.3, 0.1 and 0.1; after the first nothing is left of the radius
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
        # One that is infinite would leave no number for the tokens after it.
        divergence = divergence.clamp(max=RADII[1])
        factor = 1 - (1 - self.last_weight) * tokens.position / (tokens.length - 1).clamp(min=1.0)
        factor = factor.to(logp.dtype)
        per_sequence = tokens.sequences.quantile(divergence, 0.9).clamp(self.budget, 2 * self.budget)
        budget = tokens.sequences.at_tokens(per_sequence)
        remainder = budget * tokens.sequence_before(factor) - tokens.sequence_before(factor * divergence)
        radius = self.band.radius_for(logp) + remainder.clamp(max=0.0)
        # The smallest radius blocks every ratio except 1.
        radius = (radius / factor).clamp(*RADII)
        # Return bounds instead of the band: with a radius near 0, the audit's share of the radius would be infinite.
        return Band(self.band.divergence, radius, self.band.max_ratio).bounds(logp)
