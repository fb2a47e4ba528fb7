"""The command `bandpo bounds`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from bandpo._scalar_bounds import DEFAULT_RADIUS, RADII, SMALLEST_P, scalar_bounds
from bandpo.core.errors import InvalidValue

if TYPE_CHECKING:
    from bandpo import Band

PROBABILITIES = (0.001, 0.01, 0.08, 0.3, 0.5, 0.9, 0.99, 0.999)
"""The old probabilities that are printed by default."""

CLIPS = {"clip 0.2": (0.2, 0.2), "Clip-Higher": (0.2, 0.28)}
"""The clips that are printed beside Band: the distances of their bounds from 1."""

Interval = tuple[float, float]
"""The smallest and the largest ratio that a rule allows to a token."""


class Columns(NamedTuple):
    """The intervals of each rule for the printed probabilities."""

    intervals: dict[str, Sequence[Interval]]
    """The intervals by the name of the rule, Band's first."""
    max_ratio: float
    """The cap on Band's upper bound."""


def bounds_command(
    probabilities: Annotated[
        list[float] | None,
        typer.Argument(help="Old probabilities, each in (0, 1]. By default eight from 0.001 to 0.999."),
    ] = None,
    divergence: Annotated[
        str,
        typer.Option(
            help="Divergence of the trust region, e.g. KL or TotalVariation, or your own as my_module.MyDivergence; "
            "or a rule with Band, as --method names it, e.g. bandkl005 or band-tv."
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
    """Print the allowed ratios under Band, clip 0.2 and Clip-Higher, and the largest new probability under Band.

    KL is KL(π_old ‖ π), as in the paper. ReverseKL has the other direction.
    """
    p_old = probabilities or [*PROBABILITIES]
    for p in p_old:
        if not 0 < p <= 1:
            raise InvalidValue(f"probability {p} is not in (0, 1]")
    # JSON has all digits, and these are the core's.
    columns = None if as_json else _without_torch(p_old, divergence, radius, max_ratio)
    if columns is None:
        columns = _from_core(p_old, divergence, radius, max_ratio)
    if as_json:
        print(json.dumps({"p": p_old} | columns.intervals))
        return
    _print_table(p_old, columns)


def _without_torch(
    p_old: Sequence[float], divergence: str, radius: float | None, max_ratio: float | None
) -> Columns | None:
    """Return the columns without torch; None if the core is needed for them, or for the error about a value."""
    if divergence not in ("KL", "KL()"):
        return None
    if radius is None:
        radius = DEFAULT_RADIUS
    if max_ratio is None:
        max_ratio = 10.0
    if not (RADII[0] <= radius <= RADII[1] and max_ratio > 1 and min(p_old) >= SMALLEST_P):
        return None
    intervals: dict[str, Sequence[Interval]] = {
        _band_name("KL()", radius): [scalar_bounds(p, radius, max_ratio) for p in p_old]
    }
    for clip, (low, high) in CLIPS.items():
        intervals[clip] = [(1 - low, 1 + high)] * len(p_old)
    return Columns(intervals, max_ratio)


def _from_core(
    p_old: Sequence[float], divergence: str, radius: float | None, max_ratio: float | None
) -> Columns:
    """Return the columns by the rules of the core, for any divergence."""
    import torch

    from bandpo import FixedClip, check
    from bandpo.core.text import importable_current_folder

    with importable_current_folder():
        band = _read_band(divergence)
    if radius is not None:
        band = replace(band, radius=radius)
    if max_ratio is not None:
        band = replace(band, max_ratio=max_ratio)
    check(band)
    rules = {_band_name(str(band.divergence), band.radius): band}
    rules |= {name: FixedClip(*distances) for name, distances in CLIPS.items()}
    logp_old = torch.tensor(p_old, dtype=torch.float64).log()
    intervals: dict[str, Sequence[Interval]] = {}
    for name, rule in rules.items():
        bounds = rule.bounds(logp_old)
        intervals[name] = [*zip(bounds.lower.tolist(), bounds.upper.tolist(), strict=True)]
    return Columns(intervals, band.max_ratio)


def _band_name(divergence: str, radius: object) -> str:
    """Return the header of Band's column."""
    shown = f"{radius:g}" if isinstance(radius, (int, float)) else str(radius)
    return f"Band {divergence}, radius {shown}"


def _print_table(p_old: Sequence[float], columns: Columns) -> None:
    """Print the columns, with a row for each probability."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="allowed ratio π/π_old")
    for header in ("p", *columns.intervals, "p after at most"):
        # Wrap cells on a narrow terminal instead of cutting digits off.
        table.add_column(header, overflow="fold")
    band = next(iter(columns.intervals.values()))
    if max(upper for _, upper in band) >= columns.max_ratio * (1 - 1e-9):
        table.caption = f"{columns.max_ratio:g} is Band's cap, max_ratio"
    for row, p in enumerate(p_old):
        cells = [
            f"{lower:.4g} … {upper:.4g}" for lower, upper in (x[row] for x in columns.intervals.values())
        ]
        largest = p * band[row][1]
        table.add_row(f"{p:g}", *cells, f"{largest:.4g}")
    Console().print(table)


def _read_band(text: str) -> Band:
    """Return Band with a divergence, or the rule of a method with Band, from its text form.

    The recipes of bandpo-lab name a Band ``band-kl``, ``band-tv`` or ``band-chi2``, each with its divergence's radius.
    """
    from bandpo import Band, Divergence, parse
    from bandpo.core.errors import did_you_mean
    from bandpo.core.text import PAPER_DIVERGENCES

    recipe = re.fullmatch(r"band-(\w+)", text)
    if recipe and (divergence := PAPER_DIVERGENCES.get(f"band{recipe[1]}")):
        return Band(divergence())
    try:
        return Band(parse(text, Divergence))
    except InvalidValue as error:
        try:
            clip = parse(text).clip
        except InvalidValue as method_error:
            raise (method_error if did_you_mean(text, PAPER_DIVERGENCES) else error) from None
        if not isinstance(clip, Band):
            raise InvalidValue(
                f"{text!r} is {clip}, whose bounds are not Band's alone: name a divergence such as KL, or a rule such "
                "as bandkl005"
            ) from None
        return clip
