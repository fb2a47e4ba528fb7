r"""Which right answers cannot be used: other spellings of them are graded wrong, or other values right.

A data set's answer may be read otherwise than it was meant. Every right answer then scores 0, or a wrong one
scores 1, and nothing says so. So each gold is graded against spellings of its own value, made here without
math-verify, and against other values.
"""

import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Context, Decimal, InvalidOperation
from fractions import Fraction

from bandpo_lab.evals.extraction import LONGEST_ANSWER
from bandpo_lab.evals.grading import RULES, MathGrader, grade, shared_grader

LONGEST_NUMBER = 60
"""Digits of a number that is spelled in other ways."""

_FRACTION = re.compile(r"([-+]?)\\[dt]?frac\{(\d+)\}\{(\d+)\}")
_GROUPED = re.compile(r"([-+]?\d{1,3})((?:(?:,|\{,\}|\\[,;!])\d{3})+)(\.\d+)?")
_SCIENTIFIC = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+))\\times10\^\{?([-+]?\d+)\}?")
_WORD = re.compile(r"(?<![\\a-zA-Z{.])[a-zA-Z]{4,}(?![a-zA-Z}])")
_TYPESET = re.compile(r"\\(?:text|math|operatorname|mbox)")
_FUNCTION = re.compile(r"(?:arc|a)?(?:sin|cos|tan)h?|sqrt")
_OPERATOR = re.compile(r"(?<=[\w})])\s*([-+=<>])\s*")
_WORDS = re.compile(r"[a-zA-Z]{2,}(?: [a-zA-Z]+)*")


@dataclass(frozen=True)
class Gold:
    """A right answer, its problem, and the data source that decides how it is graded."""

    id: str
    answer: str
    data_source: str = "math"


@dataclass(frozen=True)
class BadGold:
    """A gold that cannot be used, and why."""

    gold: Gold
    reason: str


def value_of(gold: str) -> Fraction | None:
    r"""The value of a plain number, read by Python and not by math-verify; None for anything else.

    >>> value_of("4.5e33") == 45 * 10**32, value_of("-1./3"), value_of(r"62.5 \%"), value_of("x")
    (True, Fraction(-1, 3), Fraction(5, 8), None)
    """
    if re.search(r",\s|\$.+\$.", gold):  # a list
        return None
    text = re.sub(r"\s+(?!\d)|(?<!\d)\s+|\$", "", gold)
    text, percent = re.subn(r"\\?%$", "", text)
    if (grouped := _GROUPED.fullmatch(text)) is not None:
        text = grouped[1] + re.sub(r"\D", "", grouped[2]) + (grouped[3] or "")
    if (fraction := _FRACTION.fullmatch(text)) is not None:
        text = f"{fraction[1]}{fraction[2]}/{fraction[3]}"
    text = _SCIENTIFIC.sub(r"\1e\2", text)
    if not re.fullmatch(r"[-+.\deE/]+", text):  # Python reads 52_8 as 528
        return None
    top, _, bottom = text.partition("/")
    try:
        value, below = Decimal(top), Decimal(bottom or "1")
    except InvalidOperation:
        return None
    if not (value.is_finite() and below.is_finite() and below):
        return None
    if max(abs(value.adjusted()), abs(below.adjusted()), len(text)) > LONGEST_NUMBER:
        return None
    return Fraction(value) / Fraction(below) / (100 if percent else 1)


def _spellings(value: Fraction) -> list[str]:
    spelled = [rf"\frac{{{value.numerator}}}{{{value.denominator}}}"]
    decimal = Context(prec=2 * LONGEST_NUMBER).divide(Decimal(value.numerator), Decimal(value.denominator))
    if Fraction(decimal) == value:
        spelled.append(format(decimal, "f"))
        mantissa, exponent = f"{decimal.normalize():E}".split("E")
        spelled.append(rf"{mantissa} \times 10^{{{int(exponent)}}}")
    return spelled


def _word_as_typeset(match: re.Match[str]) -> str:
    return rf"\{match[0]}" if _FUNCTION.fullmatch(match[0]) else rf"\text{{{match[0]}}}"


def renderings(gold: str) -> tuple[list[str], list[str]]:
    r"""What must be graded right, the other spellings of a gold, and what must be graded wrong, those of other values.

    >>> renderings("1e-5")
    (['1e-5', '\\frac{1}{100000}', '0.00001', '1 \\times 10^{-5}'], ['-0.00001', '0.0001', '0.00002'])
    """
    value = value_of(gold)
    if value is not None:
        others = dict.fromkeys((-value, 10 * value, 2 * value, value + 1)) if value else {Fraction(1): None}
        wrong = [_spellings(other)[-2:][0] for other in list(others)[:3] if other != value]
        return [gold, *_spellings(value)], wrong
    typeset = gold if _TYPESET.search(gold) else _WORD.sub(_word_as_typeset, gold)
    if _WORDS.fullmatch(gold):
        typeset = rf"\text{{{gold}}}"
    right = [gold, _OPERATOR.sub(r" \1 ", gold), typeset]
    changed = re.sub(r"\d", lambda digit: str((int(digit[0]) + 1) % 10), gold)
    wrong = [changed if changed != gold else rf"{gold} + 1"]
    return list(dict.fromkeys(right)), [*wrong, "x=x"] if "=" in gold else wrong


def unreadable(golds: Sequence[Gold], grader: MathGrader | None = None) -> list[BadGold]:
    """The golds that cannot be used, in order, and why; the process's own grader finds out if none is given.

    >>> [bad.gold.id for bad in unreadable([Gold("a", "4.5e33"), Gold("b", "9**9**9**9")])]
    ['b']
    """
    grading = grader or shared_grader(os.getpid())
    different = list(dict.fromkeys((gold.answer, gold.data_source) for gold in golds))
    with ThreadPoolExecutor(grading.workers) as pool:
        found = pool.map(lambda pair: _reason(pair[0], pair[1], grading), different)
        reasons = dict(zip(different, found, strict=True))
    found = ((gold, reasons[gold.answer, gold.data_source]) for gold in golds)
    return [BadGold(gold, reason) for gold, reason in found if reason is not None]


def _reason(answer: str, data_source: str, grader: MathGrader) -> str | None:
    if data_source in RULES:
        try:
            grade("#### 1", answer, data_source)
        except ValueError as error:
            return str(error)
        return None
    if not answer.strip():
        return "empty"
    if len(answer) > LONGEST_ANSWER:
        return f"longer than {LONGEST_ANSWER} characters"
    right, wrong = renderings(answer)
    if not grader.reads(answer):
        return f"{answer!r} is not read as mathematics: only the same text would be right"
    for spelling, score in [*((text, 1.0) for text in right), *((text, 0.0) for text in wrong)]:
        verdict = grader.grade(rf"\boxed{{{spelling}}}", answer)
        if verdict.reason in ("timeout", "failed"):
            return f"{answer!r} cannot be compared with {spelling!r}: {verdict.reason}"
        if verdict.score != score:
            return f"{answer!r} {'accepts' if verdict.score else 'does not accept'} {spelling!r}"
    return None
