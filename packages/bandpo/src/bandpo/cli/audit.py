"""The command `bandpo audit`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bandpo._siblings import require_rlvet
from bandpo.cli import read_method
from bandpo.core.errors import InvalidValue

if TYPE_CHECKING:
    from bandpo.replay.record import Replay
    from rlvet.runs import Run


def audit_command(
    paths: Annotated[
        list[Path],
        typer.Argument(
            help="Run folders, trainer_state.json files, the .jsonl of verl's file logger, or records of "
            "bandpo.audit.Recorder. Several are compared.",
            metavar="RUN...",
        ),
    ],
    run_method: Annotated[
        str | None,
        typer.Option(
            help="The method of a record's run, if the record has none: 'GSPO()', 'my_module.Rule()', ...",
            show_default=False,
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="A method or rule to apply to the tokens of a record: 'GSPO()', 'FixedClip(0.2, 0.28)', ... "
            "Repeatable."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show how often the clip of a run acts, which gradient it blocks, and what other rules would block.

    It does not judge these figures; `rlvet diagnose` does.
    """
    from rich.console import Console

    require_rlvet("bandpo audit")
    from bandpo._terminal import printable
    from bandpo.replay.tables import ages_table, clip_table, methods_table
    from rlvet.runs import open_run
    from rlvet.runs.summary import summarize

    runs = [open_run(path, method=run_method) for path in paths]
    records = [run for run in runs if run.is_record]
    logs = [run for run in runs if not run.is_record]
    if logs and method:
        raise InvalidValue(
            f"{logs[0].path} is a log, which has no tokens; --method is for records of bandpo.audit.Recorder"
        )
    replays = _replays(records, method or (), run_method)
    summaries = {str(run.path): summarize(run.rows) for run in logs}
    if as_json:
        metrics = {}
        for path, replay in replays.items():
            metrics[path] = replay.metrics()
        for path, summary in summaries.items():
            metrics[path] = summary.metrics
        print(json.dumps(metrics, indent=1))
        return

    console = Console()
    for path, replay in replays.items():
        tokens = replay.audits[replay.main_method].metrics()["tokens"]
        title = f"{path}, {len(replay.rows)} steps, {tokens:,.0f} tokens"
        console.print(printable(title), highlight=False, markup=False, soft_wrap=True)
        # Another fault than old data would explain the figures below, so it comes first.
        for line in (replay.ages.mismatch, replay.ages.unknown_line):
            if line:
                console.print(line, highlight=False, markup=False, soft_wrap=True)
        console.print(methods_table(replay))
        if replay.ages.rows:
            console.print(ages_table(replay))
    for run in logs:
        setup = str(run.setup)
        title = f"{run.path}, {summaries[str(run.path)].steps} steps"
        title = f"{title}, {setup}" if setup else title
        console.print(printable(title), highlight=False, markup=False, soft_wrap=True)
    if any(summary.metrics for summary in summaries.values()):
        console.print(clip_table(summaries))
    for path, summary in summaries.items():
        if "tokens" not in summary.metrics:
            hint = (
                f"{path} has no metrics of the audit: log them (docs/trl.md, docs/verl.md) or record the tokens "
                "(docs/audit.md) to see which tokens the clip blocks, and what other rules would block"
            )
            console.print(printable(hint), highlight=False, markup=False, soft_wrap=True)


def _replays(records: Sequence[Run], methods: Sequence[str], run_method: str | None) -> dict[str, Replay]:
    """Return the audit of each record's tokens, by its path."""
    if not records:
        return {}
    from bandpo.audit.metrics import COUNTERFACTUALS
    from bandpo.replay.record import replay_record

    counterfactuals = {text: read_method(text) for text in methods} or COUNTERFACTUALS
    method = read_method(run_method) if run_method else None
    return {str(run.path): replay_record(run, counterfactuals, method=method) for run in records}
