"""Long logs are judged within the default limits, with few bytes of memory a row."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a reader is a copy on Linux")

MOST_BYTES = 300
"""The largest number of bytes of memory a row, of the process that calls and the one that reads together."""

PROGRAM = """
import json, resource, sys
from rlvet import diagnose
diagnosis = diagnose(sys.argv[1])
used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
seconds = [one.ru_utime + one.ru_stime for one in used]
print(json.dumps([diagnosis.headline, len(diagnosis.rows), *(1024 * one.ru_maxrss for one in used), *seconds]))
"""


class Use(NamedTuple):
    """What a diagnosis says, and what it takes of the machine."""

    headline: str
    rows: int
    caller: int
    """The peak of memory of the process that calls, in bytes,"""
    reader: int
    """and that of the one that reads."""
    caller_seconds: float
    reader_seconds: float


def write_log(file: Path, rows: int) -> Path:
    """Write a healthy log with four keys in each row."""
    chance = random.Random(0)
    with file.open("w", encoding="utf-8") as stream:
        for step in range(1, rows + 1):
            row = {
                "step": step,
                "reward": 0.2 + 0.6 * step / rows + chance.gauss(0, 0.05),
                "entropy": 1.0 - 0.3 * step / rows + chance.gauss(0, 0.02),
                "grad_norm": 0.5 + 0.1 * chance.random(),
            }
            stream.write(json.dumps(row) + "\n")
    return file


def use_of(file: Path) -> Use:
    """Diagnose a log with the default limits in a new process."""
    environment = {name: value for name, value in os.environ.items() if name != "RLVET_LIMITS"}
    command = [sys.executable, "-c", PROGRAM, str(file)]
    return Use(*json.loads(subprocess.run(command, capture_output=True, check=True, env=environment).stdout))


def check_long_log(folder: Path, rows: int) -> Use:
    """Diagnose a log, and check its verdict and the memory that each row takes."""
    small = use_of(write_log(folder / "small.jsonl", 1000))
    use = use_of(write_log(folder / "long.jsonl", rows))
    assert (use.headline, use.rows) == (small.headline, rows)
    assert use.headline.startswith("ok: ")
    more = [use.caller - small.caller, use.reader - small.reader]
    assert sum(more) <= MOST_BYTES * (rows - small.rows), [one / rows for one in more]
    return use


def test_a_row_takes_few_bytes(tmp_path):
    check_long_log(tmp_path, 50_000)


@pytest.mark.slow
def test_a_log_of_two_million_rows_is_judged(tmp_path):
    use = check_long_log(tmp_path, 2_000_000)
    print(use)
