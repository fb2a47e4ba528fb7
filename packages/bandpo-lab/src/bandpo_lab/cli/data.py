"""`bandpo-lab data`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bandpo_lab.data.sets import GENERATED, HUB, SIZE, Golds, Role
from bandpo_lab.output.console import echo, print_table
from rlvet.cli.command_line import App, Group

app = App(cls=Group, no_args_is_help=True, help="Problem sets for training and evaluation.")


@app.callback()
def _data() -> None:
    # With a callback, typer keeps `prepare` as a subcommand although it is the only one.
    pass


@app.command("prepare")
def prepare_command(
    sets: Annotated[
        list[str],
        typer.Argument(
            help=f"From the hub: {', '.join(HUB)}. Generated: {', '.join(GENERATED)}. Or files, or NAME=FILE."
        ),
    ],
    output_dir: Annotated[Path, typer.Option("--output-dir", help="Folder to write to.")] = Path("data"),
    instruction: Annotated[
        str | None,
        typer.Option(help="Instruction on the form of the answer, added to each problem; empty for none."),
    ] = None,
    role: Annotated[
        Role | None,
        typer.Option(
            help="Role of the files. By default train if the name has the word train, such as my-train, else eval.",
        ),
    ] = None,
    golds: Annotated[
        Golds | None,
        typer.Option(
            help="Problems whose answer cannot be graded: drop or keep. By default drop for training, keep for eval."
        ),
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option(help="Revision of the hub's repository, in place of the default commit."),
    ] = None,
    size: Annotated[int, typer.Option(help="Number of problems of generated sets.")] = SIZE,
    seed: Annotated[int, typer.Option(help="Seed of generated sets.")] = 0,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace sets that are in the folder already.")
    ] = False,
    authors: Annotated[
        bool,
        typer.Option(
            "--authors", help="The prompts and data sources of the paper's authors, for +paper=authors."
        ),
    ] = False,
) -> None:
    """Write problem sets in verl's and TRL's formats, with a manifest and a list of dropped rows."""
    from bandpo_lab.data.prepare import INSTRUCTION, PromptForm, prepare_data

    form = PromptForm(INSTRUCTION if instruction is None else instruction)
    manifest = prepare_data(
        sets,
        output_dir,
        form=form,
        role=role,
        golds=golds,
        revision=revision,
        size=size,
        seed=seed,
        overwrite=overwrite,
        authors=authors,
    )
    header = ("set", "role", "rows", "dropped", "unreadable golds", "licence", "revision")
    rows = []
    for name, entry in manifest.items():
        bad_golds = entry["unreadable golds"]
        for problem_id, reason in bad_golds.items():
            echo(f"kept {problem_id}: {reason}", err=True)
        counts = (entry["rows"], entry["dropped"], len(bad_golds))
        rows.append((name, entry["role"], *counts, entry["licence"], entry["origin"]["revision"][:20]))
    print_table(header, rows)
    echo(f"for TRL  {output_dir / 'trl'}")
    echo(f"for verl {output_dir / 'verl'}")
    echo(f"dropped  {output_dir / 'dropped.jsonl'}")
