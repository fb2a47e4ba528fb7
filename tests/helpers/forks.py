"""A process that has imported a trainer, from which commands are forked: to import it takes each most of its time."""

import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helpers.sources import ROOT, SOURCES
from helpers.watched import Watch, run

PATH = (*SOURCES, ROOT / "tests")
"""The path of imports of the processes."""


class Job:
    """A command that was forked, and leads a session of its own.

    Args:
        server: Of which it is a child.
        pid: Its process, or that of the launcher.
        output: What it prints.
    """

    def __init__(self, server: "ForkServer", pid: int, output: Path) -> None:
        self._server = server
        self.pid = pid
        self._output = output
        self._status: int | None = None

    @property
    def text(self) -> str:
        """What it has printed so far."""
        return self._output.read_text(encoding="utf-8", errors="replace")

    def rank(self, rank: int) -> int:
        """Return the process of a rank that the launcher has started."""
        return int(Path(f"{self._output}.rank{rank}").read_text(encoding="utf-8"))

    def wait(self, seconds: float = 300) -> int:
        """Wait for its end; return its status, which is negative where a signal ended it."""
        if self._status is None:
            self._status = self._server.ask({"wait": self.pid}, seconds)
        return self._status

    def wait_for_text(self, text: str, seconds: float = 120) -> None:
        """Wait until it has printed a text."""
        end = time.monotonic() + seconds
        while text not in self.text:
            assert time.monotonic() < end, self.text
            time.sleep(0.05)

    def kill(self) -> None:
        """End it, with all of its session."""
        if self._status is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.wait()


class ForkServer:
    """A process that imports modules once, and forks a child for each command.

    Args:
        folder: Where it works, and where the outputs of its children go.
        modules: What it imports.
        watched: Whether `Watch` looks at it and its children; each then prints a line of what was seen.
        environment: Its variables, beside the path of imports.
    """

    def __init__(
        self, folder: Path, modules: Sequence[str], *, watched: bool = False, environment: dict[str, str]
    ) -> None:
        self._folder = folder
        self._jobs = 0
        path = ":".join(map(str, PATH))
        code = "import sys; from helpers.forks import serve; serve(sys.argv[1] == 'True', sys.argv[2:])"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", code, str(watched), *modules],
            cwd=folder,
            env=environment | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, request: dict[str, Any], seconds: float = 120) -> int:
        """Send a request; return the number that it answers."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        assert ready, f"no answer to {request} within {seconds} s"
        return int(self._process.stdout.readline())

    def start(
        self, folder: Path, command: list[str], *, port: str = "", processes: int = 0, **environment: str
    ) -> Job:
        """Start a command.

        Args:
            folder: Where it works.
            command: The program, ``bandpo``, ``rlvet`` or ``bandpo-lab``, and its arguments.
            port: On which the processes meet.
            processes: How many processes torch's launcher starts; without a launcher if 0.
            environment: Variables beside those of the server.
        """
        self._jobs += 1
        output = self._folder / f"job-{self._jobs}.txt"
        output.touch()
        request = {
            "folder": str(folder), "command": command, "output": str(output), "processes": processes, "port": port,
            "environment": environment,
        }  # fmt: skip
        # The first one also waits for the imports.
        return Job(self, self.ask(request, 600), output)

    def close(self) -> None:
        """End the server."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        assert self._process.stdout is not None
        self._process.stdout.close()


def serve(watched: bool, modules: Sequence[str]) -> None:
    """Import the modules, and fork a child for each request that is read from the standard input."""
    watch = Watch(os.getcwd()) if watched else None
    for module in modules:
        importlib.import_module(module)
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        if watch is not None:
            watch.is_paused = True
        pid = os.fork()
        if pid == 0:
            _become(request, watch)
            return
        print(pid, flush=True)


def _become(request: dict[str, Any], watch: Watch | None) -> None:
    """Run the command of a request in this child."""
    os.setsid()
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.chdir(request["folder"])
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    if request["processes"]:
        _launch(request)
    elif watch is None:
        sys.exit(run(request["command"]))
    else:
        watch.folder = os.getcwd()
        watch.is_paused = False
        run(request["command"])
        print("RESULT", json.dumps(watch.result()))


def _launch(request: dict[str, Any]) -> None:
    """Run a command in several processes by torch's launcher, which ends all when one is lost."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=request["processes"],
        run_id="none",
        rdzv_backend="static",
        rdzv_endpoint=f"127.0.0.1:{request['port']}",
        rdzv_configs={"rank": 0, "timeout": 900},
        max_restarts=0,
        start_method="fork",
    )
    try:
        elastic_launch(config, _rank)(request)
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        sys.exit(1)


def _rank(request: dict[str, Any]) -> None:
    from bandpo_lab.cli import main

    Path(f"{request['output']}.rank{os.environ['RANK']}").write_text(str(os.getpid()), encoding="utf-8")
    sys.argv = request["command"]
    main()
