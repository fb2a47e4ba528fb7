"""The table of logs in docs/diagnose.md, which is made from the formats of logs.

    python tests/reading_page.py

writes it anew.
"""

from __future__ import annotations

from pathlib import Path

from rlvet.runs.formats import FORMATS

PAGE = Path(__file__).parents[1] / "docs/diagnose.md"
BEGIN, END = "<!-- formats: begin -->\n", "<!-- formats: end -->\n"


def page_with_table() -> str:
    """Return the page with the table as it should be."""
    lines = ["| it reads | written by |", "|---|---|"]
    lines += [f"| {known.described} | {known.written_by} |" for known in FORMATS.values()]
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return "\n".join([before + BEGIN + lines[0], *lines[1:], END + after])


if __name__ == "__main__":
    PAGE.write_text(page_with_table(), encoding="utf-8")
