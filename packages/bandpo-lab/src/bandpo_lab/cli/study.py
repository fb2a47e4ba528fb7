"""The command `bandpo-lab study` with its subcommands `run`, which is the default, `page` and `map`."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from bandpo.cli import INTERRUPTED, stop
from bandpo_lab.cli.recipes import DefaultCommandGroup
from bandpo_lab.console import echo

CORES = os.cpu_count() or 1

app = typer.Typer(
    cls=DefaultCommandGroup,
    no_args_is_help=True,
    help="Compare clip rules: over seeds in a study of your own, or on small tables over a grid of settings.",
)


@app.command("run")
def run_command(
    file: Annotated[str, typer.Argument(help="A study file, or quick, the study that comes with bandpo.")],
    output_dir: Annotated[
        Path | None,
        typer.Option(
            "--output-dir", "--output_dir", help="Folder for runs and results; by default runs/study-NAME."
        ),
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
        sys.exit(f"error: {len(results['failed'])} runs failed; the same command tries them again")


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


@app.command("map")
def map_command(
    size: Annotated[
        Literal["quick", "full"],
        typer.Option(help="quick, a few minutes on two idle cores, or full, about two hours."),
    ] = "quick",
    output_dir: Annotated[
        Path | None,
        typer.Option("--output-dir", "--output_dir", help="Folder for the map; by default runs/map-SIZE."),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Simultaneous cells on this machine.")] = CORES,
) -> None:
    """Map where clip rules differ, on small tables over a grid of settings; the same command resumes."""
    from tqdm import tqdm

    from bandpo_lab.files import locked, replacing
    from bandpo_lab.study.grid import Grid, GridPlan, run_grid
    from bandpo_lab.study.grid_report import draw_grid, grid_text
    from bandpo_lab.style import save_figure

    plan = GridPlan.of_size(size)
    folder = output_dir or Path("runs") / f"map-{size}"
    file = folder / "map.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with locked(folder), tqdm(total=len(plan.keys), unit="cell") as progress_bar:
            for count, cell in run_grid(plan, file, workers):
                progress_bar.update(count - progress_bar.n)
                progress_bar.set_postfix_str(f"{cell.setting}; {cell.optimizer}; {cell.arm}")
    except KeyboardInterrupt:
        sys.exit(f"interrupted; the same command goes on with what is in {file}")
    grid = Grid.from_file(file)
    save_figure(draw_grid(grid), folder / "map.png")
    report = grid_text(grid)
    with replacing(folder / "map.md") as unfinished:
        unfinished.write_text(report, encoding="utf-8")
    echo(report)
    for name in ("map.png", "map.md", "map.jsonl"):
        echo(f"wrote {folder / name}")
