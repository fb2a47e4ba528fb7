"""The processes of a rehearsal: forks of one that has imported verl, Ray's own included.

verl takes longer to import than a rehearsal takes to train, and a run has a dozen processes. Python's fork server
imports it once (`bandpo_lab.rehearsal.preloaded`). Ray starts its processes with `sys.executable`, which is a small
script in a rehearsal (`stand_in.py`). The script sends its arguments, environment and files here, and ends with the
status of the fork that it gets.

Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import runpy
import shlex
import signal
import sys
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingUnixStreamServer
from threading import Thread
from typing import Any

import psutil

PYTHON = "BANDPO_REHEARSAL_PYTHON"
"""Environment variable with the script that takes the place of `sys.executable` in forks."""
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Forks(ThreadingUnixStreamServer):
    """Forks on request; ends all of them when left.

    The folder is the working folder of what is started here; the socket and the script lie there.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["bandpo_lab.rehearsal.preloaded"])
        forkserver.ensure_running()
        self.folder, self._context = folder, context
        address, python = str(folder / "fork.sock"), folder / "python"
        script = str(Path(__file__).with_name("stand_in.py"))
        command = shlex.join([sys.executable, "-IS", script, address])
        python.write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="utf-8")
        python.chmod(0o755)
        self._env = env | {PYTHON: str(python)}
        super().__init__(address, _Answer)
        Thread(target=self.serve_forever, daemon=True).start()

    def start(self, arguments: Sequence[str], env: dict[str, str], output: int) -> None:
        """Forks a Python with these arguments, an environment beyond the rehearsal's, and a descriptor for output."""
        nothing = os.open(os.devnull, os.O_RDONLY)
        self.fork(arguments, str(self.folder), self._env | env, [nothing, os.dup(output), os.dup(output)])

    def fork(self, arguments: Sequence[str], cwd: str, env: dict[str, str], files: Sequence[int]) -> Any:
        """Forks a Python with these arguments, environment and standard files, which are closed here."""
        standard = [Connection(file) for file in files]  # which can be handed over, as a number cannot
        process = self._context.Process(target=_become, args=(arguments, cwd, env, standard))
        process.start()
        for file in standard:
            file.close()
        return process

    def end_forks(self) -> None:
        """Kills every process that descends from the fork server."""
        end_descendants(forkserver._forkserver._forkserver_pid)  # type: ignore[attr-defined]

    def __exit__(self, *_: Any) -> None:
        self.end_forks()
        self.shutdown()
        self.server_close()


class _Answer(BaseRequestHandler):
    """A fork for one call of the script."""

    server: Any

    def handle(self) -> None:
        with contextlib.suppress(EOFError, OSError), Connection(self.request.detach()) as script:
            request = script.recv()
            process = self.server.fork(*request, [recv_handle(script) for _ in range(3)])
            wait([process.sentinel, script])
            if process.exitcode is None:  # Ray has killed the script, in place of the worker
                process.kill()
            else:
                script.send(process.exitcode)


def _become(arguments: Sequence[str], cwd: str, env: dict[str, str], files: Sequence[Connection]) -> None:
    """Makes the fork what `python` with these arguments would be, save the code that it has imported."""
    import numpy as np

    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for target, file in enumerate(files):
        os.dup2(file.fileno(), target)
        file.close()
    sys.stdin = open(0, encoding="utf-8")  # multiprocessing has closed it, and Ray's agents end with it  # noqa: SIM115
    resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]  # its own; we kill forks, and it complains
    np.random.seed()  # Python's own generator is seeded by the fork, torch's is the same in any process
    sys.executable = env[PYTHON]
    while arguments[0] == "-u":
        arguments = arguments[1:]
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        sys.path.insert(0, cwd)
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")


def prctl(option: int, value: int) -> None:
    """Linux's system call."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def end_descendants(pid: int) -> None:
    """Kills all processes below `pid`, and those that they start meanwhile."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        while family := [p for p in root.children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]:
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(family, timeout=1)
