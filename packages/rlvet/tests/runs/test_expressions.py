"""The regular expressions of the readers take time that grows at most linearly, for texts made from each expression."""

import ast
import math
import re
import re._constants as kinds
import re._parser as parser
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import rlvet

FOLDER = Path(rlvet.__file__).parent
FOLDERS = ("runs", "lint", "compare")
METHODS = ("search", "match", "fullmatch", "finditer", "findall", "split", "sub")

STEEPEST = 1.2
"""The largest slope of the logarithm of the time over that of the size."""

SHORTEST = 0.01
"""Times in seconds below this one are not compared."""


class Use(NamedTuple):
    """A regular expression, and a method that the readers call with it."""

    file: str
    pattern: str
    flags: int
    method: str


def uses_in(file: Path) -> Iterator[Use]:
    """Yield the expressions in a file: those of calls such as ``re.search``, and compiled ones with their methods."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    compiled: dict[str, tuple[str, int]] = {}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and is_of_re(node.value, "compile")
        ):
            compiled[ast.unparse(node.targets[0])] = pattern_of(node.value)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = ast.unparse(node.func.value)
        if node.func.attr not in METHODS:
            continue
        if owner == "re" and isinstance(node.args[0], ast.Constant):
            yield Use(file.name, *pattern_of(node), node.func.attr)
        elif owner in compiled:
            yield Use(file.name, *compiled[owner], node.func.attr)


def is_of_re(call: ast.Call, name: str) -> bool:
    return ast.unparse(call.func) == f"re.{name}"


def pattern_of(call: ast.Call) -> tuple[str, int]:
    """Return the pattern and the flags of a call of `re`."""
    flags = 0
    for argument in [*call.args[1:], *(keyword.value for keyword in call.keywords)]:
        for name in re.findall(r"re\.([A-Z]+)", ast.unparse(argument)):
            flags |= getattr(re, name)
    pattern = ast.literal_eval(call.args[0])
    return pattern.decode("latin-1") if isinstance(pattern, bytes) else pattern, flags


USES = sorted(
    {use for name in FOLDERS for file in sorted((FOLDER / name).glob("*.py")) for use in uses_in(file)}
)

CANDIDATES = [*"a1 =:|x-.,/'\"{}[]()<>#$_\n\t\\@!~%&*+;?^`€│•", *map(chr, range(32, 127))]
"""Characters from which one is taken for a class of characters."""


def samples_of(tree: Any) -> Iterator[tuple[str, str]]:
    """Yield a start and a unit for each repetition in an expression: the unit is what is repeated."""
    prefix = ""
    for kind, value in tree:
        if kind in (kinds.MAX_REPEAT, kinds.MIN_REPEAT, kinds.POSSESSIVE_REPEAT):
            _, most, inner = value
            if most == kinds.MAXREPEAT or most > 100:
                yield prefix, sample(inner) or "a"
            for start, unit in samples_of(inner):
                yield prefix + start, unit
        for inner in inner_trees(kind, value):
            for start, unit in samples_of(inner):
                yield prefix + start, unit
        prefix += sample([(kind, value)])


def inner_trees(kind: Any, value: Any) -> list[Any]:
    """Return the parts of a group or an alternative."""
    if kind == kinds.SUBPATTERN:
        return [value[-1]]
    if kind == kinds.BRANCH:
        return list(value[1])
    if kind == kinds.ATOMIC_GROUP:
        return [value]
    return []


def sample(tree: Any) -> str:
    """Return a text that an expression is likely to match."""
    text = ""
    for kind, value in tree:
        if kind == kinds.LITERAL:
            text += chr(value)
        elif kind == kinds.NOT_LITERAL:
            text += "a" if value != ord("a") else "b"
        elif kind == kinds.ANY:
            text += "a"
        elif kind == kinds.IN:
            text += character_of(value)
        elif kind in (kinds.MAX_REPEAT, kinds.MIN_REPEAT, kinds.POSSESSIVE_REPEAT):
            text += sample(value[2]) * value[0]
        elif kind == kinds.BRANCH:
            text += sample(value[1][0])
        elif kind == kinds.SUBPATTERN:
            text += sample(value[-1])
        elif kind == kinds.ATOMIC_GROUP:
            text += sample(value)
    return text


def character_of(options: Any) -> str:
    """Return a character of a class."""
    tree = parser.SubPattern(parser.State(), [(kinds.IN, options)])
    one = re._compiler.compile(tree)  # type: ignore[attr-defined]
    return next((character for character in CANDIDATES if one.fullmatch(character)), "a")


def seconds_of(use: Use, text: str) -> float:
    """Return the processor time in which the method goes through a text."""
    expression = re.compile(use.pattern, use.flags)
    arguments = ("", text) if use.method == "sub" else (text,)
    start = time.process_time()
    result = getattr(expression, use.method)(*arguments)
    if use.method == "finditer":
        for _ in result:
            pass
    return time.process_time() - start


def texts_of(use: Use, size: int) -> list[str]:
    """Return the texts of a size that are made from an expression."""
    texts: dict[str, None] = {}
    for start, unit in samples_of(parser.parse(use.pattern, use.flags)):
        for repeated in (unit, start + unit, f"{start}{unit} ", f"{start}{unit}\n"):
            for first in ("", start):
                texts[first + repeated * (size // len(repeated)) + "\0"] = None
    return list(texts)


def check_growth(use: Use, small: int, large: int) -> None:
    """Check that no text takes more than in proportion to its size, where that is measurable."""
    for short, long in zip(texts_of(use, small), texts_of(use, large), strict=True):
        seconds = seconds_of(use, long)
        if seconds < SHORTEST:
            continue
        # Another process may have disturbed the first measurement.
        seconds = min(seconds, seconds_of(use, long))
        shorter = max(seconds_of(use, short) for _ in range(3))
        slope = math.log(max(seconds, SHORTEST) / max(shorter, 1e-6)) / math.log(large / small)
        if seconds >= SHORTEST:
            assert slope <= STEEPEST, f"{use.file}: {use.method} of {use.pattern!r} with {long[:60]!r}…"


@pytest.mark.parametrize("use", USES, ids=str)
def test_an_expression_takes_linear_time(use):
    check_growth(use, 1_000, 10_000)


@pytest.mark.exhaustive
@pytest.mark.parametrize("use", USES, ids=str)
def test_an_expression_takes_linear_time_for_longer_texts(use):
    check_growth(use, 100_000, 1_000_000)


def test_the_check_finds_quadratic_time():
    with pytest.raises(AssertionError, match="search of"):
        check_growth(Use("here", r"a*b", 0, "search"), 1_000, 10_000)
