"""Folders of strangers, and what a command that reads them opens, starts and imports."""

import json
import subprocess
import sys
from pathlib import Path

from helpers.forks import PATH
from helpers.sources import ROOT

STARTUP = ROOT / "tests/helpers/startup"
"""Its module `sitecustomize` watches each process of Python that has this folder on its path."""

PLANTED = (
    *("evilmod", "cuda", "pynvml", "opt_einsum", "mlx", "trl", "tokenizers_extra"),
    *("yaml", "numpy", "pyarrow", "rich", "typer", "json", "sqlite3"),
)
"""Modules that lie in the stranger's folder: one that its texts name, and some that libraries try to import."""


def planted(folder: Path) -> Path:
    """Put modules into the folder that leave a file behind when they are imported."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in PLANTED:
        (folder / f"{name}.py").write_text(f"open('ran-{name}', 'w').close()\n")
    return folder


def result_of(
    folder: Path,
    command: list[str],
    *,
    program: str = "bandpo",
    code: str = "from helpers.watched import main; main()",
    **environment: str,
) -> dict:
    """Run a command within a folder; return what it imported, started and wrote, and what it printed.

    Args:
        folder: A stranger's folder, in which the command runs.
        command: The arguments of the command.
        program: ``bandpo``, ``rlvet`` or ``bandpo-lab``.
        code: What the process runs, which calls `helpers.watched.main`.
        environment: Variables beside those that the command needs.

    Returns:
        ``events`` lists processes, connections and files written outside of the folder, ``modules`` the modules that
        were imported from it, and ``path`` says whether it is on the path of imports. ``output`` is what was printed.
        ``readers`` has, for each process that the first one forked or started in Python, its ``events``, and in
        ``reads`` the files of the folder that it opened.
    """
    variables = own_environment(folder)
    log = Path(variables["TMPDIR"]) / "watch.jsonl"
    run = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=folder,
        env={
            "COMMAND": json.dumps([program, *command]),
            "PYTHONPATH": ":".join(map(str, (STARTUP, *PATH))),
            "WATCHED_FOLDER": str(folder),
            "WATCH_LOG": str(log),
        }
        | variables
        | environment,
        capture_output=True,
        text=True,
    )
    result = read_result(run.stdout + run.stderr)
    readers: dict[int, dict[str, list[str]]] = {}
    for line in log.read_text().splitlines():
        process, kind, text = json.loads(line)
        if process != result["process"]:
            readers.setdefault(process, {"events": [], "reads": []})[kind].append(text)
    return {**result, "readers": list(readers.values())}


GATE = ROOT / "packages/rlvet/src/rlvet/runs/gate.py"
"""The module that reads a stranger's files in another process."""

GATE_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from rlvet.runs.gate import serve_standard_input; serve_standard_input(int(sys.argv[2]))"
)
"""The program of that process, where it is not forked."""


def is_gate(event: str, folder: Path) -> bool:
    """Return True if an event is the start of the process that reads, in which a stranger's folder has no say."""
    if event == f"os.fork in {GATE}":
        return True
    kind, _, details = event.partition(" ")
    if kind != "subprocess.Popen":
        return False
    start = json.loads(details)
    if start["executable"] != sys.executable or start["folder"] is not None or len(start["words"]) != 6:
        return False
    *words, path, pipe = start["words"]
    inside = [entry for entry in json.loads(path) if not entry or Path(entry).is_relative_to(folder)]
    return words == [sys.executable, "-P", "-c", GATE_PROGRAM] and pipe.isdecimal() and not inside


def own_environment(folder: Path) -> dict[str, str]:
    """Return variables by which a command writes to the folder alone, and finds no program."""
    temporary = folder / "temporary"
    temporary.mkdir(exist_ok=True)
    return {"PATH": "", "TMPDIR": str(temporary), "HOME": str(temporary)}


def read_result(output: str) -> dict:
    """Return what `Watch` printed, with all of the output."""
    lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
    assert lines, output
    assert "Traceback" not in output, output
    return {**json.loads(lines[0].removeprefix("RESULT ")), "output": output}


def check_nothing_ran(folder: Path, result: dict, processes: tuple[str, ...] = ()) -> None:
    """Check that a command ran nothing of a stranger's folder. It may start the process that reads, see `is_gate`.

    Args:
        folder: The folder, with what `planted` put there.
        result: What `result_of` returned.
        processes: Parts of the command lines of the processes that the command may start.
    """
    others = [
        event
        for event in result["events"]
        if not (is_gate(event, folder) or any(part in event for part in processes))
    ]
    assert others == [], others
    assert result["modules"] == [], result["modules"]
    assert not result["path"]
    ran = [file.name for file in folder.rglob("ran*")]
    assert ran == [], ran
