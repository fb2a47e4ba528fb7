"""Run a shrunk recipe: unmodified verl on a private Ray, first from the start and then from its checkpoint."""

from __future__ import annotations

import os
import re
import secrets
import threading
import time
from pathlib import Path

from bandpo_lab.rehearsal import files
from bandpo_lab.rehearsal.processes import Forks

FATAL = re.compile(r"Error in _run_prompt")
"""The message of a failed response or reward. verl continues without the response; a rehearsal stops."""


def environment(folder: Path) -> dict[str, str]:
    """Return the environment variables of a rehearsal, which Ray passes on to every process."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "CUDA_VISIBLE_DEVICES")}
    modules = [inherited.get("VERL_USE_EXTERNAL_MODULES", ""), "bandpo_lab.rehearsal.cpu"]
    return inherited | {
        files.FOLDER: str(folder),
        "VERL_PLATFORM": "cpu",
        # verl registers its FSDP2 engine for GPUs only, but it runs unchanged on a CPU.
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_USE_EXTERNAL_MODULES": ",".join(filter(None, modules)),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "HYDRA_FULL_ERROR": "1",
        "PYTHONUNBUFFERED": "1",
        # A random token, so that nobody else can connect and Ray writes no token to the user's home.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_DEDUP_LOGS": "0",
        "RAY_COLOR_PREFIX": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }


def train(forks: Forks, command: list[str], folder: Path, run: str, timeout: float) -> None:
    """Run one training to its end, or to its first fatal message, and end all of its processes.

    The exit status is ignored, since verl exits with 0 after failed runs; the metrics show whether the run succeeded.

    Args:
        forks: The server that starts the training.
        command: The command line after `python`.
        folder: The folder for the log and the metrics.
        run: The name of the run: `first` or `resumed`.
        timeout: The time limit, in seconds.
    """
    timed_out = threading.Event()

    def stop() -> None:
        timed_out.set()
        forks.end_forks()

    # Copy the output of the training to the log, line by line.
    readable, writable = os.pipe()
    with os.fdopen(readable, errors="replace") as output, (folder / files.LOG.format(run)).open("w") as log:
        metrics = str(folder / files.METRICS.format(run))
        forks.start(command, {files.RUN: run, "VERL_FILE_LOGGER_PATH": metrics}, writable)
        os.close(writable)
        timer = threading.Timer(timeout, stop)
        timer.start()
        try:
            fatal_time = 0.0
            for line in output:
                log.write(line)
                log.flush()
                if FATAL.search(line) and not fatal_time:
                    fatal_time = time.monotonic()
                # After a fatal message, read on for 2 seconds: the traceback is written in that time.
                if fatal_time and time.monotonic() - fatal_time > 2:
                    break
            if timed_out.is_set():
                log.write(f"{files.FOLDER}: stopped after {timeout:.0f} s\n")
        finally:
            timer.cancel()
            forks.end_forks()
