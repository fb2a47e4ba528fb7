"""`bandpo-lab recipes`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from bandpo_lab.errors import InvalidValue
from bandpo_lab.files.writing import check_writable, replacing
from bandpo_lab.output.console import echo
from rlvet.cli.command_line import App, Group

SHIPPED = Path(__file__).parents[1] / "recipes"


class DefaultCommandGroup(Group):
    """A group of commands that runs its first command if none is named.

    For example, `bandpo-lab recipes FOLDER` runs `bandpo-lab recipes copy FOLDER`.
    """

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        """Insert the first command if the arguments name none."""
        shows_help = not args and self.no_args_is_help
        names_command = bool(args) and args[0] in {*self.commands, "-h", "--help"}
        if not names_command and not shows_help:
            args = [next(iter(self.commands)), *args]
        return super().parse_args(ctx, args)


app = App(cls=DefaultCommandGroup, help="Recipes for verl and TRL; without a subcommand, copy them.")


@app.command("copy")
def copy_command(folder: Annotated[Path, typer.Argument(help="Folder to create.")] = Path("recipes")) -> None:
    """Copy the recipes for verl and TRL, and their launchers, into a folder of yours."""
    if folder.exists():
        raise InvalidValue(f"{folder} exists already, and nothing was copied; name another folder")
    check_writable(folder.parent)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replacing(folder) as unfinished:
        shutil.copytree(SHIPPED, unfinished, ignore=shutil.ignore_patterns("__pycache__"))
    echo(folder / "README.md")


@app.command("summary")
def summary_command(
    log: Annotated[
        typer.FileText, typer.Argument(errors="replace", help="Console log of verl; - for standard input.")
    ],
) -> None:
    """Print time per step and stage and GPU memory of a run of verl, and compare its first steps with the authors'."""
    from bandpo_lab.cluster.cost import comparison_with_authors, cost_table, read_steps

    steps = read_steps(log)
    echo(cost_table(steps))
    if 1 in steps:
        echo(f"\n{comparison_with_authors(steps)}")
