"""Runs a script on two or three processes that train together."""

import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

PRELOAD = ("torch", "torch.distributed", "trl", "bandpo", "bandpo.integrations.trl")
"""The modules that are imported once, if they are installed, and shared by all processes, which are forks. Importing
them takes longer than most scripts."""
SECONDS = 300
"""The time limit of a script."""


def _run(script: str, folder: Path, environment: dict[str, str], errors: Path) -> None:
    """Run a script in this process, which ends with it."""
    output = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(output, 2)
    os.environ.update(environment)
    sys.argv = ["two.py", str(folder)]
    try:
        exec(compile(script, "two.py", "exec"), {"__name__": "__main__"})
        import torch.distributed

        torch.distributed.barrier()
        status = 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # While Python shuts down, gloo's threads abort now and then (pytorch/pytorch#179291).
    os._exit(status)


def run_on_processes(script: str, folder: Path, preload: Sequence[str] = PRELOAD, count: int = 2) -> None:
    """``script`` gets ``folder`` as its argument, and imports what the test that calls this can import.

    The modules of the first call of a process are those of all its calls. ``count`` is another number of processes.
    """
    forks: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    if sys.platform == "linux":
        forks.set_forkserver_preload([*preload])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(count):
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        errors = folder / f"errors-{rank}.txt"
        process = forks.Process(target=_run, args=(script, folder, environment, errors))
        process.start()
        ranks.append((process, errors))
    alive = {process.sentinel: process for process, _ in ranks}
    end = time.monotonic() + SECONDS
    while alive and (ended := wait(alive, max(0.0, end - time.monotonic()))):
        for sentinel in ended:
            process = alive.pop(sentinel)
            process.join()
            if process.exitcode:
                # The other would wait for this one.
                end = time.monotonic()
    for process in alive.values():
        process.kill()
        process.join()
    codes = [process.exitcode for process, _ in ranks]
    assert codes == [0] * count, "\n".join(errors.read_text() for _, errors in ranks)
