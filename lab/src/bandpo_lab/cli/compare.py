"""`bandpo compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def compare_command(
    first: Annotated[Path, typer.Argument(help="Folder that `bandpo eval` wrote.")],
    second: Annotated[Path, typer.Argument(help="Folder of the other model, on the same data.")],
    first_seeds: Annotated[
        list[Path] | None,
        typer.Option("--first", help="Further runs of the first model, by other seeds; repeatable."),
    ] = None,
    second_seeds: Annotated[
        list[Path] | None, typer.Option("--second", help="Further runs of the second model; repeatable.")
    ] = None,
) -> None:
    """Say whether one evaluation is better than another, by a paired bootstrap over problems (and seeds)."""
    from rich.console import Console
    from rich.table import Table

    from bandpo_lab.evals.compare import compare_scores
    from bandpo_lab.evals.report import score
    from bandpo_lab.evals.run import read_samples

    sides = [[score(read_samples(folder)) for folder in side] for side in (
        [first, *(first_seeds or [])],
        [second, *(second_seeds or [])],
    )]  # fmt: skip
    table = Table("data", "metric", "first", "second", "second − first", "95 % interval", "")
    for d in compare_scores(*sides):
        e = d.interval
        figures = (f"{d.first:.4f}", f"{d.second:.4f}", f"{e.value:+.4f}", f"{e.low:+.4f} to {e.high:+.4f}")
        table.add_row(d.data_source, d.metric, *figures, d.verdict)
    console = Console()
    console.print(f"first: {first}\nsecond: {second}", highlight=False, soft_wrap=True)
    console.print(table)
