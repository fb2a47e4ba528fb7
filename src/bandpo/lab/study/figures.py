"""Figures of a study: curves with bands over seeds, every seed with its interval, clipping by probability."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from bandpo.diagnostics.audit import BINS
from bandpo.diagnostics.figures import COLOURS
from bandpo.lab.study.collect import Record
from bandpo.lab.study.statistics import Interval

STYLES = ("-", "--")
"""More arms than colours: the second round is dashed."""
PANELS = {
    "reward": "reward in training",
    "entropy": "entropy (nats per token)",
    "clip_high": "clipped, A > 0",
    "clip_low": "clipped, A < 0",
    "rare_wins": "tokens with p < 0.1 and A > 0",
    "rare_blocked": "gradient on them blocked",
}


def look(place: int) -> dict[str, str]:
    """Colour and line style of the arm at that place, the same in every figure."""
    return {
        "color": COLOURS[place % len(COLOURS)] if COLOURS[place % len(COLOURS)] != "#000000" else "#8a8f98",
        "linestyle": STYLES[place // len(COLOURS) % len(STYLES)],
    }


def _curves(records: Sequence[Record], name: str) -> np.ndarray:
    """One row per seed, one column per batch, cut to the shortest run; NaN where nothing was logged."""
    rows = [[np.nan if x is None else x for x in r.curves[name]] for r in records]
    shortest = min(map(len, rows))
    return np.array([row[:shortest] for row in rows], dtype=float)


def curves(arms: Mapping[str, Sequence[Record]], places: Mapping[str, int]) -> Figure:
    """Everything that is kept of each batch, mean over seeds; the band is ± one standard error.

    Args:
        arms: For each arm its runs, one per seed.
        places: Each arm's place among all of the study, which gives its colour.
    """
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    for axes, (name, title) in zip(figure.subplots(2, 3).flat, PANELS.items(), strict=True):
        for arm, records in arms.items():
            values = _curves(records, name)
            known = np.isfinite(values).any(axis=0)
            batches = np.flatnonzero(known) + 1
            values = values[:, known]
            mean = np.nanmean(values, axis=0)
            axes.plot(batches, mean, label=arm, linewidth=1.6, **look(places[arm]))
            known_of = np.isfinite(values).sum(axis=0)
            if (known_of > 1).any():
                spread = np.nanstd(values, axis=0) / np.sqrt(
                    np.maximum(known_of - 1, 1)
                )  # the standard error
                axes.fill_between(
                    batches,
                    mean - spread,
                    mean + spread,
                    color=look(places[arm])["color"],
                    alpha=0.15,
                    linewidth=0,
                )
        axes.set(title=title, xlabel="batch", ylim=(0, None))
        axes.grid(alpha=0.25)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    return figure


def seeds(arms: Mapping[str, Sequence[Record]], metrics: Sequence[str], places: Mapping[str, int]) -> Figure:
    """Every seed as a dot, its mean and 95 % interval beside it; one panel per metric."""
    figure = Figure(figsize=(11, 0.9 + 0.36 * len(arms)), layout="constrained")
    panels = figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0]
    for axes, metric in zip(panels, metrics, strict=True):
        for height, (arm, records) in enumerate(arms.items()):
            values, colour = [r.metric(metric) for r in records], look(places[arm])["color"]
            axes.plot(values, [height + 0.16] * len(values), "o", color=colour, alpha=0.45, markersize=4)
            interval = Interval.from_values(values)
            axes.errorbar(
                interval.mean,
                height - 0.12,
                xerr=[[interval.mean - interval.low], [interval.high - interval.mean]],
                fmt="D",
                color=colour,
                markersize=5,
                capsize=3,
            )
        axes.set(title=metric)
        axes.grid(alpha=0.25, axis="x")
    panels[0].set_yticks(range(len(arms)), list(arms))
    panels[0].invert_yaxis()
    return figure


def clipped_by_probability(arms: Mapping[str, Sequence[Record]], places: Mapping[str, int]) -> Figure:
    """For each bin of old probability the share of positive-advantage tokens that the rule clipped, over all seeds."""
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(arms)
    for k, (arm, records) in enumerate(arms.items()):
        for x, name in enumerate(BINS):
            found = [r.by_bin[name] for r in records if name in r.by_bin]
            tokens = sum(count for count, _ in found)
            rate = sum(count * share for count, share in found) / tokens if tokens else 0.0
            axes.bar(
                x + (k - (len(arms) - 1) / 2) * width,
                rate,
                width * 0.92,
                color=look(places[arm])["color"],
                hatch="//" if look(places[arm])["linestyle"] == "--" else None,
                label=arm if x == 0 else None,
            )
    axes.set_xticks(range(len(BINS)), [name.replace("_", " ") for name in BINS])
    axes.set(xlabel="old probability of the token", ylabel="share clipped, A > 0")
    axes.grid(alpha=0.25, axis="y")
    figure.legend(loc="outside lower center", ncols=5, frameon=False)
    return figure
