"""A theory of the share of a rare answer's gradient that a clip blocks: see reports/rules-compared.md.

The theory assumes that each gradient of an answer raises its log-probability by the same amount, which momentum spreads
over later updates; that other answers and prompts do not change it; and that earlier batches contain it equally often.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field

import torch

from bandpo.core.rules import ClipRule, FixedClip
from bandpo_lab.errors import InvalidValue


def applied_gradients(updates: float, momentum: float) -> float:
    """Compute how many of ``updates`` equal gradients momentum has applied to the weights, from zero momentum.

    S(k) = k − β(1 − β^k)/(1 − β). Momentum applies the remainder later, even if later tokens are blocked.

    >>> applied_gradients(3, momentum=0.0), round(applied_gradients(3, momentum=0.9), 3)
    (3.0, 0.561)
    """
    return updates - (momentum - momentum ** (updates + 1)) / (1 - momentum)


@dataclass(frozen=True)
class RareAnswer:
    """A rare answer in a training run: its probability, and the schedule of its gradients.

    Args:
        probability: Probability of the rare token, or of the strategy that it opens, in one sample.
        batch: Samples in a batch that could draw it.
        epochs: Number of updates with each sample.
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
        """Return the number of optimizer steps on a batch."""
        return self.epochs * self.minibatches

    @property
    def bound(self) -> float:
        """Return the rule's upper bound on the ratio of the answer."""
        return float(self.rule.bounds(torch.tensor(self.probability, dtype=torch.float64).log()).upper)

    @property
    def updates_with_answer(self) -> float:
        """Return the expected number of updates of a batch that contain the answer, if the batch contains it."""
        return self.updates * self._chance_in_minibatch / self._chance(self.batch)

    @property
    def stale_updates_with_answer(self) -> float:
        """Return the expected number of updates with the answer between sampling and first update of a batch."""
        return self.lag * self.updates * self._chance_in_minibatch

    @property
    def _chance_in_minibatch(self) -> float:
        return self._chance(self.batch / self.minibatches)

    def _chance(self, samples: float) -> float:
        """Compute the probability that the answer is among ``samples`` samples: 1 − (1 − p)^n."""
        return -math.expm1(samples * math.log1p(-self.probability))

    def log_ratio_change(self, unblocked: float = 1.0, *, no_momentum: bool = False) -> float:
        """Compute the change of the log-ratio at the last unblocked gradient, in units of one gradient.

        Stale gradients have been applied. Those of the batch itself are ``updates / updates_with_answer`` updates
        apart, and momentum has not applied all of them. Momentum also applies the remainder from earlier batches.

        Args:
            unblocked: The share of the answer's gradients that is not blocked.
            no_momentum: If True, no momentum is left from earlier batches.
        """
        distance = self.updates / self.updates_with_answer
        earlier = max(0.0, unblocked * self.updates_with_answer - 1)
        pending = earlier * distance - applied_gradients(earlier * distance, self.momentum)
        from_earlier_batches = 0.0 if no_momentum else unblocked * self._chance_in_minibatch * pending
        stale = unblocked * self.stale_updates_with_answer
        return stale + applied_gradients(earlier, self.momentum**distance) + from_earlier_batches

    @property
    def binding_rise(self) -> float:
        """Return the nats per gradient above which the rule blocks an answer without earlier momentum.

        The value is infinite if the ratio of the answer stays 1.
        """
        change = self.log_ratio_change(no_momentum=True)
        return math.log(self.bound) / change if change > 0 else math.inf

    def blocked_share(self, rise: float) -> float:
        """Compute the share of the answer's gradient that lies beyond the upper bound.

        A blocked gradient has no effect. So the unblocked gradients, stale ones and the batch's own, are as many as
        move the ratio to the bound; the first is never blocked.

        Args:
            rise: Nats by which one gradient raises the answer's log-probability, once momentum has applied all of it.

        >>> RareAnswer(0.002, 128, epochs=16, minibatches=1).blocked_share(0.6)  # 2 of 16 are not blocked
        0.875
        """
        rises_to_bound = math.log(self.bound) / rise
        gradients = self.updates_with_answer + self.stale_updates_with_answer
        unblocked_after_first = bisect_right(
            range(2, math.ceil(gradients) + 1),
            rises_to_bound,
            key=lambda n: self.log_ratio_change(min(1, n / gradients)),
        )
        return 1 - min(1, (1 + unblocked_after_first) / gradients)
