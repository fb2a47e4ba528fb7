"""The map as one picture."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from bandpo.audit.style import house_style
from bandpo.errors import InvalidValue
from bandpo.where import BAND, BASELINE, UPPER
from bandpo_lab.study.cells import TAILS, Cell, Setting, difference

UPDATES = (64, 16, 4)
PANELS = {
    "Band's upper side in place of clip 0.2": (UPPER, BASELINE),
    "Band's lower side in place of clip 0.2": (BAND, UPPER),
}


@house_style()
def draw_map(cells: Sequence[Cell]) -> Figure:
    """What each side of Band brings where: difference of mean reward, each rule at its own best learning rate.

    Args:
        cells: Of a map; those of the rare arm with 128 samples and Adam are shown.

    Raises:
        ValueError: they are not all there.
    """
    figure = Figure(figsize=(10, 4))
    panels = figure.subplots(1, 2, sharey=True)
    known = {(cell.setting, cell.rule) for cell in cells}
    image = None
    for axes, (title, (rule, minus)) in zip(panels, PANELS.items(), strict=True):
        gaps = np.zeros((len(UPDATES), len(TAILS)))
        for row, updates in enumerate(UPDATES):
            for column, p in enumerate(TAILS):
                setting = Setting("rare arm", p, 128, updates, "Adam")
                if not {(setting, rule), (setting, minus)} <= known:
                    raise InvalidValue(
                        f"the map is not finished: {setting} has not run under {rule} and {minus}"
                    )
                gaps[row, column], half = difference(cells, setting, rule, minus)
                strong = abs(gaps[row, column]) > half
                axes.text(
                    column,
                    row,
                    f"{gaps[row, column].round(2) + 0.0:+.2f}\n± {half:.2f}",  # + 0.0: there is no -0.00
                    ha="center",
                    va="center",
                    fontweight="bold" if strong else "normal",
                    color="white" if abs(gaps[row, column]) > 0.2 else "black",
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
