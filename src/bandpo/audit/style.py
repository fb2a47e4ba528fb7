"""How figures look: one style sheet for all, and one colour, line and marker for each rule, in every figure.

Colours are told apart by colour-blind readers. Where two are close, or equal in grey, line and marker differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, cycle
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import style
from matplotlib.figure import Figure

from bandpo.divergences import KL, PearsonChi2, TotalVariation
from bandpo.errors import InvalidValue
from bandpo.methods import Method
from bandpo.objectives import DualClip, Surrogate
from bandpo.rules import DCPO, Band, ClipRule, FixedClip, Sides, Unclipped, Union
from bandpo.text import as_method

SHEET = "bandpo.audit.house"


class Look(NamedTuple):
    """How one rule is drawn."""

    colour: str
    line: Any = "-"
    marker: str = "o"

    def options(self) -> dict[str, Any]:
        """Those of a line."""
        return {"color": self.colour, "linestyle": self.line, "marker": self.marker}


DASHED, DOTTED, DASH_DOT, LONG = (0, (4, 1.5)), (0, (1, 1.3)), (0, (5, 1.5, 1, 1.5)), (0, (9, 2))
LOOKS: Mapping[str, Look] = {
    "clip": Look("#4D4D4D", "-", "s"),
    "Clip-Higher": Look("#E69F00", DASHED, "^"),
    "DCPO": Look("#009E73", DASH_DOT, "v"),
    "Band-KL": Look("#0072B2", "-", "o"),
    "Band-TV": Look("#56B4E9", DASH_DOT, "P"),
    "Band-χ²": Look("#332288", DOTTED, "X"),
    "Band on one side": Look("#D55E00", LONG, "D"),
    "union": Look("#882255", DASH_DOT, "<"),
    "no clip": Look("#CC79A7", DOTTED, "*"),
}
"""By kind of rule. Most colours are Okabe and Ito's, three are Tol's."""
OTHERS = (
    Look("#999933", "-", "h"),
    Look("#AA4499", DASHED, ">"),
    Look("#117733", DOTTED, "p"),
    Look("#DDAA77", DASH_DOT, "d"),
    Look("#661100", LONG, "H"),
)
"""Of further rules, of a second one of the same kind, and of runs whose rule is not known."""


KINDS: Mapping[type, str] = {
    DCPO: "DCPO",
    KL: "Band-KL",
    TotalVariation: "Band-TV",
    PearsonChi2: "Band-χ²",
    Sides: "Band on one side",
    Union: "union",
    Unclipped: "no clip",
}
"""The key in `LOOKS`, by class of the rule, or of a Band's divergence."""


def _kind(method: Method) -> str | None:
    """The key in `LOOKS`; None for a kind of its own."""
    clip = method.clip
    if not isinstance(method.objective, Surrogate | DualClip) or method.level != "token":
        return None
    if isinstance(clip, FixedClip):
        return "clip" if clip.low == clip.high else "Clip-Higher"
    return KINDS.get(type(clip.divergence if isinstance(clip, Band) else clip))


def looks_of(methods: Mapping[str, Method | ClipRule | str | None]) -> dict[str, Look]:
    """The look of each label: that of its rule, and for a second rule of one kind a further one.

    Args:
        methods: For each label what it stands for; None where that is not known.

    >>> looks = looks_of({"mine": FixedClip(0.2), "a run": None, "another": "Band(KL(), 0.1)"})
    >>> looks["mine"] is LOOKS["clip"], looks["another"] is LOOKS["Band-KL"], looks["a run"] is OTHERS[0]
    (True, True, True)
    """
    found: dict[str, Look] = {}
    for label, method in methods.items():
        look = LOOKS.get(_kind(as_method(method)) or "") if method else None
        if look and look not in found.values():
            found[label] = look
    spare = chain((look for look in (*OTHERS, *LOOKS.values()) if look not in found.values()), cycle(OTHERS))
    return {label: found[label] if label in found else next(spare) for label in methods}


def house_style() -> Any:
    """The style sheet, as a context or a decorator, for the making of a figure and for its saving."""
    return style.context(SHEET)


def add_legend(figure: Figure, columns: int = 5) -> None:
    """One legend for the whole figure, below it, with every label once."""
    handles = {
        str(label): handle
        for axes in figure.axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if handles:
        options: dict[str, Any] = {"loc": "outside lower center", "ncols": min(columns, len(handles))}
        figure.legend(list(handles.values()), list(handles), **options)


def save_figure(figure: Figure, output: Path) -> None:
    """Write a figure in the house's style; if that fails, an earlier file of this name stays as it was.

    Raises:
        ValueError: the suffix is another than .png, .svg and .pdf.
    """
    if output.suffix not in (".png", ".svg", ".pdf"):
        raise InvalidValue(f"{output}: a figure is written as .png, .svg or .pdf")
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = output.with_name(f".unfinished-{output.name}")
    try:
        with house_style():
            figure.savefig(unfinished)
        unfinished.replace(output)
    finally:
        unfinished.unlink(missing_ok=True)
