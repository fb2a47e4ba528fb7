"""The gradient of a loss by the log-probabilities of its tokens, beside that of a method.

A trainer's aggregation, another plug-in or a new release can change the loss between the method and the optimiser step.
The gradient with respect to ``logp`` shows every such change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from bandpo.core.batch import Batch
from bandpo.core.methods import Method

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

TOLERANCE = 1e-4
"""Largest difference that counts as rounding. Float32 losses differ by at most 4e-7, also under autocast; losses with
another clip, advantage or aggregation differ by more than 1e-2."""
ROUNDING = 1e-6
"""Largest rounding error of a log-probability, relative to the larger of 1 and its size: 8 units in float32's last
place."""


def slope(method: Method, batch: Batch) -> Float[Tensor, "batch time"]:
    """Compute the derivative of each token's loss with respect to its log-probability, ``−(w·A + b)``.

    Importance weights are included, the aggregation is not.
    """
    with torch.no_grad():
        tokens = method.tokens(batch)
        objective = method.objective.resolve(batch.state)
        derivative = objective.weight(tokens) * batch.advantages
        bias = objective.bias(tokens)
        if bias is not None:
            derivative = derivative + bias * batch.mask
        derivative = -derivative
        token_weights = batch.token_weights
        if token_weights is None or objective.weights_inside:
            return derivative
        return derivative * token_weights


def near_discontinuity(method: Method, batch: Batch) -> Bool[Tensor, "batch time"]:
    """Mark the tokens so close to a bound, or to another discontinuity of the weight, that rounding decides."""
    derivative = slope(method, batch)
    size = ROUNDING * (batch.logp_old + batch.log_ratio).abs().clamp(min=1.0)
    # A smooth weight changes by about ROUNDING, a discontinuous one by much more than its square root.
    threshold = ROUNDING**0.5 * derivative.abs().clamp(min=ROUNDING)
    jumps: list[Tensor] = []
    for sign in (-1, 1):
        shifted = batch._replace(log_ratio=batch.log_ratio + sign * size)
        jumps.append((slope(method, shifted) - derivative).abs() > threshold)
    return torch.stack(jumps).any(0)


def relative_differences(x: Tensor, expected: Tensor, unit: Tensor) -> Float[Tensor, "batch time"]:
    """Return the difference of each token, relative to the larger value and at least to a unit; infinite for NaN.

    Args:
        x: A gradient.
        expected: Another one.
        unit: The gradient of a token with an advantage and a weight of 1.

    >>> ones = torch.ones(3)
    >>> relative_differences(torch.tensor([1.0, 2.0, torch.nan]), ones, ones)
    tensor([0.0000, 0.5000,    inf], dtype=torch.float64)
    """
    x, expected = x.double(), expected.double()
    scale = torch.maximum(torch.maximum(x.abs(), expected.abs()), unit.abs())
    return ((x - expected).abs() / scale.clamp(min=1e-300)).nan_to_num(nan=torch.inf)


@dataclass(frozen=True, eq=False)
class PolicyTerm:
    """The gradient of a loss's policy term, and what it should be; tensors of shape (batch, time)."""

    gradient: Float[Tensor, "batch time"]
    """The gradient by the log-probabilities."""
    method: Method
    """The method that it should have."""
    batch: Batch
    """The batch that the loss was computed from, as the method sees it."""
    share: Float[Tensor, "batch time"]
    """The weight of each token's loss in the total: the derivative of the aggregation, times other factors."""
    by_method: Callable[[Method], Float[Tensor, "batch time"]] | None = None
    """A function that returns the gradient of a method, if that is not ``slope(method, batch)·share``."""
    place: str = ""
    """The name of the batch in messages."""

    def of(self, method: Method) -> Float[Tensor, "batch time"]:
        """Return the gradient that a method would have."""
        gradient = (
            slope(method, self.batch) * self.share if self.by_method is None else self.by_method(method)
        )
        return gradient.double().masked_fill(self.batch.mask == 0, 0.0)

    @cached_property
    def expected(self) -> Float[Tensor, "batch time"]:
        """The gradient of `method`."""
        return self.of(self.method)

    @cached_property
    def counted(self) -> Bool[Tensor, "batch time"]:
        """True for the counted tokens whose gradient rounding does not decide."""
        return (self.batch.mask > 0) & ~near_discontinuity(self.method, self.batch)

    def differences(self, expected: Tensor) -> Float[Tensor, "batch time"]:
        """Return the relative difference of each token from a gradient; that of padding must be 0."""
        compared = self.counted | (self.batch.mask == 0)
        return relative_differences(self.gradient, expected, self.share).masked_fill(~compared, 0.0)

    def is_equal_to(self, expected: Tensor, tolerance: float = TOLERANCE) -> bool:
        """Return True if the gradient is a given one, up to rounding."""
        return not bool((self.differences(expected) > tolerance).any())

    def is_equal(self, tolerance: float = TOLERANCE) -> bool:
        """Return True if the gradient is that of `method`, up to rounding."""
        return self.is_equal_to(self.expected, tolerance)

    def describe(self, token: int) -> str:
        """Return the position of a token in the flattened batch, both numbers, its ratio and its advantage."""
        position = f"{self.place}{self.batch.sequences.describe_position(token)}"
        numbers = f"{self.gradient.flatten()[token]:.4g}, expected {self.expected.flatten()[token]:.4g}"
        if self.batch.mask.flatten()[token] == 0:
            return f"{position}: {numbers}; the token does not count"
        ratio = self.batch.log_ratio.flatten()[token].exp()
        advantage = self.batch.advantages.expand_as(self.batch.mask).flatten()[token]
        return f"{position}: {numbers}, at a ratio of {ratio:.4g} and an advantage of {advantage:.3g}"
