"""Rules for configurations of TRL's GRPOTrainer."""

from __future__ import annotations

from math import gcd
from typing import Any

from rlvet.lint.learning_rate import RATE_HAPPENS, RATE_SOURCE, learning_rate_is_high
from rlvet.lint.rules import (
    GREEDY,
    GSPO_PAPER,
    GSPO_RANGE,
    KEEP_SAMPLING_MASK,
    NEARLY_GREEDY,
    ONE_ANSWER,
    ONE_UPDATE,
    SAMPLING_PENALTY,
    TRUNCATED_SAMPLING,
    TWO_ANSWERS,
    UNWEIGHTED_TRUNCATION,
    Rule,
    UnknownValue,
    Values,
    largest,
    samples_greedily,
    samples_nearly_greedily,
)

TRL_CLIPS = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo")
TRL_UPDATES = {
    "accumulation": "gradient_accumulation_steps",
    "steps": "steps_per_generation",
    "batch": "generation_batch_size",
    "iterations": "num_iterations",
}


def _trl_makes_one_update(v: Values) -> bool:
    """Return whether each generated batch gets one optimizer step."""
    if v.steps is None and v.batch is not None:
        # The number of processes is set by the launcher, not by the configuration.
        raise UnknownValue(
            "steps_per_generation follows from generation_batch_size and the number of processes"
        )
    # TRL computes steps · iterations losses on each generated batch. All of them belong to the same optimizer step if
    # their number divides the number of losses that are accumulated.
    steps = v.accumulation if v.steps is None else v.steps
    return v.accumulation % (steps * v.iterations) == 0


def _trl_truncates_sampling(v: Values) -> bool:
    """Return whether answers are sampled from a part of the vocabulary."""
    return v.top_p < 1 or (v.top_k or 0) > 0 or (v.min_p or 0) > 0


def _trl_groups_may_be_split(v: Values) -> bool:
    """Return whether a generation batch may have no whole groups, for all that is known of the number of processes."""
    if not v.is_set("group", "device_batch", "steps", "accumulation"):
        return False
    divisor = _trl_process_divisor(v)
    if v.all_processes is not None:
        return _first(v.all_processes) % divisor != 0
    if v.processes is not None:
        return _first(v.processes) * _first(v.nodes) % divisor != 0
    return divisor > 1


def _first(value: Any) -> Any:
    """Return the first of several values. A launcher's flag seems to have several before the name of the script."""
    return value[0] if isinstance(value, list) else value


def _trl_process_divisor(v: Values) -> int:
    """Return the smallest number of processes with which a generation batch has whole groups.

    Every valid number of processes is a multiple of it.
    """
    if v.batch is not None:
        return 1
    steps = v.accumulation if v.steps is None else v.steps
    return v.group // gcd(v.group, v.device_batch * steps)


def _trl_penalizes(v: Values) -> bool:
    """Return whether a penalty changes the probabilities of tokens that are in the answer already."""
    if v.repetition != 1:
        return True
    # Raises an error if the arguments of the engine are not known.
    _ = v.arguments
    return (
        any((penalty or 0) != 0 for penalty in (v.presence, v.frequency)) or (v.engine_repetition or 1) != 1
    )


TRL_SOURCE = "trl 1.16.0, trl/trainer/grpo_trainer.py, _generate_and_score_completions and _compute_loss"

TRL_RULES = (
    Rule(
        id="clip-cannot-act",
        framework="trl",
        severity="look",
        title="the clip has no effect",
        reads={
            "high": "epsilon_high",
            "low": "epsilon",
            "delta": "delta",
            "loss": "loss_type",
            **TRL_UPDATES,
        },
        condition=lambda v: (
            v.is_set("high", "low", "delta") and v.loss in TRL_CLIPS and _trl_makes_one_update(v)
        ),
        happens=ONE_UPDATE + " epsilon is {low}, epsilon_high {high} and delta {delta}.",
        fix="set num_iterations above 1, or steps_per_generation above gradient_accumulation_steps; or "
        "remove epsilon, epsilon_high and delta",
        source="huggingface/trl issue 3120; " + TRL_SOURCE,
    ),
    Rule(
        id="truncated-sampling",
        framework="trl",
        severity="look",
        title="sampling is truncated, and importance weights are used",
        reads={
            "top_p": "top_p",
            "top_k": "top_k",
            "min_p": "min_p",
            "vllm": "use_vllm",
            "weight": "vllm_importance_sampling_correction",
        },
        condition=lambda v: _trl_truncates_sampling(v) and v.vllm and v.weight,
        happens=TRUNCATED_SAMPLING + " top_p is {top_p}, top_k {top_k}, min_p {min_p}.",
        fix="top_p=1.0, top_k=0 and min_p=None; or vllm_importance_sampling_correction=False",
        source="huggingface/trl issue 6789; " + TRL_SOURCE,
    ),
    Rule(
        id="truncated-without-weight",
        framework="trl",
        severity="note",
        title="sampling is truncated",
        reads={
            "top_p": "top_p",
            "top_k": "top_k",
            "min_p": "min_p",
            "vllm": "use_vllm",
            "weight": "vllm_importance_sampling_correction",
        },
        condition=lambda v: (
            _trl_truncates_sampling(v) and v.get("top_k") != 1 and not (v.get("vllm") and v.get("weight"))
        ),
        happens=UNWEIGHTED_TRUNCATION + " top_p is {top_p}, top_k {top_k}, min_p {min_p}.",
        fix="top_p=1.0, top_k=0 and min_p=None",
        source=KEEP_SAMPLING_MASK.format("trl 1.16.0, trl/trainer/utils.py:577 (logits / temperature)"),
    ),
    Rule(
        id="greedy-sampling",
        framework="trl",
        severity="fix",
        title="the answers to a prompt are all the same",
        reads={"temperature": "temperature", "top_k": "top_k", "group": "num_generations"},
        condition=samples_greedily,
        happens=GREEDY + "temperature is {temperature}, top_k {top_k}, num_generations {group}. TRL "
        "refuses a temperature of 0.",
        fix="temperature=1.0 and top_k=0",
        source="trl 1.16.0, trl/trainer/grpo_trainer.py:1132 (temperature) and :1134 (top_k); "
        "trl/trainer/utils.py:577 divides by the temperature",
    ),
    Rule(
        id="temperature-near-zero",
        framework="trl",
        severity="look",
        title="the temperature is near 0",
        reads={"temperature": "temperature", "group": "num_generations"},
        condition=samples_nearly_greedily,
        happens=NEARLY_GREEDY + "temperature is {temperature}, num_generations {group}.",
        fix="temperature=1.0",
        source="trl 1.16.0, trl/trainer/grpo_trainer.py:1132 (temperature)",
    ),
    Rule(
        id="sampling-penalty",
        framework="trl",
        severity="look",
        title="a penalty changes how answers are sampled",
        reads={
            "repetition": "repetition_penalty",
            "arguments": "generation_kwargs",
            "presence": "generation_kwargs.presence_penalty",
            "frequency": "generation_kwargs.frequency_penalty",
            "engine_repetition": "generation_kwargs.repetition_penalty",
        },
        condition=_trl_penalizes,
        happens=SAMPLING_PENALTY + " repetition_penalty is {repetition}, presence_penalty {presence}, "
        "frequency_penalty {frequency}.",
        fix="repetition_penalty=1.0, and no penalty in generation_kwargs",
        source="trl 1.16.0, trl/trainer/grpo_trainer.py:1131 (repetition_penalty) and trl/trainer/utils.py:577 "
        "(logits / temperature); PrimeIntellect-ai/prime-rl pull request 886 on the size of the effect",
    ),
    Rule(
        id="liger-drops-the-weight",
        framework="trl",
        severity="note",
        title="Liger's loss leaves out the importance weight in TRL before 0.29",
        reads={
            "liger": "use_liger_kernel",
            "vllm": "use_vllm",
            "weight": "vllm_importance_sampling_correction",
        },
        condition=lambda v: bool(v.liger and v.vllm and v.weight),
        happens="TRL before 0.29 does not pass the importance weight of vLLM's answers to Liger's loss; a "
        "gradient norm 100 times larger was reported. TRL 1.14 and later do not use Liger's loss.",
        fix="trl>=0.29 with a liger-kernel that accepts vllm_is_ratio, or {liger.name}=False",
        source="linkedin/Liger-Kernel issue 1082 and pull request 1088; huggingface/trl pull request 5031",
    ),
    Rule(
        id="gspo-clip",
        framework="trl",
        severity="look",
        title="the clip of GSPO is that of GRPO",
        reads={
            "level": "importance_sampling_level",
            "low": "epsilon",
            "high": "epsilon_high",
            "loss": "loss_type",
            **TRL_UPDATES,
        },
        condition=lambda v: (
            v.level == "sequence"
            and v.loss in TRL_CLIPS[:-1]
            and largest(v.low, v.high) >= 0.05
            # With one update, no clip has an effect, and the rule clip-cannot-act says so.
            and not _trl_makes_one_update(v)
        ),
        happens=GSPO_RANGE + " epsilon is {low}, epsilon_high {high}.",
        fix="epsilon=3e-4, epsilon_high=4e-4",
        source=GSPO_PAPER,
    ),
    Rule(
        id="batch-does-not-divide",
        framework="trl",
        severity="fix",
        title="a generation batch is no multiple of the group size",
        reads={"batch": "generation_batch_size", "group": "num_generations"},
        condition=lambda v: v.batch is not None and v.batch % v.group != 0,
        happens="generation_batch_size {batch} is no multiple of num_generations {group}: GRPOConfig refuses "
        "it.",
        fix="a generation_batch_size that is a multiple of num_generations",
        source="trl 1.16.0, trl/trainer/grpo_config.py, __post_init__",
        only_before_start=True,
    ),
    Rule(
        id="batch-set-twice",
        framework="trl",
        severity="fix",
        title="the generation batch is set twice",
        reads={"batch": "generation_batch_size", "steps": "steps_per_generation"},
        condition=lambda v: v.batch is not None and v.steps is not None,
        happens="generation_batch_size and steps_per_generation are both set: GRPOConfig refuses it.",
        fix="one of the two",
        source="trl 1.16.0, trl/trainer/grpo_config.py, __post_init__",
        only_before_start=True,
    ),
    Rule(
        id="processes-must-divide",
        framework="trl",
        severity="note",
        title="a batch has whole groups only with some numbers of processes",
        reads={
            "group": "num_generations",
            "device_batch": "per_device_train_batch_size",
            "steps": "steps_per_generation",
            "accumulation": "gradient_accumulation_steps",
            "batch": "generation_batch_size",
            "all_processes": "num_processes",
            "processes": "nproc_per_node",
            "nodes": "nnodes",
        },
        condition=_trl_groups_may_be_split,
        happens="A generation batch is per_device_train_batch_size {device_batch} times steps_per_generation "
        "(by default gradient_accumulation_steps, {accumulation}) for each process. It is a multiple of "
        "num_generations {group} only for some numbers of processes; GRPOConfig refuses the others, "
        "including a single process.",
        fix="a number of processes for which the product is a multiple of num_generations",
        source="trl 1.16.0, trl/trainer/grpo_config.py, __post_init__",
    ),
    Rule(
        id="group-of-one",
        framework="trl",
        severity="fix",
        title="one answer to each prompt",
        reads={"group": "num_generations"},
        condition=lambda v: v.group < 2,
        happens=ONE_ANSWER + "GRPOConfig refuses num_generations {group}.",
        fix="num_generations=8",
        source="trl 1.16.0, trl/trainer/grpo_config.py, __post_init__",
    ),
    Rule(
        id="group-of-two",
        framework="trl",
        severity="note",
        title="two answers to each prompt",
        reads={"group": "num_generations"},
        condition=lambda v: v.group == 2,
        happens=TWO_ANSWERS,
        fix="num_generations=8, or scale_rewards='none'",
        source="Liu et al., Understanding R1-Zero-Like Training, arXiv 2503.20783, section 3.1",
    ),
    Rule(
        id="lora-reference",
        framework="trl",
        severity="note",
        title="the KL term is relative to the base model, not to the adapter, in TRL before 0.27",
        reads={"adapter": "model.adapter", "beta": "beta"},
        condition=lambda v: bool(v.adapter and v.beta),
        happens="The model has an adapter that is already trained, and beta is {beta}. TRL before 0.27 "
        "computes the reference with the adapter turned off, so the KL is large at the first step and pulls "
        "the policy back to the base model.",
        fix="trl>=0.27, which keeps a copy of the adapter; or merge the adapter first; or beta=0.0",
        source="huggingface/trl issue 3194 and pull request 4723",
    ),
    Rule(
        id="mean-depends-on-micro-batch",
        framework="trl",
        severity="note",
        title="the loss depends on how a batch is split",
        reads={
            "loss": "loss_type",
            "accumulation": "gradient_accumulation_steps",
            "device_batch": "per_device_train_batch_size",
        },
        condition=lambda v: v.loss == "bnpo" and v.accumulation > 1,
        happens="loss_type 'bnpo' divides by the tokens of each micro-batch: a token weighs more in a "
        "micro-batch of short answers, and another per_device_train_batch_size gives another loss.",
        fix="loss_type='dapo', which divides by the tokens of the whole batch",
        source=TRL_SOURCE,
    ),
    Rule(
        id="learning-rate",
        framework="trl",
        severity="look",
        title="the learning rate is far above published ones",
        reads={
            "rate": "learning_rate",
            "model": "model_name_or_path",
            "lora": "use_peft",
            "optimizer": "optim",
        },
        condition=learning_rate_is_high,
        happens=RATE_HAPPENS,
        fix="learning_rate=1e-6, or 1e-5 with LoRA",
        source=RATE_SOURCE,
    ),
)
