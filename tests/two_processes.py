"""Runs a script on two processes that train together."""

import os
import subprocess
import sys
from pathlib import Path

# While Python shuts down, gloo's threads abort now and then (pytorch/pytorch#179291).
END = "\nimport os, torch.distributed\ntorch.distributed.barrier()\nos._exit(0)\n"


def run_on_two_processes(script: str, folder: Path) -> None:
    """``script`` gets ``folder`` as its argument, and imports what the test that calls this can import."""
    file = folder / "two.py"
    file.write_text(script + END)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", file, folder]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr
