"""Group keys of a log by the words with which they begin."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import takewhile

FEWEST_OF_GROUP = 3
"""The smallest number of keys of a group."""

FIRST_WORDS = re.compile(r"(?:[^/._]+[/._]+){1,2}")
"""The first two words of a key, or the first one of a key of two, with what divides them from the rest."""


def groups_of(keys: Sequence[str]) -> tuple[list[list[str]], list[str]]:
    """Return groups of keys with the same beginning, the largest first, and the keys that are in no group.

    >>> groups_of(["my/score", "actor/prefix_a", "actor/prefix_b", "actor/prefix_c", "actor/lag"])
    ([['actor/prefix_a', 'actor/prefix_b', 'actor/prefix_c']], ['my/score', 'actor/lag'])
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for key in keys:
        start = FIRST_WORDS.match(key)
        groups[start[0] if start else key].append(key)
    large = [group for group in groups.values() if len(group) >= FEWEST_OF_GROUP]
    large.sort(key=len, reverse=True)
    grouped = {key for group in large for key in group}
    return large, [key for key in keys if key not in grouped]


def common_beginning(keys: Sequence[str]) -> str:
    """Return the beginning that keys have in common, up to the end of a word.

    >>> common_beginning(["actor/prefix_mask_sum", "actor/prefix_mask_mean", "actor/prefix_may"])
    'actor/prefix_'
    """
    # What the first and the last key in the alphabet have in common, all between them have.
    equal = takewhile(lambda pair: pair[0] == pair[1], zip(min(keys), max(keys), strict=False))
    return re.sub(r"[^/._]*$", "", "".join(first for first, _ in equal))
