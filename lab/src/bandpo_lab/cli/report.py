"""`bandpo report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report_command(
    study: Annotated[Path, typer.Argument(help="A study's folder, ended or not, or its results.json.")],
    output: Annotated[
        Path | None,
        typer.Option(
            help="Page to write: .html (self-contained), or .md with PNGs; by default the study's report.html."
        ),
    ] = None,
) -> None:
    """Write a study's report."""
    from bandpo_lab.study.execute import read_results
    from bandpo_lab.study.report import study_page

    folder = study.parent if study.name == "results.json" else study
    for path in study_page(read_results(folder)).save(output or folder / "report.html"):
        typer.echo(path)
