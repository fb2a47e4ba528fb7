"""A report: prose, tables and figures, as one self-contained HTML page or as Markdown with pictures beside it."""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined

from bandpo.errors import InvalidValue
from bandpo_lab.files import replacing
from bandpo_lab.style import plot_style, save_figure
from bandpo_lab.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Picture:
    """A figure, what it shows in a sentence, and the name of its file."""

    name: str
    figure: Figure
    caption: str

    def data_uri(self) -> str:
        """As SVG that stands in the page itself."""
        buffer = io.BytesIO()
        with plot_style():
            self.figure.savefig(buffer, format="svg", metadata={"Date": None})
        return f"data:image/svg+xml;base64,{b64encode(buffer.getvalue()).decode()}"


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
            raise InvalidValue(f"{path}: a report is written as .html or .md")
        path.parent.mkdir(parents=True, exist_ok=True)
        written = [path]
        if path.suffix == ".md":
            pictures = (p for section in self.sections for p in section.content if isinstance(p, Picture))
            for picture in pictures:
                written.append(path.parent / f"{path.stem}-{picture.name}.png")
                save_figure(picture.figure, written[-1])
        environment = Environment(
            loader=PackageLoader("bandpo_lab"),
            autoescape=path.suffix == ".html",  # noqa: S701  (the other is Markdown)
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        environment.tests["of_kind"] = lambda value, kind: type(value).__name__ == kind
        text = environment.get_template(f"report{path.suffix}.jinja").render(page=self, stem=path.stem)
        with replacing(path) as unfinished:
            unfinished.write_text(text, encoding="utf-8")
        return written
