"""What README and the documentation print is run; where that takes a hub or a cluster, it is parsed."""

import ast
import doctest
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import warnings
from itertools import product
from pathlib import Path

import pytest

import bandpo
from bandpo.integrations import ADAPTERS
from pages import PAGES, ROOT, blocks

PAGE_OF_METHODS = (ROOT / "docs/which-method.md").read_text()
# Those of frameworks.md need their frameworks: tests/integrations runs each. Those with a title are files.
PYTHON = [
    pytest.param(page, block.text, id=f"{block.page}-{number}")
    for page in PAGES
    if page.name != "frameworks.md"
    for number, block in enumerate(blocks(page, "python"))
    if not block.title
]


@pytest.mark.parametrize(("page", "block"), PYTHON)
def test_python(page, block, tmp_path, monkeypatch, capsys):
    """Beside the files that the page has the reader write; what is printed is what the comment says, up to a colon."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for file in blocks(page, "python"):
        if file.title and "/" not in file.title:
            (tmp_path / file.title).write_text(file.text)
    if block.startswith(">>>"):
        example = doctest.DocTestParser().get_doctest(block, {}, "docs", "docs", 0)
        assert doctest.DocTestRunner().run(example).failed == 0
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of the frameworks at their own defaults
            exec(compile(block, "docs", "exec"), {})
        said = re.findall(r"^print\(.*\)  # (.*?)(?:: .*)?$", block, re.M)
        assert capsys.readouterr().out.splitlines()[: len(said)] == said or not said


def shell(command: str, folder: Path, source: Path = ROOT / "src") -> str:
    """What a command prints, in ``folder``, with the package of ``source``."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {"PATH": path, "PYTHONPATH": str(source), "COLUMNS": "120", "PYTHONIOENCODING": "utf-8"}
    run = subprocess.run(
        ["bash", "-ec", command], cwd=folder, env=os.environ | variables, capture_output=True, text=True
    )
    assert run.returncode == 0, f"{command}\n{run.stdout}{run.stderr}"
    return run.stdout


def follow(steps, folder: Path, source: Path = ROOT / "src") -> None:
    """Does what a page says, block by block: writes its files, runs its commands, compares what they print."""
    for step in steps:
        if step.title:
            (folder / step.title).write_text(step.text)
        elif step.language == "console":
            command, _, expected = step.text.removeprefix("$ ").partition("\n")
            assert shell(command, folder, source).split() == expected.split()
        elif step.language == "sh":
            shell(re.sub(r"^pip install .*$", "", step.text, flags=re.M), folder, source)


@pytest.mark.parametrize(
    "step", [b for page in PAGES for b in blocks(page, "console") if page.name != "write-your-own.md"]
)
def test_console(step, tmp_path):
    follow([step], tmp_path)


@pytest.mark.slow
def test_an_objective_is_added_as_the_page_says(tmp_path):
    """The command of verl alone is not run: tests/integrations/test_verl.py builds what it configures."""
    steps = [
        b
        for b in blocks(ROOT / "docs/write-your-own.md")
        if b.heading in ("A clip rule", "An objective", "A method")
        and (b.title or b.text.startswith("bandpo "))
    ]
    assert len(steps) == 4
    follow(steps, tmp_path)
    logged = (tmp_path / "runs/mine/metrics.jsonl").read_text()
    assert '"audit/softened"' in logged


@pytest.mark.slow
@pytest.mark.parametrize("heading", ["For commands and trainers", "For everyone"])
def test_a_divergence_is_added_as_the_page_says(heading, tmp_path):
    """In an empty folder, or in a copy of the checkout."""
    steps = [b for b in blocks(ROOT / "docs/write-your-own.md") if b.heading.startswith(heading)]
    if heading == "For everyone":
        for name in ("src", "tests"):
            shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("conftest.py", "pyproject.toml"):
            shutil.copy(ROOT / name, tmp_path)
        follow(steps, tmp_path, tmp_path / "src")
    else:
        follow(steps, tmp_path)
    rows = (tmp_path / "runs/le-cam/metrics.jsonl").read_text()
    assert "audit/clip_high" in rows
    assert "LeCam()" in (tmp_path / "runs/le-cam/config.yaml").read_text()
    assert (tmp_path / "le-cam.png").read_bytes().startswith(b"\x89PNG")


def test_the_verl_overrides_compose():
    """The two overrides as README prints them, through hydra and into verl's own config object."""
    hydra = pytest.importorskip("hydra")
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass

    block = next(b.text for b in blocks(ROOT / "README.md", "sh") if "main_ppo" in b.text)
    overrides = [word for word in shlex.split(block.replace("\\\n", " ")) if "policy_loss" in word]
    assert len(overrides) == 2
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra.compose("ppo_trainer", overrides)
    loss = omega_conf_to_dataclass(config.actor_rollout_ref.actor.policy_loss)
    assert (type(loss).__name__, loss.loss_mode, loss.clip) == (
        "BandPolicyLossConfig",
        "band",
        "Band(KL(), 0.05)",
    )
    assert OmegaConf.is_config(config)


def test_the_verl_page_composes():
    """Its one override, with each of those that may come second, through hydra and into verl's own config object."""
    hydra = pytest.importorskip("hydra")
    from verl.utils.config import omega_conf_to_dataclass

    page = (ROOT / "docs/verl.md").read_text()
    lines = re.findall(r'^    "?(\+?actor_rollout_ref\.actor\.policy_loss\.[^"#\n]*)"?', page, re.M)
    targets, named = [x for x in lines if x[0] != "+"], [x.strip() for x in lines if x[0] == "+"]
    assert (len(targets), len(named)) == (2, 5)
    for target, second in product(targets, named):
        name, _, text = second.rpartition("policy_loss.")[2].partition("=")
        if "Audited" in target and name in ("clip", "method"):
            continue
        with hydra.initialize_config_module("verl.trainer.config", version_base=None):
            config = hydra.compose("ppo_trainer", [target.strip(), second])
        loss = omega_conf_to_dataclass(config.actor_rollout_ref.actor.policy_loss)
        assert type(loss).__name__ == target.strip().rpartition(".")[2]
        assert str(getattr(loss, name)).lower() == text.strip("'").lower()


def names_in(file: Path) -> set[str]:
    """What a module defines or imports, its classes' attributes included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.ClassDef(name=name)
                | ast.alias(name=name)
                | ast.Name(id=name)
            ):
                names.add(name)
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_names_in_the_package_exist(page):
    """Every `bandpo.…` path of the page, looked up in the source: importing an adapter takes its framework."""
    text = page.read_text()
    for block in blocks(page):
        text = text.replace(block.text, "") if block.title else text
    for path in set(re.findall(r"\bbandpo(?:\.\w+)+", text)):
        place, names = ROOT / "src/bandpo", path.split(".")[1:]
        while names and (place / names[0]).is_dir():
            place /= names.pop(0)
        if names and (place / f"{names[0]}.py").is_file():
            place /= f"{names.pop(0)}.py"
        elif names and place == ROOT / "src/bandpo":  # which takes its names from its modules
            assert hasattr(bandpo, names[0]), path
            names = names[2:]
        elif names:
            place /= "__init__.py"
        assert set(names) <= names_in(place) if names else place.exists(), path


def test_the_tests_named_in_the_paper_map_exist():
    named = re.findall(
        r"`(?:(test_\w+\.py)(?:::)?)?(test_\w+)?`", (ROOT / "docs" / "paper-map.md").read_text()
    )
    file = ""
    checked = 0
    for in_file, test in named:
        file = in_file or file
        if file:
            (path,) = [*(ROOT / "tests").rglob(file), *(ROOT / "lab/tests").rglob(file)]
            text = path.read_text()
            assert not test or f"def {test}(" in text, f"{file}::{test}"
            checked += 1
    assert checked > 10


def test_the_page_of_methods_has_each_with_its_source():
    """As it is written, with the paper that its docstring names."""
    rows = dict(
        re.findall(
            r"^\| `(\w+\(\))` \|.*?\| \[([\d.]+)\]\(https://arxiv\.org/abs/\2\) \|$", PAGE_OF_METHODS, re.M
        )
    )
    methods = [
        m for m in vars(bandpo.methods).values() if isinstance(m, type) and issubclass(m, bandpo.Method)
    ]
    named = {f"{m.__name__}()": m for m in methods if m is not bandpo.Method}
    assert rows.keys() == named.keys()
    for text, method in named.items():
        assert bandpo.parse_method(text) == method()
        assert f"arXiv {rows[text]}" in method.__doc__
    assert f"bandpo has {len(named)} methods" in PAGE_OF_METHODS


def matrix_rows() -> dict[str, list[str]]:
    page = (ROOT / "docs/frameworks.md").read_text()
    table = page.partition("<!-- matrix: begin -->")[2].partition("<!-- matrix: end -->")[0]
    return {
        cells[0]: cells[1:]
        for row in table.splitlines()
        if (cells := [c.strip() for c in row.split("|")[1:-1]])
    }


MATRIX = runpy.run_path(str(ROOT / "scripts/matrix.py"))


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.module)
def test_the_table_of_frameworks_says_what_each_is_tested_against(adapter):
    rows = matrix_rows()
    names = {"trl": ["trl, oldest", "trl, newest"], "verl": ["verl"]}.get(adapter.module, [adapter.framework])
    assert rows[names[-1]][0] == adapter.tested


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.module)
def test_the_tests_of_an_adapter_need_its_framework(adapter):
    tests = (ROOT / f"tests/integrations/test_{adapter.module}.py").read_text()
    needed = rf'^(from|import) {adapter.package}\b|^pytest\.importorskip\("{adapter.package}"'
    assert re.search(needed, tests, re.M)
