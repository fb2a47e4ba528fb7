"""A study with a real vocabulary: AdamW trains the last two layers of SmolLM2-135M.

    PYTHONPATH=research python -m studies.smollm2 runs.jsonl --processes 2
    PYTHONPATH=research python -m studies.smollm2 runs.jsonl --device cuda --processes 5 --seeds-together 4
    PYTHONPATH=research python -m studies.smollm2 new-seeds.jsonl --study "new seeds" --processes 2
    PYTHONPATH=research python -m studies.smollm2 runs.jsonl --count

All but the last continue after the last run in the file.

The lower layers are frozen, and their hidden states are stored with each batch, so that an update only runs the last
layers. A batch is sampled from the current policy and trained on ``lag`` batches later. A continuation of six tokens is
rewarded for a word of a class, or at random. All arms of a part are trained together at one rate, with stacked weights.
The predictions are in smollm2-predictions.md and smollm2-new-seeds-predictions.md, each committed before its first run.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from bandpo import (
    M2PO,
    Band,
    BandAbove,
    FixedClip,
    Loosest,
    Method,
    Rows,
    TokenTOPR,
    TotalVariation,
    TwoSided,
    Unclipped,
    policy_loss,
    rollout_weights,
)
from bandpo.core.objectives import DualClip, Objective, SequenceMask, Surrogate
from bandpo_lab.errors import RunProblem
from bandpo_lab.evals.metrics import pass_at_k
from bandpo_lab.files.writing import drop_unfinished_line
from bandpo_lab.models.embedded import smollm2_path
from bandpo_lab.study.jobs import run_in_processes
from bandpo_lab.study.provenance import commit, machine, now
from rlvet.runs.files import read_jsonl
from studies.stacked_llama import StackedLayers, select_rows

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from bandpo.core.batch import Tokens
    from bandpo.core.rules import ClipRule


@dataclass(frozen=True)
class SuffixVeto(Objective):
    """PPO's surrogate, but a sequence with A < 0 is dropped from the first token with a ratio below ``trigger`` on.

    This is how we read the negative-advantage veto of arXiv 2605.17570, whose exact formula we did not find. A row must
    hold one sequence without padding.
    """

    trigger: float = 0.5

    def weight(self, tokens: Tokens) -> Float[Tensor, "batch time"]:
        triggered = (tokens.advantages < 0) & (tokens.ratio < self.trigger)
        return Surrogate().weight(tokens).masked_fill(triggered.cumsum(-1) > 0, 0.0)

    @property
    def whole_sequence(self) -> bool:
        return True


@dataclass(frozen=True)
class Arm:
    """What is compared: a method, and the policy that its ratio refers to.

    Attributes:
        method: The method or its clip rule.
        recomputed: True if the ratio refers to log-probabilities that were recomputed before the first update on a
            batch, as trainers with decoupled objectives do; False if it refers to the policy that sampled.
        weighted: True for importance weights of recomputed to sampling policy, truncated at 2 for each token.
        rate_by_sample_size: True to multiply each update by the square root of the effective sample size over the
            number of sequences, as arXiv 2602.17616 does for AdamW.
    """

    method: Method | ClipRule
    recomputed: bool = False
    weighted: bool = False
    rate_by_sample_size: bool = False


CLIP = FixedClip(0.2)
HIGH_CLIP = FixedClip(0.2, 1.0)
ARMS: Mapping[str, Arm] = {
    "clip 0.2": Arm(CLIP),
    "Clip-Higher": Arm(FixedClip(0.2, 0.28)),
    "clip [.8, 2]": Arm(HIGH_CLIP),
    "clip [.8, 5]": Arm(FixedClip(0.2, 4.0)),
    "no upper bound": Arm(FixedClip(0.2, math.inf)),
    "no bound": Arm(Unclipped()),
    "Band": Arm(Band()),
    "BandAbove": Arm(BandAbove().clip),
    "room by mass": Arm(TwoSided(lower=CLIP, upper=Loosest(CLIP, Band(TotalVariation(), 0.02)))),
    "clip above, Band below": Arm(TwoSided(lower=Band(), upper=CLIP)),
    # The negative side, mostly under an upper bound of 2.
    "clip 0.1": Arm(FixedClip(0.1)),
    "clip [0, 2]": Arm(FixedClip(1.0, 1.0)),
    "dual clip": Arm(Method(HIGH_CLIP, DualClip(3.0))),
    "veto of sequences": Arm(Method(HIGH_CLIP, SequenceMask(0.5))),
    "veto of suffixes": Arm(Method(HIGH_CLIP, SuffixVeto())),
    "truncated negatives": Arm(TokenTOPR()),
    "M2PO": Arm(M2PO()),
    "rate by sample size": Arm(HIGH_CLIP, rate_by_sample_size=True),
    "recomputed": Arm(CLIP, recomputed=True),
    "recomputed, weighted": Arm(CLIP, recomputed=True, weighted=True),
}
CONSTANT = ("clip 0.2", "Clip-Higher", "clip [.8, 2]", "clip [.8, 5]", "no upper bound", "no bound")
"""The arms whose bounds are the same for every probability."""

PROMPTS = (
    "Once upon a time, there was a small",
    "The best way to learn a new language",
    "In the morning she opened the door and",
    "Dinner was ready, so the whole family",
    "The history of the old town is a",
    "If you want to bake a good cake",
    "He looked up at the sky and said",
    "On Monday the company said that it would",
    "Water is important for people because it",
    "The main difference between summer and winter is",
    "When I was a child I used to",
    "The teacher asked the class to write about",
    "A good friend is someone who will always",
    "Last night I had a dream in which",
    "To fix the problem you first need to",
    "Dear Anna, I am writing to you about",
)
"""The prompts. Each is truncated to the length of the shortest, so that a batch has no padding."""
BODY = frozenset(
    {
        "arm",
        "arms",
        "ankle",
        "bone",
        "bones",
        "brain",
        "cheek",
        "cheeks",
        "chest",
        "chin",
        "ear",
        "ears",
        "elbow",
        "elbows",
        "eye",
        "eyes",
        "face",
        "faces",
        "feet",
        "finger",
        "fingers",
        "foot",
        "forehead",
        "hair",
        "hand",
        "hands",
        "head",
        "heads",
        "heart",
        "hip",
        "hips",
        "knee",
        "knees",
        "leg",
        "legs",
        "lip",
        "lips",
        "liver",
        "lungs",
        "mouth",
        "neck",
        "nose",
        "shoulder",
        "shoulders",
        "skin",
        "stomach",
        "teeth",
        "throat",
        "thumb",
        "toe",
        "toes",
        "tongue",
        "tooth",
        "wrist",
    }
)
"""Words for parts of the body. A continuation with one of them earns the true reward."""
LENGTH = 6
"""Tokens of a continuation."""
STD_EPSILON = 1e-4
"""The constant that TRL adds to a group's standard deviation."""
COMMON = 0.1
"""The lowest probability of a common token."""
HARD = 0.25
"""A group is hard if at most this share of its continuations is rewarded, as in `studies.bandits`."""
TOP_LAYERS = 2
BASE_SAMPLES = 4
"""The number of continuations of each prompt by the base model, for its distance to the policy."""
END_SAMPLES = 32
"""The number of continuations of each prompt by the final policy."""
LARGEST_NORM = 1.0
"""The norm to which gradients are clipped."""

CURVES = ("right", "rewarded", "entropy", "blocked", "blocked below", "movement", "sample size", "luck")
"""The curves of a row, with a value for each batch.

- ``right``: share of continuations with a word of the class; ``rewarded``: with a reward.
- ``entropy``: of the policy at the tokens that it drew, in nats a token.
- ``blocked``: share of the gradient of tokens with A > 0 that the method drops; ``blocked below``: with A < 0.
- ``movement``: mean absolute logarithm of the ratio to the sampling policy at the updates.
- ``sample size``: effective number of sequences over their number, by the ratios to the sampling policy.
- ``luck``: in groups of which at most a quarter is rewarded, the share of the winners' advantages that is on common
  tokens.

The last five are of the batch that is trained on, and None before there is one.
"""


@dataclass(frozen=True)
class Part:
    """A part of the study: all its arms at all its rates and seeds.

    Attributes:
        reward: ``"body"`` for the true reward, ``"coin"`` for a random one that does not depend on the continuation.
        luck: The probability that a continuation is rewarded whatever it contains.
        lucky_word: If given, only continuations with this word have luck.
        groups: The number of prompts in a batch.
        group: The number of continuations of each prompt.
        epochs: The number of passes over a batch.
        top_layers: The number of last layers that are trained.
    """

    name: str
    arms: Sequence[str]
    rates: Sequence[float]
    lag: int
    epochs: int = 1
    reward: str = "body"
    luck: float = 0.1
    lucky_word: str | None = None
    groups: int = 8
    group: int = 8
    minibatches: int = 4
    batches: int = 100
    seeds: Sequence[int] = range(12)
    top_layers: int = TOP_LAYERS


_BOUNDS = list(ARMS)[:9]
_SIX = ["clip 0.2", "clip [.8, 2]", "no upper bound", "Band", "BandAbove", "room by mass"]
_FOUR = ["clip 0.2", "clip [.8, 2]", "BandAbove", "room by mass"]
_NEGATIVE = ["clip 0.2", "clip [.8, 2]", "no bound", *list(ARMS)[10:]]
PARTS = (
    Part("stale", _BOUNDS, [1.5e-4, 3e-4, 6e-4, 1.2e-3], lag=4),
    Part("reused", _SIX, [1.5e-4, 3e-4, 6e-4], lag=0, epochs=4, batches=60),
    Part("stale, coin", list(ARMS)[:10], [3e-4, 1e-3], lag=4, reward="coin", luck=0.5, group=4, batches=60),
    Part("reused, coin", _SIX, [2.5e-4, 5e-4], lag=0, epochs=4, reward="coin", luck=0.5, group=4, batches=40),
    Part("very stale", _NEGATIVE, [1.5e-4, 3e-4, 6e-4], lag=8),
    Part("stale, no luck", _FOUR, [3e-4, 6e-4], lag=4, luck=0.0),
    Part("stale, lucky word", _FOUR, [3e-4, 6e-4], lag=4, luck=0.3, lucky_word="the"),
    Part("stale, six layers", _FOUR, [1.5e-4, 3e-4], lag=4, top_layers=6),
)
"""The parts in order. All parts of a block of seeds are run before the next, so an interrupted study is balanced."""
NEW_SEEDS = Part(
    "stale, new seeds",
    ["clip 0.2", "clip [.8, 2]", "BandAbove"],
    [6e-4],
    lag=4,
    batches=80,
    seeds=range(12, 20),
)
"""A test of the entropy that was found after the runs of the part "stale" had ended."""
STUDIES = {"bounds": PARTS, "new seeds": (NEW_SEEDS,)}
"""The studies, each with its parts."""


class Run(NamedTuple):
    """A training run."""

    part: str
    arm: str
    rate: float
    seed: int


class Continuations(NamedTuple):
    """Continuations of prompts of one length, for each policy."""

    hidden: Float[Tensor, "policies rows time width"]
    """The output of the frozen layers for the prompt and the continuation without its last token."""
    tokens: Int[Tensor, "policies rows length"]
    logp: Float[Tensor, "policies rows length"]
    entropy: Float[Tensor, "policies rows length"]
    advantages: Float[Tensor, "policies rows"]
    hard: Tensor
    """True if at most a quarter of the row's group was rewarded."""

    def rows(self, indices: Int[Tensor, "policies some"]) -> Continuations:
        """Return some rows of each policy."""
        policies = torch.arange(len(indices), device=indices.device)[:, None]
        return Continuations(*(tensor[policies, indices] for tensor in self))


class Policies:
    """Policies that share the frozen layers of a Llama model, and have trained layers of their own above them.

    On a GPU the frozen layers are in bfloat16. The others are in float32.

    Args:
        folder: The folder of the model and its tokenizer.
        count: The number of policies.
        top_layers: The number of last layers that are trained, with the norm after them.
        device: The device.
    """

    def __init__(self, folder: Path, count: int, top_layers: int = TOP_LAYERS, device: str = "cpu"):
        from transformers import AutoTokenizer, LlamaForCausalLM

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        loaded: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model = loaded.to(device)
        llama = model.model
        trunk_dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.trunk = StackedLayers(llama, slice(None, -top_layers), 1, dtype=trunk_dtype)
        self.top = StackedLayers(llama, slice(-top_layers, None), count, with_norm=True)
        self.head: Tensor = model.lm_head.weight.detach()
        self.embedding: Tensor = llama.embed_tokens.weight.detach()
        self.device = device
        self.count = count
        for parameter in self.top.parameters:
            parameter.requires_grad_(True)
        # Decoding token by token is equal but for characters of several tokens, of which no word consists.
        self._pieces = self.tokenizer.batch_decode([[token] for token in range(len(self.embedding))])
        ids = [self.tokenizer(text).input_ids for text in PROMPTS]
        self.prompt_length = min(map(len, ids))
        self.prompts = torch.tensor([row[: self.prompt_length] for row in ids], device=device)
        with torch.no_grad():
            self._prompt_hidden, self._prompt_cache = self.trunk(self.embedding[self.prompts][None])

    @torch.no_grad()
    def generate(
        self, prompts: Int[Tensor, "policies rows"], chances: Float[Tensor, "policies rows length"]
    ) -> Continuations:
        """Sample continuations at temperature 1; rewards and advantages are still 0.

        Args:
            prompts: The indices of the prompts.
            chances: A random number between 0 and 1 for each token.
        """
        policies, rows = prompts.shape
        trunk_cache = select_rows(self._prompt_cache, prompts.flatten())
        hidden = [self._prompt_hidden[0, prompts].float()]
        states, top_cache = self.top(hidden[0])
        tokens, logp, entropy = [], [], []
        for step in range(LENGTH):
            all_logp = (states[:, :, -1].flatten(0, 1) @ self.head.T).log_softmax(-1)
            probabilities = all_logp.exp()
            entropy.append(-(probabilities * all_logp).sum(-1))
            edges = probabilities.cumsum_(-1)
            edges[:, -1] = math.inf  # rounding may leave it below the largest random number
            token = torch.searchsorted(edges, chances[:, :, step].reshape(-1, 1).contiguous())
            tokens.append(token)
            logp.append(all_logp.gather(-1, token)[:, 0])
            if step + 1 < LENGTH:
                states, trunk_cache = self.trunk(self.embedding[token][None], trunk_cache)
                hidden.append(states.float().view(policies, rows, 1, -1))
                states, top_cache = self.top(hidden[-1], top_cache)
        return Continuations(
            torch.cat(hidden, 2),
            torch.cat(tokens, 1).view(policies, rows, LENGTH),
            torch.stack(logp, 1).view(policies, rows, LENGTH),
            torch.stack(entropy, 1).view(policies, rows, LENGTH),
            torch.zeros(policies, rows, device=self.device),
            torch.zeros(policies, rows, dtype=torch.bool, device=self.device),
        )

    def logp(
        self, hidden: Float[Tensor, "policies rows time width"], tokens: Int[Tensor, "policies rows length"]
    ) -> Float[Tensor, "policies rows length"]:
        """Return the log-probabilities of continuations under the current policies."""
        states, _ = self.top(hidden)
        # One matrix product over all rows: for a slice with more dimensions torch would copy the head for each row.
        logits = states[:, :, self.prompt_length - 1 :].flatten(0, 2) @ self.head.T
        losses = torch.nn.functional.cross_entropy(logits, tokens.flatten(), reduction="none")
        return -losses.view(tokens.shape)

    def texts(self, tokens: Int[Tensor, "policies rows length"]) -> list[list[str]]:
        """Return the continuations of each policy as text."""
        pieces = self._pieces
        return [
            ["".join(pieces[token] for token in row) for row in rows_of_policy]
            for rows_of_policy in tokens.tolist()
        ]


def word_of(text: str, words: frozenset[str] = BODY) -> str | None:
    """Return the first of some words, by default of `BODY`, in a text, or None.

    >>> word_of(" dog, and his Eyes were")
    'eyes'
    """
    return next((word for word in re.findall("[a-z]+", text.lower()) if word in words), None)


def rewarded(
    part: Part, texts: Sequence[str], chances: Float[Tensor, " rows"]
) -> tuple[list[str | None], Float[Tensor, " rows"]]:
    """Return the words of `BODY` in continuations, None if there is none, and their rewards.

    Args:
        part: The part.
        texts: The continuations.
        chances: A random number between 0 and 1 for each.
    """
    words = [word_of(text) for text in texts]
    lucky = chances < part.luck
    if part.lucky_word is not None:
        lucky_words = frozenset([part.lucky_word])
        lucky &= torch.tensor([word_of(text, lucky_words) is not None for text in texts])
    if part.reward == "coin":
        return words, lucky.float()
    return words, (torch.tensor([word is not None for word in words]) | lucky).float()


def with_rewards(batch: Continuations, rewards: Float[Tensor, "policies rows"], group: int) -> Continuations:
    """Return a batch with the advantages of GRPO.

    >>> empty = Continuations(*[torch.zeros(1, 4)] * 6)
    >>> batch = with_rewards(empty, torch.tensor([[1.0, 0.0, 0.0, 0.0]]), group=4)
    >>> [round(advantage, 2) for advantage in batch.advantages[0].tolist()], batch.hard[0].tolist()
    ([1.5, -0.5, -0.5, -0.5], [True, True, True, True])
    """
    groups = rewards.view(len(rewards), -1, group)
    mean = groups.mean(-1, keepdim=True)
    advantages = (groups - mean) / (groups.std(-1, keepdim=True) + STD_EPSILON)
    hard = (mean <= HARD).expand_as(groups)
    return batch._replace(advantages=advantages.flatten(1), hard=hard.flatten(1))


def luck_of(batch: Continuations) -> Float[Tensor, " policies"]:
    """Return the share of positive advantages in hard groups on common tokens; NaN if there are none."""
    winners = (batch.advantages.clamp(min=0.0) * batch.hard)[..., None].expand_as(batch.logp)
    common = winners * (batch.logp >= math.log(COMMON))
    return common.sum((1, 2)) / winners.sum((1, 2))


def effective_words(words: Sequence[str | None]) -> float:
    """Return the exponential of the entropy of the words in continuations; 0 if there are none.

    >>> effective_words(["eye", "hand", None])
    2.0
    """
    counts = torch.tensor(
        list(Counter(word for word in words if word is not None).values()), dtype=torch.float64
    )
    if not len(counts):
        return 0.0
    return round(float(torch.distributions.Categorical(counts).entropy().exp()), 6)


@dataclass
class Trainer:
    """AdamW on the trained layers of policies, each by its own arm, all at one rate.

    Attributes:
        policies: The policies.
        arms: The arm of each policy.
        rate: The learning rate.
    """

    policies: Policies
    arms: Sequence[Arm]
    rate: float
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        fused = self.policies.device == "cuda"
        self.optimizer = torch.optim.AdamW(
            self.policies.top.parameters, self.rate, weight_decay=0.0, fused=fused, foreach=not fused
        )
        by_arm: dict[Arm, list[int]] = {}
        for index, arm in enumerate(self.arms):
            by_arm.setdefault(arm, []).append(index)
        device = self.policies.device
        self._by_arm = {arm: torch.tensor(indices, device=device) for arm, indices in by_arm.items()}
        self._rate_by_sample_size = torch.tensor(
            [arm.rate_by_sample_size for arm in self.arms], device=device
        )

    def old_logp(self, batch: Continuations) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities that the ratios refer to, and importance weights, both of the form of ``logp``.

        Call it before the first update on a batch.
        """
        old = batch.logp.clone()
        weights = torch.ones_like(old)
        recomputed = torch.tensor([arm.recomputed for arm in self.arms], device=old.device)
        if recomputed.any():
            with torch.no_grad():
                # Some rows at a time, because the logits of all would take gigabytes.
                chunks = zip(batch.hidden.split(16, 1), batch.tokens.split(16, 1), strict=True)
                current = torch.cat([self.policies.logp(*chunk) for chunk in chunks], 1)
            old[recomputed] = current[recomputed]
            weighted = torch.tensor([arm.weighted for arm in self.arms], device=old.device)
            if weighted.any():
                weights[weighted] = rollout_weights(
                    current[weighted].flatten(0, 1), batch.logp[weighted].flatten(0, 1), upper=2.0
                ).view_as(batch.logp[weighted])
        return old, weights

    def update(self, batch: Continuations, old: Tensor, weights: Tensor) -> dict[str, Tensor]:
        """Make one update on a minibatch.

        Args:
            batch: The minibatch.
            old: The log-probabilities that the ratios refer to.
            weights: Importance weights.

        Returns:
            Statistics of each policy, (policies,): sums for the shares of dropped gradient, the mean movement, and the
            effective sample size.
        """
        logp = self.policies.logp(batch.hidden, batch.tokens)
        gradient = self._loss_gradient(logp.detach(), batch, old, weights)
        self.optimizer.zero_grad()
        logp.backward(gradient)
        log_ratio = (logp.detach() - batch.logp).clamp(-20, 20)
        sequence_ratios = log_ratio.sum(-1).exp()
        sample_size = sequence_ratios.sum(1).square() / sequence_ratios.square().sum(1) / log_ratio.shape[1]
        self._step(sample_size)
        # The gradient without a bound, up to its sign.
        mass = (logp.detach() - old).exp() * batch.advantages.abs()[..., None] * weights
        above = mass * (batch.advantages > 0)[..., None]
        below = mass * (batch.advantages < 0)[..., None]
        statistics = {
            "blocked": above * (gradient >= 0),
            "above": above,
            "blocked below": below * (gradient <= 0),
            "below": below,
        }
        sums = {name: values.sum((1, 2)) for name, values in statistics.items()}
        return {**sums, "movement": log_ratio.abs().mean((1, 2)), "sample size": sample_size}

    def _loss_gradient(self, logp: Tensor, batch: Continuations, old: Tensor, weights: Tensor) -> Tensor:
        """Return the derivative of each policy's mean loss with respect to ``logp``."""
        logp = logp.requires_grad_()
        total = torch.zeros((), device=logp.device)
        for arm, indices in self._by_arm.items():
            advantages = batch.advantages[indices].flatten()[:, None].expand(-1, LENGTH)
            loss, _ = policy_loss(
                logp[indices].flatten(0, 1),
                old[indices].flatten(0, 1),
                advantages,
                method=arm.method,
                weights=weights[indices].flatten(0, 1) if arm.weighted else None,
                aggregation="sum",
                layout=Rows(),
            )
            total = total + loss
        return torch.autograd.grad(total, logp)[0] / batch.tokens[0].numel()

    @torch.no_grad()
    def _step(self, sample_size: Tensor) -> None:
        """Clip the gradient of each policy and step; a gradient that is not finite counts as 0."""
        parameters = self.policies.top.parameters
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norms = sum(gradient.flatten(1).square().sum(1) for gradient in gradients).sqrt()  # pyright: ignore
        scale = (LARGEST_NORM / (norms + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(scale.view(-1, *[1] * (gradient.dim() - 1)))
            gradient.masked_fill_(~norms.isfinite().view(-1, *[1] * (gradient.dim() - 1)), 0.0)
        if not any(arm.rate_by_sample_size for arm in self.arms):
            self.optimizer.step()
            return
        factor = torch.where(self._rate_by_sample_size, sample_size.sqrt(), 1.0)
        before = [parameter.clone() for parameter in parameters]
        self.optimizer.step()
        for parameter, start in zip(parameters, before, strict=True):
            parameter.copy_(start.lerp(parameter, factor.view(-1, *[1] * (parameter.dim() - 1))))


class RandomNumbers:
    """The random numbers of runs: all arms and rates of a seed use the same ones.

    Args:
        seeds: The seed of each run.
        device: The device of the results.
    """

    def __init__(self, seeds: Sequence[int], device: str):
        distinct = sorted(set(seeds))
        self._generators = [torch.Generator().manual_seed(seed) for seed in distinct]
        self._of_run = torch.tensor([distinct.index(seed) for seed in seeds])
        self._device = device

    def uniform(self, *shape: int) -> Float[Tensor, "runs ..."]:
        """Return numbers between 0 and 1."""
        numbers = [torch.rand(shape, generator=generator) for generator in self._generators]
        return torch.stack(numbers)[self._of_run].to(self._device)

    def permutations(self, count: int, size: int) -> Int[Tensor, "runs count size"]:
        """Return permutations of the numbers below ``size``."""
        orders = [
            torch.stack([torch.randperm(size, generator=generator) for _ in range(count)])
            for generator in self._generators
        ]
        return torch.stack(orders)[self._of_run].to(self._device)


def train(part: Part, runs: Sequence[Run], device: str) -> list[dict[str, Any]]:
    """Train runs of one part and rate together, and return their rows: curves, and measurements of the end."""
    if device == "cpu":
        torch.set_num_threads(1)  # the order of sums, hence the bits, would depend on their number
    began = time.monotonic()
    policies = Policies(smollm2_path(), len(runs), part.top_layers, device)
    trainer = Trainer(policies, [ARMS[run.arm] for run in runs], runs[0].rate)
    numbers = RandomNumbers([run.seed for run in runs], device)
    every_prompt = torch.arange(len(PROMPTS), device=device)
    base_prompts = every_prompt.repeat_interleave(BASE_SAMPLES).expand(len(runs), -1)
    base = policies.generate(base_prompts, numbers.uniform(len(PROMPTS) * BASE_SAMPLES, LENGTH))
    rows = part.groups * part.group
    curves: dict[str, list[Tensor]] = {name: [] for name in CURVES}
    waiting: deque[Continuations] = deque()

    for _ in range(part.batches):
        prompts = numbers.permutations(1, len(PROMPTS))[:, 0, : part.groups]
        order = numbers.permutations(part.epochs, rows)
        batch = policies.generate(prompts.repeat_interleave(part.group, 1), numbers.uniform(rows, LENGTH))
        chances = numbers.uniform(rows).cpu()
        outcomes = [
            rewarded(part, texts, chances[index]) for index, texts in enumerate(policies.texts(batch.tokens))
        ]
        rewards = torch.stack([rewards_of_run for _, rewards_of_run in outcomes])
        waiting.append(with_rewards(batch, rewards.to(device), part.group))
        right = [sum(word is not None for word in words) / rows for words, _ in outcomes]
        point = {
            "right": torch.tensor(right),
            "rewarded": rewards.mean(1),
            "entropy": batch.entropy.mean((1, 2)),
        }
        if len(waiting) > part.lag:
            point |= _train_on_batch(
                trainer, waiting.popleft(), order.view(len(runs), -1, rows // part.minibatches)
            )
        for name in CURVES:
            curves[name].append(point.get(name, torch.full((len(runs),), math.nan)))

    ends = _measure_end(policies, numbers, base)
    by_run = {
        name: torch.stack([value.cpu() for value in values], 1).tolist() for name, values in curves.items()
    }
    seconds = round((time.monotonic() - began) / len(runs), 1)
    return [
        {
            **run._asdict(),
            "seconds": seconds,
            **ends[index],
            **{name: [_rounded(value) for value in by_run[name][index]] for name in CURVES},
        }
        for index, run in enumerate(runs)
    ]


def _rounded(value: float) -> float | None:
    """Return a value with four decimals; None for NaN."""
    return None if math.isnan(value) else round(value, 4)


def _train_on_batch(
    trainer: Trainer, batch: Continuations, minibatches: Int[Tensor, "policies count size"]
) -> dict[str, Tensor]:
    """Make the updates on a batch, and return the points of the curves that describe them."""
    old, weights = trainer.old_logp(batch)
    policies = torch.arange(len(old), device=old.device)[:, None]
    effects = []
    for chosen in minibatches.unbind(1):
        minibatch = batch.rows(chosen)
        effects.append(trainer.update(minibatch, old[policies, chosen], weights[policies, chosen]))
    total = {name: torch.stack([effect[name] for effect in effects]).sum(0) for name in effects[0]}
    return {
        "blocked": total["blocked"] / total["above"],
        "blocked below": total["blocked below"] / total["below"],
        "movement": total["movement"] / len(effects),
        "sample size": total["sample size"] / len(effects),
        "luck": luck_of(batch),
    }


def _measure_end(policies: Policies, numbers: RandomNumbers, base: Continuations) -> list[dict[str, Any]]:
    """Measure the final policies: continuations of every prompt, and the distance from the base model."""
    every_prompt = torch.arange(len(PROMPTS), device=policies.device)
    prompts = every_prompt.repeat_interleave(END_SAMPLES).expand(policies.count, -1)
    chances = numbers.uniform(prompts.shape[1], LENGTH)
    # In chunks, because the probabilities of all rows would take gigabytes.
    chunks = zip(prompts.split(64, 1), chances.split(64, 1), strict=True)
    samples = [policies.generate(*chunk) for chunk in chunks]
    texts = policies.texts(torch.cat([batch.tokens for batch in samples], 1))
    entropy = torch.cat([batch.entropy for batch in samples], 1).mean((1, 2))
    with torch.no_grad():
        distance = (base.logp - policies.logp(base.hidden, base.tokens)).mean((1, 2))
    ends = []
    for index, texts_of_run in enumerate(texts):
        words = [word_of(text) for text in texts_of_run]
        right = torch.tensor([word is not None for word in words]).view(len(PROMPTS), END_SAMPLES).float()
        ends.append(
            {
                "end": round(float(right.mean()), 4),
                f"pass@{END_SAMPLES}": round(float(pass_at_k(right, END_SAMPLES).mean()), 4),
                "words": round(effective_words(words), 2),
                "end entropy": round(float(entropy[index]), 4),
                "kl from base": round(float(distance[index]), 4),
            }
        )
    return ends


def groups_of_runs(
    parts: Sequence[Part] = PARTS, seeds_together: int = 1
) -> Iterator[tuple[Part, list[Run]]]:
    """Yield the runs that are trained together: all arms of a part at one rate, for a block of seeds.

    All parts of a block of seeds come before the next block.
    """
    seeds = sorted({seed for part in parts for seed in part.seeds})
    for begin in range(0, len(seeds), seeds_together):
        block = seeds[begin : begin + seeds_together]
        for part in parts:
            for rate in part.rates:
                group = [
                    Run(part.name, arm, rate, seed)
                    for arm in part.arms
                    for seed in block
                    if seed in part.seeds
                ]
                if group:
                    yield part, group


def read_runs(file: Path) -> dict[Run, dict[str, Any]]:
    """Return the rows of the finished runs."""
    return {Run(*(row[name] for name in Run._fields)): row for _, row in read_jsonl(file)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the runs that the file of results does not contain."""
    parser = argparse.ArgumentParser(prog="python -m studies.smollm2")
    parser.add_argument("results", type=Path, help="one line for each run; made if it is not there")
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        help="on a CPU, of one thread each; on a GPU, of up to 16 GB with 4 seeds",
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--seeds-together", type=int, default=1, help="more use more memory")
    parser.add_argument("--study", choices=STUDIES, default="bounds", help="default: %(default)s")
    parser.add_argument("--count", action="store_true", help="only say how much is done")
    options = parser.parse_args(arguments)
    parts = STUDIES[options.study]
    options.results.touch()
    drop_unfinished_line(options.results)
    done = read_runs(options.results)
    if options.count:
        for part in parts:
            of_part = [run in done for _, group in groups_of_runs([part]) for run in group]
            print(f"{part.name}: {sum(of_part)} of {len(of_part)} runs")
        return
    todo = []
    for part, group in groups_of_runs(parts, options.seeds_together):
        missing = [run for run in group if run not in done]
        if missing:
            todo.append((part, missing))
    smollm2_path()  # prepare the model once, before several processes do so in parallel
    calls = [partial(train, part, group, options.device) for part, group in todo]
    provenance = {"commit": commit(), "machine": machine(), "torch": torch.__version__}
    if options.device == "cuda":
        provenance["machine"] = torch.cuda.get_device_name()
    failed = []
    with options.results.open("a") as lines:
        ended = run_in_processes(calls, options.processes, preload=["studies.smollm2", "transformers"])
        for count, (index, outcome) in enumerate(ended, 1):
            part, group = todo[index]
            if outcome.code:
                failed.append(f"{part.name} at {group[0].rate}")
                continue
            for row in outcome.value:
                lines.write(json.dumps(row | provenance | {"time": now()}) + "\n")
            lines.flush()
            seconds = f"{outcome.seconds:.0f} s"
            print(f"{count} of {len(todo)} groups: {part.name} at {group[0].rate}, {seconds}", flush=True)
    if failed:
        raise RunProblem(
            f"some groups of runs failed: {', '.join(failed)}. Their errors are above. The same command runs them "
            "again; if memory was short, with a lower --processes"
        )


if __name__ == "__main__":
    main()
