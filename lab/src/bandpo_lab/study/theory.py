"""When a clip rule can matter: how far a rare winner rises within a batch, and how often it is drawn at all.

Argued in docs/theory.md, and held against the map of `bandpo_lab.study.cells`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from bandpo.errors import InvalidValue
from bandpo.rules import ClipRule, FixedClip
from bandpo_lab.study.tabular import Optimizer

LIFT_PER_STEP = 0.35
"""Nats by which Adam lifts a rare winner in one update, for each unit of learning rate × √parameters.

When each weight moves by about the learning rate, and its gradient's parts are of one size, a token's log-probability
moves by learning rate × √parameters × the gradient's norm. Measured on two models: 0.35 in the embedded one (335k
parameters, 1e-4: clip 0.2 binds after 9 updates), and within a factor of 4 of it in a model of 135M at 3e-6."""
LIFT_FACTOR = 4.0
"""By what factor that may be off, either way."""

SCARCE, PLENTY = 0.3, 3.0
"""Draws of the tail in a batch: below the first the rule shows clearly in the map, above the second not at all."""


def growth(lift: float, updates: int, bound: float, overshoot: float = 1.0) -> float:
    """Nats by which a rare winner's log-probability rises in one batch: min(updates·lift, ln bound + overshoot·lift).

    It rises by ``lift`` in each update until its ratio meets the bound. From there on it has no gradient, but momentum
    carries it on for ``overshoot`` updates in all.

    Args:
        lift: Nats in one update.
        updates: On each batch.
        bound: The rule's upper bound on its ratio; ``inf`` for none.
        overshoot: 1 for plain SGD, up to 1/(1 − β1) with momentum.

    >>> round(growth(0.05, updates=16, bound=1.2, overshoot=10), 3)  # 0.182 up to the clip, 0.5 beyond it
    0.682
    >>> round(growth(0.05, updates=4, bound=1.2, overshoot=10), 3)  # the batch is over before
    0.2
    """
    return min(updates * lift, math.log(bound) + overshoot * lift)


def binding_updates(lift: float, bound: float = 1.2, overshoot: float = 1.0) -> float:
    """Updates on a batch above which a bound holds a rare winner back: overshoot + ln bound / lift.

    >>> round(binding_updates(0.05, overshoot=10), 1)
    13.6
    """
    return overshoot + math.log(bound) / lift


def lift_when_binding(updates: int, bound: float = 1.2, overshoot: float = 1.0) -> float:
    """Nats per update above which a bound holds a rare winner back; infinite where momentum alone outlasts the batch.

    >>> round(lift_when_binding(16, overshoot=10), 3), lift_when_binding(4, overshoot=10)
    (0.03, inf)
    """
    return math.log(bound) / (updates - overshoot) if updates > overshoot else math.inf


def lift_from_clipping(clipped: float, updates: int, bound: float = 1.2) -> float:
    """Nats per update, from the share of a rare winner's updates that found it beyond the bound.

    It met the bound after ``(1 − clipped)·updates`` of them; where ``clipped`` is 0, this is the most it can be.

    Raises:
        ValueError: ``clipped`` is no share below 1.

    >>> round(lift_from_clipping(0.43, updates=16), 3)
    0.02
    """
    if not 0 <= clipped < 1:
        raise InvalidValue(f"the share clipped must be at least 0 and below 1, got {clipped:g}")
    return math.log(bound) / ((1 - clipped) * updates)


@dataclass(frozen=True)
class Placement:
    """A run's place in the map.

    Args:
        tail: Probability of the rare token, or of the strategy that it opens.
        batch: Samples in a batch that could draw it.
        updates: Optimizer steps on a batch.
        optimizer: Which.
        lift: Least and greatest nats by which an update lifts a rare winner; equal where it is known, None where
            nothing is.
        rule: The clip rule in use.

    Raises:
        ValueError: a number out of range.
    """

    tail: float
    batch: int
    updates: int
    optimizer: Optimizer
    lift: tuple[float, float] | None = None
    rule: ClipRule = field(default_factory=FixedClip)

    def __post_init__(self) -> None:
        if not 0 < self.tail < 1:
            raise InvalidValue(f"--tail {self.tail:g}: it is a probability, so choose it between 0 and 1")
        for name, value in (("--batch", self.batch), ("--updates", self.updates)):
            if value < 1:
                raise InvalidValue(f"{name} {value}: choose at least 1")
        if self.lift and not 0 < self.lift[0] <= self.lift[1] < math.inf:
            raise InvalidValue(
                f"the lift of one update must be finite and above 0, got {self.lift[1]:g} nats"
            )

    @property
    def draws(self) -> float:
        """How often a batch draws the tail: N·p."""
        return self.batch * self.tail

    @property
    def bound(self) -> float:
        """The rule's upper bound on the tail's ratio."""
        return float(self.rule.bounds(torch.tensor([self.tail], dtype=torch.float64).log()).upper)

    @property
    def binding_lift(self) -> float:
        """Nats per update from which the rule holds the tail back."""
        return lift_when_binding(self.updates, self.bound, self.optimizer.overshoot)

    @property
    def binds(self) -> bool | None:
        """Whether the rule holds a rare winner back; None where the lift is not known well enough to say."""
        if self.updates <= 1 or math.isinf(self.bound) or math.isinf(self.binding_lift):
            return False
        if self.lift is None:
            return None
        low, high = (lift > self.binding_lift for lift in self.lift)
        return low if low == high else None

    @property
    def supply(self) -> str:
        """``scarce``, ``some`` or ``plenty``: how the number of draws compares with what the map needs."""
        return "scarce" if self.draws < SCARCE else "some" if self.draws < PLENTY else "plenty"

    @property
    def verdict(self) -> str:
        """``no``, ``yes``, ``a little`` or ``open``: whether another upper side can change how soon it is found."""
        if self.binds is False or self.supply == "plenty":
            return "no"
        if self.binds is None:
            return "open"
        return "yes" if self.supply == "scarce" else "a little"


def lift_from_rate(learning_rate: float, parameters: float) -> tuple[float, float]:
    """Rough least and greatest nats per update of a rare winner under Adam; see `LIFT_PER_STEP`.

    Raises:
        ValueError: a number that is not above 0.

    >>> low, high = lift_from_rate(1e-4, parameters=335e3)
    >>> round(low, 4), round(high, 4)
    (0.0051, 0.081)
    """
    if not (learning_rate > 0 and parameters > 0):
        raise InvalidValue(
            f"learning rate {learning_rate:g} and {parameters:g} parameters must both be above 0"
        )
    middle = LIFT_PER_STEP * learning_rate * math.sqrt(parameters)
    return middle / LIFT_FACTOR, middle * LIFT_FACTOR
