"""Download the models of recipes from the Hugging Face hub at fixed revisions, and list what is downloaded.

A model is downloaded to a folder named after its commit, ``DATA/models/ORGANISATION/NAME/COMMIT``. The download is
complete once the folder has a file of digests. So the folder cannot hold another revision, and a training that uses the
folder does not change when the hub does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bandpo_lab.data.sets import HUB
from bandpo_lab.errors import FileProblem, InvalidValue
from bandpo_lab.files.hub_digests import compare_with_hub
from bandpo_lab.files.validation import read_json
from bandpo_lab.files.writing import SEAL, digest, is_path, seal, sealed
from bandpo_lab.output.console import echo

LEFT_OUT = ("original/*", "onnx/*", "*.gguf", "*.pth")
"""The files of a model's repository that neither transformers nor vLLM reads, which are not downloaded."""


@dataclass(frozen=True)
class HubModel:
    """A model on the hub.

    Attributes:
        repo: The repository.
        revision: The commit that a recipe names; None if the model is not in a recipe.
    """

    repo: str
    revision: str | None = None

    def folder(self, data: Path) -> Path:
        """Return the folder that holds the folders of its revisions."""
        return data / "models" / self.repo


@dataclass(frozen=True)
class DataSet:
    """A data set that a recipe trains or evaluates on.

    Attributes:
        name: The name of the set in `bandpo-lab data prepare`.
        folder: The folder of the prepared data.
        authors: True if it has the prompts of the paper's authors.
    """

    name: str
    folder: Path
    authors: bool


def hub_model(name: str, recipes: Path) -> HubModel | None:
    """Return the model on the hub that a name refers to; None if the name is a folder.

    Args:
        name: A model of the recipes, a folder, or a name on the hub.
        recipes: The folder of the recipes.
    """
    file = recipes / "paper/model" / f"{name}.yaml"
    if file.is_file():
        settings = yaml.safe_load(file.read_text(encoding="utf-8"))
        return HubModel(settings["actor_rollout_ref"]["model"]["path"], settings["recipe"].get("revision"))
    if is_path(name) or Path(name).is_dir():
        return None
    return HubModel(name)


def downloaded_folder(model: HubModel, data: Path) -> Path | None:
    """Return the folder of a model's completely downloaded revision; None if there is none.

    If the model has no revision, the only downloaded one is returned.

    Raises:
        ValueError: The model has no revision, and several are downloaded.
    """
    folders = [path.parent for path in sorted(model.folder(data).glob(f"*/{SEAL}"))]
    if model.revision is not None:
        folders = [folder for folder in folders if folder.name == model.revision]
    if len(folders) > 1:
        listed = ", ".join(map(str, folders))
        raise InvalidValue(
            f"{model.repo} is here in several revisions: name a folder as the model, of {listed}"
        )
    return folders[0] if folders else None


def download(model: HubModel, data: Path) -> Path:
    """Download a revision of a model, or resume an interrupted download.

    Args:
        model: The model. If it has no revision, the newest is downloaded, unless one is downloaded already.
        data: The folder of the data.

    Returns:
        The folder of the revision.

    Raises:
        ConnectionError: The hub cannot be reached, or refuses the model.
        FileProblem: A file of a complete download has changed, or a file did not arrive with the hub's digest.
    """
    folder = downloaded_folder(model, data)
    if folder is not None:
        check_whole(folder)
        return folder
    import huggingface_hub

    try:
        revision = model.revision or huggingface_hub.HfApi().model_info(model.repo).sha
        assert revision is not None
        folder = model.folder(data) / revision
        huggingface_hub.snapshot_download(
            model.repo, revision=revision, local_dir=folder, ignore_patterns=list(LEFT_OUT)
        )
    # Without a network, the hub's libraries raise errors of several packages.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ConnectionError(
            f"{model.repo}, revision {model.revision or 'newest'}, was not downloaded: {reason} What has arrived is "
            "kept, and the same command goes on. A model whose licence is to be accepted needs `hf auth login`"
        ) from error
    files = _files(folder)
    names = [file.relative_to(folder).as_posix() for file in files]
    echo(f"{model.repo}: {compare_with_hub(folder, names, model.repo, revision)}", err=True)
    seal(folder, files)
    return folder


def _files(folder: Path) -> list[Path]:
    """Return the files of a model, without the folder ``.cache`` of the hub's library."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return [path for path in files if ".cache" not in path.relative_to(folder).parts and path.name != SEAL]


def check_whole(folder: Path) -> None:
    """Check that no file of a downloaded model has changed.

    Raises:
        FileProblem: A file has changed.
    """
    for name, expected in sealed(folder).items():
        file = folder / name
        if not file.is_file() or digest(file) != expected:
            raise FileProblem(f"{file} is missing or has changed since it was downloaded: delete {folder}")


def data_sets(settings: str, task: str, data: Path, recipes: Path) -> list[DataSet]:
    """Return the data sets of a recipe.

    The recommended sets are in ``DATA/verl``, and those of the authors in ``DATA/authors/verl``.

    Args:
        settings: ``recommended`` or ``authors``.
        task: ``math``, or a task of the recipes.
        data: The folder of the data.
        recipes: The folder of the recipes.
    """
    names = ["recommended", settings]
    if task != "math":
        names.append(f"task/{task}")
    # Later files of the recipe override earlier ones.
    files: dict[str, list[str]] = {}
    for name in names:
        recipe = yaml.safe_load((recipes / "paper" / f"{name}.yaml").read_text(encoding="utf-8"))
        section: Mapping[str, Any] = recipe.get("data", {})
        files |= {key: section[key] for key in ("train_files", "val_files") if key in section}
    sets = []
    for path in (*files["train_files"], *files["val_files"]):
        file = Path(path.replace("${recipe.data}", str(data)))
        folder = file.parents[1]
        sets.append(DataSet(file.stem, folder, folder != data))
    return sets


def prepared_revision(data_set: DataSet) -> str | None:
    """Return the revision from which a set was prepared; None if it was not prepared."""
    entry = _manifest_entry(data_set.folder, data_set.name)
    return entry["origin"]["revision"] if entry else None


def changed_files(paths: list[str]) -> list[str]:
    """Return a message for each data file that was changed after `bandpo-lab data prepare` wrote it.

    Files that it did not write are not checked.

    Args:
        paths: The data files of a recipe.
    """
    changed = []
    for path in map(Path, paths):
        entry = _manifest_entry(path.parent.parent, path.stem)
        expected = entry["sha256"].get(path.parent.name) if entry else None
        if expected is not None and path.is_file() and digest(path) != expected:
            changed.append(
                f"{path} has changed since it was prepared: write it again with `bandpo-lab data prepare "
                f"--overwrite`, or put your own file elsewhere and name it in data.train_files or data.val_files"
            )
    return changed


def _manifest_entry(folder: Path, name: str) -> dict[str, Any] | None:
    """Return the entry of a set in the manifest of a folder; None if there is none."""
    try:
        return read_json(folder / "manifest.json").get(name)
    except FileNotFoundError:
        return None


def state_of_model(model: HubModel, data: Path) -> tuple[str, str, str]:
    """Return a model's revision, the source of that revision, and the state of the download, as texts."""
    folder = downloaded_folder(model, data)
    if model.revision is not None:
        return model.revision, "the recipe's", "here" if folder else "to download"
    if folder is not None:
        return folder.name, "of the first download", "here"
    return "newest", "no recipe names one", "to download"


def state_of_data(data_set: DataSet) -> tuple[str, str, str]:
    """Return a data set's revision, the source of that revision, and the state of the preparation, as texts."""
    default = HUB[data_set.name].revision
    prepared = prepared_revision(data_set)
    if prepared is None:
        return default, "bandpo's", "to download"
    return prepared, "bandpo's" if prepared == default else f"changed; bandpo's is {default}", "here"
