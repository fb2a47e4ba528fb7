"""Run a study: each run is a process of `bandpo-lab train`, several at a time on this machine."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bandpo_lab.errors import InvalidValue
from bandpo_lab.files.validation import SEAL, content_digest, read_sealed_json, validate_as
from bandpo_lab.files.writing import locked, replacing
from bandpo_lab.study.collect import RunResult, collect_run, versions
from bandpo_lab.study.jobs import Job, JobResult
from bandpo_lab.study.plan import PlannedRun, Study
from bandpo_lab.study.provenance import commit
from bandpo_lab.study.statistics import Results

Say = Callable[[str], None]


@dataclass
class Execution:
    """The execution of a study in a folder, with ``study.yaml``, ``runs/`` and, once a run has ended, ``results.json``.

    ``results.json`` holds every run that has ended, and ``unfinished`` is true in it until the last has. The study is
    resumed from this file: a run that is in it is not repeated, even if its folder was removed.

    Args:
        study: The study.
        text: The text of the study file, which is copied to the folder.
        folder: The folder; if it has the same study, that is resumed.
        run_jobs: The function that runs jobs: `run_in_processes` with a number of workers.
        say: A function that is called with each line of progress.
    """

    study: Study
    text: str
    folder: Path
    run_jobs: Callable[[Sequence[Job]], Iterator[tuple[int, JobResult]]]
    say: Say = print

    def __call__(self) -> dict[str, Any]:
        """Run the tuning runs, then the reported runs, and write ``results.json``.

        Returns:
            The content of that file.

        Raises:
            ValueError: The folder holds another study, the settings of a run are not valid (which is checked before any
                run is started), or every run fails.
            FileProblem: Another process runs the study in this folder.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder):
            return self._execute()

    def _execute(self) -> dict[str, Any]:
        self._open()
        # Check the settings of all runs first. The tuned values are not known yet, so examples are used.
        tuning_runs = self.study.tuning_runs()
        self._check([*tuning_runs, *self.study.reported(_example_values(self.study))])
        failed = self._run(tuning_runs)
        tuned_values = {}
        if tuning_runs:
            tuned_values = Results(self.study, self._finished_results(tuning_runs)).tuned_values
        reported_runs = self.study.reported(tuned_values)
        failed += self._run(reported_runs)
        if not self._finished:
            raise InvalidValue("every run has failed; see the last lines above and the logs")

        # Order the runs as planned, and leave out runs that are not planned.
        keys = [_key(**vars(run)) for run in [*tuning_runs, *reported_runs]]
        self._results |= {
            "chosen": [
                {"experiment": experiment, "arm": arm, "values": values}
                for (experiment, arm), values in tuned_values.items()
            ],
            "failed": [str(run) for run in failed],
            "unfinished": False,
            "runs": [self._finished[key] for key in keys if key in self._finished],
        }
        self._write()
        return self._results

    def _open(self) -> None:
        """Read the results of an interrupted execution, and copy the study file to the folder.

        Raises:
            ValueError: The folder holds another study.
        """
        study_file = self.folder / "study.yaml"
        self._results: dict[str, Any] = {"chosen": [], "failed": [], "runs": []}
        if (self.folder / "results.json").exists():
            self._results |= read_results(self.folder)
        file_text = study_file.read_text(encoding="utf-8") if study_file.exists() else None
        for text in (file_text, self._results.get("study")):
            if text not in (None, self.text):
                raise InvalidValue(
                    f"{self.folder} holds another study, or an earlier form of this one ({study_file}); the terms of a "
                    "study are fixed before it runs, so choose another --output_dir"
                )
        # The rows of the runs that have ended without an error, by the key of the run.
        self._finished = {_key(**run): run for run in self._results["runs"]}
        with replacing(study_file) as unfinished:
            unfinished.write_text(self.text, encoding="utf-8")

    def _write(self) -> None:
        """Write ``results.json``, with one line for each run, so that a diff shows which runs changed."""
        runs = ",\n".join("  " + json.dumps(run) for run in self._results["runs"])
        fields = {name: value for name, value in self._results.items() if name != "runs"}
        head = json.dumps({SEAL: content_digest(self._results), **fields}, indent=1)
        with replacing(self.folder / "results.json") as unfinished:
            unfinished.write_text(f'{head[:-2]},\n "runs": [\n{runs}\n ]\n}}\n', encoding="utf-8")

    def _check(self, runs: Sequence[PlannedRun]) -> None:
        """Check the settings of every run with the parser of `bandpo-lab train`, which imports TRL but trains nothing.

        Raises:
            ValueError: The settings of a run are not valid; the message names the run.
        """
        self.study.check_methods()
        from bandpo_lab.training.arguments import parse_arguments

        for run in runs:
            try:
                parse_arguments(["--config", str(self._write_config(run))])
            except SystemExit as error:
                raise InvalidValue(f"{run}: bandpo-lab train refuses its settings") from error
            except ValueError as error:
                raise InvalidValue(f"{run}: {error}") from error

    def _write_config(self, run: PlannedRun) -> Path:
        """Write the config file of a run, and return its path."""
        config = self._folder_of(run).with_suffix(".yaml")
        config.parent.mkdir(parents=True, exist_ok=True)
        options = {**run.options, "output_dir": str(self._folder_of(run))}
        config.write_text(yaml.safe_dump(options, sort_keys=False), encoding="utf-8")
        return config

    def _run(self, runs: Sequence[PlannedRun]) -> list[PlannedRun]:
        """Run those of `runs` that are not in the results yet, and return those that failed."""
        missing = [run for run in runs if _key(**vars(run)) not in self._finished]
        jobs = [
            Job(
                "bandpo_lab",
                ["train", "--config", str(self._write_config(run)), "--resume"],
                self._folder_of(run).with_suffix(".log"),
            )
            for run in missing
        ]
        earlier = len(runs) - len(missing)
        if earlier:
            self.say(f"{earlier} of {len(runs)} runs were done before")
        failed: list[PlannedRun] = []
        start = time.monotonic()
        for count, (index, job_result) in enumerate(self.run_jobs(jobs), start=1):
            run = missing[index]
            if job_result.code:
                failed.append(run)
                result_text = f"FAILED: {_last_line(jobs[index].log)} (see {jobs[index].log})"
            else:
                self._add(run, job_result.seconds)
                [result] = self._finished_results([run])
                result_text = f"{self.study.primary} {result.metric(self.study.primary):.3f}"
            # Assume that the remaining runs take as long as the mean of those that have ended.
            minutes_left = (time.monotonic() - start) / count * (len(missing) - count) / 60
            self.say(
                f"[{earlier + count}/{len(runs)}] {run}   {result_text}   {job_result.seconds:.0f} s, "
                f"{minutes_left:.0f} min to go"
            )
        return failed

    def _add(self, run: PlannedRun, seconds: float) -> None:
        """Add a run that has ended to ``results.json``."""
        folder = self._folder_of(run)
        names = {name: value for name, value in vars(run).items() if name != "options"}
        self._finished[_key(**names)] = {**names, "seconds": round(seconds, 1), **collect_run(folder)}
        # A resumed study may have runs of several commits.
        commits = (self._results.get("commit") or "").split(", ")
        self._results |= {
            "study": self.text,
            "versions": versions(folder),
            "commit": ", ".join(dict.fromkeys(filter(None, [*commits, commit()]))),
            "unfinished": True,
            "runs": list(self._finished.values()),
        }
        self._write()

    def _folder_of(self, run: PlannedRun) -> Path:
        return self.folder / "runs" / run.folder

    def _finished_results(self, runs: Sequence[PlannedRun]) -> list[RunResult]:
        """Return the results of those of `runs` that have ended without an error."""
        rows = [self._finished.get(_key(**vars(run))) for run in runs]
        return validate_as(list[RunResult], [row for row in rows if row], "runs")


def read_results(folder: Path) -> dict[str, Any]:
    """Return the content of a study's ``results.json``; the study may have ended, be running or be interrupted.

    Raises:
        ValueError: No run has ended yet, or the file was changed after it was written.
    """
    file = folder / "results.json"
    if not file.exists():
        raise InvalidValue(f"{folder} has no results.json: it is no study, or none of its runs has ended yet")
    return read_sealed_json(file)


def _key(experiment: str, arm: str, seed: int, tuning: Any, **_: Any) -> str:
    """Return the key of a run, which is unique in its study; the run may be planned or ended."""
    return json.dumps([experiment, arm, seed, tuning], sort_keys=True)


def _example_values(study: Study) -> Mapping[tuple[str, str], Mapping[str, Any]]:
    """Return the first tuned values of each arm, to check the settings of all runs before the tuning."""
    values = {}
    for experiment in study.experiments.values():
        if experiment.tune:
            first = experiment.tune.choices()[0]
            values |= {(experiment.name, arm): first for arm in study.arms_of(experiment)}
    return values


def _last_line(log: Path) -> str:
    """Return the last line of a log that is not blank."""
    text = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n")
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no output"
