"""Rules for configurations of verl."""

from __future__ import annotations

from collections.abc import Callable

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
    UnknownValue,
    Values,
    largest,
    samples_greedily,
    samples_nearly_greedily,
)

VERL_ACTOR = "actor_rollout_ref.actor."
VERL_CORRECTION = "algorithm.rollout_correction."
VERL_CLIPS = ("vanilla", "dppo_tv", "dppo_kl", "gspo", "geo_mean", "cispo", "clip_cov")
VERL_GROUPS = ("grpo", "grpo_passk", "grpo_vectorized", "rloo", "rloo_vectorized", "gdpo", "opo")
VERL_UPDATES = {
    "train": "data.train_batch_size",
    "mini": f"{VERL_ACTOR}ppo_mini_batch_size",
    "epochs": f"{VERL_ACTOR}ppo_epochs",
}
VERL_ASYNC = {
    "program": "program",
    "mode": "trainer.v1.trainer_mode",
    "v1": "trainer.use_v1",
    "bypass": f"{VERL_CORRECTION}bypass_mode",
    "weight": f"{VERL_CORRECTION}rollout_is",
    "reject": f"{VERL_CORRECTION}rollout_rs",
}
VERL_ASYNC_PROGRAMS = ("fully_async", "one_step_off")


VERL_SETTINGS_SINCE_0_3 = (
    f"{VERL_ACTOR}clip_ratio_high",
    f"{VERL_ACTOR}clip_ratio_low",
    f"{VERL_ACTOR}loss_agg_mode",
    "actor_rollout_ref.rollout.mode",
)
"""Settings that versions before 0.3 did not have."""
VERL_PPO_PROGRAMS = ("verl.trainer.main_ppo", "verl.experimental.", "recipe.dapo.")
"""Prefixes of the modules that train by advantages."""
VERL_PROGRAMS = ("verl.", "recipe.dapo.")
"""Prefixes of the modules whose batches and groups follow the settings."""


def _verl_is_async(v: Values) -> bool:
    """Return whether answers may be sampled from older weights than those in training."""
    is_async_program = any(part in v.program for part in VERL_ASYNC_PROGRAMS)
    return is_async_program or bool(v.v1 and v.mode in ("colocate_async", "separate_async"))


def _check_verl_program(v: Values) -> None:
    """Check that the command runs a program of verl, since others may form batches and groups differently.

    Raises:
        UnknownValue: if the command runs another program.
    """
    if v.program and not v.program.startswith(VERL_PROGRAMS):
        raise UnknownValue(f"{v.program} is no program of verl, and may form batches and groups differently")


def _verl_clip_has_no_effect(v: Values) -> bool:
    """Return whether a clip is set although each batch gets one update."""
    if not v.is_set("high", "low", "clip") or v.loss not in VERL_CLIPS:
        return False
    if v.train != v.mini or v.epochs != 1 or v.bypass or _verl_is_async(v):
        return False
    _check_verl_program(v)
    return True


def _verl_gspo_clips_nothing(v: Values) -> bool:
    """Return whether GSPO has the clip range of GRPO. With one update, no clip has an effect."""
    if v.loss != "gspo" or largest(v.low, v.high) < 0.05:
        return False
    return v.train != v.mini or v.epochs != 1 or v.bypass or _verl_is_async(v)


def _verl_has_single_answers(v: Values) -> bool:
    """Return whether a prompt has one answer although the estimator compares the answers of a group."""
    if v.estimator not in VERL_GROUPS or v.group != 1:
        return False
    _check_verl_program(v)
    # Distillation learns from a teacher, without groups.
    return not v.distillation


def _verl_batch_is_not_divisible(v: Values) -> bool:
    """Return whether the batch is no multiple of the mini-batch."""
    if v.train % v.mini == 0:
        return False
    _check_verl_program(v)
    return True


VERL_TRUNCATION = {
    "top_p": "actor_rollout_ref.rollout.top_p",
    "top_k": "actor_rollout_ref.rollout.top_k",
    "weight": f"{VERL_CORRECTION}rollout_is",
    "reject": f"{VERL_CORRECTION}rollout_rs",
    "bypass": f"{VERL_CORRECTION}bypass_mode",
}


VERL_POLICY = {"estimator": "algorithm.adv_estimator", "program": "program"}


def _check_policy_gradient(v: Values) -> None:
    """Check that advantages are estimated. Other programs generate answers, or distil, with the same settings.

    Raises:
        UnknownValue: if this is not known.
    """
    if v.setting("estimator") is None and not v.program.startswith(VERL_PPO_PROGRAMS):
        raise UnknownValue(f"{v.program or 'the program'} may not train by advantages")


def _in_policy_gradient(condition: Callable[[Values], bool]) -> Callable[[Values], bool]:
    """Return a condition that holds only where advantages are estimated, see `_check_policy_gradient`."""

    def holds(v: Values) -> bool:
        if not condition(v):
            return False
        _check_policy_gradient(v)
        return True

    return holds


def _verl_truncates_without_weight(v: Values) -> bool:
    """Return whether sampling is truncated, and no importance weight is known to be used."""
    if not (v.top_p < 1 or v.top_k > 1):
        return False
    _check_policy_gradient(v)
    is_weighted = v.get("weight") is not None or v.get("reject") is not None or bool(v.get("bypass"))
    # Distillation learns from a teacher's probabilities, not from advantages.
    return not is_weighted and not v.get("distillation")


def _verl_kl_has_no_effect(v: Values) -> bool:
    """Return whether a coefficient of a KL term is set without its switch, and no term is used.

    A coefficient beside its switch is no fault: whoever sets the switch to False knows that it has no effect.

    Raises:
        UnknownValue: if the configuration is for an early version of verl, which had no switch.
    """
    in_reward = v.is_set_to_more_than("reward_coefficient", 0) and v.setting("in_reward") is None
    in_loss = v.is_set_to_more_than("loss_coefficient", 0) and v.setting("in_loss") is None
    if not (in_reward or in_loss) or v.in_loss or v.in_reward:
        return False
    is_recent = any(name in v.settings for name in VERL_SETTINGS_SINCE_0_3)
    if v.setting("early") is not None and not is_recent:
        raise UnknownValue("data.val_batch_size is of versions of verl that used kl_coef without a switch")
    return True


def _verl_group_has_a_critic(v: Values) -> bool:
    """Return whether groups are sampled with the default estimator, and no critic is configured."""
    if any(name.startswith("critic.") for name in v.settings) or v.setting("estimator") is not None:
        return False
    return v.estimator == "gae" and v.group > 1 and not v.distillation


VERL_RULES = (
    Rule(
        id="clip-cannot-act",
        framework="verl",
        severity="look",
        title="the clip has no effect",
        reads={
            "high": f"{VERL_ACTOR}clip_ratio_high",
            "low": f"{VERL_ACTOR}clip_ratio_low",
            "clip": f"{VERL_ACTOR}clip_ratio",
            "loss": f"{VERL_ACTOR}policy_loss.loss_mode",
            **VERL_UPDATES,
            **VERL_ASYNC,
        },
        condition=_verl_clip_has_no_effect,
        happens=ONE_UPDATE + " {train.name} and {mini.name} are both {train}, and {epochs.name} is {epochs}: "
        "clip_ratio_low {low} and clip_ratio_high {high} have no effect.",
        fix="set actor_rollout_ref.actor.ppo_mini_batch_size below data.train_batch_size, or "
        "actor_rollout_ref.actor.ppo_epochs above 1; or remove the clip settings",
        source="verl-project/verl issue 791; BytedTsinghua-SIA/DAPO issues 11 and 23; verl 0.9.1, "
        "verl/trainer/ppo/v1/trainer_base.py, _update_actor",
    ),
    Rule(
        id="asynchronous-anchor",
        framework="verl",
        severity="look",
        title="the ratio is not relative to the sampling policy",
        reads={
            **VERL_ASYNC,
            "use_rollout": "async_training.use_rollout_log_probs",
        },
        condition=lambda v: (
            _verl_is_async(v) and not v.bypass and v.weight is None and v.reject is None and not v.use_rollout
        ),
        happens=ASYNCHRONOUS + " No importance weight corrects it.",
        fix="algorithm.rollout_correction.bypass_mode=True, which uses the engine's probabilities as the old "
        "ones, or algorithm.rollout_correction.rollout_is=token",
        source="verl 0.9.1, verl/trainer/ppo/v1/trainer_separate_async.py, _compute_old_log_prob; "
        "radixark/miles pull request 1829",
    ),
    Rule(
        id="truncated-sampling",
        framework="verl",
        severity="look",
        title="sampling is truncated, and importance weights are used",
        reads=VERL_TRUNCATION,
        condition=lambda v: (
            (v.top_p < 1 or v.top_k > 0) and bool(v.weight is not None or v.reject is not None or v.bypass)
        ),
        happens=TRUNCATED_SAMPLING + " top_p is {top_p}, top_k {top_k}.",
        fix="actor_rollout_ref.rollout.top_p=1.0 and actor_rollout_ref.rollout.top_k=-1",
        source="huggingface/trl issue 6789, of the same arithmetic; verl 0.9.1, "
        "verl/workers/config/rollout.py (logprobs_mode: processed_logprobs)",
    ),
    Rule(
        id="truncated-without-weight",
        framework="verl",
        severity="note",
        title="sampling is truncated",
        reads={**VERL_TRUNCATION, **VERL_POLICY, "distillation": "distillation.enabled"},
        condition=_verl_truncates_without_weight,
        happens=UNWEIGHTED_TRUNCATION + " top_p is {top_p}, top_k {top_k}.",
        fix="actor_rollout_ref.rollout.top_p=1.0 and actor_rollout_ref.rollout.top_k=-1",
        source=KEEP_SAMPLING_MASK.format(
            "verl 0.9.1, verl/workers/engine/fsdp/transformer_impl.py:98 (logits are only divided by the temperature)"
        ),
    ),
    Rule(
        id="greedy-sampling",
        framework="verl",
        severity="fix",
        title="the answers to a prompt are all the same",
        reads={
            "temperature": "actor_rollout_ref.rollout.temperature",
            "top_k": "actor_rollout_ref.rollout.top_k",
            "group": "actor_rollout_ref.rollout.n",
            **VERL_POLICY,
        },
        condition=_in_policy_gradient(samples_greedily),
        happens=GREEDY + "temperature is {temperature}, top_k {top_k}, n {group}.",
        fix="actor_rollout_ref.rollout.temperature=1.0 and actor_rollout_ref.rollout.top_k=-1",
        source="verl 0.9.1, verl/trainer/ppo/v1/agent_loop_tq.py:65 (temperature, top_p and top_k of the training)",
    ),
    Rule(
        id="temperature-near-zero",
        framework="verl",
        severity="look",
        title="the temperature is near 0",
        reads={
            "temperature": "actor_rollout_ref.rollout.temperature",
            "group": "actor_rollout_ref.rollout.n",
            **VERL_POLICY,
        },
        condition=_in_policy_gradient(samples_nearly_greedily),
        happens=NEARLY_GREEDY + "temperature is {temperature}, n {group}.",
        fix="actor_rollout_ref.rollout.temperature=1.0",
        source="verl 0.9.1, verl/trainer/ppo/v1/agent_loop_tq.py:65 (temperature of the training)",
    ),
    Rule(
        id="penalty-ignored",
        framework="verl",
        severity="look",
        title="the repetition penalty has no effect",
        reads={"penalty": "actor_rollout_ref.rollout.repetition_penalty"},
        condition=lambda v: v.penalty != 1,
        happens="repetition_penalty is {penalty}, and verl 0.9.1 samples with 1.0 whatever its value.",
        fix="remove actor_rollout_ref.rollout.repetition_penalty",
        source="verl 0.9.1, verl/trainer/ppo/v1/agent_loop_tq.py:68 and "
        "verl/experimental/agent_loop/agent_loop.py:594 (repetition_penalty=1.0)",
    ),
    Rule(
        id="entropy-bonus",
        framework="verl",
        severity="look",
        title="the bonus for entropy is far above published ones",
        reads={"coefficient": f"{VERL_ACTOR}entropy_coeff"},
        condition=lambda v: v.coefficient > LARGEST_ENTROPY_COEFFICIENT,
        happens=ENTROPY_BONUS + "entropy_coeff is {coefficient}.",
        fix="actor_rollout_ref.actor.entropy_coeff=0",
        source=ENTROPY_SOURCE.format("verl 0.9.1, verl/workers/utils/losses.py:128"),
    ),
    Rule(
        id="kl-without-switch",
        framework="verl",
        severity="note",
        title="the coefficient of the KL term has no effect",
        reads={
            "reward_coefficient": "algorithm.kl_ctrl.kl_coef",
            "loss_coefficient": f"{VERL_ACTOR}kl_loss_coef",
            "in_loss": f"{VERL_ACTOR}use_kl_loss",
            "in_reward": "algorithm.use_kl_in_reward",
            "early": "data.val_batch_size",
        },
        condition=_verl_kl_has_no_effect,
        happens="use_kl_loss is {in_loss} and use_kl_in_reward {in_reward}: there is no KL term, and "
        "kl_ctrl.kl_coef and kl_loss_coef are not used. Versions before 0.3 used kl_coef without a switch.",
        fix="actor_rollout_ref.actor.use_kl_loss=True or algorithm.use_kl_in_reward=True; or remove the "
        "coefficient",
        source="verl 0.9.1, verl/workers/utils/losses.py:132 and verl/trainer/ppo/v1/trainer_base.py:1788; "
        "verl-project/verl pull request 644",
    ),
    Rule(
        id="critic-and-group",
        framework="verl",
        severity="look",
        title="the answers of a group are not compared",
        reads={
            "group": "actor_rollout_ref.rollout.n",
            "estimator": "algorithm.adv_estimator",
            "distillation": "distillation.enabled",
        },
        condition=_verl_group_has_a_critic,
        happens=GROUP_AND_CRITIC,
        fix="algorithm.adv_estimator=grpo; or algorithm.adv_estimator=gae, if PPO is meant",
        source="verl 0.9.1, verl/trainer/ppo/utils.py:100 (need_critic) and "
        "verl/trainer/config/_generated_ppo_trainer.yaml (adv_estimator: gae)",
    ),
    Rule(
        id="gspo-clip",
        framework="verl",
        severity="look",
        title="the clip of GSPO is that of GRPO",
        reads={
            "loss": f"{VERL_ACTOR}policy_loss.loss_mode",
            "low": f"{VERL_ACTOR}clip_ratio_low",
            "high": f"{VERL_ACTOR}clip_ratio_high",
            **VERL_UPDATES,
            **VERL_ASYNC,
        },
        condition=_verl_gspo_clips_nothing,
        happens=GSPO_RANGE + " clip_ratio_low is {low}, clip_ratio_high {high}.",
        fix="actor_rollout_ref.actor.clip_ratio_low=3e-4 actor_rollout_ref.actor.clip_ratio_high=4e-4",
        source=GSPO_PAPER + "; verl-project/verl pull request 2775, by an author of the paper",
    ),
    Rule(
        id="batch-does-not-divide",
        framework="verl",
        severity="fix",
        title="a batch is no multiple of the mini-batch",
        reads={
            "train": "data.train_batch_size",
            "mini": f"{VERL_ACTOR}ppo_mini_batch_size",
            "program": "program",
        },
        condition=_verl_batch_is_not_divisible,
        happens="data.train_batch_size {train} is no multiple of ppo_mini_batch_size {mini}: the actor's "
        "update stops with an assertion. Early versions go on, and divide the loss of a smaller "
        "mini-batch as if it were whole.",
        fix="a data.train_batch_size that is a multiple of actor_rollout_ref.actor.ppo_mini_batch_size",
        only_before_start=True,
        source="verl 0.9.1, verl/utils/tensordict_utils.py, make_iterator; verl/workers/config/actor.py, "
        "validate",
    ),
    Rule(
        id="batch-does-not-divide-among-gpus",
        framework="verl",
        severity="fix",
        title="the answers of a batch do not divide among the GPUs",
        reads={
            "train": "data.train_batch_size",
            "group": "actor_rollout_ref.rollout.n",
            "gpus": "trainer.n_gpus_per_node",
            "nodes": "trainer.nnodes",
            "dynamic": f"{VERL_ACTOR}use_dynamic_bsz",
            "strategy": f"{VERL_ACTOR}strategy",
            "program": "program",
        },
        condition=lambda v: (
            not v.dynamic
            and v.strategy in ("fsdp", "fsdp2")
            and not any(part in v.program for part in VERL_ASYNC_PROGRAMS)
            and v.train * v.group % (v.gpus * v.nodes) != 0
        ),
        happens="data.train_batch_size {train} times rollout.n {group} is no multiple of {gpus} times "
        "{nodes} GPUs: verl stops before it trains.",
        fix="a data.train_batch_size for which the product is a multiple of trainer.n_gpus_per_node × "
        "trainer.nnodes",
        only_before_start=True,
        source="verl 0.9.1, verl/utils/config.py, validate_config",
    ),
    Rule(
        id="group-of-one",
        framework="verl",
        severity="fix",
        title="one answer to each prompt",
        reads={
            "group": "actor_rollout_ref.rollout.n",
            "estimator": "algorithm.adv_estimator",
            "program": "program",
            "distillation": "distillation.enabled",
        },
        condition=_verl_has_single_answers,
        happens=ONE_ANSWER + "{estimator} then takes the reward itself as the advantage, without a baseline.",
        fix="actor_rollout_ref.rollout.n=8",
        source="verl 0.9.1, verl/trainer/ppo/core_algos.py, compute_grpo_outcome_advantage",
    ),
    Rule(
        id="group-of-two",
        framework="verl",
        severity="note",
        title="two answers to each prompt",
        reads={
            "group": "actor_rollout_ref.rollout.n",
            "estimator": "algorithm.adv_estimator",
            "spread": "algorithm.norm_adv_by_std_in_grpo",
        },
        condition=lambda v: v.estimator in VERL_GROUPS[:3] and v.group == 2 and bool(v.spread),
        happens=TWO_ANSWERS,
        fix="actor_rollout_ref.rollout.n=8, or algorithm.norm_adv_by_std_in_grpo=False",
        source="Liu et al., Understanding R1-Zero-Like Training, arXiv 2503.20783, section 3.1",
    ),
    Rule(
        id="lora-reference",
        framework="verl",
        severity="look",
        title="the KL term is relative to the base model, not to the adapter",
        reads={
            "adapter": "actor_rollout_ref.model.lora_adapter_path",
            "loss": f"{VERL_ACTOR}use_kl_loss",
            "reward": "algorithm.use_kl_in_reward",
        },
        condition=lambda v: v.has_value("adapter") and bool(v.loss or v.reward),
        happens="The run begins with the adapter {adapter}, and the reference is computed with every adapter "
        "turned off: the KL is large at the first step, and pulls the policy back to the base model.",
        fix="merge the adapter into actor_rollout_ref.model.path first, or "
        "actor_rollout_ref.actor.use_kl_loss=False and algorithm.use_kl_in_reward=False",
        source="verl 0.9.1, verl/trainer/ppo/v1/trainer_base.py, _compute_ref_log_prob (no_lora_adapter); "
        "huggingface/trl issue 3194 describes the effect",
    ),
    Rule(
        id="correction-without-probabilities",
        framework="verl",
        severity="fix",
        title="the correction has no effect",
        reads={
            "log_probs": "actor_rollout_ref.rollout.calculate_log_probs",
            "reject": f"{VERL_CORRECTION}rollout_rs",
            "weight": f"{VERL_CORRECTION}rollout_is",
            "bypass": f"{VERL_CORRECTION}bypass_mode",
        },
        condition=lambda v: bool(
            not v.log_probs and (v.reject is not None or v.weight is not None) and not v.bypass
        ),
        happens="calculate_log_probs is {log_probs}, so the engine's probabilities are not in the batch, and "
        "rollout_rs {reject} and rollout_is {weight} are ignored without a warning.",
        fix="actor_rollout_ref.rollout.calculate_log_probs=True",
        source="verl 0.9.1, verl/trainer/ppo/v1/trainer_base.py: the correction runs where rollout_log_probs "
        "is in the batch",
    ),
    Rule(
        id="correction-in-bypass",
        framework="verl",
        severity="fix",
        title="the correction has no effect",
        reads={
            "bypass": f"{VERL_CORRECTION}bypass_mode",
            "reject": f"{VERL_CORRECTION}rollout_rs",
            "weight": f"{VERL_CORRECTION}rollout_is",
            "kind": f"{VERL_CORRECTION}loss_type",
            "v1": "trainer.use_v1",
            "program": "program",
            "loss": f"{VERL_ACTOR}policy_loss.loss_mode",
        },
        condition=lambda v: bool(
            v.bypass
            and (v.reject is not None or v.weight is not None or v.kind != "ppo_clip")
            and v.v1
            and v.loss != "bypass_mode"
            and not any(part in v.program for part in VERL_ASYNC_PROGRAMS)
        ),
        happens="With bypass_mode, the correction is left to the loss bypass_mode. The trainer that verl "
        "0.9.1 uses by default (trainer.use_v1) does not choose that loss: rollout_rs {reject}, rollout_is "
        "{weight} and loss_type {kind} have no effect.",
        fix="algorithm.rollout_correction.bypass_mode=False, or trainer.use_v1=False",
        source="verl 0.9.1: apply_bypass_mode of verl/trainer/ppo/rollout_corr_helper.py is called by "
        "verl/trainer/ppo/ray_trainer.py alone",
    ),
    Rule(
        id="rejection-without-threshold",
        framework="verl",
        severity="fix",
        title="rejection has no threshold",
        reads={
            "reject": f"{VERL_CORRECTION}rollout_rs",
            "threshold": f"{VERL_CORRECTION}rollout_rs_threshold",
        },
        condition=lambda v: v.reject is not None and v.threshold is None,
        happens="rollout_rs is {reject}, and rollout_rs_threshold is not set: the first step stops with an "
        "error.",
        fix="algorithm.rollout_correction.rollout_rs_threshold",
        source="verl 0.9.1, verl/trainer/ppo/rollout_corr_helper.py, "
        "compute_rollout_correction_and_rejection_mask",
        only_before_start=True,
    ),
    Rule(
        id="mean-depends-on-micro-batch",
        framework="verl",
        severity="look",
        title="the loss depends on how a batch is split",
        reads={
            "reduction": f"{VERL_ACTOR}loss_agg_mode",
            "scale": f"{VERL_ACTOR}loss_scale_factor",
        },
        condition=lambda v: v.reduction == "seq-mean-token-sum-norm" and v.scale is None,
        happens="loss_agg_mode seq-mean-token-sum-norm without loss_scale_factor divides by the longest "
        "answer of each micro-batch, so the weight of an answer depends on the other answers in its "
        "micro-batch. Dr. GRPO divides by a constant.",
        fix="actor_rollout_ref.actor.loss_scale_factor=N with N the value of data.max_response_length",
        source="verl 0.9.1, verl/trainer/ppo/core_algos.py, agg_loss; verl-project/verl issue 3741",
    ),
    Rule(
        id="learning-rate",
        framework="verl",
        severity="look",
        title="the learning rate is far above published ones",
        reads={
            "rate": f"{VERL_ACTOR}optim.lr",
            "model": "actor_rollout_ref.model.path",
            "lora": "actor_rollout_ref.model.lora_rank",
            "lora_rank": "actor_rollout_ref.model.lora.rank",
            "adapter": "actor_rollout_ref.model.lora_adapter_path",
            "optimizer": f"{VERL_ACTOR}optim.optimizer",
        },
        condition=learning_rate_is_high,
        happens=RATE_HAPPENS,
        fix="actor_rollout_ref.actor.optim.lr=1e-6, or 1e-5 with LoRA",
        source=RATE_SOURCE,
    ),
)
