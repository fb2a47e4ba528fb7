"""What the lab's tests share."""

import pytest

TIME_LIMIT = 1.5


@pytest.fixture(scope="session")
def grader():
    """The processes that grade: each takes a second to start."""
    pytest.importorskip("math_verify")
    from bandpo_lab.evals.grading import MathGrader

    with MathGrader(time_limit=TIME_LIMIT, workers=1) as grader:
        yield grader


@pytest.fixture
def quick_limits(grader, monkeypatch):
    """A grader in which one answer of a batch may meet each limit of time; returns the limits that it is asked for."""
    from bandpo_lab.evals import grading

    limits = []
    ask = grading.MathGrader._ask
    monkeypatch.setattr(
        grading.MathGrader,
        "_ask",
        lambda self, *question: limits.append(question[-1]) or ask(self, *question),
    )
    monkeypatch.setattr(grading, "shared_grader", lambda pid: grader)
    for name, value in {
        "CORES": 1,
        "SLOW_ANSWERS": 1,
        "SLOW_ANSWERS_AT_SHORT_LIMIT": 1,
        "SHORT_LIMIT": 0.5,
    }.items():
        monkeypatch.setattr(grading, name, value)
    return limits


@pytest.fixture
def one_grader(grader, monkeypatch):
    """For whatever asks for a grader of its own."""
    for owner in ("grading", "golds"):
        monkeypatch.setattr(f"bandpo_lab.evals.{owner}.shared_grader", lambda pid: grader)
