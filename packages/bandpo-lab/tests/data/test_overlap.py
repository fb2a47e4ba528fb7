import re

import pytest

from bandpo_lab.data.overlap import overlaps, words
from bandpo_lab.data.sources import Problem, load

LONG = "Find the number of pairs of positive integers a and b whose product is 2024 and whose sum is even."


def found(train, evaluation=()):
    train = [Problem(f"t{i}", text, "1") for i, text in enumerate(train)]
    evaluation = [Problem(f"e{i}", text, "1") for i, text in enumerate(evaluation)]
    return [(o.problem.id, o.original) for o in overlaps(train, evaluation)]


OTHER = "Find the number of pairs of positive integers x and y such that 3x + 5y = 100 and x < y holds."


@pytest.mark.parametrize(
    ("train", "evaluation", "repeats"),
    [
        (["  what is $1 + 1$ ?"], ["What is \\left(1+1\\right)?"], [("t0", "e0")]),  # whatever the layout
        ([LONG.replace("whose sum", "where the sum")], [LONG], [("t0", "e0")]),  # one changed word
        (["Solve this. " + LONG + " Answer as a whole number."], [LONG], [("t0", "e0")]),  # added text
        (["Problem: What is 2 + 2?"], ["What is 2 + 2?"], [("t0", "e0")]),  # a short one
        ([re.sub(r"((?:\S+ ){5})\S+", r"\1other", LONG)], [LONG], [("t0", "e0")]),  # one word in six
        ([OTHER], [LONG], []),  # common phrases are not enough
        (["What is 2 + 2?"], ["What is 1 + 1?"], []),
        ([LONG, "Another.", LONG.upper()], [], [("t2", "t0")]),  # inside the training set
    ],
)
def test_repeated_problems_are_found(train, evaluation, repeats):
    assert found(train, evaluation) == repeats


def test_a_common_wrapper_is_no_evidence(real_data):
    """Of sixty training problems in the wrapper of the evaluation set, only the one that stands there is dropped."""
    wrapper = "You are a careful mathematician. Reason step by step about what follows, and box the answer at the end: "
    train, evaluation = (
        [wrapper + problem.problem for problem in load(str(real_data / f"{name}.jsonl")).problems[:60]]
        for name in ("gsm8k_train", "amc23")
    )
    assert found([*train, evaluation[3]], evaluation) == [("t60", "e3")]


def test_words_keep_letters_of_all_scripts_and_numbers():
    assert words("求 x² 的值 $x=10$") == ["求", "x", "^", "2", "的值", "x", "=", "10"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Solve $x^2+5x+6=0$.", "Solve $x^2-5x-6=0$."),
        ("Simplify $a+b$.", "Simplify $a-b$."),
        ("Simplify $a/b$.", "Simplify $a \\cdot b$."),
        ("Solve $x<3$.", "Solve $x>3$."),
        ("Solve $x \\le 3$.", "Solve $x \\ge 3$."),
        ("Find $5!$.", "Find $5$."),
        ("Find $2^3$.", "Find $23$."),
        ("Find $1.5$.", "Find $15$."),
        ("Find $|x|$ for $x=2$.", "Find $x$ for $x=2$."),
    ],
)
def test_problems_that_differ_in_a_sign_are_different(one, other):
    assert found([one, other]) == []
    assert found([one], [other]) == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Find $x^2-1$.", "find x² − 1"),
        ("Find $2 \\cdot 3$.", "Find $2 \\times 3$."),
        ("Solve $x \\leq 3$.", "Solve $x\\le3$."),
        ("A four-digit number", "A four digit number"),
    ],
)
def test_spellings_of_one_problem_are_the_same(one, other):
    assert found([one, other]) == [("t1", "t0")]
