"""Tests that run the code of README and the documentation, or parse it if it needs a hub or a cluster."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import bandpo
import rlvet
from bandpo.core.methods import METHODS
from helpers.missing import require
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
    """Return the names that a module defines or imports, including attributes of its classes."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
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
    """Every `bandpo.…` and `rlvet.…` of the page, looked up in the source: importing an adapter takes its framework."""
    text = page.read_text()
    for block in blocks(page):
        text = text.replace(block.text, "") if block.title else text
    for path in set(re.findall(r"(?<![\w-])(?:bandpo|rlvet)(?:\.\w+)+", text)):
        package, *names = path.split(".")
        source = place = ROOT / f"packages/{package}/src/{package}"
        while names and (place / names[0]).is_dir():
            place /= names.pop(0)
        if names and (place / f"{names[0]}.py").is_file():
            place /= f"{names.pop(0)}.py"
        elif names and place == source:  # which takes its names from its modules
            assert hasattr({"bandpo": bandpo, "rlvet": rlvet}[package], names[0]), path
            names = names[2:]
        elif names:
            place /= "__init__.py"
        assert set(names) <= names_in(place) if names else place.exists(), path


def test_the_tests_named_in_the_table_of_the_operator_exist():
    page = (ROOT / "research/reports/mission.md").read_text().split("## The operator, by its tests")[1]
    named = re.findall(r"`(?:(test_\w+\.py)(?:::)?)?(test_\w+)?`", page)
    file, checked = "", 0
    for in_file, test in named:
        file = in_file or file
        if file:
            (path,) = [*(ROOT / "tests").rglob(file), *(ROOT / "packages").glob(f"*/tests/**/{file}")]
            text = path.read_text()
            assert not test or f"def {test}(" in text, f"{file}::{test}"
            checked += 1
    assert checked > 10


ROW_OF_METHOD = r"^\| \[`(\w+)\(\)`\]\(https://arxiv\.org/abs/([\d.]+)\) \| .+ \|$"
SOURCES = dict(re.findall(ROW_OF_METHOD, PAGE_OF_METHODS, re.M))


@pytest.mark.parametrize("name", METHODS)
def test_the_page_of_methods_has_each_with_its_source(name):
    """Each method has a row, which leads to its paper."""
    require(
        [name] if SOURCES.get(name) != METHODS[name].source else [],
        "docs/which-method.md",
        lambda name: f"| [`{name}()`](https://arxiv.org/abs/{METHODS[name].source}) | WHAT IT DOES |",
        "one of the tables of methods",
    )


def test_the_page_of_methods_has_no_others():
    assert SOURCES.keys() <= METHODS.keys(), "docs/which-method.md has rows of methods that do not exist"


def test_the_number_of_published_methods_is_that_of_the_table():
    """`BandPO` is named before, and `BandAbove` is a combination of our own, as its documentation says."""
    own = [
        name for name, paper in METHODS.items() if "is our own" in " ".join(str(paper.method.__doc__).split())
    ]
    assert own == ["BandAbove"]
    others = len(METHODS) - len(own) - 1
    said = re.findall(r"(\d+) other published methods", (ROOT / "README.md").read_text())
    if said != [str(others)]:
        pytest.fail(
            f"README.md says {', '.join(said)} other methods. Write there:\n\n{others} other published methods\n",
            pytrace=False,
        )


def test_no_page_says_that_all_published_methods_are_here():
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        claim = re.search(r"(?:any|every|all) published (?:clip )?(?:rule|method)s?", path.read_text())
        assert not claim, f"{path.relative_to(ROOT)} says {claim and claim[0]!r}: say how many there are"


def test_readme_is_read_in_three_minutes():
    """Words as `wc -w` counts them, and numbers outside of code, tables, links and the names of rules."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 700
    text = re.sub(
        r"^```.*?^```|^(?:\||<picture>|!\[)[^\n]*$|\]\([^)]*\)|`[^`]*`", "", text, flags=re.S | re.M
    )
    prose = re.sub(r"clip 0\.2|\[0\.8, (?:1\.)?2\]|Python 3\.11 to 3\.13", "", text)
    numbers = re.findall(r"\d[\d,.]*", prose)
    assert 5 < len(numbers) <= 18, numbers


def test_the_site_is_read_in_two_hours():
    """Words of the fifteen pages beside the first, which is made from README; not those of generated blocks."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    assert len(pages) == 15
    generated = re.compile(r"<!-- ([^>]*?): begin -->.*?<!-- \1: end -->", re.S)
    words = sum(len(generated.sub("", page.read_text(encoding="utf-8")).split()) for page in pages)
    assert words <= 25_000


SEARCHED = (
    "entropy collapse",
    "off-policy",
    "importance sampling",
    "exploration",
    "mismatch",
    "stale",
    "RLVR",
)
"""What people type who look for this."""


@pytest.mark.parametrize("words", SEARCHED)
def test_readme_has_the_words_that_people_search_for(words):
    assert words in " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())


SELECTIONS = re.findall(r'^python -m pytest (.*?) -k "(.+)"', (ROOT / "CONTRIBUTING.md").read_text(), re.M)


@pytest.mark.slow
@pytest.mark.parametrize(("files", "words"), SELECTIONS, ids=[words.split()[0] for _, words in SELECTIONS])
def test_a_command_for_contributors_selects_what_it_names(files, words):
    """Words that are in the name of a file select all tests of the file."""
    options = ("-q", "-n", "0", "-p", "no:randomly", "--collect-only", "-k", words)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *files.split(), *options], cwd=ROOT, capture_output=True, text=True
    )
    selected = [line.partition("::")[2].lower() for line in run.stdout.splitlines() if "::" in line]
    named = [word.lower() for word in words.split(" or ")]
    assert 1 <= len(selected) <= 100, run.stdout[-500:]
    assert [test for test in selected if not any(word in test for word in named)] == []
    assert [word for word in named if not any(word in test for test in selected)] == []


def test_each_command_for_contributors_is_a_selection():
    """A whole file is run if it is of the contribution alone, as the file of an adapter's tests."""
    commands = re.findall(r"^python -m pytest (\S+).*$", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    whole = ["packages/bandpo/tests/integrations/test_tinker.py", "tests/test_conformance.py"]
    assert [file for file in commands if file not in whole] == [files.split()[0] for files, _ in SELECTIONS]
    assert len(SELECTIONS) >= 5


def test_the_files_that_a_contributor_is_sent_to_exist():
    """`NAME` in a path stands for the new adapter, and in the tests of logs for a format."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    folders = "packages|tests|docs|scripts|benchmarks"
    paths = re.findall(rf"(?<![\w/])((?:{folders})/[\w./-]*\w|pyproject\.toml|mkdocs\.yml|README\.md)", page)
    names = {"packages/rlvet/tests/runs/test_NAME.py": "formats"}
    paths = [path.replace("NAME", names.get(path, "tinker")) for path in paths]
    assert len(set(paths)) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []
