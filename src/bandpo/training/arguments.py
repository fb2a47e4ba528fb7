"""What `bandpo train` can be told: every option of TRL's GRPO script, and a few of its own."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import trl.rewards
import yaml
from trl import DatasetMixtureConfig, ModelConfig, TrlParser
from trl.scripts.grpo import GRPOScriptArguments

from bandpo.integrations.trl import BandGRPOConfig


@dataclass
class RunArguments(GRPOScriptArguments):
    """Which data and rewards, how to evaluate, and how the run folder is treated."""

    resume: bool = field(
        default=False,
        metadata={
            "help": "Go on with the run in output_dir from its last checkpoint; start it if there is none."
        },
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
        for name, least in (
            ("train_prompts", 1),
            ("eval_prompts", 0),
            ("eval_samples", 1),
            ("eval_every", 0),
            ("threads", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")


ABOVE_0 = (
    "num_train_epochs", "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps",
    "steps_per_generation", "num_iterations", "max_completion_length", "temperature", "logging_steps", "save_steps",
)  # fmt: skip
AT_LEAST_0 = ("learning_rate", "weight_decay", "max_grad_norm", "beta", "warmup_steps", "seed")


@dataclass
class TrainingConfig(BandGRPOConfig):
    """`BandGRPOConfig` that refuses numbers with which a run would end late, or never begin.

    Raises:
        ValueError: such a number.
    """

    def __post_init__(self) -> None:
        for names, fits, said in (
            (ABOVE_0, lambda value: value > 0, "above 0"),
            (AT_LEAST_0, lambda value: value >= 0, "at least 0"),
        ):
            for name in names:
                value = getattr(self, name)
                if isinstance(value, int | float) and not fits(value):
                    raise ValueError(f"{name} must be {said}, got {value}")
        if self.max_steps == 0 or self.max_steps < -1:
            raise ValueError(
                f"max_steps must be at least 1, or -1 to go by num_train_epochs, got {self.max_steps}"
            )
        super().__post_init__()


class Arguments(NamedTuple):
    """All settings of one run."""

    run: RunArguments
    training: TrainingConfig
    model: ModelConfig
    mixture: DatasetMixtureConfig


def parser() -> TrlParser:
    """The parser of every flag and YAML key."""
    dataclasses: Any = (RunArguments, TrainingConfig, ModelConfig, DatasetMixtureConfig)
    return TrlParser(dataclasses, prog="bandpo train")


def parse(argv: Sequence[str]) -> Arguments:
    """Settings from flags and, with ``--config FILE``, a YAML file that the flags override.

    Where neither a model nor data is named, the embedded task's own settings stand below the flags.

    Raises:
        ValueError: an unknown key or flag, a malformed file, or a refused value; the message names it.
        SystemExit: ``--help``, or a flag whose value is of another type (after printing usage).
    """
    argv = list(argv)
    names_its_own = any(
        a.split("=")[0] in ("--config", "--dataset_name", "--model_name_or_path") for a in argv
    )
    if not names_its_own:
        argv = ["--config", str(resources.files("bandpo.tasks") / "multiplication.yaml"), *argv]
    if "--config" in argv:
        _check_yaml(argv[argv.index("--config") + 1 :][:1])
    known = {
        f.name
        for cls in (RunArguments, TrainingConfig, ModelConfig, DatasetMixtureConfig)
        for f in fields(cls)
    }
    for flag in (a.split("=")[0] for a in argv if a.startswith("--")):
        name = flag.removeprefix("--").removeprefix("no_").replace("-", "_")
        if name not in known | {"config", "help"}:
            close = difflib.get_close_matches(name, known, n=1)
            raise ValueError(f"unknown option {flag}" + (f"; did you mean --{close[0]}?" if close else ""))
    try:
        arguments = Arguments(*parser().parse_args_and_config(argv))
    except (ValueError, ImportError) as error:
        raise ValueError(str(error)) from error
    if not (arguments.run.dataset_name or arguments.mixture.datasets):
        raise ValueError(
            "no data: give --dataset_name (a hub name, 'multiplication', or 'lock') or `datasets` in the YAML file"
        )
    if not arguments.model.model_name_or_path:
        raise ValueError("no model: give --model_name_or_path (a hub name, a folder, or 'multiplication')")
    if not (arguments.run.reward_funcs or arguments.run.reward_model_name_or_path):
        raise ValueError("no reward: give --reward_funcs (e.g. accuracy_reward, or package.module.function)")
    return arguments


def _check_yaml(path: list[str]) -> None:
    if not path:
        raise ValueError("--config needs the path of a YAML file")
    file = Path(path[0])
    if not file.is_file():
        raise ValueError(f"--config {file}: there is no such file")
    try:
        content = yaml.safe_load(file.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"--config {file} is no valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"--config {file} must hold `option: value` lines, got a {type(content).__name__}")


def reward_functions(run: RunArguments) -> list[Callable[..., list[float]]]:
    """The reward functions named in ``reward_funcs``: TRL's own by name, any other by its import path.

    Raises:
        ValueError: a name that leads to no function.
    """
    return [_reward_function(name) for name in run.reward_funcs or []]


def _reward_function(name: str) -> Callable[..., Any]:
    if name == "get_soft_overlong_punishment":  # a factory; the values of TRL's own script
        return trl.rewards.get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256)
    if hasattr(trl.rewards, name):
        return getattr(trl.rewards, name)
    module, _, function = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"reward_funcs: {name!r} is neither one of TRL's nor package.module.function ({error})"
        ) from error
