"""The study of a pretrained model: its data, its table of predictions, and what the page says of both."""

from collections import Counter

from helpers.frameworks import needs

needs("trl")

from bandpo_lab.study.execute import read_results
from bandpo_lab.study.interval import signed, student
from bandpo_lab.study.plan import parse_study
from bandpo_lab.study.statistics import Results
from pages import ROOT
from studies.predictions import verdict
from studies.staleness_report import SMALLEST


def test_every_figure_of_the_page_is_the_data_s():
    """The committed report, and what the report on all rules says of it."""
    content = read_results(ROOT / "research" / "results" / "pretrained")
    runs, found = content["runs"], Results.from_file(content)
    plan = parse_study((ROOT / "research/studies/pretrained.yaml").read_text())
    planned = [(r.experiment, r.arm, r.seed) for r in plan.reported({})]
    assert [(r["experiment"], r["arm"], r["seed"]) for r in runs] == planned
    report = (ROOT / "research/reports/pretrained/report.md").read_text()
    verdicts = Counter()
    for arm in list(plan.arms)[1:]:
        for metric in ("AUC", "mean entropy", "pass@8"):
            # Pairs of runs with equal rate and seed.
            apart = [
                gap for e in plan.experiments for gap in found.paired_differences(e, arm, metric).values()
            ]
            assert len(apart) == 4
            assert arm != "Band" or metric != "AUC" or min(apart) > 0
            expected, gap = verdict(student(apart), "equal", SMALLEST), signed(student(apart))
            verdicts[expected] += 1
            assert f"| {arm} | {metric} | {gap} | {expected} |" in report
    assert verdicts == {"held": 6, "undecided": 3}
    assert len(runs) == 16
    said = " ".join((ROOT / "research/reports/rules-compared.md").read_text().split())
    assert "Of nine predictions six held, three are undecided" in said
    apart = [gap for e in plan.experiments for gap in found.paired_differences(e, "Band", "AUC").values()]
    assert f"Band adds {signed(student(apart))} to its AUC" in said
