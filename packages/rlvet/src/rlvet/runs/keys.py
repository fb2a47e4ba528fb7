"""The table of logged keys: what each framework logs under which name, as read in its own source.

``rlvet/data/keys.tsv`` is the only list of names. A row has the key, its quantity and the line of the framework's code
that writes it. Its ``use`` is

- ``yes``: the key is read as the quantity, if rlvet knows the quantity;
- ``older``: the same, for a key that a commit has removed, which is named in place of a line;
- ``no``: the key is like a quantity and is another one, such as a count in place of a share; it is never read;
- ``ambiguous``: it depends on settings what the key is; the row is for readers of the table.

The first rows of a framework are preferred to later ones. A part of a key in braces may be any name, as in
``rewards/{name}``. A quantity may be logged as its complement, in per cent, or with the other sign; its name says so,
such as ``dead_complement``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import resources
from typing import NamedTuple

OWN = "your own"
"""The names that people use in loops of their own, which are read whatever the framework is."""

AUDIT = "bandpo"
"""The keys of bandpo's audit, which are read whatever the framework is, and before all others."""

BASES: Mapping[str, tuple[str, ...]] = {
    "trl-async": (),
    "trl-rloo": ("trl",),
    "trl-ppo": (),
    "axolotl": ("trl",),
    "miles": ("slime",),
    "rllm": ("verl", "tinker"),
}
"""For each framework that logs keys of others too, these frameworks, such as its back ends."""

FAMILIES: Mapping[str, str] = {
    **dict.fromkeys(("trl-async", "trl-rloo", "trl-ppo", "ms-swift", "axolotl"), "trl"),
    "miles": "slime",
    "rllm": "verl",
}
"""The family of a framework whose keys are mostly those of another one: the name of that one."""

RULE = "rule"
"""What stands in place of a quantity for a rule about keys, such as a prefix, which is for readers of the table."""

EVERYWHERE = frozenset(("step", "epoch", "loss", "learning_rate", "lr", "grad_norm"))
"""Keys that tell no frameworks apart."""

PART_IN_BRACES = re.compile(r"\\\{(?:(\d)\\\.\\\.(\d)|[^{}]*)\\\}")


class Key(NamedTuple):
    """A row of the table."""

    framework: str
    key: str
    """The key, or a pattern of keys with a part in braces."""
    quantity: str
    """The quantity that is logged."""
    use: str
    placeholder: str
    """The value that is logged if the quantity was not computed; empty if there is none."""
    unit: str
    meaning: str
    commit: str
    """The commit whose code was read, and its date; for an older key, the one that removed it."""
    place: str
    """The file and the line that write the key."""
    source: str
    """The text of the line."""


def load_keys() -> tuple[Key, ...]:
    """Return the rows of the table."""
    text = (resources.files("rlvet") / "data" / "keys.tsv").read_text(encoding="utf-8")
    _, *lines = text.splitlines()
    return tuple(Key(*line.split("\t")) for line in lines)


KEYS = load_keys()
"""The rows of the table, in its order."""

FRAMEWORKS = tuple(dict.fromkeys(row.framework for row in KEYS if row.framework not in (OWN, AUDIT)))
"""The frameworks in the order of the table. If the keys of several are logged, the first is meant."""


def pattern_of(key: str) -> re.Pattern[str]:
    """Return the pattern of a key with a part in braces.

    >>> bool(pattern_of("rewards/{name}/mean").fullmatch("rewards/format/mean"))
    True
    >>> [bool(pattern_of("kl{0..2}").fullmatch(key)) for key in ("kl1", "kl3")]
    [True, False]
    """
    text = PART_IN_BRACES.sub(lambda part: f"[{part[1]}-{part[2]}]" if part[1] else "[^/]+", re.escape(key))
    return re.compile(text)


def _by_key() -> dict[str, dict[str, str]]:
    """Return, for each key, its use by each framework; yes if a framework has the key for several quantities."""
    uses: dict[str, dict[str, str]] = {}
    for row in KEYS:
        if row.quantity == RULE or row.use == "ambiguous":
            continue
        of_key = uses.setdefault(row.key, {})
        if of_key.get(row.framework) != "yes":
            of_key[row.framework] = row.use
    return uses


USES = _by_key()
"""The use of each key of the table, by framework."""

REWARDS = frozenset(row.key for row in KEYS if row.quantity == "reward")
"""The keys of the reward."""


def _spelled_otherwise() -> dict[str, str]:
    """Return the keys with a slash by the names that exports give them, in which another character replaces it."""
    spelled: dict[str, str] = {}
    for separator in ("_", "."):
        for key in USES:
            if "/" in key and "{" not in key:
                spelled.setdefault(key.replace("/", separator), key)
    return spelled


SPELLED_OTHERWISE = _spelled_otherwise()
"""The keys of frameworks by the names of columns that some exports give them, such as ``critic_score_mean``."""


def table_key(key: str, framework: str = "") -> str | None:
    """Return the key of the table that a logged key is; None if it is none.

    Args:
        key: The logged key.
        framework: The framework whose keys are looked up; all if it is empty.

    >>> table_key("reward"), table_key("rewards/format/mean"), table_key("my/reward")
    ('reward', 'rewards/{name}/mean', None)
    """
    literals, with_parts, pattern = _known(framework)
    if key in literals:
        return key
    match = pattern.fullmatch(key)
    return with_parts[match.lastindex - 1] if match and match.lastindex else None


@lru_cache(maxsize=64)
def _known(framework: str) -> tuple[frozenset[str], tuple[str, ...], re.Pattern[str]]:
    """Return the keys of a framework without a part in braces, the others, and a pattern with a group for each."""
    frameworks = {AUDIT, framework, *BASES.get(framework, ()), OWN}
    keys = [key for key, uses in USES.items() if not framework or frameworks & uses.keys()]
    with_parts = tuple(key for key in keys if "{" in key)
    text = "|".join(f"({pattern_of(key).pattern})" for key in with_parts)
    return frozenset(key for key in keys if "{" not in key), with_parts, re.compile(text)


def endings(key: str) -> Iterator[str]:
    """Yield a key, and what follows each slash in it.

    >>> list(endings("a/b/c"))
    ['a/b/c', 'b/c', 'c']
    """
    yield key
    while "/" in key:
        key = key.partition("/")[2]
        yield key


@lru_cache(maxsize=65536)
def known_endings(key: str) -> tuple[str, ...]:
    """Return the keys of the table with which a logged key ends, the longest first.

    >>> known_endings("train/rollout_corr/kl"), known_endings("my/own")
    (('rollout_corr/kl', 'kl'), ())
    """
    found = (table_key(ending) for ending in endings(key))
    return tuple(known for known in found if known is not None)


@lru_cache(maxsize=1024)
def framework_of(keys: frozenset[str]) -> str:
    """Return the framework that logged keys; empty if no key, or too few, are of one framework alone.

    A framework is recognised by a key with a slash that only it or its family logs, by two such keys without one, or
    by one if half of all keys are its own, and its reward is among them. Of several, the one with the most keys is
    meant. A logged key is the longest key of the table with which it ends. In a log without any slash, keys may be
    spelled as in an export.

    >>> framework_of(frozenset(("critic/score/mean", "actor/entropy", "kl")))
    'verl'
    >>> framework_of(frozenset(("critic_score_mean", "actor_entropy", "actor_lr")))
    'verl'
    >>> framework_of(frozenset(("reward", "kl"))), framework_of(frozenset(("reward_mean", "reward_std", "loss")))
    ('', '')
    """
    counts = dict.fromkeys(FRAMEWORKS, 0)
    marks: dict[str, int] = {}
    with_reward: set[str] = set()
    is_export = not any("/" in key for key in keys)
    for key in keys - EVERYWHERE:
        found = known_endings(key)
        if not found and is_export and key in SPELLED_OTHERWISE:
            found = (SPELLED_OTHERWISE[key],)
        if not found or found[0] in EVERYWHERE:
            continue
        frameworks = set().union(*(USES[known] for known in found))
        is_reward = not REWARDS.isdisjoint(found)
        for framework in FRAMEWORKS:
            if not frameworks.isdisjoint((framework, *BASES.get(framework, ()))):
                counts[framework] += 1
                if is_reward:
                    with_reward.add(framework)
        of_longest = USES[found[0]].keys()
        families = {FAMILIES.get(framework, framework) for framework in of_longest}
        if len(families) == 1 and counts.keys() >= of_longest:
            (family,) = families
            marks[family] = marks.get(family, 0) + (2 if "/" in key and "/" in found[0] else 1)
    candidates = []
    for framework in FRAMEWORKS:
        weight = _weight(framework, marks)
        is_mostly_own = 2 * counts[framework] >= len(keys - EVERYWHERE) and framework in with_reward
        if weight >= 2 or (weight and is_mostly_own):
            candidates.append(framework)
    return max(candidates, key=lambda framework: counts[framework] + _weight(framework, marks), default="")


def _weight(framework: str, marks: Mapping[str, int]) -> int:
    """Return the weight of the keys that only a framework, its family or one of its bases logs."""
    families = {FAMILIES.get(framework, framework), *BASES.get(framework, ())}
    return max((marks.get(family, 0) for family in families), default=0)


@lru_cache(maxsize=65536)
def quantities_of(known: str) -> frozenset[str]:
    """Return the quantities that frameworks log under a key of the table, complements as the quantity itself.

    >>> sorted(quantities_of("kl")), sorted(quantities_of("rollout/rewards"))
    (['kl', 'kl_old'], ['reward_norm'])
    """
    return frozenset(base_quantity(row.quantity) for row in KEYS if row.key == known)


def base_quantity(name: str) -> str:
    """Return the quantity of a name such as ``dead_complement_percent``.

    >>> base_quantity("dead_complement_percent"), base_quantity("mismatch_kl_negated"), base_quantity("kl")
    ('dead', 'mismatch_kl', 'kl')
    """
    return name.removesuffix("_percent").removesuffix("_complement").removesuffix("_negated")


def rows_of(framework: str) -> Sequence[Key]:
    """Return the rows of the names of a framework, the best first; of all frameworks if it is empty.

    Of several rows with the same key, the first is meant, with a placeholder that any of them has.
    """
    frameworks = (
        (AUDIT, framework, *BASES.get(framework, ()), OWN) if framework else (AUDIT, *FRAMEWORKS, OWN)
    )
    rows: dict[str, Key] = {}
    for name in frameworks:
        for row in _ROWS[name]:
            # A free part of a name is one only in the log of its framework.
            is_free = not framework and name != OWN and "{" in row.key
            if row.use not in ("yes", "older") or is_free:
                continue
            first = rows.setdefault(row.key, row)
            if row.quantity == first.quantity and not first.placeholder:
                rows[row.key] = first._replace(placeholder=row.placeholder)
    return tuple(rows.values())


def _rows_by_framework(rows: Iterable[Key]) -> dict[str, list[Key]]:
    by_framework: dict[str, list[Key]] = {}
    for row in rows:
        by_framework.setdefault(row.framework, []).append(row)
    return by_framework


_ROWS = _rows_by_framework(KEYS)
