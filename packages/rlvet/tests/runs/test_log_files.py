"""Every kind of file that a person may have, and what is said of it."""

import gzip
import itertools
import json
import os
import random
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlvet import diagnose
from rlvet.cli.app import app
from rlvet.runs.consoles.trl import trl_trainings
from rlvet.runs.consoles.verl import verl_rows
from rlvet.runs.logs import UnreadableLog, read_log
from rlvet.runs.unread import Unread

LOGS = Path(os.environ.get("BANDPO_TEST_DATA", "missing")) / "logs"
"""Logs of runs by other people, which are no part of the repository."""


def trl_rows(text, unread=None):
    """Return the rows of all trainings in a console."""
    return list(itertools.chain.from_iterable(trl_trainings(text, unread)))


def metrics(step, **changed):
    return {"step": step, "reward": 0.1 * step, "entropy": 1.0, "grad_norm": 0.3} | changed


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


ROWS = [metrics(step) for step in range(1, 13)]
TABLE = "step,reward,entropy,note\n" + "".join(f"{row['step']},{row['reward']},1.0,x\n" for row in ROWS)
EXPORT = '"Step","a - train/reward","a - train/reward__MIN","a - train/entropy"\n' + "".join(
    f'"{row["step"]}","{row["reward"]}","0","1.0"\n' for row in ROWS
)
TRL = "Loading: 100% 4/4 [00:01]\n" + "".join(
    f"  1%| | {row['step']}/40 [00:05<1:00, 5s/it]{{'loss': '0.1', 'reward': {row['reward']}, 'entropy': 1.0}}\n"
    for row in ROWS
)
VERL = "".join(
    f"(TaskRunner pid=3) step:{row['step']} - actor/entropy:1.000 - actor/lr:0.000 - "
    f"critic/score/mean:np.float64({row['reward']}) - critic/score/max:1.000\n"
    for row in ROWS
)
COLUMNS = json.dumps(
    {"step": [row["step"] for row in ROWS], "reward": [row["reward"] for row in ROWS], "seed": 3}
)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics.jsonl", lines(ROWS)),
        ("verl.jsonl", lines({"step": row["step"], "data": row} for row in ROWS)),
        ("state.json", json.dumps({"epoch": 1, "log_history": ROWS})),
        ("rows.json", json.dumps(ROWS)),
        ("history.json", json.dumps({"name": "x", "history": ROWS})),
        ("columns.json", COLUMNS),
        ("lines.json", lines(ROWS)),
        ("lines.log", lines(ROWS)),
        ("table.csv", TABLE),
        ("table.tsv", TABLE.replace(",", "\t")),
        ("table.txt", TABLE),
        ("export.csv", EXPORT),
        ("train.log", TRL),
        ("console.out", VERL),
    ],
)
def test_a_file_is_read(name, content, tmp_path):
    (tmp_path / name).write_text(content)
    for path in (tmp_path / name, tmp_path):
        rows = read_log(path).rows
        assert [row["step"] for row in rows] == list(range(1, 13))
        assert [row["reward"] for row in rows] == pytest.approx([row["reward"] for row in ROWS])
        assert name in read_log(path).source


def test_a_packed_file_is_read(tmp_path):
    with gzip.open(tmp_path / "metrics.jsonl.gz", "wt") as file:
        file.write(lines(ROWS))
    assert len(read_log(tmp_path / "metrics.jsonl.gz").rows) == 12


@pytest.mark.parametrize("lost", [("reward",), ("reward", "grad_norm"), ("grad_norm",)])
def test_null_in_a_row_of_verls_file_logger_is_no_number(lost, tmp_path):
    """It writes NaN and infinite values so; in another file null is a metric that was not measured."""
    rows = ROWS[:6] + [row | dict.fromkeys(lost) for row in ROWS[6:]]
    (tmp_path / "verl.jsonl").write_text(lines({"step": row["step"], "data": row} for row in rows))
    among = ", the reward among them" if "reward" in lost else ""
    headline = f"nan: 6 of 12 log steps hold NaN or infinite values, first step 7{among}"
    assert diagnose(tmp_path / "verl.jsonl").headline == headline
    (tmp_path / "own.jsonl").write_text(lines(rows))
    assert "nan" not in [finding.code for finding in diagnose(tmp_path / "own.jsonl").findings]


def test_rows_without_a_step_are_counted(tmp_path):
    (tmp_path / "log.csv").write_text("reward,entropy\n0.1,1\n0.2,1\n")
    assert [row["step"] for row in read_log(tmp_path).rows] == [1, 2]


def test_what_verl_rounds_away_is_not_0():
    (row,) = verl_rows(
        "step:1 - actor/lr:0.000 - actor/grad_norm:0.000 - actor/kl_loss:0.000 - critic/lr(1e-4):0.010"
    )
    assert row == {
        "step": 1,
        "actor/lr": "0.000 (rounded)",
        "actor/grad_norm": "0.000 (rounded)",
        "actor/kl_loss": 0.0,
        "critic/lr": pytest.approx(1e-6),
    }


def test_a_trainer_s_rows_among_other_output():
    text = "{'a': 1}\n{'prompt': 'x', 'score': [1]}\n{'loss': 0.5, 'reward': nan}\r 50%| 240/960 ["
    text += "{'reward': 1.0, 'kl': inf}"
    assert [row["step"] for row in trl_rows(text)] == [1, 2]
    assert trl_rows(text)[0] == {"loss": 0.5, "reward": "NaN", "step": 1}


PASTED = {
    "the end is missing": ("{'loss': 0.5, 'reward': 0.25, 'reward_std': 0.5, 'kl': 0.01, 'epoch': 0.3", 0.01),
    "the start is missing": ("'loss': 0.5, 'reward': 0.25, 'reward_std': 0.5, 'kl': 0.01}", 0.01),
    "a number is broken off": (
        "{'loss': 0.5, 'reward': 0.25, 'reward_std': 0.5, 'epoch': 0.3, 'kl': 1.234",
        None,
    ),
    "JSON without its end": ('{"loss": 0.5, "reward": 0.25, "reward_std": 0.5, "kl": 0.01, "epoch": 0', 0.01),
}


@pytest.mark.parametrize(("line", "kl"), PASTED.values(), ids=PASTED)
def test_a_part_of_a_row_is_read_up_to_where_it_is_whole(line, kl):
    (row,) = trl_rows(f"the log of my run:\n{line}\nWhy is the loss 0?")
    assert (row["reward"], row.get("kl")) == (0.25, kl)


@pytest.mark.parametrize(
    "line",
    [
        "config = {'loss': 'grpo', 'reward': 'accuracy'",
        "{'reward': 0.5, 'kl': 0.1",
        "'model': 'a', 'lr': 1, 'steps': 2, 'batch': 3, 'seed': 4",
    ],
)
def test_parts_of_other_dictionaries_are_no_rows(line):
    assert trl_rows(line) == []


def wrapped(text: str, width: int) -> str:
    """Return a text as a terminal of a width shows it, without spaces at the ends of lines."""
    lines: list[str] = []
    for line in text.split("\n"):
        lines += [line[start : start + width].rstrip() for start in range(0, len(line), width)]
    return "\n".join(lines)


@pytest.mark.parametrize("width", [40, 47, 80, 200])
@pytest.mark.parametrize("end", ["", "\r"])
def test_rows_that_a_terminal_has_wrapped_are_read(width, end):
    rows = [{"loss": 0.125, "reward": number / 8, "kl": 0.015625, "epoch": 0.5} for number in range(9)]
    text = wrapped("\n".join(map(str, rows)), width).replace("\n", f"{end}\n")
    assert trl_rows(f"the log of my run:\n{text}\nthe end") == [
        {**row, "step": step} for step, row in enumerate(rows, 1)
    ]


def test_lines_of_other_widths_are_not_joined():
    text = "{'loss': 0.125, 'epoch': 0.5, 'step_time': 1.5, 'reward': 0.\n25, 'reward_std': 0.1, 'kl'\n: 0.1}"
    assert trl_rows(text) == []


def test_a_row_that_is_cut_off_is_counted_and_keeps_its_number():
    rows = [f"{{'loss': 0.125, 'reward': 0.{number}, 'kl': 0.01}}" for number in range(1, 5)]
    rows[1] = rows[1][:25]
    unread = Unread()
    assert [row["step"] for row in trl_rows("\n".join(rows), unread)] == [1, 3, 4]
    assert unread.notes()[1:] == (
        """1 dictionary is not read, as it is cut off: "{'loss': 0.125, 'reward':\"""",
    )


def test_a_row_that_is_read_in_part_is_told():
    rows = [
        f"{{'loss': 0.125, 'reward': 0.{number}, 'kl': 0.01, 'entropy': 0.5, 'step_time': 1.5}}"
        for number in range(1, 5)
    ]
    rows[3] = rows[3][:-8]
    unread = Unread()
    assert trl_rows("\n".join(rows), unread)[3] == {
        "loss": 0.125,
        "reward": 0.4,
        "kl": 0.01,
        "entropy": 0.5,
        "step": 4,
    }
    assert "1 row is cut off; its complete values are read" in unread.notes()


def row_and_bars(before: str, after: str) -> str:
    """Return a row between two progress bars."""
    bars = [f"\r  1%|  | {bar} [1:00<2:00, 1.5s/it]" if bar else "" for bar in (before, after)]
    return f"{bars[0]}\n{{'reward': 0.5, 'kl': 0.1, 'reward_std': 0.1}}\n{bars[1]}"


BARS = {
    "before and after": ([("20/90", "20/90"), ("40/90", "40/90"), ("60/90", "60/90")], [20, 40, 60]),
    "before": ([("20/90", ""), ("40/90", ""), ("60/90", "")], [20, 40, 60]),
    "after": ([("", "20/90"), ("", "40/90"), ("", "60/90")], [20, 40, 60]),
    "shown late": ([("19/90", "20/90"), ("39/90", "40/90"), ("59/90", "60/90")], [20, 40, 60]),
    "first one of 0": ([("0/90", "1/90"), ("", "2/90"), ("", "3/90")], [1, 2, 3]),
    "of the next step": ([("20/90", "21/90"), ("40/90", "41/90"), ("60/90", "61/90")], [20, 40, 60]),
    "of several rows": ([("40/90", ""), ("", ""), ("60/90", "")], [20, 40, 60]),
    "of several rows, at the end": ([("20/90", ""), ("70/90", ""), ("", "")], [20, 40, 60]),
    "of a buffer": (
        [(f"{bar}/1000", f"{bar + 1}/1000") for bar in [26] * 5 + [52] * 5 + [78] * 5],
        [*range(5, 76, 5)],
    ),
    "of a buffer, late": (
        [(f"{bar}/1000", "") for bar in [855] * 5 + [880] * 5 + [903] * 5],
        [*range(830, 901, 5)],
    ),
    "of a buffer, the last one lost": (
        [(f"{bar}/1000", "") for bar in [26] * 5 + [52] * 5 + [63]],
        [*range(5, 56, 5)],
    ),
    "of other things": ([("400/400", ""), ("", ""), ("", "")], [1, 2, 3]),
    "without a distance": ([("50/90", ""), ("", ""), ("60/90", "")], [1, 2, 3]),
    "none": ([("", ""), ("", ""), ("", "")], [1, 2, 3]),
}


@pytest.mark.parametrize(("bars", "steps"), BARS.values(), ids=BARS)
def test_rows_have_the_steps_of_the_progress_bar(bars, steps):
    text = "".join(itertools.starmap(row_and_bars, bars))
    assert [row["step"] for row in trl_rows(text)] == steps


def test_dictionaries_without_a_metric_of_training_take_no_step():
    text = (
        "{'easy': 1.0, 'middle': 0.5, 'hard': 0.25}\n{'reward': 0.5, 'kl': 0.1}\n{'easy': 1, 'middle': 2, 'hard': 3}\n"
        "{'eval_reward': 0.5, 'eval_runtime': 1.5, 'epoch': 0.1}\n{'reward': 0.5, 'kl': 0.1}\n"
        "{'train_runtime': 1.5, 'train_loss': 0.1, 'epoch': 0.2}"
    )
    assert [row.get("step") for row in trl_rows(text)] == [1, 1, 1, 2, 2]


def test_a_summary_with_metrics_has_the_last_step_of_the_bar():
    text = "".join(row_and_bars(f"{step}/90", "") for step in (40, 80))
    text += "\r100%|  | 90/90 [1:00<2:00, 1.5s/it]\n{'train_runtime': 1.5, 'train_loss': 0.1, 'reward': 0.5}"
    assert [row["step"] for row in trl_rows(text)] == [40, 80, 90]


def training(first_reward: float, rows: int, every: int = 1, *, is_finished: bool = True) -> str:
    """Return what a trainer prints."""
    lines = []
    for number in range(1, rows + 1):
        lines.append(f"  1%|  | {number * every}/90 [1:00<2:00, 1.5s/it]")
        row = {
            "loss": 0.1,
            "num_tokens": 100.0 * number,
            "reward": first_reward + number,
            "kl": 0.1,
            "epoch": 0.01,
        }
        lines.append(str(row))
    if is_finished:
        lines.append(str({"train_runtime": 1.5, "train_loss": 0.1, "epoch": 0.01}))
    return "\n".join(lines) + "\n"


def test_trainings_that_follow_each_other_are_several_runs(tmp_path):
    file = tmp_path / "train.log"
    file.write_text(training(0, 12) + "the same again\n" + training(100, 12, every=5))
    with pytest.raises(UnreadableLog, match=r"2 runs.*'1' \(steps 1 to 12\), '2' \(steps 5 to 60\)"):
        read_log(file)
    assert [row["reward"] for row in read_log(file, run_name="2").rows] == list(range(101, 113))


def test_a_training_that_was_restarted_is_told_from_the_one_before(tmp_path):
    file = tmp_path / "train.log"
    file.write_text(training(0, 5, is_finished=False) + training(100, 12))
    assert [row["reward"] for row in read_log(file).rows] == list(range(101, 113))


def test_a_training_that_goes_on_after_its_summary_is_one(tmp_path):
    file = tmp_path / "train.log"
    first, second = training(0, 12), training(0, 24, is_finished=False)
    file.write_text(first + second.partition("  1%|  | 13/90")[2])
    assert len(read_log(file).rows) == 24


def test_a_row_that_names_its_step_has_it():
    text = """{"loss": 0.0, "reward": 0.5, "kl": 0.0, "global_step/max_steps": "7/100"}"""
    assert "step" not in trl_rows(text)[0]
    assert trl_rows(text)[0]["global_step/max_steps"] == 7


@pytest.mark.parametrize(
    ("name", "content", "code", "message"),
    [
        (
            "plot.png",
            b"\x89PNG\r\n\x1a\n\0\0",
            None,
            r"plot\.png is thought to be an image \(PNG\), and no log of a run; give",
        ),
        ("a.safetensors", b"\x10\0\0\0\0\0\0\0{}", None, "is thought to be a binary file, and no log"),
        (
            "notes.md",
            b"# Notes\nIt went well.\n",
            None,
            r"is thought to be a file \.md: no row of metrics is in it",
        ),
        ("page.html", b"<!DOCTYPE html><p>", None, "is thought to be a page of HTML"),
        (
            "train.sh",
            b"python train.py --lr 1e-6\n",
            None,
            "or a script is checked by rlvet lint, and is no run; give",
        ),
        (
            "train.yaml",
            b"learning_rate: 1e-6\n",
            None,
            "or a script is checked by rlvet lint, and is no run; give",
        ),
        ("config.json", b'{"learning_rate": 1e-6}', None, "holds no list of rows either"),
        ("empty.csv", b"step,reward\n", None, "is a table without rows"),
        (
            "own.csv",
            b"step,iteration_reward\n1,2\n",
            "no-quantity",
            r"but iteration_reward; say .* --map reward=KEY",
        ),
        (
            "sft.csv",
            b"step,loss,mean_token_accuracy\n1,2,3\n",
            "not-rl",
            "thought to be of supervised training",
        ),
        (
            "dpo.csv",
            b"step,loss,rewards/chosen\n1,2,3\n",
            "not-rl",
            "thought to be of preference training, such as DPO",
        ),
        # The keys of TRL's RewardTrainer.
        (
            "reward_model.csv",
            b"step,loss,accuracy,min_reward,mean_reward,max_reward,margin\n1,2,3,4,5,6,7\n",
            "not-rl",
            "thought to be of a reward model",
        ),
        (
            "own_accuracy.csv",
            b"step,loss,accuracy,episode_reward\n1,2,3,4\n",
            "no-quantity",
            r"but loss, accuracy, episode_reward; say .* --map reward=KEY",
        ),
    ],
)
def test_what_is_no_log_of_rl_is_said_to_be_what_it_is(name, content, code, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as raised:
        read_log(tmp_path / name)
    assert getattr(raised.value, "code", None) == code
    result = CliRunner().invoke(app, ["diagnose", str(tmp_path / name)])
    assert isinstance(result.exception, ValueError)


def test_a_loop_of_one_s_own_with_an_accuracy_is_of_rl(tmp_path):
    rows = [{"iteration": step, "accuracy": 0.8, "mean_reward": 0.1 * step} for step in range(1, 13)]
    (tmp_path / "metrics.jsonl").write_text(lines(rows))
    assert read_log(tmp_path).rows[-1]["reward"] == pytest.approx(1.2)


def test_runs_in_one_object_are_listed_and_named(tmp_path):
    """A summary of several runs, each with the rows of its curve."""
    curve = [{"step": step, "reward": 0.1 * step} for step in range(1, 13)]
    runs = {"a": {"task": "x", "curve": curve}, "b": {"task": "y", "curve": curve[:11]}}
    file = tmp_path / "collected.json"
    file.write_text(json.dumps(runs))
    with pytest.raises(
        UnreadableLog, match=r"2 runs, .*'a' \(steps 1 to 12\), 'b' \(steps 1 to 11\)"
    ) as raised:
        read_log(file)
    assert raised.value.code == "several-runs"
    assert len(read_log(file, run_name="b").rows) == 11
    file.write_text(json.dumps({"run": {"curve": curve}}))
    assert len(read_log(file).rows) == 12


def test_several_runs_are_listed_and_named(tmp_path):
    """Two runs in one file, with and without names, and two logs in one folder."""
    second = [metrics(step, reward=0.5) for step in range(1, 21)]
    (tmp_path / "both.jsonl").write_text(lines([*ROWS, *second]))
    with pytest.raises(
        UnreadableLog, match=r"2 runs, .* --run-name: '1' \(steps 1 to 12\), '2' \(steps 1 to 20\)"
    ):
        read_log(tmp_path / "both.jsonl")
    assert len(read_log(tmp_path / "both.jsonl", run_name="2").rows) == 20
    with pytest.raises(UnreadableLog, match="holds no run '3'; it holds '1'"):
        read_log(tmp_path / "both.jsonl", run_name="3")

    named = [row | {"run_name": "a"} for row in ROWS] + [row | {"run_name": "b"} for row in second]
    (tmp_path / "named.jsonl").write_text(lines(named))
    assert len(read_log(tmp_path / "named.jsonl", run_name="b").rows) == 20

    (tmp_path / "runs").mkdir()
    for name in ("x.csv", "y.csv"):
        (tmp_path / "runs" / name).write_text(TABLE)
    with pytest.raises(UnreadableLog, match=r"'x\.csv' \(steps 1 to 12\), 'y\.csv'") as raised:
        read_log(tmp_path / "runs")
    assert raised.value.code == "several-runs"
    assert len(read_log(tmp_path / "runs", run_name="y.csv").rows) == 12


def test_a_run_that_was_resumed_is_one(tmp_path):
    """Steps 9 to 12 were logged, lost with the weights, and logged again."""
    again = [metrics(step, reward=7.0) for step in range(9, 16)]
    (tmp_path / "metrics.jsonl").write_text(lines([*ROWS, *again]))
    log = read_log(tmp_path)
    assert [row["step"] for row in log.rows] == list(range(1, 16))
    assert log.rows[8]["reward"] == 7.0
    assert log.notes == (
        "steps 9 to 12 were logged again after a restart: the later rows replace the earlier",
    )
    assert log.notes[0] in str(diagnose(tmp_path))


def test_a_short_first_attempt_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(lines([*ROWS[:3], *ROWS]))
    assert len(read_log(tmp_path).rows) == 12


def test_rows_of_one_step_are_put_together(tmp_path):
    rows = [
        {"step": 1, "reward": 0.2},
        {"step": 1, "reward": 0.4},
        {"step": 1, "entropy": 1.0},
        {"step": 2, "reward": 1.0},
    ]
    (tmp_path / "metrics.jsonl").write_text(lines(rows))
    first, second = read_log(tmp_path).rows
    assert (first["reward"], first["entropy"], second["reward"]) == (pytest.approx(0.3), 1.0, 1.0)


def test_a_stray_file_does_not_hide_a_log(tmp_path):
    (tmp_path / "samples.jsonl").write_text(lines([{"prompt": "a", "answer": "b", "score": 1.0}]))
    (tmp_path / "train.log").write_text(TRL)
    assert read_log(tmp_path).source == "console output, train.log"


def test_names_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"step": step, "iteration_reward": 0.1 * step, "H": 1.0} for step in range(1, 41)]
    Path("log.jsonl").write_text(lines(rows), encoding="utf-8")
    result = CliRunner().invoke(
        app, ["diagnose", "log.jsonl", "--map", "reward=iteration_reward", "--map", "entropy=H"]
    )
    assert result.exit_code == 0, result.output
    assert "read 2 of 2 logged keys in 40 log steps, from step 1 to 40" in result.output
    Path("bandpo-names.json").write_text('{"reward": "iteration_reward"}', encoding="utf-8")
    log = read_log("log.jsonl")
    assert (log.read["reward"], log.unread) == (("iteration_reward",), ("H",))
    # They also tell which file of a folder is the log.
    assert read_log(".").read["reward"] == ("iteration_reward",)
    Path("bandpo-names.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(ValueError, match=r"bandpo-names\.json must be an object such as"):
        read_log("log.jsonl")
    with pytest.raises(ValueError, match=r"--map takes QUANTITY=KEY, such as .*, got 'reward'"):
        CliRunner().invoke(app, ["diagnose", "log.jsonl", "--map", "reward"], catch_exceptions=False)


def test_over_what_was_not_read_nothing_is_called_ok(tmp_path):
    rows = [{"step": step, "entropy": 1.0} | {f"my/{k}": 1.0 for k in range(20)} for step in range(1, 40)]
    (tmp_path / "metrics.jsonl").write_text(lines(rows))
    diagnosis = diagnose(tmp_path)
    assert (
        diagnosis.headline
        == "no verdict: no key of the log is known to be the reward; name it by --map reward=KEY"
    )
    assert "read 1 of 21 logged keys in 39 log steps, from step 1 to 39" in str(diagnosis)
    assert "not read: my/0, my/1," in str(diagnosis)
    assert diagnosis.as_json()["log"]["unread"][0] == "my/0"
    assert CliRunner().invoke(app, ["diagnose", str(tmp_path)]).exit_code == 2


@pytest.mark.slow
def test_many_rows_take_little_more_than_their_parsing(tmp_path):
    """They take 2.9 times what the standard library takes to parse them, and up to 3.2 times beside other work."""
    draw = random.Random(1)
    file = tmp_path / "metrics.jsonl"
    keys = [f"other/{k}" for k in range(25)] + ["reward", "entropy", "kl", "grad_norm"]
    with file.open("w") as opened:
        for step in range(30_000):
            opened.write(json.dumps({"step": step} | {key: draw.random() for key in keys}) + "\n")
    ratios = []
    for _ in range(4):  # the smallest counts: other programs share the caches of the machine
        start = time.process_time()
        with file.open("rb") as opened:
            rows = [json.loads(line) for line in opened]
        parsed = time.process_time()
        del rows
        diagnose(tmp_path)
        ratios.append((time.process_time() - parsed) / (parsed - start))
    assert min(ratios) < 3.5, ratios


@pytest.mark.skipif(not LOGS.exists(), reason="BANDPO_TEST_DATA has no logs")
@pytest.mark.parametrize(
    ("log", "headline"),
    [
        ("chaos", "truncated: 99.6% of answers are cut off"),
        ("rith", "collapse: reward 0.5 → -5, from the best tenth of the run to the last"),
        (
            "wordle-tb/1767733342",
            "step-too-large: KL to the reference went 0 → 1.28 in the first 3 log steps",
        ),
        ("wordle-tb/1767730664", "truncated: 78% of answers are cut off at the cap of 16 tokens in the last"),
        ("finqa/train.log", "no-signal: 58% of groups teach nothing"),
        ("logic-rl/verl-console.log", "no verdict: 1 log step with a reward is too few"),
    ],
)
def test_logs_of_other_people(log, headline):
    assert diagnose(LOGS / log).headline.startswith(headline)


@pytest.mark.skipif(not LOGS.exists(), reason="BANDPO_TEST_DATA has no logs")
def test_six_runs_of_other_people_are_not_read_as_one():
    with pytest.raises(UnreadableLog, match="holds 6 runs, which are not read as one"):
        read_log(LOGS / "wordle-tb")


def test_settings_that_an_engine_prints_do_not_hide_the_rows(tmp_path):
    """They are a dictionary of numbers without a step, as rows of a trainer are."""
    settings = "INFO engine: config={'a': {'fusion': True, 'padding': False, 'level': 3, 'size': 8}}\n"
    rows = [f"[Step {step}/50] loss=0.1 clip=0.0 | reward=0.{step:02}" for step in range(1, 51)]
    (tmp_path / "train.log").write_text(settings + "\n".join(rows))
    log = read_log(tmp_path / "train.log")
    assert (len(log.rows), log.rows[-1]["reward"]) == (50, 0.5)


def test_a_key_with_the_name_of_another_quantity_is_told_and_mapped(tmp_path):
    """TRL's asynchronous trainer logs the divergence to the old policy as `kl`."""
    file = tmp_path / "metrics.jsonl"
    row = {"reward": 0.5, "kl": 0.6, "ratio": 1.0, "entropy": 0.4, "grad_norm": 0.3, "learning_rate": 1e-6}
    file.write_text("".join(json.dumps(row | {"step": step}) + "\n" for step in range(1, 31)))
    log = read_log(file)
    assert log.read["kl_old"] == ("kl",)
    (note,) = [note for note in log.notes if note.startswith("the key kl is read as kl_old")]
    assert note.endswith("and not as kl; if it is that: --map kl=kl")
    mapped = read_log(file, {"kl": "kl"})
    assert mapped.read["kl"] == ("kl",)
    assert "kl_old" not in mapped.read
    assert not any(note.startswith("the key kl") for note in mapped.notes)
