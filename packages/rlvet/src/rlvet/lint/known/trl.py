"""TRL: its settings, their defaults, and the rules for its configurations."""

from __future__ import annotations

from math import gcd
from typing import Any

from rlvet.lint.framework import Framework, each_with
from rlvet.lint.rules import Rule
from rlvet.lint.topics import (
    BATCH_DOES_NOT_DIVIDE,
    CLIP_CANNOT_ACT,
    GREEDY_SAMPLING,
    GROUP_OF_ONE,
    GROUP_OF_TWO,
    GSPO_CLIP,
    KEEP_SAMPLING_MASK,
    LEARNING_RATE,
    MEAN_DEPENDS_ON_MICRO_BATCH,
    NEGATIVE_KL,
    SAMPLING_PENALTY,
    TEMPERATURE_NEAR_ZERO,
    TRUNCATED_SAMPLING,
    TRUNCATED_WITHOUT_WEIGHT,
    setting_without_effect,
)
from rlvet.lint.values import UnknownValue, Values, largest

CLIPS = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo")
UPDATES = {
    "accumulation": "gradient_accumulation_steps",
    "steps": "steps_per_generation",
    "batch": "generation_batch_size",
    "iterations": "num_iterations",
}


def _makes_one_update(v: Values) -> bool:
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


def _truncates_sampling(v: Values) -> bool:
    """Return whether answers are sampled from a part of the vocabulary."""
    # Raises an error if the arguments of the engine, which may override these, are not known.
    _ = v.arguments
    return v.top_p < 1 or (v.top_k or 0) > 0 or (v.min_p or 0) > 0


def _groups_may_be_split(v: Values) -> bool:
    """Return whether a generation batch may have no whole groups, for all that is known of the number of processes."""
    if not v.is_set("group", "device_batch", "steps", "accumulation"):
        return False
    divisor = _process_divisor(v)
    if v.all_processes is not None:
        return _first(v.all_processes) % divisor != 0
    if v.processes is not None:
        return _first(v.processes) * _first(v.nodes) % divisor != 0
    return divisor > 1


def _first(value: Any) -> Any:
    """Return the first of several values. A launcher's flag seems to have several before the name of the script."""
    return value[0] if isinstance(value, list) else value


def _process_divisor(v: Values) -> int:
    """Return the smallest number of processes with which a generation batch has whole groups.

    Every valid number of processes is a multiple of it.
    """
    if v.batch is not None:
        return 1
    steps = v.accumulation if v.steps is None else v.steps
    return v.group // gcd(v.group, v.device_batch * steps)


def _penalizes(v: Values) -> bool:
    """Return whether a penalty changes the probabilities of tokens that are in the answer already."""
    # An engine takes None for no penalty.
    if (v.repetition or 1) != 1:
        return True
    # Raises an error if the arguments of the engine are not known.
    _ = v.arguments
    return any((penalty or 0) != 0 for penalty in (v.presence, v.frequency))


LOSS_SETTINGS = (
    "epsilon",
    "epsilon_high",
    "delta",
    "importance_sampling_level",
    "sapo_temperature_neg",
    "sapo_temperature_pos",
    "vespo_k_neg",
    "vespo_k_pos",
    "vespo_lambda_neg",
    "vespo_lambda_pos",
)
"""The settings of losses that some of them do not read."""


SAMPLING = ("top_p", "top_k", "min_p", "repetition_penalty")
"""The settings that act on sampling alone, which ``generation_kwargs`` may override. The trainer divides its logits by
``temperature`` whatever the engine does."""


SOURCE = "trl 1.16.0, trl/trainer/grpo_trainer.py, _generate_and_score_completions and _compute_loss"


TRL = Framework(
    key="trl",
    title="TRL",
    version="1.16.0",
    defaults={
        "beta": 0.0,
        "delta": None,
        "epsilon": 0.2,
        "epsilon_high": None,
        "generation_batch_size": None,
        "generation_kwargs": None,
        "generation_kwargs.frequency_penalty": None,
        "generation_kwargs.presence_penalty": None,
        "generation_kwargs.temperature": None,
        "gradient_accumulation_steps": 1,
        "importance_sampling_level": "token",
        "learning_rate": 1e-6,
        "loss_type": "dapo",
        "min_p": None,
        "model_name_or_path": None,
        # Flags of torchrun and of accelerate, not of TRL.
        "nnodes": 1,
        "nproc_per_node": None,
        "num_processes": None,
        "num_generations": 8,
        "num_iterations": 1,
        "optim": "adamw_torch_fused",
        "per_device_train_batch_size": 8,
        "repetition_penalty": 1.0,
        "sapo_temperature_neg": 1.05,
        "sapo_temperature_pos": 1.0,
        "steps_per_generation": None,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "use_liger_kernel": False,
        "use_peft": False,
        "use_vllm": False,
        "vespo_k_neg": 3.0,
        "vespo_k_pos": 2.0,
        "vespo_lambda_neg": 2.0,
        "vespo_lambda_pos": 3.0,
        "vllm_importance_sampling_correction": True,
        # Not a setting of GRPOConfig: True if the script loads the model from a trained adapter.
        "model.adapter": False,
    },
    marks=(
        ("importance_sampling_level",),
        ("vllm_importance_sampling_*",),
        ("steps_per_generation",),
        ("generation_batch_size",),
        # Programs for MLX have num_generations too, but neither TRL's nor transformers' names of these.
        *each_with(
            "num_generations",
            "max_completion_length",
            "model_name_or_path",
            "num_train_epochs",
            "per_device_train_batch_size",
            "use_vllm",
        ),
    ),
    mark_among_own="num_generations",
    programs=("trl grpo", "trl.scripts.grpo", "trl/scripts/grpo"),
    older_names={"use_liger_loss": "use_liger_kernel"},
    # Both engines update their arguments with these.
    overriding={f"generation_kwargs.{name}": name for name in SAMPLING},
    optional=frozenset(
        # The arguments of the script and its launcher, and settings without which TRL did as with their defaults.
        {
            "delta",
            "generation_batch_size",
            "generation_kwargs",
            "generation_kwargs.frequency_penalty",
            "generation_kwargs.presence_penalty",
            "generation_kwargs.temperature",
            "importance_sampling_level",
            "min_p",
            "model.adapter",
            "model_name_or_path",
            "nnodes",
            "nproc_per_node",
            "num_iterations",
            "num_processes",
            "optim",
            "repetition_penalty",
            "steps_per_generation",
            "use_liger_kernel",
            "use_peft",
        }
    ),
    stable=frozenset(
        {"gradient_accumulation_steps", "learning_rate", "num_generations", "per_device_train_batch_size"}
    ),
    added=frozenset(
        {
            "accept_idle_clip",
            "anchor",
            "audit_detail",
            "audit_steps",
            "certify",
            "method",
            "record",
            "watched",
        }
    ),
    rules=(
        CLIP_CANNOT_ACT(
            reads={
                "high": "epsilon_high",
                "low": "epsilon",
                "delta": "delta",
                "loss": "loss_type",
                **UPDATES,
            },
            condition=lambda v: v.is_set("high", "low", "delta") and v.loss in CLIPS and _makes_one_update(v),
            details="epsilon is {low}, epsilon_high {high} and delta {delta}.",
            fix="set num_iterations above 1, or steps_per_generation above gradient_accumulation_steps; or "
            "remove epsilon, epsilon_high and delta",
            source="huggingface/trl issue 3120; " + SOURCE,
        ),
        TRUNCATED_SAMPLING(
            reads={
                "top_p": "top_p",
                "top_k": "top_k",
                "min_p": "min_p",
                "arguments": "generation_kwargs",
                "vllm": "use_vllm",
                "weight": "vllm_importance_sampling_correction",
            },
            condition=lambda v: _truncates_sampling(v) and v.vllm and v.weight,
            details="top_p is {top_p}, top_k {top_k}, min_p {min_p}.",
            fix="top_p=1.0, top_k=0 and min_p=None, also in generation_kwargs; or "
            "vllm_importance_sampling_correction=False",
            source="huggingface/trl issue 6789; " + SOURCE,
        ),
        TRUNCATED_WITHOUT_WEIGHT(
            reads={
                "top_p": "top_p",
                "top_k": "top_k",
                "min_p": "min_p",
                "arguments": "generation_kwargs",
                "vllm": "use_vllm",
                "weight": "vllm_importance_sampling_correction",
            },
            condition=lambda v: (
                _truncates_sampling(v) and v.get("top_k") != 1 and not (v.get("vllm") and v.get("weight"))
            ),
            details="top_p is {top_p}, top_k {top_k}, min_p {min_p}.",
            fix="top_p=1.0, top_k=0 and min_p=None, also in generation_kwargs",
            source=KEEP_SAMPLING_MASK.format("trl 1.16.0, trl/trainer/utils.py:577 (logits / temperature)"),
        ),
        GREEDY_SAMPLING(
            reads={"temperature": "temperature", "top_k": "top_k", "group": "num_generations"},
            details="temperature is {temperature}, top_k {top_k}, num_generations {group}. TRL "
            "refuses a temperature of 0.",
            fix="temperature=1.0 and top_k=0",
            source="trl 1.16.0, trl/trainer/grpo_trainer.py:1132 (temperature) and :1134 (top_k); "
            "trl/trainer/utils.py:577 divides by the temperature",
        ),
        TEMPERATURE_NEAR_ZERO(
            reads={"temperature": "temperature", "group": "num_generations"},
            details="temperature is {temperature}, num_generations {group}.",
            fix="temperature=1.0",
            source="trl 1.16.0, trl/trainer/grpo_trainer.py:1132 (temperature)",
        ),
        Rule(
            id="engine-temperature",
            severity="fix",
            title="answers are sampled at another temperature than they are trained at",
            reads={"engine": "generation_kwargs.temperature", "temperature": "temperature"},
            condition=lambda v: v.engine is not None and v.engine != v.temperature,
            details="The engine samples at {engine}, from generation_kwargs, and the trainer divides its logits by the "
            "temperature {temperature}. The gradient is not that of the policy that answers.",
            fix="temperature={engine}, and none in generation_kwargs",
            source="trl 1.16.0, trl/trainer/grpo_trainer.py:1172 (generation_kwargs) and trl/trainer/utils.py:577 "
            "(logits / temperature)",
        ),
        SAMPLING_PENALTY(
            reads={
                "repetition": "repetition_penalty",
                "arguments": "generation_kwargs",
                "presence": "generation_kwargs.presence_penalty",
                "frequency": "generation_kwargs.frequency_penalty",
            },
            condition=_penalizes,
            details="repetition_penalty is {repetition}, presence_penalty {presence}, "
            "frequency_penalty {frequency}.",
            fix="repetition_penalty=1.0, and no penalty in generation_kwargs",
            source="trl 1.16.0, trl/trainer/grpo_trainer.py:1131 (repetition_penalty) and trl/trainer/utils.py:577 "
            "(logits / temperature); PrimeIntellect-ai/prime-rl pull request 886 on the size of the effect",
        ),
        Rule(
            id="liger-drops-the-weight",
            severity="note",
            title="Liger's loss leaves out the importance weight in TRL before 0.29",
            reads={
                "liger": "use_liger_kernel",
                "vllm": "use_vllm",
                "weight": "vllm_importance_sampling_correction",
            },
            condition=lambda v: bool(v.liger and v.vllm and v.weight),
            details="TRL before 0.29 does not pass the importance weight of vLLM's answers to Liger's loss; a "
            "gradient norm 100 times larger was reported. TRL 1.14 and later do not use Liger's loss.",
            fix="trl>=0.29 with a liger-kernel that accepts vllm_is_ratio, or {liger.name}=False",
            source="linkedin/Liger-Kernel issue 1082 and pull request 1088; huggingface/trl pull request 5031",
        ),
        GSPO_CLIP(
            reads={
                "level": "importance_sampling_level",
                "low": "epsilon",
                "high": "epsilon_high",
                "loss": "loss_type",
                **UPDATES,
            },
            condition=lambda v: (
                v.level == "sequence"
                and v.loss in CLIPS[:-1]
                and largest(v.low, v.high) >= 0.05
                # With one update, no clip has an effect, and the rule clip-cannot-act says so.
                and not _makes_one_update(v)
            ),
            details="epsilon is {low}, epsilon_high {high}.",
            fix="epsilon=3e-4, epsilon_high=4e-4",
        ),
        setting_without_effect(
            "trl",
            {name: name for name in LOSS_SETTINGS},
            "loss_type",
            "trl 1.16.0, trl/trainer/grpo_trainer.py, _compute_loss",
        ),
        BATCH_DOES_NOT_DIVIDE(
            title="a generation batch is no multiple of the group size",
            reads={"batch": "generation_batch_size", "group": "num_generations"},
            condition=lambda v: v.batch is not None and v.batch % v.group != 0,
            details="generation_batch_size {batch} is no multiple of num_generations {group}: GRPOConfig refuses "
            "it.",
            fix="a generation_batch_size that is a multiple of num_generations",
            source="trl 1.16.0, trl/trainer/grpo_config.py, __post_init__",
        ),
        Rule(
            id="batch-set-twice",
            severity="fix",
            title="the generation batch is set twice",
            reads={"batch": "generation_batch_size", "steps": "steps_per_generation"},
            condition=lambda v: v.batch is not None and v.steps is not None,
            details="generation_batch_size and steps_per_generation are both set: GRPOConfig refuses it.",
            fix="one of the two",
            source="trl 1.16.0, trl/trainer/grpo_config.py, __post_init__",
            only_before_start=True,
        ),
        Rule(
            id="processes-must-divide",
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
            condition=_groups_may_be_split,
            details="A generation batch is per_device_train_batch_size {device_batch} times steps_per_generation "
            "(by default gradient_accumulation_steps, {accumulation}) for each process. It is a multiple of "
            "num_generations {group} only for some numbers of processes; GRPOConfig refuses the others, "
            "including a single process.",
            fix="a number of processes for which the product is a multiple of num_generations",
            source="trl 1.16.0, trl/trainer/grpo_config.py, __post_init__",
        ),
        GROUP_OF_ONE(
            reads={"group": "num_generations"},
            condition=lambda v: v.group < 2,
            details="GRPOConfig refuses num_generations {group}.",
            fix="num_generations=8",
            source="trl 1.16.0, trl/trainer/grpo_config.py, __post_init__",
        ),
        GROUP_OF_TWO(
            reads={"group": "num_generations"},
            condition=lambda v: v.group == 2,
            fix="num_generations=8, or scale_rewards='none'",
        ),
        Rule(
            id="lora-reference",
            severity="note",
            title="the KL term is relative to the base model, not to the adapter, in TRL before 0.27",
            reads={"adapter": "model.adapter", "beta": "beta"},
            condition=lambda v: bool(v.adapter and v.beta),
            details="The model has an adapter that is already trained, and beta is {beta}. TRL before 0.27 "
            "computes the reference with the adapter turned off, so the KL is large at the first step and pulls "
            "the policy back to the base model.",
            fix="trl>=0.27, which keeps a copy of the adapter; or merge the adapter first; or beta=0.0",
            source="huggingface/trl issue 3194 and pull request 4723",
        ),
        NEGATIVE_KL(
            reads={"beta": "beta"},
            condition=lambda v: v.beta < 0,
            details="beta is {beta}.",
            fix="beta=0.0, or a positive one",
            source="trl 1.16.0, trl/trainer/grpo_trainer.py:3150",
        ),
        MEAN_DEPENDS_ON_MICRO_BATCH(
            severity="note",
            reads={
                "loss": "loss_type",
                "accumulation": "gradient_accumulation_steps",
                "device_batch": "per_device_train_batch_size",
            },
            condition=lambda v: v.loss == "bnpo" and v.accumulation > 1,
            details="loss_type 'bnpo' divides by the tokens of each micro-batch: a token weighs more in a "
            "micro-batch of short answers, and another per_device_train_batch_size gives another loss.",
            fix="loss_type='dapo', which divides by the tokens of the whole batch",
            source=SOURCE,
        ),
        LEARNING_RATE(
            reads={
                "rate": "learning_rate",
                "model": "model_name_or_path",
                "lora": "use_peft",
                "optimizer": "optim",
            },
            fix="learning_rate=1e-6, or 1e-5 with LoRA",
        ),
    ),
)
