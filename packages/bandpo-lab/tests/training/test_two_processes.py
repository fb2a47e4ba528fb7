"""Two processes that train together: which checkpoint they resume from, and what one says when the other is lost."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.frameworks import needs

needs("trl")

from bandpo_lab.errors import InvalidValue, RunProblem
from bandpo_lab.training.processes import Processes
from bandpo_lab.training.run_folder import RunFolder
from helpers.ports import free_port

OPTIONS = [
    "--per_device_train_batch_size=8",
    "--num_generations=4",
    "--steps_per_generation=2",
    "--eval_prompts=0",
]
OPTIONS += ["--num_iterations=1", "--save_steps=2", "--logging_steps=1", "--max_completion_length=8"]
OPTIONS += ["--train_prompts=64", "--save_total_limit=8", "--use_cpu"]


def arguments(folder, *more, steps=6):
    return ["train", *OPTIONS, f"--max_steps={steps}", "--output_dir", str(folder), *more]


@pytest.fixture(scope="module")
def start(server):
    """Start a training by torch's launcher, whose processes are forked."""
    jobs = []

    def started(folder, *more, processes=2, steps=6):
        command = ["bandpo-lab", *arguments(folder, *more, steps=steps)]
        jobs.append(server.start(Path.cwd(), command, processes=processes, port=free_port()))
        return jobs[-1]

    yield started
    for job in jobs:
        job.kill()  # what is still at work


@pytest.fixture(scope="module")
def train(start):
    """Train, and return the status and what was printed."""

    def trained(folder, *more, processes=2, steps=6):
        job = start(folder, *more, processes=processes, steps=steps)
        return job.wait(), job.text

    return trained


def train_by_torchrun(folder, *more):
    """Train as a user does, with `torchrun`, each of whose processes imports the trainer; takes longer."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_addr=127.0.0.1"]
    command += [f"--master_port={free_port()}", "-m", "bandpo_lab", *arguments(folder, *more)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return ended.returncode, ended.stdout + ended.stderr


def disturbed(start, folder, how, *more):
    """Start a long run, and send a signal to rank 1 after the first checkpoints; return the run."""
    job = start(folder, *more, steps=100)
    deadline = time.monotonic() + 120
    while not (folder / "checkpoint-4").exists():
        assert time.monotonic() < deadline, job.text
        time.sleep(0.02)
    os.kill(job.rank(1), how)
    return job


@pytest.fixture(scope="module")
def whole(tmp_path_factory, train):
    """A run of two processes that ended."""
    folder = tmp_path_factory.mktemp("two") / "run"
    status, words = train(folder)
    assert status == 0, words
    return folder


@pytest.fixture
def interrupted(whole, tmp_path):
    """The same run, before its end."""
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    for name in ("manifest.json", "report.html", "model"):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copyfile(whole / "manifest.json", folder / "manifest.json")
    seal = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({"config.yaml": seal["config.yaml"]}))
    return folder


def weights(folder):
    return (folder / "model" / "model.safetensors").read_bytes()


def rows(folder):
    return [row | {"step_time": 0} for row in RunFolder(folder).history()]


def assert_goes_on_from(step, folder, whole, train):
    status, words = train(folder, "--resume")
    assert status == 0, words
    assert f"going on from step {step}" in words
    assert (weights(folder), rows(folder)) == (weights(whole), rows(whole))


def names(folder):
    return sorted(path for path in folder.rglob("*") if not path.name.startswith(".lock"))


def append(path, content=b"more"):
    with path.open("ab") as file:
        file.write(content)


@pytest.mark.slow
def test_two_processes_go_on_from_the_newest_whole_checkpoint(interrupted, whole, train):
    """The newest is damaged, and the one before it is incomplete: the third is taken, to the same end."""
    append(interrupted / "checkpoint-6" / "rng_state_1.pth")
    (interrupted / "checkpoint-4" / "rng_state_1.pth").unlink()
    assert_goes_on_from(2, interrupted, whole, train)
    assert sorted(path.name for path in (interrupted / "damaged").iterdir()) == [
        "checkpoint-4",
        "checkpoint-6",
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("gone", [(), (6,), (6, 4)])
def test_two_processes_resume_from_each_checkpoint(gone, interrupted, whole):
    for step in gone:
        shutil.rmtree(interrupted / f"checkpoint-{step}")
    assert_goes_on_from(6 - 2 * len(gone), interrupted, whole, train_by_torchrun)
    assert not (interrupted / "damaged").exists()


@pytest.mark.slow
def test_another_number_of_processes_is_refused(interrupted, train):
    before = names(interrupted)
    status, words = train(interrupted, "--resume", processes=1)
    assert status != 0
    assert "holds a run of 2 processes, and this is one of 1 process: " in words
    assert "Traceback" not in words.partition("torch/distributed/elastic")[0]
    assert names(interrupted) == before


@pytest.mark.slow
def test_a_stopped_process_ends_the_other_with_an_error_that_names_it(tmp_path, start):
    """And the run goes on from its newest checkpoint."""
    job = disturbed(start, tmp_path / "run", signal.SIGSTOP, "--ddp_timeout=5")
    job.wait_for_text("rank 1 of 2 does not answer rank 0 (ddp_timeout is 5 s)")
    job.wait_for_text("Terminating process")
    os.kill(job.rank(1), signal.SIGKILL)  # as torch's launcher does after 30 seconds
    assert job.wait() != 0
    words = job.text
    error = next(line for line in words.splitlines() if "does not answer" in line)
    assert error.startswith("error: ")


@pytest.mark.slow
def test_a_killed_process_ends_the_run_which_resumes(tmp_path, start):
    """No half checkpoint is left under its own name, and the run goes on."""
    folder = tmp_path / "run"
    job = disturbed(start, folder, signal.SIGKILL)
    assert job.wait() != 0
    assert "rank      : 1" in job.text
    newest = max(int(path.name.partition("-")[2]) for path in folder.glob("checkpoint-*"))
    job = start(folder, "--resume", steps=100)
    job.wait_for_text(f"step {newest + 1}/100")
    job.kill()
    assert f"going on from step {newest}\n" in job.text


class OtherRank(Processes):
    """Rank 0 of two on different machines; the other gives these answers."""

    def __init__(self, answers):
        super().__init__(rank=0, size=1)
        self._answers = answers

    def gather(self, compute):
        """This process's result, and the other's of a checkpoint."""
        result = compute()
        return [result, self._answers.get(compute.__defaults__ and compute.__defaults__[0].name)]


@pytest.fixture
def sealed_checkpoints(tmp_path):
    from bandpo_lab.files.writing import seal

    for step in (2, 4, 6):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        seal(folder, [folder / "trainer_state.json"])
    return tmp_path


def test_a_checkpoint_must_be_whole_on_every_machine(sealed_checkpoints):
    processes = OtherRank({"checkpoint-6": "model.safetensors is missing"})
    checkpoint, faults = RunFolder(sealed_checkpoints, processes)._agree_on_checkpoint()
    assert checkpoint == sealed_checkpoints / "checkpoint-4"
    assert faults == {sealed_checkpoints / "checkpoint-6": "on rank 1: model.safetensors is missing"}


def test_checkpoints_of_which_none_is_whole_stop_the_run_and_stay(sealed_checkpoints):
    for step in (2, 4, 6):
        append(sealed_checkpoints / f"checkpoint-{step}" / "trainer_state.json", b" ")
    before = sorted(sealed_checkpoints.rglob("*"))
    with pytest.raises(
        RunProblem, match=r"begin anew at step 0, choose.*checkpoint-2: trainer_state.json has changed$"
    ):
        RunFolder(sealed_checkpoints).begin()
    assert sorted(sealed_checkpoints.rglob("*")) == before


def test_a_disk_that_does_not_give_a_checkpoint_has_not_damaged_it(sealed_checkpoints, monkeypatch):
    """Such an error stops the run, and nothing is moved."""

    def failing(path):
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr("bandpo_lab.training.checkpoints.digest", failing)
    with pytest.raises(OSError, match=r"Input/output error: .*checkpoint-6/trainer_state.json"):
        RunFolder(sealed_checkpoints).begin()
    assert not (sealed_checkpoints / "damaged").exists()


def test_an_error_of_the_main_process_is_raised_on_all(monkeypatch):
    """With its kind if it is bandpo's own, and with its text otherwise."""

    def of_rank_0(error):
        def gather(outcomes, outcome):
            outcomes[:] = [(None, error), outcome]

        monkeypatch.setattr("torch.distributed.all_gather_object", gather)
        Processes(rank=1, size=2).from_main(lambda: None)

    with pytest.raises(InvalidValue, match="already used"):
        of_rank_0(InvalidValue("already used"))
    with pytest.raises(RunProblem, match="rank 0 stopped with PermissionError: no"):
        of_rank_0("PermissionError: no")


def test_an_error_of_another_kind_accuses_no_process():
    with pytest.raises(RuntimeError, match="out of memory"), Processes(0, 2).naming_lost_processes():
        raise RuntimeError("out of memory")
