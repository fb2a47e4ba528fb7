"""Multiplication by one digit, with a common bad way to answer and a rare good one.

A prompt is `537*6=`. A policy may answer it *directly*, `|3222`, or after a *scratchpad* of column steps,
`<7*6+0=42;3*6+4=22;5*6+2=32>3222`, so the first token it writes chooses the branch. The base model that ships
with the package (`base_model_path`, made by `studies.base_model`) is nearly always right on the
scratchpad and nearly always wrong without it. It takes the scratchpad with a probability of 2 % only.
Reinforcement learning has to raise a rare token before a common one crowds it out.
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

from bandpo.errors import InvalidValue

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import Qwen2Tokenizer

Split = Literal["train", "eval"]

DIRECT, SCRATCHPAD = "|", "<"
PAD, EOS = "<|endoftext|>", "<|im_end|>"
MAX_COMPLETION_LENGTH = 40
"""Tokens. The longest right completion of a three-digit problem, with its end token, takes 33."""

_ANSWER = re.compile(r"(?:\|([0-9]+)|<[0-9*+=;]*>([0-9]+))")
_FACTORS = range(2, 10)  # 0 and 1 would be free points


@dataclass(frozen=True)
class Product:
    """One product `a * b`, `a` of any number of digits and `b` of one.

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
        """`a*b=`."""
        return f"{self.a}*{self.b}="

    @property
    def answer(self) -> str:
        """The product, in digits."""
        return str(self.a * self.b)

    @property
    def scratchpad(self) -> str:
        """The right completion with a scratchpad: `digit*b+carry=sum` for each digit, last one first."""
        steps, carry = [], 0
        for digit in reversed(str(self.a)):
            column = int(digit) * self.b + carry
            steps.append(f"{digit}*{self.b}+{carry}={column}")
            carry = column // 10
        return f"{SCRATCHPAD}{';'.join(steps)}>{self.answer}"


def problems(split: Split, n: int, seed: int = 0) -> list[Product]:
    """`n` different problems of a split, in random order: three digits, not beginning with 0, times one from 2 to 9.

    No problem is in both splits, whatever the seeds: a tenth of all problems belongs to `"eval"`.

    Raises:
        ValueError: unknown split, or `n` beyond the number of problems there are.

    >>> train, held_out = problems("train", 6480), problems("eval", 720)
    >>> set(train) & set(held_out)
    set()
    """
    if split not in get_args(Split):
        raise InvalidValue(f"split={split!r}: choose one of {', '.join(get_args(Split))}")
    total = 900 * len(_FACTORS)
    # Positions in the scattered order of all problems: the two ranges share none.
    members = range(total // 10) if split == "eval" else range(total // 10, total)
    if not 0 <= n <= len(members):
        raise InvalidValue(f"n={n}: choose 0 to {len(members)}, the {split} problems there are")
    # A stride coprime to the total visits each problem once; near the golden ratio it spreads ranges evenly.
    stride = next(k for k in count(total * 618_034 // 1_000_000) if gcd(k, total) == 1)
    picked = (member * stride % total for member in random.Random(seed).sample(members, n))
    return [Product(100 + i // len(_FACTORS), _FACTORS[i % len(_FACTORS)]) for i in picked]


def dataset(split: Split, n: int, seed: int = 0) -> Dataset:
    """`problems` as a dataset in TRL's standard prompt-only format: plain-text columns `prompt` and `answer`.

    >>> dataset("train", 100).column_names
    ['prompt', 'answer']
    """
    from datasets import Dataset

    return Dataset.from_list([{"prompt": p.prompt, "answer": p.answer} for p in problems(split, n, seed)])


def reward(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float]:
    """1.0 for a completion in one of the two forms that ends in the right product, else 0.0.

    The product must be written as `answer` writes it: no sign, space, leading zero or text after it. What
    stands on the scratchpad is not judged, but it must be one: digits, signs and semicolons. The signature
    is that of TRL's reward functions, which pass each column of the dataset by name.

    Raises:
        ValueError: the two sequences differ in length.

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
    """The tokenizer of the task: one token per character, 20 in all, in the stock class of Qwen2 models.

    It is a byte-level vocabulary without merges, because `AutoTokenizer` rebuilds the tokenizer of a Qwen2
    model as one, whatever its file says. Characters outside the vocabulary are dropped. The chat template
    writes the messages one after the other, for trainers that insist on a conversation.

    >>> tokenizer().tokenize("12*3=|36")
    ['1', '2', '*', '3', '=', '|', '3', '6']
    """
    from transformers import Qwen2Tokenizer

    # "Ċ" is how a byte-level vocabulary writes the line feed, which some trainers look up.
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
    """Folder of the base model that ships with the package, for `from_pretrained`.

    >>> (base_model_path() / "model.safetensors").exists()
    True
    """
    return Path(str(resources.files("bandpo_lab.tasks") / "multiplication_base"))
