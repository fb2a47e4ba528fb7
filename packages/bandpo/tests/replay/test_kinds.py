"""The kinds of tokens, and what rules drop of the gradient on the rare winners of each kind."""

import pytest
import torch

pytest.importorskip("rlvet")

from bandpo.audit import Recorder
from bandpo.replay.kinds import (
    FIRST,
    KINDS,
    NAME,
    NOT_DECODED,
    NUMBER,
    SIGN,
    SPACE,
    SPECIAL,
    TAG,
    WORD,
    KindRow,
    kinds_of,
)
from bandpo.replay.opening import kind_lines
from bandpo.replay.record import RUN
from bandpo.replay.record_audit import Words
from bandpo.replay.tables import kinds_table
from rlvet import open_run
from rlvet.runs.effect import Effect

pytest.importorskip("pyarrow")


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["<think>", "a"], [FIRST, WORD]),
        (["x", "<", "answer", ">", "42", "</", "answer", ">"], [FIRST, TAG, TAG, TAG, NUMBER, TAG, TAG, TAG]),
        (["x", " \\", "boxed", "{", "7", "}"], [FIRST, TAG, TAG, SIGN, NUMBER, SIGN]),
        (["x", "<|im_end|>"], [FIRST, SPECIAL]),
        (["x", "</s>"], [FIRST, SPECIAL]),
        (["x", "<｜end▁of▁sentence｜>"], [FIRST, SPECIAL]),
        (["x", "[PAD]"], [FIRST, SPECIAL]),
        (["1", "1", " 12", "3.5", "½", "٣"], [FIRST, NUMBER, NUMBER, NUMBER, SIGN, NUMBER]),
        (["x", " Paris", " is", ".", " The", " USA"], [FIRST, NAME, WORD, SIGN, WORD, WORD]),
        (["x", "\nHere", ",", " Ann"], [FIRST, WORD, SIGN, NAME]),
        (["x", "Mc", "Donald"], [FIRST, WORD, WORD]),
        (["x", " ", "\n\n", ""], [FIRST, SPACE, SPACE, SPACE]),
        (["x", " a", " <", " b", ">"], [FIRST, WORD, SIGN, WORD, SIGN]),
        (["x", " 3", "<", "4"], [FIRST, NUMBER, SIGN, NUMBER]),
        (["x", "中文", "é", "\ufffd"], [FIRST, WORD, WORD, SIGN]),
        (["x", "\x1b[31m", "\u202e"], [FIRST, WORD, SIGN]),
    ],
)
def test_the_kind_of_each_token_of_an_answer(pieces, expected):
    places = range(len(pieces))
    assert kinds_of(pieces, places) == expected
    for place in places:
        assert kinds_of(pieces, [place]) == [expected[place]]


def test_long_texts_take_no_longer_than_their_length():
    """A tag has a limit, so an opening bracket does not search to the end of the answer."""
    pieces = ["x", *["<a" * 2000] * 50]
    assert set(kinds_of(pieces, range(1, 51))) == {WORD}


def write(folder, ids, p, ratio, advantages, method="FixedClip(0.2)"):
    with Recorder(folder, method=method) as recorder:
        logp_old = torch.tensor(p).log()
        logp = logp_old + torch.tensor(ratio).log()
        mask = torch.tensor(ids) >= 0
        recorder.add(
            logp=logp,
            logp_old=logp_old,
            advantages=torch.tensor(advantages),
            tokens=torch.tensor(ids),
            mask=mask,
            step=1,
        )
    return folder


TEXTS = ("Yes", " 12", "<", "tag", ">", " Ann")


def rows_of(folder, decode, rules):
    words = Words(None, rules, decode)
    open_run(folder).scan([words])
    return {row.kind: row for row in words.kinds}


def test_what_rules_drop_of_each_kind(tmp_path):
    """The gradient of a token is r·A. Losers and common tokens do not count, and neither does padding at the left."""
    folder = write(
        tmp_path,
        ids=[[-1, 0, 1, 2, 3, 4], [0, 1, 1, 5, 5, -1]],
        p=[[0.05, 0.05, 0.05, 0.05, 0.05, 0.5], [0.05, 0.05, 0.01, 0.05, 0.2, 0.5]],
        ratio=[[1.0, 2.0, 1.1, 1.25, 1.0, 1.9], [1.0, 1.0, 5.0, 1.0, 1.9, 1.0]],
        advantages=[2.0, 1.0],
    )

    def texts(ids):
        return "".join(TEXTS[k] for k in ids)

    rows = rows_of(folder, texts, {"Clip-Higher": "FixedClip(0.2, 0.28)", "no clip": "Unclipped()"})
    sizes = {FIRST: [4.0, 1.0], NUMBER: [2.2, 1.0, 5.0], TAG: [2.5, 2.0], NAME: [1.0]}
    by_run = {FIRST: 4.0, NUMBER: 5.0, TAG: 2.5, NAME: 0.0}
    by_higher = {FIRST: 4.0, NUMBER: 5.0, TAG: 0.0, NAME: 0.0}
    total = sum(map(sum, sizes.values()))
    assert rows.keys() == sizes.keys()
    for kind, values in sizes.items():
        row = rows[kind]
        assert (row.tokens, row.share) == (len(values), pytest.approx(sum(values) / total, rel=1e-4))
        assert row.dropped == {
            RUN: pytest.approx(by_run[kind] / sum(values), rel=1e-4),
            "Clip-Higher": pytest.approx(by_higher[kind] / sum(values), rel=1e-4),
            "no clip": 0,
        }
        assert row.of_dropped[RUN] == pytest.approx(by_run[kind] / 11.5, rel=1e-4)
        assert row.of_dropped["no clip"] == 0
        counts = {FIRST: 1, NUMBER: 1, TAG: 1, NAME: 0}
        assert row.dropped_tokens == {
            RUN: counts[kind],
            "Clip-Higher": counts[kind] if kind != TAG else 0,
            "no clip": 0,
        }
    assert sum(row.share for row in rows.values()) == pytest.approx(1)


def test_without_a_tokenizer_only_the_first_token_of_an_answer_is_known(tmp_path):
    folder = write(tmp_path, [[0, 1, 5]], [[0.05, 0.05, 0.05]], [[1.0, 2.0, 1.0]], [1.0])
    rows = rows_of(folder, None, {})
    assert {kind: row.tokens for kind, row in rows.items()} == {FIRST: 1, NOT_DECODED: 2}
    assert set(rows) <= set(KINDS)


def row(kind, tokens, dropped_tokens):
    share = dropped_tokens / 40
    return KindRow(kind, tokens, tokens / 40, {RUN: share}, {RUN: share}, {RUN: dropped_tokens})


@pytest.mark.parametrize(
    ("dropped", "sentence"),
    [
        ((1, 0), "the run dropped gradient of 1 rare winner: numbers 1"),
        ((2, 3), "the run dropped gradient of 5 rare winners: words 3, numbers 2"),
        ((15, 14), "the run dropped gradient of 29 rare winners: numbers 15, words 14"),
        (
            (16, 14),
            "of the rare winners' gradient that the run dropped, 40 % was on numbers, 35 % was on words",
        ),
    ],
)
def test_of_few_dropped_tokens_their_numbers_are_said(dropped, sentence):
    rows = [row(NUMBER, 20, dropped[0]), row(WORD, 20, dropped[1])]
    assert kind_lines(rows, Effect(40, {RUN: 0.5})) == [sentence]


@pytest.mark.parametrize(
    ("tokens", "cells"),
    [
        ((20, 5), [["numbers (20)", "–", "3 of 20"], ["words (5)", "–", "1 of 5"]]),
        ((20, 40), [["numbers (20)", "50%", "3 of 20"], ["words (40)", "100%", "2%"]]),
    ],
)
def test_the_table_has_numbers_of_few_tokens(tokens, cells):
    table = kinds_table([row(NUMBER, tokens[0], 3), row(WORD, tokens[1], 1)])
    assert [list(line) for line in zip(*(column.cells for column in table.columns), strict=True)] == cells


def test_losses_without_rare_winners_have_no_kinds(tmp_path):
    assert rows_of(write(tmp_path, [[0, 1]], [[0.5, 0.05]], [[1.0, 2.0]], [-1.0]), None, {}) == {}
