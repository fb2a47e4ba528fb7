"""prime-rl: its settings, their defaults, and the rules for its configurations."""

from __future__ import annotations

from rlvet.lint.framework import Framework, each_with
from rlvet.lint.topics import (
    BATCH_DOES_NOT_DIVIDE,
    GREEDY_SAMPLING,
    GROUP_OF_ONE,
    LEARNING_RATE,
    SAMPLING_PENALTY,
    TEMPERATURE_NEAR_ZERO,
    TRUNCATED_SAMPLING,
)

SAMPLING = "orchestrator.train.sampling.extra_body."


PRIME_RL = Framework(
    key="prime-rl",
    title="prime-rl",
    version="0.8.0",
    defaults={
        "model.name": None,
        "orchestrator.algo.type": "grpo",
        "orchestrator.batch_size": None,
        "orchestrator.group_size": 1,
        "orchestrator.token_batch_size": None,
        # Not a setting: the smallest group size of the sources.
        "orchestrator.train.source.group_size": None,
        "orchestrator.train.sampling.extra_body.frequency_penalty": None,
        "orchestrator.train.sampling.extra_body.min_p": None,
        "orchestrator.train.sampling.extra_body.presence_penalty": None,
        "orchestrator.train.sampling.extra_body.repetition_penalty": None,
        "orchestrator.train.sampling.extra_body.top_k": None,
        "orchestrator.train.sampling.extra_body.top_p": None,
        "orchestrator.train.sampling.temperature": 1.0,
        "trainer.model.experimental.lora.rank": None,
        "trainer.model.lora.rank": None,
        "trainer.optim.lr": 1e-6,
        "trainer.optim.type": "adamw",
    },
    marks=(
        ("orchestrator.*",),
        # The files of the orchestrator alone and of the trainer alone have names without a prefix.
        ("rollouts_per_example",),
        *each_with(
            "group_size",
            "train.source.*",
            "train.env.*",
            "train.sampling.*",
            "env.*",
            "sampling.*",
            "buffer.*",
        ),
        *each_with(
            "optim.lr",
            "loss.adv_tau",
            "loss.dppo_mask_high",
            "loss.dppo_mask_low",
            "loss.kl_tau",
            "loss.ratio_type",
            "loss.token_mask_high",
            "loss.token_mask_low",
            "weight_broadcast.*",
        ),
    ),
    older_names={"orchestrator.rollouts_per_example": "orchestrator.group_size"},
    rules=(
        TRUNCATED_SAMPLING(
            reads={
                "top_p": f"{SAMPLING}top_p",
                "top_k": f"{SAMPLING}top_k",
                "min_p": f"{SAMPLING}min_p",
            },
            condition=lambda v: (
                (v.top_p is not None and v.top_p < 1) or (v.top_k or 0) > 0 or (v.min_p or 0) > 0
            ),
            effect="",
            details="prime-rl's losses weight every token by the ratio of the trainer's to the engine's "
            "probability, and version 0.8.0 computes the trainer's over all tokens. top_p is {top_p}, top_k "
            "{top_k}, min_p {min_p}.",
            fix="remove top_p, top_k and min_p from orchestrator.train.sampling.extra_body",
            source="prime-rl 0.8.0, src/prime_rl/trainer/rl/loss.py, default_loss_fn; PrimeIntellect-ai/prime-rl "
            "pull request 3431; huggingface/trl issue 6789",
        ),
        GREEDY_SAMPLING(
            reads={
                "temperature": "orchestrator.train.sampling.temperature",
                "top_k": f"{SAMPLING}top_k",
                "group": "orchestrator.group_size",
            },
            details="temperature is {temperature}, top_k {top_k}, group_size {group}.",
            fix="temperature = 1.0 under [orchestrator.train.sampling]",
            source="prime-rl 0.8.0, packages/prime-rl-configs/src/prime_rl/configs/orchestrator.py, "
            "TrainSamplingConfig",
        ),
        TEMPERATURE_NEAR_ZERO(
            reads={
                "temperature": "orchestrator.train.sampling.temperature",
                "group": "orchestrator.group_size",
            },
            details="temperature is {temperature}, group_size {group}.",
            fix="temperature = 1.0 under [orchestrator.train.sampling]",
            source="prime-rl 0.8.0, packages/prime-rl-configs/src/prime_rl/configs/orchestrator.py, "
            "TrainSamplingConfig",
        ),
        SAMPLING_PENALTY(
            reads={
                "repetition": f"{SAMPLING}repetition_penalty",
                "presence": f"{SAMPLING}presence_penalty",
                "frequency": f"{SAMPLING}frequency_penalty",
            },
            condition=lambda v: (v.repetition or 1) != 1 or (v.presence or 0) != 0 or (v.frequency or 0) != 0,
            details="repetition_penalty is {repetition}, presence_penalty {presence}, "
            "frequency_penalty {frequency}.",
            fix="remove the penalties from orchestrator.train.sampling.extra_body",
            source="prime-rl 0.8.0, src/prime_rl/trainer/rl/train.py (logits are only divided by the temperatures); "
            "PrimeIntellect-ai/prime-rl pull request 886 on the size of the effect",
        ),
        BATCH_DOES_NOT_DIVIDE(
            title="a batch is no multiple of the group size",
            reads={
                "batch": "orchestrator.batch_size",
                "group": "orchestrator.group_size",
                "tokens": "orchestrator.token_batch_size",
            },
            condition=lambda v: v.tokens is None and (128 if v.batch is None else v.batch) % v.group != 0,
            details="orchestrator.batch_size is {batch:128 by default}, which is no multiple of {group.name} {group}: "
            "prime-rl refuses it.",
            fix="an orchestrator.batch_size that is a multiple of {group.name}",
            source="prime-rl 0.8.0, packages/prime-rl-configs/src/prime_rl/configs/orchestrator.py, "
            "resolve_batching",
        ),
        GROUP_OF_ONE(
            reads={
                "group": "orchestrator.train.source.group_size",
                "algorithm": "orchestrator.algo.type",
            },
            condition=lambda v: v.algorithm in ("grpo", "max_rl", "echo") and v.group == 1,
            details="{algorithm} subtracts the mean of the group, so every advantage is 0. 1 is the default of "
            "orchestrator.group_size.",
            fix="orchestrator.group_size = 16",
            source="prime-rl 0.8.0, src/prime_rl/orchestrator/algo/grpo.py",
        ),
        LEARNING_RATE(
            reads={
                "rate": "trainer.optim.lr",
                "model": "model.name",
                "lora": "trainer.model.lora.rank",
                "older_lora": "trainer.model.experimental.lora.rank",
                "optimizer": "trainer.optim.type",
            },
            fix="lr = 1e-6 under [trainer.optim], or 1e-5 with LoRA",
        ),
    ),
)
