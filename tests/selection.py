"""Selections of test cases: which run with `make test`, and which with the slow tests."""

from collections.abc import Iterable

import pytest


def mostly_slow(cases: Iterable[object], quick_each: int) -> list[object]:
    """Mark most cases of a test as slow, and leave every n-th quick.

    It is for cases that guard the same code, of which a few show a fault at once.

    Args:
        cases: The parameters of the test.
        quick_each: The distance between two quick cases; the first case is quick.

    >>> [case if isinstance(case, str) else case.values for case in mostly_slow("abcd", 3)]
    ['a', ('b',), ('c',), 'd']
    """
    return [
        case if index % quick_each == 0 else pytest.param(case, marks=pytest.mark.slow)
        for index, case in enumerate(cases)
    ]
