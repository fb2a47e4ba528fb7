"""`bandpo-lab compare`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from bandpo_lab.console import echo
from bandpo_lab.errors import InvalidValue


def compare_command(
    methods: Annotated[
        list[str],
        typer.Argument(
            help="Two or more methods or rules: 'DAPO()', 'FixedClip(0.2)', 'my_module.Rule()', ...",
            metavar="METHOD METHOD...",
        ),
    ],
    baseline: Annotated[
        str | None,
        typer.Option(
            help="The method that the others are compared with; by default the last.", show_default=False
        ),
    ] = None,
    lags: Annotated[
        str,
        typer.Option(help="Ages of the data in batches, separated by commas; each is compared separately."),
    ] = "0,4",
    optimizers: Annotated[
        str,
        typer.Option(
            help="Optimizers, separated by commas. A gain is claimed only if it holds under each of them.",
        ),
    ] = "adam,head-and-trunk,shared-moment,momentum",
    seeds: Annotated[int, typer.Option(help="Seeds of each method at each learning rate, at least 4.")] = 64,
    rates: Annotated[
        str | None,
        typer.Option(
            help="Learning rates of one optimizer, separated by commas; by default eight, each twice the one before.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="Write the figure to this .png, .svg or .pdf file.", show_default=False),
    ] = None,
) -> None:
    """Train small tables with each method and report which learns more: a screening of about a minute.

    Results on tables need not hold for networks; `bandpo-lab study` compares methods on networks.
    """
    lag_values = _parse_lags(lags)
    rate_values = None if rates is None else _parse_rates(rates)

    # Check the methods before matplotlib is imported. This also imports modules of the current folder, so that
    # `compare` finds them when it reads the same text.
    from bandpo.cli import read_method

    for text in methods:
        read_method(text)

    from bandpo_lab.comparison import compare
    from bandpo_lab.files import check_writable
    from bandpo_lab.style import check_figure_path, save_figure

    if output is not None:
        check_figure_path(output)
        check_writable(output.parent)
    comparison = compare(
        methods,
        baseline=baseline,
        lags=lag_values,
        optimizers=[name.strip() for name in optimizers.split(",")],
        seeds=seeds,
        rates=rate_values,
    )
    if output is not None:
        save_figure(comparison.figure(), output)
    if as_json:
        content = {
            "baseline": comparison.baseline,
            "sentence": comparison.sentence,
            "verdicts": [
                {"lag": lag, "method": method, "verdict": verdict}
                for (lag, method), verdict in comparison.verdicts.items()
            ],
            "table": comparison.table,
            "by_rate": comparison.by_rate,
        }
        print(json.dumps(content, indent=1))
        return
    echo(comparison)
    if output is not None:
        echo(f"\nwrote {output}")


def _parse_lags(text: str) -> list[int]:
    """Return the lags in a list separated by commas."""
    try:
        return [int(item) for item in text.split(",")]
    except ValueError as error:
        raise InvalidValue(
            f"--lags takes whole numbers separated by commas, such as --lags 0,4; got {text!r}"
        ) from error


def _parse_rates(text: str) -> list[float]:
    """Return the learning rates in a list separated by commas."""
    try:
        return [float(item) for item in text.split(",")]
    except ValueError as error:
        raise InvalidValue(
            f"--rates takes numbers separated by commas, such as --rates 0.04,0.08; got {text!r}"
        ) from error
