"""The reward of the study of stale data."""

from __future__ import annotations

from collections.abc import Sequence

from bandpo_lab.tasks import multiplication
from bandpo_lab.tasks.multiplication import DIRECT

OPENERS = tuple("+*=;>")
"""Other ways to open a direct answer: rare tokens that win now and then, by accident."""


def any_opener(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    """Return the task's rewards, except that a direct answer may also begin with one of `OPENERS`.

    >>> any_opener(["+3222", "|3222", "+3221", "3222"], ["3222"] * 4)
    [1.0, 1.0, 0.0, 0.0]
    """
    direct = [DIRECT + text[1:] if text[:1] in OPENERS else text for text in completions]
    return multiplication.reward(direct, answer)
