r"""Normalize the spelling of answers, so that math-verify parses them as they are meant.

math-verify does not parse ``27.`` as a number, and reads ``4.5e33`` as 4.5·e·33 and ``1\,234`` as the sum 1 + 234. Each
rule here replaces a spelling by another one of the same meaning. Ambiguous spellings are not changed.
"""

import re
from collections.abc import Callable
from decimal import Context, Decimal

LARGEST_EXPONENT = 300
"""The largest exponent of a power of ten that is written out, close to that of a float."""

_CHARACTERS = str.maketrans(
    dict.fromkeys("\u00a0\u2009\u202f\u3000", " ")  # no-break, thin, narrow and wide space
    | {"\u2212": "-", "\uff05": "%", "\u00b0": r"^\circ "}
)
_PRODUCTS = str.maketrans({"\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u22c5": r"\cdot "})
_NUMBER = r"(?:\d+\.?\d*|\.\d+)"
# A number times a power of ten is written out, but not after a letter, a point, a power, a quotient or a group.
_ALONE = r"(?<![\w.\\^/}])"
_MODULE = r"(?<![\w\\.])(?:np|numpy|math)\."
# Words that are not part of a unit: they join answers, negate one, or change its value.
_NO_UNIT = (
    r"(?i:and|or|if|for|when|where|is|are|was|not|no|wrong|plus|minus|times|over|than|to|base|mod|of|from|by"
    r"|hundreds?|thousands?|[mbtr]+illions?|dozens?|half|pi|sqrt|sin|cos|tan|log|ln|[ap]m)"
)
# Words in roman type, except the numbers e and i.
_UNIT = (
    rf"\\(?:text|mathrm|mbox|hbox)\s*\{{(?!\s*[ei]\b)(?![^}}]*\b{_NO_UNIT}\b)[a-zA-Z\u00b5\u03a9 ./-]+\}}"
    r"(?:\s*\^\s*(?:\{\s*-?\d\s*\}|-?\d))?"
)


def _without_exponent(mantissa: str, exponent: str) -> str | None:
    """Return a number in scientific notation as a plain decimal; None if the exponent is too large."""
    if abs(int(exponent)) > LARGEST_EXPONENT:
        return None
    return format(Decimal(mantissa).scaleb(int(exponent), Context(prec=len(mantissa))), "f")


def _power_of_ten(match: re.Match[str]) -> str:
    return _without_exponent(match[1], match[2] or match[3]) or match[0]


def _e_notation(match: re.Match[str]) -> str:
    mantissa, sign, digits = match.groups()
    # 3e-2 may mean 3·e - 2 as well, so it is not changed. Nobody writes 1·e, 2.5·e or e - 02.
    if sign == "-" and len(digits) == 1 and mantissa.isdecimal() and mantissa != "1":
        return match[0]
    return _without_exponent(mantissa, sign + digits) or match[0]


def _without_grouping(match: re.Match[str]) -> str:
    return re.sub(r"\D", "", match[0])


# 4.5e33 and 4.5 \times 10^{33}
_EXPONENTS = (
    (re.compile(rf"{_ALONE}({_NUMBER})[eE]([+-]?)(\d{{1,3}})(?![\w{{^]|\.\d|\s*!)"), _e_notation),
    (
        re.compile(
            rf"{_ALONE}({_NUMBER})\s*(?:\\times|\\cdot|\*|×)\s*10\s*\^\s*"
            r"(?:\{\s*([+-]?\d{1,3})\s*\}|(-?\d))(?![\d^!]|\.\d)"
        ),
        _power_of_ten,
    ),
)


def _as_root(match: re.Match[str]) -> str:
    return rf"\sqrt{{{match[1] or match[2]}}}"


_Rule = tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]

_RULES: tuple[_Rule, ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # Markdown's emphasis, and the end of a sentence.
        (r"^\s*(\*\*|__|`)(.+)\1(\.?)\s*$", r"\2\3"),
        (r"(?<=[^\s.])\s*[.,;]\s*$", ""),
        # 1\,234 and 1{,}234: groups of three digits.
        (r"(?<![\d.])[1-9]\d{0,2}(?:(?:(?<!\\)\\[,;:! ]|~|\{,\})\d{3})+(?!\d)", _without_grouping),
        (r"^\s*[1-9]\d{0,2}(?: \d{3})+\s*$", _without_grouping),
        # Dollars around the answer, and spaces after a sign.
        (r"^\s*\$([^$]+)\$\s*$", r"\1"),
        (r"^\s*-\s+(?=[\d.])", "-"),
        # -2 = m
        (r"^([^=<>]*\d[^=<>]*)(?<![\\!])=\s*([a-zA-Z])\s*$", r"\2 = \1"),
        (r"\u221a\s*(?:\(([^()]*)\)|(\d+\.?\d*|[a-zA-Z]))", _as_root),
        # Option A, B)
        (r"^\s*(?:(?:option|choice|answer|Option|Choice|Answer)\s+)?\(?([A-Z])(?:\)|:)?\s*$", r"\1"),
        # Other spaces.
        (r"(?<!\\)\\!", ""),
        (r"(?<!\\)(?:\\[,;: ]|~|\\q?quad(?![a-zA-Z]))", " "),
        # 3 1/2 is a mixed number; 3 5 is a list, which math-verify would add up.
        (r"^(\s*[-+]?\d+)\s+(\d+)/(\d+)\s*$", r"\1\\frac{\2}{\3}"),
        (r"^\s*[-+]?\d+(?:\s+\d+)+\s*$", lambda match: ", ".join(match[0].split())),
        # \text{1.25}, 9 (apples)
        (
            r"\\(?:text|mathrm|textbf|mathbf|textit|mathit|mbox|hbox)\s*\{\s*([-+]?[\d.,/]*\d[\d.,/]*)\s*\}",
            r"\1",
        ),
        # The unit after a number, also of several parts: \mathrm{m}/\mathrm{s}^2.
        (rf"(?<=[\d}})])(?:\s*(?:/|\\cdot(?![a-z]))?\s*{_UNIT})+\s*$", ""),
        (r"(?<=\d)\s+per ?cent\s*$", r"\\%"),
        (
            rf"^(\s*-?\$?(?:{_NUMBER}|\d+/\d+))(?!.*\b{_NO_UNIT}\b)\s*[a-zA-Z]{{4,}}(?:\s+[a-zA-Z]+){{0,2}}\s*$",
            r"\1",
        ),
        (r"\\(?:text|mathrm)\s*\{\s*([ei])\s*\}(?!\s*_)", r"\1"),
        (r"^(\s*[-+]?[\d.,]+)\s+\((?:\\text\{)?[a-zA-Z]{3,}[a-zA-Z ,-]*\}?\)\s*$", r"\1"),
        # -1./3
        (r"(?<=\d)\.(?![\d.\\])", ""),
        # 10 %: a bare % begins a comment in LaTeX.
        (r"(?<=\d)\s*\\?%", r"\\%"),
        # Python's spelling. A chain 2**3**2 stays: Python and math-verify bracket it differently.
        (r"\*\*\s*(-?\w+(?:\.\d+)?)(?![\w.(]|\s*(?:\*\*|\^))", r"^{\1}"),
        (r"\*\*(?=\s*\()", "^"),
        (rf"{_MODULE}a(?:rc)?(sin|cos|tan)(?=\s*\()", r"\\arc\1"),
        (rf"{_MODULE}(sin|cos|tan|exp|pi)(?![a-zA-Z])", r"\\\1 "),
        (rf"{_MODULE}(?=sqrt\s*\()", ""),
        (rf"{_MODULE}log(?=\s*\()", r"\\ln"),
        (r"(?<![\w\\.])((?:arc)?(?:sin|cos|tan)|exp|log|ln)(?=\s*\()", r"\\\1"),
        # Words are one text, and not the product of their letters.
        (r"^\s*([a-zA-Z]{2,}(?:\s+[a-zA-Z]+)+)\s*$", r"\\text{\1}"),
        # E_1 is a name, and not the number e.
        (r"(?<![a-zA-Z\\])([eE])(?=_)", r"\\mathrm{\1}"),
    )
)


def normal_form(text: str) -> str:
    r"""Return an answer, LaTeX or a plain number, in its normal spelling, as LaTeX of the same meaning.

    >>> normal_form("4.5e33") == normal_form(r"4.5 \times 10^{33}")
    True
    >>> normal_form("-1./3"), normal_form(r"13\,535."), normal_form("62.5 %")
    ('-1/3', '13535', '62.5\\%')
    """
    text = text.translate(_CHARACTERS).translate(_PRODUCTS)
    for pattern, replacement in _RULES + _EXPONENTS:
        text = pattern.sub(replacement, text)
    return text.strip()


_SENTENCE_END = re.compile(r"(?<=\d)\.(?=\s|$)")
_INLINE = re.compile(r"(?<!\\)(\$|\\\(|\\\[)(?=\S)([^$\n]*?\S)(\$|\\\)|\\\])")


def normal_prose(text: str) -> str:
    r"""Normalize prose before its last expression is searched.

    Formulas get their normal form, and a full stop after a number becomes a comma, since math-verify would read it as a
    decimal point.

    >>> normal_prose("The answer is 14/3."), normal_prose("It is $4.5e3$.")
    ('The answer is 14/3,', 'It is $4500$.')
    """
    text = _INLINE.sub(lambda match: match[1] + normal_form(match[2]) + match[3], text.translate(_CHARACTERS))
    for pattern, replacement in _EXPONENTS:
        text = pattern.sub(replacement, text)
    return _SENTENCE_END.sub(",", text)
