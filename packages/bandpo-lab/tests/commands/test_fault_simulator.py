"""Commands that meet a fault of the host go on with the same bits: `helpers.fault_simulator`, by the number of a seed.

``FAULT_SEEDS="17 23"`` tries these seeds alone.
"""

import os
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from helpers.frameworks import needs

needs("trl")
pytest.importorskip("typer")
pytest.importorskip("math_verify")

from helpers.fault_simulator import COMMANDS, FAULTS, Simulator, drawn

MEMORY = Path("/dev/shm")  # noqa: S108  # a tmpfs; the folder in it has a name of its own

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="LD_PRELOAD is of Linux"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="there is no compiler of C"),
    pytest.mark.skipif(not MEMORY.is_dir(), reason="the simulation needs a tmpfs"),
]


def test_every_command_meets_the_faults():
    """In the seeds that are tried at each change. The demo is a comparison, and a record has no lock of its own."""
    trials = [drawn(seed) for seed in range(200)]
    pairs = {(trial.command.replace("demo", "compare"), trial.fault) for trial in trials}
    for command in ("train", "eval", "compare", "record"):
        for fault in FAULTS:
            assert ((command, fault) in pairs) == ((command, fault) != ("record", "two"))
    counts = Counter(trial.command for trial in trials)
    assert counts.keys() == COMMANDS.keys()
    assert min(counts.values()) >= 5


@pytest.fixture(scope="module")
def simulator():
    folder = Path(tempfile.mkdtemp(dir=MEMORY, prefix="bandpo-faults-"))
    simulator = Simulator(folder, {**os.environ, "OMP_NUM_THREADS": "1"})
    yield simulator
    simulator.close()
    shutil.rmtree(folder)


def check(simulator, numbers):
    """Try the seeds, and say for each kind of problem how often it was found, with one seed that shows it."""
    numbers = [int(number) for number in os.environ.get("FAULT_SEEDS", "").split()] or numbers
    counts = Counter()
    examples = {}
    for seed in numbers:
        trial = drawn(seed)
        for problem in simulator.problems(trial) or ["none"]:
            kind = problem.partition(":")[0]
            counts[kind] += 1
            examples.setdefault(kind, f"FAULT_SEEDS={seed}, {trial}: {problem}")
    examples.pop("none", None)
    assert set(counts) == {"none"}, (counts, examples)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_200_faults(simulator):
    check(simulator, range(200))


@pytest.mark.exhaustive
@pytest.mark.timeout(36000)
def test_2000_faults(simulator):
    check(simulator, range(2000))
