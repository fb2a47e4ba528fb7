"""The command `rlvet diagnose`."""

from __future__ import annotations

import atexit
import sys
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rlvet.cli.json_output import json_text
from rlvet.cli.names import Names, read_names
from rlvet.cli.severity import Severity
from rlvet.cli.wrapping import wrapped


class Format(StrEnum):
    """The format of the output."""

    text = "text"
    markdown = "markdown"


def diagnose_command(
    run: Annotated[
        str,
        typer.Argument(
            help="A log, a run folder, or a record of bandpo.audit.Recorder; or wandb://ENTITY/PROJECT/RUN or hub://OWNER/NAME.",
        ),
    ],
    run_method: Annotated[
        str | None,
        typer.Option(help="The run's method, if its files have none: 'GSPO()', ...", show_default=False),
    ] = None,
    words: Annotated[
        bool,
        typer.Option(
            "--words",
            help="For a record with token ids: show the ten tokens whose blocked gradient is largest, and the ten on "
            "which engine and trainer disagree most.",
        ),
    ] = False,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Tokenizer for --words: a folder or a name on the Hugging Face hub. By default that of the run's "
            "folder; without one, ids are shown."
        ),
    ] = None,
    names: Names = None,
    run_name: Annotated[
        str | None,
        typer.Option(
            help="The run to read, if a path contains several and the error lists their names.",
            show_default=False,
        ),
    ] = None,
    fail_on: Annotated[
        Severity, typer.Option(help="Exit with 1 if there is a finding of this severity or a higher one.")
    ] = Severity.fix,
    output_format: Annotated[
        Format, typer.Option("--format", help="Print text, or Markdown, as for the summary of a CI job.")
    ] = Format.text,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose",
            "-v",
            help="List the checks that passed or decided nothing, and the keys that were not read.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Diagnose a run: list its problems, causes first, each with one remedy.

    Exits with 1 if there is a finding of the severity --fail-on or a higher one, with 2 if the run cannot be read or
    its log gets no verdict, and else with 0.
    """
    from rlvet.dispatch import diagnose
    from rlvet.plugins import COLLECTORS, require_plugin

    path = _local_path(run)
    word_collector = None
    if words:
        word_collector = require_plugin(COLLECTORS, "words", "--words")(run_method, tokenizer)
    collectors = [] if word_collector is None else [word_collector]
    diagnosis = diagnose(
        path, method=run_method, names=read_names(names), run_name=run_name, collectors=collectors
    )
    if as_json:
        print(json_text("diagnose", diagnosis.as_json()))
    elif output_format is Format.markdown:
        print(diagnosis.as_markdown())
    else:
        print(wrapped(diagnosis.as_text(verbose=verbose)))
        if word_collector is not None:
            print(wrapped(f"\n{word_collector.text(path)}"))
    if diagnosis.is_at_least(fail_on):
        sys.exit(1)
    if diagnosis.no_verdict:
        sys.exit(2)


def _local_path(text: str) -> Path:
    """Return the path of a run, which is downloaded to a temporary folder if the text is an address."""
    from rlvet.runs.addresses import download_run, is_address

    if not is_address(text):
        return Path(text)
    folder = tempfile.TemporaryDirectory(prefix="rlvet-")
    atexit.register(folder.cleanup)
    return download_run(text, Path(folder.name))
