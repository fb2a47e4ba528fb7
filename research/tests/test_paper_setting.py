"""The program of the paper's setting: its terms, its metrics by hand, and its report on made-up rows."""

import argparse
import gzip
import math

import pytest

from bandpo.core.text import as_method
from bandpo_lab.fast_loop import Run, Settings
from pages import ROOT
from studies import paper_setting
from studies.gate import CELLS as GATE
from studies.paper_setting import (
    ARMS,
    CELLS,
    CLIP,
    NETWORK,
    Cell,
    Key,
    Rows,
    at_level,
    best_rates_table,
    count_lines,
    is_broken,
    page,
    read_part,
    read_rows,
    regimes_table,
    row_of,
    rows_by_cell,
    settings_of,
    simulated_power,
)
from studies.predictions import read_predictions

RESULTS = ROOT / "research/results/paper-setting"


def made(evaluated, entropy=0.5):
    """A run with the held-out reward of every tenth batch, and pass@32 four times as high."""
    log = []
    for batch in range(1, 10 * len(evaluated) + 1):
        line = {"step": batch, "reward": 0.1, "entropy": entropy - 0.001 * batch}
        if batch % 10 == 0:
            reward = evaluated[batch // 10 - 1]
            line |= {"eval/pass@1": reward, "eval/pass@32": 4 * reward}
        log.append(line)
    settings = Settings("GRPO()", batches=len(log), lag=0)
    return Run(settings, log, {"pass@1": evaluated[-1], "pass@8": 0.5, "pass@32": 0.5, "seconds": 1.0})


def number_of_lines(file):
    return len(gzip.decompress(file.read_bytes()).splitlines())


def made_row(score, entropy=0.4):
    """The row of a run with the same reward in every batch."""
    return {
        "AUC": score,
        "entropy": entropy,
        "pass@32": None,
        "end": 2 * score,
        "blocked": 0.2,
        "curves": {"reward": [score] * 20, "eval": [[10, score, 0.5], [20, score, 0.5]]},
    }


def test_the_moment_of_equal_reward_is_interpolated():
    # From 0.06 at batch 20 to 0.10 at 30, the level 0.09 is three quarters of the way. The mean of five batches is the
    # entropy two batches before.
    moment = at_level(made([0.05, 0.06, 0.10, 0.12]), 0.09)
    assert moment["entropy"] == pytest.approx(0.5 - 0.001 * (18 + 0.75 * 10), abs=1e-4)
    assert moment["pass@32"] == pytest.approx(0.36)
    assert at_level(made([0.05, 0.06]), 0.09) == {"entropy": None, "pass@32": None}
    assert at_level(made([0.09, 0.2]), 0.09)["pass@32"] == pytest.approx(0.36)


def test_the_terms_have_no_seed_of_the_gate_and_every_prediction_has_a_cell():
    gate_seeds = {cell.first_seed + seed for cell in GATE for seed in range(cell.seeds)}
    keys = [key for _, key in NETWORK.runs()]
    assert len(set(keys)) == len(keys)
    assert not gate_seeds & {key.seed for key in keys}
    for text in ARMS.values():
        as_method(text)
    worlds = {f"{cell.name} at {rate:g}" for cell in CELLS for rate in cell.rates}
    predictions = read_predictions(paper_setting.PREDICTIONS)
    for prediction in predictions:
        assert prediction.world in worlds
        assert {prediction.arm, prediction.minus} <= set(ARMS)
        assert prediction.metric in paper_setting.SMALLEST
    text = paper_setting.PREDICTIONS.read_text()
    hours = sum(len(cell.seeds) * len(cell.rates) * len(ARMS) * cell.seconds for cell in CELLS) / 3600
    assert f"{len(keys)} runs, {hours:.0f} core-hours" in text


def test_power_is_that_of_the_formula():
    # Half of the studies find a difference whose t statistic has the critical value as its median, about.
    power = simulated_power(0.01 * math.sqrt(12) / 2.2, 12, 0.01)
    assert 0.4 < power.greater < 0.6
    assert power.twice > 0.95


def test_the_report_on_made_up_rows():
    rows = {}
    for cell, key in NETWORK.runs():
        if cell.name != "fresh":
            continue
        gain = 0.02 if key.arm == "no bound" else 0.0
        score = 0.1 + gain + 0.001 * (key.seed % 5) - abs(math.log(key.rate / 5e-5)) * 0.01
        rows[key] = made_row(score, 0.4 - gain)
    text = page(rows)
    assert "12 of 12 seeds have all runs" in text
    assert "| no bound | 5e-05 | 0.1218 | +0.020 [+0.020, +0.020] |" in text
    assert "| 0.244 | +0.040 [+0.040, +0.040] |" in text
    assert "| no bound | 0.1148, 20%, 0 | 0.1218, 20%, 0 | 0.1148, 20%, 0 |" in text
    assert (
        "| fresh at 0.0001 | no bound minus clip 0.2, AUC | less | +0.020 [+0.020, +0.020] | failed |" in text
    )
    assert (
        "| fresh at 0.0001 | Clip-Higher minus clip 0.2, entropy | equal | +0.000 [+0.000, +0.000] | held |"
        in text
    )
    assert "| lag 4 at 5e-05 | no bound minus clip 0.2, AUC | greater | not run | open |" in text
    assert count_lines(rows)[0] == "fresh: 252 of 252 runs, 0.0 core-hours left"
    edge = Cell("fresh", 0, 1, [5e-5, 1e-4], 10, 1.0, range(300, 312))
    curve = Rows(edge, rows).curve([CLIP])
    assert curve.at_edge
    assert not Rows(CELLS[0], rows).curve([CLIP]).at_edge


def test_a_rate_at_the_edge_is_not_called_the_best():
    cell = Cell("fresh", 0, 1, [1e-4, 2e-4, 4e-4], 20, 1.0, range(200, 206))
    best = dict.fromkeys(ARMS, 2e-4) | {CLIP: 4e-4, "BandPO": 1e-4}
    rows = {}
    for arm in ARMS:
        for rate in cell.rates:
            for seed in cell.seeds:
                rows[Key("fresh", arm, rate, seed)] = made_row(0.2 if rate == best[arm] else 0.1)
    by_rule = {cells[0]: cells for cells in best_rates_table(Rows(cell, rows)).rows}
    assert by_rule[CLIP][1:3] == ["–", "0.2000 at the edge, 0.0004"]
    assert by_rule["BandPO"][1:3] == ["–", "0.2000 at the edge, 0.0001"]
    assert by_rule["no bound"][1:3] == ["0.0002", "0.2000"]


def test_the_table_of_regimes_says_which_rate_is_at_an_edge():
    arms = (CLIP, "BandPO", "no bound")
    cell = Cell("fresh", 0, 1, [1e-4, 2e-4, 4e-4], 20, 1.0, range(200, 206), arms, compared_at=2e-4)
    rows = {}
    for arm in cell.arms:
        for rate in cell.rates:
            for seed in cell.seeds:
                best = 4e-4 if arm == "no bound" else 2e-4
                score = (0.15 if arm == "no bound" else 0.1) - 0.01 * (rate != best)
                rows[Key("fresh", arm, rate, seed)] = made_row(score, 0.3 if arm == "BandPO" else 0.4)
    made_rows = Rows(cell, rows)
    assert regimes_table([made_rows]).rows == [
        ["fresh", "BandPO", "+0.000 [+0.000, +0.000]", "-0.100 [-0.100, -0.100]", "–"],
        ["fresh", "no bound", "+0.050 [+0.050, +0.050] (edge: no bound)", "+0.000 [+0.000, +0.000]", "–"],
    ]


@pytest.mark.parametrize(
    ("rewards", "broken"),
    [
        ([0.2, 0.2], False),
        ([0.1, 0.2, 0.11], False),
        ([0.1, 0.2, 0.1], True),
        ([0.1, 0.2, 0.1, 0.3], True),  # it recovered
        ([0.2], False),
    ],
)
def test_a_run_is_broken_if_its_held_out_reward_fell_by_half(rewards, broken):
    evaluations = [[20 * index, reward, 0.5] for index, reward in enumerate(rewards)]
    assert is_broken({"curves": {"eval": evaluations}}) is broken


def test_a_row_is_made_of_a_run():
    key = Key("fresh", CLIP, 1e-4, 200)
    settings = settings_of(CELLS[0], key)
    assert (settings.task, settings.lag, settings.seed, settings.rate) == ("mental", 0, 200, 1e-4)
    row = row_of(key, made([0.05, 0.10]))
    assert row["AUC"] == pytest.approx(0.1)
    assert row["curves"]["eval"] == [[10, 0.05, 0.2], [20, 0.10, 0.4]]


def test_the_seeds_are_parted_without_one_left_out_or_twice():
    assert [read_part(text) for text in ("0/1", "0/2", "1/2")] == [(0, 1), (0, 2), (1, 2)]
    for text in ("2/2", "-1/2", "1", "a/b"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"{text}: choose K/N"):
            read_part(text)


def test_the_first_grid_was_wrong_as_its_page_says():
    file = RESULTS / "first-grid.jsonl.gz"
    by_run = read_rows(file)
    assert len(by_run) == number_of_lines(file) == 154
    assert not {key.seed for key in by_run} & {key.seed for _, key in NETWORK.runs()}
    cell = Cell("fresh", 0, 1, [1e-4, 2e-4, 4e-4, 8e-4], 160, 40.0, range(200, 204))
    finished = Rows(cell, by_run)
    assert finished.finished_seeds() == [200, 201, 202, 203]
    for arm in ARMS:
        assert finished.curve([arm]).best == 0
        for rate in (4e-4, 8e-4):
            assert all(by_run[Key("fresh", arm, rate, seed)]["end"] < 0.002 for seed in cell.seeds)
    ends = [run["end"] for key, run in by_run.items() if key.rate == 2e-4 and key.seed in cell.seeds]
    assert (sum(end < 0.055 for end in ends), len(ends)) == (17, 28)
    pages = (
        "research/README.md",
        "research/reports/README.md",
        "research/studies/paper-setting-first-predictions.md",
    )
    for page_name in pages:
        assert "154" in (ROOT / page_name).read_text(encoding="utf-8")


def test_the_committed_rows_are_runs_of_the_study_and_the_report_is_theirs():
    file = RESULTS / "rows.jsonl.gz"
    rows = read_rows(file)
    of_study = [key for _, key in NETWORK.runs()]
    assert len(rows) == number_of_lines(file)  # no run is there twice
    assert set(rows) <= set(of_study)
    assert all(row["commit"] and row["machine"] and row["seconds"] > 0 for row in rows.values())
    report = ROOT / "research/reports/paper-setting/report.md"
    assert report.read_text(encoding="utf-8") == page(rows)
    for page_name in ("research/README.md", "research/reports/README.md"):
        text = " ".join((ROOT / page_name).read_text(encoding="utf-8").split())
        assert f"{len(rows)} of {len(of_study)} runs" in text


def test_the_page_says_what_the_first_seeds_have():
    """Until all seeds are there; then the page has a table of the regimes."""
    fresh = rows_by_cell(read_rows(RESULTS / "rows.jsonl.gz"))["fresh"]
    text = " ".join((ROOT / "docs/when.md").read_text(encoding="utf-8").split())
    assert (
        f"In {len(fresh.finished_seeds())} of {len(fresh.cell.seeds)} seeds BandPO minus clip 0.2 is" in text
    )
    for rate in (5e-5, 1e-4):
        gap = fresh.difference("BandPO", CLIP, "AUC", rate)
        assert "{:+.3f} [{:+.3f}, {:+.3f}]".format(*gap) in text
    assert {fresh.cell.rates[fresh.curve([arm]).best] for arm in ARMS} == {5e-5}
