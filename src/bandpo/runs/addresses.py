"""Runs that lie elsewhere: at wandb, or in a repository of the Hugging Face hub, by the package of each."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bandpo._terminal import printable
from bandpo.errors import BandpoError, InvalidValue, MissingPackage

HUB_FILES = (
    "*.jsonl",
    "*.json",
    "*.csv",
    "*.log",
    "*.txt",
    "*.yaml",
    "*tfevents*",
    "training_args.bin",
    "*.wandb",
)
"""Files of a repository that may be a log or the configuration of a run. Weights and data are not downloaded."""

NOT_LOGS = ("*tokenizer*", "vocab*", "*.safetensors*", "*.index.json")
"""Files of a repository that have such a name and are none."""


def is_address(text: str) -> bool:
    """Check whether a text is an address of `download_run`, and not a path.

    >>> is_address("wandb://team/project/run"), is_address("runs/demo")
    (True, False)
    """
    return text.startswith(tuple(f"{scheme}://" for scheme in _DOWNLOADS))


def download_run(address: str, folder: Path) -> Path:
    """Download the log of a run into a folder, and return the folder.

    Args:
        address: ``wandb://ENTITY/PROJECT/RUN``, whose history is read, or ``hub://OWNER/NAME``, whose logs and
            configurations are read; ``hub://datasets/OWNER/NAME`` is a dataset, and ``@REVISION`` may follow both.
        folder: An empty folder.

    Raises:
        ImportError: if the package ``wandb`` or ``huggingface_hub`` is not installed.
        ValueError: if the address is of another form, or nothing can be read there.
    """
    scheme, _, place = address.partition("://")
    try:
        _DOWNLOADS[scheme](place, folder)
    except BandpoError:
        raise
    except Exception as error:  # whatever a client raises: no network, no permission, no such run
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise InvalidValue(f"{address} cannot be read: {printable(reason)[:300]}") from error
    return folder


def _client(package: str, address: str) -> Any:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise MissingPackage(f"{address}:// needs {package}: pip install {package}") from error


def _download_from_wandb(place: str, folder: Path) -> None:
    if len(place.split("/")) != 3 or not all(place.split("/")):
        raise InvalidValue(f"write wandb://ENTITY/PROJECT/RUN, got wandb://{place}")
    wandb = _client("wandb", "wandb")
    run = wandb.Api().run(place)
    with (folder / "wandb-history.jsonl").open("w", encoding="utf-8") as file:
        for row in run.scan_history():
            # Tables, pictures and histograms are objects there, and no metrics.
            numbers = {key: value for key, value in row.items() if isinstance(value, (int, float, str))}
            file.write(json.dumps(numbers) + "\n")


def _download_from_hub(place: str, folder: Path) -> None:
    hub = _client("huggingface_hub", "hub")
    name, _, revision = place.partition("@")
    repo_type = "dataset" if name.startswith("datasets/") else "model"
    name = name.removeprefix("datasets/")
    if len(name.split("/")) != 2 or not all(name.split("/")):
        raise InvalidValue(f"write hub://OWNER/NAME or hub://datasets/OWNER/NAME, got hub://{place}")
    hub.snapshot_download(
        name,
        repo_type=repo_type,
        revision=revision or None,
        local_dir=folder,
        allow_patterns=list(HUB_FILES),
        ignore_patterns=list(NOT_LOGS),
    )


_DOWNLOADS: dict[str, Callable[[str, Path], None]] = {
    "wandb": _download_from_wandb,
    "hub": _download_from_hub,
}
