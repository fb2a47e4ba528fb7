"""The command `rlvet demo`."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Annotated, Any

import typer

ABSENT = "absent"
"""What a column has in place of a value that a row does not log."""

SHOWN_ROWS = 6
"""Number of log steps that are shown."""

SHOWN_METRICS = 4
"""Largest number of metrics that are shown."""


def load_demos() -> Mapping[str, Mapping[str, Any]]:
    """Return the simulated runs by the code of a finding: ``scenario``, and ``columns`` of values by key."""
    file = resources.files("rlvet") / "data" / "demos.json.gz"
    return json.loads(gzip.decompress(file.read_bytes()))


def rows_of(demo: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a simulated run as they were logged.

    >>> rows_of({"columns": {"step": [1, 2], "kl": [0.5, "absent"]}})
    [{'step': 1, 'kl': 0.5}, {'step': 2}]
    """
    columns = demo["columns"]
    return [
        {key: value for key, value in zip(columns, values, strict=True) if value != ABSENT}
        for values in zip(*columns.values(), strict=True)
    ]


def demo_text(code: str) -> str:
    """Return some rows of the simulated run that has a finding, and its diagnosis.

    Args:
        code: The code of the finding.

    Raises:
        ValueError: if there is no such finding, or no run for it.
    """
    from rlvet.checks.diagnosis import Diagnosis
    from rlvet.checks.log_checks import log_findings
    from rlvet.checks.registry import LOGS
    from rlvet.errors import InvalidValue, did_you_mean
    from rlvet.runs.logs import Log

    demos = load_demos()
    if code not in demos:
        kinds = {kind.code: kind for kind in LOGS.kinds()}
        if code not in kinds:
            raise InvalidValue(
                f"no finding of logs is called {code!r}; rlvet demo lists them{did_you_mean(code, kinds)}"
            )
        raise InvalidValue(f"{code} has no demo, as a log alone does not show it: {kinds[code].meaning}")
    demo = demos[code]
    log = Log.of(rows_of(demo), f"a simulated run: {demo['scenario']}")
    findings = log_findings(log.rows)
    diagnosis = Diagnosis(findings, rows=log.rows, log=log)
    quantities = next(one.quantities for one in findings if one.code == code)
    return f"{_table(log.rows, quantities)}\n\n{diagnosis.as_text()}"


def _table(rows: Sequence[Mapping[str, float]], quantities: Sequence[str]) -> str:
    """Return a table of the first and the last row, and some between them."""
    from rlvet._numbers import format_number

    logged = dict.fromkeys(key for row in rows for key in row)
    wanted = (*quantities, "reward", "kl", "entropy", "grad_norm")
    keys = ["step", *[key for key in dict.fromkeys(wanted) if key in logged][:SHOWN_METRICS]]
    last = len(rows) - 1
    shown = [rows[round(place * last / (SHOWN_ROWS - 1))] for place in range(SHOWN_ROWS)]
    cells = [[format_number(row[key]) if key in row else "-" for key in keys] for row in shown]
    widths = [max(map(len, column)) for column in zip(keys, *cells, strict=True)]
    lines = [keys, *cells]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
    )


def list_text() -> str:
    """Return the findings with a simulated run, a line for each: code, severity and meaning."""
    from rlvet.checks.registry import LOGS

    demos = load_demos()
    kinds = [kind for kind in LOGS.kinds() if kind.code in demos]
    width = max(len(kind.code) for kind in kinds)
    return "\n".join(f"{kind.code.ljust(width)}  {kind.severity.ljust(4)}  {kind.meaning}" for kind in kinds)


def demo_command(
    name: Annotated[
        str | None,
        typer.Argument(help="The name of a finding; without one, they are listed.", show_default=False),
    ] = None,
) -> None:
    """Show a finding on a small simulated run: some rows of its log, and the diagnosis.

    Exits with 0, and with 2 if there is no such finding.
    """
    print(list_text() if name is None else demo_text(name))
