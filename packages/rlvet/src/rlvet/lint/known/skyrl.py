"""SkyRL: its settings, their defaults, and the rules for its configurations."""

from __future__ import annotations

from rlvet.lint.framework import Framework
from rlvet.lint.rules import Rule
from rlvet.lint.topics import (
    ASYNCHRONOUS_ANCHOR,
    BATCH_DOES_NOT_DIVIDE,
    CLIP_CANNOT_ACT,
    ENTROPY_BONUS,
    ENTROPY_SOURCE,
    GREEDY_SAMPLING,
    GROUP_OF_ONE,
    GROUP_OF_TWO,
    GSPO_CLIP,
    KEEP_SAMPLING_MASK,
    LARGEST_ENTROPY_COEFFICIENT,
    LEARNING_RATE,
    MEAN_DEPENDS_ON_MICRO_BATCH,
    PENALTY_IGNORED,
    SAMPLING_PENALTY,
    TEMPERATURE_NEAR_ZERO,
    TRUNCATED_SAMPLING,
    TRUNCATED_WITHOUT_WEIGHT,
    setting_without_effect,
)
from rlvet.lint.values import Values, largest

ALGORITHM = "trainer.algorithm."
OLD_PROBABILITIES = (
    "regular",
    "dual_clip",
    "gspo",
    "cispo",
    "clip_cov",
    "kl_cov",
    "sapo",
    "cross_entropy",
    "importance_sampling",
)
BAND = "band"
"""The loss that bandpo's adapter registers. Its ``method`` decides which old probabilities it uses."""
SAMPLER_METHODS = ("CPPO", "DPPO", "IPO", "IcePop", "PrimeRL", "TRM")
"""The methods of bandpo whose ratio is relative to the probabilities of the sampler."""
LOSS = {
    "loss": f"{ALGORITHM}policy_loss_type",
    "anchor": f"{ALGORITHM}cispo.cispo_anchor",
}
LOSS_SETTINGS = {
    name: f"{ALGORITHM}{name}"
    for name in (
        "cispo.cispo_eps_clip_high",
        "cispo.cispo_eps_clip_low",
        "clip_cov.clip_cov_lb",
        "clip_cov.clip_cov_ub",
        "clip_cov.clip_ratio",
        "clip_ratio_c",
        "dppo.delta_high",
        "dppo.delta_low",
        "eps_clip_high",
        "eps_clip_low",
        "kl_cov.kl_cov_frac",
        "kl_cov.ppo_kl_coef",
        "sapo.tau_neg",
        "sapo.tau_pos",
    )
}
"""The settings of losses that some of them do not read."""
ANCHOR = {**LOSS, "method": f"{ALGORITHM}method"}
CORRECTION = {
    "weight": f"{ALGORITHM}off_policy_correction.tis_ratio_type",
    "mask": f"{ALGORITHM}off_policy_correction.sequence_mask_metric",
    "old_weight": f"{ALGORITHM}use_tis",
}
BATCHES = {
    "train": "trainer.train_batch_size",
    "mini": "trainer.policy_mini_batch_size",
}


def _uses_old_probabilities(v: Values) -> bool:
    """Return whether the ratio of the loss is relative to old probabilities that the trainer computes."""
    if v.loss == BAND:
        return not str(v.get("method")).startswith(tuple(f"{name}(" for name in SAMPLER_METHODS))
    return v.loss in OLD_PROBABILITIES and not (v.loss == "cispo" and v.anchor == "rollout")


def _uses_correction(v: Values) -> bool:
    """Return whether an importance weight or a mask corrects the difference between engine and trainer."""
    return bool(v.weight is not None or v.mask is not None or v.old_weight)


def _mini_batch_is_not_divisible(v: Values) -> bool:
    """Return whether the answers of a mini-batch on each GPU are no multiple of the micro-batch."""
    gpus = v.gpus * v.nodes // v.parallel
    answers = v.mini * v.group // gpus
    return answers == 0 or answers % v.micro != 0


SAMPLING = "generator.sampling_params."
TRUNCATION = {
    "top_p": f"{SAMPLING}top_p",
    "top_k": f"{SAMPLING}top_k",
    "min_p": f"{SAMPLING}min_p",
    **LOSS,
    **CORRECTION,
}
PENALTIES = {
    "repetition": f"{SAMPLING}additional_kwargs.repetition_penalty",
    "presence": f"{SAMPLING}additional_kwargs.presence_penalty",
    "frequency": f"{SAMPLING}additional_kwargs.frequency_penalty",
}


def _truncates_without_weight(v: Values) -> bool:
    """Return whether sampling is truncated, and no importance weight is known to be used."""
    if not (v.top_p < 1 or v.top_k > 1 or v.min_p > 0):
        return False
    weight = v.get("weight") is not None or v.get("mask") is not None or bool(v.get("old_weight"))
    return not weight and v.get("loss") not in ("rollout_is", "dppo")


SKYRL = Framework(
    key="skyrl",
    title="SkyRL",
    version="0.3.0",
    defaults={
        "generator.n_samples_per_prompt": 5,
        "generator.sampling_params.additional_kwargs.frequency_penalty": None,
        "generator.sampling_params.additional_kwargs.presence_penalty": None,
        "generator.sampling_params.additional_kwargs.repetition_penalty": None,
        "generator.sampling_params.min_p": 0.0,
        "generator.sampling_params.repetition_penalty": 1.0,
        "generator.sampling_params.temperature": 1.0,
        "generator.sampling_params.top_k": -1,
        "generator.sampling_params.top_p": 1.0,
        "program": "",
        "trainer.algorithm.advantage_estimator": "grpo",
        "trainer.algorithm.cispo.cispo_anchor": "old",  # a setting of later versions
        "trainer.algorithm.cispo.cispo_eps_clip_high": 5.0,
        "trainer.algorithm.cispo.cispo_eps_clip_low": 0.0,
        "trainer.algorithm.clip_cov.clip_cov_lb": 1.0,
        "trainer.algorithm.clip_cov.clip_cov_ub": 5.0,
        "trainer.algorithm.clip_cov.clip_ratio": 0.0002,
        "trainer.algorithm.clip_ratio_c": 3.0,
        "trainer.algorithm.dppo.delta_high": 0.2,
        "trainer.algorithm.dppo.delta_low": 0.2,
        "trainer.algorithm.entropy_loss_coef": 0.01,
        "trainer.algorithm.eps_clip_high": 0.2,
        "trainer.algorithm.eps_clip_low": 0.2,
        "trainer.algorithm.grpo_norm_by_std": True,
        "trainer.algorithm.kl_cov.kl_cov_frac": 0.2,
        "trainer.algorithm.kl_cov.ppo_kl_coef": 1.0,
        "trainer.algorithm.loss_reduction": "token_mean",
        "trainer.algorithm.method": None,  # a setting of bandpo
        "trainer.algorithm.off_policy_correction.sequence_mask_metric": None,
        "trainer.algorithm.off_policy_correction.tis_ratio_type": None,
        "trainer.algorithm.policy_loss_type": "regular",
        "trainer.algorithm.sapo.tau_neg": 1.05,
        "trainer.algorithm.sapo.tau_pos": 1.0,
        "trainer.algorithm.use_entropy_loss": False,
        "trainer.algorithm.use_tis": False,
        "trainer.fully_async.enabled": False,
        "trainer.micro_train_batch_size_per_gpu": 1,
        "trainer.placement.policy_num_gpus_per_node": 1,
        "trainer.placement.policy_num_nodes": 1,
        "trainer.policy.model.lora.rank": 0,
        "trainer.policy.model.path": None,
        "trainer.policy.optimizer_config.lr": 1e-6,
        "trainer.policy.sequence_parallel_size": 1,
        "trainer.policy_mini_batch_size": 256,
        "trainer.strategy": "fsdp",
        "trainer.train_batch_size": 1024,
        "trainer.update_epochs_per_batch": 1,
    },
    marks=(
        ("trainer.algorithm.*",),
        ("trainer.policy.model.*",),
        ("trainer.policy.optimizer_config.*",),
        ("generator.n_samples_per_prompt",),
    ),
    programs=("skyrl.train.entrypoints.", "skyrl_train.entrypoints."),
    rules=(
        setting_without_effect(
            "skyrl",
            LOSS_SETTINGS,
            f"{ALGORITHM}policy_loss_type",
            "SkyRL 0.3.0, skyrl/backends/skyrl_train/utils/ppo_utils.py",
        ),
        CLIP_CANNOT_ACT(
            reads={
                "high": f"{ALGORITHM}eps_clip_high",
                "low": f"{ALGORITHM}eps_clip_low",
                **LOSS,
                **BATCHES,
                "epochs": "trainer.update_epochs_per_batch",
                "fully_async": "trainer.fully_async.enabled",
            },
            condition=lambda v: (
                v.is_set("high", "low")
                and v.loss in ("regular", "dual_clip", "gspo")
                and not v.fully_async
                and v.train == v.mini
                and v.epochs == 1
            ),
            details="trainer.train_batch_size and trainer.policy_mini_batch_size are both {train}: eps_clip_low {low} "
            "and eps_clip_high {high} have no effect.",
            fix="set trainer.policy_mini_batch_size below trainer.train_batch_size, or "
            "trainer.update_epochs_per_batch above 1; or remove the clip settings",
            source="NovaSky-AI/SkyRL issue 1692; BytedTsinghua-SIA/DAPO issue 23",
        ),
        ASYNCHRONOUS_ANCHOR(
            severity="fix",
            reads={"fully_async": "trainer.fully_async.enabled", "program": "program", **ANCHOR},
            condition=lambda v: (
                bool(v.fully_async or "fully_async" in v.program) and _uses_old_probabilities(v)
            ),
            details="Earlier versions train without a clip; later ones refuse policy_loss_type {loss} here.",
            fix="trainer.algorithm.policy_loss_type=rollout_is (or dppo, or cispo with "
            "cispo.cispo_anchor=rollout)",
            source="NovaSky-AI/SkyRL issue 1315 and pull requests 1850 and 1980",
        ),
        ASYNCHRONOUS_ANCHOR(
            id="asynchronous-anchor-one-step",
            reads={
                "program": "program",
                "fully_async": "trainer.fully_async.enabled",
                **ANCHOR,
                **CORRECTION,
            },
            condition=lambda v: (
                ".async." in v.program
                and not v.fully_async
                and _uses_old_probabilities(v)
                and not _uses_correction(v)
            ),
            details="The sampler is one batch behind, and no importance weight corrects it.",
            fix="trainer.algorithm.policy_loss_type=rollout_is, or "
            "trainer.algorithm.off_policy_correction.tis_ratio_type=token",
            source="NovaSky-AI/SkyRL, examples/train/async; radixark/miles pull request 1829 on the same "
            "arrangement",
        ),
        TRUNCATED_SAMPLING(
            reads=TRUNCATION,
            condition=lambda v: (
                (v.top_p < 1 or v.top_k > 0 or v.min_p > 0)
                and (_uses_correction(v) or v.loss in ("rollout_is", "dppo"))
            ),
            effect="",
            details="SkyRL lets vLLM report probabilities before truncation. The importance weights then compare "
            "two distributions, neither of which sampled the answers, so the truncation is not corrected. top_p "
            "is {top_p}, top_k {top_k}, min_p {min_p}.",
            fix="generator.sampling_params.top_p=1.0, generator.sampling_params.top_k=-1, "
            "generator.sampling_params.min_p=0.0",
            source="NovaSky-AI/SkyRL, skyrl/backends/skyrl_train/inference_servers (no logprobs_mode is set; "
            "vLLM's default is raw_logprobs); compare huggingface/trl issue 6789",
        ),
        TRUNCATED_WITHOUT_WEIGHT(
            reads=TRUNCATION,
            condition=_truncates_without_weight,
            details="top_p is {top_p}, top_k {top_k}, min_p {min_p}.",
            fix="generator.sampling_params.top_p=1.0, generator.sampling_params.top_k=-1, "
            "generator.sampling_params.min_p=0.0",
            source=KEEP_SAMPLING_MASK.format(
                "SkyRL 0.3.0, skyrl/backends/skyrl_train/workers/model_wrapper.py:334 (logits are only divided by the "
                "temperature)"
            ),
        ),
        GREEDY_SAMPLING(
            reads={
                "temperature": f"{SAMPLING}temperature",
                "top_k": f"{SAMPLING}top_k",
                "group": "generator.n_samples_per_prompt",
            },
            details="temperature is {temperature}, top_k {top_k}, n_samples_per_prompt {group}.",
            fix="generator.sampling_params.temperature=1.0 and generator.sampling_params.top_k=-1",
            source="SkyRL 0.3.0, skyrl/backends/skyrl_train/inference_servers/engine_utils.py:62",
        ),
        TEMPERATURE_NEAR_ZERO(
            reads={
                "temperature": f"{SAMPLING}temperature",
                "group": "generator.n_samples_per_prompt",
            },
            details="temperature is {temperature}, n_samples_per_prompt {group}.",
            fix="generator.sampling_params.temperature=1.0",
            source="SkyRL 0.3.0, skyrl/backends/skyrl_train/inference_servers/engine_utils.py:62",
        ),
        SAMPLING_PENALTY(
            reads=PENALTIES,
            condition=lambda v: (v.repetition or 1) != 1 or (v.presence or 0) != 0 or (v.frequency or 0) != 0,
            details="repetition_penalty is {repetition}, presence_penalty {presence}, "
            "frequency_penalty {frequency}.",
            fix="remove the penalties from generator.sampling_params.additional_kwargs",
            source="SkyRL 0.3.0, skyrl/backends/skyrl_train/inference_servers/engine_utils.py:78 (additional_kwargs) "
            "and skyrl/backends/skyrl_train/workers/model_wrapper.py:334 (logits are only divided by the temperature)",
        ),
        PENALTY_IGNORED(
            reads={"penalty": f"{SAMPLING}repetition_penalty"},
            condition=lambda v: v.penalty != 1,
            details="repetition_penalty is {penalty}, and SkyRL 0.3.0 does not pass it to the engine.",
            fix="remove generator.sampling_params.repetition_penalty",
            source="SkyRL 0.3.0, skyrl/backends/skyrl_train/inference_servers/engine_utils.py:57 "
            "(get_vllm_sampling_params)",
        ),
        ENTROPY_BONUS(
            reads={
                "coefficient": f"{ALGORITHM}entropy_loss_coef",
                "switch": f"{ALGORITHM}use_entropy_loss",
            },
            condition=lambda v: v.coefficient > LARGEST_ENTROPY_COEFFICIENT and bool(v.switch),
            details="entropy_loss_coef is {coefficient}.",
            fix="trainer.algorithm.use_entropy_loss=false",
            source=ENTROPY_SOURCE.format("SkyRL 0.3.0, skyrl/backends/skyrl_train/workers/worker.py:965"),
        ),
        Rule(
            id="entropy-without-switch",
            severity="note",
            title="the coefficient of the entropy has no effect",
            reads={
                "coefficient": f"{ALGORITHM}entropy_loss_coef",
                "switch": f"{ALGORITHM}use_entropy_loss",
            },
            condition=lambda v: (
                v.is_set_to_more_than("coefficient", 0) and not v.switch and v.setting("switch") is None
            ),
            details="entropy_loss_coef is {coefficient}, and use_entropy_loss is not set: the entropy is no part of "
            "the loss.",
            fix="trainer.algorithm.use_entropy_loss=true; or remove the coefficient",
            source="SkyRL 0.3.0, skyrl/backends/skyrl_train/workers/worker.py:964",
        ),
        GSPO_CLIP(
            reads={
                "loss": f"{ALGORITHM}policy_loss_type",
                "low": f"{ALGORITHM}eps_clip_low",
                "high": f"{ALGORITHM}eps_clip_high",
                **BATCHES,
                "epochs": "trainer.update_epochs_per_batch",
                "fully_async": "trainer.fully_async.enabled",
            },
            condition=lambda v: (
                v.loss == "gspo"
                and largest(v.low, v.high) >= 0.05
                # With one update, no clip has an effect.
                and (v.train != v.mini or v.epochs != 1 or bool(v.fully_async))
            ),
            details="eps_clip_low is {low}, eps_clip_high {high}.",
            fix="trainer.algorithm.eps_clip_low=3e-4 trainer.algorithm.eps_clip_high=4e-4",
        ),
        BATCH_DOES_NOT_DIVIDE(
            title="a batch is no multiple of the mini-batch",
            reads=BATCHES,
            condition=lambda v: v.train % v.mini != 0,
            details="trainer.train_batch_size {train} is no multiple of trainer.policy_mini_batch_size {mini}: "
            "SkyRL stops before it trains.",
            fix="a trainer.train_batch_size that is a multiple of trainer.policy_mini_batch_size",
            source="NovaSky-AI/SkyRL, skyrl/train/utils/utils.py, validate_batch_sizes",
        ),
        Rule(
            id="micro-batch-does-not-divide",
            severity="fix",
            title="a mini-batch is no multiple of the micro-batches of all GPUs",
            reads={
                "micro": "trainer.micro_train_batch_size_per_gpu",
                "mini": "trainer.policy_mini_batch_size",
                "group": "generator.n_samples_per_prompt",
                "gpus": "trainer.placement.policy_num_gpus_per_node",
                "nodes": "trainer.placement.policy_num_nodes",
                "parallel": "trainer.policy.sequence_parallel_size",
                "strategy": "trainer.strategy",
            },
            condition=lambda v: v.strategy in ("fsdp", "fsdp2") and _mini_batch_is_not_divisible(v),
            details="policy_mini_batch_size {mini} times n_samples_per_prompt {group}, on {gpus} times {nodes} "
            "GPUs, is no multiple of micro_train_batch_size_per_gpu {micro} on each: SkyRL stops before it "
            "trains.",
            fix="a trainer.micro_train_batch_size_per_gpu that divides the answers of a mini-batch on each GPU",
            source="NovaSky-AI/SkyRL, skyrl/train/utils/utils.py, validate_batch_sizes",
            only_before_start=True,
        ),
        GROUP_OF_ONE(
            reads={
                "group": "generator.n_samples_per_prompt",
                "estimator": f"{ALGORITHM}advantage_estimator",
            },
            condition=lambda v: v.estimator in ("grpo", "rloo") and v.group == 1,
            details="{estimator} then takes the reward itself as the advantage, without a baseline.",
            fix="generator.n_samples_per_prompt=8",
            source="NovaSky-AI/SkyRL, skyrl/backends/skyrl_train/utils/ppo_utils.py, "
            "compute_grpo_outcome_advantage",
        ),
        GROUP_OF_TWO(
            reads={
                "group": "generator.n_samples_per_prompt",
                "estimator": f"{ALGORITHM}advantage_estimator",
                "spread": f"{ALGORITHM}grpo_norm_by_std",
            },
            condition=lambda v: v.estimator == "grpo" and v.group == 2 and bool(v.spread),
            fix="generator.n_samples_per_prompt=8, or trainer.algorithm.grpo_norm_by_std=false",
        ),
        MEAN_DEPENDS_ON_MICRO_BATCH(
            reads={"reduction": f"{ALGORITHM}loss_reduction"},
            condition=lambda v: v.reduction == "token_mean_legacy",
            details="loss_reduction token_mean_legacy divides by the tokens of each micro-batch: a token weighs "
            "more in a micro-batch of short answers, and another micro_train_batch_size_per_gpu gives another "
            "loss.",
            fix="trainer.algorithm.loss_reduction=token_mean",
            source="NovaSky-AI/SkyRL, skyrl/backends/skyrl_train/utils/ppo_utils.py, "
            "apply_loss_reduction_to_advantages_minibatch",
        ),
        LEARNING_RATE(
            reads={
                "rate": "trainer.policy.optimizer_config.lr",
                "model": "trainer.policy.model.path",
                "lora": "trainer.policy.model.lora.rank",
            },
            fix="trainer.policy.optimizer_config.lr=1e-6, or 1e-5 with LoRA",
        ),
    ),
)
