"""Checks of a recipe at its full size that take seconds and start no training."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import math
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bandpo.core.methods import Method
from bandpo_lab.cluster.engines import ENGINES, memory_problem, missing_engine
from bandpo_lab.cluster.modes import ModeName, has_separate_sampler, mode_of
from bandpo_lab.cluster.node import unseen_plugin
from bandpo_lab.errors import InvalidValue, is_reported
from bandpo_lab.files.writing import is_path
from bandpo_lab.rehearsal.checks import Check
from bandpo_lab.rehearsal.shrink import named_unset, unset


def validate(config: Any, overrides: Sequence[str] = ()) -> Check:
    """Run the checks of verl and of bandpo on the full-size settings of a recipe.

    bandpo's checks write a description of the run into ``config``, under ``bandpo.run``.

    Args:
        config: The recipe's composed config.
        overrides: The overrides of the command line.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    with contextlib.redirect_stdout(io.StringIO()):
        try:
            problem = (
                unseen_plugin()
                or misread_override(overrides, OmegaConf.to_yaml(config))
                or missing_value(config, overrides)
                or _impossible_setting(config)
                or _refusal(config, overrides)
                or uneven_replicas(config)
                or asynchronous_problem(config)
            )
        except OmegaConfBaseException as error:
            problem = _unreadable(error, overrides)
    return Check("settings", not problem, problem or "accepted by verl at full size")


def missing_value(config: Any, overrides: Sequence[str] = ()) -> str | None:
    """Return a message on the first required setting without a value, or with one of a wrong type; None if all are set.

    Args:
        config: The recipe's composed config.
        overrides: The overrides of the command line, which the message names.
    """
    from omegaconf.errors import OmegaConfBaseException

    from bandpo.integrations.verl.settings import check_required

    try:
        check_required(config)
    except OmegaConfBaseException as error:
        return _unreadable(error, overrides)
    except ValueError as error:
        return str(error)
    return None


@contextlib.contextmanager
def naming_unset(overrides: Sequence[str]) -> Iterator[None]:
    """Replace an error caused by a null or deleted setting by one that names the setting.

    Args:
        overrides: The overrides of the command line. If none of them unsets a setting, errors are not replaced.

    Raises:
        ValueError: In place of an error of OmegaConf, or of the TypeError or AttributeError that a null causes.
    """
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except (OmegaConfBaseException, TypeError, AttributeError) as error:
        if not unset(overrides):
            raise
        raise InvalidValue(_unreadable(error, overrides)) from error


def _unreadable(error: Exception, overrides: Sequence[str]) -> str:
    """Return the message for settings that OmegaConf cannot resolve."""
    return f"the settings cannot be read: {' '.join(str(error).split())}{named_unset(overrides)}"


def misread_override(overrides: Sequence[str], config: str) -> str | None:
    """Return a message on the first override that hydra reads in another way than intended; None if there is none.

    Args:
        overrides: The overrides, in the order in which hydra applies them.
        config: The composed config, in YAML.
    """
    loss = "actor_rollout_ref.actor.policy_loss."
    earlier_keys: set[str] = set()
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        if key.startswith(loss) and key in earlier_keys:
            return f"{key} is set twice, and hydra takes the last value: set it once"
        if key == f"{loss}loss_mode" and value == "vanilla" and "BandPolicyLossConfig" in config:
            return f"{override} contradicts {loss}_target_, which trains band: leave one of them out"
        if key.startswith("paper") and "," in value:
            return f"{override}: the last of them would replace the others; name one"
        replaces_part = any(name.startswith(("paper/arm", "paper/task", "dapo")) for name in earlier_keys)
        if key == "paper" and replaces_part:
            return f"{override} comes after an override that replaces a part of it: write it first"
        is_name = key in ("recipe.model", "recipe.rule", "recipe.data", "recipe.output")
        if key.startswith("recipe.") and not is_name and not re.search(rf"[{{:]{key}[}},]", config):
            return f"{key} is not used by this recipe: leave it out, or check its spelling"
        earlier_keys.add(key)
    return None


def _refusal(config: Any, overrides: Sequence[str]) -> str | None:
    """Return the first error that verl or bandpo raises over the settings; None if there is none.

    Two errors that verl raises in the first update only are among them.
    """
    from hydra.errors import InstantiationException
    from verl.trainer.ppo.utils import need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.import_utils import import_external_libs

    from bandpo.integrations.verl import check_run

    settings = config.actor_rollout_ref
    try:
        import_external_libs(settings.model.external_lib)
        # verl does not check this if use_dynamic_bsz is set, or fails in the first update only.
        gpus = config.trainer.nnodes * config.trainer.n_gpus_per_node
        prompts = settings.actor.ppo_mini_batch_size
        responses = settings.rollout.n
        if prompts * responses % gpus:
            raise InvalidValue(
                f"actor.ppo_mini_batch_size × rollout.n = {prompts} × {responses} responses cannot be split evenly "
                f"over {gpus} GPUs"
            )
        # In the order of verl's main, which starts with a function that bandpo wraps.
        check_run(config)
        validate_config(config, need_reference_policy(config), use_critic=False)
    except InstantiationException as error:  # hydra wraps the error of a config class
        cause = error.__cause__ or error
        return f"verl refuses the settings: {str(cause) or type(cause).__name__}{named_unset(overrides)}"
    except Exception as error:  # any error of verl or of a plug-in is a finding
        if is_reported(error):
            return str(error)
        return f"verl refuses the settings: {type(error).__name__}: {error}{named_unset(overrides)}"
    return None


def _impossible_setting(config: Any) -> str | None:
    """Return a message on a setting that cannot work but that verl reports late, unclearly or never; None if none."""
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


def uneven_replicas(config: Any) -> str | None:
    """Return a message if the GPUs of the engine's replicas do not divide those of the trainer; None if they do.

    verl finds out after a minute or more, when all of its processes have started. An engine with nodes of its own is
    not checked.
    """
    rollout = config.actor_rollout_ref.rollout
    if rollout.nnodes:
        return None
    names = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
    sizes = [rollout[name] for name in names]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return None  # refused with all other settings of a wrong type
    per_replica = math.prod(sizes)
    gpus = config.trainer.n_gpus_per_node * config.trainer.nnodes
    if gpus % per_replica == 0:
        return None
    settings = ", ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True) if size != 1)
    return (
        f"actor_rollout_ref.rollout: {settings} gives each replica of the engine {per_replica} GPUs, which do not "
        f"divide the {gpus} of the trainer: lower it (verl's default of tensor_model_parallel_size is 2)"
    )


def asynchronous_problem(config: Any) -> str | None:
    """Return a message on a setting that an asynchronous trainer of verl cannot have; None if there is none.

    verl finds out when its processes have started.
    """
    from omegaconf import OmegaConf

    mode = mode_of(config)
    rollout = "actor_rollout_ref.rollout"
    batch = config.data.train_batch_size
    mini_batch = config.actor_rollout_ref.actor.ppo_mini_batch_size
    if mode == "separate_async" and batch % mini_batch:
        return (
            f"data.train_batch_size={batch}: verl's {mode} makes mini-batches of {mini_batch} of it: make "
            "data.train_batch_size a multiple of actor_rollout_ref.actor.ppo_mini_batch_size"
        )
    own_gpus = "its sampler has GPUs of its own"
    needed: dict[ModeName, dict[str, tuple[Any, str]]] = {
        "separate_async": {
            "trainer.v1.separate_async.parameter_sync_step": (
                batch // mini_batch,
                f"it sends the weights once for each batch, of {batch} / {mini_batch} mini-batches",
            ),
        },
        "fully_async": {
            "data.train_batch_size": (0, "it has no batch"),
            "data.gen_batch_size": (1, "it takes one prompt at a time"),
            "actor_rollout_ref.hybrid_engine": (False, own_gpus),
        },
        "one_step_off": {"actor_rollout_ref.hybrid_engine": (False, own_gpus)},
    }
    settings = dict(needed.get(mode, {}))
    if mode == "separate_async" and not config.actor_rollout_ref.rollout.nnodes:
        settings[f"{rollout}.nnodes"] = (1, own_gpus)
    if has_separate_sampler(mode) and config.actor_rollout_ref.rollout.checkpoint_engine.backend == "naive":
        settings[f"{rollout}.checkpoint_engine.backend"] = ("nccl", own_gpus)
    for key, (value, reason) in settings.items():
        own = OmegaConf.select(config, key)
        if own != value:
            remedy = f"set {key}={str(value).lower()}"
            return f"{key}={own}: verl's trainer {mode} cannot have this, since {reason}: {remedy}"
    return None


def loggers(config: Any) -> list[str]:
    """Return the recipe's loggers; verl accepts one or a list."""
    logger = config.trainer.logger
    return [logger] if isinstance(logger, str) else list(logger)


def configured_loss(config: Any) -> tuple[str, Method | None]:
    """Return the loss mode of the recipe, and its method if the loss is bandpo's or ``vanilla``."""
    from verl.utils.config import omega_conf_to_dataclass

    from bandpo.integrations.verl import loss_method

    actor: Any = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    mode = actor.policy_loss.loss_mode
    return mode, loss_method(actor) if mode in ("band", "vanilla") else None


def check_reward(config: Any) -> list[Check]:
    """Load the reward function and its manager as verl's reward workers do; return a failed check if that fails."""
    from verl.trainer.ppo.reward import get_custom_reward_fn, resolve_reward_manager_cls

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # verl's, on importing its reward managers
        importlib.import_module("verl.experimental.reward_loop.reward_manager")
    function = config.reward.custom_reward_function
    manager = config.reward.reward_manager
    function_name = "reward"
    if function.path:
        if function.name is None:
            problem = f"reward.custom_reward_function.name is null: set it to the function's name in {function.path}"
            return [Check("reward", False, problem)]
        function_name = f"reward.custom_reward_function ({function.name} of {function.path})"
    loaders = {
        function_name: get_custom_reward_fn,
        f"reward.reward_manager.name ({manager.name}, of reward.reward_manager.source={manager.source})": (
            resolve_reward_manager_cls
        ),
    }
    for name, load in loaders.items():
        try:
            load(config)
        except Exception as error:  # any error of a user's module is a finding
            return [Check("reward", False, f"{name} cannot be loaded: {type(error).__name__}: {error}")]
    return []


def data_files(config: Any, split: str) -> list[str]:
    """Return the recipe's files for `train` or `val`; verl accepts one or a list."""
    paths = config.data[f"{split}_files"]
    return [paths] if isinstance(paths, str) else list(paths or ())


def absent_files(config: Any, *, remote: bool = False) -> list[str]:
    """Return a message for each data file and model folder of the recipe that is not on this machine.

    A model may also be a name on a hub, which is not looked up. A model that cannot be such a name is a path.

    Args:
        config: The recipe's composed config.
        remote: If True, paths with a scheme, such as ``hdfs://``, are accepted.
    """
    absent = []
    for split in ("train", "val"):
        for path in data_files(config, split):
            if not _is_here(path, remote):
                absent.append(f"data.{split}_files: {path} is not here")
    key = "actor_rollout_ref.model.path"
    model = config.actor_rollout_ref.model.path
    folder = Path(model).expanduser()
    if (is_path(model) or model.count("/") > 1) and not _is_here(model, remote):
        absent.append(f"{key}: {model} is not here")
    elif folder.is_dir() and not (folder / "config.json").is_file():
        absent.append(f"{key}: {model} has no config.json, so transformers cannot load it as a model")
    return absent


def _is_here(path: str, remote: bool) -> bool:
    return (remote and "://" in path) or Path(path).expanduser().exists()


def check_files(config: Any) -> list[Check]:
    """Return a failed check for each data file and model folder of the recipe that is not on this machine."""
    hint = " (--stand-in uses made-up ones instead)"
    return [Check("files", False, f"{text}{hint}") for text in absent_files(config)]


def lacking_gpus(count: int, setting: str) -> str | None:
    """Return a message if this machine has fewer GPUs than needed; None if it has enough.

    Args:
        count: The number of GPUs that are needed.
        setting: The setting that needs them, with its value; the message begins with it.
    """
    import torch

    if not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} sees no GPU; check that this is the node, and that torch was built for its "
            "driver (nvidia-smi)"
        )
    available = torch.cuda.device_count()
    return f"{setting}, and {available} GPUs are here" if available < count else None


NO_FLASH_ATTENTION = (
    "flash-attn is not installed, which verl's default attention needs: install a wheel of it for this Python, torch "
    "and CUDA, see docs/install.md, or add +actor_rollout_ref.model.override_config.attn_implementation=sdpa, which is "
    "slower (406 s an update against 216 s in verl's pull request 7131) and refused together with sequence parallelism"
)
"""The message if the recipe needs FlashAttention and it is not installed."""


def lacks_attention(config: Any) -> bool:
    """Return True if the recipe uses FlashAttention and this machine does not have it."""
    from omegaconf import OmegaConf

    attention = OmegaConf.select(config, "actor_rollout_ref.model.override_config.attn_implementation")
    return attention in (None, "flash_attention_2") and importlib.util.find_spec("flash_attn") is None


def launch_problems(config: Any) -> list[str]:
    """Return a message for each thing that a launch of the recipe needs and this machine does not have.

    Files and the plug-in are checked, and if Ray starts on this machine alone, GPUs, the engine that generates, its
    memory, and FlashAttention.

    Args:
        config: The recipe's composed config.
    """
    unseen = unseen_plugin()
    problems = [unseen] if unseen else []
    # A client of a remote cluster does not see the cluster's files.
    if "://" not in os.environ.get("RAY_ADDRESS", ""):
        problems += absent_files(config, remote=True)
        of_data = [number for number, problem in enumerate(problems) if problem.startswith("data.")]
        if of_data:
            problems[of_data[-1]] += (
                "; `bandpo-lab setup` with the same --model, --settings and --task writes the data of the recipes, and "
                "--data names their folder"
            )
    if _trains_on_cuda(config) and not _joins_cluster(config):
        per_node = config.trainer.n_gpus_per_node
        nodes = config.trainer.nnodes
        gpus = per_node * nodes
        setting = f"trainer.n_gpus_per_node × trainer.nnodes is {per_node} × {nodes} = {gpus}"
        if has_separate_sampler(mode_of(config)):
            rollout = config.actor_rollout_ref.rollout
            gpus += rollout.n_gpus_per_node * rollout.nnodes
            setting += f", and the sampler has {rollout.n_gpus_per_node} × {rollout.nnodes} more"
        problem = lacking_gpus(gpus, setting)
        if problem:
            problems.append(f"{problem}; to train on a cluster, set RAY_ADDRESS")
        problem = uneven_replicas(config) or asynchronous_problem(config)
        if problem:
            problems.append(problem)
        problem = engine_problem(config)
        if problem:
            problems.append(problem)
        if lacks_attention(config):
            problems.append(NO_FLASH_ATTENTION)
    return problems


def engine_problem(config: Any) -> str | None:
    """Return a message if the engine of the recipe is missing, or has not the memory that it will claim."""
    rollout = config.actor_rollout_ref.rollout
    prefix = "actor_rollout_ref.rollout."
    engine = missing_engine(rollout.name)
    if engine is not None:
        return (
            f"{engine} is not installed, which is to generate ({prefix}name={rollout.name}): docs/install.md has the "
            "environment for verl"
        )
    if rollout.name not in ENGINES:
        return None
    setting = f"{prefix}gpu_memory_utilization"
    return memory_problem(
        rollout.name, setting, rollout.gpu_memory_utilization, config.trainer.n_gpus_per_node
    )


def _trains_on_cuda(config: Any) -> bool:
    """Return True if verl will count CUDA's GPUs: no other platform, and no number of GPUs in the settings of Ray."""
    from omegaconf import OmegaConf

    platform = os.environ.get("VERL_PLATFORM") or config.trainer.device
    counted_by_hand = OmegaConf.select(config, "ray_kwargs.ray_init.num_gpus") is not None
    return platform == "cuda" and not counted_by_hand and importlib.util.find_spec("torch_npu") is None


def _joins_cluster(config: Any) -> bool:
    """Return True if Ray will join a cluster, whose GPUs cannot be counted from here, instead of starting one."""
    from omegaconf import OmegaConf

    address = OmegaConf.select(config, "ray_kwargs.ray_init.address")
    if address is not None:
        return address != "local"
    if os.environ.get("RAY_ADDRESS"):
        return True
    # `ray start` writes the address of the cluster that it starts on this machine to a file, and Ray joins it.
    temporary = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"  # noqa: S108
    return (Path(temporary) / "ray" / "ray_current_cluster").exists()
