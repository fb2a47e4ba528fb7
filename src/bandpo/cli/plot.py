"""`bandpo plot`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DEFAULT = ("FixedClip(0.2, 0.2)", "FixedClip(0.2, 0.28)", "DCPO(0.16, 0.2)", "Band(KL(), 0.05)")


def plot_command(
    output: Annotated[Path, typer.Option(help="File to write: .png, .svg or .pdf.")],
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Run folders, or logs of TRL or verl.", metavar="[RUN...]")
    ] = None,
    rules: Annotated[
        list[str] | None,
        typer.Option("--clip", help="A rule to draw, e.g. 'Band(KL(), 0.05)'; repeat for more."),
    ] = None,
) -> None:
    """Draw how runs went: reward, entropy, clip rates and scores; without a run, what clip rules allow."""
    from bandpo import ClipRule, check, parse
    from bandpo.audit import figures
    from bandpo.audit.configs import setup_of
    from bandpo.audit.logs import read_log
    from bandpo.audit.style import save_figure

    if runs and rules:
        raise typer.BadParameter("--clip draws rules, without a run")
    named = {text: parse(text, ClipRule) for text in rules or DEFAULT}
    for rule in named.values():
        check(rule)
    if runs:
        logs = {path.name: read_log(path) for path in runs}
        known = {path.name: setup_of(path, logs[path.name]).method for path in runs}
        drawn = figures.training_curves(logs, known)
    else:
        drawn = figures.allowed_change(named)
    save_figure(drawn, output)
    typer.echo(output)
