"""Read numbers and dictionaries as frameworks print them."""

from __future__ import annotations

import ast
import re
from typing import Any

from rlvet.runs.limits import DEEPEST_ROW, LONGEST_ROW
from rlvet.runs.quantities import NOT_FINITE

ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
"""The escape sequences of a terminal's colours."""

ROUNDED_TO_ZERO = re.compile(r"(^|[/_])(lr|learning_rate|grad_norm)$")
"""Keys for which a printed 0.000 is a small number that was rounded."""

PRINTED_ZERO = re.compile(r"[+-]?0?\.0+")
"""A zero with decimals, as of a number that was rounded to them. A printed 0 or 0.0e+00 is exactly 0."""

ROUNDED = "{} (rounded)"
"""The text of a row for such a number, which is not known."""

BRACE = re.compile(r"[{}]")
"""The start or end of a dictionary."""


def dictionary_at(text: str, start: int) -> dict[str, Any]:
    """Return the dictionary that begins at a position of a text, with its numbers parsed; empty if it is not valid."""
    end = 0
    depth = 0
    for match in BRACE.finditer(text, start, start + LONGEST_ROW):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            end = match.end()
            break
        if depth > DEEPEST_ROW:
            return {}
    if not end:
        return {}

    # Make a Python literal of it: nan and inf become strings, np.float64(0.5) becomes 0.5.
    literal = text[start:end]
    literal = re.sub(r"(?<=: )(nan|-?inf)(?=[,}\n])", r"'\1'", literal)
    literal = re.sub(r"np\.\w+\(([^()]*)\)", r"\1", literal)
    metrics: dict[str, Any] = {}
    for key, value in literal_dictionary(literal).items():
        # A learning rate that is printed as 0.000 was rounded, so its value is unknown.
        is_zero = isinstance(value, str) and PRINTED_ZERO.fullmatch(value)
        number = number_of(value)
        if is_zero and ROUNDED_TO_ZERO.search(str(key)):
            metrics[str(key)] = ROUNDED.format(value)
        else:
            metrics[str(key)] = value if number is None else number
    return metrics


def literal_dictionary(text: str) -> dict[Any, Any]:
    """Return the dictionary that a text is as a literal of Python; an empty one if it is none.

    >>> literal_dictionary("{'loss': 0.1}"), literal_dictionary("{'loss': f()}"), literal_dictionary("[0.1]")
    ({'loss': 0.1}, {}, {})
    """
    try:
        content = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return {}
    return content if isinstance(content, dict) else {}


def number_of(value: Any) -> float | str | None:
    """Return a printed number, with NaN and infinity as texts, as JSON logs have them; None if it is not a number."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return value
    if not isinstance(value, str):  # a list or a dictionary
        return None
    words = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
    if value in words:
        return words[value]
    try:
        return float(value)
    except ValueError:
        return None


def is_number(value: Any) -> bool:
    """Return True if a value is a number, or a text for one that is not finite."""
    return isinstance(value, (int, float)) or (isinstance(value, str) and value in NOT_FINITE)
