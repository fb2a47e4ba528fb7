"""Which training problems are also evaluation problems, word for word or nearly."""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from bandpo_lab.data.sources import Problem

GRAM = 3
"""Words, numbers and signs per fragment: with one word in six replaced, (5/6)³ = 58 % of the fragments stay."""
COMMON = 100
"""Problems of another wording that share a fragment, from which it tells nothing: it is of a wrapper."""
SHORT, SHORT_SHARE = 12, 0.75
"""Below so many words, a changed one makes another problem, so more must be shared."""
SHARE = 0.4
"""Of the lighter problem, from which two are the same; `scripts/evaluation_tables.py leaks` measures it."""
LONGER = 3
"""Times, to which the heavier problem may be a longer text around the lighter one."""

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


def fragments(text: tuple[str, ...]) -> set[tuple[str, ...]]:
    """The runs of `GRAM` words of a problem, or all its words where they are fewer."""
    return {text[i : i + GRAM] for i in range(max(len(text) - GRAM, 0) + 1)}


def overlaps(train: Iterable[Problem], evaluation: Iterable[Problem]) -> list[Overlap]:
    """Training problems, in order, that repeat an evaluation problem, or an earlier training problem word for word.

    Two are the same if they share fragments enough, each weighed by how few other problems have it.

    >>> a, b = Problem("a", "What is 1 + 1?", "2"), Problem("b", "what is $1+1$", "2")
    >>> [(o.problem.id, o.other, o.share) for o in overlaps([a], [b])]
    [('a', 'b', 1.0)]
    """
    problems, others = list(train), list(evaluation)
    texts = [tuple(words(problem.problem)) for problem in (*problems, *others)]
    fragments_of = {text: fragments(text) for text in texts}
    rows = Counter(fragment for found in fragments_of.values() for fragment in found)

    def weight(found: Iterable[tuple[str, ...]]) -> float:
        # What stands in two problems only is as telling as what stands in one.
        return sum(1 / max(rows[fragment] - 1, 1) for fragment in found if rows[fragment] <= COMMON)

    weights = {text: weight(found) for text, found in fragments_of.items()}
    holders: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for i, text in enumerate(texts[len(problems) :]):
        for fragment in fragments_of[text]:
            holders[fragment].append(i)
    exact = {text: other.id for text, other in zip(texts[len(problems) :], others, strict=True)}
    seen: dict[tuple[str, ...], str] = {}
    dropped: list[Overlap] = []
    for text, problem in zip(texts, problems, strict=False):
        shared: defaultdict[int, float] = defaultdict(float)
        for fragment in fragments_of[text]:
            if rows[fragment] <= COMMON:
                for i in holders.get(fragment, ()):
                    shared[i] += 1 / max(rows[fragment] - 1, 1)
        shares: dict[int, float] = {}
        for i, found in shared.items():
            other = texts[len(problems) + i]
            light, heavy = sorted((weights[text], weights[other]))
            share = found / max(light, heavy / LONGER)
            if share >= (SHORT_SHARE if min(len(text), len(other)) < SHORT else SHARE):
                shares[i] = share
        first = exact.get(text) or seen.setdefault(text, problem.id)
        if first != problem.id:
            dropped.append(Overlap(problem, first, 1.0))
        elif shares:
            nearest = max(shares, key=lambda i: shares[i])
            dropped.append(Overlap(problem, others[nearest].id, shares[nearest]))
    return dropped
