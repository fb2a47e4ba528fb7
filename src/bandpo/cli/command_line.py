"""The parts that the command lines of both distributions share: help, errors and ``--version``."""

from typing import Annotated

import typer


def new_app(description: str, installed_version: str) -> typer.Typer:
    """Return a command line without subcommands.

    Args:
        description: What ``--help`` prints first.
        installed_version: What ``--version`` prints.
    """
    app = typer.Typer(
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
        help=description,
    )

    def print_version(wanted: bool) -> None:
        if wanted:
            typer.echo(installed_version)
            raise typer.Exit

    # typer reads the annotation as a value, so annotations are not postponed in this file.
    @app.callback()
    def options(
        version: Annotated[
            bool,
            typer.Option(
                "--version", callback=print_version, is_eager=True, help="Print the version and exit."
            ),
        ] = False,
    ) -> None:
        pass

    return app
