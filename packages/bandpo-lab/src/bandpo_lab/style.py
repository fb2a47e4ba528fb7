"""The style of the studies' figures: one style sheet for all, and one colour, line and marker for each arm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import rcParams, style
from matplotlib.figure import Figure

from bandpo_lab.errors import InvalidValue
from bandpo_lab.files import replacing


class LineStyle(NamedTuple):
    """The colour, line and marker of one arm."""

    colour: str
    line: str
    marker: str

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments for `Axes.plot`."""
        return {"color": self.colour, "linestyle": self.line, "marker": self.marker}


def plot_style() -> Any:
    """Return the style sheet as a context manager or decorator, for creating a figure and for saving it."""
    return style.context("bandpo_lab.bandpo")


def line_styles(labels: Iterable[str]) -> dict[str, LineStyle]:
    """Return a line style for each label, in the order of the style sheet's cycle."""
    with plot_style():
        styles = [LineStyle(*properties.values()) for properties in rcParams["axes.prop_cycle"]]
    return dict(zip(labels, cycle(styles), strict=False))


def add_legend(figure: Figure, columns: int = 5) -> None:
    """Add one legend below the whole figure, with every label once."""
    handles = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles[str(label)] = handle
    if handles:
        options: dict[str, Any] = {"loc": "outside lower center", "ncols": min(columns, len(handles))}
        figure.legend(list(handles.values()), list(handles), **options)


def spread(values: Sequence[float]) -> str:
    """Return the range of values as a text for the title of a panel, such as ``0.1 to 0.3``."""
    if not values:
        return "–"
    low = f"{min(values):.2g}"
    high = f"{max(values):.2g}"
    return low if low == high else f"{low} to {high}"


def check_figure_path(output: Path) -> None:
    """Check that a figure can be written in the format of a file's suffix.

    Raises:
        ValueError: The suffix is not .png, .svg or .pdf.
    """
    if output.suffix not in (".png", ".svg", ".pdf"):
        raise InvalidValue(f"{output}: a figure is written as .png, .svg or .pdf")


def save_figure(figure: Figure, output: Path) -> None:
    """Write a figure in the style of `plot_style`; if that fails, an existing file of this name is not changed.

    Raises:
        ValueError: The suffix is not .png, .svg or .pdf.
    """
    check_figure_path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    with plot_style(), replacing(output) as unfinished:
        figure.savefig(unfinished)
