"""`bandpo study`."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from bandpo.cli import INTERRUPTED, stop


def study_command(
    file: Annotated[str, typer.Argument(help="A study file, or quick, the study that comes with bandpo.")],
    output_dir: Annotated[
        Path | None,
        typer.Option(
            "--output-dir", "--output_dir", help="Where runs and results go; by default runs/study-NAME."
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Runs side by side on this machine.")] = os.cpu_count()
    or 1,
    ray: Annotated[
        bool, typer.Option("--ray", help="Run on the Ray cluster this machine belongs to instead.")
    ] = False,
    cores_per_run: Annotated[int, typer.Option(min=1, help="Cores that Ray sets aside for a run.")] = 1,
) -> None:
    """Compare clip rules: arms × seeds × settings, each run a `bandpo train`; the same command again resumes."""
    from rich.console import Console

    from bandpo.lab.study.execute import Execution, on_cores, on_ray
    from bandpo.lab.study.plan import parse_study, study_text

    text = study_text(file)
    plan = parse_study(text)
    folder = output_dir or Path("runs") / f"study-{Path(file).stem}"
    console = Console()
    console.print(f"[bold]{plan.title}[/bold]\n{plan.question}", highlight=False)
    console.print(f"decided by {plan.primary}, against {plan.baseline}; {plan.stopping}", highlight=False)
    run_jobs = partial(on_ray, cores=cores_per_run) if ray else partial(on_cores, workers=workers)
    try:
        results = Execution(plan, text, folder, run_jobs, say=partial(print, flush=True))()
    except KeyboardInterrupt:
        stop(f"interrupted; the same command goes on with what is in {folder}", INTERRUPTED)
    for failure in results["failed"]:
        console.print(f"[red]failed[/red] {failure}", highlight=False)
    console.print(f"results  {folder / 'results.json'}", highlight=False, soft_wrap=True)
    if results["failed"]:
        sys.exit(f"error: {len(results['failed'])} runs failed; the same command tries them again")
