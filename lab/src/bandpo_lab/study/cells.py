"""The map: clip rules over tails, batch sizes, updates and optimizers in the worlds of `bandpo_lab.study.tabular`.

A cell is one place under one rule, at all learning rates and seeds. Cells run side by side, and each is a line of
one file as soon as it ends, so a map that was interrupted goes on where it was.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

import bandpo
from bandpo.audit.files import read_jsonl
from bandpo.audit.interval import Interval
from bandpo.divergences import KL
from bandpo.errors import InvalidValue, RunProblem
from bandpo.rules import Band, FixedClip, Sides, Unclipped
from bandpo_lab.files import drop_unfinished_line
from bandpo_lab.study.jobs import on_cores
from bandpo_lab.study.statistics import Curve, halves, student
from bandpo_lab.study.tabular import OPTIMIZERS, World, coin_flips, rare_arm, simulate, two_stages

Size = Literal["quick", "full"]

_CLIP, _BAND = FixedClip(0.2), Band(KL(), 0.05)
BASELINE, BAND, UPPER = "clip 0.2", "Band", "Band above, clip below"
"""Rules that are compared everywhere, as results name them."""
RULES = {
    BASELINE: _CLIP,
    BAND: _BAND,
    UPPER: Sides(lower=_CLIP, upper=_BAND),
    "clip above, Band below": Sides(lower=_BAND, upper=_CLIP),
    "no bound above, clip below": FixedClip(0.2, float("inf")),
    "no clip": Unclipped(),
}
MAIN = (BASELINE, BAND, UPPER, "no bound above, clip below")
"""The rules that the quick map has everywhere; the full map has all of them."""
TAILS = (0.0005, 0.002, 0.01, 0.05)
WORLDS: Mapping[str, Callable[[float], World]] = {
    "rare arm": rare_arm,
    "two stages": two_stages,
    "coin flips": lambda p: coin_flips(),
}


@dataclass(frozen=True)
class Place:
    """Where in the map rules are compared."""

    world: str
    """One of `WORLDS`."""
    p: float
    """Probability of the answer to be found, at the start; 0 where there is none."""
    samples: int
    updates: int
    optimizer: str
    """One of `bandpo_lab.study.tabular.OPTIMIZERS`."""
    lag: int = 0
    """Batches between drawing a batch and training on it."""

    def __str__(self) -> str:
        tail = f", p = {self.p:g}" if self.p else ""
        lag = f", lag {self.lag}" if self.lag else ""
        return f"{self.world}{tail}, {self.samples} samples, {self.updates} updates, {self.optimizer}{lag}"


@dataclass(frozen=True)
class Cell:
    """A place under a rule, and what came of it at each learning rate."""

    setting: Place
    """The file has it under this name."""
    rule: str
    rates: Sequence[float]
    auc: Sequence[Sequence[float]]
    """For each rate and seed: mean reward over all batches."""
    half: Sequence[Sequence[int]]
    """Batches until the reward reached a half; one more than all where it never did."""
    lost: Sequence[float]
    """For each rate the share of seeds that lost the answer to be found."""
    entropy: Sequence[float]
    """For each rate the mean entropy over seeds and batches, in nats."""
    entropy_at_end: Sequence[float]
    """In the last batch."""

    @property
    def curve(self) -> Curve:
        """AUC over the rates."""
        return Curve(self.rates, np.array(self.auc, dtype=float))

    @property
    def fitted(self) -> np.ndarray:
        """Each seed's AUC at the rate that is best on the other half of the seeds."""
        return self.curve.cross_fitted(halves(len(self.auc[0])))


@dataclass(frozen=True)
class Plan:
    """Which cells, and how many seeds and rates each has."""

    size: Size
    seeds: int
    rates: int
    """How many, a factor √2 apart."""
    places: Sequence[Place]
    batches: int = 80

    @classmethod
    def of_size(cls, size: Size) -> Plan:
        """The quick map, or the full one.

        >>> len(Plan.of_size("quick").todo) < len(Plan.of_size("full").todo)
        True
        """
        adam = [Place("rare arm", p, 128, u, "Adam") for u in (4, 16, 64) for p in TAILS]
        worlds = [Place("two stages", 0.01, 128, 16, "Adam"), Place("coin flips", 0.0, 128, 16, "Adam")]
        if size == "quick":
            more = [Place("rare arm", p, n, 16, "Adam") for n in (32, 512) for p in TAILS[1:3]]
            more += [Place("rare arm", 0.002, 128, u, "Adam, β1 = 0") for u in (16, 4)]
            return cls(size, 40, 12, adam + worlds + more)
        more = [Place("rare arm", p, n, u, "Adam") for n in (32, 512) for u in (4, 16, 64) for p in TAILS]
        others = [name for name in OPTIMIZERS if name != "Adam"]
        more += [
            Place("rare arm", p, 128, u, name) for name in others for u in (4, 16, 64) for p in TAILS[:3]
        ]
        worlds += [replace(place, updates=u) for place in worlds for u in (4, 64)]
        return cls(size, 100, 14, adam + worlds + more)

    @property
    def todo(self) -> list[tuple[Place, str]]:
        """Every cell."""
        return [
            (place, rule)
            for place in self.places
            for rule in (MAIN if self.size == "quick" and place.world == "rare arm" else RULES)
        ]

    @property
    def header(self) -> dict[str, Any]:
        """The terms of the map: the first line of its file, apart from versions."""
        terms = {name: getattr(self, name) for name in ("size", "seeds", "rates", "batches")}
        return {**terms, "cells": len(self.todo)}

    def learning_rates(self, optimizer: str) -> list[float]:
        """The rates of an optimizer, so that the best lies within them.

        Adam's step is the rate itself. That of SGD is the rate times a gradient of the order of 1/30, and momentum
        multiplies it by 1/(1 − β1).
        """
        chosen = OPTIMIZERS[optimizer]
        first = 0.01 if chosen.adam else 0.4 * (1 - chosen.momentum)
        return [round(first * 2 ** (k / 2), 6) for k in range(self.rates)]


def run_cell(plan: Plan, place: Place, rule: str) -> Cell:
    """Simulate one cell."""
    rates = plan.learning_rates(place.optimizer)
    found = simulate(
        WORLDS[place.world](place.p),
        RULES[rule],
        OPTIMIZERS[place.optimizer],
        rates,
        seeds=plan.seeds,
        samples=place.samples,
        updates=place.updates,
        batches=plan.batches,
        lag=place.lag,
    )
    return Cell(
        place,
        rule,
        rates,
        auc=_rounded(found.auc),
        half=found.half.tolist(),
        lost=_rounded(found.lost.float().mean(1)),
        entropy=_rounded(found.entropies.mean((1, 2))),
        entropy_at_end=_rounded(found.entropies[..., -1].mean(1)),
    )


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
        file.write_text(_line({**plan.header, "versions": versions}))
    todo = [key for key in plan.todo if key not in done]
    calls = [partial(_run_alone, plan, *key) for key in todo]
    with file.open("a") as lines:
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
class Score:
    """A rule in one place, at its own best learning rate."""

    auc: Interval
    """Over seeds, each at the rate that is best on the other half of them; Student's."""
    at_best: float
    """AUC at the rate that is best over all seeds, over the same seeds: a little too good."""
    at_edge: bool
    """Whether no greater, or no smaller, rate was tried."""
    half: float
    """Median over seeds of the batches until the reward reached a half."""
    lost: float
    equal_rate: float
    """AUC at the rate that is best for clip 0.2."""


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
            raise InvalidValue(f"{file} is no map that `bandpo study map` has written")
        cells = [Cell(**{**line, "setting": Place(**line["setting"])}) for line in lines[1:]]
        return cls(lines[0], {(cell.setting, cell.rule): cell for cell in cells})

    def places(self, *worlds: str) -> list[Place]:
        """The places of some worlds, or all, as they were run."""
        return [p for p in dict.fromkeys(place for place, _ in self.cells) if not worlds or p.world in worlds]

    def rules(self, place: Place) -> list[str]:
        """The rules that ran there."""
        return [rule for rule in RULES if (place, rule) in self.cells]

    def score(self, place: Place, rule: str) -> Score:
        """What a rule reached."""
        cell = self.cells[place, rule]
        curve, best = cell.curve, cell.curve.best
        common = self.cells[place, BASELINE].curve.best if (place, BASELINE) in self.cells else None
        return Score(
            auc=student(cell.fitted),
            at_best=float(curve.scores[best].mean()),
            at_edge=curve.at_edge,
            half=float(np.median(cell.half[best])),
            lost=cell.lost[best],
            equal_rate=float("nan") if common is None else float(curve.scores[common].mean()),
        )

    def difference(self, place: Place, rule: str, minus: str) -> Interval:
        """One rule's AUC minus another's, each at its own best rate, paired by seed."""
        return student(self.cells[place, rule].fitted - self.cells[place, minus].fitted)
