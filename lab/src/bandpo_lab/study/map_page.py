"""The map as tables and as one picture."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np
from matplotlib.figure import Figure

from bandpo.audit.style import house_style
from bandpo.errors import InvalidValue
from bandpo_lab.study.cells import BAND, BASELINE, MAIN, RULES, TAILS, UPPER, Map, Place
from bandpo_lab.tables import Table

HIGH_RATE = 0.32
"""Where entropy is compared: the greatest learning rate but one of the quick map."""
UPDATES = (64, 16, 4)
PANELS = {
    "Band's upper side in place of clip 0.2": (UPPER, BASELINE),
    "Band's lower side in place of clip 0.2": (BAND, UPPER),
}


def rare_arm_table(found: Map) -> Table:
    """For each place of the rare arm: rules, each at its own best rate, and what each side brings."""
    rows = []
    for place in sorted(found.places("rare arm"), key=_order):
        scores = {rule: found.score(place, rule) for rule in MAIN}
        sides = (found.difference(place, *pair) for pair in PANELS.values())
        rows.append(
            [
                place.optimizer,
                str(place.updates),
                str(place.samples),
                f"{place.p:g}",
                *(f"{score.auc.value:.2f}" for score in scores.values()),
                *(f"{side.value:+.2f} ± {side.half:.2f}" for side in sides),
                f"{scores[UPPER].equal_rate - scores[BASELINE].equal_rate:+.2f}",
                " / ".join(f"{scores[rule].half:.0f}" for rule in MAIN[:3]),
                " / ".join(f"{scores[rule].lost:.0%}" for rule in MAIN[:3]),
            ]
        )
    head = ["optimizer", "updates", "samples", "p", *MAIN, "upper side", "lower side"]
    return Table([*head, "upper side at clip's rate", "batches to half", "lost"], rows)


def other_worlds_table(found: Map) -> Table:
    """Every rule in two stages and under coin flips."""
    two, coins = (sorted(found.places(world), key=_order) for world in ("two stages", "coin flips"))

    def reward(place: Place, rule: str) -> str:
        score = found.score(place, rule)
        return f"{score.auc.value:.3f} ± {score.auc.half:.3f}{' (edge)' if score.at_edge else ''}"

    def entropy(place: Place, rule: str) -> str:
        cell = found.cells[place, rule]
        return f"{cell.entropy_at_end[cell.rates.index(HIGH_RATE)]:.2f}"

    return Table(
        [
            "rule",
            *(f"{place.world}, {place.updates} updates: reward" for place in two),
            *(f"{place.world}, {place.updates} updates: entropy at the end" for place in coins),
        ],
        [
            [rule, *(reward(place, rule) for place in two), *(entropy(place, rule) for place in coins)]
            for rule in RULES
        ],
    )


def map_tables(found: Map) -> str:
    """All of it, in Markdown."""
    return f"{rare_arm_table(found).markdown()}\n\n{other_worlds_table(found).markdown()}\n"


def _order(place: Place) -> tuple[object, ...]:
    _, p, samples, updates, optimizer, lag = astuple(place)
    return lag, optimizer, samples != 128, samples, updates, p


@house_style()
def draw_map(found: Map) -> Figure:
    """What each side of Band brings where: difference of mean reward, each rule at its own best learning rate.

    Of the map its rare arm with 128 samples and Adam is shown.

    Raises:
        ValueError: that is not all there.
    """
    figure = Figure(figsize=(10, 4))
    panels = figure.subplots(1, 2, sharey=True)
    image = None
    for axes, (title, (rule, minus)) in zip(panels, PANELS.items(), strict=True):
        gaps = np.zeros((len(UPDATES), len(TAILS)))
        for (row, column), _ in np.ndenumerate(gaps):
            place = Place("rare arm", TAILS[column], 128, UPDATES[row], "Adam")
            if not {rule, minus} <= {*found.rules(place)}:
                raise InvalidValue(f"the map is not finished: {place} has not run under {rule} and {minus}")
            apart = found.difference(place, rule, minus)
            gaps[row, column] = apart.value
            axes.text(
                column,
                row,
                f"{round(apart.value, 2) + 0.0:+.2f}\n± {apart.half:.2f}",  # + 0.0: there is no -0.00
                ha="center",
                va="center",
                fontweight="bold" if abs(apart.value) > apart.half else "normal",
                color="white" if abs(apart.value) > 0.2 else "black",
            )
        image = axes.imshow(gaps, cmap="RdBu", vmin=-0.35, vmax=0.35, aspect="auto")
        axes.set_title(title)
        axes.grid(visible=False)
        axes.set_xticks(range(len(TAILS)), [f"{p:g}\n({128 * p:.2g})" for p in TAILS])
        axes.set_xlabel("probability of the good answer at the start\n(draws of it in a batch of 128)")
        axes.set_yticks(range(len(UPDATES)), [str(updates) for updates in UPDATES])
    panels[0].set_ylabel("optimiser steps on each batch (Adam)")
    if image is not None:
        bar = figure.colorbar(image, ax=panels, shrink=0.9)
        bar.set_label("difference of mean reward")
    return figure
