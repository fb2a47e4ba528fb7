"""The typer app without subcommands that `bandpo` and `bandpo-lab` share, with help and ``--version``."""

from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

EXIT_STATUSES = (
    "Exit status: 0 if all is well; 1 for a finding, a difference or a failed check, where the text above says so; 2 "
    "after an error, also if the output cannot be written; 130 after Ctrl-C."
)
"""The last paragraph of each help."""


def _without_types_of_flags(parameters: list[Any]) -> list[Any]:
    """Return parameters of which flags, such as ``--help``, have no type in the help, since they take no value."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


class Command(TyperCommand):
    """A subcommand."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types_of_flags(super().get_params(ctx))


class Group(TyperGroup):
    """A command with subcommands."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types_of_flags(super().get_params(ctx))


class App(typer.Typer):
    """A typer app whose help ends with the exit statuses, and has no types of flags."""

    def __init__(self, **settings: Any):
        super().__init__(**{"epilog": EXIT_STATUSES, **settings})

    def command(self, name: str | None = None, **settings: Any) -> Any:
        """Register a subcommand: see `typer.Typer.command`."""
        return super().command(name, **{"cls": Command, "epilog": EXIT_STATUSES, **settings})


def new_app(description: str, installed_version: str) -> App:
    """Return a command line without subcommands.

    Args:
        description: The first paragraph of ``--help``.
        installed_version: The output of ``--version``.
    """
    app = App(
        cls=Group,
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
