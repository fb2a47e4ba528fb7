"""Inputs that would take a machine's time or memory end in one sentence, within 20 seconds and 2 GB.

Processor time and memory are those of the command and of the process that reads, together.
"""

import json
import os
import struct
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("typer")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux limits the memory"),
]

ROWS = "".join(
    json.dumps({"step": step, "reward": 0.1 * step, "entropy": 1.0, "kl": 0.1}) + "\n"
    for step in range(1, 41)
)
TREE = b"\x80\x02})" + b"2\x86" * 60 + b"K\x01s."
"""A pickle of 130 bytes whose key is a tuple of two equal tuples, 60 times: its hash takes 2**60 steps."""

MEASURE = """
import json, os, resource, subprocess, sys, tempfile, time
from pathlib import Path

def peaks(process):
    # The largest memory so far of a process, and of the readers that it started.
    try:
        status = Path(f"/proc/{process}/status").read_text()
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:
        return {}
    found = {process: 1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")}
    for child in children:
        found |= peaks(int(child))
    return found

with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
    run = subprocess.Popen(sys.argv[1:], stdout=stdout, stderr=stderr)
    memory = {}
    while run.poll() is None:
        memory |= peaks(run.pid)
        time.sleep(0.01)
    texts = []
    for stream in (stdout, stderr):
        stream.seek(0)
        texts.append(stream.read().decode(errors="replace"))
used = resource.getrusage(resource.RUSAGE_CHILDREN)
largest = max(sum(memory.values()), used.ru_maxrss * 1024)
print(json.dumps([run.returncode, *texts, used.ru_utime + used.ru_stime, largest]))
"""
"""A program that measures a command with the processes that it starts: the sum of their processor times, and the sum of
the peaks of their memory."""


class Outcome(NamedTuple):
    """What became of a command."""

    status: int
    stdout: str
    stderr: str
    seconds: float
    memory: int


def measured(*arguments: object) -> Outcome:
    """Run a command with the limits that it has by itself, and measure it."""
    environment = {name: value for name, value in os.environ.items() if name != "RLVET_LIMITS"}
    program = "bandpo" if arguments[0] == "audit" else "rlvet"
    command = [sys.executable, "-P", "-m", program, *map(str, arguments)]
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, *command], capture_output=True, text=True, env=environment, check=True
    )
    return Outcome(*json.loads(run.stdout))


def check_limits(outcome: Outcome) -> None:
    """Check that a command stayed within the limits, and gave no traceback."""
    assert outcome.seconds < 20
    assert outcome.memory < 2 * 10**9 + 7 * 10**8  # Python and its libraries, torch in both, take the rest
    assert "Traceback" not in outcome.stderr


def with_rows(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text(ROWS)


# --- Configurations beside a log: the log is diagnosed, and the output says why the configuration is not read ---


def merges() -> str:
    """Return 11 levels of merges, each of nine copies of the one before."""
    lines = ["a0: &a0 {" + ", ".join(f"k{number}: 1" for number in range(8)) + "}"]
    lines += [f"a{n}: &a{n} {{<<: [" + ", ".join([f"*a{n - 1}"] * 9) + "]}" for n in range(1, 12)]
    return "\n".join(lines)


CONFIGURATIONS = {
    "lists in lists": ("config.yaml", "[" * 50_000, "it is nested too deeply"),
    "entries in entries": ("config.yaml", "- " * 50_000, "it is nested too deeply"),
    "mappings in mappings": ("config.yaml", "{a: " * 50_000, "it is nested too deeply"),
    "merges": ("config.yaml", merges(), "it has more than 65,536 values"),
    "a key of many parts": ("trainer.toml", "a." * 200_000 + "a = 1", "it is nested too deeply"),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_configuration_is_left_out_and_said(name, tmp_path):
    file, text, reason = CONFIGURATIONS[name]
    with_rows(tmp_path)
    (tmp_path / file).write_text(text)
    outcome = measured("diagnose", tmp_path)
    check_limits(outcome)
    assert (outcome.status, outcome.stderr) == (0, "")
    assert f"{file} was not read: {reason}" in outcome.stdout
    linted = measured("lint", tmp_path / file)
    check_limits(linted)
    assert linted.status == 2
    assert reason.removeprefix("it ") in linted.stderr


# --- What ends the command ---


def shared_tree_in_arguments(folder: Path) -> str:
    with_rows(folder)
    with zipfile.ZipFile(folder / "training_args.bin", "w") as archive:
        archive.writestr("x/data.pkl", TREE)
    return "training_args.bin is no pickle, or a damaged one"


def shared_tree_in_a_batch(folder: Path) -> str:
    (folder / "batch.pkl").write_bytes(TREE)
    return "batch.pkl is no pickle, or a damaged one"


def views(folder: Path) -> str:
    """Write 1,000 views of 2**27 elements, 125 GiB as numbers, in a file of some kilobytes."""
    torch = pytest.importorskip("torch")
    one = torch.zeros(1)
    row = {name: one.expand(2**27) for name in ("log_probs", "advantages", "loss_masks")}
    torch.save({"samples": [row] * 334, "rollout_id": 1}, folder / "1_0.pt")
    return "1_0.pt takes more than 2 GB of memory to read, the limit"


def equals_signs(folder: Path) -> str:
    (folder / "train.log").write_text("=" * 10**7)
    return "train.log is thought to be a text"


def long_words(folder: Path) -> str:
    (folder / "train.log").write_text(("step 1 " + "a" * 2000 + "\n") * 5000)
    return "train.log is thought to be a text"


def tags(folder: Path) -> str:
    (folder / "train.log").write_text("metrics_tag: {" * 36_000)
    return "train.log is thought to be a text"


def calls(folder: Path) -> str:
    (folder / "train.log").write_text("{'loss': a" + "()" * 1_900_000 + "}")
    return "none of its 1 files with a log's name holds one"


def wide_table(folder: Path) -> str:
    width = 60_000
    row = ",".join(["1"] * width) + "\n"
    header = ",".join(f"c{number}" for number in range(width)) + "\n"
    (folder / "table.csv").write_text(header + row * (4 * 10**6 // len(row)))
    return "none of its 1 files with a log's name holds one"


def long_table(folder: Path) -> str:
    (folder / "table.csv").write_text("step,a,b\n" + "1,,\n" * 4_000_000)
    return "table.csv takes more than 2,097,152 lines, the limit"


def empty_objects(folder: Path) -> str:
    (folder / "rows.json").write_text("[" + "{}," * 4_000_000 + "{}]")
    return "none of its 1 files with a log's name holds one"


def empty_lists(folder: Path) -> str:
    (folder / "rows.json").write_text("[" + "[]," * 4_000_000 + "[]]")
    return "rows.json is no trainer_state.json"


def varint(number: int) -> bytes:
    """Return an integer in seven bits per byte."""
    written = b""
    while number > 127:
        written += bytes([number & 127 | 128])
        number >>= 7
    return written + bytes([number])


def empty_histories(folder: Path) -> str:
    """Write a file of wandb with one record of two million empty rows."""
    body = (varint(2 << 3 | 2) + varint(0)) * 1_950_000
    data = bytearray(b":W&B\xbe\xef\x00")
    position = 0
    while position < len(body):
        left = 2**15 - len(data) % 2**15
        if left < 8:
            data += bytes(left)
            continue
        part = body[position : position + left - 7]
        last = position + len(part) == len(body)
        kind = {(True, True): 1, (True, False): 2, (False, False): 3, (False, True): 4}[not position, last]
        data += struct.pack("<IHB", zlib.crc32(part, zlib.crc32(bytes([kind]))), len(part), kind) + part
        position += len(part)
    (folder / "run-1.wandb").write_bytes(data)
    return "none of its 1 files with a log's name holds one"


def pipe(folder: Path) -> str:
    os.mkfifo(folder / "x.pt")
    return "x.pt is a named pipe, and only regular files are read"


def link(folder: Path) -> str:
    (folder.parent / "secret").write_text("the pass is hunter2\n" * 3)
    (folder / "metrics.jsonl").symlink_to(folder.parent / "secret")
    return "metrics.jsonl is a link to"


ENDS = (
    shared_tree_in_a_batch, views, equals_signs, long_words, tags, calls, wide_table,
    long_table, empty_objects, empty_lists, empty_histories, pipe, link,
)  # fmt: skip


OTHER_LIMIT = "takes more than 12 seconds of processor time to read, the limit"
"""What a busy machine may reach before the other limit."""


@pytest.mark.parametrize("write", ENDS)
def test_a_command_ends_in_one_sentence(write, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    message = write(folder)
    outcome = measured("diagnose", folder)
    check_limits(outcome)
    assert (outcome.status, outcome.stdout) == (2, "")
    # Some have a warning before it, such as one about an incomplete last line.
    sentence = outcome.stderr.splitlines()[-1]
    assert sentence.startswith("error: ")
    assert message in sentence or OTHER_LIMIT in sentence
    assert "hunter2" not in outcome.stderr


def test_settings_that_cannot_be_read_are_named_beside_the_verdict(tmp_path):
    message = shared_tree_in_arguments(tmp_path)
    outcome = measured("diagnose", tmp_path)
    check_limits(outcome)
    assert outcome.status == 0
    assert "training_args.bin was not read" in outcome.stdout
    assert message in outcome.stdout


@pytest.mark.parametrize("command", ["report", "audit"])
@pytest.mark.parametrize("write", [shared_tree_in_a_batch, views])
def test_other_commands_end_in_one_sentence_too(command, write, tmp_path):
    message = write(tmp_path)
    outcome = measured(command, tmp_path)
    check_limits(outcome)
    assert outcome.status == 2
    assert message in outcome.stderr or OTHER_LIMIT in outcome.stderr
