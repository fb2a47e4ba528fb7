r"""Normalize the spelling of answers, so that math-verify parses them as they are meant.

math-verify does not parse ``27.`` as a number, and reads ``4.5e33`` as 4.5·e·33 and ``1\,234`` as the sum 1 + 234. Each
rule here replaces a spelling by another one of the same meaning. Ambiguous spellings are not changed.
"""

import re
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction

from bandpo_lab.evals.inequalities import normal_set

LARGEST_EXPONENT = 300
"""The largest exponent of a power of ten that is written out, close to that of a float."""

_CHARACTERS = str.maketrans(
    dict.fromkeys("\u00a0\u2009\u202f\u3000", " ")  # no-break, thin, narrow and wide space
    | {"\u2212": "-", "\uff05": "%", "\u00b0": r"^\circ ", "\u2019": "'", "\u2032": "'", "\u03c0": r"\pi "}
    | {
        "\u2264": r"\le ",
        "\u2265": r"\ge ",
        "\u221e": r"\infty ",
        "\u222a": r"\cup ",
        "\u2205": r"\emptyset ",
    }
    | {ord("\uff10") + digit: str(digit) for digit in range(10)}  # wide digits
    | {
        "\u2013": "-",
        "\u2044": "/",
        "\u2215": "/",
        "\u00b2": "^{2}",
        "\u00b3": "^{3}",
        "\u221b": r"\sqrt[3] ",
    }
    | {"\u00bd": r"\frac{1}{2}", "\u2153": r"\frac{1}{3}", "\u2154": r"\frac{2}{3}"}
    | {
        "\u00bc": r"\frac{1}{4}",
        "\u00be": r"\frac{3}{4}",
        "\u00a3": r"\$",
        "\u20ac": r"\$",
        "\u00a2": " cents",
    }
)
_PRODUCTS = str.maketrans({"\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u22c5": r"\cdot "})
_NUMBER = r"(?:\d+\.?\d*|\.\d+)"
# A number times a power of ten is written out, but not after a letter, a point, a power, a quotient or a group.
_ALONE = r"(?<![\w.\\^/}])"
_PER_CENT = r"(?:per\s?cent(?:age)?|pct)"
# What has no effect but on the look: fonts, sizes, colours, the class of a symbol, labels and spaces. The group that
# follows a command stays, except that of a colour or a label.
_LOOK = (
    r"\\(?:(?:color|textcolor|colorbox|tag\*?|label|raisebox)\s*(?:\[[^\[\]]*\])?\s*\{[^{}]*\}"
    r"|(?:boldsymbol|bm|pmb|underline|uline|emph|mathsf|mathtt|bf|it|sf"
    r"|rm|tt|bfseries|itshape|normalfont|tiny|scriptsize|footnotesize|small|normalsize|large|Large|LARGE|huge|Huge"
    r"|displaystyle|textstyle|scriptstyle|boldmath|ensuremath|math(?:bin|rel|ord|op|open|close|punct|inner|strut)"
    r"|smash|strut|null|hfill?|nonumber|notag|[bB]igg?[lmr]?)(?![a-zA-Z])"
    r"|(?:kern|hskip|mkern|mskip)\s*-?(?:\d+\.?\d*|\.\d+)\s*(?:pt|pc|in|bp|cm|mm|em|ex|mu))\s*"
)
_FONT = r"(?:text(?:bf|it|rm|sf|tt|up|sl|md|sc|normal)?|math(?:rm|bf|it|sf|tt|normal)|mbox|hbox)"
# Signs of the end of a proof, and words that announce an answer.
_END = r"(?:\\(?:square|blacksquare|Box|qed|checkmark|qedsymbol)(?![a-zA-Z])|\\\\)"
_ANNOUNCEMENT = r"(?:the\s+)?(?:final\s+)?answer\s*(?:is\b|:|=)?"
_GROUP = r"\{(?:[^{}]|\{[^{}]*\})*\}"
_MODULE = r"(?<![\w\\.])(?:np|numpy|math)\."
# Words that are not part of a unit: they join answers, negate one, or change its value.
_NO_UNIT = (
    r"(?i:and|or|if|for|when|where|is|are|was|not|no|wrong|plus|minus|times|over|than|to|base|mod|of|from|by"
    r"|hundreds?|thousands?|[mbtr]+illions?|dozens?|half|pi|sqrt|sin|cos|tan|log|ln|[ap]m)"
)
# Words in roman type, except the numbers e and i.
_UNIT = (
    rf"\\(?:text(?:rm)?|mathrm|mbox|hbox|operatorname)\s*\{{(?!\s*[ei]\b)(?![^}}]*\b{_NO_UNIT}\b)"
    r"(?:[a-zA-Z\u00b5\u03a9 ./-]|\\cdot(?![a-z])|\\mu(?![a-z])|\\Omega)+"
    r"(?:\^\s*\{?-?\d\}?[a-zA-Z\u00b5\u03a9 ./-]*)*\}"
    r"(?:\s*\^\s*(?:\{\s*-?\d\s*\}|-?\d))?"
)
# Units of several letters in italics. A single letter may be a variable.
_SHORT_UNIT = (
    r"(?:[kcm]m|[km]g|m[lL]|ms|hrs?|min|sec|ft|yd|mi|lbs?|oz|mph|k?Hz|k?Pa|k?W"
    r"|mol|rad|deg|EUR|USD|GBP|m/s(?:\^\{?2\}?)?|km/h)"
)
# A part of a thing, such as "of the cake" after 3/4.
_OF_A_THING = rf"\\text\s*\{{\s*of\s+(?:the|a|an)\s(?![^{{}}]*\b{_NO_UNIT}\b)[a-zA-Z ]+\}}"
_ABOUT = r"(?:about|approximately|approx\.?|roughly|around)"
# The start of a sentence that states an answer, without a word that changes or denies it.
_STATEMENT = (
    r"\s*(?:[Tt]he\s+)?(?![^{}]*(?i:\b(?:not|never|no|\w+n't|if|whether|or|than|least|most|wrong|incorrect|false|except"
    r"|between|from|twice|double|triple|half|third|square|minus|plus|times|maybe|perhaps|possibly|could|might|may|cannot"
    r"|neither|nor|other|without|hundred|thousand|[mb]illion|dozen|per|percent|step)\b))"
    r"(?:[a-zA-Z]+\s+)*(?:is|are|equals|has|have|total\s+of|point|center|vertex|focus|prime|year)\s*"
)
_MONTH = r"(?:January|February|March|April|May|June|July|August|September|October|November|December)"
_WHOLE_TEXT = r"^\s*(?:\\text\s*\{{\s*)?(?i:{})\.?\s*\}}?\s*$"
_NUMERALS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
    "twenty",
]
_PARTS = ["half", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"]
_ONE_OF_NUMERALS = f"({'|'.join(_NUMERALS)})"
_POWERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}


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


def _repeating_decimal(match: re.Match[str]) -> str:
    """Return a repeating decimal, given as the digits before and after its point and its period, as a fraction."""
    digits_before, digits = match[1] or "0", match[2]
    period = re.sub(r"\D", "", match[3])
    denominator = 10 ** len(digits) * (10 ** len(period) - 1)
    numerator = int(digits_before + digits + period) - int(digits_before + digits)
    return rf"\frac{{{numerator}}}{{{denominator}}}"


def _angle_in_radians(match: re.Match[str]) -> str:
    return rf"\{match[1]}(\frac{{{match[2]}\pi}}{{180}})"


def _without_unit(match: re.Match[str]) -> str:
    """Return nothing for a unit after a value; of a word after words, as in two choices, return the word."""
    is_after_words = re.search(
        r"\\(?:text|mathrm|mbox)\s*\{[^{}]*[a-zA-Z][^{}]*\}\s*$", match.string[: match.start()]
    )
    return match[0] if is_after_words else ""


def _mixed_number(match: re.Match[str]) -> str:
    """Return a mixed number before a factor, such as 4½ before π, as a sum in brackets."""
    return rf"({match[1]}+\frac{{{match[2] or match[3]}}}{{{match[4] or match[5]}}})"


def _exponent(match: re.Match[str]) -> str:
    """Return the fraction that a decimal exponent means, which math-verify would round."""
    return f"^{{{Fraction(match[1])}}}"


def _numeral(match: re.Match[str]) -> str:
    return str(_NUMERALS.index(match[1].lower()))


def _fraction_in_words(match: re.Match[str]) -> str:
    part = match[2].lower().replace("halves", "half").replace("quarter", "fourth").rstrip("s")
    return rf"\frac{{{_NUMERALS.index(match[1].lower())}}}{{{_PARTS.index(part) + 2}}}"


def _with_power_word(match: re.Match[str]) -> str:
    """Return a number such as 1.5 million in digits."""
    number = Decimal(match[1]).scaleb(_POWERS[match[2].lower()], Context(prec=60))
    return format(number, "f")


def _without_outer_braces(match: re.Match[str]) -> str:
    """Return the content of a group that is the whole text; the text itself if it is two groups."""
    depth = 0
    for brace in re.finditer(r"\\.|[{}]", match[1]):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth < 0:
            return match[0]
    return match[1] if depth == 0 else match[0]


_BASE = re.compile(
    r"(?<=[\dA-F)])\s*_\s*(?:\{\s*(?:\\text\s*\{)?\s*\(?\s*(?:base[\s-]*)?(\w+)\s*\)?\s*\}?\s*\}|(\d+))"
)
_BASES = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]


def _number_with_base(match: re.Match[str]) -> str:
    """Return the base of a number as a subscript in digits; nothing for ten."""
    base = (match[1] or match[2]).lower()
    if base in _BASES:
        base = str(_BASES.index(base) + 2)
    return "" if base == "10" else f"_{{{base}}}"


def _rows(match: re.Match[str]) -> str:
    """Return equations that stand below each other as a list, and the lines of one equation as one line.

    The cases of a function, which have conditions, are not changed.
    """
    is_cases = match[1].endswith("cases")
    rows = [row.replace("&", " ").strip(" ,;") for row in match[2].split(r"\\") if row.strip()]
    if len(rows) > 1 and all(re.match(r"[a-zA-Z](?:_\{?\w+\}?)?\s*=[^=]*$", row) for row in rows):
        return ", ".join(rows)
    return match[0] if is_cases else match[2]


def _as_primes(match: re.Match[str]) -> str:
    return "'" * match[0].count("prime")


_Rule = tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]

_RULES: tuple[_Rule, ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # The unit vectors in one font
        (r"\\(?:vec|boldsymbol|bm)\s*\{\s*(?:\\mathbf\s*\{)?\s*\\?([ijk])(?:math)?\s*\}", r"\\mathbf{\1}"),
        # Invisible text, and the look.
        (rf"\\[hv]?phantom\s*(?:{_GROUP}|[^\\{{])", ""),
        (r"\{\s*\\rm\s+([a-zA-Z][a-zA-Z ]*)\}", r"\\mathrm{\1}"),
        (_LOOK, ""),
        (r"\\text(?:bf|it|rm|sf|tt|up|sl|md|sc|normal)(?=\s*\{)", r"\\text"),
        (r"\\(?:left|right|middle)(?![a-zA-Z.])\s*", ""),
        (r"\^\s*\{(?:\s|\\[,;:!])*\\circ(?:\s|\\[,;:!])*\}", r"^\\circ"),
        (r"\\textdollar(?![a-zA-Z])", r"\\$"),
        (r"\\ast(?![a-zA-Z])", r"\\cdot "),
        (r"\s*\\&\s*", ", "),
        (rf"^\s*\\{_FONT}\s*\{{\s*([-+]?[\d.,/]*\d)(?:\s|\\[,;: ])+([a-zA-Z ]+)\}}\s*$", r"\1\\text{ \2}"),
        (rf"^\s*\\{_FONT}\s*\{{\s*(\d+(?:,\s*\d+)*),?\s+and\s+(\d+)\s*\}}\s*$", r"\1, \2"),
        (r"\\begin\s*\{(aligned|align\*?|gathered|split|equation\*?|d?cases)\}(.*)\\end\s*\{\1\}", _rows),
        (r"^\s*&|(?<!\\)&\s*$", ""),
        (rf"(?<=\S)\s*{_END}\s*$", ""),
        (rf"^\s*\\boxed\s*({_GROUP})\s*$", r"\1"),
        (r"\\[lr]brace(?![a-zA-Z])", lambda match: r"\{" if "l" in match[0] else r"\}"),
        (r"\\[lr]brack(?![a-zA-Z])", lambda match: "[" if "l" in match[0] else "]"),
        (r"(?<=\\\\)\s*\[[^\[\]]*\]", ""),  # the distance of two rows
        # A sentence around one number, and the name of a point
        (rf"^\s*\\{_FONT}\s*\{{({_STATEMENT})\}}\s*(?=\S)(?!.*\\(?:text|mathrm|mbox)\s*\{{[^{{}}]*\d)", ""),
        (rf"^\s*\\{_FONT}\s*\{{{_STATEMENT}\s(-?[\d,.]*\d)(?:\s+[a-zA-Z]+)?\.?\s*\}}\s*$", r"\1"),
        (r"^\s*[A-Z]\s*(?=\([^()]*,[^()]*\)\s*$)", ""),
        # 7^{th}
        (r"(?<=\d)\s*\^\s*(?:\{\s*)?(?:\\(?:text|mathrm)\s*\{\s*)?(?:st|[nr]d|th)(?:\s*\}){0,2}\s*$", ""),
        # March 5
        (rf"^\s*({_MONTH}\s+\d{{1,2}}(?:,?\s+\d{{4}})?)\s*$", r"\\text{\1}"),
        # The number of combinations, and the modulus of a congruence
        (r"^\s*(?:\{\s*\}\s*)?[_^]\s*\{?(\w+)\}?\s*C\s*_\s*\{?(\w+)\}?\s*$", r"\\binom{\1}{\2}"),
        (
            r"^(\s*\w+)\s*\\equiv\s*(-?\w+)"
            r"\s*\(?\s*\\(?:[pb]?mod(?![a-z])|text\s*\{\s*mod\s*\})\s*\{?\s*(\w+)\s*\}?\s*\)?\s*$",
            r"\1 \\equiv \2 \\pmod{\3}",
        ),
        # 135^o, with the letter for the sign of degrees
        (
            r"(?<=\d)\s*\^\s*(?:\{\s*)?(?:\\(?:text|mathrm)\s*\{\s*o\s*\}|o(?![a-zA-Z]))(?:\s*\})?",
            r"^\\circ ",
        ),
        # 3:30 PM and 3:30 p.m.
        (
            r"^\s*(?:\\text\s*\{\s*)?(\d{1,2}:\d\d)"
            r"\s*(?:\\[,;: ]\s*)?(?:\\text\s*\{\s*)?([aApP])\.?\s*[mM]\.?\s*\}?\s*$",
            lambda match: rf"\text{{{match[1]} {match[2].upper()}M}}",
        ),
        # What stands before an answer: "Answer:", "about", a currency, a limit, a relation without a left side.
        (rf"^\s*\\{_FONT}\s*\{{\s*(?i:{_ABOUT})\s*\}}\s*(?=\S)", ""),
        (r"^\s*[a-zA-Z]\s*\\(?:to|rightarrow|longrightarrow)(?![a-zA-Z])\s*(?=\S)", ""),
        (rf"^\s*\\{_FONT}\s*\{{\s*(?i:{_ANNOUNCEMENT})\s*:?\s*([-+]?[\d.,/]*\d)\.?\s*\}}\s*$", r"\1"),
        (r"\\text\s*\{\s*\}", " "),
        (rf"^\s*\\{_FONT}\s*\{{\s*(?i:{_ANNOUNCEMENT})\s*\}}\s*(?:[:=]|is\b)?", ""),
        (rf"^\s*(?i:{_ANNOUNCEMENT})\s*(?=[-\d\\$.])", ""),
        (rf"^\s*\\{_FONT}\s*\{{(?![^{{}}]*\b(?:not?|never|wrong)\b)[^{{}}]*:\s*\}}(?=\s*\S)", ""),
        (rf"^\s*\\{_FONT}\s*\{{\s*(?:\\?\$|USD|EUR|GBP)\s*\}}|^\s*(?:\\pounds|\\euro)(?![a-zA-Z])", ""),
        (r"^\s*(?:US|USD|EUR|GBP)\s*(?=\\?\$|\d)", ""),
        (r"^\s*(?:\\(?:approx|therefore|implies|Rightarrow|simeq)(?![a-zA-Z])|=|\u2248|\u2234)\s*(?=\S)", ""),
        (r"\\[hv]space\*?\s*\{[^{}]*\}|\\(?:left|right)\s*\.", " "),
        (r"^\s*\{(.*)(?<!\\)\}\s*$", _without_outer_braces),
        (r"(?<![\w\]})^_\\])\{\s*([-+]?[\d.,/]*\d)\s*\}", r"\1"),
        # A choice or a name in a font of its own, quotes, and primes.
        (rf"^\s*\\{_FONT}\s*\{{\s*([\[(]?[a-zA-Z][\]).]?)\s*\}}\s*$", r"\1"),
        (rf"\\{_FONT}\s*(?=\d)", ""),
        (r"^\s*\\operatorname\s*\{\s*([a-zA-Z]{4,})\s*\}\s*$", r"\\text{\1}"),
        (
            r"\\text\s*\{\s*([.,])\s*\}(?=\d)|(?<=\d)\{(\.|,(?!\}\d{3}(?!\d)))\}(?=\d)",
            lambda match: match[1] or match[2],
        ),
        (rf"^\s*\\{_FONT}\s*\{{\s*(?i:option|choice|answer)\s*\}}?\s*\(?([A-Z])\)?\s*\}}?\s*$", r"\1"),
        (rf"^\s*\\{_FONT}\s*\{{\s*([a-zA-Z]+)[.!]\s*\}}\s*$", r"\\text{\1}"),
        (r"^\s*(?:``|\u201c)([^'\"`]*)(?:''|\u201d|\")\s*$", r"\1"),
        # \text{3:30}, \text{\$5} and 3\text{e-}5
        (rf"^\s*\\{_FONT}\s*\{{\s*((?:\\?\$)?\d[\d:.,]*)\s*\}}\s*$", r"\1"),
        (rf"(?<=\d)\s*\\{_FONT}\s*\{{\s*([eE][-+]?)\s*\}}\s*(?=\d)", r"\1"),
        (
            r"^\s*(?:[a-zA-Z]|\\(?:mathbf|vec|mathrm)\s*\{[a-zA-Z]\})\s*=\s*(?=(?:\\left\s*[(\[]\s*)?\\begin\s*\{)",
            "",
        ),
        (r"\\degree(?![a-z])", r"^\\circ"),
        (r"(?<=[{,\s])([A-Z])\s+and\s+([A-Z])\s*\}\s*$", r"\1, \2}"),
        (r"^\s*\\text\s*\{\s*([A-Z](?:,\s*[A-Z])+)\s*\}\s*$", r"\1"),
        (_WHOLE_TEXT.format(r"(?:the\s+set\s+of\s+)?all\s+real\s+numbers|\\R"), r"\\mathbb{R}"),
        (r"^\s*\\mathbb\s*\{?\s*R\s*\}?\s*(?:\^\s*\{?\s*\+\s*\}?|_\s*\{\s*>\s*0\s*\})\s*$", r"(0,\\infty)"),
        (r"\^\s*\{\s*(-?\d{0,3}\.\d{1,3})\s*\}", _exponent),
        (_WHOLE_TEXT.format(r"no\s+solutions?"), r"\\emptyset "),
        (_WHOLE_TEXT.format(_ONE_OF_NUMERALS), _numeral),
        (
            _WHOLE_TEXT.format(
                rf"{_ONE_OF_NUMERALS}[\s-]+(hal(?:f|ves)|quarters?|(?:third|fourth|fifth|sixth|seventh|eighth|ninth|tenth)s?)"
            ),
            _fraction_in_words,
        ),
        (
            rf"^\s*\\?\$?(\d+(?:\.\d+)?)\s*(?:\\text\s*\{{\s*)?(?i:({'|'.join(_POWERS)}))(?:\s+[a-z]+)?\s*\}}?\s*$",
            _with_power_word,
        ),
        (r"\{?\s*([\w+-]+)\s*\\choose\s*([\w+-]+)\s*\}?", r"\\binom{\1}{\2}"),
        (r"\\([gl])eq[q](?![a-z])", r"\\\1eq "),
        (r"\\big(cup|cap)(?![a-z])", r"\\\1"),
        (r"\\surd(?![a-z])\s*", "\u221a"),
        (r"[_^]\{\s*\}|^\s*\{\s*\}", ""),
        (r"\\begin\s*\{array\}\s*\{[lcr]\}((?:(?!\\\\|&|\\end).)*)\\end\s*\{array\}", r"\1"),
        (r"^\s*\\langle(?![a-z])(.*,.*)\\rangle\s*$", r"(\1)"),
        # Degrees of temperature.
        (r"\\(?:text|mathrm)\s*\{\s*\^\s*\{?\s*\\circ\s*\}?\s*[CF]?\s*\}\s*$", r"^\\circ"),
        (r"\^\s*\{?\s*\\circ\s*\}?\s*(?:[CF]|\\(?:text|mathrm)\s*\{\s*[CF]\s*\})\s*$", r"^\\circ"),
        (
            r"\\(?:operatorname|mathrm|text)\s*\{\s*(sin|cos|tan|cot|sec|csc|ln|log|exp|arcsin|arccos|arctan)\s*\}",
            r"\\\1 ",
        ),
        (r"\\log\s*_\s*(?:\{\s*e\s*\}|e)", r"\\ln "),
        (
            r"^\s*(?:\\text\s*\{\s*)?(?:[Tt]he\s+)?[Ee]mpty\s+set\s*\}?\s*$"
            r"|^\s*\\\{\s*(?:\\[,;: ])*\s*\\\}\s*$|\\varnothing",
            r"\\emptyset ",
        ),
        (r"^\s*(['\"])([^'\"]*)\1\s*$", r"\2"),
        (r"\^\s*(?:\{\s*(?:\\prime\s*)+\}|\\prime)", _as_primes),
        # Markdown's emphasis, and the end of a sentence.
        (r"^\s*(\*\*|__|`)(.+)\1(\.?)\s*$", r"\2\3"),
        (rf"\\{_FONT}\s*\{{\s*[.,;]?\s*\}}\s*$", ""),
        (r"(?<=[^\s.\\])\s*[.,;]\s*$", ""),
        # 1\,234 and 1{,}234: groups of three digits.
        (r"^\s*[1-9]\d{0,2}(?:'\d{3})+\s*$", _without_grouping),
        (r"(?<![\d.])[1-9]\d{0,2}(?:(?:(?<!\\)\\[,;:! ]|~|\{,\})\d{3})+(?!\d)", _without_grouping),
        (r"^\s*[1-9]\d{0,2}(?: \d{3})+\s*$", _without_grouping),
        (r"(?<=[a-z\]}]\{)[1-9]\d{0,2}(?:,\d{3})+(?=\})", _without_grouping),
        # Dollars around the answer, and spaces after a sign.
        (r"^\s*\$([^$]+)\$\s*$", r"\1"),
        (r"^\s*-\s+(?=[\d.])", "-"),
        # -2 = m
        (r"^([^=<>]*\d[^=<>]*)(?<![\\!])=\s*([a-zA-Z])\s*$", r"\2 = \1"),
        # Fractions with a small slash, repeating decimals, and angles of functions.
        (r"\\[ns]icefrac(?![a-zA-Z])|\\[sx]frac(?![a-zA-Z])", r"\\frac"),
        (r"(?:\{\s*\})?\s*\^\s*\{?(\d+)\}?\s*(?:\\!)*\s*/\s*(?:\\!)*\s*_\s*\{?(\d+)\}?", r"\\frac{\1}{\2}"),
        (r"(?<![\d.])(\d*)\.(\d*)(\\dot\s*\{?\d\}?\d*\\dot\s*(?:\{\d\}|\d))(?!\d)", _repeating_decimal),
        (r"(?<![\d.])(\d*)\.(\d*)\\(?:overline|bar|dot)\s*(\{\s*\d+\s*\}|\d)(?![\d\\])", _repeating_decimal),
        (r"(?<=^)\s*(\d*)\.(\d*)(\(\d{1,9}\))\s*$", _repeating_decimal),
        (r"(?<![\d.])(\d+)\.(\d*?)(\d)\3{2,}\s*(?:\\[lc]?dots|\.\.\.|\u2026)\s*$", _repeating_decimal),
        (
            r"\\(sin|cos|tan|cot|sec|csc)\s*[({]?\s*(\d+(?:\.\d+)?)\s*\^\s*\{?\s*\\circ\s*\}?\s*[)}]?",
            _angle_in_radians,
        ),
        (r"(?<=\d)\s*(?:\{:\}|\\colon(?![a-z])|:)\s*(?=\d)", ":"),
        (r"\u221a\s*(?:\(([^()]*)\)|(\d+\.?\d*|[a-zA-Z]))", _as_root),
        # Option A, B)
        (r"^\s*(?:(?:option|choice|answer|Option|Choice|Answer)\s+)?\(?([A-Z])(?:\)|:)?\s*$", r"\1"),
        # Other spaces.
        (r"(?<!\\)\\(?:!|neg(?:thin|med|thick)space(?![a-zA-Z]))", ""),
        (r"(?<!\\)(?:\\[,;:> ]|~|\\(?:q?quad|(?:en|thin|med|thick|nobreak)?space)(?![a-zA-Z]))", " "),
        # 3 1/2 is a mixed number; 3 5 is a list, which math-verify would add up.
        (r"^(\s*[-+]?\d+)\s+(\d+)/(\d+)\s*$", r"\1\\frac{\2}{\3}"),
        (r"^\s*(\d+)\s*\\[dt]?frac\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))(?=\s*\\)", _mixed_number),
        (r"^\s*[-+]?\d+(?:\s+\d+)+\s*$", lambda match: ", ".join(match[0].split())),
        # The spellings of a per cent sign. A bare % begins a comment in LaTeX.
        (rf"\\{_FONT}\s*\{{\s*(?:{_PER_CENT}|\\?%)\s*\}}", r"\\%"),
        (rf"(?<=[\d.}})\s%])\s*{_PER_CENT}(?![a-zA-Z])", r"\\%"),
        (r"\s*(?:\\%|(?<!\\)%)", r"\\%"),
        # 12 base 3 and 12_{\text{three}}; ten is the usual base.
        (
            r"(?<=\d)\s*(?:\\text\s*\{)?\s*\(?\s*(?:in\s+)?base[\s-]*\}?\s*(\w+)\s*\)?\s*\}?\s*$",
            r"_{\1}",
        ),
        (_BASE, _number_with_base),
        (r"^\s*\(\s*([\dA-F]+)\s*\)(?=_\{)", r"\1"),
        # \text{1.25}, 9 (apples)
        (
            rf"\\{_FONT}\s*\{{\s*([-+]?[\d.,/]*\d[\d.,/]*(?:\\%)?)\s*\}}",
            r"\1",
        ),
        # The unit after a number, also of several parts: \mathrm{m}/\mathrm{s}^2.
        (rf"(?<=\d)\s*\\{_FONT}\s*\{{\s*\((?![^{{}}]*\b{_NO_UNIT}\b)[a-z ]{{3,}}\)\s*\}}\s*$", ""),
        (
            rf"(?:(?<=[\d}})])|(?<=\\pi)|(?<=\\pi\s))(?:\s*(?:/|\\cdot(?![a-z]))?\s*{_UNIT})+\s*$",
            _without_unit,
        ),
        (
            rf"^(\s*-?\$?(?:{_NUMBER}|\d+/\d+))(?!.*\b{_NO_UNIT}\b)\s*[a-zA-Z]{{4,}}(?:\s+[a-zA-Z]+){{0,2}}(?:\s*\^\s*\{{?\d\}}?)?\s*$",
            r"\1",
        ),
        (rf"(?<=[\d}}])\s*\\[dt]?frac\s*\{{\s*{_UNIT}\s*\}}\s*\{{\s*{_UNIT}\s*\}}\s*$", ""),
        (rf"(?<=[\d}}])\s*{_OF_A_THING}\s*$", ""),
        (r"(?<=\d)\s+\\Omega\s*$", ""),
        (rf"(?<=[\d}}])(?:\s+{_SHORT_UNIT}|\s+\\?\$)(?:\s*\^\s*\{{?\d\}}?)?\s*$", ""),
        (r"\\(?:text|mathrm)\s*\{\s*([ei])\s*\}(?!\s*_)", r"\1"),
        (r"^(\s*[-+]?[\d.,]+)\s+\((?:\\text\{)?[a-zA-Z]{3,}[a-zA-Z ,-]*\}?\)\s*$", r"\1"),
        # -1./3
        (r"(?<=\d)\.(?![\d.\\])", ""),
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
    return normal_set(text)


def bases(text: str) -> list[str]:
    """Return the bases of the numbers in a normal form, in order."""
    return re.findall(r"[\dA-F)]_\{(\w+)\}", text)


def primes(text: str) -> int:
    """Return the number of primes in a normal form, except those in the name of an answer such as f'(x) = 2x."""
    return re.sub(r"^\s*[a-zA-Z]'*\s*(?:\([^()=]*\))?\s*=", "", text).count("'")


def has_other_case(answer: str, gold: str) -> bool:
    r"""Return True if an answer and a gold, both in normal form, differ in the case of a letter.

    The case of words does not count, only that of letters and of commands such as ``\Pi``.

    >>> has_other_case("N+1", "n+1"), has_other_case("yes", "Yes"), has_other_case("y=5", "5")
    (True, False, False)
    """
    answer_letters = _letters(answer)
    gold_letters = _letters(gold)
    both_cases = {letter for letter in answer_letters if letter.swapcase() in answer_letters}
    if both_cases - gold_letters:
        return True
    return any(_swapped(letter) in gold_letters for letter in answer_letters - gold_letters)


def _swapped(letter: str) -> str:
    r"""Return a letter, or a command such as ``\pi``, with its first letter in the other case."""
    if letter.startswith("\\"):
        return letter[:1] + letter[1].swapcase() + letter[2:]
    return letter.swapcase()


def _letters(text: str) -> set[str]:
    """Return the letters and the commands of a normal form, without words."""
    text = re.sub(r"\\(?:text\w*|mathrm|mbox|operatorname)\s*\{[^{}]{2,}\}", " ", text)
    text = re.sub(r"(?<![\\a-zA-Z])(?:[a-zA-Z]{3,}|(?i:no))(?![a-zA-Z])", " ", text)
    return set(re.findall(r"\\[a-zA-Z]+|[a-zA-Z]", text))


_ARTICLE = re.compile(r"^(?:an?|the|on)\s+(?=\S)")


def words_of(text: str) -> str | None:
    r"""Return the words of a normal form that is a text, in small letters; None if it is mathematics.

    >>> words_of(r"\text{No solution}"), words_of("Evelyn"), words_of("AB")
    ('no solution', 'evelyn', None)
    """
    words = re.fullmatch(r"\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}|([a-zA-Z]{3,}|(?i:no))", text)
    return _ARTICLE.sub("", (words[1] or words[2] or "").strip().casefold()) if words else None
