"""`bandpo audit`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bandpo.errors import InvalidValue

if TYPE_CHECKING:
    from rich.console import Console

    from bandpo.audit.replay import Replay


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
            help="The runs' method, if no config.yaml or record names it: 'GSPO()', 'my_module.Rule()', ...",
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
    """Show what the clip does to a run: how often it acts, what it blocks, and what other rules would block.

    Figures alone; `bandpo diagnose` says whether anything is wrong.
    """
    from rich.console import Console

    from bandpo import ClipRule, parse
    from bandpo.audit.figures import audit_figure
    from bandpo.audit.logs import read_log, summarize
    from bandpo.audit.metrics import COUNTERFACTUALS
    from bandpo.audit.recorder import record_files
    from bandpo.audit.replay import replay_record
    from bandpo.audit.settings import Setup
    from bandpo.audit.style import save_figure
    from bandpo.audit.tables import clip_table

    records = [path for path in runs if record_files(path)]
    logs = {str(path): read_log(path) for path in runs if path not in records}
    if logs and (clip or method or anchor):
        raise InvalidValue(
            f"{next(iter(logs))} is a log, whose tokens are gone; --clip, --method and --anchor are for records of "
            "bandpo.Recorder"
        )
    console = Console()
    tried = {text: parse(text, ClipRule) for text in clip or ()} | {
        text: parse(text) for text in method or ()
    }
    for path in records:
        seen = replay_record(
            path, tried or COUNTERFACTUALS, method=run_method, anchor=anchor, skip_bad=skip_bad
        )
        _print_record(console, path, seen)
    if not logs:
        return
    setups = {label: Setup.of_log(Path(label), rows, method=run_method) for label, rows in logs.items()}
    summaries = {label: summarize(rows) for label, rows in logs.items()}
    for label, summary in summaries.items():
        console.print(f"{label}, {summary.steps} steps", highlight=False, soft_wrap=True)
    console.print(clip_table(summaries))
    save_figure(audit_figure(logs, {label: setup.method for label, setup in setups.items()}), output)
    console.print(f"plot  {output}", highlight=False, soft_wrap=True)


def _print_record(console: Console, path: Path, seen: Replay) -> None:
    """What is seen of a record under its own method and others."""
    from bandpo.audit.tables import methods_table

    tokens = seen.audits[seen.judged].metrics()["tokens"]
    title = f"{path}, {len(seen.rows)} steps, {tokens:,.0f} tokens"
    console.print(title, highlight=False, soft_wrap=True)
    console.print(methods_table(seen))
