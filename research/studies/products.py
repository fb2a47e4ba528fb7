"""A task in plain text for a small pretrained model: two-digit × one-digit products after two worked lines."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from datasets import Dataset

Split = Literal["train", "eval"]
SEEDS = {"train": 0, "eval": 1}


def dataset(split: Split, n: int) -> Dataset:
    r"""Return ``n`` prompts with their answers. The problems of the two splits do not overlap.

    >>> dataset("train", 1)[0]
    {'prompt': '25 * 8 = 200\n22 * 3 = 66\n62 * 9 =', 'answer': '558'}
    """
    from datasets import Dataset

    pairs = [(a, b) for a in range(11, 100) for b in range(3, 10) if a % 10]
    random.Random(0).shuffle(pairs)
    cut = len(pairs) // 10
    split_pairs = pairs[:cut] if split == "eval" else pairs[cut:]
    rng = random.Random(SEEDS[split])
    rows: dict[str, list[str]] = {"prompt": [], "answer": []}
    for _ in range(n):
        shown = rng.sample(pairs[cut:], 2)
        a, b = rng.choice([pair for pair in split_pairs if pair not in shown])
        lines = [f"{x} * {y} = {x * y}" for x, y in shown]
        rows["prompt"].append("\n".join([*lines, f"{a} * {b} ="]))
        rows["answer"].append(str(a * b))
    return Dataset.from_dict(rows)


def reward(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float]:
    r"""Return 1.0 for each completion whose first line is the answer, else 0.0.

    >>> reward([" 84\n13 *", " 840", "84 apples"], ["84"] * 3)
    [1.0, 0.0, 0.0]
    """
    return [
        float(re.fullmatch(r"\s*" + right, text.lstrip("\n").partition("\n")[0]) is not None)
        for text, right in zip(completions, answer, strict=True)
    ]
