"""Tables of text for HTML pages and Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A table of texts; the first column names the row."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    prose: bool = False
    """True if the cells are words, which are aligned left and wrapped; False if they are numbers."""

    def markdown(self) -> str:
        """Return the table in Markdown, without the caption."""
        separators = ["---" if column == 0 or self.prose else "---:" for column in range(len(self.header))]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in (self.header, separators, *self.rows))
