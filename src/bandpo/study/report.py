"""The report of a study: its terms, what was found, and everything by which a reader may judge it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl

from bandpo.study import figures
from bandpo.study.collect import METRICS, WINDOW, Record, read_records
from bandpo.study.page import FIGURE_STYLE, Page, Picture, Section, Table, Verbatim
from bandpo.study.plan import Experiment, Study, parse_study
from bandpo.study.statistics import Interval, by_seed, choose, differences, differing, tuning_score

SHARES = ("clip high", "clip low", "rare wins", "rare blocked")


def study_page(results: Mapping[str, Any]) -> Page:
    """The whole report of a ``results.json``, from what the file holds alone.

    If it says ``unfinished``, the report does too.
    """
    study, records = parse_study(results["study"]), read_records(results)
    with mpl.rc_context(FIGURE_STYLE):
        sections = [_experiment(study, e, records, results) for e in study.experiments]
    return Page(
        study.title,
        [study.question, *_unfinished(results), *found(study, records)],
        [
            Section("At a glance", [glance_table(study, records)]),
            _terms(study),
            *sections,
            _made(results, records),
        ],
    )


def _unfinished(results: Mapping[str, Any]) -> list[str]:
    runs = len(results["runs"])
    return [f"This study has not ended: {runs} runs have so far."] if results.get("unfinished") else []


def glance_table(study: Study, records: Sequence[Record]) -> Table:
    """One row per arm, one column per experiment: the primary metric, and the difference from the baseline."""
    compared = [e for e in study.experiments if not e.identical]
    columns: list[list[str]] = []
    for e in compared:
        gaps = {
            d.arm: d for d in differences(records, e.name, study.arms_of(e), study.baseline, study.primary)
        }
        column: list[str] = []
        for arm in study.arms:
            values = by_seed(records, e.name, arm, study.primary).values()
            text = f"{Interval.of(list(values)).mean:.3f}" if values else "–"
            if gap := gaps.get(arm):
                half = (gap.interval.high - gap.interval.low) / 2
                text += f" ({gap.interval.mean:+.2f} ± {half:.2f}{' *' if gap.claimed else ''})"
            column.append(text)
        columns.append(column)
    return Table(
        ["", *(f"{e.name}, n = {len(e.seeds)}" for e in compared)],
        [list(row) for row in zip(study.arms, *columns, strict=True)],
        f"{study.primary}, mean over n seeds; in parentheses the difference from {study.baseline}, paired by seed, and "
        "the half-width of its 95 % interval; * where a difference can be claimed.",
    )


def found(study: Study, records: Sequence[Record]) -> list[str]:
    """A sentence or two for each experiment: who differs from the baseline, by how much, and who does not."""
    return [_sentence(study, e, records) for e in study.experiments]


def _sentence(study: Study, e: Experiment, records: Sequence[Record]) -> str:
    if not any(r.experiment == e.name and r.tuning is None for r in records):
        return f"{e.name}: no run has ended."
    if e.identical:
        others = differing(records, e.name)
        return f"{e.name}: " + (
            f"the arms should coincide and do not: {'; '.join(others)}."
            if others
            else "all arms coincide exactly."
        )
    arms = study.arms_of(e)
    gaps = differences(records, e.name, arms, study.baseline, study.primary)
    base = Interval.of(
        list(by_seed(records, e.name, study.baseline, study.primary).values()) or [float("nan")]
    )
    said = [
        f"{d.arm} {d.interval.mean:+.3f} ({d.interval.low:+.3f} to {d.interval.high:+.3f})"
        for d in gaps
        if d.claimed
    ]
    rest = [d.arm for d in gaps if not d.claimed]
    text = f"{e.name}: {study.baseline} ends at {study.primary} {base.mean:.3f}; "
    text += f"differing from it: {'; '.join(said)}." if said else "no difference from it can be claimed."
    return text + (f" No difference can be claimed for {', '.join(rest)}." if said and rest else "")


def _terms(study: Study) -> Section:
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
    return Section(
        "Terms",
        [
            f"Decided by {study.primary}, every arm against {study.baseline}, paired by seed. Stopping rule: "
            f"{study.stopping}.",
            "Intervals are Student's, 95 %, over seeds. A difference is claimed where the paired t-test, corrected "
            "after Holm for all arms of the experiment, gives p < 0.05. Where options were tuned, each arm took those "
            f"with the best {study.primary} on tuning seeds, and is reported on others.",
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


def _experiment(
    study: Study, e: Experiment, records: Sequence[Record], results: Mapping[str, Any]
) -> Section:
    arms = {
        arm: mine
        for arm in study.arms_of(e)
        if (mine := [r for r in records if r.experiment == e.name and r.arm == arm and r.tuning is None])
    }
    if not arms:
        return Section(e.name, [e.question, "No run of this experiment ended."])
    said = _sentence(study, e, records).partition(": ")[2]
    content: list[Any] = [e.question, said[0].upper() + said[1:]]
    if e.identical:
        return Section(e.name, content)
    places, slug = {arm: place for place, arm in enumerate(study.arms)}, e.name.replace(" ", "-")
    content.append(scores_table(study, e, records))
    metrics = [study.primary, "batches to half", "entropy midway"]
    content.append(
        Picture(
            f"{slug}-seeds",
            figures.seeds(arms, metrics, places),
            "A dot for every seed; the diamond is their mean, with its 95 % interval.",
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


def scores_table(study: Study, e: Experiment, records: Sequence[Record]) -> Table:
    """One row per arm: final scores with intervals, speed, entropy, and the difference from the baseline."""
    gaps = {d.arm: d for d in differences(records, e.name, study.arms_of(e), study.baseline, study.primary)}
    rows: list[list[str]] = []
    for arm in study.arms_of(e):
        mine = [r for r in records if r.experiment == e.name and r.arm == arm and r.tuning is None]
        if not mine:
            rows.append([arm, "no run ended", *[""] * 6])
            continue
        halves = [r.metric("batches to half") for r in mine]
        reached = sum(half <= len(r.curves["reward"]) for half, r in zip(halves, mine, strict=True))
        gap = gaps.get(arm)
        passed = next((name for name in mine[0].after if name.startswith("pass@")), None)
        rows.append(
            [
                arm,
                _interval(Interval.of([r.metric(study.primary) for r in mine])),
                _interval(Interval.of([r.metric(passed) for r in mine])) if passed else "–",
                f"{sum(halves) / len(halves):.1f} ({reached}/{len(mine)})",
                f"{Interval.of([r.metric('entropy midway') for r in mine]).mean:.2f}",
                f"{Interval.of([r.metric('entropy at end') for r in mine]).mean:.2f}",
                f"{gap.interval.mean:+.3f} [{gap.interval.low:+.3f}, {gap.interval.high:+.3f}]"
                if gap
                else "–",
                (f"{gap.p:.3f}" + (" *" if gap.claimed else "")) if gap else "–",
            ]
        )
    passed = next((n for r in records for n in r.after if n.startswith("pass@")), "pass@k")
    return Table(
        [
            "arm", study.primary, passed, "batches to half", "entropy midway", "entropy at end",
            f"{study.primary} − {study.baseline}", "p (Holm)",
        ],
        rows,
        f"Means over seeds with 95 % intervals. Batches to half: until the training reward, averaged over {WINDOW} "
        "batches, reached 0.5; a run that never did counts as one batch more than it had (how many did, in brackets). "
        "* marks what is claimed.",
    )  # fmt: skip


def _interval(interval: Interval) -> str:
    return f"{interval.mean:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


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
    header = [", ".join(f"{name} {value}" for name, value in choice.items()) for choice in choices]
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
    if results["failed"]:
        content.append(f"Failed and not counted: {'; '.join(results['failed'])}.")
    elif not results.get("unfinished"):
        content.append("No run failed.")
    content.append(Verbatim("The study file", results["study"]))
    return Section("How it was made", content)
