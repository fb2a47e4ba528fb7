"""The section that upstream/trl.md offers to TRL's paper index: its code trains with BandPO, which has its numbers."""

import importlib.metadata
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from helpers.frameworks import needs

needs("trl")

from bandpo import BandPO, parse
from bandpo.integrations.trl import BandGRPOTrainer
from helpers.frameworks import CLONES
from pages import ROOT

PAPER_INDEX = ROOT / "upstream/trl-paper-index.patch"

pytestmark = pytest.mark.skipif(
    not importlib.metadata.version("trl").startswith("1.16."), reason="the section is for TRL 1.16"
)


def paper_index():
    """Return the text that the patch adds to TRL's paper index."""
    lines = PAPER_INDEX.read_text().splitlines()
    return "\n".join(line[1:] for line in lines if line.startswith("+") and not line.startswith("+++"))


def test_the_code_of_the_paper_index_trains_with_the_method(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [code] = re.findall(r"```python\n(.*?)```", paper_index(), re.DOTALL)
    code = code.replace("trainer = BandGRPOTrainer(..., args=training_args)\n", "")
    code = code.replace("BandGRPOConfig(\n", "BandGRPOConfig(\n    use_cpu=True, bf16=False,\n")
    names = {}
    exec(code, names)
    assert names["BandGRPOTrainer"] is BandGRPOTrainer
    assert names["training_args"].num_iterations == 2
    assert parse(names["training_args"].method) == BandPO()


def test_the_numbers_of_the_paper_index_are_the_methods():
    intervals = re.findall(r"\[([\d.]+), ([\d.]+)\] \\\\\) at \\\\\( p = ([\d.]+)", paper_index())
    assert len(intervals) == 2
    for low, high, p in intervals:
        bounds = BandPO().clip.bounds(torch.tensor(float(p), dtype=torch.float64).log())
        assert (f"{bounds.lower:.2f}", f"{bounds.upper:.2f}") == (low, high)


def test_the_paper_index_of_a_clone_takes_the_patch():
    clone = Path(os.environ.get(CLONES, "unset")) / "trl"
    if not clone.is_dir():
        pytest.skip(f"needs a clone called trl in ${CLONES}")
    subprocess.run(["git", "apply", "--check", PAPER_INDEX], cwd=clone, check=True)
