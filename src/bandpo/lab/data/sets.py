"""The sets that have a name; the standard library is enough to import them, so that `bandpo --help` can list them."""

from __future__ import annotations

from collections.abc import Mapping
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
    levels: tuple[str, ...] = ()
    """Values of the column `level` to keep; empty keeps every row."""


HUB: Mapping[str, Hub] = {
    "dapo-math-17k": Hub("open-r1/DAPO-Math-17k-Processed", "train", "train", "apache-2.0", config="en"),
    "math-3-5": Hub(
        "DigitalLearningGmbH/MATH-lighteval",
        "train",
        "train",
        "mit",
        levels=("Level 3", "Level 4", "Level 5"),
    ),
    "gsm8k-train": Hub("openai/gsm8k", "train", "train", "mit", config="main"),
    "gsm8k": Hub("openai/gsm8k", "test", "eval", "mit", config="main"),
    "amc23": Hub("math-ai/amc23", "test", "eval", "not stated (texts: MAA)"),
    "aime24": Hub("HuggingFaceH4/aime_2024", "train", "eval", "not stated (texts: MAA)"),
    "aime25": Hub("math-ai/aime25", "test", "eval", "apache-2.0 (texts: MAA)"),
    "math500": Hub("HuggingFaceH4/MATH-500", "test", "eval", "mit (of MATH)"),
    "minerva": Hub("math-ai/minervamath", "test", "eval", "not stated"),
    "olympiadbench": Hub("Hothan/OlympiadBench", "train", "eval", "apache-2.0", config="OE_TO_maths_en_COMP"),
}
"""The sets of the paper and its usual company. `math-3-5` is the training split of MATH, levels 3 to 5."""

GENERATED = ("multiplication", "multiplication-train", "countdown", "countdown-train")
"""Sets that the package makes itself, to any size."""

SIZE = 500
"""Problems that are made of a generated set unless told otherwise: as many as MATH-500 has, and each task has more."""
