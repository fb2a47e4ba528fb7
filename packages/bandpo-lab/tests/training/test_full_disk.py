"""A disk that becomes full at any write of a training ends it with one sentence, and a resumed run ends as undisturbed.

Only the mark at the end of the record's stream, which is written when the process ends, may be missing in silence: no
reader needs it.

A library in C (tests/helpers/faulty_disk.c) counts the calls of the system that write to the run's folder: those that
create, write, flush and rename a file, of Python, torch and safetensors alike. From a chosen one on, each fails.
"""

import os
import re
import shutil
import subprocess
import sys
import warnings
from collections import Counter

import pytest

from helpers.frameworks import needs

needs("trl")
pytest.importorskip("typer")

from bandpo_lab.training.checkpoints import damage, saved_checkpoints
from helpers.forks import ForkServer
from pages import ROOT
from rlvet.records.record import read_record

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="LD_PRELOAD is of Linux"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="there is no compiler of C"),
]

COMMAND = ["bandpo-lab", "train", "--per_device_train_batch_size=8", "--num_generations=4"]
COMMAND += [
    "--steps_per_generation=2",
    "--num_iterations=1",
    "--max_steps=4",
    "--save_steps=2",
    "--logging_steps=1",
]
COMMAND += [
    "--max_completion_length=8",
    "--train_prompts=32",
    "--eval_prompts=1",
    "--eval_samples=4",
    "--use_cpu",
]
COMMAND += ["--report_to=none", "--record={output_dir}/record", "--output_dir=run"]

RESULT = ("model/model.safetensors", "model/config.json", "evaluation.json")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("full")
    library = folder / "faulty_disk.so"
    source = ROOT / "tests" / "helpers" / "faulty_disk.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    environment = {
        **os.environ,
        "LD_PRELOAD": str(library),
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
    }
    server = ForkServer(folder, ("bandpo_lab.training.train", "bandpo_lab.cli.app"), environment=environment)
    yield server
    server.close()


def results(run):
    """Return what a run leaves: the bytes of its files, the steps that its record has, and whether it is finished."""
    with warnings.catch_warnings():
        # A loss that was cut off is left out with a warning, and the resumed run records its step again.
        warnings.simplefilter("ignore")
        steps = [loss.step for loss in read_record(run / "record")]
    files = {name: (run / name).read_bytes() for name in RESULT}
    return files | {"record": steps, "finished": (run / "manifest.json").exists()}


@pytest.fixture(scope="module")
def whole(server, tmp_path_factory):
    """The results of a run with room, and the lines about its writes."""
    folder = tmp_path_factory.mktemp("whole")
    log = folder / "writes.txt"
    job = server.start(folder, COMMAND, FAULT_IN=str(folder / "run"), FAULT_LOG=str(log))
    assert job.wait() == 0, job.text
    return results(folder / "run"), log.read_text(encoding="utf-8").splitlines()


def problems_of(server, whole, number, folder):
    """Make the disk full at a write, make room, resume, and return what is wrong."""
    undisturbed, writes = whole
    folder.mkdir()
    run = folder / "run"
    job = server.start(folder, COMMAND, FAULT_IN=str(run), FAULT_AT=str(number))
    code = job.wait()
    lines = [line for line in job.text.splitlines() if "error: " in line]
    problems = []
    if code == 0 and results(run) != undisturbed:
        problems.append("ended with 0, with another result")
    if "Traceback" in job.text or code < 0:
        problems.append(f"a traceback or a signal: {job.text[-1500:]}")
    elif code and (len(lines) != 1 or not re.search("No space left on device|cannot be written", lines[0])):
        problems.append(f"not one sentence: {job.text[-1500:]}")
    sealed = {
        match[1]
        for write in writes[: number - 1]
        if (match := re.fullmatch(r"\d+ rename \S+/run/(checkpoint-\d+)", write))
    }
    kept = {checkpoint.name for checkpoint in saved_checkpoints(run) if damage(checkpoint) is None}
    if kept != {checkpoint.name for checkpoint in saved_checkpoints(run)}:
        problems.append("a damaged checkpoint")
    if sealed and max(sealed) not in kept:
        problems.append(f"{max(sealed)} is lost")
    job = server.start(folder, [*COMMAND, "--resume"])
    if job.wait() != 0:
        problems.append(f"not resumed: {job.text[-1500:]}")
    elif results(run) != undisturbed:
        problems.append("another result")
    shutil.rmtree(folder)
    return problems


def check(server, whole, folder, numbers):
    counts = Counter()
    examples = {}
    for number in numbers:
        for problem in problems_of(server, whole, number, folder / str(number)) or ["none"]:
            kind = problem.partition(":")[0]
            counts[kind] += 1
            examples.setdefault(kind, f"write {number}, {whole[1][number - 1]}: {problem}")
    return counts, examples


def test_all_kinds_of_writes_are_seen(whole):
    """The writes of Python, of torch and of safetensors, and each kind of call."""
    _, writes = whole
    text = "\n".join(writes)
    for kind in ("create", "write", "fsync", "rename", "mkdir"):
        assert re.search(rf"(?m)^\d+ {kind} ", text), kind
    # safetensors writes to a temporary file beside the model.
    for name in (r"checkpoint-2/\.tmp", "optimizer.pt", "metrics.jsonl", "config.yaml", "manifest.json"):
        assert re.search(rf"(?m)^\d+ write .*{name}", text), name
    assert len(writes) > 100


def test_a_disk_that_becomes_full_at_some_writes(server, whole, tmp_path):
    writes = len(whole[1])
    numbers = [1 + i * writes // 6 for i in range(6)]
    counts, examples = check(server, whole, tmp_path, numbers)
    assert counts == {"none": len(numbers)}, examples


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
def test_a_disk_that_becomes_full_at_each_write(server, whole, tmp_path):
    numbers = range(1, len(whole[1]) + 1)
    counts, examples = check(server, whole, tmp_path, numbers)
    assert counts == {"none": len(numbers)}, examples
