"""On an accelerator no loss, audit or log-probability copies from the host or waits for the device."""

import subprocess
import sys

import pytest

from bandpo.core.methods import METHODS
from pages import ROOT

pytestmark = pytest.mark.slow

PROGRAM = ROOT / "tests/helpers/accelerator.py"


@pytest.fixture(scope="module")
def operations():
    """For each case the operations that it must not have, from a process in which the device is registered."""
    process = subprocess.run([sys.executable, str(PROGRAM)], capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    return dict(line.split(": ", 1) for line in process.stdout.splitlines())


def test_what_is_planted_is_named(operations):
    assert "empty_strided" in operations["planted copy"]
    assert operations["planted wait"].startswith("aten.nonzero")


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("what", ["loss", "audit", "packed loss"])
def test_nothing_is_copied_and_nothing_is_waited_for(what, name, operations):
    assert operations[f"{what} {name}()"] == "nothing"


def test_every_case_is_named_or_planted(operations):
    assert {case for case, names in operations.items() if names != "nothing"} == {
        "planted copy",
        "planted wait",
    }
    assert operations["linear_logp"] == "nothing"
