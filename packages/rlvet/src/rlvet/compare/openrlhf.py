"""The quantities of `rlvet.compare.vocabulary` in a configuration of OpenRLHF's PPO trainer.

The formulas are those of openrlhf/models/loss.py, trainer/ray/ppo_actor.py and trainer/ppo_utils/experience_maker.py.
Quantities that are not here are not known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlvet._numbers import format_setting
from rlvet.compare.settings import NotSet, Settings, last_parts
from rlvet.compare.trl import OF_ANSWERS, OF_THE_UPDATE, optimizer_name, schedule_name, weights_text
from rlvet.lint.values import UnknownValue

BASELINES: Mapping[str, str | None] = {
    "gae": "a critic",
    "reinforce": None,
    "rloo": "mean of the other answers",
    "reinforce_baseline": "mean of the group",
    "group_norm": "mean of the group",
    "dr_grpo": "mean of the group",
}
"""Texts for values of ``algo.advantage.estimator``."""


def _policy_loss(s: Settings) -> str:
    kind = s("actor.policy_loss_type")
    return {"ppo": "clipped ratio of tokens", "gspo": "clipped ratio of answers"}.get(
        kind, f"{kind} of OpenRLHF"
    )


def _clip(s: Settings, side: int) -> float:
    pair = s("actor.eps_clip_low_high")
    return s.number("actor.eps_clip") if pair is None else float(pair[side])


def _clip_below(s: Settings) -> float | None:
    low = _clip(s, 0)
    return 1 - low if low < 1 else None


def _average(s: Settings) -> str:
    return OF_ANSWERS if _is_gspo(s) else OF_THE_UPDATE


def _updates(s: Settings) -> float:
    answers = s.number("rollout.batch_size") * s.number("rollout.n_samples_per_prompt")
    return s.number("train.max_epochs") * max(1.0, answers // s.number("train.batch_size"))


def _scale(s: Settings) -> str | None:
    estimator = s("algo.advantage.estimator")
    if estimator == "group_norm":
        return "deviation of the group"
    if estimator == "dr_grpo" or s("algo.advantage.no_std_norm"):
        return None
    return "deviation of the batch"


def _is_corrected(s: Settings) -> bool:
    return bool(s("algo.advantage.is_correction_enable"))


def _is_gspo(s: Settings) -> bool:
    return s("actor.policy_loss_type") == "gspo"


def _weights(s: Settings) -> str | None:
    # The ratio of GSPO is then that to the engine, without a weight.
    if not _is_corrected(s) or _is_gspo(s):
        return None
    low, high = s("algo.advantage.is_correction_threshold")
    kind = s("algo.advantage.is_correction_type")
    if kind == "seq-mask-tis":
        return f"of tokens, for answers with a mean between {low:g} and {high:g}"
    return weights_text("token", kind == "icepop", float(low), float(high))


def _kl_in_loss(s: Settings) -> float | None:
    coefficient = s.number("algo.kl.init_coef")
    return coefficient if s("algo.kl.use_loss") and coefficient else None


def _kl_in_reward(s: Settings) -> str | None:
    coefficient = s.number("algo.kl.init_coef")
    if s("algo.kl.use_loss") or not coefficient:
        return None
    return f"{format_setting(coefficient)} times {s('algo.kl.estimator')}"


def _learning_rate(s: Settings) -> float:
    return s.number("actor.adam.lr" if s("actor.optim") == "adam" else "actor.muon.lr")


def _schedule(s: Settings) -> str:
    name = s("actor.lr_scheduler")
    if name == "cosine_with_min_lr":
        return f"cosine to {s.number('actor.min_lr_ratio'):g} of the rate"
    return schedule_name(name)


def _warm_up(s: Settings) -> str | None:
    share = s.number("actor.lr_warmup_ratio")
    return f"{format_setting(100 * share)}% of the run" if share else None


def _age(s: Settings) -> str | None:
    if not s("train.async_enable"):
        return None
    return f"up to {s.number('train.async_queue_size') + 1:g} batches"


def _left_out(s: Settings) -> str | None:
    if not s("algo.dynamic_filtering_enable"):
        return None
    low, high = s("algo.dynamic_filtering_range")
    return f"with a mean reward outside {low:g} to {high:g}"


def _name(s: Settings, setting: str, parts: int) -> str:
    if s(setting) is None:
        raise NotSet(f"{setting} is not set", "is not in the configuration")
    return last_parts(s(setting), parts)


def _positive_or_none(name: str) -> Callable[[Settings], float | None]:
    return lambda s: s.number_or_none(name) or None


def _unless_one(name: str) -> Callable[[Settings], float | None]:
    return lambda s: None if s.number(name) == 1 else s.number(name)


def _longest_answer(s: Settings) -> float:
    if s("rollout.max_new_tokens") is None:
        raise UnknownValue("rollout.max_new_tokens is the rest of data.max_len after the prompt")
    return s.number("rollout.max_new_tokens")


def _length(s: Settings) -> str:
    return f"{format_setting(s.number('train.num_episodes'))} epochs"


QUANTITIES: Mapping[str, Callable[[Settings], Any]] = {
    "policy loss": _policy_loss,
    "clip below": _clip_below,
    "clip above": lambda s: 1 + _clip(s, 1),
    "dual clip": lambda s: s.number_or_none("actor.dual_clip"),
    "average of the loss": _average,
    "old policy": lambda s: "the engine's" if _is_corrected(s) and _is_gspo(s) else "the trainer's own",
    "updates on a batch": _updates,
    "passes over a batch": lambda s: s.number("train.max_epochs"),
    "answers an update": lambda s: s.number("train.batch_size"),
    "baseline": lambda s: BASELINES[s("algo.advantage.estimator")],
    "scale of the advantages": _scale,
    "importance weights": _weights,
    "KL coefficient": _kl_in_loss,
    "KL estimator": lambda s: s("algo.kl.estimator"),
    "average of the KL term": lambda s: OF_THE_UPDATE,
    "KL reference": lambda s: "the first policy",
    "KL in the reward": _kl_in_reward,
    "entropy bonus": _positive_or_none("actor.entropy_coef"),
    "average of the entropy": lambda s: OF_THE_UPDATE,
    "temperature": lambda s: s.number("rollout.temperature"),
    "learning rate": _learning_rate,
    "schedule": _schedule,
    "warm-up": _warm_up,
    "optimizer": lambda s: optimizer_name({"adam": "adamw"}.get(s("actor.optim"), s("actor.optim"))),
    "weight decay": lambda s: s.number("actor.adam.weight_decay"),
    "betas of Adam": lambda s: " and ".join(f"{beta:g}" for beta in s("actor.adam.betas")),
    "limit of the gradient norm": lambda s: s.number("actor.max_norm") or None,
    "LoRA rank": lambda s: s("ds.lora.rank") or None,
    "LoRA alpha": lambda s: s.number("ds.lora.alpha"),
    "dropout": lambda s: s.number("ds.lora.dropout") or None if s("ds.lora.rank") else None,
    "model": lambda s: _name(s, "actor.model_name_or_path", 1),
    "answers to a prompt": lambda s: s.number("rollout.n_samples_per_prompt"),
    "answers a batch": lambda s: s.number("rollout.batch_size") * s.number("rollout.n_samples_per_prompt"),
    "longest answer": _longest_answer,
    "engine's temperature": lambda s: None,
    "top-p": _unless_one("rollout.top_p"),
    "groups left out": _left_out,
    "age of the data": _age,
    "data set": lambda s: _name(s, "data.prompt_dataset", 2),
    "length of the run": _length,
}
"""The functions that compute the quantities."""
