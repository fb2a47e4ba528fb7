"""Figures, drawn with matplotlib's object interface (no global state, no display)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from matplotlib.figure import Figure

from bandpo.audit.style import Look, add_legend, house_style, looks_of
from bandpo.methods import Method
from bandpo.rules import ClipRule

PANELS = {
    "reward": "reward",
    "entropy": "entropy (nats per token)",
    "clip_high": "share of tokens clipped, A > 0",
    "clip_low": "share of tokens clipped, A < 0",
}
STEP, OLD = "optimiser step", "old probability of the token"

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
