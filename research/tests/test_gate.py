"""The gate of the testbeds: its grid, its rows by hand, and its committed report."""

import json
import re

import pytest

from bandpo import FixedClip
from pages import ROOT
from reports import check_same_report
from studies import gate
from studies.bandits import random_rewards, simulate
from studies.gate import CELLS, CLIP, Cell, Key, all_keys, finished_keys, keys, page, read_settings, run
from studies.predictions import read_predictions

ROWS = ROOT / "research/results/gate/rows.jsonl"
REPORT = ROOT / "research/reports/gate/report.md"


def made(file, cell, by_arm, reward=0.5, blocked=0.2):
    """Write rows with given entropies by rule and seed."""
    with file.open("a") as lines:
        for arm, entropies in by_arm.items():
            key = Key(cell.name, arm, cell.rates[0], cell.first_seed)
            rewards = [
                reward + (0.1 if arm == "no bound" else 0.0) + 0.001 * k for k in range(len(entropies))
            ]
            values = {"entropy": entropies, "reward": rewards, "blocked": [blocked] * len(entropies)}
            lines.write(json.dumps({**key._asdict(), **values}) + "\n")


def test_cells_are_unique_and_no_seed_of_the_gate_is_a_pilot_s():
    assert len({cell.name for cell in CELLS}) == len(CELLS)
    every = [key for _, key in all_keys()]
    assert len(set(every)) == len(every)
    pilots = {key.first_seed for cell, key in all_keys() if cell.pilot}
    assert not pilots & {key.first_seed for cell, key in all_keys() if not cell.pilot}
    names = {f"{cell.name} at {rate:g}" for cell in CELLS for rate in cell.rates}
    assert {prediction.world for prediction in read_predictions(gate.PREDICTIONS)} <= names


def test_a_row_of_tables_is_the_simulation_at_its_rate():
    cell = Cell("x", "tables", "random", 1, 1, [0.05, 0.1], seeds=3, answers=32, batches=10)
    rows = list(run(cell, keys(cell)[0]))
    assert [row["rate"] for row in rows] == [0.05, 0.1]
    world = random_rewards(decisions=4, answers=20)
    sizes = {"seeds": 3, "samples": 32, "epochs": 1, "batches": 10, "lag": 1, "first_seed": cell.first_seed}
    outcome = simulate(world, FixedClip(0.2), [0.1], **sizes)
    assert rows[1]["entropy"] == pytest.approx(outcome.entropy[0, :, -1].tolist(), abs=1e-4)
    assert rows[1]["reward"] == pytest.approx(outcome.rewards[0].mean(-1).tolist(), abs=1e-4)
    other = simulate(world, FixedClip(0.2), [0.1], **sizes | {"first_seed": 0})
    assert other.rewards.tolist() != outcome.rewards.tolist()


def test_a_row_of_the_network_has_the_metrics_of_its_log():
    cell = Cell("x", "network", "random", 0, 1, [1e-4], seeds=2, answers=32, batches=3)
    assert [key.first_seed for key in keys(cell)] == [1001] * 6 + [1002] * 6
    [row] = run(cell, keys(cell)[0])
    assert all(len(row[metric]) == 1 for metric in gate.METRICS)
    assert 0 < row["entropy"][0] < 2
    assert 0 <= row["blocked"][0] <= 1


def test_the_gate_is_open_where_both_effects_are_sure(tmp_path):
    file = tmp_path / "rows.jsonl"
    cell = next(cell for cell in CELLS if cell.name == "random, 4 x 4")
    base = [1.0, 1.1, 0.9, 1.0]
    more = [x + gap for x, gap in zip(base, (0.1, 0.12, 0.08, 0.1), strict=True)]
    made(file, cell, {CLIP: base, "Clip-Higher": more, "no bound": base})
    [setting] = read_settings(file)
    assert setting.blocked == pytest.approx(0.2)
    assert setting.difference("Clip-Higher", CLIP, "entropy") == pytest.approx((0.1, 0.074, 0.126), abs=1e-3)
    assert (setting.keeps_entropy, setting.bound_matters) == (True, True)
    # As many seeds with both signs are not sure.
    mixed = tmp_path / "mixed.jsonl"
    made(mixed, cell, {CLIP: base, "Clip-Higher": [1.2, 0.9, 1.1, 0.8], "no bound": base})
    assert not read_settings(mixed)[0].keeps_entropy
    text = page(file)
    assert "**1 of 1 settings show both effects**" in text
    assert "| random, 4 x 4 | 0.006 | 4 | 20% | 1.00 | +0.100 [+0.074, +0.126] |" in text


def test_the_committed_report_is_that_of_the_rows():
    check_same_report(REPORT.read_text(), page(ROWS))
    planned = {key for _, key in all_keys()}
    assert finished_keys(ROWS) <= planned
    open_settings = re.search(r"\*\*(\d+) of (\d+) settings show both effects\*\*", REPORT.read_text())
    assert int(open_settings[1]) > 0


def test_the_counts_of_the_page_are_those_of_the_rows():
    settings = [setting for setting in read_settings(ROWS) if not setting.cell.pilot]
    reused = [
        s for s in settings if s.cell.testbed == "tables" and s.cell.task == "random" and s.cell.epochs > 1
    ]
    mild = [s for s in reused if 0.02 <= s.blocked < 0.5]
    strong = [s for s in reused if s.blocked >= 0.5]
    less = [s for s in strong if s.difference("Clip-Higher", CLIP, "entropy").high < 0]
    page_text = " ".join((ROOT / "research/reports/README.md").read_text().split())
    assert f"in [{sum(s.keeps_entropy for s in mild)} of {len(mild)} settings]" in page_text
    assert f"surely ended with less in {len(less)} of {len(strong)}." in page_text
    right = [s for s in settings if s.cell.testbed == "tables" and s.cell.task == "true"]
    assert not any(s.keeps_entropy for s in right)
