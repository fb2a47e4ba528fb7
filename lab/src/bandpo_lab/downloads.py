"""What a recipe needs from the Hugging Face hub, at which revision, and what of it is here.

A model goes into a folder that its commit names, ``DATA/models/ORGANISATION/NAME/COMMIT``. It is whole once the folder
has a file of digests. So a folder never holds another revision than its name says, and a training that is given the
folder cannot drift with the hub.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bandpo.errors import FileProblem, InvalidValue
from bandpo_lab.data.sets import HUB
from bandpo_lab.files import SEAL, digest, is_path, seal, sealed

LEFT_OUT = ("original/*", "onnx/*", "*.gguf", "*.pth")
"""Files of a model's repository that neither transformers nor vLLM reads."""


@dataclass(frozen=True)
class HubModel:
    """A model on the hub.

    Attributes:
        repo: Its repository.
        revision: The commit that a recipe names; None for a model of no recipe.
    """

    repo: str
    revision: str | None = None

    def folder(self, data: Path) -> Path:
        """Return the folder that holds the folders of its revisions."""
        return data / "models" / self.repo


@dataclass(frozen=True)
class DataSet:
    """A set that a recipe trains or evaluates on.

    Attributes:
        name: As `bandpo-lab data prepare` calls it.
        folder: Where it is prepared.
        authors: Whether it has the prompts of the paper's authors.
    """

    name: str
    folder: Path
    authors: bool


def hub_model(name: str, recipes: Path) -> HubModel | None:
    """Return the model of a recipe, or of the hub; None for a folder.

    Args:
        name: A model of the recipes, a folder, or a name on the hub, as `bandpo-lab run` takes it.
        recipes: The folder of the recipes.
    """
    file = recipes / "paper/model" / f"{name}.yaml"
    if file.is_file():
        settings = yaml.safe_load(file.read_text(encoding="utf-8"))
        return HubModel(settings["actor_rollout_ref"]["model"]["path"], settings["recipe"].get("revision"))
    if is_path(name) or Path(name).is_dir():
        return None
    return HubModel(name)


def downloaded(model: HubModel, data: Path) -> Path | None:
    """Return the folder of the model's whole revision; None if there is none.

    A model of no recipe was downloaded at what was its newest revision then. That one is kept to.

    Raises:
        ValueError: several revisions of a model are here, and no recipe names one of them.
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
    """Download a revision of a model, or go on with a download that was stopped.

    Args:
        model: The model; of one without a revision the newest, unless one is here already.
        data: The folder of the data.

    Returns:
        The folder of the revision.

    Raises:
        ConnectionError: the hub cannot be reached, or does not give the model.
        FileProblem: a file of a model that was whole has changed.
    """
    folder = downloaded(model, data)
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
    # Without a network the hub's libraries raise errors of several packages.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ConnectionError(
            f"{model.repo}, revision {model.revision or 'newest'}, was not downloaded: {reason} What has arrived is "
            "kept, and the same command goes on. A model whose licence is to be accepted needs `hf auth login`"
        ) from error
    seal(folder, _files(folder))
    return folder


def _files(folder: Path) -> list[Path]:
    """Return the files of a model; what the hub's library keeps beside them has a folder of its own."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return [path for path in files if ".cache" not in path.relative_to(folder).parts and path.name != SEAL]


def check_whole(folder: Path) -> None:
    """Check that no file of a downloaded model has changed.

    Raises:
        FileProblem: one has.
    """
    for name, expected in sealed(folder).items():
        file = folder / name
        if not file.is_file() or digest(file) != expected:
            raise FileProblem(f"{file} is missing or has changed since it was downloaded: delete {folder}")


def data_sets(settings: str, task: str, data: Path, recipes: Path) -> list[DataSet]:
    """Return the sets of a recipe, whose files lie in ``DATA/verl``, and those of the authors in ``DATA/authors/verl``.

    Args:
        settings: ``recommended`` or ``authors``.
        task: ``math``, or a task of the recipes.
        data: The folder of the data.
        recipes: The folder of the recipes.
    """
    names = ["recommended", settings, *([] if task == "math" else [f"task/{task}"])]
    of_recipe: dict[str, list[str]] = {}
    for name in names:
        section: Mapping[str, Any] = yaml.safe_load(
            (recipes / "paper" / f"{name}.yaml").read_text(encoding="utf-8")
        ).get("data", {})
        of_recipe |= {key: section[key] for key in ("train_files", "val_files") if key in section}
    sets = []
    for path in (*of_recipe["train_files"], *of_recipe["val_files"]):
        file = Path(path.replace("${recipe.data}", str(data)))
        folder = file.parents[1]
        sets.append(DataSet(file.stem, folder, folder != data))
    return sets


def prepared_revision(data_set: DataSet) -> str | None:
    """Return the revision from which a set was prepared; None if it was not."""
    entry = _entry(data_set.folder, data_set.name)
    return entry["origin"]["revision"] if entry else None


def changed_files(paths: list[str]) -> list[str]:
    """Name the data files that are not what `bandpo-lab data prepare` wrote; files of other origin are not judged.

    Args:
        paths: Files of a recipe.
    """
    changed = []
    for path in map(Path, paths):
        entry = _entry(path.parent.parent, path.stem)
        expected = entry["sha256"].get(path.parent.name) if entry else None
        if expected is not None and path.is_file() and digest(path) != expected:
            changed.append(
                f"{path} has changed since it was prepared: write it again with `bandpo-lab data prepare "
                f"--overwrite`, or put your own file elsewhere and name it in data.train_files or data.val_files"
            )
    return changed


def _entry(folder: Path, name: str) -> dict[str, Any] | None:
    """Return what a folder's manifest says of a set."""
    try:
        return json.loads((folder / "manifest.json").read_text(encoding="utf-8")).get(name)
    except FileNotFoundError:
        return None


def state_of_model(model: HubModel, data: Path) -> tuple[str, str, str]:
    """Return a model's revision, where that is from, and whether it is here."""
    folder = downloaded(model, data)
    if model.revision is not None:
        return model.revision, "the recipe's", "here" if folder else "to download"
    if folder is not None:
        return folder.name, "of the first download", "here"
    return "newest", "no recipe names one", "to download"


def state_of_data(data_set: DataSet) -> tuple[str, str, str]:
    """Return a set's revision, where that is from, and whether it is here."""
    named, here = HUB[data_set.name].revision, prepared_revision(data_set)
    if here is None:
        return named, "bandpo's", "to download"
    return here, "bandpo's" if here == named else f"changed; bandpo's is {named}", "here"
