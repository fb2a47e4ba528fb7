"""Stages of a plan on one GPU: commands in order, each checked, kept in rows, and not repeated once it has passed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from bandpo_lab.cluster.cost import read_steps
from bandpo_lab.study.provenance import commit, machine, now

ROOT = Path(__file__).parents[1]
ROWS = "rows.jsonl"
"""The file, in the folder of a plan, with a row for each stage that was run."""
PACKAGES = ("bandpo", "torch", "transformers", "trl", "verl", "ray", "vllm", "flash-attn")
"""The packages whose versions are kept, if they are installed."""

Steps = Mapping[int, Mapping[str, float]]


def read_console(log: Path) -> Steps:
    """Return the metrics of each step that verl printed to a log."""
    return read_steps(log.read_text(encoding="utf-8", errors="replace").splitlines())


@dataclass(frozen=True)
class Stage:
    """A stage of a plan.

    Attributes:
        name: The name of the stage and of its log.
        command: The command, executed from the root of a clone.
        seconds: The expected duration.
        shows: The output of a successful stage.
        otherwise: The advice if the stage fails.
        check: A function that returns the fault in the steps of a training; if None, the exit status decides.
        read: A function that returns the steps, or None for a stage without steps. It gets the path of the log.
        limit: The seconds after which the stage is ended; None for no limit.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    shows: str
    otherwise: str
    check: Callable[[Steps], str | None] | None = None
    read: Callable[[Path], Steps] | None = None
    limit: float | None = None

    def steps(self, log: Path) -> Steps:
        """Return the steps of the stage, from its log or from what it wrote elsewhere; empty if it has none."""
        read = self.read or (read_console if self.check else None)
        return read(log) if read else {}


def run_stages(
    stages: Sequence[Stage], output: Path, table: Callable[[Mapping[str, Steps]], Sequence[str]]
) -> int:
    """Run the stages in order, and return the exit status. If a stage fails, print advice and return 1.

    Args:
        stages: The stages.
        output: The folder for logs and for `ROWS`.
        table: A function from the steps of all trainings to the rows of the table that is printed at the end.
    """
    output.mkdir(parents=True, exist_ok=True)
    record = output / "passed.json"
    passed: dict[str, list[str]] = json.loads(record.read_text()) if record.exists() else {}
    trained: dict[str, Steps] = {}
    for stage in stages:
        log = output / f"{stage.name}.log"
        if passed.get(stage.name) == list(stage.command):
            print(f"{stage.name}: passed before", flush=True)
        else:
            print(f"{stage.name}: about {stage.seconds / 60:.1f} min; its log is {log}", flush=True)
            start = time.monotonic()
            status = _run_logged(stage, log)
            seconds = time.monotonic() - start
            fault = stage.check(stage.steps(log)) if stage.check is not None else None
            problem = fault or (f"it ended with {status}" if status else None)
            if status and stage.limit is not None and seconds >= stage.limit:
                problem = f"ended after its limit of {stage.limit:.0f} s" + (f"; {fault}" if fault else "")
            _keep_row(stage, output / ROWS, log, seconds, problem)
            if problem:
                print(
                    f"{stage.name}: FAILED after {seconds:.0f} s: {problem}\n  {stage.otherwise}", flush=True
                )
                return 1
            print(f"{stage.name}: passed in {seconds:.0f} s", flush=True)
            passed[stage.name] = list(stage.command)
            record.write_text(json.dumps(passed, indent=1))
        steps = stage.steps(log)
        if steps:
            trained[stage.name] = steps
    if trained:
        print("\n".join(["", *table(trained)]))
    return 0


def _keep_row(stage: Stage, file: Path, log: Path, seconds: float, problem: str | None) -> None:
    """Append a row about a stage to a file: what ran, where, with which versions, and its metrics."""
    try:
        steps = stage.steps(log)
    except (OSError, ValueError):  # of a stage that ended before it wrote them
        steps = {}
    row = {
        "stage": stage.name,
        "passed": problem is None,
        "problem": problem,
        "seconds": round(seconds, 1),
        "time": now(),
        "commit": commit(),
        "machine": machine(),
        "cores": os.cpu_count(),
        "gpus": _gpus(),
        "versions": _versions(_python_of(stage.command[0])),
        "command": list(stage.command),
        "steps": {str(step): metrics for step, metrics in steps.items()},
    }
    with file.open("a", encoding="utf-8") as rows:
        rows.write(json.dumps(row) + "\n")


def _gpus() -> list[str]:
    """Return the name, driver and memory of each GPU, as nvidia-smi prints them; empty without nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    return output.splitlines()


def _python_of(program: str) -> str:
    """Return the Python of a stage: its program, or this one for a program such as make."""
    return program if Path(program).name.startswith("python") else sys.executable


VERSIONS = """
import json, platform, sys
from importlib.metadata import PackageNotFoundError, version

versions = {"python": platform.python_version()}
for package in sys.argv[1:]:
    try:
        versions[package] = version(package)
    except PackageNotFoundError:
        continue
print(json.dumps(versions))
"""
"""A program that prints the versions of Python and of the installed packages among its arguments."""


@cache
def _versions(program: str) -> dict[str, str]:
    """Return the versions of Python and of the installed `PACKAGES` for a stage's program; empty if it is no Python."""
    try:
        output = subprocess.run(
            [program, "-c", VERSIONS, *PACKAGES], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return {}
    return json.loads(output)


def _run_logged(stage: Stage, log: Path) -> int:
    """Run a stage with its output in a file, and return its exit status.

    The pipe ends when the last child process has ended, so the file then holds the output of all of them. After the
    stage's limit, and if this process is interrupted, all of them are ended.
    """
    with (
        log.open("wb") as file,
        subprocess.Popen(
            stage.command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        ) as process,
    ):
        assert process.stdout is not None
        timer = None
        if stage.limit is not None:
            timer = threading.Timer(stage.limit, _end, [process.pid])
            timer.start()
        try:
            for line in process.stdout:
                file.write(line)
                file.flush()
        except BaseException:
            _end(process.pid)
            raise
        finally:
            if timer is not None:
                timer.cancel()
    return process.returncode


def _end(group: int) -> None:
    """End the processes of a group."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        print(f"process group {group} had ended", file=sys.stderr)


def mean_of(steps: Steps, key: str) -> str:
    """Return the mean of a metric over the steps that have it, as text; empty if none has it."""
    logged = [metrics[key] for metrics in steps.values() if isinstance(metrics.get(key), int | float)]
    return f"{fmean(logged):.3g}" if logged else ""


def table_rows(runs: Mapping[str, Steps], columns: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a Markdown table with a row for each run and the means of its metrics.

    Args:
        runs: The steps of each run.
        columns: The names of a metric for each column; the first that a run has is used.
    """
    rows = ["| run | " + " | ".join(columns) + " |", "| --- |" + " ---: |" * len(columns)]
    for name, steps in runs.items():
        cells = []
        for keys in columns.values():
            values: list[Any] = [mean_of(steps, key) for key in keys]
            cells.append(next(filter(None, values), ""))
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return rows


def plan_rows(stages: Sequence[Stage]) -> list[str]:
    """Return the plan as the rows of a table, with the minute at which each stage begins."""
    rows = ["| from minute | stage | expected | it shows | otherwise |", "| ---: | --- | ---: | --- | --- |"]
    begin = 0.0
    for stage in stages:
        minutes = f"{stage.seconds / 60:.1f} min"
        rows.append(f"| {begin / 60:.0f} | `{stage.name}` | {minutes} | {stage.shows} | {stage.otherwise} |")
        begin += stage.seconds
    return [*rows, f"| {begin / 60:.0f} | end | | | |"]
