"""`bandpo diagnose`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bandpo.cli import read_method

if TYPE_CHECKING:
    from bandpo.audit.diagnosis import Diagnosis


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
    from bandpo.audit.diagnosis import diagnose

    found = diagnose(run, method=read_method(run_method) if run_method else None)
    if as_json:
        # In ASCII, so that no control character of a log's keys reaches the terminal.
        print(json.dumps(found.as_json(), indent=1))
    else:
        # Names of a run's log and folders stand in these lines.
        print("\n".join(map(printable, _lines(found))))
        if words:
            print(_words(run, tokenizer))
        if found.untested:
            told = [what + (f" ({how})" if how else "") for what, how in found.untested.items()]
            print(printable(f"cannot be tested: {'; '.join(told)}"))
    if not found.healthy:
        sys.exit(1)


def _lines(found: Diagnosis) -> list[str]:
    """The lines on what was found, how much of the run was looked at, and what passed in that."""
    lines = [found.headline]
    if found.coverage is not None:
        lines.append(str(found.coverage))
    for number, f in enumerate(found.findings, 1):
        spread = "" if f.error is None else f" ± {f.error:.2g}"
        figure = "" if f.figure is None or not f.n else f" ({f.figure:.3g}{spread} over {f.n:,})"
        lines += ["", f"{number}. {f.code}: {f.cause}"]
        lines.append(f"   tested: {f.tested}{figure}")
        lines.append(f"   do: {f.advice}")
    lines += ["", f"the run: {found.setup}"] if str(found.setup) else [""]
    part = "" if found.coverage is None else found.coverage.part
    where = f" in {part}" if part else ""
    passed = "; ".join(dict.fromkeys(found.passed)) or "nothing"
    lines.append(f"passed{where}: {passed}")
    return lines


def _words(run: Path, tokenizer: str | None) -> str:
    """What a record's rule blocked, in words if a tokenizer is given or lies beside it."""
    from bandpo.audit.record import read_calls
    from bandpo.audit.words import costliest, decoder, shown

    found = shown(costliest(read_calls(run)), decoder(run, tokenizer))
    return f"\nblocked, the costliest first:\n{found or 'no token whose id is recorded'}"
