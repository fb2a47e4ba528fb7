"""Countdown: reach a target with each of some numbers used once, by +, -, *, / and parentheses.

Problems are made to any amount; each has a solution, usually several, so a completion is judged by evaluating
its expression, which is parsed and never executed.
"""

from __future__ import annotations

import ast
import json
import operator
import random
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

from bandpo.errors import InvalidValue

Split = Literal["train", "eval"]

LONGEST_EXPRESSION = 200
"""Characters; a longer expression is wrong."""

_COUNT, _LARGEST = 3, 50
_PATIENCE = 20_000  # draws without a new problem, after which there are hardly any left

_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_LATEX = {
    "\\times": "*",
    "\\cdot": "*",
    "\\div": "/",
    "\u00d7": "*",
    "\u00f7": "/",
    "\u2212": "-",
    "\\left": "",
    "\\right": "",
}


@dataclass(frozen=True)
class Countdown:
    """Numbers to use, each once, and the target to reach.

    >>> Countdown((25, 3, 4), 79).solved_by("25 * 3 + 4")
    True
    """

    numbers: tuple[int, ...]
    target: int

    @classmethod
    def from_answer(cls, answer: str) -> Countdown:
        """The problem whose `answer` text this is.

        Raises:
            ValueError: The text is not one that `answer` writes.
        """
        try:
            fields = json.loads(answer)
            return cls(tuple(fields["numbers"]), fields["target"])
        except (TypeError, KeyError, ValueError) as error:
            raise InvalidValue(
                f'answer {answer!r} must look like {{"numbers": [3, 4], "target": 7}}'
            ) from error

    @property
    def answer(self) -> str:
        """What a completion is judged by, as text for the `answer` column."""
        return json.dumps({"numbers": list(self.numbers), "target": self.target})

    @property
    def prompt(self) -> str:
        """The problem in words."""
        return (
            f"Using the numbers {', '.join(map(str, self.numbers))}, each exactly once, with +, -, *, / and "
            f"parentheses, write an expression that equals {self.target}."
        )

    def solved_by(self, expression: str) -> bool:
        """Whether an expression uses exactly the numbers, each once, and equals the target.

        ``= 14`` may stand at its end, and LaTeX's signs for the operations.
        """
        for latex, sign in _LATEX.items():
            expression = expression.replace(latex, sign)
        expression = expression.split("=")[0].strip()
        if len(expression) > LONGEST_EXPRESSION:
            return False
        used: list[int] = []
        try:
            value = _value(ast.parse(expression, mode="eval").body, used)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return False
        return value == self.target and Counter(used) == Counter(self.numbers)


def _value(node: ast.expr, used: list[int]) -> Fraction:
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left, used), _value(node.right, used))
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    raise InvalidValue(f"{ast.dump(node)} is neither a number nor one of + - * /")


def problems(split: Split, n: int, seed: int = 0) -> list[Countdown]:
    """`n` different problems of a split: three numbers from 1 to 50, and a target from 1 to 100 that can be reached.

    No problem is in both splits, whatever the seeds: a checksum puts about a tenth of all into ``"eval"``.

    Raises:
        ValueError: Unknown split, or more problems asked for than could be found.

    >>> problems("eval", 1, seed=0)
    [Countdown(numbers=(...), target=...)]
    """
    if split not in get_args(Split):
        raise InvalidValue(f"split = {split!r}: choose one of {', '.join(get_args(Split))}")
    if n < 0:
        raise InvalidValue(f"n = {n} must be 0 or more")
    generator = random.Random(seed)
    found: dict[Countdown, None] = {}
    misses = 0
    while len(found) < n:
        misses += 1
        if misses > _PATIENCE:
            raise InvalidValue(f"only {len(found)} of n = {n} problems found: ask for fewer")
        numbers = [generator.randint(1, _LARGEST) for _ in range(_COUNT)]
        target = _random_value(numbers, generator)
        if target is None or target.denominator != 1 or not 1 <= target <= 2 * _LARGEST:
            continue
        problem = Countdown(tuple(sorted(numbers)), int(target))
        held_out = zlib.crc32(problem.answer.encode()) % 10 == 0
        if held_out == (split == "eval") and problem not in found:
            found[problem] = None
            misses = 0
    return list(found)


def _random_value(numbers: list[int], generator: random.Random) -> Fraction | None:
    values = [Fraction(number) for number in numbers]
    while len(values) > 1:
        generator.shuffle(values)
        right, left = values.pop(), values.pop()
        operation = generator.choice(list(_OPERATIONS.values()))
        if operation is operator.truediv and right == 0:
            return None
        values.append(operation(left, right))
    return values[0]
