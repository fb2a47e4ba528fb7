"""Write the tables of docs/when.md from the committed rows of the studies.

    PYTHONPATH=. python scripts/when_tables.py

- ``map``: the gains of bounds by probability over the best constant in tables, under four optimizers.
- ``vocabulary``, ``negative``: two parts of the study with a real vocabulary.
- ``entropy``: the entropy at the end under random rewards, in that study.
- ``luck``: the growth of a rare right answer, of `studies.luck`.
- ``fresh``: the older study of fresh data: means, and intervals by a bootstrap that selects the rates anew.
- ``matched``: pass@32 and entropy at matched reward, for all runs of the study of stale data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path

import pandas as pd

from bandpo_lab.file_models import validate_as
from bandpo_lab.study.collect import RunResult
from bandpo_lab.study.grid_report import DATA, mean_gain
from bandpo_lab.study.optimizers import OPTIMIZERS
from bandpo_lab.study.statistics import Curve, difference, student
from bandpo_lab.study.tables import signed
from map_page import read_parts
from marked import write_between_marks
from studies import luck, smollm2
from studies.smollm2_report import BEST_CONSTANT, World, worlds_of
from studies.staleness import read_runs

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "results/staleness/runs.jsonl.gz"
MAP = ROOT / "results/optimizers"
VOCABULARY = ROOT / "results/smollm2/runs.jsonl.gz"
SHAPES = ("Band", "BandAbove", "room by mass")
"""The arms whose upper bounds depend on the probability."""
SAME_RATE = 6e-4
"""The learning rate at which arms with a real vocabulary are compared at one rate."""
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


def map_table() -> Iterator[str]:
    """Yield the table of gains over the best constant in tables, by kind of data and optimizer."""
    grid = read_parts(MAP)
    yield f"| data (settings) | optimizer | {' | '.join(SHAPES)} |"
    yield "|---|---|" + "---:|" * len(SHAPES)
    for data in DATA:
        settings = [setting for setting in grid.settings_to_learn if setting.data == data]
        for optimizer in OPTIMIZERS:
            cells = [mean_gain(grid, settings, optimizer, arm) for arm in SHAPES]
            yield f"| {data} ({len(settings)}) | {optimizer} | {' | '.join(cells)} |"


@cache
def vocabulary() -> Mapping[str, World]:
    """Return the settings of the study with a real vocabulary, by name."""
    return {world.name: world for world in worlds_of(smollm2.read_runs(VOCABULARY))}


def vocabulary_table() -> Iterator[str]:
    """Yield the table of all arms on stale data with a real vocabulary."""
    world = vocabulary()["stale"]
    rates = world.part.rates
    yield (
        "| arm | "
        + " | ".join(f"at {rate:g}" for rate in rates)
        + " | minus the best constant | words at 6e-4 | words minus the best constant's |"
    )
    yield "|---|" + "---:|" * (len(rates) + 3)
    for arm in world.part.arms:
        scores = [f"{seeds.mean():.3f}" for seeds in world.curve(arm).scores]
        words = world.curve(arm, "words").scores[rates.index(SAME_RATE)].mean()
        gains = [signed(world.difference(arm, BEST_CONSTANT, metric)) for metric in ("AUC", "words")]
        yield f"| {arm} | {' | '.join(scores)} | {gains[0]} | {words:.1f} | {gains[1]} |"


def negative_table() -> Iterator[str]:
    """Yield the table of the arms on very stale data, at one rate."""
    world = vocabulary()["very stale"]
    yield "| arm | AUC | minus clip 0.2 | words | entropy | KL(base ‖ policy) |"
    yield "|---|" + "---:|" * 5
    index = world.rates.index(SAME_RATE)
    for arm in world.part.arms:
        metrics = ("AUC", "words", "end entropy", "kl from base")
        auc, words, entropy, distance = (world.curve(arm, metric).scores[index].mean() for metric in metrics)
        gain = "" if arm == "clip 0.2" else signed(world.difference_at_rate(arm, "clip 0.2", SAME_RATE))
        yield f"| {arm} | {auc:.3f} | {gain} | {words:.1f} | {entropy:.2f} | {distance:.1f} |"


def entropy_table() -> Iterator[str]:
    """Yield the table of the entropy at the end under random rewards with a real vocabulary."""
    worlds = [world for world in vocabulary().values() if world.part.reward == "coin"]
    yield "| arm | " + " | ".join(world.name.replace(", coin, ", " at ") for world in worlds) + " |"
    yield "|---|" + "---:|" * len(worlds)
    for arm in worlds[0].part.arms:
        cells = []
        for world in worlds:
            if arm in world.part.arms:
                interval = student(world.curve(arm, "end entropy").scores[0])
                cells.append(f"{interval.value:.2f} ± {interval.half:.2f}")
            else:
                cells.append("–")
        yield f"| {arm} | {' | '.join(cells)} |"


TABLES: Mapping[str, Callable[[], Iterator[str]]] = {
    "map": map_table,
    "vocabulary": vocabulary_table,
    "negative": negative_table,
    "entropy": entropy_table,
    "luck": luck.rows,
    "fresh": fresh_data_table,
    "matched": matched_reward_table,
}


if __name__ == "__main__":
    for name, rows in TABLES.items():
        write_between_marks(ROOT / "docs/when.md", name, [*rows()])
