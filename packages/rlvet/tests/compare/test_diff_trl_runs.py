"""Logs of real runs: TRL's GRPOTrainer on the embedded model of bandpo-lab, 30 batches of 128 answers, 13 metrics.

Ten runs, ``base``, differ in their seed only. Two more each have a temperature of 0.6 in place of 1, ten times the
learning rate, or answers of at most 12 in place of 24 tokens. The limits of `rlvet.compare.logs` were chosen on other
runs.
"""

import gzip
import json
from collections import defaultdict
from itertools import combinations, product
from pathlib import Path

import pytest

from pages import ROOT
from rlvet.compare.logs import compare_logs
from rlvet.runs.quantities import named_rows

FILE = Path(__file__).parent / "trl_runs.jsonl.gz"
PAGE = ROOT / "research/reports/rlvet/how-right.md"
ROWS = {
    "base": "TRL, other seed, 13 metrics",
    "rate": "TRL, ten times the learning rate",
    "temperature": "TRL, a temperature of 0.6",
    "cap": "TRL, answers of half the length",
}


@pytest.fixture(scope="module")
def runs():
    logs = defaultdict(list)
    with gzip.open(FILE, "rt") as lines:
        for line in lines:
            run = json.loads(line)
            logs[run["arm"]].append(named_rows(run["rows"]))
    return logs


@pytest.mark.parametrize("arm", ROWS)
def test_the_page_has_the_number_of_pairs_that_part(arm, runs):
    base = runs["base"]
    pairs = list(combinations(base, 2) if arm == "base" else product(base, runs[arm]))
    parted = sum(bool(compare_logs(*pair).parted) for pair in pairs)
    assert f"| {ROWS[arm]} | {parted} of {len(pairs)} |" in PAGE.read_text()
    if arm == "base":
        assert parted <= 0.05 * len(pairs)
        assert not any(compare_logs(*pair).apart for pair in pairs)
