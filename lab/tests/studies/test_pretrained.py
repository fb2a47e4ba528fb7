"""The study of a pretrained model: its data, its table of predictions, and what the page says of both."""

from collections import Counter

import numpy as np
import pytest

pytest.importorskip("trl")
from bandpo_lab.study.execute import read_results
from bandpo_lab.study.plan import parse_study
from bandpo_lab.study.statistics import Results, student
from bandpo_lab.study.tables import signed
from pages import ROOT
from studies.staleness_report import verdict


def test_every_figure_of_the_page_is_the_data_s():
    """The table of docs/when.md, its counts and means, and the committed report."""
    content = read_results(ROOT / "results" / "pretrained")
    runs, found = content["runs"], Results.from_file(content)
    plan = parse_study((ROOT / "studies" / "pretrained.yaml").read_text())
    planned = [(r.experiment, r.arm, r.seed) for r in plan.reported({})]
    assert [(r["experiment"], r["arm"], r["seed"]) for r in runs] == planned
    said = (ROOT / "docs" / "when.md").read_text()
    said = said[said.index("## What a pretrained model says") : said.index("## What to set")]
    report = (ROOT / "results" / "pretrained" / "report.md").read_text()
    verdicts = Counter()
    for arm in list(plan.arms)[1:]:
        cells = []
        for metric in ("AUC", "mean entropy", "pass@8"):
            # Pairs of runs with equal rate and seed.
            apart = [gap for e in plan.experiments for gap in found.gaps(e, arm, "clip 0.2", metric).values()]
            assert len(apart) == 4
            assert arm != "Band" or metric != "AUC" or min(apart) > 0
            expected, gap = verdict(student(apart), "equal"), signed(student(apart))
            verdicts[expected] += 1
            assert f"| {arm} | {metric} | {gap} | {expected} |" in report
            cells.append(gap if expected == "held" else f"{expected}: {gap}")
        assert f"| {arm} | {' | '.join(cells)} |" in said
    assert verdicts == {"held": 6, "undecided": 3}
    said = " ".join(said.split())
    assert len(runs) == 16
    assert "16 runs" in said
    assert "Six of nine predictions held, and three were left undecided" in said

    rewards = np.array([run["curves"]["reward"] for run in runs])
    first, last = rewards[:, :4].mean(), rewards[:, -4:].mean()
    before, after = (np.mean([run[when]["pass@8"] for run in runs]) for when in ("before", "after"))
    assert f"rises from {first:.2f} in the first four to {last:.2f} in the last four" in said
    assert f"pass@8 falls from {before:.2f} to {after:.2f}" in said
    rare = np.mean([run["curves"]["rare_wins"] for run in runs])
    assert f"are {100 * rare:.1f} % of all tokens" in said
