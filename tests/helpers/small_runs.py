"""A program that runs a command of `helpers.fault_simulator`, made small.

A comparison draws no picture and has four held-out problems, and a study forks its runs from its own process, which has
imported all that they need.
"""

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from helpers.watched import run

HELD_OUT = 4
"""The number of held-out problems."""
DIES_WITH_PARENT = 1
"""The number of Linux for PR_SET_PDEATHSIG."""


def status_of(call: Callable[[], Any]) -> int:
    """Make a call, and return the status with which a process of it ends."""
    try:
        call()
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
            return 1
        return stop.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _run_in_fork(call: Callable[[], Any]) -> Any:
    from bandpo_lab.study.jobs import JobResult

    child = os.fork()
    if child == 0:
        # A run of a study ends with the study.
        ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)
        status = status_of(call)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return JobResult(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), time.monotonic())


def make_small() -> None:
    """Make the commands of this process small."""
    from bandpo_lab.study import jobs
    from bandpo_lab.tasks import multiplication

    problems = multiplication.problems

    def few_problems(split: str, number: int, *seed: int) -> Any:
        return problems(split, min(number, HELD_OUT) if split == "eval" else number, *seed)

    multiplication.problems = few_problems
    jobs._run_in_process = _run_in_fork
    sys.modules["matplotlib"] = None  # type: ignore[assignment]  # as if it were not installed


def main() -> None:
    """Run the command of the command line."""
    make_small()
    sys.exit(run(sys.argv[1:]))
