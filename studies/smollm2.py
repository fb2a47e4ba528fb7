"""A study with a real vocabulary: SmolLM2-135M, of which the last two layers are trained by AdamW.

    python -m studies.smollm2 runs.jsonl --processes 2            # goes on where the file ends
    python -m studies.smollm2 runs.jsonl --count

The layers below are frozen, and their hidden states are kept with each batch: an update runs through the last layers
alone. A batch is drawn by the policy as it is, and trained on ``lag`` batches later. Rewards are for a word
of a class among six tokens, or for luck. What is expected stands in smollm2-predictions.md, which was committed before
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
"""What is continued. Each is cut to the length of the shortest, so that a batch has no padding."""
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
"""Words for parts of the body: the true reward is for a continuation that has one."""
LENGTH = 6
"""Tokens of a continuation."""
STD_EPSILON = 1e-4
"""What TRL adds to a group's standard deviation."""
COMMON = 0.1
"""Probability from which on a token counts as common."""
TOP_LAYERS = 2
BASE_SAMPLES = 4
"""Continuations of each prompt by the base model, on which its distance to the policy is measured."""
END_SAMPLES = 32
"""Continuations of each prompt by the policy at the end."""

CURVES = ("right", "rewarded", "entropy", "blocked", "blocked below", "movement", "luck")
"""What a row has by batch.

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
    """One part of the study: every arm at every rate and seed.

    Attributes:
        reward: ``"body"`` for the true reward, ``"coin"`` for one that no continuation deserves more than another.
        luck: How often a continuation is rewarded whatever it says.
        groups: Prompts of a batch.
        group: Continuations of each.
        epochs: Passes over a batch.
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
"""In a seed's order. All parts of a seed are made before the next seed, so that a study that is cut off is balanced."""


class Run(NamedTuple):
    """One training."""

    part: str
    arm: str
    rate: float
    seed: int


class Continuations(NamedTuple):
    """Continuations of prompts of one length."""

    hidden: Float[Tensor, "rows time width"]
    """What the frozen layers give for the prompt and the continuation without its last token."""
    tokens: Int[Tensor, "rows length"]
    logp: Float[Tensor, "rows length"]
    entropy: Float[Tensor, "rows length"]
    advantages: Float[Tensor, " rows"]
    hard: Tensor
    """Whether less than half of the row's group was rewarded."""


class Policy:
    """A Llama model in two parts, both in float32: frozen layers, and trained ones above them.

    Args:
        folder: The model and its tokenizer.
        top_layers: How many of its last layers are trained, with the norm after them.
    """

    def __init__(self, folder: Path, top_layers: int = TOP_LAYERS):
        from transformers import AutoTokenizer, LlamaForCausalLM

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        whole = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        layers = whole.model.layers
        self.trunk = _part_of(whole, layers[:-top_layers], torch.nn.Identity())
        self.top = _part_of(whole, layers[-top_layers:], whole.model.norm)
        self.head: Tensor = whole.lm_head.weight.detach()
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
            prompts: Their numbers, one a row.
            numbers: Where the random numbers come from.
        """
        trunk_cache = copy.deepcopy(self._prompt_cache)
        trunk_cache.batch_select_indices(prompts)
        hidden = [self._prompt_hidden[prompts]]
        output = self.top(inputs_embeds=hidden[0], use_cache=True)
        state, top_cache = output.last_hidden_state[:, -1], output.past_key_values
        tokens, logp, entropy = [], [], []
        for step in range(LENGTH):
            every = self._log_probabilities(state)
            probabilities = every.exp()
            entropy.append(-(probabilities * every).sum(-1))
            chances = torch.rand(len(prompts), 1, generator=numbers)
            # The last edge is left out: rounding may leave it below the greatest chance.
            token = torch.searchsorted(probabilities.cumsum(-1)[:, :-1].contiguous(), chances)
            tokens.append(token)
            logp.append(every.gather(-1, token))
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
        """Return the log-probabilities of continuations under the policy as it is."""
        states = self.top(inputs_embeds=hidden, use_cache=False).last_hidden_state
        states = states[:, self.prompt_length - 1 :]
        # One matrix product over all rows: over a slice of three dimensions torch would copy the head for each row.
        logits = states.flatten(0, 1) @ self.head.T
        losses = torch.nn.functional.cross_entropy(logits, tokens.flatten(), reduction="none")
        return -losses.view(tokens.shape)

    def texts(self, tokens: Int[Tensor, "rows length"]) -> list[str]:
        """Return continuations as text."""
        return self.tokenizer.batch_decode(tokens)

    def _log_probabilities(self, state: Float[Tensor, "rows width"]) -> Float[Tensor, "rows vocabulary"]:
        return (state.contiguous() @ self.head.T).log_softmax(-1)


def _part_of(whole: Any, layers: Any, norm: torch.nn.Module) -> Any:
    """Return a model of some layers of another, without gradients.

    Args:
        whole: The other model.
        layers: Its layers.
        norm: What comes after them.
    """
    from transformers import LlamaModel

    config = copy.deepcopy(whole.config)
    config.num_hidden_layers = len(layers)
    with torch.device("meta"):
        part = cast("Any", LlamaModel(config))
    part.embed_tokens = copy.deepcopy(whole.model.embed_tokens)
    part.layers = torch.nn.ModuleList(copy.deepcopy(layer) for layer in layers)
    part.norm = copy.deepcopy(norm)
    part.rotary_emb = copy.deepcopy(whole.model.rotary_emb)
    for place, layer in enumerate(cast("Any", part.layers)):
        # Where the layer's keys and values stand in a cache of this part.
        layer.self_attn.layer_idx = place
    return part.requires_grad_(False).eval()


@cache
def policy() -> Policy:
    """Return SmolLM2, which each process loads once."""
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
    """Return the rewards of continuations, by the word that each has."""
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
    """Return the share of the winners' advantages in hard groups that is on common tokens; None without a winner."""
    winners = batch.advantages.clamp(min=0.0) * batch.hard
    mass = winners[:, None].expand_as(batch.logp)
    if not mass.any():
        return None
    return float((mass * (batch.logp.exp() >= COMMON)).sum() / mass.sum())


def effective_words(words: Sequence[str | None]) -> float:
    """Return the exponential of the entropy of the words that continuations have; 0 without any.

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
    """Make one update on a minibatch, and return what the rule did to it."""
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
    """Make one run, and return its row: curves, and outcomes of the policy at the end."""
    began = time.process_time()
    model = policy()
    model.reset()
    rule = ARMS[run.arm]
    optimizer = torch.optim.AdamW(model.parameters, run.rate, weight_decay=0.0, foreach=True)
    # Every arm and rate of a seed draws the same numbers.
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
    # In parts: the probabilities of all rows would take a hundred megabytes each.
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
    """Yield all runs in the order in which they are made: every part of a seed before the next seed."""
    for seed in sorted({seed for part in parts for seed in part.seeds}):
        for part in parts:
            if seed in part.seeds:
                for rate in part.rates:
                    for arm in part.arms:
                        yield part, Run(part.name, arm, rate, seed)


def read_runs(file: Path) -> dict[Run, dict[str, Any]]:
    """Return the rows of the runs that have ended."""
    return {Run(*(row[name] for name in Run._fields)): row for _, row in read_jsonl(file)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Make what a file does not hold yet."""
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
    smollm2_path()  # once, before the processes would make it side by side
    calls = [partial(train, part, run) for part, run in todo]
    with options.results.open("a") as lines:
        ended = run_in_processes(calls, options.processes, preload=["studies.smollm2", "transformers"])
        for count, (place, outcome) in enumerate(ended, len(done) + 1):
            _, run = todo[place]
            if outcome.code:
                raise RunProblem(f"{run} failed with status {outcome.code}")
            made = {"commit": commit(), "time": now(), "machine": machine()}
            lines.write(json.dumps(outcome.value | made) + "\n")
            lines.flush()
            print(f"{count} of {len(done) + len(todo)}: {run}", flush=True)


if __name__ == "__main__":
    main()
