"""Writes problem sets as trainers read them: verl's parquet schema, TRL's prompt and answer, and a
manifest."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bandpo.data.overlap import overlaps
from bandpo.data.sources import Problem, ProblemSet, load
from bandpo.evals.grading import MathGrader

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
"""How to answer, so that grading finds the answer; the sentence that Qwen's models were trained with."""


@dataclass(frozen=True)
class PromptForm:
    """How a problem becomes a prompt.

    Attributes:
        instruction: Added after the problem on a line of its own; empty adds nothing.
        system: Content of a system message; empty for none, which lets a chat template add its own.
        plain: TRL's prompts are text, for models without a chat template, rather than messages. verl's are
            always
            messages: it applies the model's chat template itself.

    >>> PromptForm(instruction="In a box.").text("1+1?")
    '1+1?\\nIn a box.\\n'
    """

    instruction: str = INSTRUCTION
    system: str = ""
    plain: bool = False

    def messages(self, problem: str) -> list[dict[str, str]]:
        """The prompt as messages for a chat template."""
        asked = f"{problem}\n{self.instruction}" if self.instruction else problem
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": asked}]

    def text(self, problem: str) -> str:
        """The prompt as text to be continued."""
        return "".join(f"{message['content']}\n" for message in self.messages(problem))


@dataclass(frozen=True)
class Dropped:
    """A row that was left out, and why."""

    set: str
    id: str
    reason: str
    problem: str


def prepare(
    specs: Sequence[str],
    out: Path,
    *,
    form: PromptForm | None = None,
    revision: str | None = None,
    size: int = 1000,
    seed: int = 0,
) -> dict[str, Any]:
    """Loads sets, drops what must not be trained on, and writes them.

    ``out/verl/NAME.parquet`` has verl's schema and ``out/trl/NAME.parquet`` the columns `prompt`, `answer`,
    `data_source` and `id`, which `bandpo.evals.grading.reward` and `bandpo eval` read. ``out/manifest.json``
    says what each file holds and ``out/dropped.jsonl`` which rows were left out: training problems that
    repeat an evaluation problem of this call or of an earlier one into the same folder, or an earlier
    training problem; rows without problem or answer; and training problems whose own answer is not graded as
    right.

    Args:
        specs: Names and files, as `bandpo.data.sources.load` takes them.
        out: Folder to write to; sets that are there already and not named stay.
        form: How problems become prompts.
        revision: Of the hub's repository, where a single set is named.
        size: Problems to make, for generated sets.
        seed: Of generated sets.

    Returns:
        The manifest.

    Raises:
        ValueError: No set, the same set twice, an unknown name, a file that does not hold problems, or a set
            of which nothing is left.
        FileNotFoundError: A file does not exist.
        ConnectionError: The hub cannot be reached.
    """
    form = PromptForm() if form is None else form
    if not specs:
        raise ValueError("no set named: give names or files, for example aime24 or my.jsonl")
    if revision is not None and len(specs) > 1:
        raise ValueError(f"revision {revision!r} belongs to one repository: name one set, not {len(specs)}")
    sets = [load(spec, revision=revision, size=size, seed=seed) for spec in specs]
    names = [s.name for s in sets]
    if len(set(names)) < len(names):
        raise ValueError(f"the same set twice among {', '.join(names)}: give each another name, NAME=FILE")
    manifest = _read_manifest(out)
    evaluation = [p for s in sets if s.role == "eval" for p in s.problems]
    evaluation += _earlier_evaluation(out, manifest, names)
    dropped = [d for d in _read_dropped(out) if d.set not in names]
    for problems in sets:
        gone = _find_dropped(problems, evaluation)
        kept = [p for p in problems.problems if p.id not in {d.id for d in gone}]
        if not kept:
            raise ValueError(
                f"{problems.name}: nothing left, all rows are dropped; the first: {gone[0].reason}"
            )
        dropped += gone
        files = {
            "verl": _write(out / "verl" / f"{problems.name}.parquet", _verl_rows(problems, kept, form)),
            "trl": _write(out / "trl" / f"{problems.name}.parquet", _trl_rows(problems, kept, form)),
        }
        manifest[problems.name] = {
            "role": problems.role,
            "rows": len(kept),
            "dropped": len(gone),
            "licence": problems.licence,
            "origin": dict(problems.origin),
            "prompt": asdict(form) | ({"instruction": ""} if problems.complete else {}),
            "sha256": files,
        }
    _replace(out / "dropped.jsonl", "".join(json.dumps(asdict(d)) + "\n" for d in dropped).encode())
    _replace(out / "manifest.json", (json.dumps(manifest, indent=2) + "\n").encode())
    return manifest


def _find_dropped(problems: ProblemSet, evaluation: Sequence[Problem]) -> list[Dropped]:
    dropped = [Dropped(problems.name, id, "no problem or no answer", "") for id in problems.unreadable]
    if problems.role == "eval":
        return dropped
    # The generated sets have answers by construction, and splits that share nothing.
    if "generator" in problems.origin:
        return dropped
    repeated = overlaps(problems.problems, evaluation)
    dropped += [
        Dropped(problems.name, o.problem.id, f"repeats {o.other} ({o.share:.0%})", o.problem.problem)
        for o in repeated
    ]
    gone = {o.problem.id for o in repeated}
    kept = [p for p in problems.problems if p.id not in gone]
    with MathGrader() as grader:
        grades = grader.grade_all([f"\\boxed{{{p.answer}}}" for p in kept], [p.answer for p in kept])
    return dropped + [
        Dropped(problems.name, p.id, f"its own answer is graded: {grade.reason}", p.problem)
        for p, grade in zip(kept, grades, strict=True)
        if not grade.score
    ]


def _verl_rows(problems: ProblemSet, kept: Sequence[Problem], form: PromptForm) -> list[dict[str, Any]]:
    return [
        {
            "data_source": problems.data_source,
            "prompt": _form_of(problems, form).messages(p.problem),
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": p.answer},
            "extra_info": {"split": problems.role, "index": i, "id": p.id, "problem": p.problem},
        }
        for i, p in enumerate(kept)
    ]


def _trl_rows(problems: ProblemSet, kept: Sequence[Problem], form: PromptForm) -> list[dict[str, Any]]:
    form = _form_of(problems, form)
    return [
        {
            "prompt": p.problem
            if problems.complete
            else form.text(p.problem)
            if form.plain
            else form.messages(p.problem),
            "answer": p.answer,
            "data_source": problems.data_source,
            "id": p.id,
        }
        for p in kept
    ]


def _form_of(problems: ProblemSet, form: PromptForm) -> PromptForm:
    return PromptForm(instruction="", plain=True) if problems.complete else form


def _write(path: Path, rows: list[dict[str, Any]]) -> str:
    import pyarrow
    import pyarrow.parquet

    buffer = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
    content = buffer.getvalue().to_pybytes()
    _replace(path, content)
    return hashlib.sha256(content).hexdigest()


def _replace(path: Path, content: bytes) -> None:
    # Whole or not at all: an interrupted run leaves the earlier file.
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(content)
    os.replace(partial, path)


def _read_manifest(out: Path) -> dict[str, Any]:
    path = out / "manifest.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _read_dropped(out: Path) -> list[Dropped]:
    path = out / "dropped.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [Dropped(**json.loads(line)) for line in lines]


def _earlier_evaluation(out: Path, manifest: Mapping[str, Any], named: Sequence[str]) -> list[Problem]:
    import pyarrow.parquet

    earlier = [name for name, entry in manifest.items() if entry["role"] == "eval" and name not in named]
    rows = [
        row
        for name in earlier
        for row in pyarrow.parquet.read_table(out / "verl" / f"{name}.parquet").to_pylist()
    ]
    return [
        Problem(row["extra_info"]["id"], row["extra_info"]["problem"], row["reward_model"]["ground_truth"])
        for row in rows
    ]
