"""The report of a study: its settings and rules, its results, and the provenance of its runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bandpo_lab.output.page import Page, Picture, Section, Verbatim
from bandpo_lab.output.style import line_styles
from bandpo_lab.output.tables import Table
from bandpo_lab.study import figures
from bandpo_lab.study.collect import RunResult
from bandpo_lab.study.interval import signed
from bandpo_lab.study.plan import Experiment, Study, options_text
from bandpo_lab.study.statistics import ArmDifference, Results
from bandpo_lab.study.tables import (
    clip_table,
    differences_table,
    glance_table,
    mean_of,
    scores_table,
    tuning_table,
)


def study_page(content: Mapping[str, Any]) -> Page:
    """Return the whole report of a study.

    Args:
        content: The content of the study's ``results.json``. If it is ``unfinished``, the report says so.
    """
    results = Results.from_file(content)
    study = results.study
    primary_differences = results.differences(study.primary)
    auc_differences = results.differences("AUC")
    experiments = study.experiments.values()

    lead = [study.question]
    if content.get("unfinished"):
        lead.append(f"This study has not ended: {len(results.runs)} runs have so far.")
    lead += [
        f"{experiment.name}: {sentence(results, experiment, primary_differences)}"
        for experiment in experiments
    ]
    glance_tables = [glance_table(results, study.primary, primary_differences)]
    if study.primary != "AUC":
        glance_tables.append(glance_table(results, "AUC", auc_differences))
    sections = [_terms(study, len(primary_differences)), Section("At a glance", glance_tables)]
    for experiment in experiments:
        differences = differences_table(results, experiment, primary_differences, auc_differences)
        sections.append(_experiment(results, experiment, primary_differences, differences))
    sections.append(provenance(content, results, "`bandpo-lab study page`"))
    return Page(study.title, lead, sections)


def sentence(results: Results, experiment: Experiment, differences: Sequence[ArmDifference]) -> str:
    """Return a few sentences on an experiment: the differences that can be claimed, and those that cannot."""
    study = results.study
    differences = [d for d in differences if d.experiment == experiment.name]
    if not any(run.experiment == experiment.name and run.tuning is None for run in results.runs):
        return "no run has ended."
    baseline = results.runs_of(experiment.name, study.baseline)
    if not baseline:
        return f"{study.baseline} has no run to compare with."
    text = f"{study.baseline} ends at {study.primary} {mean_of(baseline, study.primary):.3f}."
    claimed = [f"{d.arm} {signed(d.interval)}" for d in differences if d.claimed]
    if claimed:
        text += f" Different from it: {'; '.join(claimed)}."
    unclaimed = [d for d in differences if not d.claimed]
    if unclaimed:
        low = min(d.interval.low for d in unclaimed)
        high = max(d.interval.high for d in unclaimed)
        text += (
            f" Left open, shown neither to differ nor to tie: {'; '.join(d.arm for d in unclaimed)}. Their intervals, "
            f"not corrected for the number of comparisons, reach from {low:+.3f} to {high:+.3f}."
        )
    return text


def _terms(study: Study, comparisons: int) -> Section:
    """Return the section on the settings and the rules of a study."""
    rows = []
    for experiment in study.experiments.values():
        tuning = "–"
        if experiment.tune:
            grid = "; ".join(
                f"{name} {', '.join(map(str, values))}" for name, values in experiment.tune.options.items()
            )
            tuning = f"{grid}, on seeds {', '.join(map(str, experiment.tune.seeds))}"
        elif experiment.tuned_in:
            tuning = f"as in {experiment.tuned_in}"
        seeds = ", ".join(map(str, experiment.seeds))
        rows.append([experiment.name, seeds, str(len(study.arms_of(experiment))), tuning])
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
    results: Results,
    experiment: Experiment,
    primary_differences: Sequence[ArmDifference],
    differences: Table,
) -> Section:
    """Return the section on an experiment."""
    study = results.study
    arms: dict[str, list[RunResult]] = {}
    for arm in study.arms_of(experiment):
        runs = results.runs_of(experiment.name, arm)
        if runs:
            arms[arm] = runs
    if not arms:
        return Section(experiment.name, [experiment.question, "No run of this experiment ended."])
    summary = sentence(results, experiment, primary_differences)
    content: list[Any] = [experiment.question, summary[0].upper() + summary[1:]]
    if experiment.tune or experiment.tuned_in:
        content.append(_tuned_values(results, experiment))
    styles = line_styles(study.arms)
    slug = experiment.name.replace(" ", "-")
    metrics = list(dict.fromkeys((study.primary, "AUC", "mean entropy")))
    content += [
        scores_table(results, experiment),
        differences,
        Picture(
            f"{slug}-seeds",
            figures.seeds(arms, metrics, styles),
            "A dot for every seed; above the dots their mean, with its 95 % bootstrap interval.",
        ),
        Picture(
            f"{slug}-curves",
            figures.curves(arms, styles),
            "Mean over seeds of every batch, with its 95 % bootstrap interval.",
        ),
        clip_table(arms),
        Picture(
            f"{slug}-bins",
            figures.clipped_by_probability(arms, styles),
            "Share of positive-advantage tokens whose gradient the rule dropped, by their old probability. The "
            "95 % intervals come from drawing seeds anew, and are at least Wilson's for the number of tokens. An arm "
            "without such tokens has no mark.",
        ),
    ]
    if experiment.tune:
        content.append(tuning_table(results, experiment))
    return Section(experiment.name, content)


def _tuned_values(results: Results, experiment: Experiment) -> str:
    """Return sentences on the tuned values of each arm, with warnings if they differ or lie at the edge of the grid."""
    source = results.study.experiments[experiment.tuned_in or experiment.name]
    assert source.tune is not None
    arms_by_values: dict[str, list[str]] = {}
    arms_at_edge: list[str] = []
    for arm in results.study.arms_of(experiment):
        values = results.tuned_values[source.name, arm]
        arms_by_values.setdefault(options_text(values), []).append(arm)
        if any(values[name] in (grid[0], grid[-1]) for name, grid in source.tune.options.items()):
            arms_at_edge.append(arm)
    text = " ".join(f"At {values}: {'; '.join(arms)}." for values, arms in arms_by_values.items())
    if len(arms_by_values) > 1:
        text += " A difference between arms at unequal values is one of rule and values together."
    if arms_at_edge:
        text += f" Chosen at the edge of what was tried, so that the best may lie beyond: {'; '.join(arms_at_edge)}."
    return text


def provenance(content: Mapping[str, Any], results: Results, command: str) -> Section:
    """Return the section on the provenance of the runs, with the study file.

    Args:
        content: The content of the study's ``results.json``.
        results: The results in it.
        command: The command that writes the page.
    """
    hours = sum(run.seconds for run in results.runs) / 3600
    packages = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    if content.get("commit"):
        packages += f"; commit {content['commit']}"
    section: list[Any] = [
        f"By `bandpo-lab study` with the file below, and {command}: {len(results.runs)} runs, {hours:.1f} hours in "
        f"all, with {packages}."
    ]
    if content["failed"]:
        section.append(f"Failed and not counted: {'; '.join(content['failed'])}.")
    elif not content.get("unfinished"):
        section.append("No run failed.")
    section.append(Verbatim("The study file", content["study"]))
    return Section("How it was made", section)
