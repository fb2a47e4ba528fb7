"""Sums: the splits, the prompts, and their grading by the grader of all tasks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bandpo_lab.tasks.sums import Sum, problems


def unordered(rows):
    return {(min(row.a, row.b), max(row.a, row.b)) for row in rows}


@given(st.integers(0, 70), st.integers(), st.integers())
def test_no_seed_mixes_the_splits(n, seed, other):
    train = problems("train", n, seed)
    held_out = problems("eval", n, other)
    assert not unordered(train) & unordered(held_out)
    assert len(unordered(train)) == n == len(unordered(held_out))
    assert problems("train", n, seed) == train


def test_the_splits_are_all_pairs_once():
    both = problems("train", 3276) + problems("eval", 819)
    assert unordered(both) == {(a, b) for a in range(10, 100) for b in range(a, 100)}


@pytest.mark.parametrize(
    ("split", "n", "message"), [("test", 1, "train, eval"), ("eval", 820, "0 to 819"), ("train", -1, "n=-1")]
)
def test_a_split_that_is_not_there_is_refused(split, n, message):
    with pytest.raises(ValueError, match=message):
        problems(split, n)


def test_a_prepared_set_is_graded_by_its_last_number(tmp_path):
    pytest.importorskip("math_verify", reason="needs the extra bandpo-lab[eval]")
    import pyarrow.parquet as pq

    from bandpo_lab.data.prepare import prepare_data
    from bandpo_lab.evals.grading import compute_score

    prepare_data(["sums", "sums-train"], tmp_path, size=3)
    [row, *_] = pq.read_table(tmp_path / "verl/sums-train.parquet").to_pylist()
    problem = Sum(
        *map(int, row["prompt"][0]["content"].removesuffix("? Answer with the number alone.").split()[2::2])
    )
    assert row["prompt"] == [{"role": "user", "content": problem.prompt}]
    gold = row["reward_model"]["ground_truth"]
    assert gold == str(problem.a + problem.b)
    answers = {
        gold: 1.0,
        f"It is {gold}.": 1.0,
        f"{problem.a} + {problem.b} =": 0.0,
        "": 0.0,
        str(int(gold) + 1): 0.0,
    }
    for text, score in answers.items():
        assert compute_score(row["data_source"], text, gold, row["extra_info"])["score"] == score, text
