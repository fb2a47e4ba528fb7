"""Runs a script on two processes that train together."""

import os
import subprocess
import sys
from pathlib import Path


def run_on_two_processes(script: str, folder: Path) -> None:
    """``script`` gets ``folder`` as its argument, and imports what the test that calls this can import."""
    file = folder / "two.py"
    file.write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", file, folder]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr
