"""Work side by side on this machine, each piece in a process of its own."""

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


class Job(NamedTuple):
    """A command: ``python -m MODULE ARGUMENTS``. Called, it takes the place of what its process is."""

    module: str
    arguments: Sequence[str]
    log: Path
    """Takes what it prints."""

    def __call__(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("w") as log:
            for stream in (1, 2):
                os.dup2(log.fileno(), stream)
        sys.argv[1:] = self.arguments
        runpy.run_module(self.module, run_name="__main__", alter_sys=True)


class Outcome(NamedTuple):
    """How a piece of work ended."""

    code: int
    seconds: float
    value: Any = None
    """What the call returned; None where it failed."""


# Importing TRL takes ten seconds, a fifth of a short run. The server imports it once, and each process is a fork of it.
_FORKS = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
# Each start looks for processes that have ended, and would take the exit code that a join in another thread is reading.
_ONE_AT_A_TIME = Lock()
TRAINING = ("bandpo_lab.training.train", "bandpo.integrations.trl")


def _work(call: Callable[[], Any], answer: Any) -> None:
    # It ends as soon as the process that started it does, even where that one was killed.
    if owner := multiprocessing.parent_process():
        Thread(target=lambda: (owner.join(), os._exit(1)), daemon=True).start()
    answer.send(call())


def _fork(call: Callable[[], Any]) -> Outcome:
    start = time.monotonic()
    mine, theirs = _FORKS.Pipe(duplex=False)
    process = _FORKS.Process(target=_work, args=(call, theirs))
    with _ONE_AT_A_TIME:
        process.start()
    theirs.close()
    try:
        value = mine.recv()
    except EOFError:
        value = None
    wait([process.sentinel])
    with _ONE_AT_A_TIME:
        process.join()
    return Outcome(process.exitcode or 0, time.monotonic() - start, value)


def on_cores(
    calls: Sequence[Callable[[], Any]], workers: int, preload: Sequence[str] = TRAINING
) -> Iterator[tuple[int, Outcome]]:
    """Make calls side by side on this machine; yields each one's place and outcome as it ends.

    Calls must survive pickling, and so must what they return. Every process finds the modules of ``preload`` imported.
    """
    _FORKS.set_forkserver_preload(list(preload))
    with ThreadPoolExecutor(workers) as pool:
        places = {pool.submit(_fork, call): place for place, call in enumerate(calls)}
        try:
            for done in as_completed(places):
                yield places[done], done.result()
        except BaseException:  # an interrupt has reached the processes too; no more are started
            pool.shutdown(cancel_futures=True)
            raise
