"""What a command opens, starts and imports, as an audit hook of Python sees it from within the process."""

import importlib
import json
import os
import sys
from typing import Any


class Watch:
    """Note the processes, connections and files outside of a folder that this process begins from now on.

    Args:
        folder: The folder of a stranger.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.events: list[str] = []
        self.is_paused = False
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.is_paused:
            return
        if event == "subprocess.Popen":
            self.events.append(f"{event} {arguments[1]}")
        if event in ("os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.connect"):
            self.events.append(event)
        if event == "socket.getaddrinfo" or (event == "socket.bind" and arguments[1] != ("::1", 0)):
            # urllib3 binds the latter when it is imported, to see whether the machine has IPv6.
            self.events.append(f"{event} {arguments[1:]}")
        if event == "exec" and arguments[0].co_filename.startswith(self.folder):
            self.events.append(f"exec {arguments[0].co_filename}")
        if event == "open" and isinstance(arguments[0], str):
            path, mode, flags = arguments
            writes = set(mode or "") & set("wax+") or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            outside = not os.path.abspath(path).startswith(self.folder)
            # Python caches what it has compiled, first under a name with a number.
            is_cache = path.endswith(".pyc") or ".pyc." in path
            if writes and outside and not is_cache and not path.startswith("/dev/"):
                self.events.append(f"open {path}")

    def result(self) -> dict[str, Any]:
        """Return the events, the modules imported from the folder, and whether it is on the path of imports."""
        inside = [
            name
            for name, module in sys.modules.items()
            if str(getattr(module, "__file__", None) or "").startswith(self.folder)
        ]
        return {
            "events": self.events,
            "modules": inside,
            "path": self.folder in sys.path or "" in sys.path,
        }


def run(command: list[str]) -> str | int | None:
    """Run ``bandpo``, ``rlvet`` or ``bandpo-lab`` in this process; return the status with which it ends."""
    program = importlib.import_module(f"{command[0].replace('-', '_')}.cli")
    sys.argv = command
    try:
        program.main()
    except SystemExit as stop:
        return stop.code
    return 0


def main() -> None:
    """Run the command that the variable COMMAND names, and print what was seen in a line of JSON."""
    watch = Watch(os.getcwd())
    run(json.loads(os.environ["COMMAND"]))
    print("RESULT", json.dumps(watch.result()))
