"""The tables of a study's report: scores, differences, what the clip did, and what was tuned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from bandpo_lab.interval import Interval, bootstrap
from bandpo_lab.study.collect import WINDOW, RunResult
from bandpo_lab.study.plan import Experiment, options_text
from bandpo_lab.study.statistics import ArmDifference, Results
from bandpo_lab.tables import Table

SHARES = ("clip high", "clip low", "rare wins", "rare blocked")


def glance_table(found: Results, metric: str, differences: Sequence[ArmDifference]) -> Table:
    """One row per arm, one column per experiment: the metric, and its difference from the baseline.

    Only of the primary metric differences are marked with stars: no other was announced.
    """
    study = found.study
    apart = {(d.experiment, d.arm): d for d in differences}
    starred = metric == study.primary

    def cell(e: Experiment, arm: str) -> str:
        values = found.by_seed(e.name, arm, metric).values()
        text = f"{np.mean([*values]):.3f}" if values else "–"
        if gap := apart.get((e.name, arm)):
            star = " *" if gap.claimed and starred else ""
            text += f" ({gap.interval.value:+.2f} ± {gap.interval.half:.2f}{star})"
        return text

    stars = (
        f"; * marks a difference that can be claimed: p < 0.05, corrected for all {len(apart)} comparisons"
    )
    return Table(
        ["", *(f"{e.name}, n = {len(e.seeds)}" for e in study.experiments.values())],
        [[arm, *(cell(e, arm) for e in study.experiments.values())] for arm in study.arms],
        f"{metric}, mean over n seeds; in parentheses the difference from {study.baseline}, paired by seed, ± half its "
        f"95 % interval{stars if starred else ''}.",
    )


def scores_table(found: Results, e: Experiment) -> Table:
    """One row per arm: final scores with intervals, speed, and entropy."""
    metrics = [*dict.fromkeys((found.study.primary, "AUC"))]
    metrics += [n for n in dict.fromkeys(n for r in found.runs for n in r.after) if n.startswith("pass@")][:1]
    rows: list[list[str]] = []
    for arm in found.study.arms_of(e):
        mine = found.of(e.name, arm)
        if not mine:
            rows.append([arm, "no run ended", *[""] * (len(metrics) + 3 - 1)])
            continue
        scores = [bootstrap([[r.metric(name) for r in mine]]) for name in metrics]
        rows.append(
            [
                arm,
                *("{:.3f} [{:.3f}, {:.3f}]".format(*score) for score in scores),
                half_text(mine),
                *(f"{mean_of(mine, name):.2f}" for name in ("mean entropy", "entropy at end")),
            ]
        )
    return Table(
        ["arm", *metrics, "batches to half", "mean entropy", "entropy at end"],
        rows,
        f"Means over seeds, with 95 % bootstrap intervals. Batches to half: until the training reward, averaged over "
        f"{WINDOW} batches, reached 0.5, and in brackets how many runs did; a run that never did counts as one batch "
        "more than it had, so that the true mean is greater (>). Entropy in nats per token, over all batches and in "
        "the last.",
    )


def mean_of(runs: Sequence[RunResult], metric: str) -> float:
    """A metric's mean over runs."""
    return float(np.mean([run.metric(metric) for run in runs]))


def half_text(runs: Sequence[RunResult]) -> str:
    """Mean batches to half, greater than that where some run never reached it, and how many did."""
    halves = [r.metric("batches to half") for r in runs]
    reached = sum(half <= len(r.curves["reward"]) for half, r in zip(halves, runs, strict=True))
    mean = f"{sum(halves) / len(halves):.1f}" if reached else "never"
    return f"{'> ' * (0 < reached < len(runs))}{mean} ({reached}/{len(runs)})"


def differences_table(
    found: Results, e: Experiment, decided: Sequence[ArmDifference], early: Sequence[ArmDifference]
) -> Table:
    """One row per arm: its difference from the baseline by what the study is decided by, and ``early``, by AUC."""
    study = found.study
    columns = [(study.primary, decided, True)]
    caption = (
        f"Differences from {study.baseline}, paired by seed, with Student's 95 % intervals; p corrected after Holm for "
        f"all {len(decided)} comparisons of the study, and * where a difference is claimed."
    )
    if study.primary != "AUC":
        columns.append(("AUC", early, False))
        caption += " AUC was not announced as a measure and carries no star."
    header, rows = [f"minus {study.baseline}"], {d.arm: [d.arm] for d in decided if d.experiment == e.name}
    for title, differences, tested in columns:
        header += [title, "p"] if tested else [title]
        for d in differences:
            if d.experiment == e.name:
                star = " *" if d.claimed and differences is decided else ""
                p = "< 0.001" if d.p < 0.001 else f"{d.p:.3f}"
                rows[d.arm] += [signed(d.interval), p + star] if tested else [signed(d.interval)]
    return Table(header, list(rows.values()), caption)


def clip_table(arms: Mapping[str, Sequence[RunResult]]) -> Table:
    """One row per arm: how much was clipped, and what that blocked of rare tokens."""
    return Table(
        ["arm", *SHARES],
        [[arm, *(f"{mean_of(mine, name):.2%}" for name in SHARES)] for arm, mine in arms.items()],
        "Over the whole run: share of tokens clipped with A > 0 and with A < 0; share of tokens with p < 0.1 that won "
        "(A > 0); share of the gradient on those that the rule blocked.",
    )


def tuning_table(found: Results, e: Experiment) -> Table:
    """One row per arm: its score at each value tried, and the one taken."""
    assert e.tune is not None
    choices = e.tune.choices()

    def cell(arm: str, choice: Mapping[str, object]) -> str:
        score = found.tuning_score(e.name, arm, choice)
        taken = " ←" if choice == found.chosen[e.name, arm] else ""
        return "–" if score is None else f"{score:.3f}{taken}"

    return Table(
        ["arm", *map(options_text, choices)],
        [[arm, *(cell(arm, choice) for choice in choices)] for arm in found.study.arms_of(e)],
        f"Tuning: mean {found.study.primary} on seeds {', '.join(map(str, e.tune.seeds))}; ← marks the value taken.",
    )


def signed(interval: Interval) -> str:
    """A difference and its interval."""
    return "{:+.3f} [{:+.3f}, {:+.3f}]".format(*interval)
