"""The kernels of `linear_logp`, compiled for a card without one: instructions, registers, and the page about them."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from pages import ROOT

RESULTS = json.loads((ROOT / "benchmarks/results/linear_logp_kernels.json").read_text())
PAGE = (ROOT / "research/reports/benchmarks.md").read_text()
VARIANT = ("pass", "cap", "entropy", "bias")


def counts(result):
    """Return the counted rows of a result by variant."""
    rows = [row for row in result["rows"] if "instructions" in row]
    return {tuple(row[name] for name in VARIANT): row for row in rows}


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_no_variant_has_more_instructions_than_recorded(tmp_path):
    """In another process: where the interpreter is on, nothing can be compiled."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    source = os.pathsep.join([str(ROOT / "packages/bandpo/src"), variables.get("PYTHONPATH", "")])
    output = tmp_path / "counts.json"
    subprocess.run(
        [sys.executable, "benchmarks/linear_logp_kernels.py", "--output", str(output)],
        cwd=ROOT,
        env=variables | {"PYTHONPATH": source, "TRITON_CACHE_DIR": str(tmp_path / "cache")},
        check=True,
        capture_output=True,
    )
    recorded = counts(RESULTS)
    compiled = counts(json.loads(output.read_text()))
    assert compiled.keys() == recorded.keys()
    for variant, row in compiled.items():
        # Other versions of Triton and of its assembler differ a little.
        assert row["instructions"] <= 1.1 * recorded[variant]["instructions"], variant
        assert row["registers"] <= 64, (
            variant
        )  # with more, fewer than half of a processor's threads have room
        assert row["spilled_bytes"] == 0, variant


def test_the_page_has_the_recorded_counts():
    for (name, cap, entropy, bias), row in counts(RESULTS).items():
        logits = f"{'capped' if cap else 'plain'}{', with entropy' if entropy else ''}"
        cells = [
            name,
            logits,
            *(row[key] for key in ("instructions_per_logit", "registers", "bytes_per_logit")),
        ]
        assert bias or f"| {' | '.join(map(str, cells))} |" in PAGE


def test_the_page_has_the_calculated_times():
    row = RESULTS["rows"][-1]
    low, high = row["with_kernels_ms"]
    text = " ".join(PAGE.split())
    assert f"{row['without_kernels_ms']} ms become {low} to {high} ms, which is" in text
    low, high = row["times_full_logits"]
    assert f"{low} to {high} times full logits ({row['full_logits_ms']} ms)" in text
    assert f"matrix products take {row['matrix_products_ms']} ms" in text
