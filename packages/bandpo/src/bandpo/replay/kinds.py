"""Kinds of tokens, such as numbers and tags, and what rules drop of the gradient on the rare winners of each kind."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch

from bandpo.audit.metrics import lost_share
from bandpo.replay.blocked_tokens import LEAST_SHARE
from bandpo.replay.by_age import is_rare_winner

if TYPE_CHECKING:
    from torch import Tensor

    from bandpo.replay.blocked_tokens import Applied
    from rlvet.records import LossBatch

FIRST = "first tokens of an answer"
SPECIAL = "special tokens"
TAG = "tags"
NUMBER = "numbers"
NAME = "names"
WORD = "words"
SIGN = "signs"
SPACE = "spaces and line breaks"
NOT_DECODED = "other tokens"
"""The kind of tokens without a tokenizer, but for the first of an answer."""
KINDS = (FIRST, SPECIAL, TAG, NUMBER, NAME, WORD, SIGN, SPACE, NOT_DECODED)

# Each repetition has a limit, so that no text takes long.
_TAG = re.compile(r"</?[A-Za-z][\w -]{0,40}/?>|\\boxed\b")
_SPECIAL = re.compile(r"<[|｜][^<>]{1,80}[|｜]>|</?s>|<(?:pad|eos|bos|unk)>|\[(?:PAD|CLS|SEP|UNK)\]")
_ENDS_OF_SENTENCES = ".!?:\n"


def kinds_of(pieces: Sequence[str], places: Sequence[int]) -> list[str]:
    r"""Return the kinds of some tokens of an answer.

    The first token of an answer is of the kind `FIRST`, whatever its text. A tag may consist of several tokens: each
    that is part of ``<answer>``, ``</think>`` or ``\boxed`` is of the kind `TAG`. A name is a capitalised word that
    does not begin a sentence. It may be another word, as nouns in German are.

    Args:
        pieces: The text of each token of the answer.
        places: The indices of the tokens whose kinds are returned.

    >>> pieces = ["So", " <", "answer", ">", "1", "2", " of", " Paris", "\n", "."]
    >>> kinds_of(pieces, range(4))
    ['first tokens of an answer', 'tags', 'tags', 'tags']
    >>> kinds_of(pieces, range(5, 10))
    ['numbers', 'words', 'names', 'spaces and line breaks', 'signs']
    """
    text = "".join(pieces)
    ends = list(accumulate(map(len, pieces)))
    tags = [match.span() for match in _TAG.finditer(text)]
    in_tags: set[int] = set()
    for start, end in tags:
        in_tags.update(range(bisect_right(ends, start), bisect_left(ends, end) + 1))
    kinds: list[str] = []
    for place in places:
        piece = pieces[place].strip()
        before = text[max(0, ends[place] - len(pieces[place]) - 1) : ends[place] - len(pieces[place])]
        if place == 0:
            kinds.append(FIRST)
        elif _SPECIAL.fullmatch(piece):
            kinds.append(SPECIAL)
        else:
            kinds.append(TAG if place in in_tags else _kind_of_text(pieces[place], before))
    return kinds


def _kind_of_text(piece: str, before: str) -> str:
    """Return the kind of a token by its text.

    Args:
        piece: The text.
        before: The character before it in the answer.
    """
    word = piece.strip()
    if not word:
        return SPACE
    has_letters = any(map(str.isalpha, word))
    if not has_letters:
        return NUMBER if any(map(str.isdecimal, word)) else SIGN
    begins_word = piece[0].isspace() or not before.isalpha()
    begins_sentence = before in _ENDS_OF_SENTENCES or "\n" in piece
    is_capitalised = len(word) > 1 and word[0].isupper() and word[1:].islower()
    return NAME if is_capitalised and begins_word and not begins_sentence else WORD


class KindRow(NamedTuple):
    """The rare winners of one kind."""

    kind: str
    """One of `KINDS`."""
    tokens: int
    """Their number; a token counts once for each update that uses it."""
    share: float
    """The share that they have of the gradient on all rare winners."""
    dropped: Mapping[str, float]
    """The share of their gradient that each rule drops, the run's first."""
    of_dropped: Mapping[str, float]
    """The share that they have of what each rule drops of all rare winners; 0 if it drops nothing."""
    dropped_tokens: Mapping[str, int]
    """The number of those of whose gradient each rule drops a share that is not below `LEAST_SHARE`."""


class KindSums:
    """The gradient of the rare winners of each kind, and the part of it that each rule drops.

    Args:
        decode: A function that decodes token ids; None if there is no tokenizer.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str] | None):
        self._decode = decode
        self._pieces: dict[int, str] = {}
        self._counts = torch.zeros(len(KINDS), dtype=torch.int64)
        self._sums: dict[str, Tensor] = {}
        """By rule the gradient's size, that of its dropped part, and the tokens with such a part, (3, kinds)."""

    def add(self, batch: LossBatch, applied: Mapping[str, Applied]) -> None:
        """Add one loss.

        Args:
            batch: The loss, with ids.
            applied: What each rule does to its tokens.
        """
        first = next(iter(applied.values()))
        rare = is_rare_winner(first.tokens)
        rows, columns = rare.nonzero(as_tuple=True)
        if not len(rows):
            return
        kinds = self._kinds(batch, rows.tolist(), columns.tolist())
        self._counts += torch.bincount(kinds, minlength=len(KINDS))
        for name, (_, kept, size) in applied.items():
            sizes = size.expand_as(rare)[rows, columns].double()
            lost = lost_share(kept).expand_as(rare)[rows, columns].double()
            sums = torch.stack(
                [
                    torch.bincount(kinds, sizes, minlength=len(KINDS)),
                    torch.bincount(kinds, sizes * lost, minlength=len(KINDS)),
                    torch.bincount(kinds, (lost >= LEAST_SHARE).double(), minlength=len(KINDS)),
                ]
            )
            self._sums[name] = self._sums[name] + sums if name in self._sums else sums

    def _kinds(self, batch: LossBatch, rows: Sequence[int], columns: Sequence[int]) -> Tensor:
        """Return the index in `KINDS` of each of some tokens, which are ordered by rows."""
        assert batch.token is not None
        places: dict[int, list[int]] = {}
        for row, column in zip(rows, columns, strict=True):
            places.setdefault(row, []).append(column)
        kinds: list[int] = []
        for row, columns_of_row in places.items():
            counted = batch.mask[row]
            # The index of each column among the counted tokens.
            index = counted.cumsum() - 1
            wanted = [int(index[column]) for column in columns_of_row]
            if self._decode is None:
                names = [NOT_DECODED if place else FIRST for place in wanted]
            else:
                names = kinds_of([self._piece(token) for token in batch.token[row][counted].tolist()], wanted)
            kinds += map(KINDS.index, names)
        return torch.tensor(kinds)

    def _piece(self, token: int) -> str:
        """Return the text of a token."""
        if token not in self._pieces:
            assert self._decode is not None
            self._pieces[token] = self._decode([token])
        return self._pieces[token]

    def rows(self) -> list[KindRow]:
        """Return the kinds that have tokens, those with the largest gradient first."""
        result: list[KindRow] = []
        for index, kind in enumerate(KINDS):
            count = int(self._counts[index])
            if not count:
                continue
            dropped: dict[str, float] = {}
            of_dropped: dict[str, float] = {}
            dropped_tokens: dict[str, int] = {}
            for name, (sizes, lost, tokens) in self._sums.items():
                dropped[name] = _share(lost[index], sizes[index])
                of_dropped[name] = _share(lost[index], lost.sum())
                dropped_tokens[name] = int(tokens[index])
            sizes = next(iter(self._sums.values()))[0]
            share = _share(sizes[index], sizes.sum())
            result.append(KindRow(kind, count, share, dropped, of_dropped, dropped_tokens))
        return sorted(result, key=lambda row: -row.share)


def _share(part: Tensor, whole: Tensor) -> float:
    """Return a quotient; 0 if the whole is 0."""
    return float(part / whole) if float(whole) > 0 else 0.0
