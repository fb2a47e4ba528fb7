"""Numbers in sentences, as people write them: ``166``, ``3395``, ``12,288``, ``0.0005``, ``1e-6`` and ``99.6%``."""

from __future__ import annotations

import math
from typing import Any, TypeGuard

LARGEST_PLAIN = 1e9
"""Numbers below this one are written without an exponent."""

FIRST_WITH_COMMA = 10_000
"""The first integer that has commas between its thousands."""


def is_number(value: Any) -> TypeGuard[int | float]:
    """Return True for an integer or a float. A boolean is none, although Python counts it among the integers.

    >>> is_number(1), is_number(0.5), is_number(True), is_number("1")
    (True, True, False, False)
    """
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def format_number(value: float, digits: int = 3) -> str:
    """Return a number with some significant digits. Integer parts are complete, and small exponents have no padding.

    Args:
        value: The number.
        digits: Number of significant digits of fractions. An integer part has all of its digits.

    >>> format_number(166.4, 2), format_number(3395.2), format_number(12288), format_number(0.00123456)
    ('166', '3395', '12,288', '0.00123')
    >>> format_number(1e-6), format_number(3.2e9), format_number(99.96)
    ('1e-6', '3.2e9', '100')
    """
    text = f"{value:.{digits}g}"
    if "e" not in text:
        return text
    if 1 <= abs(value) < LARGEST_PLAIN:
        integer = f"{value:.0f}"
        return integer if abs(int(integer)) < FIRST_WITH_COMMA else f"{value:,.0f}"
    mantissa, _, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}"


def format_setting(value: float) -> str:
    """Return the value of a setting as Python writes it, but without an exponent if it is large.

    >>> format_setting(1e-05), format_setting(16777216.0)
    ('1e-05', '16,777,216')
    """
    return format_number(value, 6) if abs(value) >= 1 else f"{value:g}"


def format_share(share: float) -> str:
    """Return a share as a percentage, which is 0% or 100% only if the share is exactly 0 or 1.

    >>> format_share(0.584), format_share(0.996), format_share(1.0), format_share(0.0004)
    ('58%', '99.6%', '100%', '0.04%')
    """
    text = f"{share:.0%}"
    nearest = {"0%": 0.0, "-0%": 0.0, "100%": 1.0}.get(text)
    if nearest is None or math.isclose(share, nearest, abs_tol=1e-9):
        return text.removeprefix("-") if nearest == 0 else text
    for digits in range(1, 8):
        text = f"{share:.{digits}%}"
        if float(text[:-1]) != 100 * nearest:
            break
    return text


def format_step(step: float) -> str:
    """Return the number of a step, complete and without commas.

    >>> format_step(1234567.0), format_step(12.5)
    ('1234567', '12.5')
    """
    return f"{step:.15g}"
