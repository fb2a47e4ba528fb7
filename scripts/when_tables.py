"""Write the two tables of docs/when.md that are not in a report.

    PYTHONPATH=. python scripts/when_tables.py

The first table is of the older study of fresh data: means, and intervals by a bootstrap that selects the rates anew.
The second table has pass@32 and entropy at matched reward, for all runs of the study of stale data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pandas as pd

from bandpo_lab.file_models import validate_as
from bandpo_lab.study.collect import RunResult
from bandpo_lab.study.statistics import Curve, difference, student
from bandpo_lab.study.tables import signed
from marked import write_between_marks
from studies.staleness import read_runs

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "results/staleness/runs.jsonl.gz"
ARMS = {"clip 0.2": "clip", "Band": "Band", "BandAbove": "Band"}
ENDS = (0.3, 0.5, 0.7, 0.85, 0.95)
"""The limits of the groups of runs, by final reward."""
WORLDS = ("paper", "plenty", "active", "two stages")
"""The settings in which a policy can learn."""
RULES = {
    "Band": "Band",
    "Band above, clip below": "BandAbove",
    "clip above, Band below": "clip above, Band below",
}


def curves(world: str) -> dict[str, Curve]:
    """Return the AUC of each arm in a setting, over rates and seeds."""
    rows: list[dict[str, object]] = []
    for folder in ("network", "network-more"):
        content = json.loads((ROOT / "results" / folder / "results.json").read_text())
        for run in validate_as(list[RunResult], content["runs"], folder):
            run_world, _, rate = run.experiment.partition(", learning_rate ")
            if run_world == world:
                rows.append({"arm": run.arm, "rate": float(rate), "seed": run.seed, "AUC": run.metric("AUC")})
    curves_by_arm: dict[str, Curve] = {}
    for arm, arm_rows in pd.DataFrame(rows).groupby("arm"):
        grid = arm_rows.pivot(index="rate", columns="seed", values="AUC")
        curves_by_arm[str(arm)] = Curve([*grid.index], grid.to_numpy())
    return curves_by_arm


def fresh_data_table() -> Iterator[str]:
    """Yield the table of each rule's gain on fresh data."""
    yield f"| setting | seeds | clip 0.2 | {' | '.join(RULES.values())} |"
    yield "|---|---:|---:|---:|---:|---:|"
    for world in WORLDS:
        by_arm = curves(world)
        clip = by_arm["clip 0.2"]
        seeds = clip.scores.shape[1]
        gains = [
            difference(by_arm[arm].resampled_scores, clip.resampled_scores, [0] * seeds) for arm in RULES
        ]
        cells = " | ".join(map(signed, gains))
        yield f"| {world} | {seeds} | {clip.best_scores.mean():.3f} | {cells} |"


def matched_reward_table() -> Iterator[str]:
    """Yield the table of pass@32, entropy and number of runs by final reward, with Band's gain in pass@32 by seed."""
    runs = pd.DataFrame([*read_runs(RUNS).values()])
    runs["rule"] = runs["arm"].map(ARMS.get)
    runs["entropy"] = runs["entropy"].str[-1]
    yield "| reward at the end | clip 0.2 | Band or BandAbove | difference |"
    yield "|---|---:|---:|---:|"
    for low, high in pairwise(ENDS):
        group = runs[(runs["end"] >= low) & (runs["end"] < high)]
        means = group.groupby("rule").agg({"pass@32": "mean", "entropy": "mean", "seed": "count"})
        cells = ["{:.3f}, {:.2f} ({:.0f})".format(*means.loc[rule]) for rule in ("clip", "Band")]
        by_seed = group.pivot_table("pass@32", "seed", "rule").dropna()
        gap = student(by_seed["Band"] - by_seed["clip"])
        yield f"| {low} to {high} | {' | '.join(cells)} | {signed(gap)} |"


if __name__ == "__main__":
    write_between_marks(ROOT / "docs/when.md", "fresh", [*fresh_data_table()])
    write_between_marks(ROOT / "docs/when.md", "matched", [*matched_reward_table()])
