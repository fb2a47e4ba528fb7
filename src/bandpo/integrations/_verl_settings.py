"""The settings of a run of verl: their names, which were set, which of verl's trainers reads them, and refusals."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from omegaconf import OmegaConf

from bandpo.errors import InvalidValue

if TYPE_CHECKING:
    from omegaconf import DictConfig

ACTOR = "actor_rollout_ref.actor."
ROLLOUT = "actor_rollout_ref.rollout."
WHERE = f"{ACTOR}policy_loss."
FREE = re.compile(rf"^(recipe\b|model_engine$|{WHERE})|kwargs")
"""Settings of which verl's config need not have the names."""


WHOLE = "a whole number of at least 1"
NUMBER = "a number"
SWITCH = "true or false"
TEXT = "a text"
SOMETHING = "set"
NEEDED: Mapping[str, str] = {
    "data.train_files": SOMETHING,
    "data.val_files": SOMETHING,
    "data.train_batch_size": WHOLE,
    "data.max_prompt_length": WHOLE,
    "data.max_response_length": WHOLE,
    "data.prompt_key": TEXT,
    "actor_rollout_ref.model.path": TEXT,
    "actor_rollout_ref.model.lora_rank": NUMBER,
    "actor_rollout_ref.model.lora.rank": NUMBER,
    f"{ACTOR}strategy": TEXT,
    f"{ACTOR}fsdp_config.strategy": TEXT,
    f"{ACTOR}ppo_mini_batch_size": WHOLE,
    f"{ACTOR}ppo_epochs": WHOLE,
    f"{ACTOR}use_dynamic_bsz": SWITCH,
    f"{ACTOR}use_kl_loss": SWITCH,
    f"{ACTOR}kl_loss_coef": NUMBER,
    f"{ACTOR}entropy_coeff": NUMBER,
    f"{ACTOR}loss_agg_mode": TEXT,
    f"{ACTOR}clip_ratio_c": NUMBER,
    f"{ACTOR}ulysses_sequence_parallel_size": WHOLE,
    f"{ACTOR}optim.lr": NUMBER,
    f"{ACTOR}optim.lr_scheduler_type": TEXT,
    f"{ROLLOUT}name": TEXT,
    f"{ROLLOUT}n": WHOLE,
    f"{ROLLOUT}val_kwargs.n": WHOLE,
    f"{ROLLOUT}temperature": NUMBER,
    f"{ROLLOUT}top_p": NUMBER,
    f"{ROLLOUT}top_k": NUMBER,
    f"{ROLLOUT}tensor_model_parallel_size": WHOLE,
    f"{ROLLOUT}gpu_memory_utilization": NUMBER,
    f"{ROLLOUT}calculate_log_probs": SWITCH,
    "algorithm.adv_estimator": TEXT,
    "algorithm.norm_adv_by_std_in_grpo": SWITCH,
    "algorithm.use_kl_in_reward": SWITCH,
    "reward.reward_model.enable": SWITCH,
    "trainer.nnodes": WHOLE,
    "trainer.n_gpus_per_node": WHOLE,
    "trainer.total_epochs": NUMBER,
    "trainer.save_freq": NUMBER,
    "trainer.test_freq": NUMBER,
    "trainer.critic_warmup": NUMBER,
    "trainer.logger": SOMETHING,
    "trainer.project_name": TEXT,
    "trainer.experiment_name": TEXT,
    "trainer.default_local_dir": TEXT,
    "trainer.resume_mode": TEXT,
    "trainer.v1.trainer_mode": TEXT,
}
"""The settings that verl or bandpo reads and that must have a value, each with what it must be.

Where one is null, verl fails with a TypeError that does not name it, some of them after Ray has started; or it takes a
null switch for false.
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
"""Groups of settings that verl or bandpo reads; the other groups that the settings of `NEEDED` are in are read, too."""


def check_needed(config: DictConfig) -> None:
    """Check that each setting of `NEEDED` that a configuration has is of its kind, and in no group that is null.

    Raises:
        ValueError: one is not, such as null, or the command line deletes it; the message names it.
    """
    kinds = {
        WHOLE: lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 1,
        NUMBER: lambda value: isinstance(value, int | float) and not isinstance(value, bool),
        SWITCH: lambda value: isinstance(value, bool),
        TEXT: lambda value: isinstance(value, str) and value != "",
        SOMETHING: lambda value: value is not None and value != "",
    }
    deleted = [key.removeprefix("~") for key in overrides() if key.startswith("~")]
    for key in SECTIONS:
        _check_section(config, key, deleted)
    needed = dict(NEEDED)
    if trainer_of(config) == "fully_async":
        # verl wants 0 there, and counts a batch in mini-batches.
        del needed["data.train_batch_size"]
        needed["async_training.require_batches"] = WHOLE
    for key, kind in needed.items():
        parent, _, name = key.rpartition(".")
        settings = _check_section(config, parent, deleted)
        refuse(key in deleted, f"{key} must be {kind}, and ~{key} deletes it: leave that out")
        # A trainer or a version of verl may lack the setting.
        if settings is None or name not in settings:
            continue
        value = OmegaConf.select(config, key)
        refuse(
            not kinds[kind](value), f"{key} must be {kind}, got {'null' if value is None else repr(value)}"
        )


def _check_section(config: DictConfig, key: str, deleted: Sequence[str]) -> DictConfig | None:
    """Return a group of settings; None if the trainer or the version of verl lacks it.

    Raises:
        ValueError: it, or a group that it is in, is null, or the command line deletes it.
    """
    section = config
    where = ""
    for name in key.split("."):
        where = f"{where}.{name}".lstrip(".")
        refuse(
            where in deleted, f"{where} must be a group of settings, and ~{where} deletes it: leave that out"
        )
        if name not in section:
            return None
        value = section[name]
        if not OmegaConf.is_dict(
            value
        ):  # a group has thousands of characters, so its text is not made for nothing
            text = "null" if value is None else repr(value)
            raise InvalidValue(f"{where} must be a group of settings, got {text}")
        section = cast("DictConfig", value)
    return section


def refuse(wrong: object, why: str) -> None:
    """Raise ``why`` if something is wrong.

    Raises:
        ValueError: it is.
    """
    if wrong:
        raise InvalidValue(why)


def trainer_of(config: DictConfig) -> str:
    """Return which of verl's trainers a configuration is for.

    Returns:
        ``fully_async``, ``one_step_off``, ``v1`` or ``v0``. The first two have settings that no other has.
    """
    if "async_training" in config:
        return "fully_async"
    if "rollout" in config:
        return "one_step_off"
    return "v1" if config.trainer.use_v1 else "v0"


def is_ours(config: DictConfig) -> bool:
    """Return whether a run's loss is bandpo's or audited, or its settings come from a recipe."""
    loss = OmegaConf.select(config, WHERE.rstrip(".")) or {}
    target = str(loss.get("_target_"))
    return target.startswith("bandpo.") or loss.get("loss_mode") in ("band", "audited") or "recipe" in config


def bypasses(config: DictConfig) -> bool:
    """Return whether the old policy is the rollout engine's."""
    return bool((config.algorithm.get("rollout_correction") or {}).get("bypass_mode"))


def uses_critic(config: DictConfig) -> bool:
    """Return whether a critic is trained, as verl decides it."""
    return bool(
        config.algorithm.adv_estimator == "gae" if config.critic.enable is None else config.critic.enable
    )


def overrides() -> dict[str, str]:
    """Return the overrides of hydra's command line, as they were written.

    Only the process that hydra started knows them.
    """
    from hydra.core.hydra_config import HydraConfig

    if not HydraConfig.initialized():
        return {}
    words = (word.lstrip("+").partition("=") for word in HydraConfig.get().overrides.task)
    return {key: value for key, _, value in words}


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Return each setting of a nested configuration by its full name."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from leaves(inner, f"{key}.{name}".lstrip("."))
    else:
        yield key, value


def new_settings(config: DictConfig) -> list[str]:
    """Return the settings that verl's own config does not have, which a misspelling makes too.

    Those of a method or a recipe are left out.
    """

    def has(key: str) -> bool:
        return key in known_settings() or ("." in key and has(key.rpartition(".")[0]))

    keys = [key for key, value in leaves(OmegaConf.to_container(config)) if value is not None]
    return [key for key in keys if not (has(key) or FREE.search(key))]


@functools.cache
def known_settings() -> set[str]:
    """Return verl's own settings, of each of its engines and trainers."""
    import verl

    folder = Path(verl.__path__[0])
    files = [
        *folder.glob("trainer/config/_generated_ppo*.yaml"),
        *folder.glob("experimental/*/config/*.yaml"),
    ]
    known = set[str]()
    for file in files:
        known.update(key for key, _ in leaves(OmegaConf.to_container(OmegaConf.load(file))))
    return known
