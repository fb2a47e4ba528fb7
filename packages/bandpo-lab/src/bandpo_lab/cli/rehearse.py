"""`bandpo-lab rehearse`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from bandpo_lab.cli.recipes import SHIPPED
from bandpo_lab.cluster.modes import ModeName
from bandpo_lab.output.console import echo


def rehearse_command(
    overrides: Annotated[list[str], typer.Argument(help="The arguments of verl's program on the cluster.")],
    mode: Annotated[
        ModeName, typer.Option(help="verl's trainer, as for `bandpo-lab run verl`.", metavar="MODE")
    ] = "sync",
    config_dir: Annotated[Path, typer.Option(help="Your copy of the recipes.", show_default=False)] = SHIPPED,
    steps: Annotated[int, typer.Option(min=1, help="Training steps before the checkpoint.")] = 2,
    timeout: Annotated[
        float, typer.Option(min=1, help="Time limit of each of the two runs, in seconds.")
    ] = 900.0,
    right_answer: Annotated[
        str | None, typer.Option(help="An answer that your reward accepts, with {0} for the ground truth.")
    ] = None,
    stand_in: Annotated[
        bool, typer.Option("--stand-in", help="Make up data files and a model that are missing here.")
    ] = False,
    output_dir: Annotated[
        Path | None,
        typer.Option(
            "--output-dir",
            help="Folder for logs and metrics. Its path has at most 39 bytes, as Ray's sockets are in it.",
        ),
    ] = None,
) -> None:
    """Run a recipe for verl end to end on the CPU at a small size, and report what would fail on the cluster.

    The exit status is 0 only if every check passed.
    """
    from bandpo_lab.rehearsal import rehearse

    start = time.monotonic()
    options = {} if right_answer is None else {"right_answer": right_answer}
    rehearsal = rehearse(
        overrides,
        mode=mode,
        config_dir=config_dir,
        steps=steps,
        timeout=timeout,
        stand_in=stand_in,
        folder=output_dir,
        say=echo,
        **options,
    )
    lines = [rehearsal.verdict]
    if rehearsal.changes:
        lines.append("Settings that were changed, by reason")
        for reason in dict.fromkeys(change.reason for change in rehearsal.changes):
            lines.append(reason)
            lines += [
                f"  {change.key}: {change.original} → {change.value}"
                for change in rehearsal.changes
                if change.reason == reason
            ]
        lines.append(rehearsal.prompts)
    for check in rehearsal.checks:
        state = "FAIL"
        if check.ok:
            state = "warn" if check.warning else "ok"
        lines.append(f"{state} {check.name}: {check.detail}")
    if rehearsal.not_covered:
        lines += ["Not covered", *(f"  {text}" for text in rehearsal.not_covered)]
    lines.append(f"{time.monotonic() - start:.0f} s; logs and metrics are in {rehearsal.folder}")
    echo("\n".join([*lines, rehearsal.verdict]))
    if not rehearsal.ok:
        raise typer.Exit(1)
