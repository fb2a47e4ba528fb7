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
def one_grader(grader, monkeypatch):
    """For whatever asks for a grader of its own."""
    for owner in ("grading", "golds"):
        monkeypatch.setattr(f"bandpo_lab.evals.{owner}.shared_grader", lambda pid: grader)
