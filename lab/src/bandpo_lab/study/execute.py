"""Runs a study: every run a process of `bandpo-lab train`, over the cores of this machine or a Ray cluster."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bandpo.errors import InvalidValue
from bandpo_lab.file_models import SEAL, checked, content_digest, read_sealed_json
from bandpo_lab.files import locked, replacing
from bandpo_lab.study.collect import RunResult, collect_run, versions
from bandpo_lab.study.jobs import Job, Outcome
from bandpo_lab.study.plan import PlannedRun, Study
from bandpo_lab.study.provenance import commit
from bandpo_lab.study.statistics import Results

Say = Callable[[str], None]


@dataclass
class Execution:
    """A study in its folder: ``study.yaml``, ``runs/``, and ``results.json`` once a run has ended.

    ``results.json`` holds every run that has ended and says ``unfinished`` until the last has. It is enough to go on
    from: a run that stands there is not made again, even if its own folder is gone.

    Args:
        text: The study's file, kept beside the results.
        folder: A folder with the same study is resumed.
        run_jobs: `on_cores`, with its number filled in.
    """

    study: Study
    text: str
    folder: Path
    run_jobs: Callable[[Sequence[Job]], Iterator[tuple[int, Outcome]]]
    say: Say = print

    def __call__(self) -> dict[str, Any]:
        """Tune, run what is reported, and write ``results.json``.

        Returns:
            What that file holds.

        Raises:
            ValueError: the folder holds another study, a run's settings are refused (before any run is started), or
                what is to be prepared fails.
            FileProblem: another process runs the study in this folder.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder):
            return self._execute()

    def _execute(self) -> dict[str, Any]:
        self._open()
        searches = self.study.searches()
        self._check([*searches, *self.study.reported(_anything(self.study))])
        failed = self._run(searches)
        chosen = Results(self.study, self._ended_of(searches)).chosen if searches else {}
        runs = self.study.reported(chosen)
        failed += self._run(runs)
        if not self._ended:
            raise InvalidValue("every run has failed; the last lines above and the logs say why")
        self._results |= {
            "chosen": [
                {"experiment": e, "arm": arm, "values": values} for (e, arm), values in chosen.items()
            ],
            "failed": [str(run) for run in failed],
            "unfinished": False,
            "runs": [
                self._ended[key] for run in [*searches, *runs] if (key := _key(**vars(run))) in self._ended
            ],
        }
        self._write()
        return self._results

    def _open(self) -> None:
        kept = self.folder / "study.yaml"
        self._results: dict[str, Any] = {"chosen": [], "failed": [], "runs": []}
        if (self.folder / "results.json").exists():
            self._results |= read_results(self.folder)
        for text in (kept.read_text(encoding="utf-8") if kept.exists() else None, self._results.get("study")):
            if text not in (None, self.text):
                raise InvalidValue(
                    f"{self.folder} holds another study, or an earlier form of this one ({kept}); the terms of a "
                    "study are fixed before it runs, so choose another --output_dir"
                )
        self._ended = {_key(**run): run for run in self._results["runs"]}
        with replacing(kept) as unfinished:
            unfinished.write_text(self.text, encoding="utf-8")

    def _write(self) -> None:
        """With one line for each run, so that a repository's history shows which changed."""
        runs = ",\n".join("  " + json.dumps(run) for run in self._results["runs"])
        rest = {name: value for name, value in self._results.items() if name != "runs"}
        head = json.dumps({SEAL: content_digest(self._results), **rest}, indent=1)
        with replacing(self.folder / "results.json") as unfinished:
            unfinished.write_text(f'{head[:-2]},\n "runs": [\n{runs}\n ]\n}}\n', encoding="utf-8")

    def _check(self, runs: Sequence[PlannedRun]) -> None:
        """Let `bandpo-lab train` itself read the settings of every run, which loads TRL but trains nothing."""
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
        config = self._place(run).with_suffix(".yaml")
        config.parent.mkdir(parents=True, exist_ok=True)
        options = {**run.options, "output_dir": str(self._place(run))}
        config.write_text(yaml.safe_dump(options, sort_keys=False), encoding="utf-8")
        return config

    def _run(self, runs: Sequence[PlannedRun]) -> list[PlannedRun]:
        """Run what has not run yet; returns the runs that failed."""
        todo = [run for run in runs if _key(**vars(run)) not in self._ended]
        jobs = [
            Job(
                "bandpo_lab",
                ["train", "--config", str(self._write_config(run)), "--resume"],
                self._place(run).with_suffix(".log"),
            )
            for run in todo
        ]
        failed: list[PlannedRun] = []
        if len(runs) > len(todo):
            self.say(f"{len(runs) - len(todo)} of {len(runs)} runs were done before")
        start, done = time.monotonic(), len(runs) - len(todo)
        for ended, (place, outcome) in enumerate(self.run_jobs(jobs), start=1):
            run = todo[place]
            if outcome.code:
                failed.append(run)
                said = f"FAILED: {_last_line(jobs[place].log)} (see {jobs[place].log})"
            else:
                self._keep(run, outcome.seconds)
                [result] = self._ended_of([run])
                said = f"{self.study.primary} {result.metric(self.study.primary):.3f}"
            left = (time.monotonic() - start) / ended * (len(todo) - ended) / 60
            self.say(
                f"[{done + ended}/{len(runs)}] {run}   {said}   {outcome.seconds:.0f} s, {left:.0f} min to go"
            )
        return failed

    def _keep(self, run: PlannedRun, seconds: float) -> None:
        """Add a run that has ended to the results."""
        folder = self._place(run)
        names = {name: value for name, value in vars(run).items() if name != "options"}
        self._ended[_key(**names)] = {**names, "seconds": round(seconds, 1), **collect_run(folder)}
        commits = (self._results.get("commit") or "").split(", ")
        self._results |= {
            "study": self.text,
            "versions": versions(folder),
            "commit": ", ".join(dict.fromkeys(filter(None, [*commits, commit()]))),
            "unfinished": True,
            "runs": list(self._ended.values()),
        }
        self._write()

    def _place(self, run: PlannedRun) -> Path:
        return self.folder / "runs" / run.folder

    def _ended_of(self, runs: Sequence[PlannedRun]) -> list[RunResult]:
        ended = (self._ended.get(_key(**vars(run))) for run in runs)
        return checked(list[RunResult], [run for run in ended if run], "runs")


def read_results(folder: Path) -> dict[str, Any]:
    """What a study's ``results.json`` holds, of a study that has ended, is at work or was interrupted.

    Raises:
        ValueError: no run has ended yet, or the file is not what was written.
    """
    file = folder / "results.json"
    if not file.exists():
        raise InvalidValue(f"{folder} has no results.json: it is no study, or none of its runs has ended yet")
    return read_sealed_json(file)


def _key(experiment: str, arm: str, seed: int, tuning: Any, **_: Any) -> str:
    """What tells one run, planned or ended, from the others."""
    return json.dumps([experiment, arm, seed, tuning], sort_keys=True)


def _anything(study: Study) -> Mapping[tuple[str, str], Mapping[str, Any]]:
    """Some choice of tuned values, to have the settings of all runs read before the search is made."""
    return {
        (e.name, arm): e.tune.choices()[0]
        for e in study.experiments.values()
        if e.tune
        for arm in study.arms_of(e)
    }


def _last_line(log: Path) -> str:
    lines = [
        line
        for line in log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").splitlines()
        if line.strip()
    ]
    return lines[-1].strip() if lines else "it printed nothing"
