"""The pictures of README, in light and dark, of the landing page, which shows the light one, and of docs/when.md.

    PYTHONPATH=. python scripts/pictures.py docs/figures

The dark one, `…-dark.png` beside it, is the light one with its lightness turned round. On the landing page the explorer
takes the place of `allowed_change.png` where a page can run scripts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.image import imread, imsave

from bandpo import KL, Band, FixedClip
from bandpo_lab.study.statistics import Curve, difference
from bandpo_lab.style import add_legend, line_styles, plot_style, save_figure
from studies.staleness import Run, read_runs
from studies.staleness_report import CLIP, worlds_of

RUNS = Path(__file__).parents[1] / "results/staleness/runs.jsonl.gz"
ARMS = (CLIP, "Clip-Higher", "clip [.8, 2]", "BandAbove", "no upper bound")
BY_AGE = ("lag 0", "lag 2", "lag 4", "lag 8")
"""Cells that differ in the age of the data alone."""
RULES = {
    "FixedClip(0.2, 0.2)": FixedClip(0.2),
    "Band(KL(), 0.05)": Band(KL(), 0.05),
    "FixedClip(0.2, 0.28)": FixedClip(0.2, 0.28),
}


def mean_curve(rewards: np.ndarray, groups: Sequence[int]) -> np.ndarray:
    """Mean of rows (seeds, batches) and its 95 % interval, (3, batches): their difference from nothing."""
    nothing = Curve([0.0], np.zeros((1, len(groups)))).resampled_scores
    each = [difference(Curve([0.0], scores[None]).resampled_scores, nothing, groups) for scores in rewards.T]
    return np.array(each).T


@plot_style()
def stale_data() -> Figure:
    """What is learned from data four batches old, and what each rule adds to clip 0.2 at other ages."""
    rows = read_runs(RUNS)
    worlds = [world for name, world in worlds_of(rows).items() if name in BY_AGE and world.compared]
    worlds.sort(key=lambda world: world.cell.lag)
    [lag_4] = [world for world in worlds if world.name == "lag 4"]
    figure = Figure(figsize=(8, 4.2))
    left, right = figure.subplots(1, 2)
    learned, looks = {arm: lag_4.curve(arm) for arm in ARMS}, line_styles(ARMS)
    for place, (arm, look) in enumerate(looks.items()):
        runs = [Run("lag 4", arm, learned[arm].rates[learned[arm].best], seed) for seed in lag_4.seeds]
        mean, low, high = mean_curve(np.array([rows[run]["reward"] for run in runs]), lag_4.groups)
        batches = np.arange(1, len(mean) + 1)
        left.plot(batches, mean, **look.options(), markevery=(2 * place, 10), label=arm)
        left.fill_between(batches, low, high, color=look.colour, alpha=0.1, linewidth=0)
        if arm != CLIP:
            tested = [world for world in worlds if arm in world.cell.arms]
            gain, low, high = np.array([world.difference(arm, CLIP) for world in tested]).T
            ages = [worlds.index(world) + 0.12 * (place - 2.5) for world in tested]
            error = {"yerr": (gain - low, high - gain), "fmt": look.marker, "color": look.colour}
            right.errorbar(ages, gain, **error, capsize=2)
    left.set(title="Data four batches old:\na much higher upper bound learns sooner")
    left.set(xlabel=f"batch (n = {len(lag_4.seeds)} runs a rule)", ylabel="reward", ylim=(0, None))
    right.axhline(0, color=looks[CLIP].colour, linewidth=1)
    ages = [f"{world.cell.lag}\n(n = {len(world.seeds)})" for world in worlds]
    right.set_xticks(range(len(worlds)), ages)
    gains = [world.difference("BandAbove", CLIP).value for world in (worlds[0], lag_4)]
    right.set(
        title=f"BandAbove minus clip 0.2, 60 batches:\n{gains[0]:+.3f} (fresh), {gains[1]:+.3f} (4 batches old)"
    )
    right.set(xlabel="age of the data in batches", ylabel="mean reward minus that of clip 0.2")
    add_legend(figure)
    return figure


@plot_style()
def allowed_change() -> Figure:
    """How far a rule lets a token's probability move in one batch.

    The grey area is beyond the simplex: no token can gain more than 1 − p or lose more than p.
    """
    p = torch.logspace(-4, 0, 401, dtype=torch.float64).clamp(max=1 - 1e-9)
    p = torch.cat([p, torch.tensor([0.08])]).sort().values  # the token that the titles are about
    of_title = (p - 0.08).abs().argmin()
    figure = Figure(figsize=(6, 4))
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    for axes, word, edge in zip(panels, ("gain", "lose"), (1 - p, p), strict=True):
        axes.fill_between(p, edge, 2, color="0.93", linewidth=0, label="beyond any probability")
        rare: dict[str, float] = {}
        for label, look in line_styles(RULES).items():
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
    folder = Path(sys.argv[1])
    save_figure(stale_data(), folder / "stale_data.png")
    light = folder / "allowed_change.png"
    save_figure(allowed_change(), light)
    imsave(light.with_stem("allowed_change-dark"), darkened(imread(light)[..., :3]))
