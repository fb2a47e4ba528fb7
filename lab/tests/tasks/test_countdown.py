from itertools import permutations, product

import pytest

from bandpo_lab.tasks import countdown
from bandpo_lab.tasks.countdown import Countdown, problems

PROBLEM = Countdown((3, 4, 25), 79)


RIGHT = ["25*3+4", " 4 + (25 * 3) ", r"25 \times 3 + 4", r"25 \cdot 3 + 4 = 79", "25*3+4=79"]
WRONG = ["79", "25*3+4+0", "25+3+4", "25*3", "3**4-2", "-(-25)*3+4", "25.0*3+4", "25*3+True*4", "(" * 99, ""]
WRONG += ["25/0", "9" * 999, "25*3+4-4+4", "x", "f(3)", "25 if 3 else 4", "25//3+4", "25*3+4;1"]


def test_expressions_of_just_these_numbers_that_give_the_target_are_right():
    assert [expression for expression in RIGHT if not PROBLEM.solved_by(expression)] == []
    assert [expression for expression in WRONG if PROBLEM.solved_by(expression)] == []
    assert Countdown((1, 3, 5, 15), 8).solved_by("15 / 3 + 5 - 1 * 1") is False
    assert Countdown((1, 3, 8), 24).solved_by("8 / (1 / 3)")  # fractions are exact


def test_problems_repeat_differ_and_have_solutions():
    rows = problems("train", 50, seed=3)
    assert rows == problems("train", 50, seed=3)
    assert len(set(rows)) == 50
    forms = ["({}{}{}){}{}".format, "{}{}({}{}{})".format]
    for row in rows:
        assert any(
            row.solved_by(form(a, first, b, second, c))
            for a, b, c in permutations(row.numbers)
            for first, second in product("+-*/", repeat=2)
            for form in forms
        )


def test_splits_share_nothing():
    train = {p for seed in range(5) for p in problems("train", 300, seed)}
    assert train.isdisjoint(problems("eval", 300, seed=9))


def test_answers_read_back():
    [problem] = problems("eval", 1)
    assert Countdown.from_answer(problem.answer) == problem
    assert str(problem.target) in problem.prompt


def test_bad_input_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="split = 'test'"):
        problems("test", 1)
    with pytest.raises(ValueError, match="n = -1"):
        problems("train", -1)
    monkeypatch.setattr(countdown, "_LARGEST", 2)
    with pytest.raises(ValueError, match="problems found: ask for fewer"):
        problems("train", 10_000)
    with pytest.raises(ValueError, match="must look like"):
        Countdown.from_answer("27")
