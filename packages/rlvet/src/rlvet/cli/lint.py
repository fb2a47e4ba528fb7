"""The command `rlvet lint`."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlvet.cli.json_output import json_text
from rlvet.cli.severity import Severity
from rlvet.cli.wrapping import wrapped

if TYPE_CHECKING:
    from rlvet.lint.checks import LintReport


class OutputFormat(str, Enum):
    """The format of the findings."""

    TEXT = "text"
    MARKDOWN = "markdown"
    GITHUB = "github"


def lint_command(
    config: Annotated[
        list[str],
        typer.Argument(
            help="A Python script or notebook with a GRPOConfig, a YAML, JSON or TOML file, or a shell script with a "
            "training command; - reads one of these from standard input.",
        ),
    ],
    fail_on: Annotated[
        Severity, typer.Option(help="Exit with 1 if there is a finding of this severity or a higher one.")
    ] = Severity.fix,
    output_format: Annotated[
        OutputFormat,
        typer.Option("--format", help="github prints annotations for a workflow of GitHub Actions."),
    ] = OutputFormat.TEXT,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    ignore_other_files: Annotated[
        bool,
        typer.Option(
            "--ignore-other-files",
            help="Ignore files without a configuration, and unjudged ones, as a pre-commit hook needs.",
        ),
    ] = False,
) -> None:
    """Find errors and risks in the configuration of a training run before it starts.

    It reads configurations of TRL, verl, SkyRL, prime-rl and OpenRLHF. Nothing in them is executed.

    Exits with 1 if there is a finding of the severity --fail-on or a higher one, with 2 if a file cannot be read, has
    no configuration, or has one of which nothing could be checked, and else with 0.
    """
    from rlvet._terminal import printable
    from rlvet.cli import BAD_INPUT, stop
    from rlvet.errors import OtherFormat, RlvetError
    from rlvet.lint.checks import NO_CONFIGURATION

    reports: list[LintReport] = []
    errors: list[str] = []
    for path in config:
        try:
            report = _read_and_check(path)
        except (RlvetError, OSError) as error:
            if not (ignore_other_files and isinstance(error, OtherFormat)):
                errors.append(str(error))
            continue
        if report.configurations:
            reports.append(report)
        elif not ignore_other_files:
            errors.append(f"{path} holds {NO_CONFIGURATION}")

    if as_json:
        print(json_text("lint", {"files": [report.as_json() for report in reports], "errors": errors}))
    else:
        for report in reports:
            text = _format_report(report, output_format)
            if text:
                print(wrapped(text) if output_format is OutputFormat.TEXT else text)
    if errors:
        stop("\n".join(f"error: {printable(error)}" for error in errors), BAD_INPUT)
    if any(report.fails(fail_on.value) for report in reports):
        sys.exit(1)
    if any(report.is_unjudged for report in reports) and not ignore_other_files:
        sys.exit(BAD_INPUT)


def _read_and_check(path: str) -> LintReport:
    """Return the findings of a file, or of standard input for the path ``-``."""
    from rlvet.lint.checks import lint_file, lint_text
    from rlvet.runs.limits import LARGEST_LINTED

    if path != "-":
        return lint_file(Path(path))
    return lint_text(sys.stdin.buffer.read(LARGEST_LINTED + 1), "-")


def _format_report(report: LintReport, output_format: OutputFormat) -> str:
    """Return a report as text in a format."""
    if output_format is OutputFormat.MARKDOWN:
        return report.as_markdown()
    if output_format is OutputFormat.GITHUB:
        return report.as_annotations()
    return str(report)
