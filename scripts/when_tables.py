"""Write the two tables of docs/when.md that no report has.

    PYTHONPATH=. python scripts/when_tables.py

The older study of fresh data, with means and with intervals that choose rates anew, which its report has not. And
pass@32 and entropy at matched reward, of all runs of the study of stale data.
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
"""Of the groups of runs, by their reward at the end."""
WORLDS = ("paper", "plenty", "active", "two stages")
"""Those in which something can be learned."""
RULES = {
    "Band": "Band",
    "Band above, clip below": "BandAbove",
    "clip above, Band below": "clip above, Band below",
}


def curves(world: str) -> dict[str, Curve]:
    """The AUC of each arm over rates and seeds."""
    rows: list[dict[str, object]] = []
    for folder in ("network", "network-more"):
        content = json.loads((ROOT / "results" / folder / "results.json").read_text())
        for run in validate_as(list[RunResult], content["runs"], folder):
            of, _, rate = run.experiment.partition(", learning_rate ")
            if of == world:
                rows.append({"arm": run.arm, "rate": float(rate), "seed": run.seed, "AUC": run.metric("AUC")})
    found: dict[str, Curve] = {}
    for arm, mine in pd.DataFrame(rows).groupby("arm"):
        grid = mine.pivot(index="rate", columns="seed", values="AUC")
        found[str(arm)] = Curve([*grid.index], grid.to_numpy())
    return found


def fresh() -> Iterator[str]:
    """What each rule adds on fresh data."""
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


def matched() -> Iterator[str]:
    """pass@32, entropy and number of the runs that end alike, and what Band's pass@32 is above clip 0.2's, by seed."""
    runs = pd.DataFrame([*read_runs(RUNS).values()])
    runs["rule"] = runs["arm"].map(ARMS.get)
    runs["entropy"] = runs["entropy"].str[-1]
    yield "| reward at the end | clip 0.2 | Band or BandAbove | difference |"
    yield "|---|---:|---:|---:|"
    for low, high in pairwise(ENDS):
        alike = runs[(runs["end"] >= low) & (runs["end"] < high)]
        told = alike.groupby("rule").agg({"pass@32": "mean", "entropy": "mean", "seed": "count"})
        cells = ["{:.3f}, {:.2f} ({:.0f})".format(*told.loc[rule]) for rule in ("clip", "Band")]
        by_seed = alike.pivot_table("pass@32", "seed", "rule").dropna()
        gap = student(by_seed["Band"] - by_seed["clip"])
        yield f"| {low} to {high} | {' | '.join(cells)} | {signed(gap)} |"


if __name__ == "__main__":
    write_between_marks(ROOT / "docs/when.md", "fresh", [*fresh()])
    write_between_marks(ROOT / "docs/when.md", "matched", [*matched()])
