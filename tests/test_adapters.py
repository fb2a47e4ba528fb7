"""Each module of bandpo.integrations is registered, tested and documented."""

import json
import re

import pytest

import matrix
from bandpo.core.methods import METHODS
from bandpo.integrations import ADAPTERS
from helpers.missing import require
from pages import ROOT
from rlvet.lint.known.skyrl import SAMPLER_METHODS

SOURCE = ROOT / "packages/bandpo/src/bandpo/integrations"
BESIDE = {"legs", "stock_methods", "prime_rl"}
"""Modules of the folder that are no adapters, and that of prime-rl, which is on no package index."""
MODULES = sorted({path.stem for path in SOURCE.glob("[!_]*.py")} - BESIDE)
MODULES += sorted(path.parent.name for path in SOURCE.glob("[!_]*/__init__.py"))
FRAMEWORKS = {adapter.module: adapter for adapter in ADAPTERS}
OWN_CONTRACT = {"trl", "verl"}
"""Adapters that replace a trainer's loss and average; their tests compare both with the framework's own."""

CONTRACT = '''"""The adapter against the real framework."""

import pytest

pytest.importorskip("{module}", reason="needs the extra bandpo[{module}]")

from bandpo.integrations.{module} import loss
from contract import Contract


class TestLoss(Contract):
    aggregation = "sum"  # the docstring of Contract says what this and the next attributes mean
    any_method = True
    whole_batch = False

    def ours(self, batch, clip):
        return loss({{...}}, method=clip).loss

    def stock(self, batch, low, high):
        return ...  # the framework's own loss, clipped at 1 - low and 1 + high

    def sequence_level(self, batch):
        return loss({{...}})  # with one log-probability for each sequence: must raise ValueError

    def recorded(self, batch, folder):
        return loss({{...}}, record=folder)
'''


def has_page(module):
    """Return True if an adapter has a page of its own, and not a section of docs/frameworks.md."""
    return (ROOT / f"docs/{module}.md").exists()


def headings():
    """Return the headings of docs/frameworks.md, as the modules are named."""
    found = re.findall(r"^## (.*)$", (ROOT / "docs/frameworks.md").read_text(), re.M)
    return {heading.lower().replace("-", "_") for heading in found}


@pytest.mark.parametrize("module", MODULES)
def test_each_adapter_is_registered(module):
    require(
        [module] if module not in FRAMEWORKS else [],
        "packages/bandpo/src/bandpo/_adapters.py",
        lambda module: f'    Adapter("FRAMEWORK", "{module}", "{module}", "{module}", "VERSION"),',
        "ADAPTERS (its name, its distribution, its package, the module here, the tested version)",
    )


def test_each_registered_adapter_is_a_module():
    absent = [adapter.module for adapter in ADAPTERS if adapter.module not in MODULES]
    assert not absent, (
        f"packages/bandpo/src/bandpo/_adapters.py registers modules that do not exist: {absent}"
    )


@pytest.mark.parametrize("module", MODULES)
def test_an_adapter_is_tested_against_its_framework(module):
    file = f"packages/bandpo/tests/integrations/test_{module}.py"
    path = ROOT / file
    tests = path.read_text() if path.exists() else ""
    missing = ["the contract"] if module not in OWN_CONTRACT and "(Contract)" not in tests else []
    require(missing, file, lambda _: CONTRACT.format(module=module))
    package = FRAMEWORKS[module].package if module in FRAMEWORKS else module
    needed = rf'^(from|import) {package}\b|^pytest\.importorskip\("{package}"'
    require(
        [] if re.search(needed, tests, re.M) else [package],
        file,
        lambda package: f'pytest.importorskip("{package}", reason="needs the extra bandpo[{module}]")',
    )


@pytest.mark.parametrize("module", MODULES)
def test_the_matrix_has_each_adapter(module):
    """`make test-matrix` installs the framework and runs the adapter's tests; a pull request need not run it."""
    require(
        [module] if not {module, f"{module}, newest"} & matrix.ENVIRONMENTS.keys() else [],
        "scripts/matrix.py",
        lambda module: f'    "{module}": Environment(("{module}=={{version}}",)),',
        "ENVIRONMENTS",
    )


@pytest.mark.parametrize("module", MODULES)
def test_each_adapter_has_a_page_or_a_section(module):
    require(
        [module] if not has_page(module) and module not in headings() else [],
        "docs/frameworks.md",
        lambda _: "## FRAMEWORK  # begin with a copy of the section on Tinker",
        "the sections",
    )


@pytest.mark.parametrize("module", MODULES)
def test_each_adapter_is_in_the_table_of_frameworks(module):
    table = (ROOT / "docs/frameworks.md").read_text()
    address = f"{module}.md" if has_page(module) else f"#{module.replace('_', '-')}"
    require(
        [address] if f"]({address})" not in table else [],
        "docs/frameworks.md",
        lambda address: f"| [FRAMEWORK]({address}) | HOW | any method |",
        "the first table",
    )


@pytest.mark.parametrize("module", [module for module in MODULES if has_page(module)])
def test_the_page_of_an_adapter_is_in_the_menu(module):
    menu = (ROOT / "mkdocs.yml").read_text()
    require(
        [f"{module}.md"] if f": {module}.md\n" not in menu else [],
        "mkdocs.yml",
        lambda page: f"      - FRAMEWORK: {page}",
        "nav, Use a method",
    )


@pytest.mark.parametrize("module", MODULES)
def test_each_adapter_has_an_extra(module):
    project = (ROOT / "packages/bandpo/pyproject.toml").read_text()
    require(
        [module] if f"\n{module} = [" not in project else [],
        "packages/bandpo/pyproject.toml",
        lambda module: f'{module} = ["{module}==VERSION"]',
        "[project.optional-dependencies]",
    )


@pytest.mark.parametrize("module", MODULES)
def test_pyright_leaves_out_adapters_of_absent_frameworks(module):
    """`constraints.txt` has the packages of the development environment."""
    installed = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.M)
    settings = (ROOT / "pyproject.toml").read_text().partition("[tool.pyright]")[2]
    file = f"packages/bandpo/src/bandpo/integrations/{module}.py"
    known = (
        module not in FRAMEWORKS or FRAMEWORKS[module].distribution in installed or f'"{file}"' in settings
    )
    require([] if known else [file], "pyproject.toml", '"{}",'.format, "ignore of [tool.pyright]")


def test_no_placeholder_of_a_suggested_line_is_left():
    """The lines that the tests of this file suggest have words in capitals to replace."""
    texts = {
        "packages/bandpo/src/bandpo/_adapters.py": "\n".join(map(str, ADAPTERS)),
        "scripts/matrix.py": "\n".join(map(str, matrix.ENVIRONMENTS.values())),
    }
    files = ["docs/frameworks.md", "mkdocs.yml", "packages/bandpo/pyproject.toml"]
    files += [f"packages/bandpo/tests/integrations/test_{module}.py" for module in MODULES]
    texts |= {file: (ROOT / file).read_text() for file in files if (ROOT / file).exists()}
    left = {
        file: sorted(
            {*re.findall(r"\bFRAMEWORK\b|\bVERSION\b|\| HOW \||loss\(\{\.\.\.\}|return \.\.\.", text)}
        )
        for file, text in texts.items()
    }
    assert {file: words for file, words in left.items() if words} == {}


def test_the_table_of_tested_versions_is_made_of_the_results():
    results = matrix.committed()
    assert list(results) == [name for name in matrix.ENVIRONMENTS if name in results]
    assert "\n".join(matrix.table(results, matrix.adapters())) in matrix.PAGE.read_text()


def test_a_row_of_an_older_core_says_so():
    old = {"time": "2026-11-27T10:00+00:00", "core": "a"}
    new = {"time": "2026-11-29T08:00+00:00", "core": "b"}
    results = {"x": old, "y": new}
    assert matrix.date(old, results) == "2026-11-27, older core"
    assert matrix.date(new, results) == "2026-11-29"
    assert matrix.date(old, {"x": old, "y": new | {"core": "a"}}) == "2026-11-27"


def test_the_matrix_writes_a_result_at_once_and_keeps_the_other_rows(tmp_path, monkeypatch):
    """A case whose Python is absent keeps its row, and one that fails is in the table."""
    page, results = tmp_path / "page.md", tmp_path / "matrix.json"
    page.write_text("<!-- matrix: begin -->\n<!-- matrix: end -->\n")
    row = {"ran": 9, "passed": 9, "python": "3.11.7", "version": "1.0", "commit": "abc"}
    old = row | {"time": "2026-11-27T10:00+00:00", "core": "a"}
    results.write_text(json.dumps({"tinker": old, "python, newest": old}))
    made = {
        "tinker": row | {"passed": 8, "time": "2026-11-29T08:00+00:00", "core": "b"},
        "python, newest": {"absent": "python3.13"},
    }
    monkeypatch.setattr(matrix, "PAGE", page)
    monkeypatch.setattr(matrix, "RESULTS", results)
    known = {adapter.module: vars(adapter) for adapter in ADAPTERS}
    monkeypatch.setattr(matrix, "adapters", lambda: known)
    monkeypatch.setattr(matrix, "run", lambda name, folder, version: made[name])
    monkeypatch.setattr("sys.argv", ["matrix.py", str(tmp_path), "python, newest", "tinker"])
    with pytest.raises(SystemExit, match="failed or skipped: tinker"):
        matrix.main()
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ")][1:]
    assert rows == [
        "| Tinker | 1.0 | 8 of 9 | 3.11.7 | the real package | 2026-11-29 |",
        "| python, newest | 1.0 | 9 of 9 | 3.11.7 | the core, TRL | 2026-11-27, older core |",
    ]


def test_the_matrix_knows_the_state_of_the_core():
    """The digest is of the modules, and the same for the same modules."""
    digest = matrix.core_digest()
    assert re.fullmatch("[0-9a-f]{12}", digest)
    assert matrix.core_digest() == digest


def test_lint_knows_the_methods_that_are_relative_to_the_sampler():
    relative = {name for name, paper in METHODS.items() if paper.method().old_policy == "rollout"}
    assert relative == {*SAMPLER_METHODS}
