"""A GRPO loop in plain torch whose engine and trainer are two policies, with faults to be found, by name.

A run takes seconds on one core. It trains the lab's embedded model (335k parameters) on answers written after
``a*b=``; the reward counts the digits that are even, so that every batch has a signal. What goes wrong, and where, is
one `Fault`; a healthy run is `Fault()`.
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

from bandpo import Recorder, policy_loss
from bandpo_lab.models import model_path
from bandpo_lab.tasks import EMBEDDED
from bandpo_lab.tasks.multiplication import problems, tokenizer

PAD, EOS = 0, 1
PROMPTS, GROUP = 8, 8
METHOD = "FixedClip(0.2, 0.28)"


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong; the defaults are a healthy run."""

    expected: tuple[str, ...] = ()
    """Codes of which the first finding must be one; none for a healthy run."""
    engine_temperature: float | None = None
    """At which the engine samples; that of the run if None."""
    reported_temperature: float | None = None
    """Of the log-probabilities that the engine reports; as it samples if None."""
    old_temperature: float | None = None
    """Of the trainer's old log-probabilities; as the new ones if None."""
    top_p: float = 1.0
    raw: bool = False
    """Whether the engine reports log-probabilities of the whole vocabulary in spite of top-p."""
    lag: int = 0
    """Batches by which the engine's weights are old; a large number for never synchronised."""
    versions: str = "true"
    """``true``, ``fresh`` (whatever they are) or ``none``."""
    bypass: bool = False
    """Whether the engine's log-probabilities are taken as the old ones."""
    low_precision: bool = False
    """Whether the engine is in bfloat16 in any case."""
    retokenised: float = 0.0
    shift: str = ""
    """What is shifted by a token: ``old`` or ``both``."""
    counted: str = "completion"
    """What else the mask counts: ``prompt`` or ``padding``."""
    dropout: float = 0.0
    advantages: str = ""
    """``zero``, ``wrong groups``, ``flipped``, ``no baseline`` or ``scale``."""
    reward: str = ""
    """``random``, ``constant``, or ``parity``, which depends on the answer and cannot be learned in a few steps."""
    learning_rate: float = 1.0
    """Times that of the run."""
    updates: int | None = None
    sharpened: float = 1.0
    """Factor by which all updates together make the logits larger."""
    nan: float = 0.0
    """Share of the sequences whose log-probabilities are NaN."""
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
"""The last is no fault: nothing is wrong, and a report should say only that no clip can act."""

LOG_ONLY = {
    "low-entropy": "is a remark on the model that training begins with",
    "clip-idle": "is a remark; healthy runs make it",
    "rare-tokens-blocked": "is a remark; healthy runs make it",
}
"""Findings that no fault of the bench makes, with the reason; tests/doctor makes them from logs."""


@dataclass(frozen=True)
class Setting:
    """What varies between runs that are alike otherwise."""

    seed: int = 0
    temperature: float = 1.0
    length: int = 12
    low_precision: bool = False
    """Whether the engine computes in bfloat16."""
    batches: int = 8
    updates: int = 4
    scratchpad: bool = False
    """Whether answers are begun with a scratchpad, which makes them long."""
    learning_rate: float = 1e-4
    columns: bool = True
    """Whether tokens, cuts, batches and updates are recorded, which other writers may leave out."""
    parts: int = 1
    """Updates that one pass over a batch is made in."""
    steps_of_updates: bool = False
    """Whether ``step`` counts updates, as most trainers do, or batches."""
    task: str = "digits"
    """What is rewarded: even ``digits``, or the right ``product``."""


def policy(dropout: float = 0.0):
    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(model_path(EMBEDDED), attention_dropout=dropout)


def whole_logp(model, ids: Tensor, temperature: float) -> Tensor:
    """Of every token of the vocabulary at each place but the first, from the tokens before it; padding is seen."""
    return (model(ids[:, :-1]).logits.float() / temperature).log_softmax(-1)


def picked(whole: Tensor, ids: Tensor) -> Tensor:
    return whole.gather(2, ids[:, 1:, None]).squeeze(2)


def nucleus(whole: Tensor, top_p: float) -> Tensor:
    """Log-probabilities within the least set of tokens that holds ``top_p``, normalised anew."""
    ordered, places = whole.sort(-1, descending=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    kept = torch.zeros_like(before, dtype=torch.bool).scatter(-1, places, before < top_p)
    return whole.masked_fill(~kept, -math.inf).log_softmax(-1)


@torch.no_grad()
def generate(engine, prompts: Tensor, length: int, temperature: float, top_p: float, g) -> Tensor:
    """Prompts with their completions, padded after the end token."""
    ids, ended = prompts, torch.zeros(len(prompts), dtype=torch.bool)
    for _ in range(length):
        logp = nucleus((engine(ids).logits[:, -1].float() / temperature).log_softmax(-1), top_p)
        new = torch.multinomial(logp.exp(), 1, generator=g).squeeze(1).masked_fill(ended, PAD)
        ids, ended = torch.cat([ids, new[:, None]], 1), ended | (new == EOS)
    return ids


def rewards_of(completion: Tensor, how: str, g, answers: list[str] | None = None) -> Tensor:
    """Share of even digits among the tokens of each answer (ids 2 to 11 are the digits), or whether it is right."""
    if how == "random":
        return torch.rand(len(completion), generator=g).round()
    if how == "parity":
        return (completion.sum(1) % 2).float()
    if how == "constant":
        return torch.ones(len(completion))
    if answers:
        texts = tokenizer().batch_decode(completion, skip_special_tokens=True)
        return torch.tensor([float(t.endswith(a)) for t, a in zip(texts, answers, strict=True)])
    even = ((completion >= 2) & (completion <= 11) & (completion % 2 == 0)).sum(1).float()
    return (even / (completion != PAD).sum(1)).round(decimals=2)


def advantages_of(reward: Tensor, how: str, g) -> Tensor:
    if how == "no baseline":
        return reward.clone()
    order = torch.randperm(len(reward), generator=g) if how == "wrong groups" else torch.arange(len(reward))
    grouped = reward[order].view(-1, GROUP)
    centred = grouped - grouped.mean(1, keepdim=True)
    advantages = torch.empty_like(reward)
    advantages[order] = (centred / (grouped.std(1, keepdim=True) + 1e-4)).flatten()
    return advantages * {"zero": 0.0, "flipped": -1.0, "scale": 4000.0}.get(how, 1.0)


def train(folder: Path, fault: Fault = Fault(), setting: Setting = Setting()) -> None:
    """Train, and write a record to ``folder``."""
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
    tok, history = tokenizer(), []
    batches = fault.batches or setting.batches
    questions = problems("train", PROMPTS * batches, setting.seed)
    with Recorder(folder, method=METHOD, framework="bench", sampling={"temperature": sampled_at}) as recorder:
        for batch in range(batches):
            history.append(copy.deepcopy(trainer).eval())
            version = max(0, batch - fault.lag)
            engine = copy.deepcopy(history[version])
            if setting.low_precision or fault.low_precision:
                engine = engine.bfloat16()
            asked = questions[batch * PROMPTS :][:PROMPTS]
            texts = [q.prompt + "<" * setting.scratchpad for q in asked]
            prompts = torch.tensor(tok(texts)["input_ids"]).repeat_interleave(GROUP, 0)
            start = prompts.shape[1]
            length = fault.length or setting.length
            ids = generate(engine, prompts, length, sampled_at, fault.top_p, g)
            completion = ids[:, start:]
            answers = [q.answer for q in asked for _ in range(GROUP)] if setting.task == "product" else None
            reward = rewards_of(completion, fault.reward, g, answers)
            advantages = advantages_of(reward, fault.advantages, g)
            truncated = ~(completion == EOS).any(1)
            before_end = completion != PAD
            with torch.no_grad():
                said = whole_logp(engine, ids, reported_at)
                said = said if fault.raw else nucleus(said, fault.top_p)
                rollout = picked(said, ids)
                if fault.retokenised:
                    change = (torch.rand(completion.shape, generator=g) < fault.retokenised) & before_end
                    other = torch.randint(2, 18, completion.shape, generator=g)
                    ids = torch.cat([prompts, torch.where(change, other, completion)], 1)
                old = picked(whole_logp(history[-1], ids, fault.old_temperature or temperature), ids)
            mask = torch.cat([torch.zeros(len(ids), start - 1, dtype=torch.bool), before_end], 1)
            rollout[:, : start - 1] = 0.0  # of a prompt an engine says nothing
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
            parts = min(updates, setting.parts)
            for update in range(updates):
                part = torch.arange(update % parts, len(ids), parts)
                whole = whole_logp(trainer, ids[part], temperature)
                entropy, logp = -(whole.exp() * whole).sum(-1), picked(whole, ids[part])
                logp = torch.where(bad[part, None], math.nan, logp)
                seen, seen_old = logp, old[part]
                if fault.shift:
                    seen_old = seen_old.roll(1, 1)
                if fault.shift == "both":
                    seen = logp.roll(1, 1)
                added: dict[str, Any] = {
                    "reward": reward[part],
                    "group": torch.arange(PROMPTS).repeat_interleave(GROUP)[part],
                }
                if setting.columns:
                    added |= {
                        "tokens": ids[part, 1:],
                        "truncated": truncated[part],
                        "generation": batch,
                        "update": update,
                    }
                per_step = updates if setting.steps_of_updates else 1
                if fault.versions != "none":
                    added["version"] = per_step * (batch if fault.versions == "fresh" else version)
                recorder.add(
                    logp=seen,
                    logp_old=seen_old,
                    logp_rollout=rollout[part],
                    advantages=advantages[part],
                    mask=mask[part],
                    entropy=entropy,
                    step=batch * per_step + (update if setting.steps_of_updates else 0),
                    **added,
                )
                counted = (mask & ~bad[:, None])[part]
                loss = policy_loss(
                    seen.masked_fill(bad[part, None], 0.0), seen_old, advantages[part], counted, method=METHOD
                ).loss
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(trainer.parameters(), 1.0)
                optimizer.step()
                with torch.no_grad():
                    trainer.model.norm.weight.mul_(fault.sharpened ** (1 / (batches * updates)))
