"""The demo: its sentences follow from intervals, and the command without methods prints them."""

import math

import pytest
from typer.testing import CliRunner

from bandpo_lab.cli.app import app
from bandpo_lab.toy import demo
from bandpo_lab.toy.comparison import Outcomes

CLIP, HIGHER, BAND, HIGH = demo.OTHERS
NOISE = (0.001, -0.001, 0.002, -0.002, 0.001, -0.001, 0.0, 0.0)


def outcomes(**levels):
    """Outcomes of eight seeds in which each metric of a method has the level of its name, with a little noise."""
    metrics = {}
    for index, method in enumerate(demo.METHODS):
        runs = []
        for seed in range(8):
            noise = NOISE[(seed + index) % 8]
            runs.append({name: values[method] + noise for name, values in levels.items()})
        metrics[method] = runs
    return Outcomes(CLIP, metrics)


def level(above, clip, higher, high, band):
    return {demo.RECOMMENDED: above, CLIP: clip, HIGHER: higher, HIGH: high, BAND: band}


def test_a_sentence_names_a_method_only_on_the_side_that_its_interval_supports():
    reward, batches, entropy, end = demo.conclusions(
        outcomes(
            reward=level(0.5, 0.4, 0.45, 0.505, 0.51),
            batches=level(30.0, 40.0, 35.0, 30.0, 30.0),
            entropy=level(0.1, 0.2, 0.15, 0.1, 0.05),
            end=level(0.8, 0.8, 0.9, 0.8, 0.8),
        )
    )
    assert reward == (
        f"The mean reward over the run is higher under BandAbove() than under {CLIP} and {HIGHER}; "
        f"it is lower under BandAbove() than under {BAND} and {HIGH}."
    )
    lower = f"lower under BandAbove() than under {CLIP} and {HIGHER}; it is not distinguished from that under"
    assert f"{lower} {BAND} and {HIGH}." in batches
    assert f"higher under BandAbove() than under {BAND}; it is {lower} {HIGH}." in entropy
    near = f"it is within 0.02 of that under {CLIP}, {BAND} and {HIGH}."
    assert f"lower under BandAbove() than under {HIGHER}; {near}" in end


def test_a_level_that_a_seed_never_reached_leaves_no_difference():
    same = level(0.5, 0.5, 0.5, 0.5, 0.5)
    never = outcomes(reward=same, batches=same, entropy=same, end=same)
    never.metrics[CLIP][3]["batches"] = math.nan
    row = demo.differences(never)[0]
    assert [cell.text for cell in row][1] == "–"
    assert row[1].conclusion == "not distinguished"


def test_wide_intervals_are_called_neither_equal_nor_different():
    same = level(0.5, 0.5, 0.5, 0.5, 0.5)
    values = outcomes(reward=same, batches=same, entropy=same, end=same)
    for seed, run in enumerate(values.metrics[demo.RECOMMENDED]):
        run["reward"] += 0.1 * (-1) ** seed
    (reward, *_) = demo.conclusions(values)
    assert reward == (
        f"The mean reward over the run is not distinguished from that under {CLIP}, {HIGHER}, {BAND} and {HIGH}."
    )


def test_the_package_has_eight_seeds_of_each_method_on_old_and_on_fresh_data():
    found = demo.eight_seeds()
    assert [*found] == [*demo.LAGS]
    for lag_outcomes in found.values():
        assert [*lag_outcomes.metrics] == [*demo.METHODS]
        assert {len(runs) for runs in lag_outcomes.metrics.values()} == {demo.SEEDS}


def test_the_report_has_each_difference_and_each_sentence():
    report = demo.report()
    for lag, lag_outcomes in demo.eight_seeds().items():
        assert f"8 seeds, {demo.data_age(lag)}" in report
        for row in demo.differences(lag_outcomes):
            for cell in row:
                assert cell.text in report
        for sentence in demo.conclusions(lag_outcomes):
            assert f"- {sentence}\n" in report + "\n"
    assert (
        "over 8 seeds, with 95 % intervals adjusted for 4 comparisons (Bonferroni), at one learning rate (0.0002)"
        in report
    )


@pytest.mark.slow
def test_the_command_without_methods_is_the_demo(tmp_path):
    words = ["compare", "--task", "random", "--batches", "3", "--lag", "1", "--workers", "1"]
    result = CliRunner().invoke(app, [*words, "--output-dir", str(tmp_path)])
    assert result.exit_code == 0, result.output
    for method in demo.METHODS:
        assert f"{method}, seed 0: batch 3 of 3" in result.output
    assert demo.report() in result.output
    assert "One seed:" in result.output
