"""`bandpo diagnose`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bandpo.cli import read_method

if TYPE_CHECKING:
    from bandpo.audit.blocked_tokens import BlockedTokens
    from bandpo.doctor.diagnosis import Diagnosis
    from bandpo.doctor.findings import Finding
    from bandpo.methods import Method


def diagnose_command(
    run: Annotated[
        Path,
        typer.Argument(
            help="A record of bandpo.Recorder, a run folder, trainer_state.json, or the .jsonl of verl's file logger.",
        ),
    ],
    run_method: Annotated[
        str | None,
        typer.Option(help="The run's method, if nothing tells it: 'GSPO()', ...", show_default=False),
    ] = None,
    words: Annotated[
        bool,
        typer.Option(
            "--words", help="Of a record with token ids: show the ten costliest words that were blocked."
        ),
    ] = False,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="What decodes them: a folder or a name of the hub; else the run's folder, or ids are shown."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what is wrong with a run, causes first, with one thing to do for each.

    Exits with 0 if nothing is, with 1 if something is, and with 2 if the run cannot be read.
    """
    from bandpo._terminal import printable
    from bandpo.doctor.diagnosis import diagnose
    from bandpo.runs import open_run

    method = read_method(run_method) if run_method else None
    blocked = _blocked_tokens(method) if words else None
    opened = open_run(run, method=run_method)
    diagnosis = diagnose(opened, method=method, collectors=() if blocked is None else [blocked])
    if as_json:
        # In ASCII, so that no control character of a log's keys reaches the terminal.
        print(json.dumps(diagnosis.as_json(), indent=1))
    else:
        # Names of a run's log and folders stand in these lines.
        print("\n".join(map(printable, _lines(diagnosis))))
        if blocked is not None:
            print(_format_blocked(blocked, run, tokenizer))
        if diagnosis.untested:
            checks = [f"{name} ({how})" if how else name for name, how in diagnosis.untested.items()]
            print(printable(f"cannot be tested: {'; '.join(checks)}"))
    if not diagnosis.healthy:
        sys.exit(1)


def _lines(diagnosis: Diagnosis) -> list[str]:
    """Return the lines on what is wrong, how much of the run was looked at, and what passed in that."""
    lines = [diagnosis.headline]
    if diagnosis.coverage is not None:
        lines.append(str(diagnosis.coverage))
    for number, finding in enumerate(diagnosis.findings, 1):
        lines += ["", f"{number}. {finding.code}: {finding.cause}"]
        lines.append(f"   tested: {finding.tested}{_figure(finding)}")
        lines.append(f"   do: {finding.advice}")
    lines += ["", f"the run: {diagnosis.setup}"] if str(diagnosis.setup) else [""]
    part = "" if diagnosis.coverage is None else diagnosis.coverage.part
    where = f" in {part}" if part else ""
    passed = "; ".join(dict.fromkeys(diagnosis.passed)) or "nothing"
    lines.append(f"passed{where}: {passed}")
    return lines


def _figure(finding: Finding) -> str:
    """Return the figure of a finding with its error and what it was taken over, in brackets; empty if it has none."""
    if finding.figure is None or not finding.n:
        return ""
    spread = "" if finding.error is None else f" ± {finding.error:.2g}"
    return f" ({finding.figure:.3g}{spread} over {finding.n:,})"


def _blocked_tokens(method: Method | str | None) -> BlockedTokens:
    from bandpo.audit.blocked_tokens import BlockedTokens
    from bandpo.text import as_method

    return BlockedTokens(None if method is None else as_method(method))


def _format_blocked(blocked: BlockedTokens, run: Path, tokenizer: str | None) -> str:
    """Return what a record's rule blocked, in words if a tokenizer is named or lies beside it."""
    from bandpo.audit.blocked_tokens import decoder, format_tokens

    text = format_tokens(blocked.result(), decoder(run, tokenizer))
    return f"\nblocked, the costliest first:\n{text or 'no token whose id is recorded'}"
