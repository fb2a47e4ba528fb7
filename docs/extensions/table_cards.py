"""Gives each cell of a page's tables the name of its column, so that a phone shows each row as a card."""

import re
from html import escape, unescape
from typing import Any

TABLE = re.compile(r"<table>\s*<thead>(.*?)</thead>(.*?)</table>", re.DOTALL)
HEADER_CELL = re.compile(r"<th\b[^>]*>(.*?)</th>", re.DOTALL)
ROW = re.compile(r"<tr>.*?</tr>", re.DOTALL)
CELL = re.compile(r"<td\b")


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Add the attribute ``data-label`` to each cell of a page's tables (an event of mkdocs)."""
    return TABLE.sub(_with_labels, html)


def _with_labels(table: re.Match[str]) -> str:
    """Return a table whose cells have the names of their columns."""
    names = [unescape(re.sub(r"<[^>]+>", "", cell)).strip() for cell in HEADER_CELL.findall(table[1])]

    def label(row: re.Match[str]) -> str:
        cells = iter(names)
        return CELL.sub(lambda _: f'<td data-label="{escape(next(cells, ""))}"', row[0])

    return f"<table>\n<thead>{table[1]}</thead>{ROW.sub(label, table[2])}</table>"
