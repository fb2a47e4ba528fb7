"""`bandpo report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report_command(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="A study's folder, ended or not, or its results.json; or run folders, trainer_state.json files, or "
            "the .jsonl of verl's file logger, side by side.",
            metavar="RUN...",
        ),
    ],
    output: Annotated[
        Path, typer.Option(help="Page to write: .html (self-contained), or .md with PNGs.")
    ] = Path("report.html"),
) -> None:
    """Write a report: of a study, or of any runs of TRL or verl."""
    from bandpo.diagnostics.run_report import run_page
    from bandpo.lab.study.afterwards import FILE
    from bandpo.lab.study.execute import read_results
    from bandpo.lab.study.report import study_page

    folder = runs[0].parent if runs[0].name == "results.json" else runs[0]
    if len(runs) == 1 and any((folder / name).is_file() for name in ("study.yaml", "results.json")):
        afterwards = folder / FILE
        page = study_page(read_results(folder), afterwards.read_text() if afterwards.is_file() else "")
    else:
        page = run_page(runs)
    for path in page.save(output):
        typer.echo(path)
