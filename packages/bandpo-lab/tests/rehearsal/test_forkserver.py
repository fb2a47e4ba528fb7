"""Processes of a rehearsal come from one server, are what they were asked to be, and end with who started it."""

import os
import socket
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path

import psutil
import pytest

from bandpo_lab.rehearsal.processes import Forks, end_descendants
from bandpo_lab.rehearsal.run import train

pytestmark = [
    pytest.mark.slow,  # starts fork servers
    pytest.mark.skipif(sys.platform != "linux", reason="the fork server is Linux's"),
]


@pytest.fixture
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("f")


@pytest.fixture(scope="module")
def without_verl(tmp_path_factory) -> str:
    """A folder of imports in which verl fails at once: to import it takes ten seconds, and nothing here trains."""
    folder = tmp_path_factory.mktemp("without_verl")
    for name in ("verl", "transformers", "transfer_queue"):
        (folder / f"{name}.py").write_text("raise ImportError")
    return str(folder)


@pytest.fixture(scope="module")
def server(tmp_path_factory, without_verl):
    forkserver._forkserver._stop()  # one that another test has started, with other modules in it
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(without_verl)
        server = Forks(tmp_path_factory.mktemp("f"), dict(os.environ))
    with server:
        yield server
    forkserver._forkserver._stop()


def output_of(server: Forks, *arguments: str, **env: str) -> str:
    readable, writable = os.pipe()
    server.start(arguments, env, writable)
    os.close(writable)
    with os.fdopen(readable) as output:
        return output.read()


SCRIPT = """
import os, subprocess, sys
inner = subprocess.run([sys.executable, "-u", "inner.py", "y z"], capture_output=True, text=True)
print(*sys.argv)
print(os.getcwd(), os.environ["OF_THE_RUN"], "hydra" in sys.modules, sep="\\n")
print(inner.stdout.strip(), inner.returncode)
"""


def test_a_fork_runs_a_file_as_python_does_and_so_do_those_that_it_starts(server):
    (server.folder / "outer.py").write_text(SCRIPT)
    (server.folder / "inner.py").write_text("import sys; print(sys.argv[1], 'hydra' in sys.modules); exit(3)")
    told = output_of(server, "outer.py", "x", OF_THE_RUN="1").splitlines()
    assert told == ["outer.py x", str(server.folder), "1", "True", "y z True 3"]
    (server.folder / "a_module.py").write_text("import sys; print(__name__, sys.argv[1:])")
    assert output_of(server, "-m", "a_module", "x") == "__main__ ['x']\n"


ORPHANS = """
import os, sys, time
from pathlib import Path
from threading import Thread
from bandpo_lab.rehearsal.processes import Forks
folder = Path(sys.argv[1])
for _ in range(50):  # the system sends its signal as each thread ends
    Thread(target=time.sleep, args=(600,), daemon=True).start()
with Forks(folder, dict(os.environ)) as server:
    server.start(["outer.py"], {}, 1)
    time.sleep(600)
"""
DETACHES = """
import subprocess, sys, time
subprocess.Popen(["sleep", "600"], start_new_session=True)
subprocess.Popen([sys.executable, "sleeps.py"], start_new_session=True)
print("started", flush=True)
time.sleep(600)
"""


def test_nothing_outlives_a_killed_rehearsal(folder, without_verl, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", without_verl, prepend=os.pathsep)
    (folder / "outer.py").write_text(DETACHES)
    (folder / "sleeps.py").write_text("import time; time.sleep(600)")
    command = [sys.executable, "-c", ORPHANS, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "started\n"
        family = psutil.Process(owner.pid).children(recursive=True)
        assert len(family) >= 3
        owner.kill()
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not alive


def test_a_descendant_that_ends_by_itself_spares_no_other(monkeypatch):
    with subprocess.Popen(["true"]) as ended:
        gone = psutil.Process(ended.pid)
    with subprocess.Popen(["sleep", "600"]) as sleeper:
        listed = iter([[gone, psutil.Process(sleeper.pid)], []])
        monkeypatch.setattr(psutil.Process, "children", lambda *_, **__: next(listed))
        end_descendants(os.getpid())
        assert not psutil.pid_exists(sleeper.pid)


def test_forks_that_are_ended_and_a_client_that_ends_leave_the_server_at_work(server):
    (server.folder / "sleeps.py").write_text("import time; print('up', flush=True); time.sleep(600)")
    (server.folder / "prints.py").write_text("print('done')")
    readable, writable = os.pipe()
    server.start(["sleeps.py"], {}, writable)
    os.close(writable)
    with os.fdopen(readable) as output:
        assert output.readline() == "up\n"
        server.end_forks()
        assert output.read() == ""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(server.folder / "fork.sock"))
        client.sendall(b"[")
    assert output_of(server, "prints.py") == "done\n"


def test_a_run_that_takes_too_long_is_stopped_and_its_log_says_so(server):
    (server.folder / "sleeps.py").write_text("import time; print('up', flush=True); time.sleep(600)")
    train(server, ["sleeps.py"], server.folder, "first", timeout=1.0)
    log = (server.folder / "log-first.txt").read_text()
    assert log.endswith("BANDPO_REHEARSAL: stopped after 1 s\n")


def test_a_run_stops_at_its_first_fatal_message(server):
    (server.folder / "goes_on.py").write_text(
        "import time\nprint('Error in _run_prompt', flush=True)\n"
        "for i in range(6000):\n    print('KeyError: 1', flush=True)\n    time.sleep(0.1)"
    )
    train(server, ["goes_on.py"], server.folder, "first", timeout=300.0)
    log = (server.folder / "log-first.txt").read_text()
    assert "KeyError: 1" in log
    assert "stopped after" not in log
