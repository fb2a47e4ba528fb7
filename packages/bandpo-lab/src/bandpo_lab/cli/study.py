"""The command `bandpo-lab study` with its subcommands `run`, which is the default, and `page`."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from bandpo_lab.cli.recipes import DefaultCommandGroup
from bandpo_lab.output.console import echo
from rlvet.cli import BAD_INPUT, INTERRUPTED, stop
from rlvet.cli.command_line import App

CORES = os.cpu_count() or 1

app = App(
    cls=DefaultCommandGroup,
    no_args_is_help=True,
    help="Compare clip rules over seeds in a study of your own.",
)


@app.command("run")
def run_command(
    file: Annotated[str, typer.Argument(help="A study file, or quick, the study that comes with bandpo.")],
    output_dir: Annotated[
        Path | None,
        typer.Option("--output-dir", help="Folder for runs and results; by default runs/study-NAME."),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Simultaneous runs on this machine.")] = CORES,
) -> None:
    """Compare clip rules: arms × seeds × settings, each run a `bandpo-lab train`; the same command resumes."""
    from bandpo_lab.study.execute import Execution
    from bandpo_lab.study.jobs import run_in_processes
    from bandpo_lab.study.plan import parse_study, study_text

    text = study_text(file)
    study = parse_study(text)
    folder = output_dir or Path("runs") / f"study-{Path(file).stem}"
    echo(f"{study.title}\n{study.question}")
    echo(f"decided by {study.primary}, against {study.baseline}; {study.stopping}")
    try:
        run_jobs = partial(run_in_processes, workers=workers)
        results = Execution(study, text, folder, run_jobs, say=echo)()
    except KeyboardInterrupt:
        stop(f"interrupted; the same command goes on with what is in {folder}", INTERRUPTED)
    for failure in results["failed"]:
        echo(f"failed {failure}")
    echo(f"results  {folder / 'results.json'}")
    if results["failed"]:
        stop(f"error: {len(results['failed'])} runs failed; the same command tries them again", BAD_INPUT)


@app.command("page")
def page_command(
    study: Annotated[
        Path, typer.Argument(help="A study's folder or its results.json; the study need not have ended.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            help="Page to write: .html (self-contained), or .md with PNGs; by default the study's report.html."
        ),
    ] = None,
) -> None:
    """Write the page of a study: its rules, its figures and its conclusions."""
    from bandpo_lab.study.execute import read_results
    from bandpo_lab.study.report import study_page

    folder = study.parent if study.name == "results.json" else study
    for path in study_page(read_results(folder)).save(output or folder / "report.html"):
        echo(path)
