"""Description of a run of verl: printed before Ray starts, handed to its trackers, and kept with each leg of it."""

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
from bandpo.runs.legs import METRICS, new_leg
from bandpo.text import as_text

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from bandpo.methods import Method

LEG = "BANDPO_LEG"
"""The environment variable with the folder of a leg that a launcher has made."""

FILE_LOGGER = "VERL_FILE_LOGGER_PATH"
"""The environment variable with the file of verl's file logger, which empties that file when it starts."""

FILE = "run.json"
"""The name of the file of a leg that says what the run is."""

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
"""The packages whose versions are kept, where they are installed."""


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


def begin_leg(config: Mapping[str, Any]) -> Path:
    """Make the folder of a leg, unless a launcher has made it, and write into it what the run is, and all its settings.

    Args:
        config: The run's configuration, with what `announce` has added.
    """
    launched = os.environ.get(LEG)
    leg = Path(launched) if launched else new_leg(Path(config["trainer"]["default_local_dir"]))
    if (leg / FILE).exists():
        # A driver that Ray has started again inherits the variable.
        leg = new_leg(Path(config["trainer"]["default_local_dir"]))
    leg.mkdir(parents=True, exist_ok=True)
    settings = {name: value for name, value in config.items() if name != "bandpo"}
    # Another project's trainer may have settings of types that YAML does not know.
    plain = json.loads(json.dumps(settings, default=str))
    write_whole(leg / "config.yaml", yaml.safe_dump(plain, sort_keys=False))
    description = {**config["bandpo"], "versions": _versions()}
    write_whole(leg / FILE, json.dumps(description, indent=1))
    return leg


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


@contextmanager
def logging_into(leg: Path) -> Iterator[None]:
    """Have verl's file logger and W&B write into a leg, unless the user's environment names another place."""
    places = {FILE_LOGGER: str(leg / METRICS), "WANDB_DIR": str(leg)}
    added = {name: place for name, place in places.items() if not os.environ.get(name)}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _start_of_training(trainer: Any) -> str:
    """Return where verl's own settings let training go on from."""
    folder = Path(trainer.default_local_dir)
    if trainer.resume_mode == "resume_path":
        return f"{folder} goes on from {trainer.resume_from_path}"
    tracker = folder / "latest_checkpointed_iteration.txt"
    if trainer.resume_mode == "disable" or not tracker.exists():
        return f"{folder} starts at step 0"
    return f"{folder} goes on from {folder / f'global_step_{tracker.read_text().strip()}'}"
