"""How often `rlvet diff` reports a metric of two runs of the same settings, and the table of its page."""

import pytest

from pages import ROOT
from studies import log_noise

PAGE = ROOT / "research/reports/rlvet/how-right.md"
LARGEST_SHARE = 0.05


@pytest.fixture(scope="module")
def runs():
    return log_noise.read_runs()


@pytest.mark.parametrize("half", [0, 1])
def test_at_most_one_of_twenty_pairs_of_healthy_runs_parts(half, runs):
    counts = log_noise.count_of_seeds(runs, half)
    assert counts.pairs > 250
    assert counts.parted <= LARGEST_SHARE * counts.pairs


def test_the_page_has_the_table_of_the_study():
    page = PAGE.read_text()
    for row in log_noise.rows():
        assert row in page


def test_a_run_with_a_fault_is_no_healthy_one():
    collapse = [0.5 + 0.01 * (step % 3) for step in range(40)] + [0.0] * 60
    assert not log_noise.is_healthy(
        {"reward": collapse, "entropy": [0.5 + 0.01 * (s % 5) for s in range(100)]}
    )
    learns = [0.005 * step + 0.01 * (step % 3) for step in range(100)]
    assert log_noise.is_healthy({"reward": learns, "entropy": [0.5 + 0.01 * (s % 5) for s in range(100)]})
