"""Files that a stranger may have written are read in the process with limits, by the lab's readers too."""

import ast
import datetime
import decimal
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import bandpo_lab
from bandpo_lab.data import prepare
from bandpo_lab.errors import InvalidValue
from bandpo_lab.evals import dataset_io, run
from bandpo_lab.files import reading
from bandpo_lab.files.reading import json_of, lines_of, rows_of, yaml_of
from bandpo_lab.files.validation import read_json, read_sealed_json, read_yaml, with_seal
from bandpo_lab.study import collect, execute, plan
from rlvet.runs import gate

pytestmark = pytest.mark.skipif(not gate.HAS_PROCESSES, reason="files are read in this process here")


@pytest.fixture(autouse=True)
def _limits(monkeypatch):
    """Set the limits that the tests of this repository leave out, and read in a copy of this process."""
    monkeypatch.setenv("RLVET_LIMITS", "")
    if sys.platform.startswith("linux") and sys.version_info < (3, 12):
        monkeypatch.setattr(gate, "_can_fork", lambda: True)


def end_by_signal(*_):
    """Be a reader that ends its process, as a fault of a library does."""
    os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(10)


def run_folder(folder):
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    (folder / "config.yaml").write_text("versions: {bandpo: '1'}\n")
    return folder


def evaluation(folder):
    settings = {"n": 1, "problems": 1, "model": "m"}
    (folder / "settings.json").write_text(json.dumps(with_seal(settings)))
    (folder / "samples.jsonl").write_text("{}\n")
    return folder


def json_file(folder, name="results.json"):
    (folder / name).write_text(json.dumps(with_seal({"a": 1})))
    return folder / name


def rows_file(folder):
    (folder / "rows.jsonl").write_text('{"problem": "1+1?", "answer": "2"}\n')
    return folder / "rows.jsonl"


READS = {
    "a study's results": ("_read_json", lambda folder: execute.read_results(json_file(folder).parent)),
    "a sealed file": ("_read_json", lambda folder: read_sealed_json(json_file(folder))),
    "a manifest of data": (
        "_read_json",
        lambda folder: prepare._read_manifest(json_file(folder, "manifest.json").parent),
    ),
    "an evaluation's settings": ("_read_json", lambda folder: run.read_samples(evaluation(folder))),
    "an evaluation's samples": (
        "_read_lines",
        lambda folder: list(run._parse(evaluation(folder) / "samples.jsonl")),
    ),
    "rows of data": ("_read_rows", lambda folder: dataset_io.read_rows(rows_file(folder))),
    "a study": ("_read_yaml", lambda folder: plan.parse_study("title: t")),
    "a YAML file": ("_read_yaml", lambda folder: read_yaml("a: 1", "a.yaml")),
    "the versions of a study's run": ("_read_yaml", lambda folder: collect.versions(run_folder(folder))),
}


@pytest.mark.parametrize("name", READS)
def test_a_fault_of_a_reader_ends_its_own_process(name, tmp_path, monkeypatch):
    reader, read = READS[name]
    monkeypatch.setattr(reading, reader, end_by_signal)
    with pytest.raises(InvalidValue, match="cannot be read: its reader was ended by the signal SIGSEGV"):
        read(tmp_path)


def test_a_fault_of_the_reader_of_a_study_s_run_ends_its_own_process(tmp_path, monkeypatch):
    monkeypatch.setattr(collect, "_collect", end_by_signal)
    with pytest.raises(InvalidValue, match="its reader was ended by the signal SIGSEGV"):
        collect.collect_run(run_folder(tmp_path))


# --- What is read is what is there ---


def test_rows_are_the_same_as_without_limits(tmp_path, monkeypatch):
    """The rows of several answers, with values that JSON does not have as texts."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    monkeypatch.setattr(reading, "VALUES_PER_ANSWER", 10)
    rows = [
        {
            "a": k,
            "b": [{"role": "user", "content": "1"}],
            "c": None,
            "d": b"\x00",
            "e": decimal.Decimal("1.50"),
        }
        | {"f": datetime.date(2026, 1, 1), "g": float("nan"), "h": float("inf")}
        for k in range(40)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    expected = [row | {"e": "1.50", "f": "2026-01-01"} for row in rows]
    read = rows_of(tmp_path / "rows.parquet")
    assert repr(read) == repr(expected)
    assert repr(rows_of(tmp_path / "rows.parquet", 7)) == repr(expected[:7])
    monkeypatch.setenv("RLVET_LIMITS", "off")
    assert repr(rows_of(tmp_path / "rows.parquet")) == repr(expected)


def test_lines_json_and_yaml_are_read(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"a": [{k}, null, "x"]}}\n' for k in range(30_000)))
    assert list(lines_of(tmp_path / "a.jsonl")) == [(k + 1, {"a": [k, None, "x"]}) for k in range(30_000)]
    (tmp_path / "a.json").write_text('{"a": {"1": 1e308, "dict": [NaN]}}')
    assert repr(json_of(tmp_path / "a.json")) == "{'a': {'1': 1e+308, 'dict': [nan]}}"
    assert yaml_of("a.yaml", "1: {a: !!set {x}}\nb: 2026-01-01 10:00:00") == {
        1: {"a": {"x"}},
        "b": "2026-01-01 10:00:00",
    }


# --- Hostile files ---


def deep_json(folder):
    (folder / "results.json").write_text("[" * 10**6)
    return folder / "results.json", read_json


def many_lists(folder):
    (folder / "results.json").write_text('{"a": [' + ",".join(["[]"] * 4_000_000) + "]}")
    return folder / "results.json", read_json


def named_pipe(folder):
    os.mkfifo(folder / "results.json")
    return folder / "results.json", read_json


def yaml_merges(folder):
    lines = ["a0: &a0 {x: 1, y: 2}"] + [
        f"a{k}: &a{k} {{<<: [{', '.join([f'*a{k - 1}'] * 9)}]}}" for k in range(1, 12)
    ]
    (folder / "study.yaml").write_text("\n".join(lines))
    return folder / "study.yaml", lambda file: read_yaml(file.read_bytes(), str(file))


def yaml_aliases(folder):
    lines = ["a0: &a0 [1, 2]"] + [f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 9)}]" for k in range(1, 12)]
    (folder / "study.yaml").write_text("\n".join(lines))
    return folder / "study.yaml", lambda file: read_yaml(file.read_bytes(), str(file))


def deep_yaml(folder):
    (folder / "study.yaml").write_text("[" * 50_000)
    return folder / "study.yaml", lambda file: read_yaml(file.read_bytes(), str(file))


def deep_line(folder):
    (folder / "samples.jsonl").write_text('{"a": ' + "[" * 10**6 + "\n")
    (folder / "settings.json").write_text(json.dumps(with_seal({"n": 1, "problems": 1})))
    return folder / "samples.jsonl", lambda file: run.read_samples(file.parent)


def many_lists_in_a_line(folder):
    (folder / "rows.jsonl").write_text('{"a": [' + ",".join(["[]"] * 4_000_000) + "]}\n")
    return folder / "rows.jsonl", rows_of


def deep_row(folder):
    (folder / "rows.jsonl").write_text('{"a": ' + "[" * 10**6 + "\n")
    return folder / "rows.jsonl", rows_of


HOSTILE = (
    deep_json, many_lists, named_pipe, yaml_merges, yaml_aliases, deep_yaml, deep_line, many_lists_in_a_line,
    deep_row,
)  # fmt: skip

# The kernel's peaks for this program and for the processes that it started, in KiB.
PROGRAM = """
import resource, sys, time
from pathlib import Path
import test_lab_gate
write = getattr(test_lab_gate, sys.argv[1])
file, read = write(Path(sys.argv[2]))
before = resource.getrusage(resource.RUSAGE_SELF)
try:
    read(file)
    said = "read"
except (ValueError, OSError) as error:
    said = str(error)
used = [resource.getrusage(one) for one in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
seconds = sum(one.ru_utime + one.ru_stime for one in used) - before.ru_utime - before.ru_stime
print(seconds, max(one.ru_maxrss for one in used), repr(said))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux limits the memory")
@pytest.mark.parametrize("write", HOSTILE, ids=lambda write: write.__name__)
def test_a_hostile_file_ends_with_one_sentence(write, tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, write.__name__, str(tmp_path)],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
    )
    assert run.stderr == ""
    seconds, peak, said = run.stdout.split(" ", 2)
    said = ast.literal_eval(said)
    assert re.search(r"(results\.json|study\.yaml|samples\.jsonl|rows\.jsonl)", said), said
    assert len(said) < 500
    assert "\n" not in said
    assert float(seconds) < 20
    assert int(peak) < 2_300_000


# --- What is read without the gate ---

PARSERS = {"read_jsonl", "read_log", "from_json", "open_stream", "ParquetFile", "safe_load"}
"""Names of functions that parse bytes."""

MODULES = {"json", "yaml", "pickle", "torch", "np", "numpy", "tomllib"}
"""Modules whose `load` and `loads` parse bytes."""

OUTSIDE = {
    "cli/run.py": "a rule of the recipes that this package ships",
    "cli/preflight.py": "settings of the recipes that this package ships",
    "files/reading.py": "runs in the process with limits",
    "study/collect.py": "its reader runs in the process with limits",
    "files/writing.py": "seals and locks, of at most 16 MiB",
    "training/checkpoints.py": "a checkpoint's step, after the digests; torch reads the checkpoint here too",
    "training/run_folder.py": "writes its own settings as JSON",
    "evals/run.py": "writes its own settings as JSON",
    "evals/grading.py": "the answers of the grader's own process",
    "evals/math_worker.py": "runs in the grader's process",
    "data/sources.py": "a text within a row, of at most 16 MiB",
    "models/downloads.py": "files of the package",
    "toy/demo.py": "a file of the package",
    "toy/fast_loop.py": "the folder of its own comparison",
    "rehearsal/checks.py": "the folder of its own rehearsal",
    "rehearsal/by_hand.py": "the folder of its own rehearsal",
    "rehearsal/rollout.py": "the folder of its own rehearsal",
    "rehearsal/samples.py": "the folder of its own rehearsal",
    "rehearsal/transfer.py": "the folder of its own rehearsal",
    "training/stale.py": "tensors of a checkpoint, after its digests, without pickled classes",
}
"""For each file of the lab that parses bytes the reason why this is no stranger's file, or is limited otherwise."""


def parses(source):
    """Return True if a source calls a parser."""
    for node in ast.walk(ast.parse(source)):
        function = node.func if isinstance(node, ast.Call) else None
        if isinstance(function, ast.Name) and function.id in PARSERS:
            return True
        if isinstance(function, ast.Attribute):
            owner = function.value.id if isinstance(function.value, ast.Name) else ""
            if function.attr in PARSERS or (owner in MODULES and function.attr in ("load", "loads")):
                return True
    return False


def test_each_file_that_parses_bytes_has_a_reason():
    package = Path(bandpo_lab.__file__).parent
    found = {
        file.relative_to(package).as_posix()
        for file in package.rglob("*.py")
        if parses(file.read_text("utf-8"))
    }
    assert found == OUTSIDE.keys()
