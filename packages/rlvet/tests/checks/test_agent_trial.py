"""The trial of the text for agents: its runs are those of the draw, and its answers, grades and table agree."""

import json
import random
import re
from collections import Counter

import pytest

from pages import ROOT

FOLDER = ROOT / "benchmarks/doctor/agent_trial"
TRIAL = json.loads((FOLDER / "runs.json").read_text())
RUNS = {name: run["log"] for name, run in TRIAL["runs"].items()}
PAGE = (FOLDER / "README.md").read_text()
KEYS = {entry["log"]: entry for entry in json.loads((FOLDER.parent / "logs_by_others.json").read_text())}
QUESTIONS = ("cause", "since", "next")
GRADES = ("right", "half", "wrong")
READERS = sorted(file.stem.partition("-")[2] for file in FOLDER.glob("answers-*.md"))


def problems_of_answers(answers, commands):
    """Return what is missing in the texts of ``answers-N.md`` and ``commands-N.txt``."""
    problems = []
    if re.findall(r"^## (\w+)$", answers, re.M) != [*RUNS]:
        problems.append("the answers are not those of the ten runs, in order")
    for run in RUNS:
        section = answers.partition(f"## {run}\n")[2].partition("\n## ")[0]
        if re.findall(r"^(\d)\. \S", section, re.M) != ["1", "2", "3"]:
            problems.append(f"{run} has not three answers")
        if run not in commands:
            problems.append(f"no command was run on {run}")
    return problems


def problems_of_grades(answers, grades):
    """Return what is missing in ``grades-N.json``, or does not agree with the answers."""
    problems = []
    if [*grades] != [*RUNS]:
        problems.append("the grades are not those of the ten runs, in order")
    for run, of_run in grades.items():
        if [*of_run] != ["first", *QUESTIONS]:
            problems.append(f"{run} has not the first cause and a grade for each question")
            continue
        cause = answers.partition(f"## {run}\n")[2].partition("\n2. ")[0]
        codes = re.findall(r"`([a-z-]+)`", cause)
        if of_run["first"] != "ok" and of_run["first"] not in codes[:1]:
            problems.append(f"{run}: the answer does not name {of_run['first']} first")
        for question in QUESTIONS:
            grade = of_run[question]
            if grade["grade"] not in GRADES or not grade["why"]:
                problems.append(f"{run}, {question}: a grade with a reason is missing")
    return problems


def cells_of(grades):
    """Return the cells of the table for the grades of a reader."""
    named = sum(of_run["first"] in KEYS[RUNS[run]]["right"] for run, of_run in grades.items())
    cells = [f"{named} of {len(RUNS)}"]
    for question in QUESTIONS:
        counts = Counter(of_run[question]["grade"] for of_run in grades.values())
        cells.append(", ".join(f"{counts[grade]} {grade}" for grade in GRADES))
    return cells


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
    assert [*RUNS.values()] == drawn
    assert [*RUNS] == [f"run{number:02}" for number in range(1, 11)]


def test_each_run_has_a_key_and_was_not_in_the_other_trial():
    assert all(KEYS[log]["reading"] and KEYS[log]["right"] for log in RUNS.values())
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
    assert problems_of_answers(answers, commands) == []
    assert problems_of_grades(answers, grades) == []
    assert rows_of_table()[reader] == cells_of(grades)


def test_the_page_has_the_figures_of_the_table():
    text = " ".join((ROOT / "research/reports/rlvet/how-right.md").read_text().split())
    said = re.search(
        r"named the cause first in (\d+ of \d+)\. .* (\d+) answers are right and (\d+) half\.", text
    )
    named, cause, *_ = rows_of_table()["1"]
    assert (named, cause) == (said[1], f"{said[2]} right, {said[3]} half, 0 wrong")


# --- The functions above find what does not agree ---

ANSWERS = "\n".join(
    f"## {run}\n\n1. `{KEYS[log]['right'][0]}`\n2. step 1\n3. go on\n" for run, log in RUNS.items()
)
COMMANDS = "\n".join(f"bin/rlvet diagnose {run} --json  -> 1" for run in RUNS)


@pytest.fixture
def grades():
    """Return the grades of `ANSWERS`, which are all right."""
    right = {"grade": "right", "why": "as the key says"}
    return {
        run: {"first": KEYS[log]["right"][0]} | {q: dict(right) for q in QUESTIONS}
        for run, log in RUNS.items()
    }


def test_an_example_that_agrees(grades):
    assert problems_of_answers(ANSWERS, COMMANDS) == []
    assert problems_of_grades(ANSWERS, grades) == []
    assert cells_of(grades) == ["10 of 10", *["10 right, 0 half, 0 wrong"] * 3]


@pytest.mark.parametrize(
    ("answers", "commands", "problem"),
    [
        (ANSWERS.replace("## run03", "## run3"), COMMANDS, "run03 has not three answers"),
        (ANSWERS.replace("3. go on", "", 1), COMMANDS, "run01 has not three answers"),
        (ANSWERS, COMMANDS.replace("run10", ""), "no command was run on run10"),
    ],
)
def test_a_missing_answer_is_found(answers, commands, problem):
    assert problem in problems_of_answers(answers, commands)


def test_a_missing_or_wrong_grade_is_found(grades):
    grades["run01"]["since"]["why"] = ""
    del grades["run02"]["next"]
    grades["run03"]["first"] = "nan"
    del grades["run10"]
    problems = problems_of_grades(ANSWERS, grades)
    assert problems == [
        "the grades are not those of the ten runs, in order",
        "run01, since: a grade with a reason is missing",
        "run02 has not the first cause and a grade for each question",
        "run03: the answer does not name nan first",
    ]


def test_the_table_counts_each_grade(grades):
    grades["run03"]["first"] = "nan"
    grades["run04"]["next"]["grade"] = "half"
    grades["run05"]["next"]["grade"] = "wrong"
    assert cells_of(grades) == ["9 of 10", *["10 right, 0 half, 0 wrong"] * 2, "8 right, 1 half, 1 wrong"]
