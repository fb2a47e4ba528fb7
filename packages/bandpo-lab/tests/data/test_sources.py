import json

import pyarrow
import pyarrow.parquet
import pytest

from bandpo_lab.errors import FileProblem

pytest.importorskip("math_verify")

from bandpo_lab.data.sets import HUB
from bandpo_lab.data.sources import load
from bandpo_lab.evals.dataset_io import read_answer


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        (27.0, "27"),
        ("27.0", "27"),
        (2.5, "2.5"),
        (-1.0, "-1"),
        (3, "3"),
        ("1,234", "1234"),
        ("1,234,567", "1234567"),
        ("1,2", "1,2"),
        ("$\\frac{1}{2}$", "\\frac{1}{2}"),
        ("$a$ and $b$", "$a$ and $b$"),
        ("2 + 2 = <<2+2=4>>4\n#### 4", "4"),
        ("First \\boxed{1}, then \\boxed{\\frac{2}{3}}.", "\\frac{2}{3}"),
        (["2", "3"], "2, 3"),
        (["$\\pi$"], "\\pi"),
        ({"style": "rule", "ground_truth": "34"}, "34"),
        ("\\boxed{1", ""),
        (None, ""),
        ("  ", ""),
        (4.5e33, "45" + 32 * "0"),
        (2e-05, "0.00002"),
        (["2", None], "2"),
    ],
)
def test_answers_of_every_schema(value, answer):
    assert read_answer(value) == answer


# One row as each set's own card shows it.
SCHEMAS = {
    "dapo-math-17k": {"prompt": "1+1?", "solution": "2", "data_source": "math_dapo", "ability": "MATH"},
    "math-3-5": {"problem": "1+1?", "level": "Level 4", "type": "Algebra", "solution": "It is $\\boxed{2}$."},
    "math-12k-3-5": {"problem": "1+1?", "solution": "…", "answer": "2", "subject": "Algebra", "level": 4},
    "gsm8k-train": {"question": "1+1?", "answer": "<<1+1=2>>2\n#### 2"},
    "gsm8k": {"question": "1+1?", "answer": "<<1+1=2>>2\n#### 2"},
    "amc23": {"id": 0, "question": "1+1?", "answer": 2.0, "url": "…"},
    "aime24": {"id": 60, "problem": "1+1?", "solution": "We add.", "answer": "2", "url": "…", "year": "2024"},
    "aime25": {"problem": "1+1?", "answer": "2", "id": "0"},
    "math500": {"problem": "1+1?", "solution": "$\\boxed{2}$", "answer": "2", "subject": "…", "level": 2},
    "minerva": {"question": "1+1?", "answer": "2"},
    "olympiadbench": {"id": 1, "question": "1+1?", "solution": ["We add."], "final_answer": ["2"]},
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_set_is_read_from_a_file_in_its_own_schema(tmp_path, name):
    assert set(SCHEMAS) == {name for name, hub in HUB.items() if hub.ability == "math"}
    path = tmp_path / f"{name}.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([SCHEMAS[name]]), path)
    problems = load(str(path))
    (problem,) = problems.problems
    assert (problem.id, problem.problem, problem.answer) == (f"{name}-0", "1+1?", "2")
    assert problems.role == HUB[name].role
    assert problems.origin["revision"].startswith("sha256:")
    assert problems.data_source == name.removesuffix("-train")


@pytest.mark.parametrize(("name", "labels"), [("commonsenseqa-train", "ABCDE"), ("arc-challenge", "1234")])
def test_a_choice_is_asked_with_its_letters(tmp_path, name, labels):
    choices = {"label": list(labels), "text": [f"thing {label}" for label in labels]}
    row = {"id": "x", "question": "Which one?", "choices": choices, "answerKey": labels[2]}
    lost = row | {"answerKey": "Z"}
    problems = load(str(write(tmp_path / f"{name}.jsonl", [row, lost])))
    (problem,) = problems.problems
    assert problem.answer == "C"
    assert f"Question: Which one?\n\nChoices:\n(A) thing {labels[0]}\n(B)" in problem.problem
    assert "'Z' is none of the choices" in next(iter(problems.unreadable.values()))
    assert (problems.role, problems.ability) == (HUB[name].role, "commonsense")


def test_a_program_is_asked_with_its_start_and_answered_by_its_tests(tmp_path):
    tests = {"inputs": ["1\n"], "outputs": ["2\n"]}
    rows = [
        {"question": "Add one.", "input_output": json.dumps(tests), "starter_code": ""},
        {"question": "Add two.", "input_output": json.dumps(tests), "starter_code": "def f(x):"},
        {"question": "No tests.", "input_output": ""},
        {"question": "Odd tests.", "input_output": json.dumps({"inputs": ["1"], "outputs": []})},
    ]
    problems = load(str(write(tmp_path / "apps-train.jsonl", rows)))
    assert [json.loads(p.answer) for p in problems.problems] == [tests, tests]
    assert problems.problems[1].problem == "Add two.\n\nStart from:\n```python\ndef f(x):\n```"
    assert problems.unreadable == {
        "apps-train-2": "0 inputs and 0 outputs are no tests",
        "apps-train-3": "1 inputs and 0 outputs are no tests",
    }


def test_the_authors_draws_are_those_of_their_libraries():
    import random

    import datasets

    shuffled = datasets.Dataset.from_dict({"row": range(9741)}).shuffle(seed=0).select(range(4096))
    assert HUB["commonsenseqa-train"].draw(9741) == shuffled["row"]
    random.seed(0)
    indices = list(range(5000))
    random.shuffle(indices)
    assert HUB["apps-val"].draw(5000) == indices[:1024]


def test_the_hubs_repository_revision_and_licence_are_used(monkeypatch):
    import datasets
    import huggingface_hub

    asked = []

    class Api:
        def dataset_info(self, repo, revision=None):
            asked.append((repo, revision))
            card = huggingface_hub.DatasetCardData(license="cc-by-4.0")
            return type("Info", (), {"sha": "abc123", "card_data": card})()

    def load_dataset(repo, config, split, revision):
        asked.append((repo, config, split, revision))
        return datasets.Dataset.from_list([SCHEMAS["gsm8k"]])

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    problems = load("gsm8k", revision="v1")
    assert asked == [("openai/gsm8k", "v1"), ("openai/gsm8k", "main", "test", "abc123")]
    assert problems.licence == "cc-by-4.0"
    assert problems.origin["revision"] == "abc123"
    asked.clear()
    load("gsm8k")
    assert asked[0] == ("openai/gsm8k", HUB["gsm8k"].revision)


def test_a_hub_out_of_reach_is_said_with_the_way_out(monkeypatch):
    import huggingface_hub

    class Api:
        def dataset_info(self, repo, revision=None):
            raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    with pytest.raises(ConnectionError, match=r"no route to host.*aime24=FILE.jsonl"):
        load("aime24")


def test_levels_are_chosen(tmp_path):
    rows = [SCHEMAS["math-3-5"] | {"level": f"Level {i}"} for i in range(1, 6)]
    problems = load(str(write(tmp_path / "math-3-5.jsonl", rows)))
    assert [p.id for p in problems.problems] == ["math-3-5-2", "math-3-5-3", "math-3-5-4"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"problem": "a", "answer": None}, "answer is null"),
        ({"problem": None, "answer": "1"}, "problem is null"),
        ({"problem": 5, "answer": "1"}, "problem: 5 is neither text nor messages of text"),
        ({"problem": [1, 2], "answer": "1"}, "problem: [1, 2] is neither text"),
        ({"problem": [{"role": "user"}], "answer": "1"}, "is neither text nor messages"),
        ({"problem": [{"role": "user", "content": [{"type": "image"}]}], "answer": "1"}, "is neither text"),
        ({"problem": "a", "answer": True}, "answer: True is no answer"),
        ({"problem": "a", "answer": []}, "answer is []"),
        ({"problem": "a"}, "the row has the columns problem, and needs one of answer"),
    ],
)
def test_a_bad_row_is_dropped_with_its_reason_and_the_others_stay(tmp_path, row, reason):
    path = write(tmp_path / "x.jsonl", [row, {"problem": "b", "answer": "2"}])
    problems = load(str(path))
    assert [p.id for p in problems.problems] == ["x-1"]
    assert reason in problems.unreadable["x-0"]
    with pytest.raises(ValueError, match="x: no row with a problem and an answer; row 0: ") as error:
        load(str(write(path, [row])))
    assert reason in str(error.value)


def test_an_empty_answer_does_not_hide_a_solution(tmp_path):
    for empty in (None, "", [], {"ground_truth": None}):
        row = {"problem": "a", "answer": empty, "solution": "So it is \\boxed{2}."}
        assert load(str(write(tmp_path / "x.jsonl", [row]))).problems[0].answer == "2"


@pytest.mark.parametrize(
    ("name", "asked", "role"),
    [
        ("train", None, "train"),
        ("train-00000-of-00001", None, "train"),
        ("training-wheels", None, "eval"),
        ("my", "train", "train"),
        ("my-train", "eval", "eval"),
        ("gsm8k", "eval", "eval"),
        ("a=b", None, "eval"),
    ],
)
def test_the_role_is_an_option_and_else_in_the_name(tmp_path, name, asked, role):
    path = write(tmp_path / f"{name}.jsonl", [{"problem": "1+1?", "answer": 2}])
    problems = load(str(path), role=asked)
    assert (problems.role, problems.name) == (role, name)
    renamed = load(f"mine-train={path}")
    assert (renamed.role, renamed.name) == ("train", "mine-train")


def test_a_role_that_is_not_the_sets_own_is_refused(tmp_path):
    path = write(tmp_path / "gsm8k.jsonl", [SCHEMAS["gsm8k"]])
    for spec in (str(path), "gsm8k", "multiplication"):
        with pytest.raises(
            ValueError, match="has the role eval, not train: to use a file of it in that role, give"
        ):
            load(spec, role="train")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"problem": "a", "answer": "1"}\nnot json\n', "line 2: not a JSON object"),
        ("", "no row with a problem and an answer"),
        ('{"problem": "\\ud800", "answer": "1"}\n', "line 1: not a JSON object, .*hex escape in column 20"),
        ('{"problem": "a", "answer": NaN}\n', "line 1: not a JSON object"),
        ('{"text": "a"}\n', "the columns text, and needs one of problem"),
    ],
)
def test_malformed_files_are_refused(tmp_path, content, message):
    path = tmp_path / "x.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        load(str(path))


def test_unknown_names_and_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"'aime' is neither.*aime24"):
        load("aime")
    path = tmp_path / "x.parquet"
    path.write_bytes(b"PAR1 no more")
    with pytest.raises(ValueError, match=r"x\.parquet cannot be read as parquet"):
        load(str(path))
    with pytest.raises(FileProblem, match=r"no\.jsonl does not exist"):
        load(str(tmp_path / "no.jsonl"))
