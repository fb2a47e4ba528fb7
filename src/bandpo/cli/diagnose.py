"""`bandpo diagnose`."""

from __future__ import annotations

import atexit
import json
import sys
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bandpo.cli import read_method
from bandpo.cli.severity import Severity
from bandpo.errors import InvalidValue

if TYPE_CHECKING:
    from bandpo.audit.blocked_tokens import BlockedTokens, DisagreeingTokens
    from bandpo.methods import Method


class Format(StrEnum):
    """What is printed."""

    text = "text"
    markdown = "markdown"


def diagnose_command(
    run: Annotated[
        str,
        typer.Argument(
            help="A log, a run folder, or a record of bandpo.Recorder; or wandb://ENTITY/PROJECT/RUN or hub://OWNER/NAME.",
        ),
    ],
    run_method: Annotated[
        str | None,
        typer.Option(help="The run's method, if nothing tells it: 'GSPO()', ...", show_default=False),
    ] = None,
    words: Annotated[
        bool,
        typer.Option(
            "--words",
            help="Of a record with token ids: show the ten costliest words that were blocked, and the ten on which "
            "engine and trainer disagree most.",
        ),
    ] = False,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="What decodes them: a folder or a name of the hub; else the run's folder, or ids are shown."
        ),
    ] = None,
    names: Annotated[
        list[str] | None,
        typer.Option(
            "--map",
            metavar="QUANTITY=KEY",
            help="The log's key of a quantity, such as reward=iteration_reward; may be repeated.",
        ),
    ] = None,
    run_name: Annotated[
        str | None,
        typer.Option(help="Which run to read, where a log or folder holds several.", show_default=False),
    ] = None,
    fail_on: Annotated[
        Severity, typer.Option(help="Exit with 1 on a finding of this severity, or of a graver one.")
    ] = Severity.fix,
    output_format: Annotated[
        Format, typer.Option("--format", help="Print text, or Markdown for the summary of a job.")
    ] = Format.text,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what is wrong with a run, causes first, with one thing to do for each.

    Exits with 0 if nothing is as grave as --fail-on, with 1 if something is, and with 2 if the run cannot be read or
    its log allows no verdict.
    """
    from bandpo.doctor.diagnosis import diagnose
    from bandpo.runs import open_run

    path = _local_path(run)
    method = read_method(run_method) if run_method else None
    blocked = _blocked_tokens(method) if words else None
    disagreeing = _disagreeing_tokens() if words else None
    collectors = [collector for collector in (blocked, disagreeing) if collector is not None]
    opened = open_run(path, method=run_method, names=_read_names(names or []), run_name=run_name)
    diagnosis = diagnose(opened, method=method, collectors=collectors)
    if as_json:
        # In ASCII, so that no control character of a log's keys reaches the terminal.
        print(json.dumps(diagnosis.as_json(), indent=1))
    elif output_format is Format.markdown:
        print(diagnosis.as_markdown())
    else:
        print(diagnosis)
        if blocked is not None and disagreeing is not None:
            from bandpo.audit.blocked_tokens import decoder, format_disagreeing_tokens, format_tokens

            decode = decoder(path, tokenizer)
            print(f"\nblocked, the costliest first:\n{format_tokens(blocked.result(), decode)}")
            print(
                "\nengine and trainer disagree, the farthest apart first:\n"
                f"{format_disagreeing_tokens(disagreeing.result(), decode)}"
            )
    if diagnosis.is_at_least(fail_on):
        sys.exit(1)
    if diagnosis.no_verdict:
        sys.exit(2)


def _local_path(text: str) -> Path:
    """Return the path of a run; of an address that of a copy, which is removed when the program ends."""
    # typer's Path would make one slash of the two.
    from bandpo.runs.addresses import download_run, is_address

    if not is_address(text):
        return Path(text)
    folder = tempfile.TemporaryDirectory(prefix="bandpo-")
    atexit.register(folder.cleanup)
    return download_run(text, Path(folder.name))


def _read_names(texts: list[str]) -> dict[str, str] | None:
    """Return the user's names by quantity; None if there are none.

    Raises:
        ValueError: if a text is not of the form QUANTITY=KEY.
    """
    names = {}
    for text in texts:
        quantity, equals, key = text.partition("=")
        if not (quantity and equals and key):
            raise InvalidValue(f"--map takes QUANTITY=KEY, such as reward=iteration_reward, got {text!r}")
        names[quantity] = key
    return names or None


def _disagreeing_tokens() -> DisagreeingTokens:
    from bandpo.audit.blocked_tokens import DisagreeingTokens

    return DisagreeingTokens()


def _blocked_tokens(method: Method | str | None) -> BlockedTokens:
    from bandpo.audit.blocked_tokens import BlockedTokens
    from bandpo.text import as_method

    return BlockedTokens(None if method is None else as_method(method))
