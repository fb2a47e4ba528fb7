"""The tables of docs/diagnose.md, which are made from the kinds of findings and from the checks.

    python tests/findings_page.py

writes them anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlvet.checks.catalogue import OF_LOGS, OF_RECORDS
from rlvet.checks.findings import Kind
from rlvet.checks.registry import ADVANTAGES, LOGS, TOKENS

PAGE = Path(__file__).parents[1] / "docs/diagnose.md"
BEGIN, END = "<!-- findings: begin -->\n", "<!-- findings: end -->\n"
NAMES_BEGIN, NAMES_END = "<!-- names: begin -->\n", "<!-- names: end -->\n"


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


def table_of_names() -> str:
    """Return the table with the name of each check in the output, and its findings."""
    lines = ["| name in the output | the check | its findings |", "|---|---|---|"]
    first, *others = TOKENS.checks()
    for check in (*LOGS.checks(), first, *ADVANTAGES.checks(), *others):
        codes = ", ".join(f"`{kind}`" for kind in check.reports)
        lines.append(f"| {check.name} | {check.explained} | {codes} |")
    return "\n".join([*lines, ""])


def page_with_tables() -> str:
    """Return the page with the tables as they should be."""
    page = PAGE.read_text(encoding="utf-8")
    for begin, text, end in ((NAMES_BEGIN, table_of_names(), NAMES_END), (BEGIN, tables(), END)):
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = f"{before}{begin}{text}{end}{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(), encoding="utf-8")
