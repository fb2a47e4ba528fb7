"""Sums of two two-digit numbers, in words: a task that a small instruction-tuned model solves rarely at first.

The answer is right if its last number is, by the grading of `bandpo_lab.evals.grading`. SmolLM2-135M-Instruct solved
1.7 % at temperature 1 (research/reports/one-card.md), so at first about one of eight groups of eight answers has a
right and a wrong one.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from bandpo_lab.errors import InvalidValue

Split = Literal["train", "eval"]
_NUMBERS = range(10, 100)


@dataclass(frozen=True)
class Sum:
    """The sum of two numbers.

    >>> Sum(47, 68).prompt, Sum(47, 68).answer
    ('What is 47 + 68? Answer with the number alone.', '115')
    """

    a: int
    b: int

    @property
    def prompt(self) -> str:
        """The question, as the user of a chat asks it."""
        return f"What is {self.a} + {self.b}? Answer with the number alone."

    @property
    def answer(self) -> str:
        """The sum, in digits."""
        return str(self.a + self.b)


def share_of_digits(completions: Sequence[str | Sequence[Mapping[str, str]]], **columns: Any) -> list[float]:
    """Return the share of digits among the characters of each completion: a reward for rehearsals.

    A few short answers have no right one, so the task's own reward would be 0 and no rule would act. This reward
    differs between nearly all answers.

    Args:
        completions: Texts, or lists of messages of which the last is used.
        **columns: The columns of the data, which are ignored.

    >>> share_of_digits(["115", "It is 9", ""])
    [1.0, 0.14285714285714285, 0.0]
    """
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in texts]


def problems(split: Split, n: int, seed: int = 0) -> list[Sum]:
    """Return different problems of a split in random order.

    A pair of numbers is in one split only, in either order: a fifth of the 4,095 pairs belongs to ``"eval"``.

    Args:
        split: The split, ``"train"`` or ``"eval"``.
        n: The number of problems.
        seed: The seed of the selection and of the order of the two numbers.

    Raises:
        ValueError: The split is unknown, or has fewer than ``n`` problems.

    >>> len({*problems("train", 3276), *problems("eval", 819)})
    4095
    """
    if split not in get_args(Split):
        raise InvalidValue(f"split={split!r}: choose one of {', '.join(get_args(Split))}")
    pairs = [(a, b) for a in _NUMBERS for b in _NUMBERS if a <= b]
    random.Random(0).shuffle(pairs)
    is_eval = split == "eval"
    of_split = [pair for i, pair in enumerate(pairs) if (i % 5 == 0) == is_eval]
    if not 0 <= n <= len(of_split):
        raise InvalidValue(f"n={n}: choose 0 to {len(of_split)}, the number of {split} problems")
    rng = random.Random(seed)
    selected = rng.sample(of_split, n)
    return [Sum(*rng.sample(pair, 2)) for pair in selected]
