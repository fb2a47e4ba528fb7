"""A reader on a hostile host: the right answer or one sentence with the remedy, and nothing left.

Each condition is lines of Python that a program runs before it reads a file. It reads by a copy of its process and by
a new one, a log and a record, and prints a result of one line.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

import rlvet

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the conditions are those of Linux"
)

PROGRAM = """
import os, sys, threading, signal, resource
from pathlib import Path
from rlvet import RecordedRun, open_run
from rlvet.lint import lint_file
from rlvet.runs import gate
from rlvet.errors import RlvetError
{by}
{condition}

def read():
    if {kind!r} == "a configuration":
        return str(lint_file({path!r})).split(chr(10))[0]
    run = open_run({path!r})
    return sum(1 for _ in run.batches()) if isinstance(run, RecordedRun) else len(run.rows)

{call}
"""

ONCE = """
try:
    print("answer", read())
except (RlvetError, OSError) as error:
    print("error", " ".join(str(error).split()))
"""

IN_FIFTY_THREADS = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(50) as pool:
    print("answer", *set(pool.map(lambda _: read(), range(50))))
"""

ENVIRONMENT = {**os.environ, "RLVET_LIMITS": "", "OMP_NUM_THREADS": "1"}
"""The environment variables of a program, which has the usual limits."""

NOTHING: Mapping[str, str] = {}

VARIABLES = {
    "Python without docstrings and assertions": {"PYTHONOPTIMIZE": "2"},
    "the locale C": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
}
"""Conditions that are environment variables."""

WAYS = {"copied": "", "new": "gate._can_fork = lambda: False"}
"""How the process that reads is started."""

ROWS = {"log": 40, "record": 3}
"""The right answers."""

CONDITIONS = {
    "1,100 open files": (
        "resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))\nkept = [open(os.devnull) for _ in range(1100)]"
    ),
    "a limit of 24 open files": "resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))",
    "SIGCHLD ignored": "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
    "SIGPIPE ends a process": "signal.signal(signal.SIGPIPE, signal.SIG_DFL)",
    "SIGPIPE ignored": "signal.signal(signal.SIGPIPE, signal.SIG_IGN)",
    "a handler of alarms": "signal.signal(signal.SIGALRM, lambda *_: sys.exit('alarm'))",
    "a running thread": "threading.Thread(target=threading.Event().wait, daemon=True).start()",
    "a lock that is held": "import logging\nlogging._lock.acquire()",
    "closed standard streams": "os.close(0); os.close(2)",
    "600 MB of address space": "resource.setrlimit(resource.RLIMIT_AS, (6 * 10**8, 6 * 10**8))",
    "no /proc": (
        "listed = os.listdir\n"
        "def refuse(path='.'):\n"
        "    if str(path).startswith('/proc'): raise FileNotFoundError(2, 'No such file', path)\n"
        "    return listed(path)\n"
        "os.listdir = refuse"
    ),
    "no home and no temporary folder": "os.environ.pop('HOME', None)\nos.environ['TMPDIR'] = '/no/such/folder'",
}
"""Conditions under which the answer is the right one."""

REFUSALS = {
    "no processes are left": (
        "import errno\n"
        "def refuse(*_, **__): raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))\n"
        "os.fork = refuse\n"
        "import subprocess\n"
        "subprocess.Popen = refuse",
        r"cannot be started: Resource temporarily unavailable; .* RLVET_LIMITS=off$",
    ),
    "no interpreter is known": (
        "gate._can_fork = lambda: False\nsys.executable = None",
        r"cannot be started: sys\.executable names no Python; .* RLVET_LIMITS=off$",
    ),
    "the interpreter was removed": (
        "gate._can_fork = lambda: False\nsys.executable = '/no/such/python'",
        r"cannot be started: No such file or directory; .* RLVET_LIMITS=off$",
    ),
}
"""Conditions under which nothing can be read, with the end of the sentence that says so."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the paths of a log and of a record."""
    folder = tmp_path_factory.mktemp("runs")
    log = folder / "log" / "metrics.jsonl"
    log.parent.mkdir()
    log.write_text("".join(f'{{"step": {step}, "reward": 0.5}}\n' for step in range(ROWS["log"])))
    torch = pytest.importorskip("torch")
    pytest.importorskip("pyarrow")
    from bandpo.audit import Recorder

    with Recorder(folder / "record", method="FixedClip(0.2)") as recorder:
        for step in range(ROWS["record"]):
            logp = -torch.rand(4, 8) - 0.01
            recorder.add(logp=logp, logp_old=logp, advantages=torch.ones(4), step=step)
    return {"log": str(log.parent), "record": str(recorder.path)}


def started(
    path: str, kind: str, way: str, condition: str, call: str = ONCE, variables: Mapping[str, str] = NOTHING
) -> subprocess.Popen[str]:
    """Start a program that reads a run under a condition, with further environment variables."""
    program = PROGRAM.format(by=WAYS[way], condition=condition, path=path, kind=kind, call=call)
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**ENVIRONMENT, **variables},
    )


def result(program: subprocess.Popen[str]) -> str:
    """Return what a program printed, if it said nothing on standard error."""
    output, errors = program.communicate(timeout=500)
    assert errors == ""
    assert program.returncode == 0
    return output.strip()


COMBINATIONS = [
    pytest.param(kind, way, marks=() if (kind, way) == ("log", "copied") else pytest.mark.slow)
    for kind in ROWS
    for way in WAYS
]


@pytest.mark.parametrize(("kind", "way"), COMBINATIONS)
@pytest.mark.parametrize("name", CONDITIONS)
def test_the_answer_is_right(name, kind, way, runs):
    assert result(started(runs[kind], kind, way, CONDITIONS[name])) == f"answer {ROWS[kind]}"


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", VARIABLES)
def test_environment_variables_change_no_answer(name, way, runs):
    program = started(runs["log"], "log", way, "", variables=VARIABLES[name])
    assert result(program) == f"answer {ROWS['log']}"


# --- Each kind of log, batches and configuration, at night ---

LOGGED = [{"step": step, "reward": 0.01 * step, "entropy": 1.0, "kl": 0.01} for step in range(1, 41)]
"""The rows of the logs that this file writes."""


def printed(row: Mapping[str, float]) -> str:
    """Return a row as TRL prints it."""
    return str({"loss": 0.1, **row, "epoch": 0.1})


def notebook(folder: Path) -> None:
    text = [f"{printed(row)}\n" for row in LOGGED]
    cell = {
        "cell_type": "code",
        "source": [],
        "outputs": [{"output_type": "stream", "name": "stdout", "text": text}],
    }
    (folder / "a.ipynb").write_text(json.dumps({"cells": [cell], "nbformat": 4, "metadata": {}}))


def page(folder: Path) -> None:
    rows = "".join(f"<tr>{''.join(f'<td>{value}</td>' for value in row.values())}</tr>" for row in LOGGED)
    header = "".join(f"<th>{name}</th>" for name in LOGGED[0])
    (folder / "a.html").write_text(f"<html><table><tr>{header}</tr>{rows}</table></html>")


def table(folder: Path) -> None:
    lines = [",".join(map(str, row.values())) for row in LOGGED]
    (folder / "log.csv").write_text("\n".join([",".join(LOGGED[0]), *lines, ""]))


def of_three_losses(write: Callable[..., None]) -> Callable[[Path], None]:
    """Return a function that writes the batches of three losses as a framework does."""

    def written(folder: Path) -> None:
        from helpers.run_files import batch

        for step in range(1, 4):
            write(folder, step, batch(step))

    return written


def in_folder(write: Callable[[Path], None]) -> Callable[[Path], None]:
    """Return a function that lets a tracker make a folder in a folder."""
    return lambda folder: write(folder / "tracked")


def kinds() -> dict[str, tuple[Callable[[Path], object], str]]:
    """Return, for each kind of file, a function that writes it in a folder, and its name there."""
    pytest.importorskip("torch")
    from helpers import run_files

    return {
        "trainer_state.json": (
            lambda folder: (folder / "trainer_state.json").write_text(json.dumps({"log_history": LOGGED})),
            "trainer_state.json",
        ),
        "CSV": (table, "log.csv"),
        "a console's text": (
            lambda folder: (folder / "train.log").write_text("\n".join(map(printed, LOGGED))),
            "train.log",
        ),
        "a notebook": (notebook, "a.ipynb"),
        "a saved page": (page, "a.html"),
        "TensorBoard": (run_files.tensorboard, ""),
        "wandb": (in_folder(run_files.wandb), ""),
        "trackio": (in_folder(run_files.trackio), ""),
        "batches of NeMo RL": (of_three_losses(run_files.nemo_rl), ""),
        "batches of slime": (of_three_losses(run_files.slime), ""),
        "batches of SkyRL": (of_three_losses(run_files.skyrl), ""),
        "a configuration": (
            lambda folder: (folder / "a.yaml").write_text("beta: 0.0\nloss_type: dapo\nnum_generations: 8\n"),
            "a.yaml",
        ),
    }


KINDS = (
    "trainer_state.json", "CSV", "a console's text", "a notebook", "a saved page", "TensorBoard", "wandb", "trackio",
    "batches of NeMo RL", "batches of slime", "batches of SkyRL", "a configuration",
)  # fmt: skip
"""The kinds beside JSON lines and records."""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return, for each kind, the path of a file or folder, and the answer that is read without a process."""
    found = {}
    for kind, (write, name) in kinds().items():
        folder = tmp_path_factory.mktemp("kind")
        write(folder)
        path = str(folder / name)
        program = started(path, kind, "copied", "", variables={"RLVET_LIMITS": "off"})
        # That of a project of trackio is a sentence: it has two runs.
        found[kind] = (path, result(program))
        assert found[kind][1].startswith("error " if kind == "trackio" else "answer "), found[kind]
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*CONDITIONS, *VARIABLES])
def test_the_answer_is_right_for_each_kind(name, kind, way, files):
    path, answer = files[kind]
    condition = CONDITIONS.get(name, "")
    found = result(started(path, kind, way, condition, variables=VARIABLES.get(name, NOTHING)))
    if name == "600 MB of address space" and kind.startswith("batches"):
        # numpy and the arrays may need more than that, and then the sentence says so.
        assert (
            found == answer or "0.6 GB of address space that this process may have; raise its limit" in found
        )
    else:
        assert found == answer


# --- Another user with an installation that nobody may write to ---

NOBODY = 65534
"""The number of a user without rights."""


def as_nobody(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a user without rights; as this user if it has no right to change."""
    user = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.getuid() == 0 else {}
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"}
    return subprocess.run(
        command, capture_output=True, text=True, cwd="/", env=environment | variables, check=False, **user
    )


def can_be_run_by_nobody(python: str) -> bool:
    """Return True if a user without rights can run a Python, and it is one for rlvet."""
    try:
        return not as_nobody(python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))").returncode
    except OSError:
        return False


@pytest.fixture
def open_folder():
    """Return a folder that other users may read, which those of pytest are not."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    for file in [folder, *folder.rglob("*")]:
        file.chmod(0o755)
    shutil.rmtree(folder)


@pytest.mark.parametrize("way", WAYS)
def test_another_user_reads_by_an_installation_that_is_read_only(way, open_folder):
    """It writes no compiled files there, and has no folder of its own."""
    python = next(filter(can_be_run_by_nobody, (sys.executable, "/usr/bin/python3")), None)
    if python is None:
        pytest.skip("another user can run no Python of this machine")
    shutil.copytree(
        Path(rlvet.__file__).parent,
        open_folder / "lib" / "rlvet",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    log = open_folder / "metrics.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in LOGGED))
    for file in [open_folder, *open_folder.rglob("*")]:
        file.chmod(0o555 if file.is_dir() else 0o444)
    before = sorted(open_folder.rglob("*"))
    program = PROGRAM.format(by=WAYS[way], condition="", path=str(log), kind="log", call=ONCE)
    outcome = as_nobody(python, "-c", program, PYTHONPATH=str(open_folder / "lib"), HOME="/no/such/home")
    assert (outcome.stdout, outcome.stderr) == (f"answer {len(LOGGED)}\n", "")
    assert sorted(open_folder.rglob("*")) == before


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_read_is_one_sentence(name, runs):
    condition, message = REFUSALS[name]
    program = started(runs["log"], "log", "copied", condition)
    printed = result(program)
    assert printed.startswith("error "), printed
    assert re.search(message, printed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ROWS)
def test_fifty_calls_at_once(kind, runs):
    assert result(started(runs[kind], kind, "new", "", IN_FIFTY_THREADS)) == f"answer {ROWS[kind]}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ROWS)
def test_the_kernel_of_a_notebook(kind, runs):
    """It has threads of its own, so a new process reads."""
    pytest.importorskip("ipykernel")
    kernels = pytest.importorskip("jupyter_client.manager")
    manager, client = kernels.start_new_kernel(startup_timeout=300)
    texts: list[str] = []
    try:
        program = PROGRAM.format(by="", condition="", path=runs[kind], kind=kind, call=ONCE)
        client.execute_interactive(
            program, timeout=300, output_hook=lambda message: texts.append(message["content"].get("text", ""))
        )
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert "".join(texts).strip() == f"answer {ROWS[kind]}"


# --- The end of the process that calls ---

READERS = {
    "that waits": "gate.answer_of(time.sleep, 1000)",
    "that computes": "gate.answer_of(math.factorial, 10**8)",
    "whose answers nobody takes": "answers = gate.answers_of(itertools.count)\nnext(answers)\ntime.sleep(1000)",
}
"""Calls of readers that do not end."""


USUAL_SIGNALS = (
    "signal.signal(signal.SIGINT, signal.default_int_handler)\nsignal.signal(signal.SIGHUP, signal.SIG_DFL)"
)
"""What a program does with signals that the shell of a job in the background lets it ignore."""


def children_of(parent: int) -> list[int]:
    """Return the numbers of the running processes that a process started."""
    children = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, number_of_parent = file.read_text(encoding="utf-8").rpartition(")")[2].split()[:2]
        except OSError:
            continue  # it has ended
        if int(number_of_parent) == parent and state != "Z":
            children.append(int(file.parent.name))
    return children


def is_running(number: int) -> bool:
    """Return True if a process runs; one that has ended may still wait for its status to be asked for."""
    try:
        return Path(f"/proc/{number}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds: float):
    """Return the first true value of a condition, or its value after a number of seconds."""
    end = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return value


@pytest.fixture
def call(tmp_path):
    """Start a program that calls a reader, and return it with the number of the reader's process."""
    programs = []

    def start(reader: str, way: str) -> tuple[subprocess.Popen[str], int]:
        # Both ways name a reader by its module.
        imports = "import itertools, math, os, signal, sys, time\nfrom rlvet.runs import gate"
        program = f"{imports}\n{USUAL_SIGNALS}\n{WAYS[way]}\n{READERS[reader]}\n"
        programs.append(subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, env=ENVIRONMENT))
        children = wait_until(lambda: children_of(programs[-1].pid), 60)
        (child,) = children
        assert wait_until(lambda: is_silenced(child), 60)
        return programs[-1], child

    yield start
    for program in programs:
        program.kill()
        program.wait()


def is_silenced(number: int) -> bool:
    """Return True if a reader has begun: its standard streams are nowhere."""
    try:
        return os.readlink(f"/proc/{number}/fd/2") == os.devnull == os.readlink(f"/proc/{number}/fd/0")
    except OSError:
        return False


ENDS = [signal.SIGTERM, signal.SIGKILL, signal.SIGHUP, signal.SIGINT]


@pytest.mark.parametrize("way", [pytest.param("new", marks=pytest.mark.slow), "copied"])
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "end", [pytest.param(end, marks=() if end is signal.SIGKILL else pytest.mark.slow) for end in ENDS]
)
def test_a_reader_ends_with_its_caller(end, reader, way, call):
    program, child = call(reader, way)
    program.send_signal(end)
    program.wait(100)
    # It takes milliseconds, and more on a machine under load. Without the caller's end it would never end.
    assert wait_until(lambda: not is_running(child), 10)


@pytest.mark.parametrize("way", [pytest.param("new", marks=pytest.mark.slow), "copied"])
def test_a_reader_inherits_no_file(way, call):
    _, child = call("that waits", way)
    files = {number: os.readlink(f"/proc/{child}/fd/{number}") for number in os.listdir(f"/proc/{child}/fd")}
    streams = [files.pop(number) for number in ("0", "1", "2")]
    assert streams == [os.devnull] * 3
    pipes = [file for file in files.values() if file.startswith("pipe:")]
    # A new process also keeps the pipe whose end tells it that its caller is gone.
    assert len(pipes) == {"copied": 1, "new": 2}[way]
    assert set(files.values()) - set(pipes) <= {os.devnull}


@pytest.mark.slow
def test_a_caller_that_was_stopped_goes_on(call, runs):
    program = started(
        runs["log"], "log", "copied", "", "print('begun', flush=True)\nfor _ in range(200): read()\n" + ONCE
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "begun\n"
    program.send_signal(signal.SIGSTOP)
    time.sleep(0.5)
    program.send_signal(signal.SIGCONT)
    assert result(program) == f"answer {ROWS['log']}"
