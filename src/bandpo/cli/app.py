"""The subcommands. Their bodies import what they need, so `bandpo --help` loads no framework."""

from __future__ import annotations

from typing import Annotated, Any

import typer

import bandpo
from bandpo.cli.audit import audit_command
from bandpo.cli.bounds import bounds_command
from bandpo.cli.compare import compare_command
from bandpo.cli.data import app as data
from bandpo.cli.doctor import doctor_command
from bandpo.cli.eval import eval_command
from bandpo.cli.plot import plot_command
from bandpo.cli.recipes import app as recipes
from bandpo.cli.rehearse import rehearse_command
from bandpo.cli.report import report_command
from bandpo.cli.study import app as study
from bandpo.cli.train import train_command

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="Probability-aware ratio bounds (Band) for PPO and GRPO.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(bandpo.__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    pass


COMMANDS = {
    "bounds": bounds_command,
    "plot": plot_command,
    "train": train_command,
    "study": study,
    "report": report_command,
    "eval": eval_command,
    "compare": compare_command,
    "audit": audit_command,
    "data": data,
    "recipes": recipes,
    "rehearse": rehearse_command,
    "doctor": doctor_command,
}
"""In the order of ``--help``."""
SETTINGS: dict[str, dict[str, Any]] = {
    # All of its arguments go to TRL's parser, --help included.
    "train": {
        "add_help_option": False,
        "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
    }
}
for name, command in COMMANDS.items():
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name)
    else:
        app.command(name, **SETTINGS.get(name, {}))(command)
