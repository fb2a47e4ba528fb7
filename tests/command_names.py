"""The names of all commands, arguments and options of `bandpo`, `rlvet` and `bandpo-lab`, as `commands.txt` lists them.

    python tests/command_names.py

writes that file anew, which a change of a name on purpose needs. Options of `bandpo-lab train` are TRL's, and are left
out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

LISTING = Path(__file__).with_name("commands.txt")
INTRODUCTION = (
    "# Every command, argument and option, one a line. `python tests/command_names.py` writes this file."
)
UPDATE = (
    "the names of commands, arguments or options differ from tests/commands.txt; if that is on purpose, "
    "run `python tests/command_names.py` and commit the file"
)
"""The advice of the test that finds a difference."""


def names_of(program: str, app: typer.Typer) -> list[str]:
    """Return a line for every command of a program, and for each of its arguments and options."""
    return _lines(program, typer.main.get_command(app))


def _lines(path: str, command: Any) -> list[str]:
    lines = [path]
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            name = parameter.metavar or parameter.name.upper()
        else:
            name = ", ".join([*parameter.opts, *parameter.secondary_opts])
        lines.append(f"{path} {name}")
    subcommands = getattr(command, "commands", {})
    for name in sorted(subcommands):
        lines += _lines(f"{path} {name}", subcommands[name])
    return lines


def listed_names(program: str) -> list[str]:
    """Return the lines of a program in the committed listing."""
    lines = LISTING.read_text().splitlines()
    return [line for line in lines if line == program or line.startswith(f"{program} ")]


def main() -> None:
    """Write the listing."""
    from bandpo.cli.app import app as library_app
    from bandpo_lab.cli.app import app as lab_app
    from rlvet.cli.app import app as rlvet_app

    lines = [INTRODUCTION]
    for program, app in (("bandpo", library_app), ("rlvet", rlvet_app), ("bandpo-lab", lab_app)):
        lines += names_of(program, app)
    LISTING.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
