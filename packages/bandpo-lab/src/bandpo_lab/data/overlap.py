"""Find training problems that repeat an evaluation problem, word for word or nearly."""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bandpo_lab.data.sources import Problem

GRAM = 3
"""The words, numbers and signs of a fragment. If one word in six is replaced, (5/6)³ = 58 % of the fragments remain."""
COMMON = 100
"""A fragment in more problems than this is ignored, as it belongs to an instruction and not to a problem."""
SHARE = 0.4
"""The share of common fragments from which two problems are the same (see `scripts/evaluation_tables.py leaks`).

Fragments are weighted, and the share is that of the problem with the smaller weight.
"""
SHORT = 12
"""A problem with fewer words is short: a single changed word makes another problem."""
SHORT_SHARE = 0.75
"""The share from which two problems are the same if one of them is short."""
LONGER = 3
"""The factor by which the weights of two problems may differ without reducing the share.

A problem may be embedded in a longer text.
"""

# A hyphen between two words is not a minus.
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
    """A training problem that repeats another problem.

    Attributes:
        problem: The training problem.
        original: The id of the problem that it repeats.
        share: The share of common fragments; 1 if the words are the same.
    """

    problem: Problem
    original: str
    share: float


def words(text: str) -> list[str]:
    r"""Return the words, numbers and signs of a problem, without case, punctuation and layout.

    >>> words(r"Find \left(x + 1\right) for $x=\dfrac{1}{2}$.")
    ['find', 'x', '+', '1', 'for', 'x', '=', 'frac', '1', '2']
    """
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    return _WORDS.findall(_LAYOUT.sub(" ", unicodedata.normalize("NFKC", text)).lower())


Words = tuple[str, ...]


def fragments(text: Words) -> set[Words]:
    """Return the sequences of `GRAM` consecutive words of a problem, or all its words if there are fewer."""
    return {text[i : i + GRAM] for i in range(max(len(text) - GRAM, 0) + 1)}


def overlaps(train: Iterable[Problem], evaluation: Iterable[Problem]) -> list[Overlap]:
    """Find training problems that repeat an evaluation problem, or an earlier training problem word for word.

    A training problem repeats an evaluation problem if enough of their fragments are the same. Rare fragments have a
    larger weight.

    >>> a, b = Problem("a", "What is 1 + 1?", "2"), Problem("b", "what is $1+1$", "2")
    >>> [(o.problem.id, o.original, o.share) for o in overlaps([a], [b])]
    [('a', 'b', 1.0)]
    """
    train_problems = list(train)
    eval_problems = list(evaluation)
    train_texts = [tuple(words(problem.problem)) for problem in train_problems]
    eval_texts = [tuple(words(problem.problem)) for problem in eval_problems]
    index = _FragmentIndex(train_texts, eval_texts)

    eval_ids = {text: problem.id for text, problem in zip(eval_texts, eval_problems, strict=True)}
    train_ids: dict[Words, str] = {}
    repeats: list[Overlap] = []
    for text, problem in zip(train_texts, train_problems, strict=True):
        # The first problem with the same words, which may be the problem itself.
        first_id = eval_ids.get(text) or train_ids.setdefault(text, problem.id)
        if first_id != problem.id:
            repeats.append(Overlap(problem, first_id, 1.0))
            continue
        shares = index.similar(text)
        if shares:
            nearest = max(shares, key=lambda i: shares[i])
            repeats.append(Overlap(problem, eval_problems[nearest].id, shares[nearest]))
    return repeats


class _FragmentIndex:
    """An index of the fragments of evaluation problems, with the weights of all fragments.

    Args:
        train_texts: The words of each training problem.
        eval_texts: The words of each evaluation problem.
    """

    def __init__(self, train_texts: Sequence[Words], eval_texts: Sequence[Words]) -> None:
        self._eval_texts = eval_texts
        self._fragments = {text: fragments(text) for text in (*train_texts, *eval_texts)}
        # The number of problems with each fragment.
        self._counts: Counter[Words] = Counter()
        for text_fragments in self._fragments.values():
            self._counts.update(text_fragments)
        self._weights = {
            text: sum(map(self._weight, text_fragments)) for text, text_fragments in self._fragments.items()
        }
        # The indices of the evaluation problems with each fragment.
        self._eval_indices: defaultdict[Words, list[int]] = defaultdict(list)
        for i, text in enumerate(eval_texts):
            for fragment in self._fragments[text]:
                self._eval_indices[fragment].append(i)

    def _weight(self, fragment: Words) -> float:
        """Return the weight of a fragment: 1 if it is in one or two problems, less if in more, 0 if it is common."""
        count = self._counts[fragment]
        return 1 / max(count - 1, 1) if count <= COMMON else 0.0

    def similar(self, text: Words) -> dict[int, float]:
        """Return the evaluation problems that a text repeats, as the share of common fragments by index."""
        common_weights: defaultdict[int, float] = defaultdict(float)
        for fragment in self._fragments[text]:
            weight = self._weight(fragment)
            if weight:
                for i in self._eval_indices.get(fragment, ()):
                    common_weights[i] += weight
        shares: dict[int, float] = {}
        for i, common_weight in common_weights.items():
            eval_text = self._eval_texts[i]
            light, heavy = sorted((self._weights[text], self._weights[eval_text]))
            share = common_weight / max(light, heavy / LONGER)
            is_short = min(len(text), len(eval_text)) < SHORT
            if share >= (SHORT_SHARE if is_short else SHARE):
                shares[i] = share
        return shares
