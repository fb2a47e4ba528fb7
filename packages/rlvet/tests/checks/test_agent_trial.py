"""The trial of the text for agents: its runs are those of the draw, and its answers, grades and table agree."""

import json
import random
import re
from collections import Counter

import pytest

from pages import ROOT

FOLDER = ROOT / "benchmarks/doctor/agent_trial"
TRIAL = json.loads((FOLDER / "runs.json").read_text())
PAGE = (FOLDER / "README.md").read_text()
QUESTIONS = ("cause", "since", "next")
GRADES = ("right", "half", "wrong")
READERS = sorted(file.stem.partition("-")[2] for file in FOLDER.glob("answers-*.md"))


def problems(answers, commands, grades, table_row):
    """Return what is wrong with the files of a reader.

    Args:
        answers: The text of ``answers-N.md``.
        commands: The text of ``commands-N.txt``.
        grades: The content of ``grades-N.json``.
        table_row: The cells of the reader's row of the table; None if there is none.
    """
    found = []
    if re.findall(r"^## (\w+)$", answers, re.M) != [*TRIAL["runs"]]:
        found.append("the answers are not those of the ten runs, in order")
    for run in TRIAL["runs"]:
        section = answers.partition(f"## {run}\n")[2].partition("\n## ")[0]
        if re.findall(r"^(\d)\. \S", section, re.M) != ["1", "2", "3"]:
            found.append(f"{run} has not three answers")
        if run not in commands:
            found.append(f"no command was run on {run}")
    if [*grades] != [*TRIAL["runs"]]:
        found.append("the grades are not those of the ten runs, in order")
    for run, of_run in grades.items():
        if [*of_run] != [*QUESTIONS]:
            found.append(f"{run} has not a grade for each question")
        for question, grade in of_run.items():
            if grade["grade"] not in GRADES or not grade["why"]:
                found.append(f"{run}, {question}: a grade with a reason is missing")
    texts = []
    for question in QUESTIONS:
        counts = Counter(of_run[question]["grade"] for of_run in grades.values() if question in of_run)
        texts.append(", ".join(f"{counts[grade]} {grade}" for grade in GRADES))
    if table_row != texts:
        found.append(f"the row of the table is not | {' | '.join(texts)} |")
    return found


def rows_of_table():
    rows = {}
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[0].isdigit():
            rows[cells[0]] = cells[1:]
    return rows


def test_the_runs_are_those_of_the_draw():
    pool = list(TRIAL["pool"])
    random.Random(TRIAL["seed_of_draw"]).shuffle(pool)
    drawn = pool[:10]
    random.Random(TRIAL["seed_of_order"]).shuffle(drawn)
    assert [run["log"] for run in TRIAL["runs"].values()] == drawn
    assert [*TRIAL["runs"]] == [f"run{number:02}" for number in range(1, 11)]


def test_each_run_has_a_key_and_was_not_in_the_other_trial():
    keys = {
        entry["log"]: entry["reading"]
        for entry in json.loads((FOLDER.parent / "logs_by_others.json").read_text())
    }
    assert all(keys[run["log"]] for run in TRIAL["runs"].values())
    other = (FOLDER.parent / "reader_trial/README.md").read_text()
    named = re.findall(r"^\| `\d\.txt`, `([^`]+)` \|", other, re.M)
    assert len(named) == 6
    assert not [log for log in TRIAL["pool"] for name in named if log.startswith(name)]


def test_each_reader_is_in_the_table():
    assert [*rows_of_table()] == READERS


@pytest.mark.parametrize("reader", READERS)
def test_answers_grades_and_table_agree(reader):
    answers = (FOLDER / f"answers-{reader}.md").read_text()
    commands = (FOLDER / f"commands-{reader}.txt").read_text()
    grades = json.loads((FOLDER / f"grades-{reader}.json").read_text())
    assert problems(answers, commands, grades, rows_of_table()[reader]) == []


@pytest.fixture
def example():
    """Return the files of a made-up reader, in which nothing is wrong."""
    runs = [*TRIAL["runs"]]
    grades = {
        run: {question: {"grade": "right", "why": "as the key"} for question in QUESTIONS} for run in runs
    }
    return {
        "answers": "\n".join(f"## {run}\n\n1. a fault\n2. step 1\n3. go on\n" for run in runs),
        "commands": "\n".join(f"bin/rlvet diagnose {run} --json: 1" for run in runs),
        "grades": grades,
        "table_row": ["10 right, 0 half, 0 wrong"] * 3,
    }


def test_files_that_agree_have_no_problem(example):
    assert problems(**example) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda files: files["grades"]["run03"]["cause"].update(grade="half"), "the row of the table is not"),
        (
            lambda files: files["grades"]["run03"]["cause"].update(why=""),
            "run03, cause: a grade with a reason",
        ),
        (lambda files: files["grades"]["run03"].pop("cause"), "run03 has not a grade"),
        (lambda files: files["grades"].pop("run03"), "the grades are not those"),
        (
            lambda files: files.update(answers=files["answers"].replace("## run03", "## run3")),
            "run03 has not three",
        ),
        (
            lambda files: files.update(answers=files["answers"].replace("3. go on", "", 1)),
            "run01 has not three",
        ),
        (lambda files: files.update(commands=""), "no command was run on run01"),
        (lambda files: files.update(table_row=None), "the row of the table is not"),
    ],
)
def test_files_that_do_not_agree_are_found(change, problem, example):
    change(example)
    assert any(text.startswith(problem) for text in problems(**example))
