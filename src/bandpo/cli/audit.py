"""`bandpo audit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bandpo.cli.plot import save

MARKS = {True: "[green]✓[/green]", False: "[red]✗[/red]", None: "[dim]?[/dim]"}


def audit_command(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Run folders, trainer_state.json files, or the .jsonl of verl's file logger; several are compared.",
            metavar="RUN...",
        ),
    ],
    output: Annotated[Path, typer.Option(help="Plot to save: .png, .svg or .pdf.")] = Path("audit.png"),
) -> None:
    """Say what the clip does to a run: does it act, does it suppress rare tokens, is entropy lost, what to try."""
    from rich.console import Console
    from rich.table import Table

    from bandpo.diagnostics.figures import audit_figure
    from bandpo.diagnostics.findings import all_findings
    from bandpo.diagnostics.logs import read_log
    from bandpo.diagnostics.summary import summarize
    from bandpo.diagnostics.tables import clip_table

    logs = {str(path): read_log(path) for path in runs}
    summaries = {label: summarize(rows) for label, rows in logs.items()}
    console = Console()
    for label, summary in summaries.items():
        table = Table(
            box=None, show_header=False, title=f"{label}, {summary.steps} steps", title_justify="left"
        )
        for finding in all_findings(summary):
            advice = f"\n[bold]try[/bold] {finding.try_next}" if finding.try_next else ""
            table.add_row(MARKS[finding.ok], finding.question, finding.answer + advice)
        console.print(table)
        console.print()
    numbers = clip_table(summaries)
    table = Table(*numbers.header, title="on the run's own tensors")
    for row in numbers.rows:
        table.add_row(*row)
    console.print(table)
    save(audit_figure(logs), output)
    console.print(f"plot  {output}", highlight=False, soft_wrap=True)
