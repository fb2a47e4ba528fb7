"""How a result looks in a notebook."""

from collections.abc import Iterable, Sequence
from html import escape


def as_html(said: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A sentence and a table, for ``_repr_html_``.

    >>> as_html("two < three", ["p", "upper"], [[0.08, 2.41]])
    '<p>two &lt; three</p><table><tr><th>p</th><th>upper</th></tr><tr><td>0.08</td><td>2.41</td></tr></table>'
    """
    lines = ["".join(f"<th>{escape(name)}</th>" for name in header)]
    lines += ["".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in rows]
    return f"<p>{escape(said)}</p><table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
