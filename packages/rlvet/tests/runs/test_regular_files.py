"""What is no regular file, such as a named pipe, is refused by its name and never waited for."""

import io
import json
import os
import signal
import socket
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest

import bandpo.cli
import rlvet.cli

pytest.importorskip("typer")

ROWS = "".join(
    json.dumps({"step": step, "reward": 0.1 * step, "entropy": 1.0, "kl": 0.1}) + "\n"
    for step in range(1, 41)
)
LOGS = (
    *("metrics.jsonl", "trainer_state.json", "train.log", "console.txt", "rows.csv", "rows.ndjson"),
    *("metrics.jsonl.gz", "run-1.wandb", "project.db", "events.out.tfevents.1"),
)
"""Names of logs."""
DUMPS = ("x.pt", "batch.pkl", "train_data_step1.jsonl", "tokens-0-0.arrow")
"""Names of batches that a framework or the recorder wrote."""
CONFIGS = ("config.yaml", "training_args.bin", "trainer.toml", "trainer.json", "adapter_config.json")
"""Names of configurations."""


class Result(NamedTuple):
    """The exit status of a command, and what it printed."""

    status: int
    stdout: str
    stderr: str


def run(*arguments: object) -> Result:
    """Run a command of rlvet, or `bandpo audit`, in this process. An alarm ends it after 30 seconds."""
    program = bandpo.cli if arguments[0] == "audit" else rlvet.cli
    stdout = io.StringIO()
    stderr = io.StringIO()
    status = 0
    signal.alarm(30)
    try:
        with redirect_stdout(stdout), redirect_stderr(stderr), pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [program.__name__.partition(".")[0], *map(str, arguments)])
            patch.setattr(program, "escape_warnings", lambda: None)
            program.main()
    except SystemExit as end:
        status = int(end.code or 0)
    finally:
        signal.alarm(0)
    return Result(status, stdout.getvalue(), stderr.getvalue())


def check_refused(result: Result, name: str) -> None:
    """Check that a command ended with a line that names a file and its kind."""
    assert "Traceback" not in result.stderr
    assert result.status == 2, result
    assert name in result.stderr
    assert "is a named pipe, and only regular files are read" in result.stderr


@pytest.mark.parametrize("name", [*LOGS, *DUMPS])
def test_a_named_pipe_is_refused_in_a_folder_and_by_itself(name, tmp_path):
    os.mkfifo(tmp_path / name)
    check_refused(run("diagnose", tmp_path), name)
    check_refused(run("diagnose", tmp_path / name), name)


@pytest.mark.parametrize("command", ["audit", "report"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "x.pt", "train.log", "tokens-0-0.arrow"])
def test_other_commands_refuse_it_too(command, name, tmp_path):
    os.mkfifo(tmp_path / name)
    check_refused(run(command, tmp_path), name)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_that_is_a_named_pipe_is_reported(name, tmp_path):
    os.mkfifo(tmp_path / name)
    (tmp_path / "metrics.jsonl").write_text(ROWS)
    result = run("diagnose", tmp_path)
    assert "Traceback" not in result.stderr
    assert f"{name} was not read: " in result.stdout
    assert "is a named pipe, and only regular files are read" in " ".join(result.stdout.split())


@pytest.mark.parametrize("name", ["run.yaml", "run.toml", "run.py", "run.sh"])
def test_lint_refuses_a_named_pipe(name, tmp_path):
    os.mkfifo(tmp_path / name)
    check_refused(run("lint", tmp_path / name), name)


@pytest.mark.parametrize("name", ["bandpo-names.json", "tokens-0-0.sha256", "legs/0001/metrics.jsonl"])
def test_files_beside_a_log_are_refused_too(name, tmp_path):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(tmp_path / name)
    if name.startswith("tokens"):
        (tmp_path / "tokens-0-0.arrow").write_bytes(b"")
    else:
        (tmp_path / "metrics.jsonl").write_text(ROWS)
    check_refused(run("diagnose", tmp_path), Path(name).name)


def test_other_kinds_are_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "device").mkdir()
    (tmp_path / "device" / "metrics.jsonl").symlink_to("/dev/zero")
    (tmp_path / "socket").mkdir()
    server = socket.socket(socket.AF_UNIX)
    server.bind("socket/train.log")
    try:
        for folder, kind in (("device", "a device"), ("socket", "a socket")):
            result = run("diagnose", folder)
            assert result.status == 2
            assert f"is {kind}, and only regular files are read" in result.stderr
    finally:
        server.close()


def test_links_in_a_folder_are_read_and_folders_with_the_name_of_a_file_are_left_alone(tmp_path):
    folder = tmp_path / "run"
    (folder / "model.pt").mkdir(parents=True)
    (folder / "old.log").mkdir()
    (folder / "rows").write_text(ROWS)
    (folder / "metrics.jsonl").symlink_to("rows")
    (tmp_path / "latest").symlink_to(folder)
    (tmp_path / "linked.jsonl").symlink_to(folder / "rows")
    for path in (folder, tmp_path / "latest", tmp_path / "linked.jsonl"):
        result = run("diagnose", path)
        assert result.status in (0, 1), result.stderr
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").symlink_to(tmp_path / "nothing")
    result = run("diagnose", folder)
    assert result.status == 2
    assert "Traceback" not in result.stderr


PRIVATE = "the pass is hunter2"
"""The content of a file outside of a run, which no message may quote."""


def check_named_and_not_quoted(result: Result, name: str) -> None:
    """Check that a link is named, and that nothing of the file is printed."""
    printed = " ".join((result.stdout + result.stderr).split())
    assert f"{name} is a link to " in printed or "it is a link to " in printed
    assert "outside of the run's folder, and such links are not read" in printed
    assert "hunter2" not in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize("name", [*LOGS, *DUMPS])
def test_a_link_out_of_the_folder_is_named_and_not_read(name, tmp_path):
    (tmp_path / "secret").write_text(f"{PRIVATE}\n" * 3)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / name).symlink_to(tmp_path / "secret")
    result = run("diagnose", folder)
    assert result.status == 2
    check_named_and_not_quoted(result, name)


@pytest.mark.parametrize("name", ["a.log", "config.yaml"])
def test_a_link_beside_a_log_is_named_and_not_read(name, tmp_path):
    (tmp_path / "secret").write_text(f"{PRIVATE}\n" * 3)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "rows.jsonl").write_text(ROWS)
    (folder / name).symlink_to(tmp_path / "secret")
    result = run("diagnose", folder)
    assert result.status in (0, 1), result.stderr
    if name != "config.yaml":
        check_named_and_not_quoted(result, name)
    assert "hunter2" not in result.stdout + result.stderr


def test_a_snapshot_of_the_hub_s_cache_is_read(tmp_path):
    """Its files are links to the blobs beside the folder of snapshots."""
    folder = tmp_path / "models--someone--run" / "snapshots" / "0123abcd"
    folder.mkdir(parents=True)
    blobs = tmp_path / "models--someone--run" / "blobs"
    blobs.mkdir()
    (blobs / "4567").write_text(ROWS)
    (folder / "metrics.jsonl").symlink_to("../../blobs/4567")
    result = run("diagnose", folder)
    assert result.status in (0, 1), result.stderr
