"""Folders of strangers, and what a command that reads them opens, starts and imports."""

import json
import subprocess
import sys
from pathlib import Path

from helpers.forks import PATH

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


def result_of(folder: Path, command: list[str], *, program: str = "bandpo", **environment: str) -> dict:
    """Run a command within a folder; return what it imported, started and wrote, and what it printed.

    Args:
        folder: A stranger's folder, in which the command runs.
        command: The arguments of the command.
        program: ``bandpo``, ``rlvet`` or ``bandpo-lab``.
        environment: Variables beside those that the command needs.

    Returns:
        ``events`` lists processes, connections and files written outside of the folder, ``modules`` the modules that
        were imported from it, and ``path`` says whether it is on the path of imports. ``output`` is what was printed.
    """
    run = subprocess.run(
        [sys.executable, "-P", "-c", "from helpers.watched import main; main()"],
        cwd=folder,
        env={
            "COMMAND": json.dumps([program, *command]),
            "PYTHONPATH": ":".join(map(str, PATH)),
        }
        | own_environment(folder)
        | environment,
        capture_output=True,
        text=True,
    )
    return read_result(run.stdout + run.stderr)


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
