"""Starts the fork server of a rehearsal, and ends all that descends from it."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from bandpo_lab.rehearsal import fork_client


class ForkServer:
    """The server, as the process that starts it sees it; ends everything when left.

    Args:
        folder: Working folder of the server and of what it forks; its socket and its log lie there.
        env: Environment in which it imports.
        preloaded: Modules that it imports; a name that cannot be imported is left to who asks for it.
    """

    def __init__(self, folder: Path, env: dict[str, str], preloaded: Sequence[str] = ()):
        self.folder = folder
        self._address = str(folder / "fork.sock")
        python = folder / "python"
        python.write_text(
            f'#!/bin/sh\nexec {shlex.join([sys.executable, "-IS", fork_client.__file__, self._address])} "$@"\n'
        )
        python.chmod(0o755)
        self._env = env | {fork_client.PYTHON: str(python)}
        self._clients: list[socket.socket] = []  # a fork lives as long as its client
        # The socket listens before the server is up, so early requests wait.
        with socket.socket(socket.AF_UNIX) as listener, (folder / "log-forkserver.txt").open("w") as log:
            listener.bind(self._address)
            listener.listen(64)
            self._server = subprocess.Popen(
                [sys.executable, "-m", "bandpo_lab.rehearsal.forkserver", str(listener.fileno()), *preloaded],
                cwd=folder, env=self._env, stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=[listener.fileno()],
            )  # fmt: skip

    def start(self, arguments: Sequence[str], env: dict[str, str], output: int) -> None:
        """Forks a Python with these arguments.

        Args:
            arguments: A file or ``-m`` and a module, and what follows.
            env: What its environment has beyond the server's.
            output: Descriptor that its output goes to.
        """
        with open(os.devnull) as nothing:
            standard = (nothing.fileno(), output, output)
            self._clients.append(
                fork_client.request(self._address, [*arguments], self._env | env, str(self.folder), standard)
            )

    def end_forks(self) -> None:
        """Kills every process that descends from the server."""
        end_descendants(self._server.pid)
        clients, self._clients = self._clients, []
        for client in clients:
            client.close()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: Any) -> None:
        self.end_forks()
        with self._server as server:
            server.kill()


def end_descendants(pid: int) -> None:
    """Kills all processes below `pid`, and those that they start meanwhile."""
    try:
        root = psutil.Process(pid)
        while family := [p for p in root.children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]:
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(family, timeout=1)
    except psutil.NoSuchProcess:
        return
