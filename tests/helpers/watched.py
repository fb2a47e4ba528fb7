"""What a command opens, starts and imports, as an audit hook of Python sees it from within its processes."""

import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any


class Watch:
    """Note the processes, connections and files outside of a folder that this process begins from now on.

    Args:
        folder: The folder of a stranger.
        log: A file to which this process, and each that is forked from it, adds a line for each event, and for each
            file of the folder that it opens to read.
    """

    def __init__(self, folder: str, log: str | None = None) -> None:
        self.folder = folder
        self.events: list[str] = []
        self.is_paused = False
        self._log = log
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.is_paused:
            return
        if event == "subprocess.Popen":
            executable, words, folder, _ = arguments
            start = {"executable": str(executable), "words": [*map(str, words)], "folder": folder}
            self._note(f"{event} {json.dumps(start)}")
        if event == "os.fork":
            self._note(f"{event} in {sys._getframe(1).f_code.co_filename}")
        if event in ("os.system", "os.exec", "os.posix_spawn", "socket.connect"):
            self._note(event)
        if event == "socket.getaddrinfo" or (event == "socket.bind" and arguments[1] != ("::1", 0)):
            # urllib3 binds the latter when it is imported, to see whether the machine has IPv6.
            self._note(f"{event} {arguments[1:]}")
        if event == "exec" and arguments[0].co_filename.startswith(self.folder):
            self._note(f"exec {arguments[0].co_filename}")
        if event == "open" and isinstance(arguments[0], str):
            path, mode, flags = arguments
            writes = set(mode or "") & set("wax+") or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            outside = not os.path.abspath(path).startswith(self.folder)
            # Python caches what it has compiled, first under a name with a number.
            is_cache = path.endswith(".pyc") or ".pyc." in path
            if not writes and not outside:
                self._write("reads", os.path.abspath(path))
            if writes and outside and not is_cache and not path.startswith("/dev/"):
                self._note(f"open {path}")

    def _note(self, event: str) -> None:
        self.events.append(event)
        self._write("events", event)

    def _write(self, kind: str, text: str) -> None:
        if self._log is None:
            return
        # It is opened each time, since a process that reads closes what it inherits.
        self.is_paused = True
        try:
            file = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.write(file, f"{json.dumps([os.getpid(), kind, text])}\n".encode())
            os.close(file)
        finally:
            self.is_paused = False

    def result(self) -> dict[str, Any]:
        """Return the events, the modules imported from the folder, and whether it is on the path of imports.

        They are those of this process, whose number is ``process``.
        """
        inside = [
            name
            for name, module in sys.modules.items()
            if str(getattr(module, "__file__", None) or "").startswith(self.folder)
        ]
        return {
            "process": os.getpid(),
            "events": self.events,
            "modules": inside,
            "path": self.folder in sys.path or "" in sys.path,
        }


def run(command: list[str]) -> str | int | None:
    """Run ``bandpo``, ``rlvet``, ``bandpo-lab`` or a module in this process; return the status with which it ends."""
    name = command[0] if "." in command[0] else f"{command[0].replace('-', '_')}.cli"
    program = importlib.import_module(name)
    sys.argv = command
    try:
        program.main()
    except SystemExit as stop:
        return stop.code
    return 0


def main(action: Callable[[list[str]], object] = run) -> None:
    """Run the command that the variable COMMAND names, and print what was seen in a line of JSON.

    Args:
        action: What is called with the command.
    """
    action(json.loads(os.environ["COMMAND"]))
    assert own_watch is not None
    print("RESULT", json.dumps(own_watch.result()))


own_watch: Watch | None = None
"""The watch of this process, see `watch_from_start`."""


def watch_from_start() -> None:
    """Watch this process; `helpers/startup/sitecustomize.py` calls this in each process of Python that starts."""
    global own_watch
    own_watch = Watch(os.environ["WATCHED_FOLDER"], os.environ["WATCH_LOG"])
