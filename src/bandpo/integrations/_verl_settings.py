"""The settings of a run of verl: their names, which were set, which of verl's trainers reads them, and refusals."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from bandpo.errors import InvalidValue

if TYPE_CHECKING:
    from omegaconf import DictConfig

ACTOR = "actor_rollout_ref.actor."
ROLLOUT = "actor_rollout_ref.rollout."
WHERE = f"{ACTOR}policy_loss."
FREE = re.compile(rf"^(recipe\b|model_engine$|{WHERE})|kwargs")
"""Settings of which verl's config need not have the names."""


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
    loss = config.actor_rollout_ref.actor.policy_loss
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
