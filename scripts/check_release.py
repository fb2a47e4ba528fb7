"""Build the three distributions twice, compare them, and install them into empty environments.

    python scripts/check_release.py build/release [--extras] [--tested]

With --tested, the table of tested versions in docs/frameworks.md must match the current core and the versions that the
adapters name.

Source distributions and wheels are built from the tracked files in two folders and must be equal byte for byte. Each
must contain its own tracked files and nothing else. rlvet, installed alone into an empty environment, must diagnose a
log without torch, numpy and bandpo. Then the wheels of all three are installed together into another. With --extras,
each extra is installed into an empty environment of its own, which takes about a quarter of an hour more. The files are
left in the folder, and their SHA-256 is printed. Needs `build` and the index; takes a few minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import matrix

ROOT = Path(__file__).parents[1]
TORCH = "torch==2.13.0"
PACKAGES = ("rlvet", "bandpo", "bandpo-lab")


def run(*command: str | Path, **options: object) -> str:
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)  # type: ignore[call-overload]
    if result.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{result.stdout}{result.stderr}")
    return result.stdout


def tracked_files() -> list[str]:
    return run("git", "ls-files", cwd=ROOT).splitlines()


def build(folder: Path) -> list[Path]:
    """Build sdist and wheel of the three distributions from a copy of the tracked files, and return them by name."""
    tree = folder / "tree"
    dist = folder / "dist"
    for name in tracked_files():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name, follow_symlinks=False)
    stamp = run("git", "log", "-1", "--format=%ct", cwd=ROOT).strip()
    for package in PACKAGES:
        run(
            # Without isolation, the build uses the pinned packages of locks/build.txt.
            *(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, tree / "packages" / package),
            env=os.environ | {"SOURCE_DATE_EPOCH": stamp},
        )
    shutil.rmtree(tree)
    return sorted(dist.iterdir())


def check_same(first: Sequence[Path], second: Sequence[Path]) -> None:
    for a, b in zip(first, second, strict=True):
        digest = hashlib.sha256(a.read_bytes()).hexdigest()
        if digest != hashlib.sha256(b.read_bytes()).hexdigest():
            sys.exit(f"{a.name}: two builds differ; compare {a} and {b}")
        print(f"{digest}  {a.name}")


def check_contents(sdist: Path, wheel: Path, tracked: set[str]) -> None:
    """Check sdist and wheel against the tracked files of the distribution, relative to its folder."""
    with zipfile.ZipFile(wheel) as archive:
        wheel_files = {name for name in archive.namelist() if ".dist-info/" not in name}
    with tarfile.open(sdist) as archive:
        sdist_files = {member.name.partition("/")[2] for member in archive if member.isfile()}
    modules = {name.removeprefix("src/") for name in tracked if name.startswith("src/")}
    cases = ((wheel, wheel_files, modules), (sdist, sdist_files, {*tracked, "PKG-INFO"}))
    for file, files, expected in cases:
        if files != expected:
            sys.exit(f"{file.name}: missing {sorted(expected - files)}, stray {sorted(files - expected)}")
        print(f"{file.name}: {len(files)} files, none missing or stray")


def check_tested_versions() -> None:
    """Check that the table in docs/frameworks.md matches the current core and the versions that the adapters name."""
    page = (ROOT / "docs/frameworks.md").read_text()
    table = page.partition("<!-- matrix: begin -->")[2].partition("<!-- matrix: end -->")[0]
    digest = matrix.core_digest()
    if f"with the core `{digest}`" not in table:
        sys.exit(f"docs/frameworks.md: the core is {digest} and was not tested; run make test-matrix")
    for name, adapter in matrix.adapters().items():
        # A framework that is tested at both ends of its versions has two rows.
        rows = (f"| {adapter['framework']} | ", f"| {name}, newest | ")
        if not any(f"{row}{adapter['tested']} |" in table for row in rows):
            sys.exit(
                f"docs/frameworks.md: {adapter['framework']} {adapter['tested']} was not tested; "
                "run make test-matrix"
            )
    print(f"docs/frameworks.md: tested with the core {digest}")


class Environment:
    """An empty virtual environment, which knows nothing of this checkout.

    Args:
        folder: Where it is made.
    """

    def __init__(self, folder: Path) -> None:
        run(sys.executable, "-m", "venv", "--clear", folder)
        self._bin = folder / "bin"
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._options: dict[str, object] = {"cwd": folder.parent, "env": variables}

    def run(self, command: str, *arguments: str | Path) -> str:
        """Run a command of the environment, and return what it prints."""
        return run(self._bin / command, *arguments, **self._options)

    def install(self, *requirements: str | Path) -> None:
        """Install requirements of pip."""
        self.run("python", "-m", "pip", "install", "--quiet", "--no-compile", *requirements)

    def check_refused(self, message: str, command: str, *arguments: str | Path) -> None:
        """Check that a command ends with exit status 2 and one line that contains a message."""
        words = [str(self._bin / command), *map(str, arguments)]
        result = subprocess.run(words, capture_output=True, text=True, **self._options)  # type: ignore[call-overload]
        lines = result.stderr.splitlines()
        if result.returncode != 2 or len(lines) != 1 or message not in lines[0]:
            sys.exit(f"{' '.join(words)} should end with one line: {message}; not: {result.stderr}")


def check_rlvet_alone(folder: Path, wheel: Path) -> None:
    """Install rlvet alone, and check that it diagnoses a log without torch, numpy and bandpo."""
    environment = Environment(folder / "rlvet")
    environment.install(wheel)
    installed = environment.run("python", "-m", "pip", "freeze").lower()
    heavy = ("torch", "numpy", "scipy", "pyarrow", "trl", "bandpo", "bandpo-lab")
    if unwanted := [name for name in heavy if re.search(rf"^{name}( @|==)", installed, re.M)]:
        sys.exit(f"rlvet alone installs {', '.join(unwanted)}")
    rows = [{"step": step, "reward": 0.01 * step} for step in range(1, 60)]
    log = folder / "trainer_state.json"
    log.write_text(json.dumps({"log_history": rows}))
    if not environment.run("rlvet", "diagnose", log).startswith("ok: "):
        sys.exit("the installed command does not diagnose a log")
    print("rlvet alone: diagnoses a log without torch, numpy and bandpo")


def check_all(folder: Path, wheels: Mapping[str, Path]) -> None:
    """Install bandpo and bandpo-lab step by step, and check what works and what is refused after each step."""
    environment = Environment(folder / "environment")
    # The pinned torch first: without it, pip would take a newer one with gigabytes of CUDA libraries.
    environment.install(TORCH)
    environment.install(wheels["bandpo"])
    code = "import bandpo, torch; print(bandpo.Band().bounds(torch.tensor([0.08]).log()).upper.item())"
    if not environment.run("python", "-c", code).startswith("2.41"):
        sys.exit("the installed core gives other bounds")
    environment.run("bandpo", "bounds", "0.08")
    environment.check_refused("pip install ./packages/rlvet", "bandpo", "audit", folder)
    environment.install("--no-deps", wheels["bandpo-lab"])  # `make demo` installs its dependencies
    environment.check_refused("bandpo-lab needs rlvet", "bandpo-lab", "recipes", folder / "recipes")
    # The three together, as the command of README has them.
    environment.install("--force-reinstall", "--no-deps", *wheels.values())
    environment.install(wheels["rlvet"])
    environment.run("bandpo-lab", "recipes", folder / "recipes")
    for name, wheel in wheels.items():
        version = environment.run(name, "--version").strip()
        if f"-{version}-" not in wheel.name:
            sys.exit(f"{name} --version prints {version}, and the wheel is {wheel.name}")
    recipes = len(list((folder / "recipes").rglob("*.yaml")))
    print(f"installed: bandpo alone, and the three together with {recipes} recipe files")


def check_extras(folder: Path, wheels: Mapping[str, Path]) -> None:
    """Install each extra of each distribution into an empty environment, and run the command there.

    The other distributions are installed beside it, since none requires a sibling in its metadata.
    """
    for name in PACKAGES:
        project = tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())["project"]
        for extra in project["optional-dependencies"]:
            environment = Environment(folder / f"{name}-{extra}")
            siblings = [wheel for sibling, wheel in wheels.items() if sibling != name]
            requirement = f"{name}[{extra}] @ {wheels[name].as_uri()}"
            environment.install(TORCH, *siblings, requirement)
            environment.run("python", "-m", "pip", "check")
            environment.run(name, "--version")
            shutil.rmtree(folder / f"{name}-{extra}")
            print(f"{name}[{extra}]: installed into an empty environment", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder for the files; emptied first")
    parser.add_argument("--extras", action="store_true", help="install each extra into an empty environment")
    parser.add_argument(
        "--tested", action="store_true", help="check that the table of tested versions matches this core"
    )
    arguments = parser.parse_args()
    if arguments.tested:
        check_tested_versions()
    folder = arguments.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    first, second = build(folder / "1"), build(folder / "2")
    check_same(first, second)
    tracked = {name for name in tracked_files() if not (ROOT / name).is_symlink()}
    wheels = {}
    for package in PACKAGES:
        stem = package.replace("-", "_")
        [wheel] = [file for file in first if file.name.startswith(f"{stem}-") and file.suffix == ".whl"]
        [sdist] = [file for file in first if file.name.startswith(f"{stem}-") and file.suffix != ".whl"]
        prefix = f"packages/{package}/"
        own = {name.removeprefix(prefix) for name in tracked if name.startswith(prefix)}
        check_contents(sdist, wheel, own | {".gitignore"})  # hatchling adds the one of the repository
        wheels[package] = wheel
    check_rlvet_alone(folder, wheels["rlvet"])
    check_all(folder, wheels)
    if arguments.extras:
        check_extras(folder, wheels)


if __name__ == "__main__":
    main()
