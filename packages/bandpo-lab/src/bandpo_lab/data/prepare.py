"""Write problem sets for trainers: files in verl's parquet schema, files with TRL's columns, and a manifest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from bandpo_lab.data.authors import STYLES
from bandpo_lab.data.overlap import overlaps
from bandpo_lab.data.sets import SIZE, Golds, Role
from bandpo_lab.data.sources import Problem, ProblemSet, load, set_name
from bandpo_lab.errors import InvalidValue
from bandpo_lab.evals.dataset_io import read_rows
from bandpo_lab.evals.golds import Gold, find_bad_golds
from bandpo_lab.files.reading import lines_of
from bandpo_lab.files.validation import read_json, validate_as
from bandpo_lab.files.writing import check_writable, replacing

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
"""The instruction on the form of the answer, which grading expects; Qwen's models were trained with this sentence."""


@dataclass(frozen=True)
class PromptForm:
    r"""The form of a prompt.

    Attributes:
        instruction: A text that is added on a line after the problem; empty adds nothing.
        template: A text with ``{problem}`` for the problem, in place of the instruction.

    >>> PromptForm(instruction="In a box.").messages("1+1?")
    [{'role': 'user', 'content': '1+1?\nIn a box.'}]
    """

    instruction: str = INSTRUCTION
    template: str = ""

    def messages(self, problem: str) -> list[dict[str, str]]:
        """Return the prompt of a problem as messages for a chat template."""
        content = f"{problem}\n{self.instruction}".removesuffix("\n")
        if self.template:
            content = self.template.replace("{problem}", problem)
        return [{"role": "user", "content": content}]


@dataclass(frozen=True)
class DroppedRow:
    """A row that was left out, and the reason."""

    set: str
    id: str
    reason: str
    problem: str


Entry = TypedDict(
    "Entry",
    {
        "role": Role,
        "rows": int,
        "dropped": int,
        "unreadable golds": dict[str, str],
        "licence": str,
        "origin": dict[str, Any],
        "prompt": dict[str, Any],
        "sha256": dict[str, str],
    },
)
"""The entry of a set in the manifest."""


def prepare_data(
    specs: Sequence[str],
    out: Path,
    *,
    form: PromptForm = PromptForm(),
    role: Role | None = None,
    golds: Golds | None = None,
    revision: str | None = None,
    size: int = SIZE,
    seed: int = 0,
    overwrite: bool = False,
    authors: bool = False,
) -> dict[str, Entry]:
    """Load problem sets, drop problems that must not be trained on, and write the sets.

    The files are ``out/verl/NAME.parquet`` with verl's schema, and ``out/trl/NAME.parquet`` with the columns `prompt`,
    `answer`, `data_source` and `id`, which `bandpo_lab.evals.grading.reward` and `bandpo-lab eval` read.
    ``out/manifest.json`` describes each file, and ``out/dropped.jsonl`` lists the rows that were left out:

    - training problems that repeat an evaluation problem of this call or of an earlier call with the same folder, or an
      earlier training problem;
    - rows without a problem or an answer;
    - problems whose answer cannot be used (see `bandpo_lab.evals.golds.find_bad_golds`). If they are kept, the manifest
      lists them.

    Args:
        specs: The names and files of the sets (see `bandpo_lab.data.sources.load`).
        out: The folder. Other sets in it are kept.
        form: The form of the prompts.
        role: The role of files, as for `load`.
        golds: The treatment of problems whose answer cannot be used. By default, they are dropped from training sets
            and kept in evaluation sets, so that scores remain comparable with published ones.
        revision: The revision of the hub's repository, as for `load`.
        size: The number of problems of a generated set, as for `load`.
        seed: The seed of a generated set, as for `load`.
        overwrite: If True, sets that are in the folder already are written again.
        authors: If True, use the prompts and data sources of the paper's authors (see `bandpo_lab.data.authors`).

    Returns:
        The manifest.

    Raises:
        ValueError: There is no set, a set is named twice or is in the folder already, `load` refuses a set, no problem
            of a set is left, or a training set that was prepared earlier repeats evaluation problems.
        FileProblem: A file does not exist.
        ConnectionError: The hub cannot be reached.
    """
    if not specs:
        raise InvalidValue("no set named: give names or files, for example aime24 or my.jsonl")
    if revision is not None and len(specs) > 1:
        raise InvalidValue(f"revision {revision!r} belongs to one repository: name one set, not {len(specs)}")
    names = [set_name(spec) for spec in specs]
    if len(set(names)) < len(names):
        raise InvalidValue(f"the same set twice among {', '.join(names)}: give each another name, NAME=FILE")
    check_writable(out)
    manifest = _read_manifest(out)
    existing = ", ".join(name for name in names if name in manifest)
    if existing and not overwrite:
        raise InvalidValue(
            f"{out} already holds {existing}: write again with --overwrite (overwrite=True), or choose another folder"
        )
    unknown = [name for name in names if name not in STYLES]
    if authors and unknown:
        raise InvalidValue(
            f"the authors have no prompt for {', '.join(unknown)}, only for {', '.join(STYLES)}"
        )
    sets = [load(spec, role=role, revision=revision, size=size, seed=seed) for spec in specs]

    # All evaluation problems, of this call and of earlier ones.
    evaluation: list[Problem] = []
    for problem_set in sets:
        if problem_set.role == "eval":
            evaluation += problem_set.problems
    _refuse_leaks(out, manifest, names, evaluation)
    for problems in _earlier_sets(out, manifest, names, "eval").values():
        evaluation += problems

    # Select the rows of all sets before the first is written.
    dropped = [row for row in _read_dropped(out) if row.set not in names]
    selections = [_select(problem_set, evaluation, golds) for problem_set in sets]
    for problem_set, selection in zip(sets, selections, strict=True):
        dropped += selection.dropped
        prompt_form = replace(form, instruction="") if problem_set.complete else form
        data_source = problem_set.data_source
        if authors:
            style = STYLES[problem_set.name]
            data_source = style.data_source
            prompt_form = replace(form, template=style.template)
        written_set = replace(problem_set, data_source=data_source, problems=tuple(selection.problems))
        file_name = f"{problem_set.name}.parquet"
        digests = {
            "verl": _write(out / "verl" / file_name, _verl_rows(written_set, prompt_form)),
            "trl": _write(out / "trl" / file_name, _trl_rows(written_set, prompt_form)),
        }
        manifest[problem_set.name] = {
            "role": problem_set.role,
            "rows": len(selection.problems),
            "dropped": len(selection.dropped),
            "unreadable golds": selection.bad_golds,
            "licence": problem_set.licence,
            "origin": dict(problem_set.origin),
            "prompt": asdict(prompt_form),
            "sha256": digests,
        }
    dropped_lines = [json.dumps(asdict(row)) + "\n" for row in dropped]
    _replace(out / "dropped.jsonl", "".join(dropped_lines).encode())
    _replace(out / "manifest.json", (json.dumps(manifest, indent=2) + "\n").encode())
    return manifest


@dataclass(frozen=True)
class _Selection:
    """The rows of a set that are written, and those that are dropped.

    Attributes:
        problems: The problems that are written.
        dropped: The rows that are dropped.
        bad_golds: The golds among ``problems`` that cannot be used, as reasons by id.
    """

    problems: list[Problem]
    dropped: list[DroppedRow]
    bad_golds: dict[str, str]


def _select(problem_set: ProblemSet, evaluation: Sequence[Problem], golds: Golds | None) -> _Selection:
    """Select the problems of a set that are written.

    Raises:
        ValueError: None is left.
    """
    name = problem_set.name
    dropped = [DroppedRow(name, row_id, reason, "") for row_id, reason in problem_set.unreadable.items()]
    problems = list(problem_set.problems)
    bad_golds: dict[str, str] = {}
    # The answers of generated sets are right by construction, and their splits have no common problems.
    if "generator" not in problem_set.origin:
        if problem_set.role == "train":
            repeats = overlaps(problems, evaluation)
            dropped += [
                DroppedRow(name, o.problem.id, f"repeats {o.original} ({o.share:.0%})", o.problem.problem)
                for o in repeats
            ]
            repeated_ids = {o.problem.id for o in repeats}
            problems = [problem for problem in problems if problem.id not in repeated_ids]
        if problem_set.ability == "math":
            all_golds = [Gold(problem.id, problem.answer, problem_set.data_source) for problem in problems]
            bad_golds = {bad.gold.id: bad.reason for bad in find_bad_golds(all_golds)}
        if golds == "drop" or (golds is None and problem_set.role == "train"):
            dropped += [
                DroppedRow(name, problem.id, f"answer: {bad_golds[problem.id]}", problem.problem)
                for problem in problems
                if problem.id in bad_golds
            ]
            problems = [problem for problem in problems if problem.id not in bad_golds]
            bad_golds = {}
    if not problems:
        raise InvalidValue(f"{name}: nothing left, all rows are dropped; the first: {dropped[0].reason}")
    return _Selection(problems, dropped, bad_golds)


def _refuse_leaks(
    out: Path, manifest: Mapping[str, Entry], names: Sequence[str], evaluation: Sequence[Problem]
) -> None:
    """Check that no training set of an earlier call repeats an evaluation problem of this call.

    Raises:
        ValueError: A training set does; the message names it and the first problem.
    """
    eval_ids = {problem.id for problem in evaluation}
    for name, problems in _earlier_sets(out, manifest, names, "train").items():
        if "generator" in manifest[name]["origin"]:
            continue
        leaks = [o for o in overlaps(problems, evaluation) if o.original in eval_ids]
        if leaks:
            raise InvalidValue(
                f"{name}, prepared earlier into {out}, repeats {len(leaks)} of these evaluation problems (the "
                f"first: {leaks[0].problem.id} repeats {leaks[0].original}): name {name} in the same call, with "
                "--overwrite (overwrite=True), to drop them from it, or choose another folder"
            )


def _verl_rows(problem_set: ProblemSet, form: PromptForm) -> list[dict[str, Any]]:
    """Return the rows of a set in verl's schema."""
    return [
        {
            "data_source": problem_set.data_source,
            "prompt": form.messages(problem.problem),
            "ability": problem_set.ability,
            "reward_model": {"style": "rule", "ground_truth": problem.answer},
            "extra_info": {
                "split": problem_set.role,
                "index": i,
                "id": problem.id,
                "problem": problem.problem,
            },
        }
        for i, problem in enumerate(problem_set.problems)
    ]


def _trl_rows(problem_set: ProblemSet, form: PromptForm) -> list[dict[str, Any]]:
    """Return the rows of a set with the columns of a reward function for TRL."""
    return [
        {
            "prompt": problem.problem if problem_set.complete else form.messages(problem.problem),
            "answer": problem.answer,
            "data_source": problem_set.data_source,
            "id": problem.id,
        }
        for problem in problem_set.problems
    ]


def _write(path: Path, rows: list[dict[str, Any]]) -> str:
    """Write rows to a parquet file and return its SHA-256."""
    import pyarrow
    import pyarrow.parquet

    buffer = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer, write_page_checksum=True)
    content = buffer.getvalue().to_pybytes()
    _replace(path, content)
    return hashlib.sha256(content).hexdigest()


def _replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as unfinished:
        unfinished.write_bytes(content)


def _read_manifest(out: Path) -> dict[str, Entry]:
    path = out / "manifest.json"
    return validate_as(dict[str, Entry], read_json(path), str(path)) if path.exists() else {}


def _read_dropped(out: Path) -> list[DroppedRow]:
    path = out / "dropped.jsonl"
    if not path.exists():
        return []
    return [validate_as(DroppedRow, row, f"{path}, line {n}") for n, row in lines_of(path, growing=False)]


def _earlier_sets(
    out: Path, manifest: Mapping[str, Entry], names: Sequence[str], role: Role
) -> dict[str, list[Problem]]:
    """Return the sets of a role that earlier calls wrote, except those of ``names``, which are written again."""
    sets: dict[str, list[Problem]] = {}
    for name, entry in manifest.items():
        if entry["role"] != role or name in names:
            continue
        rows = read_rows(out / "verl" / f"{name}.parquet")
        sets[name] = [
            Problem(
                row["extra_info"]["id"], row["extra_info"]["problem"], row["reward_model"]["ground_truth"]
            )
            for row in rows
        ]
    return sets
