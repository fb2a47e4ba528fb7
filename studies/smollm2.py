"""A study with a real vocabulary: AdamW trains the last two layers of SmolLM2-135M.

    python -m studies.smollm2 runs.jsonl --processes 2            # continues after the last run in the file
    python -m studies.smollm2 runs.jsonl --count

The lower layers are frozen, and their hidden states are stored with each batch, so that an update only runs the last
layers. A batch is sampled from the current policy and trained on ``lag`` batches later. A continuation of six tokens is
rewarded for a word of a class, or at random. The predictions are in smollm2-predictions.md, which was committed before
the first run.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import re
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from bandpo import Band, BandAbove, FixedClip, Loosest, TotalVariation, TwoSided, Unclipped, policy_loss
from bandpo.errors import RunProblem
from bandpo.runs.files import read_jsonl
from bandpo_lab.evals.metrics import pass_at_k
from bandpo_lab.files import drop_unfinished_line
from bandpo_lab.models import smollm2_path
from bandpo_lab.study.jobs import run_in_processes
from bandpo_lab.study.provenance import commit, machine, now

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from bandpo.rules import ClipRule

CLIP = FixedClip(0.2)
ARMS: Mapping[str, ClipRule] = {
    "clip 0.2": CLIP,
    "Clip-Higher": FixedClip(0.2, 0.28),
    "clip [.8, 2]": FixedClip(0.2, 1.0),
    "clip [.8, 5]": FixedClip(0.2, 4.0),
    "no upper bound": FixedClip(0.2, math.inf),
    "no bound": Unclipped(),
    "Band": Band(),
    "BandAbove": BandAbove().clip,
    "room by mass": TwoSided(lower=CLIP, upper=Loosest(CLIP, Band(TotalVariation(), 0.02))),
    "clip above, Band below": TwoSided(lower=Band(), upper=CLIP),
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
TOP_LAYERS = 2
BASE_SAMPLES = 4
"""The number of continuations of each prompt by the base model, for its distance to the policy."""
END_SAMPLES = 32
"""The number of continuations of each prompt by the final policy."""

CURVES = ("right", "rewarded", "entropy", "blocked", "blocked below", "movement", "luck")
"""The curves of a row, with a value for each batch.

- ``right``: share of continuations with a word of the class; ``rewarded``: with a reward.
- ``entropy``: of the policy at the tokens that it drew, in nats a token.
- ``blocked``: share of the gradient of tokens with A > 0 that the rule drops; ``blocked below``: with A < 0.
- ``movement``: mean absolute logarithm of the ratio at the updates.
- ``luck``: in groups of which less than half is rewarded, the share of the winners' advantages that is on
  common tokens.

The last four are of the batch that is trained on, and None before there is one.
"""


@dataclass(frozen=True)
class Part:
    """A part of the study: all its arms at all its rates and seeds.

    Attributes:
        reward: ``"body"`` for the true reward, ``"coin"`` for a random one that does not depend on the continuation.
        luck: The probability that a continuation is rewarded whatever it contains.
        groups: The number of prompts in a batch.
        group: The number of continuations of each prompt.
        epochs: The number of passes over a batch.
    """

    name: str
    arms: Sequence[str]
    rates: Sequence[float]
    lag: int
    epochs: int = 1
    reward: str = "body"
    luck: float = 0.1
    groups: int = 8
    group: int = 8
    minibatches: int = 4
    batches: int = 80
    seeds: Sequence[int] = range(8)


_NINE = [name for name in ARMS if name != "clip above, Band below"]
_SIX = ["clip 0.2", "clip [.8, 2]", "no upper bound", "Band", "BandAbove", "room by mass"]
_FOUR = ["clip 0.2", "clip [.8, 2]", "BandAbove", "room by mass"]
PARTS = (
    Part("stale", _NINE, [1.5e-4, 3e-4, 6e-4], lag=4),
    Part("reused", _SIX, [1.5e-4, 3e-4, 6e-4], lag=0, epochs=4, batches=40),
    Part("stale, coin", [*ARMS], [3e-4, 1e-3], lag=4, reward="coin", luck=0.5, group=4, batches=40),
    Part("stale, no luck", _FOUR, [3e-4, 6e-4], lag=4, luck=0.0),
    Part("reused, coin", _SIX, [2.5e-4, 5e-4], lag=0, epochs=4, reward="coin", luck=0.5, group=4, batches=30),
)
"""The parts in order. All parts of a seed are run before the next seed, so that an interrupted study is balanced."""


class Run(NamedTuple):
    """A training run."""

    part: str
    arm: str
    rate: float
    seed: int


class Continuations(NamedTuple):
    """Continuations of prompts of one length."""

    hidden: Float[Tensor, "rows time width"]
    """The output of the frozen layers for the prompt and the continuation without its last token."""
    tokens: Int[Tensor, "rows length"]
    logp: Float[Tensor, "rows length"]
    entropy: Float[Tensor, "rows length"]
    advantages: Float[Tensor, " rows"]
    hard: Tensor
    """True if less than half of the row's group was rewarded."""


class Policy:
    """A Llama model in two parts, both in float32: frozen layers, and trained ones above them.

    Args:
        folder: The folder of the model and its tokenizer.
        top_layers: The number of last layers that are trained, with the norm after them.
    """

    def __init__(self, folder: Path, top_layers: int = TOP_LAYERS):
        from transformers import AutoTokenizer, LlamaForCausalLM

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        layers = model.model.layers
        self.trunk = _submodel(model, layers[:-top_layers], torch.nn.Identity())
        self.top = _submodel(model, layers[-top_layers:], model.model.norm)
        self.head: Tensor = model.lm_head.weight.detach()
        self.parameters = [
            *(parameter for layer in self.top.layers for parameter in layer.parameters()),
            *self.top.norm.parameters(),
        ]
        for parameter in self.parameters:
            parameter.requires_grad_(True)
        self._start = [parameter.detach().clone() for parameter in self.parameters]
        ids = [self.tokenizer(text).input_ids for text in PROMPTS]
        self.prompt_length = min(map(len, ids))
        self.prompts = torch.tensor([row[: self.prompt_length] for row in ids])
        with torch.no_grad():
            output = self.trunk(input_ids=self.prompts, use_cache=True)
        self._prompt_hidden = output.last_hidden_state.float()
        self._prompt_cache = output.past_key_values

    @torch.no_grad()
    def reset(self) -> None:
        """Put the weights of the base model back."""
        for parameter, start in zip(self.parameters, self._start, strict=True):
            parameter.copy_(start)

    @torch.no_grad()
    def generate(self, prompts: Int[Tensor, " rows"], numbers: torch.Generator) -> Continuations:
        """Sample a continuation of each prompt at temperature 1; rewards and advantages are still 0.

        Args:
            prompts: The indices of the prompts, one per row.
            numbers: The random generator.
        """
        trunk_cache = copy.deepcopy(self._prompt_cache)
        trunk_cache.batch_select_indices(prompts)
        hidden = [self._prompt_hidden[prompts]]
        output = self.top(inputs_embeds=hidden[0], use_cache=True)
        state, top_cache = output.last_hidden_state[:, -1], output.past_key_values
        tokens, logp, entropy = [], [], []
        for step in range(LENGTH):
            all_logp = self._log_probabilities(state)
            probabilities = all_logp.exp()
            entropy.append(-(probabilities * all_logp).sum(-1))
            chances = torch.rand(len(prompts), 1, generator=numbers)
            # Without the last edge, which rounding may leave below the largest random number.
            token = torch.searchsorted(probabilities.cumsum(-1)[:, :-1].contiguous(), chances)
            tokens.append(token)
            logp.append(all_logp.gather(-1, token))
            if step + 1 < LENGTH:
                output = self.trunk(input_ids=token, past_key_values=trunk_cache, use_cache=True)
                hidden.append(output.last_hidden_state.float())
                output = self.top(inputs_embeds=hidden[-1], past_key_values=top_cache, use_cache=True)
                state = output.last_hidden_state[:, -1]
        rows = len(prompts)
        return Continuations(
            torch.cat(hidden, 1),
            torch.cat(tokens, 1),
            torch.cat(logp, 1),
            torch.stack(entropy, 1),
            torch.zeros(rows),
            torch.zeros(rows, dtype=torch.bool),
        )

    def logp(
        self, hidden: Float[Tensor, "rows time width"], tokens: Int[Tensor, "rows length"]
    ) -> Float[Tensor, "rows length"]:
        """Return the log-probabilities of continuations under the current policy."""
        states = self.top(inputs_embeds=hidden, use_cache=False).last_hidden_state
        states = states[:, self.prompt_length - 1 :]
        # One matrix product over all rows: for a slice with three dimensions torch would copy the head for each row.
        logits = states.flatten(0, 1) @ self.head.T
        losses = torch.nn.functional.cross_entropy(logits, tokens.flatten(), reduction="none")
        return -losses.view(tokens.shape)

    def texts(self, tokens: Int[Tensor, "rows length"]) -> list[str]:
        """Return continuations as text."""
        return self.tokenizer.batch_decode(tokens)

    def _log_probabilities(self, state: Float[Tensor, "rows width"]) -> Float[Tensor, "rows vocabulary"]:
        return (state.contiguous() @ self.head.T).log_softmax(-1)


def _submodel(model: Any, layers: Any, norm: torch.nn.Module) -> Any:
    """Return a model with some of the layers of ``model``, without gradients.

    Args:
        model: The full model.
        layers: The layers to take.
        norm: The norm after them.
    """
    from transformers import LlamaModel

    config = copy.deepcopy(model.config)
    config.num_hidden_layers = len(layers)
    with torch.device("meta"):
        part = cast("Any", LlamaModel(config))
    part.embed_tokens = copy.deepcopy(model.model.embed_tokens)
    part.layers = torch.nn.ModuleList(copy.deepcopy(layer) for layer in layers)
    part.norm = copy.deepcopy(norm)
    part.rotary_emb = copy.deepcopy(model.model.rotary_emb)
    for index, layer in enumerate(cast("Any", part.layers)):
        # The index of the layer in the key-value cache of this model.
        layer.self_attn.layer_idx = index
    return part.requires_grad_(False).eval()


@cache
def policy() -> Policy:
    """Return SmolLM2. Each process loads it once."""
    torch.set_num_threads(1)  # the order of sums, hence the bits, would depend on their number
    return Policy(smollm2_path())


def word_of(text: str) -> str | None:
    """Return the first word of `BODY` in a text, or None.

    >>> word_of(" dog, and his Eyes were")
    'eyes'
    """
    words = re.findall("[a-z]+", text.lower())
    return next((word for word in words if word in BODY), None)


def rewarded(part: Part, words: Sequence[str | None], luck: torch.Generator) -> Float[Tensor, " rows"]:
    """Return the rewards of continuations from their words, which are None if there is none."""
    lucky = torch.rand(len(words), generator=luck) < part.luck
    if part.reward == "coin":
        return lucky.float()
    return (torch.tensor([word is not None for word in words]) | lucky).float()


def with_rewards(batch: Continuations, rewards: Float[Tensor, " rows"], group: int) -> Continuations:
    """Return a batch with the advantages of GRPO.

    >>> empty = Continuations(*[torch.zeros(4)] * 6)
    >>> batch = with_rewards(empty, torch.tensor([1.0, 0.0, 0.0, 0.0]), group=4)
    >>> [round(advantage, 2) for advantage in batch.advantages.tolist()], batch.hard.tolist()
    ([1.5, -0.5, -0.5, -0.5], [True, True, True, True])
    """
    groups = rewards.view(-1, group)
    mean = groups.mean(1, keepdim=True)
    advantages = (groups - mean) / (groups.std(1, keepdim=True) + STD_EPSILON)
    hard = (mean < 0.5).expand_as(groups)
    return batch._replace(advantages=advantages.flatten(), hard=hard.flatten())


def luck_of(batch: Continuations) -> float | None:
    """Return the share of positive advantages in hard groups on common tokens; None if there are none."""
    winners = batch.advantages.clamp(min=0.0) * batch.hard
    mass = winners[:, None].expand_as(batch.logp)
    if not mass.any():
        return None
    return float((mass * (batch.logp.exp() >= COMMON)).sum() / mass.sum())


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


def update(
    model: Policy, optimizer: torch.optim.Optimizer, batch: Continuations, rule: ClipRule
) -> dict[str, float]:
    """Make one update on a minibatch, and return its statistics of blocked gradient and movement."""
    logp = model.logp(batch.hidden, batch.tokens)
    advantages = batch.advantages[:, None].expand_as(logp)
    loss, _ = policy_loss(logp, batch.logp, advantages, method=rule, packed=False)
    optimizer.zero_grad()
    loss.backward()
    if torch.nn.utils.clip_grad_norm_(model.parameters, 1.0).isfinite():
        optimizer.step()
    with torch.no_grad():
        log_ratio = logp - batch.logp
        bounds = rule.bounds(batch.logp)
        mass = log_ratio.exp() * advantages.abs()
        above = (advantages > 0) * mass
        below = (advantages < 0) * mass
        return {
            "blocked": float((above * (log_ratio > bounds.log_upper)).sum()),
            "above": float(above.sum()),
            "blocked below": float((below * (log_ratio < bounds.log_lower)).sum()),
            "below": float(below.sum()),
            "movement": float(log_ratio.abs().mean()),
        }


def train(part: Part, run: Run) -> dict[str, Any]:
    """Train one run, and return its row: curves, and measurements of the final policy."""
    began = time.process_time()
    model = policy()
    model.reset()
    rule = ARMS[run.arm]
    optimizer = torch.optim.AdamW(model.parameters, run.rate, weight_decay=0.0, foreach=True)
    # All arms and rates of a seed use the same random numbers.
    numbers = torch.Generator().manual_seed(run.seed)
    luck = torch.Generator().manual_seed(run.seed + 1000)
    base_numbers = torch.Generator().manual_seed(run.seed + 2000)
    base = model.generate(torch.arange(len(PROMPTS)).repeat_interleave(BASE_SAMPLES), base_numbers)
    curves: dict[str, list[float | None]] = {name: [] for name in CURVES}
    waiting: deque[Continuations] = deque()

    for _ in range(part.batches):
        prompts = torch.randperm(len(PROMPTS), generator=numbers)[: part.groups]
        rows = part.groups * part.group
        order = torch.stack([torch.randperm(rows, generator=numbers) for _ in range(part.epochs)])
        batch = model.generate(prompts.repeat_interleave(part.group), numbers)
        words = [word_of(text) for text in model.texts(batch.tokens)]
        rewards = rewarded(part, words, luck)
        waiting.append(with_rewards(batch, rewards, part.group))
        point: dict[str, float | None] = {
            "right": sum(word is not None for word in words) / rows,
            "rewarded": float(rewards.mean()),
            "entropy": float(batch.entropy.mean()),
        }
        if len(waiting) > part.lag:
            old = waiting.popleft()
            minibatches = order.view(part.epochs * part.minibatches, -1)
            effects = [
                update(model, optimizer, Continuations(*(tensor[chosen] for tensor in old)), rule)
                for chosen in minibatches
            ]
            total = {name: sum(effect[name] for effect in effects) for name in effects[0]}
            point["blocked"] = total["blocked"] / total["above"] if total["above"] else None
            point["blocked below"] = total["blocked below"] / total["below"] if total["below"] else None
            point["movement"] = total["movement"] / len(effects)
            point["luck"] = luck_of(old)
        for name in CURVES:
            value = point.get(name)
            curves[name].append(value if value is None else round(value, 4))

    end_numbers = torch.Generator().manual_seed(run.seed + 3000)
    prompts = torch.arange(len(PROMPTS)).repeat_interleave(END_SAMPLES)
    # In chunks, because the probabilities of all rows would take hundreds of megabytes.
    samples = [model.generate(rows, end_numbers) for rows in prompts.split(64)]
    words = [word_of(text) for batch in samples for text in model.texts(batch.tokens)]
    right = torch.tensor([word is not None for word in words]).view(len(PROMPTS), END_SAMPLES).float()
    with torch.no_grad():
        distance = (base.logp - model.logp(base.hidden, base.tokens)).mean()
    return {
        **run._asdict(),
        "seconds": round(time.process_time() - began, 1),
        "end": round(float(right.mean()), 4),
        f"pass@{END_SAMPLES}": round(float(pass_at_k(right, END_SAMPLES).mean()), 4),
        "words": round(effective_words(words), 2),
        "end entropy": round(float(torch.cat([batch.entropy for batch in samples]).mean()), 4),
        "kl from base": round(float(distance), 4),
        **curves,
    }


def runs(parts: Sequence[Part] = PARTS) -> Iterator[tuple[Part, Run]]:
    """Yield all runs in order: all parts of a seed before the next seed."""
    for seed in sorted({seed for part in parts for seed in part.seeds}):
        for part in parts:
            if seed in part.seeds:
                for rate in part.rates:
                    for arm in part.arms:
                        yield part, Run(part.name, arm, rate, seed)


def read_runs(file: Path) -> dict[Run, dict[str, Any]]:
    """Return the rows of the finished runs."""
    return {Run(*(row[name] for name in Run._fields)): row for _, row in read_jsonl(file)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the runs that the file of results does not contain."""
    parser = argparse.ArgumentParser(prog="python -m studies.smollm2")
    parser.add_argument("results", type=Path, help="one line for each run; made if it is not there")
    parser.add_argument("--processes", type=int, default=1, help="of one thread each")
    parser.add_argument("--count", action="store_true", help="only say how much is done")
    options = parser.parse_args(arguments)
    options.results.touch()
    drop_unfinished_line(options.results)
    done = read_runs(options.results)
    if options.count:
        for part in PARTS:
            of_part = [run in done for _, run in runs([part])]
            print(f"{part.name}: {sum(of_part)} of {len(of_part)} runs")
        return
    todo = [(part, run) for part, run in runs() if run not in done]
    smollm2_path()  # prepare the model once, before several processes do so in parallel
    calls = [partial(train, part, run) for part, run in todo]
    with options.results.open("a") as lines:
        ended = run_in_processes(calls, options.processes, preload=["studies.smollm2", "transformers"])
        for count, (index, outcome) in enumerate(ended, len(done) + 1):
            _, run = todo[index]
            if outcome.code:
                raise RunProblem(f"{run} failed with status {outcome.code}")
            provenance = {"commit": commit(), "time": now(), "machine": machine()}
            lines.write(json.dumps(outcome.value | provenance) + "\n")
            lines.flush()
            print(f"{count} of {len(done) + len(todo)}: {run}", flush=True)


if __name__ == "__main__":
    main()
