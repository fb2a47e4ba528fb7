"""OpenRLHF: its settings, their defaults, and the rules for its configurations."""

from __future__ import annotations

from rlvet.lint.framework import Framework, each_with
from rlvet.lint.rules import Rule
from rlvet.lint.topics import (
    ASYNCHRONOUS_ANCHOR,
    BATCH_DOES_NOT_DIVIDE,
    CLIP_CANNOT_ACT,
    CRITIC_AND_GROUP,
    ENTROPY_BONUS,
    ENTROPY_SOURCE,
    GREEDY_SAMPLING,
    GROUP_OF_ONE,
    GROUP_OF_TWO,
    GSPO_CLIP,
    KEEP_SAMPLING_MASK,
    LARGEST_ENTROPY_COEFFICIENT,
    LEARNING_RATE,
    TEMPERATURE_NEAR_ZERO,
    TRUNCATED_SAMPLING,
    TRUNCATED_WITHOUT_WEIGHT,
)
from rlvet.lint.values import Values, largest

GROUPS = ("rloo", "reinforce_baseline", "group_norm", "dr_grpo")
CLIP = {"pair": "actor.eps_clip_low_high", "clip": "actor.eps_clip"}
CORRECTION = {
    "weight": "algo.advantage.is_correction_enable",
    "loss": "actor.policy_loss_type",
}


def _batch_is_not_divisible(v: Values) -> bool:
    """Return whether the batch is no multiple of the micro-batches of all processes."""
    processes = v.gpus * v.nodes // (v.ring * v.tensor)
    return v.train % (v.micro * processes) != 0


def _group_has_a_critic(v: Values) -> bool:
    """Return whether groups are sampled with the default estimator, and no critic is configured."""
    if any(name.startswith(("critic.", "critic_")) for name in v.settings):
        return False
    return v.setting("estimator") is None and v.estimator == "gae" and v.group > 1


OPENRLHF = Framework(
    key="openrlhf",
    title="OpenRLHF",
    version="0.11.0",
    defaults={
        "actor.adam.lr": 1e-6,
        "actor.entropy_coef": None,
        "actor.eps_clip": 0.2,
        "actor.eps_clip_low_high": None,
        "actor.model_name_or_path": None,
        "actor.num_gpus_per_node": 8,
        "actor.num_nodes": 1,
        "actor.optim": "adam",
        "actor.policy_loss_type": "ppo",
        "algo.advantage.estimator": "gae",
        "algo.advantage.is_correction_enable": False,
        "ds.lora.rank": 0,
        "ds.ring_attn_size": 1,
        "ds.tensor_parallel_size": 1,
        "rollout.batch_size": 1024,
        "rollout.n_samples_per_prompt": 1,
        "rollout.temperature": 1.0,
        "rollout.top_p": 1.0,
        "train.async_enable": False,
        "train.batch_size": 128,
        "train.dynamic_batch_enable": False,
        "train.max_epochs": 1,
        "train.micro_batch_size": 1,
    },
    marks=(
        ("algo.advantage.*",),
        ("algo.kl.*",),
        ("rollout.n_samples_per_prompt",),
        ("actor.adam.*",),
        # Names before 0.10.2. ROLL has init_kl_coef too, slime n_samples_per_prompt, DeepSpeed-Chat the actor's rate.
        ("enable_vllm_is_correction",),
        *each_with(
            "actor_learning_rate", "advantage_estimator", "n_samples_per_prompt", "rollout_batch_size"
        ),
        *each_with("micro_rollout_batch_size", "advantage_estimator", "actor_learning_rate", "init_kl_coef"),
    ),
    programs=("openrlhf.cli.train_ppo",),
    older_names={
        "actor_learning_rate": "actor.adam.lr",
        "actor_num_gpus_per_node": "actor.num_gpus_per_node",
        "actor_num_nodes": "actor.num_nodes",
        "advantage_estimator": "algo.advantage.estimator",
        "async_train": "train.async_enable",
        "entropy_loss_coef": "actor.entropy_coef",
        "enable_vllm_is_correction": "algo.advantage.is_correction_enable",
        "eps_clip": "actor.eps_clip",
        "eps_clip_low_high": "actor.eps_clip_low_high",
        "init_kl_coef": "algo.kl.init_coef",
        "lora_rank": "ds.lora.rank",
        "max_epochs": "train.max_epochs",
        "micro_train_batch_size": "train.micro_batch_size",
        "n_samples_per_prompt": "rollout.n_samples_per_prompt",
        "policy_loss_type": "actor.policy_loss_type",
        "pretrain": "actor.model_name_or_path",
        "ring_attn_size": "ds.ring_attn_size",
        "rollout_batch_size": "rollout.batch_size",
        "temperature": "rollout.temperature",
        "top_p": "rollout.top_p",
        "train_batch_size": "train.batch_size",
        "use_dynamic_batch": "train.dynamic_batch_enable",
    },
    rules=(
        CLIP_CANNOT_ACT(
            reads={
                **CLIP,
                "prompts": "rollout.batch_size",
                "group": "rollout.n_samples_per_prompt",
                "train": "train.batch_size",
                "epochs": "train.max_epochs",
                **CORRECTION,
            },
            condition=lambda v: (
                v.is_set("pair", "clip")
                and v.prompts * v.group == v.train
                and v.epochs == 1
                and not (v.loss == "gspo" and v.weight)
            ),
            details="{prompts} prompts with {group} answers make one batch of {train}.",
            fix="set {train.name} below the number of answers, or {epochs.name} above 1; or remove the clip settings",
            source="BytedTsinghua-SIA/DAPO issue 23; OpenRLHF 0.11.0, openrlhf/trainer/ray/ppo_actor.py, "
            "ppo_train",
        ),
        ASYNCHRONOUS_ANCHOR(
            reads={"asynchronous": "train.async_enable", "weight": "algo.advantage.is_correction_enable"},
            condition=lambda v: bool(v.asynchronous and not v.weight),
            details="No importance weight corrects it.",
            fix="--algo.advantage.is_correction_enable (before 0.10.2: --enable_vllm_is_correction)",
            source="OpenRLHF 0.11.0, openrlhf/models/loss.py, PolicyLoss; radixark/miles pull request 1829",
        ),
        TRUNCATED_SAMPLING(
            reads={"top_p": "rollout.top_p", "weight": "algo.advantage.is_correction_enable"},
            condition=lambda v: v.top_p < 1 and bool(v.weight),
            details="{top_p.name} is {top_p}.",
            fix="--{top_p.name} 1.0",
            source="huggingface/trl issue 6789, of the same arithmetic; OpenRLHF 0.11.0, "
            "openrlhf/cli/train_ppo_ray.py (processed_logprobs)",
        ),
        TRUNCATED_WITHOUT_WEIGHT(
            reads={"top_p": "rollout.top_p", "weight": "algo.advantage.is_correction_enable"},
            condition=lambda v: v.top_p < 1 and not v.get("weight"),
            details="{top_p.name} is {top_p}.",
            fix="--{top_p.name} 1.0",
            source=KEEP_SAMPLING_MASK.format(
                "OpenRLHF 0.11.0, openrlhf/models/utils.py:141 (logits are only divided by the temperature)"
            ),
        ),
        GREEDY_SAMPLING(
            reads={"temperature": "rollout.temperature", "group": "rollout.n_samples_per_prompt"},
            details="{temperature.name} is {temperature}, {group.name} {group}.",
            fix="--{temperature.name} 1.0",
            source="OpenRLHF 0.11.0, openrlhf/trainer/ppo_utils/samples_generator.py:204",
        ),
        TEMPERATURE_NEAR_ZERO(
            reads={"temperature": "rollout.temperature", "group": "rollout.n_samples_per_prompt"},
            details="{temperature.name} is {temperature}, {group.name} {group}.",
            fix="--{temperature.name} 1.0",
            source="OpenRLHF 0.11.0, openrlhf/trainer/ppo_utils/samples_generator.py:204",
        ),
        ENTROPY_BONUS(
            reads={"coefficient": "actor.entropy_coef"},
            condition=lambda v: (v.coefficient or 0) > LARGEST_ENTROPY_COEFFICIENT,
            details="{coefficient.name} is {coefficient}.",
            fix="--{coefficient.name} 0",
            source=ENTROPY_SOURCE.format("OpenRLHF 0.11.0, openrlhf/trainer/ray/ppo_actor.py:345"),
        ),
        CRITIC_AND_GROUP(
            reads={"group": "rollout.n_samples_per_prompt", "estimator": "algo.advantage.estimator"},
            condition=_group_has_a_critic,
            fix="--{estimator.name} group_norm; or --{estimator.name} gae, if PPO is meant",
            source="OpenRLHF 0.11.0, openrlhf/cli/train_ppo_ray.py:481 (default gae)",
        ),
        GSPO_CLIP(
            reads={"loss": "actor.policy_loss_type", **CLIP},
            condition=lambda v: v.loss == "gspo" and largest(*(v.pair or [v.clip])) >= 0.05,
            details="{pair.name} is {pair}, {clip.name} {clip}.",
            fix="--{pair.name} 3e-4 4e-4",
        ),
        BATCH_DOES_NOT_DIVIDE(
            title="a batch is no multiple of the micro-batches of all processes",
            reads={
                "train": "train.batch_size",
                "micro": "train.micro_batch_size",
                "gpus": "actor.num_gpus_per_node",
                "nodes": "actor.num_nodes",
                "ring": "ds.ring_attn_size",
                "tensor": "ds.tensor_parallel_size",
                "dynamic": "train.dynamic_batch_enable",
            },
            condition=lambda v: not v.dynamic and _batch_is_not_divisible(v),
            details="{train.name} {train} is no multiple of {micro.name} {micro} times the actor's processes "
            "({gpus} times {nodes} GPUs): DeepSpeed refuses it.",
            fix="a {train.name} that is a multiple of the product",
            source="OpenRLHF 0.11.0, openrlhf/utils/deepspeed/deepspeed.py (accumulated_gradient)",
        ),
        Rule(
            id="batch-larger-than-answers",
            severity="look",
            title="a batch is larger than the answers of a step",
            reads={
                "train": "train.batch_size",
                "prompts": "rollout.batch_size",
                "group": "rollout.n_samples_per_prompt",
            },
            condition=lambda v: v.train > v.prompts * v.group,
            details="{train.name} {train} is more than {prompts} prompts times {group} answers: a step ends "
            "before one update is complete, and with dynamic batches it makes none.",
            fix="a {train.name} of at most {prompts.name} times {group.name}",
            source="OpenRLHF 0.11.0, openrlhf/trainer/ppo_utils/replay_buffer.py, setup_dynamic_batch",
        ),
        GROUP_OF_ONE(
            reads={"group": "rollout.n_samples_per_prompt", "estimator": "algo.advantage.estimator"},
            condition=lambda v: v.estimator in GROUPS and v.group == 1,
            details="OpenRLHF refuses {estimator} with {group.name} 1, which is its default.",
            fix="--{group.name} 8",
            source="OpenRLHF 0.11.0, openrlhf/cli/train_ppo_ray.py",
        ),
        GROUP_OF_TWO(
            reads={
                "group": "rollout.n_samples_per_prompt",
                "estimator": "algo.advantage.estimator",
            },
            condition=lambda v: v.estimator == "group_norm" and v.group == 2,
            fix="--{group.name} 8, or --{estimator.name} dr_grpo",
        ),
        LEARNING_RATE(
            reads={
                "rate": "actor.adam.lr",
                "model": "actor.model_name_or_path",
                "lora": "ds.lora.rank",
                "optimizer": "actor.optim",
            },
            fix="--{rate.name} 1e-6, or 1e-5 with LoRA",
        ),
    ),
)
