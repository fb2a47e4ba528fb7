"""The picture of README: how far a rule lets a token's probability move in one batch.

    python scripts/allowed_change.py docs/figures/allowed_change.png

On the site the explorer takes its place where a page can run scripts.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure

from bandpo import KL, Band, FixedClip
from bandpo_lab.style import add_legend, house_style, looks_of, save_figure, spread

RULES = {
    "FixedClip(0.2, 0.2)": FixedClip(0.2),
    "Band(KL(), 0.05)": Band(KL(), 0.05),
    "FixedClip(0.2, 0.28)": FixedClip(0.2, 0.28),
}


@house_style()
def allowed_change() -> Figure:
    """The grey area is beyond the simplex: no token can gain more than 1 − p or lose more than p."""
    p = torch.logspace(-4, 0, 401, dtype=torch.float64).clamp(max=1 - 1e-9)
    figure = Figure(figsize=(7, 4))
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    for axes, word, edge in zip(panels, ("gain", "lose"), (1 - p, p), strict=True):
        axes.fill_between(p, edge, 2, color="0.93", linewidth=0, label="beyond any probability")
        rare: list[float] = []
        for label, look in looks_of(RULES).items():
            bounds = RULES[label].bounds(p.log())
            change = p * (bounds.upper - 1 if word == "gain" else 1 - bounds.lower)
            axes.plot(p, change, **look.options(), markevery=(25, 80), label=label)
            rare.append(change[200].item())  # at p = 0.01
        axes.set(title=f"p = 0.01 may {word} {spread(rare)}", xlabel="old probability of the token")
        axes.set(xscale="log", yscale="log", xlim=(1e-4, 1), ylim=(1e-5, 1.2))
    panels[0].set_ylabel("change of probability in one batch")
    add_legend(figure, 2)
    return figure


if __name__ == "__main__":
    save_figure(allowed_change(), Path(sys.argv[1]))
