"""A training with a record, cut by a simulated loss of power at any of its writes, resumes to the same end.

After each cut, the run must go on from the newest checkpoint that was certain to be on the disk, or from a newer one,
and end with the same weights, rows and scores, bit for bit. Recorded losses up to that checkpoint are there, and what
is missing of the others is said when the record is read.
"""

import random
import re
import shutil
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import pytest

from helpers.frameworks import needs

needs("trl")

from bandpo_lab.training.arguments import parse_arguments
from bandpo_lab.training.run_folder import RunFolder
from bandpo_lab.training.train import run_training
from helpers.power import PowerLog
from rlvet.errors import InvalidValue
from rlvet.records.record import read_record

MEMORY = Path("/dev/shm")  # noqa: S108  # a tmpfs; the folder in it has a name of its own
pytestmark = [
    pytest.mark.filterwarnings("ignore:no-signal"),
    pytest.mark.filterwarnings("ignore:reward-flat"),
    pytest.mark.filterwarnings("ignore:.*set aside"),
    pytest.mark.skipif(not MEMORY.is_dir(), reason="the simulation needs a tmpfs"),
]
SMALL = ["--per_device_train_batch_size=8", "--num_generations=4", "--steps_per_generation=2"]
SMALL += [
    "--num_iterations=1",
    "--max_steps=6",
    "--save_steps=2",
    "--save_total_limit=2",
    "--logging_steps=1",
]
SMALL += ["--max_completion_length=8", "--train_prompts=32", "--eval_prompts=1", "--eval_samples=4"]
STEPS = range(6)
RESULTS = ("rows", "scores", "model")


def train(folder, *more):
    return run_training(
        parse_arguments([*SMALL, "--record={output_dir}/record", "--output_dir", str(folder), *more])
    )


@pytest.fixture(scope="module")
def shared_memory():
    folder = Path(tempfile.mkdtemp(dir=MEMORY, prefix="bandpo-power-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def logged(shared_memory):
    """A whole run, and the log of its writes."""
    folder = shared_memory / "whole"
    folder.mkdir()
    log = PowerLog(folder)
    with log.recording():
        train(folder)
    return folder, log


def losses(record):
    """The losses of a record by step, as text of their values, and the warnings of its reader."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        by_step = {}
        for batch in read_record(record):
            by_step.setdefault(batch.step, []).append((batch.logp_old.tobytes(), batch.advantages.tobytes()))
    return by_step, [str(warning.message) for warning in caught]


def results(path):
    folder = RunFolder(path)
    rows = [row | {"step_time": 0} for row in folder.history()]
    # Other files, such as tokenizer.json, tell whether the tokenizer was used before it was saved.
    model = {name: (folder.model / name).read_bytes() for name in ("model.safetensors", "config.json")}
    return rows, folder.evaluations, model


def problems_after_a_cut(logged, event, seed, target, output):
    """Cut the run, resume it, and return what is wrong with it.

    Args:
        logged: The whole run and its log.
        event: The event before which the power is lost.
        seed: The seed of what arrived on the disk.
        target: The folder of the cut run.
        output: A function that returns what was printed since its last call.
    """
    whole, log = logged
    log.cut(event, target, random.Random(seed))
    sealed = [
        int(name.rpartition("-")[2]) for name in log.flushed_names(event) if name.startswith("checkpoint-")
    ]
    newest = max(sealed, default=0)
    output()
    try:
        train(target, "--resume")
    except Exception as error:
        return [f"stopped: {type(error).__name__}: {error}"]
    text = output()
    match = re.search(r"going on from step (\d+)", text)
    start = int(match[1]) if match else 0
    is_finished = not match and "starting again" not in text and newest == max(STEPS) + 1
    problems = []
    if start < newest and not is_finished:
        problems.append(f"checkpoint lost: began at step {start}, and checkpoint {newest} was sealed")
    for name, result, undisturbed in zip(RESULTS, results(target), results(whole), strict=True):
        if result != undisturbed:
            problems.append(f"other {name}")
    expected, _ = losses(whole / "record")
    try:
        recorded, said = losses(target / "record")
    except InvalidValue as error:
        return [*problems, f"record unreadable: {error}"]
    if any(recorded[step] != expected[step] for step in recorded):
        problems.append("recorded losses differ")
    missing = sorted({*expected} - {*recorded})
    if [step for step in missing if step < newest]:
        problems.append(f"recorded losses lost: {missing} of a sealed checkpoint at {newest}")
    elif missing and not any("missing" in message or "cut off" in message for message in said):
        problems.append(f"gap not said: {missing}")
    return problems


def cut_often(logged, folder, output, number):
    """Cut the run at points that are spaced evenly, and count the problems by kind."""
    _, log = logged
    counts = Counter()
    examples = {}
    for i in range(number):
        event = 1 + i * log.events // number
        target = folder / f"cut-{i}"
        for problem in problems_after_a_cut(logged, event, i, target, output) or ["none"]:
            kind = problem.partition(":")[0]
            counts[kind] += 1
            examples.setdefault(kind, f"event {event} of {log.events}, seed {i}: {problem}")
        shutil.rmtree(target)
    return counts, examples


@pytest.fixture
def output(capsys):
    return lambda: "".join(capsys.readouterr())


@pytest.mark.slow
def test_a_run_survives_a_few_losses_of_power(logged, shared_memory, output):
    counts, examples = cut_often(logged, shared_memory, output, 6)
    assert counts == {"none": 6}, examples


@pytest.mark.exhaustive
def test_a_run_survives_200_losses_of_power(logged, shared_memory, output):
    counts, examples = cut_often(logged, shared_memory, output, 200)
    assert counts == {"none": 200}, examples
