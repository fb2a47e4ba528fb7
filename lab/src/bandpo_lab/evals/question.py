"""Whether a right answer says more than its question: what restates or leaves to be done is no answer in training."""

import re
from decimal import Decimal
from difflib import SequenceMatcher
from math import gcd, isqrt

from bandpo_lab.evals.normalize import normal_form

HEAVIER = 1.5
"""Times the numbers, letters and functions of the gold, beyond which an answer is less simple: a sum of two numbers for
one is, another order or spelling is not."""
COPIED = 0.59
"""Of an answer, beyond which a piece of the problem makes it that piece: three tokens of five in x + 1 + 0."""
PADDED = 4
"""Times, beyond which an answer hides another: 27 + 5 - 5 + 3 - 3 has five numbers for one."""

_SIMPLIFY = re.compile(r"simpl(?:if|est)|lowest terms|reduced? (?:form|fraction)", re.IGNORECASE)
_LAYOUT = re.compile(
    r"\\(?:left|right|displaystyle|text\w*|math\w*|mbox|[,;:! %$]|quad)|\^\s*\{?\\circ\}?|\\?[%{}$]"
)
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]*)\}|(\w))\s*(?:\{([^{}]*)\}|(\w))")
_NAMED = re.compile(r"^\s*[a-zA-Z]\s*(?:\(\s*[a-zA-Z]\s*\))?\s*(?:=|\\in(?![a-z]))")
_TOKEN = re.compile(r"\\[a-zA-Z]+|\d+\.?\d*|\.\d+|\S")
_RATIO = re.compile(r"(?<![\d^])(\d+)\s*/\s*(\d+)(?!\d)")
_ROOT = re.compile(r"\\sqrt\s*\{?(\d+)\}?")


def fault(answer: str, gold: str, problem: str) -> str | None:
    r"""What is wrong with an answer that equals the gold, given the problem; None for nothing.

    ``restated``: it stands in the problem and the gold does not stand so there, or it is put together from the
    problem's numbers and less simple than the gold. ``unsimplified``: the problem asks for a simpler form.

    >>> fault("3+4", "7", "What is $3+4$?"), fault("4+3+0", "7", "What is $3+4$?"), fault("7", "7", "Add 3 to 4.")
    ('restated', 'restated', None)
    >>> fault(r"\frac{6}{8}", r"\frac{3}{4}", "Simplify 18/24.")
    'unsimplified'
    """
    ours, golds, asked = _tokens(answer), _tokens(gold), _tokens(problem)
    if ours == golds:
        return None
    block = SequenceMatcher(None, ours, asked, autojunk=False).find_longest_match()
    copied = ours[block.a : block.a + block.size]
    own = f" {' '.join(copied)} " not in f" {' '.join(golds)} "
    if copied == ours or (own and len(copied) > COPIED * len(ours)):
        return "restated"
    weight, heavy = _weight(ours), HEAVIER * max(_weight(golds), 1)
    unreduced = _unreduced(answer) and not _unreduced(gold)
    if weight > heavy or unreduced:
        if _SIMPLIFY.search(problem):
            return "unsimplified"
        numbers, known = [token for token in ours if token[0].isdigit()], {*asked, "0", "1"}
        lowest = len(ours) == 3 and not unreduced and ours[1] == "/"
        given = 2 * sum(number in known for number in numbers) >= len(numbers)
        if weight > PADDED * max(_weight(golds), 1) or (given and not lowest):
            return "restated"
    return None


def _tokens(text: str) -> list[str]:
    """Numbers, names and signs, without layout, the name of the unknown and the ways to write one number."""
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", _FRACTION.sub(_in_line, normal_form(text)))
    found = _TOKEN.findall(_NAMED.sub("", _LAYOUT.sub(" ", text)).lower())
    return [f"{Decimal(token).normalize():f}" if re.match(r"\.?\d", token) else token for token in found]


def _in_line(fraction: re.Match[str]) -> str:
    parts = (fraction[1] or fraction[2], fraction[3] or fraction[4])
    return "/".join(part if re.fullmatch(r"\s*-?\w+\s*", part or "") else f"({part})" for part in parts)


def _weight(tokens: list[str]) -> int:
    operators = {"\\cdot", "\\times", "\\pm", "\\div", "\\in", "\\cup", "\\infty"}
    return sum((token[0].isalnum() or token[0] == "\\") and token not in operators for token in tokens)


def _unreduced(text: str) -> bool:
    """Whether a fraction of two numbers or a root of one could be made smaller."""
    text = _FRACTION.sub(_in_line, text)
    fractions = any(gcd(int(top), int(bottom)) > 1 for top, bottom in _RATIO.findall(text))
    roots = (int(root) for root in _ROOT.findall(text) if len(root) < 7)
    return fractions or any(root % k**2 == 0 for root in roots for k in range(2, isqrt(root) + 1))
