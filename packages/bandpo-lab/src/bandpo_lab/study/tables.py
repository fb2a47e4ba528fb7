"""The tables of a study's report: scores, differences, clipped tokens and tuning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from bandpo_lab.output.tables import Table
from bandpo_lab.study.collect import WINDOW, RunResult
from bandpo_lab.study.interval import bootstrap, signed
from bandpo_lab.study.plan import Experiment, options_text
from bandpo_lab.study.statistics import ArmDifference, Results

SHARES = ("clip high", "clip low", "rare wins", "rare blocked")


def glance_table(results: Results, metric: str, differences: Sequence[ArmDifference]) -> Table:
    """Return a table with a metric and its difference from the baseline, one row per arm, one column per experiment.

    Significant differences are marked with stars for the primary metric only, since only that was announced.
    """
    study = results.study
    differences_by_arm = {(d.experiment, d.arm): d for d in differences}
    is_primary = metric == study.primary

    def cell(experiment: Experiment, arm: str) -> str:
        values = results.by_seed(experiment.name, arm, metric).values()
        text = f"{np.mean([*values]):.3f}" if values else "–"
        difference = differences_by_arm.get((experiment.name, arm))
        if difference:
            star = " *" if difference.claimed and is_primary else ""
            text += f" ({difference.interval.value:+.2f} ± {difference.interval.half:.2f}{star})"
        return text

    caption = (
        f"{metric}, mean over n seeds; in parentheses the difference from {study.baseline}, paired by seed, ± half its "
        "95 % interval"
    )
    if is_primary:
        caption += (
            "; * marks a difference that can be claimed: p < 0.05, corrected for all "
            f"{len(differences_by_arm)} comparisons"
        )
    experiments = study.experiments.values()
    header = ["", *(f"{experiment.name}, n = {len(experiment.seeds)}" for experiment in experiments)]
    rows = [[arm, *(cell(experiment, arm) for experiment in experiments)] for arm in study.arms]
    return Table(header, rows, f"{caption}.")


def scores_table(results: Results, experiment: Experiment) -> Table:
    """Return a table with final scores and their intervals, speed and entropy, one row per arm."""
    metrics = [*dict.fromkeys((results.study.primary, "AUC"))]
    # Add the first pass@k, if the runs have one.
    pass_metrics: dict[str, None] = {}
    for run in results.runs:
        pass_metrics |= dict.fromkeys(name for name in run.after if name.startswith("pass@"))
    metrics += list(pass_metrics)[:1]

    header = ["arm", *metrics, "batches to half", "mean entropy", "entropy at end"]
    rows: list[list[str]] = []
    for arm in results.study.arms_of(experiment):
        runs = results.runs_of(experiment.name, arm)
        if not runs:
            rows.append([arm, "no run ended", *[""] * (len(header) - 2)])
            continue
        scores = [bootstrap([[run.metric(name) for run in runs]]) for name in metrics]
        rows.append(
            [
                arm,
                *("{:.3f} [{:.3f}, {:.3f}]".format(*score) for score in scores),
                half_text(runs),
                f"{mean_of(runs, 'mean entropy'):.2f}",
                f"{mean_of(runs, 'entropy at end'):.2f}",
            ]
        )
    return Table(
        header,
        rows,
        f"Means over seeds, with 95 % bootstrap intervals. Batches to half: until the training reward, averaged over "
        f"{WINDOW} batches, reached 0.5, and in brackets how many runs did; a run that never did counts as one batch "
        "more than it had, so that the true mean is greater (>). Entropy in nats per token at equal step, over all "
        "batches and in the last.",
    )


def mean_of(runs: Sequence[RunResult], metric: str) -> float:
    """Return the mean of a metric over runs."""
    return float(np.mean([run.metric(metric) for run in runs]))


def half_text(runs: Sequence[RunResult]) -> str:
    """Return the mean batches to half, and the number of runs that reached one half, as a text.

    If some runs never reached it, the text begins with ">", since these count as one batch more than they have.
    """
    halves = [run.metric("batches to half") for run in runs]
    reached = sum(half <= len(run.curves["reward"]) for half, run in zip(halves, runs, strict=True))
    mean = f"{sum(halves) / len(halves):.1f}" if reached else "never"
    is_lower_bound = 0 < reached < len(runs)
    return f"{'> ' if is_lower_bound else ''}{mean} ({reached}/{len(runs)})"


def differences_table(
    results: Results,
    experiment: Experiment,
    primary_differences: Sequence[ArmDifference],
    auc_differences: Sequence[ArmDifference],
) -> Table:
    """Return a table with the differences from the baseline in the primary metric and in AUC, one row per arm."""
    study = results.study
    header = [f"minus {study.baseline}", study.primary, "p"]
    caption = (
        f"Differences from {study.baseline}, paired by seed, with Student's 95 % intervals; p corrected after Holm for "
        f"all {len(primary_differences)} comparisons of the study, and * where a difference is claimed."
    )
    rows: dict[str, list[str]] = {}
    for d in primary_differences:
        if d.experiment == experiment.name:
            p = "< 0.001" if d.p < 0.001 else f"{d.p:.3f}"
            rows[d.arm] = [d.arm, signed(d.interval), f"{p} *" if d.claimed else p]
    if study.primary != "AUC":
        header.append("AUC")
        caption += " AUC was not announced as a measure and carries no star."
        for d in auc_differences:
            if d.experiment == experiment.name:
                rows[d.arm].append(signed(d.interval))
    return Table(header, list(rows.values()), caption)


def clip_table(arms: Mapping[str, Sequence[RunResult]]) -> Table:
    """Return a table with the shares of tokens clipped and of rare tokens blocked, one row per arm."""
    return Table(
        ["arm", *SHARES],
        [[arm, *(f"{mean_of(runs, name):.2%}" for name in SHARES)] for arm, runs in arms.items()],
        "Over the whole run: share of tokens clipped with A > 0 and with A < 0; share of tokens with p < 0.1 that won "
        "(A > 0); share of the gradient on those that the rule blocked.",
    )


def tuning_table(results: Results, experiment: Experiment) -> Table:
    """Return a table with the score at each value of the tuning and a mark at the best, one row per arm."""
    assert experiment.tune is not None
    choices = experiment.tune.choices()

    def cell(arm: str, choice: Mapping[str, object]) -> str:
        score = results.tuning_score(experiment.name, arm, choice)
        mark = " ←" if choice == results.tuned_values[experiment.name, arm] else ""
        return "–" if score is None else f"{score:.3f}{mark}"

    rows = [[arm, *(cell(arm, choice) for choice in choices)] for arm in results.study.arms_of(experiment)]
    seeds = ", ".join(map(str, experiment.tune.seeds))
    caption = f"Tuning: mean {results.study.primary} on seeds {seeds}; ← marks the value taken."
    return Table(["arm", *map(options_text, choices)], rows, caption)
