"""Writes problem sets as trainers read them: verl's parquet schema, TRL's prompt and answer, and a
manifest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from bandpo.errors import InvalidValue
from bandpo.runs.files import read_jsonl
from bandpo_lab.authors import STYLES
from bandpo_lab.data.overlap import overlaps
from bandpo_lab.data.sets import SIZE, Golds, Role
from bandpo_lab.data.sources import Problem, ProblemSet, load, set_name
from bandpo_lab.evals.dataset_io import read_rows
from bandpo_lab.evals.golds import Gold, find_bad_golds
from bandpo_lab.file_models import checked, read_json
from bandpo_lab.files import check_writable, replacing

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
"""How to answer, so that grading finds the answer; the sentence that Qwen's models were trained with."""


@dataclass(frozen=True)
class PromptForm:
    """How a problem becomes a prompt.

    Attributes:
        instruction: Added after the problem on a line of its own; empty adds nothing.
        template: Text around ``{problem}``, in place of the instruction.

    >>> PromptForm(instruction="In a box.").messages("1+1?")
    [{'role': 'user', 'content': '1+1?\\nIn a box.'}]
    """

    instruction: str = INSTRUCTION
    template: str = ""

    def messages(self, problem: str) -> list[dict[str, str]]:
        """The prompt as messages for a chat template."""
        asked = f"{problem}\n{self.instruction}".removesuffix("\n")
        if self.template:
            asked = self.template.replace("{problem}", problem)
        return [{"role": "user", "content": asked}]


@dataclass(frozen=True)
class Dropped:
    """A row that was left out, and why."""

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
"""What the manifest says of a set."""


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
    """Loads sets, drops what must not be trained on, and writes them.

    ``out/verl/NAME.parquet`` has verl's schema and ``out/trl/NAME.parquet`` the columns `prompt`, `answer`,
    `data_source` and `id`, which `bandpo_lab.evals.grading.reward` and `bandpo-lab eval` read. ``out/manifest.json``
    says what each file holds and ``out/dropped.jsonl`` which rows were left out: training problems that
    repeat an evaluation problem of this call or of an earlier one into the same folder, or an earlier
    training problem; rows without problem or answer; and problems whose answer cannot be used (see
    `bandpo_lab.evals.golds.find_bad_golds`). Where the last are kept, the manifest names them.

    Args:
        specs: Names and files, as `bandpo_lab.data.sources.load` takes them, which `role`, `revision`, `size` and
            `seed` are for.
        out: Sets that are there already and not named stay.
        golds: Left out, problems whose answer cannot be used are dropped from training sets and kept in evaluation
            sets, which stay comparable with others' figures.
        authors: Whether prompts and data sources are those of the paper's authors (see `bandpo_lab.authors`).

    Returns:
        The manifest.

    Raises:
        ValueError: No set, the same set twice, a set that is there already, or what `load` refuses. A set of which
            nothing is left. An evaluation set whose problems stand in a training set prepared earlier.
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
    there = ", ".join(name for name in names if name in manifest)
    if there and not overwrite:
        raise InvalidValue(
            f"{out} already holds {there}: write again with --overwrite (overwrite=True), or choose another folder"
        )
    if authors and (unknown := [name for name in names if name not in STYLES]):
        raise InvalidValue(
            f"the authors have no prompt for {', '.join(unknown)}, only for {', '.join(STYLES)}"
        )
    sets = [load(spec, role=role, revision=revision, size=size, seed=seed) for spec in specs]
    evaluation = [p for s in sets if s.role == "eval" for p in s.problems]
    _refuse_leaks(out, manifest, names, evaluation)
    evaluation += [p for problems in _earlier(out, manifest, names, "eval").values() for p in problems]
    dropped = [d for d in _read_dropped(out) if d.set not in names]
    sifted = [_sift(problems, evaluation, golds) for problems in sets]
    for problems, (kept, gone, unusable) in zip(sets, sifted, strict=True):
        dropped += gone
        written, asked = problems, replace(form, instruction="") if problems.complete else form
        if authors:
            style = STYLES[problems.name]
            written = replace(problems, data_source=style.data_source)
            asked = replace(form, template=style.template)
        files = {
            "verl": _write(out / "verl" / f"{problems.name}.parquet", _verl_rows(written, kept, asked)),
            "trl": _write(out / "trl" / f"{problems.name}.parquet", _trl_rows(written, kept, asked)),
        }
        manifest[problems.name] = {
            "role": problems.role,
            "rows": len(kept),
            "dropped": len(gone),
            "unreadable golds": unusable,
            "licence": problems.licence,
            "origin": dict(problems.origin),
            "prompt": asdict(asked),
            "sha256": files,
        }
    _replace(out / "dropped.jsonl", "".join(json.dumps(asdict(d)) + "\n" for d in dropped).encode())
    _replace(out / "manifest.json", (json.dumps(manifest, indent=2) + "\n").encode())
    return manifest


def _sift(
    problems: ProblemSet, evaluation: Sequence[Problem], golds: Golds | None
) -> tuple[list[Problem], list[Dropped], dict[str, str]]:
    """What is kept of a set, what is dropped, and which of the kept golds cannot be used."""
    name = problems.name
    dropped = [Dropped(name, id, reason, "") for id, reason in problems.unreadable.items()]
    kept, unusable = list(problems.problems), {}
    # The generated sets have answers by construction, and splits that share nothing.
    if "generator" not in problems.origin:
        if problems.role == "train":
            repeats = overlaps(kept, evaluation)
            dropped += [
                Dropped(name, o.problem.id, f"repeats {o.other} ({o.share:.0%})", o.problem.problem)
                for o in repeats
            ]
            kept = [p for p in kept if p.id not in {o.problem.id for o in repeats}]
        golds_of = [Gold(p.id, p.answer, problems.data_source) for p in kept if problems.ability == "math"]
        unusable = {bad.gold.id: bad.reason for bad in find_bad_golds(golds_of)}
        if golds == "drop" or (golds is None and problems.role == "train"):
            dropped += [
                Dropped(name, p.id, f"answer: {unusable[p.id]}", p.problem) for p in kept if p.id in unusable
            ]
            kept, unusable = [p for p in kept if p.id not in unusable], {}
    if not kept:
        raise InvalidValue(f"{name}: nothing left, all rows are dropped; the first: {dropped[0].reason}")
    return kept, dropped, unusable


def _refuse_leaks(
    out: Path, manifest: Mapping[str, Entry], named: Sequence[str], evaluation: Sequence[Problem]
) -> None:
    ids = {p.id for p in evaluation}
    for name, problems in _earlier(out, manifest, named, "train").items():
        if "generator" in manifest[name]["origin"]:
            continue
        leaks = [o for o in overlaps(problems, evaluation) if o.other in ids]
        if leaks:
            raise InvalidValue(
                f"{name}, prepared earlier into {out}, repeats {len(leaks)} of these evaluation problems (the "
                f"first: {leaks[0].problem.id} repeats {leaks[0].other}): name {name} in the same call, with "
                "--overwrite (overwrite=True), to drop them from it, or choose another folder"
            )


def _verl_rows(problems: ProblemSet, kept: Sequence[Problem], form: PromptForm) -> list[dict[str, Any]]:
    return [
        {
            "data_source": problems.data_source,
            "prompt": form.messages(p.problem),
            "ability": problems.ability,
            "reward_model": {"style": "rule", "ground_truth": p.answer},
            "extra_info": {"split": problems.role, "index": i, "id": p.id, "problem": p.problem},
        }
        for i, p in enumerate(kept)
    ]


def _trl_rows(problems: ProblemSet, kept: Sequence[Problem], form: PromptForm) -> list[dict[str, Any]]:
    prompts = [p.problem if problems.complete else form.messages(p.problem) for p in kept]
    return [
        {"prompt": prompt, "answer": p.answer, "data_source": problems.data_source, "id": p.id}
        for prompt, p in zip(prompts, kept, strict=True)
    ]


def _write(path: Path, rows: list[dict[str, Any]]) -> str:
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
    return checked(dict[str, Entry], read_json(path), str(path)) if path.exists() else {}


def _read_dropped(out: Path) -> list[Dropped]:
    path = out / "dropped.jsonl"
    if not path.exists():
        return []
    return [checked(Dropped, row, f"{path}, line {n}") for n, row in read_jsonl(path, growing=False)]


def _earlier(
    out: Path, manifest: Mapping[str, Entry], named: Sequence[str], role: Role
) -> dict[str, list[Problem]]:
    """The sets of a role that earlier calls wrote and this one does not write again."""
    earlier = [name for name, entry in manifest.items() if entry["role"] == role and name not in named]
    return {
        name: [
            Problem(
                row["extra_info"]["id"], row["extra_info"]["problem"], row["reward_model"]["ground_truth"]
            )
            for row in read_rows(out / "verl" / f"{name}.parquet")
        ]
        for name in earlier
    }
