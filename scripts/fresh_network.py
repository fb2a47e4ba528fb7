"""Write the table of fresh data in docs/when.md: means, intervals that choose rates anew, and interquartile means.

    python scripts/fresh_network.py

The report of that study has interquartile means alone, and intervals that take the chosen rates for granted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from bandpo_lab.file_models import checked
from bandpo_lab.study.collect import RunResult
from bandpo_lab.study.statistics import Curve, difference, interquartile_mean
from bandpo_lab.study.tables import signed
from marked import write_between_marks

ROOT = Path(__file__).parents[1]
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


def rows() -> Iterator[str]:
    """The table's lines."""
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


if __name__ == "__main__":
    write_between_marks(ROOT / "docs/when.md", "fresh", [*rows()])
