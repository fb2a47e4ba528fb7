"""How the studies' figures look: one style sheet for all, and in a study one colour, line and marker for each arm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import rcParams, style
from matplotlib.figure import Figure

from bandpo.errors import InvalidValue
from bandpo_lab.files import replacing


class Look(NamedTuple):
    """How one arm is drawn."""

    colour: str
    line: str
    marker: str

    def options(self) -> dict[str, Any]:
        """Those of a line."""
        return {"color": self.colour, "linestyle": self.line, "marker": self.marker}


def house_style() -> Any:
    """The style sheet, as a context or a decorator, for the making of a figure and for its saving."""
    return style.context("bandpo_lab.house")


def looks_of(labels: Iterable[str]) -> dict[str, Look]:
    """A look for each label, as the style sheet has them, one after the other."""
    with house_style():
        looks = [Look(*look.values()) for look in rcParams["axes.prop_cycle"]]
    return dict(zip(labels, cycle(looks), strict=False))


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


def spread(values: Sequence[float]) -> str:
    """Of what a panel shows, for its title: ``0.1 to 0.3``."""
    return " to ".join(dict.fromkeys(f"{end(values):.2g}" for end in (min, max))) if values else "–"


def check_figure_path(output: Path) -> None:
    """Check that a figure can be written in the format of a file's suffix.

    Raises:
        ValueError: the suffix is another than .png, .svg and .pdf.
    """
    if output.suffix not in (".png", ".svg", ".pdf"):
        raise InvalidValue(f"{output}: a figure is written as .png, .svg or .pdf")


def save_figure(figure: Figure, output: Path) -> None:
    """Write a figure in the house's style; if that fails, an earlier file of this name stays as it was.

    Raises:
        ValueError: the suffix is another than .png, .svg and .pdf.
    """
    check_figure_path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    with house_style(), replacing(output) as unfinished:
        figure.savefig(unfinished)
