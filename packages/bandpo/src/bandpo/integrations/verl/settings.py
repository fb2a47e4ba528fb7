"""The settings of a verl run: the required ones, those on the command line, and the trainer that reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from omegaconf import OmegaConf

from bandpo.core.errors import InvalidValue

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from verl.workers.config import ActorConfig

ACTOR = "actor_rollout_ref.actor."
ROLLOUT = "actor_rollout_ref.rollout."
POLICY_LOSS = f"{ACTOR}policy_loss."

POSITIVE_INTEGER = "a whole number of at least 1"
NUMBER = "a number"
BOOLEAN = "true or false"
TEXT = "a text"
ANY_VALUE = "set"
REQUIRED: Mapping[str, str] = {
    "data.train_files": ANY_VALUE,
    "data.val_files": ANY_VALUE,
    "data.train_batch_size": POSITIVE_INTEGER,
    "data.max_prompt_length": POSITIVE_INTEGER,
    "data.max_response_length": POSITIVE_INTEGER,
    "data.prompt_key": TEXT,
    "actor_rollout_ref.model.path": TEXT,
    "actor_rollout_ref.model.lora_rank": NUMBER,
    "actor_rollout_ref.model.lora.rank": NUMBER,
    f"{ACTOR}strategy": TEXT,
    f"{ACTOR}fsdp_config.strategy": TEXT,
    f"{ACTOR}ppo_mini_batch_size": POSITIVE_INTEGER,
    f"{ACTOR}ppo_epochs": POSITIVE_INTEGER,
    f"{ACTOR}use_dynamic_bsz": BOOLEAN,
    f"{ACTOR}use_kl_loss": BOOLEAN,
    f"{ACTOR}kl_loss_coef": NUMBER,
    f"{ACTOR}entropy_coeff": NUMBER,
    f"{ACTOR}loss_agg_mode": TEXT,
    f"{ACTOR}clip_ratio_c": NUMBER,
    f"{ACTOR}ulysses_sequence_parallel_size": POSITIVE_INTEGER,
    f"{ACTOR}optim.lr": NUMBER,
    f"{ACTOR}optim.lr_scheduler_type": TEXT,
    f"{ROLLOUT}name": TEXT,
    f"{ROLLOUT}n": POSITIVE_INTEGER,
    f"{ROLLOUT}val_kwargs.n": POSITIVE_INTEGER,
    f"{ROLLOUT}temperature": NUMBER,
    f"{ROLLOUT}top_p": NUMBER,
    f"{ROLLOUT}top_k": NUMBER,
    f"{ROLLOUT}tensor_model_parallel_size": POSITIVE_INTEGER,
    f"{ROLLOUT}gpu_memory_utilization": NUMBER,
    f"{ROLLOUT}calculate_log_probs": BOOLEAN,
    "algorithm.adv_estimator": TEXT,
    "algorithm.norm_adv_by_std_in_grpo": BOOLEAN,
    "algorithm.use_kl_in_reward": BOOLEAN,
    "reward.reward_model.enable": BOOLEAN,
    "trainer.nnodes": POSITIVE_INTEGER,
    "trainer.n_gpus_per_node": POSITIVE_INTEGER,
    "trainer.total_epochs": NUMBER,
    "trainer.save_freq": NUMBER,
    "trainer.test_freq": NUMBER,
    "trainer.critic_warmup": NUMBER,
    "trainer.logger": ANY_VALUE,
    "trainer.project_name": TEXT,
    "trainer.experiment_name": TEXT,
    "trainer.default_local_dir": TEXT,
    "trainer.resume_mode": TEXT,
    "trainer.v1.trainer_mode": TEXT,
}
"""The settings that verl or bandpo reads and that must have a value, each with the kind of its value.

If one is null, verl raises a TypeError that does not name it, in some cases after Ray has started, or it reads a null
boolean as false.
"""

SECTIONS = (
    "trainer",
    "actor_rollout_ref.ref",
    f"{ACTOR}policy_loss",
    "critic",
    "reward",
    "reward.custom_reward_function",
    "reward.reward_model",
)
"""Groups of settings that verl or bandpo reads, in addition to the groups of the settings in `REQUIRED`."""


def check_required(config: DictConfig) -> None:
    """Check that the settings of `REQUIRED` have values of their kind, and that no group of settings is null.

    Settings that the config lacks are not checked, as a trainer or a version of verl may not have them.

    Raises:
        ValueError: a setting has no value or one of another kind, or the command line deletes it; the message names it.
    """
    is_kind = {
        POSITIVE_INTEGER: lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 1,
        NUMBER: lambda value: isinstance(value, int | float) and not isinstance(value, bool),
        BOOLEAN: lambda value: isinstance(value, bool),
        TEXT: lambda value: isinstance(value, str) and value != "",
        ANY_VALUE: lambda value: value is not None and value != "",
    }
    deleted = [key.removeprefix("~") for key in overrides() if key.startswith("~")]
    for key in SECTIONS:
        _check_section(config, key, deleted)

    required = dict(REQUIRED)
    if trainer_of(config) == "fully_async":
        # This trainer requires train_batch_size=0, and counts a batch in mini-batches.
        del required["data.train_batch_size"]
        required["async_training.require_batches"] = POSITIVE_INTEGER

    for key, kind in required.items():
        parent, _, name = key.rpartition(".")
        section = _check_section(config, parent, deleted)
        refuse_if(key in deleted, f"{key} must be {kind}, and ~{key} deletes it: leave that out")
        if section is None or name not in section:
            continue
        value = OmegaConf.select(config, key)
        text = "null" if value is None else repr(value)
        refuse_if(not is_kind[kind](value), f"{key} must be {kind}, got {text}")
    _check_engine(config)


STRATEGIES = {"McoreActorConfig": ("megatron",), "FSDPActorConfig": ("fsdp", "fsdp2", "fsdp_turbo")}
"""The strategies of verl's actors, by the class of their settings, which ``model_engine`` selects."""


def _check_engine(config: DictConfig) -> None:
    """Check that the actor's ``strategy`` is one of the engine that ``model_engine`` selects.

    A recipe sets the strategy, and ``model_engine=megatron`` does not replace it.

    Raises:
        ValueError: the strategy is one of another engine.
    """
    actor = OmegaConf.select(config, ACTOR.rstrip(".")) or {}
    strategy = actor.get("strategy")
    fitting = STRATEGIES.get(str(actor.get("_target_")).rpartition(".")[2], (strategy,))
    refuse_if(
        strategy not in fitting,
        f"{ACTOR}strategy={strategy} under model_engine={config.get('model_engine')}: parts of verl would take one "
        f"engine, and parts the other; set {ACTOR}strategy={fitting[0]}, or another model_engine",
    )


def _check_section(config: DictConfig, key: str, deleted: Sequence[str]) -> DictConfig | None:
    """Return a group of settings; None if the config does not have it.

    Args:
        config: The run's config.
        key: The path of the group.
        deleted: The paths that the command line deletes.

    Raises:
        ValueError: the group, or one that contains it, is null, or the command line deletes it.
    """
    section = config
    path = ""
    for name in key.split("."):
        path = f"{path}.{name}".lstrip(".")
        refuse_if(
            path in deleted, f"{path} must be a group of settings, and ~{path} deletes it: leave that out"
        )
        if name not in section:
            return None
        value = section[name]
        # No refuse_if here: the repr of a valid group, thousands of characters, would be computed each time.
        if not OmegaConf.is_dict(value):
            text = "null" if value is None else repr(value)
            raise InvalidValue(f"{path} must be a group of settings, got {text}")
        section = cast("DictConfig", value)
    return section


def refuse_if(condition: object, message: str) -> None:
    """Raise an error with a message if a condition holds.

    Raises:
        ValueError: the condition holds.
    """
    if condition:
        raise InvalidValue(message)


def trainer_of(config: DictConfig) -> str:
    """Return the one of verl's trainers that a config belongs to.

    Returns:
        ``fully_async``, ``one_step_off``, ``v1`` or ``v0``.
    """
    # The asynchronous trainers have groups of settings that no other trainer has.
    if "async_training" in config:
        return "fully_async"
    if "rollout" in config:
        return "one_step_off"
    return "v1" if config.trainer.use_v1 else "v0"


def mode_of(config: DictConfig) -> str:
    """Return the mode in which a trainer of verl samples.

    Returns:
        ``sync``, ``colocate_async``, ``separate_async``, ``fully_async`` or ``one_step_off``.
    """
    trainer = trainer_of(config)
    if trainer == "v1":
        return config.trainer.v1.trainer_mode
    return "sync" if trainer == "v0" else trainer


def uses_bandpo(config: DictConfig) -> bool:
    """Return True if a run's loss is bandpo's or audited, or its settings come from a recipe of bandpo."""
    loss = OmegaConf.select(config, POLICY_LOSS.rstrip(".")) or {}
    target = str(loss.get("_target_"))
    return target.startswith("bandpo.") or loss.get("loss_mode") in ("band", "audited") or "recipe" in config


def loss_of(actor: ActorConfig) -> str:
    """Return the name, in verl's registry, of the loss that a worker trains with."""
    return actor.policy_loss.get("audited") or actor.policy_loss.loss_mode


def in_bypass_mode(config: DictConfig) -> bool:
    """Return True if the old log-probabilities are the rollout engine's."""
    return bool((config.algorithm.get("rollout_correction") or {}).get("bypass_mode"))


def uses_critic(config: DictConfig) -> bool:
    """Return True if verl trains a critic."""
    if config.critic.enable is None:
        return bool(config.algorithm.adv_estimator == "gae")
    return bool(config.critic.enable)


def overrides() -> dict[str, str]:
    """Return the overrides of hydra's command line as text, by path.

    They are only available in the process that hydra started, and empty elsewhere.
    """
    from hydra.core.hydra_config import HydraConfig

    if not HydraConfig.initialized():
        return {}
    words = (word.lstrip("+").partition("=") for word in HydraConfig.get().overrides.task)
    return {key: value for key, _, value in words}
