"""The quantities of `rlvet.compare.vocabulary` in a configuration of prime-rl.

The formulas are those of src/prime_rl/trainer/rl/loss.py and of packages/prime-rl-configs. Quantities that are not here
are not known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlvet.compare.settings import NotSet, Settings, last_parts
from rlvet.compare.trl import optimizer_name, schedule_name
from rlvet.lint.values import UnknownValue

TRAINER = "trainer."
LOSS = f"{TRAINER}loss."
OPTIMIZER = f"{TRAINER}optim."
SCHEDULER = f"{TRAINER}scheduler."
SAMPLING = "orchestrator.train.sampling."


def _policy_loss(s: Settings) -> str:
    kind = s(f"{LOSS}type")
    return "DPPO with total variation" if kind == "default" else f"{kind} of prime-rl"


def _mask(side: str) -> Callable[[Settings], float | None]:
    return lambda s: s.number(f"{LOSS}dppo_mask_{side}") if s(f"{LOSS}type") == "default" else None


def _baseline(s: Settings) -> str:
    kind = s("orchestrator.algo.type")
    if kind != "grpo":
        raise UnknownValue(f"orchestrator.algo.type is {kind}")
    return "mean of the group"


def _scale(s: Settings) -> str | None:
    _baseline(s)
    return None


def _learning_rate(s: Settings) -> float:
    return s.number(f"{OPTIMIZER}lr")


def _warm_up(s: Settings) -> str | None:
    if s(f"{SCHEDULER}type") == "constant":
        return None
    return f"{s.number(f'{SCHEDULER}warmup_steps'):g} batches"


def _batch(s: Settings) -> float:
    if s("orchestrator.token_batch_size") is not None:
        raise UnknownValue("orchestrator.token_batch_size counts tokens")
    return 128.0 if s("orchestrator.batch_size") is None else s.number("orchestrator.batch_size")


def _extra(name: str, neutral: float) -> Callable[[Settings], float | None]:
    """Return a function that computes a setting of sampling; None if it is not set or has no effect."""

    def compute(s: Settings) -> float | None:
        value = s.number_or_none(f"{SAMPLING}extra_body.{name}")
        return None if value is None or value == neutral else value

    return compute


def _lora_rank(s: Settings) -> float | None:
    return s(f"{TRAINER}model.lora.rank") or s(f"{TRAINER}model.experimental.lora.rank") or None


def _model(s: Settings) -> str:
    if s("model.name") is None:
        raise NotSet("model.name is not set", "is not in the configuration")
    return last_parts(s("model.name"))


def _longest_answer(s: Settings) -> float:
    if s(f"{SAMPLING}max_completion_tokens") is None:
        raise UnknownValue("max_completion_tokens is not set, so that the context is the limit")
    return s.number(f"{SAMPLING}max_completion_tokens")


def _length(s: Settings) -> str:
    steps = s.number_or_none("max_steps")
    return "without end" if steps is None else f"{steps:g} batches"


QUANTITIES: Mapping[str, Callable[[Settings], Any]] = {
    "policy loss": _policy_loss,
    "clip below": _mask("low"),
    "clip above": _mask("high"),
    "dual clip": lambda s: None,
    "old policy": lambda s: "the engine's",
    "updates on a batch": lambda s: 1.0,
    "passes over a batch": lambda s: 1.0,
    "baseline": _baseline,
    "scale of the advantages": _scale,
    "temperature": lambda s: s.number(f"{SAMPLING}temperature"),
    "learning rate": _learning_rate,
    "schedule": lambda s: schedule_name(s(f"{SCHEDULER}type")),
    "warm-up": _warm_up,
    "optimizer": lambda s: optimizer_name(s(f"{OPTIMIZER}type")),
    "weight decay": lambda s: s.number(f"{OPTIMIZER}weight_decay"),
    "betas of Adam": lambda s: (
        f"{s.number(f'{OPTIMIZER}betas1'):g} and {s.number(f'{OPTIMIZER}betas2'):g}"
        if s(f"{OPTIMIZER}type") == "adamw"
        else None
    ),
    "limit of the gradient norm": lambda s: s.number_or_none(f"{OPTIMIZER}max_norm"),
    "LoRA rank": _lora_rank,
    "LoRA alpha": lambda s: s.number(f"{TRAINER}model.lora.alpha"),
    "dropout": lambda s: s.number(f"{TRAINER}model.lora.dropout") or None if _lora_rank(s) else None,
    "model": _model,
    "answers to a prompt": lambda s: s.number("orchestrator.group_size"),
    "answers a batch": _batch,
    "answers an update": _batch,
    "longest answer": _longest_answer,
    "engine's temperature": lambda s: None,
    "top-p": _extra("top_p", 1.0),
    "top-k": _extra("top_k", -1.0),
    "min-p": _extra("min_p", 0.0),
    "repetition penalty": _extra("repetition_penalty", 1.0),
    "length of the run": _length,
}
"""The functions that compute the quantities."""
