"""The page of the network study: predictions first, then each world's curves.

    bandpo study studies/network.yaml --output-dir results/network
    bandpo study studies/network-more.yaml --output-dir results/network-more
    python -m studies.network_report results/network results/network-more

The second study has further seeds, and may be left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from bandpo.audit.style import Look, add_legend, house_style
from bandpo.audit.tables import Table
from bandpo_lab.page import Page, Picture, Section
from bandpo_lab.study.cells import read_map
from bandpo_lab.study.collect import SOLVED, WINDOW, Record, read_records
from bandpo_lab.study.execute import read_results
from bandpo_lab.study.map_figure import draw_map
from bandpo_lab.study.plan import Study, parse_study
from bandpo_lab.study.report import looks_of_arms, made
from bandpo_lab.study.tables import half_text
from studies.network import (
    COLLAPSED,
    METRICS,
    PREDICTIONS,
    SIDES,
    SMALLEST,
    SPLITS,
    Curve,
    Effect,
    Prediction,
    Scored,
    collapsed,
    curves,
    effects,
    entropy_at_half,
    factorial,
    interquartile_mean,
    profile,
    progress,
    scored,
    sides,
    summary,
    verdict,
)

MAP = Path(__file__).parents[1] / "results" / "map" / "map.jsonl.gz"
COMMITTED = "on 22 November 2026 (ac89c0e)"
"""Where git has the predictions."""
PAGE_BY = "`python -m studies.network_report`"


def network_page(results: Mapping[str, Any], *more: Mapping[str, Any]) -> Page:
    """The whole report; a world says nothing until all of its runs have ended, nor do further seeds of it."""
    study, runs = parse_study(results["study"]), scored(results, *more)
    ended = progress(results)
    known = dict.fromkeys(run.world for run in runs)
    waiting = [f"{world} ({have} of {of} runs)" for world, (have, of) in ended.items() if world not in known]
    lead = [study.question]
    for further in more:
        waiting += [
            f"more seeds of {world} ({have} of {of} runs)"
            for world, (have, of) in progress(further).items()
            if have < of
        ]
        lead += _second_look(results, further)
    if waiting:
        lead.append(f"The study has not ended. Not looked at yet: {', '.join(waiting)}.")
    return Page(
        study.title,
        lead,
        [
            Section("Predictions", _predictions(runs, ended)),
            Section("Which side", _which_side(runs)),
            Section("What tables say", _map()),
            *(_world(study, runs, world) for world in known),
            made(results, read_records(results), PAGE_BY),
            *(
                replace(made(one, read_records(one), PAGE_BY), title="How the further seeds were made")
                for one in more
            ),
        ],
    )


def _second_look(results: Mapping[str, Any], further: Mapping[str, Any]) -> list[str]:
    """What the first seeds and the further ones say by themselves, of the prediction that asked for more."""
    p = PREDICTIONS[0]
    first, alone = (
        dict(effects([run for run in scored(one) if run.world == p.world])).get(p)
        for one in (results, further)
    )
    if not (first and alone):
        return []
    return [
        f"The world “{p.world}” has further seeds, as the stopping rule asks. For “{p.name}” the first seeds alone "
        f"gave {first}, the further ones alone {alone}. Intervals over all seeds are not corrected for this "
        "second look."
    ]


def _predictions(runs: Sequence[Scored], ended: Mapping[str, tuple[int, int]]) -> list[Any]:
    measured = dict(effects(runs))
    rows = []
    for p in PREDICTIONS:
        what = (
            f"{p.name}: in “{p.world}”, {p.metric} of “{p.arm}” against “{p.minus}” is {_expected(p.expects)}"
        )
        if e := measured.get(p):
            rows.append([what, str(e), f"{e.improved:.0%}", verdict(e, p.expects)])
        else:
            rows.append([what, "–", "–", "not run yet: {} of {}".format(*ended[p.world])])
    return [
        f"They were committed {COMMITTED}, before the first run, with the rules of the verdicts.",
        Picture(
            "predictions",
            predictions_figure(measured),
            f"What was predicted, and the difference that was measured, with its interval of 95 %. Grey: within "
            f"{SMALLEST}, the smallest effect of interest.",
        ),
        f"Difference: of interquartile means over seeds, with a bootstrap interval of 95 %. Each arm is scored at the "
        f"rate that is best for it on the other half of the seeds, over {SPLITS} random halves. The smallest effect of "
        f"interest is {SMALLEST}. Wins: the probability that a run of the first arm beats one of the second.",
        Table(["prediction", "difference", "wins", "verdict"], rows, "", prose=True),
    ]


def _which_side(runs: Sequence[Scored]) -> list[Any]:
    rows = [
        [f"{world}, {METRICS[world]}", *map(str, sides(runs, world).values())]
        for world in dict.fromkeys(run.world for run in runs)
    ]
    return [
        "One side of Band in place of clip 0.2's, with each kind of other side, and the mean over both. Differences as "
        "above. Most of them were not announced: the table of predictions has those that were.",
        Table(
            ["world", *SIDES],
            rows,
            "In coin flips nothing can be learned. There entropy is compared, in nats per token, at the lower rate.",
        ),
    ]


def _map() -> list[Any]:
    _, cells = read_map(MAP)
    return [
        "The theory came from tables: policies of one decision, with the library's rules and loss. It asks for more "
        "updates on a batch than momentum outlasts, and for fewer draws of the good answer than about one a batch.",
        Picture(
            "map",
            draw_map(cells),
            "Difference in mean reward between two rules in tables, each at its own best learning rate, by draws and "
            "updates of a batch, with half of an interval of 95 %.",
        ),
    ]


def _expected(expects: str) -> str:
    return f"equal to within {SMALLEST}" if expects == "equal" else f"{expects} by at least {SMALLEST}"


def _world(study: Study, runs: Sequence[Scored], world: str) -> Section:
    first = next(e for e in study.experiments.values() if e.world == world)
    metric = METRICS[world]
    found = {arm: curve for (w, arm), curve in curves(runs, metric).items() if w == world}
    records = {
        arm: [run.record for run in runs if run.world == world and run.record.arm == arm] for arm in found
    }
    rates = next(iter(found.values())).rates
    return Section(
        world.capitalize(),
        [
            first.question,
            Picture(
                f"{world.replace(' ', '-')}-rates",
                rate_curves(found, looks_of_arms(study), metric),
                "Left: interquartile mean over seeds at each learning rate, with bootstrap intervals of 95 %. Right: "
                f"share of runs, over all rates and seeds, whose {metric} exceeds a value.",
            ),
            Table(
                ["arm", *(f"{metric} at {rate:.1e}" for rate in rates)],
                [
                    [arm, *(f"{x:.3f}" for x in interquartile_mean(curve.scores))]
                    for arm, curve in found.items()
                ],
                "Interquartile means over seeds. AUC: mean reward over all batches. Entropy: nats per token.",
            ),
            *([_learning(found, records)] if metric == "AUC" else []),
            _factorial(runs, world),
        ],
    )


def _learning(found: Mapping[str, Curve], records: Mapping[str, Sequence[Record]]) -> Table:
    rows = []
    for arm, curve in found.items():
        entropies = [x for record in records[arm] if (x := entropy_at_half(record)) is not None]
        rows.append(
            [
                arm,
                f"{curve.rates[curve.best]:.1e}" + ("" if curve.interior else ", an edge"),
                half_text(records[arm]),
                f"{np.mean(entropies):.2f}" if entropies else "–",
                f"{np.mean([record.metric('entropy at end') for record in records[arm]]):.2f}",
                f"{sum(map(collapsed, records[arm]))} of {len(records[arm])}",
            ]
        )
    return Table(
        ["arm", "best rate", "batches to half", "entropy at half", "entropy at end", "collapsed"],
        rows,
        "Best rate: by the mean AUC over seeds; where it is an edge, a better one may lie beyond. The rest is over all "
        f"rates and seeds. Batches to half: until the reward, averaged over {WINDOW} batches, reached {SOLVED}; in "
        "brackets how many runs did; the others count as one batch more than they had, so the true mean is greater "
        "(>). Entropy in nats per token, at half in runs that reached it. Collapsed: a reward below "
        f"{COLLAPSED} in the last {WINDOW} batches.",
    )


def _factorial(runs: Sequence[Scored], world: str) -> Table:
    fit = factorial(runs, world)
    intervals = fit.conf_int()
    names = {
        "upper": "Band above", "lower": "Band below", "upper:lower": "both, beyond the sum",
        "rate": "twice the rate", "upper:rate": "Band above, at twice the rate",
        "lower:rate": "Band below, at twice the rate",
    }  # fmt: skip
    return Table(
        [f"effect on {METRICS[world]}", "estimate", "95 %"],
        [
            [said, f"{fit.params[name]:+.3f}", "[{:+.3f}, {:+.3f}]".format(*intervals.loc[name])]
            for name, said in names.items()
        ],
        "The 2 × 2 of clip and Band on each side, at the middle rate, by least squares with errors clustered by seed. "
        f"Clusters are few ({fit.model.data.frame['seed'].nunique()}), so the intervals are too narrow.",
    )


MARKS = {"held": ("#0072B2", "o"), "undecided": ("#4D4D4D", "s"), "failed": ("#D55E00", "X")}
"""Colour and marker of each verdict."""


@house_style()
def predictions_figure(measured: Mapping[Prediction, Effect]) -> Figure:
    """Each prediction's difference with its interval, and its verdict."""
    figure = Figure(figsize=(11, 0.6 * len(PREDICTIONS) + 0.9))
    axes = figure.subplots()
    axes.axvspan(-SMALLEST, SMALLEST, color="#999999", alpha=0.2, linewidth=0)
    axes.axvline(0, color="#999999", linewidth=1)
    verdicts = []
    for row, p in enumerate(PREDICTIONS):
        e = measured.get(p)
        verdicts.append(f"{p.expects}: {verdict(e, p.expects) if e else 'not run yet'}")
        if e:
            colour, marker = MARKS[verdict(e, p.expects)]
            spread = [[e.mean - e.low], [e.high - e.mean]]
            axes.errorbar(e.mean, row, xerr=spread, color=colour, marker=marker, capsize=3)
    rows = range(len(PREDICTIONS))
    axes.set_yticks(rows, [f"{p.world}: {p.arm}\nminus {p.minus}, {p.metric}" for p in PREDICTIONS])
    axes.set(xlabel="difference of interquartile means", ylim=(len(PREDICTIONS) - 0.5, -0.5))
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
    thresholds = np.linspace(0, most, 101).tolist()
    for arm, curve in found.items():
        look = looks[arm]
        low, high = np.array([_interval(row) for row in curve.scores]).T
        left.plot(curve.rates, interquartile_mean(curve.scores), label=arm, **look.options())
        left.fill_between(curve.rates, low, high, color=look.colour, alpha=0.12, linewidth=0)
        right.step(
            thresholds, profile(curve, thresholds), where="post", color=look.colour, linestyle=look.line
        )
    left.set(xscale="log", xlabel="learning rate", ylabel=metric, ylim=(0, None))
    rates = next(iter(found.values())).rates
    left.set_xticks(rates, [f"{rate:.1e}" for rate in rates])
    left.minorticks_off()
    right.set(xlabel=metric, ylabel="share of runs above it", ylim=(0, 1.02), xlim=(0, most))
    add_legend(figure, columns=4)
    return figure


def _interval(scores: np.ndarray) -> tuple[float, float]:
    """Of the interquartile mean, by percentile bootstrap."""
    if not np.ptp(scores):
        return scores[0], scores[0]
    drawn: Any = stats.bootstrap(
        (scores,), interquartile_mean, method="percentile", rng=np.random.default_rng(0)
    )
    return drawn.confidence_interval


def save_page(page: Page, folder: Path) -> None:
    """Write ``report.md`` and ``report.html``, and say which files that made."""
    for name in ("report.md", "report.html"):
        for path in page.save(folder / name):
            print(path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write ``report.md``, ``report.html`` and ``networks.json`` (what the package ships) beside a ``results.json``."""
    folder, *others = map(Path, sys.argv[1:] if arguments is None else arguments)
    results = [read_results(place) for place in (folder, *others)]
    worlds = ",\n ".join(map(json.dumps, summary(*results)))
    (folder / "networks.json").write_text(f"[{worlds}]\n")
    save_page(network_page(*results), folder)


if __name__ == "__main__":
    main()
