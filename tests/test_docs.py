"""What README and the documentation print is run; where that takes a hub or a cluster, it is parsed."""

import ast
import re
from pathlib import Path

import pytest

import bandpo
import matrix
from bandpo.integrations import ADAPTERS
from bandpo.methods import METHODS
from pages import PAGES, ROOT, blocks, check_python, follow, python_blocks

PAGE_OF_METHODS = (ROOT / "docs/which-method.md").read_text()


@pytest.mark.parametrize(("page", "block"), python_blocks(of_frameworks=False))
def test_python(page, block, tmp_path, monkeypatch, capsys):
    check_python(page, block, tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize(
    "step", [b for page in PAGES for b in blocks(page, "console") if page.name != "write-your-own.md"]
)
def test_console(step, tmp_path):
    follow([step], tmp_path)


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
    page = (ROOT / "docs" / "paper-map.md").read_text()
    named = re.findall(r"`(?:(test_\w+\.py)(?:::)?)?(test_\w+)?`", page)
    file, checked = "", 0
    for in_file, test in named:
        file = in_file or file
        if file:
            (path,) = [*(ROOT / "tests").rglob(file), *(ROOT / "lab/tests").rglob(file)]
            text = path.read_text()
            assert not test or f"def {test}(" in text, f"{file}::{test}"
            checked += 1
    assert checked > 10


def test_the_page_of_methods_has_each_with_its_source():
    """As it is written, with its paper."""
    row = r"^\| `(\w+\(\))` \|.*?\| \[([\d.]+)\]\(https://arxiv\.org/abs/\2\) \|$"
    found = dict(re.findall(row, PAGE_OF_METHODS, re.M))
    assert found == {f"{name}()": paper.source for name, paper in METHODS.items()}
    assert f"bandpo has {len(METHODS)} methods" in PAGE_OF_METHODS


MATRIX = (ROOT / "docs/frameworks.md").read_text().partition("<!-- matrix: begin -->")[2]


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.module)
def test_an_adapter_has_tests_that_need_its_framework_and_the_table_has_their_version(adapter):
    assert (ROOT / f"src/bandpo/integrations/{adapter.module}.py").exists()
    tests = (ROOT / f"tests/integrations/test_{adapter.module}.py").read_text()
    needed = rf'^(from|import) {adapter.package}\b|^pytest\.importorskip\("{adapter.package}"'
    assert re.search(needed, tests, re.M)
    name = {"trl": "trl, newest", "verl": "verl, newest"}.get(adapter.module, adapter.framework)
    assert f"| {name} | {adapter.tested} |" in MATRIX


def test_the_table_of_frameworks_is_of_this_core():
    """Comments, docstrings and layout aside."""
    assert f"with the core `{matrix.core_digest()}`" in MATRIX, "the core has changed since: make test-matrix"
