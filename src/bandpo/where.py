"""When a clip rule can matter: how far a rare winner rises within a batch, and how often it is drawn at all.

docs/theory.md argues it, and docs/when.md has what tables and networks made of it. `advice` says all of it of one run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bandpo.audit.files import shipped
from bandpo.audit.metrics import BINS, EDGES
from bandpo.errors import InvalidValue
from bandpo.rules import Band, ClipRule, FixedClip

BASELINE, BAND, UPPER = "clip 0.2", "Band", "Band above, clip below"
"""Rules of the map and of the network study, as their data name them."""

LIFT_PER_STEP = 0.35
"""Nats by which Adam lifts a rare winner in one update, for each unit of learning rate × √parameters.

When each weight moves by about the learning rate, and its gradient's parts are of one size, a token's log-probability
moves by learning rate × √parameters × the gradient's norm. Measured on two models: 0.35 in the embedded one (335k
parameters, 1e-4: clip 0.2 binds after 9 updates), and within a factor of 4 of it in a model of 135M at 3e-6."""
LIFT_FACTOR = 4.0
"""By what factor that may be off, either way."""
SCARCE, PLENTY = 0.3, 3.0
"""Draws of the tail in a batch: below the first the rule shows clearly in the map, above the second not at all."""
FAR = 2.0
"""A run is outside of the map where its tail, batch or updates are off by more than this factor from all of it."""
COUNTS = 0.02
"""A difference between two rules in the map counts if it is greater than this, and greater than its error."""


@dataclass(frozen=True)
class Optimizer:
    """SGD, momentum or Adam.

    Raises:
        ValueError: ``momentum`` outside of [0, 1).

    >>> Optimizer(momentum=0.9, adam=True).overshoot
    10.0
    """

    momentum: float = 0.0
    """β1 of Adam."""
    adam: bool = False
    beta2: float = 0.99

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise InvalidValue(f"momentum (β1) must be at least 0 and below 1, got {self.momentum:g}")

    @property
    def overshoot(self) -> float:
        """1/(1 − momentum): how many updates' worth of movement one lasting gradient makes, its own included."""
        return round(1 / (1 - self.momentum), 9)


OPTIMIZERS = {
    "Adam": Optimizer(0.9, adam=True),
    "Adam, β1 = 0": Optimizer(0.0, adam=True),
    "Adam, β1 = 0.95": Optimizer(0.95, adam=True),
    "momentum 0.9": Optimizer(0.9),
    "SGD": Optimizer(),
}
"""Those of the map."""


def lift_from_clipping(clipped: float, updates: int, bound: float = 1.2) -> float:
    """Nats per update, from the share of a rare winner's updates that found it beyond the bound.

    It met the bound after ``(1 − clipped)·updates`` of them; where ``clipped`` is 0, this is the most it can be.

    Raises:
        ValueError: ``clipped`` is no share below 1.

    >>> round(lift_from_clipping(0.43, updates=16), 3)
    0.02
    """
    if not 0 <= clipped < 1:
        raise InvalidValue(f"the share clipped must be at least 0 and below 1, got {clipped:g}")
    return math.log(bound) / ((1 - clipped) * updates)


def lift_from_rate(learning_rate: float, parameters: float) -> tuple[float, float]:
    """Rough least and greatest nats per update of a rare winner under Adam; see `LIFT_PER_STEP`.

    Raises:
        ValueError: a number that is not above 0.

    >>> low, high = lift_from_rate(1e-4, parameters=335e3)
    >>> round(low, 4), round(high, 4)
    (0.0051, 0.081)
    """
    if not (learning_rate > 0 and parameters > 0):
        raise InvalidValue(
            f"learning rate {learning_rate:g} and {parameters:g} parameters must both be above 0"
        )
    middle = LIFT_PER_STEP * learning_rate * math.sqrt(parameters)
    return middle / LIFT_FACTOR, middle * LIFT_FACTOR


@dataclass(frozen=True)
class Placement:
    """A run's place in the map.

    Args:
        tail: Probability of the rare token, or of the strategy that it opens.
        batch: Samples in a batch that could draw it.
        updates: Optimizer steps on a batch.
        optimizer: Which.
        lift: Least and greatest nats by which an update lifts a rare winner; equal where it was measured, None where
            nothing is known.
        rule: The clip rule in use.

    Raises:
        ValueError: a number out of range.
    """

    tail: float
    batch: int
    updates: int
    optimizer: Optimizer
    lift: tuple[float, float] | None = None
    rule: ClipRule = field(default_factory=FixedClip)

    def __post_init__(self) -> None:
        if not 0 < self.tail < 1:
            raise InvalidValue(f"--tail {self.tail:g}: it is a probability, so choose it between 0 and 1")
        for name, value in (("--batch", self.batch), ("--updates", self.updates)):
            if value < 1:
                raise InvalidValue(f"{name} {value}: choose at least 1")
        if self.lift and not 0 < self.lift[0] <= self.lift[1] < math.inf:
            raise InvalidValue(
                f"the lift of one update must be finite and above 0, got {self.lift[1]:g} nats"
            )

    @property
    def draws(self) -> float:
        """How often a batch draws the tail: N·p."""
        return self.batch * self.tail

    def bounds(self, rule: ClipRule) -> tuple[float, float]:
        """A rule's bounds on the tail's ratio."""
        found = rule.bounds(torch.tensor([self.tail], dtype=torch.float64).log())
        return float(found.lower), float(found.upper)

    @property
    def binding_lift(self) -> float:
        """Nats per update from which the rule holds the tail back; infinite where momentum alone outlasts the batch."""
        spare = self.updates - self.optimizer.overshoot
        return math.log(self.bounds(self.rule)[1]) / spare if spare > 0 else math.inf


def advice(run: Placement) -> list[tuple[str, str]]:
    """Headed sentences: whether the rule can matter, which side of it, what to set, how sure, what would tell more."""
    word, why = expected(run)
    upper = f"{word}. {why}"
    if difference := _against_theory(run, word):
        theory, word = word.lower(), "gains" if difference[0] > 0 else "costs"
        upper = (
            f"Not clear. The theory says {theory}, but at the nearest place of the map Band's upper side {word} "
            f"({_signed(difference)}). {why}"
        )
    name = BINS[sum(run.tail >= edge for edge in EDGES)]
    told = (
        f"audit/clip_high/{name}: the share of winners of the tail's probability that were clipped; give it as "
        f"--clip-high. audit/tokens_positive/{name}: how many such winners there were."
    )
    return [
        ("Can the upper side matter?", upper),
        ("And the lower side?", _lower(run)),
        ("What to set", _SETTINGS[word]),
        ("Nearest in the map", _nearest(run)),
        ("Nearest network", _network(run)),
        (
            "How sure",
            f"{_lift(run)} The theory was held against tables of one decision, and one small network.",
        ),
        ("What the audit tells", told),
    ]


def expected(run: Placement) -> tuple[str, str]:
    """What the theory says of the upper side: ``No``, ``Yes``, ``A little`` or ``Perhaps``; and the reason."""
    draws = f"A batch draws the tail {run.draws:.2g} times"
    bound, threshold, lift = run.bounds(run.rule)[1], run.binding_lift, run.lift
    if run.draws >= PLENTY:
        return "No", f"{draws}. From {PLENTY:g} draws on the map shows no difference between rules."
    if run.updates == 1:
        return "No", "With one update on a batch every ratio is 1, and no rule acts."
    if math.isinf(bound):
        return "No", "Your rule has no upper bound, so it holds nothing back."
    if math.isinf(threshold):
        return "No", (
            f"Your batch is over after {run.updates} updates, and momentum carries a blocked token on for up to "
            f"{run.optimizer.overshoot:g} updates."
        )
    nats = " to ".join(f"{x:.2g}" for x in dict.fromkeys(lift or ()))
    binds = (
        f"With {run.updates} updates the bound of {bound:.3g} holds a rare winner back if one update lifts it by more "
        f"than {threshold:.2g} nats"
    )
    if lift is None:
        return "Perhaps", f"{draws}. {binds}. The lift of your run is not known."
    if lift[0] <= threshold < lift[1]:
        return "Perhaps", f"{draws}. {binds}. The lift of your run is roughly {nats} nats."
    binds += f". Your run's lift is {nats} nats."
    if lift[1] <= threshold:
        return "No", binds
    if run.draws < SCARCE:
        return "Yes", (
            f"{binds} {draws}; at under {SCARCE:g} draws the map shows large differences, most of them gains."
        )
    return "A little", f"{binds} {draws}; at {SCARCE:g} to {PLENTY:g} draws the map shows small differences."


_SETTINGS = {
    "No": "Keep your rule. More samples in a batch find a rare tail sooner.",
    "Perhaps": 'Nothing yet. Audit one run first. If it clips rare winners, try method "BandAbove()".',
    **dict.fromkeys(("Yes", "A little"), 'method "BandAbove()", at your rate and at half of it.'),
    "gains": 'Your rule, or method "BandAbove()" at your rate and at half of it. Compare both.',
    "costs": "A tight upper bound, such as clip 0.2's. More samples in a batch find a rare tail sooner.",
}
"""What to set, by what is `expected`, or by what the map says against it."""


def _signed(difference: Sequence[float]) -> str:
    return "{:+.2f} ± {:.2f}".format(*difference)


def _lower(run: Placement) -> str:
    if run.updates == 1:
        return "No, for the same reason."
    mine, band = (run.bounds(rule)[0] for rule in (run.rule, Band()))
    said = (
        f"Within a batch your rule stops pushing the tail down at {mine:.1g} of its probability, Band(KL(), 0.05) at "
        f"{band:.1g} of it. "
    )
    if run.optimizer.overshoot > 1:
        said += "Momentum carries it further. "
    if run.draws >= PLENTY:
        return f"{said}A tail that is drawn so often comes back."
    return f"{said}A rare strategy that loses a few times may be gone for good. A fixed lower bound is safer."


def _against_theory(run: Placement, word: str) -> tuple[float, float] | None:
    """What Band's upper side brings at the nearest place of the map, and its error, if that contradicts the theory."""
    row, near = _place(run, "rare arm")
    gap, half = row["minus clip 0.2"][UPPER]
    if not near or abs(gap) <= max(COUNTS, half):
        return None
    if word != "No":
        return (gap, half) if gap < 0 else None
    # Places have rates at which clip 0.2 does best. They say nothing of a run whose lift never meets its bound, nor of
    # one that has no bound to meet.
    unbound = math.isinf(run.bounds(run.rule)[1])
    below = run.lift is not None and run.lift[1] <= run.binding_lift < math.inf
    return None if run.updates == 1 or unbound or below else (gap, half)


def _nearest(run: Placement) -> str:
    row, near = _place(run, "rare arm")
    s, auc = row["setting"], row["auc"]
    where = f"p = {s['p']:g}, {s['samples']} samples, {s['updates']} updates, {s['optimizer']}"
    if not near:
        return f"None: your run lies outside of it. The closest place has {where}."
    said = (
        f"{where}: mean reward {auc[BASELINE]:.2f} with {BASELINE}, {auc[BAND]:.2f} with {BAND}, {auc[UPPER]:.2f} with "
        f"{UPPER} (against clip {_signed(row['minus clip 0.2'][UPPER])}), each at its own best learning rate."
    )
    row, near = _place(run, "two stages")
    if near:
        said += (
            " Where the rare strategy is worth nothing until half-time, and all after it: "
            f"{_signed(row['minus clip 0.2'][UPPER])}."
        )
    return said


def _place(run: Placement, world: str) -> tuple[Mapping[str, Any], bool]:
    """The place of one of the map's worlds that is closest to a run's, and whether it is near.

    It has the run's optimizer where the world was mapped with that one. Else it is not near.
    """
    places = [row for row in shipped("map")["settings"] if row["setting"]["world"] == world]
    overshoot = {name: o.overshoot for name, o in OPTIMIZERS.items() if o.adam == run.optimizer.adam}
    optimizer = min(overshoot, key=lambda name: abs(math.log(overshoot[name] / run.optimizer.overshoot)))
    alike = [row for row in places if row["setting"]["optimizer"] == optimizer]
    # Draws would not do: at equal draws a large batch does not behave like a small one.
    found = [([row["setting"][name] for name in ("p", "samples", "updates")], row) for row in alike or places]
    place, near = _closest((run.tail, run.batch, run.updates), found)
    return place, near and bool(alike)


def _closest(
    own: Sequence[float], places: Sequence[tuple[Sequence[float], Mapping[str, Any]]]
) -> tuple[Mapping[str, Any], bool]:
    """What stands at the coordinates least off from one's own, and whether each is within a factor of `FAR`."""
    apart = [
        [abs(math.log(there / here)) for there, here in zip(place, own, strict=True)] for place, _ in places
    ]
    nearest = min(range(len(places)), key=lambda k: sum(apart[k]))
    return places[nearest][1], max(apart[nearest]) <= math.log(FAR)


def _network(run: Placement) -> str:
    """What the small networks that the lab trained made of the closest such world."""
    worlds = [((world["samples"] * world["tail"], world["updates"]), world) for world in shipped("networks")]
    world, near = _closest((run.draws, run.updates), worlds)
    where = f"{world['samples'] * world['tail']:.2g} draws, {world['updates']} updates, Adam"
    if not near:
        return f"None: your run lies outside of what was trained. The closest has {where}."
    upper, lower = ("{:+.3f} [{:+.3f}, {:+.3f}]".format(*world[side]) for side in ("upper", "lower"))
    return (
        f"{where}: Band's upper side in place of clip 0.2's changed the mean reward by {upper}, its lower side by "
        f"{lower}, each at its own best learning rate (335k parameters, {world['seeds']} seeds)."
    )


def _lift(run: Placement) -> str:
    if not run.lift:
        return (
            "Without a lift (see --clip-high, or --learning-rate with --parameters) the place is a rough one."
        )
    if run.lift[0] == run.lift[1]:
        return "The lift was measured."
    return f"The lift is a guess from the learning rate, good to a factor of {LIFT_FACTOR:g}."
