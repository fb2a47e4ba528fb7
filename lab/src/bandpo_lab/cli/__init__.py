"""The lab's commands. Each is one file, whose body imports what it needs, so `bandpo --help` loads no framework."""

from __future__ import annotations

import typer

from bandpo_lab.cli.compare import compare_command
from bandpo_lab.cli.data import app as data
from bandpo_lab.cli.eval import eval_command
from bandpo_lab.cli.recipes import app as recipes
from bandpo_lab.cli.rehearse import rehearse_command
from bandpo_lab.cli.run import run_command
from bandpo_lab.cli.study import app as study
from bandpo_lab.cli.train import train_command


def add_commands(app: typer.Typer) -> None:
    """Add them to the command `bandpo`, which finds this function by its entry point."""
    # All of train's arguments go to TRL's parser, --help included.
    to_parser = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command("train", add_help_option=False, context_settings=to_parser)(train_command)
    app.add_typer(study, name="study")
    app.command("eval")(eval_command)
    app.command("compare")(compare_command)
    app.add_typer(data, name="data")
    app.add_typer(recipes, name="recipes")
    app.command("run")(run_command)
    app.command("rehearse")(rehearse_command)
