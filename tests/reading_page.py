"""The logs and quantities in docs/diagnose.md, which are made from the formats of logs and from the known quantities.

    python tests/reading_page.py

writes them anew.
"""

from __future__ import annotations

from pathlib import Path

from rlvet.runs.formats import FORMATS
from rlvet.runs.quantities import EVALUATION, QUANTITIES

PAGE = Path(__file__).parents[1] / "docs/diagnose.md"


def table_of_formats() -> str:
    """Return the table of the logs that are read."""
    lines = ["| it reads | written by |", "|---|---|"]
    lines += [f"| {known.described} | {known.written_by} |" for known in FORMATS.values()]
    return "\n".join([*lines, ""])


def list_of_quantities() -> str:
    """Return the quantities to which a key can be mapped."""
    return ", ".join(f"`{name}`" for name in (*QUANTITIES, EVALUATION)) + "\n"


def page_with_table() -> str:
    """Return the page with the table and the list as they should be."""
    page = PAGE.read_text(encoding="utf-8")
    for name, text in (("formats", table_of_formats()), ("quantities", list_of_quantities())):
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = f"{before}{begin}{text}{end}{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(page_with_table(), encoding="utf-8")
