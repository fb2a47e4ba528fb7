"""The description of a verl run: printed before Ray starts, passed to verl's trackers, and saved with each leg.

A leg is the part of a run from one start, or resume, of its process to the next. Each has a folder of its own.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from omegaconf import open_dict

from bandpo._atomic import write_whole
from bandpo.core.text import as_text
from bandpo.integrations.legs import METRICS, new_leg

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from bandpo.core.methods import Method

LEG = "BANDPO_LEG"
"""The environment variable with the folder of the leg, if a launcher has created it."""

FILE_LOGGER = "VERL_FILE_LOGGER_PATH"
"""The environment variable with the path of verl's file logger, which empties that file when it starts."""

FILE = "run.json"
"""The name of the file, in the folder of a leg, with the description of the run."""

PACKAGES = (
    "bandpo",
    "verl",
    "torch",
    "transformers",
    "ray",
    "tensordict",
    "vllm",
    "sglang",
    "flash-attn",
    "wandb",
)
"""The packages whose versions are saved, if they are installed."""


def announce(config: DictConfig, method: Method | None, lines: Mapping[str, str]) -> None:
    """Print the description of a run, and add it to the config, which verl's trackers and `begin_leg` save.

    Args:
        config: The run's config.
        method: The method that it trains; None if it is not one of bandpo's.
        lines: One line about each topic: the loss, the updates, and so on.
    """
    lines = {**lines, "checkpoints": _start_of_training(config.trainer)}
    for topic, text in lines.items():
        print(f"bandpo: {topic:12}{text}", flush=True)
    with open_dict(config):
        config.bandpo = {"method": None if method is None else as_text(method), "run": lines}


def begin_leg(config: Mapping[str, Any]) -> Path:
    """Create the folder of a leg, unless a launcher has created it, and write the run's description and config.

    Args:
        config: The run's config, with the additions of `announce`.

    Returns:
        The folder.
    """
    run_folder = Path(config["trainer"]["default_local_dir"])
    launcher_folder = os.environ.get(LEG)
    leg = Path(launcher_folder) if launcher_folder else new_leg(run_folder)
    if (leg / FILE).exists():
        # A driver that Ray restarts inherits the variable, but is a new leg.
        leg = new_leg(run_folder)
    leg.mkdir(parents=True, exist_ok=True)

    settings = {name: value for name, value in config.items() if name != "bandpo"}
    # Trainers of other projects may have settings of types that YAML cannot represent.
    plain = json.loads(json.dumps(settings, default=str))
    write_whole(leg / "config.yaml", yaml.safe_dump(plain, sort_keys=False))
    description = {**config["bandpo"], "versions": _versions()}
    write_whole(leg / FILE, json.dumps(description, indent=1))
    return leg


def _versions() -> dict[str, str]:
    """Return the versions of Python and of the installed `PACKAGES`."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


@contextmanager
def logging_into(leg: Path) -> Iterator[None]:
    """Let verl's file logger and W&B write into the folder of a leg, unless the environment sets another path."""
    paths = {FILE_LOGGER: str(leg / METRICS), "WANDB_DIR": str(leg)}
    added = {name: path for name, path in paths.items() if not os.environ.get(name)}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _start_of_training(trainer: Any) -> str:
    """Return a line about the checkpoint from which verl's settings resume training."""
    folder = Path(trainer.default_local_dir)
    if trainer.resume_mode == "resume_path":
        return f"{folder} goes on from {trainer.resume_from_path}"
    tracker = folder / "latest_checkpointed_iteration.txt"
    if trainer.resume_mode == "disable" or not tracker.exists():
        return f"{folder} starts at step 0"
    return f"{folder} goes on from {folder / f'global_step_{tracker.read_text().strip()}'}"
