"""The rows of eight seeds of `bandpo-lab compare`, and the differences that the changelog names."""

import gzip
import json
from statistics import fmean

from bandpo_lab.interval import student
from pages import ROOT

FILE = ROOT / "research/results/comparison/lag-4.jsonl.gz"
CLIP = "FixedClip(0.2)"


def mean_rewards() -> dict[tuple[str, int], float]:
    """The mean reward over all batches, by method and seed."""
    rows = [json.loads(line) for line in gzip.decompress(FILE.read_bytes()).decode().splitlines()]
    return {(row["method"], row["seed"]): fmean(row["reward"]) for row in rows}


def difference(method: str) -> tuple[float, float, float]:
    """The difference of a method and clip 0.2, paired by seed, with its interval of 95 %."""
    means = mean_rewards()
    value, low, high = student([means[method, seed] - means[CLIP, seed] for seed in range(8)])
    return round(value, 3), round(low, 3), round(high, 3)


def test_each_method_has_eight_seeds():
    methods = {method for method, _ in mean_rewards()}
    assert methods == {CLIP, "FixedClip(0.2, 0.28)", "FixedClip(0.2, 1.0)", "BandPO()", "Band(KL(), 0.05)"}
    assert len(mean_rewards()) == 5 * 8


def test_a_high_bound_learns_sooner_on_old_data_whether_or_not_it_depends_on_p():
    for method in ("BandPO()", "FixedClip(0.2, 1.0)", "Band(KL(), 0.05)"):
        value, low, _ = difference(method)
        assert value > 0.07, method
        assert low > 0.05, method
    means = mean_rewards()
    gaps = [means["BandPO()", seed] - means["FixedClip(0.2, 1.0)", seed] for seed in range(8)]
    assert student(gaps).low < 0 < student(gaps).high


def test_the_difference_that_the_changelog_names():
    value, low, high = difference("BandPO()")
    text = " ".join((ROOT / "CHANGELOG.md").read_text().split())
    assert f"+{value:.3f} [{low:.3f}, {high:.3f}]" in text
