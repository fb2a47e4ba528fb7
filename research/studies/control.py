"""A testbed in which the best-known effect of a clip is expected to show: shared features, many updates a batch.

    PYTHONPATH=research python -m studies.control rows.jsonl             # goes on with what is missing
    PYTHONPATH=research python -m studies.control rows.jsonl --count     # what is done, and what is left
    PYTHONPATH=research python -m studies.control pilot.jsonl --cell pilot

A policy is one linear layer over the features of a prompt, so that prompts share what they learn, as in a network. A
batch has groups of answers to fresh prompts, each answer is used once or more often in many updates, and advantages are
those of GRPO. The rules are all pairs of an upper and a lower side, so the effect of each side is read off, with
constants of the same dose as Band's sides. All seeds and learning rates are rows of one tensor. The terms and the
predictions are in `control-predictions.md`.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from bandpo.core.loss import policy_loss
from bandpo.core.methods import Method
from bandpo.core.text import as_method
from bandpo_lab.fast_loop import group_advantages
from bandpo_lab.files import drop_unfinished_line
from rlvet.runs.files import read_jsonl
from studies.optimizers import Moments

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

UPPER = {
    "1.2": "FixedClip(0.2)",
    "1.28": "FixedClip(0.2, 0.28)",
    "2": "FixedClip(0.2, 1.0)",
    "3": "FixedClip(0.2, 2.0)",
}
"""The constant upper sides. 3 is the one of the same dose as Band's."""
LOWER = {".8": "FixedClip(0.2)", ".3": "FixedClip(0.7)"}
"""The constant lower sides. .3 is the one of the same dose as Band's."""
BAND = "Band(KL(), 0.05)"
CLIP = "1.2 over .8"
PREDICTIONS = Path(__file__).parent / "control-predictions.md"
HELD_OUT = 128
"""The held-out prompts, which are never trained on."""
SAMPLES = 32
"""The answers of pass@32."""
EVAL_EVERY = 4
"""The batches between two evaluations on held-out prompts."""
RARE = 0.1
"""The probability below which a token is rare, as in the audit."""
BETA2 = 0.999
"""The decay of Adam's second moment, torch's default."""


def rules() -> dict[str, str]:
    """Return all pairs of an upper and a lower side, and no bound at all, by name.

    >>> rules()["Band over .8"]
    'TwoSided(FixedClip(0.2), Band(KL(), 0.05))'
    """
    uppers = {**UPPER, "Band": BAND}
    lowers = {**LOWER, "Band": BAND}
    pairs = {
        f"{up} over {low}": f"TwoSided({lowers[low]}, {uppers[up]})" for up, low in product(uppers, lowers)
    }
    return {**pairs, "no bound": "Unclipped()"}


@dataclass(frozen=True)
class World:
    """A task: prompts of several kinds, each with features and with answers of which some are right.

    Attributes:
        vocabulary: The number of tokens.
        features: The number of features of a prompt, and of kinds of prompts.
        spread: The distance of a prompt from the others of its kind, as a multiple of a kind's.
        length: The number of tokens of an answer.
        decisive: The number of its tokens, the first ones, on which the reward depends.
        right: The number of tokens of a kind of prompt that are right with a probability of 0.9, all rare at first.
        prompts: The number of prompts to train on.
        prompts_per_batch: The number of prompts of a batch.
        group: The number of answers to each of them.
    """

    vocabulary: int = 64
    features: int = 32
    spread: float = 0.3
    length: int = 1
    decisive: int = 1
    right: int = 2
    prompts: int = 1536
    prompts_per_batch: int = 64
    group: int = 16


WORLDS = {
    "one token": World(),
    "eight tokens": World(
        vocabulary=32,
        features=40,
        spread=1.5,
        length=8,
        decisive=2,
        right=3,
        prompts=1024,
        prompts_per_batch=16,
        group=8,
    ),
}
"""One token: prompts of a kind are alike. Eight tokens: a prompt's own features dominate; six tokens are neutral."""
FREQUENT = 4
"""The number of the most frequent tokens of a decisive position, which are right with a probability of 0.35."""


class Task(NamedTuple):
    """The task of each seed."""

    features: Float[Tensor, "seeds prompts length features"]
    start: Float[Tensor, "seeds features vocabulary"]
    """The weights of the policy before the training."""
    right: Bool[Tensor, "seeds prompts length vocabulary"]
    """True for the tokens that are right at a position; all of them at neutral ones."""


def task_of(world: World, seeds: Sequence[int]) -> Task:
    """Return the task of each seed, drawn from the seed alone."""
    return Task(
        *(torch.stack(parts) for parts in zip(*(_one_task(world, seed) for seed in seeds), strict=True))
    )


def _one_task(world: World, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    size, prompts = world.features, world.prompts + HELD_OUT
    centres = torch.randn(size, size, generator=generator) / size**0.5
    kind = torch.randint(size, (prompts,), generator=generator)
    own = torch.randn(prompts, size, generator=generator) / size**0.5
    features = torch.nn.functional.normalize(centres[kind] + world.spread * own, dim=-1)
    # Each position sees the prompt by other features, so that positions share weights and not answers.
    by_position = [
        features @ torch.linalg.qr(torch.randn(size, size, generator=generator)).Q
        for _ in range(world.length)
    ]
    features = torch.cat([torch.stack(by_position, 1), torch.ones(prompts, world.length, 1)], -1)

    start = torch.randn(size + 1, world.vocabulary, generator=generator) * 0.5
    # Zipf's law: at first the probability of the token of rank k is about proportional to k^-1.5.
    start[-1] = -1.5 * torch.arange(1, world.vocabulary + 1).log()

    chances = torch.full((size, world.length, world.vocabulary), 0.02)
    chances[..., :FREQUENT] = 0.35
    rare = torch.rand(size, world.length, world.vocabulary - FREQUENT, generator=generator).argsort(-1)
    chances.scatter_(-1, FREQUENT + rare[..., : world.right], 0.9)
    chances[:, world.decisive :] = 1.0
    right = torch.rand(prompts, world.length, world.vocabulary, generator=generator) < chances[kind]
    return features, start, right


class Batch(NamedTuple):
    """A sampled batch of all rows."""

    features: Float[Tensor, "1 seeds answers length features"]
    tokens: Int[Tensor, "rates seeds answers length"]
    logp_old: Float[Tensor, "rates seeds answers length"]
    advantages: Float[Tensor, "rates seeds answers"]
    order: Int[Tensor, "seeds answers"]
    """The order in which a seed's answers are used."""


@dataclass(frozen=True)
class Cell:
    """A setting, with all rules at all rates and seeds.

    Attributes:
        name: The name.
        world: A name in `WORLDS`.
        minibatches: The number of updates of a batch and epoch.
        rates: The learning rates.
        seeds: The seeds.
        level: The held-out reward at which entropies and pass@32 are compared at equal reward.
        lag: The age of the data in batches.
        epochs: The number of times that an answer is used.
        noise: The share of rewards that are drawn at random.
        batches: The number of batches.
        arms: The rules.
    """

    name: str
    world: str
    minibatches: int
    rates: Sequence[float]
    seeds: Sequence[int]
    level: float
    lag: int = 0
    epochs: int = 1
    noise: float = 0.0
    batches: int = 80
    arms: Sequence[str] = tuple(rules())


PRIMARY_RATES = (0.00625, 0.0125, 0.025)
CELLS = [
    Cell("pilot", "one token", 64, (0.0125,), range(900, 916), 0.4),
    Cell("pilot, eight tokens", "eight tokens", 64, (0.0125,), range(900, 916), 0.11),
    Cell("one token, 64", "one token", 64, (0.0015625, 0.003125, *PRIMARY_RATES), range(2000, 2064), 0.4),
    Cell("eight tokens, 64", "eight tokens", 64, (0.003125, *PRIMARY_RATES, 0.05), range(2000, 2064), 0.11),
    Cell("one token, 16", "one token", 16, (*PRIMARY_RATES, 0.05), range(2000, 2064), 0.4),
    Cell("eight tokens, 16", "eight tokens", 16, (*PRIMARY_RATES, 0.05, 0.1), range(2000, 2064), 0.11),
]
"""The cells in the order in which they run; the seeds of the pilots are no others'."""


class Key(NamedTuple):
    """A row: a rule in a cell, at one rate with one seed."""

    cell: str
    arm: str
    rate: float
    seed: int


class Trainer:
    """Trains the policies of all rates and seeds of a cell with one rule.

    Args:
        cell: The cell.
        method: The rule.
        seeds: The seeds, by default those of the cell.
    """

    def __init__(self, cell: Cell, method: Method | str, seeds: Sequence[int] | None = None):
        self.cell, self.world, self.method = cell, WORLDS[cell.world], as_method(method)
        self.seeds = [*(cell.seeds if seeds is None else seeds)]
        self.task = task_of(self.world, self.seeds)
        shape = (len(cell.rates), len(self.seeds))
        self.weights = self.task.start.expand(*shape, -1, -1).clone().requires_grad_()
        self._moments = Moments(self.weights.detach().flatten(0, 1), beta2=BETA2)
        self._rates = torch.tensor(cell.rates).repeat_interleave(len(self.seeds))[:, None, None]
        # Random numbers of a seed are the same for all rules and rates.
        self._generators = [torch.Generator().manual_seed(10**6 + seed) for seed in self.seeds]
        self.curves: dict[str, list[Tensor]] = {name: [] for name in CURVES}
        # Sums over rare winners and over rare losers of the gradient, and of its part that the rule dropped.
        self._gradient = torch.zeros(2, 2, *shape)

    def train(self) -> None:
        """Train for all batches of the cell."""
        queue: deque[Batch] = deque()
        for batch in range(self.cell.batches):
            queue.append(self._sample())
            if len(queue) > self.cell.lag:
                self._learn(queue.popleft())
            if (batch + 1) % EVAL_EVERY == 0:
                self._evaluate()

    @torch.no_grad()
    def _sample(self) -> Batch:
        """Sample answers to prompts that are drawn at random."""
        world = self.world
        answers = world.prompts_per_batch * world.group
        draws = [self._draw(generator, answers) for generator in self._generators]
        prompts, uniform, chance, is_noise, order = (torch.stack(parts) for parts in zip(*draws, strict=True))
        seeds = torch.arange(len(self.seeds))[:, None]
        features = self.task.features[seeds, prompts]
        logp_all = self._logp_all(features[None])
        edges = logp_all.exp().cumsum(-1)[..., :-1]
        # (rates, seeds, prompts, length, group)
        by_prompt = uniform.expand(len(self.cell.rates), *uniform.shape).contiguous()
        tokens = torch.searchsorted(edges.contiguous(), by_prompt)
        logp_old = logp_all.gather(-1, tokens)
        is_right = (
            self.task.right[seeds, prompts].expand(*tokens.shape[:2], -1, -1, -1).gather(-1, tokens).all(-2)
        )
        self.curves["reward"].append(is_right.float().mean((-1, -2)))
        rewards = torch.where(is_noise, chance < 0.5, is_right).float().flatten(2)
        advantages = group_advantages(rewards.flatten(), world.group).view_as(rewards)

        def by_answer(values: Tensor) -> Tensor:
            return values.transpose(-1, -2).flatten(2, 3)

        return Batch(
            features.repeat_interleave(world.group, 1)[None],
            by_answer(tokens),
            by_answer(logp_old),
            advantages,
            order,
        )

    def _draw(self, generator: torch.Generator, answers: int) -> tuple[Tensor, ...]:
        """Return the prompts of a seed's batch, and its random numbers."""
        world = self.world
        prompts = HELD_OUT + torch.randperm(world.prompts, generator=generator)[: world.prompts_per_batch]
        uniform = torch.rand(world.prompts_per_batch, world.length, world.group, generator=generator)
        chance = torch.rand(world.prompts_per_batch, world.group, generator=generator)
        is_noise = torch.rand(world.prompts_per_batch, world.group, generator=generator) < self.cell.noise
        return prompts, uniform, chance, is_noise, torch.randperm(answers, generator=generator)

    def _logp_all(self, features: Tensor) -> Tensor:
        """Return the log-probabilities of all tokens at positions with these features."""
        # One product for each rate and seed: with the answers as a dimension of their own it took ten times as long.
        logits = features.flatten(2, 3) @ self.weights
        return logits.unflatten(2, features.shape[2:4]).log_softmax(-1)

    def _learn(self, batch: Batch) -> None:
        """Train on a batch, in updates on parts of it."""
        log_ratio = torch.zeros(())
        for part in batch.order.chunk(self.cell.minibatches, 1) * self.cell.epochs:
            log_ratio = self._update(batch, part)
        self.curves["spread"].append(log_ratio.flatten(2).std(-1))

    def _update(self, batch: Batch, part: Int[Tensor, "seeds answers"]) -> Tensor:
        """Make one update, and return the log-ratios before it."""

        def of_part(values: Tensor) -> Tensor:
            index = part.view(1, *part.shape, *[1] * (values.dim() - 3))
            return values.gather(2, index.expand(len(values), -1, -1, *values.shape[3:]))

        features, tokens, logp_old, advantages = map(of_part, batch[:4])
        logp = self._logp_all(features).gather(-1, tokens[..., None])[..., 0]
        loss = policy_loss(
            logp.flatten(0, 2),
            logp_old.flatten(0, 2),
            advantages.flatten(),
            method=self.method,
            aggregation="sum",
            metrics=False,
        ).loss
        logp_gradient, gradient = torch.autograd.grad(loss, (logp, self.weights))
        with torch.no_grad():
            self._add_blocked(logp - logp_old, logp_old, advantages[..., None], logp_gradient)
            mean = gradient / logp[0, 0].numel()
            step = self._rates * self._moments.direction(mean.flatten(0, 1))
            self.weights -= step.view_as(self.weights)
            return logp.detach() - logp_old

    def _add_blocked(
        self, log_ratio: Tensor, logp_old: Tensor, advantages: Tensor, logp_gradient: Tensor
    ) -> None:
        """Add the gradient of rare winners and losers, and the part that the rule dropped."""
        gradient = (log_ratio.exp() * advantages).abs() * (logp_old < math.log(RARE))
        for index, is_side in enumerate((advantages > 0, advantages < 0)):
            of_side = gradient * is_side
            dropped = of_side * (logp_gradient == 0)
            self._gradient[index] += torch.stack([of_side.sum((-1, -2)), dropped.sum((-1, -2))])

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Add the entropy, the reward and pass@32 on held-out prompts, all of them exact."""
        logp_all = self._logp_all(self.task.features[None, :, :HELD_OUT])
        probabilities = logp_all.exp()
        right = (probabilities * self.task.right[:, :HELD_OUT]).sum(-1).prod(-1).clamp(max=1.0)
        self.curves["entropy"].append(-(probabilities * logp_all).sum(-1).mean((-1, -2)))
        self.curves["held out"].append(right.mean(-1))
        self.curves["pass@32"].append((1 - (1 - right) ** SAMPLES).mean(-1))

    def rows(self, arm: str) -> Iterator[dict[str, Any]]:
        """Yield the row of each rate and seed: the curves, and the blocked shares above and below."""
        curves = {name: torch.stack(values, -1) for name, values in self.curves.items()}
        blocked = self._gradient[:, 1] / self._gradient[:, 0]
        for (index, rate), (place, seed) in product(enumerate(self.cell.rates), enumerate(self.seeds)):
            yield {
                **Key(self.cell.name, arm, rate, seed)._asdict(),
                "blocked above": round(blocked[0, index, place].nan_to_num(0.0).item(), 4),
                "blocked below": round(blocked[1, index, place].nan_to_num(0.0).item(), 4),
                "curves": {
                    name: [round(value, 4) for value in values[index, place].tolist()]
                    for name, values in curves.items()
                },
            }


CURVES = ("reward", "spread", "entropy", "held out", "pass@32")
"""The curves of a row.

- ``reward``: the share of right answers by batch, without noise.
- ``spread``: the standard deviation of the log-ratios in the last update on a batch.
- ``entropy``, ``held out``, ``pass@32``: on held-out prompts every `EVAL_EVERY` batches: the entropy in nats a token,
  the probability of a right answer, and that of one among 32.
"""
SEEDS_TOGETHER = 16
"""The seeds that are trained in one program."""


def parts_of(cell: Cell) -> Iterator[tuple[str, list[int]]]:
    """Yield the rules of a cell with seeds that are trained together, all rules of some seeds before the next seeds."""
    seeds = [*cell.seeds]
    for start in range(0, len(seeds), SEEDS_TOGETHER):
        for arm in cell.arms:
            yield arm, seeds[start : start + SEEDS_TOGETHER]


def keys_of(cell: Cell, arm: str, seeds: Sequence[int]) -> list[Key]:
    """Return the rows of a rule."""
    return [Key(cell.name, arm, rate, seed) for rate, seed in product(cell.rates, seeds)]


def read_rows(file: Path) -> dict[Key, Mapping[str, Any]]:
    """Return the rows of a file by key."""
    return {Key(*(row[name] for name in Key._fields)): row for _, row in read_jsonl(file)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the file does not have, or count it."""
    parser = argparse.ArgumentParser(prog="python -m studies.control")
    parser.add_argument("rows", type=Path, help="one line for each run; made if it is not there")
    parser.add_argument("--cell", choices=[cell.name for cell in CELLS], help="run one cell only")
    parser.add_argument("--count", action="store_true", help="only print what is done and what is left")
    options = parser.parse_args(arguments)
    options.rows.touch()
    drop_unfinished_line(options.rows)
    done = read_rows(options.rows).keys()
    cells = [cell for cell in CELLS if options.cell in (None, cell.name)]
    if options.count:
        for cell in cells:
            every = [key for arm, seeds in parts_of(cell) for key in keys_of(cell, arm, seeds)]
            print(f"{cell.name}: {sum(key in done for key in every)} of {len(every)} runs")
        return
    # The order of sums, and so the bits, would depend on the number of threads.
    torch.set_num_threads(1)
    with options.rows.open("a", encoding="utf-8") as lines:
        for cell in cells:
            for arm, seeds in parts_of(cell):
                if all(key in done for key in keys_of(cell, arm, seeds)):
                    continue
                begin = time.process_time()
                trainer = Trainer(cell, rules()[arm], seeds)
                trainer.train()
                seconds = (time.process_time() - begin) / len(keys_of(cell, arm, seeds))
                for row in trainer.rows(arm):
                    lines.write(json.dumps({**row, "seconds": round(seconds, 3)}) + "\n")
                lines.flush()


if __name__ == "__main__":
    main()
