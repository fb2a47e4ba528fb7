"""Write the two tables of docs/when.md that no report has.

    PYTHONPATH=. python scripts/when_tables.py

The older study of fresh data, with means, interquartile means, and intervals that choose rates anew, which its report
has not. And pass@32 and entropy at matched reward, of all runs of the study of stale data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np

from bandpo.audit.interval import bootstrap
from bandpo_lab.file_models import checked
from bandpo_lab.study.collect import RunResult
from bandpo_lab.study.statistics import Curve, difference, interquartile_mean
from bandpo_lab.study.tables import signed
from marked import write_between_marks
from studies.staleness import read_runs

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "results/staleness/runs.jsonl.gz"
ARMS = {"clip 0.2": ("clip 0.2",), "Band or BandAbove": ("Band", "BandAbove")}
ENDS = (0.3, 0.5, 0.7, 0.85, 0.95)
"""Of the groups of runs, by their reward at the end."""
WORLDS = {"paper": "1 × 4", "plenty": "4 × 4", "active": "4 × 4", "two stages": "4 × 4"}
"""Those in which something can be learned, and their epochs × minibatches."""
RULES = {
    "Band": "Band",
    "Band above, clip below": "BandAbove",
    "clip above, Band below": "clip above, Band below",
}


def curves(world: str) -> dict[str, Curve]:
    """The AUC of each arm over rates and seeds."""
    found: dict[str, dict[float, dict[int, float]]] = {}
    for folder in ("network", "network-more"):
        content = json.loads((ROOT / "results" / folder / "results.json").read_text())
        for run in checked(list[RunResult], content["runs"], folder):
            of, _, rate = run.experiment.partition(", learning_rate ")
            if of == world:
                by_rate = found.setdefault(run.arm, {})
                by_rate.setdefault(float(rate), {})[run.seed] = run.metric("AUC")
    return {arm: _curve(scores) for arm, scores in found.items()}


def _curve(scores: Mapping[float, Mapping[int, float]]) -> Curve:
    rates = sorted(scores)
    return Curve(rates, np.array([[scores[rate][seed] for seed in sorted(scores[rate])] for rate in rates]))


def fresh() -> Iterator[str]:
    """What each rule adds on fresh data."""
    yield f"| setting | updates | seeds | clip 0.2 | {' | '.join(RULES.values())} |"
    yield "|---|---|---:|---:|---:|---:|---:|"
    for world, updates in WORLDS.items():
        by_arm = curves(world)
        clip = by_arm["clip 0.2"]
        seeds = clip.scores.shape[1]
        gains = [difference(by_arm[arm].drawn, clip.drawn, [0] * seeds) for arm in RULES]
        middle = interquartile_mean(clip.best_scores)
        middles = [interquartile_mean(by_arm[arm].best_scores) - middle for arm in RULES]
        cells = [f"{signed(gain)}, {middle:+.3f}" for gain, middle in zip(gains, middles, strict=True)]
        yield f"| {world} | {updates} | {seeds} | {clip.best_scores.mean():.3f} | {' | '.join(cells)} |"


def matched() -> Iterator[str]:
    """pass@32, entropy and number of the runs of each group, and what Band's pass@32 is above clip 0.2's."""
    rows = [*read_runs(RUNS).values()]
    yield f"| reward at the end | {' | '.join(ARMS)} | difference |"
    yield "|---|---:|---:|---:|"
    for low, high in pairwise(ENDS):
        groups = [[r for r in rows if r["arm"] in arms and low <= r["end"] < high] for arms in ARMS.values()]
        solved = [[r["pass@32"] for r in found] for found in groups]
        entropies = [np.mean([r["entropy"][-1] for r in found]) for found in groups]
        cells = [f"{np.mean(x):.3f}, {h:.2f} ({len(x)})" for x, h in zip(solved, entropies, strict=True)]
        yield f"| {low} to {high} | {' | '.join(cells)} | {signed(bootstrap(solved[::-1], _gap))} |"


def _gap(ours: np.ndarray, theirs: np.ndarray, axis: int) -> np.ndarray:
    return ours.mean(axis) - theirs.mean(axis)


if __name__ == "__main__":
    write_between_marks(ROOT / "docs/when.md", "fresh", [*fresh()])
    write_between_marks(ROOT / "docs/when.md", "matched", [*matched()])
