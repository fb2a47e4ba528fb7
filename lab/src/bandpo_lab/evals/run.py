"""Runs an evaluation: samples, grades and writes each completion as it comes, and goes on where it
stopped."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bandpo.audit.files import read_jsonl
from bandpo.errors import FileProblem, InvalidValue
from bandpo_lab.evals.generate import GenerationError, Sampler
from bandpo_lab.evals.grading import grade
from bandpo_lab.evals.problems import EvalProblem, fingerprint
from bandpo_lab.file_models import checked
from bandpo_lab.files import drop_unfinished_line, locked

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
        finish: ``stop`` where the model ended the completion, ``length`` where it was cut.
        tokens: Length of the completion.
    """

    problem: str
    sample: int
    data_source: str
    score: float
    answer: str | None
    reason: str
    finish: str
    tokens: int
    completion: str


def evaluate(
    generator: Sampler,
    problems: Sequence[EvalProblem],
    n: int,
    folder: Path,
    *,
    settings: Mapping[str, Any] | None = None,
) -> list[Sample]:
    """Completes each problem n times and grades every completion.

    Each sample is written to ``folder/samples.jsonl`` as it comes. A run into a folder that holds samples
    already draws only those that are missing; it refuses a folder with other data, n or settings.

    The settings are what else identifies the run, such as the model's name.

    Raises:
        ValueError: n below 1, or a folder of another run, or a file of samples that is damaged.
        GenerationError: The generator cannot go on. What came until then is kept, and the same call goes on.
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
    }
    with locked(folder):
        _check_settings(folder / SETTINGS, identity)
        positions = {(p.id, j): i * n + j for i, p in enumerate(problems) for j in range(n)}
        done = _read_done(folder / SAMPLES, positions)
        missing = [position for position in range(len(positions)) if position not in done]
        job = [problem.prompt for problem in problems for _ in range(n)]
        with (
            (folder / SAMPLES).open("a", encoding="utf-8") as file,
            tqdm(total=len(job), initial=len(done), desc="samples") as bar,
        ):
            try:
                for position, completion in generator.stream(job, missing) if missing else ():
                    problem = problems[position // n]
                    verdict = grade(completion.text, problem.answer, problem.data_source)
                    sample = Sample(
                        problem=problem.id,
                        sample=position % n,
                        data_source=problem.data_source,
                        finish=completion.finish,
                        tokens=completion.tokens,
                        completion=completion.text,
                        **asdict(verdict),
                    )
                    file.write(json.dumps(asdict(sample)) + "\n")
                    file.flush()  # a kill must not lose it
                    done[position] = sample
                    bar.update()
            except GenerationError as error:
                raise GenerationError(
                    f"{error}\n{len(done)} of {len(job)} samples are kept in {folder / SAMPLES}; "
                    "the same command goes on from there"
                ) from error
    return [done[position] for position in range(len(positions))]


def read_samples(folder: Path) -> list[Sample]:
    """The samples of a finished run in the folder that `evaluate` wrote, each problem's in order.

    Raises:
        FileProblem: Not such a folder.
        ValueError: The run is not finished, or its file is damaged.
    """
    path = folder / SAMPLES
    if not path.exists() or not (folder / SETTINGS).exists():
        raise FileProblem(f"{folder} holds no evaluation: `bandpo eval` makes one")
    settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    samples = sorted((sample for _, sample in _parse(path)), key=lambda s: (s.problem, s.sample))
    expected = settings["n"] * settings["problems"]
    if len(samples) != expected or len({(s.problem, s.sample) for s in samples}) != expected:
        raise InvalidValue(
            f"{path} has {len(samples)} samples of {expected}: run the same `bandpo eval` again to finish"
        )
    return samples


def _parse(path: Path) -> Iterator[tuple[int, Sample]]:
    """Line numbers and samples."""
    for number, row in read_jsonl(path):
        yield number, checked(Sample, row, f"{path}, line {number}")


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
    return done


def _check_settings(path: Path, identity: dict[str, Any]) -> None:
    identity = json.loads(json.dumps(identity))
    if not path.exists():
        path.write_text(json.dumps(identity, indent=2) + "\n", encoding="utf-8")
        return
    earlier = json.loads(path.read_text(encoding="utf-8"))
    for key in {**earlier, **identity}:
        if earlier.get(key) != identity.get(key):
            raise InvalidValue(
                f"{path.parent} holds a run with {key} = {earlier.get(key)}, not {identity.get(key)}: "
                "choose another folder, or the settings of that run to go on with it"
            )
