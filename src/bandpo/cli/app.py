"""The subcommands. Their bodies import what they need, so `bandpo --help` loads no framework."""

from __future__ import annotations

from typing import Annotated

import typer

import bandpo
from bandpo.cli.audit import audit_command
from bandpo.cli.bounds import bounds_command
from bandpo.cli.diagnose import diagnose_command
from bandpo.cli.env import env_command
from bandpo.cli.report import report_command

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="Probability-aware ratio bounds (Band) for PPO and GRPO: read what a clip did to a run.",
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


app.command("diagnose")(diagnose_command)
app.command("audit")(audit_command)
app.command("report")(report_command)
app.command("bounds")(bounds_command)
app.command("env")(env_command)
