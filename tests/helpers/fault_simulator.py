"""A simulator of faults: from one seed it draws a command, a fault and a moment, and runs the command again after it.

The faults are

- ``kill``: the process is killed before one of its calls that change the folder,
- ``once``: one of these calls fails with an error of the disk, and later ones do not,
- ``fail`` and ``full``: all calls from one on fail, with an error of the disk or for want of room,
- ``power``: the power is lost before one of these calls; what was not flushed arrives in part (`helpers.power`),
- ``two``: while the process is stopped at one of these calls, the same command is run in the same folder.

After it, the same command must go on and end with the bits of an undisturbed run; each call that ends with an error
says one sentence; what was sealed is there; and no process is left.

`tests/helpers/faulty_disk.c` counts the calls, those of Python, torch, Arrow and safetensors alike.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from helpers.forks import ForkServer, Job
from helpers.power import PowerLog
from helpers.watched import run

MODULES = (
    "bandpo_lab.training.train", "bandpo_lab.cli.app", "bandpo_lab.toy.comparison", "bandpo_lab.evals.run",
    "bandpo_lab.evals.report", "bandpo_lab.evals.golds", "bandpo_lab.study.execute", "bandpo_lab.study.report",
    "bandpo_lab.toy.demo", "bandpo.cli", "helpers.small_runs", "helpers.recorded_run", "helpers.fault_simulator",
)  # fmt: skip
"""The modules of the server, which prepare the commands."""

FOLDER = "run"
"""The folder of each command, in the current folder."""
SMALL_TRAINING = {
    "dataset_name": "multiplication", "model_name_or_path": "multiplication",
    "reward_funcs": ["bandpo_lab.tasks.multiplication.reward"], "per_device_train_batch_size": 8,
    "num_generations": 4, "steps_per_generation": 2, "num_iterations": 1, "max_steps": 4, "save_steps": 2,
    "logging_steps": 1, "max_completion_length": 4, "train_prompts": 16, "eval_prompts": 1, "eval_samples": 4,
    "use_cpu": True, "report_to": "none", "threads": 1,
}  # fmt: skip
STUDY = json.dumps(
    {
        "title": "small", "question": "does it?", "primary": "mean@4", "stopping": "a fixed number of steps",
        "baseline": "clip", "arms": {"clip": {"method": "FixedClip(0.2)"}, "band": {"method": "Band(KL(), 0.05)"}},
        "options": SMALL_TRAINING | {"max_steps": 2}, "experiments": {"main": {"question": "which?", "seeds": [0]}},
    }
)  # fmt: skip


@dataclass(frozen=True)
class Command:
    """A command whose faults are simulated.

    Attributes:
        words: The command.
        again: The same, to go on with what is in the folder.
        results: The function that returns what a finished run leaves, without times.
        sealed: The function that returns what must never be lost of what a folder has, each as a text.
        weight: How often it is drawn, compared with the others; those that take long are drawn rarely.
        is_exclusive: True if a second process in the folder is refused or harmless.
    """

    words: tuple[str, ...]
    again: tuple[str, ...]
    results: Callable[[Path], Mapping[str, Any]]
    sealed: Callable[[Path], set[str]]
    weight: int
    is_exclusive: bool = True


def _json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def _losses(record: Path) -> dict[int, bytes]:
    """Return the losses of a record by their step."""
    from rlvet.errors import RlvetError
    from rlvet.records.record import read_record

    losses: dict[int, bytes] = {}
    with warnings.catch_warnings():
        # A loss that was cut off is left out with a warning, and the next run records its step again.
        warnings.simplefilter("ignore")
        try:
            for batch in read_record(record):
                losses[batch.step or 0] = batch.logp_old.tobytes() + batch.advantages.tobytes()
        except (RlvetError, OSError):
            return losses
    return losses


def _results_of_training(folder: Path) -> Mapping[str, Any]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    files = ("model/model.safetensors", "model/config.json", "evaluation.json")
    return {
        "rows": [row | {"step_time": 0} for row in rows],
        "record": _losses(folder / "record"),
        "finished": (folder / "manifest.json").is_file(),
        **{name: (folder / name).read_bytes() for name in files},
    }


def _sealed_of_training(folder: Path) -> set[str]:
    from bandpo_lab.training.checkpoints import damage, saved_checkpoints, step_of

    whole = [checkpoint for checkpoint in saved_checkpoints(folder) if damage(checkpoint) is None]
    newest = max(map(step_of, whole), default=0)
    losses = [f"loss {step}" for step in _losses(folder / "record") if step < newest]
    return {f"{checkpoint.name} {(checkpoint / 'manifest.json').read_text()}" for checkpoint in whole} | {
        *losses
    }


def _results_of_evaluation(folder: Path) -> Mapping[str, Any]:
    lines = (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    names = ("settings.json", "report.json", "report.md")
    return {"samples": sorted(lines)} | {name: (folder / name).read_bytes() for name in names}


def _sealed_of_evaluation(folder: Path) -> set[str]:
    file = folder / "samples.jsonl"
    text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    return {line for line in text.splitlines(keepends=True) if line.endswith("}\n")}


def _results_of_comparison(folder: Path) -> Mapping[str, Any]:
    results: dict[str, Any] = {}
    for scores in sorted(folder.glob("*/scores.json")):
        results[scores.parent.name] = [
            _json(scores) | {"seconds": 0},
            *(file.read_text(encoding="utf-8") for file in sorted(scores.parent.glob("*.jsonl"))),
        ]
    return results


def _sealed_of_comparison(folder: Path) -> set[str]:
    # The scores have the time that the run took, so one that is repeated has others.
    return {f"{file.parent.name} {file.read_text(encoding='utf-8')}" for file in folder.glob("*/scores.json")}


def _results_of_study(folder: Path) -> Mapping[str, Any]:
    content = _json(folder / "results.json")
    rows = [json.dumps(row | {"seconds": 0}, sort_keys=True) for row in content["runs"]]
    return {"runs": rows, "failed": content["failed"], "unfinished": content["unfinished"]}


def _sealed_of_study(folder: Path) -> set[str]:
    file = folder / "results.json"
    return {json.dumps(row) for row in _json(file)["runs"]} if file.exists() else set()


def _results_of_record(folder: Path) -> Mapping[str, Any]:
    return _losses(folder / "record") | _json(folder / "checkpoint.json")


def _sealed_of_record(folder: Path) -> set[str]:
    file = folder / "checkpoint.json"
    step = _json(file)["step"] if file.exists() else 0
    return {f"loss {number}" for number in _losses(folder / "record") if number < step}


def _options(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as options of `bandpo-lab train`."""
    return [f"--{name}={value[0] if isinstance(value, list) else value}" for name, value in settings.items()]


_TRAIN = (
    "bandpo-lab",
    "train",
    *_options(SMALL_TRAINING),
    "--record={output_dir}/record",
    f"--output_dir={FOLDER}",
)
_EVAL = ("bandpo-lab", "eval", "--n=2", "--limit=4", "--max-new-tokens=6", f"--output-dir={FOLDER}")
_SMALL = ("--task=random", "--batches=3", "--lag=1", "--workers=1", f"--output-dir={FOLDER}")
_COMPARE = ("bandpo-lab", "compare", "FixedClip(0.2)", "BandPO()", *_SMALL)
_DEMO = ("bandpo-lab", "compare", *_SMALL)
_STUDY = ("bandpo-lab", "study", "run", "study.yaml", "--workers=1", f"--output-dir={FOLDER}")
_RECORD = ("helpers.recorded_run", FOLDER)

COMMANDS: Mapping[str, Command] = {
    "train": Command(_TRAIN, (*_TRAIN, "--resume"), _results_of_training, _sealed_of_training, 2),
    "eval": Command(_EVAL, _EVAL, _results_of_evaluation, _sealed_of_evaluation, 3),
    "compare": Command(_COMPARE, _COMPARE, _results_of_comparison, _sealed_of_comparison, 3),
    "demo": Command(_DEMO, _DEMO, _results_of_comparison, _sealed_of_comparison, 1),
    "study": Command(_STUDY, _STUDY, _results_of_study, _sealed_of_study, 1),
    # A record has no lock: a trainer writes it, and locks its own folder.
    "record": Command(_RECORD, _RECORD, _results_of_record, _sealed_of_record, 12, is_exclusive=False),
}

FAULTS = ("kill", "once", "fail", "full", "power", "two")


class Trial(NamedTuple):
    """What a seed draws."""

    command: str
    fault: str
    moment: float
    """The share of the calls that are made before the fault."""
    seed: int
    """The seed of what arrives on the disk at a loss of power."""


def drawn(seed: int) -> Trial:
    """Return the command, the fault and the moment of a seed.

    >>> drawn(1) == drawn(1)
    True
    """
    chance = random.Random(seed)
    command = chance.choices([*COMMANDS], [command.weight for command in COMMANDS.values()])[0]
    faults = FAULTS if COMMANDS[command].is_exclusive else FAULTS[:-1]
    return Trial(command, chance.choice(faults), chance.random(), seed)


class _LosesAll(random.Random):
    """A source of choices by which everything is lost that was not flushed."""

    def random(self) -> float:
        return 0.0


class Whole(NamedTuple):
    """An undisturbed run."""

    results: Mapping[str, Any]
    calls: int
    """The number of calls that change the folder."""


class Simulator:
    """Runs the trials of seeds.

    Args:
        folder: Where it works, on a tmpfs, which uses no inode twice.
        environment: The variables of the processes.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder
        library = folder / "faulty_disk.so"
        source = Path(__file__).with_name("faulty_disk.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
        variables = {
            **environment,
            "LD_PRELOAD": str(library),
            "HF_HUB_OFFLINE": "1",
            "PYTHONWARNINGS": "ignore",
        }
        self._server = ForkServer(folder, MODULES, environment=variables)
        self._wholes: dict[str, Whole] = {}
        self._logs: dict[str, PowerLog] = {}

    def close(self) -> None:
        """End its processes."""
        self._server.close()

    def problems(self, trial: Trial) -> list[str]:
        """Run a trial, and return what is wrong: a kind and, after a colon, details."""
        command = COMMANDS[trial.command]
        whole = self._whole(trial.command)
        place = self._place(f"trial-{trial.seed}")
        folder = place / FOLDER
        try:
            if trial.fault == "power":
                problems: list[str] = []
                sealed = self._cut(trial, folder)
            else:
                at = 1 + int(trial.moment * whole.calls)
                problems = (
                    self._two(command, place, at)
                    if trial.fault == "two"
                    else self._fail(command, place, trial.fault, at)
                )
                sealed = command.sealed(folder)
            job = self._start(place, command.again, FAULT_IN=str(folder))
            problems += self._end_of(job, place, succeeds=True)
            if job.wait() == 0:
                results = command.results(folder)
                others = [
                    name
                    for name in {*results, *whole.results}
                    if results.get(name) != whole.results.get(name)
                ]
                if others:
                    problems.append(f"another result: {', '.join(map(str, others))}")
            lost = sealed - command.sealed(folder)
            if lost:
                problems.append(f"sealed, and lost: {sorted(lost)[0]:.200}")
        finally:
            shutil.rmtree(place)
        return problems

    def _start(self, place: Path, words: Sequence[str], **variables: str) -> Job:
        return self._server.start(place, ["helpers.small_runs", *words], **variables)

    def _place(self, name: str) -> Path:
        """Return a new folder in which a command is run."""
        place = self._folder / name
        place.mkdir()
        (place / "study.yaml").write_text(STUDY, encoding="utf-8")
        return place

    def _whole(self, name: str) -> Whole:
        """Return an undisturbed run of a command, which is made once."""
        if name not in self._wholes:
            place = self._place(f"whole-{name}")
            log = self._folder / f"calls-{name}"
            words = COMMANDS[name].words
            job = self._start(place, words, FAULT_IN=str(place / FOLDER), FAULT_LOG=str(log))
            assert job.wait() == 0, job.text
            calls = max(int(line.partition(" ")[0]) for line in log.read_text(encoding="utf-8").splitlines())
            self._wholes[name] = Whole(COMMANDS[name].results(place / FOLDER), calls)
        return self._wholes[name]

    def _cut(self, trial: Trial, folder: Path) -> set[str]:
        """Make a folder as it may be after a loss of power, and return what was sealed before."""
        if trial.command not in self._logs:
            place = self._place(f"power-{trial.command}")
            file = self._folder / f"power-{trial.command}.pickle"
            words = [
                "helpers.fault_simulator",
                str(file),
                str(place / FOLDER),
                *COMMANDS[trial.command].words,
            ]
            job = self._server.start(place, words)
            assert job.wait() == 0, job.text
            self._logs[trial.command] = pickle.loads(file.read_bytes())  # noqa: S301  (our own)
            results = COMMANDS[trial.command].results(place / FOLDER)
            assert results == self._whole(trial.command).results
        log = self._logs[trial.command]
        event = 1 + int(trial.moment * log.events)
        certain = folder.with_name("certain")
        log.cut(event, certain, _LosesAll())
        log.cut(event, folder, random.Random(trial.seed))
        return COMMANDS[trial.command].sealed(certain)

    def _fail(self, command: Command, place: Path, fault: str, at: int) -> list[str]:
        """Run a command that meets a fault, and return what is wrong with its end."""
        variables = {"FAULT_IN": str(place / FOLDER), "FAULT_AT": str(at), "FAULT_KIND": fault}
        job = self._start(place, command.words, **variables)
        return self._end_of(job, place, may_be_killed=fault == "kill")

    def _two(self, command: Command, place: Path, at: int) -> list[str]:
        """Run a command while another process of it is stopped, and return what is wrong with their ends."""
        variables = {"FAULT_IN": str(place / FOLDER), "FAULT_AT": str(at), "FAULT_KIND": "stop"}
        first = self._start(place, command.words, **variables)
        stopped = _wait_until_stopped(first.pid)
        second = self._start(place, command.again, FAULT_IN=str(place / FOLDER))
        problems = self._end_of(second, place, looks_for_processes=False)
        # A process that the first one starts has its own count of calls, and is stopped as well.
        while stopped:
            for process in stopped:
                os.kill(process, signal.SIGCONT)
            stopped = _wait_until_stopped(first.pid)
        return problems + self._end_of(first, place)

    def _end_of(
        self,
        job: Job,
        place: Path,
        *,
        succeeds: bool = False,
        may_be_killed: bool = False,
        looks_for_processes: bool = True,
    ) -> list[str]:
        """Wait for the end of a command, and return what is wrong with it.

        Args:
            job: The command.
            place: Where it works.
            succeeds: True if it must end with 0.
            may_be_killed: True if it, or a process of it, may have been killed.
            looks_for_processes: False if another command still works there.
        """
        code = job.wait()
        text = job.text
        problems: list[str] = []
        if "Traceback" in text or "Exception ignored" in text or (code < 0 and not may_be_killed):
            problems.append(f"a traceback or a signal: {code} {text[-3000:]}")
        elif code > 0 and len(re.findall(r"(?<!FAILED: )(?<!output )\berror: ", text)) != 1:
            problems.append(f"not one sentence: {text[-3000:]}")
        elif code and succeeds:
            problems.append(f"not resumed: {text[-1500:]}")
        if looks_for_processes and (left := _processes_left(job.pid, place)):
            problems.append(f"processes are left: {left}")
        return problems


def _state_and_session(process: int) -> tuple[str, int]:
    """Return the state of a process and its session; an empty state if it has ended."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    except OSError:
        return "", 0
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[3])


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _wait_until_stopped(session: int, seconds: float = 60.0) -> list[int]:
    """Return the processes of a session that are stopped, once there are any; none if the session has ended."""
    end = time.monotonic() + seconds
    while True:
        states = {process: _state_and_session(process) for process in _processes()}
        # A process that was just forked does not lead its session yet.
        members = {process: state for process, (state, of) in states.items() if session in (process, of)}
        stopped = [process for process, state in members.items() if state == "T"]
        running = [process for process, state in members.items() if state not in ("", "Z")]
        if stopped or not running or time.monotonic() > end:
            return stopped
        time.sleep(0.01)


def _processes_left(session: int, place: Path) -> list[int]:
    """Return the processes that a command has left: those of its session, or whose variables name its folder."""
    mark = f"FAULT_IN={place}".encode()

    def is_left(process: int) -> bool:
        state, of = _state_and_session(process)
        if state in ("", "Z"):
            return False
        try:
            variables = Path(f"/proc/{process}/environ").read_bytes()
        except OSError:
            variables = b""
        return of == session or mark in variables

    end = time.monotonic() + 20
    left = [process for process in _processes() if is_left(process)]
    while left and time.monotonic() < end:
        time.sleep(0.02)
        left = [process for process in left if is_left(process)]
    return left


def main() -> None:
    """Run the command of the command line with a log of its writes: FILE FOLDER COMMAND."""
    file, folder, *words = sys.argv[1:]
    from bandpo_lab.study import jobs
    from helpers.small_runs import make_small

    make_small()
    # The log is that of one process.
    jobs._run_in_process = _in_this_process
    Path(folder).mkdir()
    log = PowerLog(Path(folder))
    with log.recording():
        status = run(words)
    Path(file).write_bytes(pickle.dumps(log))
    sys.exit(status)


def _in_this_process(call: Callable[[], Any]) -> Any:
    """Make a call of a study in this process, whose output it replaces meanwhile."""
    from bandpo_lab.study.jobs import JobResult
    from helpers.small_runs import status_of

    start = time.monotonic()
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    words = [*sys.argv]
    status = status_of(call)
    for descriptor, copy in zip((1, 2), kept, strict=True):
        os.dup2(copy, descriptor)
        os.close(copy)
    sys.argv[:] = words
    return JobResult(status, time.monotonic() - start)
