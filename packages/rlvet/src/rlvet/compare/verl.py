"""The quantities of `rlvet.compare.vocabulary` in a configuration of verl's PPO trainer.

The formulas are those of verl 0.9.1: trainer/ppo/core_algos.py, trainer/ppo/rollout_corr_helper.py and
workers/utils/losses.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlvet._numbers import format_setting
from rlvet.compare.settings import NotSet, Settings, last_parts
from rlvet.compare.trl import (
    OF_ANSWERS,
    OF_THE_UPDATE,
    optimizer_name,
    precision_text,
    schedule_name,
    weights_text,
)
from rlvet.lint.values import UnknownValue

ACTOR = "actor_rollout_ref.actor."
OPTIMIZER = f"{ACTOR}optim."
LOSS = f"{ACTOR}policy_loss."
ROLLOUT = "actor_rollout_ref.rollout."
MODEL = "actor_rollout_ref.model."
CORRECTION = "algorithm.rollout_correction."

DUAL = ("vanilla", "dppo_tv", "dppo_kl", "bypass_mode")
"""Losses that bound the ratio of tokens with negative advantages."""
CLIPPED = ("vanilla", "gspo", "bypass_mode")
"""Losses that clip the ratio."""
WITHOUT_CLIP = ("sapo", "gpg", "")
"""Losses without bounds of the ratio, and the methods of bandpo, which have their own."""
NAMES: Mapping[str, str] = {
    "vanilla": "clipped ratio of tokens",
    "bypass_mode": "clipped ratio of tokens",
    "gspo": "clipped ratio of answers",
    "cispo": "CISPO, ratio of tokens",
    "dppo_tv": "DPPO with total variation",
    "dppo_kl": "DPPO with the KL divergence",
    "gpg": "without a ratio",
}
"""Texts for values of ``loss_mode``; others are printed as they are."""
BASELINES: Mapping[str, str] = {
    "grpo": "mean of the group",
    "grpo_vectorized": "mean of the group",
    "rloo": "mean of the other answers",
    "rloo_vectorized": "mean of the other answers",
    "gae": "a critic",
    "remax": "the greedy answer",
}
"""Texts for values of ``adv_estimator``; others are printed as they are."""
AVERAGES: Mapping[str, str] = {
    "token-mean": OF_THE_UPDATE,
    "token-sum": "sum over the tokens of an update",
    "seq-mean-token-mean": OF_ANSWERS,
    "seq-mean-token-sum": "mean over answers of their sums",
}
"""Texts for values of ``loss_agg_mode``."""


def _clip(s: Settings, side: str) -> float:
    value = s.number_or_none(f"{ACTOR}clip_ratio_{side}")
    return s.number(f"{ACTOR}clip_ratio") if value is None else value


def _method(s: Settings) -> str:
    """Return the method of bandpo that replaces verl's loss; empty without one."""
    target = str(s(f"{LOSS}_target_")) if s.is_set(f"{LOSS}_target_") else ""
    if s.is_set(f"{LOSS}method"):
        return str(s(f"{LOSS}method"))
    return "Band()" if "bandpo" in target and "Band" in target.rpartition(".")[2] else ""


def _policy_loss(s: Settings) -> str:
    method = _method(s)
    if method:
        return f"{method} of bandpo"
    loss = s(f"{LOSS}loss_mode")
    if loss == "sapo":
        gate = f"{format_setting(s(f'{ACTOR}tau_pos'))} and {format_setting(s(f'{ACTOR}tau_neg'))}"
        return f"SAPO with {gate}, ratio of tokens"
    return NAMES.get(loss, f"{loss} of verl")


def _loss_of_verl(s: Settings) -> str:
    """Return the name of verl's loss; empty if a method of bandpo replaces it."""
    return "" if _method(s) else s(f"{LOSS}loss_mode")


def _clip_below(s: Settings) -> float | None:
    low = _clip(s, "low")
    loss = _loss_of_verl(s)
    if loss in (*CLIPPED, "cispo"):
        return 1 - low if low < 1 else None
    return None if loss in WITHOUT_CLIP else low


def _clip_above(s: Settings) -> float | None:
    high = _clip(s, "high")
    loss = _loss_of_verl(s)
    if loss in (*CLIPPED, "cispo"):
        return 1 + high
    return None if loss in WITHOUT_CLIP else high


def _dual_clip(s: Settings) -> float | None:
    cap = s.number(f"{ACTOR}clip_ratio_c")
    return cap if _loss_of_verl(s) in DUAL else None


def _average_of_terms(s: Settings) -> str:
    """Return the average of the KL term and of the entropy."""
    mode = s(f"{ACTOR}loss_agg_mode")
    if mode != "seq-mean-token-sum-norm":
        return AVERAGES[mode]
    factor = s.number_or_none(f"{ACTOR}loss_scale_factor")
    divisor = "the longest answer of the micro-batch" if factor is None else format_setting(float(factor))
    return f"mean over answers of their sums / {divisor}"


def _average(s: Settings) -> str:
    average = _average_of_terms(s)
    if _method(s):
        raise UnknownValue("the average may be that of the method of bandpo")
    loss = s(f"{LOSS}loss_mode")
    if loss == "sapo":
        return OF_ANSWERS
    return "mean over the answers of each micro-batch" if loss == "geo_mean" else average


def _updates_of_pass(s: Settings) -> float:
    return max(1.0, s.number("data.train_batch_size") / s.number(f"{ACTOR}ppo_mini_batch_size"))


def _old_policy(s: Settings) -> str:
    return "the engine's" if s(f"{CORRECTION}bypass_mode") else "the trainer's own"


def _scale(s: Settings) -> str | None:
    estimator = s("algorithm.adv_estimator")
    if estimator in ("grpo", "grpo_vectorized", "gdpo"):
        return "deviation of the group" if s("algorithm.norm_adv_by_std_in_grpo") else None
    if estimator in ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        return "deviation of the batch"
    return None


def _is_corrected(s: Settings) -> bool:
    """Return whether the trainer applies the rollout correction, see the rules of `rlvet lint`."""
    return bool(s(f"{ROLLOUT}calculate_log_probs")) and not s(f"{CORRECTION}bypass_mode")


def _importance_weights(s: Settings) -> str | None:
    level = s(f"{CORRECTION}rollout_is")
    if level is None or not _is_corrected(s):
        return None
    threshold = str(s(f"{CORRECTION}rollout_is_threshold"))
    low, separator, high = threshold.partition("_")
    if not separator:
        low, high = "", threshold
    text = weights_text(level, bool(separator), float(low) if low else None, float(high))
    return f"{text}, divided by their mean" if s(f"{CORRECTION}rollout_is_batch_normalize") else text


def _rejected(s: Settings) -> str | None:
    kinds = s(f"{CORRECTION}rollout_rs")
    if kinds is None or not _is_corrected(s):
        return None
    return f"by {kinds} outside of {s(f'{CORRECTION}rollout_rs_threshold')}"


def _kl_coefficient(s: Settings) -> float | None:
    return (s.number(f"{ACTOR}kl_loss_coef") or None) if s(f"{ACTOR}use_kl_loss") else None


KL_ESTIMATORS: Mapping[str, str] = {
    "kl": "k1",
    "k1": "k1",
    "abs": "absolute value of k1",
    "mse": "gradient of k2",
    "k2": "gradient of k2",
    "low_var_kl": "k3",
    "k3": "k3",
}
"""Texts for values of ``kl_loss_type``. The value of an estimator with a plus has the gradient of k2."""


def _kl_estimator(s: Settings) -> str:
    kind = s(f"{ACTOR}kl_loss_type")
    return "gradient of k2" if kind.endswith("+") else KL_ESTIMATORS[kind]


def _kl_in_reward(s: Settings) -> str | None:
    if not s("algorithm.use_kl_in_reward"):
        return None
    coefficient = s.number("algorithm.kl_ctrl.kl_coef")
    if s("algorithm.kl_ctrl.type") != "fixed":
        return f"adapted to {s('algorithm.kl_ctrl.target_kl')}, from {coefficient}"
    kind = s("algorithm.kl_penalty").removesuffix("+")
    return f"{format_setting(coefficient)} times {KL_ESTIMATORS[kind].removeprefix('gradient of ')}"


def _warm_up(s: Settings) -> str | None:
    steps = s.number(f"{OPTIMIZER}lr_warmup_steps")
    # The schedule advances once for each batch.
    if steps > 0:
        return f"{format_setting(float(steps))} batches"
    share = s.number(f"{OPTIMIZER}lr_warmup_steps_ratio") if steps < 0 else 0
    if not share:
        return None
    length = s.number_or_none("trainer.total_training_steps")
    return f"{int(share * length)} batches" if length else f"{format_setting(100 * float(share))}% of the run"


def _schedule(s: Settings) -> str:
    name = s(f"{OPTIMIZER}warmup_style") or s(f"{OPTIMIZER}lr_scheduler_type")
    least = s(f"{OPTIMIZER}min_lr_ratio") if name != "constant" else None
    return f"{schedule_name(name)} to {least:g} of the rate" if least else schedule_name(name)


def _betas(s: Settings) -> str:
    first, second = s(f"{OPTIMIZER}betas")
    return f"{first:g} and {second:g}"


def _precision(s: Settings) -> str:
    if s(f"{ACTOR}strategy") == "megatron":
        return precision_text("bfloat16", "float32")
    names = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    computation = s(f"{ACTOR}fsdp_config.dtype")
    weights = s(f"{ACTOR}fsdp_config.model_dtype")
    return precision_text(*(names.get(name, str(name)) for name in (computation, weights)))


def _lora_rank(s: Settings) -> int | None:
    return s(f"{MODEL}lora_rank") or s(f"{MODEL}lora.rank") or None


def _lora_alpha(s: Settings) -> float:
    return s(f"{MODEL}lora_alpha") if s(f"{MODEL}lora_rank") else s(f"{MODEL}lora.alpha")


def _prompts_left_out(s: Settings) -> str | None:
    if s("data.filter_overlong_prompts"):
        return f"those above {s('data.max_prompt_length')} tokens"
    # By default, a longer prompt ends the run.
    kind = s("data.truncation")
    return None if kind == "error" else f"tokens above {s('data.max_prompt_length')}, {kind}"


def _age(s: Settings) -> str | None:
    if "one_step_off" in s.program:
        return "one batch"
    return "asynchronous" if "fully_async" in s.program else None


def _longest_answer(s: Settings) -> float:
    return (
        s(f"{ROLLOUT}response_length")
        if s.is_set(f"{ROLLOUT}response_length")
        else s.number("data.max_response_length")
    )


def _data_set(s: Settings) -> str:
    if not s.is_set("data.train_files"):
        raise NotSet("the data set is not in the configuration", "is not in the configuration")
    return last_parts(s("data.train_files"), 2)


def _length(s: Settings) -> str:
    steps = s.number_or_none("trainer.total_training_steps")
    return (
        f"{format_setting(float(steps))} batches"
        if steps
        else f"{format_setting(s.number('trainer.total_epochs'))} epochs"
    )


def _sampler(s: Settings) -> str:
    if not s.is_set(f"{ROLLOUT}name"):
        raise NotSet(f"{ROLLOUT}name is not set", "is not in the configuration")
    name = str(s(f"{ROLLOUT}name"))
    return {"vllm": "vLLM", "sglang": "SGLang"}.get(name, name)


def _positive_or_none(name: str) -> Callable[[Settings], Any]:
    """Return a function that returns the value of a setting, and None for 0, -1 and None."""

    def compute(s: Settings) -> Any:
        value = s.number_or_none(name)
        return value if value is not None and value > 0 else None

    return compute


def _unless_one(name: str) -> Callable[[Settings], Any]:
    """Return a function that returns the value of a setting, and None for 1."""
    return lambda s: None if s.number(name) == 1 else s.number(name)


QUANTITIES: Mapping[str, Callable[[Settings], Any]] = {
    "policy loss": _policy_loss,
    "clip below": _clip_below,
    "clip above": _clip_above,
    "dual clip": _dual_clip,
    "average of the loss": _average,
    "old policy": _old_policy,
    "passes over a batch": lambda s: s.number(f"{ACTOR}ppo_epochs"),
    "answers an update": lambda s: (
        min(s.number(f"{ACTOR}ppo_mini_batch_size"), s.number("data.train_batch_size"))
        * s.number(f"{ROLLOUT}n")
    ),
    "updates on a batch": lambda s: s.number(f"{ACTOR}ppo_epochs") * _updates_of_pass(s),
    "baseline": lambda s: BASELINES.get(
        s("algorithm.adv_estimator"), f"{s('algorithm.adv_estimator')} of verl"
    ),
    "scale of the advantages": _scale,
    "weights of the rewards": lambda s: None,
    "truncated answers": lambda s: "trained on",
    "rejected tokens": _rejected,
    "off-policy answers": lambda s: None,
    "tokens by entropy": lambda s: None,
    "importance weights": _importance_weights,
    "KL coefficient": _kl_coefficient,
    "KL estimator": _kl_estimator,
    "average of the KL term": _average_of_terms,
    "KL reference": lambda s: "the first policy",
    "KL in the reward": _kl_in_reward,
    "entropy bonus": _positive_or_none(f"{ACTOR}entropy_coeff"),
    "average of the entropy": _average_of_terms,
    "temperature": lambda s: s.number(f"{ROLLOUT}temperature"),
    "learning rate": lambda s: s.number(f"{OPTIMIZER}lr"),
    "schedule": _schedule,
    "warm-up": _warm_up,
    "optimizer": lambda s: optimizer_name(s(f"{OPTIMIZER}optimizer")),
    "weight decay": _positive_or_none(f"{OPTIMIZER}weight_decay"),
    "betas of Adam": _betas,
    "limit of the gradient norm": _positive_or_none(f"{OPTIMIZER}clip_grad"),
    "LoRA rank": _lora_rank,
    "LoRA alpha": _lora_alpha,
    "precision": _precision,
    "dropout": lambda s: "as in the model",
    "model": lambda s: last_parts(s(f"{MODEL}path")),
    "answers to a prompt": lambda s: s.number(f"{ROLLOUT}n"),
    "answers a batch": lambda s: s.number("data.train_batch_size") * s.number(f"{ROLLOUT}n"),
    "longest answer": _longest_answer,
    "engine's temperature": lambda s: None,
    "top-p": _unless_one(f"{ROLLOUT}top_p"),
    "top-k": _positive_or_none(f"{ROLLOUT}top_k"),
    "min-p": lambda s: None,
    "repetition penalty": _unless_one(f"{ROLLOUT}repetition_penalty"),
    "groups left out": lambda s: (
        f"those of equal {s('algorithm.filter_groups.metric')}"
        if s("algorithm.filter_groups.enable")
        else None
    ),
    "prompts left out": _prompts_left_out,
    "age of the data": _age,
    "data set": _data_set,
    "length of the run": _length,
    "sampler": _sampler,
}
"""The function that computes each quantity from the settings."""
