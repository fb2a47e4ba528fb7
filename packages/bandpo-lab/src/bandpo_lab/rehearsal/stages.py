"""The stages of a rehearsal.

A rehearsal runs all stages of a training on a cluster, with a tiny model and unmodified verl and Ray. It reads the
config, loads the plug-ins in every process, and calls the reward function and the policy loss. It syncs weights,
validates, writes a checkpoint and resumes from it. See `rehearse`.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bandpo_lab.cluster.modes import ModeName, entry_point, mode_of, mode_overrides
from bandpo_lab.errors import InvalidValue
from bandpo_lab.rehearsal import files, preflight
from bandpo_lab.rehearsal.checks import (
    Check,
    Expectations,
    demanded_metrics,
    first_run_checks,
    resumed_run_check,
)
from bandpo_lab.rehearsal.inputs import RIGHT_ANSWER, choose_prompts, write_model, write_rows
from bandpo_lab.rehearsal.processes import Forks
from bandpo_lab.rehearsal.run import environment, train
from bandpo_lab.rehearsal.shrink import (
    PROMPT_TOKENS,
    PROMPTS,
    Change,
    changes,
    compose,
    makes_one_update,
    not_covered,
    refuse,
)

LONGEST_PATH = 107 - len("/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")
"""The largest number of bytes in the path of a rehearsal's folder. The name of a socket has at most 107 on Linux, and
Ray's have the time and the process after the folder."""


LENGTHS = ("trainer.total_training_steps", "rollout.total_rollout_steps")
"""The settings with the length of a run, in which the resumed run differs from the first."""


@dataclass(frozen=True)
class Rehearsal:
    """The result of a rehearsal: the replaced settings and the checks."""

    changes: list[Change]
    checks: list[Check]
    prompts: str
    """The origin of the prompts."""
    folder: Path
    """The folder with logs, metrics, responses and checkpoints."""

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def not_covered(self) -> list[str]:
        """The parts of a real run that this rehearsal did not test; empty if it ran nothing."""
        return not_covered(self.changes) if self.changes else []

    @property
    def verdict(self) -> str:
        """The result in one line: the failed checks, or the number of checks, and the checks with warnings."""
        failures = [check.name for check in self.checks if not check.ok]
        warnings = [check.name for check in self.checks if check.warning]
        verdict = f"REHEARSAL PASSED: {len(self.checks)} checks"
        if failures:
            verdict = f"REHEARSAL FAILED: {', '.join(failures)}"
        if warnings:
            verdict += f", with warnings: {', '.join(warnings)}"
        return verdict


def rehearse(
    overrides: Sequence[str],
    *,
    mode: ModeName = "sync",
    config_dir: Path | None = None,
    steps: int = 2,
    timeout: float = 900.0,
    right_answer: str = RIGHT_ANSWER,
    stand_in: bool = False,
    folder: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Rehearsal:
    """Run a recipe for verl end to end on the CPU, at a small size.

    Args:
        overrides: The recipe, as overrides for hydra.
        mode: The trainer of verl. The settings that `bandpo_lab.cluster.modes.mode_overrides` returns for it come
            before the recipe's overrides.
        config_dir: A folder with further config files for hydra.
        steps: The number of training steps of the first run; the resumed run makes one more.
        timeout: The time limit of each of the two runs, in seconds.
        right_answer: The text of a right answer, with `{0}` for the ground truth. Such answers are planted among
            the samples, so that the reward function gets right ones.
        stand_in: If a data file or the model's folder is not on this machine, use made-up prompts and a model of the
            family that the path names. By default, a missing file is a failed check.
        folder: The folder for logs, metrics and checkpoints; by default a new temporary folder. It must be empty, or
            of an earlier rehearsal, whose files are removed. Ray puts sockets there, so its path has at most
            `LONGEST_PATH` bytes.
        say: A function that is called with a text to print: each line on what the run needs at full size, and the name
            of each stage as it begins.

    Raises:
        ValueError: The recipe needs something that cannot run on a CPU, the config cannot be composed, or the folder
            holds other files.
    """
    from bandpo.integrations.verl.settings import in_bypass_mode

    overrides = [*mode_overrides(mode), *overrides]
    program = entry_point(mode)
    config = compose(overrides, config_dir, program.config_name)
    if preflight.missing_value(config, overrides) is None:  # otherwise the check of the settings reports it
        with preflight.naming_unset(overrides):
            refuse(config)
    folder = _clear(Path(tempfile.mkdtemp(prefix="bandpo-")) if folder is None else folder.resolve())
    # The fork server imports the same modules as this process, at the same time, on another core.
    with Forks(folder, environment(folder)) as forks:
        # The settings at full size.
        checks = [preflight.validate(config, overrides)]
        for name, text in config.get("bandpo", {}).get("run", {}).items():
            say(f"{name:12}{text}")
        if checks[0].ok and not stand_in:
            checks += preflight.check_files(config)
        if checks[-1].ok:
            with preflight.naming_unset(overrides):
                checks += preflight.check_reward(config)
        if not checks[-1].ok:
            return Rehearsal([], checks, "", folder)

        # The inputs of the small run.
        say("writing a tiny model")
        try:
            answers, origin = _write_inputs(config, folder, steps, right_answer)
        except _UnusableData as error:
            checks.append(Check("files", False, str(error)))
            return Rehearsal([], checks, "", folder)
        with preflight.naming_unset(overrides):
            replaced = changes(config, folder, steps)
            loss_mode, method = preflight.configured_loss(config)
            expected = Expectations(
                loss_mode,
                method,
                answers,
                demanded_metrics(config),
                makes_one_update=makes_one_update(config),
                mode=mode_of(config),
                has_samplers_anchor=in_bypass_mode(config),
            )

        # The two runs.
        command = [*program.command(config_dir), *overrides, *[change.override for change in replaced]]
        say("first run")
        train(forks, command, folder, "first", timeout)
        checks += first_run_checks(folder, steps, expected)
        if all(check.ok for check in checks):
            command += [
                change.override for change in changes(config, folder, steps + 1) if change.key in LENGTHS
            ]
            say("resumed run")
            train(forks, command, folder, "resumed", timeout)
            checks.append(resumed_run_check(folder, steps, expected))
    return Rehearsal(replaced, checks, origin, folder)


class _UnusableData(Exception):
    """A data file of the recipe has no prompts that a rehearsal can use."""


def _write_inputs(config: Any, folder: Path, steps: int, right_answer: str) -> tuple[dict[str, str], str]:
    """Write the tiny model, the prompts and their right answers to the folder.

    Returns:
        The right answers by prompt, and the origin of the prompts.

    Raises:
        _UnusableData: A data file has no usable prompts; the message names it.
    """
    tokenizer = write_model(config.actor_rollout_ref.model.path, folder / "model")
    key = config.data.prompt_key
    answers: dict[str, str] = {}
    origins = []
    for split, count in (("train", PROMPTS * (steps + 2)), ("val", PROMPTS)):
        paths = preflight.data_files(config, split)
        try:
            prompts = choose_prompts(paths, key, tokenizer, PROMPT_TOKENS, count)
        except ValueError as error:
            raise _UnusableData(f"data.{split}_files: {error}") from error
        write_rows(prompts.rows, folder / f"{split}.parquet")
        answers |= prompts.answers(key, right_answer)
        origins.append(f"{split} prompts: {prompts.origin}")
    (folder / files.ANSWERS).write_text(json.dumps(answers), encoding="utf-8")
    return answers, "; ".join(origins)


def _clear(folder: Path) -> Path:
    """Remove the files of an earlier rehearsal from a folder, and mark it as one of a rehearsal.

    Raises:
        ValueError: The folder holds other files, or its path is too long.
    """
    length = len(os.fsencode(folder))
    if length > LONGEST_PATH:
        raise InvalidValue(
            f"{folder} has {length} bytes, and Ray's sockets in it allow at most {LONGEST_PATH}: give --output-dir a "
            "shorter path, such as /tmp/rehearsal"
        )
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / files.MARK
    paths = [path for path in folder.iterdir() if path != mark]
    if paths and not mark.exists():
        raise InvalidValue(
            f"{folder} is not the folder of a rehearsal, and not empty ({paths[0].name}): name an empty folder"
        )
    mark.touch()
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return folder
