"""Whatever is renamed into place was on the disk before, and its folder after: a power cut leaves no half file."""

import ast
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bandpo._atomic import write_whole
from bandpo_lab.files.writing import locked, put_in_place, remove, replacing, seal
from helpers.frameworks import needs
from pages import ROOT


class WriteOrder:
    """Watches files under a folder; refuses a rename of what the disk has not taken."""

    def __init__(self, folder, monkeypatch):
        self.folder = folder.resolve()
        self.renames = 0
        self.unsynced_folders = set()
        self._synced = {}
        for name, watching in {"fsync": self._fsync, "replace": self._rename, "rename": self._rename}.items():
            original = getattr(os, name)
            monkeypatch.setattr(os, name, lambda *a, w=watching, o=original, **k: w(o, *a, **k))

    def _fsync(self, fsync, descriptor):
        fsync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        self._synced[path] = self._state(path)
        self.unsynced_folders.discard(path)

    def _rename(self, rename, source, target, **named):
        source, target = Path(source).resolve(), Path(target).resolve()
        leaves = target.name.startswith(".unfinished")  # it is about to be deleted
        if self.folder in source.parents and not leaves:
            for path in [source, *source.rglob("*")]:
                assert self._synced.get(path) == self._state(path), (
                    f"{path} is renamed before it is on the disk"
                )
            self.unsynced_folders.add(target.parent)
            self.renames += 1
        rename(source, target, **named)

    @staticmethod
    def _state(path):
        """What changes when a file is written to after it was synced."""
        return None if path.is_dir() else (path.stat().st_size, path.stat().st_mtime_ns, path.stat().st_ino)

    def assert_kept(self):
        assert self.renames
        assert self.unsynced_folders == set()


@pytest.fixture
def order(tmp_path, monkeypatch):
    return WriteOrder(tmp_path, monkeypatch)


def test_a_rename_before_its_fsync_is_noticed(order, tmp_path):
    (tmp_path / "a").write_text("half")
    with pytest.raises(AssertionError, match="a is renamed before it is on the disk"):
        (tmp_path / "a").replace(tmp_path / "b")


def test_files_and_folders_of_commands(order, tmp_path):
    """All commands write by these."""
    with replacing(tmp_path / "file") as unfinished:
        unfinished.write_text("whole")
    with replacing(tmp_path / "folder") as unfinished:
        (unfinished / "inner").mkdir(parents=True)
        (unfinished / "inner" / "file").write_text("whole")
    write_whole(tmp_path / "page.html", "whole")
    seal(tmp_path, [tmp_path / "file"])
    with locked(tmp_path):
        remove(tmp_path / "folder")
    (tmp_path / "new").write_text("whole")
    put_in_place(tmp_path / "new", tmp_path / "newer")
    order.assert_kept()
    assert order.renames == 6


def test_a_training(order, tmp_path):
    needs("trl")
    from bandpo_lab.training.arguments import parse_arguments
    from bandpo_lab.training.train import run_training

    options = [
        "--per_device_train_batch_size=8",
        "--num_generations=4",
        "--steps_per_generation=2",
        "--num_iterations=1",
    ]
    options += [
        "--max_steps=4",
        "--save_steps=2",
        "--save_total_limit=1",
        "--logging_steps=1",
        "--train_prompts=32",
    ]
    options += ["--max_completion_length=8", "--eval_prompts=0", f"--record={tmp_path / 'record'}"]
    run_training(parse_arguments([*options, "--output_dir", str(tmp_path / "run")]))
    order.assert_kept()
    assert order.renames > 6


def renaming_calls(path):
    """Lines that rename or write a file under its own name without the helpers."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
        renames = node.func.attr in ("replace", "rename") and len(node.args) == 1 and not node.keywords
        if renames or (owner, node.func.attr) in {("os", "replace"), ("os", "rename"), ("shutil", "move")}:
            yield f"{path.relative_to(ROOT)}:{node.lineno}"


HELPERS = (
    "packages/bandpo/src/bandpo/_atomic.py",
    "packages/rlvet/src/rlvet/_atomic.py",
    "packages/bandpo-lab/src/bandpo_lab/files/writing.py",
)


def test_only_the_helpers_rename():
    files = sorted(ROOT.glob("packages/*/src/**/*.py"))
    calls = [call for path in files for call in renaming_calls(path)]
    elsewhere = [call for call in calls if not call.startswith(HELPERS)]
    # A damaged checkpoint, or a damaged file of a record, that is moved aside: nothing is written. And files that the
    # processes of a rehearsal pass to each other, which nobody reads after them.
    assert [call.partition(":")[0] for call in elsewhere] == [
        "packages/bandpo/src/bandpo/audit/recorder.py",
        "packages/bandpo-lab/src/bandpo_lab/rehearsal/rollout.py",
        "packages/bandpo-lab/src/bandpo_lab/rehearsal/transfer.py",
        "packages/bandpo-lab/src/bandpo_lab/training/run_folder.py",
    ]


def stray(folder, process):
    import socket

    path = folder / f".unfinished-{socket.gethostname()}-{process}-samples.jsonl"
    path.write_text("half")
    return path


def test_what_a_killed_process_left_is_removed_by_the_next_that_writes(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    old, of_another = stray(tmp_path, ended.pid), stray(tmp_path, os.getppid())
    elsewhere = tmp_path / f".unfinished-another-machine-{ended.pid}-samples.jsonl"
    elsewhere.write_text("half")
    with replacing(tmp_path / "file") as unfinished:
        unfinished.write_text("whole")
    assert (old.exists(), of_another.exists(), elsewhere.exists()) == (False, True, True)
    old = stray(tmp_path, ended.pid)
    with locked(tmp_path):
        assert not old.exists()


def test_a_folder_that_is_being_removed_has_no_name_of_its_own(tmp_path, monkeypatch):
    """Whenever the removal is cut off, no part of a checkpoint is left that could be taken for one."""
    checkpoint = tmp_path / "checkpoint-2"
    checkpoint.mkdir()
    (checkpoint / "optimizer.pt").write_text("state")
    with monkeypatch.context() as patched:
        patched.setattr("bandpo_lab.files.writing.shutil.rmtree", lambda *a, **k: None)
        remove(checkpoint)
    assert [path.name.partition("-")[0] for path in tmp_path.iterdir()] == [".unfinished"]


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("write", [lambda path: write_whole(path, "text"), lambda path: replaced(path)])
def test_a_full_disk_names_the_file(write, tmp_path, monkeypatch):
    """Cleaning up, which fails too, does not hide it."""
    (tmp_path / "results.json").write_text("before")
    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(Path, "unlink", lambda *a, **k: full())
    with pytest.raises(OSError, match=r"No space left on device: '.*results.json'"):
        write(tmp_path / "results.json")
    assert (tmp_path / "results.json").read_text() == "before"


def replaced(path):
    with replacing(path) as unfinished:
        unfinished.write_text("after")


def test_the_lock_does_not_hide_the_error_of_its_block(tmp_path, monkeypatch):
    def failing():
        with locked(tmp_path):
            monkeypatch.setattr("bandpo_lab.files.writing.remove", full)
            raise OSError(errno.EIO, "Input/output error", "samples.jsonl")

    with pytest.raises(OSError, match=r"Input/output error: 'samples.jsonl'"):
        failing()


@pytest.mark.slow
@pytest.mark.parametrize("module", ["bandpo", "bandpo_lab"])
def test_a_deleted_working_folder_is_said_in_one_line(module, tmp_path):
    script = f"import os; os.chdir({str(tmp_path / 'gone')!r}); os.rmdir({str(tmp_path / 'gone')!r}); "
    (tmp_path / "gone").mkdir()
    script += f"import subprocess, sys; command = [sys.executable, '-m', {module!r}, '--help']; "
    script += "sys.exit(subprocess.run(command).returncode)"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr.splitlines()) == (
        2,
        ["error: the current folder was deleted; change to one that is there"],
    )
