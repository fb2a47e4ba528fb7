"""Options of `bandpo-lab train`: those of TRL's GRPO script, and a few of its own."""

from __future__ import annotations

import argparse
import importlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
import trl.rewards
from trl import DatasetMixtureConfig, ModelConfig, TrlParser
from trl.scripts.grpo import GRPOScriptArguments

from bandpo.errors import InvalidValue, did_you_mean
from bandpo.integrations.trl import BandGRPOConfig
from bandpo.text import importable_current_folder
from bandpo_lab.console import echo
from bandpo_lab.file_models import read_yaml
from bandpo_lab.files import PATHS, check_path


@dataclass
class RunArguments(GRPOScriptArguments):
    """Which data and rewards, how to evaluate, and how the run folder is treated."""

    resume: bool = field(
        default=False,
        metadata={
            "help": "Go on with the run in output_dir from its last checkpoint; start it if there is none."
        },
    )
    data_dir: str | None = field(
        default=None,
        metadata={"help": "Folder of the data_files of `datasets`; their own data_dir if unset."},
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
            "help": "Optimiser steps between evaluations during training, for curves of mean@k; 0 for none."
        },
    )
    solved_at: float = field(
        default=1.0, metadata={"help": "Total reward from which a completion counts as right."}
    )
    threads: int | None = field(
        default=None, metadata={"help": "CPU threads for torch; its own choice if unset."}
    )

    def __post_init__(self) -> None:
        _refuse(self, ("train_prompts", "eval_samples", "threads"), lambda value: value >= 1, "at least 1")
        _refuse(self, ("eval_prompts", "eval_every"), lambda value: value >= 0, "at least 0")


def _refuse(settings: Any, names: Sequence[str], fits: Callable[[float], bool], said: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if isinstance(value, int | float) and not fits(value):
            raise InvalidValue(f"{name} must be {said}, got {value}")


ABOVE_0 = (
    "num_train_epochs", "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps",
    "num_generations", "steps_per_generation", "num_iterations", "max_completion_length", "temperature",
    "logging_steps", "save_steps",
)  # fmt: skip
AT_LEAST_0 = ("lag", "learning_rate", "weight_decay", "max_grad_norm", "beta", "warmup_steps", "seed")


@dataclass
class TrainingConfig(BandGRPOConfig):
    """`BandGRPOConfig` with a lag; refuses, by a ValueError, numbers with which a run would end late or never begin."""

    lag: int = field(
        default=0,
        metadata={
            "help": "Train on each batch so many batches after it was generated, as asynchronous training does. The "
            "first `lag` batches of a run move nothing."
        },
    )

    def __post_init__(self) -> None:
        _refuse(self, ABOVE_0, lambda value: value > 0, "above 0")
        _refuse(self, AT_LEAST_0, lambda value: value >= 0, "at least 0")
        if self.max_steps == 0 or self.max_steps < -1:
            raise InvalidValue(
                f"max_steps must be at least 1, or -1 to go by num_train_epochs, got {self.max_steps}"
            )
        super().__post_init__()

    @cached_property
    def _setup_devices(self) -> torch.device:
        # transformers hands ddp_timeout on for other devices only.
        started_by_a_launcher = dist.is_torchelastic_launched() or "LOCAL_RANK" in os.environ
        if self.use_cpu and started_by_a_launcher and not dist.is_initialized():
            dist.init_process_group(self.ddp_backend or "gloo", timeout=self.ddp_timeout_delta)
        device = super()._setup_devices
        # With several processes transformers names the CPU "cpu:0". torch.load knows it by "cpu" alone, so an optimizer
        # could not be loaded.
        return torch.device("cpu") if device.type == "cpu" else device


class Arguments(NamedTuple):
    """All settings of one run."""

    run: RunArguments
    training: TrainingConfig
    model: ModelConfig
    mixture: DatasetMixtureConfig


OUTPUT_DIR = "{output_dir}"
"""What stands in a run's config.yaml for the run folder, so that the folder can be moved."""
PARTS: Any = (RunArguments, TrainingConfig, ModelConfig, DatasetMixtureConfig)
KNOWN = {f.name for part in PARTS for f in fields(part)} | {"help", "help_all"}

HELP = {
    "what is trained, on what": (
        "config", "model_name_or_path", "dataset_name", "reward_funcs", "train_prompts", "data_dir",
    ),
    "the method": ("method", "anchor", "lag", "certify", "fused_logits"),
    "batches": (
        "max_steps", "learning_rate", "num_iterations", "steps_per_generation", "num_generations",
        "per_device_train_batch_size", "gradient_accumulation_steps", "max_completion_length", "temperature", "beta",
        "seed",
    ),
    "what is seen": (
        "audit_steps", "audit_detail", "watched", "record", "eval_prompts", "eval_samples", "eval_every", "solved_at",
        "logging_steps", "report_to",
    ),
    "the folder and the machine": (
        "output_dir", "resume", "save_steps", "use_cpu", "bf16", "threads", "use_vllm", "use_peft",
    ),
}  # fmt: skip
"""The options that --help shows, by group: all of ours, and of TRL's those that most runs set."""


class Parser(TrlParser):
    """TRL's, of every flag and YAML key, without the usage of two hundred lines before an error."""

    def __init__(self) -> None:
        super().__init__(PARTS, prog="bandpo-lab train")

    def format_help(self) -> str:
        """The options of `HELP`, each with the first sentence that its class has on it."""
        known = {f.name: f.metadata["help"] for part in PARTS for f in fields(part)}
        known["config"] = "YAML file of options; flags stand above it."
        short = argparse.ArgumentParser(
            prog=self.prog,
            usage="bandpo-lab train [--config FILE] [--OPTION VALUE ...]",
            formatter_class=lambda prog: argparse.ArgumentDefaultsHelpFormatter(prog, max_help_position=33),
            epilog="bandpo-lab train --help-all lists the other options of TRL and transformers.",
            add_help=False,
        )
        for title, names in HELP.items():
            group = short.add_argument_group(title)
            for name in names:
                said = re.split(r"(?<=\.)\s", known[name])[0]
                default = self.get_default(name)
                default = argparse.SUPPRESS if default is None else default
                group.add_argument(f"--{name}", metavar="", default=default, help=said)
        return short.format_help()

    def error(self, message: str) -> NoReturn:
        raise InvalidValue(f"{message}; bandpo-lab train --help-all lists all options")


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Settings from flags and, with ``--config FILE``, a YAML file that the flags override.

    A flag may be written with hyphens. The file may be the ``config.yaml`` of a run, which makes that run again. Where
    flags and file name neither a model nor data, the embedded task's own settings stand below them.

    Raises:
        ValueError: an unknown key or flag, a malformed file, or a refused value; the message names it.
        SystemExit: ``--help``, ``--help-all``.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", nargs="?", const="")
    file, flags = first.parse_known_args(argv)
    flags = [re.sub("^--[^=]+", lambda m: "--" + m[0][2:].replace("-", "_"), flag) for flag in flags]
    named = [flag.split("=")[0].removeprefix("--") for flag in flags if flag.startswith("--")]
    for name in named:
        if name not in KNOWN and name.removeprefix("no_") not in KNOWN:
            raise InvalidValue(f"unknown option --{name}{did_you_mean(name, KNOWN)}")
    config = {} if file.config is None else _read(file.config)
    if not {"dataset_name", "datasets", "model_name_or_path"} & {*named, *config}:
        task = _read(str(resources.files("bandpo_lab.tasks") / "multiplication.yaml"))
        config = task | config
    # Paths of the YAML file; the command has checked those of its flags before it imported TRL.
    for option, what in PATHS.items():
        name = config.get(option)
        if option not in named and isinstance(name, str):
            check_path(option, name, what)
    environment = config.pop("env", {})  # as in TRL's own scripts
    if not isinstance(environment, dict):
        raise InvalidValue(f"--config {file.config}: env must hold `NAME: value` lines, got {environment!r}")
    os.environ.update({str(name): str(value) for name, value in environment.items()})
    parsing = Parser()
    try:
        parsing.set_defaults_with_config(**config)
        if "help_all" in named:
            echo(TrlParser.format_help(parsing))
            raise SystemExit(0)
        with importable_current_folder():
            arguments = Arguments(*parsing.parse_args_into_dataclasses(args=flags))
    except (ValueError, ImportError) as error:
        raise InvalidValue(str(error)) from error
    if arguments.training.record and arguments.training.output_dir:
        arguments.training.record = arguments.training.record.replace(
            OUTPUT_DIR, arguments.training.output_dir
        )
    if arguments.run.data_dir:
        for part in arguments.mixture.datasets:
            part.data_dir = arguments.run.data_dir
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
    return arguments


def _read(path: str) -> dict[str, Any]:
    """The options in a YAML file, or in the ``config.yaml`` of a run."""
    if not path:
        raise InvalidValue("--config needs the path of a YAML file")
    file = Path(path)
    if not file.is_file():
        raise InvalidValue(f"--config {file}: there is no such file")
    options = read_yaml(file.read_bytes(), f"--config {file}")
    if options.keys() == {"versions", "processes", "arguments"}:
        options = options["arguments"]
        del options["generation_batch_size"]  # TRL derived it from others, and refuses to be given both
    for name in options.keys() - KNOWN - {"env"}:
        raise InvalidValue(f"--config {file}: unknown option {name}{did_you_mean(name, KNOWN)}")
    return options


def reward_functions(run: RunArguments) -> list[Callable[..., list[float]]]:
    """The reward functions named in ``reward_funcs``: TRL's own by name, any other by its import path.

    Raises:
        ValueError: a name that leads to no function.
    """
    return [_reward_function(name) for name in run.reward_funcs or []]


def _reward_function(name: str) -> Callable[..., Any]:
    if name == "get_soft_overlong_punishment":  # a factory, given the values of TRL's own script
        return trl.rewards.get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256)
    if hasattr(trl.rewards, name):
        return getattr(trl.rewards, name)
    module, _, function = name.rpartition(".")
    try:
        with importable_current_folder():
            return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidValue(
            f"reward_funcs: {name!r} is neither one of TRL's nor package.module.function ({error})"
        ) from error
