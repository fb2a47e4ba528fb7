"""Build both distributions twice, compare them, and install them into an empty environment.

    python scripts/check_release.py build/release [--extras] [--tested]

With --tested, the table of tested versions in docs/frameworks.md must be of this core, and of the versions that the
adapters name.

From what git tracks: source distributions and wheels are built in two folders and must be equal byte for byte. Each
must hold its own tracked files and nothing else. Installed into an empty environment, bandpo must diagnose a log
without torch, name the extra that a command lacks, and run with it. With --extras, each must resolve against the
package index. The files are left in the folder, with their SHA-256. Needs `build` and the index; takes a minute or two.
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


def tracked() -> list[str]:
    return run("git", "ls-files", cwd=ROOT).splitlines()


def build(folder: Path) -> list[Path]:
    """Sdist and wheel of both, from a fresh copy of the tracked files: bandpo's before those of the lab."""
    tree, dist = folder / "tree", folder / "dist"
    for name in tracked():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name, follow_symlinks=False)
    stamp = run("git", "log", "-1", "--format=%ct", cwd=ROOT).strip()
    for project in (tree, tree / "lab"):
        run(
            # What builds them was installed by its digest: locks/build.txt.
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


def check_contents(sdist: Path, wheel: Path, ours: set[str]) -> None:
    """Against the tracked files of one distribution, relative to its folder."""
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    with tarfile.open(sdist) as archive:
        source = {member.name.partition("/")[2] for member in archive if member.isfile()}
    wanted = {name.removeprefix("src/") for name in ours if name.startswith("src/")}
    for file, found, expected in ((wheel, held, wanted), (sdist, source, {*ours, "PKG-INFO"})):
        if found != expected:
            sys.exit(f"{file.name}: missing {sorted(expected - found)}, stray {sorted(found - expected)}")
        print(f"{file.name}: {len(found)} files, none missing or stray")


def check_tested_versions() -> None:
    """Check that the table of docs/frameworks.md is of this core and of the versions that the adapters name."""
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
    environment = folder / "environment"
    run(sys.executable, "-m", "venv", "--clear", environment)
    python, command = environment / "bin/python", environment / "bin/bandpo"
    elsewhere = {"cwd": folder, "env": {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}}

    def pip(*what: str | Path) -> None:
        run(python, "-m", "pip", "install", "--quiet", "--no-compile", *what, **elsewhere)

    def refused(words: str, *arguments: str) -> None:
        ended = subprocess.run([command, *arguments], capture_output=True, text=True, **elsewhere)  # type: ignore[call-overload]
        last = ended.stderr.splitlines()[-1]  # torch warns where there is no numpy
        if ended.returncode != 2 or "Traceback" in ended.stderr or words not in last:
            sys.exit(f"bandpo {' '.join(arguments)} should end with one line: {words}; not: {ended.stderr}")

    # The command alone: a log is diagnosed without torch and numpy.
    pip(library)
    installed = run(python, "-m", "pip", "freeze", **elsewhere)
    heavy = [
        name for name in ("torch", "numpy", "scipy", "pyarrow", "trl") if f"\n{name}==" in f"\n{installed}"
    ]
    if heavy:
        sys.exit(f"bandpo alone installs {', '.join(heavy)}")
    version = run(command, "--version", **elsewhere).strip()
    if not all(f"-{version}-" in wheel.name for wheel in (library, lab)):
        sys.exit(f"bandpo --version prints {version}, the wheels are {library.name} and {lab.name}")
    rows = [{"step": step, "reward": 0.01 * step} for step in range(1, 60)]
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    if not run(command, "diagnose", folder / "trainer_state.json", **elsewhere).startswith("ok: "):
        sys.exit("the installed command does not diagnose a log")
    refused("needs the package torch; in a clone of bandpo, pip install", "bounds", "0.08")

    # Losses need torch alone.
    pip(TORCH)
    code = "import bandpo, torch; print(bandpo.Band().bounds(torch.tensor([0.08]).log()).upper.item())"
    if not run(python, "-c", code, **elsewhere).startswith("2.41"):
        sys.exit("the installed core gives other bounds")
    run(command, "bounds", "0.08", **elsewhere)

    pip("--no-deps", lab)  # what it requires, `make demo` installs
    run(environment / "bin/bandpo-lab", "recipes", folder / "recipes", **elsewhere)
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
        for extra in run(python, "-c", code, **elsewhere).split():
            pip("--dry-run", library, f"{wheel}[{extra}]")
            print(f"{name}[{extra}]: resolves", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the files go; emptied first")
    parser.add_argument("--extras", action="store_true", help="resolve each, without installing")
    parser.add_argument(
        "--tested", action="store_true", help="demand that the table of tested versions is of this core"
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
    ours = {name for name in tracked() if not (ROOT / name).is_symlink()}
    of_lab = {name for name in ours if name.startswith("lab/")}
    # What the [tool.hatch.build.targets.sdist] of pyproject.toml leaves out.
    left_out = ("results/", "studies/", "docs/figures/", "docs/studies/")
    of_library = {name for name in ours - of_lab if not name.startswith(left_out)}
    check_contents(library_source, library, of_library)
    of_lab.add(".gitignore")  # hatchling adds the repository's
    check_contents(lab_source, lab, {name.removeprefix("lab/") for name in of_lab})
    check_install(folder, library, lab, arguments.extras)


if __name__ == "__main__":
    main()
