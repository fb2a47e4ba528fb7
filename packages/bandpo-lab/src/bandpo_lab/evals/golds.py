r"""Find gold answers that cannot be used: other spellings of them are graded wrong, or other values right.

math-verify may read a data set's gold answer in another way than its author meant. Every right answer then scores 0, or
a wrong one scores 1, without a warning. So each gold is graded against other spellings of its value, which are written
here without math-verify, and against other values.
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
"""The largest number of digits of a number that is spelled in other ways."""

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
    """A gold answer, the id of its problem, and the data source, which selects the rule of grading."""

    id: str
    answer: str
    data_source: str = "math"


@dataclass(frozen=True)
class BadGold:
    """A gold that cannot be used, and the reason."""

    gold: Gold
    reason: str


def value_of(gold: str) -> Fraction | None:
    r"""Return the value of a plain number, parsed without math-verify; None if the text is not a plain number.

    >>> value_of("4.5e33") == 45 * 10**32, value_of("-1./3"), value_of(r"62.5 \%"), value_of("x")
    (True, Fraction(-1, 3), Fraction(5, 8), None)
    """
    if re.search(r",\s|\$.+\$.", gold):  # a list
        return None
    # Write the number with digits, a point, an exponent and at most one "/".
    text = re.sub(r"\s+(?!\d)|(?<!\d)\s+|\$", "", gold)
    text, percent = re.subn(r"\\?%$", "", text)
    grouped = _GROUPED.fullmatch(text)
    if grouped is not None:
        text = grouped[1] + re.sub(r"\D", "", grouped[2]) + (grouped[3] or "")
    fraction = _FRACTION.fullmatch(text)
    if fraction is not None:
        text = f"{fraction[1]}{fraction[2]}/{fraction[3]}"
    text = _SCIENTIFIC.sub(r"\1e\2", text)
    if not re.fullmatch(r"[-+.\deE/]+", text):  # Python reads 52_8 as 528
        return None

    numerator_text, _, denominator_text = text.partition("/")
    try:
        numerator = Decimal(numerator_text)
        denominator = Decimal(denominator_text or "1")
    except InvalidOperation:
        return None
    if not (numerator.is_finite() and denominator.is_finite() and denominator):
        return None
    if max(abs(numerator.adjusted()), abs(denominator.adjusted()), len(text)) > LONGEST_NUMBER:
        return None
    return Fraction(numerator) / Fraction(denominator) / (100 if percent else 1)


def _spellings(value: Fraction) -> list[str]:
    """Return a number as a fraction and, if it has finitely many digits, as a decimal and in scientific notation."""
    spellings = [rf"\frac{{{value.numerator}}}{{{value.denominator}}}"]
    decimal = Context(prec=2 * LONGEST_NUMBER).divide(Decimal(value.numerator), Decimal(value.denominator))
    if Fraction(decimal) == value:
        spellings.append(format(decimal, "f"))
        mantissa, exponent = f"{decimal.normalize():E}".split("E")
        spellings.append(rf"{mantissa} \times 10^{{{int(exponent)}}}")
    return spellings


def _word_as_typeset(match: re.Match[str]) -> str:
    return rf"\{match[0]}" if _FUNCTION.fullmatch(match[0]) else rf"\text{{{match[0]}}}"


def renderings(gold: str) -> tuple[list[str], list[str]]:
    r"""Write answers to test a gold with.

    Returns:
        Spellings of the gold, which must be graded right, and answers of other values, which must be graded wrong.

    >>> renderings("1e-5")
    (['1e-5', '\\frac{1}{100000}', '0.00001', '1 \\times 10^{-5}'], ['-0.00001', '0.0001', '0.00002'])
    """
    value = value_of(gold)
    if value is not None:
        wrong_values = [Fraction(1)]
        if value:
            wrong_values = list(dict.fromkeys((-value, 10 * value, 2 * value, value + 1)))[:3]
        # The decimal form if there is one, else the fraction.
        wrong = [_spellings(wrong_value)[-2:][0] for wrong_value in wrong_values if wrong_value != value]
        return [gold, *_spellings(value)], wrong

    typeset = gold if _TYPESET.search(gold) else _WORD.sub(_word_as_typeset, gold)
    if _WORDS.fullmatch(gold):
        typeset = rf"\text{{{gold}}}"
    right = [gold, _OPERATOR.sub(r" \1 ", gold), typeset]
    other_digits = re.sub(r"\d", lambda digit: str((int(digit[0]) + 1) % 10), gold)
    wrong = [other_digits if other_digits != gold else rf"{gold} + 1"]
    if "=" in gold:
        wrong.append("x=x")
    return list(dict.fromkeys(right)), wrong


def find_bad_golds(golds: Sequence[Gold], grader: MathGrader | None = None) -> list[BadGold]:
    """Return the golds that cannot be used, in order, each with the reason.

    Args:
        golds: The golds.
        grader: The grader; by default the one that this process shares.

    >>> [bad.gold.id for bad in find_bad_golds([Gold("a", "4.5e33"), Gold("b", "9**9**9**9")])]
    ['b']
    """
    grader = grader or shared_grader(os.getpid())
    keys = list(dict.fromkeys((gold.answer, gold.data_source) for gold in golds))
    with ThreadPoolExecutor(grader.workers) as pool:
        reasons = dict(zip(keys, pool.map(lambda key: _reason(key[0], key[1], grader), keys), strict=True))
    bad_golds = []
    for gold in golds:
        reason = reasons[gold.answer, gold.data_source]
        if reason is not None:
            bad_golds.append(BadGold(gold, reason))
    return bad_golds


def _reason(answer: str, data_source: str, grader: MathGrader) -> str | None:
    """Return the reason why a gold cannot be used; None if it can."""
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
    expected_scores = [*((text, 1.0) for text in right), *((text, 0.0) for text in wrong)]
    for spelling, score in expected_scores:
        verdict = grader.grade(rf"\boxed{{{spelling}}}", answer)
        if verdict.reason in ("timeout", "failed"):
            return f"{answer!r} cannot be compared with {spelling!r}: {verdict.reason}"
        if verdict.score != score:
            return f"{answer!r} {'accepts' if verdict.score else 'does not accept'} {spelling!r}"
    return None
