"""`bandpo-lab train`."""

from __future__ import annotations

import sys
from itertools import pairwise

import typer

from bandpo.cli import INTERRUPTED, stop
from bandpo_lab.console import echo, print_table


def train_command(context: typer.Context) -> None:
    """Train with GRPO and a clip rule; without arguments, the embedded task with Band."""
    from bandpo.text import importable_current_folder, parse
    from bandpo_lab.files import PATHS, check_path

    words = [word for a in context.args for word in (a.split("=", 1) if a.startswith("--") else [a])]
    for flag, text in pairwise(words):
        if flag == "--method":
            # A misspelt rule is refused before TRL is imported, which takes seconds.
            with importable_current_folder():
                parse(text)
        option = flag.removeprefix("--").replace("-", "_")
        if option in PATHS:
            check_path(option, text, PATHS[option])

    from transformers.utils.logging import disable_progress_bar

    from bandpo_lab.training.arguments import parse_arguments
    from bandpo_lab.training.train import run_training

    arguments = parse_arguments(context.args)
    if not sys.stderr.isatty():
        disable_progress_bar()  # of loading and saving; `ProgressBar` writes lines
    try:
        folder = run_training(arguments)
    except KeyboardInterrupt:
        stop(
            f"interrupted; add --resume to go on from the last checkpoint in {arguments.training.output_dir}",
            INTERRUPTED,
        )
    if folder.evaluations:
        scores = folder.evaluations.values()
        names = next(iter(scores))
        rows = [(name, *(f"{figures[name]:.3f}" for figures in scores)) for name in names]
        print_table(("", *folder.evaluations), rows)
    said = {"method": arguments.training.method, "model": folder.model, "report": folder.report}
    for what, value in {**said, "metrics": folder.metrics}.items():
        echo(f"{what:8} {value}")
