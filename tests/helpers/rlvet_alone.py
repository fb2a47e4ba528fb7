"""rlvet in a process in which bandpo, and some other packages, cannot be imported."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "packages/rlvet/src"

HIDE = """
import json, sys

# rlvet without bandpo: no package has entry points for it, and these cannot be imported.
for name in json.loads(sys.argv.pop(1)):
    sys.modules[name] = None
import rlvet.plugins

rlvet.plugins.entry_points = lambda **_: ()
"""

DIAGNOSE = """
from rlvet import diagnose

for path in sys.argv[1:]:
    diagnosis = diagnose(path)
    findings = [[*finding.as_json().values()] for finding in diagnosis.tested]
    coverage = None if diagnosis.coverage is None else diagnosis.coverage.as_json()
    print(json.dumps({"findings": findings, "coverage": coverage, "setup": str(diagnosis.setup)}))
"""

COMMAND = """
from rlvet.cli import main

sys.argv[0] = "rlvet"
try:
    main()
finally:
    packages = {name.partition(".")[0] for name, module in sys.modules.items() if module is not None}
    print("PACKAGES", *packages)
"""

COMMANDS = """
import contextlib, io

from rlvet.cli import main

for command in json.loads(sys.argv.pop(1)):
    sys.argv[:] = ["rlvet", *command]
    output, errors = io.StringIO(), io.StringIO()
    status = 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            main()
        except SystemExit as end:
            status = end.code
    print(json.dumps([status, output.getvalue(), errors.getvalue()]))
"""


def _run(code: str, hidden: Sequence[str], arguments: Sequence[object]) -> subprocess.CompletedProcess[str]:
    """Run code in a process in which bandpo and other packages cannot be imported."""
    return subprocess.run(
        [sys.executable, "-c", HIDE + code, json.dumps(["bandpo", *hidden]), *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE), "COLUMNS": "200"},
    )


def diagnosed_without_torch(*paths):
    """Diagnose runs in a process in which neither torch nor bandpo can be imported.

    Returns:
        For each run its ``findings``, ``coverage`` and ``setup``, as JSON has them.
    """
    process = _run(DIAGNOSE, ["torch"], paths)
    assert process.returncode == 0, process.stderr
    return [json.loads(line) for line in process.stdout.splitlines()]


def run_alone(*arguments, hidden=("torch", "numpy", "pyarrow", "scipy", "transformers", "tokenizers")):
    """Run a command of rlvet in a process in which bandpo and the hidden packages cannot be imported.

    Returns:
        The finished process, and the packages that it had imported.
    """
    process = _run(COMMAND, hidden, arguments)
    printed, _, packages = process.stdout.rpartition("PACKAGES ")
    process.stdout = printed
    return process, set(packages.split())


def run_commands_alone(commands, hidden):
    """Run several commands of rlvet in one process in which bandpo and the hidden packages cannot be imported.

    Returns:
        For each command its exit status, its output and its errors.
    """
    process = _run(COMMANDS, hidden, [json.dumps([[*map(str, command)] for command in commands])])
    assert process.returncode == 0, process.stderr
    return [json.loads(line) for line in process.stdout.splitlines()]


def token_part(findings):
    """Return the findings of the token checks, which come before those of the course, as JSON has them."""
    findings = json.loads(json.dumps([[*finding] for finding in findings]))
    names = [finding[2] for finding in findings]
    return findings[: names.index("the log holds numbers")] if "the log holds numbers" in names else findings
