"""Run an evaluation: sample and grade completions, write each to a file, and resume after an interruption."""

from __future__ import annotations

import hashlib
import json
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bandpo_lab.errors import FileProblem, InvalidValue
from bandpo_lab.evals.generate import REFUSED, Completion, GenerationError, Sampler
from bandpo_lab.evals.grading import ANSWERS_IN_A_ROW, CORES, BatchTime, grade, version
from bandpo_lab.evals.problems import EvalProblem, fingerprint
from bandpo_lab.files.reading import lines_of
from bandpo_lab.files.validation import read_sealed_json, validate_as, with_seal
from bandpo_lab.files.writing import drop_unfinished_line, locked, replacing

SAMPLES = "samples.jsonl"
"""The file with the graded completions, one per line."""
SETTINGS = "settings.json"
"""The file with the settings of the run."""


@dataclass(frozen=True)
class Sample:
    """A graded completion: one line of ``samples.jsonl``.

    Attributes:
        problem: The id of the problem.
        sample: The number of the completion among the n of its problem, from 0.
        data_source: The data source of the problem.
        score: 1.0 for a right answer, 0.0 for a wrong one.
        answer: The extracted answer, which majority voting counts; None if there is none.
        reason: The reason of the score (see `bandpo_lab.evals.grading.Grade`).
        finish: ``stop`` if the model ended the completion, ``length`` if it was cut; ``refused`` and the reason if a
            server refused the request.
        tokens: The length of the completion in tokens; None if a server does not report it.
        completion: The text of the completion.
        gold: The gold answer.
    """

    problem: str
    sample: int
    data_source: str
    score: float
    answer: str | None
    reason: str
    finish: str
    tokens: int | None
    completion: str
    gold: str


def evaluate(
    sampler: Sampler,
    problems: Sequence[EvalProblem],
    n: int,
    folder: Path,
    *,
    settings: Mapping[str, Any] | None = None,
) -> list[Sample]:
    """Complete each problem n times and grade every completion.

    Each graded sample is written to ``folder/samples.jsonl`` with a digest. If the folder has samples of an interrupted
    run, only the missing ones are drawn.

    `ANSWERS_IN_A_ROW` samples are a batch, in which the time limit of grading gets shorter after many slow answers, as
    in `bandpo_lab.evals.grading.reward`. A warning reports how many answers had less time.

    Args:
        sampler: The sampler that completes prompts.
        problems: The problems.
        n: The number of completions of each problem.
        folder: The folder for the samples and the settings.
        settings: Further settings that identify the run, such as the model's name.

    Returns:
        All samples, in the order of the problems.

    Raises:
        ValueError: n is below 1, the folder holds a run with other data, n or settings, or its samples are damaged.
        GenerationError: The sampler cannot continue, or refused all requests. The samples so far are in the folder,
            and the same call resumes.
        FileProblem: Another process is writing to the folder.
    """
    if n < 1:
        raise InvalidValue(f"n = {n} must be at least 1")
    folder.mkdir(parents=True, exist_ok=True)
    identity = {
        **(settings or {}),
        "n": n,
        "problems": len(problems),
        "data": fingerprint(problems),
        "sampling": asdict(sampler.sampling),
        "grader": version(),
    }
    with locked(folder):
        _check_settings(folder / SETTINGS, identity)
        # The position in the job of each problem and number of the sample.
        positions = {}
        for i, problem in enumerate(problems):
            for j in range(n):
                positions[problem.id, j] = i * n + j
        completed = _read_completed(folder / SAMPLES, positions)
        missing = [position for position in range(len(positions)) if position not in completed]
        batch_time = BatchTime(ANSWERS_IN_A_ROW)
        try:
            _sample_missing(sampler, problems, n, folder / SAMPLES, missing, completed, batch_time)
        finally:
            batch_time.warn_of(len(missing), f"{ANSWERS_IN_A_ROW} in a row")
    if all(sample.finish.startswith(REFUSED) for sample in completed.values()):
        raise GenerationError(f"the server refused every request, the first {completed[0].finish}")
    return [completed[position] for position in range(len(positions))]


def _sample_missing(
    sampler: Sampler,
    problems: Sequence[EvalProblem],
    n: int,
    path: Path,
    missing: Sequence[int],
    completed: dict[int, Sample],
    batch_time: BatchTime,
) -> None:
    """Sample and grade the completions that are missing, and write each to the file as soon as it is graded.

    Args:
        sampler: The sampler that completes prompts.
        problems: The problems.
        n: The number of completions of each problem.
        path: The file of samples.
        missing: The positions in the job that are missing.
        completed: The samples by their position in the job, to which the missing ones are added.
        batch_time: The time limit of grading.

    Raises:
        GenerationError: The sampler cannot continue.
    """
    job = list(chain.from_iterable(repeat(problem.prompt, n) for problem in problems))
    # The samples that are being graded, in the order in which they were generated.
    pending: deque[tuple[int, Future[Sample]]] = deque()
    with (
        path.open("a", encoding="utf-8") as file,
        tqdm(total=len(job), initial=len(completed), desc="samples") as progress_bar,
        ThreadPoolExecutor(CORES) as executor,
    ):

        def write(max_pending: int) -> None:
            """Write the graded samples, and wait until at most `max_pending` are left."""
            while pending and (len(pending) > max_pending or pending[0][1].done()):
                position, sample = pending.popleft()
                completed[position] = sample.result()
                file.write(_line(completed[position]))
                file.flush()  # so that it is not lost if the process is killed
                progress_bar.update()

        try:
            for position, completion in sampler.stream(job, missing) if missing else ():
                problem = problems[position // n]
                sample = executor.submit(_grade_sample, problem, position % n, completion, batch_time)
                pending.append((position, sample))
                write(max_pending=CORES)
        except GenerationError as error:
            write(max_pending=0)
            raise GenerationError(
                f"{error}; {len(completed)} of {len(job)} samples are kept in {path}; "
                "the same command goes on from there"
            ) from error
        finally:
            write(max_pending=0)


def regrade(folder: Path) -> list[Sample]:
    """Grade the samples of a finished run again with the current grader, and replace them in the file.

    Raises:
        FileProblem: `evaluate` did not write the folder, or another process is writing to it.
        ValueError: The run is not finished, or its file is damaged.
    """
    samples = read_samples(folder)
    with locked(folder):
        with ThreadPoolExecutor(CORES) as executor:
            batch_time = BatchTime(ANSWERS_IN_A_ROW)
            grades = executor.map(
                grade,
                [sample.completion for sample in samples],
                [sample.gold for sample in samples],
                [sample.data_source for sample in samples],
                repeat(None),
                repeat(batch_time),
            )
            graded_again = [
                replace(sample, **asdict(new_grade))
                for sample, new_grade in zip(samples, grades, strict=True)
            ]
            batch_time.warn_of(len(samples), f"{ANSWERS_IN_A_ROW} in a row")
        settings = read_sealed_json(folder / SETTINGS)
        _write(folder / SAMPLES, "".join(map(_line, graded_again)))
        _write_settings(folder / SETTINGS, settings | {"grader": version()})
    return graded_again


def _grade_sample(problem: EvalProblem, sample: int, completion: Completion, batch_time: BatchTime) -> Sample:
    """Grade a completion of a problem."""
    return Sample(
        problem=problem.id,
        sample=sample,
        data_source=problem.data_source,
        finish=completion.finish,
        tokens=completion.tokens,
        completion=completion.text,
        gold=problem.answer,
        **asdict(grade(completion.text, problem.answer, problem.data_source, batch_time=batch_time)),
    )


def _line(sample: Sample) -> str:
    """Return a sample as a line of JSON with its digest."""
    row = asdict(sample)
    return json.dumps({**row, "sha256": _digest(row)}) + "\n"


def _digest(row: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()


def _write(path: Path, text: str) -> None:
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def _write_settings(path: Path, settings: Mapping[str, Any]) -> None:
    _write(path, json.dumps(with_seal(settings), indent=2) + "\n")


def read_samples(folder: Path) -> list[Sample]:
    """Return the samples of a finished run, ordered by problem and number.

    Raises:
        FileProblem: `evaluate` did not write the folder.
        ValueError: The run is not finished, or its file is damaged.
    """
    path = folder / SAMPLES
    if not path.exists() or not (folder / SETTINGS).exists():
        raise FileProblem(f"{folder} holds no evaluation: `bandpo-lab eval` makes one")
    settings = read_sealed_json(folder / SETTINGS)
    samples = sorted(
        (sample for _, sample in _parse(path)), key=lambda sample: (sample.problem, sample.sample)
    )
    counts = validate_as(
        list[int], [settings.get("n"), settings.get("problems")], f"{folder / SETTINGS}, n and problems"
    )
    expected = math.prod(counts)
    distinct = {(sample.problem, sample.sample) for sample in samples}
    if len(samples) != expected or len(distinct) != expected:
        raise InvalidValue(
            f"{path} has {len(samples)} samples of {expected}: run the same `bandpo-lab eval` again to finish"
        )
    return samples


def _parse(path: Path) -> Iterator[tuple[int, Sample]]:
    """Yield the samples of a file with their line numbers.

    Raises:
        ValueError: A line does not have the digest that was written with it.
    """
    for number, row in lines_of(path):
        digest = row.pop("sha256", None)
        sample = validate_as(Sample, row, f"{path}, line {number}")
        if digest != _digest(row):
            raise InvalidValue(f"{path}, line {number} has changed since it was written: remove the folder")
        yield number, sample


def _read_completed(path: Path, positions: Mapping[tuple[str, int], int]) -> dict[int, Sample]:
    """Return the samples of an interrupted run by position; refused requests are removed, to be sent again.

    Args:
        path: The file of samples.
        positions: The position in the job of each problem id and sample number.

    Raises:
        ValueError: A sample does not belong to the job, or is in the file twice.
    """
    completed: dict[int, Sample] = {}
    if not path.exists():
        return completed
    drop_unfinished_line(path)  # its sample is drawn again
    for number, sample in _parse(path):
        position = positions.get((sample.problem, sample.sample))
        if position is None or position in completed:
            raise InvalidValue(
                f"{path}, line {number}: sample {sample.sample} of {sample.problem!r} is unknown or double"
            )
        completed[position] = sample
    without_refused = {
        position: sample for position, sample in completed.items() if not sample.finish.startswith(REFUSED)
    }
    if len(without_refused) < len(completed):
        _write(path, "".join(map(_line, without_refused.values())))
    return without_refused


def _check_settings(path: Path, identity: dict[str, Any]) -> None:
    """Check that the run in a folder has the same settings, and write them if there is no run yet.

    Raises:
        ValueError: A setting differs; the message names it.
    """
    identity = json.loads(json.dumps(identity))
    samples = path.with_name(SAMPLES)
    if not path.exists() or not samples.exists() or not samples.stat().st_size:
        _write_settings(path, identity)
        return
    earlier = read_sealed_json(path)
    for key in {**earlier, **identity}:
        if earlier.get(key) != identity.get(key):
            advice = "choose another folder, or the settings of that run to go on with it"
            if key == "grader":
                advice += "; --regrade grades a finished one again"
            raise InvalidValue(
                f"{path.parent} holds a run with {key} = {earlier.get(key)}, not {identity.get(key)}: {advice}"
            )
