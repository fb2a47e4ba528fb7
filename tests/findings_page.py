"""The findings, the table of checks and the example of an output in docs/diagnose.md, which are made from their code.

The counts of right first lines on logs of others, which rlvet prints, are made here too.

    python tests/findings_page.py

writes them anew.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from rlvet.checks.findings import Kind
from rlvet.checks.first_lines import FirstLines
from rlvet.checks.registry import LOGS
from rlvet.cli.demo import demo_text
from rlvet.records.catalogue import OF_LOGS, OF_RECORDS
from rlvet.records.registry import ADVANTAGES, TOKENS
from rlvet.runs.setup import Setup

PROJECT = Path(__file__).parents[1]
BENCHMARK = PROJECT / "benchmarks/doctor"
sys.path.insert(0, str(BENCHMARK))

from log_bench import verdict

PAGE = PROJECT / "docs/diagnose.md"
REPORT = PROJECT / "research/reports/rlvet/report.md"
COUNTS = PROJECT / "packages/rlvet/src/rlvet/data/first_lines.json"
GOOD = ("right", "fair")
"""Ratings of a first line that count."""
BEGIN, END = "<!-- findings: begin -->\n", "<!-- findings: end -->\n"
DEMO_BEGIN, DEMO_END = "<!-- demo: begin -->\n", "<!-- demo: end -->\n"
NAMES_BEGIN, NAMES_END = "<!-- names: begin -->\n", "<!-- names: end -->\n"


def first_lines() -> dict[str, FirstLines]:
    """Count the logs of other people by their first line, which was one of our codes, and its rating."""
    said: Counter[str] = Counter()
    right: Counter[str] = Counter()
    unseen: Counter[str] = Counter()
    for entry in json.loads((BENCHMARK / "logs_by_others.json").read_text(encoding="utf-8")):
        code = entry["said"]
        said[code] += 1
        right[code] += verdict([code], entry["right"], entry["half"], entry["fair"]) in GOOD
        # Logs of the first two batches were in view.
        unseen[code] += entry.get("first") in GOOD
    tried, mended = (_rows_of(name) for name in ("results.tsv", "after_mending.tsv"))
    for first, later in zip(tried, mended, strict=True):
        # A log that was refused has its line since it is read.
        row = later if first["rating"] == "refused" else first
        # Of two codes that rows do not tell apart, the first one is more likely.
        code = re.split(r":| or ", row["first line"])[0]
        said[code] += 1
        right[code] += row["rating"] in GOOD
        unseen[code] += first["rating"] in GOOD
    for code, rating in first_tries():
        is_good = rating.startswith(GOOD)
        said[code] += 1
        right[code] += is_good
        unseen[code] += is_good
    codes = [kind.code for kind in (*OF_LOGS, *OF_RECORDS) if said[kind.code]]
    return {code: FirstLines(said[code], right[code], unseen[code]) for code in sorted(codes)}


def _rows_of(name: str) -> list[dict[str, str]]:
    """Return the rows of a table of first lines on forty logs of others, one a log."""
    with (BENCHMARK / "forty_logs" / name).open(encoding="utf-8") as results:
        return [*csv.DictReader(results, delimiter="\t")]


def first_tries() -> Iterator[tuple[str, str]]:
    """Yield the code and the rating of each first line that is in a table of the report alone."""
    report = REPORT.read_text(encoding="utf-8")
    tables = re.findall(
        r"^\| from \|.*\| the first line at the first try \| \|\n.*\n((?:\|.*\n)+)", report, re.M
    )
    for row in "".join(tables).splitlines():
        first_line, rating = (cell.strip() for cell in row.split("|")[3:5])
        yield re.split(r"[, ]", first_line)[0], rating


def first_lines_as_made() -> str:
    """Return the file of the counts as it should be."""
    counts = {code: counts._asdict() for code, counts in first_lines().items()}
    return f"{json.dumps(counts, indent=1)}\n"


def section(kind: Kind) -> list[str]:
    """Return the lines about a kind of finding: a heading, its meaning and severity, and a line for each other part."""
    counts = first_lines().get(kind.code, FirstLines())
    logs = "log" if counts.logs == 1 else "logs"
    rated = f"right or fair on {counts.right}, {counts.unseen_text}"
    trust = f"- **First line on:** {counts.logs} {logs} of other people, {rated}"
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
        *([trust] if counts.logs else []),
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
    COUNTS.write_text(first_lines_as_made(), encoding="utf-8")
    PAGE.write_text(page_as_made(), encoding="utf-8")
