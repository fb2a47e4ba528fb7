"""A fixed set of answers in unusual forms and of imitations, each with a person's verdict.

pairs.jsonl has nine sets. "building" and "held out" are halves of the first one, drawn by a digest: the rules were
written with the first half alone. "second" to "eighth" were written later, each before it was first graded.
research/reports/evaluation.md has the scores of each set, the first ones and those of today.
"""

import hashlib
import json
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("math_verify")

PAIRS = [
    json.loads(line)
    for line in Path(__file__).with_name("pairs.jsonl").read_text(encoding="utf-8").splitlines()
]


def test_the_halves_of_the_first_set_are_drawn_by_a_digest():
    """Which half a pair is in depends on nothing but its text."""
    halves = [pair for pair in PAIRS if pair["set"] in ("building", "held out")]
    for pair in halves:
        answer = pair["completion"]
        if pair["kind"] != "prose" and answer.startswith(r"\boxed{") and answer.endswith("}"):
            answer = answer[len(r"\boxed{") : -1]
        digest = hashlib.sha256(f"{pair['gold']}\n{answer}".encode()).digest()
        assert pair["set"] == ("held out" if digest[0] % 2 else "building"), pair
    assert len(halves) >= 300


def test_at_least_95_per_cent_of_the_right_answers_are_listed_as_graded_right():
    right = Counter(pair["set"] for pair in PAIRS if pair["is_right"])
    misjudged = Counter(pair["set"] for pair in PAIRS if pair.get("is_misjudged"))
    assert not [pair for pair in PAIRS if pair.get("is_misjudged") and not pair["is_right"]]
    assert sum(misjudged.values()) <= 0.05 * sum(right.values())
    assert misjudged["building"] == misjudged["held out"] == 0


def grades_that_differ(grader, pairs):
    """Return the pairs that are not graded as the file says."""
    return [
        pair
        for pair in pairs
        if (grader.grade(pair["completion"], pair["gold"]).score == 1.0)
        != (pair["is_right"] != pair.get("is_misjudged", False))
    ]


def test_a_part_of_the_pairs_is_graded_as_listed(grader):
    assert grades_that_differ(grader, PAIRS[::20]) == []


@pytest.mark.slow
def test_every_pair_is_graded_as_listed(grader):
    assert grades_that_differ(grader, PAIRS) == []
