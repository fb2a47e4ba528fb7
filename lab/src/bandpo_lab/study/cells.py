"""The map: clip rules over starts, tails, batch sizes, updates and lags in the worlds of `bandpo_lab.study.tabular`.

A cell is one place under one rule, at all learning rates and seeds. Cells run side by side, and each is a line of
one file as soon as it ends, so a map that was interrupted goes on where it was.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

import bandpo
from bandpo.divergences import TotalVariation
from bandpo.errors import InvalidValue, RunProblem
from bandpo.methods import BandAbove
from bandpo.rules import Band, FixedClip, Loosest, TwoSided
from bandpo.runs.files import read_jsonl
from bandpo_lab.files import drop_unfinished_line
from bandpo_lab.interval import Interval
from bandpo_lab.study.jobs import on_cores
from bandpo_lab.study.statistics import Curve, difference, simulated_coverage
from bandpo_lab.study.tabular import RATES, World, dominant, rare_arm, simulate, two_stages, zipf

Size = Literal["quick", "full"]

_CLIP = FixedClip(0.2)
BASELINE, BAND, ABOVE = "clip 0.2", "Band", "BandAbove"
RULES = {
    BASELINE: _CLIP,
    BAND: Band(),
    "Clip-Higher": FixedClip(0.2, 0.28),
    "clip [.8, 2]": FixedClip(0.2, 1.0),
    ABOVE: BandAbove().clip,
    "room by mass": TwoSided(lower=_CLIP, upper=Loosest(_CLIP, Band(TotalVariation(), 0.02))),
    "no upper bound": FixedClip(0.2, float("inf")),
}
"""What is compared everywhere: the paper's rule against the clip first. Room by mass lets an answer rise by 20 %, or by
0.02 of probability if that is more, at most tenfold."""
WORLDS: Mapping[str, Callable[[float], World]] = {
    "uniform": rare_arm,
    "dominant": dominant,
    "Zipf": zipf,
    "two stages": two_stages,
}
"""By how the wrong answers start."""


@dataclass(frozen=True)
class Place:
    """Where in the map rules are compared."""

    world: str
    """One of `WORLDS`."""
    p: float
    """Probability of the answer to be found, at the start."""
    samples: int
    epochs: int
    minibatches: int
    lag: int
    """Batches between drawing a batch and training on it."""

    @property
    def data(self) -> str:
        """How they are when they are trained on."""
        return "stale" if self.lag else "fresh, used once" if self.epochs == 1 else "fresh, used more often"

    def __str__(self) -> str:
        shape = f"{self.samples} samples, {self.epochs} × {self.minibatches} updates, lag {self.lag}"
        return f"{self.world}, p = {self.p:g}, {shape}"


@dataclass(frozen=True)
class Cell:
    """A place under a rule, and what came of it at each learning rate."""

    setting: Place
    """The file has it under this name."""
    rule: str
    rates: Sequence[float]
    auc: Sequence[Sequence[float]]
    """For each rate and seed: mean reward over all batches."""
    blocked: Sequence[float]
    """For each rate the share of rare winners' gradient that the rule blocked: mean over seeds that had any."""

    @cached_property
    def curve(self) -> Curve:
        """AUC over the rates."""
        return Curve(self.rates, np.array(self.auc, dtype=float))


@dataclass(frozen=True)
class Plan:
    """Which cells, and how many seeds and rates each has."""

    size: Size
    seeds: int
    places: Sequence[Place]
    batches: int = 80

    @classmethod
    def of_size(cls, size: Size) -> Plan:
        """The quick map, or the full one.

        >>> len(Plan.of_size("quick").todo) < len(Plan.of_size("full").todo)
        True
        """
        starts, lags = ("uniform", "dominant", "Zipf"), (0, 4, 8)
        if size == "quick":
            return cls(size, 40, [Place(w, 0.002, 128, 1, 4, lag) for w in starts for lag in lags[:2]])
        shapes = ((1, 4), (1, 1), (4, 4))
        places = [Place(w, 0.002, 128, *shape, lag) for shape, w, lag in product(shapes, starts, lags)]
        places += [Place(w, 0.01, 128, 1, 4, lag) for w in starts for lag in lags]
        places += [Place(w, 0.002, n, 1, 4, lag) for w in starts for n in (32, 512) for lag in (0, 4)]
        places += [Place(w, 0.002, 128, *shape, 0) for w in starts for shape in ((1, 16), (16, 1))]
        places += [
            Place("two stages", 0.01, 128, *shape, lag) for shape in ((1, 4), (4, 4)) for lag in (0, 4)
        ]
        return cls(size, 80, places)

    @property
    def todo(self) -> list[tuple[Place, str]]:
        """Every cell."""
        return [*product(self.places, RULES)]

    @property
    def header(self) -> dict[str, Any]:
        """The terms of the map: the first line of its file, apart from versions."""
        terms = {name: getattr(self, name) for name in ("size", "seeds", "batches")}
        return {**terms, "cells": len(self.todo)}


def run_cell(plan: Plan, place: Place, rule: str) -> Cell:
    """Simulate one cell."""
    found = simulate(
        WORLDS[place.world](place.p),
        RULES[rule],
        RATES,
        seeds=plan.seeds,
        samples=place.samples,
        epochs=place.epochs,
        minibatches=place.minibatches,
        batches=plan.batches,
        lag=place.lag,
    )
    return Cell(place, rule, RATES, _rounded(found.auc), _rounded(found.blocked.nanmean(1)))


def _rounded(values: torch.Tensor) -> Any:
    return np.round(values.numpy().astype(float), 4).tolist()


def _run_alone(plan: Plan, place: Place, rule: str) -> Cell:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it, and says so
    return run_cell(plan, place, rule)


def run_map(plan: Plan, file: Path, workers: int) -> Iterator[tuple[int, Cell]]:
    """Run what ``file`` does not hold yet, cells side by side; each is in the file before it is yielded.

    Yields:
        How many cells the file holds by now, and the latest.

    Raises:
        ValueError: the file holds a map on other terms, or none.
        RunProblem: a cell failed.
    """
    done: Mapping[tuple[Place, str], Cell] = {}
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
    calls = [partial(_run_alone, plan, *key) for key in todo]
    with file.open("a", encoding="utf-8") as lines:
        ended = on_cores(calls, workers, preload=[__name__])
        for count, (place, outcome) in enumerate(ended, len(done) + 1):
            if outcome.code:
                raise RunProblem(
                    f"{todo[place][0]} failed under {todo[place][1]}, with status {outcome.code}"
                )
            lines.write(_line(asdict(outcome.value)))
            lines.flush()
            yield count, outcome.value


def _line(content: Mapping[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n"


# What a map says ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Map:
    """A map, or what there is of it so far."""

    terms: Mapping[str, Any]
    cells: Mapping[tuple[Place, str], Cell]
    """By place and rule."""

    @classmethod
    def from_file(cls, file: Path) -> Map:
        """Read it.

        Raises:
            ValueError: the file is no map.
        """
        lines = [line for _, line in read_jsonl(file)]
        if not lines or "versions" not in lines[0]:
            raise InvalidValue(f"{file} is no map that `bandpo-lab study map` has written")
        cells = [Cell(**{**line, "setting": Place(**line["setting"])}) for line in lines[1:]]
        return cls(lines[0], {(cell.setting, cell.rule): cell for cell in cells})

    @property
    def places(self) -> list[Place]:
        """Those that every rule has run in, in order."""
        ran = dict.fromkeys(place for place, _ in self.cells)
        return [place for place in ran if all((place, rule) in self.cells for rule in RULES)]

    def blocked(self, place: Place) -> float:
        """The share of rare winners' gradient that clip 0.2 blocks, at its best rate."""
        cell = self.cells[place, BASELINE]
        return cell.blocked[cell.curve.best]

    def difference(self, place: Place, rule: str, minus: str = BASELINE) -> Interval:
        """One rule's AUC minus another's, each at its own best rate."""
        ours, theirs = (self.cells[place, name].curve for name in (rule, minus))
        return difference(ours.drawn, theirs.drawn, [0] * ours.scores.shape[1])

    def coverage(self, place: Place, rule: str) -> float:
        """How often the interval of `difference` holds the truth in a simulation of that place."""
        ours, theirs = (self.cells[place, name].curve for name in (rule, BASELINE))
        return simulated_coverage(ours, theirs, [0] * ours.scores.shape[1])
