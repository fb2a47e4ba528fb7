"""The subcommands. Their bodies import what they need, so `bandpo --help` loads no framework."""

from __future__ import annotations

from typing import Annotated

import typer

import bandpo
from bandpo.cli.audit import audit
from bandpo.cli.bounds import bounds
from bandpo.cli.compare import compare
from bandpo.cli.data import app as data
from bandpo.cli.doctor import doctor
from bandpo.cli.eval import evaluate
from bandpo.cli.plot import plot
from bandpo.cli.recipes import recipes
from bandpo.cli.rehearse import rehearse
from bandpo.cli.report import report
from bandpo.cli.study import study
from bandpo.cli.train import train

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
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


app.command()(bounds)
app.command()(plot)
# All of its arguments go to TRL's parser, --help included.
app.command(
    add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)(train)
app.command()(study)
app.command()(report)
app.command("eval")(evaluate)
app.command()(compare)
app.command()(audit)
app.add_typer(data, name="data")
app.command()(recipes)
app.command()(rehearse)
app.command()(doctor)
