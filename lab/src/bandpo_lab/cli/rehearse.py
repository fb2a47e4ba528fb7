"""`bandpo rehearse`."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Annotated

import typer

from bandpo_lab.cli.recipes import SHIPPED


def rehearse_command(
    overrides: Annotated[
        list[str],
        typer.Argument(
            help="verl's overrides: what follows `python -m verl.trainer.main_ppo` on the cluster."
        ),
    ],
    config_dir: Annotated[
        Path | None, typer.Option(help="The recipe's --config-dir; bandpo's own recipes if not given.")
    ] = None,
    config_name: Annotated[str, typer.Option(help="The recipe's --config-name.")] = "ppo_trainer",
    steps: Annotated[int, typer.Option(min=1, help="Training steps before the checkpoint.")] = 2,
    ranks: Annotated[int, typer.Option(min=1, help="Training processes, in place of GPUs.")] = 1,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for each of the two runs.")] = 300.0,
    right_answer: Annotated[
        str | None, typer.Option(help="An answer that your reward accepts; {0} stands for the ground truth.")
    ] = None,
    stand_in: Annotated[
        bool,
        typer.Option(
            "--stand-in", help="Make up data files and a model for those that are not on this machine."
        ),
    ] = False,
    output_dir: Annotated[
        Path | None,
        typer.Option("--output-dir", "--output_dir", help="For logs and metrics. Its path must be short."),
    ] = None,
) -> None:
    """Run a recipe for verl end to end on the CPU, small, and say what would fail on the cluster.

    Exits 0 only if every check passed.
    """
    from rich.console import Console
    from rich.markup import escape

    from bandpo_lab.rehearsal import NOT_COVERED, CannotRehearse, rehearse

    console, started = Console(), time.monotonic()
    say = functools.partial(console.print, highlight=False, soft_wrap=True)
    form = {} if right_answer is None else {"right_answer": right_answer}
    try:
        with console.status("composing the config") as status:

            def report(stage: str) -> None:
                line = f"{stage} ({time.monotonic() - started:.0f} s)"
                status.update(line) if console.is_terminal else typer.echo(line, err=True)

            found = rehearse(
                overrides,
                config_dir=config_dir or SHIPPED,
                config_name=config_name,
                steps=steps,
                ranks=ranks,
                timeout=timeout,
                stand_in=stand_in,
                folder=output_dir,
                report=report,
                say=lambda line: say(escape(line)),
                **form,
            )
    except CannotRehearse as reason:
        console.print(
            f"[red]This recipe cannot be rehearsed on a CPU:[/red] {escape(str(reason))}", soft_wrap=True
        )
        raise typer.Exit(2) from None

    verdict = f"[bold {'green' if found.ok else 'red'}]{found.verdict}[/]"
    say(verdict)
    if found.changes:
        say("[bold]What was changed, and why[/bold]")
        for why in dict.fromkeys(change.why for change in found.changes):
            say(f"[bold]{why}[/bold]")
            for change in (c for c in found.changes if c.why == why):
                say(escape(f"  {change.key}: {change.was} → {change.value}"))
        say(escape(found.prompts))
    for check in found.checks:
        mark = (
            ("[yellow]warn[/yellow]" if check.warning else "[green]ok  [/green]")
            if check.ok
            else "[red]FAIL[/red]"
        )
        say(f"{mark} [bold]{check.name}[/bold]: {escape(check.detail)}")
    say("[bold]Not covered[/bold]")
    for part in NOT_COVERED:
        say(escape(f"  {part}"))
    say(f"{time.monotonic() - started:.0f} s; logs and metrics are in {found.folder}")
    say(verdict)
    if not found.ok:
        raise typer.Exit(1)
