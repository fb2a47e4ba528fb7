"""A testbed in which the best-known effect of a clip is expected to show: shared features, many updates a batch.

    PYTHONPATH=research python -m studies.control rows.jsonl             # goes on with what is missing
    PYTHONPATH=research python -m studies.control rows.jsonl --count     # what is done, and what is left
    PYTHONPATH=research python -m studies.control rows.jsonl --rate 0.0125   # the common rate alone
    PYTHONPATH=research python -m studies.control rows.jsonl --report report.md
    PYTHONPATH=research python -m studies.control pilot.jsonl --cell pilot

A policy is one linear layer over the features of a prompt, so that prompts share what they learn, as in a network. A
batch has groups of answers to fresh prompts, each answer is used once or more often in many updates, and advantages are
those of GRPO. The rules are all pairs of an upper and a lower side, so the effect of each side is read off, with
constants of the same dose as Band's sides. All seeds and learning rates are rows of one tensor. The terms and the
predictions are in `control-predictions.md`, and those of the rates above in `control-more-rates-predictions.md`.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from scipy import stats

from bandpo.core.loss import policy_loss
from bandpo.core.methods import Method
from bandpo.core.text import as_method
from bandpo_lab.files.writing import drop_unfinished_line, replacing
from bandpo_lab.output.tables import Table
from bandpo_lab.study.interval import Interval, signed, student
from bandpo_lab.toy.fast_loop import group_advantages
from rlvet.runs.files import read_jsonl
from studies.equal_reward import entropy_at_equal_step
from studies.learning_rates import Curve, ResampledScores, difference, remembering
from studies.optimizers import Moments
from studies.predictions import Prediction, read_predictions, verdict

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
MORE_RATES = Path(__file__).parent / "control-more-rates-predictions.md"
"""The predictions of rates above those of the first plan."""
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
        higher_rates: Learning rates above the others, for the rules of `AT_HIGHER_RATES` alone.
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
    higher_rates: Sequence[float] = ()

    def with_higher_rates(self) -> Cell:
        """Return the cell with all its rates and the rules that are run at all of them."""
        arms = [arm for arm in self.arms if arm in AT_HIGHER_RATES]
        return replace(self, rates=(*self.rates, *self.higher_rates), arms=arms, higher_rates=())


AT_HIGHER_RATES = (
    CLIP,
    "1.2 over .3",
    "1.2 over Band",
    "1.28 over .8",
    "2 over .8",
    "3 over .8",
    "Band over .8",
    "Band over Band",
)
"""The rules at rates above those of the first plan."""
PRIMARY_RATES = (0.00625, 0.0125, 0.025)
CELLS = [
    Cell("pilot", "one token", 64, (0.0125,), range(900, 916), 0.4),
    Cell("pilot, eight tokens", "eight tokens", 64, (0.0125,), range(900, 916), 0.11),
    Cell(
        "one token, 64",
        "one token",
        64,
        (0.0015625, 0.003125, *PRIMARY_RATES),
        range(2000, 2064),
        0.4,
        higher_rates=(0.05, 0.1),
    ),
    Cell(
        "eight tokens, 64",
        "eight tokens",
        64,
        (0.003125, *PRIMARY_RATES, 0.05),
        range(2000, 2064),
        0.11,
        higher_rates=(0.1, 0.2),
    ),
    Cell(
        "one token, 16",
        "one token",
        16,
        (*PRIMARY_RATES, 0.05),
        range(2000, 2064),
        0.4,
        higher_rates=(0.1, 0.2),
    ),
    Cell(
        "eight tokens, 16",
        "eight tokens",
        16,
        (*PRIMARY_RATES, 0.05, 0.1),
        range(2000, 2064),
        0.11,
        higher_rates=(0.2,),
    ),
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
        self.curves: dict[str, list[Tensor]] = {name: [] for name in (*MEANS, *CURVES)}
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
        self.curves["AUC"].append(is_right.float().mean((-1, -2)))
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
        features, tokens, logp_old, advantages = self.part_of(batch, part)
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

    @staticmethod
    def part_of(batch: Batch, part: Int[Tensor, "seeds answers"]) -> list[Tensor]:
        """Return the features, tokens, old log-probabilities and advantages of a part of each seed's answers."""

        def of_part(values: Tensor) -> Tensor:
            index = part.view(1, *part.shape, *[1] * (values.dim() - 3))
            return values.gather(2, index.expand(len(values), -1, -1, *values.shape[3:]))

        return [of_part(values) for values in batch[:4]]

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
        """Yield the row of each rate and seed: the means of `MEANS`, the blocked shares, and the curves of `CURVES`."""
        curves = {name: torch.stack(values, -1) for name, values in self.curves.items()}
        blocked = self._gradient[:, 1] / self._gradient[:, 0]
        for (index, rate), (place, seed) in product(enumerate(self.cell.rates), enumerate(self.seeds)):
            yield {
                **Key(self.cell.name, arm, rate, seed)._asdict(),
                **{name: round(curves[name][index, place].mean().item(), 5) for name in MEANS},
                "blocked above": round(blocked[0, index, place].nan_to_num(0.0).item(), 4),
                "blocked below": round(blocked[1, index, place].nan_to_num(0.0).item(), 4),
                "curves": {
                    name: [round(value, 4) for value in values[index, place].tolist()]
                    for name, values in curves.items()
                    if name in CURVES
                },
            }


MEANS = ("AUC", "spread")
"""The means over all batches in a row.

- ``AUC``: the share of right answers, without noise.
- ``spread``: the standard deviation of the log-ratios in the last update on a batch.
"""
CURVES = ("entropy", "held out", "pass@32")
"""The curves of a row, on held-out prompts every `EVAL_EVERY` batches.

- ``entropy``: in nats a token.
- ``held out``: the probability of a right answer.
- ``pass@32``: the probability of a right answer among 32.
"""
SEEDS_TOGETHER = 64
"""The seeds that are trained in one program. With 64 a run takes a quarter to two fifths less time than with 16."""


def parts_of(cell: Cell) -> Iterator[tuple[str, list[int]]]:
    """Yield the rules of a cell with seeds that are trained together, all rules of some seeds before the next seeds."""
    seeds = [*cell.seeds]
    for start in range(0, len(seeds), SEEDS_TOGETHER):
        for arm in cell.arms:
            yield arm, seeds[start : start + SEEDS_TOGETHER]


def keys_of(cell: Cell, arm: str, seeds: Sequence[int]) -> list[Key]:
    """Return the rows of a rule."""
    return [Key(cell.name, arm, rate, seed) for rate, seed in product(cell.rates, seeds)]


def all_keys(cell: Cell) -> list[Key]:
    """Return all rows of a cell."""
    return [key for arm, seeds in parts_of(cell) for key in keys_of(cell, arm, seeds)]


def _missing(cell: Cell, arm: str, seeds: Sequence[int], done: Collection[Key]) -> Cell | None:
    """Return the cell with the rates and seeds of which a rule lacks a row; None if it has all."""
    missing = [key for key in keys_of(cell, arm, seeds) if key not in done]
    rates = [rate for rate in cell.rates if any(key.rate == rate for key in missing)]
    open_seeds = [seed for seed in seeds if any(key.seed == seed for key in missing)]
    return replace(cell, rates=rates, seeds=open_seeds) if missing else None


def run_missing(
    file: Path,
    cells: Sequence[Cell],
    trainer: Callable[[Cell, str], Trainer] | None = None,
    rates: Collection[float] | None = None,
    arms: Collection[str] | None = None,
) -> None:
    """Run what a file of rows does not have, and add it.

    Args:
        file: The file, made if it is not there.
        cells: The cells in the order in which they run.
        trainer: From a cell and the name of a rule, what trains it; by default a `Trainer`.
        rates: The learning rates, by default all.
        arms: The rules, by default all.
    """
    # The order of sums, and so the bits, would depend on the number of threads.
    torch.set_num_threads(1)
    file.touch()
    drop_unfinished_line(file)
    done = {*read_rows(file)}
    with file.open("a", encoding="utf-8") as lines:
        for cell in cells:
            chosen = [rate for rate in cell.rates if rates is None or rate in rates]
            for arm, seeds in parts_of(cell):
                part = _missing(replace(cell, rates=chosen), arm, seeds, done)
                if part is None or arm not in (arms or cell.arms):
                    continue
                begin = time.process_time()
                trained = trainer(part, arm) if trainer else Trainer(part, rules()[arm])
                trained.train()
                seconds = (time.process_time() - begin) / len(keys_of(part, arm, part.seeds))
                for row in trained.rows(arm):
                    if _key_of(row) not in done:
                        lines.write(json.dumps({**row, "seconds": round(seconds, 3)}) + "\n")
                        # A cell with higher rates has the runs of an earlier one.
                        done.add(_key_of(row))
                lines.flush()


def print_count(file: Path, cells: Sequence[Cell]) -> None:
    """Print how many of the runs of each cell a file has."""
    done = read_rows(file).keys()
    for cell in cells:
        every = all_keys(cell)
        print(f"{cell.name}: {sum(key in done for key in every)} of {len(every)} runs")


def read_rows(file: Path) -> dict[Key, Mapping[str, Any]]:
    """Return the rows of a file by key."""
    return {_key_of(row): row for _, row in read_jsonl(file)}


def _key_of(row: Mapping[str, Any]) -> Key:
    return Key(*(row[name] for name in Key._fields))


# The report -----------------------------------------------------------------------------------------------------------

SMALLEST = {"entropy": 0.03, "entropy at reward": 0.03, "pass@32": 0.01, "end": 0.01, "AUC": 0.01}
"""The smallest effect of interest of each metric."""
NAMES = {
    "entropy": "entropy at equal step",
    "entropy at reward": "entropy at equal reward",
    "pass@32": "pass@32",
    "end": "final reward",
    "AUC": "mean reward",
}
"""The names of the metrics in tables."""
COMMON_RATE = 0.0125
BEST = "best"
"""In place of a learning rate: each rule's best one by AUC, of the first plan."""
BEST_OF_MORE = "best of more rates"
"""The same with the rates of an amendment, which are above."""
FEWEST_SEEDS = 4
"""The seeds from which an interval is computed."""
ADDITIVE = 0.05
"""The interaction of the two sides, in nats at equal step, within which they are called additive."""

Contrast = Mapping[str, float]
"""The weights of rules in a difference."""
Rate = float | str
"""A learning rate, `BEST` or `BEST_OF_MORE`."""


def minus(arm: str, other: str) -> Contrast:
    """Return the difference of two rules."""
    return {arm: 1.0, other: -1.0}


PRIMARY = minus("Band over .8", "3 over .8")
CONTROL = minus("2 over .8", CLIP)
PRIMARY_METRICS = ("pass@32", "end")
PRIMARY_CELLS = ("one token, 64", "eight tokens, 64")
INTERACTION: Contrast = {"Band over .8": 1.0, "1.2 over Band": 1.0, "Band over Band": -1.0, CLIP: -1.0}
PAIRS = {
    "Band over .8 minus 3 over .8": PRIMARY,
    "Band over .8 minus 2 over .8": minus("Band over .8", "2 over .8"),
    "Band over .8 minus Band over Band": minus("Band over .8", "Band over Band"),
    "1.2 over Band minus 1.2 over .3": minus("1.2 over Band", "1.2 over .3"),
    "interaction of the two sides of Band": INTERACTION,
}
"""The differences that are not from clip 0.2."""


def side_effects(
    uppers: Sequence[str] = (*UPPER, "Band"), lowers: Sequence[str] = (*LOWER, "Band")
) -> dict[str, Contrast]:
    """Return the effect of each side: of an upper one averaged over the lower sides, and of a lower one over the upper.

    Args:
        uppers: The upper sides; the first one is subtracted from the others.
        lowers: The lower sides, as well.

    >>> sorted(side_effects()["lower .3"].items())[:2]
    [('1.2 over .3', 0.2), ('1.2 over .8', -0.2)]
    """
    effects: dict[str, Contrast] = {}
    for up in uppers[1:]:
        effect = {f"{up} over {low}": 1 / len(lowers) for low in lowers}
        effects[f"upper {up}"] = effect | {f"{uppers[0]} over {low}": -1 / len(lowers) for low in lowers}
    for low in lowers[1:]:
        effect = {f"{up} over {low}": 1 / len(uppers) for up in uppers}
        effects[f"lower {low}"] = effect | {f"{up} over {lowers[0]}": -1 / len(uppers) for up in uppers}
    return effects


def contrasts_of(kind: str) -> dict[str, Contrast]:
    """Return the contrasts of a table by name."""
    if kind == "pairs":
        return PAIRS
    if kind == "sides":
        return side_effects()
    return {arm: minus(arm, CLIP) for arm in rules() if arm != CLIP}


KINDS = {
    "clip": f"minus {CLIP}",
    "sides": "a side, over all others; minus 1.2 or .8",
    "pairs": "other differences",
}
"""The tables of a setting, with the headers of their first columns."""


def metric_of(row: Mapping[str, Any], metric: str, level: float) -> float:
    """Return a metric of a run; NaN for the entropy at a reward that the run never reaches.

    Args:
        row: A row of `Trainer.rows`.
        metric: A key of `SMALLEST`.
        level: The reward on held-out prompts at which entropies are compared at equal reward.
    """
    curves = row["curves"]
    match metric:
        case "AUC":
            return row["AUC"]
        case "end":
            return curves["held out"][-1]
        case "pass@32":
            return curves["pass@32"][-1]
        case "entropy":
            return entropy_at_equal_step(curves["entropy"], "second half")
        case _:
            return _entropy_at_reward(curves["held out"], curves["entropy"], level)


def _entropy_at_reward(rewards: Sequence[float], entropies: Sequence[float], level: float) -> float:
    """Return the entropy when the reward first is at a level, interpolated between two evaluations."""
    first = next((index for index, reward in enumerate(rewards) if reward >= level), None)
    if first is None:
        return math.nan
    around = slice(max(0, first - 1), first + 1)
    return float(np.interp(level, rewards[around], entropies[around]))


class Measured(NamedTuple):
    """A difference with its interval at 95 %, and the number of seeds it is of."""

    interval: Interval
    seeds: int

    def adjusted(self, comparisons: int) -> Interval:
        """Return the interval adjusted for the number of comparisons after Bonferroni."""
        value, low, high = self.interval
        freedom = self.seeds - 1
        factor = float(stats.t.ppf(1 - 0.025 / comparisons, freedom) / stats.t.ppf(0.975, freedom))
        return Interval(value, value - (value - low) * factor, value + (high - value) * factor)


class CellScores:
    """The metrics of a cell by rule, rate and seed.

    Args:
        cell: The cell.
        rows: The rows of all cells.
        metric: What reads a metric of a row at the cell's level, as `metric_of`, the default.
    """

    def __init__(
        self,
        cell: Cell,
        rows: Mapping[Key, Mapping[str, Any]],
        metric: Callable[[Mapping[str, Any], str, float], float] = metric_of,
    ):
        self.cell = cell
        self.rows = {key: row for key, row in rows.items() if key.cell == cell.name}
        shape = (len(cell.arms), len(cell.rates), len(cell.seeds))
        self._arms = {arm: index for index, arm in enumerate(cell.arms)}
        self._scores = {metric: np.full(shape, np.nan) for metric in SMALLEST}
        places = {
            Key(cell.name, arm, rate, seed): (self._arms[arm], index, place)
            for arm in cell.arms
            for index, rate in enumerate(cell.rates)
            for place, seed in enumerate(cell.seeds)
        }
        for key in self.rows.keys() & places.keys():
            for name, scores in self._scores.items():
                scores[places[key]] = metric(self.rows[key], name, cell.level)
        self._remembered: dict[tuple[str, str, bytes], ResampledScores] = {}

    def scores(self, arm: str, metric: str) -> np.ndarray:
        """Return a metric of a rule, of shape (rates, seeds); NaN where there is none."""
        return self._scores[metric][self._arms[arm]]

    def settings(self, predictions: Sequence[Prediction]) -> list[Rate]:
        """Return the rates of the tables that have rows: the common one, those of predictions, and the best ones."""
        worlds = {prediction.world for prediction in predictions}
        rates: list[Rate] = [
            rate
            for rate in self.cell.rates
            if rate == COMMON_RATE or f"{self.cell.name} at {rate:g}" in worlds
        ]
        from_clip = contrasts_of("clip").values()
        return [
            rate
            for rate in [*rates, BEST]
            if any(self.measure(contrast, "AUC", rate) for contrast in from_clip)
        ]

    def has_all_rates(self, arm: str) -> np.ndarray:
        """Return for each seed whether a rule has a run at every rate."""
        return np.isfinite(self.scores(arm, "AUC").sum(0))

    def best_rate(self, arm: str) -> tuple[float, bool] | None:
        """Return a rule's best rate by AUC, and whether it is at an edge; None without runs at every rate."""
        seeds = self.has_all_rates(arm)
        if seeds.sum() < FEWEST_SEEDS:
            return None
        curve = Curve(self.cell.rates, self.scores(arm, "AUC")[:, seeds])
        return self.cell.rates[curve.best], curve.at_edge

    def measure(self, contrast: Contrast, metric: str, rate: Rate) -> Measured | None:
        """Return a difference of rules, paired by seed; None if fewer than `FEWEST_SEEDS` seeds have all their runs."""
        if isinstance(rate, str) and metric != "entropy at reward":
            return self._measure_at_best(contrast, metric)
        values = self.differences(contrast, metric, rate)
        return Measured(student(values), len(values)) if len(values) >= FEWEST_SEEDS else None

    def differences(self, contrast: Contrast, metric: str, rate: Rate) -> np.ndarray:
        """Return a difference of rules for each seed that has all their runs.

        At best rates each rule is at the one that is best over all seeds.
        """
        total = np.zeros(len(self.cell.seeds))
        if not contrast.keys() <= self._arms.keys():
            return np.array([])
        for arm, weight in contrast.items():
            best = (rate, False) if isinstance(rate, float) else self.best_rate(arm)
            if best is None:
                return np.array([])
            total += weight * self.scores(arm, metric)[[*self.cell.rates].index(best[0])]
        return total[np.isfinite(total)]

    def _measure_at_best(self, contrast: Contrast, metric: str) -> Measured | None:
        """Return a difference of rules, each at the rate that is best by AUC on other seeds than it is scored on."""
        if not contrast.keys() <= self._arms.keys():
            return None
        seeds = np.all([self.has_all_rates(arm) for arm in contrast], axis=0)
        if seeds.sum() < FEWEST_SEEDS:
            return None

        def total(sign: int) -> ResampledScores:
            terms = [
                (abs(weight), self._resampled(arm, metric, seeds))
                for arm, weight in contrast.items()
                if weight * sign > 0
            ]
            return lambda counts: np.sum([weight * scores(counts) for weight, scores in terms], axis=0)

        return Measured(difference(total(1), total(-1), [0] * int(seeds.sum())), int(seeds.sum()))

    def _resampled(self, arm: str, metric: str, seeds: np.ndarray) -> ResampledScores:
        """Return the scores of a rule at its best rate as a function of resampled seeds, which remembers them."""
        key = (arm, metric, seeds.tobytes())
        if key not in self._remembered:
            curve, chosen_by = (
                Curve(self.cell.rates, self.scores(arm, name)[:, seeds]) for name in (metric, "AUC")
            )
            self._remembered[key] = remembering(partial(curve.resampled_scores, chosen_by=chosen_by))
        return self._remembered[key]


class Setting(NamedTuple):
    """A cell at one rate, or at the best ones, with all differences of its tables."""

    scores: CellScores
    rate: Rate
    measured: Mapping[tuple[str, str, str], Measured]
    """The differences by kind of table, name and metric."""

    @property
    def name(self) -> str:
        """The name, as in the predictions."""
        return f"{self.scores.cell.name} at {_text(self.rate)}"


def _text(rate: Rate) -> str:
    return rate if isinstance(rate, str) else f"{rate:g}"


def settings_of_rows(rows: Mapping[Key, Mapping[str, Any]]) -> list[Setting]:
    """Return the settings of the report that have rows."""
    predictions = all_predictions()
    settings: list[Setting] = []
    for cell in STUDY:
        scores = CellScores(cell, rows)
        settings += [setting_of(scores, rate) for rate in scores.settings(predictions)]
        more = setting_of(CellScores(cell.with_higher_rates(), rows), BEST_OF_MORE)
        settings += [more] if more.measured else []
    return settings


def setting_of(
    scores: CellScores, rate: Rate, contrasts: Callable[[str], Mapping[str, Contrast]] = contrasts_of
) -> Setting:
    """Return a setting with the differences that have runs.

    Args:
        scores: The metrics of its cell.
        rate: The rate.
        contrasts: What returns the contrasts of a table of `KINDS` by name.
    """
    measured: dict[tuple[str, str, str], Measured] = {}
    for kind in KINDS:
        for (name, contrast), metric in product(contrasts(kind).items(), SMALLEST):
            if found := scores.measure(contrast, metric, rate):
                measured[kind, name, metric] = found
    return Setting(scores, rate, measured)


def all_predictions() -> list[Prediction]:
    """Return the predictions of both pages."""
    return [*read_predictions(PREDICTIONS), *read_predictions(MORE_RATES)]


def differences_table(setting: Setting, kind: str, comparisons: int) -> Table:
    """Return the differences of one kind in a setting; bold if they exclude 0 adjusted for the comparisons.

    A difference of rules that have no runs together is left out.
    """
    cells: list[list[str]] = []
    for name in dict.fromkeys(name for other, name, _ in setting.measured if other == kind):
        texts: list[str] = []
        for metric in SMALLEST:
            found = setting.measured.get((kind, name, metric))
            if found is None:
                texts.append("–")
                continue
            low, high = found.adjusted(comparisons)[1:]
            text = signed(found.interval)
            if low > 0 or high < 0:
                text = f"**{text}**"
            is_part = found.seeds < len(setting.scores.cell.seeds)
            texts.append(f"{text} ({found.seeds})" if metric == "entropy at reward" or is_part else text)
        cells.append([name, *texts])
    return Table([f"{setting.name}: {KINDS[kind]}", *NAMES.values()], cells)


def means_table(scores: CellScores, rate: Rate) -> Table:
    """Return the means of each rule at a rate or at its best one, the blocked shares, and the rule's best rate.

    A rule without runs at the rate is left out.
    """
    cells: list[list[str]] = []
    seeds = len(scores.cell.seeds)
    for arm in scores.cell.arms:
        best = scores.best_rate(arm)
        at = rate if isinstance(rate, float) else best and best[0]
        if at is None:
            continue
        keys = [Key(scores.cell.name, arm, at, seed) for seed in scores.cell.seeds]
        runs = [scores.rows[key] for key in keys if key in scores.rows]
        if not runs:
            continue
        texts = [arm, f"{len(runs)} of {seeds}"]
        for metric in SMALLEST:
            values = scores.scores(arm, metric)[[*scores.cell.rates].index(at)]
            known = values[np.isfinite(values)]
            text = f"{known.mean():.3f}" if len(known) else "–"
            texts.append(f"{text} ({len(known)})" if metric == "entropy at reward" else text)
        texts += [f"{np.mean([row[name] for row in runs]):.3f}" for name in MEANS_OF_RUNS]
        place = "not run" if best is None else f"{best[0]:g}, {'edge' if best[1] else 'interior'}"
        complete = int(scores.has_all_rates(arm).sum())
        texts.append(f"{place} ({complete})" if 0 < complete < seeds else place)
        cells.append(texts)
    return Table([f"means at {_text(rate)}", "runs", *NAMES.values(), *MEANS_OF_RUNS, "best rate"], cells)


MEANS_OF_RUNS = ("blocked above", "blocked below", "spread")
"""What a table of means has besides the metrics."""


def runs_table(rows: Mapping[Key, Mapping[str, Any]]) -> Table:
    """Return how many of the planned runs of each cell there are."""
    cells: list[list[str]] = []
    for cell in STUDY:
        keys = all_keys(cell)
        higher = [key for key in all_keys(cell.with_higher_rates()) if key.rate in cell.higher_rates]
        common = [key for key in keys if key.rate == COMMON_RATE]
        counted = [f"{sum(key in rows for key in some)} of {len(some)}" for some in (common, keys, higher)]
        cells.append([cell.name, *counted])
    return Table(["cell", f"runs at {COMMON_RATE:g}", "runs at all rates", "runs at higher rates"], cells)


def primary_measures(settings: Sequence[Setting]) -> dict[tuple[str, str], Measured]:
    """Return the primary differences at the common rate by cell and metric."""
    return {
        (setting.scores.cell.name, metric): setting.measured["pairs", "Band over .8 minus 3 over .8", metric]
        for setting in settings
        if setting.rate == COMMON_RATE and setting.scores.cell.name in PRIMARY_CELLS
        for metric in PRIMARY_METRICS
    }


PRIMARY_COMPARISONS = len(PRIMARY_CELLS) * len(PRIMARY_METRICS)


def primary_table(settings: Sequence[Setting]) -> Table:
    """Return the primary differences, adjusted for their number and not."""
    cells: list[list[str]] = []
    for (cell, metric), found in primary_measures(settings).items():
        adjusted = found.adjusted(PRIMARY_COMPARISONS)
        cells.append([cell, NAMES[metric], signed(found.interval, 4), signed(adjusted, 4), str(found.seeds)])
    return Table(["cell", "Band over .8 minus 3 over .8", "95 %", "adjusted for four", "seeds"], cells)


def shows(control: Measured) -> bool:
    """Return True if the control keeps entropy at equal step, so that something may be said of Band."""
    return control.interval.low > 0 and control.interval.value >= SMALLEST["entropy"]


def control_of(setting: Setting) -> Measured | None:
    """Return the difference in entropy at equal step of the control from clip 0.2."""
    return setting.measured.get(("clip", "2 over .8", "entropy"))


def control_table(settings: Sequence[Setting]) -> Table:
    """Return where the control shows."""
    cells: list[list[str]] = []
    for setting in settings:
        if control := control_of(setting):
            verdict_of_control = "shows" if shows(control) else "does not show"
            cells.append([setting.name, signed(control.interval), str(control.seeds), verdict_of_control])
    header = ["setting", f"2 over .8 minus {CLIP}, {NAMES['entropy']}", "seeds", "the control"]
    return Table(header, cells)


def looked_at_table(settings: Sequence[Setting], comparisons: int) -> Table:
    """Return how many intervals exclude 0, adjusted for those of the setting, for all of the report, and not."""
    cells: list[list[str]] = []
    for setting in settings:
        found = [*setting.measured.values()]
        texts = [setting.name, str(len(found))]
        for number in (1, len(found), comparisons):
            intervals = [each.adjusted(number) for each in found]
            above = sum(interval.low > 0 for interval in intervals)
            below = sum(interval.high < 0 for interval in intervals)
            texts.append(f"{above} above, {below} below")
        cells.append(texts)
    header = ["setting", "intervals", "exclude 0", "adjusted for these", f"for all {comparisons}"]
    return Table(header, cells)


def power_of(deviation: float, seeds: int, effect: float) -> float:
    """Return how often a paired interval at 95 % is above 0, if the differences are normal with a mean of the effect.

    >>> round(power_of(0.1, 64, 0.05), 2), round(power_of(0.1, 64, 0.0), 3)
    (0.98, 0.025)
    """
    limit = stats.t.ppf(0.975, seeds - 1)
    return float(stats.nct.sf(limit, seeds - 1, effect * seeds**0.5 / deviation))


def power_table(settings: Sequence[Setting]) -> Table:
    """Return the power of the primary comparison and of the control, for the smallest effect and for twice that."""
    cells: list[list[str]] = []
    named = {"Band over .8 minus 3 over .8": PRIMARY, f"2 over .8 minus {CLIP}": CONTROL}
    for setting, (name, contrast) in product(settings, named.items()):
        if isinstance(setting.rate, str):
            continue
        texts = [f"{setting.name}: {name}"]
        for metric, smallest in SMALLEST.items():
            values = setting.scores.differences(contrast, metric, setting.rate)
            deviation = float(np.std(values, ddof=1)) if len(values) >= FEWEST_SEEDS else 0.0
            if not deviation:
                texts.append("–")
                continue
            once, twice = (power_of(deviation, len(values), effect) for effect in (smallest, 2 * smallest))
            texts.append(f"{once:.0%}, {twice:.0%}")
        cells.append(texts)
    header = ["setting", *(f"{NAMES[metric]}, {smallest:g}" for metric, smallest in SMALLEST.items())]
    return Table(header, cells)


def verdicts_table(settings: Sequence[Setting]) -> Table:
    """Return the verdict on each prediction; the primary ones on intervals that are adjusted for their number."""
    by_name = {setting.name: setting for setting in settings}
    cells: list[list[str]] = []
    for world, arm, other, metric, expects in all_predictions():
        setting = by_name.get(world)
        found = setting and setting.scores.measure(minus(arm, other), metric, setting.rate)
        terms = [world, f"{arm} minus {other}, {NAMES[metric]}", expects]
        if setting is None or found is None:
            cells.append([*terms, "not run", "–", "open"])
            continue
        interval = found.interval
        is_primary = (
            minus(arm, other) == PRIMARY
            and (setting.scores.cell.name, metric) in primary_measures(settings)
            and setting.rate == COMMON_RATE
        )
        if is_primary:
            interval = found.adjusted(PRIMARY_COMPARISONS)
        conclusion = verdict(interval, expects, SMALLEST[metric])
        measured = signed(interval) + (", adjusted for four" if is_primary else "")
        cells.append([*terms, measured, str(found.seeds), conclusion])
    return Table(["setting", "difference", "predicted", "measured", "seeds", "verdict"], cells)


STUDY = [cell for cell in CELLS if not cell.name.startswith("pilot")]
"""The cells of the study, without pilots."""
TERMS = """\
Rules are named by their upper and their lower side. "Band over .8" is `BandAbove()`, "Band over Band" has the bounds of
`BandPO()`, "1.2 over .8" is clip 0.2, "1.28 over .8" is Clip-Higher; "3 over .8" and "1.2 over .3" are the constants of
the dose of Band's two sides. The number of a cell is that of its updates on a batch; each answer is used once.

- **Entropy at equal step:** in nats a token on held-out prompts, the mean over the second half of the batches.
- **Entropy at equal reward:** in nats a token on held-out prompts, interpolated to when the held-out reward first is
  {levels}. It is over the seeds of which all compared runs reach it.
- **pass@32** and **final reward:** exact, on held-out prompts at the end. **Mean reward:** over all batches of the
  training.
- **Blocked above, below:** the share of the gradient of rare winners and rare losers (p < 0.1) that a rule dropped.
  **Spread:** the standard deviation of the log-ratios in the last update on a batch, the mean over the batches.
- **Best rate:** by mean reward, chosen on other seeds than those that are scored, and chosen anew in each bootstrap
  sample; at equal reward, and in the tables of means, the best one over all seeds. At an *edge* of the grid a rate
  beyond may be better. *Best* is of the rates of the first plan. *Best of more rates* is of those and of higher ones,
  which were added, with the predictions of `control-more-rates-predictions.md`, because best rates were at the edge;
  eight rules have runs there.

A number in parentheses is that of the seeds, where there may be fewer than planned. Intervals are of 95 %, paired by
seed. **Bold** ones exclude 0 also if they are adjusted after Bonferroni for the number of all intervals in the tables
of differences, {comparisons}."""
PRIMARY_TEXT = """\
Does a bound by probability matter beyond a constant of the same dose? Of {number} intervals, each adjusted for the
number of four: above 0 {above}, below 0 {below}, within ± 0.01, the smallest effect of interest, {equal}."""


def page(rows: Mapping[Key, Mapping[str, Any]]) -> str:
    """Return the report as Markdown."""
    settings = settings_of_rows(rows)
    comparisons = max(1, sum(len(setting.measured) for setting in settings))
    levels = ", ".join(dict.fromkeys(f"{cell.level:g} with {cell.world}" for cell in STUDY))
    primary = [found.adjusted(PRIMARY_COMPARISONS) for found in primary_measures(settings).values()]
    counts = {
        "number": len(primary),
        "above": sum(interval.low > 0 for interval in primary),
        "below": sum(interval.high < 0 for interval in primary),
        "equal": sum(interval.low > -0.01 and interval.high < 0.01 for interval in primary),
    }
    verdicts = verdicts_table(settings)
    counted = Counter(cells[-1] for cells in verdicts.rows)
    lines = [
        "# A control that shows: many updates a batch, in two testbeds",
        "",
        "Written by `python -m studies.control research/results/control/rows.jsonl.gz --report`. The terms, the rules "
        "and the predictions are those of `research/studies/control-predictions.md`, committed before the runs.",
        "",
        TERMS.format(levels=levels, comparisons=comparisons),
        "",
        "## The primary comparison",
        "",
        PRIMARY_TEXT.format(**counts),
        "",
        primary_table(settings).markdown(),
        "",
        "## The control",
        "",
        "Nothing is said of Band in a testbed, unless the control shows there at the common rate with 64 updates: "
        "entropy at equal step above clip 0.2, surely and by at least 0.03 nats.",
        "",
        control_table(settings).markdown(),
        "",
        "## Predictions",
        "",
        f"Of {len(verdicts.rows)} predictions {counted['held']} held, {counted['failed']} failed, "
        f"{counted['undecided']} are undecided and {counted['open']} are open.",
        "",
        verdicts.markdown(),
        "",
        "## Runs",
        "",
        "How many of the planned runs there are. Rules without runs are left out of the tables, and a rule without all "
        "its rates has no best one.",
        "",
        runs_table(rows).markdown(),
        "",
    ]
    for cell in STUDY:
        of_cell = [setting for setting in settings if setting.scores.cell.name == cell.name]
        if not of_cell:
            continue
        lines += [f"## {cell.name}", ""]
        for setting in of_cell:
            lines += [means_table(setting.scores, setting.rate).markdown(), ""]
            tables = [differences_table(setting, kind, comparisons) for kind in KINDS]
            for table in tables:
                lines += [table.markdown(), ""] if table.rows else []
    lines += [
        "## Are the two sides additive?",
        "",
        f"They are called so if their interaction in entropy at equal step is within ± {ADDITIVE:g} nats.",
        "",
        additive_table(settings).markdown(),
        "",
        "## Intervals looked at",
        "",
        "They share runs and seeds, so they are not independent.",
        "",
        looked_at_table(settings, comparisons).markdown(),
        "",
        "## Power",
        "",
        "How often such a study finds a difference of the smallest effect of interest, and of twice that, from the "
        "paired standard deviations and the seeds of the rows.",
        "",
        power_table(settings).markdown(),
    ]
    return "\n".join(lines) + "\n"


def additive_table(settings: Sequence[Setting]) -> Table:
    """Return the interaction of Band's two sides in entropy at equal step."""
    cells: list[list[str]] = []
    for setting in settings:
        found = setting.measured.get(("pairs", "interaction of the two sides of Band", "entropy"))
        if found:
            within = verdict(found.interval, "equal", ADDITIVE)
            word = {"held": "additive", "failed": "not additive"}.get(within, within)
            cells.append([setting.name, signed(found.interval), word])
    return Table(["setting", f"interaction, {NAMES['entropy']}", "the sides are"], cells)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the file does not have, or count it."""
    parser = argparse.ArgumentParser(prog="python -m studies.control")
    parser.add_argument("rows", type=Path, help="one line for each run; made if it is not there")
    parser.add_argument("--cell", choices=[cell.name for cell in CELLS], help="run one cell only")
    parser.add_argument("--rate", type=float, action="append", help="run this learning rate, and no other")
    parser.add_argument("--arm", choices=rules(), action="append", help="run this rule, and no other")
    parser.add_argument("--report", type=Path, help="only write the report to this file")
    parser.add_argument("--count", action="store_true", help="only print what is done and what is left")
    options = parser.parse_args(arguments)
    if options.report:
        with replacing(options.report) as unfinished:
            unfinished.write_text(page(read_rows(options.rows)), encoding="utf-8")
        return
    chosen = [cell for cell in CELLS if cell.name == options.cell] or STUDY
    cells = [*chosen, *(cell.with_higher_rates() for cell in chosen if cell.higher_rates)]
    if options.count:
        print_count(options.rows, cells)
        return
    run_missing(options.rows, cells, rates=options.rate, arms=options.arm)


if __name__ == "__main__":
    main()
