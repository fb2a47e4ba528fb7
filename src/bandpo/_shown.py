"""How a result looks in a notebook: a table, and a sentence above it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def as_html(said: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """What ``_repr_html_`` returns.

    >>> as_html("two < three", ["p", "upper"], [["0.08", "2.41"]])
    '<p>two &lt; three</p><table><tr><th>p<th>upper<tr><td>0.08<td>2.41</table>'
    """
    lines = ["".join(f"<td>{escape(str(cell))}" for cell in row) for row in rows]
    heads = "".join(f"<th>{escape(name)}" for name in header)
    return f"<p>{escape(said)}</p><table><tr>{heads}{''.join(f'<tr>{line}' for line in lines)}</table>"
