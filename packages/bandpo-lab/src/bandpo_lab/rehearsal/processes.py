"""The processes of a rehearsal, including Ray's: forks of one process that has imported verl.

Importing verl takes longer than the training of a rehearsal, and a run has a dozen processes, so Python's fork server
imports it once (`bandpo_lab.rehearsal.preloaded`). Ray starts its processes with `sys.executable`, which is a small
script in a rehearsal (`stand_in.py`). The script sends its arguments, environment and standard files to `Forks`, which
forks the server in its place, and exits with the status of the fork.

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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psutil

PYTHON = "BANDPO_REHEARSAL_PYTHON"
"""The environment variable with the path of the script that replaces `sys.executable` in forks."""
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Forks(ThreadingUnixStreamServer):
    """A server that forks Python processes on request; a context manager that ends all of them on exit.

    Args:
        folder: The folder for the socket and the script, and the working folder of processes started with `start`.
        env: The environment of the processes.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["bandpo_lab.rehearsal.preloaded"])
        forkserver.ensure_running()
        self.folder = folder
        self._context = context
        address = str(folder / "fork.sock")

        # The script that Ray runs in place of Python.
        python = folder / "python"
        script = str(Path(__file__).with_name("stand_in.py"))
        command = shlex.join([sys.executable, "-IS", script, address])
        python.write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="utf-8")
        python.chmod(0o755)
        self._env = env | {PYTHON: str(python)}

        super().__init__(address, _ForkRequest)
        Thread(target=self.serve_forever, daemon=True).start()

    def start(self, arguments: Sequence[str], env: dict[str, str], output: int) -> None:
        """Fork a Python process in the folder of the rehearsal.

        Args:
            arguments: The command line after `python`.
            env: Environment variables in addition to those of the rehearsal.
            output: The file descriptor for standard output and errors.
        """
        devnull = os.open(os.devnull, os.O_RDONLY)
        self.fork(arguments, str(self.folder), self._env | env, [devnull, os.dup(output), os.dup(output)])

    def fork(self, arguments: Sequence[str], cwd: str, env: dict[str, str], files: Sequence[int]) -> Any:
        """Fork a Python process and return it.

        Args:
            arguments: The command line after `python`.
            cwd: The working folder.
            env: All of its environment variables.
            files: The descriptors of its standard input, output and errors, which are closed in this process.
        """
        # A Connection can be sent to the fork server; a plain descriptor cannot.
        connections = [Connection(file) for file in files]
        process = self._context.Process(target=_run_python, args=(arguments, cwd, env, connections))
        process.start()
        for connection in connections:
            connection.close()
        return process

    def end_forks(self) -> None:
        """Kill every process that descends from the fork server."""
        end_descendants(forkserver._forkserver._forkserver_pid)  # type: ignore[attr-defined]

    def __exit__(self, *_: Any) -> None:
        self.end_forks()
        self.shutdown()
        self.server_close()


class _ForkRequest(BaseRequestHandler):
    """The handler of one call of the script: forks, and sends the exit status."""

    server: Any

    def handle(self) -> None:
        with contextlib.suppress(EOFError, OSError), Connection(self.request.detach()) as script:
            request = script.recv()
            process = self.server.fork(*request, [recv_handle(script) for _ in range(3)])
            wait([process.sentinel, script])
            if process.exitcode is None:  # Ray has killed the script, to end its worker
                process.kill()
            else:
                script.send(process.exitcode)


def _run_python(arguments: Sequence[str], cwd: str, env: dict[str, str], files: Sequence[Connection]) -> None:
    """Run in the fork what `python` with these arguments would run; modules that are imported stay imported."""
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
    # A tracker of its own: forks are killed, and the shared tracker would report their resources as leaked.
    resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]
    # Python's own generator is seeded by the fork, and torch's is the same in any process.
    np.random.seed()
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
    """Call Linux's system call prctl.

    Raises:
        OSError: The call failed.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def end_descendants(pid: int) -> None:
    """Kill all descendants of the process `pid`, and those that they start meanwhile."""
    import psutil  # it comes with verl, and without verl a rehearsal says so first

    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        while True:
            descendants = [process for process in root.children(recursive=True) if not _has_ended(process)]
            if not descendants:
                return
            for process in descendants:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(descendants, timeout=1)


def _has_ended(process: psutil.Process) -> bool:
    import psutil

    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
