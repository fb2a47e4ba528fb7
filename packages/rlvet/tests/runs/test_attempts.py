"""Attempts, stages and repetitions: the rows of a file that are no run of their own."""

import json
import random

import pytest

from rlvet.runs.log_files import runs_of_attempts, split_attempts, without_first_stage
from rlvet.runs.logs import UnreadableLog, read_log
from rlvet.runs.unread import Unread


def rl_rows(count=60, seed=0, first=1):
    generator = random.Random(seed)
    return [
        {
            "step": step,
            "loss": generator.random(),
            "reward": generator.random(),
            "kl": generator.random() / 100,
            "completions/mean_length": 100 + 50 * generator.random(),
        }
        for step in range(first, first + count)
    ]


def sft_rows(count=23):
    return [
        {"step": step, "loss": 2 / step, "grad_norm": 1.0, "learning_rate": 1e-5, "mean_token_accuracy": 0.5}
        for step in range(1, count + 1)
    ]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rounded(row):
    return {key: float(f"{value:.4g}") for key, value in row.items()}


REPETITIONS = {
    "head": lambda rows: [*rows, *rows[:5]],
    "head before": lambda rows: [*rows[:12], *rows],
    "prefix": lambda rows: [*rows[:40], *rows],
    "every tenth": lambda rows: [*rows, *rows[::10]],
    "all": lambda rows: [*rows, *rows],
    "rounded": lambda rows: [*rows, *map(rounded, rows[:20])],
    "some columns": lambda rows: [
        *rows,
        *({"step": row["step"], "reward": row["reward"]} for row in rows[:15]),
    ],
    "thrice": lambda rows: [*rows[:20], *rows[:40], *rows],
}


@pytest.mark.parametrize("kind", REPETITIONS)
def test_what_is_printed_twice_is_one_run(kind, tmp_path):
    rows = rl_rows()
    printed = REPETITIONS[kind](rows)
    log = read_log(write(tmp_path / "log.jsonl", printed))
    assert [row["step"] for row in log.rows] == list(range(1, 61))
    assert [row["reward"] for row in log.rows] == pytest.approx([row["reward"] for row in rows], rel=5e-3)
    assert len(log.rows) + log.unread_rows == len(printed)
    assert "printed a second time" in " ".join(log.notes)


def test_another_run_is_not_taken_for_a_repetition(tmp_path):
    """Two runs of other seeds, also if the second has only begun, or differs in one row."""
    rows = rl_rows()
    other = rl_rows(seed=1)
    with pytest.raises(UnreadableLog, match="2 runs"):
        read_log(write(tmp_path / "a.jsonl", [*rows, *other]))
    changed = [dict(row) for row in rows[:20]]
    changed[7]["reward"] += 0.1
    with pytest.raises(UnreadableLog, match="2 runs"):
        read_log(write(tmp_path / "b.jsonl", [*rows, *changed]))


def test_a_stage_of_supervised_training_is_no_run(tmp_path):
    rows = rl_rows()
    after = read_log(write(tmp_path / "a.jsonl", [*sft_rows(), *rows]))
    before = read_log(write(tmp_path / "b.jsonl", [*rows, *sft_rows()]))
    shifted = rl_rows(first=24)
    going_on = read_log(write(tmp_path / "c.jsonl", [*sft_rows(), *shifted]))
    for log in (after, before, going_on):
        assert len(log.rows) == 60
        assert log.unread_rows == 23
        assert "supervised training" in " ".join(log.notes)
        assert not log.unjudged
    assert read_log(tmp_path / "c.jsonl").rows[0]["step"] == 24


def test_rows_without_a_reward_may_be_of_rl():
    """A reward in every tenth row, one that is null at first, and KL alone are no other training."""
    rows = rl_rows()
    sparse = [
        {"step": row["step"], "loss": row["loss"]} | (row if row["step"] % 10 == 0 else {}) for row in rows
    ]
    null = [row | {"reward": None} for row in rows[:20]] + rows[20:]
    no_reward = [{key: value for key, value in row.items() if key != "reward"} for row in rows[:20]] + rows[
        20:
    ]
    for log in (sparse, null, no_reward):
        unread = Unread()
        assert without_first_stage(log, unread) == log
        assert not unread.count
        assert runs_of_attempts([log], unread) == [log]


@pytest.mark.parametrize("counter", ["epoch", "num_tokens", "train/epoch"])
def test_steps_that_are_counted_anew_while_a_counter_goes_on_are_of_one_run(counter, tmp_path):
    rows = rl_rows()
    anew = []
    for number, row in enumerate(rows):
        anew.append(row | {"step": number % 20, counter: number // 20 if counter == "epoch" else number + 1})
    log = read_log(write(tmp_path / "log.jsonl", anew))
    assert [row["step"] for row in log.rows] == list(range(60))
    assert "counted anew 2 times" in " ".join(log.notes)


def test_steps_that_begin_anew_without_a_counter_are_several_runs():
    rows = rl_rows()
    epochs = [row | {"epoch": 0.1 * row["step"]} for row in rows]
    assert len(split_attempts([*rows, *rows], [])) == 2
    assert len(split_attempts([*epochs, *epochs], [])) == 2, "the epoch begins anew too"


def test_a_table_that_pandas_has_wrapped_has_whole_rows(tmp_path):
    pandas = pytest.importorskip("pandas")
    rows = [
        {
            "step": step,
            "reward": (-1) ** (step // 3) * step / 8,
            **{f"rewards/a_long_name_of_a_function_{n}": n + step / 4 for n in range(9)},
        }
        for step in range(1, 13)
    ]
    frame = pandas.DataFrame(rows)
    with pandas.option_context("display.width", 80, "display.max_columns", None):
        text = f"The table:\n{frame}\n\nDone.\n"
        head = f"{frame.head()}\nafter it: nothing\n"
    assert "\\\n" in text
    (tmp_path / "run.txt").write_text(text)
    log = read_log(tmp_path / "run.txt")
    assert [row["reward"] for row in log.rows] == [row["reward"] for row in rows]
    assert [row["rewards/a_long_name_of_a_function_8"] for row in log.rows] == [
        8 + step / 4 for step in range(1, 13)
    ]
    (tmp_path / "both.txt").write_text(text + head)
    both = read_log(tmp_path / "both.txt")
    assert len(both.rows) == 12
    assert both.unread_rows == 5
