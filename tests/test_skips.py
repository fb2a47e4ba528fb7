"""Tests of a framework that is absent, or of another version than they are for, are skipped with the reason."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.frameworks import needs

ROOT = Path(__file__).parents[1]
INDEXED = ("trl", "verl", "skyrl", "tinker")
"""The frameworks with an extra of bandpo, whose oldest version is known."""
OTHERS = ("swift", "openrlhf", "areal", "nemo_rl", "roll", "rllm", "slime", "miles", "prime_rl")

COLLECT = """
import sys, pytest

class WithoutFrameworks:
    def pytest_configure(self):
        sys.modules.update(dict.fromkeys({absent!r}))

options = ["-q", "-n", "0", "-rs", "--collect-only", "-p", "no:randomly", *sys.argv[1:]]
sys.exit(pytest.main(options, plugins=[WithoutFrameworks()]))
"""


def write_framework(folder, name, version):
    """Write an installed package of this name and version that has no modules."""
    package, metadata = folder / name, folder / f"{name}-{version}.dist-info/METADATA"
    for path in (package, metadata.parent):
        path.mkdir()
    (package / "__init__.py").touch()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def files_of_tests():
    """Yield the files of tests that mention a framework."""
    mention = re.compile(rf"\b({'|'.join((*INDEXED, *OTHERS))})\b", re.IGNORECASE)
    for folder in ("packages/bandpo", "packages/bandpo-lab", "research"):
        for path in sorted((ROOT / folder).glob("tests/**/test_*.py")):
            if mention.search(path.read_text(encoding="utf-8")):
                yield path


def collect(environment=None, absent=()):
    """Return what pytest prints when it collects the files in another process."""
    command = [sys.executable, "-c", COLLECT.format(absent=absent), *files_of_tests()]
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout[-5000:] + process.stderr[-2000:]
    return process.stdout


@pytest.mark.slow
def test_no_module_fails_where_the_frameworks_are_older(tmp_path, clean_environment):
    for name in (*INDEXED, *OTHERS):
        write_framework(tmp_path, name, "0.0.1")
    printed = collect(clean_environment | {"PYTHONPATH": str(tmp_path)})
    for name in INDEXED:
        assert re.search(rf"needs {name} [\d.]+ or later, and this is 0\.0\.1", printed)
    for name in OTHERS:
        if name == "miles":
            continue  # its tests are those of slime, which is looked for first
        assert f"needs another version of {name}: No module named" in printed


@pytest.mark.slow
def test_no_module_fails_where_the_frameworks_are_absent(clean_environment):
    # What TRL and verl require, and bandpo does not, is absent with them.
    printed = collect(clean_environment, (*INDEXED, *OTHERS, "accelerate", "peft", "ray", "tensordict"))
    for name in INDEXED:
        assert re.search(rf"needs {name} [\d.]+ or later", printed)


@pytest.fixture
def clean_environment(monkeypatch):
    """Return the environment of the process without clones of frameworks."""
    monkeypatch.delenv("BANDPO_CLONES", raising=False)
    return dict(os.environ)


@pytest.mark.parametrize(
    ("version", "oldest", "reason"),
    [
        ("1.9.2", "", r"needs trl 1\.10 or later, and this is 1\.9\.2"),
        ("1.10.0", "", None),
        ("99.0", "", None),
        ("1.10.0", "1.12", r"needs trl 1\.12 or later, and this is 1\.10\.0"),
    ],
)
def test_a_version_is_too_old_and_never_too_new(version, oldest, reason, tmp_path, monkeypatch):
    write_framework(tmp_path, "trl", version)
    monkeypatch.syspath_prepend(tmp_path)
    if reason is None:
        needs("trl", oldest=oldest)
        return
    with pytest.raises(pytest.skip.Exception, match=reason):
        needs("trl", oldest=oldest)
