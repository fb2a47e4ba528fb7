"""The shape annotations of the core hold while its own tests and examples run."""

import os
import subprocess
import sys

import pytest

from pages import ROOT

EXAMPLES = [
    f"packages/bandpo/src/bandpo/core/{name}.py"
    for name in ("batch", "bounds", "loss", "methods", "schedules", "rules")
]
EXAMPLES += [
    "packages/bandpo/src/bandpo/core/divergences",
    "packages/bandpo/src/bandpo/core/objectives",
    "packages/bandpo/src/bandpo/audit/metrics.py",
]
TESTS = [
    f"packages/bandpo/tests/core/test_{name}.py"
    for name in ("batch", "loss", "combinators", "objectives", "dcpo")
]


def run(*arguments):
    path = os.pathsep.join(
        [
            str(ROOT / "packages/bandpo/src"),
            str(ROOT / "tests"),
            *filter(None, [os.environ.get("PYTHONPATH")]),
        ]
    )
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "shapes", "--tb=short", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_every_annotation_is_true_of_what_passes_through():
    pytest.importorskip("beartype")
    # What refuses bad input would be refused by the check of types before.
    found = run(
        "--hypothesis-profile=ci",
        "-m",
        "not slow",
        "-k",
        "not refuse and not bad and not compile",
        *EXAMPLES,
        *TESTS,
    )
    assert found.returncode == 0, found.stdout[-5000:]


@pytest.mark.slow
def test_an_untrue_annotation_is_found(tmp_path):
    """A token's advantage that no annotation admits."""
    pytest.importorskip("beartype")
    test = tmp_path / "test_wrong.py"
    test.write_text(
        "import torch\nfrom bandpo import policy_loss\n\n\n"
        "def test_wrong():\n    policy_loss(*torch.full((2, 2, 3), -1.0), torch.ones(2, 7))\n"
    )
    found = run(str(test))
    assert found.returncode == 1
    assert "jaxtyping.TypeCheckError" in found.stdout
