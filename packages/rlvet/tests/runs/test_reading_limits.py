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
import torch

from rlvet import diagnose
from rlvet.errors import InvalidValue
from rlvet.runs.configs import newest_configuration
from rlvet.runs.files import read_pickle
from rlvet.runs.logs import read_log


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


def gzip_of_rows(folder):
    with gzip.open(folder / "metrics.jsonl.gz", "wb", compresslevel=1) as file:
        for _ in range(2**21 // 2**15 + 1):
            file.write(b'{"step": 1, "reward": 0.5}\n' * 2**15)
    return "takes more than 2,097,152 lines, the limit"


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


FILES = (
    sparse, sparse_table, long_line, gzip_bomb, gzip_of_rows, damaged_gzip, recursive_view, long_integers, nested,
)  # fmt: skip


@pytest.mark.parametrize("write", FILES)
def test_what_is_too_much_is_refused_in_one_line_at_once(write, tmp_path):
    message = write(tmp_path)
    (file,) = tmp_path.iterdir()
    start = time.process_time()
    with pytest.raises(InvalidValue, match=message) as raised:
        read_log(file)
    assert time.process_time() - start < 5
    assert "\n" not in str(raised.value)


# The kernel's peak for this program. getrusage counts the peak of the process that started it as well.
LIMITED = """
import re, sys
from rlvet.cli import main

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
    start = time.process_time()
    assert read_pickle(b"\x80\x02}" + long_binput + b".") == {}
    assert time.process_time() - start < 5


def test_an_archive_with_a_forged_size_is_not_decompressed_as_a_whole(tmp_path):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(bytes(2**26)))
    forged = buffer.getvalue().replace((2**26 + 15).to_bytes(4, "little"), (100).to_bytes(4, "little"))
    (tmp_path / "training_args.bin").write_bytes(forged)
    saved = newest_configuration(tmp_path)
    assert saved.configuration is None
    assert len(saved.unread) == 1


def wide_table(folder):
    names = ",".join(f"c{number}" for number in range(2**16 + 1))
    (folder / "table.csv").write_text(f"step,{names}\n1,2\n")
    return r"table.csv has 65,538 columns, and at most 65,536 are read"


def table_of_many_runs(folder):
    """Write a table in which the columns of steps count for each run; return the expected error."""
    header = [f"step{number}" for number in range(20_000)] + [
        f"run{number} - loss" for number in range(20_000)
    ]
    (folder / "table.csv").write_text(",".join(header) + "\n" + ",".join(["1"] * len(header)) + "\n")
    return r"table.csv has 20,000 runs with 400,040,000 cells, and at most 67,108,864 are read"


@pytest.mark.parametrize("write", [wide_table, table_of_many_runs])
def test_a_table_of_too_many_columns_is_refused(write, tmp_path):
    message = write(tmp_path)
    with pytest.raises(InvalidValue, match=message):
        read_log(tmp_path / "table.csv")


def sparse_batch(folder):
    with (folder / "1_0.pt").open("wb") as file:
        file.truncate(10 * 2**30)
    return "1_0.pt has 10,240 MiB, and at most 4,096 are read"


def tensor_of_one_place(folder):
    """Write a tensor of 2**40 elements, with strides of 0, in a file of a kilobyte; return the expected error."""
    row = {name: torch.zeros(1).expand(2**40) for name in ("log_probs", "advantages", "loss_masks")}
    torch.save({"samples": [row], "rollout_id": 1}, folder / "1_0.pt")
    return "a tensor has 1,099,511,627,776 elements, and at most 134,217,728 are read"


def compressed_archive(folder):
    row = {name: torch.zeros(2**20) for name in ("log_probs", "advantages", "loss_masks")}
    torch.save({"samples": [row], "rollout_id": 1}, folder / "stored")
    with zipfile.ZipFile(folder / "stored") as stored, zipfile.ZipFile(folder / "1_0.pt", "w") as packed:
        for entry in stored.infolist():
            packed.writestr(entry.filename, stored.read(entry), zipfile.ZIP_DEFLATED)
    (folder / "stored").unlink()
    return "1_0.pt is compressed, as no file of torch is"


def ragged_sequences(folder):
    """Two thousand sequences of one token beside one of 100,000: 200 million tokens with their padding."""
    rows = [
        {"log_probs": torch.zeros(n), "advantages": torch.ones(n), "loss_masks": torch.ones(n)}
        for n in (*[1] * 2_000, 100_000)
    ]
    torch.save({"samples": rows, "rollout_id": 1}, folder / "1_0.pt")
    return "1_0.pt has 2,001 sequences of up to 100,000 tokens, and at most 134,217,728 tokens are read"


@pytest.mark.parametrize("write", [sparse_batch, tensor_of_one_place, compressed_archive, ragged_sequences])
def test_a_batch_that_takes_a_machine_s_memory_is_refused(write, tmp_path):
    message = write(tmp_path)
    start = time.process_time()
    with pytest.raises(InvalidValue, match=message):
        diagnose(tmp_path)
    assert time.process_time() - start < 6


WITHOUT_TORCH = """
import sys
from rlvet import diagnose

try:
    diagnose(sys.argv[1])
except ValueError as error:
    print(error)
print("torch" in sys.modules)
"""


@pytest.mark.slow
@pytest.mark.parametrize("write", [sparse_batch, compressed_archive])
def test_a_batch_that_is_too_much_is_refused_before_torch_is_imported(write, tmp_path):
    """Which takes seconds, and 250 MB."""
    message = write(tmp_path)
    command = [sys.executable, "-P", "-c", WITHOUT_TORCH, str(tmp_path / "1_0.pt")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert message in printed[0]
    assert printed[1:] == ["False"]
