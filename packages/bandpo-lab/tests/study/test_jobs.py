"""The processes of a study: how they end, and that none is left behind."""

import os
import subprocess
import sys
import time
from functools import partial

import psutil
import pytest

from bandpo_lab.study.jobs import Job, run_in_processes


def ending_with(codes, folder, monkeypatch):
    """Jobs that print a status and end with it."""
    (folder / "ending.py").write_text("import sys; print(sys.argv[1]); sys.exit(int(sys.argv[1]))")
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    monkeypatch.syspath_prepend(folder)
    return [Job("ending", [str(code)], folder / f"{code}.log") for code in codes]


def test_a_failing_job_does_not_disturb_the_others(tmp_path, monkeypatch):
    jobs = ending_with([0, 3, 1], tmp_path, monkeypatch)
    assert {place: outcome.code for place, outcome in run_in_processes(jobs, 2, preload=[])} == {
        0: 0,
        1: 3,
        2: 1,
    }
    assert jobs[1].log.read_text() == "3\n"


def test_side_by_side_each_keeps_its_exit_code():
    ended = run_in_processes([partial(sys.exit, 3)] * 60, 8, preload=[])
    assert [outcome.code for _, outcome in ended] == [3] * 60


SLEEPING_JOB = """
import sys
from pathlib import Path
from bandpo_lab.study.jobs import Job, run_in_processes
list(run_in_processes([Job("sleeping", [], Path(sys.argv[1]))], 1, preload=[]))
"""


@pytest.mark.slow
def test_no_process_outlives_a_study_that_is_killed(tmp_path):
    (tmp_path / "sleeping.py").write_text("import time; print('started', flush=True); time.sleep(600)")
    written = tmp_path / "written"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    with subprocess.Popen([sys.executable, "-c", SLEEPING_JOB, str(written)], env=environment) as owner:
        while not (written.exists() and written.read_text()):
            assert owner.poll() is None
            time.sleep(0.05)
        family = psutil.Process(owner.pid).children(recursive=True)
        owner.kill()
    _, alive = psutil.wait_procs(family, timeout=10)
    alive = [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    for process in alive:
        process.kill()
    assert family
    assert not alive
