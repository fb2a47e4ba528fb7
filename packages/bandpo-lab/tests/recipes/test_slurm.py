"""The recipe under a fake Slurm: started on two nodes, stopped before its time limit, queued again and finished."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.frameworks import needs
from helpers.sources import ROOT, SOURCES

RECIPES = ROOT / "packages/bandpo-lab/src/bandpo_lab/recipes"

# What the real programs do as far as the script can see; each call is a line of the file calls.
FAKES = {
    # One task on this machine, whichever node is asked for.
    "srun": """
        while [[ $1 == --* ]]; do case $1 in --nodelist=*) node=${1#*=} ;; esac; shift; done
        echo "srun ${node:-all} $*" >> "$FAKE/calls"
        exec "$@" """,
    "scontrol": """
        echo "scontrol $*" >> "$FAKE/calls"
        if [ "$1" = show ]; then printf 'nodea\\nnodeb\\n'; fi """,
    "getent": """
        printf '127.0.1.1 STREAM nodea\\n10.0.0.5 STREAM\\n' """,
}
# `python -c 'import ray; ...; exit(len(ray.nodes()) < N)'` asks whether N nodes have joined. It waits until they have.
JOINED = """
        if [ "$1" = -c ]; then
          wanted=${2##*< }
          until [ "$(find "$FAKE" -name 'node-*' | wc -l)" -ge "${wanted%)}" ]; do sleep 0.05; done
          exit 0
        fi"""
WITHOUT_RAY = FAKES | {
    "ray": """
        if [ "$1" != start ]; then exit 0; fi
        [ -z "${RAY_TMPDIR:-}" ] || mkdir -p "$RAY_TMPDIR"
        trap 'rm "$FAKE/node-$$"; echo "ray ended" >> "$FAKE/calls"; exit 0' TERM
        touch "$FAKE/node-$$"
        while :; do sleep 0.05; done """,
    "python": JOINED,
    # `bandpo-lab run verl …` trains six steps and resumes as verl does.
    "bandpo-lab": """
        echo "bandpo: checkpoints $BANDPO_OUTPUT/qwen starts at step 0"
        checkpoints=$BANDPO_OUTPUT/qwen/latest_checkpointed_iteration.txt
        step=$(cat "$checkpoints" 2>/dev/null || echo 0)
        echo "training from step $step" >> "$FAKE/calls"
        while [ "$step" -lt 6 ]; do
          sleep ${STEP_TIME:-0.2}
          step=$((step + 1))
          mkdir -p "$(dirname "$checkpoints")"
          echo "$step" > "$checkpoints"
        done """,
}


class Slurm:
    """Runs a batch script as one job: the signal before the time limit, and a run more after each requeue."""

    def __init__(self, folder: Path, fakes: dict[str, str], **environment: str) -> None:
        self.folder = folder
        self.job = str(os.getpid())
        (folder / "bin").mkdir()
        for name, text in fakes.items():
            (folder / "bin" / name).write_text(f"#!/usr/bin/env bash\n{text}")
            (folder / "bin" / name).chmod(0o755)
        shutil.copytree(RECIPES, folder / "recipes")
        job = {"SUBMIT_DIR": str(folder), "JOB_ID": self.job, "JOB_NODELIST": "node[a-b]"}
        job |= {"JOB_NUM_NODES": "2", "GPUS_ON_NODE": "4", "CPUS_PER_TASK": "16"}
        self.environment = os.environ | {
            "PATH": f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "FAKE": str(folder),
            "BANDPO_OUTPUT": str(folder / "runs"),
            **{f"SLURM_{name}": value for name, value in job.items()},
            **environment,
        }

    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def submit(
        self,
        *arguments: str,
        out_of_time: Callable[[], bool] = lambda: False,
        meanwhile: Callable[[int], None] = lambda start: None,
        limit: float = 60,
    ) -> list[int]:
        """Return the exit status of each start; the first is sent the signal as soon as its time is over.

        Args:
            arguments: Of the batch script.
            out_of_time: Whether the first start's time is over.
            meanwhile: Called again and again while the script runs, with the number of the start, from 0.
            limit: Seconds for each start.
        """
        statuses = []
        while self.calls().count(f"scontrol requeue {self.job}") == len(statuses):
            variables = self.environment | {"SLURM_RESTART_COUNT": str(len(statuses))}
            with (self.folder / f"bandpo-{self.job}.log").open("a") as log:
                command = ["bash", str(self.folder / "recipes/slurm.sbatch"), *arguments]
                printed = {"stdout": log, "stderr": log}
                script = subprocess.Popen(command, env=variables, start_new_session=True, **printed)
                try:
                    ends, signalled = time.monotonic() + limit, bool(statuses)
                    while script.poll() is None and time.monotonic() < ends:
                        meanwhile(len(statuses))
                        if not signalled and out_of_time():
                            script.send_signal(signal.SIGUSR1)
                            signalled = True
                        time.sleep(0.02)
                    assert script.poll() is not None, "the job hangs"
                finally:
                    if script.poll() is None:
                        os.killpg(script.pid, signal.SIGKILL)
                    script.wait()
            statuses.append(script.returncode)
        return statuses

    def log(self) -> str:
        return (self.folder / f"bandpo-{self.job}.log").read_text()

    def ray_folder(self) -> Path:
        return Path(f"/tmp/ray-{self.job}")  # noqa: S108  # where the script puts it


RECIPE = ("qwen2.5-3b-instruct", "band-kl")


def checkpoint(slurm: Slurm) -> int:
    path = slurm.folder / "runs/qwen/latest_checkpointed_iteration.txt"
    return int(path.read_text() or 0) if path.exists() else 0


def test_a_job_out_of_time_is_queued_again_and_goes_on(tmp_path):
    slurm = Slurm(tmp_path, WITHOUT_RAY)
    assert slurm.submit(*RECIPE, out_of_time=lambda: checkpoint(slurm) >= 2) == [0, 0]
    assert checkpoint(slurm) == 6
    calls = slurm.calls()
    first, second = (int(c.split()[-1]) for c in calls if c.startswith("training from"))
    assert first == 0
    assert 2 <= second < 6
    port = 20000 + int(slurm.job) % 20000
    for node, role in ("nodea", "--head"), ("nodeb", f"--address=10.0.0.5:{port}"):
        assert sum(c.startswith(f"srun {node} ray start --block") and role in c for c in calls) == 2
    assert calls.count("ray ended") == 4  # head and worker of both runs
    assert calls.count(f"scontrol requeue {slurm.job}") == 1
    assert not slurm.ray_folder().exists()
    assert "queued again" in slurm.log()


def test_a_job_that_saved_nothing_is_not_queued_again(tmp_path):
    slurm = Slurm(tmp_path, WITHOUT_RAY, STEP_TIME="30")
    other = tmp_path / "runs/another-job/latest_checkpointed_iteration.txt"
    other.parent.mkdir(parents=True)

    def begun_while_another_job_saves() -> bool:
        other.touch()
        return "training from step 0" in slurm.calls()

    assert slurm.submit(*RECIPE, out_of_time=begun_while_another_job_saves) == [1]
    assert "lower trainer.save_freq" in slurm.log()
    assert not any("requeue" in call for call in slurm.calls())
    assert not slurm.ray_folder().exists()


def test_a_failed_training_fails_the_job_and_leaves_no_ray(tmp_path):
    fakes = WITHOUT_RAY | {"bandpo-lab": "exit 3"}
    slurm = Slurm(tmp_path, fakes)
    assert slurm.submit(*RECIPE) == [3]
    assert slurm.calls().count("ray ended") == 2
    assert not slurm.ray_folder().exists()


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["status", "123"], "scontrol show job 123"),
        (["log", "123"], "tail -n +1 -F bandpo-123.log"),
        (["stop", "123"], "scancel 123"),
        (["summary", "123"], "bandpo-lab recipes summary bandpo-123.log"),
        (["status", "raysubmit_1"], "ray job status --address http://head:8265 raysubmit_1"),
        (["log", "raysubmit_1"], "ray job logs --follow --address http://head:8265 raysubmit_1"),
        (["stop", "raysubmit_1"], "ray job stop --address http://head:8265 raysubmit_1"),
        (["list"], "ray job list --address http://head:8265"),
    ],
)
def test_a_job_is_looked_after_in_one_place(arguments, command):
    words = [RECIPES / "job.sh", "--dry-run", *arguments]
    variables = {"PATH": "/usr/bin:/bin", "RAY_ADDRESS": "http://head:8265"}
    found = subprocess.run(words, env=variables, capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == command


def test_a_job_without_a_name_is_asked_for():
    found = subprocess.run([RECIPES / "job.sh", "log"], capture_output=True, text=True)
    assert found.returncode == 2
    assert "summary JOB" in found.stderr


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)  # Ray and verl are started twice
def test_two_real_nodes_train_are_stopped_queued_again_and_finish_as_one_run_of_two_legs(tmp_path_factory):
    """Ray and verl are real, small and on the CPU; both nodes are this machine."""
    needs("verl")
    from test_launching import end_ray, small

    from bandpo_lab.cluster.cost import read_steps
    from bandpo_lab.rehearsal import files
    from bandpo_lab.rehearsal.run import environment
    from rlvet import open_run
    from rlvet.runs.legs import legs_of

    folder = tmp_path_factory.mktemp("s")
    fakes = {name: FAKES[name] for name in ("srun", "scontrol")}
    slurm = Slurm(folder, fakes, SLURM_GPUS_ON_NODE="1", SLURM_CPUS_PER_TASK="6")
    slurm.environment |= environment(folder) | {
        "PATH": slurm.environment["PATH"],
        files.RUN: "first",
        "PYTHONPATH": os.pathsep.join(map(str, SOURCES)),
    }
    overrides = [*small(folder, steps=4), "trainer.save_freq=1", "trainer.resume_mode=auto"]
    trained = folder / "runs/small"
    overrides.append(f"trainer.default_local_dir={trained}")
    saved = trained / "latest_checkpointed_iteration.txt"
    diagnosed: dict[int, Any] = {}  # by start, while it trains
    first_leg: dict[str, bytes] = {}  # its files, as they are while the second trains

    def step_1_is_done() -> bool:
        """And said: verl prints a step's metrics after its checkpoint, and Ray takes a moment to bring them."""
        return saved.exists() and 1 in read_steps(slurm.log().splitlines()) and 0 in diagnosed

    def diagnose_while_it_trains(start: int) -> None:
        """Diagnose the run's folder once in each start, as soon as its leg has logged a step."""
        legs = legs_of(trained)
        if start in diagnosed or len(legs) <= start or not logged_steps(legs[start]):
            return
        diagnosed[start] = diagnosis(trained)
        if start == 1:
            first_leg.update({file.name: file.read_bytes() for file in legs[0].iterdir() if file.is_file()})

    try:
        statuses = slurm.submit(
            *RECIPE,
            *overrides,
            out_of_time=step_1_is_done,
            meanwhile=diagnose_while_it_trains,
            limit=1200,
        )
    finally:
        end_ray(slurm.ray_folder())
    assert statuses == [0, 0], slurm.log()[-4000:]
    assert saved.read_text() == "4"
    first, second = (set(read_steps(part.splitlines())) for part in slurm.log().split("queued again"))
    assert 1 in first
    assert 1 not in second
    assert 4 in second
    assert (trained / "global_step_4/actor/model_world_size_2_rank_1.pt").exists()
    assert not slurm.ray_folder().exists()
    # Each start left a leg. The second goes on from the first's checkpoint, and takes nothing from the first's files.
    legs = legs_of(trained)
    assert len(legs) == 2
    for leg in legs:
        assert {"console.log", "metrics.jsonl", "config.yaml", "run.json"} <= {
            file.name for file in leg.iterdir()
        }
        assert "bandpo: loss" in (leg / "console.log").read_text()
    begun, resumed = (logged_steps(leg) for leg in legs)
    assert begun[0] == 1
    assert resumed == list(range(resumed[0], 5))
    assert 1 < resumed[0] <= begun[-1] + 1
    assert (
        f"goes on from {trained / f'global_step_{resumed[0] - 1}'}\n" in (legs[1] / "console.log").read_text()
    )
    assert {file.name: file.read_bytes() for file in legs[0].iterdir() if file.is_file()} == first_leg
    # The two are one run, while it trains and afterwards.
    run = open_run(trained)
    assert [row["step"] for row in run.rows] == [1, 2, 3, 4]
    assert run.setup.method == "Band(KL(), 0.05, max_ratio=10)"
    assert sorted(diagnosed) == [0, 1]
    assert 1 <= diagnosed[0]["log"]["rows"] <= len(begun)
    assert resumed[0] <= diagnosed[1]["log"]["rows"] <= 4
    afterwards = diagnosis(trained)
    assert afterwards["log"]["rows"] == 4
    assert "2 legs" in afterwards["log"]["source"]


def logged_steps(leg: Path) -> list[int]:
    """Return the steps of a training that a leg's file has whole so far."""
    path = leg / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row["step"] for row in rows if "actor/grad_norm" in row["data"]]


def diagnosis(run: Path) -> Any:
    """Return what `rlvet diagnose` prints of a folder; it exits with 1 where it finds something to fix."""
    command = [sys.executable, "-m", "rlvet", "diagnose", str(run), "--json"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert found.returncode in (0, 1), found.stderr
    return json.loads(found.stdout)
