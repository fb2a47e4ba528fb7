"""Rules for configurations of OpenRLHF."""

from __future__ import annotations

from rlvet.lint.learning_rate import RATE_HAPPENS, RATE_SOURCE, learning_rate_is_high
from rlvet.lint.rules import (
    ASYNCHRONOUS,
    ENTROPY_BONUS,
    ENTROPY_SOURCE,
    GREEDY,
    GROUP_AND_CRITIC,
    GSPO_PAPER,
    GSPO_RANGE,
    KEEP_SAMPLING_MASK,
    LARGEST_ENTROPY_COEFFICIENT,
    NEARLY_GREEDY,
    ONE_ANSWER,
    ONE_UPDATE,
    TRUNCATED_SAMPLING,
    TWO_ANSWERS,
    UNWEIGHTED_TRUNCATION,
    Rule,
    Values,
    largest,
    samples_greedily,
    samples_nearly_greedily,
)

OPENRLHF_GROUPS = ("rloo", "reinforce_baseline", "group_norm", "dr_grpo")
OPENRLHF_CLIP = {"pair": "actor.eps_clip_low_high", "clip": "actor.eps_clip"}
OPENRLHF_CORRECTION = {
    "weight": "algo.advantage.is_correction_enable",
    "loss": "actor.policy_loss_type",
}


def _openrlhf_batch_is_not_divisible(v: Values) -> bool:
    """Return whether the batch is no multiple of the micro-batches of all processes."""
    processes = v.gpus * v.nodes // (v.ring * v.tensor)
    return v.train % (v.micro * processes) != 0


def _openrlhf_group_has_a_critic(v: Values) -> bool:
    """Return whether groups are sampled with the default estimator, and no critic is configured."""
    if any(name.startswith(("critic.", "critic_")) for name in v.settings):
        return False
    return v.setting("estimator") is None and v.estimator == "gae" and v.group > 1


OPENRLHF_RULES = (
    Rule(
        id="clip-cannot-act",
        framework="openrlhf",
        severity="look",
        title="the clip has no effect",
        reads={
            **OPENRLHF_CLIP,
            "prompts": "rollout.batch_size",
            "group": "rollout.n_samples_per_prompt",
            "train": "train.batch_size",
            "epochs": "train.max_epochs",
            **OPENRLHF_CORRECTION,
        },
        condition=lambda v: (
            v.is_set("pair", "clip")
            and v.prompts * v.group == v.train
            and v.epochs == 1
            and not (v.loss == "gspo" and v.weight)
        ),
        happens=ONE_UPDATE + " {prompts} prompts with {group} answers make one batch of {train}.",
        fix="set {train.name} below the number of answers, or {epochs.name} above 1; or remove the clip settings",
        source="BytedTsinghua-SIA/DAPO issue 23; OpenRLHF 0.11.0, openrlhf/trainer/ray/ppo_actor.py, "
        "ppo_train",
    ),
    Rule(
        id="asynchronous-anchor",
        framework="openrlhf",
        severity="look",
        title="the ratio is not relative to the sampling policy",
        reads={"asynchronous": "train.async_enable", "weight": "algo.advantage.is_correction_enable"},
        condition=lambda v: bool(v.asynchronous and not v.weight),
        happens=ASYNCHRONOUS + " No importance weight corrects it.",
        fix="--algo.advantage.is_correction_enable (before 0.10.2: --enable_vllm_is_correction)",
        source="OpenRLHF 0.11.0, openrlhf/models/loss.py, PolicyLoss; radixark/miles pull request 1829",
    ),
    Rule(
        id="truncated-sampling",
        framework="openrlhf",
        severity="look",
        title="sampling is truncated, and importance weights are used",
        reads={"top_p": "rollout.top_p", "weight": "algo.advantage.is_correction_enable"},
        condition=lambda v: v.top_p < 1 and bool(v.weight),
        happens=TRUNCATED_SAMPLING + " {top_p.name} is {top_p}.",
        fix="--{top_p.name} 1.0",
        source="huggingface/trl issue 6789, of the same arithmetic; OpenRLHF 0.11.0, "
        "openrlhf/cli/train_ppo_ray.py (processed_logprobs)",
    ),
    Rule(
        id="truncated-without-weight",
        framework="openrlhf",
        severity="note",
        title="sampling is truncated",
        reads={"top_p": "rollout.top_p", "weight": "algo.advantage.is_correction_enable"},
        condition=lambda v: v.top_p < 1 and not v.get("weight"),
        happens=UNWEIGHTED_TRUNCATION + " {top_p.name} is {top_p}.",
        fix="--{top_p.name} 1.0",
        source=KEEP_SAMPLING_MASK.format(
            "OpenRLHF 0.11.0, openrlhf/models/utils.py:141 (logits are only divided by the temperature)"
        ),
    ),
    Rule(
        id="greedy-sampling",
        framework="openrlhf",
        severity="fix",
        title="the answers to a prompt are all the same",
        reads={"temperature": "rollout.temperature", "group": "rollout.n_samples_per_prompt"},
        condition=samples_greedily,
        happens=GREEDY + "{temperature.name} is {temperature}, {group.name} {group}.",
        fix="--{temperature.name} 1.0",
        source="OpenRLHF 0.11.0, openrlhf/trainer/ppo_utils/samples_generator.py:204",
    ),
    Rule(
        id="temperature-near-zero",
        framework="openrlhf",
        severity="look",
        title="the temperature is near 0",
        reads={"temperature": "rollout.temperature", "group": "rollout.n_samples_per_prompt"},
        condition=samples_nearly_greedily,
        happens=NEARLY_GREEDY + "{temperature.name} is {temperature}, {group.name} {group}.",
        fix="--{temperature.name} 1.0",
        source="OpenRLHF 0.11.0, openrlhf/trainer/ppo_utils/samples_generator.py:204",
    ),
    Rule(
        id="entropy-bonus",
        framework="openrlhf",
        severity="look",
        title="the bonus for entropy is far above published ones",
        reads={"coefficient": "actor.entropy_coef"},
        condition=lambda v: (v.coefficient or 0) > LARGEST_ENTROPY_COEFFICIENT,
        happens=ENTROPY_BONUS + "{coefficient.name} is {coefficient}.",
        fix="--{coefficient.name} 0",
        source=ENTROPY_SOURCE.format("OpenRLHF 0.11.0, openrlhf/trainer/ray/ppo_actor.py:345"),
    ),
    Rule(
        id="critic-and-group",
        framework="openrlhf",
        severity="look",
        title="the answers of a group are not compared",
        reads={"group": "rollout.n_samples_per_prompt", "estimator": "algo.advantage.estimator"},
        condition=_openrlhf_group_has_a_critic,
        happens=GROUP_AND_CRITIC,
        fix="--{estimator.name} group_norm; or --{estimator.name} gae, if PPO is meant",
        source="OpenRLHF 0.11.0, openrlhf/cli/train_ppo_ray.py:481 (default gae)",
    ),
    Rule(
        id="gspo-clip",
        framework="openrlhf",
        severity="look",
        title="the clip of GSPO is that of GRPO",
        reads={"loss": "actor.policy_loss_type", **OPENRLHF_CLIP},
        condition=lambda v: v.loss == "gspo" and largest(*(v.pair or [v.clip])) >= 0.05,
        happens=GSPO_RANGE + " {pair.name} is {pair}, {clip.name} {clip}.",
        fix="--{pair.name} 3e-4 4e-4",
        source=GSPO_PAPER,
    ),
    Rule(
        id="batch-does-not-divide",
        framework="openrlhf",
        severity="fix",
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
        condition=lambda v: not v.dynamic and _openrlhf_batch_is_not_divisible(v),
        happens="{train.name} {train} is no multiple of {micro.name} {micro} times the actor's processes "
        "({gpus} times {nodes} GPUs): DeepSpeed refuses it.",
        fix="a {train.name} that is a multiple of the product",
        source="OpenRLHF 0.11.0, openrlhf/utils/deepspeed/deepspeed.py (accumulated_gradient)",
        only_before_start=True,
    ),
    Rule(
        id="batch-larger-than-answers",
        framework="openrlhf",
        severity="look",
        title="a batch is larger than the answers of a step",
        reads={
            "train": "train.batch_size",
            "prompts": "rollout.batch_size",
            "group": "rollout.n_samples_per_prompt",
        },
        condition=lambda v: v.train > v.prompts * v.group,
        happens="{train.name} {train} is more than {prompts} prompts times {group} answers: a step ends "
        "before one update is complete, and with dynamic batches it makes none.",
        fix="a {train.name} of at most {prompts.name} times {group.name}",
        source="OpenRLHF 0.11.0, openrlhf/trainer/ppo_utils/replay_buffer.py, setup_dynamic_batch",
    ),
    Rule(
        id="group-of-one",
        framework="openrlhf",
        severity="fix",
        title="one answer to each prompt",
        reads={"group": "rollout.n_samples_per_prompt", "estimator": "algo.advantage.estimator"},
        condition=lambda v: v.estimator in OPENRLHF_GROUPS and v.group == 1,
        happens=ONE_ANSWER + "OpenRLHF refuses {estimator} with {group.name} 1, which is its default.",
        fix="--{group.name} 8",
        source="OpenRLHF 0.11.0, openrlhf/cli/train_ppo_ray.py",
    ),
    Rule(
        id="group-of-two",
        framework="openrlhf",
        severity="note",
        title="two answers to each prompt",
        reads={
            "group": "rollout.n_samples_per_prompt",
            "estimator": "algo.advantage.estimator",
        },
        condition=lambda v: v.estimator == "group_norm" and v.group == 2,
        happens=TWO_ANSWERS,
        fix="--{group.name} 8, or --{estimator.name} dr_grpo",
        source="Liu et al., Understanding R1-Zero-Like Training, arXiv 2503.20783, section 3.1",
    ),
    Rule(
        id="learning-rate",
        framework="openrlhf",
        severity="look",
        title="the learning rate is far above published ones",
        reads={
            "rate": "actor.adam.lr",
            "model": "actor.model_name_or_path",
            "lora": "ds.lora.rank",
            "optimizer": "actor.optim",
        },
        condition=learning_rate_is_high,
        happens=RATE_HAPPENS,
        fix="--{rate.name} 1e-6, or 1e-5 with LoRA",
        source=RATE_SOURCE,
    ),
)
