"""Damage to data, evaluations and studies: no signal, no traceback, and no other figure in silence."""

import faulthandler
import hashlib
import json
import random
import re
import subprocess
import sys
import warnings
from collections import Counter
from dataclasses import asdict

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

pytest.importorskip("math_verify")

from bandpo_lab.data.prepare import _read_manifest, prepare_data
from bandpo_lab.data.sources import _load_file
from bandpo_lab.evals.dataset_io import read_rows
from bandpo_lab.evals.problems import read_problems
from bandpo_lab.evals.report import as_json, score
from bandpo_lab.evals.run import SAMPLES, SETTINGS, Sample, read_samples
from bandpo_lab.files.validation import with_seal
from bandpo_lab.study.collect import collect_run, versions
from bandpo_lab.study.execute import read_results
from bandpo_lab.study.plan import parse_study, study_text
from helpers.damage import damaged, read_with_limits
from rlvet.errors import RlvetError

faulthandler.enable()


@pytest.fixture(autouse=True)
def _limits(request, monkeypatch):
    """Read in a process with limits, as the commands do, in the tests that run at night."""
    if request.node.get_closest_marker("exhaustive"):
        read_with_limits(monkeypatch)


def parquet(folder):
    """Write rows in TRL's form, with the checksums of pages that `bandpo-lab data prepare` writes."""
    rows = [
        {"prompt": f"What is {k} + 1?", "answer": str(k + 1), "data_source": "sums", "id": f"sums-{k}"}
        for k in range(200)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "sums.parquet", write_page_checksum=True)
    return folder / "sums.parquet"


def samples(folder):
    """Write an evaluation of 20 problems with 4 samples each, with the digests of `evaluate`."""
    lines = []
    for k in range(80):
        row = asdict(
            Sample(
                f"p{k // 4}", k % 4, "sums", float(k % 3 == 0), str(k), "wrong", "stop", 9, "a text", str(k)
            )
        )
        digest = hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()
        lines.append(json.dumps({**row, "sha256": digest}))
    (folder / SAMPLES).write_text("\n".join([*lines, ""]))
    settings = {"model": "m", "n": 4, "problems": 20, "grader": "g"}
    (folder / SETTINGS).write_text(json.dumps(with_seal(settings), indent=2) + "\n")
    return folder / SAMPLES


def settings(folder):
    samples(folder)
    return folder / SETTINGS


def study(folder):
    runs = [
        {"experiment": "main", "arm": arm, "seed": seed, "after": {"mean@2": 0.5}}
        for arm in "ab"
        for seed in (0, 1)
    ]
    (folder / "results.json").write_text(json.dumps(with_seal({"study": "title: t", "runs": runs}), indent=1))
    return folder / "results.json"


KINDS = {
    parquet: lambda file: read_problems([file]),
    samples: lambda file: as_json(score(read_samples(file.parent))),
    settings: lambda file: as_json(score(read_samples(file.parent))),
    study: lambda file: read_results(file.parent),
}
"""For each kind of file its writer and what is read of it."""


def check_damages(write, folder, count):
    read = KINDS[write]
    file = write(folder)
    content = file.read_bytes()
    whole = read(file)
    outcomes = Counter()
    for seed in range(count):
        file.write_bytes(damaged(content, random.Random(seed)))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that a last line is cut off; the run then lacks samples
                again = read(file)
        except (RlvetError, OSError) as error:
            outcomes["refused" if str(folder) in str(error) else f"without the file's name: {error}"] += 1
            continue
        outcomes["the same" if again == whole else f"other figures in silence, of seed {seed}"] += 1
    return outcomes


@pytest.mark.parametrize("write", KINDS)
def test_damage_makes_no_other_figure_in_silence(write, tmp_path):
    outcomes = check_damages(write, tmp_path, 200)
    assert outcomes.keys() <= {"refused", "the same"}
    assert outcomes["refused"] > 100


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("write", KINDS)
def test_two_thousand_damages(write, tmp_path):
    assert check_damages(write, tmp_path, 2000).keys() <= {"refused", "the same"}


# --- Files without digests ---


def rows(folder):
    lines = [json.dumps({"problem": f"What is {k} + 1?", "answer": str(k + 1)}) for k in range(50)]
    (folder / "rows.jsonl").write_text("\n".join([*lines, ""]))
    return folder / "rows.jsonl"


def study_file(folder):
    (folder / "study.yaml").write_text(study_text("quick"))
    return folder / "study.yaml"


def run_settings(folder):
    settings = {"versions": {"bandpo": "1"}, "processes": 1, "arguments": {"seed": 0, "learning_rate": 1e-6}}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return folder / "config.yaml"


def data_manifest(folder):
    (folder / "rows.jsonl").write_text('{"problem": "1+1?", "answer": "2"}\n')
    prepare_data([str(folder / "rows.jsonl")], folder / "data")
    return folder / "data" / "manifest.json"


def finished_run(folder):
    """Write the log and the settings of a run of a study, of which the log is damaged."""
    run_settings(folder)
    lines = [json.dumps({"step": step, "reward": 0.1, "entropy": 1.0}) for step in range(1, 30)]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    return folder / "metrics.jsonl"


WITHOUT_DIGESTS = {
    rows: lambda file: _load_file("rows", file, "train"),
    study_file: lambda file: parse_study(file.read_text(errors="replace")),
    run_settings: lambda file: versions(file.parent),
    data_manifest: lambda file: _read_manifest(file.parent),
    finished_run: lambda file: collect_run(file.parent),
}
"""For each kind of file its writer and what reads it."""


def check_texts(write, folder, count):
    file = write(folder)
    read = WITHOUT_DIGESTS[write]
    content = file.read_bytes()
    read(file)
    for seed in range(count):
        file.write_bytes(damaged(content, random.Random(seed)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                read(file)
            except RlvetError as error:
                assert "\n" not in str(error), (seed, str(error))  # noqa: PT017


@pytest.mark.parametrize("write", WITHOUT_DIGESTS)
def test_damage_of_a_file_without_digests_gives_no_traceback(write, tmp_path):
    check_texts(write, tmp_path, 100)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("write", WITHOUT_DIGESTS)
def test_two_thousand_damages_of_a_file_without_digests(write, tmp_path):
    check_texts(write, tmp_path, 2000)


def test_a_changed_byte_of_prepared_data_is_refused_with_its_file(tmp_path):
    (tmp_path / "sums.jsonl").write_text('{"problem": "1+1?", "answer": "2"}\n')
    prepare_data([f"{tmp_path / 'sums.jsonl'}"], tmp_path / "data")
    file = tmp_path / "data" / "trl" / "sums.parquet"
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"data/trl/sums\.parquet has changed since it was prepared"):
        read_rows(file)


def many_columns(file):
    pq.write_table(pa.table({f"c{k}": [1] for k in range(1500)}), file)
    return "has 1,500 columns, and at most 1,000 are read"


def many_rows(file):
    pq.write_table(pa.table({"c": pa.array(np.zeros(3_000_000, np.int8))}), file)
    return "has 3,000,000 rows, and at most 2,097,152 are read"


def large_once_decompressed(file):
    """Texts of zeros, which take a thousandth of their size."""
    table = pa.table({"c": ["0" * 2**20]})
    with pq.ParquetWriter(file, table.schema, compression="zstd", use_dictionary=False) as writer:
        for _ in range(1100):
            writer.write_table(table)
    return "has 1,1.. MiB once it is decompressed, and at most 1,024 are read"


def one_text_in_all_rows(file):
    """A text of 1 MiB that is stored once and stands in 20,000 rows: 20 GB."""
    indices = pa.array(np.zeros(20_000, np.int32))
    column = pa.DictionaryArray.from_arrays(indices, pa.array(["0" * 2**20]))
    pq.write_table(pa.table({"c": column}), file, compression="zstd", store_schema=False)
    return "has more than 128 MiB in its rows, the limit for a file with 1.. MiB in its columns"


HOSTILE = (many_columns, many_rows, large_once_decompressed, one_text_in_all_rows)

# The kernel's peak for this program. getrusage counts the peak of the process that started it as well.
LIMITED = """
import re, sys, time
from pathlib import Path
from bandpo_lab.evals.dataset_io import read_rows
import pyarrow.parquet

start = time.process_time()  # of the clock, a busy machine takes longer
try:
    read_rows(Path(sys.argv[1]))
    said = "read"
except ValueError as error:
    said = str(error)
seconds = time.process_time() - start
with open("/proc/self/status") as status:
    peak = re.search(r"VmHWM:\\s*(\\d+)", status.read())[1]
print(said, seconds, peak, sep="\\n")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak of memory from /proc")
@pytest.mark.parametrize("write", HOSTILE)
def test_a_hostile_parquet_file_is_refused_in_one_line(write, tmp_path):
    file = tmp_path / "data.parquet"
    message = write(file)
    run = subprocess.run([sys.executable, "-c", LIMITED, str(file)], capture_output=True, text=True)
    said, seconds, peak = run.stdout.splitlines()
    assert re.search(message, said), said
    assert float(seconds) < 2
    assert int(peak) < 500_000
