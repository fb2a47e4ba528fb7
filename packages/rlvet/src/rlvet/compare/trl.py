"""The quantities of `rlvet.compare.vocabulary` in a configuration of TRL's GRPOTrainer.

The formulas are those of trl/trainer/grpo_trainer.py of 1.16.0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from rlvet._numbers import format_setting
from rlvet.compare.settings import NotSet, Settings, last_parts
from rlvet.compare.vocabulary import PerProcess
from rlvet.lint.values import UnknownValue

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
"""Values of ``loss_type`` that clip the ratio."""

MICRO_BATCHES = "mean over the tokens of each micro-batch"
OF_THE_UPDATE = "mean over the tokens of an update"
OF_ANSWERS = "mean over answers of their means"


def _processes(s: Settings) -> float | None:
    """Return the number of processes; None if the configuration does not have it."""
    for name in ("num_processes", "nproc_per_node"):
        number = s.number_or_none(name) if s.is_set(name) else None
        if number is not None:
            nodes = s.number("nnodes") if name == "nproc_per_node" else 1
            return number * nodes
    size = s.number_or_none("generation_batch_size")
    steps = s.number_or_none("steps_per_generation")
    if size is not None and steps is not None:
        # A run that has begun has saved both.
        return size // (s.number("per_device_train_batch_size") * steps)
    return None


def _in_all(s: Settings, answers: float) -> float | PerProcess:
    """Return a number of answers of all processes, or for each process."""
    processes = _processes(s)
    return PerProcess(answers) if processes is None else answers * processes


def _answers_of_update(s: Settings) -> float | PerProcess:
    return _in_all(s, s.number("per_device_train_batch_size") * s.number("gradient_accumulation_steps"))


def _steps(s: Settings) -> float:
    """Return the number of micro-batches into which a process splits its part of a batch."""
    steps = s.number_or_none("steps_per_generation")
    if steps is not None:
        return steps
    size = s.number_or_none("generation_batch_size")
    if size is None:
        return s.number("gradient_accumulation_steps")
    processes = _processes(s)
    if processes is None:
        raise UnknownValue("the number of processes is not in the configuration")
    return size / (s.number("per_device_train_batch_size") * processes)


def _answers_of_batch(s: Settings) -> float | PerProcess:
    of_process = s.number("per_device_train_batch_size")
    size = s.number_or_none("generation_batch_size")
    return size if size is not None else _in_all(s, of_process * _steps(s))


def _updates(s: Settings) -> float:
    return s.number("num_iterations") * _steps(s) / s.number("gradient_accumulation_steps")


def _has_ratios_of_one(s: Settings) -> bool:
    """Return whether TRL trains without old probabilities, as each batch gets at most one update."""
    return s.number("gradient_accumulation_steps") % (_steps(s) * s.number("num_iterations")) == 0


def _policy_loss(s: Settings) -> str:
    if s.is_set("method"):
        # BandGRPOConfig of bandpo, whose method replaces TRL's loss.
        return f"{s('method')} of bandpo"
    loss = s("loss_type")
    level = "answers" if s("importance_sampling_level") == "sequence" else "tokens"
    if loss in CLIPPED:
        return f"clipped ratio of {level}"
    if loss == "sapo":
        gate = f"{format_setting(s('sapo_temperature_pos'))} and {format_setting(s('sapo_temperature_neg'))}"
        return f"SAPO with {gate}, ratio of {level}"
    if loss == "vespo":
        names = ("k_pos", "lambda_pos", "k_neg", "lambda_neg")
        return f"VESPO with {', '.join(format_setting(s(f'vespo_{name}')) for name in names)}"
    return f"{str(loss).upper()}, ratio of {level}"


def _clips(s: Settings) -> bool:
    """Return whether the loss is one of TRL's that clip the ratio."""
    return s("loss_type") in CLIPPED and not s.is_set("method")


def _clip_below(s: Settings) -> float | None:
    low = s.number("epsilon")
    return _bound(1 - low) if _clips(s) else None


def _clip_above(s: Settings) -> float | None:
    high = s.number_or_none("epsilon_high")
    high = s.number("epsilon") if high is None else high
    if s("loss_type") == "cispo":
        # The bound itself, not its distance from 1.
        return high
    return 1 + high if _clips(s) else None


def _bound(value: float) -> float | None:
    """Return a lower bound of a ratio; None if it bounds nothing."""
    return value if value > 0 else None


def _dual_clip(s: Settings) -> float | None:
    cap = s.number_or_none("delta")
    return cap if _clips(s) else None


def _average(s: Settings) -> str:
    loss = s("loss_type")
    if s.is_set("method"):
        raise UnknownValue("the average may be that of the method of bandpo")
    if loss in ("grpo", "sapo"):
        return OF_ANSWERS
    if loss == "luspo":
        return "mean over answers of their sums"
    if loss == "dr_grpo":
        return f"mean over answers of their sums / {s.number('max_completion_length')}"
    if loss == "bnpo":
        return _average_of_micro_batches(s)
    if _steps(s) == s.number("gradient_accumulation_steps"):
        return OF_THE_UPDATE
    return "sum over the tokens of an update / mean number of tokens of the batch's updates"


def _average_of_micro_batches(s: Settings) -> str:
    """Return the name of a mean over the tokens of each micro-batch, which may be all of an update."""
    processes = _processes(s)
    if processes is None:
        raise UnknownValue("the number of processes is not in the configuration")
    return OF_THE_UPDATE if processes * s.number("gradient_accumulation_steps") == 1 else MICRO_BATCHES


def _importance_weights(s: Settings) -> str | None:
    if not s("use_vllm") or not s("vllm_importance_sampling_correction"):
        return None
    level, _, kind = s("vllm_importance_sampling_mode").partition("_")
    # The older name of the upper bound.
    high = s.number_or_none("vllm_importance_sampling_cap")
    high = s.number_or_none("vllm_importance_sampling_clip_max") if high is None else high
    return weights_text(level, kind == "mask", s.number_or_none("vllm_importance_sampling_clip_min"), high)


def weights_text(level: str, is_mask: bool, low: float | None, high: float | None) -> str:
    """Return the text of importance weights between the engine and the trainer.

    Args:
        level: ``token`` or ``sequence``.
        is_mask: True if weights outside of the bounds are 0, and not the bound.
        low: The lower bound; None without one.
        high: The upper bound; None without one.

    >>> weights_text("token", False, None, 2.0)
    'of each token, at most 2'
    """
    unit = "of each token" if level == "token" else "of each answer"
    verb = "0 if {} {}" if is_mask else "{} {}"
    words = ("below", "above") if is_mask else ("at least", "at most")
    bounds = [
        verb.format(word, format_setting(float(bound)))
        for word, bound in zip(words, (low, high), strict=True)
        if bound is not None
    ]
    return ", ".join([unit, *bounds])


def _kl_estimator(s: Settings) -> str:
    if not s("use_bias_correction_kl"):
        return "k3"
    if s("importance_sampling_level") == "token":
        # The gradient of r·k3 is r·(log π − log π_ref)·∇log π, which is that of k2 where r is 1.
        return "gradient of k2" if _has_ratios_of_one(s) else "k3 times the ratio of each token"
    return "k3 times the ratio of each answer"


def _kl_reference(s: Settings) -> str:
    if not s("sync_ref_model"):
        return "the first policy"
    return f"moved by {s('ref_model_mixup_alpha')} every {s('ref_model_sync_steps')} steps"


def _entropy_bonus(s: Settings) -> float | str | None:
    if s("use_adaptive_entropy"):
        return f"adapted to an entropy of {s('entropy_target')}"
    return s.number_or_none("entropy_coef") or None


def _tokens_by_entropy(s: Settings) -> str | None:
    share = s.number("top_entropy_quantile")
    return None if share == 1 else f"the top {100 * share:g}%"


def _scale(s: Settings) -> str | None:
    if s("multi_objective_aggregation") != "sum_then_normalize":
        return "deviation of the group for each reward, then of the batch"
    scale = {True: "group", False: "none"}.get(s("scale_rewards"), s("scale_rewards"))
    # YAML and the command line read the word none as None.
    return None if scale in ("none", None) else f"deviation of the {scale}"


def _warm_up(s: Settings) -> str | None:
    if s("lr_scheduler_type") == "constant":
        return None
    steps = s.number("warmup_steps")
    share = s.number_or_none("warmup_ratio")
    if 0 < steps < 1:
        share = steps
        steps = 0
    if steps:
        return f"{format_setting(float(steps / _updates(s)))} batches"
    if not share:
        return None
    length = s.number("max_steps")
    if length > 0:
        return f"{format_setting(math.ceil(share * length) / _updates(s))} batches"
    return f"{format_setting(100 * float(share))}% of the run"


def _length(s: Settings) -> str:
    if s.number("max_steps") > 0:
        return f"{format_setting(float(s.number('max_steps') / _updates(s)))} batches"
    return f"{format_setting(float(s.number('num_train_epochs')))} epochs"


def schedule_name(name: Any) -> str:
    """Return the name of a schedule of the learning rate, in which a warm-up is not counted.

    >>> schedule_name("constant_with_warmup")
    'constant'
    """
    return str(name).removesuffix("_with_warmup")


def optimizer_name(name: Any) -> str:
    """Return the name of an optimizer without that of its implementation.

    >>> optimizer_name("adamw_torch_fused"), optimizer_name("AdamW"), optimizer_name("adamw_bnb_8bit")
    ('AdamW', 'AdamW', 'adamw_bnb_8bit')
    """
    return (
        "AdamW"
        if str(name).lower() in ("adamw", "adamw_torch", "adamw_torch_fused", "adamw_apex_fused")
        else str(name)
    )


def precision_text(computation: str, weights: str) -> str:
    """Return a precision, with that of the weights if a setting changes it: a script may load them in any.

    >>> precision_text("bfloat16", "float32"), precision_text("bfloat16", "bfloat16")
    ('bfloat16', 'bfloat16, weights in bfloat16')
    """
    return computation if weights == "float32" else f"{computation}, weights in {weights}"


def _precision(s: Settings) -> str:
    weights = "float32"
    if s("model_init_kwargs") is not None:
        raise UnknownValue("model_init_kwargs may set the precision of the weights")
    if s.is_set("dtype"):
        weights = s("dtype")
    is_half = s("fp16")
    is_brain = s("bf16")
    computation = "float16" if is_half else "bfloat16" if is_brain or is_brain is None else "float32"
    return precision_text(computation, weights)


def _lora_rank(s: Settings) -> int | None:
    if not s("use_peft"):
        return None
    if s.is_set("lora_r"):
        return s("lora_r")
    if s.program.startswith("trl"):
        return 16
    raise UnknownValue("the rank is not among the settings of GRPOConfig")


def _lora_alpha(s: Settings) -> float:
    if s.is_set("lora_alpha"):
        return s("lora_alpha")
    if s.program.startswith("trl"):
        return 32
    raise UnknownValue("lora_alpha is not among the settings of GRPOConfig")


def _model(s: Settings) -> str:
    name = s("model_name_or_path")
    if name is None:
        raise NotSet("the model is not in the configuration", "is not in the configuration")
    return last_parts(name)


def _data_set(s: Settings) -> str:
    if not s.is_set("dataset_name"):
        raise NotSet("the data set is not in the configuration", "is not in the configuration")
    return last_parts(s("dataset_name"), 2)


def _engine_temperature(s: Settings) -> float | None:
    name = "generation_kwargs.temperature"
    return s.number(name) if s.is_set(name) else None


def _top_k(s: Settings) -> float | None:
    return s.number_or_none("top_k") or None


QUANTITIES: Mapping[str, Callable[[Settings], Any]] = {
    "policy loss": _policy_loss,
    "clip below": _clip_below,
    "clip above": _clip_above,
    "dual clip": _dual_clip,
    "average of the loss": _average,
    "old policy": lambda s: "the trainer's own",
    "passes over a batch": lambda s: s.number("num_iterations"),
    "answers an update": _answers_of_update,
    "updates on a batch": _updates,
    "baseline": lambda s: "mean of the group",
    "scale of the advantages": _scale,
    "weights of the rewards": lambda s: None if s("reward_weights") is None else str(s("reward_weights")),
    "truncated answers": lambda s: "left out" if s("mask_truncated_completions") else "trained on",
    "rejected tokens": lambda s: None,
    "off-policy answers": lambda s: (
        None
        if s.number_or_none("off_policy_mask_threshold") is None
        else f"left out above a KL of {s.number_or_none('off_policy_mask_threshold')}"
    ),
    "tokens by entropy": _tokens_by_entropy,
    "importance weights": _importance_weights,
    "KL coefficient": lambda s: s.number_or_none("beta") or None,
    "KL estimator": _kl_estimator,
    "average of the KL term": _average,
    "KL reference": _kl_reference,
    "KL in the reward": lambda s: None,
    "entropy bonus": _entropy_bonus,
    "average of the entropy": _average_of_micro_batches,
    "temperature": lambda s: s.number("temperature"),
    "learning rate": lambda s: s.number("learning_rate"),
    "schedule": lambda s: schedule_name(s("lr_scheduler_type")),
    "warm-up": _warm_up,
    "optimizer": lambda s: optimizer_name(s("optim")),
    "weight decay": lambda s: s.number_or_none("weight_decay") or None,
    "betas of Adam": lambda s: f"{s.number('adam_beta1'):g} and {s.number('adam_beta2'):g}",
    "limit of the gradient norm": lambda s: s.number_or_none("max_grad_norm") or None,
    "LoRA rank": _lora_rank,
    "LoRA alpha": _lora_alpha,
    "precision": _precision,
    "dropout": lambda s: "off" if s("disable_dropout") else "as in the model",
    "model": _model,
    "answers to a prompt": lambda s: s.number("num_generations"),
    "answers a batch": _answers_of_batch,
    "longest answer": lambda s: s.number("max_completion_length"),
    "engine's temperature": _engine_temperature,
    "top-p": lambda s: None if s.number("top_p") == 1 else s.number("top_p"),
    "top-k": _top_k,
    "min-p": lambda s: s.number_or_none("min_p") or None,
    "repetition penalty": lambda s: (
        None if s.number("repetition_penalty") == 1 else s.number("repetition_penalty")
    ),
    "groups left out": lambda s: None,
    "prompts left out": lambda s: None,
    "age of the data": lambda s: None,
    "data set": _data_set,
    "length of the run": _length,
    "sampler": lambda s: "vLLM" if s("use_vllm") else "transformers",
}
"""The function that computes each quantity from the settings."""
