"""Scripts in a process that cannot import rlvet."""

import subprocess
import sys

WITHOUT = """
import sys
sys.modules["rlvet"] = None
"""
"""The beginning of a script that cannot import rlvet."""
INSTALL = "in a clone of bandpo, pip install ./packages/rlvet"


def run_without_rlvet(script, *arguments, status=0):
    """Run a script in a process without rlvet, and return its output and its errors."""
    command = [sys.executable, "-c", WITHOUT + script, *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == status, run.stderr
    return run.stdout, run.stderr
