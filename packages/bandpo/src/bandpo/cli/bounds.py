"""The command `bandpo bounds`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from bandpo._scalar_bounds import DEFAULT_RADIUS, RADII, SMALLEST_P, scalar_bounds
from bandpo.core.errors import InvalidValue

if TYPE_CHECKING:
    from bandpo import ClipRule, Method

PROBABILITIES = (0.001, 0.01, 0.08, 0.3, 0.5, 0.9, 0.99, 0.999)
"""The old probabilities that are printed by default."""

CLIPS = {"clip 0.2": (0.2, 0.2), "Clip-Higher": (0.2, 0.28)}
"""The clips that are printed beside Band: the distances of their bounds from 1."""

RECIPES = {
    "band-kl": "Band(KL())",
    "band-tv": "Band(TotalVariation())",
    "band-chi2": "Band(PearsonChi2())",
    "band-kl-relaxed": "Loosest(Band(KL()), FixedClip(0.2, 0.28))",
    "clip-higher": "FixedClip(0.2, 0.28)",
    "dcpo": "DCPO()",
    "grpo": "FixedClip(0.2)",
}
"""The rules of bandpo-lab's recipes, by their names there."""

Interval = tuple[float, float]
"""The smallest and the largest ratio that a rule allows to a token."""


class Columns(NamedTuple):
    """The intervals of each rule for the printed probabilities."""

    intervals: dict[str, Sequence[Interval]]
    """The intervals by the name of the rule, that of ``--divergence`` first."""
    max_ratio: float
    """The cap on Band's upper bound; inf for another rule."""


def bounds_command(
    probabilities: Annotated[
        list[float] | None,
        typer.Argument(help="Old probabilities, each in (0, 1]. By default eight from 0.001 to 0.999."),
    ] = None,
    divergence: Annotated[
        str,
        typer.Option(
            help="Divergence of Band's trust region, e.g. KL or TotalVariation, or your own as my_module.MyDivergence; "
            "or a method or rule, as --method of other commands names it, e.g. bandkl005, band-tv or 'DCPO()'."
        ),
    ] = "KL",
    radius: Annotated[
        float | None,
        typer.Option(help="Radius of Band; by default the method's or the divergence's."),
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

    With a method or another rule in place of a divergence, its bounds take the place of Band's.

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
        # JSON has no infinity.
        finite = {
            name: [[bound if math.isfinite(bound) else None for bound in interval] for interval in intervals]
            for name, intervals in columns.intervals.items()
        }
        print(json.dumps({"p": p_old} | finite))
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

    from bandpo import Band, FixedClip, check
    from bandpo.core.text import as_text, importable_current_folder

    with importable_current_folder():
        rule = _read_rule(divergence)
    numbers = {
        name: value for name, value in (("radius", radius), ("max_ratio", max_ratio)) if value is not None
    }
    if isinstance(rule, Band):
        rule = replace(rule, **numbers)
        name = _band_name(str(rule.divergence), rule.radius)
    elif numbers:
        option = f"--{next(iter(numbers)).replace('_', '-')}"
        raise InvalidValue(
            f"{option} is of Band alone, and {divergence!r} is another rule: write its numbers in --divergence, as in "
            f"{as_text(rule)!r}"
        )
    else:
        name = divergence
    check(rule)
    rules: dict[str, ClipRule] = {name: rule}
    rules |= {name: FixedClip(*distances) for name, distances in CLIPS.items()}
    logp_old = torch.tensor(p_old, dtype=torch.float64).log()
    intervals: dict[str, Sequence[Interval]] = {}
    for header, printed_rule in rules.items():
        bounds = printed_rule.bounds(logp_old)
        intervals[header] = [*zip(bounds.lower.tolist(), bounds.upper.tolist(), strict=True)]
    return Columns(intervals, rule.max_ratio if isinstance(rule, Band) else math.inf)


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
    first = next(iter(columns.intervals.values()))
    if max(upper for _, upper in first) >= columns.max_ratio * (1 - 1e-9) and math.isfinite(
        columns.max_ratio
    ):
        table.caption = f"{columns.max_ratio:g} is Band's cap, max_ratio"
    for row, p in enumerate(p_old):
        cells = [
            f"{lower:.4g} … {upper:.4g}" for lower, upper in (x[row] for x in columns.intervals.values())
        ]
        largest = p * first[row][1]
        table.add_row(f"{p:g}", *cells, f"{largest:.4g}")
    Console().print(table)


def _read_rule(text: str) -> ClipRule:
    """Return Band with a divergence, or the rule of a method, from its text form or its name in bandpo-lab's recipes.

    Raises:
        ValueError: The text is neither, or the method has no bounds that depend on the probability of a token alone.
    """
    from bandpo import Band, Divergence, parse
    from bandpo.core.errors import did_you_mean
    from bandpo.core.text import PAPER_DIVERGENCES

    text = RECIPES.get(text, text)
    try:
        return Band(parse(text, Divergence))
    except InvalidValue as error:
        try:
            method = parse(text)
        except InvalidValue as method_error:
            is_method = did_you_mean(text, PAPER_DIVERGENCES) or (
                "did you mean" in str(method_error) and "did you mean" not in str(error)
            )
            raise (method_error if is_method else error) from None
    problem = _without_bounds(method)
    if problem:
        raise InvalidValue(
            f"{text!r} {problem}: name a divergence such as KL, or a method or rule that bounds the ratio of each "
            "token, such as bandkl005, 'BandAbove()' or 'DCPO()'"
        )
    return method.clip


def _without_bounds(method: Method) -> str:
    """Return why a method has no bounds by the probability of a token; empty if it has them."""
    from bandpo import Unclipped

    if (method.bound_level or method.level) != "token":
        return "bounds the ratio of a whole answer, not that of a token"
    if method.clip.depends_on_tokens:
        return "computes its bounds from the tokens of a batch"
    if isinstance(method.clip, Unclipped):
        return "has no bounds"
    return ""
