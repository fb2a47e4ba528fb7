"""The tables of docs/lint.md, which are made from the rules and from the quantities that `rlvet diff` compares.

    python tests/lint_page.py

writes them anew.
"""

from __future__ import annotations

from pathlib import Path

from rlvet.compare.vocabulary import EFFECTS, QUANTITIES
from rlvet.lint.framework import Framework
from rlvet.lint.known import FRAMEWORKS
from rlvet.lint.names import Names, names_of

PAGE = Path(__file__).parents[1] / "docs/lint.md"


def table() -> str:
    """Return the rules of each framework, with the settings that they read and their sources."""
    lines: list[str] = []
    for framework in FRAMEWORKS.values():
        names = names_of(framework)
        lines += [
            "",
            f"### {framework.title}",
            "",
            f"Defaults are those of {framework.version}. {_counts(names)}",
            "",
        ]
        lines += ["| rule | what is wrong |", "|---|---|"]
        settings = _settings(framework)
        for rule in framework.rules:
            reads = ", ".join(f"`{name}`" for name in rule.reads.values() if name in settings)
            source = rule.source.replace("_", "\\_")
            parts = (f"**{rule.title}**", f"*Reads:* {reads}", f"*Source:* {source}")
            lines.append(f"| `{rule.id}`, {rule.severity} | {'<br>'.join(parts)} |")
    return "\n".join([*lines[1:], ""])


def _counts(names: Names) -> str:
    """Return the sentence on the known names of settings; empty if there is no list."""
    if not names.version:
        return ""
    version = names.version.removeprefix("of ")
    return f"The known names are those of {version}, and {len(names.earlier)} of earlier versions."


def _settings(framework: Framework) -> set[str]:
    """Return the names that are settings, and not what the readers find out otherwise."""
    others = {"program", "model.adapter", "orchestrator.train.source.group_size"}
    return set(framework.defaults) - others


def table_of_quantities() -> str:
    """Return what is compared of two configurations, by its effect."""
    lines = ["| effect | compared |", "|---|---|"]
    for effect in EFFECTS:
        names = ", ".join(quantity.name for quantity in QUANTITIES if quantity.effect == effect)
        lines.append(f"| {effect} | {names} |")
    return "\n".join([*lines, ""])


def page_with_tables() -> str:
    """Return the page with the tables as they should be."""
    page = PAGE.read_text(encoding="utf-8")
    for name, text in (("rules", table()), ("quantities", table_of_quantities())):
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = f"{before}{begin}{text}{end}{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(), encoding="utf-8")
