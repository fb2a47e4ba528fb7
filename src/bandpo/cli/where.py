"""`bandpo where`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from bandpo.errors import InvalidValue


def where_command(
    run: Annotated[
        Path | None,
        typer.Argument(
            help="A run to read the blocked share and the rule from, as for bandpo audit.", show_default=False
        ),
    ] = None,
    blocked_share: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="The share itself, from 0 to 1: audit/blocked_mass_below_0.1, of the gradient on tokens with A > 0 "
            "and p < 0.1 what the clip drops. It overrules the theory.",
        ),
    ] = None,
    probability: Annotated[
        float | None,
        typer.Option(help="Probability, in one sample, of a rare token, or of the strategy that it opens."),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            help="Samples in a batch that could draw it: those per prompt for a prompt's own answer, all for a "
            "strategy that every prompt shares."
        ),
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="How often a batch is gone through.")] = None,
    minibatches: Annotated[
        int | None, typer.Option(help="Optimizer steps each time: all samples over those per step.")
    ] = None,
    lag: Annotated[
        int | None,
        typer.Option(min=0, help="Batches trained on between a batch's sampling and its use; 0: fresh."),
    ] = None,
    run_method: Annotated[
        str | None,
        typer.Option(help="The run's method, if nothing tells it; else FixedClip(0.2).", show_default=False),
    ] = None,
    beta1: Annotated[float, typer.Option(help="Adam's β1, or another optimizer's momentum.")] = 0.9,
    rise: Annotated[
        float | None,
        typer.Option(help="Nats by which one gradient raises its log-probability, if you know it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Whether the clip rule can matter in your run, which side of it, and what to set."""
    from rich.console import Console
    from rich.table import Table

    from bandpo.audit.settings import Setup
    from bandpo.rules import FixedClip
    from bandpo.text import as_method
    from bandpo.where import Placement, advice, measured_in

    if run is not None and blocked_share is not None:
        raise InvalidValue("a run and --blocked-share say the same; leave one out")
    method, found = as_method(run_method) if run_method else None, []
    setup, share = Setup(method=method), blocked_share
    measured = None if share is None else (share, share, share)
    if run is not None:
        seen, setup = measured_in(run, method)
        measured = (seen.metrics["blocked_mass_below_0.1"], *(seen.blocked_interval() or (0.0, 1.0)))
        winners = f"{seen.rare[0]:,.0f} rare winners (A > 0, p < 0.1), in {len(seen.blocked)} log steps"
        found = [("Seen in the run", winners)]
    if lag is not None:
        setup = replace(setup, stale=lag > 0)
    place = None
    if not (probability is None or batch is None or epochs is None or minibatches is None):
        rule = setup.method.clip if setup.method else FixedClip()
        place = Placement(probability, batch, epochs, minibatches, lag or 0, beta1, rise, rule)
    answers = [*found, *advice(place, measured, setup)]
    if as_json:
        print(json.dumps({"blocked_share": measured and measured[0]} | dict(answers)))
        return
    table = Table.grid(padding=(0, 3, 1, 0))
    for head, text in answers:
        table.add_row(f"[bold]{head}[/bold]", text)
    Console().print(table, highlight=False)
