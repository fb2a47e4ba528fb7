"""`bandpo-lab preflight`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bandpo_lab.cli.names import complete_model
from bandpo_lab.errors import InvalidValue, did_you_mean
from bandpo_lab.output.console import echo

CHECKPOINTS = 3
"""The number of checkpoints that the recommended recipes keep."""


def preflight_command(
    gpus: Annotated[int, typer.Option(min=1, help="GPUs that the run needs on each node.")] = 8,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of the run.")] = 1,
    model: Annotated[
        str | None,
        typer.Option(
            help="A model of the recipes, to estimate disk space, time and price.",
            autocompletion=complete_model,
        ),
    ] = None,
    output_dir: Annotated[Path, typer.Option(help="Folder for checkpoints.")] = Path("runs"),
) -> None:
    """Check whether this node can run verl, and list problems of the first steps that cannot be checked.

    The exit status is 1 if a problem would end the run.
    """
    from bandpo_lab.cluster.cost import CHECKPOINT, PARAMETERS, estimate_of
    from bandpo_lab.cluster.node import examine_node, report

    checkpoints = 0.0
    if model is not None:
        if model not in PARAMETERS:
            raise InvalidValue(
                f"{model!r} is none of {', '.join(PARAMETERS)}{did_you_mean(model, PARAMETERS)}"
            )
        parameters, _ = PARAMETERS[model]
        checkpoints = CHECKPOINTS * CHECKPOINT * parameters / 1e9
        echo(f"{model}: {estimate_of(model, gpus * nodes)}\n")
    text, ready = report(examine_node(output_dir), gpus, nodes, checkpoints)
    echo(text)
    if not ready:
        raise typer.Exit(1)
