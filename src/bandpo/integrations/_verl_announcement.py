"""Description of a run of verl: printed before Ray starts, handed to its trackers, and kept beside the checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import open_dict

from bandpo.text import as_text

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from bandpo.methods import Method

FILE = "bandpo-run.json"
"""The name of the file in the folder of the checkpoints."""


def announce(config: DictConfig, method: Method | None, lines: Mapping[str, str]) -> None:
    """Print what a run is, and add it to the configuration, from which verl's trackers and `keep` take it.

    Args:
        config: The run's configuration.
        method: The method that it trains; None if it is none of bandpo's.
        lines: What the run is, by topic: its loss, its updates, and so on.
    """
    lines = {**lines, "checkpoints": _start_of_training(config.trainer)}
    for topic, text in lines.items():
        print(f"bandpo: {topic:12}{text}", flush=True)
    with open_dict(config):
        config.bandpo = {"method": None if method is None else as_text(method), "run": lines}


def keep(run: Mapping[str, Any], folder: str) -> None:
    """Write what `announce` added to the configuration beside the checkpoints."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, FILE).write_text(json.dumps(run, indent=1))


def _start_of_training(trainer: Any) -> str:
    """Return where verl's own settings let training go on from."""
    folder = Path(trainer.default_local_dir)
    if trainer.resume_mode == "resume_path":
        return f"{folder} goes on from {trainer.resume_from_path}"
    tracker = folder / "latest_checkpointed_iteration.txt"
    if trainer.resume_mode == "disable" or not tracker.exists():
        return f"{folder} starts at step 0"
    return f"{folder} goes on from {folder / f'global_step_{tracker.read_text().strip()}'}"
