"""Tables of text, for pages and Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
