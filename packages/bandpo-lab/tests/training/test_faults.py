"""`scripts/faults.py`, made short."""

import subprocess
import sys

import pytest

from helpers.frameworks import needs
from pages import ROOT

needs("trl")


@pytest.mark.exhaustive
def test_a_run_survives_kills_full_disks_and_damage(tmp_path):
    script = [sys.executable, str(ROOT / "scripts" / "faults.py"), "--work", str(tmp_path / "work")]
    script += ["--kills", "5", "--disks", "3", "--damage", "5"]
    run = subprocess.run(script, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "kills: 5\n" in run.stdout
    assert "wrong: 0;" in run.stdout
