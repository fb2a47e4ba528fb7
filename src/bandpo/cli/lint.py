"""`bandpo lint`."""

from __future__ import annotations

import json
import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bandpo.cli.severity import Severity

if TYPE_CHECKING:
    from bandpo.lint.checks import LintReport


class OutputFormat(str, Enum):
    """How findings are printed."""

    TEXT = "text"
    MARKDOWN = "markdown"
    GITHUB = "github"


def lint_command(
    config: Annotated[
        list[str],
        typer.Argument(
            help="A Python script with a GRPOConfig, a YAML or TOML file, or a shell script with the command that "
            "trains; - reads such a command from standard input.",
        ),
    ],
    fail_on: Annotated[
        Severity, typer.Option(help="Exit with 1 on a finding of this severity, or of a graver one.")
    ] = Severity.fix,
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

    Exits with 0 if nothing is as grave as --fail-on, with 1 if something is, and with 2 if a file cannot be read or
    holds no configuration.
    """
    from bandpo._terminal import printable
    from bandpo.cli import BAD_INPUT, stop
    from bandpo.errors import BandpoError
    from bandpo.lint.checks import NO_CONFIGURATION

    reports: list[LintReport] = []
    errors: list[str] = []
    for path in config:
        try:
            report = _read_and_check(path)
        except (BandpoError, OSError) as error:
            errors.append(str(error))
            continue
        if report.configurations:
            reports.append(report)
        elif not ignore_other_files:
            errors.append(f"{path} holds {NO_CONFIGURATION}")

    if as_json:
        # In ASCII, so that no control character of a file reaches the terminal.
        print(json.dumps({"files": [report.as_json() for report in reports], "errors": errors}, indent=1))
    else:
        for report in reports:
            shown = _formatted(report, output_format)
            if shown:
                print(shown)
    if errors:
        stop("\n".join(f"error: {printable(error)}" for error in errors), BAD_INPUT)
    if any(report.fails(fail_on.value) for report in reports):
        sys.exit(1)


def _read_and_check(path: str) -> LintReport:
    from bandpo.lint.checks import lint_configurations, lint_file
    from bandpo.lint.readers import LARGEST, parse_configurations

    if path != "-":
        return lint_file(Path(path))
    data = sys.stdin.buffer.read(LARGEST + 1)
    return lint_configurations(parse_configurations(data, "-"), "-")


def _formatted(report: LintReport, output_format: OutputFormat) -> str:
    if output_format is OutputFormat.MARKDOWN:
        return report.as_markdown()
    if output_format is OutputFormat.GITHUB:
        return report.as_annotations()
    return str(report)
