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


def spread(values: Sequence[float]) -> str:
    """Of what a panel shows, for its title: ``0.1 to 0.3``."""
    return " to ".join(dict.fromkeys(f"{end(values):.2g}" for end in (min, max))) if values else "–"


def _curves(axes: Any, runs: Logs, key: str, looks: Mapping[str, Look]) -> None:
    """A quantity over the steps of each run."""
    ends: list[float] = []
    for label, rows in runs.items():
        points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        steps, values = zip(*points, strict=True) if points else ((), ())
        axes.plot(steps, values, **looks[label].options(), markevery=0.15, label=label or "_one")
        ends += values[-1:]
    axes.set(xlabel=STEP, title=f"ends at {spread(ends)}")


@house_style()
def training_curves(runs: Logs, methods: Methods | None = None) -> Figure:
    """Reward, entropy, clip rates, mean@k and pass@k over training, as far as they were logged; a colour per run.

    Args:
        runs: For each label the rows that `bandpo.audit.logs.read_log` gives, each with its ``step``.
        methods: For each label what the run was trained with, as far as that is known; it gives the colour.

    >>> figure = training_curves({"band": [{"step": 1, "reward": 0.1}, {"step": 2, "reward": 0.3}]})
    >>> [(axes.get_ylabel(), axes.get_title()) for axes in figure.axes]
    [('reward', 'ends at 0.3')]
    """
    logged = {
        key for rows in runs.values() for row in rows for key, value in row.items() if value is not None
    }
    panels = {key: title for key, title in PANELS.items() if key in logged}
    panels |= {key: scored(key) for key in sorted(logged) if key.startswith(("mean@", "pass@"))}
    looks, columns = looks_of({label: (methods or {}).get(label) for label in runs}), (len(panels) + 1) // 2
    figure = Figure(figsize=(3.6 * columns, 5.4))
    for place, (key, title) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(2, columns, place)
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
    ['p = 0.01 may gain 0.002', 'p = 0.01 may lose 0.002']
    """
    p = torch.logspace(-4, 0, 401, dtype=torch.float64).clamp(max=1 - 1e-9)
    figure, looks = Figure(figsize=(7, 4)), looks_of(rules)
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    for axes, word, edge in zip(panels, ("gain", "lose"), (1 - p, p), strict=True):
        axes.fill_between(p, edge, 2, color="0.93", linewidth=0, label="beyond any probability")
        rare: list[float] = []
        for label, rule in rules.items():
            bounds = rule.bounds(p.log())
            change = p * (bounds.upper - 1 if word == "gain" else 1 - bounds.lower)
            axes.plot(p, change, **looks[label].options(), markevery=(25, 80), label=label)
            rare.append(change[200].item())  # at p = 0.01
        axes.set(title=f"p = 0.01 may {word} {spread(rare)}", xlabel=OLD)
        axes.set(xscale="log", yscale="log", xlim=(1e-4, 1), ylim=(1e-5, 1.2))
    figure.axes[0].set_ylabel("change of probability in one batch")
    add_legend(figure, 2)
    return figure
