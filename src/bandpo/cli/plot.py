"""`bandpo plot`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

DEFAULT = ("FixedClip(0.2, 0.2)", "FixedClip(0.2, 0.28)", "DCPO(0.16, 0.2)", "Band(KL(), 0.05)")


def plot_command(
    output: Annotated[Path, typer.Argument(help="File to write: .png, .svg or .pdf.")],
    runs: Annotated[
        list[Path] | None,
        typer.Argument(help="For 'training': run folders, or logs of TRL or verl.", metavar="[RUN...]"),
    ] = None,
    figure: Annotated[
        Literal["change", "training"],
        typer.Option(
            help="change: how far a rule lets a token's probability move; training: reward, entropy, clip rates and "
            "scores over runs."
        ),
    ] = "change",
    rules: Annotated[
        list[str] | None,
        typer.Option("--clip", help="A rule to draw, e.g. 'Band(KL(), 0.05)'; repeat for more."),
    ] = None,
) -> None:
    """Draw what clip rules allow, against a token's old probability, or how runs went."""
    from bandpo import ClipRule, check, parse
    from bandpo.audit import figures
    from bandpo.audit.logs import read_log
    from bandpo.audit.settings import Setup
    from bandpo.audit.style import save_figure

    if (figure == "training") != bool(runs):
        raise typer.BadParameter("runs are drawn by --figure training, and it needs at least one")
    named = {text: parse(text, ClipRule) for text in rules or DEFAULT}
    for rule in named.values():
        check(rule)
    if figure == "training":
        logs = {path.name: read_log(path) for path in runs or []}
        known = {path.name: Setup.of_log(path, logs[path.name]).method for path in runs or []}
        drawn = figures.training_curves(logs, known)
    else:
        drawn = figures.allowed_change(named)
    save_figure(drawn, output)
    typer.echo(output)
