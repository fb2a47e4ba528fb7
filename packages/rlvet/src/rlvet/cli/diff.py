"""The command `rlvet diff`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rlvet.cli.names import Names, RunNames, read_names, run_names_of
from rlvet.cli.wrapping import wrapped


def diff_command(
    a: Annotated[
        Path,
        typer.Argument(help="A configuration, a log, or the folder of a run.", show_default=False),
    ],
    b: Annotated[Path, typer.Argument(help="Another one of the same kind.", show_default=False)],
    names: Names = None,
    run_names: RunNames = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what differs between two configurations or two runs, in effect and not in spelling.

    Of configurations: settings that train something else, with the defaults of the framework filled in. Of logs: a
    step by which each metric has parted beyond its noise.

    Exits with 1 if a setting differs in effect, or a metric parts or has no value in common at any step, but for 1
    in 20; with 0 if not, though means may surely differ; and with 2 if one of the two cannot be read or they are of
    different kinds.
    """
    from rlvet.cli.json_output import json_text
    from rlvet.compare import diff

    run_a, run_b = run_names_of(run_names, 2)
    difference = diff(a, b, names=read_names(names), run_names=(run_a, run_b))
    if as_json:
        print(json_text("diff", difference.as_json()))
    else:
        print(wrapped(str(difference)))
    if difference.differs:
        sys.exit(1)
