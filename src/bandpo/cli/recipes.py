"""`bandpo recipes`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from bandpo.diagnostics.files import replacing

SHIPPED = Path(__file__).parents[1] / "lab" / "recipes"


def recipes_command(
    folder: Annotated[Path, typer.Argument(help="Folder to make.")] = Path("recipes"),
) -> None:
    """Copy the recipes for verl and TRL, and their launchers, into a folder of yours."""
    if folder.exists():
        raise ValueError(f"{folder} is there already, and nothing was copied; name another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replacing(folder) as unfinished:
        shutil.copytree(SHIPPED, unfinished, ignore=shutil.ignore_patterns("__pycache__"))
    typer.echo(folder / "README.md")
