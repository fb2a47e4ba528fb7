"""`bandpo-lab compare`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from bandpo_lab.cli.names import complete_method
from bandpo_lab.output.console import echo
from rlvet.cli import INTERRUPTED, stop

CORES = os.cpu_count() or 1
NO_PICTURE = "no picture: matplotlib is missing; in a clone, pip install './packages/bandpo-lab[study]'"
"""The sentence in place of the picture's path."""


def compare_command(
    methods: Annotated[
        list[str] | None,
        typer.Argument(
            help="Two or more methods or rules: 'DAPO()', 'FixedClip(0.2)', 'my_module.Rule()', ...; none for the "
            "demo: clip 0.2, BandAbove, Clip-Higher, BandPO and a constant clip of [0.8, 2].",
            metavar="METHOD",
            show_default=False,
            autocompletion=complete_method,
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            help="The method that the others are compared with; by default the first.", show_default=False
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Seeds; several give differences with intervals.")] = 1,
    task: Annotated[
        str,
        typer.Option(help="multiplication; mental: only direct answers count; random: rewards are coins."),
    ] = "multiplication",
    lag: Annotated[int, typer.Option(help="Age of the data in batches; 0 for fresh data.")] = 4,
    epochs: Annotated[int, typer.Option(help="How often each batch is used.")] = 1,
    minibatches: Annotated[int, typer.Option(help="Updates in each epoch.")] = 4,
    rate: Annotated[float, typer.Option(help="Adam's learning rate.")] = 2e-4,
    batches: Annotated[int, typer.Option(help="Batches of 8 problems with 16 answers each.")] = 80,
    workers: Annotated[int, typer.Option(min=1, help="Simultaneous runs on this machine.")] = CORES,
    output_dir: Annotated[
        Path,
        typer.Option(
            "--output-dir",
            help="Folder for the logs, the checkpoints and the picture; the same command goes on with what is there.",
        ),
    ] = Path("runs/compare"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train a small network with each method side by side: about a minute for four methods and one seed.

    Without methods it is the demo, which also prints what eight seeds of the same say, on old and on fresh data.
    """
    from bandpo.cli import read_method
    from bandpo.core.text import importable_current_folder
    from bandpo_lab.files.writing import check_writable
    from bandpo_lab.toy import demo
    from bandpo_lab.toy.comparison import compare

    # Check the methods before anything is written. This also imports modules of the current folder.
    for text in methods or ():
        read_method(text)

    check_writable(output_dir)
    try:
        with importable_current_folder():
            comparison = compare(
                methods or demo.METHODS,
                baseline=baseline,
                seeds=seeds,
                task=task,
                lag=lag,
                epochs=epochs,
                minibatches=minibatches,
                rate=rate,
                batches=batches,
                workers=workers,
                folder=output_dir,
                say=None if as_json else echo,
            )
    except KeyboardInterrupt:
        stop(f"interrupted; the same command goes on with what is in {output_dir}", INTERRUPTED)
    picture: Path | None = output_dir / "curves.png"
    try:
        from bandpo_lab.output.style import save_figure

        save_figure(comparison.figure(), output_dir / "curves.png")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        picture = None
    if as_json:
        content = {
            "baseline": comparison.baseline,
            "sentence": comparison.sentence,
            "table": comparison.table,
            "differences": comparison.differences,
        }
        print(json.dumps(content, indent=1))
        return
    echo("")
    echo(comparison)
    echo("")
    if not methods:
        echo(demo.report())
        echo("")
    echo(f"picture  {picture}" if picture else NO_PICTURE)
    echo(f"logs     {output_dir}; rlvet diagnose reads that of each run")
