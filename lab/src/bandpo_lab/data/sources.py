"""Where problems come from: the paper's sets on their public hubs, local files, and the package's
generators."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bandpo.errors import InvalidValue
from bandpo_lab.data.sets import GENERATED, HUB, SIZE, Hub, Role
from bandpo_lab.evals.dataset_io import read_answer, read_prompt, read_rows
from bandpo_lab.files import digest


@dataclass(frozen=True)
class Problem:
    """One problem and its answer, as text; the id is unique in its set and the same in every run."""

    id: str
    problem: str
    answer: str


@dataclass(frozen=True)
class ProblemSet:
    """Problems and where they are from.

    Attributes:
        name: Of the set, and of its files.
        data_source: What decides how it is graded (see `bandpo_lab.evals.grading.grade`).
        role: Training or evaluation.
        problems: In the order of the source.
        origin: Source, revision and the like, for the manifest.
        licence: As the source states it.
        complete: The problem is the whole prompt, without an instruction on how to answer.
        ability: What it asks for: ``math``, ``commonsense`` (a letter) or ``code`` (tests as the answer).
        unreadable: Ids of the source's rows without a problem or an answer, each with the reason.
    """

    name: str
    data_source: str
    role: Role
    problems: tuple[Problem, ...]
    origin: Mapping[str, Any]
    licence: str
    complete: bool = False
    ability: str = "math"
    unreadable: Mapping[str, str] = field(default_factory=dict)


PROBLEM_COLUMNS = ("problem", "question", "prompt")
ANSWER_COLUMNS = ("answer", "answerKey", "final_answer", "ground_truth", "reward_model", "solution")
"""Columns searched, in this order; the first that holds one has the problem or the answer."""


_FILE = re.compile(r"(?:([\w.-]+)=)?(.+\.(?:jsonl|parquet))")
_TRAIN = re.compile(r"(?:^|[-_.])train(?=$|[-_.])", re.IGNORECASE)


def set_name(spec: str) -> str:
    """The name of the set that `load` loads, without loading it.

    >>> set_name("aime24"), set_name("runs/my.jsonl"), set_name("mine=runs/my.jsonl")
    ('aime24', 'my', 'mine')
    """
    file = _FILE.fullmatch(spec)
    return spec if file is None else file[1] or Path(file[2]).stem


def load(
    spec: str, *, role: Role | None = None, revision: str | None = None, size: int = SIZE, seed: int = 0
) -> ProblemSet:
    """Loads one set.

    Args:
        spec: A name of `HUB` or `GENERATED`, a JSONL or parquet file, or ``NAME=FILE``. A file
            takes its name from its stem; where the name is one of the hub's, also role and licence.
        role: Of a file. Left out, a file is for training if its name has the word ``train`` (``train``,
            ``my-train``, ``my_train``), and for evaluation if not.
        revision: Of the hub's repository; by default the commit that `HUB` names. The manifest records which it was.
        size: Problems to make, for generated sets, with this seed.

    Raises:
        ValueError: Unknown name, a role that is not the set's own, a size that the set cannot have, or a file that
            does not hold problems.
        FileProblem: No such file.
        ConnectionError: The hub cannot be reached.
    """
    file = _FILE.fullmatch(spec)
    if file is not None:
        return _load_file(set_name(spec), Path(file[2]), role)
    if spec in GENERATED:
        return _generate(spec, role, size, seed)
    if spec in HUB:
        return _load_hub(spec, HUB[spec], role, revision)
    raise InvalidValue(
        f"{spec!r} is neither a .jsonl or .parquet file nor one of {', '.join([*HUB, *GENERATED])}"
    )


def _own_role(name: str, own: Role, asked: Role | None) -> Role:
    if asked not in (None, own):
        raise InvalidValue(
            f"{name} has the role {own}, not {asked}: give a file of it another name, NAME=FILE, to use it so"
        )
    return own


def _load_hub(name: str, hub: Hub, role: Role | None, revision: str | None) -> ProblemSet:
    _own_role(name, hub.role, role)
    import huggingface_hub
    from datasets import load_dataset

    asked = revision or hub.revision
    try:
        if huggingface_hub.is_offline_mode():
            # What an earlier call has downloaded is found by its commit; the card is not among it.
            commit, licence = asked, None
        else:
            info = huggingface_hub.HfApi().dataset_info(hub.repo, revision=asked)
            commit, licence = info.sha, (info.card_data or {}).get("license")
        if hub.file is None:
            rows = load_dataset(hub.repo, hub.config, split=hub.split, revision=commit).to_list()
        else:
            file = huggingface_hub.hf_hub_download(hub.repo, hub.file, repo_type="dataset", revision=commit)
            rows = read_rows(Path(file))
    # Without a network the hub's libraries raise errors of several packages.
    except Exception as error:
        raise ConnectionError(
            f"{name} could not be loaded from the hub's {hub.repo}, revision {asked}: {error}. "
            f"Where the hub is out of reach, give a file: {name}=FILE.jsonl"
        ) from error
    origin = {"hub": hub.repo, "config": hub.config, "split": hub.split, "revision": commit}
    return _read(name, rows, origin, role, str(licence) if licence else None)


def _load_file(name: str, path: Path, role: Role | None) -> ProblemSet:
    rows = read_rows(path)
    revision = f"sha256:{digest(path)}"
    return _read(name, rows, {"file": path.name, "revision": revision}, role)


def _read(
    name: str,
    rows: Sequence[Mapping[str, Any]],
    origin: Mapping[str, Any],
    role: Role | None,
    licence: str | None = None,
) -> ProblemSet:
    hub = HUB.get(name)
    own: Role = hub.role if hub else role or ("train" if _TRAIN.search(name) else "eval")
    read = _READERS[hub.ability if hub else "math"]
    problems: list[Problem] = []
    unreadable: dict[str, str] = {}
    for i in hub.draw(len(rows)) if hub and hub.draw else range(len(rows)):
        row = rows[i]
        if hub is not None and hub.levels and row.get("level", hub.levels[0]) not in hub.levels:
            continue
        id = f"{name}-{i}"
        try:
            problems.append(Problem(id, *read(row)))
        except ValueError as error:
            unreadable[id] = str(error)
    if not problems:
        why = [f"; row {id.removeprefix(f'{name}-')}: {reason}" for id, reason in unreadable.items()]
        raise InvalidValue(f"{name}: no row with a problem and an answer{''.join(why[:1])}")
    return ProblemSet(
        name,
        _TRAIN.sub("", name) or name,
        _own_role(name, own, role),
        tuple(problems),
        origin,
        licence or (hub.licence if hub else "not stated"),
        ability=hub.ability if hub else "math",
        unreadable=unreadable,
    )


def _read_math(row: Mapping[str, Any]) -> tuple[str, str]:
    return _first(row, PROBLEM_COLUMNS, read_problem), _first(row, ANSWER_COLUMNS, read_answer)


def _read_choice(row: Mapping[str, Any]) -> tuple[str, str]:
    """A question with its choices, and the letter of the right one; some sets number them."""
    question, key = _first(row, PROBLEM_COLUMNS, read_problem), _first(row, ANSWER_COLUMNS, read_answer)
    choices = row.get("choices")
    if not isinstance(choices, Mapping):
        raise InvalidValue("the row has no choices with label and text")
    letters = {label: chr(ord("A") + i) for i, label in enumerate(choices["label"])}
    if key not in letters:
        raise InvalidValue(f"the answer {key!r} is none of the choices {', '.join(letters)}")
    listed = [f"({letter}) {text}" for letter, text in zip(letters.values(), choices["text"], strict=True)]
    return "\n".join([f"Question: {question}", "", "Choices:", *listed]), letters[key]


def _read_code(row: Mapping[str, Any]) -> tuple[str, str]:
    """A task for a program, and its tests as JSON: ``inputs`` and ``outputs``, as many of one as of the other."""
    tests = row.get("input_output") or "{}"
    try:
        read = json.loads(tests) if isinstance(tests, str) else tests
    except ValueError as error:
        raise InvalidValue(f"input_output is no JSON: {error}") from error
    inputs, outputs = (
        ([], []) if not isinstance(read, dict) else (read.get(k) or [] for k in ("inputs", "outputs"))
    )
    if not inputs or len(inputs) != len(outputs):
        raise InvalidValue(f"{len(inputs)} inputs and {len(outputs)} outputs are no tests")
    starter = f"\n\nStart from:\n```python\n{row['starter_code']}\n```" if row.get("starter_code") else ""
    return _first(row, PROBLEM_COLUMNS, read_problem) + starter, json.dumps(read)


_READERS = {"math": _read_math, "commonsense": _read_choice, "code": _read_code}


def _first(row: Mapping[str, Any], columns: tuple[str, ...], read: Callable[[Any], str]) -> str:
    """The first of the columns that holds something."""
    there = [column for column in columns if column in row]
    if not there:
        raise InvalidValue(f"the row has the columns {', '.join(row)}, and needs one of {', '.join(columns)}")
    reasons = []
    for column in there:
        try:
            if text := read(row[column]):
                return text
            reasons.append(f"{column} is {'null' if row[column] is None else f'{row[column]!r:.40}'}")
        except ValueError as error:
            reasons.append(f"{column}: {error}")
    raise InvalidValue("; ".join(reasons))


def read_problem(value: Any) -> str:
    """The text of a problem: a string, or messages, of which the last one of the user holds it.

    Raises:
        ValueError: Neither of the two.

    >>> read_problem([{"role": "user", "content": "1+1?"}])
    '1+1?'
    """
    if value is None:
        return ""
    prompt = read_prompt(value)
    if isinstance(prompt, str):
        return prompt.strip()
    return next((m["content"].strip() for m in reversed(prompt) if m["role"] == "user"), "")


def _generate(name: str, asked: Role | None, size: int, seed: int) -> ProblemSet:
    from bandpo_lab.tasks.multiplication import problems

    if size < 1:
        raise InvalidValue(f"{name}: size = {size} must be at least 1")
    role = _own_role(name, "train" if name.endswith("-train") else "eval", asked)
    rows = problems(role, size, seed)
    made = tuple(Problem(f"{name}-{i}", row.prompt, row.answer) for i, row in enumerate(rows))
    origin = {"generator": "bandpo_lab.tasks.multiplication", "revision": f"size {size}, seed {seed}"}
    return ProblemSet(name, "multiplication", role, made, origin, "apache-2.0", complete=True)
