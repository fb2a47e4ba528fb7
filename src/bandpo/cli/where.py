"""`bandpo where`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from bandpo.errors import InvalidValue


def where_command(
    tail: Annotated[float, typer.Option(help="Probability of the rare token, or of the strategy it opens.")],
    batch: Annotated[int, typer.Option(help="Samples in a batch that could draw it.")],
    updates: Annotated[
        int, typer.Option(help="Optimizer steps on each batch: epochs × minibatches. 1: on-policy.")
    ],
    clip: Annotated[str, typer.Option(help="The clip rule in use.")] = "FixedClip(0.2)",
    optimizer: Annotated[
        Literal["adam", "momentum", "sgd"], typer.Option(help="adam (AdamW too), momentum or sgd.")
    ] = "adam",
    beta1: Annotated[float, typer.Option(help="The optimizer's momentum; sgd has none.")] = 0.9,
    learning_rate: Annotated[
        float | None,
        typer.Option(help="With --parameters: a rough guess of the lift."),
    ] = None,
    parameters: Annotated[
        float | None, typer.Option(help="Trained parameters of the model, such as 3e9.")
    ] = None,
    clip_high: Annotated[
        float | None,
        typer.Option(help="The audit's share of rare winners that were clipped: it gives the lift."),
    ] = None,
    lift: Annotated[
        float | None,
        typer.Option(
            help="The lift itself: nats by which one update raises a rare winner's log-probability."
        ),
    ] = None,
) -> None:
    """Place your own run in the map: whether the clip rule can matter there, which side of it, and what to set."""
    from dataclasses import replace

    from rich.console import Console
    from rich.table import Table

    from bandpo.rules import ClipRule
    from bandpo.text import parse
    from bandpo.where import Optimizer, Placement, advice, lift_from_clipping, lift_from_rate

    if lift is not None and clip_high is not None:
        raise InvalidValue("--lift and --clip-high say the same; leave one out")
    steps = Optimizer(0.0 if optimizer == "sgd" else beta1, adam=optimizer == "adam")
    run = Placement(tail, batch, updates, steps, rule=parse(clip, ClipRule))
    if clip_high is not None:
        lift = lift_from_clipping(clip_high, updates, run.bounds(run.rule)[1])
    if lift is not None:
        run = replace(run, lift=(lift, lift))
    elif learning_rate is not None and parameters is not None and optimizer == "adam":
        run = replace(run, lift=lift_from_rate(learning_rate, parameters))
    table = Table.grid(padding=(0, 3, 1, 0))
    for head, text in advice(run):
        table.add_row(f"[bold]{head}[/bold]", text)
    Console().print(table, highlight=False)
