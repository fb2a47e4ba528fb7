"""Build both distributions twice, compare them, and install them into an empty environment.

    python scripts/check_release.py build/release [--extras] [--tested]

With --tested, the table of tested versions in docs/frameworks.md must match the current core and the versions that the
adapters name.

Source distributions and wheels are built from the tracked files in two folders and must be equal byte for byte. Each
must contain its own tracked files and nothing else. Installed into an empty environment, bandpo must diagnose a log
without torch, name the extra that a command lacks, and run with it. With --extras, each extra is installed into an
empty environment of its own, which takes about a quarter of an hour more. The files are left in the folder, and their
SHA-256 is printed. Needs `build` and the index; takes a minute or two.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import matrix

ROOT = Path(__file__).parents[1]
TORCH = "torch==2.13.0"


def run(*command: str | Path, **options: object) -> str:
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)  # type: ignore[call-overload]
    if result.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{result.stdout}{result.stderr}")
    return result.stdout


def tracked_files() -> list[str]:
    return run("git", "ls-files", cwd=ROOT).splitlines()


def build(folder: Path) -> list[Path]:
    """Build sdist and wheel of both distributions from a copy of the tracked files; bandpo's files come first."""
    tree = folder / "tree"
    dist = folder / "dist"
    for name in tracked_files():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name, follow_symlinks=False)
    stamp = run("git", "log", "-1", "--format=%ct", cwd=ROOT).strip()
    for project in (tree, tree / "lab"):
        run(
            # Without isolation, the build uses the pinned packages of locks/build.txt.
            *(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, project),
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


def check_install(folder: Path, library: Path, lab: Path, extras: bool) -> None:
    """Install both wheels into an empty environment step by step, and check what works after each step."""
    environment = folder / "environment"
    run(sys.executable, "-m", "venv", "--clear", environment)
    python, command = environment / "bin/python", environment / "bin/bandpo"
    isolated = {"cwd": folder, "env": {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}}

    def pip(*arguments: str | Path) -> None:
        run(python, "-m", "pip", "install", "--quiet", "--no-compile", *arguments, **isolated)

    def check_refused(message: str, *arguments: str) -> None:
        result = subprocess.run([command, *arguments], capture_output=True, text=True, **isolated)  # type: ignore[call-overload]
        last_line = result.stderr.splitlines()[-1]  # torch warns if numpy is missing
        if result.returncode != 2 or "Traceback" in result.stderr or message not in last_line:
            sys.exit(
                f"bandpo {' '.join(arguments)} should end with one line: {message}; not: {result.stderr}"
            )

    # bandpo alone: it diagnoses a log without torch and numpy.
    pip(library)
    installed = run(python, "-m", "pip", "freeze", **isolated)
    heavy = [
        name for name in ("torch", "numpy", "scipy", "pyarrow", "trl") if f"\n{name}==" in f"\n{installed}"
    ]
    if heavy:
        sys.exit(f"bandpo alone installs {', '.join(heavy)}")
    version = run(command, "--version", **isolated).strip()
    if not all(f"-{version}-" in wheel.name for wheel in (library, lab)):
        sys.exit(f"bandpo --version prints {version}, the wheels are {library.name} and {lab.name}")
    rows = [{"step": step, "reward": 0.01 * step} for step in range(1, 60)]
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    if not run(command, "diagnose", folder / "trainer_state.json", **isolated).startswith("ok: "):
        sys.exit("the installed command does not diagnose a log")
    check_refused("needs the package torch; in a clone of bandpo, pip install", "bounds", "0.08")

    # With torch, losses and bounds work.
    pip(TORCH)
    code = "import bandpo, torch; print(bandpo.Band().bounds(torch.tensor([0.08]).log()).upper.item())"
    if not run(python, "-c", code, **isolated).startswith("2.41"):
        sys.exit("the installed core gives other bounds")
    run(command, "bounds", "0.08", **isolated)

    pip("--no-deps", lab)  # `make demo` installs its dependencies
    run(environment / "bin/bandpo-lab", "recipes", folder / "recipes", **isolated)
    recipes = len(list((folder / "recipes").rglob("*.yaml")))
    print(
        f"installed: bandpo {version} without torch, with torch, and bandpo-lab with {recipes} recipe files"
    )

    if not extras:
        return
    for name, wheel in (("bandpo", library), ("bandpo-lab", lab)):
        code = (
            f"from importlib.metadata import metadata; print(*metadata({name!r}).get_all('Provides-Extra'))"
        )
        for extra in run(python, "-c", code, **isolated).split():
            check_extra(folder / f"{name}-{extra}", library, wheel, extra, isolated)
            print(f"{name}[{extra}]: installed into an empty environment", flush=True)


def check_extra(
    environment: Path, library: Path, wheel: Path, extra: str, isolated: dict[str, object]
) -> None:
    """Install a wheel with an extra into an empty environment, and run the command there.

    Args:
        environment: The folder of the environment, which is removed afterwards.
        library: The wheel of bandpo, which bandpo-lab needs.
        wheel: The wheel with the extra.
        extra: The name of the extra.
        isolated: The options of `subprocess.run` that keep this checkout out of the environment.
    """
    run(sys.executable, "-m", "venv", "--clear", environment)
    pip = (environment / "bin/python", "-m", "pip")
    requirement = f"{wheel.name.partition('-')[0].replace('_', '-')}[{extra}] @ {wheel.as_uri()}"
    # The pinned torch first: without it, pip would take a newer one with gigabytes of CUDA libraries.
    run(*pip, "install", "--quiet", "--no-compile", TORCH, library, requirement, **isolated)
    run(*pip, "check", **isolated)
    run(environment / "bin/bandpo", "--version", **isolated)
    shutil.rmtree(environment)


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
    library, lab, library_source, lab_source = sorted(
        first, key=lambda path: (path.suffix != ".whl", path.name)
    )
    tracked = {name for name in tracked_files() if not (ROOT / name).is_symlink()}
    lab_files = {name for name in tracked if name.startswith("lab/")}
    # The exclusions of [tool.hatch.build.targets.sdist] in pyproject.toml.
    excluded = ("results/", "studies/", "docs/figures/", "docs/studies/")
    library_files = {name for name in tracked - lab_files if not name.startswith(excluded)}
    check_contents(library_source, library, library_files)
    lab_files.add(".gitignore")  # hatchling adds the one of the repository
    check_contents(lab_source, lab, {name.removeprefix("lab/") for name in lab_files})
    check_install(folder, library, lab, arguments.extras)


if __name__ == "__main__":
    main()
