"""The command `bandpo bounds`."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from bandpo.core.errors import InvalidValue

if TYPE_CHECKING:
    from bandpo import Band

PROBABILITIES = (0.001, 0.01, 0.08, 0.3, 0.5, 0.9, 0.99, 0.999)
"""The old probabilities that are printed by default."""


def bounds_command(
    probabilities: Annotated[
        list[float] | None,
        typer.Argument(help="Old probabilities, each in (0, 1]. By default eight from 0.001 to 0.999."),
    ] = None,
    divergence: Annotated[
        str,
        typer.Option(
            help="Divergence of the trust region, e.g. KL or TotalVariation, or your own as my_module.MyDivergence; "
            "or a method with Band, as --method names it, e.g. bandkl005."
        ),
    ] = "KL",
    radius: Annotated[
        float | None,
        typer.Option(help="Radius of the trust region; by default the method's or the divergence's."),
    ] = None,
    max_ratio: Annotated[
        float | None,
        typer.Option(
            help="Cap on Band's upper bound, the rule's max_ratio; inf for none; by default the method's or 10."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print the allowed ratios under Band, clip 0.2 and Clip-Higher, and the largest new probability under Band."""
    import torch
    from rich.console import Console
    from rich.table import Table

    from bandpo import FixedClip, check
    from bandpo.core.text import importable_current_folder

    for p in probabilities or ():
        if not 0 < p <= 1:
            raise InvalidValue(f"probability {p} is not in (0, 1]")
    p_old = torch.tensor(probabilities or PROBABILITIES, dtype=torch.float64)
    with importable_current_folder():
        band = _read_band(divergence)
    if radius is not None:
        band = replace(band, radius=radius)
    if max_ratio is not None:
        band = replace(band, max_ratio=max_ratio)
    check(band)
    radius_text = f"{band.radius:g}" if isinstance(band.radius, (int, float)) else str(band.radius)
    rules = {
        f"Band {band.divergence}, radius {radius_text}": band,
        "clip 0.2": FixedClip(),
        "Clip-Higher": FixedClip(0.2, 0.28),
    }
    intervals = {name: rule.bounds(p_old.log()) for name, rule in rules.items()}
    if as_json:
        pairs = {name: torch.stack([b.lower, b.upper], -1).tolist() for name, b in intervals.items()}
        print(json.dumps({"p": p_old.tolist()} | pairs))
        return

    table = Table(title="allowed ratio π/π_old")
    for header in ("p", *rules, "p after at most"):
        table.add_column(
            header, overflow="fold"
        )  # wrap cells on a narrow terminal instead of cutting digits off
    upper = next(iter(intervals.values())).upper
    if upper.max() >= band.max_ratio * (1 - 1e-9):
        table.caption = f"{band.max_ratio:g} is Band's cap, max_ratio"
    for row, p in enumerate(p_old.tolist()):
        cells = [f"{b.lower[row].item():.4g} … {b.upper[row].item():.4g}" for b in intervals.values()]
        table.add_row(f"{p:g}", *cells, f"{p * upper[row].item():.4g}")
    Console().print(table)


def _read_band(text: str) -> Band:
    """Return Band with a divergence, or the rule of a method with Band, from its text form."""
    from bandpo import Band, Divergence, parse
    from bandpo.core.errors import did_you_mean
    from bandpo.core.text import PAPER_DIVERGENCES

    try:
        return Band(parse(text, Divergence))
    except InvalidValue as error:
        try:
            clip = parse(text).clip
        except InvalidValue as method_error:
            raise (method_error if did_you_mean(text, PAPER_DIVERGENCES) else error) from None
        if not isinstance(clip, Band):
            raise InvalidValue(
                f"{text!r} does not clip by Band: name a divergence such as KL, or a method such as bandkl005"
            ) from None
        return clip
