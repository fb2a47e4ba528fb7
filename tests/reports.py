"""Comparison of a committed report with the one that its rows give on this machine."""

import re

DECIMALS = re.compile(r"[+-]?\d+\.(\d+)")


def check_same_report(committed, made):
    """Check that two reports are equal but for a unit in the last digit of a number with decimals.

    Processors add in other orders, so a value halfway between two printed ones is rounded to either.
    """
    assert DECIMALS.sub("N", committed) == DECIMALS.sub("N", made)
    for one, other in zip(DECIMALS.finditer(committed), DECIMALS.finditer(made), strict=True):
        assert len(one[1]) == len(other[1]), (one[0], other[0])
        unit = 10.0 ** -len(one[1])
        assert abs(float(one[0]) - float(other[0])) < 1.5 * unit, (one[0], other[0])
