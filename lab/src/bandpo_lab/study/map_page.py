"""The map as a table and as one picture."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from bandpo_lab.interval import Interval
from bandpo_lab.study.cells import ABOVE, BASELINE, RULES, Map
from bandpo_lab.study.statistics import interquartile_mean, rank_correlation
from bandpo_lab.style import add_legend, house_style
from bandpo_lab.tables import Table


def map_table(found: Map) -> Table:
    """For each place clip 0.2's AUC and blocked share, and what the other rules bring."""
    others = [rule for rule in RULES if rule != BASELINE]
    rows = []
    for place in sorted(found.places, key=found.blocked):
        ends = [found.cells[place, rule].curve for rule in RULES]
        apart = [found.difference(place, rule) for rule in others]
        middle = interquartile_mean(ends[1].best_scores) - interquartile_mean(ends[0].best_scores)
        rows.append(
            [
                str(place),
                f"{found.blocked(place):.2f}",
                f"{ends[0].best_scores.mean():.2f}",
                *(f"{gap.value:+.2f} ± {gap.half:.2f}" for gap in apart),
                f"{middle:+.2f}",
                ", ".join(rule for rule, curve in zip(RULES, ends, strict=True) if curve.at_edge) or "none",
            ]
        )
    head = ["place", "clip 0.2 blocks", BASELINE, *(f"{rule} minus clip" for rule in others)]
    return Table([*head, "Band minus clip, interquartile", "best rate at the edge"], rows)


def map_text(found: Map) -> str:
    """All of it, in Markdown."""
    places = found.places
    pairs = [(found.blocked(place), found.difference(place, ABOVE).value) for place in places]
    middle = sorted(places, key=found.blocked)[len(places) // 2]
    lines = [
        map_table(found).markdown(),
        "The optimizer is an Adam with one second moment for the whole table. Under the standard Adam, with one per "
        "parameter, the order of the rules can be another.",
        f"{found.terms['seeds']} seeds. ± is half of a 95 % interval by the nested bootstrap. In a simulation of "
        f"“{middle}” such intervals of {ABOVE} minus {BASELINE} held the truth in "
        f"{found.coverage(middle, ABOVE):.0%} of cases.",
        f"Over {len(places)} places the share that clip 0.2 blocks and the gain of {ABOVE} have a rank correlation of "
        f"{rank_correlation(pairs):.2f}.",
    ]
    return "\n\n".join(lines) + "\n"


@house_style()
def draw_map(found: Map) -> Figure:
    """What three rules bring over clip 0.2, by the share of rare winners' gradient that it blocks."""
    shown = (ABOVE, "clip [.8, 2]", "no upper bound")
    figure, seeds = Figure(figsize=(8, 3.8)), found.terms["seeds"]
    panels = figure.subplots(1, len(shown), sharey=True)
    for axes, rule in zip(panels, shown, strict=True):
        gaps: list[Interval] = []
        for data, fmt in {"fresh, used once": "o", "fresh, used more often": "s", "stale": "^"}.items():
            mine = [place for place in found.places if place.data == data]
            gaps = [found.difference(place, rule) for place in mine]
            axes.errorbar(
                [found.blocked(place) for place in mine],
                [gap.value for gap in gaps],
                np.abs([[gap.low - gap.value, gap.high - gap.value] for gap in gaps]).T if gaps else None,
                fmt=fmt,
                markersize=4,
                label=data,
            )
        sure = sum(round(gap.value, 2) > round(gap.half, 2) for gap in gaps)  # of stale data, as in the table
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_title(f"{rule}: above\nclip 0.2 in {sure} of {len(gaps)} stale")
        axes.set_xlabel("share that clip 0.2 blocks")
    panels[0].set_ylabel(f"change of mean reward\n({seeds} seeds a point, 95 %)")
    add_legend(figure)
    return figure
