"""Figures of a study: curves with intervals over seeds, every seed with its interval, clipping by probability."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from bandpo.runs.metric_names import BINS
from bandpo_lab.interval import bootstrap
from bandpo_lab.study.collect import RunResult
from bandpo_lab.style import Look, add_legend, house_style, spread

PANELS = {
    "reward": "reward in training",
    "entropy": "entropy (nats per token)",
    "clip_high": "share of tokens clipped, A > 0",
    "clip_low": "share of tokens clipped, A < 0",
    "rare_wins": "share of tokens with p < 0.1, A > 0",
    "rare_blocked": "share of their gradient blocked",
}
UNITS = {"AUC": "AUC (mean reward in training)", "mean entropy": "mean entropy (nats per token)"}
RESAMPLES = 400
"""Of the seeds, for the interval of a point: its ends move by less than the width of a line from 400 on."""


def _resampled(count: int) -> np.ndarray:
    """Seeds drawn anew, one draw a row; the same every time."""
    return np.random.default_rng(0).integers(count, size=(RESAMPLES, count))


def _curves(records: Sequence[RunResult], name: str) -> np.ndarray:
    """One row per seed, one column per batch, cut to the shortest run; NaN where nothing was logged."""
    rows = [[np.nan if x is None else x for x in r.curves[name]] for r in records]
    shortest = min(map(len, rows))
    return np.array([row[:shortest] for row in rows], dtype=float)


def _mean(values: np.ndarray) -> np.ndarray:
    """Over seeds (the last axis but one), of those that logged a value; NaN where none did."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mean of empty slice")
        return np.nanmean(values, axis=-2)


@house_style()
def curves(arms: Mapping[str, Sequence[RunResult]], looks: Mapping[str, Look]) -> Figure:
    """Everything that is kept of each batch, mean over the runs of an arm, with its 95 % bootstrap interval."""
    figure = Figure(figsize=(8, 9))
    for axes, (name, title) in zip(figure.subplots(3, 2).flat, PANELS.items(), strict=True):
        ends: list[float] = []
        for arm, records in arms.items():
            values = _curves(records, name)
            values = values[:, known := np.isfinite(values).any(axis=0)]
            batches, look = np.flatnonzero(known) + 1, looks[arm]
            label, mean = f"{arm} (n = {len(records)})", _mean(values)
            axes.plot(batches, mean, **look.options(), markevery=0.2, label=label)
            ends += [*mean[-1:]]
            if len(records) > 1 and batches.size:
                low, high = np.nanpercentile(_mean(values[_resampled(len(records))]), [2.5, 97.5], axis=0)
                axes.fill_between(batches, low, high, color=look.colour, alpha=0.1, linewidth=0)
        axes.set(xlabel="batch", ylabel=title, ylim=(0, None), title=f"ends at {spread(ends)}")
        axes.xaxis.get_major_locator().set_params(integer=True)  # there is no batch 2.5
    add_legend(figure, 2)
    return figure


@house_style()
def seeds(
    arms: Mapping[str, Sequence[RunResult]], metrics: Sequence[str], looks: Mapping[str, Look]
) -> Figure:
    """Every seed as a dot, its mean and 95 % interval beside it; one panel per metric."""
    figure = Figure(figsize=(8, 1.2 + 0.38 * len(arms)))
    panels = figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0]
    for axes, metric in zip(panels, metrics, strict=True):
        means: list[float] = []
        for height, (arm, records) in enumerate(arms.items()):
            values, look = [r.metric(metric) for r in records], looks[arm]
            axes.plot(
                values, [height + 0.18] * len(values), "o", color=look.colour, alpha=0.5, markeredgewidth=0
            )
            mean, low, high = bootstrap([values])
            means.append(mean)
            axes.errorbar(
                mean,
                height - 0.14,
                xerr=[[mean - low], [high - mean]],
                fmt=look.marker,
                color=look.colour,
                markersize=6.5,
                capsize=3,
            )
        unit = UNITS.get(metric, metric)
        axes.set(xlabel=unit, title=f"means of {spread(means)}")
        axes.grid(axis="y", visible=False)
    panels[0].set_yticks(range(len(arms)), [f"{arm} (n = {len(runs)})" for arm, runs in arms.items()])
    panels[0].invert_yaxis()
    return figure


@house_style()
def clipped_by_probability(arms: Mapping[str, Sequence[RunResult]], looks: Mapping[str, Look]) -> Figure:
    """For each bin of old probability the share of positive-advantage tokens that the rule clipped, over all seeds.

    With its 95 % interval: from drawing seeds anew, and at least Wilson's for the number of tokens, where few seeds
    had any. Both stay within [0, 1]. An arm without such tokens has no mark.
    """
    figure = Figure(figsize=(8, 4))
    axes = figure.subplots()
    width = 0.8 / len(arms)
    sizes: dict[str, list[int]] = {name: [] for name in BINS}
    rates_of: list[float] = []
    for k, (arm, records) in enumerate(arms.items()):
        marks = []
        for x, name in enumerate(BINS):
            tokens, shares = np.array([r.by_bin.get(name, (0.0, 0.0)) for r in records], dtype=float).T
            if not tokens.sum():
                continue
            sizes[name].append(round(tokens.sum()))
            drawn, clipped = _resampled(len(records)), tokens * shares
            counts, rate = tokens[drawn].sum(axis=1), clipped.sum() / tokens.sum()
            rates = clipped[drawn].sum(axis=1)[counts > 0] / counts[counts > 0]
            wilson = stats.binomtest(round(clipped.sum()), round(tokens.sum())).proportion_ci(method="wilson")
            low = min(rate, wilson.low, np.percentile(rates, 2.5))
            high = max(rate, wilson.high, np.percentile(rates, 97.5))
            marks.append((x + (k - (len(arms) - 1) / 2) * width, rate, rate - low, high - rate))
        rates_of += [rate for _, rate, *_ in marks]
        if marks:
            place, rate, *bars = zip(*marks, strict=True)
            look: Any = {"fmt": looks[arm].marker, "color": looks[arm].colour, "label": arm}
            axes.errorbar(place, rate, bars, markersize=6, capsize=2.5, **look)
    for edge in range(1, len(BINS)):
        axes.axvline(edge - 0.5, color="0.85", linewidth=0.8)
    counted = [f"n = {min(n):,} to {max(n):,}" if n else "n = 0" for n in sizes.values()]
    names = [f"{name.replace('_', ' ')}\n{n}" for name, n in zip(BINS, counted, strict=True)]
    axes.set_xticks(range(len(BINS)), names)
    axes.set(
        xlabel="old probability of the token, and how many tokens an arm had",
        ylabel="share of tokens clipped, A > 0",
    )
    axes.set(xlim=(-0.5, len(BINS) - 0.5), ylim=(-0.02, None), title=f"shares of {spread(rates_of)}")
    axes.grid(axis="x", visible=False)
    add_legend(figure)
    return figure
