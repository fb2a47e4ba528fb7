"""The tables of a study's report: scores, differences, what the clip did, and what was tuned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bandpo.audit.tables import Table
from bandpo_lab.study.collect import METRICS, WINDOW, Record
from bandpo_lab.study.plan import Experiment, Study, options_text
from bandpo_lab.study.statistics import (
    ArmDifference,
    Comparisons,
    Interval,
    by_seed,
    choose,
    tuning_score,
)

SHARES = ("clip high", "clip low", "rare wins", "rare blocked")


def glance_table(
    study: Study, records: Sequence[Record], metric: str, differences: Sequence[ArmDifference]
) -> Table:
    """One row per arm, one column per experiment: the metric, and its difference from the baseline.

    Args:
        study: The study.
        records: Its runs.
        metric: None but the primary one is marked with stars: no other was announced.
        differences: By this metric.
    """
    compared = [e for e in study.experiments.values() if not e.identical]
    apart = {(d.experiment, d.arm): d for d in differences}
    columns: list[list[str]] = []
    for e in compared:
        column: list[str] = []
        for arm in study.arms:
            values = by_seed(records, e.name, arm, metric).values()
            text = f"{Interval.from_values(list(values)).mean:.3f}" if values else "–"
            if gap := apart.get((e.name, arm)):
                half = (gap.interval.high - gap.interval.low) / 2
                star = " *" if gap.claimed and metric == study.primary else ""
                text += f" ({gap.interval.mean:+.2f} ± {half:.2f}{star})"
            column.append(text)
        columns.append(column)
    stars = (
        f"; * marks a difference that can be claimed: p < 0.05, corrected for all {len(apart)} comparisons"
    )
    return Table(
        ["", *(f"{e.name}, n = {len(e.seeds)}" for e in compared)],
        [list(row) for row in zip(study.arms, *columns, strict=True)],
        f"{metric}, mean over n seeds; in parentheses the difference from {study.baseline}, paired by seed, ± half its "
        f"95 % interval{stars if metric == study.primary else ''}.",
    )


def scores_table(study: Study, e: Experiment, records: Sequence[Record]) -> Table:
    """One row per arm: final scores with intervals, speed, and entropy."""
    metrics = list(dict.fromkeys((study.primary, "AUC")))
    metrics += [n for n in dict.fromkeys(n for r in records for n in r.after) if n.startswith("pass@")][:1]
    rows: list[list[str]] = []
    for arm in study.arms_of(e):
        mine = [r for r in records if r.experiment == e.name and r.arm == arm and r.tuning is None]
        if not mine:
            rows.append([arm, "no run ended", *[""] * (len(metrics) + 3)])
            continue
        rows.append(
            [
                arm,
                *(_interval(Interval.from_values([r.metric(name) for r in mine])) for name in metrics),
                half_text(mine),
                *(
                    f"{Interval.from_values([r.metric(name) for r in mine]).mean:.2f}"
                    for name in ("mean entropy", "entropy at end")
                ),
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


def half_text(runs: Sequence[Record]) -> str:
    """Mean batches to half, greater than that where some run never reached it, and how many did."""
    halves = [r.metric("batches to half") for r in runs]
    reached = sum(half <= len(r.curves["reward"]) for half, r in zip(halves, runs, strict=True))
    mean = f"{sum(halves) / len(halves):.1f}" if reached else "never"
    return f"{'> ' * (0 < reached < len(runs))}{mean} ({reached}/{len(runs)})"


def differences_table(
    study: Study, e: Experiment, compared: Comparisons, seen: Mapping[str, Sequence[int]]
) -> Table:
    """One row per arm: its difference from the baseline, on all seeds and on those that had not been seen."""
    every, unseen, early = (
        {d.arm: d for d in of_all if d.experiment == e.name}
        for of_all in (compared.decided, compared.unseen, compared.early)
    )
    new = [seed for seed in e.seeds if seed not in seen.get(e.name, ())]
    fresh = len(new) < len(e.seeds)
    also_auc = study.primary != "AUC"
    rows = [
        [
            arm,
            signed(d.interval),
            _p(d.p) + (" *" if d.claimed else ""),
            *([signed(unseen[arm].interval), _p(unseen[arm].p)] if fresh else []),
            *([signed(early[arm].interval)] if also_auc else []),
        ]
        for arm, d in every.items()
    ]
    only = f"{study.primary}, seeds {seeds_text(new)}"
    return Table(
        [
            f"minus {study.baseline}",
            study.primary,
            "p",
            *([only, "p"] if fresh else []),
            *(["AUC"] if also_auc else []),
        ],
        rows,
        f"Differences from {study.baseline}, paired by seed, with Student's 95 % intervals; p corrected after Holm for "
        f"all {len(compared.decided)} comparisons of the study, and * where a difference is claimed."
        + (
            f" Seeds {seeds_text(seen[e.name])} had been seen when the others were added, so the others stand alone, "
            "too."
            if fresh
            else ""
        )
        + (" AUC was not announced as a measure and carries no star." if also_auc else ""),
    )


def clip_table(arms: Mapping[str, Sequence[Record]]) -> Table:
    """One row per arm: how much was clipped, and what that blocked of rare tokens."""
    return Table(
        ["arm", *SHARES],
        [
            [arm, *(f"{Interval.from_values([METRICS[name](r) for r in mine]).mean:.2%}" for name in SHARES)]
            for arm, mine in arms.items()
        ],
        "Over the whole run: share of tokens clipped with A > 0 and with A < 0; share of tokens with p < 0.1 that won "
        "(A > 0); share of the gradient on those that the rule blocked.",
    )


def tuning_table(study: Study, e: Experiment, records: Sequence[Record]) -> Table:
    """One row per arm: its score at each value tried, and the one taken."""
    assert e.tune is not None
    chosen = choose(study, records)
    choices = e.tune.choices()
    rows = []
    for arm in study.arms_of(e):
        scores = [tuning_score(records, e.name, arm, choice, study.primary) for choice in choices]
        rows.append(
            [
                arm,
                *(
                    "–" if score is None else f"{score:.3f}" + (" ←" if choice == chosen[e.name, arm] else "")
                    for choice, score in zip(choices, scores, strict=True)
                ),
            ]
        )
    header = [options_text(choice) for choice in choices]
    return Table(
        ["arm", *header],
        rows,
        f"Tuning: mean {study.primary} on seeds {seeds_text(e.tune.seeds)}; ← marks the value taken.",
    )


def _interval(interval: Interval) -> str:
    return f"{interval.mean:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def signed(interval: Interval) -> str:
    """A difference and its interval."""
    return f"{interval.mean:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]"


def _p(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def seeds_text(seeds: Sequence[int]) -> str:
    """Seeds in a row."""
    return ", ".join(map(str, seeds))
