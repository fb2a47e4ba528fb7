"""Tables in place of networks: small worlds of one decision or two, where a method meets `policy_loss` and no more.

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
from bandpo.methods import Method
from bandpo.rules import ClipRule
from bandpo.schedules import TrainingState

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
BETA1, BETA2 = 0.9, 0.99
"""Of Adam, as the studies of networks have them."""
RATES = [0.01 * 2**k for k in range(8)]
"""Learning rates: the size of a step in logits. The best lies within them."""
_STD_EPSILON = 1e-4  # TRL adds it to a group's standard deviation


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


class _Adam:
    """Adam at work on tables, each of them on its own, without a learning rate.

    It has one second moment here for the whole table: the mean square of its gradient. With one for each logit, as a
    network has for each weight, an answer that is hardly ever drawn would move as fast as any other. A network's
    answers share their weights; those of a table do not.
    """

    def __init__(self, tables: Tensor):
        self.mean, self.square, self.count = torch.zeros_like(tables), tables.new_zeros(len(tables), 1, 1), 0

    def next(self, gradient: Tensor) -> Tensor:
        """What to subtract, at learning rate 1."""
        self.count += 1
        self.mean.lerp_(gradient, 1 - BETA1)
        self.square.lerp_(gradient.square().mean((1, 2), keepdim=True), 1 - BETA2)
        scale = (self.square / (1 - BETA2**self.count)).sqrt() + 1e-8
        return self.mean / (1 - BETA1**self.count) / scale


@dataclass(frozen=True)
class Outcome:
    """What came of a cell, for every learning rate and seed."""

    rewards: Float[Tensor, "rates seeds batches"]
    """Mean reward of each batch."""
    blocked: Float[Tensor, "rates seeds"]
    """Share of the gradient of rare winners (p < 0.1, A > 0) that the method dropped, of all updates together."""

    @property
    def auc(self) -> Float[Tensor, "rates seeds"]:
        """Mean reward over all batches."""
        return self.rewards.mean(-1)


def simulate(
    world: World,
    method: Method | ClipRule | str,
    learning_rates: Sequence[float],
    *,
    seeds: int,
    samples: int = 128,
    epochs: int = 4,
    minibatches: int = 4,
    batches: int = 80,
    lag: int = 0,
) -> Outcome:
    """Train tables with a method, GRPO's advantages and `bandpo.policy_loss`.

    A seed draws the same random numbers for every method and learning rate.

    Each learning rate is run with every seed. The optimizer's state goes on from batch to batch.

    Args:
        samples: Completions in a batch, a multiple of 16.
        epochs: How often each sample is used.
        minibatches: Parts of a batch, with an optimizer step each.
        lag: So many batches are drawn before a batch is trained on; nothing is trained before the first, nor after the
            last is drawn.

    Raises:
        ValueError: a number that does not fit.

    >>> found = simulate(rare_arm(0.05), FixedClip(0.2), [0.05], seeds=4, batches=30)
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
    steps = _Adam(logits.detach())
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
            waiting.append((answers, logp_old.gather(-1, answers), _advantages(reward)))
        rewards.append(reward.mean(-1))
        if len(waiting) <= lag:
            continue
        drawn, state = waiting.popleft(), TrainingState(progress=batch / batches)
        parts = [[x[..., part::minibatches] for x in drawn] for part in range(minibatches)]
        for answers, old, advantages in parts * epochs:
            logp = logits.log_softmax(-1).gather(-1, answers)
            # Of shape (samples of all tables, decisions): a sample's tokens are its answers.
            tokens = [x.transpose(1, 2).flatten(0, 1) for x in (logp, old)]
            loss, _ = policy_loss(
                *tokens, advantages.flatten(), method=method, state=state, aggregation="sum"
            )
            slope, gradient = torch.autograd.grad(loss, (logp, logits))
            with torch.no_grad():
                winners = (advantages[:, None] > 0) & (old < math.log(RARE))
                pushed = (logp - old).exp() * advantages[:, None] * winners
                mass += torch.stack([pushed.sum((1, 2)), (pushed * (slope >= 0)).sum((1, 2))])
                logits -= rates * steps.next(gradient / advantages.shape[-1])
    shape = (len(learning_rates), seeds)
    every, blocked = mass.view(2, *shape)
    return Outcome(torch.stack(rewards, -1).view(*shape, batches), blocked / every)


def _advantages(reward: Float[Tensor, "rows samples"]) -> Float[Tensor, "rows samples"]:
    """Within each group: reward minus mean, over the standard deviation."""
    groups = reward.view(len(reward), -1, GROUP)
    apart = groups - groups.mean(-1, keepdim=True)
    return (apart / (groups.std(-1, keepdim=True) + _STD_EPSILON)).view_as(reward)
