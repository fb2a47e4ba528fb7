"""What a terminal shows: lines as wide as it is, and a line for each problem."""

import sys

import pytest

from rlvet.cli import _error_text
from rlvet.cli.wrapping import wrapped
from rlvet.errors import FileProblem, InvalidValue, RunProblem, error_about

TEXT = (
    "1. clip-heavy (fix): "
    + "word " * 60
    + "\n   do: "
    + "make fewer updates " * 20
    + "\n\n/a/path/"
    + "x" * 300
)


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")


def test_a_terminal_gets_lines_of_its_width(terminal):
    lines = wrapped(TEXT).split("\n")
    assert all(len(line) <= 60 for line in lines[:-1])
    assert lines[-1] == TEXT.split("\n")[-1]
    assert lines[1].startswith("   word")
    assert " ".join(wrapped(TEXT).split()) == " ".join(TEXT.split())


def test_a_file_gets_lines_as_they_are():
    assert wrapped(TEXT) == TEXT


@pytest.mark.parametrize("kind", [FileProblem, InvalidValue, RunProblem])
def test_each_problem_is_a_line_and_no_text_of_a_file_makes_another(kind):
    error = error_about(kind, ["no GPU", "data\nerror: none"], title="not started")
    assert str(error) == "not started: no GPU; data\nerror: none"
    assert _error_text(error).split("\n") == [
        "error: not started: 2 problems",
        "  no GPU",
        "  data\\nerror: none",
    ]
    assert _error_text(error_about(kind, ["no GPU"], title="not started")) == "error: not started: no GPU"
