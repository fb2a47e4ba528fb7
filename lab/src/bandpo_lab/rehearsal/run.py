"""Runs a shrunk recipe: stock verl on a private Ray, once from the start and once from its checkpoint."""

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
"""verl goes on without a response whose agent loop or reward raised; a rehearsal stops there."""


def environment(folder: Path) -> dict[str, str]:
    """The environment of a rehearsal; Ray hands it to every process."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "CUDA_VISIBLE_DEVICES")}
    modules = [inherited.get("VERL_USE_EXTERNAL_MODULES", ""), "bandpo_lab.rehearsal.cpu"]
    return inherited | {
        files.FOLDER: str(folder),
        "VERL_PLATFORM": "cpu",
        # verl registers its FSDP2 engine for GPUs only; on a CPU it runs unchanged.
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_USE_EXTERNAL_MODULES": ",".join(filter(None, modules)),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "HYDRA_FULL_ERROR": "1",
        "PYTHONUNBUFFERED": "1",
        # A private token, so that nobody else gets in and none is left in the user's home.
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
    """Runs one training to its end, or to its first fatal message, and leaves no process behind.

    Whether it succeeded is for the metrics to say: verl exits 0 after runs that went wrong.
    """
    stopped = threading.Event()

    def stop() -> None:
        stopped.set()
        forks.end_forks()

    readable, writable = os.pipe()
    with os.fdopen(readable, errors="replace") as output, (folder / files.LOG.format(run)).open("w") as log:
        metrics = str(folder / files.METRICS.format(run))
        forks.start(command, {files.RUN: run, "VERL_FILE_LOGGER_PATH": metrics}, writable)
        os.close(writable)
        late = threading.Timer(timeout, stop)
        late.start()
        try:
            stopping = 0.0
            for line in output:
                log.write(line)
                log.flush()
                if FATAL.search(line) and not stopping:
                    stopping = time.monotonic()
                if stopping and time.monotonic() - stopping > 2:  # its traceback follows within this time
                    break
            if stopped.is_set():
                log.write(f"{files.FOLDER}: stopped after {timeout:.0f} s\n")
        finally:
            late.cancel()
            forks.end_forks()
