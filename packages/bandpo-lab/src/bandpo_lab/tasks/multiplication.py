"""Multiplication by one digit, a task in which the initial policy rarely uses the way of answering that succeeds.

A prompt is `537*6=`. A policy may answer it *directly*, `|3222`, or after a *scratchpad* of column steps,
`<7*6+0=42;3*6+4=22;5*6+2=32>3222`, so the first token decides the way. The base model that comes with the package
(`base_model_path`, trained by `studies.base_model`) is nearly always right with the scratchpad and nearly always wrong
without it, but uses the scratchpad with a probability of 2 % only. Reinforcement learning has to increase the
probability of this rare token, before the direct answer takes all of the probability.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import count
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from bandpo_lab.errors import InvalidValue

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import Qwen2Tokenizer

Split = Literal["train", "eval"]

DIRECT = "|"
"""The first token of a direct answer."""
SCRATCHPAD = "<"
"""The first token of an answer with a scratchpad."""
PAD = "<|endoftext|>"
EOS = "<|im_end|>"
MAX_COMPLETION_LENGTH = 40
"""The longest completion, in tokens. The longest right one of a three-digit problem has 33, with the end token."""

_ANSWER = re.compile(r"(?:\|([0-9]+)|<[0-9*+=;]*>([0-9]+))")
_FACTORS = range(2, 10)  # 0 and 1 would be too easy


@dataclass(frozen=True)
class Product:
    """A product `a * b`, with `a` of any number of digits and `b` of one digit.

    >>> Product(537, 6).scratchpad
    '<7*6+0=42;3*6+4=22;5*6+2=32>3222'
    """

    a: int
    b: int

    def __post_init__(self) -> None:
        if self.a < 0 or not 0 <= self.b <= 9:
            raise InvalidValue(f"Product({self.a}, {self.b}): a must be at least 0 and b one digit")

    @property
    def prompt(self) -> str:
        """The prompt, `a*b=`."""
        return f"{self.a}*{self.b}="

    @property
    def answer(self) -> str:
        """The product, in digits."""
        return str(self.a * self.b)

    @property
    def scratchpad(self) -> str:
        """The right completion with a scratchpad: `digit*b+carry=sum` for each digit, from the last to the first."""
        steps = []
        carry = 0
        for digit in reversed(str(self.a)):
            column = int(digit) * self.b + carry
            steps.append(f"{digit}*{self.b}+{carry}={column}")
            carry = column // 10
        return f"{SCRATCHPAD}{';'.join(steps)}>{self.answer}"


def problems(split: Split, n: int, seed: int = 0) -> list[Product]:
    """Return different problems of a split in random order: a number of three digits times a digit from 2 to 9.

    The splits have no common problems for any seeds: a tenth of all problems belongs to `"eval"`.

    Args:
        split: The split, `"train"` or `"eval"`.
        n: The number of problems.
        seed: The seed of the selection.

    Raises:
        ValueError: The split is unknown, or has fewer than `n` problems.

    >>> train, held_out = problems("train", 6480), problems("eval", 720)
    >>> set(train) & set(held_out)
    set()
    """
    if split not in get_args(Split):
        raise InvalidValue(f"split={split!r}: choose one of {', '.join(get_args(Split))}")
    total = 900 * len(_FACTORS)
    # Positions in a scattered order of all problems; the ranges of the two splits are disjoint.
    positions = range(total // 10) if split == "eval" else range(total // 10, total)
    if not 0 <= n <= len(positions):
        raise InvalidValue(f"n={n}: choose 0 to {len(positions)}, the number of {split} problems")
    # A stride coprime to the total visits each problem once; near the golden ratio, it spreads each range evenly.
    stride = next(k for k in count(total * 618_034 // 1_000_000) if gcd(k, total) == 1)
    indices = (position * stride % total for position in random.Random(seed).sample(positions, n))
    return [Product(100 + i // len(_FACTORS), _FACTORS[i % len(_FACTORS)]) for i in indices]


def dataset(split: Split, n: int, seed: int = 0) -> Dataset:
    """Return `problems` as a dataset in TRL's prompt-only format, with the text columns `prompt` and `answer`.

    >>> dataset("train", 100).column_names
    ['prompt', 'answer']
    """
    from datasets import Dataset

    return Dataset.from_list([{"prompt": p.prompt, "answer": p.answer} for p in problems(split, n, seed)])


def reward(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float]:
    """Compute the rewards of completions: 1.0 for one of the two forms with the right product, else 0.0.

    The product must be the same text as `answer`, without a sign, space, leading zero or text after it. The steps on
    the scratchpad need not be right, but may only have digits, operators and semicolons. The signature is that of TRL's
    reward functions, to which each column of the dataset is passed by name.

    Args:
        completions: The texts of the completions.
        answer: The right products.
        **columns: Further columns, which are ignored.

    Raises:
        ValueError: The two sequences differ in length.

    >>> reward(["|3222", "<7*6+0=42;3*6+4=22;5*6+2=32>3222", "|3221", "3222"], ["3222"] * 4)
    [1.0, 1.0, 0.0, 0.0]
    """
    if len(completions) != len(answer):
        raise InvalidValue(
            f"{len(completions)} completions for {len(answer)} answers: give one answer for each"
        )
    matches = map(_ANSWER.fullmatch, completions)
    return [
        float(match is not None and (match[1] or match[2]) == right)
        for match, right in zip(matches, answer, strict=True)
    ]


def tokenizer() -> Qwen2Tokenizer:
    """Return the tokenizer of the task, with 20 tokens, one per character, in the tokenizer class of Qwen2.

    It is a byte-level vocabulary without merges, because `AutoTokenizer` rebuilds the tokenizer of any Qwen2 model as
    one. Characters outside the vocabulary are dropped. The chat template concatenates the messages, for trainers that
    need a conversation.

    >>> tokenizer().tokenize("12*3=|36")
    ['1', '2', '*', '3', '=', '|', '3', '6']
    """
    from transformers import Qwen2Tokenizer

    # "Ċ" is the line feed in a byte-level vocabulary, which some trainers look up.
    alphabet = [PAD, EOS, *"0123456789*+=;>", DIRECT, SCRATCHPAD, "Ċ"]
    return Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(alphabet)},
        merges=[],
        unk_token=PAD,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
    )


def base_model_path() -> Path:
    """Return the folder of the base model that comes with the package, for `from_pretrained`.

    >>> (base_model_path() / "model.safetensors").exists()
    True
    """
    return Path(str(resources.files("bandpo_lab.tasks") / "multiplication_base"))
