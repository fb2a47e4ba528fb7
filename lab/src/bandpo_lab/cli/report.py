"""`bandpo report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report_command(
    study: Annotated[Path, typer.Argument(help="A study's folder, ended or not, or its results.json.")],
    output: Annotated[
        Path, typer.Option(help="Page to write: .html (self-contained), or .md with PNGs.")
    ] = Path("report.html"),
) -> None:
    """Write a study's report."""
    from bandpo_lab.study.afterwards import FILE
    from bandpo_lab.study.execute import read_results
    from bandpo_lab.study.report import study_page

    folder = study.parent if study.name == "results.json" else study
    afterwards = folder / FILE
    page = study_page(read_results(folder), afterwards.read_text() if afterwards.is_file() else "")
    for path in page.save(output):
        typer.echo(path)
