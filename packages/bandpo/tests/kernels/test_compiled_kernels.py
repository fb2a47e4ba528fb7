"""The kernels compiled for an H100 without a GPU: they compile, and a token takes few instructions."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

BENCHMARKS = Path(__file__).parents[4] / "benchmarks"
KEPT = json.loads((BENCHMARKS / "results/kernel_instructions.json").read_text())

COUNTED = """
import json
import kernel_instructions as measured

rows = [measured.forward_row(method) for method in ("BandPO()", "FixedClip()")]
rows.append(measured.backward_row())
constants = {"PER_SEQUENCE": True, "OVER": "sequences", "HAS_NORMALIZER": False, "METRICS": True}
measured.compiled(measured.token_kernels.average, constants | {"ROWS": 128, "BLOCKS": 32}, warps=16)
constants = measured.BOUNDS["BandAbove()"] | {"HAS_MASK": False, "PER_TOKEN": True, "METRICS": False, "FAST": True}
measured.compiled(measured.token_kernels.forward, constants | {"BLOCK": 128, "CHUNK": 32})
print(json.dumps(rows))
"""


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Return the rows of a process of its own, in which Triton does not interpret."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    environment.pop("TRITON_INTERPRET", None)
    environment["PYTHONPATH"] = os.pathsep.join([str(BENCHMARKS), *filter(None, sys.path)])
    run = subprocess.run([sys.executable, "-c", COUNTED], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return {row["kernel"]: row for row in json.loads(run.stdout.splitlines()[-1])}


CEILINGS = {"forward, BandPO()": (130, 220), "forward, FixedClip()": (65, 0), "backward": (8, 0)}
"""The most instructions of a token, and of a pass that solves for 32 roots."""


@pytest.mark.parametrize("kernel", CEILINGS)
def test_a_token_takes_few_instructions(kernel, rows):
    per_token, for_roots = CEILINGS[kernel]
    assert 0 < rows[kernel]["instructions_per_token"] <= per_token
    assert rows[kernel]["instructions_for_32_roots"] <= for_roots
    assert rows[kernel]["spilled_bytes"] == 0


def test_the_kept_rows_are_of_these_kernels(rows):
    """Another version of Triton may write other instructions; its rows are to be kept then."""
    import triton

    if triton.__version__ != KEPT["triton"]:
        pytest.skip(f"the rows are of Triton {KEPT['triton']}")
    kept = {row["kernel"]: row for row in KEPT["rows"]}
    assert {kernel: kept[kernel] for kernel in rows} == rows


def test_the_page_has_the_kept_rows():
    page = (BENCHMARKS.parent / "research/reports/benchmarks.md").read_text()
    for row in KEPT["rows"]:
        cells = (row["kernel"], f"{row['instructions_per_token']:g}", row["instructions_for_32_roots"] or "")
        assert "| {} | {} | {} | {} | {} |".format(*cells, row["registers"], row["bytes_per_token"]) in page
