"""`bandpo-lab compare-evals`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from bandpo_lab.errors import InvalidValue


def compare_evals_command(
    first: Annotated[Path, typer.Argument(help="Folder that `bandpo-lab eval` wrote.")],
    second: Annotated[Path, typer.Argument(help="Folder of the other model, on the same data.")],
    first_seeds: Annotated[
        list[Path] | None,
        typer.Option("--more-first", help="Further runs of the first model, with other seeds; repeatable."),
    ] = None,
    second_seeds: Annotated[
        list[Path] | None, typer.Option("--more-second", help="Further runs of the second model; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare two evaluations by mean@n on the same problems."""
    from bandpo_lab.evals.compare import compare_scores
    from bandpo_lab.evals.report import score
    from bandpo_lab.evals.run import SETTINGS, read_samples
    from bandpo_lab.files.validation import read_sealed_json
    from bandpo_lab.output.console import echo, print_table

    first_folders = [first, *(first_seeds or [])]
    second_folders = [second, *(second_seeds or [])]
    first_scores = [score(read_samples(folder)) for folder in first_folders]
    second_scores = [score(read_samples(folder)) for folder in second_folders]
    # Scores of different graders are not comparable.
    settings = [read_sealed_json(folder / SETTINGS) for folder in first_folders + second_folders]
    if len({run_settings.get("grader") for run_settings in settings}) > 1:
        raise InvalidValue(
            "the runs were graded by different graders: bandpo-lab eval --regrade --output-dir RUN"
        )
    differences = compare_scores(first_scores, second_scores)
    if as_json:
        rows = [vars(d) | {"verdict": d.verdict} for d in differences]
        print(json.dumps({"differences": rows}, indent=1))
        return
    header = ("data", "metric", "first", "second", "second − first", "95 % interval", "p", "")
    rows = []
    for d in differences:
        metric = f"{d.metric} *" if d.primary else d.metric
        difference = f"{d.interval.value:+.4f}"
        interval = f"{d.interval.low:+.4f} to {d.interval.high:+.4f}"
        scores = (f"{d.first:.4f}", f"{d.second:.4f}")
        rows.append((d.data_source, metric, *scores, difference, interval, f"{d.p:.3f}", d.verdict))
    echo(f"first: {first}\nsecond: {second}")
    print_table(header, rows)
    echo("* decides. p is corrected for the sources, and separately for the other metrics (Holm).")
