"""Does one number of a batch order the effect of a clip's two sides over many settings?

    PYTHONPATH=research python -m studies.control_axis rows.jsonl             # goes on with what is missing
    PYTHONPATH=research python -m studies.control_axis rows.jsonl --count     # what is done, and what is left
    PYTHONPATH=research python -m studies.control_axis rows.jsonl --report report.md

The testbeds are those of `studies.control`. Updates on a batch, the age of the data, the epochs, the learning rate and
the noise of rewards vary. The numbers are taken from the runs under clip 0.2 alone, and nothing is fitted. The terms
and the predictions are in `control-axis-predictions.md`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from bandpo.audit.entropy_ledger import collision_of, entropy_changes
from bandpo.core.batch import Batch as TokenBatch
from bandpo.core.text import as_method
from bandpo_lab.errors import InvalidValue
from bandpo_lab.files.writing import replacing
from bandpo_lab.output.tables import Table
from bandpo_lab.study.interval import Interval, signed, student
from studies.control import (
    CLIP,
    Batch,
    Cell,
    Key,
    Trainer,
    keys_of,
    metric_of,
    print_count,
    read_rows,
    rules,
    run_missing,
)
from studies.learning_rates import rank_correlation

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

ARMS = (CLIP, "3 over .8", "Band over .8", "1.2 over Band", "Band over Band")
"""The rules from which the effect of each side of Band is read, with the constant of the dose of its upper side."""
PREDICTIONS = Path(__file__).parent / "control-axis-predictions.md"
SEEDS = range(2100, 2116)
"""The seeds, which no other cell has."""
EARLY = 8
"""The batches of the early ledger."""
RATES = {
    1: (0.05, 0.1, 0.2),
    4: (0.025, 0.05, 0.1),
    16: (0.0125, 0.025, 0.05),
    64: (0.00625, 0.0125, 0.025),
}
"""The learning rates by the number of updates on a batch, over all epochs."""
LEVELS = {"one token": 0.4, "eight tokens": 0.11}
"""The held-out reward at which entropies are compared at equal reward."""


def cell_of(world: str, minibatches: int, lag: int, epochs: int = 1, noise: float = 0.0) -> Cell:
    """Return a cell of the study."""
    name = f"{world}, {minibatches} x {epochs}, lag {lag}" + (f", noise {noise:g}" if noise else "")
    return Cell(
        name,
        world,
        minibatches,
        RATES[minibatches * epochs],
        SEEDS,
        LEVELS[world],
        lag=lag,
        epochs=epochs,
        noise=noise,
        arms=ARMS,
    )


def planned_cells() -> list[Cell]:
    """Return the cells in the order in which they run: the last ones are dropped first.

    One update on fresh data is left out: there every ratio is 1, so no rule differs from another.
    """
    first = [*product((64, 16, 4), (0, 4))]
    others = [(1, 4), *product((64, 16, 4, 1), (1,))]
    return [
        *(cell_of(world, parts, lag) for parts, lag in first for world in LEVELS),
        *(cell_of("one token", parts, 0, epochs=4) for parts in (16, 4)),
        *(cell_of("one token", parts, 0, noise=1.0) for parts in (64, 16)),
        *(cell_of(world, parts, lag) for parts, lag in others for world in LEVELS),
        *(cell_of("one token", parts, lag, noise=0.3) for parts, lag in product((64, 16, 4), (0, 4))),
        *(cell_of("one token", parts, 4, epochs=4) for parts in (16, 4, 1)),
        *(cell_of("one token", parts, 4, noise=1.0) for parts in (64, 16)),
        *(cell_of("eight tokens", parts, 0, epochs=4) for parts in (16, 4)),
        cell_of("one token", 1, 0, epochs=4),
        *(cell_of("one token", parts, 1, epochs=4) for parts in (16, 4, 1)),
    ]


ENDS = ("held out", "pass@32")
"""The curves of which a row has the end alone."""


class AxisTrainer(Trainer):
    """Trains with a rule, and keeps of the curves in its rows what the report reads."""

    def rows(self, arm: str) -> Iterator[dict[str, Any]]:
        """Yield the rows of `Trainer.rows` with the ends of the curves of `ENDS`."""
        for row in super().rows(arm):
            ends = {name: row["curves"][name][-1:] for name in ENDS}
            yield {**row, "curves": {**row["curves"], **ends}}


class AccountingTrainer(AxisTrainer):
    """Trains with clip 0.2, and takes from each update what Band's sides would have changed.

    Args:
        cell: The cell.
    """

    def __init__(self, cell: Cell):
        super().__init__(cell, rules()[CLIP])
        shape = (len(cell.rates), len(self.seeds))
        # By side: the gradient of surprising winners or losers, and the part beyond the bound of clip 0.2.
        self._surprising = torch.zeros(2, 2, *shape)
        # By side: the ledger with the second term, with its mean over the update, and of the early batches.
        self._ledgers = torch.zeros(2, len(LEDGERS), *shape)

    @torch.no_grad()
    def _update(self, batch: Batch, part: Int[Tensor, "seeds answers"]) -> Tensor:
        features, tokens, logp_old, advantages = self.part_of(batch, part)
        logp_all = self._logp_all(features)
        logp = logp_all.gather(-1, tokens[..., None])[..., 0]
        entropy = -(logp_all.exp() * logp_all).sum(-1)
        self._add_surprising(logp, logp_old, advantages[..., None], entropy)
        self._add_ledgers(logp, logp_old, advantages, entropy, collision_of(logp_all))
        with torch.enable_grad():
            return super()._update(batch, part)

    def _add_surprising(self, logp: Tensor, logp_old: Tensor, advantages: Tensor, entropy: Tensor) -> None:
        """Add the gradient of tokens that are more surprising than the mean, and its part beyond the bound."""
        ratio = (logp - logp_old).exp()
        gradient = (ratio * advantages).abs() * (-logp > entropy)
        sides = ((advantages > 0, ratio > 1.2), (advantages < 0, ratio < 0.8))
        for index, (is_side, is_beyond) in enumerate(sides):
            of_side = gradient * is_side
            self._surprising[index] += torch.stack(
                [of_side.sum((-1, -2)), (of_side * is_beyond).sum((-1, -2))]
            )

    def _add_ledgers(
        self, logp: Tensor, logp_old: Tensor, advantages: Tensor, entropy: Tensor, collision: Tensor
    ) -> None:
        """Add the ledger of each side of Band minus that of clip 0.2, as a mean over the tokens times the rate."""
        tokens = TokenBatch.read(
            logp.flatten(0, 2), logp_old.flatten(0, 2), advantages.flatten(), entropy=entropy.flatten(0, 2)
        )
        surprise = logp.exp() * (logp + entropy)
        mean = surprise.mean((-1, -2), keepdim=True)
        rates = torch.tensor(self.cell.rates)[:, None]
        is_early = len(self.curves["spread"]) < EARLY

        def changes(arm: str) -> tuple[Tensor, Tensor]:
            """Return the changes without the second term, and the gradient, by which a second term is multiplied."""
            method = as_method(rules()[arm])
            first = entropy_changes(tokens, method)
            return first.view_as(logp), (entropy_changes(tokens, method, 1.0) - first).view_as(logp)

        clip_first, clip_gradient = changes(CLIP)
        for index, arm in enumerate(SIDES.values()):
            first, gradient = changes(arm)
            first, gradient = first - clip_first, gradient - clip_gradient
            exact = rates * (first + gradient * collision).mean((-1, -2))
            record = rates * (first + gradient * mean).mean((-1, -2))
            self._ledgers[index] += torch.stack([exact, record, exact * is_early])

    def rows(self, arm: str) -> Iterator[dict[str, Any]]:
        """Yield the rows of `AxisTrainer.rows` with the numbers of each side."""
        shares = (self._surprising[:, 1] / self._surprising[:, 0]).nan_to_num(0.0)
        places = product(range(len(self.cell.rates)), range(len(self.seeds)))
        for row, place in zip(super().rows(arm), places, strict=True):
            numbers = {}
            for index, side in enumerate(SIDES):
                numbers[f"beyond {side}"] = round(shares[index, *place].item(), 5)
                for name, values in zip(LEDGERS, self._ledgers[index], strict=True):
                    numbers[f"{name} {side}"] = float(f"{values[*place].item():.4g}")
            yield {**row, **numbers}


SIDES = {"above": "Band over .8", "below": "1.2 over Band"}
"""The rules with one side of Band, by side."""
LEDGERS = ("ledger", "record", "early")
"""The ledgers: with the second term, with its mean over the update instead, and that of the first batches alone."""


def trainer_of(cell: Cell, arm: str) -> Trainer:
    """Return what trains a rule of a cell."""
    return AccountingTrainer(cell) if arm == CLIP else AxisTrainer(cell, rules()[arm])


# The report -----------------------------------------------------------------------------------------------------------

NUMBERS = {
    "above": {
        "spread": "spread of log-ratios in the last update",
        "beyond above": "share of surprising winners beyond 1.2",
        "ledger above": "ledger of Band's upper side",
        "record above": "the same, second term by its mean",
        "early above": "the same, first 8 batches",
    },
    "below": {
        "spread": "spread of log-ratios in the last update",
        "beyond below": "share of surprising losers below 0.8",
        "ledger below": "ledger of Band's lower side",
        "record below": "the same, second term by its mean",
        "early below": "the same, first 8 batches",
    },
}
"""The numbers by side. Each is of a run under clip 0.2."""
EFFECTS = {"above": ("Band over .8", CLIP), "below": ("1.2 over Band", CLIP)}
"""The effect of each side of Band: a rule and what it is compared with."""
BEYOND_DOSE = ("Band over .8", "3 over .8")
"""What knowing the probability adds to a constant of the same dose."""
ENOUGH = 0.8
"""The rank correlation from which a number is said to order an effect."""
SURE_ENOUGH = 0.7
"""What the lower end of its interval must be."""
RESAMPLES = 1000


class Expected(NamedTuple):
    """A predicted rank correlation of a number with an effect, over all settings of a testbed."""

    testbed: str
    number: str
    at_least: float


def read_expected(file: Path = PREDICTIONS) -> list[Expected]:
    """Return the table of predictions: testbed, number, at least, why.

    Raises:
        ValueError: if there is no table.
    """
    rows = [row.split(" | ") for row in re.findall(r"^\| (.*) \|$", file.read_text(encoding="utf-8"), re.M)]
    expected = [
        Expected(row[0], row[1], float(row[2])) for row in rows if len(row) == 4 and row[0] != "testbed"
    ]
    if not expected:
        raise InvalidValue(f"{file} has no table of predictions")
    return expected


class AxisSetting(NamedTuple):
    """A cell at one learning rate, with all seeds of all rules."""

    cell: Cell
    rate: float
    rows: Mapping[str, Sequence[Mapping[str, Any]]]
    """The rows of each rule by seed."""

    def number(self, name: str) -> np.ndarray:
        """Return a number of the runs under clip 0.2, by seed."""
        return np.array([row[name] for row in self.rows[CLIP]])

    def effect(self, arm: str, other: str, metric: str = "entropy") -> np.ndarray:
        """Return the difference of two rules, by seed."""
        ours, theirs = (
            np.array([metric_of(row, metric, self.cell.level) for row in self.rows[name]])
            for name in (arm, other)
        )
        return ours - theirs


def axis_settings(rows: Mapping[Key, Mapping[str, Any]]) -> list[AxisSetting]:
    """Return the settings of which all runs are there."""
    settings: list[AxisSetting] = []
    for cell in planned_cells():
        for rate in cell.rates:
            keys = {arm: [Key(cell.name, arm, rate, seed) for seed in cell.seeds] for arm in cell.arms}
            if all(key in rows for of_arm in keys.values() for key in of_arm):
                settings.append(
                    AxisSetting(
                        cell, rate, {arm: [rows[key] for key in of_arm] for arm, of_arm in keys.items()}
                    )
                )
    return settings


class Group(NamedTuple):
    """Settings that are looked at together."""

    name: str
    settings: Sequence[AxisSetting]

    def values(self, number: str, side: str) -> tuple[np.ndarray, np.ndarray]:
        """Return a number and an effect of each setting and seed."""
        numbers = np.array([setting.number(number) for setting in self.settings])
        effects = np.array([setting.effect(*EFFECTS[side]) for setting in self.settings])
        return numbers, effects

    def correlation(self, number: str, side: str) -> Interval:
        """Return the rank correlation over the settings of means over the seeds, with an interval over seeds.

        Seeds are resampled for all settings together, which share them. The interval says nothing of other settings.
        """
        numbers, effects = self.values(number, side)
        # A lower bound costs entropy where it acts: a share or a spread that is large goes with a low effect.
        sign = -1 if side == "below" and number in ("spread", "beyond below") else 1
        draws = np.random.default_rng(0).integers(numbers.shape[1], size=(RESAMPLES, numbers.shape[1]))

        def over_settings(seeds: np.ndarray) -> float:
            return sign * rank_correlation(
                [*zip(numbers[:, seeds].mean(1), effects[:, seeds].mean(1), strict=True)]
            )

        low, high = np.percentile([over_settings(draw) for draw in draws], [2.5, 97.5])
        return Interval(over_settings(np.arange(numbers.shape[1])), float(low), float(high))


def groups_of(settings: Sequence[AxisSetting]) -> list[Group]:
    """Return the groups of settings: each testbed with rewards for right answers, both, and all with random rewards."""
    right = [setting for setting in settings if setting.cell.noise < 1]
    groups = [
        *(Group(world, [each for each in right if each.cell.world == world]) for world in LEVELS),
        Group("both testbeds", right),
        Group("both, and random rewards", settings),
    ]
    return [group for group in groups if len(group.settings) >= 4]


class Axis:
    """The settings of rows, with their groups.

    Args:
        rows: The rows.
    """

    def __init__(self, rows: Mapping[Key, Mapping[str, Any]]):
        self.rows = rows
        self.settings = axis_settings(rows)

    @cached_property
    def groups(self) -> dict[str, Group]:
        """The groups by name."""
        return {group.name: group for group in groups_of(self.settings)}

    @cached_property
    def correlations(self) -> dict[tuple[str, str], Interval]:
        """The rank correlation by group and number, "spread" as "spread above" and "spread below"."""
        return {
            (name, number if number.endswith(side) else f"{number} {side}"): group.correlation(number, side)
            for name, group in self.groups.items()
            for side, numbers in NUMBERS.items()
            for number in numbers
        }

    def correlations_table(self) -> Table:
        """Return the rank correlation of each number with the effect of its side, by group."""
        cells: list[list[str]] = []
        for side, numbers in NUMBERS.items():
            for number, title in numbers.items():
                name = number if number.endswith(side) else f"{number} {side}"
                found = [signed(self.correlations[group, name], 2) for group in self.groups]
                cells.append([f"{side}: {title}", *found])
        header = [f"{name} ({len(group.settings)})" for name, group in self.groups.items()]
        return Table(["side: number", *header], cells)

    def signs_table(self) -> Table:
        """Return how often a ledger has the sign of an effect that is sure, beside a vote by side alone."""
        cells: list[list[str]] = []
        for name, group in self.groups.items():
            for side, vote in (("above", 1), ("below", -1)):
                sure = [setting for setting in group.settings if is_sure(setting.effect(*EFFECTS[side]))]
                signs = np.array([np.sign(setting.effect(*EFFECTS[side]).mean()) for setting in sure])
                texts = [f"{name}, {side}", f"{len(sure)} of {len(group.settings)}"]
                texts.append(str(int((signs == vote).sum())))
                for ledger in LEDGERS:
                    ledgers = [np.sign(setting.number(f"{ledger} {side}").mean()) for setting in sure]
                    texts.append(str(int((signs == ledgers).sum())))
                cells.append(texts)
        return Table(
            ["settings, side", "sure effects", "right: vote by side", *(f"right: {x}" for x in LEDGERS)],
            cells,
        )

    def verdicts_table(self) -> Table:
        """Return the verdict on each predicted rank correlation."""
        cells: list[list[str]] = []
        for testbed, number, at_least in read_expected():
            found = self.correlations.get((testbed, number))
            if found is None:
                cells.append([testbed, number, f"{at_least:g}", "not run", "open"])
                continue
            cells.append([testbed, number, f"{at_least:g}", signed(found, 2), verdict_on(found, at_least)])
        return Table(["settings", "number", "at least", "rank correlation", "verdict"], cells)

    def settings_table(self) -> Table:
        """Return each setting: the numbers under clip 0.2, and the effects."""
        cells: list[list[str]] = []
        for setting in sorted(self.settings, key=lambda each: each.number("spread").mean()):
            numbers = [
                f"{setting.number(name).mean():.3g}"
                for name in ("spread", "beyond above", "beyond below", "ledger above", "ledger below")
            ]
            effects = [
                signed(student(setting.effect(*EFFECTS["above"]))),
                signed(student(setting.effect(*EFFECTS["below"]))),
                signed(student(setting.effect("Band over Band", CLIP))),
                signed(student(setting.effect(*BEYOND_DOSE))),
                signed(student(setting.effect(*BEYOND_DOSE, "pass@32"))),
            ]
            cells.append([f"{setting.cell.name} at {setting.rate:g}", *numbers, *effects])
        header = [
            "setting",
            "spread",
            "beyond 1.2",
            "beyond 0.8",
            "ledger above",
            "ledger below",
            "upper side, entropy",
            "lower side, entropy",
            "both, entropy",
            "Band over .8 minus 3 over .8, entropy",
            "the same, pass@32",
        ]
        return Table(header, cells)

    def ranges_table(self) -> Table:
        """Return the effects by the spread of log-ratios: how many settings have a sure one, and their mean."""
        cells: list[list[str]] = []
        for low, high in pairwise(SPREADS):
            inside = [each for each in self.settings if low <= each.number("spread").mean() < high]
            if not inside:
                continue
            texts = [f"{low:g} to {high:g}" if high < 10 else f"{low:g} and more", str(len(inside))]
            texts.append(", ".join(f"{blocked_above(inside, arm):.3f}" for arm in BEYOND_DOSE))
            for arm, other, metric in SHOWN:
                effects = [setting.effect(arm, other, metric) for setting in inside]
                sure = [np.sign(effect.mean()) for effect in effects if is_sure(effect)]
                mean = np.mean([effect.mean() for effect in effects])
                texts.append(f"{mean:+.3f} ({sure.count(1)} above, {sure.count(-1)} below)")
            cells.append(texts)
        header = [f"{arm} minus {other}, {metric}" for arm, other, metric in SHOWN]
        return Table(["spread", "settings", f"blocked above: {', '.join(BEYOND_DOSE)}", *header], cells)

    def runs_table(self) -> Table:
        """Return how many of the planned runs of each cell there are."""
        cells: list[list[str]] = []
        for cell in planned_cells():
            keys = [key for arm in cell.arms for key in keys_of(cell, arm, cell.seeds)]
            cells.append([cell.name, f"{sum(key in self.rows for key in keys)} of {len(keys)}"])
        return Table(["cell", "runs"], cells)


SPREADS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 100.0)
"""The edges of the ranges of spreads."""
SHOWN = (
    (*EFFECTS["above"], "entropy"),
    (*EFFECTS["below"], "entropy"),
    (*BEYOND_DOSE, "entropy"),
    (*BEYOND_DOSE, "pass@32"),
    (*BEYOND_DOSE, "end"),
)
"""The differences by spread."""


def blocked_above(settings: Sequence[AxisSetting], arm: str) -> float:
    """Return the share of the gradient of rare winners that a rule dropped, as a mean over settings and seeds."""
    return float(np.mean([row["blocked above"] for setting in settings for row in setting.rows[arm]]))


def is_sure(values: np.ndarray) -> bool:
    """Return True if the interval at 95 % of paired differences excludes 0."""
    interval = student(values)
    return interval.low > 0 or interval.high < 0


def verdict_on(found: Interval, at_least: float) -> str:
    """Return the verdict on a predicted rank correlation.

    >>> verdict_on(Interval(0.8, 0.7, 0.9), 0.6), verdict_on(Interval(0.3, 0.1, 0.5), 0.6)
    ('held', 'failed')
    """
    if found.value >= at_least and found.low >= at_least - (ENOUGH - SURE_ENOUGH):
        return "held"
    return "failed" if found.high < at_least else "undecided"


def orders(axis: Axis, number: str) -> bool:
    """Return True if a number is said to order the effect of its side: in each testbed, and in both together."""
    found = [axis.correlations.get((group, number)) for group in (*LEVELS, "both testbeds")]
    return all(each and each.value >= ENOUGH and each.low >= SURE_ENOUGH for each in found)


def page(rows: Mapping[Key, Mapping[str, Any]]) -> str:
    """Return the report as Markdown."""
    axis = Axis(rows)
    named = [name for name in dict.fromkeys(number for _, number in axis.correlations) if orders(axis, name)]
    lines = [
        "# One number of a batch",
        "",
        "Written by `python -m studies.control_axis research/results/control/axis.jsonl.gz --report`. The terms, the "
        "settings and the predictions are those of `research/studies/control-axis-predictions.md`, committed before "
        "the runs. Intervals are of 95 %, not adjusted; there are sixteen seeds. Nothing is fitted.",
        "",
        "## Does one number order the effects?",
        "",
        f"Said to order the effect of its side in entropy at equal step: {', '.join(named) or 'none'}. That is a rank "
        f"correlation of at least {ENOUGH:g}, with an interval from at least {SURE_ENOUGH:g} on, in each testbed and "
        "in both together.",
        "",
        "The numbers are means over the runs under clip 0.2. The interval is over seeds, and says nothing of other "
        "settings. Signs are turned so that a number that orders an effect has a correlation of +1.",
        "",
        axis.correlations_table().markdown(),
        "",
        "## Predictions",
        "",
        f"Of {sum(len(cell.rates) for cell in planned_cells())} planned settings {len(axis.settings)} have all their "
        "runs, and the verdicts are of these alone.",
        "",
        axis.verdicts_table().markdown(),
        "",
        "## Signs",
        "",
        "Of the settings in which the interval of an effect excludes 0: how often the upper side keeps entropy and the "
        "lower one costs it, and how often a ledger has the sign.",
        "",
        axis.signs_table().markdown(),
        "",
        "## By the spread of log-ratios",
        "",
        "The mean of the differences, and how many of them surely exclude 0. Entropy is at equal step. The constant of "
        "3 has Band's dose in the cells of the control. What both block elsewhere, of the gradient of rare winners, is "
        "beside it. No prediction is about this table.",
        "",
        axis.ranges_table().markdown(),
        "",
        "## Each setting",
        "",
        "Entropy is at equal step.",
        "",
        axis.settings_table().markdown(),
        "",
        "## Runs",
        "",
        axis.runs_table().markdown(),
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the file does not have, count it, or write the report."""
    parser = argparse.ArgumentParser(prog="python -m studies.control_axis")
    parser.add_argument("rows", type=Path, help="one line for each run; made if it is not there")
    parser.add_argument("--report", type=Path, help="only write the report to this file")
    parser.add_argument("--count", action="store_true", help="only print what is done and what is left")
    options = parser.parse_args(arguments)
    if options.report:
        with replacing(options.report) as unfinished:
            unfinished.write_text(page(read_rows(options.rows)), encoding="utf-8")
    elif options.count:
        print_count(options.rows, planned_cells())
    else:
        run_missing(options.rows, planned_cells(), trainer_of)


if __name__ == "__main__":
    main()
