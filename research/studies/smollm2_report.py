r"""Write the report of the study with a real vocabulary: its predictions, then each part.

    PYTHONPATH=research python -m studies.smollm2_report \
      research/results/smollm2/runs.jsonl research/reports/smollm2/report.md

A report on an unfinished study uses the seeds for which all runs of a part have ended.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from bandpo_lab.output.page import Page, Picture, Section
from bandpo_lab.output.style import add_legend, line_styles, plot_style
from bandpo_lab.output.tables import Table
from bandpo_lab.study.interval import Interval, signed, student
from studies.equal_reward import (
    EQUAL_STEP,
    LEVELS,
    Scores,
    entropies_table,
    entropy_at,
    entropy_at_equal_step,
    equal_step_name,
    metric_name,
)
from studies.learning_rates import Curve, difference, simulated_coverage
from studies.predictions import read_predictions, verdict
from studies.smollm2 import CONSTANT, END_SAMPLES, PARTS, Part, Run, groups_of_runs, read_runs

PREDICTIONS = Path(__file__).with_name("smollm2-predictions.md")
BASELINE = "clip 0.2"
BEST_CONSTANT = "the best constant"
"""The best arm with constant bounds. Arm and rate are selected on other seeds than those of its score."""
SMALLEST: Mapping[str, float] = {"AUC": 0.05, "end": 0.05, "words": 1.0, "end entropy": 0.3, "luck": 0.05}
"""The smallest effect of interest, by metric: in rewards, in words and in nats a token."""
PASS = f"pass@{END_SAMPLES}"

Row = Mapping[str, Any]


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else float("nan")


def _entropy_at_reward(row: Row, level: float) -> float:
    return entropy_at(row["right"], row["entropy"], level)


def _entropy_at_step(row: Row, part: str) -> float:
    return entropy_at_equal_step(row["entropy"], part)


METRICS: Mapping[str, Callable[[Row], float]] = {
    "AUC": lambda row: _mean(row["right"]),
    "end": lambda row: row["end"],
    PASS: lambda row: row[PASS],
    "words": lambda row: row["words"],
    "end entropy": lambda row: row["end entropy"],
    "kl from base": lambda row: row["kl from base"],
    "blocked": lambda row: _mean(row["blocked"]),
    "blocked below": lambda row: _mean(row["blocked below"]),
    "movement": lambda row: _mean(row["movement"]),
    "sample size": lambda row: _mean(row["sample size"]),
    "luck": lambda row: _mean(row["luck"]),
    **{metric_name(level): partial(_entropy_at_reward, level=level) for level in LEVELS},
    **{equal_step_name(part): partial(_entropy_at_step, part=part) for part in EQUAL_STEP},
}
"""The metrics of a row. AUC is the mean share of right answers over all batches."""


class World:
    """A part of the study, or one of its rates, with the seeds for which all runs have ended.

    With random rewards no rate is better than another, so arms are compared at each rate separately.
    """

    def __init__(self, part: Part, rates: Sequence[float], rows: Mapping[Run, Row]):
        self.part = part
        self.rates = rates
        self.name = part.name if len(rates) > 1 else f"{part.name}, {rates[0]:g}"
        missing = {run.seed for _, group in groups_of_runs([part]) for run in group if run not in rows}
        self.seeds = [seed for seed in part.seeds if seed not in missing]
        self._rows = rows

    def curve(self, arm: str, metric: str = "AUC") -> Curve:
        """Return a metric of an arm over its rates; for `BEST_CONSTANT`, over its arms and rates."""
        arms = [arm]
        if arm == BEST_CONSTANT:
            arms = [name for name in self.part.arms if name in CONSTANT]
        read = METRICS[metric]
        scores = [
            [read(self._rows[Run(self.part.name, name, rate, seed)]) for seed in self.seeds]
            for name in arms
            for rate in self.rates
        ]
        return Curve([*self.rates] * len(arms), np.array(scores, dtype=float))

    def scores_of(self, arm: str) -> Scores:
        """Return a function of a metric that returns the scores of an arm by rate and seed."""
        return lambda metric: self.curve(arm, metric).scores

    def difference(self, arm: str, minus: str, metric: str = "AUC") -> Interval:
        """Return the difference of two arms, each at its best rate for AUC, which is selected on other seeds."""
        ours = partial(self.curve(arm, metric).resampled_scores, chosen_by=self.curve(arm))
        theirs = partial(self.curve(minus, metric).resampled_scores, chosen_by=self.curve(minus))
        return difference(ours, theirs, [0] * len(self.seeds))

    def difference_at_rate(self, arm: str, minus: str, rate: float, metric: str = "AUC") -> Interval:
        """Return the mean difference of two arms at the same rate, paired by seed, with Student's interval."""
        index = self.rates.index(rate)
        return student(self.curve(arm, metric).scores[index] - self.curve(minus, metric).scores[index])


def worlds_of(rows: Mapping[Run, Row]) -> list[World]:
    """Return the settings with at least two finished seeds."""
    worlds = []
    for part in PARTS:
        rates = [[rate] for rate in part.rates] if part.reward == "coin" else [part.rates]
        worlds += [World(part, each, rows) for each in rates]
    return [world for world in worlds if len(world.seeds) > 1]


def page(rows: Mapping[Run, Row]) -> Page:
    """Return the report."""
    worlds = worlds_of(rows)
    all_runs = [run for _, group in groups_of_runs() for run in group]
    ended = sum(run in rows for run in all_runs)
    lead = [
        "Which bounds suit a policy with a real vocabulary? SmolLM2-135M, of which the last two layers are trained by "
        "AdamW. The reward is for an English word for a part of the body within six tokens, 1.5 % of the continuations "
        "at the start; others are rewarded by luck. The terms and "
        "predictions (`research/studies/smollm2-predictions.md`) were committed before the first run.",
    ]
    if ended < len(all_runs):
        lead.append(
            f"**{ended} of {len(all_runs)} runs have ended. All verdicts are provisional.** A setting has the seeds "
            "for which all of its runs have ended. A rate that is chosen on half of so few seeds is "
            "uncertain, and few intervals can decide; the tables at one rate are narrower."
        )
    sections = [Section("Predictions", _predictions(worlds))]
    sections += [Section(world.name, _world(world)) for world in worlds]
    return Page("A real vocabulary", lead, sections)


def _predictions(worlds: Sequence[World]) -> list[Any]:
    by_name = {world.name: world for world in worlds}
    rows = []
    for prediction in read_predictions(PREDICTIONS):
        what = f"{prediction.metric}: {prediction.arm} minus {prediction.minus}"
        begin = [prediction.world, what, prediction.expects]
        if world := by_name.get(prediction.world):
            gap = world.difference(prediction.arm, prediction.minus, prediction.metric)
            seeds = f"{len(world.seeds)} of {len(world.part.seeds)}"
            judged = verdict(gap, prediction.expects, SMALLEST[prediction.metric])
            rows.append([*begin, signed(gap), seeds, judged])
        else:
            rows.append([*begin, "–", "0", "not yet"])
    header = ["setting", "what", "expected", "measured", "seeds", "verdict"]
    caption = "End entropy is at equal step: after the last batch."
    content: list[Any] = [Table(header, rows, caption, prose=True)]
    learning = [world for world in worlds if world.part.reward != "coin"]
    if learning:
        first = learning[0]
        ours, theirs = first.curve("BandAbove"), first.curve(BEST_CONSTANT)
        coverage = simulated_coverage(ours, theirs, [0] * len(first.seeds))
        content.append(
            "Intervals of 95 %, each arm at its own best rate, by a bootstrap over seeds that chooses rates anew. In a "
            f"simulation of BandAbove against the best constant they held the truth in {coverage:.0%} of cases."
        )
    return content


def _world(world: World) -> list[Any]:
    rows = []
    against = BEST_CONSTANT if world.part.reward != "coin" else BASELINE
    metric = "AUC" if world.part.reward != "coin" else "end entropy"
    names = [
        "end",
        PASS,
        "words",
        "end entropy",
        "kl from base",
        "blocked",
        "blocked below",
        "movement",
        "luck",
    ]
    for arm in world.part.arms:
        curve = world.curve(arm)
        best = curve.best
        gap = "" if arm == against else signed(world.difference(arm, against, metric))
        values = [f"{world.curve(arm, name).scores[best].mean():.2f}" for name in names]
        edge = " (edge)" if curve.at_edge and len(curve.rates) > 1 else ""
        rows.append([arm, f"{curve.best_scores.mean():.3f}", gap, f"{curve.rates[best]:g}{edge}", *values])
    best_table = Table(
        ["arm", "AUC", f"{metric} minus {against}", "rate", *names],
        rows,
        f"{len(world.seeds)} seeds, each arm at its best rate. End entropy is at equal step, after the last batch; it "
        "and KL(base ‖ policy) are in nats a token.",
    )
    if len(world.rates) == 1:
        return [best_table]
    rates = [f"{rate:g}" for rate in world.rates]
    curves = Table(
        ["arm", *(f"AUC at {rate}" for rate in rates), *(f"end at {rate}" for rate in rates)],
        [
            [
                arm,
                *(f"{scores.mean():.3f}" for scores in world.curve(arm).scores),
                *(f"{scores.mean():.2f}" for scores in world.curve(arm, "end").scores),
            ]
            for arm in world.part.arms
        ],
        "Whole rate curves.",
    )
    at_one_rate = Table(
        ["arm", *(f"at {rate}" for rate in rates)],
        [
            [arm, *(signed(world.difference_at_rate(arm, BASELINE, rate)) for rate in world.rates)]
            for arm in world.part.arms
            if arm != BASELINE
        ],
        f"AUC minus that of {BASELINE} at the same rate, paired by seed, with Student's interval.",
    )
    picture = Picture(
        world.name.replace(",", "").replace(" ", "-"),
        _rate_curves(world),
        "Each arm by learning rate: mean and standard error over seeds.",
    )
    scores = {arm: world.scores_of(arm) for arm in world.part.arms}
    clip = scores.pop(BASELINE)
    entropies = entropies_table({arm: (ours, clip) for arm, ours in scores.items()}, BASELINE)
    return [best_table, picture, curves, at_one_rate, entropies]


@plot_style()
def _rate_curves(world: World) -> Figure:
    """Plot AUC and the number of different words at the end by learning rate, a line for each arm."""
    figure = Figure(figsize=(8, 4))
    panels = figure.subplots(1, 2)
    titles = {"AUC": "share of right answers,\nmean of all batches", "words": "different words at the end"}
    for axes, (metric, title) in zip(panels, titles.items(), strict=True):
        for arm, style in line_styles(world.part.arms).items():
            scores = world.curve(arm, metric).scores
            errors = scores.std(1, ddof=1) / scores.shape[1] ** 0.5
            axes.errorbar(world.rates, scores.mean(1), errors, **style.options(), capsize=2, label=arm)
        axes.set(xscale="log", xlabel=f"learning rate (n = {len(world.seeds)} seeds)", title=title)
        axes.set_xticks(world.rates, [f"{rate:g}" for rate in world.rates])
        axes.minorticks_off()
    add_legend(figure, 4)
    return figure


def main(arguments: Sequence[str]) -> None:
    """Read the results, and write the report."""
    runs_file, report = map(Path, arguments)
    for written in page(read_runs(runs_file)).save(report):
        print(f"wrote {written}")


if __name__ == "__main__":
    main(sys.argv[1:])
