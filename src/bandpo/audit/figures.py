"""Figures, drawn with matplotlib's object interface (no global state, no display)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from matplotlib.figure import Figure

from bandpo.audit.logs import summarize
from bandpo.audit.metrics import BINS, COUNTERFACTUALS
from bandpo.audit.style import Look, add_legend, house_style, looks_of
from bandpo.methods import Method
from bandpo.rules import ClipRule

PANELS = {
    "reward": "reward",
    "entropy": "entropy (nats per token)",
    "clip_high": "share of tokens clipped, A > 0",
    "clip_low": "share of tokens clipped, A < 0",
}
BLOCKED = "blocked_mass_below_0.1"
STEP, OLD = "optimiser step", "old probability of the token"
BIN_NAMES = [name.replace("_", " ").replace(" ", "\n", 1) for name in BINS]

Logs = Mapping[str, Sequence[Mapping[str, Any]]]
Methods = Mapping[str, Method | ClipRule | str | None]


def scored(metric: str) -> str:
    """The name of a score with its unit.

    >>> scored("mean@32")
    'mean@32 (share of answers)'
    """
    return f"{metric} (share of {'problems' if metric.startswith('pass@') else 'answers'})"


def _curves(axes: Any, runs: Logs, key: str, looks: Mapping[str, Look]) -> None:
    """A quantity over the steps of each run."""
    for label, rows in runs.items():
        points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        steps, values = zip(*points, strict=True) if points else ((), ())
        axes.plot(steps, values, **looks[label].options(), markevery=0.15, label=label or "_one")
    axes.set(xlabel=STEP)


@house_style()
def training_curves(runs: Logs, methods: Methods | None = None) -> Figure:
    """Reward, entropy and clip rates over training, and mean@k and pass@k where they were taken; a colour per run.

    Args:
        runs: For each label the rows that `bandpo.audit.logs.read_log` gives, each with its ``step``.
        methods: For each label what the run was trained with, as far as that is known; it gives the colour.

    >>> figure = training_curves({"band": [{"step": 1, "reward": 0.1}, {"step": 2, "reward": 0.3}]})
    >>> [axes.get_ylabel() for axes in figure.axes][:2]
    ['reward', 'entropy (nats per token)']
    """
    taken = {
        key for rows in runs.values() for row in rows for key in row if key.startswith(("mean@", "pass@"))
    }
    panels = PANELS | {name: scored(name) for name in sorted(taken)[:2]}  # mean@k and pass@k
    looks, columns = looks_of({label: (methods or {}).get(label) for label in runs}), (len(panels) + 1) // 2
    figure = Figure(figsize=(4.2 * columns, 6))
    drawn = list(figure.subplots(2, columns).flat)
    for axes in drawn[len(panels) :]:
        axes.set_visible(False)
    for axes, (key, title) in zip(drawn, panels.items(), strict=False):
        _curves(axes, runs, key, looks)
        axes.set(ylabel=title)
        if axes.dataLim.ymin >= 0:  # rewards may be negative
            axes.set_ylim(bottom=0)
    add_legend(figure)
    return figure


@house_style()
def audit_figure(runs: Logs, methods: Methods | None = None) -> Figure:
    """Entropy over training; clip-high rate by old probability; positive gradient on rare tokens that rules block.

    Args:
        runs: For each label the rows that `bandpo.audit.logs.read_log` gives.
        methods: As for `training_curves`.

    >>> figure = audit_figure({"run": [{"step": 1.0, "entropy": 0.5, "clip_high": 0.1}]})
    >>> len(figure.axes)
    3
    """
    figure = Figure(figsize=(12.5, 4.3))
    entropy, by_bin, blocked = figure.subplots(1, 3)
    summaries = {label: summarize(rows) for label, rows in runs.items()}
    looks = looks_of({label: (methods or {}).get(label) for label in runs})
    by_rule = {"": BLOCKED} | {name: f"if/{name}/{BLOCKED}" for name in COUNTERFACTUALS}
    of_bin = {name: f"clip_high/{name}" for name in BINS}
    rules = {name: key for name, key in by_rule.items() if any(key in d.metrics for d in summaries.values())}
    bars = (by_bin, of_bin), (blocked, rules)
    _curves(entropy, runs, "entropy", looks)
    width = 0.8 / len(runs)
    for k, (label, found) in enumerate(summaries.items()):
        shift = (k - (len(runs) - 1) / 2) * width
        for axes, keys in bars:
            shares = [found.metrics.get(key, 0.0) for key in keys.values()]
            axes.bar([x + shift for x in range(len(keys))], shares, width * 0.92, color=looks[label].colour)
        interval = found.blocked_interval() if "" in rules else None
        if interval:  # of the run's own rule, in [0, 1]
            share = found.metrics[BLOCKED]
            sides = [[max(0.0, share - interval[0])], [max(0.0, interval[1] - share)]]
            blocked.errorbar(shift, share, sides, color="black", capsize=3, linewidth=1.1)
    entropy.set(ylabel=PANELS["entropy"], ylim=(0, None))
    by_bin.set(ylabel=PANELS["clip_high"], xlabel=OLD)
    by_bin.set_xticks(range(len(BINS)), BIN_NAMES)
    blocked.set(ylabel="share of gradient blocked, A > 0, p < 0.1", xlabel="rule, on the run's own tokens")
    blocked.set_xticks(range(len(rules)), [r.replace(" ", "\n") or "the\nrun's" for r in rules])
    for axes, keys in bars:
        axes.grid(axis="x", visible=False)
        if not any(d.metrics.keys() & keys.values() for d in summaries.values()):
            axes.text(0.5, 0.5, "not in this log", transform=axes.transAxes, ha="center", color="0.4")
    add_legend(figure)
    return figure


@house_style()
def allowed_change(rules: Mapping[str, ClipRule]) -> Figure:
    """How much probability a token may gain or lose in one batch, against its old probability.

    The grey line is the simplex: no token can gain more than ``1 − p`` or lose more than ``p``.

    >>> figure = allowed_change({"clip 0.2": FixedClip(0.2)})
    >>> [axes.get_title() for axes in figure.axes]
    ['may gain', 'may lose']
    """
    p = torch.logspace(-4, 0, 400, dtype=torch.float64).clamp(max=1 - 1e-9)
    figure = Figure(figsize=(9, 4.1))
    gain, lose = figure.subplots(1, 2, sharex=True, sharey=True)
    for axes, edge, title in ((gain, 1 - p, "may gain"), (lose, p, "may lose")):
        axes.fill_between(p, edge, 2, color="0.93", linewidth=0, label="beyond any probability")
        axes.set(title=title, xlabel=OLD, xscale="log", yscale="log", xlim=(1e-4, 1), ylim=(1e-5, 1.2))
    for label, look in looks_of(rules).items():
        bounds = rules[label].bounds(p.log())
        gain.plot(p, p * (bounds.upper - 1), **look.options(), markevery=(25, 80), label=label)
        lose.plot(p, p * (1 - bounds.lower), **look.options(), markevery=(25, 80), label=label)
    gain.set_ylabel("change of probability in one batch")
    add_legend(figure, 4)
    return figure


@house_style()
def clipped_regions(rules: Mapping[str, ClipRule]) -> Figure:
    """Where in the plane of old probability and ratio each rule clips: beyond its bounds, and short of the simplex.

    Ratios above ``1/p`` (grey) belong to no policy.

    >>> figure = clipped_regions({"clip 0.2": FixedClip(0.2), "Band": Band()})
    >>> [axes.get_title() for axes in figure.axes]
    ['clip 0.2', 'Band']
    """
    low, high = 0.02, 100.0
    p = torch.logspace(-4, 0, 400, dtype=torch.float64).clamp(max=1 - 1e-9)
    figure = Figure(figsize=(1 + 3.2 * len(rules), 4))
    panels = figure.subplots(1, len(rules), sharex=True, sharey=True, squeeze=False)[0]
    for axes, (label, look) in zip(panels, looks_of(rules).items(), strict=True):
        bounds, edge, colour = rules[label].bounds(p.log()), (1 / p).clamp(max=high), look.colour
        lower, upper = bounds.lower.clamp(min=low), torch.minimum(bounds.upper, edge)
        axes.fill_between(p, upper, edge, color=colour, alpha=0.3, linewidth=0)
        axes.fill_between(p, low, lower, color=colour, alpha=0.3, hatch="//", linewidth=0)
        axes.fill_between(p, edge, high, color="0.85", linewidth=0)
        axes.plot(p, upper, color=colour)
        axes.plot(p, lower, color=colour)
        axes.axhline(1, color="0.4", linestyle=":", linewidth=1)
        axes.set(title=label, xlabel=OLD, xscale="log", yscale="log")
        axes.set(xlim=(1e-4, 1), ylim=(low, high))
    for options in (
        {"alpha": 0.4, "label": "clipped where A > 0"},
        {"alpha": 0.4, "hatch": "//", "label": "clipped where A < 0"},
        {"alpha": 1.0, "color": "0.85", "label": "no policy has this ratio"},
    ):
        panels[0].fill_between([], [], linewidth=0, **{"color": "0.3"} | options)
    panels[0].set_ylabel("ratio π/π_old")
    add_legend(figure)
    return figure
