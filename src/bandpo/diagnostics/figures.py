"""Figures, drawn with matplotlib's object interface (no global state, no display)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from matplotlib.figure import Figure

from bandpo.clipping import ClipRule
from bandpo.diagnostics.audit import BINS, COUNTERFACTUALS
from bandpo.diagnostics.summary import summarize

# Okabe and Ito's palette: told apart by colour-blind readers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")

PANELS = {
    "reward": ("reward",),
    "entropy (nats per token)": ("entropy",),
    "share of tokens clipped": ("clip_high", "clip_low"),
}


def training_curves(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Reward, entropy and clip rates over training, and mean@k and pass@k where they were taken; a colour per run.

    Args:
        runs: For each label the rows that `bandpo.diagnostics.logs.read_log` gives, each with its ``step``.

    >>> figure = training_curves({"band": [{"step": 1, "reward": 0.1}, {"step": 2, "reward": 0.3}]})
    >>> [axes.get_title() for axes in figure.axes]
    ['reward', 'entropy (nats per token)', 'share of tokens clipped']
    """
    taken = {
        key for rows in runs.values() for row in rows for key in row if key.startswith(("mean@", "pass@"))
    }
    scores = sorted(taken)[:2]  # the two of one k
    panels = PANELS | ({", ".join(scores): tuple(scores)} if scores else {})
    figure = Figure(figsize=(3.7 * len(panels), 3.2), layout="constrained")
    for axes, (title, keys) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for colour, (label, rows) in zip(COLOURS, runs.items(), strict=False):
            for key, style in zip(keys, ("-", "--"), strict=False):
                points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
                what = key.removeprefix("clip_") if len(keys) > 1 else ""
                axes.plot(
                    *zip(*points, strict=True) if points else ([], []),
                    style,
                    color=colour,
                    label=f"{label} {what}".strip(),
                )
        axes.set(title=title, xlabel="optimiser step")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if any(handle.get_label() and not str(handle.get_label()).startswith("_") for handle in axes.lines):
            axes.legend(frameon=False, fontsize="small")
    return figure


def audit_figure(runs: Mapping[str, Sequence[Mapping[str, float]]]) -> Figure:
    """Entropy over training; clip-high rate by old probability; positive gradient on rare tokens that rules block.

    Args:
        runs: For each label the rows that `bandpo.diagnostics.logs.read_log` gives.

    >>> figure = audit_figure({"run": [{"step": 1.0, "entropy": 0.5, "clip_high": 0.1}]})
    >>> len(figure.axes)
    3
    """
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    entropy, by_bin, blocked = figure.subplots(1, 3)
    summaries = {label: summarize(rows) for label, rows in runs.items()}
    rules = [
        name for name in ("", *COUNTERFACTUALS) if any(name in d.blocked_mass for d in summaries.values())
    ]
    width = 0.8 / len(runs)
    for k, (colour, (label, rows)) in enumerate(zip(COLOURS * len(runs), runs.items(), strict=False)):
        found, shift = summaries[label], (k - (len(runs) - 1) / 2) * width
        points = [(row["step"], row["entropy"]) for row in rows if "entropy" in row]
        entropy.plot(*zip(*points, strict=True) if points else ([], []), color=colour, label=label)
        rates = [found.clip_high_by_bin.get(name, (0.0, 0.0))[0] for name in BINS]
        by_bin.bar([x + shift for x in range(len(BINS))], rates, width, color=colour)
        shares = [found.blocked_mass.get(rule, {}).get("below_0.1", 0.0) for rule in rules]
        blocked.bar([x + shift for x in range(len(rules))], shares, width, color=colour)
    entropy.set(title="entropy (nats per token)", xlabel="optimiser step", ylim=(0, None))
    entropy.legend(frameon=False)
    by_bin.set(title="clip-high rate, A > 0", xlabel="old probability")
    by_bin.set_xticks(
        range(len(BINS)), [name.replace("_", "\n", 1).replace("_", " ") for name in BINS], fontsize=8
    )
    blocked.set(
        title="positive gradient blocked, p < 0.1", xlabel="by the run's rule, and by others on its tensors"
    )
    blocked.set_xticks(range(len(rules)), [r.replace(" ", "\n") or "the run's" for r in rules], fontsize=8)
    for axes, told in (
        (by_bin, any(d.clip_high_by_bin for d in summaries.values())),
        (blocked, bool(rules)),
    ):
        if not told:
            axes.text(0.5, 0.5, "not in this log", transform=axes.transAxes, ha="center", color="0.4")
    for axes in (entropy, by_bin, blocked):
        axes.grid(alpha=0.3)
    return figure


def allowed_change(rules: Mapping[str, ClipRule]) -> Figure:
    """How much probability a token may gain or lose in one batch, against its old probability.

    The grey line is the simplex: no token can gain more than ``1 − p`` or lose more than ``p``.

    >>> figure = allowed_change({"clip 0.2": FixedClip(0.2)})
    >>> [axes.get_title() for axes in figure.axes]
    ['may gain', 'may lose']
    """
    p = torch.logspace(-4, 0, 400, dtype=torch.float64).clamp(max=1 - 1e-9)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    gain, lose = figure.subplots(1, 2, sharex=True, sharey=True)
    for colour, (label, rule) in zip(COLOURS, rules.items(), strict=False):
        bounds = rule.bounds(p.log())
        gain.plot(p, p * (bounds.upper - 1), color=colour, label=label)
        lose.plot(p, p * (1 - bounds.lower), color=colour, label=label)
    for axes, edge, title in ((gain, 1 - p, "may gain"), (lose, p, "may lose")):
        axes.plot(p, edge, color="0.6", linestyle=":", label="simplex")
        axes.set(
            title=title, xlabel="old probability of the token", xscale="log", yscale="log", ylim=(1e-5, 1.2)
        )
        axes.grid(alpha=0.3)
    gain.set_ylabel("change of probability")
    lose.legend(frameon=False, fontsize="small")
    return figure


def clipped_regions(rules: Mapping[str, ClipRule]) -> Figure:
    """Where in the plane of old probability and ratio each rule clips: beyond its bounds, and short of the simplex.

    Ratios above ``1/p`` (grey) belong to no policy.

    >>> figure = clipped_regions({"clip 0.2": FixedClip(0.2), "Band": Band()})
    >>> [axes.get_title() for axes in figure.axes]
    ['clip 0.2', 'Band']
    """
    low, high = 0.02, 100.0
    p = torch.logspace(-4, 0, 400, dtype=torch.float64).clamp(max=1 - 1e-9)
    figure = Figure(figsize=(1 + 3.4 * len(rules), 3.6), layout="constrained")
    panels = figure.subplots(1, len(rules), sharex=True, sharey=True, squeeze=False)[0]
    for axes, colour, (label, rule) in zip(panels, COLOURS * len(rules), rules.items(), strict=False):
        bounds, edge = rule.bounds(p.log()), (1 / p).clamp(max=high)
        lower, upper = bounds.lower.clamp(min=low), torch.minimum(bounds.upper, edge)
        axes.fill_between(p, upper, edge, color=colour, alpha=0.3, linewidth=0, label="clipped where A > 0")
        axes.fill_between(
            p, low, lower, color=colour, alpha=0.3, hatch="//", linewidth=0, label="clipped where A < 0"
        )
        axes.fill_between(p, edge, high, color="0.6", alpha=0.4, linewidth=0, label="no policy")
        axes.plot(p, upper, color=colour)
        axes.plot(p, lower, color=colour)
        axes.axhline(1, color="0.5", linestyle=":")
        axes.set(title=label, xlabel="old probability of the token", xscale="log", yscale="log")
        axes.set(xlim=(1e-4, 1), ylim=(low, high))
    panels[0].set_ylabel("ratio π/π_old")
    handles, labels = panels[-1].get_legend_handles_labels()
    options: dict[str, Any] = {"loc": "outside lower center", "ncols": 3, "frameon": False}
    figure.legend(handles, labels, **options)  # pyright: ignore[reportUnknownMemberType]
    return figure
