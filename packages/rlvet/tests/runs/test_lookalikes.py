"""Lines that look like rows of metrics are rows that were read, or are refused with the reason."""

import json
import random
import re

import pytest
from typer.testing import CliRunner

from helpers.table_layouts import random_layout
from rlvet import diagnose
from rlvet.cli.app import app
from rlvet.runs.consoles import CONSOLES
from rlvet.runs.logs import read_log
from rlvet.runs.lookalikes import NAME, count_lookalikes, numbers_of_row
from rlvet.runs.unread import Unread

STEPS = range(1, 61)


def printed(step, form="step={step}  loss=0.125  reward={reward:.4f}  kl={kl:.4f}"):
    """Return a line of a training whose reward rises."""
    return form.format(step=step, reward=0.2 + 0.004 * step, kl=0.0003 * step, minute=step / 7)


UNKNOWN = (
    "[{step}/60] reward = {reward:.4f}, kl = {kl:.4f}",
    "rollout {step} done | mean reward: {reward:.4f} | kl: {kl:.4f}",
    "episode: {step} (reward {reward:.4f}) (kl {kl:.4f})",
    "=> update {minute:.2f} ({step}/60): reward={reward:.4f}; grad_norm: 0.3; kl={kl:.4f}",
)
"""Forms that no reader knows."""


@pytest.mark.parametrize("width", [1, 5, 12])
def test_a_step_may_be_padded(width, tmp_path):
    file = tmp_path / "train.log"
    file.write_text("\n".join(printed(step, f"[trainer] step={{step:{width}}} {FORM}") for step in STEPS))
    log = read_log(file)
    assert [row["step"] for row in log.rows] == list(STEPS)
    assert (log.unread_rows, log.unjudged) == (0, "")


FORM = "t={minute:6.1f}s loss=0.125 reward={reward:.4f} kl={kl:.4f}"


@pytest.mark.parametrize("form", UNKNOWN)
def test_lines_of_an_unknown_form_are_counted_and_above_a_tenth_nothing_is_judged(form, tmp_path):
    file = tmp_path / "train.log"
    for unknown in (3, 20):
        lines = [printed(step, form) if step <= unknown else printed(step) for step in STEPS]
        file.write_text("\n".join(lines))
        log = read_log(file)
        assert len(log.rows) + log.unread_rows == len(STEPS)
        assert log.unread_rows == unknown
        assert any(
            note.startswith(f"{unknown} lines of metrics are not read, as no reader knows")
            for note in log.notes
        )
        assert bool(log.unjudged) == (unknown == 20)


def test_what_was_not_read_is_in_the_first_lines_and_the_exit_status_is_that_of_no_verdict(tmp_path):
    file = tmp_path / "train.log"
    collapsed = [f"step={step} loss=0.125 reward=0.0 kl=9.5" for step in range(61, 101)]
    unknown = [printed(step, UNKNOWN[0]) for step in STEPS]
    file.write_text("\n".join(unknown + collapsed))
    result = CliRunner().invoke(app, ["diagnose", str(file)])
    first, second, third, *_ = result.output.splitlines()
    assert first == "no verdict: 60 of 100 rows of metrics were not read, and from 10% on nothing is judged"
    assert second.startswith("read 2 of 3 logged keys in 40 log steps")
    assert third.startswith(
        "60 lines of metrics are not read, as no reader knows its form: '[1/60] reward = 0.2040"
    )
    assert result.exit_code == 2
    assert diagnose(file).findings == []
    markdown = CliRunner().invoke(app, ["diagnose", str(file), "--format", "markdown"]).output
    assert "60 lines of metrics are not read" in markdown


@pytest.mark.parametrize("name", CONSOLES)
def test_the_lines_of_each_console_are_in_rows(name, tmp_path):
    """The example of each console has no line that is read and counted as unread."""
    file = tmp_path / "train.log"
    example = CONSOLES[name].example
    texts = [re.sub(r"\b3\b(?![.\d])", str(step), example).replace("0.25", f"0.2{step:02}") for step in STEPS]
    file.write_text("".join(texts).replace("2.5000e-01", "2.5100e-01"))
    log = read_log(file)
    assert (len(log.rows), log.unread_rows) == (len(STEPS), 0), log.notes


@pytest.mark.parametrize("name", CONSOLES)
@pytest.mark.parametrize("seed", range(3))
def test_lines_of_another_form_among_those_of_a_console_are_counted(name, seed, tmp_path):
    chance = random.Random(seed)
    file = tmp_path / "train.log"
    texts = []
    unknown = 0
    for step in STEPS:
        texts.append(re.sub(r"\b3\b(?![.\d])", str(step), CONSOLES[name].example))
        if chance.random() < 0.2:
            unknown += 1
            texts.append(
                f"[{step}/60] reward = {chance.uniform(2, 3):.5f}, kl = {chance.uniform(2, 3):.5f}\n"
            )
    file.write_text("".join(texts))
    log = read_log(file)
    assert (len(log.rows), log.unread_rows) == (len(STEPS), unknown), log.notes


def test_lines_of_a_notebook_are_counted(tmp_path):
    file = tmp_path / "train.ipynb"
    rows = "".join(f"<tr><td>{step}</td><td>{0.2 + step / 997:.6f}</td></tr>" for step in STEPS)
    page = f"<table><tr><th>Step</th><th>reward</th></tr>{rows}</table>"
    unknown = [printed(step, UNKNOWN[1]) for step in range(61, 81)]
    outputs = [{"data": {"text/html": page}}, {"text": "\n".join(unknown)}]
    file.write_text(json.dumps({"cells": [{"outputs": outputs}]}))
    log = read_log(file)
    assert (len(log.rows), log.unread_rows) == (60, 20)
    assert log.unjudged.startswith("20 of 80 rows")


def test_json_lines_under_other_keys_are_not_judged(tmp_path):
    """After a restart with other code the reward has another name."""
    file = tmp_path / "metrics.jsonl"
    rows = [{"step": step, "reward": 0.5} for step in range(1, 41)]
    rows += [{"step": step, "episode_reward_v2": 0.25} for step in range(41, 61)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    log = read_log(file)
    assert log.unjudged == "20 of 60 rows of metrics were not read, and from 10% on nothing is judged"
    # The time of a reward function is no reward.
    times = ("loss", "eval_reward", "profiling/Time taken: GRPOTrainer.my_reward")
    rows = [{"step": step, name: 0.5} for step in range(1, 41) for name in ("reward", *times)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert read_log(file).unjudged == ""


@pytest.mark.parametrize(
    "line",
    [
        "At step 3 of the plan the reward is scaled by 0.5",
        "GRPOConfig(learning_rate=1e-6, kl_coef=0.001, max_length=512, clip_ratio=0.2)",
        "{'train_runtime': 12.5, 'train_loss': 0.25, 'step': 60}",
        "step 3/100 [00:12<01:30, 1.2it/s]",
        "epoch 3: 0.5 0.25",
        "saved checkpoint-300 at step 300, size 12.5",
    ],
)
def test_other_lines_are_no_rows(line):
    assert numbers_of_row(line) == []


def test_a_line_that_a_reader_has_refused_is_counted_once():
    unread = Unread()
    line = "step 3: loss=0.25 length=312.5"
    unread.add("line with a step and numbers", "it has no reward", line)
    count_lookalikes(line, [], unread)
    assert unread.count == 1
    unread.add("line of a step", "its metrics cannot be parsed", "step 4", is_lost=True)
    count_lookalikes("step 4: {'reward': 0.25, 'kl': 0.5", [], unread)
    assert (unread.count, unread.lost) == (2, 1)
    count_lookalikes("step 5: {'reward': 0.25, 'kl': 0.5", [], unread)
    assert (unread.count, unread.lost, unread.counts[NAME, "no reader knows its form"]) == (3, 2, 1)


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 200))]
)
def test_rows_of_tables_are_none_of_the_unknown_lines(seed, tmp_path):
    layout = random_layout(seed)
    file = tmp_path / layout.name
    file.write_text(layout.text)
    log = read_log(file)
    assert not any(NAME in note for note in log.notes), log.notes
