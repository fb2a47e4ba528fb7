"""The folder a run leaves behind, and what may be written into it."""

from __future__ import annotations

import json
import os
import platform
import sys
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

from bandpo.errors import FileProblem, InvalidValue
from bandpo.report.page import write_report
from bandpo.runs.files import read_jsonl
from bandpo.runs.quantities import named_rows
from bandpo_lab.files import LOCK, UNFINISHED, digest, locked, remove, replacing, seal, sealed
from bandpo_lab.training.checkpoints import damage, saved_checkpoints, step_of

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

    def __init__(self, path: str | Path, main: bool = True):
        self.path = Path(path)
        self.metrics = self.path / "metrics.jsonl"
        self.evaluation = self.path / "evaluation.json"
        self.model = self.path / "model"
        self.report = self.path / "report.html"
        self.errors = self.path / "error.log"
        self._config = self.path / "config.yaml"
        self._main = main

    @contextmanager
    def held(self) -> Generator[None, None, None]:
        """Keep other processes out of the folder, which is made if need be.

        Raises:
            ValueError: the folder cannot be written.
            FileProblem: another process holds it; the message says which.
        """
        with ExitStack() as stack:
            try:
                if self._main:
                    self.path.mkdir(parents=True, exist_ok=True)
                    stack.enter_context(locked(self.path))
            except FileProblem:
                raise
            except OSError as error:
                raise InvalidValue(
                    f"output_dir {self.path} cannot be written: {error.strerror}; choose another"
                ) from error
            yield

    def check(self, arguments: Arguments) -> None:
        """See that a run with these settings may begin or go on here, without changing anything.

        Raises:
            ValueError: the folder holds a run and ``resume`` is off, or a run with other settings.
        """
        if not self._main:
            return
        self._settings = _settings(arguments)  # now, before the training fills some of them in
        used = any(not entry.name.startswith((LOCK, UNFINISHED)) for entry in self.path.iterdir())
        if used and not arguments.run.resume:
            raise InvalidValue(
                f"output_dir {self.path} is already used; add --resume to go on with that run, or choose another"
            )
        if not self._config.exists():
            return
        before, now = self._settings_before(), self._settings
        if before is None:
            _say(f"{self._config} is damaged: the settings given are taken, without a comparison")
            return
        changed = sorted(k for k in before.keys() | now.keys() if before.get(k) != now.get(k))
        if changed:
            was = ", ".join(f"{k}: {before.get(k)!r} → {now.get(k)!r}" for k in changed)
            raise InvalidValue(
                f"output_dir {self.path} holds a run with other settings ({was}); choose another"
            )

    def _settings_before(self) -> dict[str, Any] | None:
        """The settings in config.yaml; None if it is damaged."""
        whole = sealed(self.path).get(self._config.name) == digest(self._config)
        return dict(yaml.safe_load(self._config.read_text())["arguments"]) if whole else None

    def begin(self) -> Path | None:
        """Write the settings that were checked, remove what was never finished, and set damaged checkpoints aside.

        Returns:
            The newest whole checkpoint, if there is one.
        """
        if self._main:
            for left in self.path.glob(f"{UNFINISHED}*"):
                remove(left)
            packages = ("bandpo", "torch", "transformers", "trl", "datasets", "accelerate")
            versions = {"python": platform.python_version()} | {name: version(name) for name in packages}
            settings = {"versions": versions, "arguments": self._settings}
            with replacing(self._config) as unfinished:
                unfinished.write_text(yaml.safe_dump(settings, sort_keys=False))
            if not self.evaluations:
                remove(self.evaluation)
            self._seal()
            for checkpoint in saved_checkpoints(self.path):
                fault = damage(checkpoint)
                if fault is None:
                    break
                self._set_aside(checkpoint, fault)
        newest = next(iter(saved_checkpoints(self.path)), None)
        if self._main and newest:
            _say(f"going on from step {step_of(newest)}")
        elif self._main and (self.path / DAMAGED).exists():
            _say("no checkpoint is whole: starting again from step 0")
        return newest

    def _set_aside(self, checkpoint: Path, fault: str) -> None:
        """Move a damaged checkpoint out of the way, and say why."""
        aside = self.path / DAMAGED / checkpoint.name
        remove(aside)
        aside.parent.mkdir(exist_ok=True)
        checkpoint.replace(aside)
        _say(f"{checkpoint} is damaged ({fault}); moved to {aside}")

    def _seal(self, *more: Path) -> None:
        """Write the manifest of what an unfinished run cannot make again, or has to compare, and of more."""
        seal(self.path, (part for part in (self._config, self.evaluation, *more) if part.is_file()))

    @property
    def finished(self) -> bool:
        """Whether the run has ended and everything it left is whole."""
        if self.metrics.name not in sealed(self.path):
            return False
        if fault := damage(self.path):
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
        return json.loads(self.evaluation.read_text())

    def record_evaluation(self, when: str, scores: dict[str, float]) -> None:
        self.evaluations[when] = scores
        if self._main:
            with replacing(self.evaluation) as unfinished:
                unfinished.write_text(json.dumps(self.evaluations, indent=2) + "\n")
            self._seal()

    def log(self, row: dict[str, Any]) -> None:
        """Append a row to the metrics."""
        if self._main:
            with self.metrics.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def rewrite_log(self, rows: Sequence[dict[str, Any]]) -> None:
        """Put these rows in the place of the metrics."""
        if self._main:
            with replacing(self.metrics) as unfinished:
                lines = [json.dumps({"step": row["step"], **row}) for row in rows]
                unfinished.write_text("".join(f"{line}\n" for line in lines))

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
            unfinished.replace(self.model)
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
            with self.errors.open("a") as file:
                file.write(f"{now}, process {os.getpid()}\n{traceback.format_exc()}\n")
        except OSError as error:
            _say(f"{self.errors} cannot be written: {error.strerror}")


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _settings(arguments: Arguments) -> dict[str, Any]:
    """Every setting that shapes the trajectory, as YAML can hold it."""
    training = arguments.training.to_dict()
    # They tell where and when a run took place, and do not shape it. The log folder's name holds the time.
    for name in ("output_dir", "logging_dir", "run_name"):
        training.pop(name, None)
    run = asdict(arguments.run)
    del run["resume"]
    settings = run | training | asdict(arguments.model) | asdict(arguments.mixture)
    return json.loads(json.dumps(settings, default=str))
