"""The sets that have a name; the standard library is enough to import them, so that `bandpo --help` can list them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Role = Literal["train", "eval"]
Golds = Literal["drop", "keep"]
"""What becomes of problems whose right answer cannot be graded."""


@dataclass(frozen=True)
class Hub:
    """A set on the Hugging Face hub."""

    repo: str
    split: str
    role: Role
    licence: str
    """Where the hub's card states none, and for local copies."""
    revision: str
    """The commit that is loaded unless another is asked for. Public repositories name these; the hub was not asked."""
    config: str | None = None
    levels: tuple[str | int, ...] = ()
    """Values of the column `level` to keep; empty keeps every row."""
    ability: str = "math"
    draw: Callable[[int], Sequence[int]] | None = None
    """Which rows of how many to keep; all by default."""
    file: str | None = None
    """The file of the split, where the repository describes its files by a program, which `datasets` does not run."""


def _drawn_by_datasets(rows: int) -> Sequence[int]:
    """As ``dataset.shuffle(seed=0).select(range(4096))``."""
    import numpy as np

    return np.random.default_rng(0).permutation(rows)[:4096].tolist()


def _drawn_by_python(rows: int) -> Sequence[int]:
    """As ``random.seed(0); random.shuffle(rows)``, and the first 1,024."""
    indices = list(range(rows))
    random.Random(0).shuffle(indices)
    return indices[:1024]


HUB: Mapping[str, Hub] = {
    "dapo-math-17k": Hub(
        "open-r1/DAPO-Math-17k-Processed",
        "train",
        "train",
        "apache-2.0",
        "31dd309567e3da778038cc87d868b6097a3ccf68",
        config="en",
    ),
    "math-3-5": Hub(
        "DigitalLearningGmbH/MATH-lighteval",
        "train",
        "train",
        "mit",
        "0530c78699ea5e8eb5530600900e1f328b48acad",
        levels=("Level 3", "Level 4", "Level 5"),
    ),
    "math-12k-3-5": Hub(
        "nlile/hendrycks-MATH-benchmark",
        "train",
        "train",
        "mit (of MATH)",
        "465bcdb36f5962aa3512891498966df785fc3c18",
        levels=(3, 4, 5),
    ),
    "gsm8k-train": Hub(
        "openai/gsm8k", "train", "train", "mit", "740312add88f781978c0658806c59bc2815b9866", config="main"
    ),
    "gsm8k": Hub(
        "openai/gsm8k", "test", "eval", "mit", "740312add88f781978c0658806c59bc2815b9866", config="main"
    ),
    "amc23": Hub(
        "math-ai/amc23", "test", "eval", "not stated (texts: MAA)", "80815d37005feb82cd7f8fbc6901d5d3eff43057"
    ),
    "aime24": Hub(
        "HuggingFaceH4/aime_2024",
        "train",
        "eval",
        "not stated (texts: MAA)",
        "2fe88a2f1091d5048c0f36abc874fb997b3dd99a",
    ),
    "aime25": Hub(
        "math-ai/aime25",
        "test",
        "eval",
        "apache-2.0 (texts: MAA)",
        "563bb8404243c5f09de6ec262f2db674fe5bce9b",
    ),
    "math500": Hub(
        "HuggingFaceH4/MATH-500", "test", "eval", "mit (of MATH)", "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be"
    ),
    "minerva": Hub(
        "math-ai/minervamath", "test", "eval", "not stated", "ee46ddc498933b1977577953250ca5c66be64f96"
    ),
    "olympiadbench": Hub(
        "Hothan/OlympiadBench",
        "train",
        "eval",
        "apache-2.0",
        "91184b52131e7fc9455fef848035173aea8cc01a",
        config="OE_TO_maths_en_COMP",
    ),
    "commonsenseqa-train": Hub(
        "tau/commonsense_qa",
        "train",
        "train",
        "mit",
        "94630fe30dad47192a8546eb75f094926d47e155",
        ability="commonsense",
        draw=_drawn_by_datasets,
    ),
    "arc-challenge": Hub(
        "allenai/ai2_arc",
        "validation",
        "eval",
        "cc-by-sa-4.0",
        "210d026faf9955653af8916fad021475a3f00453",
        config="ARC-Challenge",
        ability="commonsense",
    ),
    "apps-train": Hub(
        "codeparrot/apps",
        "train",
        "train",
        "mit",
        "21e74ddf8de1a21436da12e3e653065c5213e9d1",
        ability="code",
        file="train.jsonl",
    ),
    "apps-val": Hub(
        "codeparrot/apps",
        "test",
        "eval",
        "mit",
        "21e74ddf8de1a21436da12e3e653065c5213e9d1",
        ability="code",
        draw=_drawn_by_python,
        file="test.jsonl",
    ),
}
"""The sets of the paper, of its authors' repository, and their usual company.

`math-3-5` is the training split of MATH, levels 3 to 5; `math-12k-3-5` has these levels of the 12,000 problems beside
MATH-500, as the authors take them. `commonsenseqa-train` and `apps-val` are the rows that the authors draw.
"""

GENERATED = ("multiplication", "multiplication-train")
"""Sets that the package makes itself, to any size."""

SIZE = 500
"""Problems that are made of a generated set unless told otherwise: as many as MATH-500 has, and each task has more."""
