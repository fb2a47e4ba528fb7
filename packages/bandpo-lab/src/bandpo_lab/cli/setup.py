"""`bandpo-lab setup`."""

from __future__ import annotations

import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from bandpo_lab.cli.names import complete_model
from bandpo_lab.cli.recipes import SHIPPED
from bandpo_lab.output.console import echo

if TYPE_CHECKING:
    from bandpo_lab.models.downloads import DataSet

PACKAGES = ("torch", "verl", "ray", "vllm", "flash-attn")
"""The packages that a node needs in addition to bandpo."""


def setup_command(
    model: Annotated[
        str,
        typer.Option(
            help="A model of the recipes, a folder, or a name on the hub.", autocompletion=complete_model
        ),
    ],
    settings: Annotated[
        Literal["recommended", "authors"],
        typer.Option(help="Data sets: recommended, or authors for those of the paper's authors."),
    ] = "recommended",
    task: Annotated[str, typer.Option(help="math, or a task of the recipes.")] = "math",
    data: Annotated[Path, typer.Option(help="Folder for models and data, shared by all nodes.")] = Path(
        "data"
    ),
    output_dir: Annotated[Path, typer.Option(help="Folder for checkpoints, shared by all nodes.")] = Path(
        "runs"
    ),
    config_dir: Annotated[Path, typer.Option(help="Your copy of the recipes.", show_default=False)] = SHIPPED,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Only list what is needed, with revisions, and what is downloaded already."
        ),
    ] = False,
) -> None:
    """Download a recipe's model, prepare its data and create its folders; if interrupted, the same command resumes."""
    from bandpo_lab.cli.run import experiment
    from bandpo_lab.files.writing import check_writable
    from bandpo_lab.models import downloads

    experiment(model, "vanilla", task, settings, config_dir)  # raises an error for unknown names
    data = data.resolve()
    output_dir = output_dir.resolve()
    sets = downloads.data_sets(settings, task, data, config_dir)
    hub_model = downloads.hub_model(model, config_dir)

    # List the model and the data sets: kind, name, revision, source of the revision, state.
    rows = []
    if hub_model is None:
        rows.append(("model", model, "", "a folder", "here"))
    else:
        rows.append(("model", hub_model.repo, *downloads.state_of_model(hub_model, data)))
    for data_set in sets:
        rows.append(("data", data_set.name, *downloads.state_of_data(data_set)))
    _print_environment(data)
    for kind, name, revision, origin, state in rows:
        echo(f"{kind:5} {name}: {state}\n      revision {revision} ({origin})")
    if dry_run:
        return

    for folder in (data, output_dir):
        check_writable(folder)
        folder.mkdir(parents=True, exist_ok=True)
    folder = downloads.download(hub_model, data) if hub_model else Path(model)
    echo(f"model {folder}")
    _prepare(sets)
    echo(f"export BANDPO_DATA={data} BANDPO_OUTPUT={output_dir}")
    echo("next: bandpo-lab run verl --rehearse with the same options, and a --method")


def _print_environment(data: Path) -> None:
    """Print the versions of the packages that a node needs, and the space for models and checkpoints."""
    echo(f"python {platform.python_version()}")
    for package in PACKAGES:
        try:
            echo(f"{package} {version(package)}")
        except PackageNotFoundError:
            echo(f"{package} is not installed: docs/install.md has the environment of a node")
    existing = next(folder for folder in (data, *data.parents) if folder.is_dir())
    echo(f"{shutil.disk_usage(existing).free / 1e9:.0f} GB are free in {existing}")


def _prepare(sets: list[DataSet]) -> None:
    """Prepare the sets that are not prepared yet.

    The sets of a folder are prepared together, so that training problems that repeat evaluation problems are dropped.
    """
    from bandpo_lab.data.prepare import prepare_data
    from bandpo_lab.errors import FileProblem, error_about
    from bandpo_lab.models.downloads import changed_files, prepared_revision

    missing = [data_set for data_set in sets if prepared_revision(data_set) is None]
    for folder in dict.fromkeys(data_set.folder for data_set in missing):
        folder_sets = [data_set for data_set in missing if data_set.folder == folder]
        names = [data_set.name for data_set in folder_sets]
        prepare_data(names, folder, authors=folder_sets[0].authors)
    files = [data_set.folder / "verl" / f"{data_set.name}.parquet" for data_set in sets]
    changed = changed_files([str(file) for file in files])
    if changed:
        raise error_about(FileProblem, changed)
    for file in files:
        echo(f"data  {file}")
