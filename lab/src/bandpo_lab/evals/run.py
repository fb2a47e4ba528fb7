"""Runs an evaluation: samples, grades and writes each completion as it comes, and goes on where it
stopped."""

from __future__ import annotations

import hashlib
import json
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bandpo.errors import FileProblem, InvalidValue
from bandpo.runs.files import read_jsonl
from bandpo_lab.evals.generate import REFUSED, Completion, GenerationError, Sampler
from bandpo_lab.evals.grading import ANSWERS_IN_A_ROW, CORES, BatchTime, grade, version
from bandpo_lab.evals.problems import EvalProblem, fingerprint
from bandpo_lab.file_models import checked, read_sealed_json, with_seal
from bandpo_lab.files import drop_unfinished_line, locked, replacing

SAMPLES, SETTINGS = "samples.jsonl", "settings.json"


@dataclass(frozen=True)
class Sample:
    """One graded completion: a line of ``samples.jsonl``.

    Attributes:
        problem: Id.
        sample: Which of its n completions, from 0.
        score: 1.0 right, 0.0 wrong.
        answer: The answer read, None where there is none; what majority voting counts.
        reason: Of the score (see `bandpo_lab.evals.grading.Grade`).
        finish: ``stop`` where the model ended the completion, ``length`` where it was cut; ``refused`` and why, where a
            server refused the request.
        tokens: Length of the completion; None where a server does not say.
        gold: The right answer.
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
    generator: Sampler,
    problems: Sequence[EvalProblem],
    n: int,
    folder: Path,
    *,
    settings: Mapping[str, Any] | None = None,
) -> list[Sample]:
    """Completes each problem n times and grades every completion.

    Each sample is written to ``folder/samples.jsonl`` as it is graded, with a digest. A run into a folder that holds
    samples already draws only those that are missing; it refuses a folder with other data, n or settings.

    The settings are what else identifies the run, such as the model's name.

    `ANSWERS_IN_A_ROW` samples are a batch, whose answers have less time once many met the grader's limit, as in
    `bandpo_lab.evals.grading.reward`; a warning says how many had.

    Raises:
        ValueError: n below 1, or a folder of another run, or a file of samples that is damaged.
        GenerationError: The generator cannot go on, or refused everything. What came until then is kept, and the
            same call goes on.
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
        "sampling": asdict(generator.sampling),
        "grader": version(),
    }
    with locked(folder):
        _check_settings(folder / SETTINGS, identity)
        positions = {(p.id, j): i * n + j for i, p in enumerate(problems) for j in range(n)}
        done = _read_done(folder / SAMPLES, positions)
        missing = [position for position in range(len(positions)) if position not in done]
        job = [problem.prompt for problem in problems for _ in range(n)]
        waiting: deque[tuple[int, Future[Sample]]] = deque()
        batch_time = BatchTime(ANSWERS_IN_A_ROW)
        with (
            (folder / SAMPLES).open("a", encoding="utf-8") as file,
            tqdm(total=len(job), initial=len(done), desc="samples") as bar,
            ThreadPoolExecutor(CORES) as graders,
        ):

            def write(at_most: int) -> None:
                while waiting and (len(waiting) > at_most or waiting[0][1].done()):
                    position, graded = waiting.popleft()
                    done[position] = graded.result()
                    file.write(_line(done[position]))
                    file.flush()  # a kill must not lose it
                    bar.update()

            try:
                for position, completion in generator.stream(job, missing) if missing else ():
                    problem = problems[position // n]
                    graded = graders.submit(_graded, problem, position % n, completion, batch_time)
                    waiting.append((position, graded))
                    write(at_most=CORES)
            except GenerationError as error:
                write(at_most=0)
                raise GenerationError(
                    f"{error}; {len(done)} of {len(job)} samples are kept in {folder / SAMPLES}; "
                    "the same command goes on from there"
                ) from error
            finally:
                write(at_most=0)
                batch_time.warn_of(len(missing), f"{ANSWERS_IN_A_ROW} in a row")
    if all(sample.finish.startswith(REFUSED) for sample in done.values()):
        raise GenerationError(f"the server refused every request, the first {done[0].finish}")
    return [done[position] for position in range(len(positions))]


def regrade(folder: Path) -> list[Sample]:
    """Grade the samples of a finished run again, with the grader as it is now, and write them in their place.

    Raises:
        FileProblem: Not a folder that `evaluate` wrote, or another process is writing to it.
        ValueError: The run is not finished, or its file is damaged.
    """
    samples = read_samples(folder)
    with locked(folder):
        with ThreadPoolExecutor(CORES) as graders:
            golds = ([getattr(s, name) for s in samples] for name in ("completion", "gold", "data_source"))
            batch_time = BatchTime(ANSWERS_IN_A_ROW)
            grades = graders.map(grade, *golds, repeat(None), repeat(batch_time))
            again = [replace(s, **asdict(verdict)) for s, verdict in zip(samples, grades, strict=True)]
            batch_time.warn_of(len(samples), f"{ANSWERS_IN_A_ROW} in a row")
        settings = read_sealed_json(folder / SETTINGS)
        _write(folder / SAMPLES, "".join(map(_line, again)))
        _write_settings(folder / SETTINGS, settings | {"grader": version()})
    return again


def _graded(problem: EvalProblem, sample: int, completion: Completion, batch_time: BatchTime) -> Sample:
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
    """The samples of a finished run in the folder that `evaluate` wrote, each problem's in order.

    Raises:
        FileProblem: Not such a folder.
        ValueError: The run is not finished, or its file is damaged.
    """
    path = folder / SAMPLES
    if not path.exists() or not (folder / SETTINGS).exists():
        raise FileProblem(f"{folder} holds no evaluation: `bandpo-lab eval` makes one")
    settings = read_sealed_json(folder / SETTINGS)
    samples = sorted((sample for _, sample in _parse(path)), key=lambda s: (s.problem, s.sample))
    counts = checked(
        list[int], [settings.get("n"), settings.get("problems")], f"{folder / SETTINGS}, n and problems"
    )
    expected = math.prod(counts)
    if len(samples) != expected or len({(s.problem, s.sample) for s in samples}) != expected:
        raise InvalidValue(
            f"{path} has {len(samples)} samples of {expected}: run the same `bandpo-lab eval` again to finish"
        )
    return samples


def _parse(path: Path) -> Iterator[tuple[int, Sample]]:
    """Line numbers and samples."""
    for number, row in read_jsonl(path):
        digest = row.pop("sha256", None)
        sample = checked(Sample, row, f"{path}, line {number}")
        if digest != _digest(row):
            raise InvalidValue(f"{path}, line {number} has changed since it was written: remove the folder")
        yield number, sample


def _read_done(path: Path, positions: Mapping[tuple[str, int], int]) -> dict[int, Sample]:
    done: dict[int, Sample] = {}
    if not path.exists():
        return done
    drop_unfinished_line(path)  # its sample is drawn again
    for number, sample in _parse(path):
        position = positions.get((sample.problem, sample.sample))
        if position is None or position in done:
            raise InvalidValue(
                f"{path}, line {number}: sample {sample.sample} of {sample.problem!r} is unknown or double"
            )
        done[position] = sample
    refused = [position for position, sample in done.items() if sample.finish.startswith(REFUSED)]
    if refused:  # they are asked for again
        done = {position: sample for position, sample in done.items() if position not in refused}
        _write(path, "".join(map(_line, done.values())))
    return done


def _check_settings(path: Path, identity: dict[str, Any]) -> None:
    identity = json.loads(json.dumps(identity))
    samples = path.with_name(SAMPLES)
    if not path.exists() or not samples.exists() or not samples.stat().st_size:
        _write_settings(path, identity)
        return
    earlier = read_sealed_json(path)
    for key in {**earlier, **identity}:
        if earlier.get(key) != identity.get(key):
            raise InvalidValue(
                f"{path.parent} holds a run with {key} = {earlier.get(key)}, not {identity.get(key)}: "
                "choose another folder, or the settings of that run to go on with it"
                + "; --regrade grades a finished one again"
                * (key == "grader")
            )
