"""The grid of `studies.tables_map`: arms under four optimizers in many settings of `studies.bandits`.

Settings differ in the starting policy, luck, batch size, updates and lag. A cell is one arm in one setting under one
optimizer, at all learning rates and seeds. Cells run in parallel, and each is written as one line of a file as soon as
it ends, so an interrupted grid can be resumed.
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
from bandpo.core.divergences import TotalVariation
from bandpo.core.methods import BandAbove, Method
from bandpo.core.objectives import DualClip
from bandpo.core.rules import Band, ClipRule, FixedClip, Loosest, TwoSided, Unclipped
from bandpo_lab.errors import InvalidValue, RunProblem
from bandpo_lab.files.writing import drop_unfinished_line
from bandpo_lab.study.interval import Interval
from bandpo_lab.study.jobs import run_in_processes
from bandpo_lab.study.provenance import commit, machine, now
from rlvet.runs.files import read_jsonl
from studies.bandits import (
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
from studies.learning_rates import Curve, difference, remembering, simulated_coverage
from studies.optimizers import OPTIMIZERS

Size = Literal["quick", "full"]

_CLIP = FixedClip(0.2)
_INFINITY = float("inf")


@dataclass(frozen=True)
class Arm:
    """A method and a schedule of the learning rate.

    Attributes:
        method: The method, or its clip rule.
        kind: ``"constant"`` if its bounds are the same for every probability, ``"schedule"`` if in addition the
            learning rate has a schedule, and ``"shape"`` if its bounds depend on the probability.
        rate_schedule: A function from the share of the training that is done to a factor of the learning rate.
    """

    method: Method | ClipRule
    kind: Literal["constant", "schedule", "shape"] = "constant"
    rate_schedule: Callable[[float], float] = constant_rate


BASELINE = "clip 0.2"
ABOVE = "BandAbove"
BEST_CONSTANT = "the best constant"
"""The best of all arms with constant bounds, chosen with its learning rate on other seeds than it is scored on."""
RANDOM_REWARDS = "random rewards"
"""The world in which no answer is better than another."""
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
"""The arms of every setting.

``room by mass`` lets the probability of an answer rise by 20 %, or by 0.02 if that is more, at most tenfold.
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

Each is a function of the initial probability of the right answer and of the probability that a wrong answer is
rewarded.
"""


@dataclass(frozen=True)
class Setting:
    """A setting in which arms are compared: a world and the sizes of the training."""

    world: str
    """The name of one of `WORLDS`."""
    p: float
    """The initial probability of the right answer."""
    samples: int
    """The completions of a batch."""
    epochs: int
    """The number of times that each completion is used."""
    minibatches: int
    """The optimizer steps per epoch."""
    lag: int
    """The number of batches between sampling a batch and training on it."""
    luck: float = WRONG
    """The probability that a wrong answer is rewarded."""

    @property
    def data(self) -> str:
        """The kind of data that the policy is trained on: one of `studies.grid_report.DATA`."""
        if self.lag:
            return "stale"
        return "fresh, used once" if self.epochs == 1 else "fresh, used more often"

    def __str__(self) -> str:
        shape = f"{self.samples} samples, {self.epochs} × {self.minibatches} updates, lag {self.lag}"
        if self.world == RANDOM_REWARDS:
            return f"{self.world}, {shape}"
        return f"{self.world}, p = {self.p:g}, luck {self.luck:g}, {shape}"


class Key(NamedTuple):
    """The key of a cell."""

    setting: Setting
    optimizer: str
    arm: str


@dataclass(frozen=True)
class Cell:
    """The outcomes of an arm in a setting under an optimizer, for each learning rate and seed.

    Arrays have the shape ``(rates, seeds)``. A missing value is None in the file and NaN here.
    """

    setting: Setting
    optimizer: str
    arm: str
    rates: Sequence[float]
    auc: np.ndarray
    """The mean reward over all batches."""
    end: np.ndarray
    """The mean reward over the last tenth of the batches."""
    batches_to_half: np.ndarray
    """The number of batches until the right answer has a probability of one half; NaN if it never has."""
    right_at_end: np.ndarray
    """The probability of the right answer at the end."""
    entropy_at_half: np.ndarray
    """The entropy when the right answer first has a probability of one half, in nats per decision."""
    entropy_at_end: np.ndarray
    """The entropy at the end, in nats per decision."""
    broken: np.ndarray
    """1 if the final probability of the right answer is less than half of its maximum during training, else 0."""
    blocked: np.ndarray
    """The share of the gradient of rare winners that the method dropped."""
    luck: np.ndarray
    """The share of the winners' advantages in hard groups that is on common answers (see `Outcome`)."""

    @property
    def key(self) -> Key:
        """The key of the cell."""
        return Key(self.setting, self.optimizer, self.arm)

    @cached_property
    def curve(self) -> Curve:
        """The AUC over learning rates and seeds."""
        return self.curve_of("auc")

    def curve_of(self, outcome: str) -> Curve:
        """Return an outcome over learning rates and seeds, by the name of its attribute."""
        return Curve(self.rates, getattr(self, outcome))

    @classmethod
    def from_outcome(cls, key: Key, rates: Sequence[float], outcome: Outcome) -> Cell:
        """Create a cell from the outcome of a simulation."""
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
        """Return the cell as a row of the file, with outcomes in thousandths, as whole numbers."""
        row: dict[str, Any] = {
            "place": asdict(self.setting),
            "optimizer": self.optimizer,
            "arm": self.arm,
            "rates": list(self.rates),
        }
        for name in OUTCOMES:
            row[name] = [list(map(_thousandths, seed_values)) for seed_values in getattr(self, name)]
        return row

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Cell:
        """Create a cell from a row of the file."""
        outcomes = {name: np.array(row[name], dtype=float) / 1000 for name in OUTCOMES}
        return cls(Setting(**row["place"]), row["optimizer"], row["arm"], row["rates"], **outcomes)


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
"""The attributes of a cell that have a value for each rate and seed."""


def _thousandths(value: float) -> int | None:
    """Return a value in thousandths as a whole number; None for NaN."""
    return None if np.isnan(value) else round(1000 * float(value))


def _array(values: torch.Tensor) -> np.ndarray:
    """Round values as the file does, so that a cell does not change when it is written and read."""
    return np.round(values.numpy().astype(float) * 1000) / 1000


@dataclass(frozen=True)
class GridPlan:
    """The settings and the number of seeds and batches of a grid."""

    size: Size
    seeds: int
    settings: Sequence[Setting]
    batches: int = 80

    @classmethod
    def of_size(cls, size: Size) -> GridPlan:
        """Return the plan of the quick grid or of the full one.

        >>> len(GridPlan.of_size("quick").keys) < len(GridPlan.of_size("full").keys)
        True
        """
        if size == "quick":
            settings = [
                Setting(world, 0.002, 128, 1, 4, lag) for world, lag in product(("uniform", "Zipf"), (0, 4))
            ]
            return cls(size, 16, settings)
        starts = ("uniform", "Zipf", "dominant")
        # Pairs of (epochs, minibatches) and lag.
        reused_and_stale = (((4, 4), 0), ((1, 4), 4))
        # The most informative settings come first, so that an interrupted grid is useful.
        settings = [
            Setting(world, 0.002, 128, *shape, lag)
            for world, (shape, lag) in product(starts, reused_and_stale)
        ]
        settings += [Setting(RANDOM_REWARDS, 0.0, 128, *shape, lag, 0.5) for shape, lag in reused_and_stale]
        # With luck 0, groups without the right answer have no gradient.
        settings += [
            Setting(world, 0.01, 128, *shape, lag, luck)
            for world, (shape, lag), luck in product(("uniform", "Zipf"), reused_and_stale, (0.0, WRONG, 0.2))
        ]
        settings += [
            Setting("eight positions", 0.01, 128, *shape, lag, luck)
            for (shape, lag), luck in product(reused_and_stale, (WRONG, 0.2))
        ]
        settings += [Setting("two stages", 0.01, 128, *shape, lag) for shape, lag in reused_and_stale]
        settings += [
            Setting("uniform", 0.002, samples, *shape, lag)
            for samples, (shape, lag) in product((32, 512), reused_and_stale)
        ]
        further_shapes = (((1, 4), 0), ((1, 4), 8), ((4, 4), 4), ((4, 4), 8))
        settings += [
            Setting(world, 0.002, 128, *shape, lag) for world, (shape, lag) in product(starts, further_shapes)
        ]
        return cls(size, 32, settings)

    @property
    def keys(self) -> list[Key]:
        """The keys of all cells, in the order in which they run."""
        return [Key(*key) for key in product(self.settings, OPTIMIZERS, ARMS)]

    @property
    def header(self) -> dict[str, Any]:
        """The first line of the grid's file, apart from the versions of packages."""
        return {
            "size": self.size,
            "seeds": self.seeds,
            "batches": self.batches,
            "cells": len(self.keys),
        }


def run_cell(plan: GridPlan, key: Key) -> Cell:
    """Simulate one cell."""
    setting, optimizer, arm = key
    rates = OPTIMIZERS[optimizer].rates
    outcome = simulate(
        WORLDS[setting.world](setting.p, setting.luck),
        ARMS[arm].method,
        rates,
        seeds=plan.seeds,
        samples=setting.samples,
        epochs=setting.epochs,
        minibatches=setting.minibatches,
        batches=plan.batches,
        lag=setting.lag,
        optimizer=optimizer,
        rate_schedule=ARMS[arm].rate_schedule,
    )
    return Cell.from_outcome(key, rates, outcome)


def _run_in_worker(plan: GridPlan, key: Key) -> Cell:
    """Simulate one cell in a worker process, with one thread."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles interrupts and ends this process
    return run_cell(plan, key)


def run_grid(plan: GridPlan, file: Path, workers: int) -> Iterator[tuple[int, Cell]]:
    """Run the cells of a plan that are not in ``file`` yet, several at a time.

    Args:
        plan: The plan.
        file: The file of the grid, which is created if it does not exist.
        workers: The number of simultaneous processes.

    Yields:
        The number of cells in the file and the latest cell, after it was written.

    Raises:
        ValueError: The file holds a grid of another plan, or no grid.
        RunProblem: A cell failed.
    """
    # Read the cells of an interrupted grid, or begin the file.
    finished: Mapping[Key, Cell] = {}
    if file.exists():
        grid = Grid.from_file(file)
        if {name: grid.terms.get(name) for name in plan.header} != plan.header:
            raise InvalidValue(
                f"{file} holds a map on other terms ({grid.terms.get('size')}, {grid.terms.get('seeds')} seeds); "
                "choose another --output_dir"
            )
        finished = grid.cells
        drop_unfinished_line(file)
    else:
        file.parent.mkdir(parents=True, exist_ok=True)
        versions = {"bandpo": bandpo.__version__, "torch": torch.__version__, "numpy": np.__version__}
        file.write_text(_line({**plan.header, "versions": versions}), encoding="utf-8")
    missing = [key for key in plan.keys if key not in finished]
    calls = [partial(_run_in_worker, plan, key) for key in missing]
    with file.open("a", encoding="utf-8") as lines:
        job_results = run_in_processes(calls, workers, preload=[__name__])
        for count, (index, job_result) in enumerate(job_results, len(finished) + 1):
            if job_result.code:
                key = missing[index]
                raise RunProblem(
                    f"{key.setting} failed under {key.arm}, {key.optimizer}, with status {job_result.code}"
                )
            provenance = {
                "commit": commit(),
                "time": now(),
                "machine": machine(),
                "seconds": round(job_result.seconds, 1),
            }
            lines.write(_line({**job_result.value.as_row(), **provenance}))
            lines.flush()  # so that it is not lost if the process is killed
            yield count, job_result.value


def _line(content: Mapping[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n"


# Results of a grid ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Grid:
    """The cells of a grid, which may be unfinished."""

    terms: Mapping[str, Any]
    """The first line of the file: the size of the grid and the versions of packages."""
    cells: Mapping[Key, Cell]

    @classmethod
    def from_file(cls, file: Path) -> Grid:
        """Read a grid from its file.

        Raises:
            ValueError: The file is not one of `run_grid`.
        """
        rows = [row for _, row in read_jsonl(file)]
        if not rows or "versions" not in rows[0]:
            raise InvalidValue(f"{file} was not written by `studies.tables_map`")
        cells = map(Cell.from_row, rows[1:])
        return cls(rows[0], {cell.key: cell for cell in cells})

    @property
    def settings(self) -> list[Setting]:
        """The settings in which every arm has run under every optimizer, in order."""
        all_settings = dict.fromkeys(key.setting for key in self.cells)
        return [setting for setting in all_settings if self._is_complete(setting)]

    def _is_complete(self, setting: Setting) -> bool:
        keys = (Key(setting, optimizer, arm) for optimizer, arm in product(OPTIMIZERS, ARMS))
        return all(key in self.cells for key in keys)

    @property
    def settings_to_learn(self) -> list[Setting]:
        """The members of `settings` in which an answer is better than others."""
        return [setting for setting in self.settings if setting.world != RANDOM_REWARDS]

    def curve(self, setting: Setting, optimizer: str, arm: str) -> Curve:
        """Return the AUC of an arm over its rates; for `BEST_CONSTANT`, over all constant arms and their rates."""
        names = [arm]
        if arm == BEST_CONSTANT:
            names = [name for name in ARMS if ARMS[name].kind == "constant"]
        curves = [self.cells[Key(setting, optimizer, name)].curve for name in names]
        rates: list[float] = []
        for curve in curves:
            rates += curve.rates
        return Curve(rates, np.concatenate([curve.scores for curve in curves]))

    def blocked(self, setting: Setting, optimizer: str) -> float:
        """Return the share of rare winners' gradient that clip 0.2 blocks, at its best rate."""
        cell = self.cells[Key(setting, optimizer, BASELINE)]
        return float(np.nanmean(cell.blocked[cell.curve.best]))

    def luck(self, setting: Setting, optimizer: str) -> float:
        """Return the luck under clip 0.2, at its best rate."""
        cell = self.cells[Key(setting, optimizer, BASELINE)]
        return float(np.nanmean(cell.luck[cell.curve.best]))

    def score(self, setting: Setting, optimizer: str, arm: str) -> float:
        """Return the AUC of an arm at its best rate, which is chosen on other seeds."""
        curve = self.curve(setting, optimizer, arm)
        return float(curve.resampled_scores(np.ones((1, curve.scores.shape[1])))[0])

    @cached_property
    def gains(self) -> Mapping[Key, Interval]:
        """The difference from `BEST_CONSTANT` of each arm that is not constant, in `settings_to_learn`."""
        arms = [name for name, arm in ARMS.items() if arm.kind != "constant"]
        gains: dict[Key, Interval] = {}
        for setting, optimizer in product(self.settings_to_learn, OPTIMIZERS):
            best_constant = remembering(self.curve(setting, optimizer, BEST_CONSTANT).resampled_scores)
            for arm in arms:
                scores = self.curve(setting, optimizer, arm).resampled_scores
                # All seeds are of one group.
                gain = difference(scores, best_constant, [0] * self.terms["seeds"], draws=300)
                gains[Key(setting, optimizer, arm)] = gain
        return gains

    def coverage(self, setting: Setting, optimizer: str, arm: str, minus: str = BASELINE) -> float:
        """Simulate how often the interval of `difference` contains the true value in a setting."""
        curve = self.curve(setting, optimizer, arm)
        baseline = self.curve(setting, optimizer, minus)
        return simulated_coverage(curve, baseline, [0] * curve.scores.shape[1])

    def at_best_rate(self, setting: Setting, optimizer: str, arm: str, outcome: str) -> np.ndarray:
        """Return an outcome for each seed, at the rate with the best AUC."""
        cell = self.cells[Key(setting, optimizer, arm)]
        return getattr(cell, outcome)[cell.curve.best]
