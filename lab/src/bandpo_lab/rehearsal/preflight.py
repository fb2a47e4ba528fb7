"""What can be said of a recipe before anything runs: in seconds, at its full size."""

from __future__ import annotations

import contextlib
import importlib
import io
import warnings
from pathlib import Path
from typing import Any

from bandpo.errors import InvalidValue
from bandpo.methods import Method
from bandpo_lab.rehearsal.checks import Check


def validate(config: Any) -> Check:
    """verl's own checks, on the recipe in its full size."""
    fault = _impossible(config) or _refused(config)
    return Check("settings", not fault, fault or "accepted by verl at full size")


def _refused(config: Any) -> str | None:
    """What verl says against it, or would in the first update."""
    from hydra.errors import InstantiationException
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
    from verl.trainer.ppo.utils import need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.import_utils import import_external_libs

    settings = config.actor_rollout_ref
    try:
        import_external_libs(settings.model.external_lib)
        with contextlib.redirect_stdout(io.StringIO()):
            validate_config(config, need_reference_policy(config), use_critic=False)
        # verl does not check these where use_dynamic_bsz is set, or finds them in the first update only.
        gpus = config.trainer.nnodes * config.trainer.n_gpus_per_node
        prompts, responses = settings.actor.ppo_mini_batch_size, settings.rollout.n
        if prompts > config.data.train_batch_size:
            raise InvalidValue(
                f"actor.ppo_mini_batch_size = {prompts} is more than data.train_batch_size = "
                f"{config.data.train_batch_size}"
            )
        if prompts * responses % gpus:
            raise InvalidValue(
                f"actor.ppo_mini_batch_size × rollout.n = {prompts} × {responses} responses cannot be split evenly "
                f"over {gpus} GPUs"
            )
    except InstantiationException as error:  # hydra wraps the error of a config class
        return f"verl refuses the settings: {error.__cause__ or error}"
    except Exception as error:  # any error of verl or of a plug-in is a finding
        return f"verl refuses the settings: {type(error).__name__}: {error}"
    try:
        mode = loss_mode(config)
        loss_method(config)
    except ValueError as error:
        return str(error)
    if mode not in POLICY_LOSS_REGISTRY:
        return f"there is no policy loss named {mode!r}; known are {', '.join(sorted(POLICY_LOSS_REGISTRY))}"
    return None


def _impossible(config: Any) -> str | None:
    """What no run can be done with, and what verl finds late, in other words, or not at all."""
    from omegaconf import OmegaConf

    actor, rollout = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout"))
    counts = (
        "trainer.nnodes",
        "trainer.n_gpus_per_node",
        "data.train_batch_size",
        f"{actor}.ppo_mini_batch_size",
    )
    for key in (*counts, f"{rollout}.n", f"{rollout}.val_kwargs.n"):
        value = OmegaConf.select(config, key)
        if not isinstance(value, int) or value < 1:
            return f"{key} must be a whole number of at least 1, got {value!r}"
    for split in ("train", "val"):
        if not config.data[f"{split}_files"]:
            return f"data.{split}_files names no file"
    if not config.actor_rollout_ref.model.path:
        return "actor_rollout_ref.model.path is not set"
    if config.algorithm.adv_estimator == "grpo" and config.actor_rollout_ref.rollout.n == 1:
        return f"algorithm.adv_estimator=grpo compares the answers to one prompt with each other, and {rollout}.n is 1"
    return None


def loss_mode(config: Any) -> str:
    """The name under which verl's workers look the loss up: the config class may decide it."""
    from verl.utils.config import omega_conf_to_dataclass

    return omega_conf_to_dataclass(config.actor_rollout_ref.actor.policy_loss).loss_mode


def loss_method(config: Any) -> Method | None:
    """The method that the recipe's loss is; None for a loss that is not bandpo's nor verl's ``vanilla``.

    Raises:
        ValueError: It would be refused in the first update, or leaves open what is meant.
    """
    from verl.utils.config import omega_conf_to_dataclass

    from bandpo.audit.configs import verl_method
    from bandpo.integrations import verl
    from bandpo.integrations._adapt import naming

    actor = config.actor_rollout_ref.actor
    settings = omega_conf_to_dataclass(actor.policy_loss)
    if isinstance(settings, verl.BandPolicyLossConfig):
        named = [name for name in ("method", "clip") if name in actor.policy_loss]
        if empty := [name for name in named if actor.policy_loss[name] is None]:
            raise InvalidValue(
                f"{verl.WHERE}{empty[0]} is null: leave it out for the default, Band(KL(), 0.05), or write "
                "clip='Unclipped()' for no clip"
            )
        return verl.loss_method(actor)
    with naming("actor_rollout_ref.actor.clip_ratio_c"):
        return verl_method("vanilla", actor) if settings.loss_mode == "vanilla" else None


def reward(config: Any) -> list[Check]:
    """The reward function and its manager, loaded as verl's reward workers load them; nothing if they can be."""
    from verl.trainer.ppo.reward import get_custom_reward_fn, resolve_reward_manager_cls

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # verl's, on importing its reward managers
        importlib.import_module("verl.experimental.reward_loop.reward_manager")
    try:
        get_custom_reward_fn(config)
        resolve_reward_manager_cls(config)
    except Exception as error:  # any error of a user's module is a finding
        where = config.reward.custom_reward_function
        named = f"reward.custom_reward_function ({where.name} of {where.path})" if where.path else "reward"
        return [Check("reward", False, f"{named} cannot be loaded: {type(error).__name__}: {error}")]
    return []


def data_files(config: Any, split: str) -> list[str]:
    """The recipe's files for `train` or `val`: verl takes one or a list."""
    named = config.data[f"{split}_files"]
    return [named] if isinstance(named, str) else list(named)


def missing(config: Any) -> list[Check]:
    """The files of the recipe that are not on this machine, if there are such.

    A model may be a name on a hub instead, which nobody looks up here; what cannot be such a name is a path.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    paths = [
        (f"data.{split}_files", path) for split in ("train", "val") for path in data_files(config, split)
    ]
    model = config.actor_rollout_ref.model.path
    try:
        validate_repo_id(model)
    except HFValidationError:
        paths.append(("actor_rollout_ref.model.path", model))
    absent = [f"{key}: {path} is not here" for key, path in paths if not Path(path).expanduser().exists()]
    said = "; ".join(absent) + " (--stand-in: go on with made-up ones)"
    return [Check("files", False, said)] if absent else []
