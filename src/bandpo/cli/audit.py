"""`bandpo audit`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from bandpo.cli import read_method
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
            help="The method of a record's run, if it names none: 'GSPO()', 'my_module.Rule()', ...",
            show_default=False,
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="For a record: a method or rule to try: 'GSPO()', 'FixedClip(0.2, 0.28)', ... Repeatable."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what the clip does to a run: how often it acts, what it blocks, and what other rules would block.

    Figures alone; `bandpo diagnose` says whether anything is wrong.
    """
    from rich.console import Console

    from bandpo._terminal import printable
    from bandpo.audit.configs import setup_of
    from bandpo.audit.logs import read_log, summarize
    from bandpo.audit.metrics import COUNTERFACTUALS
    from bandpo.audit.recorder import record_files
    from bandpo.audit.replay import replay_record
    from bandpo.audit.tables import clip_table, methods_table

    records = [path for path in runs if record_files(path)]
    logs = {str(path): read_log(path) for path in runs if path not in records}
    if logs and method:
        raise InvalidValue(
            f"{next(iter(logs))} is a log, whose tokens are gone; --method is for records of bandpo.Recorder"
        )
    tried = {text: read_method(text) for text in method or ()} or COUNTERFACTUALS
    run_rule = read_method(run_method) if run_method else None
    replays = {path: replay_record(path, tried, method=run_rule) for path in records}
    summaries = {label: summarize(rows) for label, rows in logs.items()}
    if as_json:
        tokens = {str(path): {m: a.metrics() for m, a in r.audits.items()} for path, r in replays.items()}
        print(json.dumps(tokens | {label: summary.metrics for label, summary in summaries.items()}, indent=1))
        return
    console = Console()
    for path, seen in replays.items():
        tokens = seen.audits[seen.judged].metrics()["tokens"]
        title = f"{path}, {len(seen.rows)} steps, {tokens:,.0f} tokens"
        console.print(printable(title), highlight=False, markup=False, soft_wrap=True)
        console.print(methods_table(seen))
    for label, summary in summaries.items():
        told = f", {setup}" if str(setup := setup_of(Path(label), logs[label])) else ""
        title = printable(f"{label}, {summary.steps} steps{told}")
        console.print(title, highlight=False, markup=False, soft_wrap=True)
    if summaries:
        console.print(clip_table(summaries))
