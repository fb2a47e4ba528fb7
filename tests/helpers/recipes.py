"""Follows a recipe of CONTRIBUTING.md in a copy of the folders that it changes."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pages import ROOT, blocks

PAGE = ROOT / "CONTRIBUTING.md"


def texts_of(heading: str) -> dict[str, str]:
    """Return the blocks of a recipe by their titles, its commands under the empty title."""
    return {block.title: block.text for block in blocks(PAGE) if block.heading == heading}


def lines_of(text: str) -> dict[str, str]:
    """Return the lines of a block ``NAME: LINE`` by their names."""
    return dict(re.findall(r"^([\w.-]+): (.*)$", text, re.M))


def copy(to: Path, paths: Sequence[str]) -> None:
    """Copy folders and files of the repository into another folder, without what Python compiled."""
    for path in paths:
        (to / path).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / path).is_dir():
            shutil.copytree(ROOT / path, to / path, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / path, to / path)


def insert(file: Path, after: str, text: str) -> None:
    """Insert a text behind another one, which occurs once."""
    content = file.read_text(encoding="utf-8")
    assert content.count(after) == 1, f"{file.name} has {after!r} {content.count(after)} times"
    file.write_text(content.replace(after, after + text), encoding="utf-8")


def run(command: str, folder: Path, sources: Sequence[str]) -> int:
    """Run a command of a recipe in a copy, and return the number of tests that passed.

    Args:
        command: A line that begins with ``python``.
        folder: The copy.
        sources: The folders of the copy whose modules are imported, in place of the installed ones.
    """
    words = [sys.executable, *shlex.split(command, comments=True)[1:]]
    if "pytest" in words:
        words += ["-q", "-n", "0", "-p", "no:randomly", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(folder / source) for source in sources)}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    return int(passed[1]) if passed else 0
