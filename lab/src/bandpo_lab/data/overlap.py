"""Which training problems are also evaluation problems, word for word or nearly."""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from bandpo_lab.data.sources import Problem

GRAM = 8
"""Words, numbers and signs per fragment. Shorter ones are common phrases; longer ones miss a problem with a word
changed."""

THRESHOLD = 0.5
"""Share of the shorter problem's fragments that also stand in the other, from which the two are the same."""

# A hyphen between two words is no minus.
_WORDS = re.compile(r"\d+(?:\.\d+)?|[^\W\d_]+|(?<![^\W\d_]{2})[-]|[-](?![^\W\d_]{2})|[+*/=<>!^|%]")
_LAYOUT = re.compile(r"\\(left|right|displaystyle|text|mathrm|quad|qquad|[,;:! ])")
_SPELLINGS = (
    (re.compile(r"\\[dt]frac"), r"\\frac"),
    (re.compile(r"\\(?:cdot|times)(?![a-zA-Z])|[×·⋅]"), "*"),
    (re.compile(r"\\(le|ge)qs?(?:lant)?(?![a-zA-Z])"), r"\\\1"),
    (re.compile(r"[−–—]"), "-"),
    # Normalising would turn x² into x2.
    (re.compile(r"[⁰¹²³⁴⁵⁶⁷⁸⁹]+"), r"^\g<0>"),
)


@dataclass(frozen=True)
class Overlap:
    """A problem and the one it repeats; `share` is 1 where the words are the same."""

    problem: Problem
    other: str
    share: float


def words(text: str) -> list[str]:
    r"""A problem's words, numbers and signs, without case, punctuation and layout.

    >>> words(r"Find \left(x + 1\right) for $x=\dfrac{1}{2}$.")
    ['find', 'x', '+', '1', 'for', 'x', '=', 'frac', '1', '2']
    """
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    return _WORDS.findall(_LAYOUT.sub(" ", unicodedata.normalize("NFKC", text)).lower())


def fragments(text: str) -> set[tuple[str, ...]]:
    """The runs of `GRAM` words of a problem, or all its words where they are fewer."""
    listed = words(text)
    return {tuple(listed[i : i + GRAM]) for i in range(max(len(listed) - GRAM, 0) + 1)}


def overlaps(train: Iterable[Problem], evaluation: Iterable[Problem]) -> list[Overlap]:
    """Training problems, in order, that repeat an evaluation problem, or an earlier training problem word for word.

    >>> a, b = Problem("a", "What is 1 + 1?", "2"), Problem("b", "what is $1+1$", "2")
    >>> [(o.problem.id, o.other, o.share) for o in overlaps([a], [b])]
    [('a', 'b', 1.0)]
    """
    sizes: dict[str, int] = {}
    holders: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for problem in evaluation:
        found = fragments(problem.problem)
        sizes[problem.id] = len(found)
        for fragment in found:
            holders[fragment].append(problem.id)
    seen: dict[tuple[str, ...], str] = {}
    dropped: list[Overlap] = []
    for problem in train:
        found = fragments(problem.problem)
        shared = Counter(holder for fragment in found for holder in holders.get(fragment, ()))
        shares = {other: count / min(len(found), sizes[other]) for other, count in shared.items()}
        other = max(shares, key=lambda key: shares[key], default=None)
        if other is not None and shares[other] >= THRESHOLD:
            dropped.append(Overlap(problem, other, shares[other]))
            continue
        first = seen.setdefault(tuple(words(problem.problem)), problem.id)
        if first != problem.id:
            dropped.append(Overlap(problem, first, 1.0))
    return dropped
