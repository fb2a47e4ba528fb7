"""The report of a study: its terms, what was found, and everything by which a reader may judge it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl

from bandpo.study import figures
from bandpo.study.afterwards import Afterwards, parse_afterwards
from bandpo.study.collect import METRICS, WINDOW, Record, read_records
from bandpo.study.page import FIGURE_STYLE, Page, Picture, Section, Table, Verbatim
from bandpo.study.plan import Experiment, Study, parse_study
from bandpo.study.statistics import (
    Contrast,
    Difference,
    Interval,
    by_seed,
    choose,
    coverage,
    differences,
    differing,
    tuning_score,
)

SHARES = ("clip high", "clip low", "rare wins", "rare blocked")


def study_page(results: Mapping[str, Any], afterwards: str = "") -> Page:
    """The whole report of a study.

    Args:
        results: What its ``results.json`` holds.
        afterwards: The text of the ``afterwards.yaml`` beside it, if there is one.
    """
    study, records = parse_study(results["study"]), read_records(results)
    said = parse_afterwards(afterwards, study)
    with mpl.rc_context(FIGURE_STYLE):
        sections = [_experiment(study, e, records, said) for e in study.experiments]
    return Page(
        study.title,
        [study.question, *found(study, records)],
        [
            *([_said(study, records, said)] if afterwards else []),
            _terms(study, records),
            Section(
                "At a glance",
                [glance_table(study, records, metric) for metric in dict.fromkeys((study.primary, "AUC"))],
            ),
            *sections,
            _made(results, records),
        ],
    )


def glance_table(study: Study, records: Sequence[Record], metric: str | None = None) -> Table:
    """One row per arm, one column per experiment: the metric, and its difference from the baseline.

    Args:
        study: The study.
        records: Its runs.
        metric: The primary one if not given. No other is marked with stars: none was announced.
    """
    metric = metric or study.primary
    compared = [e for e in study.experiments if not e.identical]
    apart = {(d.experiment, d.arm): d for d in differences(study, records, metric)}
    columns: list[list[str]] = []
    for e in compared:
        column: list[str] = []
        for arm in study.arms:
            values = by_seed(records, e.name, arm, metric).values()
            text = f"{Interval.of(list(values)).mean:.3f}" if values else "–"
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


def found(study: Study, records: Sequence[Record]) -> list[str]:
    """A few sentences for each experiment: what can be claimed, and what is left open."""
    apart = differences(study, records, study.primary)
    return [
        f"{e.name}: {_sentence(study, e, records, [d for d in apart if d.experiment == e.name])}"
        for e in study.experiments
    ]


def _sentence(study: Study, e: Experiment, records: Sequence[Record], apart: Sequence[Difference]) -> str:
    if e.identical:
        others = differing(records, e.name)
        return (
            f"the arms should coincide and do not: {'; '.join(others)}."
            if others
            else "all arms coincide exactly."
        )
    base = list(by_seed(records, e.name, study.baseline, study.primary).values())
    if not base:
        return f"{study.baseline} has no run to compare with."
    text = f"{study.baseline} ends at {study.primary} {Interval.of(base).mean:.3f}."
    if said := [f"{d.arm} {_signed(d.interval)}" for d in apart if d.claimed]:
        text += f" Different from it: {'; '.join(said)}."
    if rest := [d for d in apart if not d.claimed]:
        low, high = min(d.interval.low for d in rest), max(d.interval.high for d in rest)
        text += (
            f" Left open, shown neither to differ nor to tie: {'; '.join(d.arm for d in rest)}. Their intervals, not "
            f"corrected for the number of comparisons, reach from {low:+.3f} to {high:+.3f}."
        )
    return text


def _said(study: Study, records: Sequence[Record], said: Afterwards) -> Section:
    """What was added once the runs had been seen."""
    content: list[Any] = [*said.remarks]
    for title, pair in said.pairs.items():
        contrasts = {
            name: Contrast.of(study, records, pair.arm, pair.minus, name)
            for name in dict.fromkeys(("mean entropy", "AUC", study.primary))
        }
        rows = [
            [name, *(_signed(c.by_experiment[name]) for c in contrasts.values())]
            for name in next(iter(contrasts.values())).by_experiment
        ]
        rows.append(["all", *(_signed(c.overall) for c in contrasts.values())])
        rows.append(["pairs of runs above 0", *(f"{c.above} of {c.pairs}" for c in contrasts.values())])
        content += [
            f"{title}. {pair.why}",
            Table(
                ["", *contrasts],
                rows,
                f"{pair.arm} minus {pair.minus}, paired by seed, with Student's 95 % intervals. Mean entropy is in "
                "nats per token, over all batches. In the row “all” each seed counts once, with its mean over the "
                "experiments. Nobody announced this comparison, so it carries no star.",
            ),
        ]
    return Section("Added after the runs were seen", content)


def _terms(study: Study, records: Sequence[Record]) -> Section:
    rows = []
    for e in study.experiments:
        tuned = ""
        if e.tune:
            grid = "; ".join(
                f"{name} {', '.join(map(str, values))}" for name, values in e.tune.options.items()
            )
            tuned = f"{grid}, on seeds {_numbers(e.tune.seeds)}"
        elif e.tuned_in:
            tuned = f"as in {e.tuned_in}"
        rows.append([e.name, _numbers(e.seeds), str(len(study.arms_of(e))), tuned or "–"])
    fewest = min(len(e.seeds) for e in study.experiments if not e.identical or len(study.experiments) == 1)
    too_narrow = (
        f" It is too narrow where seeds are few: of {fewest} normal scores it holds the mean in "
        f"{coverage(fewest):.0%} of cases."
        if fewest > 1
        else ""
    )
    return Section(
        "Terms",
        [
            f"Decided by {study.primary}, every arm against {study.baseline}, paired by seed. Stopping rule: "
            f"{study.stopping}.",
            "Two kinds of interval, both for 95 %, both over seeds. A score has a bootstrap interval, which stays "
            f"between 0 and 1.{too_narrow} A difference has Student's.",
            f"A difference is claimed where the paired t-test gives p < 0.05, corrected after Holm for all "
            f"{len(differences(study, records, study.primary))} comparisons of the study. Everything else is left "
            "open: it is no evidence of a difference, and none of equality.",
            f"Where options were tuned, each arm took those with the best {study.primary} on tuning seeds, and is "
            "reported on others.",
            f"{study.primary} is measured after training. AUC, the area under the curve of training reward, is the "
            "mean reward over all batches: it sees how early an arm learns, too.",
            Table(["experiment", "seeds reported", "arms", "tuned"], rows, prose=True),
            Table(
                ["arm", "clip rule"],
                [[arm, str(options["clip"])] for arm, options in study.arms.items()],
                prose=True,
            ),
        ],
    )


def _numbers(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))


def _experiment(study: Study, e: Experiment, records: Sequence[Record], said: Afterwards) -> Section:
    arms = {
        arm: mine
        for arm in study.arms_of(e)
        if (mine := [r for r in records if r.experiment == e.name and r.arm == arm and r.tuning is None])
    }
    if not arms:
        return Section(e.name, [e.question, "No run of this experiment ended."])
    apart = [d for d in differences(study, records, study.primary) if d.experiment == e.name]
    sentence = _sentence(study, e, records, apart)
    content: list[Any] = [e.question, sentence[0].upper() + sentence[1:]]
    if e.identical:
        return Section(e.name, content)
    if e.tune or e.tuned_in:
        content.append(_tuned_values(study, e, records))
    places, slug = {arm: place for place, arm in enumerate(study.arms)}, e.name.replace(" ", "-")
    content.append(scores_table(study, e, records))
    content.append(_differences_table(study, e, records, said.seen))
    content.append(
        Picture(
            f"{slug}-seeds",
            figures.seeds(arms, list(dict.fromkeys((study.primary, "AUC", "mean entropy"))), places),
            "A dot for every seed; the diamond is their mean, with its 95 % bootstrap interval.",
        )
    )
    content.append(
        Picture(
            f"{slug}-curves",
            figures.curves(arms, places),
            "Mean over seeds of every batch, ± one standard error.",
        )
    )
    content.append(_clip_table(e, arms))
    content.append(
        Picture(
            f"{slug}-bins",
            figures.clipped_by_probability(arms, places),
            "Share of positive-advantage tokens whose gradient the rule dropped, by their old probability.",
        )
    )
    if e.tune:
        content.append(_tuning_table(study, e, records))
    return Section(e.name, content)


def _tuned_values(study: Study, e: Experiment, records: Sequence[Record]) -> str:
    """Which arms ran at which tuned values, and whether that lets a difference be put down to the rule."""
    source = study.experiment(e.tuned_in or e.name)
    assert source.tune is not None
    chosen = choose(study, records)
    arms: dict[str, list[str]] = {}
    edge: list[str] = []
    for arm in study.arms_of(e):
        values = chosen[source.name, arm]
        arms.setdefault(_options(values), []).append(arm)
        if any(values[name] in (tried[0], tried[-1]) for name, tried in source.tune.options.items()):
            edge.append(arm)
    text = " ".join(f"At {values}: {'; '.join(names)}." for values, names in arms.items())
    if len(arms) > 1:
        text += " A difference between arms at unequal values is one of rule and values together."
    if edge:
        text += f" Chosen at the edge of what was tried, so that the best may lie beyond: {'; '.join(edge)}."
    return text


def _options(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


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
                *(_interval(Interval.of([r.metric(name) for r in mine])) for name in metrics),
                _half(mine),
                *(
                    f"{Interval.of([r.metric(name) for r in mine]).mean:.2f}"
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


def _half(runs: Sequence[Record]) -> str:
    halves = [r.metric("batches to half") for r in runs]
    reached = sum(half <= len(r.curves["reward"]) for half, r in zip(halves, runs, strict=True))
    mean = f"{sum(halves) / len(halves):.1f}" if reached else "never"
    return f"{'> ' * (0 < reached < len(runs))}{mean} ({reached}/{len(runs)})"


def _differences_table(
    study: Study, e: Experiment, records: Sequence[Record], seen: Mapping[str, Sequence[int]]
) -> Table:
    """One row per arm: its difference from the baseline, on all seeds and on those that had not been seen."""
    every, unseen, early = (
        {d.arm: d for d in differences(study, records, metric, without) if d.experiment == e.name}
        for metric, without in ((study.primary, None), (study.primary, seen), ("AUC", None))
    )
    new = [seed for seed in e.seeds if seed not in seen.get(e.name, ())]
    fresh = len(new) < len(e.seeds)
    rows = [
        [
            arm,
            _signed(d.interval),
            _p(d.p) + (" *" if d.claimed else ""),
            *([_signed(unseen[arm].interval), _p(unseen[arm].p)] if fresh else []),
            _signed(early[arm].interval),
        ]
        for arm, d in every.items()
    ]
    only = f"{study.primary}, seeds {_numbers(new)}"
    count = len(differences(study, records, study.primary))
    return Table(
        [f"minus {study.baseline}", study.primary, "p", *([only, "p"] if fresh else []), "AUC"],
        rows,
        f"Differences from {study.baseline}, paired by seed, with Student's 95 % intervals; p corrected after Holm for "
        f"all {count} comparisons of the study, and * where a difference is claimed."
        + (
            f" Seeds {_numbers(seen[e.name])} had been seen when the others were added, so the others stand alone, too."
            if fresh
            else ""
        )
        + " AUC was not announced as a measure and carries no star.",
    )


def _interval(interval: Interval) -> str:
    return f"{interval.mean:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def _signed(interval: Interval) -> str:
    return f"{interval.mean:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]"


def _p(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _clip_table(e: Experiment, arms: Mapping[str, Sequence[Record]]) -> Table:
    return Table(
        ["arm", *SHARES],
        [
            [arm, *(f"{Interval.of([METRICS[name](r) for r in mine]).mean:.2%}" for name in SHARES)]
            for arm, mine in arms.items()
        ],
        "Over the whole run: share of tokens clipped with A > 0 and with A < 0; share of tokens with p < 0.1 that won "
        "(A > 0); share of the gradient on those that the rule blocked.",
    )


def _tuning_table(study: Study, e: Experiment, records: Sequence[Record]) -> Table:
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
    header = [_options(choice) for choice in choices]
    return Table(
        ["arm", *header],
        rows,
        f"Tuning: mean {study.primary} on seeds {_numbers(e.tune.seeds)}; ← marks the value taken.",
    )


def _made(results: Mapping[str, Any], records: Sequence[Record]) -> Section:
    hours = sum(r.seconds for r in records) / 3600
    made = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    if results.get("commit"):
        made += f"; commit {results['commit']}"
    content: list[Any] = [
        f"By `bandpo study` with the file below, and `bandpo report`: {len(records)} runs, {hours:.1f} hours in all, "
        f"with {made}."
    ]
    content.append(
        f"Failed and not counted: {'; '.join(results['failed'])}." if results["failed"] else "No run failed."
    )
    content.append(Verbatim("The study file", results["study"]))
    return Section("How it was made", content)
