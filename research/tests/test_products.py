"""The products that a small pretrained model is trained on."""

import re

import pytest

pytest.importorskip("datasets")
from studies.products import dataset, reward


def test_answers_are_right_and_the_splits_apart():
    asked = {}
    for split in ("train", "eval"):
        rows = dataset(split, 300)
        assert dataset(split, 5)[:] == {name: column[:5] for name, column in rows[:].items()}
        for row in rows:
            lines = row["prompt"].split("\n")
            for example in lines[:2]:
                a, b, c = map(int, re.findall(r"\d+", example))
                assert a * b == c
            a, b = re.findall(r"\d+", lines[2])
            assert int(a) * int(b) == int(row["answer"])
            assert lines[2] == f"{a} * {b} ="
            asked.setdefault(split, set()).add((a, b))
    assert not asked["train"] & asked["eval"]


def test_only_the_first_line_counts():
    assert reward([" 84", " 84\n85", "\n84", " 85\n84", " 084", ""], ["84"] * 6) == [1, 1, 1, 0, 0, 0]
