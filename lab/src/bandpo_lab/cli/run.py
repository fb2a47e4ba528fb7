"""`bandpo-lab run`."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from bandpo.cli import read_method
from bandpo.errors import InvalidValue, did_you_mean
from bandpo.runs.legs import CONSOLE, new_leg
from bandpo_lab.cli.recipes import SHIPPED
from bandpo_lab.console import echo

LOSS = "actor_rollout_ref.actor.policy_loss."
METHOD = "A rule of the recipes; any method, as 'GSPO(0.01)'; or vanilla, which is verl's own loss."


def run_command(
    framework: Annotated[Literal["verl"], typer.Argument(help="verl; for TRL there is `bandpo-lab train`.")],
    model: Annotated[str, typer.Option(help="A model of the recipes, a folder, or a name on the hub.")],
    method: Annotated[str, typer.Option(help=METHOD)],
    overrides: Annotated[list[str] | None, typer.Argument(help="Of verl, in addition; they win.")] = None,
    task: Annotated[str, typer.Option(help="math, or a task of the recipes.")] = "math",
    settings: Annotated[str, typer.Option(help="recommended, or authors for theirs.")] = "recommended",
    data: Annotated[str, typer.Option(help="Folder that `bandpo-lab data prepare` wrote.")] = "data",
    output_dir: Annotated[str, typer.Option(help="For checkpoints and logs; every node sees it.")] = "runs",
    config_dir: Annotated[Path, typer.Option(help="Your copy of the recipes.", show_default=False)] = SHIPPED,
    rehearse: Annotated[bool, typer.Option("--rehearse", help="On this machine's CPU, small.")] = False,
    one_step: Annotated[
        bool,
        typer.Option(
            "--one-step",
            help="Make one training step on this node's GPUs, with responses as long as they may get, and print what "
            "the whole run will cost in hours, memory and disk.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the command alone; no file and no GPU is looked for.")
    ] = False,
) -> None:
    """Train with verl, here or on the Ray cluster of RAY_ADDRESS: print verl's overrides and run them."""
    if not config_dir.is_dir():
        raise InvalidValue(
            f"--config-dir {config_dir}: there is no such folder in {Path.cwd()}; `bandpo-lab recipes` makes one. A "
            "job that was submitted to Ray has what its folder had, without what .gitignore and runtime-env.yaml name"
        )
    chosen, output = experiment(model, method, task, settings, config_dir), Path(output_dir).resolve()
    chosen += [f"recipe.data={Path(data).resolve()}", f"recipe.output={output}"]
    chosen += [*_downloaded_model(model, Path(data).resolve(), config_dir), *(overrides or ())]
    recipes = ["--config-dir", str(config_dir.resolve())]
    if rehearse:
        command = [sys.executable, "-m", "bandpo_lab", "rehearse", "--stand-in", *recipes, "--", *chosen]
        _print_command(command)
        if not dry_run:
            os.execv(command[0], command)  # noqa: S606  # its exit status and signals are then ours
        return

    command = [sys.executable, "-m", "verl.trainer.main_ppo", *recipes, *chosen]
    if one_step:
        command += _single_step(output)
    if one_step or dry_run:
        # Without a leg that is made here, verl's driver makes one where it runs.
        command.append(_environment())
        _print_command(command)
    if dry_run:
        return
    from bandpo_lab.rehearsal.preflight import naming_unset

    config = _checked(chosen, config_dir, overrides or ())
    if one_step:
        from bandpo_lab.rehearsal import gpu

        echo(gpu.run_one_step(command, config, output))
        return

    with naming_unset(overrides or ()):
        _check_ready(config)
    leg = new_leg(Path(config.trainer.default_local_dir).resolve())
    command.append(_environment(leg))
    echo(f"bandpo: leg {leg}")
    _print_command(command)
    train_into(leg, command)


def _print_command(command: list[str]) -> None:
    echo(shlex.join(command))
    sys.stdout.flush()


def _environment(leg: Path | None = None) -> str:
    """Return the override that hands environment variables to all of Ray's processes.

    Args:
        leg: The folder of the leg that starts; None where the driver makes it.
    """
    variables = {"WANDB_MODE": os.environ.get("WANDB_MODE", "offline")}
    variables |= {name: os.environ[name] for name in ("WANDB_DIR",) if os.environ.get(name)}
    if leg is not None:
        variables["BANDPO_LEG"] = str(leg)
    words = ",".join(f"{name}:{value}" for name, value in variables.items())
    return f"+ray_kwargs.ray_init.runtime_env.env_vars={{{words}}}"


def train_into(leg: Path, command: list[str]) -> None:
    """Become a training, whose output goes into a leg's folder as well.

    Its exit status and signals are this process's. Another process copies its output until the training closes it; it
    ignores the signals that end the training, so that the last lines are not lost.

    Args:
        leg: The folder of the leg.
        command: The training.
    """
    copy = subprocess.Popen(
        ["sh", "-c", 'trap "" INT TERM HUP USR1; exec tee -a "$0"', str(leg / CONSOLE)],
        stdin=subprocess.PIPE,
    )
    assert copy.stdin is not None
    os.dup2(copy.stdin.fileno(), 1)
    os.dup2(copy.stdin.fileno(), 2)
    os.environ["PYTHONUNBUFFERED"] = "1"  # or a pipe would hold the lines back
    os.execv(command[0], command)  # noqa: S606


def _single_step(output: Path) -> list[str]:
    """Overrides for a single step, in which all responses get as long as they may, and a checkpoint of it."""
    trainer = ("total_training_steps=1", "val_before_train=false", "test_freq=-1", "save_freq=1")
    trainer += ("resume_mode=disable", "logger=[console]", f"default_local_dir={output / 'one-step'}")
    return ["actor_rollout_ref.rollout.ignore_eos=true", *(f"trainer.{word}" for word in trainer)]


def _checked(chosen: Sequence[str], recipes: Path, typed: Sequence[str] = ()) -> Any:
    """Return the whole config of a run.

    Args:
        chosen: Every override.
        recipes: The folder of the recipes.
        typed: Those of the command line.

    Raises:
        ValueError: it cannot be composed, does not mean what it seems to, or lacks a setting.
    """
    from omegaconf import OmegaConf

    from bandpo_lab.rehearsal.preflight import misread_override, missing_value, validate
    from bandpo_lab.rehearsal.shrink import compose, unset

    config = compose([*chosen], recipes, "ppo_trainer")
    if why := misread_override(chosen, OmegaConf.to_yaml(config)) or missing_value(config, typed):
        raise InvalidValue(why)
    # What verl says over a setting without a value may not name it. The other checks are the driver's, since they take
    # the import of verl's workers.
    if unset(typed) and not (check := validate(config, typed)).ok:
        raise InvalidValue(check.detail)
    return config


def _check_ready(config: Any) -> None:
    """Refuse a run whose files or GPUs are not here, before Ray starts and takes minutes to say so."""
    from bandpo_lab.downloads import changed_files
    from bandpo_lab.rehearsal.preflight import data_files, launch_problems

    lacks = launch_problems(config)
    lacks += changed_files([path for split in ("train", "val") for path in data_files(config, split)])
    if lacks:
        raise InvalidValue(f"not started: {'; '.join(lacks)}")
    model = config.actor_rollout_ref.model.path
    if not Path(model).expanduser().is_dir():
        echo(
            f"bandpo: model       {model}, in the revision that the hub has as its newest, or this node in its cache; "
            "`bandpo-lab setup` downloads the one that the recipe names",
            err=True,
        )


def experiment(model: str, method: str, task: str, settings: str, recipes: Path) -> list[str]:
    """The overrides that name a run, refused where one of them is not known in the folder of the recipes.

    >>> experiment("qwen2.5-3b-instruct", "band-kl", "math", "authors", SHIPPED)
    ['+paper/model=qwen2.5-3b-instruct', '+paper/rule=band-kl', '+paper=authors']
    >>> experiment("Qwen/Qwen3-4B", "GSPO(0.01)", "math", "recommended", SHIPPED)[-2:]
    ['+recipe.rule=GSPO-0.01', '+actor_rollout_ref.actor.policy_loss.method="GSPO(0.01)"']
    """

    def known(kind: str, name: str) -> list[str]:
        there = _names(recipes, kind)
        if name in there:
            return ["+" + f"paper/{kind}".rstrip("/") + f"={name}"]
        if kind in ("model", "rule"):
            return []
        raise InvalidValue(f"{name!r} is none of {', '.join(there)} in {recipes}{did_you_mean(name, there)}")

    # A name without a slash that is close to a recipe's is a slip: few models of the hub have such names.
    hint = "" if "/" in model or Path(model).is_dir() else did_you_mean(model, _names(recipes, "model"))
    if hint and not known("model", model):
        raise InvalidValue(
            f"{model!r} is no model of the recipes in {recipes}, and no folder{hint} A model of the hub is written "
            "ORGANISATION/NAME"
        )
    chosen = known("model", model) or [
        f"+recipe.model={_named(model)}",
        f"actor_rollout_ref.model.path={_expanded(model)}",
    ]
    chosen += [*(rule := known("rule", method)), *known("", settings)]
    if task != "math":
        chosen += known("task", task)
    if method == "vanilla":
        own = "verl.workers.config.PolicyLossConfig"
        # verl's own class knows no setting of bandpo's.
        chosen += [
            "+recipe.rule=vanilla",
            f"{LOSS}_target_={own}",
            f"{LOSS}loss_mode=vanilla",
            f"~{LOSS}average",
        ]
    elif not rule:
        _check_method(method, recipes)
        chosen += [f"+recipe.rule={_named(method)}", f"+{LOSS}method={json.dumps(method)}"]
    return chosen


def _downloaded_model(name: str, data: Path, recipes: Path) -> list[str]:
    """Return the override that names the folder into which `bandpo-lab setup` downloaded a model, if it did."""
    from bandpo_lab.downloads import downloaded, hub_model

    model = hub_model(name, recipes)
    folder = downloaded(model, data) if model else None
    return [f"actor_rollout_ref.model.path={folder}"] if folder else []


def _expanded(model: str) -> str:
    """Return the model with the user's folder for a leading ``~``, which hydra cannot read."""
    return str(Path(model).expanduser()) if model.startswith("~") else model


def _names(recipes: Path, kind: str) -> list[str]:
    """The names of the recipes of a kind, such as ``model``; those of TRL are left out."""
    names = sorted(path.stem for path in (recipes / "paper" / kind).glob("*.yaml"))
    return [name for name in names if name not in ("accelerate", "trl")]


def _check_method(method: str, recipes: Path) -> None:
    """Check that a method which is no rule of the recipes can be read.

    Raises:
        ValueError: it cannot; the message has the nearest name where a single name was written.
    """
    from bandpo.methods import METHODS

    try:
        read_method(method)
    except InvalidValue as error:
        hint = did_you_mean(method, [*METHODS, *_names(recipes, "rule"), "vanilla"])
        if hint and re.fullmatch(r"[\w.-]+", method):
            raise InvalidValue(
                f"{method!r} is no rule of the recipes in {recipes}, and no method{hint}"
            ) from error
        raise


def _named(text: str) -> str:
    """As the name of a folder."""
    return re.sub(r"[^\w.]+", "-", Path(text).name if "(" not in text else text).strip("-")
