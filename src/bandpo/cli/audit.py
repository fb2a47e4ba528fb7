"""`bandpo audit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bandpo.cli.plot import save
from bandpo.errors import InvalidValue


def audit_command(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Run folders, trainer_state.json files, or the .jsonl of verl's file logger. Several are compared. "
            "Records of bandpo.Recorder too, folders or files.",
            metavar="RUN...",
        ),
    ],
    run_method: Annotated[
        str | None,
        typer.Option(
            help="The runs' method, if no config.yaml names it: 'GSPO()', 'DAPO()', ...",
            show_default=False,
        ),
    ] = None,
    framework: Annotated[
        str | None,
        typer.Option(
            help="Whose settings the advice names, if the log does not tell: trl, verl, prime-rl, skyrl or slime.",
            show_default=False,
        ),
    ] = None,
    clip: Annotated[
        list[str] | None,
        typer.Option(help="For a record: a clip rule to try, e.g. 'FixedClip(0.2, 0.28)'. Repeatable."),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="For a record: a method to try, e.g. 'GSPO()' or 'Band(KL(), 0.05)'. Repeatable."),
    ] = None,
    anchor: Annotated[
        str | None,
        typer.Option(
            help="For a record: whose log-probabilities the bounds surround, trainer or rollout; by default the run's."
        ),
    ] = None,
    skip_bad: Annotated[
        bool, typer.Option(help="For a record: leave out sequences with values that cannot be right.")
    ] = False,
    output: Annotated[Path, typer.Option(help="Plot to save: .png, .svg or .pdf.")] = Path("audit.png"),
) -> None:
    """Say what the clip does to a run: whether it acts, what it blocks, what other rules would block, what to try."""
    from rich.console import Console
    from rich.table import Table

    from bandpo.audit.figures import audit_figure
    from bandpo.audit.findings import all_findings
    from bandpo.audit.logs import read_log
    from bandpo.audit.recorder import is_record
    from bandpo.audit.runs import known_run
    from bandpo.audit.summary import summarize
    from bandpo.audit.tables import clip_table
    from bandpo.cli.record import findings_table, print_record

    records = [path for path in runs if is_record(path)]
    logs = {str(path): read_log(path) for path in runs if path not in records}
    if logs and (clip or method or anchor):
        raise InvalidValue(
            f"{next(iter(logs))} is a log, whose tokens are gone; --clip, --method and --anchor are for records of "
            "bandpo.Recorder"
        )
    for path in records:
        print_record(path, clip or [], method or [], anchor, skip_bad)
    if not logs:
        return
    known = {
        label: known_run(Path(label), rows, framework=framework, method=run_method)
        for label, rows in logs.items()
    }
    summaries = {label: summarize(rows) for label, rows in logs.items()}
    console = Console()
    for label, summary in summaries.items():
        title = f"{label}, {summary.steps} steps"
        console.print(findings_table(title, all_findings(summary, known[label])))
        console.print()
    numbers = clip_table(summaries)
    table = Table(*numbers.header, title="on the run's own tensors")
    for row in numbers.rows:
        table.add_row(*row)
    console.print(table)
    save(audit_figure(logs, {label: run.method for label, run in known.items()}), output)
    console.print(f"plot  {output}", highlight=False, soft_wrap=True)
