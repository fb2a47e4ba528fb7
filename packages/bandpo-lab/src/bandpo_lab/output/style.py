"""The style of the studies' figures: one style sheet for all, and one colour, line and marker for each clip rule.

The colours are those of `rlvet.report.palette`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler

from bandpo_lab.errors import InvalidValue
from bandpo_lab.files.writing import replacing
from rlvet.report.palette import COLOURS, OTHERS, colours_of


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
    colours = [COLOURS[name].light for name in OTHERS]
    return style.context(["bandpo_lab.output.bandpo", {"axes.prop_cycle": cycler("color", colours)}])


def line_styles(labels: Iterable[str]) -> dict[str, LineStyle]:
    """Return a line style for each label: that of its clip rule, or one that is no rule's.

    Labels of one rule have its colour, and lines and markers that differ.
    """
    uses: Counter[str] = Counter()
    styles: dict[str, LineStyle] = {}
    for label, name in colours_of(labels).items():
        colour = COLOURS[name]
        variants = [COLOURS[other] for other in OTHERS if COLOURS[other].line != colour.line]
        variant = [colour, *variants][uses[name] % (1 + len(variants))]
        styles[label] = LineStyle(colour.light, variant.line, variant.marker)
        uses[name] += 1
    return styles


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
