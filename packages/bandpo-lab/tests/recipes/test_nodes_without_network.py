"""The commands of the page for nodes without a network, run with a lock of two small packages and without an index."""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile

import pytest

from pages import ROOT, blocks

pytest.importorskip("hatchling", reason="builds the packages")

LOCK = "packages/bandpo-lab/src/bandpo_lab/recipes/gpu.txt"
NAMES = ("first_of_two", "second_of_two")
NO_INDEX = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0"}
"""No settings of this machine, and an index that nobody answers for."""


def page_commands():
    """Return the commands of the section for the machine with a network, and for a node."""
    page = blocks(ROOT / "docs/install.md", "sh")
    found = [block.text for block in page if block.heading == "Nodes without a network"]
    assert len(found) == 2
    return found


def write_wheel(folder, name):
    """Write a wheel with one module, and return its SHA-256."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    information = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": "VALUE = 1\n",
        f"{information}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{information}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{information}/RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as wheel:
        for member, text in files.items():
            wheel.writestr(member, text)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def make_clone(folder, digests=None):
    """Write a clone with the packages of this one and a lock of two packages, which only the index has."""
    index = folder / "index"
    index.mkdir(parents=True)
    found = {name: write_wheel(index, name) for name in NAMES} | (digests or {})
    clone = folder / "clone"
    ignored = shutil.ignore_patterns("tests", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "packages", clone / "packages", ignore=ignored)
    (clone / "locks").mkdir()
    locked = [f"{name}==1.0 \\\n    --hash=sha256:{digest}\n" for name, digest in found.items()]
    (clone / "locks/gpu.txt").write_text("".join(locked))
    (clone / LOCK).write_text("".join(f"{name}==1.0\n" for name in NAMES))
    # The page's Python: this one, whose environment has what builds the packages, as the lock has.
    programs = folder / "bin"
    programs.mkdir()
    site = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    python = programs / "python3.12"
    python.write_text(
        f'#!/bin/sh\nset -e\n"{sys.executable}" "$@"\n'
        f'echo "{sysconfig.get_path("purelib")}" > "$3/{site}/of_the_tests.pth"\n'
    )
    python.chmod(0o755)
    return clone


def run(clone, commands, **variables):
    """Run commands in a clone; the first that fails ends them."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    environment = kept | NO_INDEX | variables | {"PATH": f"{clone.parent}/bin:{os.environ['PATH']}"}
    words = ["bash", "-e", "-c", commands]
    return subprocess.run(words, cwd=clone, env=environment, capture_output=True, text=True)


def with_index(clone):
    """Return the variables with which pip finds the packages of a folder in place of an index."""
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(clone.parent / "index")}


@pytest.fixture(scope="module")
def carried(tmp_path_factory):
    """A clone with the folder of wheels, as it arrives at a node."""
    clone = make_clone(tmp_path_factory.mktemp("n"))
    process = run(clone, page_commands()[0], **with_index(clone))
    assert process.returncode == 0, process.stderr
    shutil.rmtree(clone / ".venv-wheels")
    shutil.rmtree(clone.parent / "index")
    return clone


@pytest.mark.slow
def test_the_wheels_are_installed_without_an_index(carried):
    assert sorted(path.name for path in (carried / "wheels").iterdir()) == [
        "SHA256SUMS",
        *(f"{name}-1.0-py3-none-any.whl" for name in NAMES),
    ]
    process = run(carried, page_commands()[1])
    assert process.returncode == 0, process.stdout + process.stderr
    code = (
        "import first_of_two, second_of_two\n"
        "from importlib.metadata import distribution, entry_points\n"
        "for name in ('rlvet', 'bandpo', 'bandpo-lab'): print(distribution(name).locate_file(''))\n"
        "print(sorted({point.value for point in entry_points(group='verl.plugins')}))\n"
    )
    python = carried / ".venv-verl/bin/python"
    found = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    *folders, plugins = found.stdout.splitlines()
    assert all(folder.startswith(str(carried / ".venv-verl")) for folder in folders)
    assert plugins == "['bandpo.integrations.verl']"


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["changed", "lost"])
def test_a_wheel_that_changed_or_was_lost_is_named_before_anything_is_installed(carried, tmp_path, fault):
    clone = tmp_path / "clone"
    shutil.copytree(carried / "wheels", clone / "wheels")
    wheel = clone / "wheels/second_of_two-1.0-py3-none-any.whl"
    if fault == "changed":
        wheel.write_bytes(wheel.read_bytes() + b"\0")
    else:
        wheel.unlink()
    process = run(clone, page_commands()[1])
    assert process.returncode != 0
    assert f"{wheel.name}: FAILED" in process.stdout
    assert not (clone / ".venv-verl").exists()


@pytest.mark.slow
def test_a_package_with_another_digest_than_the_locks_is_not_taken(tmp_path):
    clone = make_clone(tmp_path, {"first_of_two": "0" * 64})
    process = run(clone, page_commands()[0], **with_index(clone))
    assert process.returncode != 0
    assert "DO NOT MATCH THE HASHES" in process.stderr
    assert not list(clone.glob("wheels/*.whl"))
