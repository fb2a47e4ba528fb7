"""Draw the figures of README.md and the landing page, in light and dark, of the other pages, and of the reports.

    PYTHONPATH=research python scripts/pictures.py docs/figures research/reports/figures

The dark figure `…-dark.png` is the light one with inverted lightness. On the landing page, the explorer replaces
`allowed_change.png` if the browser runs scripts.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.image import imread, imsave

from bandpo import DAPO, DCPO, KL, Band, BandAbove, BandPO, ClipRule, FixedClip
from bandpo_lab.output.style import add_legend, line_styles, plot_style, save_figure
from bandpo_lab.study.interval import Interval, student
from bandpo_lab.toy import demo
from bandpo_lab.toy.comparison import smooth
from map_page import read_parts
from studies import async_trainer, control, paper_setting
from studies.demo_seeds import read_rows
from studies.grid import Grid, Key
from studies.grid_report import DATA
from studies.learning_rates import Curve, difference
from studies.optimizers import OPTIMIZERS
from studies.staleness import Run, read_runs
from studies.staleness_report import CLIP, worlds_of

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "research/results/staleness/runs.jsonl.gz"
MAP = ROOT / "research/results/optimizers"
PAPER_SETTING = ROOT / "research/results/paper-setting/rows.jsonl.gz"
CONTROL = ROOT / "research/results/control/rows.jsonl.gz"
ASYNC_TRAINER = ROOT / "research/results/async-trainer"
ARMS = (CLIP, "Clip-Higher", "clip [.8, 2]", "BandAbove", "no upper bound")
BY_AGE = ("lag 0", "lag 2", "lag 4", "lag 8")
"""The cells that differ only in the age of the data."""
RULES = {
    "FixedClip(0.2, 0.2)": FixedClip(0.2),
    "Band(KL(), 0.05)": Band(KL(), 0.05),
    "FixedClip(0.2, 0.28)": FixedClip(0.2, 0.28),
}
RULES_OF_PAPER = {"BandPO()": BandPO().clip, "DAPO()": DAPO().clip, "DCPO()": DCPO()}
"""The rules of the paper's Figure 1."""
REGIONS = {"DAPO()": DAPO().clip, "BandPO()": BandPO().clip, "BandAbove()": BandAbove().clip}
"""The rules of the paper's Figure 2, and Band's upper bound alone."""


NAMES = {
    "FixedClip(0.2)": "GRPO's clip, FixedClip(0.2)",
    "FixedClip(0.2, 0.28)": "Clip-Higher, FixedClip(0.2, 0.28)",
    "BandAbove()": "BandAbove()",
    "BandPO()": "BandPO()",
    "FixedClip(0.2, 1.0)": "a constant clip of [0.8, 2], FixedClip(0.2, 1.0)",
}
"""What the methods of `make demo` are called in its picture."""


def mean_curve(rewards: np.ndarray, groups: Sequence[int]) -> np.ndarray:
    """Return the mean of rewards (seeds, batches) and its 95 % interval, (3, batches): their difference from zero."""
    zero = Curve([0.0], np.zeros((1, len(groups)))).resampled_scores
    intervals = [
        difference(Curve([0.0], scores[None]).resampled_scores, zero, groups) for scores in rewards.T
    ]
    return np.array(intervals).T


@plot_style()
def stale_data() -> Figure:
    """Plot the reward on data four batches old, and each rule's gain over clip 0.2 by the age of the data."""
    rows = read_runs(RUNS)
    worlds = [world for name, world in worlds_of(rows).items() if name in BY_AGE and world.compared]
    worlds.sort(key=lambda world: world.cell.lag)
    [lag_4] = [world for world in worlds if world.name == "lag 4"]
    figure = Figure(figsize=(8, 4.2))
    left, right = figure.subplots(1, 2)
    curves = {arm: lag_4.curve(arm) for arm in ARMS}
    styles = line_styles(ARMS)
    for index, (arm, style) in enumerate(styles.items()):
        best_rate = curves[arm].rates[curves[arm].best]
        runs = [Run("lag 4", arm, best_rate, seed) for seed in lag_4.seeds]
        mean, low, high = mean_curve(np.array([rows[run]["reward"] for run in runs]), lag_4.groups)
        batches = np.arange(1, len(mean) + 1)
        left.plot(batches, mean, **style.options(), markevery=(2 * index, 10), label=arm)
        left.fill_between(batches, low, high, color=style.colour, alpha=0.1, linewidth=0)
        if arm != CLIP:
            tested = [world for world in worlds if arm in world.cell.arms]
            gain, low, high = np.array([world.difference(arm, CLIP) for world in tested]).T
            ages = [worlds.index(world) + 0.12 * (index - 2.5) for world in tested]
            error = {"yerr": (gain - low, high - gain), "fmt": style.marker, "color": style.colour}
            right.errorbar(ages, gain, **error, capsize=2)
    left.set(title="Data four batches old:\na much higher upper bound learns sooner")
    left.set(xlabel=f"batch (n = {len(lag_4.seeds)} runs a rule)", ylabel="reward", ylim=(0, None))
    right.axhline(0, color=styles[CLIP].colour, linewidth=1)
    ages = [f"{world.cell.lag}\n(n = {len(world.seeds)})" for world in worlds]
    right.set_xticks(range(len(worlds)), ages)
    gains = [world.difference("BandAbove", CLIP).value for world in (worlds[0], lag_4)]
    right.set(
        title=f"BandAbove minus clip 0.2, 60 batches:\n{gains[0]:+.3f} (fresh), {gains[1]:+.3f} (4 batches old)"
    )
    right.set(xlabel="age of the data in batches", ylabel="mean reward minus that of clip 0.2")
    add_legend(figure)
    return figure


SERIES_MARKERS = ("s", "o", "^")
"""The markers of the series in a forest plot."""


class Panel(NamedTuple):
    """A panel of a forest plot: a metric of each rule minus that of clip 0.2."""

    title: str
    smallest: float
    """The smallest effect of interest."""
    gaps: Mapping[str, Mapping[str, Interval | None]]
    """The interval of each rule in each series; None where there is none."""


@plot_style()
def forest(panels: Sequence[Panel]) -> Figure:
    """Plot what each rule adds to clip 0.2, a row a rule and a panel a metric; grey is below the effect of interest.

    A row has its rule's colour, and each series a marker.
    """
    rules = [*panels[0].gaps]
    styles = line_styles(rules)
    series = [*panels[0].gaps[rules[0]]]
    figure = Figure(figsize=(8, 0.7 + 0.27 * len(rules) * max(1, len(series)) ** 0.5))
    for panel, axes in zip(panels, figure.subplots(1, len(panels), sharey=True), strict=True):
        axes.axvspan(-panel.smallest, panel.smallest, color="0.93", linewidth=0)
        axes.axvline(0, color="black", linewidth=0.8)
        for index, name in enumerate(series):
            for place, (rule, gaps) in enumerate(panel.gaps.items()):
                gap = gaps[name]
                if gap is None:
                    continue
                axes.errorbar(
                    gap.value,
                    place + 0.25 * (index - (len(series) - 1) / 2),
                    xerr=[[gap.value - gap.low], [gap.high - gap.value]],
                    color=styles[rule].colour,
                    marker=SERIES_MARKERS[index],
                    capsize=2,
                )
            # The legend is about markers, which have no colour of a rule.
            axes.plot([], [], color="black", marker=SERIES_MARKERS[index], linestyle="", label=name)
        axes.set(title=panel.title, xlabel="minus clip 0.2")
        axes.set_yticks(range(len(rules)), rules)
    figure.axes[0].invert_yaxis()
    if len(series) > 1:
        add_legend(figure, len(series))
    else:
        figure.axes[0].set_xlabel(f"minus clip 0.2 ({series[0]})")
    return figure


def network_panels(rows: paper_setting.Rows) -> list[Panel]:
    """Return the panels of a cell of the paper's setting: rewards at best rates, the others at the cell's one rate."""
    titles = {
        paper_setting.SECOND_HALF: "entropy,\nequal step",
        "entropy": "entropy,\nequal reward",
        "pass@32": "pass@32,\nequal reward",
    }
    rules = [arm for arm in rows.cell.arms if arm != CLIP]
    name = f"n = {len(rows.finished_seeds())} seeds"
    gains = {
        arm: {name: paper_setting.difference_at_best_rates(rows.curve([arm]), rows.curve([CLIP]))}
        for arm in rules
    }
    panels = [Panel("mean reward,\nbest rates", paper_setting.SMALLEST["AUC"], gains)]
    for metric, title in titles.items():
        smallest = paper_setting.SMALLEST["entropy" if metric == paper_setting.SECOND_HALF else metric]
        gaps = {arm: {name: rows.difference(arm, CLIP, metric, rows.cell.compared_at)} for arm in rules}
        panels.append(Panel(title, smallest, gaps))
    return panels


RULES_OF_CONTROL = {
    "Clip-Higher": "1.28 over .8",
    "clip [.8, 2]": "2 over .8",
    "clip [.8, 3]": "3 over .8",
    "BandPO": "Band over Band",
    "BandAbove": "Band over .8",
    "Band below alone": "1.2 over Band",
}
"""The rules of the forest plot of many updates, with their names in the study."""


def control_panels(rows: Mapping[control.Key, Mapping[str, object]]) -> list[Panel]:
    """Return the panels of both testbeds with 64 updates: rewards at best rates, the others at the common rate."""
    titles = {
        "AUC": "mean reward,\nbest rates",
        "entropy": "entropy,\nequal step",
        "entropy at reward": "entropy,\nequal reward",
        "pass@32": "pass@32,\nend",
    }
    cells = [cell for cell in control.STUDY if cell.name in control.PRIMARY_CELLS]
    panels: list[Panel] = []
    for metric, title in titles.items():
        gaps: dict[str, dict[str, Interval | None]] = {rule: {} for rule in RULES_OF_CONTROL}
        for cell in cells:
            at_best = metric == "AUC"
            scores = control.CellScores(cell.with_higher_rates() if at_best else cell, rows)
            rate = control.BEST_OF_MORE if at_best else control.COMMON_RATE
            for rule, arm in RULES_OF_CONTROL.items():
                found = scores.measure(control.minus(arm, control.CLIP), metric, rate)
                gaps[rule][f"{cell.world} (n = {len(cell.seeds)} seeds)"] = found and found.interval
        panels.append(Panel(title, control.SMALLEST[metric], gaps))
    return panels


@plot_style()
def gains_by_age() -> Figure:
    """Plot the differences of rules by the age of the data, in TRL's asynchronous trainer and in a loop of our own.

    The grey band is the smallest effect of interest of the first study.
    """
    figure = Figure(figsize=(8, 4.2))
    left, right = figure.subplots(1, 2, sharey=True)
    rows = async_trainer.read_rows(ASYNC_TRAINER)
    seeds = async_trainer.whole_seeds(rows)
    rows = {key: row for key, row in rows.items() if key.seed in seeds}
    worlds = [world for name, world in worlds_of(read_runs(RUNS)).items() if name in BY_AGE]
    worlds.sort(key=lambda world: world.cell.lag)
    gains = {
        left: {
            pair: [student(async_trainer.differences(rows, lag, *pair)) for lag in async_trainer.LAGS]
            for pair in async_trainer.GAINS
        },
        right: {
            pair: [world.difference(*pair) for world in worlds]
            for pair in async_trainer.GAINS
            if all({*pair} <= {*world.cell.arms} for world in worlds)
        },
    }
    # A difference has the colour of its first rule; where two have the same, the marker differs.
    styles = [line_styles([arm])[arm] for arm, _ in async_trainer.GAINS]
    markers = [
        style.marker if minus == CLIP else "P"
        for (_, minus), style in zip(async_trainer.GAINS, styles, strict=True)
    ]
    for axes, lags in ((left, async_trainer.LAGS), (right, [world.cell.lag for world in worlds])):
        smallest = async_trainer.SMALLEST
        axes.axhspan(-smallest, smallest, color="0.93", linewidth=0)
        axes.axhline(0, color="black", linewidth=0.8)
        for index, (pair, style) in enumerate(zip(async_trainer.GAINS, styles, strict=True)):
            intervals = gains[axes].get(pair)
            if intervals is None:
                continue
            axes.errorbar(
                # The differences of a lag stand side by side.
                [number + 0.12 * (index - 1.5) for number in range(len(lags))],
                [interval.value for interval in intervals],
                yerr=[
                    [interval.value - interval.low for interval in intervals],
                    [interval.high - interval.value for interval in intervals],
                ],
                color=style.colour,
                marker=markers[index],
                linestyle="",
                capsize=2,
                label=" minus ".join(pair),
            )
        axes.set_xticks(range(len(lags)), [str(lag) for lag in lags])
    left.set(
        title=f"TRL's asynchronous trainer, one rate\n(n = {len(seeds)} seeds)",
        xlabel="lag in versions of four updates",
    )
    right.set(
        title=f"A loop of our own, best rates\n(n = {len(worlds[0].seeds)} seeds)", xlabel="lag in batches"
    )
    left.set_ylabel("difference in mean reward")
    add_legend(figure, 2)
    return figure


@plot_style()
def regime_gains(rows: paper_setting.Rows) -> Figure:
    """Plot what each rule adds to clip 0.2 in one cell of the paper's setting, by learning rate.

    The grey band is the smallest effect of interest. Entropy is both at equal step, over the second half of the
    batches, and at equal reward, pass@32 at equal reward.
    """
    metrics = {
        "AUC": "mean reward",
        paper_setting.SECOND_HALF: "entropy at equal step, nats",
        "entropy": "entropy at equal reward, nats",
        "pass@32": "pass@32 at equal reward",
    }
    figure = Figure(figsize=(8, 6.4))
    rules = [arm for arm in rows.cell.arms if arm != paper_setting.CLIP]
    for (metric, title), axes in zip(metrics.items(), figure.subplots(2, 2).flat, strict=True):
        smallest = paper_setting.SMALLEST["entropy" if metric == paper_setting.SECOND_HALF else metric]
        axes.axhspan(-smallest, smallest, color="0.93", linewidth=0)
        axes.axhline(0, color="black", linewidth=0.8)
        for index, (arm, style) in enumerate(line_styles(rules).items()):
            gaps = {rate: rows.difference(arm, paper_setting.CLIP, metric, rate) for rate in rows.cell.rates}
            known = {rate: gap for rate, gap in gaps.items() if gap is not None}
            # Rules stand side by side.
            places = [rate * 1.06 ** (index - len(rules) / 2) for rate in known]
            below = [gap.value - gap.low for gap in known.values()]
            above = [gap.high - gap.value for gap in known.values()]
            axes.errorbar(
                places,
                [gap.value for gap in known.values()],
                yerr=[below, above],
                color=style.colour,
                marker=style.marker,
                linestyle="",
                capsize=1,
                label=arm,
            )
        axes.set(xscale="log", title=title, xlabel="learning rate")
        axes.set_xticks(rows.cell.rates, [f"{rate:g}" for rate in rows.cell.rates])
        axes.minorticks_off()
    for axes in (figure.axes[0], figure.axes[2]):
        axes.set_ylabel(f"minus clip 0.2 (n = {len(rows.finished_seeds())} seeds)")
    add_legend(figure, 3)
    return figure


@plot_style()
def gains_in_tables(grid: Grid, data: str) -> Figure:
    """Plot what bounds by probability gain over the best constant in each setting with one kind of data.

    Args:
        grid: The map under four optimizers.
        data: One of `studies.grid_report.DATA`.
    """
    arms = ("Band", "BandAbove", "room by mass")
    settings = [setting for setting in grid.settings_to_learn if setting.data == data]
    figure = Figure(figsize=(8, 3.2))
    panels = figure.subplots(1, len(OPTIMIZERS), sharey=True)
    for optimizer, axes in zip(OPTIMIZERS, panels, strict=True):
        for position, (arm, style) in enumerate(line_styles(arms).items()):
            gains = [grid.gains[Key(setting, optimizer, arm)] for setting in settings]
            places = position + np.linspace(-0.3, 0.3, len(gains))
            values = np.array([gain.value for gain in gains])
            sure = np.array([gain.low > 0 or gain.high < 0 for gain in gains])
            colour = style.colour
            axes.scatter(places[sure], values[sure], s=14, color=colour, label=f"{arm}, interval excludes 0")
            axes.scatter(
                places[~sure],
                values[~sure],
                s=14,
                facecolors="none",
                edgecolors=colour,
                label=f"{arm}, it does not",
            )
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_title(optimizer)
        axes.set_xticks([])
    panels[0].set_ylabel(f"minus the best constant\n(n = {len(settings)} settings)")
    add_legend(figure, 3)
    return figure


@plot_style()
def allowed_change() -> Figure:
    """Plot the largest change of a token's probability that each rule allows in one batch.

    The grey area is beyond the simplex: no token can gain more than 1 − p or lose more than p.
    """
    p = torch.logspace(-4, 0, 401, dtype=torch.float64).clamp(max=1 - 1e-9)
    p = torch.cat([p, torch.tensor([0.08])]).sort().values  # the token of the titles
    of_title = (p - 0.08).abs().argmin()
    figure = Figure(figsize=(6, 4))
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    for axes, word, edge in zip(panels, ("gain", "lose"), (1 - p, p), strict=True):
        axes.fill_between(p, edge, 2, color="0.93", linewidth=0, label="beyond any probability")
        rare: dict[str, float] = {}
        for label, style in line_styles(RULES).items():
            bounds = RULES[label].bounds(p.log())
            change = p * (bounds.upper - 1 if word == "gain" else 1 - bounds.lower)
            axes.plot(p, change, **style.options(), markevery=(25, 80), label=label)
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


def lower_bound(rule: ClipRule, p: float) -> float:
    """Return the lower bound of the ratio of a token of probability p."""
    return rule.bounds(torch.tensor(p, dtype=torch.float64).log()).lower.item()


def upper_bound(rule: ClipRule, p: float) -> float:
    """Return the upper bound of the ratio of a token of probability p."""
    return rule.bounds(torch.tensor(p, dtype=torch.float64).log()).upper.item()


def leaves_simplex(rule: ClipRule) -> float:
    """Return the lowest old probability, to 0.001, from which a rule allows a new probability above 1."""
    p = torch.arange(1, 1000, dtype=torch.float64) / 1000
    return p[p * rule.bounds(p.log()).upper > 1 + 1e-9].min().item()


@plot_style()
def probability_change() -> Figure:
    """Plot how far each rule of the paper's Figure 1 lets a token's probability move, beside what is possible at all.

    The grey areas are beyond the simplex: no token can gain more than 1 − p or lose more than p. A shaded area is
    what a rule allows and no policy can reach.
    """
    p = torch.linspace(1e-6, 1 - 1e-9, 2001, dtype=torch.float64)
    figure = Figure(figsize=(8, 4))
    panels = figure.subplots(1, 2)
    styles = line_styles(RULES_OF_PAPER)
    for axes in panels:
        axes.fill_between(p, 1 - p, 1, color="0.9", linewidth=0, label="beyond any probability")
        axes.fill_between(p, -1, -p, color="0.9", linewidth=0)
        for name, style in styles.items():
            bounds = RULES_OF_PAPER[name].bounds(p.log())
            gain = p * (bounds.upper - 1)
            axes.plot(p, gain, **style.options(), markevery=0.15, label=name)
            axes.plot(p, p * (bounds.lower - 1), **style.options(), markevery=0.15)
            beyond = gain > 1 - p + 1e-6
            axes.fill_between(p, 1 - p, gain, where=beyond, color=style.colour, alpha=0.25, linewidth=0)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set(xlabel="old probability of the token")
    edges = [leaves_simplex(RULES_OF_PAPER[name]) for name in ("DAPO()", "DCPO()")]
    panels[0].set(
        title="The upper bounds of DAPO and DCPO leave\nthe simplex, from p = {:.2f} and {:.2f} on".format(
            *edges
        )
    )
    panels[0].set(ylabel="change of probability in one batch", xlim=(0, 1), ylim=(-0.4, 0.4))
    gains = {name: 0.08 * (upper_bound(rule, 0.08) - 1) for name, rule in RULES_OF_PAPER.items()}
    band, *others = (f"{gain:.2g} ({name.strip('()')})" for name, gain in gains.items())
    panels[1].set(title=f"p = 0.08 may gain {band},\n{', '.join(others)}")
    panels[1].set(xlim=(0, 0.1), ylim=(-0.1, 0.15))
    add_legend(figure)
    return figure


@plot_style()
def clip_regions() -> Figure:
    """Plot the new probabilities that leave a token its gradient whatever its advantage, by its old probability.

    A token whose advantage is positive has no gradient above the region, one whose advantage is negative none below it.
    """
    p = torch.linspace(1e-6, 1 - 1e-9, 2001, dtype=torch.float64)
    figure = Figure(figsize=(9, 3.9))
    panels = figure.subplots(1, len(REGIONS), sharey=True)
    for (name, style), axes in zip(line_styles(REGIONS).items(), panels, strict=True):
        rule = REGIONS[name]
        bounds = rule.bounds(p.log())
        lower, upper = p * bounds.lower, p * bounds.upper
        axes.axhspan(1, 1.35, color="0.9", linewidth=0, label="beyond any probability")
        axes.fill_between(p, lower, upper.clamp(max=1), color=style.colour, alpha=0.3, linewidth=0)
        axes.fill_between(p, 1, upper.clamp(min=1), color=style.colour, alpha=0.3, linewidth=0)
        for bound in (lower, upper):
            axes.plot(p, bound, color=style.colour, linestyle=style.line, marker="")
        axes.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle=":", marker="", label="no change")
        low, high = 0.08 * lower_bound(rule, 0.08), 0.08 * upper_bound(rule, 0.08)
        axes.set(title=f"{name}\np = 0.08: {low:.3f} to {high:.3f}")
        axes.set(xlabel="old probability of the token", xlim=(0, 1), ylim=(0, 1.35))
    panels[0].set_ylabel("its new probability")
    add_legend(figure)
    return figure


@plot_style()
def demo_curves() -> Figure:
    """Plot the mean reward of the methods of `make demo` over eight seeds, on old and on fresh data."""
    rows = read_rows()
    figure = Figure(figsize=(8, 3.6))
    panels = figure.subplots(1, len(demo.LAGS), sharey=True)
    for lag, axes in zip(demo.LAGS, panels, strict=True):
        for method, style in line_styles(demo.METHODS).items():
            runs = [row for row in rows if (row["lag"], row["method"]) == (lag, method)]
            curves = np.array([smooth(run["curves"]["reward"]) for run in runs])
            mean = curves.mean(0)
            half = 1.96 * curves.std(0, ddof=1) / len(curves) ** 0.5
            batches = np.arange(1, len(mean) + 1)
            axes.plot(batches, mean, color=style.colour, linestyle=style.line, marker="", label=NAMES[method])
            axes.fill_between(batches, mean - half, mean + half, color=style.colour, alpha=0.12, linewidth=0)
        axes.set(
            title=demo.data_age(lag).capitalize(), xlabel=f"batch (n = {demo.SEEDS} runs a rule)", ylim=(0, 1)
        )
    panels[0].set_ylabel("mean reward of five batches")
    add_legend(figure, 2)
    return figure


def to_dark(image: np.ndarray, page: tuple[int, int, int] = (13, 17, 23)) -> np.ndarray:
    """Invert the lightness of pixels (height, width, 3) in [0, 1]. White becomes the colour of GitHub's dark page."""
    inverted = image + 1 - image.max(-1, keepdims=True) - image.min(-1, keepdims=True)  # HSL's lightness
    floor = np.array(page) / 255
    return floor + (1 - floor) * inverted


if __name__ == "__main__":
    folder, folder_of_reports = map(Path, sys.argv[1:])
    save_figure(stale_data(), folder / "stale_data.png")
    save_figure(gains_by_age(), folder / "gains_by_age.png")
    tables = read_parts(MAP)
    for data in DATA:
        save_figure(
            gains_in_tables(tables, data),
            folder_of_reports / f"tables_{data.replace(', ', '_').replace(' ', '_')}.png",
        )
    cells = paper_setting.rows_by_cell(paper_setting.read_rows(PAPER_SETTING))
    for name, picture in {"fresh": "paper_setting", "lag 4": "old_data", "4 x 4": "reused_data"}.items():
        if len(cells[name].finished_seeds()) >= paper_setting.FEWEST_SEEDS:
            save_figure(regime_gains(cells[name]), folder_of_reports / f"{picture}.png")
            save_figure(forest(network_panels(cells[name])), folder / f"{picture}.png")
    save_figure(probability_change(), folder / "probability_change.png")
    save_figure(clip_regions(), folder / "clip_regions.png")
    save_figure(forest(control_panels(control.read_rows(CONTROL))), folder / "many_updates.png")
    for name, figure in {"allowed_change": allowed_change(), "demo": demo_curves()}.items():
        light = folder / f"{name}.png"
        save_figure(figure, light)
        imsave(light.with_stem(f"{name}-dark"), to_dark(imread(light)[..., :3]))
