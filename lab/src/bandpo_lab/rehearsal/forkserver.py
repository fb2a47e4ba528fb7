"""One process that imports verl once and forks every other one of a rehearsal, Ray's own included.

verl takes longer to import than a rehearsal takes to train, and a run has a dozen processes. Ray starts them with
`sys.executable`, which the driver of a rehearsal sets to a small script. The script sends its arguments, environment
and files to this server, which forks. The script ends with the status of the fork.

All of a rehearsal's processes descend from the server. It ends them when it loses the process that started it, however
that one ended.

Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import runpy
import selectors
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from bandpo_lab.rehearsal import fork_client
from bandpo_lab.rehearsal.processes import end_descendants

FIRST_JOB = "01000000"
"""The id that a Ray gives its first driver, of which each run has one."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


@dataclass
class _Request:
    arguments: list[str]
    cwd: str
    env: dict[str, str]
    files: list[int]


def _serve(listener: socket.socket) -> _Request | None:
    """Forks for each request. Returns in the forks, with the request, and without one once standard input ends."""
    clients: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select(timeout=0.05):
                if key.fileobj is sys.stdin:
                    return None
                if key.fileobj is not listener:  # Ray has killed the client, in place of the worker
                    selector.unregister(key.fileobj)
                    pid = next((pid for pid, client in clients.items() if client is key.fileobj), None)
                    if pid is not None:
                        os.kill(pid, signal.SIGKILL)
                    continue
                client, _ = listener.accept()
                try:
                    request = _Request(*fork_client.receive(client))
                except EOFError:
                    client.close()
                    continue
                if (pid := os.fork()) == 0:
                    return request
                for file in request.files:
                    os.close(file)
                client.sendall(f"{pid}\n".encode())
                clients[pid] = client
                selector.register(client, selectors.EVENT_READ)
            for pid, status in _ended():
                if (client := clients.pop(pid, None)) is not None:
                    with contextlib.suppress(KeyError):
                        selector.unregister(client)
                    with contextlib.suppress(OSError), client:
                        client.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _ended():
    """Children that have ended, orphans that fell to the server included."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended


def _become(request: _Request) -> None:
    """Makes the fork what the client asked for, save the code that runs in it."""
    import numpy as np

    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(request.env)
    for target, file in enumerate(request.files):
        os.dup2(file, target)
        os.close(file)
    np.random.seed()  # Python's own generator is seeded by the fork, torch's is the same in any process
    sys.executable = request.env[fork_client.PYTHON]


def _run(arguments: list[str]) -> None:
    """As `python` with these arguments does: a module after ``-m``, or a file."""
    while arguments[0] == "-u":
        arguments = arguments[1:]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(arguments[0]).parent)
        runpy.run_path(arguments[0], run_name="__main__")


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _main(listening: str, *preloaded: str) -> None:
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    with socket.socket(fileno=int(listening)) as listener:
        # Ray reads these when it is imported. A worker needs its job, and the process whose end it follows.
        os.environ |= {"RAY_JOB_ID": FIRST_JOB, "RAY_RAYLET_PID": str(os.getpid())}
        for module in preloaded:
            with contextlib.suppress(Exception):  # the run imports it again, and its log shows the error
                importlib.import_module(module)
        gc.freeze()  # so forks do not scan what the server has imported
        request = _serve(listener)
    if request is None:
        end_descendants(os.getpid())
        os._exit(0)
    _become(request)
    _run(request.arguments)


if __name__ == "__main__":
    _main(*sys.argv[1:])
