"""A method and a divergence that are added as CONTRIBUTING.md says are tested, named and on the pages."""

import re

import pytest

from helpers.recipes import copy, insert, lines_of, run, texts_of

CORE = "packages/bandpo/src/bandpo/core"
TESTS = "packages/bandpo/tests/core"
COPIED = ("packages/bandpo/src", TESTS, "tests", "docs", "scripts", "packages/rlvet/src/rlvet/report")
REPORTS = ("benchmarks.md", "one-card.md", "rlvet/how-right.md")
FILES = (
    *("conftest.py", "pyproject.toml", "packages/bandpo/pyproject.toml"),
    *("README.md", "CONTRIBUTING.md", "MAINTAINING.md"),
    *(f"research/reports/{name}" for name in REPORTS),
)
SOURCES = ("packages/bandpo/src", "tests", "packages/bandpo/tests", "scripts")
SORTED = ("python -m ruff check --fix --quiet .", "python -m ruff format --quiet .")
"""The commands of the recipe of a method that sort and wrap lists of names."""


@pytest.fixture
def clone(tmp_path):
    copy(tmp_path, (*COPIED, *FILES))
    return tmp_path


def add_name(clone, module, name, neighbour):
    """Add a name to the list of its module, and to the import and the list of the package."""
    insert(clone / CORE / module, "__all__ = [", f'"{name}", ')
    root = clone / "packages/bandpo/src/bandpo/__init__.py"
    insert(root, f"\n        {neighbour},", f"\n        {name},")
    insert(root, f'\n    "{neighbour}",', f'\n    "{name}",')
    for command in SORTED:
        run(command, clone, SOURCES)


@pytest.mark.slow
def test_a_method_is_added_by_the_recipe(clone):
    texts = texts_of("A method from a paper")
    lines = lines_of(texts["lines"])
    methods = clone / CORE / "methods.py"
    methods.write_text(methods.read_text() + "\n\n" + texts["methods.py"])
    add_name(clone, "methods.py", "ToyGRPO", "MiniRL")
    insert(clone / "tests/method_references.py", "\nPAPER_FACTS = {\n", f"    {lines['PAPER_FACTS']}\n")
    insert(clone / TESTS / "test_methods.py", "\nREFERENCES = {\n", f"    {lines['REFERENCES']}\n")
    page = clone / "docs/which-method.md"
    text = page.read_text()
    [row] = re.findall(r"^\| \[`GRPO\(\)`\].*\n", text, re.M)
    page.write_text(text.replace(row, row + lines["which-method.md"] + "\n"))
    readme = clone / "README.md"
    text = readme.read_text()
    [others] = re.findall(r"(\d+) other published methods", text)
    readme.write_text(
        text.replace(f"{others} other published methods", f"{int(others) + 1} other published methods")
    )
    assert run(texts[""].replace("MiniRL", "ToyGRPO"), clone, SOURCES) > 10


@pytest.mark.slow
def test_a_divergence_is_added_by_the_recipe(clone):
    texts = texts_of("A divergence")
    lines = lines_of(texts["lines"])
    family = clone / CORE / "divergences/family.py"
    family.write_text(family.read_text() + "\n\n" + texts["family.py"])
    add_name(clone, "divergences/family.py", "LeCam", "JensenShannon")
    insert(clone / "tests/oracle.py", "\nF = {\n", f"    {lines['oracle.py']}\n")
    insert(clone / "scripts/fuzz.py", "Tensor] | None]] = {\n", f"    {lines['fuzz.py']}\n")
    pages = clone / "packages/rlvet/src/rlvet/report/assets/bounds.js"
    insert(pages, "const divergences = {\n", f"    {lines['bounds.js']}\n")
    bounds, _, fuzz = texts[""].replace("JensenShannon", "LeCam").splitlines()
    assert run(bounds, clone, SOURCES) > 5
    # The command of the pages needs Chromium; that of random cases has fewer of them here.
    run(fuzz.replace("300000", "2000"), clone, SOURCES)
