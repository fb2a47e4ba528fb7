"""What is evaluated: prompts, answers and the rule that grades them, from prepared files or the embedded
task."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bandpo.errors import InvalidValue
from bandpo_lab.evals.generate import Prompt
from bandpo_lab.evals.rows import read_answer, read_prompt, read_rows


@dataclass(frozen=True)
class EvalProblem:
    """One prompt to be completed n times.

    Attributes:
        id: Unique among the problems of an evaluation.
        data_source: Decides how it is graded (see `bandpo_lab.evals.grading.grade`). Scores go by it.
    """

    id: str
    prompt: Prompt
    answer: str
    data_source: str


def embedded_problems(count: int = 64, seed: int = 0) -> list[EvalProblem]:
    """Problems of the embedded task that no training set contains.

    >>> len(embedded_problems(3))
    3
    """
    from bandpo_lab.tasks.multiplication import problems

    rows = problems("eval", count, seed)
    return [EvalProblem(f"multiplication-{p.prompt}", p.prompt, p.answer, "multiplication") for p in rows]


def read_problems(paths: Sequence[Path]) -> list[EvalProblem]:
    """Return the problems of files of `bandpo-lab data prepare`, in TRL's form or verl's, in order.

    The files are parquet or JSONL.

    Raises:
        ValueError: A file does not hold prompts and answers, or an id stands there twice.
        FileProblem: A file does not exist.
    """
    problems = [_read_row(path, i, row) for path in paths for i, row in enumerate(read_rows(path))]
    seen: set[str] = set()
    for problem in problems:
        if problem.id in seen:
            raise InvalidValue(
                f"two problems have the id {problem.id!r}: give each file's problems ids of their own"
            )
        seen.add(problem.id)
    if not problems:
        raise InvalidValue(f"no problems in {', '.join(map(str, paths)) or 'no file'}")
    return problems


def _read_row(path: Path, i: int, row: Mapping[str, Any]) -> EvalProblem:
    extra, model = row.get("extra_info"), row.get("reward_model")
    gold = model.get("ground_truth") if isinstance(model, Mapping) else row.get("answer")
    try:
        prompt, answer = read_prompt(row.get("prompt")), read_answer(gold)
        if not prompt or not answer:
            raise InvalidValue(f"{'the prompt' if not prompt else 'the answer'} is empty")
    except ValueError as error:
        raise InvalidValue(
            f"{path}, row {i} with the columns {', '.join(row)} needs a prompt and an answer ({error}): "
            f"make the file ready with `bandpo-lab data prepare {path}`"
        ) from error
    id = row.get("id") or (extra.get("id") if isinstance(extra, Mapping) else None) or f"{path.stem}-{i}"
    return EvalProblem(str(id), prompt, answer, str(row.get("data_source") or path.stem))


def fingerprint(problems: Sequence[EvalProblem]) -> str:
    """A hash of everything that is evaluated, by which a resumed run knows its data.

    >>> len(fingerprint([EvalProblem("a", "1+1=", "2", "sums")]))
    64
    """
    text = json.dumps([asdict(problem) for problem in problems], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
