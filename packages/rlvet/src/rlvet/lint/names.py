"""The names of all settings of a framework, and what a misspelt name was meant to be.

`scripts/known_settings.py` makes the lists from the frameworks' own code. A group without a list may have any settings.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache

from rlvet.lint.framework import HYDRA_NAMES, Framework
from rlvet.runs.files import has_table, load_table

OPEN = "*"
"""An entry of a group that may have settings of the user's own beside those that are listed."""
OPEN_GROUPS = re.compile(r"kwargs|^override_|^extra_|^env_vars$|^ray_init$")
"""A pattern of the last names of groups whose settings are passed on, and so may be any."""
SHORTEST_OF_OPEN = 10
"""Shorter names in such groups may be settings of their own, such as ``num_gpus`` beside ``num_cpus``."""
MOST_UNKNOWN = 200
"""The largest number of unknown names in a configuration that are compared with the known ones."""
LONGEST_NAME = 80
"""Longer names are no misspelt settings."""


def nearest(name: str, known: Collection[str], most: int = 2) -> list[str]:
    """Return the known names that a name is a misspelling of; more than one if they are equally near.

    Names with the same words in another order, or in the plural, are the nearest. Others may differ by one edit, or by
    two from twelve letters on. An edit adds, removes or replaces a letter, or swaps two. A name of up to three letters
    may only have an additional letter, or two that are swapped.

    Args:
        name: The name.
        known: The known names.
        most: The largest number of edits.

    >>> nearest("clip_ratio_hgih", ["clip_ratio_high", "clip_ratio_low"]), nearest("gamma", ["beta"])
    (['clip_ratio_high'], [])
    >>> nearest("reward_weight", ["reward_weights"]), nearest("top_q", ["top_k", "top_p"])
    (['reward_weights'], ['top_k', 'top_p'])
    """
    written = name.lower().replace("-", "_")
    if len(written) > LONGEST_NAME:
        return []
    words = sorted(word.rstrip("s") for word in written.split("_"))
    same_words = [one for one in known if _words(one) == words]
    if same_words:
        return same_words
    edits = min(most, 1 if len(written) < 12 else 2)
    distances: dict[int, list[str]] = {}
    for one in known:
        distance = _distance(written, one.lower(), edits)
        is_short = len(one) <= 3 and not (len(written) > len(one) or sorted(written) == sorted(one.lower()))
        if distance <= edits and len(written) > 1 and not is_short:
            distances.setdefault(distance, []).append(one)
    return distances[min(distances)] if distances else []


@cache
def _words(name: str) -> list[str]:
    """Return the words of a known name in the singular, sorted."""
    return sorted(word.rstrip("s") for word in name.lower().split("_"))


def _distance(a: str, b: str, limit: int) -> int:
    """Return the number of edits between two texts, see `nearest`; ``limit + 1`` if there are more."""
    if abs(len(a) - len(b)) > limit:
        return limit + 1
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, letter in enumerate(a, 1):
        above, row = row, [i]
        for j, other in enumerate(b, 1):
            edits = min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == b[j - 2] and a[i - 2] == other:
                edits = min(edits, before[j - 2] + 1)
            row.append(edits)
        if min(row) > limit:
            return limit + 1
        before = above
    return row[-1]


@dataclass(frozen=True, eq=False)
class Names:
    """The names of a framework's settings.

    >>> names = Names({"": {"data", "trainer"}, "data": {"seed", "train_batch_size"}})
    >>> names.meant("data.train_batchsize"), names.meant("dta.seed"), names.meant("data.language")
    (['data.train_batch_size'], ['data.seed'], [])
    """

    groups: Mapping[str, Collection[str]]
    """The names in each group, by its dotted name, those of earlier versions too; ``""`` is the top."""
    version: str = ""
    """The version of the framework that they are of."""
    earlier: Mapping[str, str] = field(default_factory=dict)
    """The last version of each dotted name that only earlier versions have."""

    def is_known(self, path: str) -> bool:
        """Return whether some version has a setting, or the group that contains it has no list."""
        return self._first_unknown(_parts(path)) is None

    def last_version(self, path: str) -> str:
        """Return the last version that has a setting; empty if the newest has it, or none."""
        return self.earlier.get(".".join(_parts(path)), "")

    def meant(self, path: str) -> list[str]:
        """Return the settings that a name was probably meant to be; an empty list if it is known, or near none.

        Args:
            path: The dotted name. Numbers among its parts are indices of lists.
        """
        return _meant_of(self, path)

    def below(self, group: str, parts: list[str]) -> list[str]:
        """Return the settings below a group that the parts of a name are near to, or are."""
        if not parts:
            return [group]
        if group not in self.groups:
            return [".".join([group, *parts])]
        unknown = self._first_unknown(parts, group)
        if unknown is None:
            return []
        *before, name = parts[: unknown + 1]
        rest = parts[unknown + 1 :]
        parent = ".".join(part for part in (group, *before) if part)
        is_open = OPEN in self.groups[parent] or bool(OPEN_GROUPS.search(parent.rpartition(".")[2]))
        if is_open and len(name) < SHORTEST_OF_OPEN:
            return []
        found: list[str] = []
        for candidate in nearest(name, self.groups[parent], most=1 if is_open else 2):
            path = f"{parent}.{candidate}" if parent else candidate
            if not rest and path not in self.groups:
                found.append(path)
            elif rest and path in self.groups:
                known = self._first_unknown(rest, path) is None
                found += [".".join([path, *rest])] if known else self.below(path, rest)
        return found

    def _first_unknown(self, parts: list[str], group: str = "") -> int | None:
        """Return the index of the first part below a group that is not known; None if all may be."""
        for index, part in enumerate(parts):
            if group not in self.groups or part in HYDRA_NAMES:
                return None
            if part not in self.groups[group]:
                return index
            group = f"{group}.{part}" if group else part
        return None


@lru_cache(maxsize=4096)
def _meant_of(names: Names, path: str) -> list[str]:
    """Return `Names.meant`. A file may have a name many times."""
    return names.below("", _parts(path))


def _parts(path: str) -> list[str]:
    """Return the parts of a dotted name without the indices of lists."""
    return [part for part in path.split(".") if not part.isdigit()]


@cache
def names_of(framework: Framework) -> Names:
    """Return the names of a framework's settings, with those of the adapter and of earlier versions.

    They have no groups if there is no list of them.
    """
    name = f"known/{framework.key.replace('-', '_')}"
    if not has_table(name):
        return Names({})
    table = load_table(name)
    others = {*framework.added, *framework.defaults, *framework.older_names}
    paths = {f"{group}.{one}" for group, members in table["settings"].items() for one in members.split()}
    earlier = {path: version for version, members in table["earlier"].items() for path in members.split()}
    groups: dict[str, set[str]] = {}
    for path in {*paths, *earlier, *others}:
        group = ""
        for part in path.strip(".").split("."):
            groups.setdefault(group, set()).add(part)
            group = f"{group}.{part}" if group else part
    return Names(groups, table["version"], earlier)
