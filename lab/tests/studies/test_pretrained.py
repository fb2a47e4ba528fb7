"""The analysis of the study of a pretrained model, on made-up runs, and what its page says of the real ones."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("trl")
from bandpo_lab.study.collect import CURVES
from bandpo_lab.study.execute import read_results
from bandpo_lab.study.plan import parse_study
from bandpo_lab.study.statistics import Results
from studies.pretrained import METRICS, pairs, pretrained_page, whole_seeds

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "studies" / "pretrained.yaml").read_text()
STUDY = parse_study(TEXT)


def results(runs, gain):
    """Of the first ``runs`` runs: Band above gains so much AUC, in seed 1 and at the higher rate 0.01 more of each."""
    ended = []
    for run in STUDY.reported({})[:runs]:
        rate = STUDY.experiments[run.experiment].point["learning_rate"]
        reward = 0.2 + (run.arm == "Band above, clip below") * (gain + 0.01 * run.seed + 0.01 * (rate > 2e-6))
        reward += (run.arm == "Band") * 0.001 * run.seed
        curves = {name: [reward if name == "reward" else 0.5] * 16 for name in CURVES}
        ended.append({
            "experiment": run.experiment, "arm": run.arm, "seed": run.seed, "tuning": None, "seconds": 1.0,
            "before": {"pass@8": 0.3}, "after": {"pass@8": 0.5}, "curves": curves, "by_bin": {"above_0.1": (10.0, 0.1)},
        })  # fmt: skip
    return {"study": TEXT, "runs": ended, "versions": {"torch": "2"}, "commit": "abc", "failed": []}


def gaps_of(results, arm, metric):
    return pairs(Results.from_file(whole_seeds(results)), arm, metric)


def test_sixteen_runs_are_planned_seed_by_seed():
    assert [run.seed for run in STUDY.reported({})] == [0] * 8 + [1] * 8


def test_a_seed_is_looked_at_once_all_of_its_runs_have_ended():
    assert len(whole_seeds(results(11, 0.1))["runs"]) == 8
    assert gaps_of(results(11, 0.1), "Band above, clip below", "AUC") == pytest.approx([0.1, 0.11])


def test_an_arm_is_compared_at_equal_rate_and_seed():
    whole = results(16, 0.1)
    assert gaps_of(whole, "Band above, clip below", "AUC") == pytest.approx([0.1, 0.11, 0.11, 0.12])
    assert gaps_of(whole, "Band", "pass@8") == [0.0] * 4


def test_the_page_begins_with_the_predictions():
    page = pretrained_page(results(16, 0.1))
    assert page.lead[1] == "Of its 9 predictions: 7 undecided, 1 held, 1 failed."
    [table] = page.sections[0].content[1:]
    said = {(row[0], row[1]): row[2:] for row in table.rows}
    # Four pairs 0.1, 0.11, 0.11, 0.12: standard deviation 0.00816, Student's 3.182 over 2.
    assert said["Band above, clip below", "AUC"] == ["+0.110 [+0.097, +0.123]", "failed"]
    assert said["Band", "AUC"][1] == "held"
    assert said["Clip-Higher", "AUC"] == ["+0.000 [+0.000, +0.000]", "undecided"]  # no spread, no interval
    assert len(said) == 9


def test_a_page_of_no_whole_seed_says_so():
    assert pretrained_page(results(5, 0.1)).lead[1] == "No two runs can be compared yet."


def test_every_figure_of_the_page_is_the_data_s():
    """The table of docs/when.md, its counts and means, and the committed report."""
    found = read_results(ROOT / "results" / "pretrained")
    runs, page = found["runs"], pretrained_page(found)
    said = (ROOT / "docs" / "when.md").read_text()
    said = said[said.index("## What a pretrained model says") : said.index("## What to set")]
    [table] = page.sections[0].content[1:]
    cells = {
        (arm, metric): f"{verdict}: {gap}" if verdict != "held" else gap
        for arm, metric, gap, verdict in table.rows
    }
    for arm in list(STUDY.arms)[1:]:
        assert "| " + " | ".join([arm, *(cells[arm, metric] for metric in METRICS)]) + " |" in said
    assert Counter(row[-1] for row in table.rows) == {"held": 6, "undecided": 3}
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
    gaps_of_band = gaps_of(found, "Band", "AUC")
    assert len(gaps_of_band) == 4
    assert min(gaps_of_band) > 0
    report = (ROOT / "results" / "pretrained" / "report.md").read_text()
    assert all("| " + " | ".join(row) + " |" in report for row in table.rows)
