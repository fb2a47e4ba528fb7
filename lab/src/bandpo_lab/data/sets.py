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
    config: str | None = None
    levels: tuple[str | int, ...] = ()
    """Values of the column `level` to keep; empty keeps every row."""
    ability: str = "math"
    draw: Callable[[int], Sequence[int]] | None = None
    """Which rows of how many to keep; all by default."""


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
    "dapo-math-17k": Hub("open-r1/DAPO-Math-17k-Processed", "train", "train", "apache-2.0", config="en"),
    "math-3-5": Hub(
        "DigitalLearningGmbH/MATH-lighteval",
        "train",
        "train",
        "mit",
        levels=("Level 3", "Level 4", "Level 5"),
    ),
    "math-12k-3-5": Hub(
        "nlile/hendrycks-MATH-benchmark", "train", "train", "mit (of MATH)", levels=(3, 4, 5)
    ),
    "gsm8k-train": Hub("openai/gsm8k", "train", "train", "mit", config="main"),
    "gsm8k": Hub("openai/gsm8k", "test", "eval", "mit", config="main"),
    "amc23": Hub("math-ai/amc23", "test", "eval", "not stated (texts: MAA)"),
    "aime24": Hub("HuggingFaceH4/aime_2024", "train", "eval", "not stated (texts: MAA)"),
    "aime25": Hub("math-ai/aime25", "test", "eval", "apache-2.0 (texts: MAA)"),
    "math500": Hub("HuggingFaceH4/MATH-500", "test", "eval", "mit (of MATH)"),
    "minerva": Hub("math-ai/minervamath", "test", "eval", "not stated"),
    "olympiadbench": Hub("Hothan/OlympiadBench", "train", "eval", "apache-2.0", config="OE_TO_maths_en_COMP"),
    "commonsenseqa-train": Hub(
        "tau/commonsense_qa", "train", "train", "mit", ability="commonsense", draw=_drawn_by_datasets
    ),
    "arc-challenge": Hub(
        "allenai/ai2_arc", "validation", "eval", "cc-by-sa-4.0", config="ARC-Challenge", ability="commonsense"
    ),
    "apps-train": Hub("codeparrot/apps", "train", "train", "mit", ability="code"),
    "apps-val": Hub("codeparrot/apps", "test", "eval", "mit", ability="code", draw=_drawn_by_python),
}
"""The sets of the paper, of its authors' repository, and their usual company.

`math-3-5` is the training split of MATH, levels 3 to 5; `math-12k-3-5` has these levels of the 12,000 problems beside
MATH-500, as the authors take them. `commonsenseqa-train` and `apps-val` are the rows that the authors draw.
"""

GENERATED = ("multiplication", "multiplication-train")
"""Sets that the package makes itself, to any size."""

SIZE = 500
"""Problems that are made of a generated set unless told otherwise: as many as MATH-500 has, and each task has more."""
