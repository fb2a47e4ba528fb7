"""`bandpo report`."""

from __future__ import annotations

import json
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
    from bandpo.lab.study.execute import results_so_far
    from bandpo.lab.study.report import study_page

    first = runs[0] / "results.json" if runs[0].is_dir() else runs[0]
    if len(runs) == 1 and first.name == "results.json" and first.is_file():
        afterwards = first.with_name(FILE)
        page = study_page(
            json.loads(first.read_text()), afterwards.read_text() if afterwards.is_file() else ""
        )
    elif len(runs) == 1 and (runs[0] / "study.yaml").is_file():
        page = study_page(results_so_far(runs[0]))
    else:
        page = run_page(runs)
    for path in page.save(output):
        typer.echo(path)
