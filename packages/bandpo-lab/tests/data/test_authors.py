"""The authors' prompts and rewards."""

import json

import pyarrow.parquet
import pytest

from helpers.frameworks import needs

pytest.importorskip("math_verify")

from bandpo_lab.data.authors import STYLES, compute_score
from bandpo_lab.data.prepare import prepare_data
from bandpo_lab.data.sources import HUB

pytestmark = pytest.mark.usefixtures("one_grader")


def test_their_prompt_and_data_source(tmp_path):
    for name in ("dapo-math-17k", "amc23"):
        row = {"problem": f"What is 1 + {len(name)}?", "answer": str(1 + len(name))}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
    out = tmp_path / "out"
    manifest = prepare_data([str(path) for path in sorted(tmp_path.glob("*.jsonl"))], out, authors=True)
    assert manifest["amc23"]["prompt"]["template"] == STYLES["amc23"].template

    def row(name):
        return pyarrow.parquet.read_table(out / "verl" / f"{name}.parquet").to_pylist()[0]

    (message,) = row("dapo-math-17k")["prompt"]
    assert message["content"] == (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        "$Answer (without quotes) where $Answer is the answer to the problem.\n\nWhat is 1 + 13?\n\n"
        'Remember to put your answer on its own line after "Answer:".'
    )
    assert row("dapo-math-17k")["data_source"] == "math_dapo"
    assert row("amc23")["data_source"] == "lighteval/MATH"
    assert "\n\n What is 1 + 5? \n\n" in row("amc23")["prompt"][0]["content"]


def test_tests_of_programs_are_not_taken_for_numbers(tmp_path):
    tests = json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]})
    (tmp_path / "apps-train.jsonl").write_text(json.dumps({"question": "Add one.", "input_output": tests}))
    prepare_data([str(tmp_path / "apps-train.jsonl")], tmp_path / "out", authors=True)
    (row,) = pyarrow.parquet.read_table(tmp_path / "out/verl/apps-train.parquet").to_pylist()
    assert (row["data_source"], row["ability"]) == ("apps", "code")
    assert json.loads(row["reward_model"]["ground_truth"]) == json.loads(tests)


def test_a_set_that_they_do_not_have_is_refused_before_it_is_loaded(tmp_path):
    with pytest.raises(ValueError, match=r"no prompt for minerva, only for dapo-math-17k, "):
        prepare_data(["amc23", "minerva"], tmp_path, authors=True)
    assert STYLES.keys() <= HUB.keys()
    with pytest.raises(ValueError, match=r"no reward for the data source 'gsm8k'.*--authors"):
        compute_score("gsm8k", "Answer: 1", "1")


@pytest.mark.parametrize(
    ("source", "text", "gold", "score"),
    [
        ("math_dapo", "So\nAnswer: 34", "34", 1.0),
        ("math_dapo", "Answer: 33\nAnswer: 34", "34", 1.0),
        ("math_dapo", "Answer: 33", "34", -1.0),
        ("math_dapo", r"So \boxed{34}.", "34", -1.0),  # verl 0.9.1's own would give 1
        ("math_dapo", "Answer: 34" + 300 * ".", "34", -1.0),
        ("aime_2024", "Answer: $34$", "34", 1.0),
        ("lighteval/MATH", r"So \boxed{34}.", "34", 1.0),
        ("lighteval/MATH", "Answer: 34", "34", 0.0),
    ],
)
def test_mathematics_is_graded_as_theirs(source, text, gold, score):
    needs("verl")
    found = compute_score(source, text, gold, {})
    assert found["score"] == score
    assert found["acc"] == max(score, 0.0)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Answer: C", 1.0),
        ("the answer is (c).", 1.0),
        ("Answer: A\nAnswer: C", -1.0),  # the first counts
        ("It is\n C ", 1.0),
        ("Answer: none", -1.0),
        ("", -1.0),
    ],
)
def test_a_choice_is_graded_by_its_letter(text, score):
    assert compute_score("commonsense_qa", text, "C")["score"] == score
