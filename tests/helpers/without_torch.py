"""`diagnose` in a process that has no torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import json, sys

sys.modules["torch"] = None
from rlvet.checks.diagnosis import diagnose

for path in sys.argv[1:]:
    diagnosis = diagnose(path)
    findings = [[*finding] for finding in diagnosis.tested]
    coverage = None if diagnosis.coverage is None else diagnosis.coverage.as_json()
    print(json.dumps({"findings": findings, "coverage": coverage, "setup": str(diagnosis.setup)}))
"""


def diagnosed_without_torch(*paths):
    """Diagnose runs in a process in which torch cannot be imported.

    Returns:
        For each run its ``findings``, ``coverage`` and ``setup``, as JSON has them.
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    command = [sys.executable, "-c", SCRIPT, *map(str, paths)]
    process = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert process.returncode == 0, process.stderr
    return [json.loads(line) for line in process.stdout.splitlines()]


def token_part(findings):
    """Return the findings of the token checks, which come before those of the course, as JSON has them."""
    findings = json.loads(json.dumps([[*finding] for finding in findings]))
    names = [finding[2] for finding in findings]
    return findings[: names.index("the log holds numbers")] if "the log holds numbers" in names else findings
