"""The figures of a study: curves with intervals over seeds, single seeds, and clipping by probability."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from bandpo_lab.output.style import LineStyle, add_legend, plot_style, spread
from bandpo_lab.study.collect import RunResult
from bandpo_lab.study.interval import bootstrap
from rlvet.runs.metric_names import BINS

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
"""The number of bootstrap samples for the interval of a point; with more, its ends move by less than a line's width."""


def _bootstrap_indices(count: int) -> np.ndarray:
    """Return the indices of the seeds in each bootstrap sample, always the same; shape (RESAMPLES, count)."""
    return np.random.default_rng(0).integers(count, size=(RESAMPLES, count))


def _curves(runs: Sequence[RunResult], name: str) -> np.ndarray:
    """Return a quantity of shape (seeds, batches), cut to the shortest run; NaN where nothing was logged."""
    rows = [[np.nan if value is None else value for value in run.curves[name]] for run in runs]
    shortest = min(map(len, rows))
    return np.array([row[:shortest] for row in rows], dtype=float)


def _mean(values: np.ndarray) -> np.ndarray:
    """Return the mean over seeds (the last axis but one) that logged a value; NaN if none did."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mean of empty slice")
        return np.nanmean(values, axis=-2)


@plot_style()
def curves(arms: Mapping[str, Sequence[RunResult]], styles: Mapping[str, LineStyle]) -> Figure:
    """Plot each of `CURVES` over batches: the mean over the runs of an arm with its 95 % bootstrap interval."""
    figure = Figure(figsize=(8, 9))
    for axes, (name, title) in zip(figure.subplots(3, 2).flat, PANELS.items(), strict=True):
        ends: list[float] = []
        for arm, runs in arms.items():
            style = styles[arm]
            values = _curves(runs, name)
            # Keep the batches in which a seed logged a value.
            is_logged = np.isfinite(values).any(axis=0)
            values = values[:, is_logged]
            batches = np.flatnonzero(is_logged) + 1
            mean = _mean(values)
            axes.plot(batches, mean, **style.options(), markevery=0.2, label=f"{arm} (n = {len(runs)})")
            ends += [*mean[-1:]]
            if len(runs) > 1 and batches.size:
                means = _mean(values[_bootstrap_indices(len(runs))])
                low, high = np.nanpercentile(means, [2.5, 97.5], axis=0)
                axes.fill_between(batches, low, high, color=style.colour, alpha=0.1, linewidth=0)
        axes.set(xlabel="batch", ylabel=title, ylim=(0, None), title=f"ends at {spread(ends)}")
        axes.xaxis.get_major_locator().set_params(integer=True)  # there is no batch 2.5
    add_legend(figure, 2)
    return figure


@plot_style()
def seeds(
    arms: Mapping[str, Sequence[RunResult]], metrics: Sequence[str], styles: Mapping[str, LineStyle]
) -> Figure:
    """Plot every seed of an arm as a dot, with the mean and its 95 % interval; one panel per metric."""
    figure = Figure(figsize=(8, 1.2 + 0.38 * len(arms)))
    panels = figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0]
    for axes, metric in zip(panels, metrics, strict=True):
        means: list[float] = []
        for height, (arm, runs) in enumerate(arms.items()):
            style = styles[arm]
            values = [run.metric(metric) for run in runs]
            # The seeds are above the row of the arm, and their mean is below it.
            axes.plot(
                values, [height + 0.18] * len(values), "o", color=style.colour, alpha=0.5, markeredgewidth=0
            )
            mean, low, high = bootstrap([values])
            means.append(mean)
            axes.errorbar(
                mean,
                height - 0.14,
                xerr=[[mean - low], [high - mean]],
                fmt=style.marker,
                color=style.colour,
                markersize=6.5,
                capsize=3,
            )
        unit = UNITS.get(metric, metric)
        axes.set(xlabel=unit, title=f"means of {spread(means)}")
        axes.grid(axis="y", visible=False)
    panels[0].set_yticks(range(len(arms)), [f"{arm} (n = {len(runs)})" for arm, runs in arms.items()])
    panels[0].invert_yaxis()
    return figure


@plot_style()
def clipped_by_probability(
    arms: Mapping[str, Sequence[RunResult]], styles: Mapping[str, LineStyle]
) -> Figure:
    """Plot the share of positive-advantage tokens that the rule clipped, for each bin of old probability.

    The 95 % interval is from a bootstrap over seeds, and at least Wilson's for the number of tokens, since few seeds
    may have tokens in a bin. Both stay within [0, 1]. An arm without such tokens has no mark.
    """
    figure = Figure(figsize=(8, 4))
    axes = figure.subplots()
    width = 0.8 / len(arms)
    token_counts: dict[str, list[int]] = {name: [] for name in BINS}
    all_shares: list[float] = []
    for k, (arm, runs) in enumerate(arms.items()):
        offset = (k - (len(arms) - 1) / 2) * width
        marks = []
        for x, name in enumerate(BINS):
            # Each of shape (seeds,).
            tokens, shares = np.array([run.by_bin.get(name, (0.0, 0.0)) for run in runs], dtype=float).T
            if not tokens.sum():
                continue
            token_counts[name].append(round(tokens.sum()))
            share, low, high = _clipped_share(tokens, shares)
            marks.append((x + offset, share, share - low, high - share))
            all_shares.append(share)
        if marks:
            positions, mark_shares, *bars = zip(*marks, strict=True)
            style: Any = {"fmt": styles[arm].marker, "color": styles[arm].colour, "label": arm}
            axes.errorbar(positions, mark_shares, bars, markersize=6, capsize=2.5, **style)
    for edge in range(1, len(BINS)):
        axes.axvline(edge - 0.5, color="0.85", linewidth=0.8)
    labels = []
    for name, counts in token_counts.items():
        range_text = f"n = {min(counts):,} to {max(counts):,}" if counts else "n = 0"
        labels.append(f"{name.replace('_', ' ')}\n{range_text}")
    axes.set_xticks(range(len(BINS)), labels)
    axes.set(
        xlabel="old probability of the token, and how many tokens an arm had",
        ylabel="share of tokens clipped, A > 0",
    )
    axes.set(xlim=(-0.5, len(BINS) - 0.5), ylim=(-0.02, None), title=f"shares of {spread(all_shares)}")
    axes.grid(axis="x", visible=False)
    add_legend(figure)
    return figure


def _clipped_share(tokens: np.ndarray, shares: np.ndarray) -> tuple[float, float, float]:
    """Compute the share of clipped tokens over all seeds, and the ends of its 95 % interval.

    Args:
        tokens: The number of tokens of each seed, of shape (seeds,).
        shares: The share of them that was clipped, of shape (seeds,).
    """
    clipped = tokens * shares
    share = clipped.sum() / tokens.sum()
    indices = _bootstrap_indices(len(tokens))
    sample_tokens = tokens[indices].sum(axis=1)
    sample_clipped = clipped[indices].sum(axis=1)
    has_tokens = sample_tokens > 0
    sample_shares = sample_clipped[has_tokens] / sample_tokens[has_tokens]
    wilson = stats.binomtest(round(clipped.sum()), round(tokens.sum())).proportion_ci(method="wilson")
    low = min(share, wilson.low, np.percentile(sample_shares, 2.5))
    high = max(share, wilson.high, np.percentile(sample_shares, 97.5))
    return share, low, high
