"""The tables of refused settings on the pages of the frameworks, made from the lists of the adapters.

`PYTHONPATH=scripts python packages/bandpo/tests/integrations/refused_settings.py` writes them to docs/verl.md and
docs/frameworks.md, each between the marks of its framework.
"""

from pathlib import Path

from bandpo.integrations._settings import REFUSED, RefusedSetting

DOCS = Path(__file__).parents[4] / "docs"
SAME = {"miles": "slime"}
"""Frameworks whose table is that of another one, which has the same settings."""


def page_of(framework: str) -> Path:
    """Return the page that has the table of a framework."""
    return DOCS / ("verl.md" if framework == "verl" else "frameworks.md")


def mark_of(framework: str) -> str:
    """Return the name of the marks around the table of a framework."""
    return f"refused by {SAME.get(framework, framework)}"


def table(framework: str) -> list[str]:
    """Return the lines of a table: the refused settings in a row for each reason."""
    refused = REFUSED[framework]
    settings_of: dict[str, list[str]] = {}
    for entry in refused.settings:
        text = f"`{refused.prefix}{entry.name}`: {_refused_values(entry)}"
        settings_of.setdefault(entry.reason, []).append(text)
    rows = [f"| {'; '.join(settings)} | {reason} |" for reason, settings in settings_of.items()]
    return ["| refused | because |", "|---|---|", *rows]


def _refused_values(entry: RefusedSetting) -> str:
    """Return the refused values of a setting in words."""
    allowed = [f"`{value}`" for value in entry.allowed if value is not None]
    if entry.refused:
        values = " or ".join(f"`{value}`" for value in entry.refused)
    elif allowed:
        values = f"other than {allowed[0]}"
    else:
        values = "any value"
    return f"{values}, beside a whole method" if entry.allowed_beside_rule else values


def main() -> None:
    """Write every table."""
    from marked import write_between_marks

    for framework in REFUSED.keys() - SAME.keys():
        write_between_marks(page_of(framework), mark_of(framework), table(framework))


if __name__ == "__main__":
    main()
