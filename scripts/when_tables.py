"""Write the tables of two reports, rules-compared.md and by-kind-of-data.md, from the committed rows of the studies.

    PYTHONPATH=. python scripts/when_tables.py

- ``map``: the gains of bounds by probability over the best constant in tables, under four optimizers.
- ``vocabulary``, ``negative``: two parts of the study with a real vocabulary.
- ``entropy``: the entropy at equal step, after the last batch, under random rewards, in that study.
- ``equal``: what each rule by probability keeps of the entropy at equal reward, against each constant, in that study.
- ``new seeds``: the same for `BandAbove` on seeds that were run after it was found, with the verdicts.
- ``elsewhere``: the same against clip 0.2 in its other settings, and in the study of stale data.
- ``power``: how often eight and more seeds of that study would have found a gain, or equality.
- ``ends``: the best rates of two rules and the ends of their runs, in the study of stale data.
- ``high``: two rules with high upper bounds beside each other, in both studies.
- ``everywhere``: each rule by probability against the one constant that is best over all settings, in tables.
- ``luck``: the growth of a rare right answer, of `studies.luck`.
- ``fresh``: the older study of fresh data: means, and intervals by a bootstrap that selects the rates anew.
- ``fresh entropy``: the entropy at equal step and at equal reward in that study.
- ``matched``: pass@32 and entropy at matched reward, for all runs of the study of stale data.
- ``regimes``, in by-kind-of-data.md: each rule on fresh, old and reused data, in the study of the paper's setting.
- ``asynchronous trainer``, ``loop of our own``, in docs/old-data.md: each rule by the age of the data, in two studies.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bandpo_lab.files.validation import validate_as
from bandpo_lab.study.collect import RunResult
from bandpo_lab.study.interval import signed, student
from map_page import read_parts
from marked import write_between_marks
from studies import async_trainer, luck, paper_setting, smollm2, staleness_report
from studies.equal_reward import (
    EQUAL_STEP,
    LEVELS,
    EqualReward,
    Scores,
    compare_at_equal_reward,
    entropies_table,
    entropy_at,
    entropy_at_equal_step,
    equal_step_name,
    metric_name,
)
from studies.grid import ARMS as GRID_ARMS
from studies.grid_report import DATA, mean_gain
from studies.learning_rates import Curve, difference, simulated_power
from studies.optimizers import OPTIMIZERS
from studies.predictions import read_predictions, verdict
from studies.smollm2 import CONSTANT
from studies.smollm2_report import BEST_CONSTANT, SMALLEST, World, worlds_of
from studies.staleness import CELLS, Cell, read_runs

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "research/results/staleness/runs.jsonl.gz"
MAP = ROOT / "research/results/optimizers"
VOCABULARY = ROOT / "research/results/smollm2/runs.jsonl.gz"
NEW_SEEDS = ROOT / "research/results/smollm2/new-seeds.jsonl.gz"
PAPER_SETTING = ROOT / "research/results/paper-setting/rows.jsonl.gz"
ASYNC_TRAINER = ROOT / "research/results/async-trainer"
NEW_SEEDS_PREDICTIONS = ROOT / "research/studies/smollm2-new-seeds-predictions.md"
SHAPES = ("Band", "BandAbove", "room by mass")
"""The arms whose upper bounds depend on the probability."""
SAME_RATE = 6e-4
"""The learning rate at which arms with a real vocabulary are compared at one rate."""
CLIP, ABOVE = "clip 0.2", "BandAbove"
MATCHED = (CLIP, "Band", ABOVE)
"""The arms that are compared by pass@32 at matched reward."""
ENDS = (0.3, 0.5, 0.7, 0.85, 0.95)
"""The limits of the groups of runs, by final reward."""
WORLDS = ("paper", "plenty", "active", "two stages")
"""The settings in which a policy can learn."""
RULES = {
    "Band": "Band",
    "Band above, clip below": "BandAbove",
    "clip above, Band below": "clip above, Band below",
}


def runs_of_network(world: str) -> Iterator[tuple[float, RunResult]]:
    """Yield the runs of the older study of fresh data in a setting, each with its learning rate."""
    for folder in ("network", "network-more"):
        content = json.loads((ROOT / "research" / "results" / folder / "results.json").read_text())
        for run in validate_as(list[RunResult], content["runs"], folder):
            run_world, _, rate = run.experiment.partition(", learning_rate ")
            if run_world == world:
                yield float(rate), run


def curves(
    world: str, read: Callable[[RunResult], float] = lambda run: run.metric("AUC")
) -> dict[str, Curve]:
    """Return a metric of each arm in a setting, by default AUC, over rates and seeds."""
    rows: list[dict[str, object]] = []
    for rate, run in runs_of_network(world):
        rows.append({"arm": run.arm, "rate": rate, "seed": run.seed, "value": read(run)})
    curves_by_arm: dict[str, Curve] = {}
    for arm, arm_rows in pd.DataFrame(rows).groupby("arm"):
        grid = arm_rows.pivot(index="rate", columns="seed", values="value")
        curves_by_arm[str(arm)] = Curve([*grid.index], grid.to_numpy())
    return curves_by_arm


def _entropies_of_network(world: str) -> dict[str, dict[str, np.ndarray]]:
    """Return the entropies at equal step and at equal reward of each arm in a setting, by the name of the metric."""
    scores: dict[str, dict[str, np.ndarray]] = {}
    readers: dict[str, Callable[[RunResult], float]] = {}
    for part in EQUAL_STEP:
        readers[equal_step_name(part)] = lambda run, part=part: entropy_at_equal_step(
            run.curves["entropy"], part
        )
    for level in LEVELS:
        readers[metric_name(level)] = lambda run, level=level: entropy_at(
            run.curves["reward"], run.curves["entropy"], level
        )
    for metric, read in readers.items():
        for arm, curve in curves(world, read).items():
            scores.setdefault(arm, {})[metric] = curve.scores
    return scores


def fresh_entropies_table() -> Iterator[str]:
    """Yield the table of the entropy of each rule minus clip 0.2 on fresh data, and its caption."""
    rows: dict[str, tuple[Scores, Scores]] = {}
    for world in WORLDS:
        scores = _entropies_of_network(world)
        for arm, name in RULES.items():
            rows[f"{world}, {name}"] = (scores[arm].__getitem__, scores[CLIP].__getitem__)
    table = entropies_table(rows, CLIP)
    yield from table.markdown().splitlines()
    yield ""
    yield table.caption


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


@cache
def stale_rows() -> Mapping[Any, Mapping[str, Any]]:
    """Return the rows of the study of stale data."""
    return read_runs(RUNS)


def matched_reward_table() -> Iterator[str]:
    """Yield the table of pass@32, entropy and number of runs by final reward, with each rule's gain in pass@32."""
    runs = pd.DataFrame([*stale_rows().values()])
    runs["entropy"] = runs["entropy"].str[-1]
    gains = " | ".join(f"{arm} minus {CLIP}" for arm in MATCHED[1:])
    yield f"| reward at the end | {' | '.join(MATCHED)} | {gains} |"
    yield "|---|" + "---:|" * (2 * len(MATCHED) - 1)
    for low, high in pairwise(ENDS):
        group = runs[(runs["end"] >= low) & (runs["end"] < high)]
        means = group.groupby("arm").agg({"pass@32": "mean", "entropy": "mean", "seed": "count"})
        cells = ["{:.3f}, {:.2f} ({:.0f})".format(*means.loc[arm]) for arm in MATCHED]
        for arm in MATCHED[1:]:
            by_seed = group[group["arm"].isin([CLIP, arm])].pivot_table("pass@32", "seed", "arm").dropna()
            cells.append(f"{signed(student(by_seed[arm] - by_seed[CLIP]))} ({len(by_seed)})")
        yield f"| {low} to {high} | {' | '.join(cells)} |"


def ends_table() -> Iterator[str]:
    """Yield the table of best rates and ends of two rules in a small network, with all rates that were run."""
    by_name = staleness_report.with_all_rates(stale_rows())
    yield f"| setting | best rate, {CLIP} | best rate, {ABOVE} | AUC | gain | reward at the end | difference |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for cell in CELLS:
        world = by_name[cell.name]
        # A setting with one rate has no best rate.
        if len(world.cell.rates) == 1:
            continue
        rates = []
        for arm in (CLIP, ABOVE):
            curve = world.curve(arm)
            rates.append(f"{curve.rates[curve.best]:g}{' (edge)' if curve.at_edge else ''}")
        scores, ends = (
            " → ".join(f"{world.at_best(arm, metric):.2f}" for arm in (CLIP, ABOVE))
            for metric in ("AUC", "end")
        )
        gain, difference_at_end = (signed(world.difference(ABOVE, CLIP, metric)) for metric in ("AUC", "end"))
        yield f"| {cell.name} | {rates[0]} | {rates[1]} | {scores} | {gain} | {ends} | {difference_at_end} |"


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
    yield "| arm | AUC | minus clip 0.2 | words | entropy at equal step | KL(base ‖ policy) |"
    yield "|---|" + "---:|" * 5
    index = world.rates.index(SAME_RATE)
    for arm in world.part.arms:
        metrics = ("AUC", "words", "end entropy", "kl from base")
        auc, words, entropy, distance = (world.curve(arm, metric).scores[index].mean() for metric in metrics)
        gain = "" if arm == "clip 0.2" else signed(world.difference_at_rate(arm, "clip 0.2", SAME_RATE))
        yield f"| {arm} | {auc:.3f} | {gain} | {words:.1f} | {entropy:.2f} | {distance:.1f} |"


def entropy_table() -> Iterator[str]:
    """Yield the table of the entropy after the last batch under random rewards with a real vocabulary."""
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


def _at_equal_reward(
    world: World | staleness_report.World, arm: str, minus: str, level: float
) -> EqualReward | None:
    ours, theirs = (world.curve(name, metric_name(level)).scores for name in (arm, minus))
    return compare_at_equal_reward(ours, theirs)


def learning_worlds() -> Iterator[tuple[str, World | staleness_report.World]]:
    """Yield the settings of both studies in which a policy can learn, with their names on the page and all rates."""
    for world in vocabulary().values():
        if world.part.reward != "coin":
            yield f"SmolLM2, {world.name}", world
    network = staleness_report.with_all_rates(stale_rows())
    for cell in CELLS:
        yield f"network, {cell.name}", network[cell.name]


def arms_of(world: World | staleness_report.World) -> Sequence[str]:
    """Return the names of the arms of a setting."""
    return world.part.arms if isinstance(world, World) else world.cell.arms


def _cell(comparison: EqualReward | None) -> str:
    return f"{signed(comparison.interval)} ({comparison.pairs})" if comparison else "–"


def equal_reward_table() -> Iterator[str]:
    """Yield the table of entropy at equal reward on old data with a real vocabulary, against each constant."""
    world = vocabulary()["stale"]
    yield "| rule | minus | " + " | ".join(f"at reward {level:g}" for level in LEVELS) + " |"
    yield "|---|---|" + "---:|" * len(LEVELS)
    pairs = [(arm, constant) for arm in SHAPES for constant in CONSTANT]
    pairs += [(arm, ABOVE) for arm in SHAPES if arm != ABOVE]
    for arm, minus in pairs:
        cells = [_cell(_at_equal_reward(world, arm, minus, level)) for level in LEVELS]
        yield f"| {arm} | {minus} | {' | '.join(cells)} |"


def new_seeds_table() -> Iterator[str]:
    """Yield the table of the entropy of `BandAbove` at equal reward on new seeds, with the verdicts on predictions."""
    part = smollm2.NEW_SEEDS
    world = World(part, part.rates, smollm2.read_runs(NEW_SEEDS))
    expected = {(row.minus, row.metric): row.expects for row in read_predictions(NEW_SEEDS_PREDICTIONS)}
    yield f"| {ABOVE} minus | at reward | difference | predicted | verdict |"
    yield "|---|---:|---:|---|---|"
    for minus in part.arms:
        if minus == ABOVE:
            continue
        for level in LEVELS:
            comparison = _at_equal_reward(world, ABOVE, minus, level)
            expects = expected.get((minus, metric_name(level)), "–")
            conclusion = "–"
            if comparison and expects != "–":
                conclusion = verdict(comparison.interval, expects, SMALLEST["end entropy"])
            yield f"| {minus} | {level:g} | {_cell(comparison)} | {expects} | {conclusion} |"


def elsewhere_table() -> Iterator[str]:
    """Yield the table of entropy at equal reward against clip 0.2, in the other settings of two studies."""
    header = [f"{ABOVE}, at reward {level:g}" for level in LEVELS]
    others = ("Band", "room by mass")
    header += [f"{arm}, at reward {LEVELS[1]:g}" for arm in others]
    yield f"| setting | {' | '.join(header)} |"
    yield "|---|" + "---:|" * len(header)
    for name, world in learning_worlds():
        arms = arms_of(world)
        # The main setting has a table of its own.
        if ABOVE not in arms or name == "SmolLM2, stale":
            continue
        cells = [_cell(_at_equal_reward(world, ABOVE, CLIP, level)) for level in LEVELS]
        for arm in others:
            cells.append(_cell(_at_equal_reward(world, arm, CLIP, LEVELS[1])) if arm in arms else "not run")
        yield f"| {name} | {' | '.join(cells)} |"


def high_bounds_table() -> Iterator[str]:
    """Yield the table of `BandAbove` minus a constant clip of [0.8, 2], where both were run."""
    high = "clip [.8, 2]"
    yield "| setting | seeds | at the same rates | each at its best rate |"
    yield "|---|---:|---:|---:|"
    for name, world in learning_worlds():
        if not {high, ABOVE} <= {*arms_of(world)}:
            continue
        by_seed = (world.curve(ABOVE).scores - world.curve(high).scores).mean(0)
        cells = [signed(student(by_seed)), signed(world.difference(ABOVE, high))]
        yield f"| {name} | {len(world.seeds)} | {' | '.join(cells)} |"


def everywhere_table() -> Iterator[str]:
    """Yield the table of rules by probability minus the one constant that is best over all settings of tables."""
    grid = read_parts(MAP)
    constants = [name for name, arm in GRID_ARMS.items() if arm.kind == "constant"]
    names = [*constants, *SHAPES]
    # Scores by optimizer, of shape (arms, settings).
    scores = {
        optimizer: np.array(
            [[grid.score(setting, optimizer, arm) for setting in grid.settings_to_learn] for arm in names]
        )
        for optimizer in OPTIMIZERS
    }
    scores["all four, averaged"] = np.mean([*scores.values()], 0)
    yield f"| optimizer | the best constant over {len(grid.settings_to_learn)} settings | {' | '.join(SHAPES)} |"
    yield "|---|---|" + "---:|" * len(SHAPES)
    for optimizer, arms in scores.items():
        best = int(arms[: len(constants)].mean(1).argmax())
        cells = [signed(student(arms[names.index(arm)] - arms[best])) for arm in SHAPES]
        yield f"| {optimizer} | {names[best]} | {' | '.join(cells)} |"


def power_table() -> Iterator[str]:
    """Yield the table of the power of `BandAbove` against the best constant, simulated from the rows."""
    world = vocabulary()["stale"]
    smallest = SMALLEST["AUC"]
    gains = (0.0, smallest, 2 * smallest)
    yield "| seeds | " + " | ".join(f"true gain {gain:g}" for gain in gains) + " | equal, true gain 0 |"
    yield "|---:|" + "---:|" * (len(gains) + 1)
    for seeds in (len(world.seeds), len(world.part.seeds), 2 * len(world.part.seeds)):
        powers = [
            simulated_power(world.curve(ABOVE), world.curve(BEST_CONSTANT), gain, seeds, smallest)
            for gain in gains
        ]
        shares = [f"{power.greater:.0%}" for power in powers]
        yield f"| {seeds} | {' | '.join(shares)} | {powers[0].equal:.0%} |"


def regimes_table() -> Iterator[str]:
    """Yield the table of the paper's setting: each rule minus clip 0.2 on fresh, old and reused data."""
    cells = paper_setting.rows_by_cell(paper_setting.read_rows(PAPER_SETTING)).values()
    finished = [cell for cell in cells if len(cell.finished_seeds()) >= paper_setting.FEWEST_SEEDS]
    yield from paper_setting.regimes_table(finished).markdown().splitlines()


def async_trainer_table() -> Iterator[str]:
    """Yield the table of TRL's asynchronous trainer: each rule minus another one, by the age of the data."""
    rows = async_trainer.read_rows(ASYNC_TRAINER)
    seeds = async_trainer.whole_seeds(rows)
    whole = {key: row for key, row in rows.items() if key.seed in seeds}
    yield from async_trainer.gains_table(whole).markdown().splitlines()


def own_loop_table() -> Iterator[str]:
    """Yield the same table of the study of stale data, each rule at its own best rate."""
    worlds = staleness_report.with_all_rates(stale_rows())
    pairs = [pair for pair in async_trainer.GAINS if "BandPO" not in pair]
    names = async_trainer.NAMES
    gains = [f"{names[arm]} minus {names[minus]}" for arm, minus in pairs]
    yield f"| lag, in batches of four updates (age, in updates) | mean reward with clip 0.2 | {' | '.join(gains)} |"
    yield "|---|---|" + "---|" * len(pairs)
    for name in ("lag 0", "lag 4, one update", "lag 2", "lag 4", "lag 8"):
        world = worlds[name]
        gaps = [signed(world.difference(*pair)) for pair in pairs]
        yield f"| {_lag_and_age(world.cell)} | {world.at_best(CLIP, 'AUC'):.3f} | {' | '.join(gaps)} |"


def _lag_and_age(cell: Cell) -> str:
    """Return the lag of a cell with the ages of its data in updates."""
    updates = cell.epochs * cell.minibatches
    youngest = cell.lag * updates
    if updates == 1:
        return f"{cell.lag}, of one update each ({youngest})"
    return f"{cell.lag} ({youngest} to {youngest + updates - 1})"


COMPARED = ROOT / "research/reports/rules-compared.md"
OLD_DATA = ROOT / "docs/old-data.md"
PAGES = {
    "regimes": ROOT / "research/reports/by-kind-of-data.md",
    "asynchronous trainer": OLD_DATA,
    "loop of our own": OLD_DATA,
}
"""The page of each table that is not in `COMPARED`."""
TABLES: Mapping[str, Callable[[], Iterator[str]]] = {
    "map": map_table,
    "vocabulary": vocabulary_table,
    "negative": negative_table,
    "entropy": entropy_table,
    "equal": equal_reward_table,
    "new seeds": new_seeds_table,
    "elsewhere": elsewhere_table,
    "power": power_table,
    "ends": ends_table,
    "high": high_bounds_table,
    "everywhere": everywhere_table,
    "luck": luck.rows,
    "fresh": fresh_data_table,
    "fresh entropy": fresh_entropies_table,
    "matched": matched_reward_table,
    "regimes": regimes_table,
    "asynchronous trainer": async_trainer_table,
    "loop of our own": own_loop_table,
}


if __name__ == "__main__":
    for name, rows in TABLES.items():
        write_between_marks(PAGES.get(name, COMPARED), name, [*rows()])
