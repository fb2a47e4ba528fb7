"""The page of the study of a pretrained model: its predictions first, then what `bandpo report` says.

    bandpo study studies/pretrained.yaml --workers 1 --output-dir results/pretrained
    python -m studies.pretrained results/pretrained

The predictions stand in pretrained-predictions.md.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bandpo.audit.interval import student
from bandpo.audit.tables import Table
from bandpo_lab.page import Page, Section
from bandpo_lab.study.execute import read_results
from bandpo_lab.study.report import study_page
from bandpo_lab.study.statistics import Results
from bandpo_lab.study.tables import signed
from studies.network import SMALLEST, verdict
from studies.network_report import save_page

METRICS = ("AUC", "mean entropy", "pass@8")


def whole_seeds(content: Mapping[str, Any]) -> dict[str, Any]:
    """The results without seeds of which a run is missing: these are not looked at."""
    found = Results.from_file(content)
    ended = {(run.experiment, run.arm, run.seed) for run in found.runs}
    missing = {
        run.seed for run in found.study.reported({}) if (run.experiment, run.arm, run.seed) not in ended
    }
    return {**content, "runs": [run for run in content["runs"] if run["seed"] not in missing]}


def pairs(found: Results, arm: str, metric: str) -> list[float]:
    """An arm minus the baseline, for each rate and each seed."""
    return [
        gap
        for experiment in found.study.experiments
        for gap in found.gaps(experiment, arm, found.study.baseline, metric).values()
    ]


def pretrained_page(content: Mapping[str, Any]) -> Page:
    """The whole report, of the seeds that ended whole."""
    whole = whole_seeds(content)
    found, rows = Results.from_file(whole), []
    baseline = found.study.baseline
    compared = [
        (arm, metric, pairs(found, arm, metric))
        for arm in found.study.arms
        for metric in METRICS
        if arm != baseline
    ]
    for arm, metric, apart in compared:
        if len(apart) > 1:
            interval = student(apart)
            # Pairs that are all alike, as coarse scores may be, have no interval and decide nothing.
            said = verdict(interval, "equal") if len(set(apart)) > 1 else "undecided"
            rows.append([arm, metric, signed(interval), said])
    page = study_page(whole)
    section = Section(
        "Predictions",
        [
            f"No arm was expected to differ from {baseline} by {SMALLEST} or more. This was written on 22 "
            "November 2026, before any two arms could be compared. You have our word for it: the commits of that day, "
            "of the predictions and of the code that ran, did not reach this repository. git has both since the "
            "results.",
            Table(
                ["arm", "metric", f"difference from {baseline}", "verdict"],
                rows,
                f"Means over {len(compared[0][-1])} pairs of runs with equal seed and rate, with Student's interval of "
                "95 % over the pairs, which are taken as independent.",
                prose=True,
            ),
        ],
    )
    counts = ", ".join(f"{count} {said}" for said, count in Counter(row[-1] for row in rows).items())
    lead = f"Of its {len(rows)} predictions: {counts}." if rows else "No two runs can be compared yet."
    return replace(page, lead=[page.lead[0], lead, *page.lead[1:]], sections=[section, *page.sections])


def main(arguments: Sequence[str] | None = None) -> None:
    """Write ``report.md`` and ``report.html`` beside a ``results.json``."""
    [folder] = map(Path, sys.argv[1:] if arguments is None else arguments)
    save_page(pretrained_page(read_results(folder)), folder)


if __name__ == "__main__":
    main()
