"""Runs a script on two processes that train together."""

import os
import subprocess
import sys
from pathlib import Path


def run_on_two_processes(script: str, folder: Path) -> None:
    """``script`` gets ``folder`` as its argument, and may import the tests of integrations."""
    file = folder / "two.py"
    file.write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", file, folder]
    tests = str(Path(__file__).parent / "integrations")
    path = os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"PYTHONPATH": path})
