"""The map: clip rules over tails, batch sizes, updates and optimizers in the worlds of `bandpo_lab.study.tabular`.

A cell is one setting under one rule, at all learning rates and seeds. Cells run side by side, and each is a line of
one file as soon as it ends, so a map that was interrupted goes on where it was.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from scipy import stats

import bandpo
from bandpo.audit.files import drop_unfinished_line, read_jsonl
from bandpo.divergences import KL
from bandpo.errors import InvalidValue
from bandpo.rules import Band, FixedClip, Sides, Unclipped
from bandpo.where import BAND, BASELINE, OPTIMIZERS, UPPER
from bandpo_lab.study.jobs import end_with_owner
from bandpo_lab.study.tabular import World, coin_flips, rare_arm, simulate, two_stages

Size = Literal["quick", "full"]
SIZES = get_args(Size)

_CLIP, _BAND = FixedClip(0.2), Band(KL(), 0.05)
RULES = {
    "clip 0.2": _CLIP,
    "Band": _BAND,
    "Band above, clip below": Sides(lower=_CLIP, upper=_BAND),
    "clip above, Band below": Sides(lower=_BAND, upper=_CLIP),
    "no bound above, clip below": FixedClip(0.2, float("inf")),
    "no clip": Unclipped(),
}
ROOM = "no bound above, clip below"
MAIN = (BASELINE, BAND, UPPER, ROOM)
"""The rules that the quick map has everywhere; the full map has all of them."""

TAILS = (0.0005, 0.002, 0.01, 0.05)
WORLDS: Mapping[str, Callable[[float], World]] = {
    "rare arm": rare_arm,
    "two stages": lambda p: two_stages(second=p),
    "coin flips": lambda p: coin_flips(),
}


@dataclass(frozen=True)
class Setting:
    """A place in the map, at which rules are compared."""

    world: str
    """One of `WORLDS`."""
    p: float
    """Probability of the answer to be found, at the start; 0 where there is none."""
    samples: int
    updates: int
    optimizer: str
    """One of `OPTIMIZERS`."""

    def __str__(self) -> str:
        tail = f", p = {self.p:g}" if self.p else ""
        return f"{self.world}{tail}, {self.samples} samples, {self.updates} updates, {self.optimizer}"


@dataclass(frozen=True)
class Cell:
    """A setting under a rule, and what came of it at each learning rate."""

    setting: Setting
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

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Cell:
        """From a line of the file."""
        return cls(**{**record, "setting": Setting(**record["setting"])})


@dataclass(frozen=True)
class Plan:
    """Which cells, and how many seeds and rates each has."""

    size: Size
    seeds: int
    rates: int
    """How many, a factor √2 apart."""
    settings: Sequence[Setting]
    batches: int = 80

    @classmethod
    def of_size(cls, size: Size) -> Plan:
        """The quick map, or the full one.

        Raises:
            ValueError: another size.

        >>> len(Plan.of_size("quick").todo) < len(Plan.of_size("full").todo)
        True
        """
        if size not in SIZES:
            raise InvalidValue(f"a map is {' or '.join(SIZES)}, got {size!r}")
        adam = [Setting("rare arm", p, 128, u, "Adam") for u in (4, 16, 64) for p in TAILS]
        worlds = [Setting("two stages", 0.01, 128, 16, "Adam"), Setting("coin flips", 0.0, 128, 16, "Adam")]
        if size == "quick":
            more = [Setting("rare arm", p, n, 16, "Adam") for n in (32, 512) for p in TAILS[1:3]]
            more += [Setting("rare arm", 0.002, 128, u, "Adam, β1 = 0") for u in (16, 4)]
            return cls(size, 40, 12, adam + worlds + more)
        more = [Setting("rare arm", p, n, u, "Adam") for n in (32, 512) for u in (4, 16, 64) for p in TAILS]
        others = [name for name in OPTIMIZERS if name != "Adam"]
        more += [
            Setting("rare arm", p, 128, u, name) for name in others for u in (4, 16, 64) for p in TAILS[:3]
        ]
        worlds += [replace(setting, updates=u) for setting in worlds for u in (4, 64)]
        return cls(size, 100, 14, adam + worlds + more)

    @property
    def todo(self) -> list[tuple[Setting, str]]:
        """Every cell."""
        return [
            (setting, rule)
            for setting in self.settings
            for rule in (MAIN if self.size == "quick" and setting.world == "rare arm" else RULES)
        ]

    @property
    def header(self) -> dict[str, Any]:
        """The terms of the map: the first line of its file, apart from versions."""
        return {
            "size": self.size,
            "seeds": self.seeds,
            "rates": self.rates,
            "batches": self.batches,
            "cells": len(self.todo),
        }

    def learning_rates(self, optimizer: str) -> list[float]:
        """The rates of an optimizer, so that the best lies within them.

        Adam's step is the rate itself. That of SGD is the rate times a gradient of the order of 1/30, and momentum
        multiplies it by `Optimizer.overshoot`.
        """
        chosen = OPTIMIZERS[optimizer]
        first = 0.01 if chosen.adam else 0.4 / chosen.overshoot
        return [round(first * 2 ** (k / 2), 6) for k in range(self.rates)]


def run_cell(plan: Plan, setting: Setting, rule: str) -> Cell:
    """Simulate one cell."""
    rates = plan.learning_rates(setting.optimizer)
    found = simulate(
        WORLDS[setting.world](setting.p),
        RULES[rule],
        OPTIMIZERS[setting.optimizer],
        rates,
        seeds=plan.seeds,
        samples=setting.samples,
        updates=setting.updates,
        batches=plan.batches,
    )
    return Cell(
        setting,
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


def run_map(plan: Plan, file: Path, workers: int) -> Iterator[tuple[int, Cell]]:
    """Run what ``file`` does not hold yet, cells side by side; each is in the file before it is yielded.

    Yields:
        How many cells the file holds by now, and the latest.

    Raises:
        ValueError: the file holds a map on other terms, or none.
    """
    done: set[tuple[Setting, str]] = set()
    if file.exists():
        header, cells = read_map(file)
        if {name: header.get(name) for name in plan.header} != plan.header:
            raise InvalidValue(
                f"{file} holds a map on other terms ({header.get('size')}, {header.get('seeds')} seeds); "
                "choose another --output_dir"
            )
        done = {(cell.setting, cell.rule) for cell in cells}
        drop_unfinished_line(file)
    else:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_line({**plan.header, "versions": _versions()}))
    todo = [cell for cell in plan.todo if cell not in done]
    yield from enumerate(
        lines_of([partial(run_cell, plan, *cell) for cell in todo], file, workers), len(done) + 1
    )


def lines_of(calls: Sequence[Callable[[], Any]], file: Path, workers: int) -> Iterator[Any]:
    """Make calls side by side. What each returns, a dataclass, is a line of ``file`` before it is yielded."""
    with ProcessPoolExecutor(workers, get_context("spawn"), _at_work) as pool, file.open("a") as lines:
        running = [pool.submit(call) for call in calls]
        try:
            for ended in as_completed(running):
                lines.write(_line(asdict(ended.result())))
                lines.flush()
                yield ended.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _at_work() -> None:
    end_with_owner()
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it, and says so


def _line(content: Mapping[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n"


def _versions() -> dict[str, str]:
    return {"bandpo": bandpo.__version__, "torch": torch.__version__, "numpy": np.__version__}


def read_map(file: Path) -> tuple[dict[str, Any], list[Cell]]:
    """The terms of a map, and the cells that it has so far.

    Raises:
        ValueError: the file is no map.
    """
    lines = [line for _, line in read_jsonl(file)]
    if not lines or "versions" not in lines[0]:
        raise InvalidValue(f"{file} is no map that `bandpo study map` has written")
    return lines[0], [Cell.from_record(line) for line in lines[1:]]


# What a map says ------------------------------------------------------------------------------------------------------


def cross_fitted(cell: Cell) -> np.ndarray:
    """Each seed's AUC at the rate that is best on the other half of the seeds.

    The best rate of a few seeds looks better on them than it is. Even seeds choose for odd ones, and odd for even.

    >>> cell = Cell(Setting("rare arm", 0.01, 128, 16, "Adam"), "Band", [1, 2], [[0, 1], [1, 0]], [], [], [], [])
    >>> cross_fitted(cell)  # seed 0 prefers the second rate, which is the worse one for seed 1, and the other way round
    array([0., 0.])
    """
    auc = np.array(cell.auc, dtype=float)
    scores = np.empty(auc.shape[1])
    for half in (0, 1):
        scores[half::2] = auc[auc[:, 1 - half :: 2].mean(1).argmax(), half::2]
    return scores


@dataclass(frozen=True)
class Score:
    """A rule at a setting, at its own best learning rate."""

    auc: float
    half_width: float
    """Of the 95 % interval of ``auc`` over seeds."""
    rate: float
    """The best over all seeds."""
    at_best: float
    """AUC there, over the seeds that chose it: a little too good."""
    at_edge: bool
    """Whether no greater, or no smaller, rate was tried."""
    half: float
    """Median over seeds of the batches until the reward reached a half."""
    lost: float
    entropy: float
    entropy_at_end: float
    equal_rate: float
    """AUC at the rate that is best for clip 0.2."""


def half_width(values: np.ndarray) -> float:
    """Half of the 95 % interval of a mean over seeds: Student's."""
    n = len(values)
    return float(stats.t.ppf(0.975, n - 1) * values.std(ddof=1) / np.sqrt(n)) if n > 1 else float("nan")


def _best(cell: Cell) -> int:
    return int(np.array(cell.auc).mean(1).argmax())


def scores(cells: Sequence[Cell]) -> dict[Setting, dict[str, Score]]:
    """Every rule's score at every setting, rules in the order of `RULES`."""
    by_setting: dict[Setting, dict[str, Cell]] = {}
    for cell in cells:
        by_setting.setdefault(cell.setting, {})[cell.rule] = cell
    found: dict[Setting, dict[str, Score]] = {}
    for setting, rules in by_setting.items():
        common = _best(rules[BASELINE]) if BASELINE in rules else None
        found[setting] = {name: _score(rules[name], common) for name in RULES if name in rules}
    return found


def _score(cell: Cell, common: int | None) -> Score:
    best, fitted = _best(cell), cross_fitted(cell)
    return Score(
        auc=float(fitted.mean()),
        half_width=half_width(fitted),
        rate=cell.rates[best],
        at_best=float(np.mean(cell.auc[best])),
        at_edge=best in (0, len(cell.rates) - 1),
        half=float(np.median(cell.half[best])),
        lost=cell.lost[best],
        entropy=cell.entropy[best],
        entropy_at_end=cell.entropy_at_end[best],
        equal_rate=float("nan") if common is None else float(np.mean(cell.auc[common])),
    )


def difference(cells: Sequence[Cell], setting: Setting, rule: str, minus: str) -> tuple[float, float]:
    """One rule's AUC minus another's, each at its own best rate, paired by seed; and half of its 95 % interval."""
    ours, theirs = (
        next(cross_fitted(cell) for cell in cells if (cell.setting, cell.rule) == (setting, name))
        for name in (rule, minus)
    )
    return float((ours - theirs).mean()), half_width(ours - theirs)


def summary(header: Mapping[str, Any], cells: Sequence[Cell]) -> dict[str, Any]:
    """A map in short: what `bandpo where` looks up, as ``map.json``."""
    rows = []
    for setting, rules in scores(cells).items():
        gap = {
            rule: [round(x, 4) for x in difference(cells, setting, rule, BASELINE)]
            for rule in rules
            if rule != BASELINE and BASELINE in rules
        }
        rows.append(
            {
                "setting": asdict(setting),
                "auc": {rule: round(score.auc, 4) for rule, score in rules.items()},
                "minus clip 0.2": gap,
            }
        )
    return {**header, "settings": rows}
