"""Tables in place of networks: small worlds of one decision or two, where a method meets `policy_loss` and no more.

A policy is a table of logits, one row for each decision; a completion takes one answer at each. Rewards are 0 or 1,
advantages those of GRPO. All seeds and learning rates are rows of one tensor, so a simulation takes seconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from bandpo.errors import InvalidValue
from bandpo.loss import policy_loss
from bandpo.methods import Method
from bandpo.rules import ClipRule
from bandpo.schedules import TrainingState
from bandpo_lab.study.optimizers import OPTIMIZERS

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
HARD = 0.25
"""Share of a group that is rewarded, up to which the group is hard: most of its answers fail."""
POSITIONS = 8
"""Decisions of a completion where a reward depends on one of them, or on none."""
VOCABULARY = 200
"""Answers of a decision where rewards are random."""
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


def rare_arm(p: float, others: Sequence[float] = (1,) * (ANSWERS - 1), luck: float = WRONG) -> World:
    """One decision among 16 answers. One of them is right 97 times in 100, and has probability ``p`` at the start.

    Args:
        others: What the probabilities of the wrong answers are in proportion to.
        luck: How often a wrong answer is rewarded.

    Raises:
        ValueError: ``p`` is no probability.

    >>> rare_arm(0.01).start[0][:2]
    (0.01, 0.066)
    """
    return World([_one_rare(p, others)], [Stage(0, _first_is_right(luck))])


def dominant(p: float, luck: float = WRONG) -> World:
    """`rare_arm`, where one wrong answer has probability 0.98.

    >>> [round(x, 4) for x in dominant(0.01).start[0][:3]]
    [0.01, 0.98, 0.0007]
    """
    return rare_arm(p, [0.98, *[(0.02 - p) / (ANSWERS - 2)] * (ANSWERS - 2)], luck)


def zipf(p: float, luck: float = WRONG) -> World:
    """`rare_arm`, where the wrong answer of rank k is in proportion to k^-1.5.

    >>> [round(x, 3) for x in zipf(0.01).start[0][:3]]
    [0.01, 0.47, 0.166]
    """
    return rare_arm(p, [rank**-1.5 for rank in range(1, ANSWERS)], luck)


def two_stages(p: float) -> World:
    """Two decisions. Rewards look at the first until half-time, at the second from then on.

    Until then answers to the second are drawn, and pushed about by rewards that have nothing to do with them. The good
    answer of the first has probability 0.05 at the start, that of the second ``p``.

    Raises:
        ValueError: ``p`` is no probability.
    """
    chances = _first_is_right(WRONG)
    return World([_one_rare(0.05), _one_rare(p)], [Stage(0, chances), Stage(1, chances)])


def positions(p: float, luck: float = WRONG) -> World:
    """Eight decisions, of which the reward depends on the first alone, as in `rare_arm`.

    The credit for a reward is spread over all eight, as over the tokens of a sequence.

    Raises:
        ValueError: ``p`` is no probability.
    """
    return World([_one_rare(p)] * POSITIONS, [Stage(0, _first_is_right(luck))])


def random_rewards(chance: float = 0.5) -> World:
    """Eight decisions among 200 answers, the one of rank k in proportion to k^-2. No answer is better than another.

    The entropy at the start is 1.60 nats a decision.

    Args:
        chance: How often a completion is rewarded.
    """
    shares = [rank**-2.0 for rank in range(1, VOCABULARY + 1)]
    start = tuple(share / sum(shares) for share in shares)
    return World([start] * POSITIONS, [Stage(0, (chance,) * VOCABULARY)])


def _one_rare(p: float, others: Sequence[float] = (1,) * (ANSWERS - 1)) -> tuple[float, ...]:
    if not 0 < p < 1:
        raise InvalidValue(f"p must lie between 0 and 1, got {p:g}")
    return (p, *((1 - p) * share / sum(others) for share in others))


def _first_is_right(luck: float) -> tuple[float, ...]:
    return (RIGHT, *[luck] * (ANSWERS - 1))


@dataclass(frozen=True)
class Outcome:
    """Results of a simulation, for every learning rate and seed."""

    rewards: Float[Tensor, "rates seeds batches"]
    """Mean reward of each batch."""
    right: Float[Tensor, "rates seeds batches"]
    """Probability of the right answer when a batch was drawn."""
    entropy: Float[Tensor, "rates seeds batches"]
    """Entropy of the policy when a batch was drawn, in nats a decision."""
    blocked: Float[Tensor, "rates seeds"]
    """Share of the gradient of rare winners (p < 0.1, A > 0) that the method dropped, of all updates together."""
    luck: Float[Tensor, "rates seeds"]
    """Of the winners' advantages in groups of which at most a quarter is rewarded, the share on answers with p ≥ 0.1.

    Such an answer is common and yet fails most of the time, so its reward was luck. Advantages are counted when a batch
    is drawn, one for each decision.
    """

    @property
    def auc(self) -> Float[Tensor, "rates seeds"]:
        """Mean reward over all batches."""
        return self.rewards.mean(-1)

    @property
    def end(self) -> Float[Tensor, "rates seeds"]:
        """Mean reward over the last tenth of the batches."""
        return self.rewards[..., -max(1, self.rewards.shape[-1] // 10) :].mean(-1)

    def pass_at(self, k: int) -> Float[Tensor, "rates seeds"]:
        """Return the probability that one of ``k`` completions is right at the end."""
        return 1 - (1 - self.right[..., -1]) ** k

    def batches_to(self, level: float) -> Float[Tensor, "rates seeds"]:
        """Return the number of batches until the right answer has a probability; infinity if it never has."""
        reached = self.right >= level
        batches = reached.float().argmax(-1) + 1.0
        return torch.where(reached.any(-1), batches, math.inf)

    def entropy_at(self, level: float) -> Float[Tensor, "rates seeds"]:
        """Return the entropy when the right answer first has a probability; NaN if it never has."""
        reached = self.right >= level
        first = reached.float().argmax(-1, keepdim=True)
        entropy = self.entropy.gather(-1, first).squeeze(-1)
        return torch.where(reached.any(-1), entropy, math.nan)

    @property
    def broken(self) -> Float[Tensor, "rates seeds"]:
        """1 where the right answer has less than half of the greatest probability it had, and 0 elsewhere."""
        return (self.right[..., -1] < self.right.amax(-1) / 2).float()


def constant_rate(progress: float) -> float:
    """Return 1: the learning rate does not change."""
    return 1.0


def falling_rate(progress: float) -> float:
    """Return the share of the learning rate that is left, which falls from 1 to 0 in a line.

    >>> falling_rate(0.25)
    0.75
    """
    return 1 - progress


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
    optimizer: str = "adam",
    rate_schedule: Callable[[float], float] = constant_rate,
) -> Outcome:
    """Train tables with a method, GRPO's advantages and `bandpo.policy_loss`.

    A seed draws the same random numbers for every method, learning rate and optimizer.

    Each learning rate is run with every seed. The optimizer's state goes on from batch to batch.

    Args:
        samples: Completions in a batch, a multiple of 16.
        epochs: How often each sample is used.
        minibatches: Parts of a batch, with an optimizer step each.
        lag: So many batches are drawn before a batch is trained on; nothing is trained before the first, nor after the
            last is drawn.
        optimizer: A name of `bandpo_lab.study.optimizers.OPTIMIZERS`.
        rate_schedule: From the share of the training that is done to a factor of the learning rate.

    Raises:
        ValueError: a number that does not fit, or an optimizer without such a name.

    >>> outcome = simulate(rare_arm(0.05), FixedClip(0.2), [0.05], seeds=4, batches=30)
    >>> outcome.rewards.shape, bool((outcome.auc > 0.5).all())
    (torch.Size([1, 4, 30]), True)
    """
    if samples % GROUP or samples < GROUP:
        raise InvalidValue(f"samples must be a multiple of {GROUP}, the size of a group, got {samples}")
    if min(seeds, epochs, minibatches, batches, lag + 1) < 1 or not min(learning_rates, default=0.0) > 0:
        raise InvalidValue(
            f"must be above 0, lag at least 0: {seeds=} {epochs=} {minibatches=} {batches=} {learning_rates=} {lag=}"
        )
    if optimizer not in OPTIMIZERS:
        raise InvalidValue(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {optimizer!r}")
    generator = torch.Generator().manual_seed(0)
    rows = len(learning_rates) * seeds
    decisions = len(world.start)
    start = torch.tensor(world.start).log().repeat(rows, 1, 1)
    policy = OPTIMIZERS[optimizer].build(start, seeds)
    rates = torch.tensor(learning_rates).repeat_interleave(seeds)[:, None, None]
    rewards: list[Tensor] = []
    right: list[Tensor] = []
    entropy: list[Tensor] = []
    waiting: deque[tuple[Tensor, Tensor, Tensor]] = deque()
    mass = torch.zeros(2, rows)
    hard_mass = torch.zeros(2, rows)
    for batch in range(batches):
        stage = world.stages[batch * len(world.stages) // batches]
        with torch.no_grad():
            logp_old = policy.logits.log_softmax(-1)
            draws = torch.rand(seeds, decisions + 1, samples, generator=generator)
            draws = draws.repeat(len(learning_rates), 1, 1)
            # The last answer lies beyond the last edge.
            edges = logp_old.exp().cumsum(-1)[..., :-1].contiguous()
            answers = torch.searchsorted(edges, draws[:, :-1].contiguous())
            reward = (draws[:, -1] < torch.tensor(stage.chances)[answers[:, stage.decision]]).float()
            logp_drawn = logp_old.gather(-1, answers)
            advantages = _advantages(reward)
            waiting.append((answers, logp_drawn, advantages))
            winners = (advantages * (reward > 0) * _in_hard_group(reward))[:, None].expand_as(logp_drawn)
            common = winners * (logp_drawn >= math.log(RARE))
            hard_mass += torch.stack([winners.sum((1, 2)), common.sum((1, 2))])
            rewards.append(reward.mean(-1))
            right.append(logp_old[:, stage.decision, 0].exp())
            entropy.append(-(logp_old.exp() * logp_old).sum(-1).mean(-1))
        if len(waiting) <= lag:
            continue
        drawn = waiting.popleft()
        progress = batch / batches
        state = TrainingState(progress=progress)
        step_rates = rates * rate_schedule(progress)
        parts = [[x[..., part::minibatches] for x in drawn] for part in range(minibatches)]
        for answers, old, advantages in parts * epochs:
            logp = policy.logits.log_softmax(-1).gather(-1, answers)
            # Of shape (samples of all tables, decisions): a sample's tokens are its answers.
            loss, _ = policy_loss(
                logp.transpose(1, 2).flatten(0, 1),
                old.transpose(1, 2).flatten(0, 1),
                advantages.flatten(),
                method=method,
                state=state,
                aggregation="sum",
            )
            slope, gradient = torch.autograd.grad(loss, (logp, policy.logits))
            with torch.no_grad():
                winners = (advantages[:, None] > 0) & (old < math.log(RARE))
                pushed = (logp - old).exp() * advantages[:, None] * winners
                mass += torch.stack([pushed.sum((1, 2)), (pushed * (slope >= 0)).sum((1, 2))])
            policy.step(gradient / advantages.shape[-1], step_rates)
    shape = (len(learning_rates), seeds)
    every, blocked = mass.view(2, *shape)
    hard, common = hard_mass.view(2, *shape)

    def by_batch(values: list[Tensor]) -> Tensor:
        return torch.stack(values, -1).view(*shape, batches)

    return Outcome(by_batch(rewards), by_batch(right), by_batch(entropy), blocked / every, common / hard)


def _advantages(reward: Float[Tensor, "rows samples"]) -> Float[Tensor, "rows samples"]:
    """Within each group: reward minus mean, over the standard deviation."""
    groups = reward.view(len(reward), -1, GROUP)
    apart = groups - groups.mean(-1, keepdim=True)
    return (apart / (groups.std(-1, keepdim=True) + _STD_EPSILON)).view_as(reward)


def _in_hard_group(reward: Float[Tensor, "rows samples"]) -> Float[Tensor, "rows samples"]:
    """Return 1 for samples of groups of which at most a quarter is rewarded, and 0 for others."""
    groups = reward.view(len(reward), -1, GROUP)
    hard = groups.mean(-1, keepdim=True) <= HARD
    return hard.float().expand_as(groups).reshape_as(reward)
