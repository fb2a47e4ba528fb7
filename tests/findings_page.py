"""The table of findings in docs/rlvet/findings.md, which is made from their kinds.

    python tests/findings_page.py

writes it anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlvet.checks.catalogue import OF_LOGS, OF_RECORDS
from rlvet.checks.findings import Kind

PAGE = Path(__file__).parents[1] / "docs/rlvet/findings.md"
BEGIN, END = "<!-- findings: begin -->\n", "<!-- findings: end -->\n"


def table(kinds: Sequence[Kind]) -> list[str]:
    """Return the lines of a table with each kind of finding: its severity, condition, evidence and source."""
    lines = ["| code | meaning | reported if | read from | source |", "|---|---|---|---|---|"]
    for kind in kinds:
        evidence = ", ".join(f"`{name}`" if " " not in name else name for name in kind.evidence)
        cells = (f"`{kind.code}`, {kind.severity}", kind.meaning, kind.condition, evidence, kind.source)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def tables() -> str:
    """Return both tables."""
    lines = [
        "## In a log or a record",
        "",
        *table(OF_LOGS),
        "",
        "## In a record only",
        "",
        *table(OF_RECORDS),
    ]
    return "\n".join([*lines, ""])


def page_with_tables() -> str:
    """Return the page with the tables as they should be."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{tables()}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(), encoding="utf-8")
