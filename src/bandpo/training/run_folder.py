"""The folder a run leaves behind, and what may be written into it."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from dataclasses import asdict
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from transformers.trainer_utils import get_last_checkpoint

if TYPE_CHECKING:
    from bandpo.training.arguments import Arguments


class RunFolder:
    """One run's files: config.yaml, metrics.jsonl, evaluation.json, checkpoint-*/, model/, curves.png."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.metrics = self.path / "metrics.jsonl"
        self.evaluation = self.path / "evaluation.json"
        self.model = self.path / "model"
        self.curves = self.path / "curves.png"
        self._config = self.path / "config.yaml"

    def open(self, arguments: Arguments) -> None:
        """Make the folder ready, before any work is done.

        Raises:
            ValueError: it cannot be written; it holds a run and ``resume`` is off; or it holds a run with other
                settings.
        """
        config = _settings(arguments)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / ".writable").touch()
            (self.path / ".writable").unlink()
        except OSError as error:
            raise ValueError(
                f"output_dir {self.path} cannot be written: {error.strerror}; choose another"
            ) from error
        if any(self.path.iterdir()) and not arguments.run.resume:
            raise ValueError(
                f"output_dir {self.path} is already used; add --resume to go on with that run, or choose another"
            )
        if self._config.exists():
            before = yaml.safe_load(self._config.read_text())["arguments"]
            changed = sorted(k for k in before.keys() | config.keys() if before.get(k) != config.get(k))
            if changed:
                was = ", ".join(f"{k}: {before.get(k)!r} → {config.get(k)!r}" for k in changed)
                raise ValueError(
                    f"output_dir {self.path} holds a run with other settings ({was}); choose another"
                )
        packages = ("bandpo", "torch", "transformers", "trl", "datasets", "accelerate")
        versions = {"python": platform.python_version()} | {name: version(name) for name in packages}
        self._config.write_text(yaml.safe_dump({"versions": versions, "arguments": config}, sort_keys=False))

    @property
    def checkpoint(self) -> str | None:
        """The last checkpoint, if there is one."""
        return get_last_checkpoint(str(self.path))

    @property
    def finished(self) -> bool:
        """Whether the run has ended and everything is written."""
        return self.curves.exists() and self.model.exists()

    @cached_property
    def evaluations(self) -> dict[str, dict[str, float]]:
        """The evaluations made so far, ``before`` and ``after``."""
        return json.loads(self.evaluation.read_text()) if self.evaluation.exists() else {}

    def record_evaluation(self, when: str, scores: dict[str, float]) -> None:
        self.evaluations[when] = scores
        self.evaluation.write_text(json.dumps(self.evaluations, indent=2) + "\n")

    def log(self, row: dict[str, Any]) -> None:
        """Append a row to the metrics."""
        with self.metrics.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def history(self) -> list[dict[str, Any]]:
        """The logged metrics, one row per log step."""
        return list(self._rows())

    def forget_after(self, step: int) -> None:
        """Drop the rows that a resumed run will log again."""
        rows = [row for row in self._rows() if row["step"] <= step]
        self.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def _rows(self) -> Iterator[dict[str, Any]]:
        if self.metrics.exists():
            for line in self.metrics.read_text().splitlines():
                yield json.loads(line)


def _settings(arguments: Arguments) -> dict[str, Any]:
    """Every setting that shapes the trajectory, as YAML can hold it."""
    training = arguments.training.to_dict()
    # Of the place and the moment, not of the run: the log folder's name holds the time.
    for name in ("output_dir", "logging_dir", "run_name"):
        training.pop(name, None)
    run = asdict(arguments.run)
    del run["resume"]
    settings = run | training | asdict(arguments.model) | asdict(arguments.mixture)
    return json.loads(json.dumps(settings, default=str))
