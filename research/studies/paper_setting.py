"""The paper's setting in the network of `bandpo_lab.toy.fast_loop`: fresh data, each answer used once, four updates.

    PYTHONPATH=research python -m studies.paper_setting rows.jsonl             # goes on with what is missing
    PYTHONPATH=research python -m studies.paper_setting half.jsonl --part 1/2   # every second seed, for another core
    PYTHONPATH=research python -m studies.paper_setting rows.jsonl --count     # what is done, and what it costs
    PYTHONPATH=research python -m studies.paper_setting rows.jsonl --report report.md
    PYTHONPATH=research python -m studies.paper_setting research/results/gate/rows.jsonl --power  # of the pilot

The terms, the predictions and the order in which cells are dropped are in `paper-setting-predictions.md`.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from bandpo_lab.files.writing import drop_unfinished_line, replacing
from bandpo_lab.output.tables import Table
from bandpo_lab.study.interval import Interval, signed, student
from bandpo_lab.toy.comparison import blocked_so_far, smooth
from bandpo_lab.toy.fast_loop import Settings, train
from rlvet.runs.files import read_jsonl
from studies.equal_reward import EQUAL_STEP, entropy_at_equal_step, equal_step_name, look
from studies.gate import read_settings
from studies.learning_rates import Curve, difference, fell_by_half
from studies.predictions import Prediction, read_predictions, verdict

CLIP = "clip 0.2"
ARMS = {
    CLIP: "FixedClip(0.2)",
    "Clip-Higher": "FixedClip(0.2, 0.28)",
    "clip [.8, 2]": "FixedClip(0.2, 1.0)",
    "no bound": "Unclipped()",
    "BandPO": "BandPO()",
    "BandAbove": "BandAbove()",
    "room by mass": "TwoSided(FixedClip(0.2), Loosest(FixedClip(0.2), Band(TotalVariation(), 0.02)))",
}
"""The rules."""
CONSTANT = (CLIP, "Clip-Higher", "clip [.8, 2]", "no bound")
"""The rules with constant bounds, of which the best one is chosen in each cell."""
SMALLEST = {"AUC": 0.01, "entropy": 0.03, "pass@32": 0.03, "end": 0.03}
"""The smallest effect of interest of each metric.

- ``AUC``: the mean training reward over all batches, which is near 0.2.
- ``entropy``: of the policy in nats per token, at equal reward: when the held-out reward first is at `LEVEL`.
- ``pass@32``: on held-out problems, at the same moment.
- ``end``: the held-out reward at the end.
"""
AT_EQUAL_REWARD = ("entropy", "pass@32")
"""The metrics at the moment when the held-out reward first is at `LEVEL`, which some runs never reach."""
AT_EQUAL_STEP = {equal_step_name(part): part for part in EQUAL_STEP}
"""The metrics of the same batches of all runs: means of the entropy over parts of them, with the names of the parts."""
SECOND_HALF = equal_step_name("second half")
"""The metric of `AT_EQUAL_STEP` in the table of all cells."""
LEVEL = 0.15
"""The held-out reward at which runs are compared: between 0.055 at the start and 0.36 at the end of a pilot."""
EVAL_EVERY = 20
"""The batches between two evaluations."""
HELD_OUT = 64
"""The held-out problems."""
FEWEST_SEEDS = 4
"""The finished seeds from which a cell's best rates are compared."""
TERMS = """\
Entropy is that of the policy in nats a token, and a comparison of it has one of two estimands:

- **At equal reward:** when a run's held-out reward first is {level:g}, as for pass@32. A mean is of the seeds of which
  both runs reached it; their number is in parentheses.
- **At equal step:** the mean over all batches, over the second half or over the last tenth of them, of all seeds. These
  three parts were chosen after the runs, and no prediction is about them.

A best rate is only named if it is neither the lowest nor the highest of the grid. *Blocked* is the share of
the gradient of rare winners (p < 0.1, A > 0) that a rule dropped; a run is broken if its held-out reward fell
by half. Differences at one rate are of all seeds that have both runs."""
POWER = """\
Of BandPO minus clip 0.2, simulated from the standard deviations of the rows: how often such a study finds a difference
if the true one is the smallest effect of interest, and if it is twice that; and how often it finds equality if there is
none."""
LOOKED_AT = """\
How many differences in entropy and pass@32 there are at all rates, how many of their intervals exclude 0, and how many
still do if they are adjusted after Bonferroni: for the number of intervals of the same data and metric, and for the
number of all in this table. One in twenty would exclude 0 by chance if no rule differed. The intervals of a table share
the runs of clip 0.2, and those of one rate their seeds, so they are not independent."""
PREDICTIONS = Path(__file__).parent / "paper-setting-predictions.md"


@dataclass(frozen=True)
class Cell:
    """A setting, with all rules at all rates and seeds.

    Attributes:
        name: The name.
        lag: The age of the data in batches.
        epochs: The number of times that an answer is used.
        rates: The learning rates.
        batches: The number of batches.
        seconds: The time of a run in seconds, as the pilots had it: processor time of a quiet core, or time of a GPU.
        seeds: The seeds, which no pilot has.
        arms: The rules.
        compared_at: The rate, named by most predictions, at which the table of all cells has entropy and pass@32;
            None leaves the cell out of that table.
    """

    name: str
    lag: int
    epochs: int
    rates: Sequence[float]
    batches: int
    seconds: float
    seeds: Sequence[int]
    arms: Sequence[str] = tuple(ARMS)
    compared_at: float | None = None


CELLS = [
    Cell("fresh", 0, 1, [2.5e-5, 5e-5, 1e-4], 320, 55.0, range(300, 312), compared_at=1e-4),
    Cell("lag 4", 4, 1, [2.5e-5, 5e-5, 1e-4], 320, 55.0, range(300, 308), compared_at=5e-5),
    Cell("4 x 4", 0, 4, [6.25e-6, 1.25e-5, 2.5e-5], 100, 50.0, range(300, 308), compared_at=1.25e-5),
]
"""The cells in the order in which they run: the last are dropped first."""


@dataclass(frozen=True)
class Study:
    """What a report is about.

    Attributes:
        title: The title.
        cells: The cells in the order in which they run.
        level: The held-out reward at which runs are compared.
        smallest: The smallest effect of interest of each metric.
        predictions: The page with the predictions.
    """

    title: str
    cells: Sequence[Cell]
    level: float
    smallest: Mapping[str, float]
    predictions: Path

    def runs(self) -> Iterator[tuple[Cell, Key]]:
        """Yield all runs in order: cell by cell, with all rules and rates of a seed before the next seed."""
        for cell in self.cells:
            for seed in cell.seeds:
                for rate in cell.rates:
                    for arm in cell.arms:
                        yield cell, Key(cell.name, arm, rate, seed)


NETWORK = Study("The paper's setting, in a small network", CELLS, LEVEL, SMALLEST, PREDICTIONS)


class Trained(Protocol):
    """A run that has ended."""

    @property
    def log(self) -> Sequence[Mapping[str, float]]:
        """The metrics of each batch."""
        ...

    @property
    def scores(self) -> Mapping[str, float]:
        """The final policy's pass@k on held-out problems, and the seconds."""
        ...

    def curve(self, name: str) -> list[float]:
        """Return a metric by batch."""
        ...


class Key(NamedTuple):
    """A run."""

    cell: str
    arm: str
    rate: float
    seed: int


def settings_of(cell: Cell, key: Key) -> Settings:
    """Return the settings of a run."""
    return Settings(
        ARMS[key.arm],
        task="mental",
        lag=cell.lag,
        epochs=cell.epochs,
        rate=key.rate,
        batches=cell.batches,
        seed=key.seed,
        held_out=HELD_OUT,
        eval_every=EVAL_EVERY,
    )


def row_of(key: Key, run: Trained, level: float = LEVEL) -> dict[str, Any]:
    """Return the row of a run: its metrics, those at equal held-out reward, and its curves for later questions."""
    moments = at_level(run, level)
    rewards = run.curve("reward")
    return {
        **key._asdict(),
        "AUC": round(sum(rewards) / len(rewards), 4),
        "entropy": moments["entropy"],
        "pass@32": moments["pass@32"],
        "end": run.scores["pass@1"],
        "end pass@32": run.scores["pass@32"],
        "last entropy": round(smooth(run.curve("entropy"))[-1], 4),
        "blocked": round(blocked_so_far(run.log)[-1], 4),
        "seconds": run.scores["seconds"],
        "curves": {
            "reward": [round(x, 3) for x in rewards],
            "entropy": [round(x, 3) for x in run.curve("entropy")],
            "eval": [[line["step"], line["eval/pass@1"], line["eval/pass@32"]] for line in evaluations(run)],
        },
    }


def evaluations(run: Trained) -> list[Mapping[str, float]]:
    """Return the lines of a run's log with an evaluation."""
    return [line for line in run.log if "eval/pass@1" in line]


def at_level(run: Trained, level: float) -> dict[str, float | None]:
    """Return the entropy and pass@32 when the held-out reward first is at a level; None if it never is.

    Both are interpolated between the last evaluation below the level and the first at or above it. The entropy is the
    mean of five batches.
    """
    entropies = smooth(run.curve("entropy"))
    points = [
        (line["eval/pass@1"], entropies[int(line["step"]) - 1], line["eval/pass@32"])
        for line in evaluations(run)
    ]
    for index, point in enumerate(points):
        if point[0] < level:
            continue
        before = points[index - 1] if index else point
        share = 1.0 if point[0] == before[0] else (level - before[0]) / (point[0] - before[0])
        entropy, solved = (
            round(first + share * (second - first), 4)
            for first, second in zip(before[1:], point[1:], strict=True)
        )
        return {"entropy": entropy, "pass@32": solved}
    return {"entropy": None, "pass@32": None}


# The report -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """The rows of a cell."""

    cell: Cell
    rows: Mapping[Key, Mapping[str, Any]]

    def difference(self, arm: str, minus: str, metric: str, rate: float) -> Interval | None:
        """Return the difference of two rules at one rate, paired by seed; None if fewer than three seeds have both."""
        differences = self.differences(arm, minus, metric, rate)
        return student(differences) if len(differences) >= 3 else None

    def differences(self, arm: str, minus: str, metric: str, rate: float) -> list[float]:
        """Return the difference of two rules at one rate for each seed that has both."""
        differences: list[float] = []
        for seed in self.cell.seeds:
            ours, theirs = (
                self._value(Key(self.cell.name, name, rate, seed), metric) for name in (arm, minus)
            )
            if ours is not None and theirs is not None:
                differences.append(ours - theirs)
        return differences

    def _value(self, key: Key, metric: str) -> float | None:
        """Return a metric of a run; None if there is no such run, or if it never reached the level."""
        row = self.rows.get(key)
        if row is None:
            return None
        if part := AT_EQUAL_STEP.get(metric):
            return entropy_at_equal_step(row["curves"]["entropy"], part)
        return row[metric]

    def differences_from_clip(self, metric: str) -> list[list[float]]:
        """Return the differences of each other rule from clip 0.2 at each rate that have an interval."""
        every = [
            self.differences(arm, CLIP, metric, rate)
            for rate in self.cell.rates
            for arm in self.cell.arms
            if arm != CLIP
        ]
        return [differences for differences in every if len(differences) >= 3]

    def finished_seeds(self) -> list[int]:
        """Return the seeds that have all runs."""
        return [
            seed
            for seed in self.cell.seeds
            if all(
                Key(self.cell.name, arm, rate, seed) in self.rows
                for arm in self.cell.arms
                for rate in self.cell.rates
            )
        ]

    def mean(self, arm: str, metric: str, rate: float) -> float:
        """Return the mean of a metric of one rule at one rate over the finished seeds."""
        keys = [Key(self.cell.name, arm, rate, seed) for seed in self.finished_seeds()]
        return float(np.mean([self.rows[key][metric] for key in keys]))

    def curve(self, arms: Sequence[str], metric: str = "AUC") -> Curve:
        """Return a metric over the rates of one rule, or over the rules and rates of several, of the finished seeds."""
        scores: list[list[float]] = []
        seeds = self.finished_seeds()
        for arm in arms:
            for rate in self.cell.rates:
                keys = [Key(self.cell.name, arm, rate, seed) for seed in seeds]
                scores.append([self.rows[key][metric] for key in keys])
        return Curve([*self.cell.rates] * len(arms), np.array(scores))


def difference_at_best_rates(ours: Curve, theirs: Curve) -> Interval:
    """Return the difference of two curves' AUC on the same seeds, each at its best rate."""
    seeds = ours.scores.shape[1]
    return difference(ours.resampled_scores, theirs.resampled_scores, [0] * seeds)


def difference_of_ends(rows: Rows, arm: str, minus: str) -> Interval:
    """Return the difference of two rules' held-out rewards at the end, each at its best rate for AUC."""
    ours, theirs = (
        partial(rows.curve([rule], "end").resampled_scores, chosen_by=rows.curve([rule]))
        for rule in (arm, minus)
    )
    return difference(ours, theirs, [0] * len(rows.finished_seeds()))


def best_rates_table(rows: Rows) -> Table:
    """Return each rule at its best rate, against one rule everywhere and against the cell's best constant.

    A rate at the edge of the grid is not called the best one, since a rate beyond it may be better; then the score is
    that of the edge. *end* is at the same rate.
    """
    constant = rows.curve([arm for arm in CONSTANT if arm in rows.cell.arms])
    clip = rows.curve([CLIP])
    cells: list[list[str]] = []
    for arm in rows.cell.arms:
        curve = rows.curve([arm])
        best_rate = f"{curve.rates[curve.best]:g}"
        score = f"{curve.best_scores.mean():.4f}"
        if curve.at_edge:
            score += f" at the edge, {best_rate}"
            best_rate = "–"
        gaps = [_signed(difference_at_best_rates(curve, other)) for other in (clip, constant)]
        end = rows.curve([arm], "end").scores[curve.best].mean()
        end_gap = _signed(difference_of_ends(rows, arm, CLIP))
        cells.append([arm, best_rate, score, *gaps, f"{end:.3f}", end_gap])
    header = [
        "rule",
        "best rate",
        "AUC",
        f"minus {CLIP}",
        "minus the best constant",
        "end",
        f"end minus {CLIP}",
    ]
    return Table(header, cells)


def is_broken(row: Mapping[str, Any]) -> bool:
    """Return True if the held-out reward fell by at least half after its maximum."""
    return fell_by_half([reward for _, reward, _ in row["curves"]["eval"]])


def runs_table(rows: Rows) -> Table:
    """Return AUC, what was blocked, and the number of broken runs, of each rule at each rate.

    Blocked is the share of the gradient of rare winners that the rule dropped, as a mean of runs. Only finished seeds
    count.
    """
    seeds = rows.finished_seeds()
    cells: list[list[str]] = []
    for arm in rows.cell.arms:
        texts = [arm]
        for rate in rows.cell.rates:
            runs = [rows.rows[Key(rows.cell.name, arm, rate, seed)] for seed in seeds]
            score = rows.mean(arm, "AUC", rate)
            blocked = rows.mean(arm, "blocked", rate)
            texts.append(f"{score:.4f}, {blocked:.0%}, {sum(map(is_broken, runs))}")
        cells.append(texts)
    header = ["rule: AUC, blocked, broken runs", *(f"at {rate:g}" for rate in rows.cell.rates)]
    return Table(header, cells)


def full_name(metric: str) -> str:
    """Return the name of a metric with its estimand.

    >>> full_name("entropy"), full_name("AUC")
    ('entropy at equal reward', 'AUC')
    """
    return f"{metric} at equal reward" if metric in AT_EQUAL_REWARD else metric


def rate_table(rows: Rows, rate: float, metrics: Sequence[str]) -> Table:
    """Return all rules at one rate, each metric as a difference from clip 0.2."""
    cells: list[list[str]] = []
    for arm in rows.cell.arms:
        if arm == CLIP:
            continue
        gaps = [_with_seeds(rows, arm, metric, rate) for metric in metrics]
        cells.append([arm, *gaps])
    return Table([f"at {rate:g}, minus {CLIP}", *map(full_name, metrics)], cells)


def equal_step_table(rows: Rows) -> Table:
    """Return the entropy of all rules at equal step, at each rate, as differences from clip 0.2."""
    cells: list[list[str]] = []
    for rate in rows.cell.rates:
        for arm in rows.cell.arms:
            if arm != CLIP:
                gaps = [_signed(rows.difference(arm, CLIP, metric, rate)) for metric in AT_EQUAL_STEP]
                cells.append([f"{arm} at {rate:g}", *gaps])
    return Table([f"entropy at equal step, minus {CLIP}", *AT_EQUAL_STEP.values()], cells)


def looked_at_table(regimes: Sequence[Rows]) -> Table:
    """Return how many intervals of entropy and pass@32 there are, and how many exclude 0, adjusted and not.

    They are adjusted for the number of intervals of the same data and metric, and for that of all data and metrics.
    """
    metrics = (*AT_EQUAL_STEP, *AT_EQUAL_REWARD)
    every = {
        (rows.cell.name, metric): rows.differences_from_clip(metric) for rows in regimes for metric in metrics
    }
    total = sum(map(len, every.values()))
    cells: list[list[str]] = []
    for (name, metric), differences in every.items():
        plain, own, all_metrics = (look(differences, count) for count in (1, len(differences), total))
        cells.append(
            [f"{name}, {full_name(metric)}", str(plain.intervals), str(plain), str(own), str(all_metrics)]
        )
    header = [
        f"data, differences from {CLIP}",
        "intervals",
        "exclude 0",
        "adjusted for these",
        f"for all {total}",
    ]
    return Table(header, cells)


def regimes_table(regimes: Sequence[Rows]) -> Table:
    """Return each rule against clip 0.2 in each cell: by AUC at their best rates, at equal step and at equal reward.

    Entropy and pass@32 are at the rate `Cell.compared_at`, without which a cell is left out.
    """
    cells: list[list[str]] = []
    for rows in regimes:
        rate = rows.cell.compared_at
        if rate is None:
            continue
        clip = rows.curve([CLIP])
        for arm in rows.cell.arms:
            if arm == CLIP:
                continue
            curve = rows.curve([arm])
            at_best_rates = _signed(difference_at_best_rates(curve, clip))
            edges: list[str] = []
            if curve.at_edge:
                edges.append(arm)
            if clip.at_edge:
                edges.append(CLIP)
            if edges:
                at_best_rates += f" (edge: {', '.join(edges)})"
            metrics = (SECOND_HALF, *AT_EQUAL_REWARD)
            gaps = [_with_seeds(rows, arm, metric, rate) for metric in metrics]
            cells.append([f"{rows.cell.name}, {arm}", at_best_rates, *gaps])
    header = [f"data, rule minus {CLIP}", "AUC at best rates", SECOND_HALF, *map(full_name, AT_EQUAL_REWARD)]
    return Table(header, cells)


def verdicts_table(
    by_cell: Mapping[str, Rows], predictions: Sequence[Prediction], smallest: Mapping[str, float]
) -> Table:
    """Return the verdict on each prediction; its world is a cell and a rate, such as ``fresh at 0.0002``."""
    cells: list[list[str]] = []
    for prediction in predictions:
        name, _, rate = prediction.world.rpartition(" at ")
        rows = by_cell.get(name)
        gap = rows and rows.difference(prediction.arm, prediction.minus, prediction.metric, float(rate))
        conclusion = verdict(gap, prediction.expects, smallest[prediction.metric]) if gap else "open"
        terms = f"{prediction.arm} minus {prediction.minus}, {full_name(prediction.metric)}"
        cells.append(
            [prediction.world, terms, prediction.expects, _signed(gap) if gap else "not run", conclusion]
        )
    return Table(["setting", "difference", "predicted", "measured", "verdict"], cells)


def _signed(interval: Interval | None) -> str:
    return "–" if interval is None else signed(interval)


def _with_seeds(rows: Rows, arm: str, metric: str, rate: float) -> str:
    """Return the difference of a rule from clip 0.2, with the number of seeds if some may have none."""
    text = _signed(rows.difference(arm, CLIP, metric, rate))
    if metric in AT_EQUAL_REWARD:
        text += f" ({len(rows.differences(arm, CLIP, metric, rate))})"
    return text


def rows_by_cell(rows: Mapping[Key, Mapping[str, Any]], study: Study = NETWORK) -> dict[str, Rows]:
    """Return the rows of each cell of a study."""
    return {
        cell.name: Rows(cell, {key: row for key, row in rows.items() if key.cell == cell.name})
        for cell in study.cells
    }


def page(rows: Mapping[Key, Mapping[str, Any]], study: Study = NETWORK) -> str:
    """Return the report as Markdown."""
    by_cell = rows_by_cell(rows, study)
    lines = [f"# {study.title}", ""]
    lines += ["Intervals are of 95 % and, where nothing else is said, not adjusted for their number.", ""]
    lines += [TERMS.format(level=study.level), ""]
    for cell in study.cells:
        cell_rows = by_cell[cell.name]
        seeds = len(cell_rows.finished_seeds())
        lines += [f"## {cell.name}", "", f"{seeds} of {len(cell.seeds)} seeds have all runs.", ""]
        if not cell_rows.rows:
            continue
        if seeds >= FEWEST_SEEDS:
            lines += [best_rates_table(cell_rows).markdown(), "", runs_table(cell_rows).markdown(), ""]
        for rate in cell.rates:
            lines += [rate_table(cell_rows, rate, [*study.smallest]).markdown(), ""]
        lines += [equal_step_table(cell_rows).markdown(), ""]
    regimes = [cell_rows for cell_rows in by_cell.values() if len(cell_rows.finished_seeds()) >= FEWEST_SEEDS]
    if regimes:
        lines += ["## All cells", "", regimes_table(regimes).markdown(), ""]
        lines += ["## Intervals looked at", "", LOOKED_AT, "", looked_at_table(regimes).markdown(), ""]
        lines += ["## Power", "", POWER, "", power_by_rate_table(regimes, study.smallest).markdown(), ""]
    predictions = read_predictions(study.predictions)
    lines += ["## Predictions", "", verdicts_table(by_cell, predictions, study.smallest).markdown()]
    return "\n".join(lines) + "\n"


# Power ----------------------------------------------------------------------------------------------------------------


class Power(NamedTuple):
    """The shares of simulated studies whose paired comparison comes to a verdict."""

    greater: float
    """The share of studies whose interval is above 0, if the true difference is the smallest effect."""
    twice: float
    """The same, if it is twice the smallest effect."""
    equal: float
    """The share of studies whose interval is within the smallest effect, if the true difference is 0."""

    def __str__(self) -> str:
        return f"{self.greater:.0%}, {self.twice:.0%}, {self.equal:.0%}"


def simulated_power(deviation: float, seeds: int, smallest: float, repeats: int = 4000) -> Power:
    """Simulate studies whose paired differences are normal with a standard deviation.

    >>> simulated_power(0.001, 12, 0.01).greater, simulated_power(1.0, 12, 0.01).equal
    (1.0, 0.0)
    """
    noise = np.random.default_rng(0).normal(0, deviation, (repeats, seeds))
    means = noise.mean(1)
    half = np.array([student(differences).half for differences in noise])
    greater = (means + smallest - half > 0).mean()
    twice = (means + 2 * smallest - half > 0).mean()
    inside = (means - half > -smallest) & (means + half < smallest)
    return Power(float(greater), float(twice), float(inside.mean()))


def power_at(rows: Rows, metric: str, rate: float, smallest: float) -> Power | None:
    """Return the power of BandPO minus clip 0.2 at one rate; None if fewer than `FEWEST_SEEDS` seeds have both runs."""
    gaps = rows.differences("BandPO", CLIP, metric, rate)
    if len(gaps) < FEWEST_SEEDS:
        return None
    return simulated_power(float(np.std(gaps, ddof=1)), len(gaps), smallest)


def power_by_rate_table(regimes: Sequence[Rows], smallest: Mapping[str, float]) -> Table:
    """Return the power of BandPO minus clip 0.2 by cell and rate, from the paired standard deviations of the rows."""
    cells: list[list[str]] = []
    for rows in regimes:
        for rate in rows.cell.rates:
            texts = [f"{rows.cell.name} at {rate:g}"]
            for metric, effect in smallest.items():
                power = power_at(rows, metric, rate, effect)
                texts.append("–" if power is None else str(power))
            cells.append(texts)
    return Table(
        ["setting", *(f"{full_name(metric)}, {effect:g}" for metric, effect in smallest.items())], cells
    )


def power_table(pilot: Path) -> Table:
    """Return the power by number of seeds, from the paired standard deviations of the gate's rows of the network."""
    cells: list[list[str]] = []
    for setting in read_settings(pilot):
        if setting.cell.testbed != "network" or setting.cell.pilot:
            continue
        for arm in ("Clip-Higher", "no bound"):
            for metric, name in (("reward", "AUC"), ("entropy", "entropy")):
                ours, theirs = (setting.rows.get(rule, {}) for rule in (arm, CLIP))
                seeds = sorted(ours.keys() & theirs.keys())
                if len(seeds) < 3:
                    continue
                gaps = [ours[seed][metric] - theirs[seed][metric] for seed in seeds]
                deviation = float(np.std(gaps, ddof=1))
                if math.isclose(deviation, 0.0):
                    continue
                texts = [
                    setting.cell.name,
                    f"{setting.rate:g}",
                    f"{arm}, {name}",
                    str(len(seeds)),
                    f"{deviation:.4f}",
                ]
                for count in (6, 12, 24):
                    power = simulated_power(deviation, count, SMALLEST[name])
                    texts.append(str(power))
                cells.append(texts)
    header = [
        "pilot",
        "rate",
        "difference from clip 0.2",
        "seeds",
        "paired SD",
        "6 seeds",
        "12 seeds",
        "24 seeds",
    ]
    return Table(header, cells)


def count_lines(
    rows: Mapping[Key, Mapping[str, Any]], study: Study = NETWORK, unit: str = "core-hours"
) -> list[str]:
    """Return what is done of each cell, and the hours that are left."""
    lines: list[str] = []
    for cell in study.cells:
        keys = [key for other, key in study.runs() if other is cell]
        missing = sum(key not in rows for key in keys)
        hours = missing * cell.seconds / 3600
        lines.append(f"{cell.name}: {len(keys) - missing} of {len(keys)} runs, {hours:.1f} {unit} left")
    return lines


def read_rows(file: Path) -> dict[Key, dict[str, Any]]:
    """Return the rows of a file by run."""
    return {Key(*(row[name] for name in Key._fields)): row for _, row in read_jsonl(file)}


def read_part(text: str) -> tuple[int, int]:
    """Read a part of the seeds, such as ``1/2``: those whose remainder by the second number is the first.

    >>> read_part("1/2")
    (1, 2)
    """
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or int(match[1]) >= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text}: choose K/N with K from 0 to N - 1, such as 0/2 and 1/2")
    return int(match[1]), int(match[2])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the file does not have, or write what the options ask for."""
    parser = argparse.ArgumentParser(prog="python -m studies.paper_setting")
    parser.add_argument("rows", type=Path, help="one line for each run; made if it is not there")
    parser.add_argument("--cell", choices=[cell.name for cell in CELLS], help="run one cell only")
    parser.add_argument(
        "--part",
        type=read_part,
        default=(0, 1),
        metavar="K/N",
        help="run only the seeds whose remainder by N is K",
    )
    parser.add_argument(
        "--count", action="store_true", help="only print what is done, and what the rest costs"
    )
    parser.add_argument(
        "--power", action="store_true", help="only print the power, from the rows of the gate"
    )
    parser.add_argument("--report", type=Path, help="only write the report to this file")
    options = parser.parse_args(arguments)
    if options.power:
        print(power_table(options.rows).markdown())
        return
    if options.report:
        with replacing(options.report) as unfinished:
            unfinished.write_text(page(read_rows(options.rows)), encoding="utf-8")
        return
    options.rows.touch()
    drop_unfinished_line(options.rows)
    rows = read_rows(options.rows)
    if options.count:
        print("\n".join(count_lines(rows)))
        return
    # The order of sums, and so the bits, would depend on the number of threads.
    torch.set_num_threads(1)
    remainder, parts = options.part
    with options.rows.open("a", encoding="utf-8") as lines:
        for cell, key in NETWORK.runs():
            if key in rows or options.cell not in (None, cell.name) or key.seed % parts != remainder:
                continue
            lines.write(json.dumps(row_of(key, train(settings_of(cell, key), None))) + "\n")
            lines.flush()


if __name__ == "__main__":
    main()
