"""The typer app without subcommands, with help and ``--version``."""

from typing import Annotated

import typer


def new_app(description: str, installed_version: str) -> typer.Typer:
    """Return a command line without subcommands.

    Args:
        description: The first paragraph of ``--help``.
        installed_version: The output of ``--version``.
    """
    app = typer.Typer(
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
        help=description,
    )

    def print_version(is_set: bool) -> None:
        if is_set:
            typer.echo(installed_version)
            raise typer.Exit

    # typer evaluates this annotation, which contains a local variable, so this file has no
    # `from __future__ import annotations`.
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
