"""Run function calls in parallel on this machine, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import wait
from pathlib import Path
from threading import Lock, Thread
from typing import Any, NamedTuple

INTERRUPTED = 130
"""The exit status of a process after Ctrl-C."""


class Job(NamedTuple):
    """A command ``python -m MODULE ARGUMENTS``; calling it runs the command in this process."""

    module: str
    arguments: Sequence[str]
    log: Path
    """The file for standard output and errors."""

    def __call__(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("w") as log:
            for descriptor in (1, 2):  # standard output and errors
                os.dup2(log.fileno(), descriptor)
        sys.argv[1:] = self.arguments
        runpy.run_module(self.module, run_name="__main__", alter_sys=True)


class JobResult(NamedTuple):
    """The result of a call in a process of its own."""

    code: int
    """The exit status of the process; 0 if the call succeeded."""
    seconds: float
    """The wall-clock time of the process, in seconds."""
    value: Any = None
    """The return value of the call; None if it failed."""


# Importing TRL takes ten seconds, a fifth of a short run. The fork server imports it once, and each process is a fork.
_PROCESSES = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
# Starting a process collects the exit codes of ended ones, and would take the one that a join in another thread needs.
_START_OR_JOIN = Lock()
TRAINING = ("bandpo_lab.training.train", "bandpo.integrations.trl")
"""The modules that a training run imports."""


def _call_and_send(call: Callable[[], Any], connection: Any) -> None:
    """Send the return value of a call to the parent; end as soon as the parent ends, even if it was killed."""
    parent = multiprocessing.parent_process()
    if parent:
        Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    try:
        connection.send(call())
    except KeyboardInterrupt:
        # Ctrl-C reaches all processes of a terminal, and the parent says that it was interrupted.
        os._exit(INTERRUPTED)


def _run_in_process(call: Callable[[], Any]) -> JobResult:
    """Make a call in a new process and wait for its end."""
    start = time.monotonic()
    receiver, sender = _PROCESSES.Pipe(duplex=False)
    process = _PROCESSES.Process(target=_call_and_send, args=(call, sender))
    with _START_OR_JOIN:
        process.start()
    sender.close()
    try:
        value = receiver.recv()
    except EOFError:
        value = None
    wait([process.sentinel])
    with _START_OR_JOIN:
        process.join()
    return JobResult(process.exitcode or 0, time.monotonic() - start, value)


def run_in_processes(
    calls: Sequence[Callable[[], Any]], workers: int, preload: Sequence[str] = TRAINING
) -> Iterator[tuple[int, JobResult]]:
    """Make calls in parallel, each in a process of its own.

    Args:
        calls: Functions without arguments. They and their return values must be picklable.
        workers: The number of simultaneous processes.
        preload: The modules that are already imported in every process.

    Yields:
        The index of each call and its result, as soon as it ends.
    """
    _PROCESSES.set_forkserver_preload(list(preload))
    with ThreadPoolExecutor(workers) as pool:
        indices = {pool.submit(_run_in_process, call): index for index, call in enumerate(calls)}
        try:
            for future in as_completed(indices):
                yield indices[future], future.result()
        except BaseException:  # an interrupt has reached the processes as well; no more are started
            pool.shutdown(cancel_futures=True)
            raise
