"""The picture of README, light and dark: how far a rule lets a token's probability move in one batch.

    python scripts/allowed_change.py docs/figures/allowed_change.png

The dark one, `…-dark.png` beside it, is the light one with its lightness turned round. On the site the explorer
takes its place where a page can run scripts.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.image import imread, imsave

from bandpo import KL, Band, FixedClip
from bandpo_lab.style import add_legend, house_style, looks_of, save_figure

RULES = {
    "FixedClip(0.2, 0.2)": FixedClip(0.2),
    "Band(KL(), 0.05)": Band(KL(), 0.05),
    "FixedClip(0.2, 0.28)": FixedClip(0.2, 0.28),
}


@house_style()
def allowed_change() -> Figure:
    """The grey area is beyond the simplex: no token can gain more than 1 − p or lose more than p."""
    p = torch.logspace(-4, 0, 401, dtype=torch.float64).clamp(max=1 - 1e-9)
    p = torch.cat([p, torch.tensor([0.08])]).sort().values  # the token that the titles are about
    of_title = (p - 0.08).abs().argmin()
    figure = Figure(figsize=(6, 4))
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    for axes, word, edge in zip(panels, ("gain", "lose"), (1 - p, p), strict=True):
        axes.fill_between(p, edge, 2, color="0.93", linewidth=0, label="beyond any probability")
        rare: dict[str, float] = {}
        for label, look in looks_of(RULES).items():
            bounds = RULES[label].bounds(p.log())
            change = p * (bounds.upper - 1 if word == "gain" else 1 - bounds.lower)
            axes.plot(p, change, **look.options(), markevery=(25, 80), label=label)
            rare[label] = change[of_title].item()
        clip, band, _ = rare.values()
        axes.set(
            title=f"p = 0.08 may {word}\n{band:.2g} (Band), {clip:.2g} (clip 0.2)",
            xlabel="old probability of the token",
        )
        axes.set(xscale="log", yscale="log", xlim=(1e-4, 1), ylim=(1e-5, 1.2))
    panels[0].set_ylabel("change of probability in one batch")
    add_legend(figure, 2)
    return figure


def darkened(image: np.ndarray, page: tuple[int, int, int] = (13, 17, 23)) -> np.ndarray:
    """Pixels (height, width, 3) in [0, 1] of the same hues, with white as the colour of GitHub's dark page."""
    turned = image + 1 - image.max(-1, keepdims=True) - image.min(-1, keepdims=True)  # HSL's lightness
    floor = np.array(page) / 255
    return floor + (1 - floor) * turned


if __name__ == "__main__":
    file = Path(sys.argv[1])
    save_figure(allowed_change(), file)
    imsave(file.with_stem(f"{file.stem}-dark"), darkened(imread(file)[..., :3]))
