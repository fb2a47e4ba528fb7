"""Compare the keys of two logs that `rlvet diagnose` does not read: those of one log only, and values that differ.

No quantity of these keys is known, so no step is searched at which they part.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlvet._numbers import format_number
from rlvet.checks.course import Course
from rlvet.compare.logs import (
    FEWEST_STEPS,
    MeanDifference,
    MetricMeans,
    aligned,
    have_no_value_in_common,
    means_at_the_end,
    pair_text,
)
from rlvet.runs.beginnings import common_beginning, groups_of
from rlvet.runs.logs import Log

PROMPT_LENGTH = re.compile(
    r"prompts?[_/ ]?len(gth)?s?([_/ ]mean|[_/ ]avg)?$|mean_prompt_length$", re.IGNORECASE
)
"""Keys of the mean length of prompts."""

LONGEST_LIST = 110
"""The largest number of characters of a list of keys, which is a line or two of a terminal."""

LONGEST_OF_KEYS = 500
"""The most characters of a list of unread keys with their values, which is the only one."""


@dataclass(frozen=True)
class KeyComparison:
    """The keys of two logs that were not read. Counters and times are not among them."""

    only_a: Sequence[str] = ()
    """The keys that only the first log has; empty if the logs are of two frameworks, which name keys differently."""
    only_b: Sequence[str] = ()
    """The keys that only the second log has."""
    apart: Sequence[MetricMeans] = ()
    """The keys of both logs of which all values of one run are above all of the other."""
    sure: Sequence[MeanDifference] = ()
    """The other keys of both logs whose means over the common steps surely differ."""
    spreads: Sequence[str] = ()
    """The other keys of both logs of which one run has values in a far wider range, each with the ranges."""
    unread: tuple[int, int] = (0, 0)
    """The number of keys of each log that were not read."""
    unread_of_both: Sequence[str] = ()
    """The keys that were read of neither."""
    logged: tuple[int, int] = (0, 0)
    """The number of keys of each log."""

    @property
    def prompts(self) -> str:
        """A sentence on prompts whose lengths have no value in common; empty if they do, or are not known."""
        lengths = [one for one in self.apart if PROMPT_LENGTH.search(one.name)]
        if not lengths:
            return ""
        return f"the prompts differ, so that data or template do: {lengths[0]} (A | B, means at the end)"

    @property
    def lines(self) -> list[str]:
        """Lines about the keys, the most telling first."""
        lines = []
        if self.apart:
            count = f"{len(self.apart)} of {len(self.unread_of_both)} such keys of both"
            lines.append(
                f"not known to rlvet, and no value in common ({count}; A | B, means at the end): "
                f"{listed([str(one) for one in self.apart], longest=LONGEST_OF_KEYS)}"
            )
        if self.sure:
            means = [f"{one.name} {pair_text(one.a, one.b)}" for one in self.sure]
            lines.append(
                f"not known to rlvet, with means over the common steps that surely differ, each alone at 95 % (A | B): "
                f"{listed(means, longest=LONGEST_OF_KEYS)}"
            )
        if self.spreads:
            lines.append(
                f"not known to rlvet, with values in ranges of which one is {WIDER:g} times the other or more (A | B, "
                f"without the {LEFT_OUT} farthest values on each side): {listed(self.spreads)}"
            )
        for name, keys in (("A", self.only_a), ("B", self.only_b)):
            if keys:
                number = "1 key" if len(keys) == 1 else f"{len(keys)} keys"
                names = listed(*by_beginning(keys))
                lines.append(f"not known to rlvet, and only {name} logs: {number}, {names}")
        counts = [
            f"{unread} of {logged} keys of {name}"
            for name, unread, logged in zip("AB", self.unread, self.logged, strict=True)
            if unread
        ]
        if counts:
            names = listed(*by_beginning(self.unread_of_both)) if self.unread_of_both else "none"
            lines.append(
                f"not read, so that no step is searched at which they part: {', '.join(counts)}; of both: {names}; "
                "rlvet diagnose -v lists them"
            )
        return lines

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as a dictionary for JSON."""
        return {
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
            "apart": [one.as_json() for one in self.apart],
            "unread": list(self.unread),
            "logged": list(self.logged),
        }


def compare_keys(a: Log, b: Log, *, is_one_framework: bool = True) -> KeyComparison:
    """Compare the keys of two logs that were not read.

    Args:
        a: The first log.
        b: The second log.
        is_one_framework: False if the logs are of two frameworks, whose keys have other names for the same.

    >>> rows = [{"step": step, "reward": 0.5, "my/weight": 0.1} for step in range(30)]
    >>> other = [{**row, "my/weight": 0.3, "my/loss": 1.0} for row in rows]
    >>> compared = compare_keys(Log.of(rows), Log.of(other))
    >>> compared.only_b, str(compared.apart[0]), compared.unread, compared.logged
    (['my/loss'], 'my/weight 0.1 | 0.3', (1, 2), (2, 3))
    """
    unread = (len(a.unread), len(b.unread))
    logged = (a.keys_of_learning, b.keys_of_learning)
    of_a, of_b = a.keys, b.keys
    shared = [key for key in a.unread if key in b.unread]
    if not is_one_framework:
        return KeyComparison([], [], unread=unread, unread_of_both=shared, logged=logged)
    courses = (Course(a.rows), Course(b.rows))
    apart = []
    sure = []
    spreads = []
    for key in shared:
        first, second = (course.series(key) for course in courses)
        if not first.values or not second.values:
            continue
        steps, *values = aligned(first, second)
        if len(steps) < FEWEST_STEPS:
            continue
        if have_no_value_in_common(*values):
            apart.append(means_at_the_end(key, *values))
            continue
        difference = MeanDifference.of(key, steps, *values)
        if difference.higher:
            sure.append(difference)
            continue
        ranges = [_range_of(of_run) for of_run in values]
        if _is_far_wider(*ranges):
            texts = [f"{format_number(low)} to {format_number(high)}" for low, high in ranges]
            spreads.append(f"{key} {' | '.join(texts)}")
    return KeyComparison(
        [key for key in a.unread if key not in of_b],
        [key for key in b.unread if key not in of_a],
        apart,
        sure,
        spreads,
        unread,
        shared,
        logged,
    )


WIDER = 10.0
"""Ratio of the ranges of the values of two runs from which they are told."""


LEFT_OUT = 2
"""Number of the smallest and of the largest values of a run that are left out of its range, as spikes."""


def _range_of(values: Sequence[float]) -> tuple[float, float]:
    """Return the smallest and the largest value, but for `LEFT_OUT` on each side.

    >>> _range_of([7.0, 1.0, 2.0, 3.0, -9.0, -8.0, 8.0])
    (1.0, 3.0)
    """
    ordered = sorted(values)
    return ordered[LEFT_OUT], ordered[-1 - LEFT_OUT]


def _is_far_wider(a: tuple[float, float], b: tuple[float, float]) -> bool:
    """Return whether one range is `WIDER` times the other or more.

    >>> _is_far_wider((0.1, 0.2), (1.0, 9.0)), _is_far_wider((0.1, 0.2), (1.0, 1.9))
    (True, False)
    """
    small, large = sorted(high - low for low, high in (a, b))
    return large >= WIDER * small and large > 0


def by_beginning(keys: Sequence[str]) -> tuple[list[str], list[int]]:
    """Return the common beginnings of keys, the most common first, and the other keys; and the number of keys of each.

    >>> by_beginning(["my/score", "actor/prefix_a", "actor/prefix_b", "actor/prefix_c", "actor/lag"])
    (['actor/prefix_… (3)', 'my/score', 'actor/lag'], [3, 1, 1])
    """
    groups, single = groups_of(keys)
    texts = [f"{common_beginning(group)}… ({len(group)})" for group in groups]
    return [*texts, *single], [*map(len, groups), *(1 for _ in single)]


def listed(texts: Sequence[str], numbers: Sequence[int] = (), longest: int = LONGEST_LIST) -> str:
    """Return texts with commas, and the number of those that are left out as the list would be too long.

    Args:
        texts: The texts.
        numbers: The number of things that each text stands for; by default one.
        longest: The most characters.

    >>> listed(["a" * 60, "b" * 60, "c"]).endswith("a, and 2 more")
    True
    >>> listed(["a" * 60, "b" * 60, "c"], [5, 4, 1]).endswith("a, and 5 more")
    True
    """
    shown = list(texts[:1])
    for text in texts[1:]:
        if len(", ".join([*shown, text])) > longest:
            break
        shown.append(text)
    rest = sum(numbers[len(shown) :]) if numbers else len(texts) - len(shown)
    return ", ".join([*shown, *([f"and {rest} more"] if rest else [])])
