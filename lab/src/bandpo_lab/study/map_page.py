"""The map as tables and as one picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from matplotlib.figure import Figure

from bandpo_lab.interval import Interval
from bandpo_lab.study.cells import ABOVE, ARMS, BASELINE, BEST_CONSTANT, RANDOM_REWARDS, Key, Map, Place
from bandpo_lab.study.optimizers import OPTIMIZERS
from bandpo_lab.study.statistics import rank_correlation
from bandpo_lab.style import add_legend, house_style
from bandpo_lab.tables import Table

DATA = ("fresh, used once", "fresh, used more often", "stale")
"""The kinds of data, as `Place.data` has them."""
_RIVALS = tuple(name for name, arm in ARMS.items() if arm.kind != "constant")
"""Arms that are compared with the best constant."""


def map_text(results: Map) -> str:
    """Return the whole page on a map, in Markdown."""
    places = results.places_to_learn
    seeds = results.terms["seeds"]
    whole = results.terms["cells"] == len(results.cells)
    state = "" if whole else f" So far {len(results.cells)} of {results.terms['cells']} cells have run."
    lines = [
        f"{len(results.places)} places × {len(OPTIMIZERS)} optimizers × {len(ARMS)} arms, {seeds} seeds, "
        f"{results.terms['batches']} batches.{state} Each arm is scored at the learning rate that is best for it on "
        "other seeds. The best constant is the best of "
        + ", ".join(name for name, arm in ARMS.items() if arm.kind == "constant")
        + ", chosen in the same way.",
        "## Against the best constant",
        "Mean over places of the difference in mean reward. In parentheses the places where the 95 % interval is above "
        "0, and those where it is below 0.",
        _against_constants(results, places).markdown(),
        "Places where the interval is above 0, or below 0, under each of the four optimizers:",
        _agreement(results, places).markdown(),
        f"## Against {BASELINE}",
        "Mean over places of the difference in mean reward.",
        _against_baseline(results, places).markdown(),
        "## Speed and end",
        "Mean over places, seeds and optimizers, each arm at its best rate: reward of the last tenth; runs whose right "
        "answer reached a probability of one half, and in how many batches; the chance that one of 32 completions is "
        "right at the end; entropy when one half was first reached; runs that lost half of the probability they had.",
        _outcomes(results, places).markdown(),
        *_luck(results, places),
        *_random_rewards(results),
        "## Each place",
        "Under each optimizer clip 0.2's mean reward and blocked share, and the difference from the best constant with "
        "its 95 % interval.",
        _each_place(results, places).markdown(),
        _notes(results, places),
    ]
    return "\n\n".join(lines) + "\n"


def _kinds(places: Sequence[Place]) -> list[str]:
    """Return the kinds of data that places have, in the order of `DATA`."""
    present = {place.data for place in places}
    return [data for data in DATA if data in present]


def _against_constants(results: Map, places: Sequence[Place]) -> Table:
    rows: list[list[str]] = []
    for data in _kinds(places):
        kind = [place for place in places if place.data == data]
        for optimizer in OPTIMIZERS:
            cells: list[str] = []
            for arm in _RIVALS:
                gaps = [results.gains[Key(place, optimizer, arm)] for place in kind]
                above = sum(gap.low > 0 for gap in gaps)
                below = sum(gap.high < 0 for gap in gaps)
                cells.append(f"{np.mean([gap.value for gap in gaps]):+.3f} ({above}, {below})")
            rows.append([f"{data} ({len(kind)})", optimizer, *cells])
    return Table(["data (places)", "optimizer", *_RIVALS], rows)


def _agreement(results: Map, places: Sequence[Place]) -> Table:
    rows: list[list[str]] = []
    for data in _kinds(places):
        kind = [place for place in places if place.data == data]
        cells: list[str] = []
        for arm in _RIVALS:
            by_place = [[results.gains[Key(place, name, arm)] for name in OPTIMIZERS] for place in kind]
            above = sum(all(gap.low > 0 for gap in gaps) for gaps in by_place)
            below = sum(all(gap.high < 0 for gap in gaps) for gaps in by_place)
            cells.append(f"{above}, {below}")
        rows.append([f"{data} ({len(kind)})", *cells])
    return Table(["data (places)", *_RIVALS], rows)


def _against_baseline(results: Map, places: Sequence[Place]) -> Table:
    others = [arm for arm in ARMS if arm != BASELINE]
    rows: list[list[str]] = []
    for data in _kinds(places):
        kind = [place for place in places if place.data == data]
        for optimizer in OPTIMIZERS:
            base = np.mean([results.score(place, optimizer, BASELINE) for place in kind])
            means = [np.mean([results.score(place, optimizer, arm) for place in kind]) for arm in others]
            rows.append([data, optimizer, f"{base:.3f}", *(f"{mean - base:+.3f}" for mean in means)])
    return Table(["data", "optimizer", BASELINE, *others], rows)


def _outcomes(results: Map, places: Sequence[Place]) -> Table:
    rows: list[list[str]] = []
    for data in _kinds(places):
        kind = [place for place in places if place.data == data]
        for arm in ARMS:
            values: dict[str, np.ndarray] = {}
            for outcome in ("end", "batches_to_half", "right_at_end", "entropy_at_half", "broken"):
                parts = [
                    results.at_best_rate(place, optimizer, arm, outcome)
                    for place in kind
                    for optimizer in OPTIMIZERS
                ]
                values[outcome] = np.concatenate(parts)
            reached = ~np.isnan(values["batches_to_half"])
            rows.append(
                [
                    data,
                    arm,
                    f"{values['end'].mean():.3f}",
                    f"{reached.mean():.0%}",
                    f"{np.nanmean(values['batches_to_half']):.0f}" if reached.any() else "–",
                    f"{np.mean(1 - (1 - values['right_at_end']) ** 32):.3f}",
                    f"{np.nanmean(values['entropy_at_half']):.2f}" if reached.any() else "–",
                    f"{values['broken'].mean():.0%}",
                ]
            )
    header = ["data", "arm", "end", "reached 1/2", "batches", "pass@32", "entropy at 1/2", "broken"]
    return Table(header, rows)


def _luck(results: Map, places: Sequence[Place]) -> Iterator[str]:
    """Yield a table of the places that differ in nothing but luck."""
    by_rest: dict[tuple[object, ...], list[Place]] = {}
    for place in places:
        rest = (place.world, place.p, place.samples, place.epochs, place.minibatches, place.lag)
        by_rest.setdefault(rest, []).append(place)
    groups = [group for group in by_rest.values() if len(group) > 1]
    if not groups:
        return
    yield "## Luck"
    yield (
        "Luck is how often a wrong answer is rewarded. Difference from the best constant, with half of its 95 % "
        "interval, in places that differ in luck alone."
    )
    rows: list[list[str]] = []
    arms = (ABOVE, "room by mass", "Band")
    for group in groups:
        for place in sorted(group, key=lambda one: one.luck):
            for optimizer in OPTIMIZERS:
                gaps = [results.gains[Key(place, optimizer, arm)] for arm in arms]
                rows.append([str(place), optimizer, *(f"{gap.value:+.3f} ± {gap.half:.3f}" for gap in gaps)])
    yield Table(["place", "optimizer", *arms], rows).markdown()


def _random_rewards(results: Map) -> Iterator[str]:
    """Yield tables of the entropy where no answer is better than another."""
    places = [place for place in results.places if place.world == RANDOM_REWARDS]
    if not places:
        return
    yield "## Entropy under random rewards"
    yield (
        "Each completion is rewarded with probability 0.5, whatever it is. Entropy after the last batch, in nats a "
        "decision (1.60 at the start), at three of the eight learning rates: the third, the fifth and the seventh. "
        "Half of the 95 % interval over seeds is below 0.1 where it is not shown."
    )
    for place in places:
        rows: list[list[str]] = []
        for arm in ARMS:
            cells: list[str] = []
            for optimizer in OPTIMIZERS:
                entropy = results.cells[Key(place, optimizer, arm)].entropy_at_end
                for rate in (2, 4, 6):
                    half = 1.96 * entropy[rate].std(ddof=1) / entropy.shape[1] ** 0.5
                    cells.append(f"{entropy[rate].mean():.2f}" + (f" ± {half:.2f}" if half >= 0.1 else ""))
            rows.append([arm, *cells])
        header = ["arm"]
        for optimizer, choice in OPTIMIZERS.items():
            header += [f"{optimizer} {choice.rates[rate]:.2g}" for rate in (2, 4, 6)]
        yield f"{place}:"
        yield Table(header, rows).markdown()


def _each_place(results: Map, places: Sequence[Place]) -> Table:
    arms = (ABOVE, "Band", "room by mass")
    rows: list[list[str]] = []
    for place in places:
        for optimizer in OPTIMIZERS:
            gaps = [results.gains[Key(place, optimizer, arm)] for arm in arms]
            at_edge = [
                arm for arm in (BASELINE, *arms) if results.cells[Key(place, optimizer, arm)].curve.at_edge
            ]
            rows.append(
                [
                    str(place),
                    optimizer,
                    f"{results.score(place, optimizer, BASELINE):.2f}",
                    f"{results.blocked(place, optimizer):.2f}",
                    *(f"{gap.value:+.2f} [{gap.low:+.2f}, {gap.high:+.2f}]" for gap in gaps),
                    ", ".join(at_edge) or "none",
                ]
            )
    header = ["place", "optimizer", BASELINE, "blocked", *arms, "best rate at the edge"]
    return Table(header, rows)


def _notes(results: Map, places: Sequence[Place]) -> str:
    """Return sentences on the coverage of the intervals, and on what goes with a gain."""
    middle = sorted(places, key=lambda place: results.blocked(place, "adam"))[len(places) // 2]
    covered = {name: results.coverage(middle, name, ABOVE, BEST_CONSTANT) for name in OPTIMIZERS}
    coverage = ", ".join(f"{share:.0%} under {name}" for name, share in covered.items())
    sentences = [
        f"In a simulation of “{middle}” the intervals of {ABOVE} minus the best constant held the truth in {coverage}."
    ]
    measures = {
        f"the share of the gradient on rare winners that {BASELINE} blocks": results.blocked,
        "luck (the share on common answers of the winners' advantages in groups that mostly fail)": results.luck,
    }
    for name, measure in measures.items():
        for arm in (ABOVE, "room by mass"):
            correlations = [
                rank_correlation(
                    [
                        (measure(place, optimizer), results.gains[Key(place, optimizer, arm)].value)
                        for place in places
                    ]
                )
                for optimizer in OPTIMIZERS
            ]
            listed = ", ".join(
                f"{value:.2f} under {optimizer}"
                for optimizer, value in zip(OPTIMIZERS, correlations, strict=True)
            )
            sentences.append(
                f"Over {len(places)} places the rank correlation of {name} and the gain of {arm} over the best "
                f"constant is {listed}."
            )
    return "\n\n".join(sentences)


@house_style()
def draw_map(results: Map) -> Figure:
    """Draw what two rules bring over the best constant under each optimizer, by the share that clip 0.2 blocks."""
    shown = (ABOVE, "room by mass")
    places = results.places_to_learn
    figure = Figure(figsize=(9, 2.4 * len(shown) + 0.6))
    panels = figure.subplots(len(shown), len(OPTIMIZERS), sharey="row", squeeze=False)
    for arm, row in zip(shown, panels, strict=True):
        for optimizer, axes in zip(OPTIMIZERS, row, strict=True):
            gaps: list[Interval] = []
            for data, marker in zip(DATA, "os^", strict=True):
                kind = [place for place in places if place.data == data]
                mine = [results.gains[Key(place, optimizer, arm)] for place in kind]
                gaps += mine
                axes.errorbar(
                    [results.blocked(place, optimizer) for place in kind],
                    [gap.value for gap in mine],
                    np.abs([[gap.low - gap.value, gap.high - gap.value] for gap in mine]).T if mine else None,
                    fmt=marker,
                    markersize=3,
                    label=data,
                )
            above = sum(gap.low > 0 for gap in gaps)
            below = sum(gap.high < 0 for gap in gaps)
            axes.axhline(0, color="black", linewidth=0.8)
            axes.set_title(f"{optimizer}\nabove in {above}, below in {below} of {len(gaps)}")
            if arm == shown[-1]:
                axes.set_xlabel("share that clip 0.2 blocks")
        row[0].set_ylabel(f"{arm} minus\nthe best constant")
    add_legend(figure)
    return figure
