"""Damage to a file of a run ends in a result or in one line: no signal and no traceback, for any bytes.

Where a file has checksums, damage changes no figure without a warning.
"""

import argparse
import faulthandler
import json
import random
import sqlite3
import warnings
from collections import Counter
from contextlib import closing, suppress

import pytest
import torch

from helpers import token_exports
from helpers.damage import damaged, read_with_limits
from helpers.run_files import batch, nemo_rl, skyrl, slime, tensorboard, wandb
from rlvet import diagnose
from rlvet.errors import InvalidValue
from rlvet.runs.configs import newest_configuration
from rlvet.runs.formats.tensorboard import read_tensorboard
from rlvet.runs.formats.wandb import BLOCK_SIZE, HEADER_SIZE, read_wandb
from rlvet.runs.log_files import read_raw
from selection import mostly_slow

faulthandler.enable()


@pytest.fixture(autouse=True)
def _limits(request, monkeypatch):
    """Read in a process with limits, as the commands do, in the tests that run at night."""
    if request.node.get_closest_marker("exhaustive"):
        read_with_limits(monkeypatch)


ROWS = [
    {"step": step, "reward": 0.01 * step, "entropy": 1.0, "grad_norm": 0.3, "kl": 0.01}
    for step in range(1, 25)
]


def store(file):
    with closing(sqlite3.connect(file)) as opened:
        opened.execute(
            "CREATE TABLE metrics (id INTEGER PRIMARY KEY, run_name TEXT, step INTEGER, metrics TEXT)"
        )
        for row in ROWS:
            values = ("mine", row["step"], json.dumps(row))
            opened.execute("INSERT INTO metrics (run_name, step, metrics) VALUES (?, ?, ?)", values)
        opened.commit()


def table(file):
    lines = [",".join(map(str, row.values())) for row in ROWS]
    file.write_text("\n".join([",".join(ROWS[0]), *lines, ""]))


KINDS = {
    "metrics.jsonl": lambda file: file.write_text("".join(json.dumps(row) + "\n" for row in ROWS)),
    "trainer_state.json": lambda file: file.write_text(json.dumps({"log_history": ROWS})),
    "log.csv": table,
    "project.db": store,
}


def written(name, folder):
    file = folder / name
    KINDS[name](file)
    return file


def check_damages(file, read, count):
    """Check that each damage of a file gives an answer, or an error in words."""
    content = file.read_bytes()
    str(read(file))
    for seed in range(count):
        file.write_bytes(damaged(content, random.Random(seed)))
        with warnings.catch_warnings(), suppress(InvalidValue):
            warnings.simplefilter("ignore")
            str(read(file))


@pytest.mark.parametrize("name", KINDS)
def test_a_damaged_log_gives_no_traceback(name, tmp_path):
    check_damages(written(name, tmp_path), diagnose, 200)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", KINDS)
def test_two_thousand_damages_of_a_log(name, tmp_path):
    check_damages(written(name, tmp_path), diagnose, 2000)


# --- Values that no framework logs ---

NUMBERS = (
    "0.5",
    "1",
    "-3",
    "9" * 400,
    "1e999",
    "nan",
    "'nan'",
    "-inf",
    "np.float64(nan)",
    "'-0.000'",
    "1_000",
    "1j",
)
OTHER_VALUES = (
    "True",
    "None",
    "'x'",
    "'\\ud800'",
    "b'x'",
    "(1, 2)",
    "[1, 2]",
    "{1, 2}",
    "{}",
    "{'a': {'b': 1}}",
    "...",
)
NAMES = (
    "'reward'",
    "'kl'",
    "'entropy'",
    "'step'",
    "'rollout/raw_reward'",
    "'\\ud800'",
    "''",
    "1",
    "None",
    "('a',)",
    "b'k'",
)
LINES = (
    "Global step {step}: {metrics}\n",
    "rollout {step}: {metrics}\n",
    "step {step}: {metrics}\n",
    "Step {step}:\n{metrics}\n",
    "metrics_tag: {metrics}\n",
    "{metrics}\n",
    "Step {step} | 1.00s | Loss {value} | Reward {value} | Entropy {value}\n",
    "step:{step} - actor/entropy:{value} - critic/rewards/mean:{value}\n",
)
"""Lines of consoles, with their step and a dictionary or a number."""


def strange_console(random):
    """Return the text of a console with values, names and types that no framework logs."""

    def metrics():
        pairs = (
            f"{random.choice(NAMES)}: {random.choice(NUMBERS + OTHER_VALUES)}"
            for _ in range(random.randint(1, 7))
        )
        return f"{{{', '.join(pairs)}}}"

    line = random.choice(LINES)
    steps = range(1, random.choice([2, 12, 40]))
    return "".join(line.format(step=step, metrics=metrics(), value=random.choice(NUMBERS)) for step in steps)


def strange_rows(random):
    """Return a log of JSON lines with such values."""
    values = [
        0.5,
        -3,
        10**400,
        float("nan"),
        float("-inf"),
        True,
        None,
        "x",
        "nan",
        "\ud800",
        [1, 2],
        {},
        {"a": {"b": 1}},
    ]
    names = ["reward", "kl", "entropy", "step", "epoch", "loss", "", "\ud800"]
    rows = (
        {random.choice(names): random.choice(values) for _ in range(random.randint(1, 7))}
        for _ in range(random.choice([2, 12, 40]))
    )
    return "".join(json.dumps(row) + "\n" for row in rows)


def check_strange_values(folder, count):
    for seed in range(count):
        generator = random.Random(seed)
        for file, text in (
            ("console.log", strange_console(generator)),
            ("metrics.jsonl", strange_rows(generator)),
        ):
            (folder / file).write_text(text)
            with warnings.catch_warnings(), suppress(InvalidValue):
                warnings.simplefilter("ignore")
                str(diagnose(folder / file))


def test_strange_values_give_no_traceback(tmp_path):
    check_strange_values(tmp_path, 200)


@pytest.mark.exhaustive
def test_two_thousand_logs_of_strange_values(tmp_path):
    check_strange_values(tmp_path, 2000)


# --- Files with checksums ---

TRACKERS = {"events.out.tfevents.*": (tensorboard, read_tensorboard), "*.wandb": (wandb, read_wandb)}
"""For each pattern of files its writer and its reader."""


@pytest.fixture(scope="module")
def tracked(request, tmp_path_factory):
    """Return a pattern, and a file that the tracker itself wrote."""
    folder = tmp_path_factory.mktemp("tracked") / "run"
    TRACKERS[request.param][0](folder)
    (file,) = (file for file in folder.rglob(request.param) if file.is_file() and not file.is_symlink())
    return request.param, file


def figures(file, read):
    """Return the metrics of each row, as texts that equal themselves where a number is NaN."""
    return [{name: repr(value) for name, value in row.items()} for row in read(file)]


def check_tracker_damages(tracked, folder, count):
    """Return how often each outcome came about."""
    pattern, whole_file = tracked
    read = TRACKERS[pattern][1]
    whole = figures(whole_file, read)
    assert len(whole) >= 60
    content = whole_file.read_bytes()
    file = folder / whole_file.name
    outcomes = Counter()
    for seed in range(count):
        changed = damaged(content, random.Random(seed))
        file.write_bytes(changed)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            log = None
            with suppress(InvalidValue):
                log = read_raw(file).runs[""]
        if log is None:
            outcomes["refused"] += 1
            continue
        rows = [{name: repr(value) for name, value in row.items()} for row in log]
        if rows == whole:
            outcomes["the same"] += 1
        elif said:
            assert all(any(row.items() <= other.items() for other in whole) for row in rows), seed
            outcomes["left out, and said"] += 1
        else:
            # A file that ends where a record ends is a shorter one.
            assert content.startswith(changed), f"other figures in silence, of seed {seed}"
            outcomes["a shorter file"] += 1
    return outcomes


@pytest.mark.parametrize(
    "tracked", mostly_slow(TRACKERS, 2), indirect=True
)  # to import wandb takes two seconds
def test_damage_of_a_tracker_s_file_makes_no_other_figure_in_silence(tracked, tmp_path):
    outcomes = check_tracker_damages(tracked, tmp_path, 200)
    assert outcomes["left out, and said"] > 100


@pytest.mark.slow
@pytest.mark.parametrize("tracked", ["*.wandb"], indirect=True)
@pytest.mark.parametrize("count", [1, 2, 7])
def test_records_of_wandb_that_are_there_twice_count_once_and_are_said(tracked, count, tmp_path):
    """Each record keeps its right checksum, so that only its number tells."""
    whole_file = tracked[1]
    content = whole_file.read_bytes()
    starts = [HEADER_SIZE]
    while starts[-1] < BLOCK_SIZE // 2:
        size = int.from_bytes(content[starts[-1] + 4 : starts[-1] + 6], "little")
        starts.append(starts[-1] + HEADER_SIZE + size)
    first, last = starts[-1 - count], starts[-1]
    file = tmp_path / whole_file.name
    file.write_bytes(content[:last] + content[first:last])
    with pytest.warns(UserWarning, match="is there twice") as said:
        rows = figures(file, read_wandb)
    assert len(said) == 1
    assert rows == figures(whole_file, read_wandb)[: len(rows)]
    assert len(rows) > 20


@pytest.mark.exhaustive
@pytest.mark.parametrize("tracked", TRACKERS, indirect=True)
def test_two_thousand_damages_of_a_tracker_s_file(tracked, tmp_path):
    check_tracker_damages(tracked, tmp_path, 2000)


# --- Batches that frameworks write, and configurations ---


def one_dump(write):
    def written(folder):
        write(folder, 3, batch(3))
        (file,) = folder.iterdir()
        return file

    return written


def token_export(write, pattern):
    def written(folder):
        with pytest.MonkeyPatch.context() as monkeypatch:
            write(folder, 3, token_exports.batch(3, moved=0.05), monkeypatch)
        (file,) = folder.rglob(pattern)
        return file

    return written


def training_arguments(folder):
    arguments = {"epsilon": 0.2, "loss_type": "dapo", "learning_rate": 1e-6, "num_iterations": 2}
    torch.save(argparse.Namespace(**arguments), folder / "training_args.bin")
    return folder / "training_args.bin"


OTHERS = {
    "training_args.bin": (training_arguments, lambda file: newest_configuration(file.parent)),
    **{write.__name__: (one_dump(write), diagnose) for write in (nemo_rl, slime, skyrl)},
    "prime_rl": (token_export(token_exports.prime_rl, "rank_*.jsonl"), diagnose),
    "miles": (token_export(token_exports.miles, "rank_*_call_*.pt"), diagnose),
}
"""For each kind of file its writer, and what reads it."""


@pytest.mark.parametrize("kind", mostly_slow(OTHERS, 3))
def test_damage_of_another_file_gives_no_traceback(kind, tmp_path):
    write, read = OTHERS[kind]
    check_damages(write(tmp_path), read, 200)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", OTHERS)
def test_two_thousand_damages_of_another_file(kind, tmp_path):
    write, read = OTHERS[kind]
    check_damages(write(tmp_path), read, 2000)
