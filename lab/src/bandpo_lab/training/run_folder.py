"""The folder a run leaves behind, and what may be written into it."""

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

from bandpo._terminal import printable
from bandpo.errors import FileProblem, InvalidValue, RunProblem
from bandpo.report.page import write_report
from bandpo.runs.files import read_jsonl
from bandpo.runs.quantities import named_rows
from bandpo_lab.console import echo
from bandpo_lab.file_models import checked, read_json, read_yaml
from bandpo_lab.files import (
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
from bandpo_lab.training.arguments import OUTPUT_DIR
from bandpo_lab.training.checkpoints import damage, saved_checkpoints, step_of
from bandpo_lab.training.processes import Processes

if TYPE_CHECKING:
    from transformers import Trainer

    from bandpo.methods import Method
    from bandpo_lab.training.arguments import Arguments

DAMAGED = "damaged"
"""Folder to which damaged checkpoints are moved."""


class RunFolder:
    """One run's files: config.yaml, metrics.jsonl, evaluation.json, checkpoint-*/, model/, report.html, manifest.json.

    Of several processes that train together only the main one writes into it.
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
        self._raised_from: int | None = None

    @contextmanager
    def held(self) -> Generator[None, None, None]:
        """Keep other processes out of the folder, which is made if need be.

        Raises:
            ValueError: the folder cannot be written.
            FileProblem: another process holds it; the message says which.
        """
        with ExitStack() as stack:
            self._processes.from_main(lambda: self._hold(stack))
            yield

    def _hold(self, stack: ExitStack) -> None:
        """Make and lock the folder until the stack is closed."""
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
        """See that a run with these settings may begin or go on here, without changing anything.

        Raises:
            ValueError: the folder holds a run and ``resume`` is off, or a run with other settings.
        """
        self._processes.from_main(lambda: self._check(arguments))

    def _check(self, arguments: Arguments) -> None:
        self._settings = _settings(arguments)  # now, before the training fills some of them in
        used = any(not entry.name.startswith((LOCK, UNFINISHED)) for entry in self.path.iterdir())
        if used and not arguments.run.resume:
            raise InvalidValue(
                f"output_dir {self.path} is already used; add --resume to go on with that run, or choose another"
            )
        if not self._config.exists():
            return
        config = self._config_before()
        if config is None:
            _say(f"{self._config} is damaged: the settings given are taken, without a comparison")
            return
        if config["processes"] != self._processes.size:
            raise InvalidValue(
                f"output_dir {self.path} holds a run of {_count(config['processes'])}, and this is one of "
                f"{_count(self._processes.size)}: each process has random numbers and prompts of its own; resume with "
                f"{_count(config['processes'])}, or choose another output_dir"
            )
        before, now = config["arguments"], self._settings
        changed = sorted(k for k in before.keys() | now.keys() if before.get(k) != now.get(k))
        if changed == ["max_steps"] and 0 < before["max_steps"] < now["max_steps"]:
            reason = reason_against_more_steps(arguments, before["max_steps"])
            if reason:
                raise InvalidValue(
                    f"max_steps of the run in {self.path} cannot be raised from {before['max_steps']} to "
                    f"{now['max_steps']}: {reason}; choose another output_dir"
                )
            self._raised_from = before["max_steps"]
            return
        if changed:
            was = ", ".join(f"{k}: {before.get(k)!r} → {now.get(k)!r}" for k in changed)
            raise InvalidValue(
                f"output_dir {self.path} holds a run with other settings ({was}); choose another"
            )

    def _config_before(self) -> dict[str, Any] | None:
        """The content of config.yaml; None if it is damaged."""
        if sealed(self.path).get(self._config.name) != digest(self._config):
            return None
        # Whoever made the folder can have sealed anything.
        config = read_yaml(self._config.read_bytes(), str(self._config))
        if not isinstance(config.get("processes"), int) or not isinstance(config.get("arguments"), dict):
            raise InvalidValue(
                f"{self._config} holds no settings of a run: choose another output_dir, or restore the file"
            )
        return config

    def begin(self) -> Path | None:
        """Write the settings that were checked, remove what was never finished, and set damaged checkpoints aside.

        Called by all processes that train together. They agree on the checkpoint before anything is moved.

        Returns:
            The newest checkpoint that is whole on every machine; None if there is no checkpoint.

        Raises:
            RunProblem: there are checkpoints and none is whole, or the run was finished and has none.
        """
        newest, faults = self._agree_on_checkpoint()
        self.evaluations = self._processes.from_main(lambda: self._prepare(newest, faults))
        return newest

    def _agree_on_checkpoint(self) -> tuple[Path | None, dict[Path, str]]:
        """Return the newest checkpoint that is whole on every machine, and what is wrong with those that are newer."""
        processes = self._processes
        names = processes.from_main(lambda: [path.name for path in saved_checkpoints(self.path)])
        faults: dict[Path, str] = {}
        for name in names:
            checkpoint = self.path / name

            def fault_here(checkpoint: Path = checkpoint) -> str | None:
                # The processes of one machine see the same files.
                return damage(checkpoint) if processes.first_on_machine else None

            everywhere = processes.gather(fault_here)
            on_ranks = [(rank, fault) for rank, fault in enumerate(everywhere) if fault is not None]
            if not on_ranks:
                return checkpoint, faults
            rank, fault = on_ranks[0]
            faults[checkpoint] = fault if rank == 0 else f"on rank {rank}: {fault}"
        anew = "to begin anew at step 0, choose another output_dir, or empty this one"
        if faults:
            which = "; ".join(f"{checkpoint.name}: {fault}" for checkpoint, fault in faults.items())
            raise RunProblem(f"no checkpoint in {self.path} is whole ({which}). Nothing was moved; {anew}")
        if processes.from_main(lambda: self.metrics.name in sealed(self.path)):
            raise RunProblem(
                f"the run in {self.path} was finished and is damaged, and it has no checkpoint to make it again from. "
                f"Nothing was changed; {anew}"
            )
        return None, {}

    def _prepare(self, newest: Path | None, faults: dict[Path, str]) -> dict[str, dict[str, float]]:
        """Bring the folder into the state in which the run goes on; return the evaluations that hold."""
        for left in self.path.glob(f"{UNFINISHED}*"):
            remove(left)
        evaluations = self.evaluations
        if self._raised_from is not None:
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
        for checkpoint, fault in faults.items():
            self._set_aside(checkpoint, fault)
        if newest:
            _say(f"going on from step {step_of(newest)}")
        elif self.metrics.exists():
            _say("there is no checkpoint yet: starting again from step 0")
        return evaluations

    def _set_aside(self, checkpoint: Path, fault: str) -> None:
        """Move a damaged checkpoint out of the way, and say why."""
        aside = self.path / DAMAGED / checkpoint.name
        remove(aside)
        aside.parent.mkdir(exist_ok=True)
        checkpoint.replace(aside)
        sync(aside.parent, self.path)
        _say(f"{checkpoint} is damaged ({fault}); moved to {aside}")

    def _seal(self, *more: Path) -> None:
        """Write the manifest of what an unfinished run cannot make again, or has to compare, and of more."""
        seal(self.path, (part for part in (self._config, self.evaluation, *more) if part.is_file()))

    @property
    def finished(self) -> bool:
        """Whether the run has ended and everything it left is whole."""
        if self.metrics.name not in sealed(self.path):
            return False
        if self._raised_from is not None:
            _say(f"max_steps of {self.path} is raised from {self._raised_from}: the run goes on")
            return False
        fault = damage(self.path)
        if fault:
            _say(f"{self.path} was finished, but {fault}; what is damaged is made again")
        return not fault

    @cached_property
    def evaluations(self) -> dict[str, dict[str, float]]:
        """The evaluations made so far, ``before`` and ``after``."""
        if not self.evaluation.exists():
            return {}
        if sealed(self.path).get(self.evaluation.name) != digest(self.evaluation):
            _say(f"{self.evaluation} has changed; evaluating again")
            return {}
        scores = dict[str, dict[str, float]]
        return checked(scores, read_json(self.evaluation), str(self.evaluation))

    def record_evaluation(self, when: str, scores: dict[str, float]) -> None:
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
        """Put these rows in the place of the metrics."""
        if self._main:
            with replacing(self.metrics) as unfinished:
                lines = [json.dumps({"step": row["step"], **row}) for row in rows]
                unfinished.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def history(self) -> list[dict[str, Any]]:
        """The logged metrics, one row per log step."""
        return [row for _, row in read_jsonl(self.metrics)] if self.metrics.exists() else []

    def save_model(self, trainer: Trainer) -> None:
        """Save the model; called by all processes that train together."""
        unfinished = self.path / UNFINISHED / self.model.name
        trainer.save_model(str(unfinished))
        trainer.accelerator.wait_for_everyone()
        if self._main:
            remove(self.model)
            put_in_place(unfinished, self.model)
            remove(unfinished.parent)

    def finish(self, method: Method | None = None) -> None:
        """Write the report, and say by a manifest that everything else is there.

        Args:
            method: The run's method. The report reads the folder as it would a stranger's, so it does not import a
                class of your own by itself.
        """
        if self._main:
            if named_rows(self.history()):
                write_report([self.path], self.report, method=method)
            self._seal(self.metrics, *self.model.rglob("*"))

    def record_error(self) -> None:
        """Append the traceback of the error being handled to error.log, if the disk takes it."""
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        try:
            with self.errors.open("a", encoding="utf-8") as file:
                file.write(
                    f"{now}, rank {self._processes.rank}, process {os.getpid()}\n{traceback.format_exc()}\n"
                )
        except OSError as error:
            _say(f"{self.errors} cannot be written: {error.strerror}")


def _count(processes: int) -> str:
    return "1 process" if processes == 1 else f"{processes} processes"


STEADY_SCHEDULES = ("constant", "constant_with_warmup", "inverse_sqrt")
"""Learning-rate schedules whose rate at a step does not depend on how many steps there are."""


def reason_against_more_steps(arguments: Arguments, steps: int) -> str | None:
    """Return why a run of so many steps is not the beginning of a longer one; None if it is."""
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


def _say(text: str) -> None:
    """Print one line, whatever the name of a folder in it holds."""
    echo(printable(text), err=True)


def _within(path: str | None, output_dir: str | None) -> str | None:
    """Return a path in the run folder by its place there, so that the folder can be moved; any other as it is."""
    if not path or not output_dir:
        return path
    absolute, folder = Path(path).absolute(), Path(output_dir).absolute()
    if not absolute.is_relative_to(folder):
        return path
    return f"{OUTPUT_DIR}/{absolute.relative_to(folder).as_posix()}"


def _settings(arguments: Arguments) -> dict[str, Any]:
    """Every setting that shapes the trajectory, as YAML can hold it."""
    training = arguments.training.to_dict()
    # They tell where and when a run took place, and do not shape it. The log folder's name holds the time.
    for name in ("output_dir", "logging_dir", "run_name"):
        training.pop(name, None)
    training["record"] = _within(training["record"], arguments.training.output_dir)
    run = asdict(arguments.run)
    del run["resume"]
    settings = run | training | asdict(arguments.model) | asdict(arguments.mixture)
    return json.loads(json.dumps(settings, default=str))
