"""Load problem sets from public hubs, local files and the package's generators."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bandpo_lab.data.sets import GENERATED, HUB, SIZE, HubDataset, Role
from bandpo_lab.errors import FileProblem, InvalidValue
from bandpo_lab.evals.dataset_io import read_answer, read_prompt, read_rows
from bandpo_lab.files.hub_digests import compare_with_hub
from bandpo_lab.files.writing import digest
from bandpo_lab.output.console import echo


@dataclass(frozen=True)
class Problem:
    """A problem and its answer as texts, with an id that is unique in its set and stable between runs."""

    id: str
    problem: str
    answer: str


@dataclass(frozen=True)
class ProblemSet:
    """A set of problems with its origin.

    Attributes:
        name: The name of the set and of its files.
        data_source: The data source, which selects the rule of grading (see `bandpo_lab.evals.grading.grade`).
        role: ``train`` for training, ``eval`` for evaluation.
        problems: The problems, in the order of the source.
        origin: The source, its revision and the like, for the manifest.
        licence: The licence that the source states.
        complete: True if the problem is the whole prompt, to which no instruction is added.
        ability: The kind of answer: ``math``, ``commonsense`` (a letter) or ``code`` (tests).
        unreadable: The rows of the source without a problem or an answer, as reasons by id.
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
"""The columns that may hold the problem; the first that is not empty is used."""
ANSWER_COLUMNS = ("answer", "answerKey", "final_answer", "ground_truth", "reward_model", "solution")
"""The columns that may hold the answer; the first that is not empty is used."""


_FILE = re.compile(r"(?:([\w.-]+)=)?(.+\.(?:jsonl|parquet))")
_TRAIN = re.compile(r"(?:^|[-_.])train(?=$|[-_.])", re.IGNORECASE)


def set_name(spec: str) -> str:
    """Return the name of a set without loading it.

    >>> set_name("aime24"), set_name("runs/my.jsonl"), set_name("mine=runs/my.jsonl")
    ('aime24', 'my', 'mine')
    """
    file = _FILE.fullmatch(spec)
    return spec if file is None else file[1] or Path(file[2]).stem


def load(
    spec: str, *, role: Role | None = None, revision: str | None = None, size: int = SIZE, seed: int = 0
) -> ProblemSet:
    """Load one set.

    Args:
        spec: A name in `HUB` or `GENERATED`, a JSONL or parquet file, or ``NAME=FILE``. The default name of a file is
            its stem. If the name is in `HUB`, the set has the role and licence given there.
        role: The role of a file. By default, a file is for training if its name has the word ``train`` (``train``,
            ``my-train``, ``my_train``), and for evaluation if not.
        revision: The revision of the hub's repository; by default the commit in `HUB`. The manifest records it.
        size: The number of problems of a generated set.
        seed: The seed of a generated set.

    Raises:
        ValueError: The name is unknown, the set has another role, it cannot have this size, or the file has no
            problems.
        FileProblem: The file does not exist.
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


def _check_role(name: str, role: Role, requested: Role | None) -> None:
    """Check that the requested role, if any, is the one of the set.

    Raises:
        ValueError: The set has another role.
    """
    if requested not in (None, role):
        raise InvalidValue(
            f"{name} has the role {role}, not {requested}: to use a file of it in that role, give the file another "
            "name, NAME=FILE"
        )


def _load_hub(name: str, hub: HubDataset, role: Role | None, revision: str | None) -> ProblemSet:
    """Load a set from the hub, or from its cache if the hub's libraries are offline."""
    _check_role(name, hub.role, role)
    import huggingface_hub
    from datasets import load_dataset

    revision = revision or hub.revision
    try:
        if huggingface_hub.is_offline_mode():
            # The cache finds an earlier download by its commit; it does not hold the card with the licence.
            commit = revision
            licence = None
        else:
            info = huggingface_hub.HfApi().dataset_info(hub.repo, revision=revision)
            commit = info.sha
            licence = (info.card_data or {}).get("license")
        if hub.file is None:
            rows = load_dataset(hub.repo, hub.config, split=hub.split, revision=commit).to_list()
        else:
            file = huggingface_hub.hf_hub_download(hub.repo, hub.file, repo_type="dataset", revision=commit)
            rows = read_rows(Path(file))
    # Without a network, the hub's libraries raise errors of several packages.
    except Exception as error:
        raise ConnectionError(
            f"{name} could not be loaded from the hub's {hub.repo}, revision {revision}: {error}. "
            f"Without access to the hub, give a file: {name}=FILE.jsonl"
        ) from error
    if not huggingface_hub.is_offline_mode():
        _compare_cache_with_hub(name, hub, str(commit))
    origin = {"hub": hub.repo, "config": hub.config, "split": hub.split, "revision": commit}
    return _problem_set(name, rows, origin, role, str(licence) if licence else None)


def _compare_cache_with_hub(name: str, hub: HubDataset, commit: str) -> None:
    """Compare the files of a set in the hub's cache with the hub's digests, and print the result.

    Raises:
        FileProblem: A file differs. It is removed, and so are the rows that were made from it.
    """
    import huggingface_hub
    from datasets import load_dataset_builder

    cache = Path(huggingface_hub.constants.HF_HUB_CACHE)
    folder = cache / f"datasets--{hub.repo.replace('/', '--')}" / "snapshots" / commit
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    if not names:  # the rows are from the cache of an earlier call, which has compared their files
        return
    try:
        comparison = compare_with_hub(folder, names, hub.repo, commit, "dataset")
    except FileProblem:
        if hub.file is None:
            builder = load_dataset_builder(hub.repo, hub.config, revision=commit)
            shutil.rmtree(builder.cache_dir, ignore_errors=True)
        raise
    echo(f"{name}: {comparison}", err=True)


def _load_file(name: str, path: Path, role: Role | None) -> ProblemSet:
    """Load a set from a local file."""
    rows = read_rows(path)
    revision = f"sha256:{digest(path)}"
    return _problem_set(name, rows, {"file": path.name, "revision": revision}, role)


def _problem_set(
    name: str,
    rows: Sequence[Mapping[str, Any]],
    origin: Mapping[str, Any],
    requested_role: Role | None,
    licence: str | None = None,
) -> ProblemSet:
    """Convert the rows of a source to a set of problems."""
    hub = HUB.get(name)
    role: Role = requested_role or ("train" if _TRAIN.search(name) else "eval")
    ability = "math"
    indices: Sequence[int] = range(len(rows))
    if hub is not None:
        role = hub.role
        ability = hub.ability
        licence = licence or hub.licence
        if hub.draw is not None:
            indices = hub.draw(len(rows))

    # Read the rows, and collect those without a problem or an answer.
    read_row = _ROW_READERS[ability]
    problems: list[Problem] = []
    unreadable: dict[str, str] = {}
    for i in indices:
        row = rows[i]
        if hub is not None and hub.levels and row.get("level", hub.levels[0]) not in hub.levels:
            continue
        problem_id = f"{name}-{i}"
        try:
            problems.append(Problem(problem_id, *read_row(row)))
        except ValueError as error:
            unreadable[problem_id] = str(error)
    if not problems:
        message = f"{name}: no row with a problem and an answer"
        for problem_id, reason in list(unreadable.items())[:1]:
            message += f"; row {problem_id.removeprefix(f'{name}-')}: {reason}"
        raise InvalidValue(message)
    _check_role(name, role, requested_role)
    return ProblemSet(
        name,
        _TRAIN.sub("", name) or name,
        role,
        tuple(problems),
        origin,
        licence or "not stated",
        ability=ability,
        unreadable=unreadable,
    )


def _read_math(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return the problem and the answer of a row."""
    return _first(row, PROBLEM_COLUMNS, read_problem), _first(row, ANSWER_COLUMNS, read_answer)


def _read_choice(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return a question with its lettered choices, and the letter of the right choice.

    Some sets have numbers as labels. They are replaced by letters.
    """
    question = _first(row, PROBLEM_COLUMNS, read_problem)
    right_label = _first(row, ANSWER_COLUMNS, read_answer)
    choices = row.get("choices")
    if not isinstance(choices, Mapping):
        raise InvalidValue("the row has no choices with label and text")
    letters = {label: chr(ord("A") + i) for i, label in enumerate(choices["label"])}
    if right_label not in letters:
        raise InvalidValue(f"the answer {right_label!r} is none of the choices {', '.join(letters)}")
    lines = [f"({letter}) {text}" for letter, text in zip(letters.values(), choices["text"], strict=True)]
    return "\n".join([f"Question: {question}", "", "Choices:", *lines]), letters[right_label]


def _read_code(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return a programming task, and its tests as JSON with the keys ``inputs`` and ``outputs``."""
    value = row.get("input_output") or "{}"
    try:
        tests = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise InvalidValue(f"input_output is not valid JSON: {error}") from error
    inputs: Sequence[Any] = []
    outputs: Sequence[Any] = []
    if isinstance(tests, dict):
        inputs = tests.get("inputs") or []
        outputs = tests.get("outputs") or []
    if not inputs or len(inputs) != len(outputs):
        raise InvalidValue(f"{len(inputs)} inputs and {len(outputs)} outputs are no tests")
    task = _first(row, PROBLEM_COLUMNS, read_problem)
    if row.get("starter_code"):
        task += f"\n\nStart from:\n```python\n{row['starter_code']}\n```"
    return task, json.dumps(tests)


_ROW_READERS = {"math": _read_math, "commonsense": _read_choice, "code": _read_code}


def _first(row: Mapping[str, Any], columns: tuple[str, ...], read: Callable[[Any], str]) -> str:
    """Return the text of the first column that is not empty.

    Args:
        row: The row.
        columns: The names of the columns, in order.
        read: A function from a value to its text.

    Raises:
        ValueError: All of these columns are missing, empty or malformed.
    """
    present = [column for column in columns if column in row]
    if not present:
        raise InvalidValue(f"the row has the columns {', '.join(row)}, and needs one of {', '.join(columns)}")
    reasons = []
    for column in present:
        value = row[column]
        try:
            text = read(value)
        except ValueError as error:
            reasons.append(f"{column}: {error}")
            continue
        if text:
            return text
        reasons.append(f"{column} is null" if value is None else f"{column} is {value!r:.40}")
    raise InvalidValue("; ".join(reasons))


def read_problem(value: Any) -> str:
    """Return the text of a problem: a string, or the last message of the user.

    Raises:
        ValueError: The value is neither a text nor messages of text.

    >>> read_problem([{"role": "user", "content": "1+1?"}])
    '1+1?'
    """
    if value is None:
        return ""
    prompt = read_prompt(value)
    if isinstance(prompt, str):
        return prompt.strip()
    return next((m["content"].strip() for m in reversed(prompt) if m["role"] == "user"), "")


def _generate(name: str, requested_role: Role | None, size: int, seed: int) -> ProblemSet:
    """Generate a set of one of the package's tasks."""
    from bandpo_lab.tasks import multiplication, sums

    if size < 1:
        raise InvalidValue(f"{name}: size = {size} must be at least 1")
    role: Role = "train" if name.endswith("-train") else "eval"
    _check_role(name, role, requested_role)
    task = name.removesuffix("-train")
    generate = {"multiplication": multiplication.problems, "sums": sums.problems}[task]
    rows = generate(role, size, seed)
    problems = tuple(Problem(f"{name}-{i}", row.prompt, row.answer) for i, row in enumerate(rows))
    origin = {"generator": f"bandpo_lab.tasks.{task}", "revision": f"size {size}, seed {seed}"}
    return ProblemSet(name, task, role, problems, origin, "apache-2.0", complete=True)
