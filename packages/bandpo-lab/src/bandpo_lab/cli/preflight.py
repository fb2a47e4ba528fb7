"""`bandpo-lab preflight`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from bandpo_lab.cli.names import complete_model
from bandpo_lab.cli.recipes import SHIPPED
from bandpo_lab.errors import InvalidValue, did_you_mean
from bandpo_lab.output.console import echo


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
    settings: Annotated[
        Literal["recommended", "authors"],
        typer.Option(
            help="Those of the run, which say how many checkpoints it keeps: recommended, or authors for those of "
            "the paper's authors."
        ),
    ] = "recommended",
    output_dir: Annotated[Path, typer.Option(help="Folder for checkpoints.")] = Path("runs"),
) -> None:
    """Check whether this node can run verl, and list problems of the first steps that cannot be checked.

    The exit status is 1 if a problem would end the run.
    """
    from bandpo_lab.cluster.cost import (
        CHECKPOINT,
        PARAMETERS,
        RUN_STEPS,
        Checkpoints,
        estimate_of,
        kept_checkpoints,
    )
    from bandpo_lab.cluster.node import examine_node, report

    checkpoints = None
    if model is not None:
        if model not in PARAMETERS:
            raise InvalidValue(
                f"{model!r} is none of {', '.join(PARAMETERS)}{did_you_mean(model, PARAMETERS)}"
            )
        parameters, _ = PARAMETERS[model]
        every, most = saving_settings(settings)
        checkpoints = Checkpoints(kept_checkpoints(RUN_STEPS, every, most), CHECKPOINT * parameters / 1e9)
        echo(f"{model}: {estimate_of(model, gpus * nodes)}")
        if settings == "authors":
            echo(
                f"The {RUN_STEPS} steps are 10 epochs of the recommended data. The authors' data have another number "
                "of problems: scale hours, price and checkpoints by your number of steps."
            )
        echo("")
    text, ready = report(examine_node(output_dir), gpus, nodes, checkpoints)
    echo(text)
    if not ready:
        raise typer.Exit(1)


def saving_settings(settings: str) -> tuple[int, int | None]:
    """Return after how many steps the recipes save a checkpoint, and how many they keep; None for all.

    The files are read without hydra, since a node that is checked may lack it.

    Args:
        settings: ``recommended`` or ``authors``, which is over the recommended ones.

    >>> saving_settings("recommended"), saving_settings("authors")
    ((20, 3), (10, None))
    """
    import yaml

    trainer: dict[str, Any] = {}
    for name in ("recommended", settings):
        recipe = yaml.safe_load((SHIPPED / "paper" / f"{name}.yaml").read_text(encoding="utf-8"))
        trainer |= recipe["trainer"]
    return trainer["save_freq"], trainer["max_actor_ckpt_to_keep"]
