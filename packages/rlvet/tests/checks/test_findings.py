"""Every kind of finding is complete, and has a check, its row in the page, a test and a run of the bench."""

import ast
import re

import pytest

import findings_page
from helpers.missing import require
from pages import ROOT
from rlvet._severities import SEVERITIES
from rlvet.checks import catalogue, log_kinds
from rlvet.checks.catalogue import KINDS, OF_LOGS
from rlvet.checks.findings import Finding, Kind
from rlvet.checks.log.engine import STALE_WEIGHTS
from rlvet.checks.log.reward import PLATEAU
from rlvet.runs.quantities import EVALUATION, QUANTITIES
from rlvet.runs.setup import SETTINGS

DOCTOR = sorted((ROOT / "packages/rlvet/src/rlvet/checks").rglob("*.py"))
BENCH = "benchmarks/doctor/faults.py"
BENCH_OF_TOKENS = "benchmarks/doctor/token_faults.py"
BENCH_OF_ADVANTAGES = "benchmarks/doctor/advantage_faults.py"
LOG_BENCH = "benchmarks/doctor/log_scenarios.py"


def parse(path):
    return ast.parse((ROOT / path).read_text())


def calls_of(tree, name):
    """Return the calls of a function or a method by its name."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if name in (getattr(call.func, "id", ""), getattr(call.func, "attr", ""))]


def defined_kinds(path):
    """Return the names to which a file assigns a kind of finding."""
    assigned = [node for node in parse(path).body if isinstance(node, ast.Assign)]
    return [node.targets[0].id for node in assigned if calls_of(node.value, "Kind")]


def texts_of(path):
    """Return the texts in a file of Python."""
    nodes = ast.walk(parse(path))
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


CODES = [kind.code for kind in KINDS]
CATALOGUE = {
    name: value for name, value in (vars(catalogue) | vars(log_kinds)).items() if isinstance(value, Kind)
}
"""The kinds of the catalogue by the names of their constants."""


def test_each_kind_is_in_the_catalogue():
    listed = [name for name, value in CATALOGUE.items() if value in KINDS]
    for path in DOCTOR:
        require(
            [name for name in defined_kinds(path) if name not in listed],
            "packages/rlvet/src/rlvet/checks/log_kinds.py, or catalogue.py beside it for a check of a record,",
            lambda name: f"    {name},",
            "OF_LOGS or OF_RECORDS",
        )
    assert len({kind.code for kind in KINDS}) == len(KINDS)


def test_each_kind_is_reported_by_a_check():
    """A check names it in a call of `Finding.failed`, or builds a fault with it that it reports."""
    used = set()
    for path in DOCTOR:
        for function in ast.walk(parse(path)):
            if isinstance(function, ast.FunctionDef):
                used |= {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    names = {value: name for name, value in CATALOGUE.items()}
    assert {kind.code for kind in KINDS if names[kind] not in used} == set()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_each_kind_is_complete(kind):
    assert kind.severity in SEVERITIES
    assert all((kind.meaning, kind.condition, kind.remedy, kind.evidence, kind.source))
    assert bool(kind.scenarios) != bool(kind.no_scenario)
    if kind in OF_LOGS:
        assert {name for name in kind.evidence if " " not in name} <= {*QUANTITIES, EVALUATION}
    for setting in re.findall(r"{([^{}]+)}", kind.remedy):
        assert any(setting in names for names in SETTINGS.values()), setting


def test_the_tables_of_the_page_are_those_of_the_kinds():
    message = "run `python tests/findings_page.py` and commit docs/rlvet/findings.md"
    assert findings_page.PAGE.read_text() == findings_page.page_with_tables(), message


@pytest.mark.parametrize("path", DOCTOR, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_each_check_is_called(path, names_used):
    functions = [node.name for node in ast.walk(parse(path)) if isinstance(node, ast.FunctionDef)]
    require(
        [name for name in functions if re.match("_?check_", name) and name not in names_used],
        "packages/rlvet/src/rlvet/checks/log_checks.py, or token_checks.py or advantage_checks.py beside it,",
        lambda name: f"        {name}(course, setup),",
        "the list of log_findings, token_findings or findings_and_notes",
    )


@pytest.fixture(scope="module")
def names_used():
    """Return the names that the files of the checks use."""
    return {node.id for path in DOCTOR for node in ast.walk(parse(path)) if isinstance(node, ast.Name)}


@pytest.fixture(scope="module")
def texts():
    """Return the texts in the tests of checks."""
    files = [
        *(ROOT / "packages/rlvet/tests/checks").glob("test_*_checks.py"),
        ROOT / "packages/rlvet/tests/checks/test_diagnose.py",
        ROOT / "tests/helpers/simulated_runs.py",
    ]
    return [text for path in files for text in texts_of(path)]


@pytest.mark.parametrize("code", CODES)
def test_each_finding_is_made_by_a_test(code, texts):
    """A test names the code itself, or begins a headline with it."""
    require(
        [] if any(re.match(rf"{code}(:|$)", text) for text in texts) else [code],
        "packages/rlvet/tests/checks/test_log_checks.py, or test_token_checks.py beside it for a check of tokens,",
        lambda code: (
            f"def test_{code.replace('-', '_')}():\n"
            f"    rows = course(METRIC=lambda t: 100 * t)  # a log that the check must report\n"
            f'    assert codes(rows) == ["{code}"]\n'
        ),
    )


@pytest.fixture(scope="module")
def scenarios():
    """Return the codes that each run of a benchmark has, by its name; torch is not imported."""
    codes = {}
    tables = (
        (BENCH, "Fault"),
        (BENCH_OF_TOKENS, "TokenFault"),
        (BENCH_OF_ADVANTAGES, "Fault"),
        (LOG_BENCH, "Scenario"),
    )
    for path, class_name in tables:
        for table in [node for node in ast.walk(parse(path)) if isinstance(node, ast.Dict)]:
            for key, value in zip(table.keys, table.values, strict=True):
                is_run = isinstance(value, ast.Call) and getattr(value.func, "id", "") == class_name
                if is_run and value.args:
                    codes.setdefault(key.value, set()).update(ast.literal_eval(value.args[0]))
    return codes


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_each_finding_is_made_by_the_bench(kind, scenarios):
    assert [name for name in kind.scenarios if kind.code not in scenarios.get(name, ())] == []
    if kind.no_scenario:
        assert not any(kind.code in codes for codes in scenarios.values())


@pytest.mark.parametrize("severity", SEVERITIES)
def test_a_fault_is_what_has_the_severity_of_one(severity):
    finding = Finding("ok", True, "the weights are current").failed(
        STALE_WEIGHTS, "they are old", severity=severity
    )
    assert finding.severity == severity
    assert finding.ok is (False if severity in ("stop", "fix") else None)


def test_the_severity_of_a_finding_is_that_of_its_kind_unless_the_check_sets_another():
    passed = Finding("ok", True, "a property")
    for kind in KINDS:
        assert passed.failed(kind, "a cause").severity == kind.severity
    assert passed.failed(PLATEAU, "a cause", severity="fix").ok is False


def test_a_finding_and_its_json_have_what_the_kind_has():
    finding = Finding("ok", True, "a property").failed(PLATEAU, "it is flat", STALE_WEIGHTS)
    assert (finding.kind, finding.advice, finding.or_else) == (PLATEAU, PLATEAU.remedy, ("stale",))
    assert finding.as_json()["advice"] == PLATEAU.remedy
    assert "kind" not in finding.as_json()
