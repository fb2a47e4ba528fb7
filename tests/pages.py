"""Helpers that find and run the fenced blocks and the commands of the documentation."""

import doctest
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "MAINTAINING.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
REPORTS = ROOT / "research/reports"
PAGES += [REPORTS / "benchmarks.md", REPORTS / "one-card.md", REPORTS / "rlvet/how-right.md"]
PAGES += sorted((ROOT / "packages/bandpo-lab/src/bandpo_lab/recipes").rglob("*.md"))


class Block(NamedTuple):
    """A fenced block."""

    page: str
    heading: str
    """The nearest one above it."""
    language: str
    title: str
    """A file's name, where the block is a file."""
    text: str


def extension(name: str) -> ModuleType:
    """Return a module of docs/extensions, with which the site is made."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/extensions/{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def name_of(page: Path) -> str:
    """Return the name of a page: its path below docs, or the file's name."""
    docs = ROOT / "docs"
    return page.relative_to(docs).as_posix() if docs in page.parents else page.name


def blocks(page: Path, *languages: str) -> list[Block]:
    """Of these languages; of all if none is given."""
    found, heading = [], ""
    pattern = r'^#+ (?P<heading>.*)$|^```(?P<language>\w+)(?: title="(?P<title>.*)")?\n(?P<text>(?s:.*?))^```'
    for match in re.finditer(pattern, page.read_text(encoding="utf-8"), re.M):
        heading = match["heading"] or heading
        if match["language"] and (not languages or match["language"] in languages):
            found.append(
                Block(name_of(page), heading, match["language"], match["title"] or "", match["text"])
            )
    return found


def commands(page: Path, program: str) -> list[list[str]]:
    """Return every command of a program on a page, as the words after the program's name.

    A command stands on a line of a shell block or of an indented block, or in a code span.

    Args:
        page: The page.
        program: ``bandpo``, ``rlvet`` or ``bandpo-lab``.
    """
    text = page.read_text(encoding="utf-8")
    fenced = "".join(block.text for block in blocks(page, "sh", "console"))
    indented = "".join(re.findall(r"^    .*\n", text, re.M))
    lines = (fenced + indented).replace("\\\n", " ")
    shell = re.findall(rf"^(?: *|\$ ){program} (.*)$", lines, re.M)
    spans = re.findall(rf"`{program} ([^`]+)`", text)
    return [shlex.split(command, comments=True) for command in [*shell, *spans]]


FRAMEWORKS = ROOT / "docs/frameworks.md"
ASYNCHRONOUS = "The asynchronous trainer"
"""The section of docs/trl.md that needs a file of the examples."""
OF_ADAPTERS = {"frameworks.md": ("Tinker", "NeMo-RL"), "trl.md": (ASYNCHRONOUS,)}
"""The sections of each page whose Python needs more than the page says, and is run by the tests of the adapter."""


def framework_blocks(heading: str, page: Path = FRAMEWORKS) -> list[str]:
    """Return the blocks below the heading of a framework."""
    found = [block.text for block in blocks(page) if block.heading == heading]
    assert found, f"{name_of(page)} has no block below {heading}"
    return found


def section(heading: str, page: Path = FRAMEWORKS) -> str:
    """Return the text of a section of a page, with those below it."""
    _, found, rest = page.read_text(encoding="utf-8").partition(f"\n## {heading}\n")
    assert found, f"{name_of(page)} has no section {heading}"
    return rest.partition("\n## ")[0]


def python_blocks(*, of_frameworks: bool) -> list:
    """Parameters of `test_python`: every block but files and those of `OF_ADAPTERS`, with what its page needs."""
    found = []
    for page in PAGES:
        for number, block in enumerate(blocks(page, "python")):
            imported = re.search(r"^(>>> )?(from|import) .*\b(trl|bandpo_lab)\b", block.text, re.M)
            of_adapter = block.heading in OF_ADAPTERS.get(page.name, ())
            if not block.title and not of_adapter and bool(imported) == of_frameworks:
                found.append(pytest.param(page, block.text, id=f"{page.name}-{number}"))
    return found


class Executed(NamedTuple):
    """What a block of Python did."""

    names: Mapping[str, Any]
    """The global names that it defined."""
    warnings: Sequence[str]
    """The texts of the warnings that were given."""


def check_python(page: Path, block: str, folder: Path, monkeypatch, capsys) -> Executed:
    """Beside the files that the page has the reader write; what is printed is what the comment says, up to a colon."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    for file in blocks(page, "python"):
        if file.title and "/" not in file.title:
            (folder / file.title).write_text(file.text)
    if block.startswith(">>>"):
        example = doctest.DocTestParser().get_doctest(block, {}, "docs", "docs", 0)
        assert doctest.DocTestRunner().run(example).failed == 0
        return Executed(example.globs, [])
    names: dict[str, Any] = {}
    # Frameworks warn at their own defaults, so warnings are no errors here.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(compile(block, "docs", "exec"), names)
    said = re.findall(r"^print\(.*\)  # (.*?)(?:: .*)?$", block, re.M)
    assert capsys.readouterr().out.splitlines()[: len(said)] == said or not said
    return Executed(names, [str(warning.message) for warning in caught])


def follow(steps: list[Block], folder: Path) -> None:
    """Do what a page says, block by block: write its files, run its commands, compare what they print."""
    for step in steps:
        if step.title:
            (folder / step.title).write_text(step.text)
        elif step.language == "console":
            command, _, expected = step.text.removeprefix("$ ").partition("\n")
            assert _shell(command, folder).split() == expected.split()
        elif step.language == "sh":
            _shell(re.sub(r"^pip install .*$", "", step.text, flags=re.M), folder)


def _shell(command: str, folder: Path) -> str:
    """Return what a command prints in ``folder``."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    packages = os.pathsep.join(str(source) for source in sorted((ROOT / "packages").glob("*/src")))
    variables = {"PATH": path, "PYTHONPATH": packages, "COLUMNS": "120", "PYTHONIOENCODING": "utf-8"}
    words, environment = ["bash", "-ec", command], os.environ | variables
    run = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, f"{command}\n{run.stdout}{run.stderr}"
    return run.stdout
