"""The folder of a run: its files, their integrity, and resuming."""

from __future__ import annotations

import json
import os
import platform
import traceback
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import datetime
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from transformers import SchedulerType

from bandpo_lab.errors import FileProblem, InvalidValue, RunProblem, error_about, is_reported
from bandpo_lab.files.reading import lines_of
from bandpo_lab.files.validation import read_json, read_yaml, validate_as
from bandpo_lab.files.writing import (
    LOCK,
    UNFINISHED,
    digest,
    locked,
    put_in_place,
    remove,
    replacing,
    seal,
    sealed,
    sync,
)
from bandpo_lab.output.console import echo
from bandpo_lab.training.arguments import ASYNC, OUTPUT_DIR, without_removed
from bandpo_lab.training.checkpoints import damage, saved_checkpoints, saving, step_of
from bandpo_lab.training.processes import Processes
from rlvet._terminal import printable
from rlvet.report.page import write_report
from rlvet.runs.quantities import named_rows

if TYPE_CHECKING:
    from transformers import Trainer

    from bandpo.core.methods import Method
    from bandpo_lab.training.arguments import Arguments

DAMAGED = "damaged"
"""The folder to which damaged checkpoints are moved."""


class RunFolder:
    """The files of one run.

    They are config.yaml, metrics.jsonl, evaluation.json, checkpoint-*/, model/, report.html and manifest.json. If
    several processes train together, only the main one writes to the folder.

    Args:
        path: The folder.
        processes: The processes of the training; by default one.
    """

    def __init__(self, path: str | Path, processes: Processes | None = None):
        self.path = Path(path)
        self._processes = processes or Processes()
        self.metrics = self.path / "metrics.jsonl"
        self.evaluation = self.path / "evaluation.json"
        self.model = self.path / "model"
        self.report = self.path / "report.html"
        self.errors = self.path / "error.log"
        self._config = self.path / "config.yaml"
        self._main = self._processes.main
        # max_steps of the earlier run in this folder, if the new run raises it.
        self._earlier_max_steps: int | None = None

    @contextmanager
    def lock(self) -> Generator[None, None, None]:
        """Create the folder if needed, and lock it against other processes.

        Raises:
            ValueError: The folder cannot be written.
            FileProblem: Another process has locked it; the message names the process.
        """
        with ExitStack() as stack:
            self._processes.from_main(lambda: self._create_and_lock(stack))
            yield

    def _create_and_lock(self, stack: ExitStack) -> None:
        """Create the folder, and lock it until the stack is closed."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(self.path))
        except FileProblem:
            raise
        except OSError as error:
            raise InvalidValue(
                f"output_dir {self.path} cannot be written: {error.strerror}; choose another"
            ) from error

    def check(self, arguments: Arguments) -> None:
        """Check that a run with these settings may begin or be resumed here, without changing a file.

        Raises:
            ValueError: The folder holds a run and ``resume`` is off, or a run with other settings.
        """
        self._processes.from_main(lambda: self._check(arguments))

    def _check(self, arguments: Arguments) -> None:
        # Computed now, since the training changes some of the settings later.
        self._settings = _settings(arguments)
        is_used = any(not entry.name.startswith((LOCK, UNFINISHED)) for entry in self.path.iterdir())
        if is_used and not arguments.run.resume:
            raise InvalidValue(
                f"output_dir {self.path} is already used; add --resume to go on with that run, or choose another"
            )
        if not self._config.exists():
            return
        config = self._earlier_config()
        if config is None:
            _print(f"{self._config} is damaged: the settings of this command are used, without a comparison")
            return
        if config["processes"] != self._processes.size:
            raise InvalidValue(
                f"output_dir {self.path} holds a run of {_count(config['processes'])}, and this is one of "
                f"{_count(self._processes.size)}: each process has random numbers and prompts of its own; resume with "
                f"{_count(config['processes'])}, or choose another output_dir"
            )
        # The settings must be the same, except that max_steps may be raised.
        earlier = without_removed(config["arguments"])
        current = self._settings
        changed = sorted(
            name for name in earlier.keys() | current.keys() if earlier.get(name) != current.get(name)
        )
        if changed == ["max_steps"] and 0 < earlier["max_steps"] < current["max_steps"]:
            reason = reason_against_more_steps(arguments, earlier["max_steps"])
            if reason:
                raise InvalidValue(
                    f"max_steps of the run in {self.path} cannot be raised from {earlier['max_steps']} to "
                    f"{current['max_steps']}: {reason}; choose another output_dir"
                )
            self._earlier_max_steps = earlier["max_steps"]
            return
        if changed:
            changes = ", ".join(f"{name}: {earlier.get(name)!r} → {current.get(name)!r}" for name in changed)
            raise InvalidValue(
                f"output_dir {self.path} holds a run with other settings ({changes}); choose another"
            )

    def _earlier_config(self) -> dict[str, Any] | None:
        """Return the content of config.yaml; None if it is damaged."""
        if sealed(self.path).get(self._config.name) != digest(self._config):
            return None
        # The folder may come from an untrusted source, so a right digest does not make the content valid.
        config = read_yaml(self._config.read_bytes(), str(self._config))
        if not isinstance(config.get("processes"), int) or not isinstance(config.get("arguments"), dict):
            raise InvalidValue(
                f"{self._config} does not hold the settings of a run: choose another output_dir, or restore the file"
            )
        return config

    def begin(self) -> Path | None:
        """Write the settings that were checked, remove unfinished files, and move damaged checkpoints away.

        All processes that train together call this. They agree on the checkpoint before a file is moved.

        Returns:
            The newest checkpoint that is not damaged on any machine; None if there is no checkpoint.

        Raises:
            RunProblem: All checkpoints are damaged, or the run was finished and has no checkpoint.
        """
        newest, damages = self._agree_on_checkpoint()
        self.evaluations = self._processes.from_main(lambda: self._prepare(newest, damages))
        return newest

    def _agree_on_checkpoint(self) -> tuple[Path | None, dict[Path, str]]:
        """Return the newest checkpoint that is not damaged on any machine, and the damage to newer ones."""
        processes = self._processes
        names = processes.from_main(lambda: [path.name for path in saved_checkpoints(self.path)])
        damages: dict[Path, str] = {}
        for name in names:
            checkpoint = self.path / name

            def damage_here(checkpoint: Path = checkpoint) -> str | None:
                # The processes of one machine have the same files, so one of them checks.
                return damage(checkpoint) if processes.first_on_machine else None

            by_rank = processes.gather(damage_here)
            damaged_ranks = [rank for rank, text in enumerate(by_rank) if text is not None]
            if not damaged_ranks:
                return checkpoint, damages
            rank = damaged_ranks[0]
            damages[checkpoint] = str(by_rank[rank]) if rank == 0 else f"on rank {rank}: {by_rank[rank]}"

        advice = "to begin anew at step 0, choose another output_dir, or empty this one"
        if damages:
            raise error_about(
                RunProblem,
                [f"{checkpoint.name}: {text}" for checkpoint, text in damages.items()],
                title=f"no checkpoint in {self.path} is whole, and nothing was moved ({advice})",
            )
        if processes.from_main(lambda: self.metrics.name in sealed(self.path)):
            raise RunProblem(
                f"the run in {self.path} was finished and is damaged, and it has no checkpoint to make it again from. "
                f"Nothing was changed; {advice}"
            )
        return None, {}

    def _prepare(self, newest: Path | None, damages: dict[Path, str]) -> dict[str, dict[str, float]]:
        """Prepare the folder for training, and return the evaluations that remain valid.

        Args:
            newest: The checkpoint from which the run is resumed.
            damages: The damage to newer checkpoints.
        """
        for unfinished_path in self.path.glob(f"{UNFINISHED}*"):
            remove(unfinished_path)
        evaluations = self.evaluations
        # If max_steps was raised, the evaluation after the training is one of an earlier step.
        if self._earlier_max_steps is not None:
            evaluations.pop("after", None)
        packages = ("bandpo", "torch", "transformers", "trl", "datasets", "accelerate")
        versions = {"python": platform.python_version()} | {name: version(name) for name in packages}
        config = {"versions": versions, "processes": self._processes.size, "arguments": self._settings}
        with replacing(self._config) as unfinished:
            unfinished.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        if evaluations:
            self._write_evaluations(evaluations)
        else:
            remove(self.evaluation)
        self._seal()
        for checkpoint, text in damages.items():
            self._move_damaged(checkpoint, text)
        if newest:
            _print(f"going on from step {step_of(newest)}")
        elif self.metrics.exists():
            _print("there is no checkpoint yet: starting again from step 0")
        return evaluations

    def _move_damaged(self, checkpoint: Path, damage_text: str) -> None:
        """Move a damaged checkpoint to another folder, and print the reason."""
        target = self.path / DAMAGED / checkpoint.name
        remove(target)
        target.parent.mkdir(exist_ok=True)
        checkpoint.replace(target)
        sync(target.parent, self.path)
        _print(f"{checkpoint} is damaged ({damage_text}); moved to {target}")

    def _seal(self, *more: Path) -> None:
        """Write the manifest, with the digests of config.yaml, evaluation.json and further files."""
        seal(self.path, (path for path in (self._config, self.evaluation, *more) if path.is_file()))

    @property
    def finished(self) -> bool:
        """True if the run has ended and none of its files is damaged."""
        if self.metrics.name not in sealed(self.path):
            return False
        if self._earlier_max_steps is not None:
            _print(f"max_steps of {self.path} is raised from {self._earlier_max_steps}: the run goes on")
            return False
        damage_text = damage(self.path)
        if damage_text:
            _print(f"{self.path} was finished, but {damage_text}; what is damaged is made again")
        return not damage_text

    @cached_property
    def evaluations(self) -> dict[str, dict[str, float]]:
        """The scores of the evaluations so far, by their time: ``before`` and ``after`` training."""
        if not self.evaluation.exists():
            return {}
        if sealed(self.path).get(self.evaluation.name) != digest(self.evaluation):
            _print(f"{self.evaluation} has changed; evaluating again")
            return {}
        scores = dict[str, dict[str, float]]
        return validate_as(scores, read_json(self.evaluation), str(self.evaluation))

    def record_evaluation(self, when: str, scores: dict[str, float]) -> None:
        """Write the scores of an evaluation ``before`` or ``after`` training."""
        self.evaluations[when] = scores
        if self._main:
            self._write_evaluations(self.evaluations)
            self._seal()

    def _write_evaluations(self, evaluations: dict[str, dict[str, float]]) -> None:
        with replacing(self.evaluation) as unfinished:
            unfinished.write_text(json.dumps(evaluations, indent=2) + "\n", encoding="utf-8")

    def log(self, row: dict[str, Any]) -> None:
        """Append a row to the metrics."""
        if self._main:
            with self.metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def rewrite_log(self, rows: Sequence[dict[str, Any]]) -> None:
        """Replace the metrics by these rows."""
        if self._main:
            with replacing(self.metrics) as unfinished:
                lines = [json.dumps({"step": row["step"], **row}) for row in rows]
                unfinished.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def history(self) -> list[dict[str, Any]]:
        """Return the logged metrics, one row per log step."""
        return [row for _, row in lines_of(self.metrics)] if self.metrics.exists() else []

    def save_model(self, trainer: Trainer) -> None:
        """Save the model; called by all processes that train together."""
        unfinished = self.path / UNFINISHED / self.model.name
        with saving(self.model):
            trainer.save_model(str(unfinished))
        trainer.accelerator.wait_for_everyone()
        if self._main:
            remove(self.model)
            put_in_place(unfinished, self.model)
            remove(unfinished.parent)

    def finish(self, method: Method | None = None) -> None:
        """Write the report, and the manifest with the digests of all files, which marks the run as finished.

        Args:
            method: The run's method. The report does not import classes that a folder names, since it may come from an
                untrusted source.
        """
        if self._main:
            if named_rows(self.history()):
                try:
                    write_report([self.path], self.report, method=method)
                except Exception as error:
                    if not is_reported(error):
                        raise
                    # A record that was damaged while the run was made: the run itself is whole.
                    _print(f"the run is finished, but {self.report} is not written: {error}")
            self._seal(self.metrics, *self.model.rglob("*"))

    def record_error(self) -> None:
        """Append the traceback of the error that is being handled to error.log; a full disk only causes a message."""
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        try:
            with self.errors.open("a", encoding="utf-8") as file:
                file.write(
                    f"{now}, rank {self._processes.rank}, process {os.getpid()}\n{traceback.format_exc()}\n"
                )
        except OSError as error:
            _print(f"{self.errors} cannot be written: {error.strerror}")


def _count(processes: int) -> str:
    return "1 process" if processes == 1 else f"{processes} processes"


STEADY_SCHEDULES = ("constant", "constant_with_warmup", "inverse_sqrt")
"""The learning-rate schedules whose rate at a step does not depend on the number of steps."""


def reason_against_more_steps(arguments: Arguments, steps: int) -> str | None:
    """Return the reason why a run cannot be extended; None if a longer run has the same first steps.

    Args:
        arguments: The settings of the longer run.
        steps: The number of steps of the shorter run.
    """
    training = arguments.training
    schedule = SchedulerType(training.lr_scheduler_type).value
    if schedule not in STEADY_SCHEDULES:
        return f"lr_scheduler_type {schedule} goes by max_steps, so earlier steps would have had other learning rates"
    if 0 < training.warmup_steps < 1:
        return f"warmup_steps={training.warmup_steps:g} is a share of max_steps"
    for name in ("save_steps", "logging_steps", "eval_steps"):
        value = getattr(training, name)
        if value and value < 1:
            return f"{name}={value:g} is a share of max_steps"
    for number in training.effective_method.varying().values():
        if number.needs == "progress":
            return f"{number!r} of the method goes by the share of max_steps that is done"
    if steps % training.updates_per_batch:
        return f"step {steps} is in the middle of a batch's {training.updates_per_batch} updates"
    return None


def _print(text: str) -> None:
    """Print one line, with the control characters of folder names escaped."""
    echo(printable(text), err=True)


def _relative_to_run(path: str | None, output_dir: str | None) -> str | None:
    """Return a path in the run folder relative to it, so that the folder can be moved; other paths are not changed."""
    if not path or not output_dir:
        return path
    absolute = Path(path).absolute()
    folder = Path(output_dir).absolute()
    if not absolute.is_relative_to(folder):
        return path
    return f"{OUTPUT_DIR}/{absolute.relative_to(folder).as_posix()}"


def _settings(arguments: Arguments) -> dict[str, Any]:
    """Return all settings that affect the training, in a form that YAML can hold."""
    training = arguments.training.to_dict()
    # These do not affect the training. The name of the log folder contains the time.
    for name in ("output_dir", "logging_dir", "run_name"):
        training.pop(name, None)
    training["record"] = _relative_to_run(training["record"], arguments.training.output_dir)
    run = asdict(arguments.run)
    del run["resume"]
    settings = run | training | asdict(arguments.model) | asdict(arguments.mixture)
    if arguments.is_async:
        settings[ASYNC] = True
    return json.loads(json.dumps(settings, default=str))
