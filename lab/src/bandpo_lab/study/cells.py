"""The map: arms under four optimizers, over starts, luck, batch sizes, updates and lags in the worlds of
`bandpo_lab.study.tabular`.

A cell is one arm in one place under one optimizer, at all learning rates and seeds. Cells run side by side, and each is
a line of one file as soon as it ends, so a map that was interrupted goes on where it was.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

import bandpo
from bandpo.divergences import TotalVariation
from bandpo.errors import InvalidValue, RunProblem
from bandpo.methods import BandAbove, Method
from bandpo.objectives import DualClip
from bandpo.rules import Band, ClipRule, FixedClip, Loosest, TwoSided, Unclipped
from bandpo.runs.files import read_jsonl
from bandpo_lab.files import drop_unfinished_line
from bandpo_lab.interval import Interval
from bandpo_lab.study.jobs import on_cores
from bandpo_lab.study.optimizers import OPTIMIZERS
from bandpo_lab.study.provenance import commit, machine, now
from bandpo_lab.study.statistics import Curve, difference, simulated_coverage
from bandpo_lab.study.tabular import (
    WRONG,
    Outcome,
    World,
    constant_rate,
    dominant,
    falling_rate,
    positions,
    random_rewards,
    rare_arm,
    simulate,
    two_stages,
    zipf,
)

Size = Literal["quick", "full"]

_CLIP = FixedClip(0.2)
_INFINITY = float("inf")


@dataclass(frozen=True)
class Arm:
    """A method and a schedule of the learning rate.

    Attributes:
        method: What `simulate` takes.
        kind: ``"constant"`` if its bounds are the same for every probability, ``"schedule"`` if the learning rate has
            a schedule besides, and ``"shape"`` if its bounds depend on the probability.
        rate_schedule: The factor of the learning rate by the share of the training that is done.
    """

    method: Method | ClipRule
    kind: Literal["constant", "schedule", "shape"] = "constant"
    rate_schedule: Callable[[float], float] = constant_rate


BASELINE = "clip 0.2"
ABOVE = "BandAbove"
BEST_CONSTANT = "the best constant"
"""The best of all arms with constant bounds, chosen with its learning rate on other seeds than it is scored on."""
RANDOM_REWARDS = "random rewards"
"""The world where no answer is better than another."""
ARMS: Mapping[str, Arm] = {
    BASELINE: Arm(_CLIP),
    "Clip-Higher": Arm(FixedClip(0.2, 0.28)),
    "clip [.8, 2]": Arm(FixedClip(0.2, 1.0)),
    "clip [.8, 5]": Arm(FixedClip(0.2, 4.0)),
    "no upper bound": Arm(FixedClip(0.2, _INFINITY)),
    "clip [.5, 1.2]": Arm(FixedClip(0.5, 0.2)),
    "clip [.5, 2]": Arm(FixedClip(0.5, 1.0)),
    "no lower bound": Arm(FixedClip(1.0, 0.2)),
    "no bound": Arm(Unclipped()),
    "dual clip 3": Arm(Method(_CLIP, DualClip(3.0))),
    "clip 0.2, falling rate": Arm(_CLIP, kind="schedule", rate_schedule=falling_rate),
    "Band": Arm(Band(), kind="shape"),
    ABOVE: Arm(BandAbove().clip, kind="shape"),
    "room by mass": Arm(
        TwoSided(lower=_CLIP, upper=Loosest(_CLIP, Band(TotalVariation(), 0.02))), kind="shape"
    ),
    "clip above, Band below": Arm(TwoSided(lower=Band(), upper=_CLIP), kind="shape"),
}
"""What is compared everywhere.

Room by mass lets an answer rise by 20 %, or by 0.02 of probability if that is more, at most tenfold.
"""
WORLDS: Mapping[str, Callable[[float, float], World]] = {
    "uniform": lambda p, luck: rare_arm(p, luck=luck),
    "dominant": dominant,
    "Zipf": zipf,
    "eight positions": positions,
    "two stages": lambda p, luck: two_stages(p),
    RANDOM_REWARDS: lambda p, luck: random_rewards(luck),
}
"""Worlds by name.

Each is made from the probability of the right answer at the start and the chance of a wrong one to be rewarded.
"""


@dataclass(frozen=True)
class Place:
    """Where in the map arms are compared."""

    world: str
    """One of `WORLDS`."""
    p: float
    """Probability of the answer to be found, at the start."""
    samples: int
    epochs: int
    minibatches: int
    lag: int
    """Batches between drawing a batch and training on it."""
    luck: float = WRONG
    """How often a wrong answer is rewarded."""

    @property
    def data(self) -> str:
        """How they are when they are trained on."""
        if self.lag:
            return "stale"
        return "fresh, used once" if self.epochs == 1 else "fresh, used more often"

    def __str__(self) -> str:
        shape = f"{self.samples} samples, {self.epochs} × {self.minibatches} updates, lag {self.lag}"
        if self.world == RANDOM_REWARDS:
            return f"{self.world}, {shape}"
        return f"{self.world}, p = {self.p:g}, luck {self.luck:g}, {shape}"


class Key(NamedTuple):
    """What names a cell."""

    place: Place
    optimizer: str
    arm: str


@dataclass(frozen=True)
class Cell:
    """An arm in a place under an optimizer: for each learning rate and seed what it came to.

    Shapes are ``(rates, seeds)``. A value that there is none of is None in the file and NaN here.
    """

    place: Place
    optimizer: str
    arm: str
    rates: Sequence[float]
    auc: np.ndarray
    """Mean reward over all batches."""
    end: np.ndarray
    """Mean reward over the last tenth of the batches."""
    batches_to_half: np.ndarray
    """Batches until the right answer has a probability of one half; NaN if it never has."""
    right_at_end: np.ndarray
    """Probability of the right answer at the end."""
    entropy_at_half: np.ndarray
    """Entropy when the right answer first has a probability of one half, in nats a decision."""
    entropy_at_end: np.ndarray
    """Entropy at the end, in nats a decision."""
    broken: np.ndarray
    """1 where the right answer has less than half of the greatest probability it had."""
    blocked: np.ndarray
    """Share of the gradient of rare winners that the method dropped."""
    luck: np.ndarray
    """Share of the winners' advantages in hard groups that is on common answers, as `Outcome` has it."""

    @property
    def key(self) -> Key:
        """Its name."""
        return Key(self.place, self.optimizer, self.arm)

    @cached_property
    def curve(self) -> Curve:
        """AUC over the rates."""
        return self.curve_of("auc")

    def curve_of(self, outcome: str) -> Curve:
        """Return an outcome over the rates, by the name of its attribute."""
        return Curve(self.rates, getattr(self, outcome))

    @classmethod
    def from_outcome(cls, key: Key, rates: Sequence[float], outcome: Outcome) -> Cell:
        """Take from a simulation what a cell keeps."""
        half = outcome.batches_to(0.5)
        return cls(
            *key,
            rates,
            auc=_array(outcome.auc),
            end=_array(outcome.end),
            batches_to_half=_array(torch.where(half.isinf(), torch.nan, half)),
            right_at_end=_array(outcome.right[..., -1]),
            entropy_at_half=_array(outcome.entropy_at(0.5)),
            entropy_at_end=_array(outcome.entropy[..., -1]),
            broken=_array(outcome.broken),
            blocked=_array(outcome.blocked),
            luck=_array(outcome.luck),
        )

    def as_row(self) -> dict[str, Any]:
        """Return the cell as a line of the file has it: outcomes in thousandths, as whole numbers."""
        row: dict[str, Any] = {
            "place": asdict(self.place),
            "optimizer": self.optimizer,
            "arm": self.arm,
            "rates": list(self.rates),
        }
        for name in OUTCOMES:
            row[name] = [
                [None if np.isnan(value) else round(1000 * float(value)) for value in values]
                for values in getattr(self, name)
            ]
        return row

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Cell:
        """Read a line of the file."""
        outcomes = {name: np.array(row[name], dtype=float) / 1000 for name in OUTCOMES}
        return cls(Place(**row["place"]), row["optimizer"], row["arm"], row["rates"], **outcomes)


OUTCOMES = (
    "auc",
    "end",
    "batches_to_half",
    "right_at_end",
    "entropy_at_half",
    "entropy_at_end",
    "broken",
    "blocked",
    "luck",
)
"""Attributes of a cell that have a value for each rate and seed."""


def _array(values: torch.Tensor) -> np.ndarray:
    """Return values as the file keeps them, so that a cell is the same before it is written and after it is read."""
    return np.round(values.numpy().astype(float) * 1000) / 1000


@dataclass(frozen=True)
class Plan:
    """Which cells, and how many seeds each has."""

    size: Size
    seeds: int
    places: Sequence[Place]
    batches: int = 80

    @classmethod
    def of_size(cls, size: Size) -> Plan:
        """Return the plan of the quick map, or of the full one.

        >>> len(Plan.of_size("quick").todo) < len(Plan.of_size("full").todo)
        True
        """
        if size == "quick":
            starts = ("uniform", "Zipf")
            return cls(size, 16, [Place(world, 0.002, 128, 1, 4, lag) for world in starts for lag in (0, 4)])
        starts = ("uniform", "Zipf", "dominant")
        reused_and_stale = (((4, 4), 0), ((1, 4), 4))
        # The places that answer most come first, so that a map that is cut off says something.
        places = [
            Place(world, 0.002, 128, *shape, lag) for world, (shape, lag) in product(starts, reused_and_stale)
        ]
        places += [Place(RANDOM_REWARDS, 0.0, 128, *shape, lag, 0.5) for shape, lag in reused_and_stale]
        # Where no wrong answer is rewarded, groups without the right one teach nothing.
        places += [
            Place(world, 0.01, 128, *shape, lag, luck)
            for world, (shape, lag), luck in product(("uniform", "Zipf"), reused_and_stale, (0.0, WRONG, 0.2))
        ]
        places += [
            Place("eight positions", 0.01, 128, *shape, lag, luck)
            for (shape, lag), luck in product(reused_and_stale, (WRONG, 0.2))
        ]
        places += [Place("two stages", 0.01, 128, *shape, lag) for shape, lag in reused_and_stale]
        places += [
            Place("uniform", 0.002, samples, *shape, lag)
            for samples, (shape, lag) in product((32, 512), reused_and_stale)
        ]
        others = (((1, 4), 0), ((1, 4), 8), ((4, 4), 4), ((4, 4), 8))
        places += [Place(world, 0.002, 128, *shape, lag) for world, (shape, lag) in product(starts, others)]
        return cls(size, 32, places)

    @property
    def todo(self) -> list[Key]:
        """Every cell."""
        return [Key(*key) for key in product(self.places, OPTIMIZERS, ARMS)]

    @property
    def header(self) -> dict[str, Any]:
        """The terms of the map: the first line of its file, apart from versions."""
        return {
            "size": self.size,
            "seeds": self.seeds,
            "batches": self.batches,
            "cells": len(self.todo),
        }


def run_cell(plan: Plan, key: Key) -> Cell:
    """Simulate one cell."""
    place, optimizer, arm = key
    rates = OPTIMIZERS[optimizer].rates
    outcome = simulate(
        WORLDS[place.world](place.p, place.luck),
        ARMS[arm].method,
        rates,
        seeds=plan.seeds,
        samples=place.samples,
        epochs=place.epochs,
        minibatches=place.minibatches,
        batches=plan.batches,
        lag=place.lag,
        optimizer=optimizer,
        rate_schedule=ARMS[arm].rate_schedule,
    )
    return Cell.from_outcome(key, rates, outcome)


def _run_alone(plan: Plan, key: Key) -> Cell:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it, and says so
    return run_cell(plan, key)


def run_map(plan: Plan, file: Path, workers: int) -> Iterator[tuple[int, Cell]]:
    """Run what ``file`` does not hold yet, cells side by side; each is in the file before it is yielded.

    Yields:
        How many cells the file holds by now, and the latest.

    Raises:
        ValueError: the file holds a map on other terms, or none.
        RunProblem: a cell failed.
    """
    done: Mapping[Key, Cell] = {}
    if file.exists():
        known = Map.from_file(file)
        if {name: known.terms.get(name) for name in plan.header} != plan.header:
            raise InvalidValue(
                f"{file} holds a map on other terms ({known.terms.get('size')}, {known.terms.get('seeds')} seeds); "
                "choose another --output_dir"
            )
        done = known.cells
        drop_unfinished_line(file)
    else:
        file.parent.mkdir(parents=True, exist_ok=True)
        versions = {"bandpo": bandpo.__version__, "torch": torch.__version__, "numpy": np.__version__}
        file.write_text(_line({**plan.header, "versions": versions}), encoding="utf-8")
    todo = [key for key in plan.todo if key not in done]
    calls = [partial(_run_alone, plan, key) for key in todo]
    with file.open("a", encoding="utf-8") as lines:
        ended = on_cores(calls, workers, preload=[__name__])
        for count, (number, outcome) in enumerate(ended, len(done) + 1):
            if outcome.code:
                key = todo[number]
                raise RunProblem(
                    f"{key.place} failed under {key.arm}, {key.optimizer}, with status {outcome.code}"
                )
            made = {
                "commit": commit(),
                "time": now(),
                "machine": machine(),
                "seconds": round(outcome.seconds, 1),
            }
            lines.write(_line({**outcome.value.as_row(), **made}))
            lines.flush()
            yield count, outcome.value


def _line(content: Mapping[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n"


# What a map says ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Map:
    """A map, or what there is of it so far."""

    terms: Mapping[str, Any]
    cells: Mapping[Key, Cell]

    @classmethod
    def from_file(cls, file: Path) -> Map:
        """Read a map from its file.

        Raises:
            ValueError: the file is no map.
        """
        rows = [row for _, row in read_jsonl(file)]
        if not rows or "versions" not in rows[0]:
            raise InvalidValue(f"{file} is no map that `bandpo-lab study map` has written")
        cells = map(Cell.from_row, rows[1:])
        return cls(rows[0], {cell.key: cell for cell in cells})

    @property
    def places(self) -> list[Place]:
        """Places in which every arm has run under every optimizer, in order."""
        begun = dict.fromkeys(key.place for key in self.cells)
        return [
            place
            for place in begun
            if all(Key(place, optimizer, arm) in self.cells for optimizer, arm in product(OPTIMIZERS, ARMS))
        ]

    @property
    def places_to_learn(self) -> list[Place]:
        """`places` where an answer is better than others."""
        return [place for place in self.places if place.world != RANDOM_REWARDS]

    def curve(self, place: Place, optimizer: str, arm: str) -> Curve:
        """Return the AUC of an arm over its rates; of `BEST_CONSTANT` over its bounds and rates."""
        names = [arm]
        if arm == BEST_CONSTANT:
            names = [name for name in ARMS if ARMS[name].kind == "constant"]
        curves = [self.cells[Key(place, optimizer, name)].curve for name in names]
        rates = [rate for curve in curves for rate in curve.rates]
        return Curve(rates, np.concatenate([curve.scores for curve in curves]))

    def blocked(self, place: Place, optimizer: str) -> float:
        """Return the share of rare winners' gradient that clip 0.2 blocks, at its best rate."""
        cell = self.cells[Key(place, optimizer, BASELINE)]
        return float(np.nanmean(cell.blocked[cell.curve.best]))

    def luck(self, place: Place, optimizer: str) -> float:
        """Return the luck under clip 0.2, at its best rate."""
        cell = self.cells[Key(place, optimizer, BASELINE)]
        return float(np.nanmean(cell.luck[cell.curve.best]))

    def score(self, place: Place, optimizer: str, arm: str) -> float:
        """Return the AUC of an arm at its best rate, which is chosen on other seeds."""
        curve = self.curve(place, optimizer, arm)
        return float(curve.drawn(np.ones((1, curve.scores.shape[1])))[0])

    def difference(
        self, place: Place, optimizer: str, arm: str, minus: str = BASELINE, draws: int = 300
    ) -> Interval:
        """Return an interval of one arm's AUC minus another's, each at its best rate."""
        ours = self.curve(place, optimizer, arm)
        theirs = self.curve(place, optimizer, minus)
        return difference(ours.drawn, theirs.drawn, [0] * ours.scores.shape[1], draws=draws)

    @cached_property
    def gains(self) -> Mapping[Key, Interval]:
        """Difference from `BEST_CONSTANT` of each arm of another kind, in `places_to_learn`."""
        arms = [name for name, arm in ARMS.items() if arm.kind != "constant"]
        keys = [Key(*key) for key in product(self.places_to_learn, OPTIMIZERS, arms)]
        return {key: self.difference(*key, minus=BEST_CONSTANT) for key in keys}

    def coverage(self, place: Place, optimizer: str, arm: str, minus: str = BASELINE) -> float:
        """Return how often the interval of `difference` holds the truth in a simulation of that place."""
        ours = self.curve(place, optimizer, arm)
        theirs = self.curve(place, optimizer, minus)
        return simulated_coverage(ours, theirs, [0] * ours.scores.shape[1])

    def at_best_rate(self, place: Place, optimizer: str, arm: str, outcome: str) -> np.ndarray:
        """Return an outcome for each seed, at the rate with the best AUC."""
        cell = self.cells[Key(place, optimizer, arm)]
        return getattr(cell, outcome)[cell.curve.best]
