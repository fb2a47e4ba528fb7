"""The options of `bandpo-lab train`: those of TRL's GRPO script, and a few more."""

from __future__ import annotations

import argparse
import importlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import trl.rewards
from trl import DatasetMixtureConfig, ModelConfig, TrlParser
from trl.scripts.grpo import GRPOScriptArguments

from bandpo.core.text import importable_current_folder
from bandpo.integrations.trl import BandGRPOConfig
from bandpo.integrations.trl.config import REMOVED
from bandpo_lab.errors import InvalidValue, did_you_mean
from bandpo_lab.files.validation import read_yaml
from bandpo_lab.files.writing import PATHS, check_path
from bandpo_lab.output.console import echo
from bandpo_lab.training.config_checks import CpuDevice, check_numbers, check_range
from bandpo_lab.training.failures import guarded

if TYPE_CHECKING:
    from bandpo_lab.training.async_config import AsyncTrainingConfig


@dataclass
class RunArguments(GRPOScriptArguments):
    """The options on data, rewards, evaluation and the run folder."""

    resume: bool = field(
        default=False,
        metadata={
            "help": "Resume the run in output_dir from its last checkpoint; start it if there is none."
        },
    )
    data_dir: str | None = field(
        default=None,
        metadata={"help": "Folder of the data_files of `datasets`; by default their own data_dir."},
    )
    train_prompts: int = field(default=4096, metadata={"help": "Prompts drawn from the embedded task."})
    eval_prompts: int = field(
        default=64,
        metadata={"help": "Prompts of the test split to evaluate on before and after; 0 for no evaluation."},
    )
    eval_samples: int = field(
        default=32, metadata={"help": "Completions per evaluated prompt: the k of mean@k."}
    )
    eval_every: int = field(
        default=0,
        metadata={
            "help": "Optimizer steps between evaluations during training, for curves of mean@k; 0 for none."
        },
    )
    solved_at: float = field(
        default=1.0, metadata={"help": "Smallest sum of rewards with which a completion counts as right."}
    )
    threads: int | None = field(default=None, metadata={"help": "CPU threads for torch."})

    def __post_init__(self) -> None:
        check_range(
            self, ("train_prompts", "eval_samples", "threads"), lambda value: value >= 1, "at least 1"
        )
        check_range(self, ("eval_prompts", "eval_every"), lambda value: value >= 0, "at least 0")


@dataclass
class TrainingConfig(CpuDevice, BandGRPOConfig):
    """`BandGRPOConfig` with a lag, which checks the range of numbers before the training begins.

    Raises:
        ValueError: A number is out of its range.
    """

    lag: int = field(
        default=0,
        metadata={
            "help": "Train on each batch this many batches after it was generated, as asynchronous training does. "
            "While the first `lag` batches of a run are generated, nothing is trained."
        },
    )

    def __post_init__(self) -> None:
        check_numbers(self)
        super().__post_init__()

    @property
    def ratio_moves(self) -> bool:
        """True if a loss may have ratios other than 1. With a lag the first one on a batch has."""
        return self.lag > 0 or super().ratio_moves


class Arguments(NamedTuple):
    """All settings of one run."""

    run: RunArguments
    training: TrainingConfig | AsyncTrainingConfig
    model: ModelConfig
    mixture: DatasetMixtureConfig

    @property
    def is_async(self) -> bool:
        """True if TRL's asynchronous trainer trains."""
        return not isinstance(self.training, TrainingConfig)


OUTPUT_DIR = "{output_dir}"
"""The placeholder for the run folder in a run's config.yaml, so that the folder can be moved."""
ASYNC = "async"
"""The option, and the entry of a YAML file, that selects TRL's asynchronous trainer."""
ONLY_ASYNC = (
    "fork_threshold_tokens", "heartbeat_stale_after_s", "max_inflight_tasks", "max_staleness", "queue_maxsize",
    "rehearse", "request_timeout", "token_budget", "weight_sync_steps", "weight_sync_timeout",
)  # fmt: skip
"""The settings that only TRL's asynchronous trainer has. Older versions of TRL do not have it."""


def config_classes(is_async: bool) -> tuple[Any, ...]:
    """Return the data classes of the options, in the order of `Arguments`.

    Args:
        is_async: True for TRL's asynchronous trainer.
    """
    if not is_async:
        return RunArguments, TrainingConfig, ModelConfig, DatasetMixtureConfig
    # TRL warns when its experimental part is imported, and older versions do not have it.
    from bandpo_lab.training.async_config import AsyncTrainingConfig

    return RunArguments, AsyncTrainingConfig, ModelConfig, DatasetMixtureConfig


def help_texts(is_async: bool) -> dict[str, str]:
    """Return the help text of each option by its name."""
    texts: dict[str, str] = {}
    for config_class in config_classes(is_async):
        texts |= {
            option.name: option.metadata.get("help", "") for option in fields(config_class) if option.init
        }
    return texts


HELP = {
    "model, data and rewards": (
        "config", "model_name_or_path", "dataset_name", "reward_funcs", "train_prompts", "data_dir",
    ),
    "the method": ("method", "anchor", "lag", "certify", "accept_idle_clip"),
    "TRL's asynchronous trainer": (
        "async", "rehearse", "max_staleness", "weight_sync_steps", "vllm_server_base_url",
    ),
    "batches": (
        "max_steps", "learning_rate", "num_iterations", "steps_per_generation", "num_generations",
        "per_device_train_batch_size", "gradient_accumulation_steps", "max_completion_length", "temperature", "beta",
        "seed",
    ),
    "logs and evaluations": (
        "audit_steps", "audit_detail", "watched", "record", "eval_prompts", "eval_samples", "eval_every", "solved_at",
        "logging_steps", "report_to",
    ),
    "the folder and the machine": (
        "output_dir", "resume", "save_steps", "use_cpu", "bf16", "threads", "use_vllm", "use_peft",
    ),
}  # fmt: skip
"""The options that --help shows if the trainer has them, by group: all of bandpo-lab's, and those of TRL that most runs
set."""


class Parser(TrlParser):
    """TRL's parser for all options, with a short help and one-line errors.

    Args:
        is_async: True for TRL's asynchronous trainer.
    """

    def __init__(self, is_async: bool = False) -> None:
        self._is_async = is_async
        program = f"bandpo-lab train --{ASYNC}" if is_async else "bandpo-lab train"
        super().__init__(config_classes(is_async), prog=program)

    def format_help(self) -> str:
        """Return the options of `HELP`, each with the first sentence of its help text."""
        texts = help_texts(self._is_async) | {
            "config": "YAML file of options; flags override it.",
            ASYNC: "Train with TRL's AsyncGRPOTrainer; --async --help shows its options.",
        }
        short_parser = argparse.ArgumentParser(
            prog=self.prog,
            usage=f"{self.prog} [--config FILE] [--OPTION VALUE ...]",
            formatter_class=lambda prog: argparse.ArgumentDefaultsHelpFormatter(prog, max_help_position=33),
            epilog=f"{self.prog} --help-all lists the other options of TRL and transformers.",
            add_help=False,
        )
        for title, names in HELP.items():
            group = short_parser.add_argument_group(title)
            for name in (name for name in names if name in texts):
                first_sentence = re.split(r"(?<=\.)\s", texts[name])[0]
                default = self.get_default(name)
                default = argparse.SUPPRESS if default is None else default
                group.add_argument(f"--{name}", metavar="", default=default, help=first_sentence)
        return short_parser.format_help()

    def error(self, message: str) -> NoReturn:
        raise InvalidValue(f"{message}; {self.prog} --help-all lists all options")


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Return the settings given by flags and, with ``--config FILE``, by a YAML file that the flags override.

    Flags may be written with hyphens. The file may be the ``config.yaml`` of a run, which repeats that run. If neither
    a model nor data is named, the defaults are the settings of the embedded task. With ``--async``, or ``async: true``
    in the file, the settings are those of TRL's asynchronous trainer.

    Raises:
        ValueError: A key or flag is unknown, the file is malformed, or a value is not valid; the message names it.
        SystemExit: With ``--help`` or ``--help-all``.
    """
    config_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    config_parser.add_argument("--config", nargs="?", const="")
    config_parser.add_argument(f"--{ASYNC}", action="store_true")
    namespace, flags = config_parser.parse_known_args(argv)
    flags = [re.sub("^--[^=]+", lambda m: "--" + m[0][2:].replace("-", "_"), flag) for flag in flags]
    flag_names = [flag.split("=")[0].removeprefix("--") for flag in flags if flag.startswith("--")]
    config = {} if namespace.config is None else _read_config(namespace.config)
    is_async = config.pop(ASYNC, False) or getattr(namespace, ASYNC)
    if not isinstance(is_async, bool):
        raise InvalidValue(f"--config {namespace.config}: {ASYNC} must be true or false, got {is_async!r}")
    for name in flag_names:
        reason = _reason_against(name.removeprefix("no_"), is_async, "--")
        # `no_` may be a part of the name.
        if reason and _reason_against(name, is_async):
            raise InvalidValue(reason)
    for name in config.keys() - {"env"}:
        reason = _reason_against(name, is_async)
        if reason:
            raise InvalidValue(f"--config {namespace.config}: {reason}")

    if not {"dataset_name", "datasets", "model_name_or_path"} & {*flag_names, *config}:
        task = _read_config(str(resources.files("bandpo_lab.tasks") / "multiplication.yaml"))
        names = help_texts(is_async)
        config = {name: value for name, value in task.items() if name in names} | config
    # Check the paths in the YAML file. The command has checked those of its flags before it imported TRL.
    for option, kind in PATHS.items():
        path = config.get(option)
        if option not in flag_names and isinstance(path, str):
            check_path(option, path, kind)
    environment = config.pop("env", {})  # as in TRL's own scripts
    if not isinstance(environment, dict):
        raise InvalidValue(
            f"--config {namespace.config}: env must hold `NAME: value` lines, got {environment!r}"
        )
    os.environ.update({str(name): str(value) for name, value in environment.items()})

    parser = Parser(is_async)
    try:
        parser.set_defaults_with_config(**config)
        if "help_all" in flag_names:
            echo(TrlParser.format_help(parser))
            raise SystemExit(0)
        with importable_current_folder():
            arguments = Arguments(*parser.parse_args_into_dataclasses(args=flags))
    except (ValueError, ImportError) as error:
        raise InvalidValue(str(error)) from error

    if arguments.training.record and arguments.training.output_dir:
        arguments.training.record = arguments.training.record.replace(
            OUTPUT_DIR, arguments.training.output_dir
        )
    if arguments.run.data_dir:
        for dataset in arguments.mixture.datasets:
            dataset.data_dir = arguments.run.data_dir
    _check_required(arguments)
    return arguments


def _check_required(arguments: Arguments) -> None:
    """Check that there are data, a model and a reward.

    Raises:
        ValueError: One of them is missing.
    """
    if not (arguments.run.dataset_name or arguments.mixture.datasets):
        raise InvalidValue(
            "no data: give --dataset_name (a hub name, 'multiplication', or a module with a dataset function), or "
            "`datasets` in the YAML file"
        )
    if not arguments.model.model_name_or_path:
        raise InvalidValue(
            "no model: give --model_name_or_path (a hub name, a folder, 'multiplication' or 'smollm2')"
        )
    if not (arguments.run.reward_funcs or arguments.run.reward_model_name_or_path):
        raise InvalidValue(
            "no reward: give --reward_funcs (e.g. accuracy_reward, or package.module.function)"
        )


def _read_config(path: str) -> dict[str, Any]:
    """Return the options in a YAML file, or in the ``config.yaml`` of a run."""
    if not path:
        raise InvalidValue("--config needs the path of a YAML file")
    file = Path(path)
    if not file.is_file():
        raise InvalidValue(f"--config {file}: there is no such file")
    options = read_yaml(file.read_bytes(), f"--config {file}")
    if options.keys() == {"versions", "processes", "arguments"}:
        options = options["arguments"]
        # TRL computes it from other options, and refuses it together with them.
        options.pop("generation_batch_size", None)
        options = without_removed(options)
    return options


def _reason_against(name: str, is_async: bool, dashes: str = "") -> str | None:
    """Return the reason why there is no option of a name; None if there is one.

    Args:
        name: The name.
        is_async: True for TRL's asynchronous trainer.
        dashes: What stands before the name of an unknown option.
    """
    known = help_texts(is_async).keys() | {"help", "help_all"}
    if name in known:
        return None
    if name in REMOVED:
        return REMOVED[name]
    if is_async and name in help_texts(False):
        return f"{name}: TRL's asynchronous trainer has no such setting; leave it out"
    if not is_async and name in ONLY_ASYNC:
        return f"{name} is a setting of TRL's asynchronous trainer: add --{ASYNC}, or leave it out"
    return f"unknown option {dashes}{name}{did_you_mean(name, known)}"


def without_removed(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a run without those that earlier versions had, where they were off."""
    return {name: value for name, value in options.items() if name not in REMOVED or value is not False}


def reward_functions(run: RunArguments) -> list[Callable[..., list[float]]]:
    """Return the reward functions of ``reward_funcs``: TRL's by name, any other by its import path.

    Raises:
        ValueError: A name is not that of a function.
    """
    return [_reward_function(name) for name in run.reward_funcs or []]


def _reward_function(name: str) -> Callable[..., Any]:
    if name == "get_soft_overlong_punishment":  # a factory, called with the values of TRL's own script
        return trl.rewards.get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256)
    if hasattr(trl.rewards, name):
        return getattr(trl.rewards, name)
    module, _, function = name.rpartition(".")
    try:
        with importable_current_folder():
            reward = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidValue(
            f"reward_funcs: {name!r} is neither one of TRL's nor package.module.function ({error})"
        ) from error
    if not callable(reward):
        raise InvalidValue(f"reward_funcs: {name!r} is {reward!r:.80}, and no function")
    return guarded(name, reward)
