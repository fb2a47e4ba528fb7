"""Build the release twice, compare it, and install it into an empty environment.

    python scripts/check_release.py build/release [--extras]

From what git tracks: source distribution and wheel are built in two folders and must be equal byte for byte; the wheel
must hold the package's tracked files and nothing else; installed into an empty environment it must need torch alone,
name the extra that a command lacks, and with that extra run. With --extras, each must resolve against the package
index. The files are left in the folder, with their SHA-256. Needs `build` and the index; takes a minute or two.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

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
    """Sdist and wheel from a fresh copy of the tracked files."""
    tree, dist = folder / "tree", folder / "dist"
    for name in tracked():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name, follow_symlinks=False)
    stamp = run("git", "log", "-1", "--format=%ct", cwd=ROOT).strip()
    run(
        *(sys.executable, "-m", "build", "--outdir", dist, tree),
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


def check_contents(sdist: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    with tarfile.open(sdist) as archive:
        source = {member.name.partition("/")[2] for member in archive if member.isfile()}
    ours = [name for name in tracked() if not (ROOT / name).is_symlink()]
    wanted = {name.removeprefix("src/") for name in ours if name.startswith("src/")}
    for what, found, expected in (("wheel", held, wanted), ("sdist", source, {*ours, "PKG-INFO"})):
        if found != expected:
            sys.exit(f"{what}: missing {sorted(expected - found)}, stray {sorted(found - expected)}")
        print(f"{what}: {len(found)} files, none missing or stray")


def check_install(folder: Path, wheel: Path, extras: bool) -> None:
    environment = folder / "environment"
    run(sys.executable, "-m", "venv", "--clear", environment)
    python, command = environment / "bin/python", environment / "bin/bandpo"
    elsewhere = {"cwd": folder, "env": {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}}
    run(python, "-m", "pip", "install", "--quiet", TORCH, **elsewhere)
    before = run(python, "-m", "pip", "freeze", **elsewhere).splitlines()
    run(python, "-m", "pip", "install", "--quiet", wheel, **elsewhere)
    after = run(python, "-m", "pip", "freeze", **elsewhere).splitlines()
    if [line for line in after if line not in before and not line.startswith("bandpo")]:
        sys.exit(f"the core needs more than torch: {set(after) - set(before)}")
    code = "import bandpo, torch; print(bandpo.Band().bounds(torch.tensor([0.08]).log()).upper.item())"
    if not run(python, "-c", code, **elsewhere).startswith("2.41"):
        sys.exit("the installed core gives other bounds")
    without = subprocess.run([command, "--version"], capture_output=True, text=True, check=False)
    if "needs the package typer; in a clone of bandpo, pip install" not in without.stderr:
        sys.exit(f"a command without its extra should name it, not: {without.stderr}")
    run(python, "-m", "pip", "install", "--quiet", f"{wheel}[cli]", **elsewhere)
    version = run(command, "--version", **elsewhere).strip()
    if f"-{version}-" not in wheel.name:
        sys.exit(f"bandpo --version prints {version}, the wheel is {wheel.name}")
    run(command, "bounds", "0.08", **elsewhere)
    run(command, "recipes", folder / "recipes", **elsewhere)
    print(
        f"installed: torch alone, bandpo {version}, {len(list((folder / 'recipes').rglob('*.yaml')))} recipe files"
    )

    if not extras:
        return
    code = "from importlib.metadata import metadata; print(*metadata('bandpo').get_all('Provides-Extra'))"
    for extra in run(python, "-c", code, **elsewhere).split():
        run(python, "-m", "pip", "install", "--dry-run", "--quiet", f"{wheel}[{extra}]", **elsewhere)
        print(f"extra {extra}: resolves", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the files go; emptied first")
    parser.add_argument("--extras", action="store_true", help="resolve each, without installing")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    (sdist, wheel), second = sorted(build(folder / "1"), reverse=True), build(folder / "2")
    check_same(sorted((sdist, wheel)), second)
    check_contents(sdist, wheel)
    check_install(folder, wheel, arguments.extras)


if __name__ == "__main__":
    main()
