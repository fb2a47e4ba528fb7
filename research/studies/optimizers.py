"""Optimizers of tables of logits.

The tables of all learning rates and seeds are rows of one tensor. The parameters of a row are updated with the learning
rate of that row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Float
    from torch import Tensor

BETA1 = 0.9
BETA2 = 0.99
"""The decay rates of Adam's moments, as in the studies of networks."""
MOMENTUM = 0.9
"""The momentum of stochastic gradient descent."""
WIDTH = 16
"""The size of a hidden state of `HeadAndTrunk`."""
_EPSILON = 1e-8


class TableOptimizer(ABC):
    """An optimizer with the parameters of the tables.

    Attributes:
        logits: The logits of the tables, of shape ``(rows, decisions, answers)``. They require a gradient.
    """

    logits: Float[Tensor, "rows decisions answers"]

    @abstractmethod
    def step(
        self, gradient: Float[Tensor, "rows decisions answers"], rates: Float[Tensor, "rows 1 1"]
    ) -> None:
        """Update ``logits``.

        Args:
            gradient: The gradient of the loss with respect to ``logits``.
            rates: The learning rate of each row.
        """


class Moments:
    """Adam's moments of a parameter.

    Args:
        parameter: A parameter with three dimensions, of which the first is rows.
        shared: If True, all elements of a row share one second moment, the mean of their squared gradients.
        beta2: The decay rate of the second moment.
    """

    def __init__(self, parameter: Tensor, *, shared: bool = False, beta2: float = BETA2):
        self._first = torch.zeros_like(parameter)
        self._second = parameter.new_zeros(len(parameter), 1, 1) if shared else torch.zeros_like(parameter)
        self._shared = shared
        self._beta2 = beta2
        self._steps = 0

    def direction(self, gradient: Tensor) -> Tensor:
        """Update the moments with a gradient, and return Adam's step at learning rate 1."""
        self._steps += 1
        squares = gradient.square()
        if self._shared:
            squares = squares.mean((1, 2), keepdim=True)
        self._first.lerp_(gradient, 1 - BETA1)
        self._second.lerp_(squares, 1 - self._beta2)
        scale = (self._second / (1 - self._beta2**self._steps)).sqrt() + _EPSILON
        return self._first / (1 - BETA1**self._steps) / scale


class Adam(TableOptimizer):
    """Adam whose parameters are the logits.

    Args:
        start: The initial logits, of shape ``(rows, decisions, answers)``.
        seeds: Not used.
        shared: If True, a table has one second moment, in place of one for each logit. A logit that is seldom sampled
            then moves slowly; standard Adam moves it as fast as any other.
    """

    def __init__(self, start: Tensor, seeds: int, *, shared: bool = False):
        self.logits = start.clone().requires_grad_()
        self._moments = Moments(start, shared=shared)

    def step(self, gradient: Tensor, rates: Tensor) -> None:
        with torch.no_grad():
            self.logits -= rates * self._moments.direction(gradient)


class HeadAndTrunk(TableOptimizer):
    """Adam whose parameters are a head, with a column for each answer, and a hidden state for each decision.

    The logits are the initial logits plus the change of ``hidden @ head``. Answers share the hidden state and decisions
    share the head, as the tokens of a network do.

    Args:
        start: The initial logits, of shape ``(rows, decisions, answers)``.
        seeds: The number of rows of each learning rate. A seed has the same initial parameters at each learning rate.
    """

    def __init__(self, start: Tensor, seeds: int):
        rows, decisions, answers = start.shape
        generator = torch.Generator().manual_seed(1)
        repeats = rows // seeds
        hidden = torch.randn(seeds, decisions, WIDTH, generator=generator)
        head = torch.randn(seeds, WIDTH, answers, generator=generator) / WIDTH**0.5
        self._hidden = hidden.repeat(repeats, 1, 1)
        self._head = head.repeat(repeats, 1, 1)
        self._offset = start - self._hidden @ self._head
        self._hidden_moments = Moments(self._hidden)
        self._head_moments = Moments(self._head)
        self.logits = start.clone().requires_grad_()

    def step(self, gradient: Tensor, rates: Tensor) -> None:
        with torch.no_grad():
            hidden_gradient = gradient @ self._head.mT
            head_gradient = self._hidden.mT @ gradient
            self._hidden -= rates * self._hidden_moments.direction(hidden_gradient)
            self._head -= rates * self._head_moments.direction(head_gradient)
            self.logits.copy_(self._offset + self._hidden @ self._head)


class Momentum(TableOptimizer):
    """Stochastic gradient descent with momentum, whose parameters are the logits.

    Args:
        start: The initial logits, of shape ``(rows, decisions, answers)``.
        seeds: Not used.
    """

    def __init__(self, start: Tensor, seeds: int):
        self.logits = start.clone().requires_grad_()
        self._velocity = torch.zeros_like(start)

    def step(self, gradient: Tensor, rates: Tensor) -> None:
        with torch.no_grad():
            self._velocity.mul_(MOMENTUM).add_(gradient)
            self.logits -= rates * self._velocity


def _shared_adam(start: Tensor, seeds: int) -> Adam:
    return Adam(start, seeds, shared=True)


@dataclass(frozen=True)
class Choice:
    """An optimizer that can be chosen by name.

    Attributes:
        title: The name of the optimizer in a sentence.
        build: The constructor, from the initial logits and the number of seeds.
        rates: The learning rates to try, each twice the one before; the best is among them.
    """

    title: str
    build: Callable[[Tensor, int], TableOptimizer]
    rates: Sequence[float]


OPTIMIZERS: Mapping[str, Choice] = {
    "adam": Choice("Adam", Adam, [0.02 * 2**k for k in range(8)]),
    "head-and-trunk": Choice("Adam of a head and a trunk", HeadAndTrunk, [0.001 * 2**k for k in range(8)]),
    "shared-moment": Choice(
        "Adam with one second moment a table", _shared_adam, [0.01 * 2**k for k in range(8)]
    ),
    "momentum": Choice("SGD with momentum", Momentum, [0.0625 * 2**k for k in range(8)]),
}
"""The optimizers by name. ``adam`` is standard Adam, with a second moment for each parameter."""
