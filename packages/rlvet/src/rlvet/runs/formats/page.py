"""Read the tables in a page of Markdown or HTML."""

from __future__ import annotations

from rlvet.runs.formats._format import Format
from rlvet.runs.formats.console import read_text

FORMAT = Format(
    kind="a table",
    patterns=(),
    if_named=("*.md", "*.html", "*.htm"),
    read=read_text,
    example="a table in Markdown or HTML",
    described=(
        "a table with a column of steps, as Markdown, HTML, a box of rich or tabulate, or columns of spaces or tabs"
    ),
    written_by="your own, pandas, an issue",
)
