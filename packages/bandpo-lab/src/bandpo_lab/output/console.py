"""Print untrusted text safely: control characters are escaped, and markup is not interpreted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import typer

from rlvet._terminal import printable, printable_lines

if TYPE_CHECKING:
    from rich.text import Text


def echo(text: object, *, err: bool = False) -> None:
    r"""Print text, with control characters and invisible characters as visible escapes.

    Args:
        text: Any object, of which ``str`` is printed. It may have several lines.
        err: If True, print to standard error.

    >>> echo("a folder\x1b[31m")
    a folder\x1b[31m
    """
    typer.echo(printable_lines(text), err=err)


def cell(text: object) -> Text:
    """Return text as a cell of a table of rich, without markup; rich would interpret markup in a plain ``str``.

    >>> cell("[red]a").plain
    '[red]a'
    """
    from rich.text import Text

    return Text(printable(text))


def print_table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> None:
    """Print a table.

    Args:
        header: The names of the columns.
        rows: The cells of each row.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for name in header:
        table.add_column(cell(name))
    for row in rows:
        table.add_row(*map(cell, row))
    Console().print(table)
