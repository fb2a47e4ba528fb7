"""What the theory and the map say of one run, in words."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

import torch

from bandpo.audit.metrics import BINS, EDGES
from bandpo_lab.study.cells import BAND, BASELINE, OPTIMIZERS, RULES, UPPER, shipped_summary
from bandpo_lab.study.theory import PLENTY, SCARCE, Placement

FAR = 2.0
"""A run is outside of the map where its tail, batch or updates are off by more than this factor from all of it."""
COUNTS = 0.02
"""A difference between two rules in the map counts if it is greater than this, and greater than its error."""


def advice(run: Placement, measured: bool) -> list[tuple[str, str]]:
    """Headed sentences: whether the rule can matter, which side of it, what to set, how sure, what would tell more.

    Args:
        run: The run's place.
        measured: Whether its lift was read from a run, and is no guess from the learning rate.
    """
    return [
        ("Can the upper side matter?", _upper(run)),
        ("And the lower side?", _lower(run)),
        ("What to set", _setting(run)),
        ("Nearest in the map", _nearest(run)),
        ("Nearest network", _network(run)),
        ("How sure", _certainty(run, measured)),
        ("What the audit tells", _audit(run)),
    ]


def _nats(lift: tuple[float, float]) -> str:
    low, high = lift
    return f"{high:.2g} nats" if low == high else f"{low:.2g} to {high:.2g} nats"


def _upper(run: Placement) -> str:
    word, why = _theory(run)
    difference = _against_theory(run)
    if not difference:
        return f"{word}. {why}"
    return (
        f"Not clear. The theory says {word.lower()}, but at the nearest place of the map Band's upper side "
        f"{'gains' if difference[0] > 0 else 'costs'} ({_signed(difference)}). {why}"
    )


def _theory(run: Placement) -> tuple[str, str]:
    """Its answer in a word or two, and the reason."""
    draws = f"A batch draws the tail {run.draws:.2g} times"
    momentum = f"momentum carries a blocked token on for up to {run.optimizer.overshoot:g} updates"
    if run.supply == "plenty":
        return "No", f"{draws}. From {PLENTY:g} draws on the map shows no difference between rules."
    if run.updates == 1:
        return "No", "With one update on a batch every ratio is 1, and no rule acts."
    if math.isinf(run.bound):
        return "No", "Your rule has no upper bound, so it holds nothing back."
    if math.isinf(run.binding_lift):
        return "No", f"Your batch is over after {run.updates} updates, and {momentum}."
    bound = (
        f"With {run.updates} updates the bound of {run.bound:.3g} holds a rare winner back if one update lifts it by "
        f"more than {run.binding_lift:.2g} nats"
    )
    if run.binds is None:
        lift = f"is roughly {_nats(run.lift)}" if run.lift else "is not known"
        return "Perhaps", f"{draws}. {bound}. The lift of your run {lift}."
    assert run.lift is not None
    if not run.binds:
        return "No", f"{bound}. Your run's lift is {_nats(run.lift)}."
    scarce = run.supply == "scarce"
    few = f"under {SCARCE:g}" if scarce else f"{SCARCE:g} to {PLENTY:g}"
    size = "large differences, most of them gains" if scarce else "small differences"
    return (
        "Yes" if scarce else "A little",
        f"{bound}. Your run's lift is {_nats(run.lift)}. {draws}; at {few} draws the map shows {size}.",
    )


def _lower(run: Placement) -> str:
    if run.updates == 1:
        return "No, for the same reason."
    logp = torch.tensor([run.tail], dtype=torch.float64).log()
    mine, band = (float(rule.bounds(logp).lower) for rule in (run.rule, RULES[BAND]))
    said = (
        f"Within a batch your rule stops pushing the tail down at {mine:.1g} of its probability, Band(KL(), 0.05) at "
        f"{band:.1g} of it. "
    )
    if run.optimizer.overshoot > 1:
        said += "Momentum carries it further. "
    if run.supply == "plenty":
        return f"{said}A tail that is drawn so often comes back."
    return f"{said}A rare strategy that loses a few times may be gone for good. A fixed lower bound is safer."


def _setting(run: Placement) -> str:
    difference = _against_theory(run)
    if difference and difference[0] > 0:
        return 'Your rule, or method "BandAbove()" at your rate and at half of it. Compare both.'
    if difference:
        return "A tight upper bound, such as clip 0.2's. More samples in a batch find a rare tail sooner."
    if run.verdict == "no":
        return "Keep your rule. More samples in a batch find a rare tail sooner."
    if run.verdict == "open":
        return 'Nothing yet. Audit one run first. If it clips rare winners, try method "BandAbove()".'
    return 'method "BandAbove()", at your rate and at half of it.'


def _against_theory(run: Placement) -> tuple[float, float] | None:
    """What Band's upper side brings at the nearest place of the map, and its error, if that contradicts the theory."""
    row, near = _place(run, "rare arm")
    gap, half = row["minus clip 0.2"][UPPER]
    if not near or abs(gap) <= max(COUNTS, half):
        return None
    if run.verdict != "no":
        return (gap, half) if gap < 0 else None
    # Places have rates at which clip 0.2 does best. They say nothing of a run whose lift never meets its bound, nor of
    # one that has no bound to meet.
    idle = (
        run.updates == 1 or math.isinf(run.bound) or (run.binds is False and math.isfinite(run.binding_lift))
    )
    return None if idle else (gap, half)


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


def _signed(difference: Sequence[float]) -> str:
    return "{:+.2f} ± {:.2f}".format(*difference)


def _place(run: Placement, world: str) -> tuple[Mapping[str, Any], bool]:
    """The place of one of the map's worlds that is closest to a run's, and whether it is near.

    It has the run's optimizer where the world was mapped with that one. Else it is not near.
    """
    settings = [row for row in shipped_summary()["settings"] if row["setting"]["world"] == world]
    alike = [row for row in settings if row["setting"]["optimizer"] == _name(run)]
    # Draws would not do: at equal draws a large batch does not behave like a small one.
    place, near = _closest(
        (run.tail, run.batch, run.updates),
        alike or settings,
        lambda row: [row["setting"][name] for name in ("p", "samples", "updates")],
    )
    return place, near and bool(alike)


def _closest(
    own: Sequence[float],
    places: Sequence[Mapping[str, Any]],
    coordinates: Callable[[Mapping[str, Any]], Sequence[float]],
) -> tuple[Mapping[str, Any], bool]:
    """The place whose coordinates are least off from one's own, and whether each is within a factor of `FAR`."""

    def apart(place: Mapping[str, Any]) -> list[float]:
        return [abs(math.log(there / here)) for there, here in zip(coordinates(place), own, strict=True)]

    place = min(places, key=lambda place: sum(apart(place)))
    return place, max(apart(place)) <= math.log(FAR)


@cache
def networks() -> Sequence[dict[str, Any]]:
    """What the network study measured in each world with a rare strategy; made by ``studies.network.summary``."""
    return json.loads((resources.files("bandpo_lab.study") / "networks.json").read_text())


def _network(run: Placement) -> str:
    def interval(values: Sequence[float]) -> str:
        return "{:+.3f} [{:+.3f}, {:+.3f}]".format(*values)

    world, near = _closest(
        (run.draws, run.updates),
        networks(),
        lambda world: (world["samples"] * world["tail"], world["updates"]),
    )
    where = f"{world['samples'] * world['tail']:.2g} draws, {world['updates']} updates, Adam"
    if not near:
        return f"None: your run lies outside of what was trained. The closest has {where}."
    return (
        f"{where}: Band's upper side in place of clip 0.2's changed the mean reward by {interval(world['upper'])}, its "
        f"lower side by {interval(world['lower'])}, each at its own best learning rate (335k parameters, "
        f"{world['seeds']} seeds)."
    )


def _name(run: Placement) -> str:
    """The optimizer of the map that is most like the run's."""
    alike = {name: o.overshoot for name, o in OPTIMIZERS.items() if o.adam == run.optimizer.adam}
    return min(alike, key=lambda name: abs(math.log(alike[name] / run.optimizer.overshoot)))


def _certainty(run: Placement, measured: bool) -> str:
    if measured:
        lift = "The lift was measured. "
    elif run.lift:
        lift = "The lift is a guess from the learning rate, good to a factor of 4. "
    else:
        lift = "Without a lift (see --clip-high, or --learning-rate with --parameters) the place is a rough one. "
    return f"{lift}The theory was held against tables of one decision, and against one small network."


def _audit(run: Placement) -> str:
    name = BINS[sum(run.tail >= edge for edge in EDGES)]
    return (
        f"audit/clip_high/{name}: the share of winners of the tail's probability that were clipped; give it as "
        f"--clip-high. audit/tokens_positive/{name}: how many such winners there were."
    )
