import re
import subprocess
import sys
from pathlib import Path

import pytest

import bandpo

SRC = Path(bandpo.__file__).parent
ROOT = Path(__file__).parents[1]
OUTER_FILES = {"__main__.py", "figures.py"}
CORE = sorted({*SRC.glob("*.py"), *(SRC / "divergences").glob("*.py")} - {SRC / name for name in OUTER_FILES})
HEAVY = ["trl", "transformers", "datasets", "verl", "ray", "matplotlib", "typer", "rich"]


def loaded(statement):
    code = f"import sys; {statement}; print(*[m for m in {HEAVY!r} if m in sys.modules])"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()


def test_the_core_loads_torch_alone():
    assert loaded("import bandpo") == []


def test_the_command_loads_no_framework_before_it_is_used():
    assert set(loaded("import bandpo.cli.app")) <= {"typer", "rich"}


@pytest.mark.parametrize("module", CORE, ids=lambda path: path.name)
def test_the_core_imports_no_outer_layer(module):
    text = module.read_text()
    outer = "integrations|tasks|evals|data|training|figures|diagnosis|cli|rehearsal|study"
    assert not re.search(rf"\bbandpo\.({outer})\b|from bandpo import .*\b({outer})\b", text)


def test_everything_exported_exists_and_is_documented():
    assert bandpo.__all__ == sorted(bandpo.__all__, key=lambda n: (not n.isupper(), not n[0].isupper(), n))
    for name in bandpo.__all__:
        assert getattr(bandpo, name).__doc__


def test_source_files_stay_short():
    long = {p.name: n for p in SRC.rglob("*.py") if (n := len(p.read_text().splitlines())) > 400}
    assert long == {}


def test_tracked_files_stay_small():
    """The base model is the largest, at 1.3 MB; anything larger belongs elsewhere."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    assert {p.name: p.stat().st_size for p in files if p.is_file() and p.stat().st_size > 2_000_000} == {}


def test_models_are_safetensors_alone():
    """No format that unpickles, in the package or in what it reads: no call loads one, remote code is never on."""
    suffixes = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".npy", ".npz", ".ckpt", ".joblib"}
    assert [p.name for p in SRC.rglob("*") if p.suffix in suffixes] == []
    banned = r"torch\.load\(|\bpickle\b|joblib|allow_pickle=True|trust_remote_code=True|use_safetensors=False"
    found = {p.name: m[0] for p in SRC.rglob("*.py") if (m := re.search(banned, p.read_text()))}
    assert found == {}


def test_remote_code_is_off_unless_asked_for():
    pytest.importorskip("trl")
    from bandpo.training.arguments import parse

    assert parse(["--use_cpu", "--bf16=False"]).training.trust_remote_code is False


def test_one_version():
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert cited[1] == bandpo.__version__
    assert f"## {bandpo.__version__}" in (ROOT / "CHANGELOG.md").read_text()
