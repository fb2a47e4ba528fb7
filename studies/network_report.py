"""The page of a study of networks: its predictions first, then each world's curves.

    bandpo study studies/network.yaml --output-dir results/network
    bandpo study studies/network-more.yaml --output-dir results/network-more
    python -m studies.network_report studies/network-predictions.md results/network results/network-more

The second study has further seeds, and may be left out.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from bandpo.audit.interval import bootstrap
from bandpo.audit.style import Look, add_legend, house_style
from bandpo_lab.page import Page, Picture, Section
from bandpo_lab.study.collect import SOLVED, WINDOW, RunResult
from bandpo_lab.study.execute import read_results
from bandpo_lab.study.report import looks_of_arms, made
from bandpo_lab.study.statistics import Curve, Results
from bandpo_lab.study.tables import half_text, mean_of
from bandpo_lab.tables import Table
from studies.network import (
    COLLAPSED,
    SIDES,
    SMALLEST,
    Effect,
    OnCurve,
    Prediction,
    collapsed,
    curves,
    effects,
    entropy_at_half,
    interquartile_mean,
    metric_of,
    on_curves,
    progress,
    read_predictions,
    sides,
    verdict,
)


def network_page(predictions: Sequence[Prediction], *contents: Mapping[str, Any]) -> Page:
    """The whole report; a world says nothing until all of its runs have ended, nor do further seeds of it.

    ``contents`` are what the ``results.json`` of the study holds, and those of further seeds of it.
    """
    first, *more = studies = [Results.from_file(content) for content in contents]
    runs, ended = on_curves(*studies), progress(first)
    known = dict.fromkeys(run.world for run in runs)
    waiting = [f"{world} ({have} of {of} runs)" for world, (have, of) in ended.items() if world not in known]
    lead = [first.study.question]
    for further in more:
        waiting += [
            f"more seeds of {world} ({have} of {of} runs)"
            for world, (have, of) in progress(further).items()
            if have < of
        ]
        lead += _second_look(predictions[0], first, further)
    if waiting:
        lead.append(f"The study has not ended. Not looked at yet: {', '.join(waiting)}.")
    rows = {world: row for world in known if (row := sides(runs, world, metric_of(world, predictions)))}
    titles = ["How it was made", *["How the further seeds were made"] * len(more)]
    return Page(
        first.study.title,
        lead,
        [
            Section("Predictions", _predictions(runs, predictions, ended)),
            *([Section("Which side", _which_side(rows, predictions))] if rows else []),
            *(_world(first, runs, world, metric_of(world, predictions)) for world in known),
            *(
                replace(made(content, found, "`python -m studies.network_report`"), title=title)
                for content, found, title in zip(contents, studies, titles, strict=True)
            ),
        ],
    )


def _second_look(p: Prediction, *studies: Results) -> list[str]:
    """What the first seeds and the further ones say by themselves, of the prediction that asked for more."""
    first, alone = (effects(on_curves(found), [p]).get(p) for found in studies)
    if not (first and alone):
        return []
    return [
        f"The world “{p.world}” has further seeds, as the stopping rule asks. For “{p.arm}” against “{p.minus}” the "
        f"first seeds alone gave {first}, the further ones alone {alone}. Intervals over all seeds are not corrected "
        "for this second look."
    ]


def _predictions(
    runs: Sequence[OnCurve], predictions: Sequence[Prediction], ended: Mapping[str, tuple[int, int]]
) -> list[Any]:
    measured = effects(runs, predictions)
    rows = []
    for p in predictions:
        if e := measured.get(p):
            rows.append([str(p), str(e), f"{e.improved:.0%}", verdict(e.interval, p.expects)])
        else:
            rows.append([str(p), "–", "–", "not run yet: {} of {}".format(*ended[p.world])])
    return [
        "They were committed before the first run, with the rules of the verdicts.",
        Picture(
            "predictions",
            predictions_figure(predictions, measured),
            f"What was predicted, and the difference that was measured, with its interval of 95 %. Grey: within "
            f"{SMALLEST}, the smallest effect of interest.",
        ),
        "Difference: of interquartile means over seeds, with a bootstrap interval of 95 %. Each arm is scored at the "
        "rate that is best for it on the other half of the seeds, over 200 random halves. The smallest effect of "
        f"interest is {SMALLEST}. Wins: the probability that a run of the first arm beats one of the second.",
        Table(["prediction", "difference", "wins", "verdict"], rows, "", prose=True),
    ]


def _which_side(rows: Mapping[str, Mapping[str, Effect]], predictions: Sequence[Prediction]) -> list[Any]:
    return [
        "One side of Band in place of clip 0.2's, with each kind of other side, and the mean over both. Differences as "
        "above. Most of them were not announced: the table of predictions has those that were.",
        Table(
            ["world", *SIDES],
            [
                [f"{world}, {metric_of(world, predictions)}", *map(str, row.values())]
                for world, row in rows.items()
            ],
            "In coin flips nothing can be learned. There entropy is compared, in nats per token, at the lower rate.",
        ),
    ]


def _world(found: Results, runs: Sequence[OnCurve], world: str, metric: str) -> Section:
    question = next(e.question for e in found.study.experiments.values() if e.world == world)
    by_arm = curves(runs, world, metric)
    rates = next(iter(by_arm.values())).rates
    return Section(
        world.capitalize(),
        [
            question,
            Picture(
                f"{world.replace(' ', '-')}-rates",
                rate_curves(by_arm, looks_of_arms(found.study), metric),
                "Left: interquartile mean over seeds at each learning rate, with bootstrap intervals of 95 %. Right: "
                f"share of runs, over all rates and seeds, whose {metric} exceeds a value.",
            ),
            Table(
                ["arm", *(f"{metric} at {rate:.1e}" for rate in rates)],
                [
                    [arm, *(f"{x:.3f}" for x in interquartile_mean(curve.scores))]
                    for arm, curve in by_arm.items()
                ],
                "Interquartile means over seeds. AUC: mean reward over all batches. Entropy: nats per token.",
            ),
            *([_learning(runs, world, by_arm)] if metric == "AUC" else []),
        ],
    )


def _learning(runs: Sequence[OnCurve], world: str, by_arm: Mapping[str, Curve]) -> Table:
    def row(arm: str, curve: Curve, mine: Sequence[RunResult]) -> list[str]:
        entropies = [x for run in mine if (x := entropy_at_half(run)) is not None]
        return [
            arm,
            f"{curve.rates[curve.best]:.1e}" + (", an edge" if curve.at_edge else ""),
            half_text(mine),
            f"{np.mean(entropies):.2f}" if entropies else "–",
            f"{mean_of(mine, 'entropy at end'):.2f}",
            f"{sum(map(collapsed, mine))} of {len(mine)}",
        ]

    return Table(
        ["arm", "best rate", "batches to half", "entropy at half", "entropy at end", "collapsed"],
        [
            row(arm, curve, [r.run for r in runs if (r.world, r.run.arm) == (world, arm)])
            for arm, curve in by_arm.items()
        ],
        "Best rate: by the mean AUC over seeds; where it is an edge, a better one may lie beyond. The rest is over all "
        f"rates and seeds. Batches to half: until the reward, averaged over {WINDOW} batches, reached {SOLVED}; in "
        "brackets how many runs did; the others count as one batch more than they had, so the true mean is greater "
        "(>). Entropy in nats per token, at half in runs that reached it. Collapsed: a reward below "
        f"{COLLAPSED} in the last {WINDOW} batches.",
    )


MARKS = {"held": ("#0072B2", "o"), "undecided": ("#4D4D4D", "s"), "failed": ("#D55E00", "X")}
"""Colour and marker of each verdict."""


@house_style()
def predictions_figure(predictions: Sequence[Prediction], measured: Mapping[Prediction, Effect]) -> Figure:
    """Each prediction's difference with its interval, and its verdict."""
    figure = Figure(figsize=(11, 0.6 * len(predictions) + 0.9))
    axes = figure.subplots()
    axes.axvspan(-SMALLEST, SMALLEST, color="#999999", alpha=0.2, linewidth=0)
    axes.axvline(0, color="#999999", linewidth=1)
    verdicts = []
    for row, p in enumerate(predictions):
        said = "not run yet"
        if p in measured:
            value, low, high = measured[p].interval
            said = verdict(measured[p].interval, p.expects)
            colour, marker = MARKS[said]
            axes.errorbar(
                value, row, xerr=[[value - low], [high - value]], color=colour, marker=marker, capsize=3
            )
        verdicts.append(f"{p.expects}: {said}")
    rows = range(len(predictions))
    axes.set_yticks(rows, [f"{p.world}: {p.arm}\nminus {p.minus}, {p.metric}" for p in predictions])
    axes.set(xlabel="difference of interquartile means", ylim=(len(predictions) - 0.5, -0.5))
    axes.grid(visible=False, axis="y")
    right = axes.twinx()
    right.set(ylim=axes.get_ylim())
    right.set_yticks(rows, verdicts)
    right.set_title("predicted: verdict", loc="right")
    right.grid(visible=False)
    return figure


@house_style()
def rate_curves(found: Mapping[str, Curve], looks: Mapping[str, Look], metric: str) -> Figure:
    """A metric against the learning rate, and the share of runs above each value of it."""
    figure = Figure(figsize=(11, 4.4))
    left, right = figure.subplots(1, 2)
    most = max(1.0, *(float(curve.scores.max()) for curve in found.values()))
    thresholds = np.linspace(0, most, 101)
    for arm, curve in found.items():
        look = looks[arm]
        middle, low, high = np.array([bootstrap([row], interquartile_mean) for row in curve.scores]).T
        left.plot(curve.rates, middle, label=arm, **look.options())
        left.fill_between(curve.rates, low, high, color=look.colour, alpha=0.12, linewidth=0)
        above = [(curve.scores > threshold).mean() for threshold in thresholds]
        right.step(thresholds, above, where="post", color=look.colour, linestyle=look.line)
    left.set(xscale="log", xlabel="learning rate", ylabel=metric, ylim=(0, None))
    rates = next(iter(found.values())).rates
    left.set_xticks(rates, [f"{rate:.1e}" for rate in rates])
    left.minorticks_off()
    right.set(xlabel=metric, ylabel="share of runs above it", ylim=(0, 1.02), xlim=(0, most))
    add_legend(figure, columns=4)
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    """Write ``report.md`` and ``report.html`` beside a ``results.json``."""
    predictions, folder, *others = map(Path, sys.argv[1:] if arguments is None else arguments)
    contents = [read_results(place) for place in (folder, *others)]
    page = network_page(read_predictions(predictions), *contents)
    for name in ("report.md", "report.html"):
        for path in page.save(folder / name):
            print(path)


if __name__ == "__main__":
    main()
