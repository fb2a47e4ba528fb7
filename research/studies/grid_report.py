"""The report of a grid: tables in Markdown, and one figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
from matplotlib.figure import Figure

from bandpo_lab.output.style import add_legend, plot_style
from bandpo_lab.output.tables import Table
from bandpo_lab.study.interval import Interval
from studies.grid import ABOVE, ARMS, BASELINE, BEST_CONSTANT, RANDOM_REWARDS, Grid, Key, Setting
from studies.learning_rates import rank_correlation
from studies.optimizers import OPTIMIZERS

DATA = ("fresh, used once", "fresh, used more often", "stale")
"""The kinds of data, as in `Setting.data`."""
_COMPARED_ARMS = tuple(name for name, arm in ARMS.items() if arm.kind != "constant")
"""The arms that are compared with the best constant."""


def grid_text(results: Grid) -> str:
    """Return the whole report of a grid, in Markdown."""
    settings = results.settings_to_learn
    seeds = results.terms["seeds"]
    constants = ", ".join(name for name, arm in ARMS.items() if arm.kind == "constant")
    progress = ""
    if len(results.cells) != results.terms["cells"]:
        progress = f" So far {len(results.cells)} of {results.terms['cells']} cells have run."
    lines = [
        f"{len(results.settings)} settings × {len(OPTIMIZERS)} optimizers × {len(ARMS)} arms, {seeds} seeds, "
        f"{results.terms['batches']} batches.{progress} Each arm is scored at the learning rate that is best for it on "
        f"other seeds. The best constant is the best of {constants}, chosen in the same way.",
        "## Against the best constant",
        "Mean over settings of the difference in mean reward. In parentheses the settings where the 95 % interval is "
        "above 0, and those where it is below 0.",
        _against_constants(results, settings).markdown(),
        "Settings where the interval is above 0, or below 0, under each of the four optimizers:",
        _agreement(results, settings).markdown(),
        f"## Against {BASELINE}",
        "Mean over settings of the difference in mean reward.",
        _against_baseline(results, settings).markdown(),
        "## Speed and end",
        "Mean over settings, seeds and optimizers, each arm at its best rate: reward of the last tenth; runs whose "
        "right answer reached a probability of one half, and in how many batches; the chance that one of 32 "
        "completions is right at the end; entropy at equal reward, when one half was first reached; runs that lost "
        "half of the probability they had.",
        _outcomes(results, settings).markdown(),
        *_luck(results, settings),
        *_random_rewards(results),
        "## Each setting",
        "Under each optimizer clip 0.2's mean reward and blocked share, and the difference from the best constant with "
        "its 95 % interval.",
        _each_setting(results, settings).markdown(),
        _notes(results, settings),
    ]
    return "\n\n".join(lines) + "\n"


def _by_data(settings: Sequence[Setting]) -> dict[str, list[Setting]]:
    """Return settings by their kind of data, in the order of `DATA`, without empty kinds."""
    groups = {data: [setting for setting in settings if setting.data == data] for data in DATA}
    return {data: group for data, group in groups.items() if group}


def mean_gain(results: Grid, settings: Sequence[Setting], optimizer: str, arm: str) -> str:
    """Return the mean gain of an arm over the best constant, as a cell of a table.

    In parentheses are the number of settings whose interval is above 0, and of those whose interval is below 0.
    """
    gains = [results.gains[Key(setting, optimizer, arm)] for setting in settings]
    above = sum(gain.low > 0 for gain in gains)
    below = sum(gain.high < 0 for gain in gains)
    return f"{np.mean([gain.value for gain in gains]):+.3f} ({above}, {below})"


def _against_constants(results: Grid, settings: Sequence[Setting]) -> Table:
    """Return a table with the mean gains over the best constant under each optimizer."""
    rows: list[list[str]] = []
    for data, group in _by_data(settings).items():
        for optimizer in OPTIMIZERS:
            cells: list[str] = []
            for arm in _COMPARED_ARMS:
                cells.append(mean_gain(results, group, optimizer, arm))
            rows.append([f"{data} ({len(group)})", optimizer, *cells])
    return Table(["data (settings)", "optimizer", *_COMPARED_ARMS], rows)


def _agreement(results: Grid, settings: Sequence[Setting]) -> Table:
    """Return a table with the number of settings in which all optimizers agree on the sign of a gain."""
    rows: list[list[str]] = []
    for data, group in _by_data(settings).items():
        cells: list[str] = []
        for arm in _COMPARED_ARMS:
            above = 0
            below = 0
            for setting in group:
                gains = [results.gains[Key(setting, optimizer, arm)] for optimizer in OPTIMIZERS]
                above += all(gain.low > 0 for gain in gains)
                below += all(gain.high < 0 for gain in gains)
            cells.append(f"{above}, {below}")
        rows.append([f"{data} ({len(group)})", *cells])
    return Table(["data (settings)", *_COMPARED_ARMS], rows)


def _against_baseline(results: Grid, settings: Sequence[Setting]) -> Table:
    """Return a table with the mean differences from clip 0.2 under each optimizer."""
    arms = [arm for arm in ARMS if arm != BASELINE]
    rows: list[list[str]] = []
    for data, group in _by_data(settings).items():
        for optimizer in OPTIMIZERS:
            baseline = np.mean([results.score(setting, optimizer, BASELINE) for setting in group])
            means = [np.mean([results.score(setting, optimizer, arm) for setting in group]) for arm in arms]
            differences = [f"{mean - baseline:+.3f}" for mean in means]
            rows.append([data, optimizer, f"{baseline:.3f}", *differences])
    return Table(["data", "optimizer", BASELINE, *arms], rows)


def _outcomes(results: Grid, settings: Sequence[Setting]) -> Table:
    """Return a table with the outcomes of each arm, over settings, seeds and optimizers."""
    rows: list[list[str]] = []
    for data, group in _by_data(settings).items():
        for arm in ARMS:
            # Each of shape (settings * optimizers * seeds,).
            values: dict[str, np.ndarray] = {}
            for outcome in ("end", "batches_to_half", "right_at_end", "entropy_at_half", "broken"):
                arrays = [
                    results.at_best_rate(setting, optimizer, arm, outcome)
                    for setting, optimizer in product(group, OPTIMIZERS)
                ]
                values[outcome] = np.concatenate(arrays)
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


def _luck(results: Grid, settings: Sequence[Setting]) -> Iterator[str]:
    """Yield a section on the settings that differ only in luck, if there are any."""
    groups_by_shape: dict[tuple[object, ...], list[Setting]] = {}
    for setting in settings:
        shape = (setting.world, setting.p, setting.samples, setting.epochs, setting.minibatches, setting.lag)
        groups_by_shape.setdefault(shape, []).append(setting)
    groups = [group for group in groups_by_shape.values() if len(group) > 1]
    if not groups:
        return
    yield "## Luck"
    yield (
        "Luck is how often a wrong answer is rewarded. Difference from the best constant, with half of its 95 % "
        "interval, in settings that differ in luck alone."
    )
    rows: list[list[str]] = []
    arms = (ABOVE, "room by mass", "Band")
    for group in groups:
        for setting in sorted(group, key=lambda setting: setting.luck):
            for optimizer in OPTIMIZERS:
                gains = [results.gains[Key(setting, optimizer, arm)] for arm in arms]
                cells = [f"{gain.value:+.3f} ± {gain.half:.3f}" for gain in gains]
                rows.append([str(setting), optimizer, *cells])
    yield Table(["setting", "optimizer", *arms], rows).markdown()


def _random_rewards(results: Grid) -> Iterator[str]:
    """Yield a section on the entropy under random rewards, if the grid has such settings."""
    settings = [setting for setting in results.settings if setting.world == RANDOM_REWARDS]
    if not settings:
        return
    yield "## Entropy under random rewards"
    yield (
        "Each completion is rewarded with probability 0.5, whatever it is. Entropy at equal step, after the last "
        "batch, in nats a decision (1.60 at the start), at three of the eight learning rates: the third, the fifth and "
        "the seventh. Half of the 95 % interval over seeds is below 0.1 where it is not shown."
    )
    for setting in settings:
        rows: list[list[str]] = []
        for arm in ARMS:
            cells: list[str] = []
            for optimizer in OPTIMIZERS:
                # Of shape (rates, seeds).
                entropy = results.cells[Key(setting, optimizer, arm)].entropy_at_end
                for rate in (2, 4, 6):
                    half = 1.96 * entropy[rate].std(ddof=1) / entropy.shape[1] ** 0.5
                    cell = f"{entropy[rate].mean():.2f}"
                    cells.append(f"{cell} ± {half:.2f}" if half >= 0.1 else cell)
            rows.append([arm, *cells])
        header = ["arm"]
        for optimizer, choice in OPTIMIZERS.items():
            header += [f"{optimizer} {choice.rates[rate]:.2g}" for rate in (2, 4, 6)]
        yield f"{setting}:"
        yield Table(header, rows).markdown()


def _each_setting(results: Grid, settings: Sequence[Setting]) -> Table:
    """Return a table with the gains over the best constant, one row per setting and optimizer."""
    arms = (ABOVE, "Band", "room by mass")
    rows: list[list[str]] = []
    for setting, optimizer in product(settings, OPTIMIZERS):
        gains = [results.gains[Key(setting, optimizer, arm)] for arm in arms]
        at_edge = [
            arm for arm in (BASELINE, *arms) if results.cells[Key(setting, optimizer, arm)].curve.at_edge
        ]
        rows.append(
            [
                str(setting),
                optimizer,
                f"{results.score(setting, optimizer, BASELINE):.2f}",
                f"{results.blocked(setting, optimizer):.2f}",
                *(f"{gain.value:+.2f} [{gain.low:+.2f}, {gain.high:+.2f}]" for gain in gains),
                ", ".join(at_edge) or "none",
            ]
        )
    header = ["setting", "optimizer", BASELINE, "blocked", *arms, "best rate at the edge"]
    return Table(header, rows)


def _notes(results: Grid, settings: Sequence[Setting]) -> str:
    """Return sentences on the coverage of the intervals, and on the correlations of two measures with the gains."""
    # The setting in which clip 0.2 blocks a medium share.
    by_blocked = sorted(settings, key=lambda setting: results.blocked(setting, "adam"))
    median = by_blocked[len(settings) // 2]
    coverages = [
        f"{results.coverage(median, optimizer, ABOVE, BEST_CONSTANT):.0%} under {optimizer}"
        for optimizer in OPTIMIZERS
    ]
    sentences = [
        f"In a simulation of “{median}” the intervals of {ABOVE} minus the best constant held the truth in "
        f"{', '.join(coverages)}."
    ]
    measures = {
        f"the share of the gradient on rare winners that {BASELINE} blocks": results.blocked,
        "luck (the share on common answers of the winners' advantages in groups that mostly fail)": results.luck,
    }
    for name, measure in measures.items():
        for arm in (ABOVE, "room by mass"):
            correlations: list[str] = []
            for optimizer in OPTIMIZERS:
                pairs = [
                    (measure(setting, optimizer), results.gains[Key(setting, optimizer, arm)].value)
                    for setting in settings
                ]
                correlations.append(f"{rank_correlation(pairs):.2f} under {optimizer}")
            sentences.append(
                f"Over {len(settings)} settings the rank correlation of {name} and the gain of {arm} over the best "
                f"constant is {', '.join(correlations)}."
            )
    return "\n\n".join(sentences)


@plot_style()
def draw_grid(results: Grid) -> Figure:
    """Plot the gains of two arms over the best constant by the share that clip 0.2 blocks; one column per optimizer."""
    arms = (ABOVE, "room by mass")
    settings = results.settings_to_learn
    figure = Figure(figsize=(9, 2.5 * len(arms) + 0.6))
    panels = figure.subplots(len(arms), len(OPTIMIZERS), sharey="row", squeeze=False)
    for arm, row in zip(arms, panels, strict=True):
        for optimizer, axes in zip(OPTIMIZERS, row, strict=True):
            all_gains: list[Interval] = []
            for data, marker in zip(DATA, "os^", strict=True):
                group = [setting for setting in settings if setting.data == data]
                gains = [results.gains[Key(setting, optimizer, arm)] for setting in group]
                all_gains += gains
                errors = [[gain.low - gain.value, gain.high - gain.value] for gain in gains]
                axes.errorbar(
                    [results.blocked(setting, optimizer) for setting in group],
                    [gain.value for gain in gains],
                    np.abs(errors).T if errors else None,
                    fmt=marker,
                    markersize=3,
                    label=data,
                )
            above = sum(gain.low > 0 for gain in all_gains)
            below = sum(gain.high < 0 for gain in all_gains)
            axes.axhline(0, color="black", linewidth=0.8)
            axes.set_title(f"{optimizer}\nabove in {above},\nbelow in {below} of {len(all_gains)}")
            if arm == arms[-1]:
                axes.set_xlabel("share that clip 0.2 blocks")
        row[0].set_ylabel(f"{arm} minus\nthe best constant")
    add_legend(figure)
    return figure
