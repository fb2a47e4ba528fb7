r"""Write sets of real numbers in one way: set builders as their condition, and inequalities joined by "or" as a union.

math-verify reads neither ``\{x \mid x > 2\}`` nor ``x < -1 \text{ or } x > 1``, and no interval with brackets that open
outwards, such as ``[0, 1[``.
"""

import re

_RELATION = r"(?:\\(?:leqslant|geqslant|leq|geq|le|ge|lt|gt)(?![a-zA-Z])|<=|>=|<|>)"
_SIDES = re.compile(rf"\s*({_RELATION})\s*")
_AND = re.compile(
    r"\s*(?:\\(?:text|mathrm|mbox)\s*\{\s*and\s*\}|(?<![a-zA-Z\\])and(?![a-zA-Z])|\\land(?![a-z])|\\wedge(?![a-z]))\s*"
)
_OR = re.compile(
    r"\s*(?:\\(?:text|mathrm|mbox)\s*\{\s*or\s*\}|(?<![a-zA-Z\\])or(?![a-zA-Z])|\\lor(?![a-z])|\\vee(?![a-z]))\s*"
)
_NAME = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z](?![a-zA-Z])")
_SET_BUILDER = re.compile(
    r"\\\{\s*([a-zA-Z])\s*(?:\\in\s*(?:\\mathbb\s*\{?\s*R\s*\}?|\\R(?![a-zA-Z]))\s*)?(?:\\mid(?![a-z])|\\vert(?![a-z])|\||:)"
    r"((?:[^{}|:]|\{[^{}|:]*\})*)\\\}"
)
_SEMICOLON = re.compile(r"^([\[\](])([^\[\](){},;]*);([^\[\](){},;]*)([\[\])])$")
_OUTWARD = re.compile(r"([\[\](])([^\[\](){},]*),([^\[\](){},]*)([\[\])])")


def normal_set(text: str) -> str:
    r"""Return a set of real numbers, as LaTeX, in a notation that math-verify reads; another text is not changed.

    >>> normal_set(r"\{x \mid x > 2\}"), normal_set("]-1, 3]")
    ('x > 2', '(-1, 3]')
    >>> normal_set(r"x < -1 \text{ or } x \ge 1")
    'x\\in(-\\infty,-1)\\cup[1,\\infty)'
    """
    text = text.strip()
    builder = _SET_BUILDER.fullmatch(text)
    if builder is not None:
        name, condition = builder.groups()
        is_relation = _SIDES.search(condition) or re.search(r"\\neq?(?![a-z])", condition)
        if is_relation and name in _NAME.findall(condition) and r"\in" not in condition:
            text = condition.strip()
    text = _SEMICOLON.sub(r"\1\2,\3\4", text)
    outward = _OUTWARD.fullmatch(text)
    if outward is not None and (outward[1] == "]" or outward[4] == "["):
        opening = "(" if outward[1] == "]" else outward[1]
        closing = ")" if outward[4] == "[" else outward[4]
        return f"{opening}{outward[2]},{outward[3]}{closing}"
    if _OR.search(text):
        return _union(text) or text
    if _AND.search(text):
        return _both(text) or text
    return text


def _both(text: str) -> str | None:
    """Return a lower and an upper limit for one name, joined by "and", as an interval; None for another text."""
    conditions = _AND.split(text)
    names = {*_NAME.findall(" ".join(conditions))}
    if len(conditions) != 2 or len(names) != 1:
        return None
    name = names.pop()
    intervals = sorted(filter(None, (_interval(condition, name) for condition in conditions)))
    if len(intervals) != 2:
        return None
    upper_limited = [interval for interval in intervals if interval.startswith(r"(-\infty,")]
    lower_limited = [interval for interval in intervals if interval.endswith(r",\infty)")]
    if len(upper_limited) != 1 or len(lower_limited) != 1 or upper_limited == lower_limited:
        return None
    return (
        rf"{name}\in"
        + lower_limited[0].removesuffix(r"\infty)")
        + upper_limited[0].removeprefix(r"(-\infty,")
    )


def _union(text: str) -> str | None:
    """Return inequalities for one name that are joined by "or" as a union of intervals; None for another text."""
    names = {*_NAME.findall(_OR.sub(" ", text))}
    if len(names) != 1:
        return None
    name = names.pop()
    intervals = [_interval(condition, name) for condition in _OR.split(text)]
    if None in intervals:
        return None
    return rf"{name}\in" + r"\cup".join(filter(None, intervals))


def _interval(condition: str, name: str) -> str | None:
    """Return the interval of an inequality such as x < 3 or 1 < x <= 2; None if the text is no such inequality."""
    parts = _SIDES.split(condition.strip())
    sides = parts[::2]
    relations = parts[1::2]
    directions = {relation.startswith(("<", r"\l")) for relation in relations}
    if len(directions) != 1 or sides.count(name) != 1 or not all(sides):
        return None
    is_closed = [relation not in ("<", ">", r"\lt", r"\gt") for relation in relations]
    if not directions.pop():
        # Read 3 > x > 1 from its right side.
        sides.reverse()
        is_closed.reverse()
    place = sides.index(name)
    if len(sides) > 3 or (len(sides) == 3 and place != 1):
        return None
    lower = "(" + r"-\infty"
    if place == 1:
        lower = ("[" if is_closed[0] else "(") + sides[0]
    upper = r"\infty" + ")"
    if place < len(sides) - 1:
        upper = sides[-1] + ("]" if is_closed[-1] else ")")
    return f"{lower},{upper}"
