"""The commands of the pages, in the environment that their page installs.

A process imports only what the requirements of a page bring with them, by the metadata of the installed packages. One
test installs rlvet in a fresh environment, as its page says.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("transformers")
pytest.importorskip("packaging")
from packaging.requirements import Requirement

from helpers.run_files import batch, nemo_rl
from helpers.simulated_runs import simulate
from helpers.sources import SOURCES
from pages import PAGES, ROOT, blocks, commands

HIDE = """
import importlib.machinery, importlib.metadata, json, os

hidden = set(json.loads(os.environ["HIDDEN_MODULES"]))
installed = set(json.loads(os.environ["INSTALLED_DISTRIBUTIONS"]))
find = importlib.machinery.PathFinder.find_spec
discover = importlib.metadata.MetadataPathFinder.find_distributions


def find_unless_hidden(cls, name, path=None, target=None):
    return None if name.partition(".")[0] in hidden else find(name, path, target)


def discover_installed(*context):
    found = discover(*context)
    return [one for one in found if one.metadata["Name"].lower().replace("_", "-") in installed]


importlib.machinery.PathFinder.find_spec = classmethod(find_unless_hidden)
importlib.metadata.MetadataPathFinder.find_distributions = staticmethod(discover_installed)
"""

INSTALL_PAGE = ROOT / "docs/install.md"
"""The page of a command whose own page installs nothing that has its program."""
ALL_PAGES = [
    *PAGES,
    *sorted((ROOT / "packages").glob("*/README.md")),
    *(ROOT / name for name in ("SECURITY.md", "examples/README.md", "upstream/README.md")),
    ROOT / "packages/rlvet/src/rlvet/skill/rlvet/SKILL.md",
]
PROGRAMS = ("bandpo", "rlvet", "bandpo-lab")
SIBLINGS = {"bandpo": {"bandpo"}, "rlvet": {"rlvet"}, "bandpo-lab": {"bandpo-lab", "rlvet", "bandpo"}}
"""The packages of this repository that a program needs at least."""

Installation = tuple[str, ...]
"""Requirements of the packages of this repository that are installed together, such as ``("rlvet[records]",)``."""

RECORDS = ("run/tokens", "dumps", "runs/clip", "runs/band")
"""What the pages call a record of tokens, or batches that a framework saved."""
NOT_RUN = {
    r"bandpo-lab eval --data data/trl/aime24\.parquet": "the test of the page on evaluation runs it, shortened",
    r"bandpo-lab compare-evals": "the test of the page on evaluation runs it",
    r"bandpo-lab data prepare (?!sums)": "downloads from a hub",
    r"bandpo-lab setup (?!.*--dry-run)": "downloads from a hub",
    r"bandpo-lab eval (models|--regrade)": "needs a model that was trained, or its evaluation",
    r"bandpo-lab run verl .*(MODEL|METHOD|RULE)": "has words to fill in; tests/recipes/test_flow.py runs it",
    r"bandpo-lab setup --model MODEL": "has words to fill in; tests/recipes/test_flow.py runs it",
    r"bandpo-lab run verl (?!.*--dry-run)": "trains on GPUs; tests/recipes/test_flow.py has verl accept its settings",
    r"bandpo-lab preflight": "looks for GPUs; tests/cluster/test_preflight.py runs it",
    r"bandpo-lab recipes summary LOG": "needs the log of a recipe; tests/recipes/test_flow.py runs it",
    r"bandpo-lab rehearse": "starts Ray; tests/rehearsal runs it",
    r"bandpo-lab train --config recipes/small": "needs a GPU",
    r"bandpo-lab train": "tests/commands/test_commands.py runs it, with the files of its page",
    r"bandpo-lab study quick": "takes seven minutes; tests/study runs smaller ones",
    r"bandpo-lab study page": "needs a study; tests/study runs it",
    r"bandpo-lab study my-study\.yaml": "needs the study of a user; tests/study runs one",
    r"bandpo-lab compare": "takes minutes; the last test here runs it with fewer batches",
    r"rlvet lint -$": "reads what is piped to it; packages/rlvet/tests/lint/test_command.py runs it",
}
"""Beginnings of commands that are not run here, each with the reason."""


def installations(page: Path) -> list[Installation]:
    """Return what each ``pip install`` on a page installs from the clone; an extra alone is added to another one."""
    text = page.read_text(encoding="utf-8")
    statements = re.findall(r"^ *(?:- run: )?pip install (.*)$", text, re.M)
    statements += re.findall(r"`pip install ([^`]+)`", " ".join(text.split()))
    found = [
        tuple(
            name + extras
            for name, extras in re.findall(r"\./(?:bandpo/)?packages/([\w-]+)(\[[\w,]+\])?", one)
        )
        for one in statements
        # What this needs is installed before, from a lock.
        if "--no-deps" not in one
    ]
    return [
        one for one in found if one and all(SIBLINGS[Requirement(text).name] <= names_of(one) for text in one)
    ]


def names_of(installation: Installation) -> set[str]:
    """Return the names of the packages of an installation."""
    return {Requirement(text).name for text in installation}


def needs_of(words: tuple[str, ...]) -> set[str]:
    """Return the packages that a command needs: its program, and what reads a record or evaluates a method."""
    program, command, *arguments = words
    needs = {program, *SIBLINGS[program]}
    if command == "audit":
        needs |= {"rlvet"}
    if program == "rlvet" and not set(RECORDS).isdisjoint(arguments):
        needs |= {"numpy", "pyarrow"}
    if program == "rlvet" and not {"--words", "--method"}.isdisjoint(arguments):
        needs |= {"bandpo"}
    return needs


def smallest_installation(page: Path, words: tuple[str, ...]) -> Installation:
    """Return the smallest installation of a page that has what a command needs; empty if the page has none.

    A page that installs nothing with the program stands for the page on installing.
    """
    stated = installations(page)
    if not any(words[0] in names_of(one) for one in stated):
        stated = installations(INSTALL_PAGE)
    fitting = [one for one in stated if needs_of(words) <= installed_by(one)]
    return min(fitting, key=lambda one: len(installed_by(one)), default=())


@cache
def reason_of(words: tuple[str, ...]) -> str | None:
    """Return the beginning of the reasons by which a command is not run here; None if it is run."""
    command = " ".join(words)
    return next((beginning for beginning in NOT_RUN if re.match(beginning, command)), None)


def is_complete(words: list[str]) -> bool:
    """Return True if the words of a command, without its program, can be run; False if they only name it."""
    if words[0].startswith("-") or words in (["data", "prepare"], ["run", "verl"], ["setup", "--dry-run"]):
        return False
    return len(words) > 1 or words[0] in ("env", "skill", "recipes")


def commands_of_pages() -> list[tuple[Path, tuple[str, ...]]]:
    """Return every command with arguments on a page, once; a command alone is only named."""
    found = {}
    for page in ALL_PAGES:
        for program in PROGRAMS:
            for words in commands(page, program):
                # Of an argument that may be repeated, one.
                arguments = [word.removesuffix("...") for word in words if word != "…"]
                if is_complete(arguments):
                    found[page, (program, *arguments)] = None
    return list(found)


@cache
def installed_by(installation: Installation) -> frozenset[str]:
    """Return the names of all distributions that an installation brings with it and that are installed here."""
    pending = [Requirement(text) for text in installation]
    installed = set()
    seen = set()
    while pending:
        requirement = pending.pop()
        name = normalized(requirement.name)
        key = (name, frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        try:
            needed = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # of another system or Python
            continue
        installed.add(name)
        for text in needed:
            dependency = Requirement(text)
            extras = {"", *requirement.extras}
            if dependency.marker is None or any(dependency.marker.evaluate({"extra": e}) for e in extras):
                pending.append(dependency)
    return frozenset(installed)


@cache
def hidden_modules(installation: Installation) -> list[str]:
    """Return the modules of installed packages that an installation does not bring with it."""
    installed = installed_by(installation)
    return sorted(
        module
        for module, packages in metadata.packages_distributions().items()
        if not installed & {normalized(package) for package in packages}
    ) + [name.replace("-", "_") for name in PROGRAMS if name not in installed]


def normalized(name: str) -> str:
    return name.lower().replace("_", "-")


def run_in(installation: Installation, command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command where only the modules of an installation can be imported."""
    (folder / "hide").mkdir(exist_ok=True)
    (folder / "hide/sitecustomize.py").write_text(HIDE)
    program, _, rest = command.partition(" ")
    module = program.replace("-", "_")
    paths = [str(folder / "hide"), *map(str, SOURCES)]
    variables = {
        "PYTHONPATH": os.pathsep.join(paths),
        "HIDDEN_MODULES": json.dumps(hidden_modules(installation)),
        "INSTALLED_DISTRIBUTIONS": json.dumps([*installed_by(installation)]),
        "HF_HUB_OFFLINE": "1",
    }
    words = ["bash", "-c", f'exec "{sys.executable}" -m {module} {rest}']
    return subprocess.run(words, cwd=folder, env=os.environ | variables, capture_output=True, text=True)


def write_inputs(folder: Path) -> None:
    """Write the runs and the configurations that the pages name, but no record."""
    rows = [{"step": step, "reward": step / 40, "grad_norm": 0.5} for step in range(1, 41)]
    log = "".join(json.dumps(row) + "\n" for row in rows)
    for run in ("demo/FixedClip-0.2-seed-0", "mine", "qwen2.5-3b-instruct-band-kl", "compare/NAME"):
        (folder / "runs" / run).mkdir(parents=True)
        (folder / "runs" / run / "metrics.jsonl").write_text(log)
    for name in ("LOG", "RUN", "A", "B", "run-1", "run-2"):
        (folder / name).mkdir()
        (folder / name / "metrics.jsonl").write_text(log)
    pair = ROOT / "packages/rlvet/tests/compare/page"
    for name in ("works.py", "train.py"):
        shutil.copy(pair / "works.py", folder / name)
    cell = {"cell_type": "code", "metadata": {}, "outputs": [], "source": (pair / "works.py").read_text()}
    notebook = {"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (folder / "train.ipynb").write_text(json.dumps(notebook))
    for name in ("stalls.sh", "run_qwen.sh", "train.sh", "CONFIG"):
        shutil.copy(pair / "stalls.sh", folder / name)
    (folder / "config.yaml").write_text(
        "algorithm: {adv_estimator: grpo}\nactor_rollout_ref: {rollout: {n: 8}}\n"
    )
    (folder / "rl.toml").write_text(
        "[orchestrator]\nbatch_size = 128\n\n[[orchestrator.train.source]]\nname = 'reverse-text'\n"
    )


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A folder with the runs, the records, the data and the files that the pages name."""
    folder = tmp_path_factory.mktemp("reader")
    write_inputs(folder)
    for name in ("run/tokens", "runs/clip", "runs/band"):
        (folder / name).mkdir(parents=True)
        simulate(folder / name)
    (folder / "dumps").mkdir()
    for step in range(1, 4):
        nemo_rl(folder / "dumps", step, batch(step))
    for block in blocks(ROOT / "docs/write-your-own.md", "python"):
        if block.title and "/" not in block.title:
            (folder / block.title).write_text(block.text)
    problems = [{"problem": f"What is {i}+4?", "answer": str(i + 4)} for i in range(2)]
    (folder / "sums.jsonl").write_text("\n".join(map(json.dumps, problems)))
    return folder


@pytest.fixture
def folder(inputs, tmp_path):
    """A copy of that folder, in which a command may write."""
    return shutil.copytree(inputs, tmp_path / "reader")


FOUND = commands_of_pages()
INSTALLATIONS = {(page, words): smallest_installation(page, words) for page, words in FOUND}
RUNS = sorted({(words, one) for (_, words), one in INSTALLATIONS.items() if one and reason_of(words) is None})


def test_every_beginning_of_a_command_that_is_not_run_is_on_a_page():
    assert len(FOUND) > 100
    assert {reason_of(words) for _, words in FOUND} == {None, *NOT_RUN}


def test_each_page_installs_what_its_commands_need():
    lacking = [
        (page.name, *words) for (page, words), installation in INSTALLATIONS.items() if not installation
    ]
    assert lacking == []


def test_modules_that_a_page_does_not_install_are_hidden():
    (installed,) = installations(ROOT / "docs/diagnose.md")[:1]
    assert installed == ("rlvet",)
    assert {"math_verify", "torch", "datasets", "numpy", "bandpo"} <= {*hidden_modules(installed)}
    (installed,) = installations(ROOT / "docs/paper.md")
    assert installed == ("rlvet", "bandpo", "bandpo-lab[eval]")
    assert "math_verify" not in hidden_modules(installed)
    assert {"trl", "verl", "matplotlib"} & {*hidden_modules(installed)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "installation"), RUNS, ids=lambda value: shlex.join(value) if value[0] in PROGRAMS else ""
)
def test_a_command_runs_in_the_environment_of_its_page(words, installation, folder):
    line = " ".join(word if word == ">" else shlex.quote(word) for word in words)
    process = run_in(installation, line, folder)
    # A finding ends with 1.
    admitted = (0, 1) if words[0] == "rlvet" else (0,)
    assert process.returncode in admitted, (installation, process.stderr)
    assert "Traceback" not in process.stderr


@pytest.mark.slow
def test_the_commands_of_rlvet_in_a_fresh_environment(tmp_path):
    """`pip install ./packages/rlvet` in an empty environment, and each command of its pages that reads no record."""
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=True)
    source = shutil.copytree(
        ROOT / "packages/rlvet", tmp_path / "rlvet", ignore=shutil.ignore_patterns("build", "tests")
    )
    install = [environment / "bin/python", "-m", "pip", "install", "-c", ROOT / "constraints.txt", source]
    installed = subprocess.run(install, capture_output=True, text=True)
    if "No matching distribution" in installed.stderr or "Temporary failure" in installed.stderr:
        pytest.skip("no package index")
    assert installed.returncode == 0, installed.stderr
    write_inputs(tmp_path)
    alone = [words for words, installation in RUNS if installation == ("rlvet",)]
    assert len(alone) > 15
    assert {words[1] for words in alone} == {"demo", "diagnose", "diff", "lint", "report", "skill"}
    for words in alone:
        run = subprocess.run(
            [environment / "bin" / words[0], *words[1:]], cwd=tmp_path, capture_output=True, text=True, env={}
        )
        assert run.returncode in (0, 1), run.stderr
        assert run.stderr == ""


@pytest.mark.slow
def test_the_page_on_evaluation_in_its_environment(folder):
    (installation,) = installations(ROOT / "docs/paper.md")
    process = run_in(installation, "bandpo-lab data prepare aime24=sums.jsonl", folder)
    assert process.returncode == 0, process.stderr
    evaluate = "bandpo-lab eval --data data/trl/aime24.parquet"
    process = run_in(installation, f"{evaluate} --n 1 --limit 1 --output-dir runs/eval-a", folder)
    assert process.returncode == 0, process.stderr
    shutil.copytree(folder / "runs/eval-a", folder / "runs/eval-b")
    process = run_in(installation, "bandpo-lab compare-evals runs/eval-a runs/eval-b", folder)
    assert process.returncode == 0, process.stderr
    # Without the extra, one line says what to install.
    process = run_in(("rlvet", "bandpo", "bandpo-lab"), f"{evaluate} --output-dir runs/c", folder)
    assert process.returncode != 0
    line = process.stderr.splitlines()[-1]
    assert "pip install ./packages/rlvet ./packages/bandpo './packages/bandpo-lab[eval]'" in line
    assert "Traceback" not in process.stderr


@pytest.mark.exhaustive
def test_the_page_on_your_own_rules_says_what_compare_needs(folder):
    """The page's own commands, with 5 batches in place of 80."""
    page = ROOT / "docs/write-your-own.md"
    install = "pip install './packages/bandpo-lab[study]'"
    assert f"The picture needs `{install}`" in " ".join(page.read_text().split())
    compared = [words for words in commands(page, "bandpo-lab") if words[0] == "compare" and "--lag" in words]
    compared += [words for words in commands(page, "bandpo-lab") if "--seeds" in words]
    assert len(compared) == 2
    for words in compared:
        command = shlex.join(["bandpo-lab", *words, "--batches", "5"])
        process = run_in(("rlvet", "bandpo", "bandpo-lab[study]"), command, folder)
        assert process.returncode == 0, process.stderr
    assert (folder / "runs/compare/curves.png").exists()
    assert (folder / "runs/fresh/curves.png").exists()
    command = shlex.join(["bandpo-lab", *compared[0], "--batches", "5", "--output-dir", "runs/bare"])
    process = run_in(("rlvet", "bandpo", "bandpo-lab"), command, folder)
    assert process.returncode == 0, process.stderr
    assert f"no picture: matplotlib is missing; in a clone, {install}" in process.stdout
