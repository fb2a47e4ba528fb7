"""The report of a study: its terms, what was found, and everything by which a reader may judge it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bandpo_lab.page import Page, Picture, Section, Verbatim
from bandpo_lab.study import figures
from bandpo_lab.study.plan import Experiment, Study, options_text
from bandpo_lab.study.statistics import ArmDifference, Results
from bandpo_lab.study.tables import (
    clip_table,
    differences_table,
    glance_table,
    mean_of,
    scores_table,
    signed,
    tuning_table,
)
from bandpo_lab.style import looks_of
from bandpo_lab.tables import Table


def study_page(content: Mapping[str, Any]) -> Page:
    """The whole report of a study, from its ``results.json``. If that says ``unfinished``, the report does too."""
    found = Results.from_file(content)
    study = found.study
    decided, early = found.differences(study.primary), found.differences("AUC")
    experiments = study.experiments.values()
    lead = [study.question]
    if content.get("unfinished"):
        lead.append(f"This study has not ended: {len(found.runs)} runs have so far.")
    return Page(
        study.title,
        [*lead, *(f"{e.name}: {sentence(found, e, decided)}" for e in experiments)],
        [
            _terms(study, len(decided)),
            Section(
                "At a glance",
                [
                    glance_table(found, metric, apart)
                    for metric, apart in {study.primary: decided, "AUC": early}.items()
                ],
            ),
            *(
                _experiment(found, e, decided, differences_table(found, e, decided, early))
                for e in experiments
            ),
            made(content, found, "`bandpo-lab study page`"),
        ],
    )


def sentence(found: Results, e: Experiment, apart: Sequence[ArmDifference]) -> str:
    """A few sentences on an experiment: what can be claimed, and what is left open."""
    study, apart = found.study, [d for d in apart if d.experiment == e.name]
    if not any(r.experiment == e.name and r.tuning is None for r in found.runs):
        return "no run has ended."
    base = found.of(e.name, study.baseline)
    if not base:
        return f"{study.baseline} has no run to compare with."
    text = f"{study.baseline} ends at {study.primary} {mean_of(base, study.primary):.3f}."
    if said := [f"{d.arm} {signed(d.interval)}" for d in apart if d.claimed]:
        text += f" Different from it: {'; '.join(said)}."
    if rest := [d for d in apart if not d.claimed]:
        low, high = min(d.interval.low for d in rest), max(d.interval.high for d in rest)
        text += (
            f" Left open, shown neither to differ nor to tie: {'; '.join(d.arm for d in rest)}. Their intervals, not "
            f"corrected for the number of comparisons, reach from {low:+.3f} to {high:+.3f}."
        )
    return text


def _terms(study: Study, comparisons: int) -> Section:
    rows = []
    for e in study.experiments.values():
        tuned = ""
        if e.tune:
            grid = "; ".join(
                f"{name} {', '.join(map(str, values))}" for name, values in e.tune.options.items()
            )
            tuned = f"{grid}, on seeds {', '.join(map(str, e.tune.seeds))}"
        elif e.tuned_in:
            tuned = f"as in {e.tuned_in}"
        rows.append([e.name, ", ".join(map(str, e.seeds)), str(len(study.arms_of(e))), tuned or "–"])
    return Section(
        "Terms",
        [
            "An arm is one way to train, here one clip rule. An experiment is one task on which arms compete, with the "
            "same seeds for each. A batch is sampled at once and used for one or more updates.",
            "mean@k is the share of right answers among k samples to each problem. pass@k is the share of problems "
            "with a right answer among k. Both are taken on test problems after training. AUC is the mean reward over "
            "all batches of training, the area under its curve. It shows how early an arm learns. Entropy is the "
            "policy's, in nats per token.",
            "p is a token's probability under the policy that sampled it, and A its advantage. A token is clipped if "
            "its rule drops its gradient.",
            f"Decided by {study.primary}, every arm against {study.baseline}, paired by seed. Stopping rule: "
            f"{study.stopping}.",
            "Two kinds of interval, both for 95 %, both over seeds. A score has a bootstrap interval, which stays "
            "between 0 and 1 and is too narrow where seeds are few: of 4 normal scores it holds the mean in 81 % of "
            "cases, of 8 in 89 %. A difference has Student's.",
            "A difference is claimed where the paired t-test gives p < 0.05, corrected after Holm for all "
            f"{comparisons} comparisons of the study. Everything else is left open: it is no evidence of a "
            "difference, and none of equality.",
            f"Where options were tuned, each arm took those with the best {study.primary} on tuning seeds, and is "
            "reported on others.",
            Table(["experiment", "seeds reported", "arms", "tuned"], rows, prose=True),
            Table(
                ["arm", "clip rule"],
                [[arm, str(options["method"])] for arm, options in study.arms.items()],
                prose=True,
            ),
        ],
    )


def _experiment(
    found: Results, e: Experiment, decided: Sequence[ArmDifference], differences: Table
) -> Section:
    study = found.study
    arms = {arm: mine for arm in study.arms_of(e) if (mine := found.of(e.name, arm))}
    if not arms:
        return Section(e.name, [e.question, "No run of this experiment ended."])
    said = sentence(found, e, decided)
    content: list[Any] = [e.question, said[0].upper() + said[1:]]
    if e.tune or e.tuned_in:
        content.append(_tuned_values(found, e))
    looks, slug = looks_of(study.arms), e.name.replace(" ", "-")
    metrics = list(dict.fromkeys((study.primary, "AUC", "mean entropy")))
    content += [
        scores_table(found, e),
        differences,
        Picture(
            f"{slug}-seeds",
            figures.seeds(arms, metrics, looks),
            "A dot for every seed; above the dots their mean, with its 95 % bootstrap interval.",
        ),
        Picture(
            f"{slug}-curves",
            figures.curves(arms, looks),
            "Mean over seeds of every batch, with its 95 % bootstrap interval.",
        ),
        clip_table(arms),
        Picture(
            f"{slug}-bins",
            figures.clipped_by_probability(arms, looks),
            "Share of positive-advantage tokens whose gradient the rule dropped, by their old probability. The "
            "95 % intervals come from drawing seeds anew, and are at least Wilson's for the number of tokens. An arm "
            "without such tokens has no mark.",
        ),
    ]
    if e.tune:
        content.append(tuning_table(found, e))
    return Section(e.name, content)


def _tuned_values(found: Results, e: Experiment) -> str:
    """Which arms ran at which tuned values, and whether that lets a difference be put down to the rule."""
    source = found.study.experiments[e.tuned_in or e.name]
    assert source.tune is not None
    arms: dict[str, list[str]] = {}
    edge: list[str] = []
    for arm in found.study.arms_of(e):
        values = found.chosen[source.name, arm]
        arms.setdefault(options_text(values), []).append(arm)
        if any(values[name] in (tried[0], tried[-1]) for name, tried in source.tune.options.items()):
            edge.append(arm)
    text = " ".join(f"At {values}: {'; '.join(names)}." for values, names in arms.items())
    if len(arms) > 1:
        text += " A difference between arms at unequal values is one of rule and values together."
    if edge:
        text += f" Chosen at the edge of what was tried, so that the best may lie beyond: {'; '.join(edge)}."
    return text


def made(content: Mapping[str, Any], found: Results, page_by: str) -> Section:
    """What the runs were made with, the study file, and the command that wrote the page."""
    hours = sum(r.seconds for r in found.runs) / 3600
    packages = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    if content.get("commit"):
        packages += f"; commit {content['commit']}"
    parts: list[Any] = [
        f"By `bandpo-lab study` with the file below, and {page_by}: {len(found.runs)} runs, {hours:.1f} hours in all, "
        f"with {packages}."
    ]
    if content["failed"]:
        parts.append(f"Failed and not counted: {'; '.join(content['failed'])}.")
    elif not content.get("unfinished"):
        parts.append("No run failed.")
    parts.append(Verbatim("The study file", content["study"]))
    return Section("How it was made", parts)
