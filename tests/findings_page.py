"""The findings, the table of checks and the example of an output in docs/diagnose.md, which are made from their code.

    python tests/findings_page.py

writes them anew.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from functools import cache
from pathlib import Path

from rlvet.checks.findings import Kind
from rlvet.checks.registry import LOGS
from rlvet.cli.demo import demo_text
from rlvet.records.catalogue import OF_LOGS, OF_RECORDS
from rlvet.records.registry import ADVANTAGES, TOKENS
from rlvet.runs.setup import Setup

PROJECT = Path(__file__).parents[1]
PAGE = PROJECT / "docs/diagnose.md"
BENCHMARK = PROJECT / "benchmarks/doctor"
BEGIN, END = "<!-- findings: begin -->\n", "<!-- findings: end -->\n"
DEMO_BEGIN, DEMO_END = "<!-- demo: begin -->\n", "<!-- demo: end -->\n"
NAMES_BEGIN, NAMES_END = "<!-- names: begin -->\n", "<!-- names: end -->\n"


@cache
def first_lines() -> tuple[Counter[str], Counter[str]]:
    """Return how often each code was the first line on a log of other people, and how often it was right or fair."""
    said: Counter[str] = Counter()
    right: Counter[str] = Counter()
    for entry in json.loads((BENCHMARK / "logs_by_others.json").read_text(encoding="utf-8")):
        said[entry["said"]] += 1
        right[entry["said"]] += entry["said"] in (*entry["right"], *entry["fair"])
    with (BENCHMARK / "forty_logs/results.tsv").open(encoding="utf-8") as results:
        for row in csv.DictReader(results, delimiter="\t"):
            code = row["first line"].partition(":")[0]
            said[code] += 1
            right[code] += row["rating"] in ("right", "fair")
    return said, right


def section(kind: Kind) -> list[str]:
    """Return the lines about a kind of finding: a heading, its meaning and severity, and a line for each other part."""
    said, right = first_lines()
    logs = "log" if said[kind.code] == 1 else "logs"
    trust = (
        f"- **First line on:** {said[kind.code]} {logs} of other people, right or fair on {right[kind.code]}"
    )
    evidence = ", ".join(f"`{name}`" if " " not in name else name for name in kind.evidence)
    first, *others = kind.condition.split("; ")
    measured = [f"- **Measured:** {first}", *(f"    - {part}" for part in others)]
    # A page knows no settings of a run's framework.
    remedy = Setup().fill(kind.remedy) + kind.resumption("before the first onset")
    return [
        f"#### `{kind.code}`",
        "",
        f"*{kind.severity}* · {kind.meaning}",
        "",
        f"- **Do:** {remedy}",
        *measured,
        f"- **Read from:** {evidence}",
        *([trust] if said[kind.code] else []),
        f"- **Source:** {kind.source}",
        "",
    ]


def sections() -> str:
    """Return the sections on all kinds of findings, in two parts, each with links to its findings."""
    lines: list[str] = []
    for title, kinds in (("In a log or a record", OF_LOGS), ("In a record only", OF_RECORDS)):
        links = " · ".join(f"[`{kind.code}`](#{kind.code})" for kind in kinds)
        lines += [f"### {title}", "", links, ""]
        for kind in kinds:
            lines += section(kind)
    return "\n".join(lines)


def table_of_names() -> str:
    """Return the table with the name of each check in the output, and its findings."""
    lines = ["| name in the output | the check | its findings |", "|---|---|---|"]
    first, *others = TOKENS.checks()
    for check in (*LOGS.checks(), first, *ADVANTAGES.checks(), *others):
        codes = ", ".join(f"[`{kind}`](#{kind})" for kind in check.reports)
        lines.append(f"| {check.name} | {check.explained} | {codes} |")
    return "\n".join([*lines, ""])


def example() -> str:
    """Return the output of a demo, without its rows, with an ellipsis for all findings but the first."""
    _, beginning, first, *_, end = demo_text("entropy-collapse").rstrip().split("\n\n")
    text = f"{beginning}\n\n{first}\n…\n{end}"
    lines = [f"    {line}".rstrip() for line in text.splitlines()]
    # An indented block of Markdown stands between empty lines.
    return "\n".join(["", *lines, "", ""])


def page_as_made() -> str:
    """Return the page with the example, the table of names and the findings as they should be."""
    page = PAGE.read_text(encoding="utf-8")
    blocks = (
        (DEMO_BEGIN, example(), DEMO_END),
        (NAMES_BEGIN, table_of_names(), NAMES_END),
        (BEGIN, sections(), END),
    )
    for begin, text, end in blocks:
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = f"{before}{begin}{text}{end}{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(page_as_made(), encoding="utf-8")
