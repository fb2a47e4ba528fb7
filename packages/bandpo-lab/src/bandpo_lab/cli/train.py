"""`bandpo-lab train`."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import typer

from bandpo_lab.console import echo, print_table
from rlvet.cli import INTERRUPTED, stop


def train_command(context: typer.Context) -> None:
    """Train with GRPO and a clip rule; without arguments, the embedded task with Band."""
    from bandpo.core.text import importable_current_folder, parse
    from bandpo_lab.files import PATHS, check_path

    # Check the method and the paths before TRL is imported, which takes seconds.
    words: list[str] = []
    for argument in context.args:
        words += argument.split("=", 1) if argument.startswith("--") else [argument]
    for flag, value in pairwise(words):
        if flag == "--method":
            with importable_current_folder():
                parse(value)
        option = flag.removeprefix("--").replace("-", "_")
        if option in PATHS:
            check_path(option, value, PATHS[option])

    from transformers.utils.logging import disable_progress_bar

    from bandpo_lab.training.arguments import parse_arguments
    from bandpo_lab.training.checkpoints import saved_checkpoints
    from bandpo_lab.training.train import run_training

    arguments = parse_arguments(context.args)
    if not sys.stderr.isatty():
        disable_progress_bar()  # of loading and saving; `ProgressBar` prints lines instead
    try:
        folder = run_training(arguments)
    except KeyboardInterrupt:
        folder = arguments.training.output_dir or "."
        if saved_checkpoints(Path(folder)):
            stop(f"interrupted; add --resume to go on from the last checkpoint in {folder}", INTERRUPTED)
        stop(
            f"interrupted before the first checkpoint in {folder}, so the steps are lost; add --resume to start again "
            "there, with a smaller --save_steps for earlier checkpoints",
            INTERRUPTED,
        )
    if folder.evaluations:
        evaluations = folder.evaluations.values()
        names = next(iter(evaluations))
        rows = [(name, *(f"{scores[name]:.3f}" for scores in evaluations)) for name in names]
        print_table(("", *folder.evaluations), rows)
    results = {
        "method": arguments.training.method,
        "model": folder.model,
        "report": folder.report,
        "metrics": folder.metrics,
    }
    for name, value in results.items():
        echo(f"{name:8} {value}")
