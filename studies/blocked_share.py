"""A theory of how much of a rare answer's gradient a clip blocks, described in docs/when.md.

The theory assumes that each gradient of an answer raises its log-probability by the same amount, which momentum spreads
over later updates, that other answers and prompts move it neither up nor down, and that the batches before draw it as
often.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field

import torch

from bandpo.errors import InvalidValue
from bandpo.rules import ClipRule, FixedClip


def arrived(updates: float, momentum: float) -> float:
    """Compute how many of ``updates`` equal gradients have moved the weights by now, from rest.

    S(k) = k − β(1 − β^k)/(1 − β). Momentum moves the weights by the rest later, whether later tokens are blocked or
    not.

    >>> arrived(3, momentum=0.0), round(arrived(3, momentum=0.9), 3)
    (3.0, 0.561)
    """
    return updates - (momentum - momentum ** (updates + 1)) / (1 - momentum)


@dataclass(frozen=True)
class RareAnswer:
    """A rare answer in a run: how often it is drawn, and how its gradients follow each other.

    Args:
        probability: Probability of the rare token, or of the strategy that it opens, in one sample.
        batch: Samples in a batch that could draw it.
        epochs: How often each sample is used.
        minibatches: Optimizer steps in an epoch.
        lag: Batches that are trained on between the sampling of a batch and its first update.
        momentum: β1 of Adam, or the momentum of SGD.
        rule: The clip rule.

    Raises:
        ValueError: if a number is out of range.
    """

    probability: float
    batch: int
    epochs: int
    minibatches: int
    lag: int = 0
    momentum: float = 0.9
    rule: ClipRule = field(default_factory=FixedClip)

    def __post_init__(self) -> None:
        if not 0 < self.probability < 1:
            raise InvalidValue(f"probability must be between 0 and 1, got {self.probability:g}")
        if not 0 <= self.momentum < 1:
            raise InvalidValue(f"momentum must be at least 0 and below 1, got {self.momentum:g}")
        if min(self.batch, self.epochs, self.minibatches) < 1 or self.lag < 0:
            raise InvalidValue("batch, epochs and minibatches must be at least 1, and lag at least 0")

    @property
    def updates(self) -> int:
        """Optimizer steps on a batch."""
        return self.epochs * self.minibatches

    @property
    def bound(self) -> float:
        """The rule's upper bound on the answer's ratio."""
        return float(self.rule.bounds(torch.tensor(self.probability, dtype=torch.float64).log()).upper)

    @property
    def updates_with_it(self) -> float:
        """Expected updates of a batch that hold the answer, given that the batch draws it."""
        return self.updates * self._chance_in_minibatch / self._chance(self.batch)

    @property
    def stale_updates_with_it(self) -> float:
        """Expected updates that hold it between the sampling of a batch and its first update."""
        return self.lag * self.updates * self._chance_in_minibatch

    @property
    def _chance_in_minibatch(self) -> float:
        return self._chance(self.batch / self.minibatches)

    def _chance(self, samples: float) -> float:
        """Compute the chance that so many samples hold the answer: 1 − (1 − p)^n."""
        return -math.expm1(samples * math.log1p(-self.probability))

    def moved(self, kept: float = 1.0, *, rest: bool = False) -> float:
        """Compute how far the ratio has moved at the last gradient that is kept, in gradients.

        Stale gradients have arrived. Those of the batch itself are ``updates / updates_with_it`` updates apart, and
        momentum has not applied all of them. Meanwhile it applies what is left of earlier batches, unless these left
        the answer at ``rest``.

        Args:
            kept: The share of the answer's gradients that is not blocked.
            rest: Whether earlier batches left no momentum.
        """
        apart = self.updates / self.updates_with_it
        earlier = max(0.0, kept * self.updates_with_it - 1)
        pending = earlier * apart - arrived(earlier * apart, self.momentum)
        from_earlier_batches = 0.0 if rest else kept * self._chance_in_minibatch * pending
        return (
            kept * self.stale_updates_with_it + arrived(earlier, self.momentum**apart) + from_earlier_batches
        )

    @property
    def binding_rise(self) -> float:
        """Nats per gradient from which the rule blocks an answer that was at rest; infinite if its ratio stays 1."""
        moved = self.moved(rest=True)
        return math.log(self.bound) / moved if moved > 0 else math.inf

    def blocked_share(self, rise: float) -> float:
        """Compute the share of the answer's gradient that lies beyond the upper bound.

        A blocked gradient moves nothing. So as many gradients are kept, stale ones and the batch's own, as bring the
        ratio to the bound; the first is always kept.

        Args:
            rise: Nats by which one gradient raises the answer's log-probability in the end.

        >>> RareAnswer(0.002, 128, epochs=16, minibatches=1).blocked_share(0.6)  # 2 of 16 are kept
        0.875
        """
        rises_to_bound = math.log(self.bound) / rise
        every = self.updates_with_it + self.stale_updates_with_it
        more = bisect_right(
            range(2, math.ceil(every) + 1),
            rises_to_bound,
            key=lambda n: self.moved(min(1, n / every)),
        )
        return 1 - min(1, (1 + more) / every)
