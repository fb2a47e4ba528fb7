"""A GRPO loop in plain torch with separate policies for inference engine and trainer, and the faults to detect.

A run takes seconds on one core. It trains the lab's embedded model (335k parameters) on answers written after
``a*b=``; the reward counts the digits that are even, so that every batch has a signal. A `Fault` describes
what is wrong; a healthy run is `Fault()`.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from bandpo import policy_loss
from bandpo.audit import Recorder
from bandpo_lab.models.embedded import model_path
from bandpo_lab.tasks import EMBEDDED
from bandpo_lab.tasks.multiplication import problems, tokenizer

PAD, EOS = 0, 1
PROMPTS, GROUP = 8, 8
METHOD = "FixedClip(0.2, 0.28)"


@dataclass(frozen=True)
class Fault:
    """A fault of a run. The defaults describe a healthy run."""

    expected: tuple[str, ...] = ()
    """The first finding must have one of these codes; empty for a healthy run."""
    engine_temperature: float | None = None
    """The factor on the temperature at which the engine samples; 1 if None. 0 selects a run at temperature 0.7."""
    reported_temperature: float | None = None
    """The temperature of the log-probabilities that the engine reports; the sampling temperature if None."""
    old_temperature: float | None = None
    """The temperature of the trainer's old log-probabilities; that of the new ones if None."""
    top_p: float = 1.0
    raw: bool = False
    """True if the engine reports log-probabilities normalised over the whole vocabulary in spite of top-p."""
    lag: int = 0
    """The age of the engine's weights in batches. A large number means that they are never synchronised."""
    versions: str = "true"
    """The recorded weight versions: ``true``, ``fresh`` (always the newest, even if wrong) or ``none``."""
    bypass: bool = False
    """True if the engine's log-probabilities are used as the old ones."""
    low_precision: bool = False
    """True if the engine computes in bfloat16, whatever the setting says."""
    retokenised: float = 0.0
    """The probability that a token is replaced after sampling."""
    shift: str = ""
    """The log-probabilities that are shifted by one token: ``old``, or ``both`` old and new."""
    counted: str = "completion"
    """The tokens that the mask counts besides the completion: ``prompt`` or ``padding``."""
    dropout: float = 0.0
    advantages: str = ""
    """``zero``, ``wrong groups``, ``flipped``, ``no baseline`` or ``scale``."""
    reward: str = ""
    """``random``, ``constant``, or ``parity``, which depends on the answer and cannot be learned in a few steps."""
    learning_rate: float = 1.0
    """The factor on the learning rate of the run."""
    updates: int | None = None
    sharpened: float = 1.0
    """The factor by which the logits are scaled over all updates together."""
    nan: float = 0.0
    """The share of sequences whose log-probabilities are NaN."""
    length: int | None = None
    batches: int | None = None


FAULTS = {
    "trainer forgot the temperature": Fault(("temperature",), engine_temperature=0.7),
    "raw log-probabilities of the engine": Fault(
        ("temperature",), reported_temperature=1.0, engine_temperature=0.0
    ),
    "old log-probabilities at another temperature": Fault(("temperature",), old_temperature=1.4),
    "top-p, raw log-probabilities": Fault(("top-p",), top_p=0.9, raw=True),
    "top-p, processed log-probabilities": Fault(("top-p",), top_p=0.9),
    "stale by four, with versions": Fault(("stale",), lag=4),
    "stale by four, without versions": Fault(("stale", "weight-sync"), lag=4, versions="none"),
    "stale by four, as bypass": Fault(("stale",), lag=4, bypass=True),
    "weight sync dead, versions fresh": Fault(("weight-sync",), lag=99, versions="fresh"),
    "retokenised, 3 %": Fault(("retokenised",), retokenised=0.03),
    "old log-probabilities shifted": Fault(("shift",), shift="old"),
    "both log-probabilities shifted": Fault(("shift",), shift="both"),
    "prompt in the mask": Fault(("mask",), counted="prompt"),
    "padding in the mask": Fault(("mask",), counted="padding"),
    "dropout on": Fault(("dropout",), dropout=0.1),
    "bfloat16 bypass": Fault(("engine-mismatch",), bypass=True, low_precision=True),
    "advantages all 0": Fault(("no-signal",), advantages="zero"),
    "wrong groups": Fault(("grouping",), advantages="wrong groups"),
    "flipped sign": Fault(("reward-sign",), advantages="flipped"),
    "advantages times 4000": Fault(("advantage-scale",), advantages="scale"),
    "random reward": Fault(("reward-noise",), reward="random"),
    "constant reward": Fault(("reward-flat",), reward="constant"),
    "constant reward, no baseline": Fault(("reward-flat",), reward="constant", advantages="no baseline"),
    "learning rate × 100": Fault(("step-too-large",), learning_rate=100.0),
    "entropy collapse": Fault(("entropy-collapse",), sharpened=36.0, learning_rate=0.1, reward="parity"),
    "NaN rows": Fault(("nan",), nan=0.03),
    "all answers cut off": Fault(("truncated",), length=3),
    "one update per batch": Fault(("on-policy",), updates=1),
}
"""The faults by name. The last one is not a fault: the report should only note that no clip can act."""


@dataclass(frozen=True)
class Setting:
    """The settings that vary between runs."""

    seed: int = 0
    temperature: float = 1.0
    length: int = 12
    low_precision: bool = False
    """True if the engine computes in bfloat16."""
    batches: int = 8
    updates: int = 4
    scratchpad: bool = False
    """True if answers begin with a scratchpad, which makes them long."""
    learning_rate: float = 1e-4
    columns: bool = True
    """True if the optional columns are recorded: tokens, truncation, generation and update."""
    minibatches: int = 1
    """The number of updates in one pass over a batch."""
    steps_of_updates: bool = False
    """True if ``step`` counts updates, as in most trainers; False if it counts batches."""
    task: str = "digits"
    """The task: ``digits`` rewards even digits, ``product`` the right product."""


def policy(dropout: float = 0.0):
    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(model_path(EMBEDDED), attention_dropout=dropout)


def log_probabilities(model, ids: Tensor, temperature: float) -> Tensor:
    """Return the log-probabilities of all tokens, (sequences, time − 1, vocabulary). Padding is attended to."""
    return (model(ids[:, :-1]).logits.float() / temperature).log_softmax(-1)


def select_tokens(all_logp: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probabilities of the tokens in ``ids``, (sequences, time − 1)."""
    return all_logp.gather(2, ids[:, 1:, None]).squeeze(2)


def nucleus(all_logp: Tensor, top_p: float) -> Tensor:
    """Return log-probabilities renormalised over the smallest set of tokens with probability ``top_p`` in total."""
    ordered, order = all_logp.sort(-1, descending=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    in_nucleus = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before < top_p)
    return all_logp.masked_fill(~in_nucleus, -math.inf).log_softmax(-1)


@torch.no_grad()
def generate(engine, prompts: Tensor, length: int, temperature: float, top_p: float, g) -> Tensor:
    """Sample completions, and return the prompts with them, padded after the end token."""
    ids = prompts
    ended = torch.zeros(len(prompts), dtype=torch.bool)
    for _ in range(length):
        logp = nucleus((engine(ids).logits[:, -1].float() / temperature).log_softmax(-1), top_p)
        new = torch.multinomial(logp.exp(), 1, generator=g).squeeze(1).masked_fill(ended, PAD)
        ids = torch.cat([ids, new[:, None]], 1)
        ended = ended | (new == EOS)
    return ids


def rewards_of(completion: Tensor, fault: str, g, answers: list[str] | None = None) -> Tensor:
    """Return the reward of each completion, (sequences,).

    The reward is 1 for the right answer if ``answers`` are given, else the share of even digits among its tokens. The
    ids 2 to 11 are the digits.
    """
    if fault == "random":
        return torch.rand(len(completion), generator=g).round()
    if fault == "parity":
        return (completion.sum(1) % 2).float()
    if fault == "constant":
        return torch.ones(len(completion))
    if answers:
        texts = tokenizer().batch_decode(completion, skip_special_tokens=True)
        return torch.tensor([float(t.endswith(a)) for t, a in zip(texts, answers, strict=True)])
    even = ((completion >= 2) & (completion <= 11) & (completion % 2 == 0)).sum(1).float()
    return (even / (completion != PAD).sum(1)).round(decimals=2)


def advantages_of(reward: Tensor, fault: str, g) -> Tensor:
    """Return GRPO's advantages, (sequences,), with a fault of `Fault.advantages`."""
    if fault == "no baseline":
        return reward.clone()
    order = torch.arange(len(reward))
    if fault == "wrong groups":
        order = torch.randperm(len(reward), generator=g)
    grouped = reward[order].view(-1, GROUP)
    centred = grouped - grouped.mean(1, keepdim=True)
    advantages = torch.empty_like(reward)
    advantages[order] = (centred / (grouped.std(1, keepdim=True) + 1e-4)).flatten()
    return advantages * {"zero": 0.0, "flipped": -1.0, "scale": 4000.0}.get(fault, 1.0)


def train(folder: Path, fault: Fault = Fault(), setting: Setting = Setting()) -> None:
    """Train with a fault, and write the record of the run to ``folder``."""
    g = torch.Generator().manual_seed(setting.seed)
    torch.manual_seed(setting.seed)
    temperature = setting.temperature
    trainer = policy(fault.dropout)
    optimizer = torch.optim.AdamW(trainer.parameters(), setting.learning_rate * fault.learning_rate)
    # Raw log-probabilities differ from processed ones at another temperature than 1 only.
    if fault.engine_temperature == 0.0:
        temperature = 0.7
    sampled_at = temperature if not fault.engine_temperature else temperature * fault.engine_temperature
    reported_at = fault.reported_temperature or sampled_at
    tok = tokenizer()
    history = []
    batches = fault.batches or setting.batches
    questions = problems("train", PROMPTS * batches, setting.seed)
    with Recorder(folder, method=METHOD, framework="bench", sampling={"temperature": sampled_at}) as recorder:
        for batch in range(batches):
            history.append(copy.deepcopy(trainer).eval())
            version = max(0, batch - fault.lag)
            engine = copy.deepcopy(history[version])
            if setting.low_precision or fault.low_precision:
                engine = engine.bfloat16()
            batch_questions = questions[batch * PROMPTS :][:PROMPTS]
            texts = [q.prompt + "<" * setting.scratchpad for q in batch_questions]
            prompts = torch.tensor(tok(texts)["input_ids"]).repeat_interleave(GROUP, 0)
            start = prompts.shape[1]
            length = fault.length or setting.length
            ids = generate(engine, prompts, length, sampled_at, fault.top_p, g)
            completion = ids[:, start:]
            answers = None
            if setting.task == "product":
                answers = [question.answer for question in batch_questions for _ in range(GROUP)]
            reward = rewards_of(completion, fault.reward, g, answers)
            advantages = advantages_of(reward, fault.advantages, g)
            truncated = ~(completion == EOS).any(1)
            before_end = completion != PAD
            with torch.no_grad():
                reported = log_probabilities(engine, ids, reported_at)
                if not fault.raw:
                    reported = nucleus(reported, fault.top_p)
                rollout = select_tokens(reported, ids)
                if fault.retokenised:
                    change = (torch.rand(completion.shape, generator=g) < fault.retokenised) & before_end
                    substitutes = torch.randint(2, 18, completion.shape, generator=g)
                    ids = torch.cat([prompts, torch.where(change, substitutes, completion)], 1)
                all_old = log_probabilities(history[-1], ids, fault.old_temperature or temperature)
                old = select_tokens(all_old, ids)
            mask = torch.cat([torch.zeros(len(ids), start - 1, dtype=torch.bool), before_end], 1)
            rollout[:, : start - 1] = 0.0  # the engine reports nothing for prompts
            rollout[ids[:, 1:] == PAD] = 0.0
            if fault.counted == "prompt":
                mask[:, : start - 1] = True
            if fault.counted == "padding":
                mask[:, start - 1 :] = True
            if fault.bypass:
                old = rollout.clone()
            bad = torch.rand(len(ids), generator=g) < fault.nan
            trainer.train(fault.dropout > 0)
            updates = fault.updates or setting.updates
            minibatches = min(updates, setting.minibatches)
            for update in range(updates):
                rows = torch.arange(update % minibatches, len(ids), minibatches)
                all_logp = log_probabilities(trainer, ids[rows], temperature)
                entropy = -(all_logp.exp() * all_logp).sum(-1)
                logp = select_tokens(all_logp, ids[rows])
                logp = torch.where(bad[rows, None], math.nan, logp)
                logp_old = old[rows]
                if fault.shift:
                    logp_old = logp_old.roll(1, 1)
                if fault.shift == "both":
                    logp = logp.roll(1, 1)
                columns: dict[str, Any] = {
                    "reward": reward[rows],
                    "group": torch.arange(PROMPTS).repeat_interleave(GROUP)[rows],
                }
                if setting.columns:
                    columns |= {
                        "tokens": ids[rows, 1:],
                        "truncated": truncated[rows],
                        "generation": batch,
                        "update": update,
                    }
                per_step = updates if setting.steps_of_updates else 1
                if fault.versions != "none":
                    columns["version"] = per_step * (batch if fault.versions == "fresh" else version)
                recorder.add(
                    logp=logp,
                    logp_old=logp_old,
                    logp_rollout=rollout[rows],
                    advantages=advantages[rows],
                    mask=mask[rows],
                    entropy=entropy,
                    step=batch * per_step + (update if setting.steps_of_updates else 0),
                    **columns,
                )
                counted = (mask & ~bad[:, None])[rows]
                loss = policy_loss(
                    logp.masked_fill(bad[rows, None], 0.0), logp_old, advantages[rows], counted, method=METHOD
                ).loss
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(trainer.parameters(), 1.0)
                optimizer.step()
                with torch.no_grad():
                    trainer.model.norm.weight.mul_(fault.sharpened ** (1 / (batches * updates)))
