"""The problems of an evaluation, from files of `bandpo-lab data prepare` or from the embedded task."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bandpo_lab.errors import InvalidValue
from bandpo_lab.evals.dataset_io import read_answer, read_prompt, read_rows
from bandpo_lab.evals.generate import Prompt


@dataclass(frozen=True)
class EvalProblem:
    """A prompt that is completed n times.

    Attributes:
        id: The id, which is unique among the problems of an evaluation.
        prompt: The prompt, a text or messages.
        answer: The gold answer.
        data_source: The data source, which selects the rule of grading (see `bandpo_lab.evals.grading.grade`). Scores
            are reported per data source.
    """

    id: str
    prompt: Prompt
    answer: str
    data_source: str


def embedded_problems(count: int = 64, seed: int = 0) -> list[EvalProblem]:
    """Return problems of the embedded task that no training set contains.

    >>> len(embedded_problems(3))
    3
    """
    from bandpo_lab.tasks.multiplication import problems

    rows = problems("eval", count, seed)
    return [EvalProblem(f"multiplication-{p.prompt}", p.prompt, p.answer, "multiplication") for p in rows]


def read_problems(paths: Sequence[Path]) -> list[EvalProblem]:
    """Return the problems of parquet or JSONL files of `bandpo-lab data prepare`, in TRL's form or verl's, in order.

    Raises:
        ValueError: A row has no prompt or no answer, or two problems have the same id.
        FileProblem: A file does not exist.
    """
    problems: list[EvalProblem] = []
    for path in paths:
        problems += [_read_row(path, number, row) for number, row in enumerate(read_rows(path))]
    ids: set[str] = set()
    for problem in problems:
        if problem.id in ids:
            raise InvalidValue(
                f"two problems have the id {problem.id!r}: give each file's problems ids of their own"
            )
        ids.add(problem.id)
    if not problems:
        raise InvalidValue(f"no problems in {', '.join(map(str, paths)) or 'no file'}")
    return problems


def _read_row(path: Path, number: int, row: Mapping[str, Any]) -> EvalProblem:
    """Return the problem in a row of a file, in TRL's form or verl's."""
    extra_info = row.get("extra_info")
    reward_model = row.get("reward_model")
    gold = reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else row.get("answer")
    try:
        prompt = read_prompt(row.get("prompt"))
        answer = read_answer(gold)
        if not prompt or not answer:
            raise InvalidValue(f"{'the prompt' if not prompt else 'the answer'} is empty")
    except ValueError as error:
        raise InvalidValue(
            f"{path}, row {number} with the columns {', '.join(row)} needs a prompt and an answer ({error}): "
            f"make the file ready with `bandpo-lab data prepare {path}`"
        ) from error
    id_in_extra = extra_info.get("id") if isinstance(extra_info, Mapping) else None
    problem_id = row.get("id") or id_in_extra or f"{path.stem}-{number}"
    return EvalProblem(str(problem_id), prompt, answer, str(row.get("data_source") or path.stem))


def fingerprint(problems: Sequence[EvalProblem]) -> str:
    """Return a hash of all problems, by which a resumed run recognizes its data.

    >>> len(fingerprint([EvalProblem("a", "1+1=", "2", "sums")]))
    64
    """
    text = json.dumps([asdict(problem) for problem in problems], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
