r"""Write the report of the study of stale data: its predictions, then each cell.

    PYTHONPATH=research python -m studies.staleness_report \
      research/results/staleness/runs.jsonl.gz research/reports/staleness/report.md

A report on an unfinished study uses the seeds for which all runs of a cell have ended.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from bandpo_lab.output.page import Page, Section
from bandpo_lab.output.tables import Table
from bandpo_lab.study.interval import Interval, signed
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
from studies.learning_rates import (
    Curve,
    difference,
    fell_by_half,
    interquartile_mean,
    rank_correlation,
    simulated_coverage,
)
from studies.predictions import read_predictions, verdict
from studies.staleness import ARMS, CELLS, FURTHER, Cell, Run, read_runs, runs

SMALLEST = 0.05
"""The smallest effect of interest, in AUC, pass@32 or nats."""
LEARNED = 0.8
"""The reward at which entropies are compared."""
PREDICTIONS = Path(__file__).with_name("staleness-predictions.md")
MODELS = {"": (0, 1), ", model a": (0,), ", model b": (1,)}
"""The base models: the suffix of a setting's name, and the remainders of its seeds modulo 2."""
CLIP, ABOVE = "clip 0.2", "BandAbove"
Row = Mapping[str, Any]


# Figures of a run -----------------------------------------------------------------------------------------------------


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else 0.0


def entropy_when_learned(row: Row) -> float:
    """Return nats per token when the mean reward of three batches first reaches 0.8; if it never does, at the end."""
    means = np.convolve(row["reward"], np.ones(3) / 3, "valid")
    reached = np.flatnonzero(means >= LEARNED)
    return row["entropy"][reached[0] + 2 if len(reached) else -1]


def broken(row: Row) -> bool:
    """Return True if the mean reward of ten batches fell by at least half after its maximum."""
    means = np.convolve(row["reward"], np.ones(10) / 10, "valid")
    return fell_by_half(means)


def _entropy_at_reward(row: Row, level: float) -> float:
    return entropy_at(row["reward"], row["entropy"], level)


def _entropy_at_step(row: Row, part: str) -> float:
    return entropy_at_equal_step(row["entropy"], part)


METRICS: Mapping[str, Callable[[Row], float]] = {
    "AUC": lambda row: _mean(row["reward"]),
    "end": lambda row: row["end"],
    "pass@32": lambda row: row["pass@32"],
    "entropy at end": lambda row: row["entropy"][-1],
    "entropy at 0.8": entropy_when_learned,
    "blocked": lambda row: _mean(row["blocked"]),
    "broken": lambda row: float(broken(row)),
    **{metric_name(level): partial(_entropy_at_reward, level=level) for level in LEVELS},
    **{equal_step_name(part): partial(_entropy_at_step, part=part) for part in EQUAL_STEP},
}


class World:
    """A cell of the study, or its seeds of one base model, with the seeds for which all runs have ended."""

    def __init__(self, cell: Cell, model: str, rows: Mapping[Run, Row]):
        self.name, self.cell = cell.name + model, cell
        ended = [s for s in cell.seeds if all(r in rows for _, r in runs([cell]) if r.seed == s)]
        self.seeds = [seed for seed in ended if seed % 2 in MODELS[model]]
        counts = [sum(seed % 2 == which for seed in self.seeds) for which in MODELS[model]]
        self.compared = min(counts) > 1
        """True if arms can be compared: there are at least two seeds of each base model."""
        self._rows = rows

    @property
    def groups(self) -> list[int]:
        """Return the base model of each seed."""
        return [seed % 2 for seed in self.seeds]

    def curve(self, arm: str, metric: str = "AUC") -> Curve:
        """Return a metric of an arm over its rates."""
        read = METRICS[metric]
        scores = [
            [read(self._rows[Run(self.cell.name, arm, r, seed)]) for seed in self.seeds]
            for r in self.cell.rates
        ]
        return Curve(self.cell.rates, np.array(scores, dtype=float))

    def scores_of(self, arm: str) -> Scores:
        """Return a function of a metric that returns the scores of an arm by rate and seed."""
        return lambda metric: self.curve(arm, metric).scores

    def at_best(self, arm: str, metric: str) -> float:
        """Return the mean of a metric over seeds, at the arm's best rate for AUC."""
        return float(self.curve(arm, metric).scores[self.curve(arm).best].mean())

    def difference(self, arm: str, minus: str, metric: str = "AUC") -> Interval:
        """Return the difference of two arms, each at its best rate for AUC."""
        ours, theirs = (
            partial(self.curve(x, metric).resampled_scores, chosen_by=self.curve(x)) for x in (arm, minus)
        )
        return difference(ours, theirs, self.groups)

    def at_one_rate(self, arm: str, minus: str) -> list[Interval]:
        """Return the differences of two arms at the same rate, for each rate of the cell."""
        ours = self.curve(arm)
        theirs = self.curve(minus)
        return [
            difference(ours.at_rate(k).resampled_scores, theirs.at_rate(k).resampled_scores, self.groups)
            for k in range(len(self.cell.rates))
        ]


def worlds_of(rows: Mapping[Run, Row]) -> dict[str, World]:
    """Return the settings with a finished seed, by name."""
    worlds = [World(cell, model, rows) for cell, model in product(CELLS, MODELS)]
    return {world.name: world for world in worlds if world.seeds}


def with_further_rates(rows: Mapping[Run, Row]) -> list[World]:
    """Return the cells of `FURTHER` with their further rates."""
    planned = {cell.name: cell for cell in CELLS}
    each = [(planned[more.name], more.rates) for more in FURTHER]
    return [World(replace(cell, rates=sorted([*cell.rates, *more])), "", rows) for cell, more in each]


def with_all_rates(rows: Mapping[Run, Row]) -> dict[str, World]:
    """Return the settings with a finished seed, by name, each with all rates that were run."""
    return worlds_of(rows) | {world.name: world for world in with_further_rates(rows)}


# The page -------------------------------------------------------------------------------------------------------------


def page(rows: Mapping[Run, Row]) -> Page:
    """Return the report."""
    worlds = worlds_of(rows)
    compared = {name: world for name, world in worlds.items() if world.compared}
    ended = [run in rows for _, run in runs([*CELLS, *FURTHER])]
    lead = [
        "Which upper bound suits data some batches old? A model of 335k parameters, products of numbers, two base "
        "models; the terms and predictions were committed before the first run.",
    ]
    if not all(ended):
        lead.append(f"**{sum(ended)} of {len(ended)} runs have ended. All verdicts are provisional.**")
    return Page(
        "Stale data: where the clip acts",
        lead,
        [
            Section("Predictions", _predictions(compared)),
            Section("Each rule", [_each_rule([w for w in compared.values() if w.name == w.cell.name])]),
            *([Section("Blocked share", _blocked(compared))] if compared else []),
            Section("Broken runs", [_broken(compared)]),
            *(Section(w.name, _world(w)) for w in worlds.values() if w.compared or w.name == w.cell.name),
            *(
                Section(f"{w.name}, with further rates", _world(w))
                for w in with_further_rates(rows)
                if w.compared
            ),
        ],
    )


def _predictions(worlds: Mapping[str, World]) -> list[Any]:
    rows = []
    for p in read_predictions(PREDICTIONS):
        cells = [p.world, f"{p.metric}: {p.arm} minus {p.minus}", p.expects]
        if world := worlds.get(p.world):
            gap = world.difference(p.arm, p.minus, p.metric)
            planned = len([s for s in world.cell.seeds if s % 2 in set(world.groups)])
            rows.append(
                [
                    *cells,
                    signed(gap),
                    f"{len(world.seeds)} of {planned}",
                    verdict(gap, p.expects, SMALLEST),
                ]
            )
        else:
            rows.append([*cells, "–", "0", "not yet"])
    header = ["setting", "what", "expected", "measured", "seeds", "verdict"]
    caption = (
        f"Entropy at {LEARNED:g} is at equal reward: when the mean reward of three batches first reaches {LEARNED:g}, "
        "and in the last batch of a run that never does."
    )
    content: list[Any] = [Table(header, rows, caption, prose=True)]
    if first := next(iter(worlds.values()), None):
        covered = simulated_coverage(first.curve(ABOVE), first.curve(CLIP), first.groups)
        content.append(
            "Intervals of 95 %, each arm at its own best rate, by a bootstrap over seeds within base models that "
            "chooses rates anew. In a simulation of the first prediction they held the truth in "
            f"{covered:.0%} of cases."
        )
    return content


def _each_rule(worlds: Sequence[World]) -> Table:
    """Return the table of each rule's gain over clip 0.2 by cell."""
    header = [arm for arm in ARMS if arm != CLIP]
    rows = []
    for world in worlds:
        gains = {arm: signed(world.difference(arm, CLIP)) for arm in header if arm in world.cell.arms}
        clip = f"{world.curve(CLIP).best_scores.mean():.3f}"
        rows.append([world.name, clip, *(gains.get(arm, "") for arm in header)])
    return Table(["setting", CLIP, *header], rows, "AUC, and what a rule adds to it, each at its best rate.")


def _blocked(worlds: Mapping[str, World]) -> list[Any]:
    """Return the tables of the share that the clip blocks and BandAbove's gain, by cell and base model."""
    single = [world for world in worlds.values() if len(set(world.groups)) == 1]
    pairs = sorted((w.at_best(CLIP, "blocked"), w.name, w.difference(ABOVE, CLIP)) for w in single)
    content: list[Any] = [
        Table(
            ["setting", "clip 0.2 blocks", "BandAbove minus clip 0.2"],
            [[name, f"{blocked:.2f}", signed(gap)] for blocked, name, gap in pairs],
            "Of rare winners' gradient (p < 0.1, A > 0), mean over batches, at the clip's best rate.",
        )
    ]
    if len(pairs) > 2:
        planned = [
            pair for pair in pairs if not pair[1].startswith(CELLS[-1].name)
        ]  # without the cell that was added later
        both, rho = (rank_correlation([(x, gap.value) for x, _, gap in some]) for some in (pairs, planned))
        content.append(
            f"Rank correlation over these {len(pairs)}: {both:.2f}; {rho:.2f} without what was added. Predicted: above "
            f"0.5; a gain below {SMALLEST} where up to 0.11 is blocked, and above it from 0.5 on."
        )
    at_one_rate = sorted(
        (float(blocked.mean()), w.name, f"{rate:g}", signed(gap))
        for w in single
        for rate, blocked, gap in zip(
            w.cell.rates, w.curve(CLIP, "blocked").scores, w.at_one_rate(ABOVE, CLIP), strict=True
        )
    )
    content.append(
        Table(
            ["setting", "rate", "clip 0.2 blocks", "BandAbove minus clip 0.2"],
            [[name, rate, f"{blocked:.2f}", gap] for blocked, name, rate, gap in at_one_rate],
            "The same with both arms at one rate: what a run tells that was trained with clip 0.2. Not predicted.",
        )
    )
    return content


def _broken(worlds: Mapping[str, World]) -> Table:
    """Return the table of the number of broken runs of each rule, over all rates."""
    arms = (CLIP, "clip [.8, 2]", ABOVE, "no upper bound")
    rows = [
        [w.name, *(f"{w.curve(a, 'broken').scores.sum():.0f}" for a in arms), f"{w.curve(CLIP).scores.size}"]
        for w in worlds.values()
        if w.name == w.cell.name and {*arms} <= {*w.cell.arms}
    ]
    caption = "Runs whose reward fell by half after its maximum. Predicted: most without an upper bound."
    return Table(["setting", *arms, "of"], rows, caption)


def _world(world: World) -> list[Any]:
    arms, clip = world.cell.arms, world.curve(CLIP)
    rows = []
    for arm in arms if world.compared else ():
        curve = world.curve(arm)
        middle = interquartile_mean(curve.best_scores) - interquartile_mean(clip.best_scores)
        rows.append(
            [
                arm,
                f"{curve.best_scores.mean():.3f}",
                "" if arm == CLIP else signed(world.difference(arm, CLIP)),
                "" if arm == CLIP else f"{middle:+.3f}",
                f"{curve.rates[curve.best]:g}{' (edge)' if curve.at_edge and len(curve.rates) > 1 else ''}",
                *(
                    f"{world.at_best(arm, name):.2f}"
                    for name in ("end", "pass@32", "entropy at end", "blocked")
                ),
            ]
        )
    curve_rows = [
        [
            arm,
            *(f"{scores.mean():.3f}" for scores in world.curve(arm).scores),
            *(f"{int(scores.sum())}" for scores in world.curve(arm, "broken").scores),
        ]
        for arm in arms
    ]
    rates = [f"{rate:g}" for rate in world.cell.rates]
    best = Table(
        ["arm", "AUC", "minus clip 0.2", "interquartile", "best rate", "end", "pass@32", "entropy", "blocks"],
        rows,
        f"{len(world.seeds)} seeds, each arm at its best rate; end, pass@32: of held-out problems; entropy: at equal "
        "step, nats per token in the last batch.",
    )
    curves = Table(
        ["arm", *(f"AUC at {rate}" for rate in rates), *(f"broken at {rate}" for rate in rates)],
        curve_rows,
        f"Whole rate curves, and how many runs broke; seeds: {len(world.seeds)}.",
    )
    if not world.compared:
        return [curves]
    if world.name != world.cell.name:
        return [best, curves]
    scores = {arm: world.scores_of(arm) for arm in arms}
    theirs = scores.pop(CLIP)
    return [best, curves, entropies_table({arm: (ours, theirs) for arm, ours in scores.items()}, CLIP)]


def main(arguments: Sequence[str]) -> None:
    """Read the results, and write the report."""
    runs_file, report = map(Path, arguments)
    for written in page(read_runs(runs_file)).save(report):
        print(f"wrote {written}")


if __name__ == "__main__":
    main(sys.argv[1:])
