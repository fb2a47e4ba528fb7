"""Tables in place of networks: small worlds of one decision or two, where a clip rule meets `policy_loss` and no more.

A policy is a table of logits, one row for each decision; a completion takes one answer at each. Rewards are 0 or 1,
advantages those of GRPO. All seeds and learning rates of a cell are rows of one tensor, so a cell takes seconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from bandpo.errors import InvalidValue
from bandpo.loss import policy_loss
from bandpo.rules import ClipRule

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

ANSWERS = 16
GROUP = 16
"""Samples whose mean and standard deviation make an advantage."""
RIGHT, WRONG = 0.97, 0.05
"""How often the good answer is rewarded, and any other."""
RARE = 0.1
"""Probability below which an answer is rare, as the audit has it."""
_STD_EPSILON = 1e-4  # TRL adds it to a group's standard deviation


@dataclass(frozen=True)
class Optimizer:
    """SGD, momentum or Adam.

    Raises:
        ValueError: ``momentum`` outside of [0, 1).
    """

    momentum: float = 0.0
    """β1 of Adam."""
    adam: bool = False
    beta2: float = 0.99

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise InvalidValue(f"momentum (β1) must be at least 0 and below 1, got {self.momentum:g}")


ADAM = Optimizer(0.9, adam=True)


@dataclass(frozen=True)
class Stage:
    """What is rewarded for a while: each answer at one of the decisions, with some chance."""

    decision: int
    chances: Sequence[float]


@dataclass(frozen=True)
class World:
    """Where a policy starts, and what it is rewarded for.

    The answer to be found is answer 0 of the last stage's decision.
    """

    start: Sequence[Sequence[float]]
    """For each decision the probabilities of its answers."""
    stages: Sequence[Stage]
    """Of equal length, one after the other."""


def rare_arm(p: float, others: Sequence[float] = (1,) * (ANSWERS - 1)) -> World:
    """One decision among 16 answers. One of them is right 97 times in 100, and has probability ``p`` at the start.

    Args:
        others: What the probabilities of the wrong answers are in proportion to.

    Raises:
        ValueError: ``p`` is no probability.

    >>> rare_arm(0.01).start[0][:2]
    (0.01, 0.066)
    """
    return World([_one_rare(p, others)], [Stage(0, _FIRST_IS_GOOD)])


def dominant(p: float) -> World:
    """`rare_arm`, where one wrong answer has probability 0.98.

    >>> [round(x, 4) for x in dominant(0.01).start[0][:3]]
    [0.01, 0.98, 0.0007]
    """
    return rare_arm(p, [0.98, *[(0.02 - p) / (ANSWERS - 2)] * (ANSWERS - 2)])


def zipf(p: float) -> World:
    """`rare_arm`, where the wrong answer of rank k is in proportion to k^-1.5.

    >>> [round(x, 3) for x in zipf(0.01).start[0][:3]]
    [0.01, 0.47, 0.166]
    """
    return rare_arm(p, [rank**-1.5 for rank in range(1, ANSWERS)])


def two_stages(p: float) -> World:
    """Two decisions. Rewards look at the first until half-time, at the second from then on.

    Until then answers to the second are drawn, and pushed about by rewards that have nothing to do with them. The good
    answer of the first has probability 0.05 at the start, that of the second ``p``.

    Raises:
        ValueError: ``p`` is no probability.
    """
    return World([_one_rare(0.05), _one_rare(p)], [Stage(0, _FIRST_IS_GOOD), Stage(1, _FIRST_IS_GOOD)])


def _one_rare(p: float, others: Sequence[float] = (1,) * (ANSWERS - 1)) -> tuple[float, ...]:
    if not 0 < p < 1:
        raise InvalidValue(f"p must lie between 0 and 1, got {p:g}")
    return (p, *((1 - p) * share / sum(others) for share in others))


_FIRST_IS_GOOD = (RIGHT, *[WRONG] * (ANSWERS - 1))


class _Steps:
    """An optimizer at work on tables, each of them on its own.

    Adam has one second moment here for the whole table: the mean square of its gradient. With one for each logit, as a
    network has for each weight, an answer that is hardly ever drawn would move as fast as any other. A network's
    answers share their weights; those of a table do not.
    """

    def __init__(self, optimizer: Optimizer, tables: Tensor):
        self.optimizer, self.count = optimizer, 0
        self.mean, self.square = torch.zeros_like(tables), tables.new_zeros(len(tables), 1, 1)

    def next(self, gradient: Tensor) -> Tensor:
        """What to subtract, at learning rate 1."""
        o = self.optimizer
        self.count += 1
        if not o.adam:
            return self.mean.mul_(o.momentum).add_(gradient)
        self.mean.lerp_(gradient, 1 - o.momentum)
        self.square.lerp_(gradient.square().mean((1, 2), keepdim=True), 1 - o.beta2)
        scale = (self.square / (1 - o.beta2**self.count)).sqrt() + 1e-8
        return self.mean / (1 - o.momentum**self.count) / scale


@dataclass(frozen=True)
class Outcome:
    """What came of a cell, for every learning rate and seed."""

    rewards: Float[Tensor, "rates seeds batches"]
    """Mean reward of each batch."""
    blocked: Float[Tensor, "rates seeds"]
    """Share of the gradient of rare winners (p < 0.1, A > 0) that the rule blocked, of all updates together."""

    @property
    def auc(self) -> Float[Tensor, "rates seeds"]:
        """Mean reward over all batches."""
        return self.rewards.mean(-1)


def simulate(
    world: World,
    rule: ClipRule,
    optimizer: Optimizer,
    learning_rates: Sequence[float],
    *,
    seeds: int,
    samples: int = 128,
    epochs: int = 4,
    minibatches: int = 4,
    batches: int = 80,
    lag: int = 0,
) -> Outcome:
    """Train tables under a clip rule, with GRPO's advantages and `bandpo.policy_loss`.

    A seed draws the same random numbers for every rule, optimizer and learning rate.

    Each learning rate is run with every seed. The optimizer's state goes on from batch to batch.

    Args:
        samples: Completions in a batch, a multiple of 16.
        epochs: How often each sample is used.
        minibatches: Parts of a batch, with an optimizer step each.
        lag: So many batches are drawn before a batch is trained on; nothing is trained before the first, nor after the
            last is drawn.

    Raises:
        ValueError: a number that does not fit.

    >>> found = simulate(rare_arm(0.05), FixedClip(0.2), ADAM, [0.05], seeds=4, batches=30)
    >>> found.rewards.shape, bool((found.auc > 0.5).all())
    (torch.Size([1, 4, 30]), True)
    """
    if samples % GROUP or samples < GROUP:
        raise InvalidValue(f"samples must be a multiple of {GROUP}, the size of a group, got {samples}")
    if min(seeds, epochs, minibatches, batches, lag + 1) < 1 or not min(learning_rates, default=0.0) > 0:
        raise InvalidValue(
            f"must be above 0, lag at least 0: {seeds=} {epochs=} {minibatches=} {batches=} {learning_rates=} {lag=}"
        )
    generator = torch.Generator().manual_seed(0)
    rows, decisions = len(learning_rates) * seeds, len(world.start)
    logits = torch.tensor(world.start).log().repeat(rows, 1, 1).requires_grad_()
    rates = torch.tensor(learning_rates).repeat_interleave(seeds)[:, None, None]
    steps = _Steps(optimizer, logits.detach())
    rewards, waiting, mass = [], deque(), torch.zeros(2, rows)
    for batch in range(batches):
        stage = world.stages[batch * len(world.stages) // batches]
        with torch.no_grad():
            logp_old = logits.log_softmax(-1)
            draws = torch.rand(seeds, decisions + 1, samples, generator=generator)
            draws = draws.repeat(len(learning_rates), 1, 1)
            # The last answer lies beyond the last edge.
            edges = logp_old.exp().cumsum(-1)[..., :-1].contiguous()
            answers = torch.searchsorted(edges, draws[:, :-1].contiguous())
            reward = (draws[:, -1] < torch.tensor(stage.chances)[answers[:, stage.decision]]).float()
            waiting.append((_as_tokens(logp_old), _parts(answers, _advantages(reward), minibatches)))
        rewards.append(reward.mean(-1))
        if len(waiting) <= lag:
            continue
        old, parts = waiting.popleft()
        bound = rule.bounds(old).log_upper
        for part in parts * epochs:
            logp = _as_tokens(logits.log_softmax(-1))
            loss, _ = policy_loss(logp, old, part, clip=rule, aggregation="sum")
            (gradient,) = torch.autograd.grad(loss, logits)
            with torch.no_grad():
                rise = logp.detach() - old
                pushed = rise.exp() * part * ((part > 0) & (old < math.log(RARE)))
                mass += torch.stack([pushed.sum(-1), (pushed * (rise > bound)).sum(-1)])
                logits -= rates * steps.next(gradient)
    shape = (len(learning_rates), seeds)
    every, blocked = mass.view(2, *shape)
    return Outcome(torch.stack(rewards, -1).view(*shape, batches), blocked / every)


def _advantages(reward: Float[Tensor, "rows samples"]) -> Float[Tensor, "rows samples"]:
    """Within each group: reward minus mean, over the standard deviation."""
    groups = reward.view(len(reward), -1, GROUP)
    apart = groups - groups.mean(-1, keepdim=True)
    return (apart / (groups.std(-1, keepdim=True) + _STD_EPSILON)).view_as(reward)


def _parts(
    answers: Tensor, advantages: Float[Tensor, "rows samples"], minibatches: int
) -> list[Float[Tensor, "rows tokens"]]:
    """For each minibatch the mean advantage that it gives to each token of `_as_tokens`."""
    rows, decisions, samples = answers.shape
    found = []
    for part in range(minibatches):
        drawn = answers[..., part::minibatches]
        pushes = advantages[:, None, part::minibatches].expand(-1, decisions, -1)
        sums = torch.zeros(rows, decisions, 2 * ANSWERS)
        sums.scatter_add_(-1, drawn + ANSWERS * (pushes < 0), pushes)
        found.append(sums.flatten(1) / (samples / minibatches))
    return found


def _as_tokens(logp: Float[Tensor, "rows decisions answers"]) -> Float[Tensor, "rows tokens"]:
    """Every answer twice: once for the samples of it that won, once for those that lost.

    All samples of an answer have one ratio, and the loss is linear in the advantages of one sign, so it is that of the
    samples themselves.
    """
    return torch.cat([logp, logp], -1).flatten(1)
