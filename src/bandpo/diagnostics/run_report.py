"""The report of any runs of TRL or verl: curves, the audit, its verdict, and the settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bandpo.diagnostics.figures import audit_figure, training_curves
from bandpo.diagnostics.findings import all_findings
from bandpo.diagnostics.logs import read_log
from bandpo.diagnostics.page import Page, Picture, Section, Verbatim
from bandpo.diagnostics.runs import known_run
from bandpo.diagnostics.summary import summarize
from bandpo.diagnostics.tables import Table, clip_table

MARKS = {True: "yes", False: "no", None: "cannot be told"}


def run_page(paths: Sequence[Path]) -> Page:
    """A page on one or more runs, side by side.

    Args:
        paths: What `bandpo.diagnostics.logs.read_log` reads.

    Raises:
        ValueError: one of them is no log of a run.
    """
    logs = {str(path): read_log(path) for path in paths}
    found = {label: summarize(rows) for label, rows in logs.items()}
    known = {label: known_run(Path(label), rows) for label, rows in logs.items()}
    methods = {label: run.method for label, run in known.items()}

    def numbers(name: str, values: Sequence[float | None], form: str = ".3f") -> list[str]:
        return [name, *("–" if value is None else format(value, form) for value in values)]

    each = found.values()
    rows = [
        numbers("optimiser steps", [d.steps for d in each], "d"),
        numbers("reward, first tenth", [d.reward and d.reward[0] for d in each]),
        numbers("reward, last tenth", [d.reward and d.reward[1] for d in each]),
        numbers("entropy, first tenth", [d.entropy and d.entropy[0] for d in each]),
        numbers("entropy, last tenth", [d.entropy and d.entropy[1] for d in each]),
        *clip_table(found).rows,
    ]
    verdicts = [
        [
            label,
            finding.question,
            MARKS[finding.ok],
            finding.answer + (f"; try {finding.try_next}" if finding.try_next else ""),
        ]
        for label, summary in found.items()
        for finding in all_findings(summary, known[label])
    ]
    pictures = [
        Picture("curves", training_curves(logs, methods), "Reward, entropy and clip rates over training."),
        Picture(
            "audit",
            audit_figure(logs, methods),
            "Entropy; the clip by old probability; what it blocks of rare tokens.",
        ),
    ]
    settings: list[Any] = [
        Verbatim(f"{path / 'config.yaml'}", (path / "config.yaml").read_text())
        for path in paths
        if (path / "config.yaml").is_file()
    ]
    return Page(
        "What the clip did" if len(logs) > 1 else f"What the clip did to {next(iter(logs))}",
        [],
        [
            Section("Verdict", [Table(["run", "question", "in order", "answer"], verdicts, prose=True)]),
            Section("Curves", pictures),
            Section("Numbers", [Table(["", *logs], rows)]),
            Section("Settings", settings or ["No config.yaml lies beside these logs."]),
        ],
    )
