"""Download of runs from wandb and from repositories of the Hugging Face hub, with the package of each."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlvet._terminal import printable
from rlvet.errors import InvalidValue, MissingPackage, RlvetError
from rlvet.runs.configs import READERS
from rlvet.runs.formats import IN_FOLDERS

HUB_FILES = tuple(f"*{name.removeprefix('*')}" for name in (*IN_FOLDERS, *READERS))
"""Patterns of the files of a repository that may be a log or the configuration of a run."""

NOT_LOGS = ("*tokenizer*", "vocab*", "*.safetensors*", "*.index.json")
"""Patterns of files that match `HUB_FILES` and are not downloaded, such as weights and tokenizers."""


def is_address(text: str) -> bool:
    """Return True if a text is an address for `download_run`, and not a path.

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
    scheme, _, name = address.partition("://")
    try:
        _DOWNLOADS[scheme](name, folder)
    except RlvetError:
        raise
    except Exception as error:  # clients raise errors of many types: no network, no permission, no such run
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise InvalidValue(f"{address} cannot be read: {printable(reason)[:300]}") from error
    return folder


def _import_client(package: str, scheme: str) -> Any:
    """Import the package that reads addresses of a scheme.

    Raises:
        ImportError: if it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise MissingPackage(f"{scheme}:// needs {package}: pip install {package}") from error


def _download_from_wandb(run_name: str, folder: Path) -> None:
    """Write the history of a run ``ENTITY/PROJECT/RUN`` into a folder, as JSON lines."""
    levels = run_name.split("/")
    if len(levels) != 3 or not all(levels):
        raise InvalidValue(f"write wandb://ENTITY/PROJECT/RUN, got wandb://{run_name}")
    wandb = _import_client("wandb", "wandb")
    run = wandb.Api().run(run_name)
    with (folder / "wandb-history.jsonl").open("w", encoding="utf-8") as file:
        for row in run.scan_history():
            # Tables, images and histograms are objects in the history, and not metrics.
            metrics = {key: value for key, value in row.items() if isinstance(value, (int, float, str))}
            file.write(json.dumps(metrics) + "\n")


def _download_from_hub(repository: str, folder: Path) -> None:
    """Download the logs and configurations of a repository ``OWNER/NAME`` or ``datasets/OWNER/NAME@REVISION``."""
    hub = _import_client("huggingface_hub", "hub")
    name, _, revision = repository.partition("@")
    repo_type = "dataset" if name.startswith("datasets/") else "model"
    name = name.removeprefix("datasets/")
    levels = name.split("/")
    if len(levels) != 2 or not all(levels):
        raise InvalidValue(f"write hub://OWNER/NAME or hub://datasets/OWNER/NAME, got hub://{repository}")
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
"""The function that downloads a run, for each scheme of an address."""
