"""Files that would take a machine's memory or time end in one line that names the limit, or the fault."""

import gzip
import io
import json
import pickle
import sqlite3
import subprocess
import sys
import time
import zipfile
from contextlib import closing

import pytest

from bandpo.errors import InvalidValue
from bandpo.runs.configs import newest_configuration
from bandpo.runs.files import unpickled
from bandpo.runs.logs import read_log


def sparse(folder):
    with (folder / "metrics.jsonl").open("wb") as file:
        file.truncate(10 * 2**30)
    return "metrics.jsonl has 10,240 MiB, and at most 512 are read"


def sparse_table(folder):
    with (folder / "table.csv").open("wb") as file:
        file.write(b"step,reward\n")
        file.truncate(10 * 2**30)
    return "table.csv is thought to be a binary file"


def long_line(folder):
    with (folder / "metrics.jsonl").open("wb") as file:
        file.truncate(2**29)
    return "takes more than 16 MiB in line 1, the limit"


def gzip_bomb(folder):
    with gzip.open(folder / "metrics.jsonl.gz", "wb", compresslevel=1) as file:
        for _ in range(64):
            file.write(bytes(2**20))
    return "takes more than 16 MiB in line 1, the limit"


def damaged_gzip(folder):
    content = gzip.compress(json.dumps({"step": 1, "reward": 0.5}).encode() * 100)
    (folder / "metrics.jsonl.gz").write_bytes(content[:-20] + bytes(20))
    return "is no gzip archive, or a damaged one"


def recursive_view(folder):
    with closing(sqlite3.connect(folder / "project.db")) as store:
        store.execute(
            "CREATE VIEW metrics AS WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) "
            "SELECT n AS id, 'a' AS run_name, n AS step, '{}' AS metrics FROM r"
        )
        store.commit()
    return "is no store of trackio: its metrics are no table"


def long_integers(folder):
    (folder / "metrics.jsonl").write_text(f'{{"step": 1, "reward": {"9" * 5000}}}\n' * 2)
    return "line 1: not a JSON object"


def nested(folder):
    (folder / "metrics.json").write_text("[" * 1_000_000)
    return "is no JSON, or only a part of one"


FILES = (sparse, sparse_table, long_line, gzip_bomb, damaged_gzip, recursive_view, long_integers, nested)


@pytest.mark.parametrize("write", FILES)
def test_what_is_too_much_is_refused_in_one_line_at_once(write, tmp_path):
    message = write(tmp_path)
    (file,) = tmp_path.iterdir()
    start = time.perf_counter()
    with pytest.raises(InvalidValue, match=message) as raised:
        read_log(file)
    assert time.perf_counter() - start < 2
    assert "\n" not in str(raised.value)


# The kernel's peak for this program. getrusage counts the peak of the process that started it as well.
LIMITED = """
import re, sys
from bandpo.cli import main

sys.argv = ["bandpo", "diagnose", *sys.argv[1:]]
try:
    main()
finally:
    with open("/proc/self/status") as status:
        print(re.search(r"VmHWM:\\s*(\\d+)", status.read())[1], file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak of memory from /proc")
@pytest.mark.parametrize("write", FILES)
def test_the_command_takes_little_memory_for_it(write, tmp_path):
    write(tmp_path)
    (file,) = tmp_path.iterdir()
    run = subprocess.run([sys.executable, "-P", "-c", LIMITED, str(file)], capture_output=True, text=True)
    error, kilobytes = run.stderr.splitlines()
    assert run.returncode == 2
    assert error.startswith("error: ")
    assert int(kilobytes) < 500_000


def test_integers_beyond_all_floats_are_no_metrics(tmp_path):
    rows = [{"step": step, "reward": 0.1 * step, "entropy": 10**400} for step in range(1, 13)]
    rows[5]["step"] = 10**400
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    log = read_log(tmp_path)
    assert len(log.rows) == 11
    assert "entropy" not in log.rows[0]


def test_a_pickle_with_a_forged_index_takes_no_memory():
    long_binput = b"r" + (2**31 - 1).to_bytes(4, "little")
    start = time.perf_counter()
    assert unpickled(b"\x80\x02}" + long_binput + b".") == {}
    assert time.perf_counter() - start < 1


def test_an_archive_with_a_forged_size_is_not_decompressed_as_a_whole(tmp_path):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(bytes(2**26)))
    forged = buffer.getvalue().replace((2**26 + 15).to_bytes(4, "little"), (100).to_bytes(4, "little"))
    (tmp_path / "training_args.bin").write_bytes(forged)
    configuration = newest_configuration(tmp_path)
    assert configuration.framework is None
    assert len(configuration.unread) == 1
