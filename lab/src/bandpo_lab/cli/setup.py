"""`bandpo-lab setup`."""

from __future__ import annotations

import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from bandpo_lab.cli.recipes import SHIPPED
from bandpo_lab.console import echo

if TYPE_CHECKING:
    from bandpo_lab.downloads import DataSet

PACKAGES = ("torch", "verl", "ray", "vllm", "flash-attn")
"""What a node needs beside bandpo."""


def setup_command(
    model: Annotated[str, typer.Option(help="A model of the recipes, a folder, or a name on the hub.")],
    settings: Annotated[
        Literal["recommended", "authors"],
        typer.Option(help="Whose data: recommended, or authors for theirs."),
    ] = "recommended",
    task: Annotated[str, typer.Option(help="math, or a task of the recipes.")] = "math",
    data: Annotated[Path, typer.Option(help="Folder for models and data; every node sees it.")] = Path(
        "data"
    ),
    output_dir: Annotated[Path, typer.Option(help="Folder for checkpoints; every node sees it.")] = Path(
        "runs"
    ),
    config_dir: Annotated[Path, typer.Option(help="Your copy of the recipes.", show_default=False)] = SHIPPED,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what is needed, at which revision, and what is here.")
    ] = False,
) -> None:
    """Download a recipe's model, prepare its data and make its folders; the same command goes on where it stopped."""
    from bandpo_lab import downloads
    from bandpo_lab.cli.run import experiment
    from bandpo_lab.files import check_writable

    experiment(model, "vanilla", task, settings, config_dir)  # refuses names that the recipes do not have
    data, output_dir = data.resolve(), output_dir.resolve()
    sets = downloads.data_sets(settings, task, data, config_dir)
    on_hub = downloads.hub_model(model, config_dir)

    rows = []
    if on_hub is None:
        rows.append(("model", model, "", "a folder", "here"))
    else:
        rows.append(("model", on_hub.repo, *downloads.state_of_model(on_hub, data)))
    for one in sets:
        rows.append(("data", one.name, *downloads.state_of_data(one)))
    _print_environment(data)
    for kind, name, revision, origin, state in rows:
        echo(f"{kind:5} {name}: {state}\n      revision {revision} ({origin})")
    if dry_run:
        return

    for folder in (data, output_dir):
        check_writable(folder)
        folder.mkdir(parents=True, exist_ok=True)
    folder = downloads.download(on_hub, data) if on_hub else Path(model)
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
    place = next(folder for folder in (data, *data.parents) if folder.is_dir())
    echo(f"{shutil.disk_usage(place).free / 1e9:.0f} GB are free in {place}")


def _prepare(sets: list[DataSet]) -> None:
    """Prepare the sets that are not here, those of a folder together: training must not repeat evaluation."""
    from bandpo.errors import FileProblem
    from bandpo_lab.data.prepare import prepare_data
    from bandpo_lab.downloads import changed_files, prepared_revision

    missing = [one for one in sets if prepared_revision(one) is None]
    for folder in dict.fromkeys(one.folder for one in missing):
        of_folder = [one for one in missing if one.folder == folder]
        prepare_data([one.name for one in of_folder], folder, authors=of_folder[0].authors)
    if changed := changed_files([str(one.folder / "verl" / f"{one.name}.parquet") for one in sets]):
        raise FileProblem("; ".join(changed))
    for one in sets:
        echo(f"data  {one.folder / 'verl' / one.name}.parquet")
