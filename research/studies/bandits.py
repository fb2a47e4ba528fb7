"""Bandits: small tasks of a few decisions, with tables of logits in place of networks, trained by `bandpo.policy_loss`.

A policy is a table of logits, one row for each decision. A completion takes one answer at each decision. Rewards are
0 or 1, and advantages are those of GRPO. All seeds and learning rates are rows of one tensor, so a simulation takes
seconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from bandpo.core.loss import policy_loss
from bandpo.core.methods import Method
from bandpo.core.rules import ClipRule
from bandpo.core.schedules import TrainingState
from bandpo_lab.errors import InvalidValue
from studies.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

ANSWERS = 16
"""The answers of a decision."""
GROUP = 16
"""The samples of a group, whose mean and standard deviation give the advantages."""
RIGHT = 0.97
"""The probability that the right answer is rewarded."""
WRONG = 0.05
"""The probability that a wrong answer is rewarded, by default."""
RARE = 0.1
"""The probability below which an answer is rare, as in the audit."""
HARD = 0.25
"""A group is hard if at most this share of its samples is rewarded."""
POSITIONS = 8
"""The decisions of a completion in tasks where the reward depends on one of them or on none."""
VOCABULARY = 200
"""The answers of a decision in the task with random rewards."""
_STD_EPSILON = 1e-4  # TRL adds it to a group's standard deviation


@dataclass(frozen=True)
class Stage:
    """A part of the training in which the reward depends on one decision.

    Attributes:
        decision: The index of the decision.
        chances: The probability that a completion is rewarded, for each answer at that decision.
    """

    decision: int
    chances: Sequence[float]


@dataclass(frozen=True)
class World:
    """A task: the initial policy and the rewards.

    The right answer is answer 0 of the last stage's decision.
    """

    start: Sequence[Sequence[float]]
    """The initial probabilities of the answers of each decision."""
    stages: Sequence[Stage]
    """The stages, of equal length, in order."""


def rare_arm(p: float, wrong: Sequence[float] = (1,) * (ANSWERS - 1), luck: float = WRONG) -> World:
    """Return a world with one decision among 16 answers, of which one is right.

    The right answer is rewarded with probability 0.97.

    Args:
        p: The initial probability of the right answer.
        wrong: Weights to which the initial probabilities of the wrong answers are proportional.
        luck: The probability that a wrong answer is rewarded.

    Raises:
        ValueError: ``p`` is not between 0 and 1.

    >>> rare_arm(0.01).start[0][:2]
    (0.01, 0.066)
    """
    return World([_start_with_rare(p, wrong)], [Stage(0, _first_is_right(luck))])


def dominant(p: float, luck: float = WRONG) -> World:
    """Return the world of `rare_arm` in which one wrong answer has the initial probability 0.98.

    >>> [round(x, 4) for x in dominant(0.01).start[0][:3]]
    [0.01, 0.98, 0.0007]
    """
    return rare_arm(p, [0.98, *[(0.02 - p) / (ANSWERS - 2)] * (ANSWERS - 2)], luck)


def zipf(p: float, luck: float = WRONG) -> World:
    """Return the world of `rare_arm` in which the probability of the wrong answer of rank k is proportional to k^-1.5.

    >>> [round(x, 3) for x in zipf(0.01).start[0][:3]]
    [0.01, 0.47, 0.166]
    """
    return rare_arm(p, [rank**-1.5 for rank in range(1, ANSWERS)], luck)


def two_stages(p: float) -> World:
    """Return a world with two decisions: the first decides the reward in the first half of the training.

    In the second half, the second decides. During the first half, answers to the second decision get gradients from
    rewards that do not depend on them. The right answer of the first decision has the initial probability 0.05, that of
    the second ``p``.

    Raises:
        ValueError: ``p`` is not between 0 and 1.
    """
    chances = _first_is_right(WRONG)
    return World([_start_with_rare(0.05), _start_with_rare(p)], [Stage(0, chances), Stage(1, chances)])


def positions(p: float, luck: float = WRONG) -> World:
    """Return a world with eight decisions, of which only the first decides the reward, as in `rare_arm`.

    All eight get the same advantage, as the tokens of a sequence do.

    Raises:
        ValueError: ``p`` is not between 0 and 1.
    """
    return World([_start_with_rare(p)] * POSITIONS, [Stage(0, _first_is_right(luck))])


def random_rewards(chance: float = 0.5, decisions: int = POSITIONS, answers: int = VOCABULARY) -> World:
    """Return a world in which no answer is better than another.

    The initial probability of the answer of rank k is proportional to k^-2. The entropy of 200 answers is 1.60 nats per
    decision, that of 20 answers 1.33.

    Args:
        chance: The probability that a completion is rewarded.
        decisions: The number of decisions.
        answers: The number of answers of each decision.
    """
    weights = [rank**-2.0 for rank in range(1, answers + 1)]
    start = tuple(weight / sum(weights) for weight in weights)
    return World([start] * decisions, [Stage(0, (chance,) * answers)])


def _start_with_rare(p: float, wrong: Sequence[float] = (1,) * (ANSWERS - 1)) -> tuple[float, ...]:
    """Return the initial probabilities of the answers of a decision; they sum to 1.

    Args:
        p: The probability of the right answer, which is the first.
        wrong: Weights to which the probabilities of the wrong answers are proportional.

    Raises:
        ValueError: ``p`` is not between 0 and 1.
    """
    if not 0 < p < 1:
        raise InvalidValue(f"p must lie between 0 and 1, got {p:g}")
    return (p, *((1 - p) * weight / sum(wrong) for weight in wrong))


def _first_is_right(luck: float) -> tuple[float, ...]:
    """Return the probability of a reward for each answer, of which the first is right."""
    return (RIGHT, *[luck] * (ANSWERS - 1))


@dataclass(frozen=True)
class Outcome:
    """The results of a simulation, for every learning rate and seed."""

    rewards: Float[Tensor, "rates seeds batches"]
    """The mean reward of each batch."""
    right: Float[Tensor, "rates seeds batches"]
    """The probability of the right answer when a batch is sampled."""
    entropy: Float[Tensor, "rates seeds batches"]
    """The entropy of the policy when a batch is sampled, in nats per decision."""
    blocked: Float[Tensor, "rates seeds"]
    """The share of the gradient of rare winners (p < 0.1, A > 0) that the method dropped, over all updates."""
    luck: Float[Tensor, "rates seeds"]
    """The share of the winners' advantages in hard groups that is on common answers, with p ≥ 0.1.

    In a hard group at most a quarter of the samples is rewarded, so a common answer fails most of the time and its
    reward was luck. Advantages are summed over samples and decisions when a batch is sampled.
    """

    @property
    def auc(self) -> Float[Tensor, "rates seeds"]:
        """The mean reward over all batches."""
        return self.rewards.mean(-1)

    @property
    def end(self) -> Float[Tensor, "rates seeds"]:
        """The mean reward over the last tenth of the batches."""
        return self.rewards[..., -max(1, self.rewards.shape[-1] // 10) :].mean(-1)

    def pass_at(self, k: int) -> Float[Tensor, "rates seeds"]:
        """Return the probability that one of ``k`` completions is right at the end."""
        return 1 - (1 - self.right[..., -1]) ** k

    def batches_to(self, level: float) -> Float[Tensor, "rates seeds"]:
        """Return the number of batches until the right answer has probability ``level``; infinity if it never has."""
        reached = self.right >= level
        batches = reached.float().argmax(-1) + 1.0
        return torch.where(reached.any(-1), batches, math.inf)

    def entropy_at(self, level: float) -> Float[Tensor, "rates seeds"]:
        """Return the entropy when the right answer first has probability ``level``; NaN if it never has."""
        reached = self.right >= level
        first = reached.float().argmax(-1, keepdim=True)
        entropy = self.entropy.gather(-1, first).squeeze(-1)
        return torch.where(reached.any(-1), entropy, math.nan)

    @property
    def broken(self) -> Float[Tensor, "rates seeds"]:
        """1 if the final probability of the right answer is less than half of its maximum during training, else 0."""
        return (self.right[..., -1] < self.right.amax(-1) / 2).float()


def constant_rate(progress: float) -> float:
    """Return 1: the learning rate does not change."""
    return 1.0


def falling_rate(progress: float) -> float:
    """Return the factor of a learning rate that falls linearly from 1 to 0.

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
    first_seed: int = 0,
) -> Outcome:
    """Train tables with a method, GRPO's advantages and `bandpo.policy_loss`.

    Each learning rate is run with every seed. A seed has the same random numbers for every method, learning rate and
    optimizer. The state of the optimizer is kept from batch to batch.

    Args:
        world: The task.
        method: The method, its clip rule, or the text of either.
        learning_rates: The learning rates.
        seeds: The number of seeds.
        samples: The completions of a batch, a multiple of 16.
        epochs: The number of times that each sample is used.
        minibatches: The number of minibatches of a batch, with an optimizer step each.
        batches: The number of batches that are sampled.
        lag: The number of batches that are sampled after a batch and before it is trained on. The last ``lag`` batches
            are not trained on.
        optimizer: A name in `studies.optimizers.OPTIMIZERS`.
        rate_schedule: A function from the share of the training that is done to a factor of the learning rate.
        first_seed: The seed of the random numbers of all seeds together.

    Raises:
        ValueError: A number is out of its range, or there is no optimizer of that name.

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
    # A row is one learning rate with one seed.
    rows = len(learning_rates) * seeds
    start = torch.tensor(world.start).log().repeat(rows, 1, 1)
    policy = OPTIMIZERS[optimizer].build(start, seeds)
    rates = torch.tensor(learning_rates).repeat_interleave(seeds)[:, None, None]
    generator = torch.Generator().manual_seed(first_seed)
    statistics = _Statistics(rows)
    queue: deque[_Batch] = deque()
    for batch in range(batches):
        stage = world.stages[batch * len(world.stages) // batches]
        with torch.no_grad():
            logp_all = policy.logits.log_softmax(-1)
            new_batch = _sample(logp_all, stage, seeds, samples, generator)
            statistics.add_batch(new_batch, logp_all, stage)
        queue.append(new_batch)
        if len(queue) <= lag:
            continue

        progress = batch / batches
        state = TrainingState(progress=progress)
        step_rates = rates * rate_schedule(progress)
        for minibatch in queue.popleft().split(minibatches) * epochs:
            logp = policy.logits.log_softmax(-1).gather(-1, minibatch.answers)
            # Of shape (samples of all tables, decisions): the tokens of a sample are its answers.
            loss, _ = policy_loss(
                logp.transpose(1, 2).flatten(0, 1),
                minibatch.logp_old.transpose(1, 2).flatten(0, 1),
                minibatch.advantages.flatten(),
                method=method,
                state=state,
                aggregation="sum",
            )
            logp_gradient, gradient = torch.autograd.grad(loss, (logp, policy.logits))
            with torch.no_grad():
                statistics.add_update(minibatch, logp, logp_gradient)
            policy.step(gradient / minibatch.advantages.shape[-1], step_rates)
    return statistics.outcome(len(learning_rates), seeds)


@dataclass(frozen=True)
class _Batch:
    """Samples of all tables."""

    answers: Int[Tensor, "rows decisions samples"]
    logp_old: Float[Tensor, "rows decisions samples"]
    """The log-probabilities of the answers under the policy that sampled them."""
    rewards: Float[Tensor, "rows samples"]
    advantages: Float[Tensor, "rows samples"]

    def split(self, count: int) -> list[_Batch]:
        """Split the samples into minibatches."""
        tensors = (self.answers, self.logp_old, self.rewards, self.advantages)
        return [_Batch(*(tensor[..., start::count] for tensor in tensors)) for start in range(count)]


def _sample(
    logp: Float[Tensor, "rows decisions answers"],
    stage: Stage,
    seeds: int,
    samples: int,
    generator: torch.Generator,
) -> _Batch:
    """Sample a batch from every table, with the same random numbers for every learning rate."""
    rows, decisions, _ = logp.shape
    uniform = torch.rand(seeds, decisions + 1, samples, generator=generator)
    uniform = uniform.repeat(rows // seeds, 1, 1)
    # Invert the cumulative distribution. The last answer is beyond the last edge.
    edges = logp.exp().cumsum(-1)[..., :-1].contiguous()
    answers = torch.searchsorted(edges, uniform[:, :-1].contiguous())
    chances = torch.tensor(stage.chances)[answers[:, stage.decision]]
    rewards = (uniform[:, -1] < chances).float()
    return _Batch(answers, logp.gather(-1, answers), rewards, _advantages(rewards))


class _Statistics:
    """The statistics of a simulation, from which its outcome is computed.

    Args:
        rows: The number of tables.
    """

    def __init__(self, rows: int):
        self._rewards: list[Tensor] = []
        self._right: list[Tensor] = []
        self._entropy: list[Tensor] = []
        # Sums over the gradient of rare winners: all of it, and the dropped part.
        self._rare = torch.zeros(2, rows)
        # Sums over the winners' advantages in hard groups: all of them, and those on common answers.
        self._hard = torch.zeros(2, rows)

    def add_batch(
        self, batch: _Batch, logp_all: Float[Tensor, "rows decisions answers"], stage: Stage
    ) -> None:
        """Add a batch that was sampled.

        Args:
            batch: The batch.
            logp_all: The log-probabilities of all answers.
            stage: The stage of the training.
        """
        # Advantages of winners in hard groups, 0 elsewhere, at each of their answers: (rows, decisions, samples).
        is_winner_of_hard = (batch.rewards > 0) * _in_hard_group(batch.rewards)
        hard = (batch.advantages * is_winner_of_hard)[:, None].expand_as(batch.logp_old)
        common = hard * (batch.logp_old >= math.log(RARE))
        self._hard += torch.stack([hard.sum((1, 2)), common.sum((1, 2))])

        self._rewards.append(batch.rewards.mean(-1))
        self._right.append(logp_all[:, stage.decision, 0].exp())
        self._entropy.append(-(logp_all.exp() * logp_all).sum(-1).mean(-1))

    def add_update(self, minibatch: _Batch, logp: Tensor, logp_gradient: Tensor) -> None:
        """Add an update.

        Args:
            minibatch: The samples of the update.
            logp: The log-probabilities of their answers, of shape (rows, decisions, samples).
            logp_gradient: The gradient of the loss with respect to ``logp``.
        """
        advantages = minibatch.advantages[:, None]
        is_rare_winner = (advantages > 0) & (minibatch.logp_old < math.log(RARE))
        # The gradient without clipping, up to its sign.
        weight = (logp - minibatch.logp_old).exp() * advantages * is_rare_winner
        dropped = weight * (logp_gradient >= 0)
        self._rare += torch.stack([weight.sum((1, 2)), dropped.sum((1, 2))])

    def outcome(self, rates: int, seeds: int) -> Outcome:
        """Compute the outcome of the simulation for each learning rate and seed."""
        rare, dropped = self._rare.view(2, rates, seeds)
        hard, common = self._hard.view(2, rates, seeds)

        def by_batch(values: list[Tensor]) -> Tensor:
            return torch.stack(values, -1).view(rates, seeds, len(values))

        return Outcome(
            rewards=by_batch(self._rewards),
            right=by_batch(self._right),
            entropy=by_batch(self._entropy),
            blocked=dropped / rare,
            luck=common / hard,
        )


def _advantages(reward: Float[Tensor, "rows samples"]) -> Float[Tensor, "rows samples"]:
    """Compute GRPO's advantages: in each group, reward minus mean, divided by the standard deviation."""
    groups = reward.view(len(reward), -1, GROUP)
    centered = groups - groups.mean(-1, keepdim=True)
    return (centered / (groups.std(-1, keepdim=True) + _STD_EPSILON)).view_as(reward)


def _in_hard_group(reward: Float[Tensor, "rows samples"]) -> Float[Tensor, "rows samples"]:
    """Return 1 for samples of hard groups, of which at most a quarter is rewarded, and 0 for others."""
    groups = reward.view(len(reward), -1, GROUP)
    hard = groups.mean(-1, keepdim=True) <= HARD
    return hard.float().expand_as(groups).reshape_as(reward)
