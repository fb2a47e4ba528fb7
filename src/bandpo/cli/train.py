"""`bandpo train`."""

from __future__ import annotations

import sys

import typer


def train_command(context: typer.Context) -> None:
    """Train with GRPO and a clip rule; without arguments, the embedded task with Band. (--help lists all options.)"""
    from rich.console import Console
    from rich.table import Table

    from bandpo.lab.training.arguments import parse
    from bandpo.lab.training.train import run_training

    arguments = parse(context.args)
    try:
        folder = run_training(arguments)
    except KeyboardInterrupt:
        sys.exit(
            f"interrupted; add --resume to go on from the last checkpoint in {arguments.training.output_dir}"
        )
    console = Console()
    if folder.evaluations:
        table = Table("", *folder.evaluations)
        for score in next(iter(folder.evaluations.values())):
            table.add_row(score, *(f"{scores[score]:.3f}" for scores in folder.evaluations.values()))
        console.print(table)
    training = arguments.training
    chosen = ("method", training.method) if training.method else ("clip", training.clip)
    places = (("model", folder.model), ("curves", folder.curves), ("metrics", folder.metrics))
    for what, value in (chosen, *places):
        console.print(f"{what:8} {value}", highlight=False, soft_wrap=True)
