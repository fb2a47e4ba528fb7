"""The problem sets that have a name.

This module imports the standard library only, so that the command's help can list the names.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Role = Literal["train", "eval"]
Golds = Literal["drop", "keep"]
"""The treatment of problems whose right answer cannot be graded."""


@dataclass(frozen=True)
class HubDataset:
    """A set on the Hugging Face hub."""

    repo: str
    split: str
    role: Role
    licence: str
    """The licence for local copies, and if the hub's card states none."""
    revision: str
    """The commit that is loaded by default, taken from public repositories that name it."""
    config: str | None = None
    levels: tuple[str | int, ...] = ()
    """The values of the column `level` to keep; empty keeps every row."""
    ability: str = "math"
    draw: Callable[[int], Sequence[int]] | None = None
    """A function from the number of rows to the indices of the rows to keep; by default all are kept."""
    file: str | None = None
    """The file of the split, if the repository has a loading script, which `datasets` does not run."""


def _draw_as_datasets(rows: int) -> Sequence[int]:
    """Return the indices that ``dataset.shuffle(seed=0).select(range(4096))`` selects."""
    import numpy as np

    return np.random.default_rng(0).permutation(rows)[:4096].tolist()


def _draw_as_python(rows: int) -> Sequence[int]:
    """Return the indices of the first 1,024 rows after ``random.seed(0); random.shuffle(rows)``."""
    indices = list(range(rows))
    random.Random(0).shuffle(indices)
    return indices[:1024]


HUB: Mapping[str, HubDataset] = {
    "dapo-math-17k": HubDataset(
        "open-r1/DAPO-Math-17k-Processed",
        "train",
        "train",
        "apache-2.0",
        "31dd309567e3da778038cc87d868b6097a3ccf68",
        config="en",
    ),
    "math-3-5": HubDataset(
        "DigitalLearningGmbH/MATH-lighteval",
        "train",
        "train",
        "mit",
        "0530c78699ea5e8eb5530600900e1f328b48acad",
        levels=("Level 3", "Level 4", "Level 5"),
    ),
    "math-12k-3-5": HubDataset(
        "nlile/hendrycks-MATH-benchmark",
        "train",
        "train",
        "mit (of MATH)",
        "465bcdb36f5962aa3512891498966df785fc3c18",
        levels=(3, 4, 5),
    ),
    "gsm8k-train": HubDataset(
        "openai/gsm8k", "train", "train", "mit", "740312add88f781978c0658806c59bc2815b9866", config="main"
    ),
    "gsm8k": HubDataset(
        "openai/gsm8k", "test", "eval", "mit", "740312add88f781978c0658806c59bc2815b9866", config="main"
    ),
    "amc23": HubDataset(
        "math-ai/amc23", "test", "eval", "not stated (texts: MAA)", "80815d37005feb82cd7f8fbc6901d5d3eff43057"
    ),
    "aime24": HubDataset(
        "HuggingFaceH4/aime_2024",
        "train",
        "eval",
        "not stated (texts: MAA)",
        "2fe88a2f1091d5048c0f36abc874fb997b3dd99a",
    ),
    "aime25": HubDataset(
        "math-ai/aime25",
        "test",
        "eval",
        "apache-2.0 (texts: MAA)",
        "563bb8404243c5f09de6ec262f2db674fe5bce9b",
    ),
    "math500": HubDataset(
        "HuggingFaceH4/MATH-500", "test", "eval", "mit (of MATH)", "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be"
    ),
    "minerva": HubDataset(
        "math-ai/minervamath", "test", "eval", "not stated", "ee46ddc498933b1977577953250ca5c66be64f96"
    ),
    "olympiadbench": HubDataset(
        "Hothan/OlympiadBench",
        "train",
        "eval",
        "apache-2.0",
        "91184b52131e7fc9455fef848035173aea8cc01a",
        config="OE_TO_maths_en_COMP",
    ),
    "commonsenseqa-train": HubDataset(
        "tau/commonsense_qa",
        "train",
        "train",
        "mit",
        "94630fe30dad47192a8546eb75f094926d47e155",
        ability="commonsense",
        draw=_draw_as_datasets,
    ),
    "arc-challenge": HubDataset(
        "allenai/ai2_arc",
        "validation",
        "eval",
        "cc-by-sa-4.0",
        "210d026faf9955653af8916fad021475a3f00453",
        config="ARC-Challenge",
        ability="commonsense",
    ),
    "apps-train": HubDataset(
        "codeparrot/apps",
        "train",
        "train",
        "mit",
        "21e74ddf8de1a21436da12e3e653065c5213e9d1",
        ability="code",
        file="train.jsonl",
    ),
    "apps-val": HubDataset(
        "codeparrot/apps",
        "test",
        "eval",
        "mit",
        "21e74ddf8de1a21436da12e3e653065c5213e9d1",
        ability="code",
        draw=_draw_as_python,
        file="test.jsonl",
    ),
}
"""The sets of the paper and of its authors' repository, and other common ones, by name.

`math-3-5` is the training split of MATH, levels 3 to 5. `math-12k-3-5` has these levels of the 12,000 problems of MATH
that are not in MATH-500, as the authors use them. `commonsenseqa-train` and `apps-val` are the rows that the authors
select.
"""

GENERATED = ("multiplication", "multiplication-train", "sums", "sums-train")
"""The sets that the package generates, of any size."""

SIZE = 500
"""The default number of problems of a generated set, as many as MATH-500 has."""
