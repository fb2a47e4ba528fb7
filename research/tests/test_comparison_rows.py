"""The rows of eight seeds of the demo, the file that bandpo-lab has of them, and the differences that pages name."""

from statistics import fmean

import numpy as np
import pytest
from scipy import stats

from bandpo_lab.toy import demo
from pages import ROOT
from studies.demo_seeds import demo_file, read_rows

ROWS = read_rows()
CLIP, HIGHER, BAND, HIGH = demo.OTHERS


def mean_rewards(lag):
    """The mean reward over all batches, by method and seed."""
    return {(row["method"], row["seed"]): fmean(row["curves"]["reward"]) for row in ROWS if row["lag"] == lag}


def interval(gaps):
    """Student's interval of 95 % for four comparisons, by scipy alone."""
    half = stats.t.ppf(1 - 0.05 / 4 / 2, len(gaps) - 1) * np.std(gaps, ddof=1) / len(gaps) ** 0.5
    return np.mean(gaps), np.mean(gaps) - half, np.mean(gaps) + half


def test_each_method_has_eight_seeds_for_each_age_of_the_data():
    runs = sorted((row["lag"], row["method"], row["seed"]) for row in ROWS)
    assert runs == sorted(
        (lag, method, seed) for lag in demo.LAGS for method in demo.METHODS for seed in range(8)
    )


def test_the_demos_file_is_that_of_the_rows():
    assert demo.FILE.read_text() == demo_file(ROWS)


@pytest.mark.parametrize("lag", demo.LAGS)
def test_the_differences_of_the_demo_are_those_of_the_rows(lag):
    means = mean_rewards(lag)
    for row in demo.differences(demo.eight_seeds()[lag]):
        gaps = [means[demo.RECOMMENDED, seed] - means[row[0].other, seed] for seed in range(8)]
        assert row[0].interval == pytest.approx(interval(gaps), abs=2e-4)
        assert row[0].higher == sum(gap > 0 for gap in gaps)


def difference(lag, other, method=demo.RECOMMENDED):
    return demo.eight_seeds()[lag].difference(method, "reward", other)


def signed(value):
    return f"{value:+.3f}".replace("-", "−")


def in_one_line(name):
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def test_the_difference_that_the_changelog_names():
    value, low, high = difference(4, CLIP)
    said = f"+{value:.3f} [{low:.3f}, {high:.3f}], a 95 % interval adjusted for four comparisons"
    assert said in in_one_line("CHANGELOG.md")


def test_what_the_first_page_says_of_the_demo():
    text = in_one_line("README.md")
    value, low, high = difference(4, CLIP)
    assert low > 0
    assert (
        f"`BandAbove()` had {value:.3f} [{low:.3f}, {high:.3f}] more mean reward than clip 0.2 in `make demo`'s task"
        in text
    )
    value, low, high = difference(4, HIGH)
    assert low < 0 < high
    assert (
        f"did as well in the demo: the difference is {signed(value)} [{signed(low)}, {signed(high)}]" in text
    )
    assert "one learning rate, adjusted 95 % intervals." in text
    report = in_one_line("research/reports/by-kind-of-data.md")
    for other, end in ((CLIP, "over clip 0.2"), (HIGH, "over a clip of [0.8, 2]")):
        value, low, high = difference(4, other)
        assert f"{value:+.3f} [{low:+.3f}, {high:+.3f}] {end}" in report
    # The page writes the number of comparisons as a word.
    adjusted = demo.eight_seeds()[4].intervals.replace(" 4 ", " four ")
    assert f"over a clip of [0.8, 2], {adjusted}." in report
    for other in demo.OTHERS:
        _, low, high = difference(0, other)
        assert low < 0 < high
    value, low, high = difference(0, CLIP, BAND)
    assert high < 0
    lost = f"BandPO lost {-value:.3f} [{-high:.3f}, {-low:.3f}]"
    assert f"{lost} of mean reward" in in_one_line("research/reports/by-kind-of-data.md")
    entropies = {row[2].other: row[2] for row in demo.differences(demo.eight_seeds()[4])}
    conclusions = {other: entropy.conclusion for other, entropy in entropies.items()}
    assert conclusions == {**dict.fromkeys(demo.OTHERS, "not distinguished"), BAND: "higher"}
