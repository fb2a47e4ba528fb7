"""verl: its settings, their defaults, and the rules for its configurations."""

from __future__ import annotations

from collections.abc import Callable

from rlvet.lint.framework import Framework
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
    GSPO_PAPER,
    KEEP_SAMPLING_MASK,
    LARGEST_ENTROPY_COEFFICIENT,
    LEARNING_RATE,
    MEAN_DEPENDS_ON_MICRO_BATCH,
    NEGATIVE_KL,
    PENALTY_IGNORED,
    TEMPERATURE_NEAR_ZERO,
    TRUNCATED_SAMPLING,
    TRUNCATED_WITHOUT_WEIGHT,
    samples_greedily,
    samples_nearly_greedily,
    setting_without_effect,
)
from rlvet.lint.values import UnknownValue, Values, largest
from rlvet.runs.files import load_table

ACTOR = "actor_rollout_ref.actor."
CORRECTION = "algorithm.rollout_correction."
CLIPS = ("vanilla", "dppo_tv", "dppo_kl", "gspo", "geo_mean", "cispo", "clip_cov")
GROUPS = ("grpo", "grpo_passk", "grpo_vectorized", "rloo", "rloo_vectorized", "gdpo", "opo")
UPDATES = {
    "train": "data.train_batch_size",
    "mini": f"{ACTOR}ppo_mini_batch_size",
    "epochs": f"{ACTOR}ppo_epochs",
}
ASYNC = {
    "program": "program",
    "mode": "trainer.v1.trainer_mode",
    "v1": "trainer.use_v1",
    "bypass": f"{CORRECTION}bypass_mode",
    "weight": f"{CORRECTION}rollout_is",
    "reject": f"{CORRECTION}rollout_rs",
}
ASYNC_PROGRAMS = ("fully_async", "one_step_off")


LOSS_SETTINGS = {
    name: f"{ACTOR}{name}"
    for name in (
        "clip_ratio_low",
        "clip_ratio_high",
        "clip_ratio_c",
        "loss_agg_mode",
        "tau_pos",
        "tau_neg",
        "clip_ratio",
    )
} | {
    name: f"{ACTOR}policy_loss.{name}"
    for name in ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef", "dro_beta")
}
"""The settings of losses that some of them do not read."""
SETTINGS_SINCE_0_3 = (
    f"{ACTOR}clip_ratio_high",
    f"{ACTOR}clip_ratio_low",
    f"{ACTOR}loss_agg_mode",
    "actor_rollout_ref.rollout.mode",
)
"""Settings that versions before 0.3 did not have."""
PPO_PROGRAMS = ("verl.trainer.main_ppo", "verl.experimental.", "recipe.dapo.")
"""Prefixes of the modules that train by advantages."""
PROGRAMS = ("verl.", "recipe.dapo.")
"""Prefixes of the modules whose batches and groups follow the settings."""


def _is_async(v: Values) -> bool:
    """Return whether answers may be sampled from older weights than those in training."""
    is_async_program = any(part in v.program for part in ASYNC_PROGRAMS)
    return is_async_program or bool(v.v1 and v.mode in ("colocate_async", "separate_async"))


def _check_program(v: Values) -> None:
    """Check that the command runs a program of verl, since others may form batches and groups differently.

    Raises:
        UnknownValue: if the command runs another program.
    """
    if v.program and not v.program.startswith(PROGRAMS):
        raise UnknownValue(f"{v.program} is no program of verl, and may form batches and groups differently")


def _clip_has_no_effect(v: Values) -> bool:
    """Return whether a clip is set although each batch gets one update."""
    if not v.is_set("high", "low", "clip") or v.loss not in CLIPS:
        return False
    if v.train != v.mini or v.epochs != 1 or v.bypass or _is_async(v):
        return False
    _check_program(v)
    return True


def _reads_clip_ratio(v: Values, name: str) -> bool:
    """Return whether a setting is clip_ratio, and has an effect beside clip_ratio_low and clip_ratio_high."""
    if name != "clip_ratio":
        return False
    if not any(since in v.settings for since in SETTINGS_SINCE_0_3):
        raise UnknownValue("verl before 0.3 had no clip_ratio_low, and used clip_ratio")
    return v.clip_ratio_low is None or v.clip_ratio_high is None


def _gspo_clips_nothing(v: Values) -> bool:
    """Return whether GSPO has the clip range of GRPO. With one update, no clip has an effect."""
    if v.loss != "gspo" or largest(v.low, v.high) < 0.05:
        return False
    return v.train != v.mini or v.epochs != 1 or v.bypass or _is_async(v)


def _has_single_answers(v: Values) -> bool:
    """Return whether a prompt has one answer although the estimator compares the answers of a group."""
    if v.estimator not in GROUPS or v.group != 1:
        return False
    _check_program(v)
    # Distillation learns from a teacher, without groups.
    return not v.distillation


def _batch_is_not_divisible(v: Values) -> bool:
    """Return whether the batch is no multiple of the mini-batch."""
    if v.train % v.mini == 0:
        return False
    _check_program(v)
    return True


TRUNCATION = {
    "top_p": "actor_rollout_ref.rollout.top_p",
    "top_k": "actor_rollout_ref.rollout.top_k",
    "weight": f"{CORRECTION}rollout_is",
    "reject": f"{CORRECTION}rollout_rs",
    "bypass": f"{CORRECTION}bypass_mode",
}


POLICY = {"estimator": "algorithm.adv_estimator", "program": "program"}


def _check_policy_gradient(v: Values) -> None:
    """Check that advantages are estimated. Other programs generate answers, or distil, with the same settings.

    Raises:
        UnknownValue: if this is not known.
    """
    if v.setting("estimator") is None and not v.program.startswith(PPO_PROGRAMS):
        raise UnknownValue(f"{v.program or 'the program'} may not train by advantages")


def _in_policy_gradient(condition: Callable[[Values], bool]) -> Callable[[Values], bool]:
    """Return a condition that holds only where advantages are estimated, see `_check_policy_gradient`."""

    def holds(v: Values) -> bool:
        if not condition(v):
            return False
        _check_policy_gradient(v)
        return True

    return holds


def _truncates_without_weight(v: Values) -> bool:
    """Return whether sampling is truncated, and no importance weight is known to be used."""
    if not (v.top_p < 1 or v.top_k > 1):
        return False
    _check_policy_gradient(v)
    is_weighted = v.get("weight") is not None or v.get("reject") is not None or bool(v.get("bypass"))
    # Distillation learns from a teacher's probabilities, not from advantages.
    return not is_weighted and not v.get("distillation")


def _pays_for_distance(v: Values) -> bool:
    if v.setting("early") is not None:
        raise UnknownValue(
            "data.val_batch_size is of early versions of verl, which subtracted the KL term, so that a positive "
            "coefficient paid for distance"
        )
    return bool(v.in_loss) and v.loss_coefficient < 0


def _kl_has_no_effect(v: Values) -> bool:
    """Return whether a coefficient of a KL term is set without its switch, and no term is used.

    A coefficient beside its switch is no fault: whoever sets the switch to False knows that it has no effect.

    Raises:
        UnknownValue: if the configuration is for an early version of verl, which had no switch.
    """
    in_reward = v.is_set_to_more_than("reward_coefficient", 0) and v.setting("in_reward") is None
    in_loss = v.is_set_to_more_than("loss_coefficient", 0) and v.setting("in_loss") is None
    if not (in_reward or in_loss) or v.in_loss or v.in_reward:
        return False
    is_recent = any(name in v.settings for name in SETTINGS_SINCE_0_3)
    if v.setting("early") is not None and not is_recent:
        raise UnknownValue("data.val_batch_size is of versions of verl that used kl_coef without a switch")
    return True


def _group_has_a_critic(v: Values) -> bool:
    """Return whether groups are sampled with the default estimator, and no critic is configured."""
    if any(name.startswith("critic.") for name in v.settings) or v.setting("estimator") is not None:
        return False
    return v.estimator == "gae" and v.group > 1 and not v.distillation


SECTIONS = (
    "data",
    "algorithm",
    "algorithm.rollout_correction",
    "trainer",
    "actor_rollout_ref.actor",
    "actor_rollout_ref.actor.fsdp_config",
    "actor_rollout_ref.actor.optim",
    "actor_rollout_ref.actor.policy_loss",
    "actor_rollout_ref.ref",
    "actor_rollout_ref.rollout",
    "actor_rollout_ref.model",
    "critic",
)
"""Groups of which hydra refuses settings that are not verl's. They are those with the settings that rules read."""


VERL = Framework(
    key="verl",
    title="verl",
    version="0.9.1",
    defaults={
        "actor_rollout_ref.actor.clip_ratio": 0.2,
        "actor_rollout_ref.actor.clip_ratio_c": 3.0,
        "actor_rollout_ref.actor.clip_ratio_high": 0.2,
        "actor_rollout_ref.actor.clip_ratio_low": 0.2,
        "actor_rollout_ref.actor.entropy_coeff": 0,
        "actor_rollout_ref.actor.kl_loss_coef": 0.001,
        "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
        "actor_rollout_ref.actor.loss_scale_factor": None,
        "actor_rollout_ref.actor.optim.lr": 1e-6,
        "actor_rollout_ref.actor.optim.optimizer": "AdamW",
        "actor_rollout_ref.actor.policy_loss.clip_cov_lb": 1.0,
        "actor_rollout_ref.actor.policy_loss.clip_cov_ratio": 0.0002,
        "actor_rollout_ref.actor.policy_loss.clip_cov_ub": 5.0,
        "actor_rollout_ref.actor.policy_loss.dro_beta": None,
        "actor_rollout_ref.actor.policy_loss.kl_cov_ratio": 0.0002,
        "actor_rollout_ref.actor.policy_loss.loss_mode": "vanilla",
        "actor_rollout_ref.actor.policy_loss.ppo_kl_coef": 0.1,
        "actor_rollout_ref.actor.ppo_epochs": 1,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
        "actor_rollout_ref.actor.strategy": "fsdp",
        "actor_rollout_ref.actor.tau_neg": 1.05,
        "actor_rollout_ref.actor.tau_pos": 1.0,
        "actor_rollout_ref.actor.use_dynamic_bsz": False,
        "actor_rollout_ref.actor.use_kl_loss": False,
        "actor_rollout_ref.model.lora.rank": 0,
        "actor_rollout_ref.model.lora_adapter_path": None,
        "actor_rollout_ref.model.lora_rank": 0,
        "actor_rollout_ref.model.path": None,
        "actor_rollout_ref.rollout.calculate_log_probs": True,
        "actor_rollout_ref.rollout.n": 1,
        "actor_rollout_ref.rollout.repetition_penalty": 1.0,
        "actor_rollout_ref.rollout.temperature": 1.0,
        "actor_rollout_ref.rollout.top_k": -1,
        "actor_rollout_ref.rollout.top_p": 1.0,
        "algorithm.adv_estimator": "gae",
        "algorithm.kl_ctrl.kl_coef": 0.001,
        "algorithm.norm_adv_by_std_in_grpo": True,
        "algorithm.rollout_correction.bypass_mode": False,
        "algorithm.rollout_correction.loss_type": "ppo_clip",
        "algorithm.rollout_correction.rollout_is": None,
        "algorithm.rollout_correction.rollout_rs": None,
        "algorithm.rollout_correction.rollout_rs_threshold": None,
        "algorithm.use_kl_in_reward": False,
        "async_training.use_rollout_log_probs": None,
        "data.train_batch_size": 1024,
        "data.val_batch_size": None,
        "distillation.enabled": False,
        # Not a setting: the module or script that a command runs.
        "program": "",
        "trainer.n_gpus_per_node": 8,
        "trainer.nnodes": 1,
        "trainer.use_v1": True,
        "trainer.v1.trainer_mode": "sync",
    },
    marks=(("actor_rollout_ref.*",), ("algorithm.rollout_correction.*",)),
    # Not verl.trainer.main, the program of EasyR1, which has other names.
    programs=("verl.trainer.main_ppo", "verl.experimental."),
    optional=frozenset(
        {
            "actor_rollout_ref.actor.optim.optimizer",
            "actor_rollout_ref.model.lora.rank",
            "actor_rollout_ref.model.lora_adapter_path",
            "actor_rollout_ref.model.lora_rank",
            "actor_rollout_ref.model.path",
            "actor_rollout_ref.rollout.repetition_penalty",
            "async_training.use_rollout_log_probs",
            "data.val_batch_size",
            "distillation.enabled",
            "program",
        }
    ),
    programs_of_settings=("verl.trainer.main_ppo", "recipe.dapo.main_dapo", "verl/trainer/main_ppo"),
    # rLLM composes verl's ppo_trainer.yaml, see rllm/trainer/config/agent_ppo_trainer.yaml.
    extensions=("rllm.",),
    program_defaults={
        "verl.experimental.fully_async_policy.": {"algorithm.rollout_correction.bypass_mode": True},
        "verl.experimental.one_step_off_policy.": {"algorithm.rollout_correction.bypass_mode": True},
    },
    early_settings=frozenset(
        {"actor_rollout_ref.actor.fsdp_config.grad_offload", "actor_rollout_ref.ref.fsdp_config.grad_offload"}
    ),
    stable=frozenset(
        # Compared with ppo_trainer.yaml of verl 0.1, as TinyZero and Logic-RL have it.
        {
            "actor_rollout_ref.actor.clip_ratio",
            "actor_rollout_ref.actor.optim.lr",
            "actor_rollout_ref.actor.optim.optimizer",
            "actor_rollout_ref.actor.ppo_epochs",
            "actor_rollout_ref.actor.ppo_mini_batch_size",
            "actor_rollout_ref.actor.strategy",
            "actor_rollout_ref.actor.use_dynamic_bsz",
            "actor_rollout_ref.model.lora.rank",
            "actor_rollout_ref.model.lora_adapter_path",
            "actor_rollout_ref.model.lora_rank",
            "actor_rollout_ref.model.path",
            "actor_rollout_ref.rollout.n",
            "actor_rollout_ref.rollout.temperature",
            "actor_rollout_ref.rollout.top_k",
            "actor_rollout_ref.rollout.top_p",
            "algorithm.adv_estimator",
            "data.train_batch_size",
            "distillation.enabled",
            "program",
            "trainer.n_gpus_per_node",
            "trainer.nnodes",
        }
    ),
    sections={
        section: frozenset(load_table("known/verl")["settings"][section].split()) for section in SECTIONS
    },
    added=frozenset(
        f"actor_rollout_ref.actor.policy_loss.{name}"
        for name in (
            "accept_idle_clip",
            "audit",
            "audit_detail",
            "audited",
            "average",
            "certify",
            "method",
            "record",
            "watched",
        )
    ),
    rules=(
        setting_without_effect(
            "verl",
            LOSS_SETTINGS,
            f"{ACTOR}policy_loss.loss_mode",
            "verl 0.9.1, verl/trainer/ppo/core_algos.py",
            is_read=_reads_clip_ratio,
        ),
        CLIP_CANNOT_ACT(
            reads={
                "high": f"{ACTOR}clip_ratio_high",
                "low": f"{ACTOR}clip_ratio_low",
                "clip": f"{ACTOR}clip_ratio",
                "loss": f"{ACTOR}policy_loss.loss_mode",
                **UPDATES,
                **ASYNC,
            },
            condition=_clip_has_no_effect,
            details="{train.name} and {mini.name} are both {train}, and {epochs.name} is {epochs}: "
            "clip_ratio_low {low} and clip_ratio_high {high} have no effect.",
            fix="set actor_rollout_ref.actor.ppo_mini_batch_size below data.train_batch_size, or "
            "actor_rollout_ref.actor.ppo_epochs above 1; or remove the clip settings",
            source="verl-project/verl issue 791; BytedTsinghua-SIA/DAPO issues 11 and 23; verl 0.9.1, "
            "verl/trainer/ppo/v1/trainer_base.py, _update_actor",
        ),
        ASYNCHRONOUS_ANCHOR(
            reads={
                **ASYNC,
                "use_rollout": "async_training.use_rollout_log_probs",
            },
            condition=lambda v: (
                _is_async(v) and not v.bypass and v.weight is None and v.reject is None and not v.use_rollout
            ),
            details="No importance weight corrects it.",
            fix="algorithm.rollout_correction.bypass_mode=True, which uses the engine's probabilities as the old "
            "ones, or algorithm.rollout_correction.rollout_is=token",
            source="verl 0.9.1, verl/trainer/ppo/v1/trainer_separate_async.py, _compute_old_log_prob; "
            "radixark/miles pull request 1829",
        ),
        TRUNCATED_SAMPLING(
            reads=TRUNCATION,
            condition=lambda v: (
                (v.top_p < 1 or v.top_k > 0)
                and bool(v.weight is not None or v.reject is not None or v.bypass)
            ),
            details="top_p is {top_p}, top_k {top_k}.",
            fix="actor_rollout_ref.rollout.top_p=1.0 and actor_rollout_ref.rollout.top_k=-1",
            source="huggingface/trl issue 6789, of the same arithmetic; verl 0.9.1, "
            "verl/workers/config/rollout.py (logprobs_mode: processed_logprobs)",
        ),
        TRUNCATED_WITHOUT_WEIGHT(
            reads={**TRUNCATION, **POLICY, "distillation": "distillation.enabled"},
            condition=_truncates_without_weight,
            details="top_p is {top_p}, top_k {top_k}.",
            fix="actor_rollout_ref.rollout.top_p=1.0 and actor_rollout_ref.rollout.top_k=-1",
            source=KEEP_SAMPLING_MASK.format(
                "verl 0.9.1, verl/workers/engine/fsdp/transformer_impl.py:98 (logits are only divided by the "
                "temperature)"
            ),
        ),
        GREEDY_SAMPLING(
            reads={
                "temperature": "actor_rollout_ref.rollout.temperature",
                "top_k": "actor_rollout_ref.rollout.top_k",
                "group": "actor_rollout_ref.rollout.n",
                **POLICY,
            },
            condition=_in_policy_gradient(samples_greedily),
            details="temperature is {temperature}, top_k {top_k}, n {group}.",
            fix="actor_rollout_ref.rollout.temperature=1.0 and actor_rollout_ref.rollout.top_k=-1",
            source="verl 0.9.1, verl/trainer/ppo/v1/agent_loop_tq.py:65 (temperature, top_p and top_k of the training)",
        ),
        TEMPERATURE_NEAR_ZERO(
            reads={
                "temperature": "actor_rollout_ref.rollout.temperature",
                "group": "actor_rollout_ref.rollout.n",
                **POLICY,
            },
            condition=_in_policy_gradient(samples_nearly_greedily),
            details="temperature is {temperature}, n {group}.",
            fix="actor_rollout_ref.rollout.temperature=1.0",
            source="verl 0.9.1, verl/trainer/ppo/v1/agent_loop_tq.py:65 (temperature of the training)",
        ),
        PENALTY_IGNORED(
            reads={"penalty": "actor_rollout_ref.rollout.repetition_penalty"},
            condition=lambda v: v.penalty != 1,
            details="repetition_penalty is {penalty}, and verl 0.9.1 samples with 1.0 whatever its value.",
            fix="remove actor_rollout_ref.rollout.repetition_penalty",
            source="verl 0.9.1, verl/trainer/ppo/v1/agent_loop_tq.py:68 and "
            "verl/experimental/agent_loop/agent_loop.py:594 (repetition_penalty=1.0)",
        ),
        ENTROPY_BONUS(
            reads={"coefficient": f"{ACTOR}entropy_coeff"},
            condition=lambda v: v.coefficient > LARGEST_ENTROPY_COEFFICIENT,
            details="entropy_coeff is {coefficient}.",
            fix="actor_rollout_ref.actor.entropy_coeff=0",
            source=ENTROPY_SOURCE.format("verl 0.9.1, verl/workers/utils/losses.py:128"),
        ),
        NEGATIVE_KL(
            reads={
                "loss_coefficient": f"{ACTOR}kl_loss_coef",
                "in_loss": f"{ACTOR}use_kl_loss",
                "early": "data.val_batch_size",
            },
            condition=_pays_for_distance,
            details="kl_loss_coef is {loss_coefficient}.",
            fix="actor_rollout_ref.actor.kl_loss_coef=0.001, or another positive one; or use_kl_loss=False",
            source="verl 0.9.1, verl/workers/utils/losses.py:140; verl-project/verl pull request 179",
        ),
        Rule(
            id="kl-without-switch",
            severity="note",
            title="the coefficient of the KL term has no effect",
            reads={
                "reward_coefficient": "algorithm.kl_ctrl.kl_coef",
                "loss_coefficient": f"{ACTOR}kl_loss_coef",
                "in_loss": f"{ACTOR}use_kl_loss",
                "in_reward": "algorithm.use_kl_in_reward",
                "early": "data.val_batch_size",
            },
            condition=_kl_has_no_effect,
            details="use_kl_loss is {in_loss} and use_kl_in_reward {in_reward}: there is no KL term, and "
            "kl_ctrl.kl_coef and kl_loss_coef are not used. Versions before 0.3 used kl_coef without a switch.",
            fix="actor_rollout_ref.actor.use_kl_loss=True or algorithm.use_kl_in_reward=True; or remove the "
            "coefficient",
            source="verl 0.9.1, verl/workers/utils/losses.py:132 and verl/trainer/ppo/v1/trainer_base.py:1788; "
            "verl-project/verl pull request 644",
        ),
        CRITIC_AND_GROUP(
            reads={
                "group": "actor_rollout_ref.rollout.n",
                "estimator": "algorithm.adv_estimator",
                "distillation": "distillation.enabled",
            },
            condition=_group_has_a_critic,
            fix="algorithm.adv_estimator=grpo; or algorithm.adv_estimator=gae, if PPO is meant",
            source="verl 0.9.1, verl/trainer/ppo/utils.py:100 (need_critic) and "
            "verl/trainer/config/_generated_ppo_trainer.yaml (adv_estimator: gae)",
        ),
        GSPO_CLIP(
            reads={
                "loss": f"{ACTOR}policy_loss.loss_mode",
                "low": f"{ACTOR}clip_ratio_low",
                "high": f"{ACTOR}clip_ratio_high",
                **UPDATES,
                **ASYNC,
            },
            condition=_gspo_clips_nothing,
            details="clip_ratio_low is {low}, clip_ratio_high {high}.",
            fix="actor_rollout_ref.actor.clip_ratio_low=3e-4 actor_rollout_ref.actor.clip_ratio_high=4e-4",
            source=GSPO_PAPER + "; verl-project/verl pull request 2775, by an author of the paper",
        ),
        BATCH_DOES_NOT_DIVIDE(
            title="a batch is no multiple of the mini-batch",
            reads={
                "train": "data.train_batch_size",
                "mini": f"{ACTOR}ppo_mini_batch_size",
                "program": "program",
            },
            condition=_batch_is_not_divisible,
            details="data.train_batch_size {train} is no multiple of ppo_mini_batch_size {mini}: the actor's "
            "update stops with an assertion. Early versions go on, and divide the loss of a smaller "
            "mini-batch as if it were whole.",
            fix="a data.train_batch_size that is a multiple of actor_rollout_ref.actor.ppo_mini_batch_size",
            source="verl 0.9.1, verl/utils/tensordict_utils.py, make_iterator; verl/workers/config/actor.py, "
            "validate",
        ),
        Rule(
            id="batch-does-not-divide-among-gpus",
            severity="fix",
            title="the answers of a batch do not divide among the GPUs",
            reads={
                "train": "data.train_batch_size",
                "group": "actor_rollout_ref.rollout.n",
                "gpus": "trainer.n_gpus_per_node",
                "nodes": "trainer.nnodes",
                "dynamic": f"{ACTOR}use_dynamic_bsz",
                "strategy": f"{ACTOR}strategy",
                "program": "program",
            },
            condition=lambda v: (
                not v.dynamic
                and v.strategy in ("fsdp", "fsdp2")
                and not any(part in v.program for part in ASYNC_PROGRAMS)
                and v.train * v.group % (v.gpus * v.nodes) != 0
            ),
            details="data.train_batch_size {train} times rollout.n {group} is no multiple of {gpus} times "
            "{nodes} GPUs: verl stops before it trains.",
            fix="a data.train_batch_size for which the product is a multiple of trainer.n_gpus_per_node × "
            "trainer.nnodes",
            only_before_start=True,
            source="verl 0.9.1, verl/utils/config.py, validate_config",
        ),
        GROUP_OF_ONE(
            reads={
                "group": "actor_rollout_ref.rollout.n",
                "estimator": "algorithm.adv_estimator",
                "program": "program",
                "distillation": "distillation.enabled",
            },
            condition=_has_single_answers,
            details="{estimator} then takes the reward itself as the advantage, without a baseline.",
            fix="actor_rollout_ref.rollout.n=8",
            source="verl 0.9.1, verl/trainer/ppo/core_algos.py, compute_grpo_outcome_advantage",
        ),
        GROUP_OF_TWO(
            reads={
                "group": "actor_rollout_ref.rollout.n",
                "estimator": "algorithm.adv_estimator",
                "spread": "algorithm.norm_adv_by_std_in_grpo",
            },
            condition=lambda v: v.estimator in GROUPS[:3] and v.group == 2 and bool(v.spread),
            fix="actor_rollout_ref.rollout.n=8, or algorithm.norm_adv_by_std_in_grpo=False",
        ),
        Rule(
            id="lora-reference",
            severity="look",
            title="the KL term is relative to the base model, not to the adapter",
            reads={
                "adapter": "actor_rollout_ref.model.lora_adapter_path",
                "loss": f"{ACTOR}use_kl_loss",
                "reward": "algorithm.use_kl_in_reward",
            },
            condition=lambda v: v.has_value("adapter") and bool(v.loss or v.reward),
            details="The run begins with the adapter {adapter}, and the reference is computed with every adapter "
            "turned off: the KL is large at the first step, and pulls the policy back to the base model.",
            fix="merge the adapter into actor_rollout_ref.model.path first, or "
            "actor_rollout_ref.actor.use_kl_loss=False and algorithm.use_kl_in_reward=False",
            source="verl 0.9.1, verl/trainer/ppo/v1/trainer_base.py, _compute_ref_log_prob (no_lora_adapter); "
            "huggingface/trl issue 3194 describes the effect",
        ),
        Rule(
            id="correction-without-probabilities",
            severity="fix",
            title="the correction has no effect",
            reads={
                "log_probs": "actor_rollout_ref.rollout.calculate_log_probs",
                "reject": f"{CORRECTION}rollout_rs",
                "weight": f"{CORRECTION}rollout_is",
                "bypass": f"{CORRECTION}bypass_mode",
            },
            condition=lambda v: bool(
                not v.log_probs and (v.reject is not None or v.weight is not None) and not v.bypass
            ),
            details="calculate_log_probs is {log_probs}, so the engine's probabilities are not in the batch, and "
            "rollout_rs {reject} and rollout_is {weight} are ignored without a warning.",
            fix="actor_rollout_ref.rollout.calculate_log_probs=True",
            source="verl 0.9.1, verl/trainer/ppo/v1/trainer_base.py: the correction runs where rollout_log_probs "
            "is in the batch",
        ),
        Rule(
            id="correction-in-bypass",
            severity="fix",
            title="the correction has no effect",
            reads={
                "bypass": f"{CORRECTION}bypass_mode",
                "reject": f"{CORRECTION}rollout_rs",
                "weight": f"{CORRECTION}rollout_is",
                "kind": f"{CORRECTION}loss_type",
                "v1": "trainer.use_v1",
                "program": "program",
                "loss": f"{ACTOR}policy_loss.loss_mode",
            },
            condition=lambda v: bool(
                v.bypass
                and (v.reject is not None or v.weight is not None or v.kind != "ppo_clip")
                and v.v1
                and v.loss != "bypass_mode"
                and not any(part in v.program for part in ASYNC_PROGRAMS)
            ),
            details="With bypass_mode, the correction is left to the loss bypass_mode. The trainer that verl "
            "0.9.1 uses by default (trainer.use_v1) does not choose that loss: rollout_rs {reject}, rollout_is "
            "{weight} and loss_type {kind} have no effect.",
            fix="algorithm.rollout_correction.bypass_mode=False, or trainer.use_v1=False",
            source="verl 0.9.1: apply_bypass_mode of verl/trainer/ppo/rollout_corr_helper.py is called by "
            "verl/trainer/ppo/ray_trainer.py alone",
        ),
        Rule(
            id="rejection-without-threshold",
            severity="fix",
            title="rejection has no threshold",
            reads={
                "reject": f"{CORRECTION}rollout_rs",
                "threshold": f"{CORRECTION}rollout_rs_threshold",
            },
            condition=lambda v: v.reject is not None and v.threshold is None,
            details="rollout_rs is {reject}, and rollout_rs_threshold is not set: the first step stops with an "
            "error.",
            fix="algorithm.rollout_correction.rollout_rs_threshold",
            source="verl 0.9.1, verl/trainer/ppo/rollout_corr_helper.py, "
            "compute_rollout_correction_and_rejection_mask",
            only_before_start=True,
        ),
        MEAN_DEPENDS_ON_MICRO_BATCH(
            reads={
                "reduction": f"{ACTOR}loss_agg_mode",
                "scale": f"{ACTOR}loss_scale_factor",
            },
            condition=lambda v: v.reduction == "seq-mean-token-sum-norm" and v.scale is None,
            details="loss_agg_mode seq-mean-token-sum-norm without loss_scale_factor divides by the longest "
            "answer of each micro-batch, so the weight of an answer depends on the other answers in its "
            "micro-batch. Dr. GRPO divides by a constant.",
            fix="actor_rollout_ref.actor.loss_scale_factor=N with N the value of data.max_response_length",
            source="verl 0.9.1, verl/trainer/ppo/core_algos.py, agg_loss; verl-project/verl issue 3741",
        ),
        LEARNING_RATE(
            reads={
                "rate": f"{ACTOR}optim.lr",
                "model": "actor_rollout_ref.model.path",
                "lora": "actor_rollout_ref.model.lora_rank",
                "lora_rank": "actor_rollout_ref.model.lora.rank",
                "adapter": "actor_rollout_ref.model.lora_adapter_path",
                "optimizer": f"{ACTOR}optim.optimizer",
            },
            fix="actor_rollout_ref.actor.optim.lr=1e-6, or 1e-5 with LoRA",
        ),
    ),
)
