"""The HTML of results in notebooks."""

from collections.abc import Iterable, Sequence
from html import escape


def as_html(caption: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a caption and a table as HTML, for ``_repr_html_``.

    >>> as_html("two < three", ["p", "upper"], [[0.08, 2.41]])
    '<p>two &lt; three</p><table><tr><th>p</th><th>upper</th></tr><tr><td>0.08</td><td>2.41</td></tr></table>'
    """
    lines = ["".join(f"<th>{escape(name)}</th>" for name in header)]
    for row in rows:
        lines.append("".join(f"<td>{escape(str(cell))}</td>" for cell in row))
    table = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<p>{escape(caption)}</p><table>{table}</table>"
