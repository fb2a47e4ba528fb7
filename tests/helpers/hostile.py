"""Folders of strangers, and what a command that reads them opens, starts and imports."""

import json
import subprocess
import sys
from pathlib import Path

PLANTED = (
    *("evilmod", "cuda", "pynvml", "opt_einsum", "mlx", "trl", "tokenizers_extra"),
    *("yaml", "numpy", "pyarrow", "rich", "typer", "json", "sqlite3"),
)
"""Modules that lie in the stranger's folder: one that its texts name, and some that libraries try to import."""

LOADED = """
import json, os, sys

opened = []


def hook(event, arguments):
    if event == "subprocess.Popen":
        opened.append(f"{event} {arguments[1]}")
    if event in ("os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.connect"):
        opened.append(event)
    if event == "socket.getaddrinfo" or event == "socket.bind" and arguments[1] != ("::1", 0):
        # urllib3 binds the latter when it is imported, to see whether the machine has IPv6.
        opened.append(f"{event} {arguments[1:]}")
    if event == "exec" and arguments[0].co_filename.startswith(folder):
        opened.append(f"exec {arguments[0].co_filename}")
    if event == "open" and isinstance(arguments[0], str):
        path, mode, flags = arguments
        writes = set(mode or "") & set("wax+") or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        outside = not os.path.abspath(path).startswith(folder)
        if writes and outside and not path.startswith("/dev/") and not path.endswith(".pyc"):
            # Python caches what it has compiled under a name with a number.
            if ".pyc." not in path:
                opened.append(f"open {path}")


folder = os.getcwd()
sys.addaudithook(hook)
program, *arguments = json.loads(os.environ["COMMAND"])
if program == "bandpo-lab":
    from bandpo_lab.cli import main
else:
    from bandpo.cli import main

sys.argv = [program, *arguments]
try:
    main()
except SystemExit:
    pass
inside = [
    name
    for name, module in sys.modules.items()
    if str(getattr(module, "__file__", None) or "").startswith(os.getcwd())
]
print("RESULT", json.dumps({"events": opened, "modules": inside, "path": os.getcwd() in sys.path or "" in sys.path}))
"""


def planted(folder: Path) -> Path:
    """Put modules into the folder that leave a file behind when they are imported."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in PLANTED:
        (folder / f"{name}.py").write_text(f"open('ran-{name}', 'w').close()\n")
    return folder


SOURCES = Path(__file__).parents[2] / "src", Path(__file__).parents[2] / "lab" / "src"
"""The folders of bandpo and of the lab."""


def result_of(folder: Path, command: list[str], *, program: str = "bandpo", **environment: str) -> dict:
    """Run a command within a folder; return what it imported, started and wrote, and what it printed.

    Args:
        folder: A stranger's folder, in which the command runs.
        command: The arguments of the command.
        program: ``bandpo`` or ``bandpo-lab``.
        environment: Variables beside those that the command needs.

    Returns:
        ``events`` lists processes, connections and files written outside of the folder, ``modules`` the modules that
        were imported from it, and ``path`` says whether it is on the path of imports. ``output`` is what was printed.
    """
    temporary = folder / "temporary"
    temporary.mkdir(exist_ok=True)
    run = subprocess.run(
        [sys.executable, "-P", "-c", LOADED],
        cwd=folder,
        env={
            "COMMAND": json.dumps([program, *command]),
            "PATH": "",
            "PYTHONPATH": ":".join(map(str, SOURCES)),
            "TMPDIR": str(temporary),
            "HOME": str(temporary),
        }
        | environment,
        capture_output=True,
        text=True,
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, run.stdout + run.stderr
    assert "Traceback" not in run.stderr, run.stderr
    return {**json.loads(lines[0].removeprefix("RESULT ")), "output": run.stdout + run.stderr}


def check_nothing_ran(folder: Path, result: dict, processes: tuple[str, ...] = ()) -> None:
    """Check that a command ran nothing of a stranger's folder.

    Args:
        folder: The folder, with what `planted` put there.
        result: What `result_of` returned.
        processes: Parts of the command lines of the processes that the command may start.
    """
    others = [event for event in result["events"] if not any(part in event for part in processes)]
    assert others == [], others
    assert result["modules"] == [], result["modules"]
    assert not result["path"]
    ran = [file.name for file in folder.rglob("ran*")]
    assert ran == [], ran
