"""A report: prose, tables and figures, as one self-contained HTML page or as Markdown with pictures beside it."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from jinja2 import Environment, PackageLoader, StrictUndefined

from bandpo.diagnostics.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_INK = "#0b0c0d"
"""The colour of axes and letters in figures; a page replaces it by the reader's own text colour."""
FIGURE_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "bandpo",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
}


@dataclass(frozen=True)
class Table:
    """Rows of text under a header; the first column names the row."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    prose: bool = False
    """Whether the cells hold words, which are set flush left and broken over lines, rather than numbers."""

    def markdown(self) -> str:
        """As a Markdown table, without the caption."""
        rules = ["---" if k == 0 or self.prose else "---:" for k in range(len(self.header))]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in (self.header, rules, *self.rows))


@dataclass(frozen=True)
class Picture:
    """A figure, what it shows in a sentence, and the name of its file."""

    name: str
    figure: Figure
    caption: str


@dataclass(frozen=True)
class Verbatim:
    """Text to be shown as it is, folded away on a page."""

    title: str
    text: str


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it, in order: paragraphs (str), tables, pictures, verbatim text."""

    title: str
    content: Sequence[str | Table | Picture | Verbatim]


@dataclass(frozen=True)
class Page:
    """A whole report."""

    title: str
    lead: Sequence[str]
    sections: Sequence[Section] = field(default_factory=list)

    def save(self, path: Path) -> list[Path]:
        """Write the report, as its suffix says.

        Args:
            path: ``….html`` for one self-contained page, ``….md`` for Markdown with its PNGs in the same folder.

        Returns:
            All files written.

        Raises:
            ValueError: another suffix.
        """
        if path.suffix not in (".html", ".md"):
            raise ValueError(f"{path}: a report is written as .html or .md")
        path.parent.mkdir(parents=True, exist_ok=True)
        written = [path]
        if path.suffix == ".md":
            for picture in self._pictures():
                written.append(path.parent / f"{path.stem}-{picture.name}.png")
                with replacing(written[-1]) as unfinished:
                    picture.figure.savefig(unfinished, dpi=110, facecolor="white")
        environment = Environment(
            loader=PackageLoader("bandpo.diagnostics"),
            autoescape=path.suffix == ".html",  # noqa: S701  (the other is Markdown)
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        environment.globals["svg"] = svg
        environment.tests["of_kind"] = lambda value, kind: type(value).__name__ == kind
        text = environment.get_template(f"report{path.suffix}.jinja").render(page=self, stem=path.stem)
        with replacing(path) as unfinished:
            unfinished.write_text(text, encoding="utf-8")
        return written

    def _pictures(self) -> list[Picture]:
        return [part for section in self.sections for part in section.content if isinstance(part, Picture)]


def svg(picture: Picture) -> str:
    """A figure as inline SVG that takes the page's text colour, so that it reads in light and in dark.

    Every id is made the figure's own: several SVGs share one page.
    """
    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "bandpo"}):
        picture.figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text: Any = buffer.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(
        r'(<svg[^>]*?) width="[^"]*" height="[^"]*"|(<svg[^>]*?) height="[^"]*" width="[^"]*"',
        r"\1\2",
        text,
        count=1,
    )
    text = re.sub(r'width="[\d.]+pt"|height="[\d.]+pt"', "", text, count=2)
    return re.sub(r'((?:xlink:)?href="#|url\(#|id=")', rf"\1{picture.name}-", text)
