"""Fetch Pyodide, the Python of the page "Diagnose a log in the browser", for `mkdocs build`.

    python scripts/fetch_pyodide.py build/pyodide

The script downloads the package `pyodide` in the version below with npm, checks it against the hash below, and unpacks
the files that a browser loads. A package that is already in the folder and has this hash is not downloaded again. To
take another version, change both constants: `npm view pyodide@VERSION dist.integrity` prints the hash.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

VERSION = "314.0.7"
INTEGRITY = "sha512-0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A=="
"""The hash of the package, as npm writes it."""

FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
"""The files that a browser loads."""

PURPOSE = f"the page docs/diagnose.md needs pyodide {VERSION}, a package of npm"


class FetchProblem(Exception):
    """An error with a message for the user: a missing program or a failed download."""


def fetch(folder: Path) -> None:
    """Put the files of Pyodide into a folder.

    Raises:
        FetchProblem: if npm is not installed or cannot fetch the package, or the package has another hash.
    """
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / f"pyodide-{VERSION}.tgz"
    if not archive.is_file() or integrity_of(archive) != INTEGRITY:
        _pack(archive)
    if integrity_of(archive) != INTEGRITY:
        raise FetchProblem(
            f"{archive} has the hash {integrity_of(archive)}, not {INTEGRITY}: it is not the package that "
            "scripts/fetch_pyodide.py names, and was not unpacked"
        )
    with tarfile.open(archive) as package:
        for name in FILES:
            content = package.extractfile(f"package/{name}")
            if content is None:
                raise FetchProblem(
                    f"{archive} has no file package/{name}; correct FILES in scripts/fetch_pyodide.py"
                )
            (folder / name).write_bytes(content.read())


def integrity_of(file: Path) -> str:
    """Return the hash of a file, as npm writes it."""
    return "sha512-" + base64.b64encode(hashlib.sha512(file.read_bytes()).digest()).decode()


def _pack(archive: Path) -> None:
    """Download the package with npm into the folder of the archive."""
    npm = shutil.which("npm")
    if npm is None:
        raise FetchProblem(f"npm is not installed, and {PURPOSE}: install Node.js, which brings npm")
    command = [npm, "pack", f"pyodide@{VERSION}", "--silent", "--pack-destination", str(archive.parent)]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode or not archive.is_file():
        reason = run.stderr.strip() or run.stdout.strip() or f"it ended with status {run.returncode}"
        raise FetchProblem(f"npm could not fetch the package, and {PURPOSE}. npm says: {reason}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    try:
        fetch(parser.parse_args().folder)
    except FetchProblem as problem:
        sys.exit(f"error: {problem}")


if __name__ == "__main__":
    main()
