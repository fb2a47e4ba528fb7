"""Write the logs of ``rlvet demo``: for each finding of a log, a small simulated run that has it.

    PYTHONPATH=packages/rlvet/tests:tests:benchmarks/doctor python benchmarks/doctor/demo_logs.py

Each is the shortest of some seeds of a scenario of ``benchmarks/doctor/log_scenarios.py``, of one that has it first if
there is any, with its numbers rounded. The file is ``packages/rlvet/src/rlvet/data/demos.json.gz``.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from log_scenarios import SCENARIOS, Course, Rows, healthy

from rlvet.checks.findings import Kind
from rlvet.checks.log_checks import log_findings
from rlvet.checks.registry import LOGS
from rlvet.runs.logs import Log
from rlvet.runs.setup import Setup

FILE = Path(__file__).parents[2] / "packages/rlvet/src/rlvet/data/demos.json.gz"

SEEDS = range(1, 21)
"""The seeds of which the shortest log is taken."""

PLACES = 4
"""Number of places of a value."""


def rounded(rows: Rows) -> Rows:
    """Return rows with rounded values; None for those that are not finite, as a log in JSON has them."""
    return [
        {key: value if value is None else float(f"{value:.{PLACES}g}") for key, value in row.items()}
        for row in rows
    ]


def place_of(rows: Rows, kind: Kind) -> int | None:
    """Return the place of a finding among those of a log; None if the log does not have it."""
    kinds = [one.kind for one in log_findings(Log.of(rows).rows, Setup()) if one.kind is not None]
    return kinds.index(kind) if kind in kinds else None


def low_entropy(seed: int) -> Rows:
    """Return the log of a run with short answers of low entropy, whose reward does not rise."""
    course = Course(seed)
    course.steps = 60
    course.curves |= {"reward": lambda t: 0.4, "completions/mean_length": lambda t: 30.0}
    return [row | {"entropy": 0.08 * row["entropy"]} for row in course.rows()]


def without_clip(seed: int) -> Rows:
    """Return a healthy log in which no token was clipped."""
    return [row | {"clip_ratio/region_mean": 0.0} for row in healthy(seed, "line", 60)]


def without_loss(seed: int) -> Rows:
    """Return a healthy log whose loss is no longer logged from step 50 on."""
    rows = healthy(seed, "line", 60)
    return [row | ({"loss": 0.02 * row["grad_norm"]} if row["step"] < 50 else {}) for row in rows]


def old_data(seed: int) -> Rows:
    """Return a healthy log whose data is six updates old."""
    return [row | {"staleness": 6.0 + 0.1 * (row["step"] % 3)} for row in healthy(seed, "line", 60)]


def longer_at_the_end(seed: int) -> Rows:
    """Return a healthy log whose answers are longer in the last tenth."""
    rows = healthy(seed, "line", 120)
    key = "completions/mean_length"
    return [row | {key: row[key] * (1.8 if row["step"] > 108 else 1)} for row in rows]


OTHERS = {
    "low-entropy": ("low entropy from the start", low_entropy),
    "on-policy": ("no token is clipped", without_clip),
    "metric-lost": ("the loss is no longer logged", without_loss),
    "stale": ("data is six updates old", old_data),
    "late-change": ("longer answers at the end", longer_at_the_end),
}
"""Runs with findings that no scenario shows by a log of metrics alone."""


def demo_of(kind: Kind) -> dict[str, Any] | None:
    """Return the demo of a finding; None if no scenario has it first."""
    candidates = [(name, SCENARIOS[name].rows) for name in kind.scenarios if name in SCENARIOS]
    if kind.code in OTHERS:
        candidates.append(OTHERS[kind.code])
    found = []
    for name, simulate in candidates:
        for seed in SEEDS:
            rows = rounded(simulate(seed))
            place = place_of(rows, kind)
            if place is not None:
                found.append((place, len(rows), seed, name, rows))
    if not found:
        return None
    _, _, seed, name, rows = min(found, key=lambda one: one[:3])
    keys = list(dict.fromkeys(key for row in rows for key in row))
    columns = {key: [row.get(key, "absent") for row in rows] for key in keys}
    return {"scenario": name, "seed": seed, "columns": columns}


def main() -> None:
    demos = {}
    for kind in LOGS.kinds():
        demo = demo_of(kind)
        if demo is None:
            print(f"no demo of {kind.code}: {kind.no_scenario or kind.scenarios}")
        else:
            demos[kind.code] = demo
    text = json.dumps(demos, separators=(",", ":"))
    # Without a time of writing, so that the file is the same each time.
    FILE.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    print(f"{len(demos)} demos in {FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
