"""`bandpo audit`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bandpo.cli.plot import save

if TYPE_CHECKING:
    from rich.table import Table

    from bandpo.diagnostics.summary import RunSummary

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
    console.print(_numbers(summaries))
    save(audit_figure(logs), output)
    console.print(f"plot  {output}", highlight=False, soft_wrap=True)


def _numbers(runs: dict[str, RunSummary]) -> Table:
    from rich.table import Table

    from bandpo.diagnostics.audit import BINS

    table = Table("", *runs, title="on the run's own tensors")

    def row(name: str, cells: list[str | None]) -> None:
        if any(cells):
            table.add_row(name, *(cell or "–" for cell in cells))

    each = runs.values()
    row("clip-high rate", [_percent(d.clip_high) for d in each])
    row("clip-low rate", [_percent(d.clip_low) for d in each])
    for name in BINS:
        found = [d.clip_high_by_bin.get(name) for d in each]
        row(
            f"  clip-high, p {name.replace('_', ' ')}",
            [f and f"{_percent(f[0])} of {f[1]:.0f}" for f in found],
        )
    row(
        "  clip-high, p below 0.1",
        [
            f"{_percent(d.rare.blocked / d.rare.tokens)} of {d.rare.tokens:.0f}" if d.rare.tokens else None
            for d in each
        ],
    )
    row(
        "positive gradient blocked, p < 0.1",
        [_percent(d.blocked_mass.get("", {}).get("below_0.1")) for d in each],
    )
    row("radius used", [_percent(d.radius_used) for d in each])
    for rule in {name: None for d in each for name in d.blocked_mass if name}:
        table.add_section()
        rates = [d.counterfactuals.get(rule) for d in each]
        row(f"{rule} would clip high", [_percent(r and r[0]) for r in rates])
        row(f"{rule} would clip low", [_percent(r and r[1]) for r in rates])
        row(
            f"{rule} would block, p < 0.1",
            [_percent(d.blocked_mass.get(rule, {}).get("below_0.1")) for d in each],
        )
    return table


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.2%}"
