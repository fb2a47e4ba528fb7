"""Training runs of a small policy with faults in log-probabilities, sampling and updates.

A run takes about a second, so that every setting can be drawn at random: the size of the vocabulary, of batches and
groups, lengths, temperatures, rounding and learning rates. The policy is an embedding and one hidden layer, or four
experts; the engine that samples is a copy of it. A fault may begin at a batch within the run.

`faults.py` does the same with the lab's embedded model, which takes twenty seconds and more.
"""

from __future__ import annotations

import copy
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bandpo import policy_loss
from bandpo.audit import Recorder

PAD, EOS, BOS = 0, 1, 2
"""The ids of special tokens. A vocabulary has at least thirteen other tokens."""

METHOD = "FixedClip(0.2, 0.28)"


@dataclass(frozen=True)
class TokenFault:
    """A fault of a run. The defaults describe a healthy run."""

    expected: tuple[str, ...] = ()
    """The first finding must have one of these codes; empty for a healthy run."""
    excluded: tuple[str, ...] = ()
    """The codes of causes that the record excludes. A diagnosis that names one is wrong."""
    midway: bool = False
    """True if the fault begins at the batch `TokenSetting.onset`; otherwise it is there from the start."""
    old: str = ""
    """The fault of the old log-probabilities: permuted ``rows`` or ``columns``, ``reversed``, ``shifted``, those of the
    ``reference`` or of the ``engine``, half ``precision``, or another ``temperature``."""
    engine_temperature: bool = False
    """True if the temperature of the engine differs from the trainer's."""
    reports_raw: bool = False
    """True if the engine reports log-probabilities of the logits before their edit."""
    edit: str = ""
    """The engine's edit of its logits: ``top-p``, ``top-k``, ``min-p``, ``min-tokens`` or ``repetition``."""
    prompt: str = ""
    """The change of the engine's prompt: ``other`` inserts a system prompt, ``double-bos`` repeats the BOS."""
    weights: str = ""
    """The fault of the engine's weights: ``stale``, ``unversioned``, ``dead`` or ``half``."""
    rounding: str = ""
    """``fp8`` rounds the engine's weights to three bits of mantissa."""
    routing_noise: float = 0.0
    """The noise in the engine's routing scores. If it is above 0, the policy has experts."""
    dropout: float = 0.0
    retokenised: float = 0.0
    counts_prompt: bool = False
    """True if the mask counts a part of the prompt."""
    updates: str = ""
    """The fault of the updates: ``no-step``, ``tiny-rate``, ``lost-tokens``, ``lost-gradient`` or ``reset``."""
    cut: bool = False
    """True if the length limit truncates nearly all answers."""


OLD_ALONE = (
    "stale",
    "weight-sync",
    "engine-mismatch",
    "top-p",
    "retokenised",
    "routing",
    "prompt",
    "edited-logits",
)
"""The faults of the engine. They are excluded if the engine agrees with the policy that is trained."""

SAMPLER_ALONE = (
    "stale",
    "weight-sync",
    "engine-mismatch",
    "retokenised",
    "routing",
    "prompt",
    "shift",
    "dropout",
)
"""The faults that change log-probabilities. They are excluded if all log-probabilities agree."""

ENGINE_ALONE = ("shift", "permuted", "dropout", "reference-as-old", "precision")
"""The faults of the trainer's forward passes. They are excluded if these passes agree."""

FAULTS: dict[str, TokenFault] = {
    "old rows permuted": TokenFault(("permuted",), ("temperature", "dropout", *OLD_ALONE), old="rows"),
    "old positions permuted": TokenFault(
        ("permuted",), ("temperature", "dropout", *OLD_ALONE), old="columns"
    ),
    "old reversed": TokenFault(("permuted",), ("temperature", "dropout", *OLD_ALONE), old="reversed"),
    "old shifted": TokenFault(("shift",), ("temperature", "dropout", *OLD_ALONE), old="shifted"),
    "old at another temperature": TokenFault(("temperature",), ("dropout", *OLD_ALONE), old="temperature"),
    "reference as old": TokenFault(
        ("reference-as-old",), ("temperature", "shift", "dropout", *OLD_ALONE), old="reference"
    ),
    "old in half precision": TokenFault(
        ("precision", "engine-mismatch"), ("temperature", "shift", "stale", "weight-sync"), old="precision"
    ),
    "dropout": TokenFault(("dropout",), ("temperature", "shift", "stale"), dropout=0.1),
    "no step": TokenFault(("no-step",), ("on-policy", "hardly-moves"), updates="no-step"),
    "learning rate too small": TokenFault(("hardly-moves", "no-step"), ("on-policy",), updates="tiny-rate"),
    "last micro-batch dropped": TokenFault(("micro-batch-lost", "advantages"), (), updates="lost-tokens"),
    "last micro-batch without gradient": TokenFault(("micro-batch-lost",), (), updates="lost-gradient"),
    "optimiser reset": TokenFault(("optimiser-reset",), (), midway=True, updates="reset"),
    "engine temperature": TokenFault(("temperature",), ENGINE_ALONE, engine_temperature=True),
    "top-p": TokenFault(("top-p",), ENGINE_ALONE, edit="top-p"),
    "top-k, raw": TokenFault(("top-p",), SAMPLER_ALONE, edit="top-k", reports_raw=True),
    "min-p": TokenFault(("top-p",), ENGINE_ALONE, edit="min-p"),
    "min_tokens, raw": TokenFault(("edited-logits",), SAMPLER_ALONE, edit="min-tokens", reports_raw=True),
    "min_tokens": TokenFault(("edited-logits",), ENGINE_ALONE, edit="min-tokens"),
    "repetition penalty, raw": TokenFault(
        ("edited-logits",), SAMPLER_ALONE, edit="repetition", reports_raw=True
    ),
    "another prompt at the sampler": TokenFault(
        ("prompt",), ("weight-sync", "temperature", "top-p", *ENGINE_ALONE), prompt="other"
    ),
    "doubled BOS at the sampler": TokenFault(
        ("prompt",), ("weight-sync", "temperature", "top-p", *ENGINE_ALONE), prompt="double-bos"
    ),
    "engine in 8 bits": TokenFault(
        ("engine-mismatch",), ("weight-sync", "temperature", "top-p", *ENGINE_ALONE), rounding="fp8"
    ),
    "routing": TokenFault(
        ("routing",), ("temperature", "top-p", "retokenised", *ENGINE_ALONE), routing_noise=0.05
    ),
    "half of the weights": TokenFault(
        ("weight-sync",), ("temperature", "top-p", *ENGINE_ALONE), weights="half"
    ),
    "stale": TokenFault(("stale",), ("temperature", "top-p", *ENGINE_ALONE), weights="stale"),
    "stale without versions": TokenFault(
        ("stale", "weight-sync"), ("temperature", "top-p", *ENGINE_ALONE), weights="unversioned"
    ),
    "retokenised": TokenFault(("retokenised",), ("temperature", "top-p", *ENGINE_ALONE), retokenised=0.03),
    "prompt counted": TokenFault(("mask",), ("temperature", "top-p", "stale"), counts_prompt=True),
    "answers cut off": TokenFault(("truncated",), ("temperature", "top-p", "stale"), cut=True),
    "midway: engine temperature": TokenFault(
        ("temperature",), ENGINE_ALONE, midway=True, engine_temperature=True
    ),
    "midway: top-p": TokenFault(("top-p",), ENGINE_ALONE, midway=True, edit="top-p"),
    "midway: old rows permuted": TokenFault(
        ("permuted",), ("temperature", "dropout", *OLD_ALONE), midway=True, old="rows"
    ),
    "midway: old shifted": TokenFault(
        ("shift",), ("temperature", "dropout", *OLD_ALONE), midway=True, old="shifted"
    ),
    "midway: weight sync dies": TokenFault(
        ("weight-sync",), ("temperature", "top-p", *ENGINE_ALONE), midway=True, weights="dead"
    ),
    "midway: another prompt": TokenFault(
        ("prompt",), ("weight-sync", "temperature", "top-p", *ENGINE_ALONE), midway=True, prompt="other"
    ),
    "midway: repetition penalty, raw": TokenFault(
        ("edited-logits",), SAMPLER_ALONE, midway=True, edit="repetition", reports_raw=True
    ),
}

HEALTHY = TokenFault()


@dataclass(frozen=True)
class TokenSetting:
    """The settings that vary between runs."""

    seed: int = 0
    vocabulary: int = 64
    prompts: int = 8
    group: int = 8
    length: int = 16
    temperature: float = 1.0
    other_temperature: float = 0.7
    """The factor on the temperature for a fault of the temperature."""
    sharpness: float = 1.5
    """The scale of the logits before training."""
    batches: int = 10
    onset: int = 5
    """The first batch of a fault that begins midway."""
    updates: int = 4
    minibatches: int = 1
    """The number of updates in one pass over a batch."""
    micro_batches: int = 1
    """The number of micro-batches in an update."""
    learning_rate: float = 3e-3
    half_precision: bool = False
    """True if the engine computes in bfloat16."""
    experts: bool = False
    lag: int = 2
    """The age of stale weights, in batches."""
    advantages: str = "grpo"
    """``grpo``, ``dr-grpo``, ``rloo`` or ``critic``."""
    reward: str = "share"
    """``share``, ``sparse``, ``dense``, ``judge``, ``latency`` or ``negative``."""
    holes: bool = False
    """True if the mask excludes some tokens within answers, as it does for the output of a tool."""
    steps_of_updates: bool = False
    """True if ``step`` counts updates; False if it counts batches."""


def random_setting(seed: int) -> TokenSetting:
    """Return settings with all values drawn at random."""
    draw = random.Random(seed)
    updates = draw.choice((2, 3, 4, 8))
    batches = draw.randint(6, 14)
    colder = draw.random() < 0.5
    return TokenSetting(
        seed,
        vocabulary=draw.choice((16, 64, 256)),
        prompts=draw.choice((4, 8, 16)),
        group=draw.choice((4, 8, 16)),
        length=draw.choice((8, 12, 24, 48)),
        temperature=draw.choice((1.0, 1.0, 0.6, 0.8, 1.2)),
        other_temperature=draw.uniform(0.5, 0.8) if colder else draw.uniform(1.25, 1.6),
        sharpness=draw.uniform(1.0, 2.5),
        batches=batches,
        onset=draw.randint(batches // 3, batches - 3),
        updates=updates,
        minibatches=draw.choice((1, updates)),
        micro_batches=draw.choice((1, 1, 2, 4)),
        learning_rate=draw.choice((1e-3, 3e-3)),
        half_precision=draw.random() < 0.5,
        lag=draw.choice((1, 2, 4)),
        advantages=draw.choice(("grpo", "grpo", "dr-grpo", "rloo")),
        steps_of_updates=draw.random() < 0.5,
    )


UNUSUAL: dict[str, dict[str, Any]] = {
    "usual": {},
    "noisy judge": {"reward": "judge"},
    "latency penalty": {"reward": "latency"},
    "tiny groups": {"group": 2},
    "sparse reward": {"reward": "sparse"},
    "dense reward": {"reward": "dense"},
    "negative rewards": {"reward": "negative"},
    "critic": {"advantages": "critic"},
    "single prompt": {"prompts": 1, "group": 16},
    "RLOO": {"advantages": "rloo"},
    "masks with holes": {"holes": True},
    "experts with noise": {"experts": True, "half_precision": True},
    "one update per batch": {"updates": 1, "minibatches": 1},
}
"""The kinds of unusual healthy runs: settings that replace the random ones."""


class SmallPolicy(nn.Module):
    """An autoregressive policy of the last two tokens and the mean of all earlier ones."""

    def __init__(self, setting: TokenSetting, experts: bool, dropout: float):
        super().__init__()
        self.routing_noise = 0.0
        width = 32
        self.embedding = nn.Embedding(setting.vocabulary, width)
        self.gate = nn.Linear(3 * width, 4) if experts else None
        self.hidden = nn.ModuleList(nn.Linear(3 * width, width) for _ in range(4 if experts else 1))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, setting.vocabulary)
        with torch.no_grad():
            for layer in self.hidden:
                layer.weight.mul_(3.0)
            self.head.weight.mul_(8.0 * setting.sharpness)
            self.head.bias[PAD] = -20.0
            # Most answers end before their length limit: the end token gets six times its reciprocal on average.
            logits = self(torch.randint(3, setting.vocabulary, (64, 8))) / setting.temperature
            logits[..., EOS] = -math.inf
            share = min(0.4, 6 / setting.length)
            level = logits.logsumexp(-1).mean() + math.log(share / (1 - share))
            self.head.weight[EOS] *= 0.2
            self.head.bias[EOS] = level * setting.temperature

    def forward(self, ids: Tensor) -> Tensor:
        embedded = self.embedding(ids)
        previous = torch.cat([torch.zeros_like(embedded[:, :1]), embedded[:, :-1]], 1)
        counts = torch.arange(1, ids.shape[1] + 1)[:, None].to(embedded)
        mean = (embedded.float().cumsum(1) / counts.float()).to(embedded)
        features = torch.cat([embedded, previous, 3 * mean], -1)
        if self.gate is None:
            hidden = torch.tanh(self.hidden[0](features))
        else:
            scores = self.gate(features)
            noise = self.routing_noise * torch.randn(scores.shape).to(scores)
            chosen = (scores + noise).argmax(-1, keepdim=True)
            outputs = torch.stack([torch.tanh(layer(features)) for layer in self.hidden], -2)
            index = chosen[..., None].expand(*chosen.shape, outputs.shape[-1])
            hidden = outputs.gather(-2, index).squeeze(-2)
            hidden = hidden * 4 * scores.softmax(-1).gather(-1, chosen)
        return self.head(self.dropout(hidden)).float()


def log_probabilities(logits: Tensor, temperature: float) -> Tensor:
    return (logits / temperature).log_softmax(-1)


def edit_logits(logits: Tensor, ids: Tensor, answer_start: int, edit: str, setting: TokenSetting) -> Tensor:
    """Return logits with the edit that an engine applies before it samples the next token.

    Args:
        logits: Logits of the next token, divided by the temperature, (batch, vocabulary).
        ids: The tokens before it, (batch, time).
        answer_start: Number of tokens of the prompt.
        edit: The kind of edit.
        setting: The run's settings.
    """
    if edit == "top-p":
        ordered, order = logits.softmax(-1).sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered
        in_nucleus = torch.zeros_like(ordered, dtype=torch.bool).scatter(-1, order, before < 0.9)
        return logits.masked_fill(~in_nucleus, -math.inf)
    if edit == "top-k":
        smallest = logits.topk(max(2, setting.vocabulary // 8), -1).values[:, -1:]
        return logits.masked_fill(logits < smallest, -math.inf)
    if edit == "min-p":
        probabilities = logits.softmax(-1)
        return logits.masked_fill(probabilities < 0.1 * probabilities.amax(-1, keepdim=True), -math.inf)
    if edit == "min-tokens" and ids.shape[1] - answer_start < setting.length // 2:
        return logits.index_fill(-1, torch.tensor([EOS]), -math.inf)
    if edit == "repetition":
        repeated = torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids, True)
        repeated[:, PAD] = False
        penalised = torch.where(logits > 0, logits / 1.3, logits * 1.3)
        return torch.where(repeated, penalised, logits)
    return logits


@torch.no_grad()
def sample(
    engine: SmallPolicy,
    prompts: Tensor,
    fault: TokenFault,
    setting: TokenSetting,
    length: int,
    temperature: float,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Return completions, (batch, length), padded after the end token, and the engine's log-probabilities."""
    ids = prompts
    ended = torch.zeros(len(prompts), dtype=torch.bool)
    completion = []
    reported = []
    for _ in range(length):
        logits = engine(ids)[:, -1] / temperature
        sampled = edit_logits(logits, ids, prompts.shape[1], fault.edit, setting).log_softmax(-1)
        token = torch.multinomial(sampled.exp(), 1, generator=generator)
        all_logp = logits.log_softmax(-1) if fault.reports_raw else sampled
        logp = all_logp.gather(1, token).squeeze(1)
        token = token.squeeze(1).masked_fill(ended, PAD)
        completion.append(token)
        reported.append(logp.masked_fill(ended, 0.0))
        ended = ended | (token == EOS)
        ids = torch.cat([ids, token[:, None]], 1)
    return torch.stack(completion, 1), torch.stack(reported, 1)


def rewards_of(completion: Tensor, kind: str, generator: torch.Generator) -> Tensor:
    """Return the reward of each answer, (batch,), computed from its share of even tokens."""
    answered = completion != PAD
    lengths = answered.sum(1).float()
    share = ((completion % 2 == 0) & answered).sum(1) / lengths
    noise = torch.randn(len(share), generator=generator)
    if kind == "sparse":
        return (share > share.quantile(0.85)).float()
    if kind == "dense":
        return share + 0.001 * lengths
    if kind == "judge":
        return (4 * share).round() / 4 + 0.02 * noise
    if kind == "latency":
        return share.round(decimals=1) - 0.01 * lengths * (1 + 0.1 * noise)
    if kind == "negative":
        return share.round(decimals=2) - 3
    return share.round(decimals=2)


def advantages_of(reward: Tensor, mask: Tensor, setting: TokenSetting, generator: torch.Generator) -> Tensor:
    """Return the advantage of each token, (batch, time)."""
    grouped = reward.view(-1, setting.group)
    centred = grouped - grouped.mean(1, keepdim=True)
    if setting.advantages == "grpo":
        centred = centred / (grouped.std(1, keepdim=True) + 1e-4)
    if setting.advantages == "rloo":
        centred = centred * setting.group / (setting.group - 1)
    advantages = centred.flatten()[:, None].expand(mask.shape)
    if setting.advantages == "critic":
        advantages = advantages + 0.1 * torch.randn(mask.shape, generator=generator)
        counted = advantages[mask]
        advantages = (advantages - counted.mean()) / counted.std()
    return advantages.contiguous()


def round_to_8_bits_(policy: SmallPolicy) -> None:
    """Round weights in place to three bits of mantissa, as 8-bit floats have."""
    with torch.no_grad():
        for weight in policy.parameters():
            mantissa, exponent = torch.frexp(weight)
            weight.copy_(torch.ldexp((mantissa * 16).round() / 16, exponent))


def engine_of(
    history: list[SmallPolicy], fault: TokenFault, setting: TokenSetting, first: int
) -> SmallPolicy:
    """Return the policy that samples the next batch.

    Args:
        history: The trainer's policy before each batch, the newest last.
        fault: What is wrong.
        setting: The run's settings.
        first: The first batch of the fault.
    """
    engine = copy.deepcopy(history[-1])
    if fault.weights in ("stale", "unversioned"):
        engine = copy.deepcopy(history[max(0, len(history) - 1 - setting.lag)])
    if fault.weights == "dead":
        engine = copy.deepcopy(history[first])
    if fault.weights == "half":
        engine.head.load_state_dict(history[first].head.state_dict())
    if fault.rounding == "fp8":
        round_to_8_bits_(engine)
    if setting.half_precision:
        engine = engine.bfloat16()
    engine.routing_noise = fault.routing_noise
    return engine


def old_log_probabilities(
    logits: Tensor,
    ids: Tensor,
    answer_start: int,
    rollout: Tensor,
    history: list[SmallPolicy],
    fault: TokenFault,
    setting: TokenSetting,
    generator: torch.Generator,
) -> Tensor:
    """Return the old log-probabilities of the completion, (batch, time), as the trainer computes them.

    Args:
        logits: The trainer's logits, (batch, time, vocabulary).
        ids: Prompts and completions.
        answer_start: Number of tokens of the prompt.
        rollout: The engine's log-probabilities, (batch, time).
        history: The trainer's policy before each batch, the newest last.
        fault: What is wrong.
        setting: The run's settings.
        generator: The random generator for permutations.
    """
    temperature = setting.temperature
    if fault.old == "temperature":
        temperature *= setting.other_temperature
    if fault.old == "reference":
        logits = history[0](ids)[:, answer_start - 1 : -1]
    if fault.old == "precision":
        logits = copy.deepcopy(history[-1]).bfloat16()(ids)[:, answer_start - 1 : -1]
    old = log_probabilities(logits, temperature).gather(2, ids[:, answer_start:, None]).squeeze(2)
    if fault.old == "rows":
        old = old[torch.randperm(len(old), generator=generator)]
    if fault.old == "columns":
        old = old[:, torch.randperm(old.shape[1], generator=generator)]
    if fault.old == "reversed":
        old = old.flip(1)
    if fault.old == "shifted":
        old = old.roll(1, 1)
    return rollout.clone() if fault.old == "engine" else old


def train(folder: Path, fault: TokenFault = HEALTHY, setting: TokenSetting = TokenSetting()) -> None:
    """Train with a fault, and write the record of the run to ``folder``."""
    torch.manual_seed(setting.seed)
    generator = torch.Generator().manual_seed(setting.seed)
    experts = setting.experts or fault.routing_noise > 0
    trainer = SmallPolicy(setting, experts, fault.dropout)
    trainer.train(fault.dropout > 0)
    rate = setting.learning_rate * (1e-6 if fault.updates == "tiny-rate" else 1.0)
    optimizer = torch.optim.Adam(trainer.parameters(), rate)
    history: list[SmallPolicy] = []
    micro_batches = (
        max(4, setting.micro_batches) if fault.updates == "lost-gradient" else setting.micro_batches
    )
    length = 4 if fault.cut else setting.length
    with Recorder(folder, method=METHOD, framework="bench") as recorder:
        for batch in range(setting.batches):
            first = setting.onset if fault.midway else 0
            active = fault if batch >= first else HEALTHY
            if active.updates == "reset" and batch == first:
                optimizer = torch.optim.Adam(trainer.parameters(), rate)
            history.append(copy.deepcopy(trainer).eval())
            engine = engine_of(history, active, setting, first)

            # Each prompt is a BOS and four random tokens, and is repeated for each answer of its group.
            words = torch.randint(3, setting.vocabulary, (setting.prompts, 4), generator=generator)
            prompts = torch.cat([torch.full((setting.prompts, 1), BOS), words], 1)
            prompts = prompts.repeat_interleave(setting.group, 0)
            engine_prompts = prompts
            if active.prompt == "other":
                system = torch.arange(3, 7).expand(len(prompts), -1)
                engine_prompts = torch.cat([prompts[:, :1], system, prompts[:, 1:]], 1)
            if active.prompt == "double-bos":
                engine_prompts = torch.cat([prompts[:, :1], prompts], 1)

            factor = setting.other_temperature if active.engine_temperature else 1.0
            completion, rollout = sample(
                engine, engine_prompts, active, setting, length, setting.temperature * factor, generator
            )
            answered = completion != PAD
            reward = rewards_of(completion, setting.reward, generator)
            mask = answered.clone()
            if setting.holes:
                mask &= torch.rand(mask.shape, generator=generator) > 0.15
                mask[:, 0] = True
            advantages = advantages_of(reward, mask, setting, generator)
            truncated = ~(completion == EOS).any(1)
            if active.retokenised:
                changed = (torch.rand(completion.shape, generator=generator) < active.retokenised) & answered
                substitutes = torch.randint(3, setting.vocabulary, completion.shape, generator=generator)
                completion = torch.where(changed, substitutes, completion)

            ids = torch.cat([prompts, completion], 1)
            start = prompts.shape[1]
            if active.counts_prompt:
                start = 2
                added = torch.ones(len(ids), prompts.shape[1] - start, dtype=torch.bool)
                mask = torch.cat([added, mask], 1)
                advantages = torch.cat([advantages[:, :1].expand(-1, added.shape[1]), advantages], 1)
                rollout = torch.cat([torch.zeros(added.shape), rollout], 1)
            with torch.no_grad():
                logits = trainer(ids)[:, start - 1 : -1]
                old = old_log_probabilities(logits, ids, start, rollout, history, active, setting, generator)

            minibatches = min(setting.updates, setting.minibatches)
            for update in range(setting.updates):
                rows_of_update = torch.arange(update % minibatches, len(ids), minibatches)
                chunks = [chunk for chunk in rows_of_update.chunk(micro_batches) if len(chunk)]
                optimizer.zero_grad()
                for number, rows in enumerate(chunks):
                    is_lost = number == len(chunks) - 1 and active.updates == "lost-gradient"
                    if active.updates == "lost-tokens":
                        # Half of the last group is dropped, like the remainder of a division into micro-batches.
                        rows = rows[rows < len(ids) - setting.group // 2]
                    if not len(rows):
                        continue
                    all_logp = log_probabilities(trainer(ids[rows])[:, start - 1 : -1], setting.temperature)
                    logp = all_logp.gather(2, ids[rows, start:, None]).squeeze(2)
                    entropy = -(all_logp.exp() * all_logp).sum(-1)
                    columns: dict[str, Any] = {
                        "reward": reward[rows],
                        "group": torch.arange(setting.prompts).repeat_interleave(setting.group)[rows],
                        "tokens": ids[rows, start:],
                        "truncated": truncated[rows],
                        "generation": batch,
                        "update": update,
                    }
                    per_step = setting.updates if setting.steps_of_updates else 1
                    if active.weights != "unversioned":
                        version = max(0, batch - setting.lag) if active.weights == "stale" else batch
                        columns["version"] = per_step * version
                    recorder.add(
                        logp=logp,
                        logp_old=old[rows],
                        logp_rollout=rollout[rows],
                        advantages=advantages[rows],
                        mask=mask[rows],
                        entropy=entropy,
                        step=batch * per_step + (update if setting.steps_of_updates else 0),
                        **columns,
                    )
                    if is_lost:
                        continue
                    loss = policy_loss(logp, old[rows], advantages[rows], mask[rows], method=METHOD).loss
                    (loss / len(chunks)).backward()
                norm = nn.utils.clip_grad_norm_(trainer.parameters(), 1.0)
                # Permuted log-probabilities may give ratios that overflow. Trainers skip such an update.
                if active.updates != "no-step" and norm.isfinite():
                    optimizer.step()
