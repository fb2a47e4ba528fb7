"""The subcommands. Their bodies import what they need, so `bandpo --help` loads no framework."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import bandpo
from bandpo.cli import BAD_INPUT, stop
from bandpo.cli.audit import audit_command
from bandpo.cli.bounds import bounds_command
from bandpo.cli.diagnose import diagnose_command
from bandpo.cli.doctor import doctor_command
from bandpo.cli.report import report_command

LAB = ("compare", "data", "eval", "recipes", "rehearse", "run", "study", "train")
"""Commands of bandpo-lab."""


class Commands(TyperGroup):
    """Those of the library; of one that the lab would add, what to install."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        if found is None and cmd_name in LAB:
            stop(
                f"error: bandpo {cmd_name} comes with bandpo-lab; in a clone of bandpo, pip install . ./lab",
                BAD_INPUT,
            )
        return found

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        steps = ["run", "verl", "--one-step", *args[2:]]  # which the lab has
        return super().resolve_command(ctx, steps if args[:2] == ["doctor", "--gpu"] else args)


app = typer.Typer(
    cls=Commands,
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


app.command("bounds")(bounds_command)
app.command("report")(report_command)
app.command("audit")(audit_command)
app.command("diagnose")(diagnose_command)
app.command("doctor")(doctor_command)
for point in entry_points(group="bandpo.commands"):
    point.load()(app)
