"""Every row and key of the logs of other people is read, or counted and named as not read.

The rows and keys of a file are counted here by patterns of its text, which share no code with the readers.
"""

import csv
import json
import os
import re
import warnings
from pathlib import Path

import pytest

from rlvet.runs.logs import read_log
from rlvet.runs.quantities import plain_key

LOGS = Path(os.environ.get("BANDPO_TEST_DATA", "missing")) / "logs"


def flat(row, prefix=""):
    for key, value in row.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}/")
        else:
            yield prefix + key


def of_rows(rows):
    return len(rows), {key for row in rows for key in flat(row)}


def of_json_lines(text):
    return of_rows([json.loads(line) for line in text.splitlines() if line.strip()])


def of_state(text):
    return of_rows(json.loads(text)["log_history"])


def of_csv(text):
    header, *rows = list(csv.reader(text.splitlines()))
    return len(rows), set(header)


def of_markdown(text):
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return len(lines) - 2, {cell.strip() for cell in lines[0].strip("|").split("|")}


def of_notebook(text):
    return text.count("<tr>") - 1, set(re.findall(r"<th>([^<]+)</th>", text))


def of_dictionaries(text):
    lines = re.findall(r"\{'loss': [^{}\n]*\}", text)
    return len(lines), {key for line in lines for key in re.findall(r"'([^'\n]+)': ", line)}


def of_verl(text):
    lines = re.findall(r"\bstep:\d+ - .*", text)
    keys = {pair.rpartition(":")[0].strip() for line in lines for pair in line.split(" - ")[1:]}
    return len(lines), keys


def of_slime(text):
    lines = re.findall(r" - perf \d+: \{.*\}", text)
    return len(lines), {key for line in lines for key in re.findall(r"'([^']+)': ", line)}


def of_prime_rl(text):
    lines = re.findall(r"Step \d+ \| .*", text)
    names = {cell.partition(":")[0].strip() for line in lines for cell in line.split(" | ")[1:]}
    filters = {f"filters/all/{name}" for name in re.findall(r"(\w+)=\d+", text)}
    keys = {
        "Time": "time/step",
        "Reward": "reward/mean",
        "Seq. Length": "seq_len/mean",
        "Async Level": "async_level",
        "Max. Off-Policy Level": "off_policy_level/max",
    }
    return len(lines), {keys[name] for name in names} | filters


FILES = {
    "chaos/trainer_state.json": of_state,
    "finqa/train.log": of_dictionaries,
    "logic-rl/verl-console.log": of_verl,
    "rdan-roll/metrics.jsonl": of_json_lines,
    "rith/metrics.jsonl": of_json_lines,
    "wild/F10_slime_46pct_truncated_passed.txt": of_slime,
    "wild/F12_reward_std_falls.jsonl": of_json_lines,
    "wild/F1_kl2_near_reference_passed.jsonl": of_json_lines,
    "wild/F1_kl34_ok_12rows.csv": of_csv,
    "wild/F2_verl_group_of_one.log": of_verl,
    "wild/F3_capitalised_columns.csv": of_csv,
    "wild/F3_same_lower_case.csv": of_csv,
    "wild/F4_bold_rows_dropped.md": of_markdown,
    "wild/F5_notebook.ipynb": of_notebook,
    "wild/F8_mini_batch_assertion/run.log": of_verl,
    "wild/F9_prime_console_unread.txt": of_prime_rl,
}
"""The stored logs that are text, with the function that counts what is in each."""


def losses(path, count):
    """Return the number of rows that are neither read nor counted as not read, and such keys."""
    rows, keys = count(path.read_text(encoding="utf-8", errors="replace"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        log = read_log(path)
    named = {key for names in log.read.values() for key in names}
    named |= {*log.unread, *log.counters, *log.replaced}
    plain = {plain_key(key) for key in named} | {"step", "loss" if "loss" in named else "step"}
    lost = {key for key in keys if plain_key(key).replace("training_loss", "loss") not in plain}
    return rows - len(log.rows) - log.unread_rows, lost


@pytest.mark.parametrize("name", FILES)
def test_nothing_of_a_stored_log_is_lost_in_silence(name):
    path = LOGS / name
    if not path.exists():
        pytest.skip("BANDPO_TEST_DATA has no logs")
    assert losses(path, FILES[name]) == (0, set())


@pytest.mark.parametrize("path", sorted(LOGS.glob("wordle-tb/*/events.*")), ids=lambda path: path.parent.name)
def test_no_tag_of_tensorboard_is_lost_in_silence(path):
    tags = {tag.decode() for tag in re.findall(rb"\x0a[\x06-\x50]((?:train|eval)/[\w/]+)", path.read_bytes())}
    log = read_log(path)
    named = {key for names in log.read.values() for key in names} | {
        *log.unread,
        *log.counters,
        *log.replaced,
    }
    assert len(tags) > 10
    assert not tags - named


CASES = {
    "wild/F3_capitalised_columns.csv": (40, {"reward", "entropy", "kl", "length"}),
    "wild/F4_bold_rows_dropped.md": (24, {"reward", "kl"}),
    "wild/F5_notebook.ipynb": (30, {"reward", "reward_std", "kl"}),
    "wild/F9_prime_console_unread.txt": (2, {"reward", "length", "dead", "staleness_max", "step_time"}),
    "wild/F10_slime_46pct_truncated_passed.txt": (1, {"cut", "length", "length_max"}),
}
"""The cases of rows and keys that vanished, with the rows and quantities that are in each."""


@pytest.mark.parametrize("name", CASES)
def test_a_case_that_failed_is_read(name):
    if not (LOGS / name).exists():
        pytest.skip("BANDPO_TEST_DATA has no logs")
    rows, quantities = CASES[name]
    log = read_log(LOGS / name)
    assert len(log.rows) == rows
    assert set(log.read) == quantities
