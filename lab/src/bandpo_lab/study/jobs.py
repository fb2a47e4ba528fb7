"""The processes of a study, side by side on this machine or on a Ray cluster."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from threading import Thread
from typing import NamedTuple


class Job(NamedTuple):
    """One process: ``python -m MODULE ARGUMENTS``."""

    module: str
    arguments: Sequence[str]
    log: Path
    """Takes what it prints."""


class Outcome(NamedTuple):
    """How it ended."""

    code: int
    seconds: float


# Importing TRL takes ten seconds, a fifth of a short run. The server imports it once, and each job is a fork of it.
_FORKS = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
_FORKS.set_forkserver_preload(["bandpo_lab.training.train", "bandpo.integrations.trl"])


def end_with_owner() -> None:
    """Let this process end as soon as the one that started it does, even where that one was killed."""
    if owner := multiprocessing.parent_process():
        Thread(target=lambda: (owner.join(), os._exit(1)), daemon=True).start()


def _run(job: Job) -> None:
    end_with_owner()
    with job.log.open("w") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    sys.argv[1:] = job.arguments
    runpy.run_module(job.module, run_name="__main__", alter_sys=True)


def _fork(job: Job) -> int:
    process = _FORKS.Process(target=_run, args=(job,))
    process.start()
    process.join()
    return process.exitcode or 0


def _launch(job: Job) -> int:
    with job.log.open("w") as log:
        command = [sys.executable, "-m", job.module, *job.arguments]
        return subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode


def _timed(run: Callable[[Job], int], job: Job) -> Outcome:
    job.log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    return Outcome(run(job), time.monotonic() - start)


def on_cores(jobs: Sequence[Job], workers: int) -> Iterator[tuple[int, Outcome]]:
    """Run jobs side by side on this machine; yields each job's place and outcome as it ends."""
    with ThreadPoolExecutor(workers) as pool:
        places = {pool.submit(_timed, _fork, job): place for place, job in enumerate(jobs)}
        try:
            for done in as_completed(places):
                yield places[done], done.result()
        except BaseException:  # an interrupt has reached the running jobs too; no more are started
            pool.shutdown(cancel_futures=True)
            raise


def on_ray(jobs: Sequence[Job], cores: int) -> Iterator[tuple[int, Outcome]]:
    """Run jobs as Ray tasks of so many cores each, on the running cluster; its nodes must share the folder."""
    import ray
    from ray.exceptions import RayError

    ray.init(address="auto", ignore_reinit_error=True, log_to_driver=False)
    task = ray.remote(num_cpus=cores, max_retries=0)(_timed)
    places = {task.remote(_launch, job): place for place, job in enumerate(jobs)}
    while places:
        [done], _ = ray.wait(list(places))
        try:
            outcome = ray.get(done)
        except RayError as error:
            Path(jobs[places[done]].log).write_text(str(error))
            outcome = Outcome(1, 0.0)
        yield places.pop(done), outcome
