"""Reports of text, tables and figures, written as one self-contained HTML page or as Markdown with PNG files."""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined

from bandpo_lab.errors import InvalidValue
from bandpo_lab.files.writing import replacing
from bandpo_lab.output.style import plot_style, save_figure
from bandpo_lab.output.tables import Table
from rlvet.report.palette import css_variables

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Picture:
    """A figure with a caption and the name of its file."""

    name: str
    figure: Figure
    caption: str

    def data_uri(self) -> str:
        """Return the figure as an SVG in a data URI, for an HTML page."""
        buffer = io.BytesIO()
        with plot_style():
            self.figure.savefig(buffer, format="svg", metadata={"Date": None})
        return f"data:image/svg+xml;base64,{b64encode(buffer.getvalue()).decode()}"


@dataclass(frozen=True)
class Verbatim:
    """A preformatted text, which is collapsed on a page."""

    title: str
    text: str


@dataclass(frozen=True)
class Section:
    """A heading and its content in order: paragraphs (str), tables, pictures and preformatted texts."""

    title: str
    content: Sequence[str | Table | Picture | Verbatim]


@dataclass(frozen=True)
class Page:
    """A whole report."""

    title: str
    lead: Sequence[str]
    sections: Sequence[Section] = field(default_factory=list)

    def save(self, path: Path) -> list[Path]:
        """Write the report in the format of the path's suffix.

        Args:
            path: ``….html`` for one self-contained page, ``….md`` for Markdown with PNG files in the same folder.

        Returns:
            All files that were written, the report first.

        Raises:
            ValueError: The path has another suffix.
        """
        if path.suffix not in (".html", ".md"):
            raise InvalidValue(f"{path}: a report is written as .html or .md")
        path.parent.mkdir(parents=True, exist_ok=True)
        files = [path]
        if path.suffix == ".md":
            for picture in self._pictures():
                file = path.parent / f"{path.stem}-{picture.name}.png"
                save_figure(picture.figure, file)
                files.append(file)
        environment = Environment(
            loader=PackageLoader("bandpo_lab.output"),
            autoescape=path.suffix == ".html",  # noqa: S701  (the other is Markdown)
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        environment.tests["of_kind"] = lambda value, kind: type(value).__name__ == kind
        template = environment.get_template(f"report{path.suffix}.jinja")
        text = template.render(page=self, stem=path.stem, colours=css_variables())
        with replacing(path) as unfinished:
            unfinished.write_text(text, encoding="utf-8")
        return files

    def _pictures(self) -> list[Picture]:
        pictures: list[Picture] = []
        for section in self.sections:
            pictures += [item for item in section.content if isinstance(item, Picture)]
        return pictures
