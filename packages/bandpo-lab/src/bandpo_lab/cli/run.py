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

from bandpo_lab.cli.names import VANILLA, complete_method, complete_model, recipe_names
from bandpo_lab.cli.recipes import SHIPPED
from bandpo_lab.cli.refused_methods import check_for_verl
from bandpo_lab.cluster.modes import MAIN, MODES, ModeName, entry_point, mode_overrides
from bandpo_lab.errors import InvalidValue, did_you_mean, error_about
from bandpo_lab.output.console import echo
from rlvet.runs.legs import CONSOLE

LOSS = "actor_rollout_ref.actor.policy_loss."
MODE = f"verl's trainer: {', '.join(MODES)}. All but sync train on old data, with the ratio to the policy that sampled."
METHOD = "A rule of the recipes, any method such as 'GSPO(0.01)', or vanilla for verl's own loss."


def run_command(
    framework: Annotated[Literal["verl"], typer.Argument(help="verl; for TRL use `bandpo-lab train`.")],
    model: Annotated[
        str,
        typer.Option(
            help="A model of the recipes, a folder, smollm2, or a name on the hub.",
            autocompletion=complete_model,
        ),
    ],
    method: Annotated[str, typer.Option(help=METHOD, autocompletion=complete_method)],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Further overrides for verl, which take precedence.")
    ] = None,
    mode: Annotated[ModeName, typer.Option(help=MODE, metavar="MODE")] = "sync",
    task: Annotated[str, typer.Option(help="math, or a task of the recipes.")] = "math",
    settings: Annotated[
        str, typer.Option(help="recommended, or authors for those of the paper's authors.")
    ] = "recommended",
    data: Annotated[str, typer.Option(help="Folder that `bandpo-lab data prepare` wrote.")] = "data",
    output_dir: Annotated[
        str, typer.Option(help="Folder for checkpoints and logs, shared by all nodes.")
    ] = "runs",
    config_dir: Annotated[Path, typer.Option(help="Your copy of the recipes.", show_default=False)] = SHIPPED,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="Run the recipe at a small size on this machine's CPU.")
    ] = False,
    one_step: Annotated[
        bool,
        typer.Option(
            "--one-step",
            help="Make one training step on this node's GPUs, with responses of maximal length, and print the "
            "estimated cost of the whole run in hours, memory and disk space.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the command, without checking files and GPUs.")
    ] = False,
) -> None:
    """Train with verl, here or on the Ray cluster of RAY_ADDRESS: print verl's overrides and run them."""
    if not config_dir.is_dir():
        raise InvalidValue(
            f"--config-dir {config_dir}: there is no such folder in {Path.cwd()}; `bandpo-lab recipes` makes one. A "
            "job that was submitted to Ray has what its folder had, without what .gitignore and runtime-env.yaml name"
        )
    if one_step and mode != "sync":
        raise InvalidValue(
            f"--one-step with --mode {mode}: the cost of a run is estimated from a step of the synchronous trainer; "
            "leave --mode out, or train without --one-step"
        )
    user_overrides = overrides or []
    if not dry_run:
        # The libraries below take up to minutes to import.
        _print_progress(f"reads the recipe of {model} with {method}")
    output = Path(output_dir).resolve()
    all_overrides = experiment(model, method, task, settings, config_dir)
    _check_radius(method, user_overrides, config_dir)
    if method not in (VANILLA, *recipe_names(config_dir, "rule")):
        check_for_verl(method, mode != "sync", user_overrides, config_dir)
    all_overrides += [f"recipe.data={Path(data).resolve()}", f"recipe.output={output}"]
    all_overrides += _local_model(model, Path(data).resolve(), config_dir, convert=not (rehearse or dry_run))
    all_overrides += user_overrides
    recipes = ["--config-dir", str(config_dir.resolve())]
    if rehearse:
        command = [
            sys.executable,
            "-m",
            "bandpo_lab",
            "rehearse",
            "--stand-in",
            *([] if mode == "sync" else ["--mode", mode]),
            *recipes,
            "--",
            *all_overrides,
        ]
        _print_command(command)
        if not dry_run:
            os.execv(command[0], command)  # noqa: S606  # replaces this process, with its exit status and signals
        return

    all_overrides = [*mode_overrides(mode), *all_overrides]
    program = entry_point(mode)
    command = [sys.executable, *program.command(config_dir), *all_overrides]
    if one_step:
        command += _single_step(output)
    if one_step or dry_run:
        # No leg is created here, so verl's driver creates one.
        command.append(_environment())
        _print_command(command)
    if dry_run:
        return
    _print_progress("composes verl's settings, which imports verl")
    from bandpo_lab.rehearsal.preflight import naming_unset

    config = _compose_and_check(all_overrides, config_dir, user_overrides, program.config_name)
    if one_step:
        from bandpo_lab.rehearsal import gpu

        echo(gpu.run_one_step(command, config, output))
        return

    _print_progress("looks for the files and GPUs")
    with naming_unset(user_overrides):
        _check_ready(config)
    from bandpo.integrations.legs import new_leg

    leg = new_leg(Path(config.trainer.default_local_dir).resolve())
    command.append(_environment(leg))
    echo(f"bandpo: leg {leg}")
    _print_command(command)
    train_into(leg, command)


def _print_progress(text: str) -> None:
    echo(f"bandpo: {text} ...", err=True)


def _print_command(command: list[str]) -> None:
    echo(shlex.join(command))
    sys.stdout.flush()


def _environment(leg: Path | None = None) -> str:
    """Return the override that sets environment variables in all of Ray's processes.

    Args:
        leg: The folder of the leg that starts; None if the driver creates it.
    """
    variables = {"WANDB_MODE": os.environ.get("WANDB_MODE", "offline")}
    if os.environ.get("WANDB_DIR"):
        variables["WANDB_DIR"] = os.environ["WANDB_DIR"]
    if leg is not None:
        variables["BANDPO_LEG"] = str(leg)
    settings = ",".join(f"{name}:{value}" for name, value in variables.items())
    return f"+ray_kwargs.ray_init.runtime_env.env_vars={{{settings}}}"


def train_into(leg: Path, command: list[str]) -> None:
    """Replace this process by a training, whose output is also copied to a leg's folder.

    The exit status and the signals of the training are those of this process. Another process copies the output until
    the training closes it. It ignores the signals that end the training, so that the last lines are copied as well.

    Args:
        leg: The folder of the leg.
        command: The command of the training.
    """
    copy = subprocess.Popen(
        ["sh", "-c", 'trap "" INT TERM HUP USR1; exec tee -a "$0"', str(leg / CONSOLE)],
        stdin=subprocess.PIPE,
    )
    assert copy.stdin is not None
    os.dup2(copy.stdin.fileno(), 1)
    os.dup2(copy.stdin.fileno(), 2)
    os.environ["PYTHONUNBUFFERED"] = "1"  # otherwise, Python buffers the output to a pipe
    os.execv(command[0], command)  # noqa: S606


def _single_step(output: Path) -> list[str]:
    """Return the overrides for a single step with a checkpoint, in which all responses have the maximal length."""
    return [
        "actor_rollout_ref.rollout.ignore_eos=true",
        "trainer.total_training_steps=1",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=1",
        "trainer.resume_mode=disable",
        "trainer.logger=[console]",
        f"trainer.default_local_dir={output / 'one-step'}",
    ]


def _compose_and_check(
    all_overrides: Sequence[str],
    recipes: Path,
    user_overrides: Sequence[str] = (),
    config_name: str = MAIN.config_name,
) -> Any:
    """Return the composed config of a run.

    Args:
        all_overrides: All overrides.
        recipes: The folder of the recipes.
        user_overrides: The overrides of the command line, which error messages name.
        config_name: The name of the program's main config.

    Raises:
        ValueError: The config cannot be composed, hydra reads an override in another way than intended, or a required
            setting has no value.
    """
    from omegaconf import OmegaConf

    from bandpo_lab.rehearsal.preflight import misread_override, missing_value, validate
    from bandpo_lab.rehearsal.shrink import compose, unset

    config = compose([*all_overrides], recipes, config_name)
    problem = misread_override(all_overrides, OmegaConf.to_yaml(config)) or missing_value(
        config, user_overrides
    )
    if problem:
        raise InvalidValue(problem)
    # verl's errors over a setting without a value may not name it, so the settings are checked here in that case. All
    # other checks are left to the driver, since they import verl's workers.
    if unset(user_overrides):
        check = validate(config, user_overrides)
        if not check.ok:
            raise InvalidValue(check.detail)
    return config


def _check_ready(config: Any) -> None:
    """Check that the files and GPUs of a run are on this machine, since Ray takes minutes to report that.

    Raises:
        ValueError: Something is missing, or a data file has changed.
    """
    from bandpo_lab.models.downloads import changed_files
    from bandpo_lab.rehearsal.preflight import data_files, launch_problems

    problems = launch_problems(config)
    problems += changed_files(data_files(config, "train") + data_files(config, "val"))
    if problems:
        raise error_about(InvalidValue, problems, title="not started")
    model = config.actor_rollout_ref.model.path
    if not Path(model).expanduser().is_dir():
        echo(
            f"bandpo: model       {model}, in the revision that the hub has as its newest, or this node in its cache; "
            "`bandpo-lab setup` downloads the one that the recipe names",
            err=True,
        )


def experiment(model: str, method: str, task: str, settings: str, recipes: Path) -> list[str]:
    """Return the overrides for a model, a method, a task and settings.

    Args:
        model: A model of the recipes, a folder, or a name on the hub.
        method: A rule of the recipes, the text of a method, or ``vanilla``.
        task: ``math``, or a task of the recipes.
        settings: ``recommended`` or ``authors``.
        recipes: The folder of the recipes.

    Raises:
        ValueError: A name is unknown.

    >>> experiment("qwen2.5-3b-instruct", "band-kl", "math", "authors", SHIPPED)
    ['+paper/model=qwen2.5-3b-instruct', '+paper/rule=band-kl', '+paper=authors']
    >>> experiment("Qwen/Qwen3-4B", "GSPO(0.01)", "math", "recommended", SHIPPED)[-2:]
    ['+recipe.rule=GSPO-0.01', '+actor_rollout_ref.actor.policy_loss.method="GSPO(0.01)"']
    """

    def recipe_override(kind: str, name: str) -> list[str]:
        """Return the override that selects a recipe; empty if a model or a rule is not among the recipes."""
        names = recipe_names(recipes, kind)
        if name in names:
            return ["+" + f"paper/{kind}".rstrip("/") + f"={name}"]
        if kind in ("model", "rule"):
            return []
        raise InvalidValue(f"{name!r} is none of {', '.join(names)} in {recipes}{did_you_mean(name, names)}")

    # A name without a slash that is similar to that of a recipe is a typing error: few models on the hub have no slash.
    hint = (
        "" if "/" in model or Path(model).is_dir() else _similar_models(model, recipe_names(recipes, "model"))
    )
    model_override = recipe_override("model", model)
    if hint and not model_override:
        raise InvalidValue(
            f"{model!r} is no model of the recipes in {recipes}, and no folder{hint} A model of the hub is written "
            "ORGANISATION/NAME"
        )
    if not model_override:
        model_override = [
            f"+recipe.model={_as_folder_name(model)}",
            f"actor_rollout_ref.model.path={_expand_home(model)}",
        ]

    rule_override = recipe_override("rule", method)
    overrides = [*model_override, *rule_override, *recipe_override("", settings)]
    if task != "math":
        overrides += recipe_override("task", task)
    if method == VANILLA:
        # verl's class has no setting of bandpo's, so the setting of the average is deleted.
        overrides += [
            "+recipe.rule=vanilla",
            f"{LOSS}_target_=verl.workers.config.PolicyLossConfig",
            f"{LOSS}loss_mode=vanilla",
            f"~{LOSS}average",
        ]
    elif not rule_override:
        _check_method(method, recipes)
        overrides += [f"+recipe.rule={_as_folder_name(method)}", f"+{LOSS}method={json.dumps(method)}"]
    return overrides


def _similar_models(model: str, names: Sequence[str]) -> str:
    """Return the end of an error about an unknown model: those whose names contain it, or the closest one.

    >>> _similar_models("qwen2.5-3b", ["qwen2.5-7b", "qwen2.5-3b-instruct"])
    '; did you mean qwen2.5-3b-instruct?'
    >>> _similar_models("Qwen", ["qwen2.5-7b", "llama-3.2-3b-instruct", "deepseek-r1-distill-qwen-7b"])
    '; the recipes have qwen2.5-7b, deepseek-r1-distill-qwen-7b.'
    """
    containing = [name for name in names if model.lower() in name]
    if len(containing) == 1:
        return f"; did you mean {containing[0]}?"
    return f"; the recipes have {', '.join(containing)}." if containing else did_you_mean(model, names)


def _local_model(name: str, data: Path, recipes: Path, *, convert: bool) -> list[str]:
    """Return the override with the folder of a model that is on this machine; empty if it is not.

    That is the folder to which `bandpo-lab setup` downloaded the model, or that of SmolLM2.

    Args:
        name: The model, as for `experiment`.
        data: The folder of the data.
        recipes: The folder of the recipes.
        convert: If True, SmolLM2 is converted if it was not before.
    """
    from bandpo_lab.models.downloads import downloaded_folder, hub_model
    from bandpo_lab.models.embedded import SMOLLM2, smollm2_folder, smollm2_path

    if name == SMOLLM2:
        return [f"actor_rollout_ref.model.path={smollm2_path() if convert else smollm2_folder()}"]
    model = hub_model(name, recipes)
    folder = downloaded_folder(model, data) if model else None
    return [f"actor_rollout_ref.model.path={folder}"] if folder else []


def _expand_home(model: str) -> str:
    """Replace a leading ``~`` in a path by the user's home folder, since hydra does not."""
    return str(Path(model).expanduser()) if model.startswith("~") else model


def _check_method(method: str, recipes: Path) -> None:
    """Check the text of a method that is not a rule of the recipes.

    Raises:
        ValueError: The text cannot be read; if it is a single name, the message suggests a similar one, or has the
            rules of the recipes.
    """
    from bandpo.cli import read_method
    from bandpo.core.methods import METHODS
    from bandpo.core.text import did_you_misspell, paper_name_hint

    try:
        read_method(method)
    except ValueError as error:
        # A rule of bandpo that lacks arguments has an error of its own. No rule of bandpo has a hyphen.
        is_unknown = "-" in method or "unknown name" in str(error)
        if not is_unknown or not re.fullmatch(r"[\w-]+", method):
            raise
        rules = [*recipe_names(recipes, "rule"), VANILLA]
        # The authors' names have no hyphen, those of the recipes do.
        of_paper = "" if "-" in method else paper_name_hint(method)
        hint = did_you_misspell(method, [*METHODS, *rules]) or of_paper
        hint = hint or (
            f"; the recipes have {', '.join(rules)}, and docs/which-method.md has the methods, such as BandAbove()"
        )
        raise InvalidValue(
            f"{method!r} is no rule of the recipes in {recipes}, and no method{hint}"
        ) from error


def _check_radius(method: str, user_overrides: Sequence[str], recipes: Path) -> None:
    """Check that ``recipe.radius``, if it is overridden, is the radius of the method.

    Raises:
        ValueError: The method is not a rule of the recipes with a radius; the message has a spelling that works.
    """
    override = re.compile(r"\+{0,2}recipe\.radius=(.*)")
    radii = [found[1] for found in map(override.fullmatch, user_overrides) if found]
    if not radii:
        return
    rules = [name for name in recipe_names(recipes, "rule") if _has_radius(recipes, name)]
    if method in rules:
        return
    from bandpo.core.text import PAPER_NAME

    spelling = f"{method}({radii[-1]})" if PAPER_NAME.fullmatch(method) else f"Band(KL(), {radii[-1]})"
    raise InvalidValue(
        f"recipe.radius is not used by --method {method!r}: it is the radius of {', '.join(rules)}. Take one of these, "
        f"or write the radius within the method, as in --method {spelling!r}"
    )


def _has_radius(recipes: Path, rule: str) -> bool:
    """Return True if a rule of the recipes reads its radius from ``recipe.radius``."""
    import yaml

    text = (recipes / "paper/rule" / f"{rule}.yaml").read_text(encoding="utf-8")
    return "radius" in yaml.safe_load(text)["recipe"]


def _as_folder_name(text: str) -> str:
    """Return the name of a model or a method in a form that can be the name of a folder."""
    return re.sub(r"[^\w.]+", "-", Path(text).name if "(" not in text else text).strip("-")
