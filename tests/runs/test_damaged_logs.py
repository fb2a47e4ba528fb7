"""Damage to a log ends in a diagnosis or in one line: no signal and no traceback, for any bytes."""

import faulthandler
import json
import random
import sqlite3
import warnings
from contextlib import closing, suppress

import pytest

from bandpo.doctor.diagnosis import diagnose
from bandpo.errors import InvalidValue
from helpers.damage import damaged

faulthandler.enable()

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


def check_damages(name, folder, count):
    file = folder / name
    KINDS[name](file)
    content = file.read_bytes()
    str(diagnose(file))
    for seed in range(count):
        file.write_bytes(damaged(content, random.Random(seed)))
        with warnings.catch_warnings(), suppress(InvalidValue):
            warnings.simplefilter("ignore")
            str(diagnose(file))


@pytest.mark.parametrize("name", KINDS)
def test_a_damaged_log_gives_no_traceback(name, tmp_path):
    check_damages(name, tmp_path, 50)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", KINDS)
def test_two_thousand_damages_of_a_log(name, tmp_path):
    check_damages(name, tmp_path, 2000)
