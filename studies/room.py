"""Which tokens should have room to rise: the rare ones, or the common ones?

    python -m studies.room    # 20 minutes on two cores; again, it goes on; results/room.jsonl

In the map Band's upper side gains in some places and costs in others. This takes it apart. Band above lets a token of
p = 0.0005 rise by a factor of 10 in a batch, and one of p = 0.067, as a wrong answer has at the start, by 2.6. Here one
of them keeps Band's bound, and the other gets clip 0.2's. Without accidents, no wrong answer is ever rewarded.

Found on the draws of the map, and predicted for the draws here, which are others but for the first batch of half of the
seeds:

1. Where the upper side costs, room for common tokens alone costs, and room for rare tokens alone does not.
2. Where it gains, room for rare tokens alone gains at least as much.
3. Without accidents nothing costs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.progress import track
from torch import Tensor

from bandpo.audit.files import drop_unfinished_line, read_jsonl
from bandpo.bounds import RatioBounds
from bandpo.rules import ClipRule
from bandpo.where import BASELINE, OPTIMIZERS, UPPER
from bandpo_lab.study.cells import (
    RULES,
    WORLDS,
    Cell,
    Plan,
    Setting,
    cross_fitted,
    half_width,
    lines_of,
)
from bandpo_lab.study.tabular import simulate

RESULTS = Path(__file__).parents[1] / "results" / "room.jsonl"
SEEDS = 200
EDGE = 0.03
"""Probability that parts rare tokens from common ones: between the answer to be found and the others, with 0.063."""


@dataclass(frozen=True)
class RoomFor(ClipRule):
    """Band's upper bound for rare tokens, or for common ones; clip 0.2 for all else.

    >>> rule = RoomFor(rare=True)
    >>> [round(x, 2) for x in rule.bounds(torch.tensor([0.01, 0.06]).log()).upper.tolist()]
    [7.81, 1.2]
    """

    rare: bool

    def bounds(self, logp_old: Tensor) -> RatioBounds:
        clip, band = (RULES[name].bounds(logp_old) for name in (BASELINE, UPPER))
        here = (logp_old < math.log(EDGE)) == self.rare
        return RatioBounds(clip.log_lower, torch.where(here, band.log_upper, clip.log_upper))


ARMS: Mapping[str, ClipRule] = {
    "clip 0.2": RULES[BASELINE],
    "all tokens": RULES[UPPER],
    "rare tokens": RoomFor(rare=True),
    "common tokens": RoomFor(rare=False),
}
"""Which tokens have Band's upper bound."""
COSTS = [
    Setting("rare arm", 0.0005, 512, 4, "Adam"),
    Setting("rare arm", 0.0005, 512, 64, "Adam"),
    Setting("rare arm", 0.002, 512, 64, "Adam"),
    Setting("rare arm", 0.0005, 128, 4, "Adam, β1 = 0.95"),
    Setting("rare arm", 0.0005, 128, 4, "momentum 0.9"),
    Setting("rare arm", 0.0005, 128, 4, "SGD"),
]
"""The six places of the map in which the upper side costs."""
GAINS = [
    Setting("rare arm", 0.0005, 128, 16, "Adam"),
    Setting("rare arm", 0.002, 128, 16, "Adam"),
    Setting("rare arm", 0.002, 32, 16, "Adam"),
    Setting("two stages", 0.01, 128, 4, "Adam"),
]
"""Four of the places in which it gains, the one against the theory among them."""


@dataclass(frozen=True)
class Look:
    """One simulation, at all learning rates."""

    setting: Setting
    accidents: bool
    """Whether a wrong answer is rewarded 5 times in 100, as in the map, or never."""
    arm: str


def planned() -> list[Look]:
    """Every simulation."""
    looks = [Look(setting, True, arm) for setting in [*COSTS, *GAINS] for arm in ARMS]
    return looks + [Look(setting, False, arm) for setting in COSTS[:3] for arm in ARMS]


@dataclass(frozen=True)
class Seen(Look):
    """What came of a look: a line of the file."""

    rate: float
    """The best over all seeds."""
    auc: Sequence[float]
    """For each seed, at the rate that is best on other seeds."""


def look(what: Look) -> Seen:
    """Simulate."""
    at = what.setting
    world = WORLDS[at.world](at.p)
    if not what.accidents:
        clean = [replace(s, chances=[s.chances[0], *[0.0] * len(s.chances[1:])]) for s in world.stages]
        world = replace(world, stages=clean)
    rates = Plan.of_size("full").learning_rates(at.optimizer)
    found = simulate(
        world, ARMS[what.arm], OPTIMIZERS[at.optimizer], rates, seeds=SEEDS, samples=at.samples, updates=at.updates
    ).auc.double()  # fmt: skip
    cell = Cell(at, what.arm, rates, found.tolist(), half=[], lost=[], entropy=[], entropy_at_end=[])
    best = rates[int(found.mean(1).argmax())]
    return Seen(at, what.accidents, what.arm, best, cross_fitted(cell).round(4).tolist())


def read() -> dict[Look, Seen]:
    """What the file has."""
    lines = [line for _, line in read_jsonl(RESULTS)] if RESULTS.exists() else []
    seen = [Seen(**{**line, "setting": Setting(**line["setting"])}) for line in lines]
    return {Look(one.setting, one.accidents, one.arm): one for one in seen}


def rows(found: Mapping[Look, Seen]) -> list[list[str]]:
    """For each place: clip 0.2's mean reward, and what is added when some tokens get Band's upper bound."""
    table = []
    for setting, accidents in dict.fromkeys((look.setting, look.accidents) for look in planned()):
        scores = {arm: np.array(found[Look(setting, accidents, arm)].auc) for arm in ARMS}
        clip = scores.pop(BASELINE)
        table.append([
            str(setting) + ("" if accidents else ", no accidents"),
            f"{clip.mean():.2f}",
            *(f"{(score - clip).mean():+.2f} ± {half_width(score - clip):.2f}" for score in scores.values()),
        ])  # fmt: skip
    return table


def main() -> None:
    """Simulate what is missing, and print the table."""
    if RESULTS.exists():
        drop_unfinished_line(RESULTS)
    found = read()
    todo = [what for what in planned() if what not in found]
    calls = [partial(look, what) for what in todo]
    for _ in track(lines_of(calls, RESULTS, os.cpu_count() or 1), total=len(calls)):
        pass
    for row in rows(read()):
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
