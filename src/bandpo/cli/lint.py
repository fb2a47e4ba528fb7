"""`bandpo lint`."""

from __future__ import annotations

import json
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer


class OutputFormat(str, Enum):
    """How findings are printed."""

    TEXT = "text"
    MARKDOWN = "markdown"
    GITHUB = "github"


class Severity(str, Enum):
    """Kinds of findings, the worst first."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


def lint_command(
    config: Annotated[
        list[str],
        typer.Argument(
            help="A Python script with a GRPOConfig, a YAML or TOML file, or a shell script with the command that "
            "trains; - reads such a command from standard input.",
        ),
    ],
    fail_on: Annotated[
        Severity, typer.Option(help="Exit with 1 for findings of this kind and worse ones.")
    ] = Severity.ERROR,
    output_format: Annotated[
        OutputFormat, typer.Option("--format", help="github writes annotations for a workflow.")
    ] = OutputFormat.TEXT,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    ignore_other_files: Annotated[
        bool,
        typer.Option(
            "--ignore-other-files",
            help="Pass over files without a configuration, as a pre-commit hook needs.",
        ),
    ] = False,
) -> None:
    """Say what is wrong or risky in the configuration of a training run, before it runs.

    It reads configurations of TRL, verl, SkyRL, prime-rl and OpenRLHF. Nothing in them is executed.

    Exits with 0 if nothing is found, with 1 if there are findings of the kind of --fail-on, and with 2 if a file cannot
    be read or holds no configuration.
    """
    from bandpo.errors import InvalidValue
    from bandpo.lint.checks import NO_CONFIGURATION, LintReport, lint_configurations, lint_file
    from bandpo.lint.readers import LARGEST, parse_configurations

    reports: list[LintReport] = []
    for path in config:
        if path == "-":
            data = sys.stdin.buffer.read(LARGEST + 1)
            report = lint_configurations(parse_configurations(data, "-"), "-")
        else:
            report = lint_file(Path(path))
        if report.configurations:
            reports.append(report)
        elif not ignore_other_files:
            raise InvalidValue(f"{path} holds {NO_CONFIGURATION}")

    if as_json:
        # In ASCII, so that no control character of a file reaches the terminal.
        print(json.dumps({"files": [report.as_json() for report in reports]}, indent=1))
    else:
        for report in reports:
            shown = {
                OutputFormat.TEXT: report.__str__,
                OutputFormat.MARKDOWN: report.as_markdown,
                OutputFormat.GITHUB: report.as_annotations,
            }[output_format]()
            if shown:
                print(shown)
    if any(report.fails(fail_on.value) for report in reports):
        sys.exit(1)
