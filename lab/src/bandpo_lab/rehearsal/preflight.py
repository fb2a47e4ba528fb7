"""What can be said of a recipe before anything runs: in seconds, at its full size."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bandpo.errors import BandpoError, InvalidValue
from bandpo.methods import Method
from bandpo_lab.files import is_path
from bandpo_lab.rehearsal.checks import Check
from bandpo_lab.rehearsal.shrink import named_unset, unset


def validate(config: Any, overrides: Sequence[str] = ()) -> Check:
    """verl's own checks and bandpo's, on the recipe in its full size. The latter leave in it what the run is."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    with contextlib.redirect_stdout(io.StringIO()):
        try:
            fault = (
                misread(overrides, OmegaConf.to_yaml(config))
                or empty(config, overrides)
                or _impossible(config)
                or _refused(config, overrides)
            )
        except OmegaConfBaseException as error:
            fault = _unreadable(error, overrides)
    return Check("settings", not fault, fault or "accepted by verl at full size")


def empty(config: Any, overrides: Sequence[str] = ()) -> str | None:
    """Name the first setting that must have a value and has none, or one of another kind; None if there is none."""
    from omegaconf.errors import OmegaConfBaseException

    from bandpo.integrations._verl_settings import check_required

    try:
        check_required(config)
    except InvalidValue as error:
        return str(error)
    except OmegaConfBaseException as error:
        return _unreadable(error, overrides)
    return None


@contextlib.contextmanager
def naming_unset(overrides: Sequence[str]) -> Iterator[None]:
    """Turn an error over a setting that is null or not there into one that names it.

    Args:
        overrides: Those of the command line. Without one that unsets a setting, errors stay as they are.

    Raises:
        ValueError: in place of OmegaConf's errors and of what Python raises over a null.
    """
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except (OmegaConfBaseException, TypeError, AttributeError) as error:
        if not unset(overrides):
            raise
        raise InvalidValue(_unreadable(error, overrides)) from error


def _unreadable(error: Exception, overrides: Sequence[str]) -> str:
    """Return the message over a setting that refers to one that is not there."""
    return f"the settings cannot be read: {' '.join(str(error).split())}{named_unset(overrides)}"


def misread(overrides: Sequence[str], config: str) -> str | None:
    """What hydra takes another way than it seems to stand there, of the overrides of a ``config`` in YAML."""
    loss, seen = "actor_rollout_ref.actor.policy_loss.", dict[str, str]()
    for word in overrides:
        key, _, value = word.lstrip("+").partition("=")
        if key.startswith(loss) and key in seen:
            return f"{key} is given twice, and hydra takes the last: write one"
        if key == f"{loss}loss_mode" and value == "vanilla" and "BandPolicyLossConfig" in config:
            return f"{word} stands beside {loss}_target_, which trains band: leave one of them out"
        if key.startswith("paper") and "," in value:
            return f"{word}: the last of them would replace the others; name one"
        if key == "paper" and any(one.startswith(("paper/arm", "paper/task", "dapo")) for one in seen):
            return f"{word} stands behind what is to replace a part of it: write it first"
        named = key in ("recipe.model", "recipe.rule", "recipe.data", "recipe.output")
        if key.startswith("recipe.") and not named and not re.search(rf"[{{:]{key}[}},]", config):
            return f"{key} is read by nothing in this recipe: leave it out, or look at its spelling"
        seen[key] = value
    return None


def _refused(config: Any, overrides: Sequence[str]) -> str | None:
    """What verl or bandpo says against it, or verl would in the first update."""
    from hydra.errors import InstantiationException
    from verl.trainer.ppo.utils import need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.import_utils import import_external_libs

    settings = config.actor_rollout_ref
    try:
        import_external_libs(settings.model.external_lib)
        # verl does not check these where use_dynamic_bsz is set, or finds them in the first update only.
        gpus = config.trainer.nnodes * config.trainer.n_gpus_per_node
        prompts, responses = settings.actor.ppo_mini_batch_size, settings.rollout.n
        if prompts * responses % gpus:
            raise InvalidValue(
                f"actor.ppo_mini_batch_size × rollout.n = {prompts} × {responses} responses cannot be split evenly "
                f"over {gpus} GPUs"
            )
        validate_config(config, need_reference_policy(config), use_critic=False)
    except InstantiationException as error:  # hydra wraps the error of a config class
        cause = error.__cause__ or error
        return f"verl refuses the settings: {str(cause) or type(cause).__name__}{named_unset(overrides)}"
    except BandpoError as error:
        return str(error)
    except Exception as error:  # any error of verl or of a plug-in is a finding
        return f"verl refuses the settings: {type(error).__name__}: {error}{named_unset(overrides)}"
    return None


def _impossible(config: Any) -> str | None:
    """What no run can be done with, and what verl finds late, in other words, or not at all."""
    from verl.utils.tracking import Tracking

    for name in loggers(config):
        if name not in Tracking.supported_backend:
            return f"trainer.logger: verl knows no logger {name!r} of {', '.join(Tracking.supported_backend)}"
    for split in ("train", "val"):
        if not config.data[f"{split}_files"]:
            return f"data.{split}_files names no file"
    if config.algorithm.adv_estimator == "grpo" and config.actor_rollout_ref.rollout.n == 1:
        return (
            "algorithm.adv_estimator=grpo compares the answers to one prompt with each other, and "
            "actor_rollout_ref.rollout.n is 1"
        )
    return None


def loggers(config: Any) -> list[str]:
    """Return the recipe's loggers: verl takes one or a list."""
    logger = config.trainer.logger
    return [logger] if isinstance(logger, str) else list(logger)


def loss(config: Any) -> tuple[str, Method | None]:
    """The name under which verl's workers look the loss up, and what it is if it is bandpo's or ``vanilla``."""
    from verl.utils.config import omega_conf_to_dataclass

    from bandpo.integrations.verl import loss_method

    actor: Any = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    mode = actor.policy_loss.loss_mode
    return mode, loss_method(actor) if mode in ("band", "vanilla") else None


def reward(config: Any) -> list[Check]:
    """The reward function and its manager, loaded as verl's reward workers load them; nothing if they can be."""
    from verl.trainer.ppo.reward import get_custom_reward_fn, resolve_reward_manager_cls

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # verl's, on importing its reward managers
        importlib.import_module("verl.experimental.reward_loop.reward_manager")
    function, manager = config.reward.custom_reward_function, config.reward.reward_manager
    named = (
        f"reward.custom_reward_function ({function.name} of {function.path})" if function.path else "reward"
    )
    loaded = {
        named: get_custom_reward_fn,
        f"reward.reward_manager.name ({manager.name})": resolve_reward_manager_cls,
    }
    for part, load in loaded.items():
        try:
            load(config)
        except Exception as error:  # any error of a user's module is a finding
            return [Check("reward", False, f"{part} cannot be loaded: {type(error).__name__}: {error}")]
    return []


def data_files(config: Any, split: str) -> list[str]:
    """The recipe's files for `train` or `val`: verl takes one or a list."""
    named = config.data[f"{split}_files"]
    return [named] if isinstance(named, str) else list(named or ())


def absent_files(config: Any, *, remote: bool = False) -> list[str]:
    """Name each data file and model folder of the recipe that is not on this machine.

    A model may be a name on a hub instead, which nobody looks up here; what cannot be such a name is a path.

    Args:
        config: The recipe's whole config.
        remote: Whether what has a scheme, such as ``hdfs://``, may stay where it is.
    """
    absent = []
    for split in ("train", "val"):
        for path in data_files(config, split):
            if not _is_here(path, remote):
                absent.append(f"data.{split}_files: {path} is not here")
    key, model = "actor_rollout_ref.model.path", config.actor_rollout_ref.model.path
    folder = Path(model).expanduser()
    if (is_path(model) or model.count("/") > 1) and not _is_here(model, remote):
        absent.append(f"{key}: {model} is not here")
    elif folder.is_dir() and not (folder / "config.json").is_file():
        absent.append(f"{key}: {model} holds no config.json, so it is no model that transformers can load")
    return absent


def _is_here(path: str, remote: bool) -> bool:
    return (remote and "://" in path) or Path(path).expanduser().exists()


def missing(config: Any) -> list[Check]:
    """The files of the recipe that are not on this machine, if there are such, as a check of a rehearsal."""
    absent = absent_files(config)
    said = "; ".join(absent) + " (--stand-in: go on with made-up ones)"
    return [Check("files", False, said)] if absent else []


def lacking_gpus(wanted: int, setting: str) -> str | None:
    """Say what this machine lacks of so many GPUs; None if it has them.

    Args:
        wanted: How many.
        setting: What asks for them, to begin the sentence.
    """
    import torch

    if not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} sees no GPU; check that this is the node, and that torch was built for its "
            "driver (nvidia-smi)"
        )
    here = torch.cuda.device_count()
    return f"{setting}, and {here} GPUs are here" if here < wanted else None


FLASH = (
    "flash-attn is not installed, which verl's default attention needs: install a wheel of it for this Python, torch "
    "and CUDA, see docs/install.md, or add +actor_rollout_ref.model.override_config.attn_implementation=sdpa, which is "
    "slower (406 s an update against 216 s in verl's pull request 7131) and refused together with sequence parallelism"
)
"""What is said where verl would not find FlashAttention."""


def lacks_attention(config: Any) -> bool:
    """Return whether the recipe's attention is FlashAttention, which this machine does not have."""
    from omegaconf import OmegaConf

    attention = OmegaConf.select(config, "actor_rollout_ref.model.override_config.attn_implementation")
    return attention in (None, "flash_attention_2") and importlib.util.find_spec("flash_attn") is None


def unready(config: Any) -> list[str]:
    """Name what a launch of the recipe from this machine lacks.

    These are files; and where Ray starts on this machine alone, GPUs and FlashAttention.

    Args:
        config: The recipe's whole config.
    """
    lacks = []
    # A client of a remote cluster does not see the cluster's files.
    if "://" not in os.environ.get("RAY_ADDRESS", ""):
        lacks += absent_files(config, remote=True)
        if any(fault.startswith("data.") for fault in lacks):
            lacks.append(
                "`bandpo-lab data prepare` writes the data of the recipes, and --data names their folder"
            )
    per_node, nodes = config.trainer.n_gpus_per_node, config.trainer.nnodes
    if _trains_on_cuda(config) and not _joins_cluster(config):
        wanted = per_node * nodes
        setting = f"trainer.n_gpus_per_node × trainer.nnodes is {per_node} × {nodes} = {wanted}"
        if few := lacking_gpus(wanted, setting):
            lacks.append(f"{few}; to train on a cluster, set RAY_ADDRESS")
        if lacks_attention(config):
            lacks.append(FLASH)
    return lacks


def _trains_on_cuda(config: Any) -> bool:
    """Whether verl will look for CUDA's GPUs, none of another kind, and Ray was not told how many there are."""
    from omegaconf import OmegaConf

    platform = os.environ.get("VERL_PLATFORM") or config.trainer.device
    counted_by_hand = OmegaConf.select(config, "ray_kwargs.ray_init.num_gpus") is not None
    return platform == "cuda" and not counted_by_hand and importlib.util.find_spec("torch_npu") is None


def _joins_cluster(config: Any) -> bool:
    """Whether Ray will join a cluster, whose GPUs cannot be counted from here, instead of starting one."""
    from omegaconf import OmegaConf

    address = OmegaConf.select(config, "ray_kwargs.ray_init.address")
    if address is not None:
        return address != "local"
    if os.environ.get("RAY_ADDRESS"):
        return True
    # `ray start` leaves the address of the cluster that it began on this machine, and Ray joins it.
    temporary = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"  # noqa: S108
    return (Path(temporary) / "ray" / "ray_current_cluster").exists()
