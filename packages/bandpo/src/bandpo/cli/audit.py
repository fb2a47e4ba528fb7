"""The command `bandpo audit`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bandpo._siblings import require_rlvet
from bandpo._terminal import printable
from bandpo.cli import read_method
from bandpo.cli.method_names import complete_method
from bandpo.core.errors import InvalidValue

if TYPE_CHECKING:
    from rich.console import Console

    from bandpo.replay.record_audit import RecordAudit
    from rlvet import RecordedRun, Run


def audit_command(
    paths: Annotated[
        list[Path],
        typer.Argument(
            help="Run folders, trainer_state.json files, the .jsonl of verl's file logger, or records of "
            "bandpo.audit.Recorder. Several are compared.",
            metavar="RUN",
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
            "Repeatable.",
            autocompletion=complete_method,
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="The tokenizer of a record's ids: a folder, or a name on the Hugging Face hub; by default that in the "
            "run's folder.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what the clip of a run drops of the gradient on rare winners, on which tokens, and what others would drop.

    It does not judge these figures; `rlvet diagnose` does.
    """
    require_rlvet("bandpo audit")
    from rlvet import Run, open_run
    from rlvet.runs.effect import RUN, Effect, matter_line, rules_of_log
    from rlvet.runs.summary import summarize

    runs = [open_run(path, method=run_method) for path in paths]
    records = {str(run.path): opened for run in runs if (opened := _record_of(run, run_method)) is not None}
    logs = [run for run in runs if isinstance(run, Run) and str(run.path) not in records]
    if logs and method:
        raise InvalidValue(
            f"{logs[0].path} is a log, which has no tokens; --method is for records of bandpo.audit.Recorder"
        )
    audits = _audits(records, method or (), run_method, tokenizer)
    summaries = {str(run.path): summarize(run.rows) for run in logs}
    lines: dict[str, list[str]] = {}
    for path, summary in summaries.items():
        matter = matter_line(rules_of_log(summary.metrics))
        lines[path] = [*Effect.from_log(summary.metrics).lines, *filter(None, [matter])]
    if as_json:
        results = {path: audit.as_json() for path, audit in audits.items()}
        for path, summary in summaries.items():
            results[path] = {"lines": lines[path], "methods": {RUN: summary.metrics}}
        print(json.dumps(results, indent=1))
        return

    for path, audit in audits.items():
        _print_record(path, audit)
    for run in logs:
        setup = str(run.setup)
        title = f"{run.path}, {summaries[str(run.path)].steps} steps"
        _print_line(f"{title}, {setup}" if setup else title)
        for line in lines[str(run.path)]:
            _print_line(line)
    if any(summary.metrics for summary in summaries.values()):
        from bandpo.replay.tables import clip_table

        _console().print(clip_table(summaries))
    for path, summary in summaries.items():
        if "tokens" not in summary.metrics:
            _print_line(
                f"{path} has no metrics of the audit: log them (docs/trl.md, docs/verl.md) or record the tokens "
                "(docs/audit.md) to see which tokens the clip blocks, and what other rules would block"
            )
        else:
            _print_line(f"{path} is a log: record the tokens (docs/audit.md) to see which ones a rule drops")


def _record_of(run: Run | RecordedRun, run_method: str | None) -> RecordedRun | None:
    """Return the record of a run, or the one in its folder, which tells more than its log; None if there is none.

    A record in a folder that lacks the policy in training, as verl's does, cannot be replayed, and the log is used.
    """
    from rlvet import RecordedRun
    from rlvet.records.run import find_record

    if isinstance(run, RecordedRun):
        return run
    path = find_record(run.path)
    if path is None:
        return None
    # The record itself, whose method may differ from that of the configuration in the run's folder.
    record = RecordedRun(path, run_method)
    return record if record.has_losses else None


def _console() -> Console:
    """Return a console on the standard output."""
    from rich.console import Console

    return Console()


def _print_line(line: str) -> None:
    """Print a line, in which control characters are escaped."""
    _console().print(printable(line), highlight=False, markup=False, soft_wrap=True)


def _print_record(path: str, audit: RecordAudit) -> None:
    """Print what the audit of a record found: sentences, tokens in context, and tables."""
    from bandpo.replay.tables import ages_table, kinds_table, methods_table, tokens_table

    replay = audit.replay
    tokens = replay.audits[replay.main_method].metrics()["tokens"]
    setup = str(replay.setup)
    title = f"{path}, {len(replay.rows)} steps, {tokens:,.0f} tokens"
    _print_line(f"{title}, {setup}" if setup else title)
    for line in audit.lines:
        _print_line(line)
    if audit.tokens:
        _console().print(tokens_table(audit.listed, audit.decode))
    if audit.kinds:
        _console().print(kinds_table(audit.kinds))
    if replay.ages.rows:
        _console().print(ages_table(replay))
    _console().print(methods_table(replay))


def _audits(
    records: Mapping[str, RecordedRun], methods: Sequence[str], run_method: str | None, tokenizer: str | None
) -> dict[str, RecordAudit]:
    """Return the audit of each record's tokens, by its path."""
    if not records:
        return {}
    from bandpo.audit.metrics import COUNTERFACTUALS
    from bandpo.replay.record_audit import audit_record

    counterfactuals = {text: read_method(text) for text in methods} or COUNTERFACTUALS
    method = read_method(run_method) if run_method else None
    audits: dict[str, RecordAudit] = {}
    for path, run in records.items():
        audits[path] = audit_record(run, counterfactuals, method=method, tokenizer=tokenizer)
    return audits
