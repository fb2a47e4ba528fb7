"""Rules for configurations of SkyRL."""

from __future__ import annotations

from rlvet.lint.learning_rate import RATE_HAPPENS, RATE_SOURCE, learning_rate_is_high
from rlvet.lint.rules import (
    ASYNCHRONOUS,
    ENTROPY_BONUS,
    ENTROPY_SOURCE,
    GREEDY,
    GSPO_PAPER,
    GSPO_RANGE,
    KEEP_SAMPLING_MASK,
    LARGEST_ENTROPY_COEFFICIENT,
    NEARLY_GREEDY,
    ONE_ANSWER,
    ONE_UPDATE,
    SAMPLING_PENALTY,
    TWO_ANSWERS,
    UNWEIGHTED_TRUNCATION,
    Rule,
    Values,
    largest,
    samples_greedily,
    samples_nearly_greedily,
)

SKYRL_ALGORITHM = "trainer.algorithm."
SKYRL_OLD_PROBABILITIES = (
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
SKYRL_BAND = "band"
"""The loss that bandpo's adapter registers. Its ``method`` decides which old probabilities it uses."""
SAMPLER_METHODS = ("CPPO", "DPPO", "IPO", "IcePop", "PrimeRL", "TRM")
"""The methods of bandpo whose ratio is relative to the probabilities of the sampler."""
SKYRL_LOSS = {
    "loss": f"{SKYRL_ALGORITHM}policy_loss_type",
    "anchor": f"{SKYRL_ALGORITHM}cispo.cispo_anchor",
}
SKYRL_ANCHOR = {**SKYRL_LOSS, "method": f"{SKYRL_ALGORITHM}method"}
SKYRL_CORRECTION = {
    "weight": f"{SKYRL_ALGORITHM}off_policy_correction.tis_ratio_type",
    "mask": f"{SKYRL_ALGORITHM}off_policy_correction.sequence_mask_metric",
    "old_weight": f"{SKYRL_ALGORITHM}use_tis",
}
SKYRL_BATCHES = {
    "train": "trainer.train_batch_size",
    "mini": "trainer.policy_mini_batch_size",
}


def _skyrl_uses_old_probabilities(v: Values) -> bool:
    """Return whether the ratio of the loss is relative to old probabilities that the trainer computes."""
    if v.loss == SKYRL_BAND:
        return not str(v.get("method")).startswith(tuple(f"{name}(" for name in SAMPLER_METHODS))
    return v.loss in SKYRL_OLD_PROBABILITIES and not (v.loss == "cispo" and v.anchor == "rollout")


def _skyrl_uses_correction(v: Values) -> bool:
    """Return whether an importance weight or a mask corrects the difference between engine and trainer."""
    return bool(v.weight is not None or v.mask is not None or v.old_weight)


def _skyrl_mini_batch_is_not_divisible(v: Values) -> bool:
    """Return whether the answers of a mini-batch on each GPU are no multiple of the micro-batch."""
    gpus = v.gpus * v.nodes // v.parallel
    answers = v.mini * v.group // gpus
    return answers == 0 or answers % v.micro != 0


SKYRL_SAMPLING = "generator.sampling_params."
SKYRL_TRUNCATION = {
    "top_p": f"{SKYRL_SAMPLING}top_p",
    "top_k": f"{SKYRL_SAMPLING}top_k",
    "min_p": f"{SKYRL_SAMPLING}min_p",
    **SKYRL_LOSS,
    **SKYRL_CORRECTION,
}
SKYRL_PENALTIES = {
    "repetition": f"{SKYRL_SAMPLING}additional_kwargs.repetition_penalty",
    "presence": f"{SKYRL_SAMPLING}additional_kwargs.presence_penalty",
    "frequency": f"{SKYRL_SAMPLING}additional_kwargs.frequency_penalty",
}


def _skyrl_truncates_without_weight(v: Values) -> bool:
    """Return whether sampling is truncated, and no importance weight is known to be used."""
    if not (v.top_p < 1 or v.top_k > 1 or v.min_p > 0):
        return False
    weight = v.get("weight") is not None or v.get("mask") is not None or bool(v.get("old_weight"))
    return not weight and v.get("loss") not in ("rollout_is", "dppo")


SKYRL_RULES = (
    Rule(
        id="clip-cannot-act",
        framework="skyrl",
        severity="look",
        title="the clip has no effect",
        reads={
            "high": f"{SKYRL_ALGORITHM}eps_clip_high",
            "low": f"{SKYRL_ALGORITHM}eps_clip_low",
            **SKYRL_LOSS,
            **SKYRL_BATCHES,
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
        happens=ONE_UPDATE
        + " trainer.train_batch_size and trainer.policy_mini_batch_size are both {train}: eps_clip_low {low} "
        "and eps_clip_high {high} have no effect.",
        fix="set trainer.policy_mini_batch_size below trainer.train_batch_size, or "
        "trainer.update_epochs_per_batch above 1; or remove the clip settings",
        source="NovaSky-AI/SkyRL issue 1692; BytedTsinghua-SIA/DAPO issue 23",
    ),
    Rule(
        id="asynchronous-anchor",
        framework="skyrl",
        severity="fix",
        title="the ratio is not relative to the sampling policy",
        reads={"fully_async": "trainer.fully_async.enabled", "program": "program", **SKYRL_ANCHOR},
        condition=lambda v: (
            bool(v.fully_async or "fully_async" in v.program) and _skyrl_uses_old_probabilities(v)
        ),
        happens=ASYNCHRONOUS
        + " Earlier versions train without a clip; later ones refuse policy_loss_type {loss} here.",
        fix="trainer.algorithm.policy_loss_type=rollout_is (or dppo, or cispo with "
        "cispo.cispo_anchor=rollout)",
        source="NovaSky-AI/SkyRL issue 1315 and pull requests 1850 and 1980",
    ),
    Rule(
        id="asynchronous-anchor-one-step",
        framework="skyrl",
        severity="look",
        title="the ratio is not relative to the sampling policy",
        reads={
            "program": "program",
            "fully_async": "trainer.fully_async.enabled",
            **SKYRL_ANCHOR,
            **SKYRL_CORRECTION,
        },
        condition=lambda v: (
            ".async." in v.program
            and not v.fully_async
            and _skyrl_uses_old_probabilities(v)
            and not _skyrl_uses_correction(v)
        ),
        happens=ASYNCHRONOUS + " The sampler is one batch behind, and no importance weight corrects it.",
        fix="trainer.algorithm.policy_loss_type=rollout_is, or "
        "trainer.algorithm.off_policy_correction.tis_ratio_type=token",
        source="NovaSky-AI/SkyRL, examples/train/async; radixark/miles pull request 1829 on the same "
        "arrangement",
    ),
    Rule(
        id="truncated-sampling",
        framework="skyrl",
        severity="look",
        title="sampling is truncated, and importance weights are used",
        reads=SKYRL_TRUNCATION,
        condition=lambda v: (
            (v.top_p < 1 or v.top_k > 0 or v.min_p > 0)
            and (_skyrl_uses_correction(v) or v.loss in ("rollout_is", "dppo"))
        ),
        happens="SkyRL lets vLLM report probabilities before truncation. The importance weights then compare "
        "two distributions, neither of which sampled the answers, so the truncation is not corrected. top_p "
        "is {top_p}, top_k {top_k}, min_p {min_p}.",
        fix="generator.sampling_params.top_p=1.0, generator.sampling_params.top_k=-1, "
        "generator.sampling_params.min_p=0.0",
        source="NovaSky-AI/SkyRL, skyrl/backends/skyrl_train/inference_servers (no logprobs_mode is set; "
        "vLLM's default is raw_logprobs); compare huggingface/trl issue 6789",
    ),
    Rule(
        id="truncated-without-weight",
        framework="skyrl",
        severity="note",
        title="sampling is truncated",
        reads=SKYRL_TRUNCATION,
        condition=_skyrl_truncates_without_weight,
        happens=UNWEIGHTED_TRUNCATION + " top_p is {top_p}, top_k {top_k}, min_p {min_p}.",
        fix="generator.sampling_params.top_p=1.0, generator.sampling_params.top_k=-1, "
        "generator.sampling_params.min_p=0.0",
        source=KEEP_SAMPLING_MASK.format(
            "SkyRL 0.3.0, skyrl/backends/skyrl_train/workers/model_wrapper.py:334 (logits are only divided by the "
            "temperature)"
        ),
    ),
    Rule(
        id="greedy-sampling",
        framework="skyrl",
        severity="fix",
        title="the answers to a prompt are all the same",
        reads={
            "temperature": f"{SKYRL_SAMPLING}temperature",
            "top_k": f"{SKYRL_SAMPLING}top_k",
            "group": "generator.n_samples_per_prompt",
        },
        condition=samples_greedily,
        happens=GREEDY + "temperature is {temperature}, top_k {top_k}, n_samples_per_prompt {group}.",
        fix="generator.sampling_params.temperature=1.0 and generator.sampling_params.top_k=-1",
        source="SkyRL 0.3.0, skyrl/backends/skyrl_train/inference_servers/engine_utils.py:62",
    ),
    Rule(
        id="temperature-near-zero",
        framework="skyrl",
        severity="look",
        title="the temperature is near 0",
        reads={
            "temperature": f"{SKYRL_SAMPLING}temperature",
            "group": "generator.n_samples_per_prompt",
        },
        condition=samples_nearly_greedily,
        happens=NEARLY_GREEDY + "temperature is {temperature}, n_samples_per_prompt {group}.",
        fix="generator.sampling_params.temperature=1.0",
        source="SkyRL 0.3.0, skyrl/backends/skyrl_train/inference_servers/engine_utils.py:62",
    ),
    Rule(
        id="sampling-penalty",
        framework="skyrl",
        severity="look",
        title="a penalty changes how answers are sampled",
        reads=SKYRL_PENALTIES,
        condition=lambda v: (v.repetition or 1) != 1 or (v.presence or 0) != 0 or (v.frequency or 0) != 0,
        happens=SAMPLING_PENALTY + " repetition_penalty is {repetition}, presence_penalty {presence}, "
        "frequency_penalty {frequency}.",
        fix="remove the penalties from generator.sampling_params.additional_kwargs",
        source="SkyRL 0.3.0, skyrl/backends/skyrl_train/inference_servers/engine_utils.py:78 (additional_kwargs) and "
        "skyrl/backends/skyrl_train/workers/model_wrapper.py:334 (logits are only divided by the temperature)",
    ),
    Rule(
        id="penalty-ignored",
        framework="skyrl",
        severity="look",
        title="the repetition penalty has no effect",
        reads={"penalty": f"{SKYRL_SAMPLING}repetition_penalty"},
        condition=lambda v: v.penalty != 1,
        happens="repetition_penalty is {penalty}, and SkyRL 0.3.0 does not pass it to the engine.",
        fix="remove generator.sampling_params.repetition_penalty",
        source="SkyRL 0.3.0, skyrl/backends/skyrl_train/inference_servers/engine_utils.py:57 "
        "(get_vllm_sampling_params)",
    ),
    Rule(
        id="entropy-bonus",
        framework="skyrl",
        severity="look",
        title="the bonus for entropy is far above published ones",
        reads={
            "coefficient": f"{SKYRL_ALGORITHM}entropy_loss_coef",
            "switch": f"{SKYRL_ALGORITHM}use_entropy_loss",
        },
        condition=lambda v: v.coefficient > LARGEST_ENTROPY_COEFFICIENT and bool(v.switch),
        happens=ENTROPY_BONUS + "entropy_loss_coef is {coefficient}.",
        fix="trainer.algorithm.use_entropy_loss=false",
        source=ENTROPY_SOURCE.format("SkyRL 0.3.0, skyrl/backends/skyrl_train/workers/worker.py:965"),
    ),
    Rule(
        id="entropy-without-switch",
        framework="skyrl",
        severity="note",
        title="the coefficient of the entropy has no effect",
        reads={
            "coefficient": f"{SKYRL_ALGORITHM}entropy_loss_coef",
            "switch": f"{SKYRL_ALGORITHM}use_entropy_loss",
        },
        condition=lambda v: (
            v.is_set_to_more_than("coefficient", 0) and not v.switch and v.setting("switch") is None
        ),
        happens="entropy_loss_coef is {coefficient}, and use_entropy_loss is not set: the entropy is no part of "
        "the loss.",
        fix="trainer.algorithm.use_entropy_loss=true; or remove the coefficient",
        source="SkyRL 0.3.0, skyrl/backends/skyrl_train/workers/worker.py:964",
    ),
    Rule(
        id="gspo-clip",
        framework="skyrl",
        severity="look",
        title="the clip of GSPO is that of GRPO",
        reads={
            "loss": f"{SKYRL_ALGORITHM}policy_loss_type",
            "low": f"{SKYRL_ALGORITHM}eps_clip_low",
            "high": f"{SKYRL_ALGORITHM}eps_clip_high",
            **SKYRL_BATCHES,
            "epochs": "trainer.update_epochs_per_batch",
            "fully_async": "trainer.fully_async.enabled",
        },
        condition=lambda v: (
            v.loss == "gspo"
            and largest(v.low, v.high) >= 0.05
            # With one update, no clip has an effect.
            and (v.train != v.mini or v.epochs != 1 or bool(v.fully_async))
        ),
        happens=GSPO_RANGE + " eps_clip_low is {low}, eps_clip_high {high}.",
        fix="trainer.algorithm.eps_clip_low=3e-4 trainer.algorithm.eps_clip_high=4e-4",
        source=GSPO_PAPER,
    ),
    Rule(
        id="batch-does-not-divide",
        framework="skyrl",
        severity="fix",
        title="a batch is no multiple of the mini-batch",
        reads=SKYRL_BATCHES,
        condition=lambda v: v.train % v.mini != 0,
        happens="trainer.train_batch_size {train} is no multiple of trainer.policy_mini_batch_size {mini}: "
        "SkyRL stops before it trains.",
        fix="a trainer.train_batch_size that is a multiple of trainer.policy_mini_batch_size",
        source="NovaSky-AI/SkyRL, skyrl/train/utils/utils.py, validate_batch_sizes",
        only_before_start=True,
    ),
    Rule(
        id="micro-batch-does-not-divide",
        framework="skyrl",
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
        condition=lambda v: v.strategy in ("fsdp", "fsdp2") and _skyrl_mini_batch_is_not_divisible(v),
        happens="policy_mini_batch_size {mini} times n_samples_per_prompt {group}, on {gpus} times {nodes} "
        "GPUs, is no multiple of micro_train_batch_size_per_gpu {micro} on each: SkyRL stops before it "
        "trains.",
        fix="a trainer.micro_train_batch_size_per_gpu that divides the answers of a mini-batch on each GPU",
        source="NovaSky-AI/SkyRL, skyrl/train/utils/utils.py, validate_batch_sizes",
        only_before_start=True,
    ),
    Rule(
        id="group-of-one",
        framework="skyrl",
        severity="fix",
        title="one answer to each prompt",
        reads={
            "group": "generator.n_samples_per_prompt",
            "estimator": f"{SKYRL_ALGORITHM}advantage_estimator",
        },
        condition=lambda v: v.estimator in ("grpo", "rloo") and v.group == 1,
        happens=ONE_ANSWER + "{estimator} then takes the reward itself as the advantage, without a baseline.",
        fix="generator.n_samples_per_prompt=8",
        source="NovaSky-AI/SkyRL, skyrl/backends/skyrl_train/utils/ppo_utils.py, "
        "compute_grpo_outcome_advantage",
    ),
    Rule(
        id="group-of-two",
        framework="skyrl",
        severity="note",
        title="two answers to each prompt",
        reads={
            "group": "generator.n_samples_per_prompt",
            "estimator": f"{SKYRL_ALGORITHM}advantage_estimator",
            "spread": f"{SKYRL_ALGORITHM}grpo_norm_by_std",
        },
        condition=lambda v: v.estimator == "grpo" and v.group == 2 and bool(v.spread),
        happens=TWO_ANSWERS,
        fix="generator.n_samples_per_prompt=8, or trainer.algorithm.grpo_norm_by_std=false",
        source="Liu et al., Understanding R1-Zero-Like Training, arXiv 2503.20783, section 3.1",
    ),
    Rule(
        id="mean-depends-on-micro-batch",
        framework="skyrl",
        severity="look",
        title="the loss depends on how a batch is split",
        reads={"reduction": f"{SKYRL_ALGORITHM}loss_reduction"},
        condition=lambda v: v.reduction == "token_mean_legacy",
        happens="loss_reduction token_mean_legacy divides by the tokens of each micro-batch: a token weighs "
        "more in a micro-batch of short answers, and another micro_train_batch_size_per_gpu gives another "
        "loss.",
        fix="trainer.algorithm.loss_reduction=token_mean",
        source="NovaSky-AI/SkyRL, skyrl/backends/skyrl_train/utils/ppo_utils.py, "
        "apply_loss_reduction_to_advantages_minibatch",
    ),
    Rule(
        id="learning-rate",
        framework="skyrl",
        severity="look",
        title="the learning rate is far above published ones",
        reads={
            "rate": "trainer.policy.optimizer_config.lr",
            "model": "trainer.policy.model.path",
            "lora": "trainer.policy.model.lora.rank",
        },
        condition=learning_rate_is_high,
        happens=RATE_HAPPENS,
        fix="trainer.policy.optimizer_config.lr=1e-6, or 1e-5 with LoRA",
        source=RATE_SOURCE,
    ),
)
