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
        print(diagnosis)
        if blocked is not None:
            from bandpo.audit.blocked_tokens import decoder, format_tokens

            print(
                f"\nblocked, the costliest first:\n{format_tokens(blocked.result(), decoder(run, tokenizer))}"
            )
    if not diagnosis.healthy:
        sys.exit(1)


def _blocked_tokens(method: Method | str | None) -> BlockedTokens:
    from bandpo.audit.blocked_tokens import BlockedTokens
    from bandpo.text import as_method

    return BlockedTokens(None if method is None else as_method(method))
