"""Detect right answers that only restate their problem or do not simplify it; in training, they are graded wrong."""

import re
from decimal import Decimal
from difflib import SequenceMatcher
from math import gcd, isqrt

from bandpo_lab.evals.normalize import normal_form

COMPLEX_FACTOR = 1.5
"""An answer with more numbers, letters and functions than this times those of the gold is more complex than the gold.

A sum of two numbers for one number is; another order or spelling is not.
"""
COPIED_SHARE = 0.59
"""If more than this share of an answer's tokens is copied from the problem, the answer restates it.

In x + 1 + 0, three of five tokens are copied if the problem has x + 1.
"""
PADDED_FACTOR = 4
"""An answer with more numbers, letters and functions than this times those of the gold restates in any case.

27 + 5 - 5 + 3 - 3 has five numbers for one.
"""

_SIMPLIFY = re.compile(r"simpl(?:if|est)|lowest terms|reduced? (?:form|fraction)", re.IGNORECASE)
_LAYOUT = re.compile(
    r"\\(?:left|right|displaystyle|text\w*|math\w*|mbox|[,;:! %$]|quad)|\^\s*\{?\\circ\}?|\\?[%{}$]"
)
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]*)\}|(\w))\s*(?:\{([^{}]*)\}|(\w))")
_NAMED = re.compile(r"^\s*[a-zA-Z]\s*(?:\(\s*[a-zA-Z]\s*\))?\s*(?:=|\\in(?![a-z]))")
_TOKEN = re.compile(r"\\[a-zA-Z]+|\d+\.?\d*|\.\d+|\S")
_RATIO = re.compile(r"(?<![\d^])(\d+)\s*/\s*(\d+)(?!\d)")
_ROOT = re.compile(r"\\sqrt\s*\{?(\d+)\}?")


def check_triviality(answer: str, gold: str, problem: str) -> str | None:
    r"""Return the reason why an answer that equals the gold is no solution of the problem; None if it is one.

    The reasons are ``restated`` and ``unsimplified``. An answer is restated if it is copied from the problem and the
    gold is not, or if it consists of the problem's numbers and is more complex than the gold. It is unsimplified if the
    problem asks for a simpler form.

    >>> check_triviality("3+4", "7", "What is $3+4$?"), check_triviality("4+3+0", "7", "What is $3+4$?")
    ('restated', 'restated')
    >>> check_triviality("7", "7", "Add 3 to 4.")
    >>> check_triviality(r"\frac{6}{8}", r"\frac{3}{4}", "Simplify 18/24.")
    'unsimplified'
    """
    answer_tokens = _tokens(answer)
    gold_tokens = _tokens(gold)
    problem_tokens = _tokens(problem)
    if answer_tokens == gold_tokens:
        return None

    # Is it copied?
    block = SequenceMatcher(None, answer_tokens, problem_tokens, autojunk=False).find_longest_match()
    copied = answer_tokens[block.a : block.a + block.size]
    is_in_gold = f" {' '.join(copied)} " in f" {' '.join(gold_tokens)} "
    is_mostly_copied = len(copied) > COPIED_SHARE * len(answer_tokens)
    if copied == answer_tokens or (is_mostly_copied and not is_in_gold):
        return "restated"

    # Is it more complex than the gold?
    complexity = _complexity(answer_tokens)
    gold_complexity = max(_complexity(gold_tokens), 1)
    is_reducible = _is_reducible(answer) and not _is_reducible(gold)
    if complexity <= COMPLEX_FACTOR * gold_complexity and not is_reducible:
        return None
    if _SIMPLIFY.search(problem):
        return "unsimplified"

    # Does it consist of the problem's numbers? A fraction in lowest terms is an answer.
    numbers = [token for token in answer_tokens if token[0].isdigit()]
    problem_numbers = {*problem_tokens, "0", "1"}
    is_from_problem = 2 * sum(number in problem_numbers for number in numbers) >= len(numbers)
    is_lowest_terms = len(answer_tokens) == 3 and not is_reducible and answer_tokens[1] == "/"
    if complexity > PADDED_FACTOR * gold_complexity or (is_from_problem and not is_lowest_terms):
        return "restated"
    return None


def _tokens(text: str) -> list[str]:
    """Split a text into numbers, names and signs.

    Layout and a leading "x =" are removed, and each number is written in one way.
    """
    text = _FRACTION.sub(_in_line, normal_form(text))
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    text = _NAMED.sub("", _LAYOUT.sub(" ", text)).lower()
    tokens = []
    for token in _TOKEN.findall(text):
        is_number = re.match(r"\.?\d", token)
        tokens.append(f"{Decimal(token).normalize():f}" if is_number else token)
    return tokens


def _in_line(fraction: re.Match[str]) -> str:
    """Return a LaTeX fraction as a quotient with "/", with brackets around sides of more than one term."""
    sides = (fraction[1] or fraction[2], fraction[3] or fraction[4])
    return "/".join(side if re.fullmatch(r"\s*-?\w+\s*", side or "") else f"({side})" for side in sides)


def _complexity(tokens: list[str]) -> int:
    """Return the number of numbers, letters and functions among tokens."""
    operators = {"\\cdot", "\\times", "\\pm", "\\div", "\\in", "\\cup", "\\infty"}
    return sum((token[0].isalnum() or token[0] == "\\") and token not in operators for token in tokens)


def _is_reducible(text: str) -> bool:
    """Return True if a fraction of two numbers or a root of a number can be reduced."""
    text = _FRACTION.sub(_in_line, text)
    if any(gcd(int(numerator), int(denominator)) > 1 for numerator, denominator in _RATIO.findall(text)):
        return True
    roots = [int(root) for root in _ROOT.findall(text) if len(root) < 7]
    return any(_has_square_factor(root) for root in roots)


def _has_square_factor(number: int) -> bool:
    return any(number % k**2 == 0 for k in range(2, isqrt(number) + 1))
