"""Every kind of finding is complete, and has a check, its row in the page, a test and a run of the bench."""

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys

import pytest

import findings_page
from helpers.missing import require
from helpers.printed_sentences import CLAIMS, NO_CLAIM
from pages import ROOT
from rlvet._severities import SEVERITIES
from rlvet.checks.findings import Finding
from rlvet.checks.log.engine import STALE_WEIGHTS
from rlvet.checks.log.reward import PLATEAU
from rlvet.checks.registry import LOGS, Check, Registry, in_order
from rlvet.records.catalogue import KINDS, OF_LOGS
from rlvet.records.registry import ADVANTAGES, TOKENS
from rlvet.runs.quantities import EVALUATION, QUANTITIES
from rlvet.runs.setup import SETTINGS

DOCTOR = [
    file
    for folder in ("checks", "records/tokens", "records/advantages")
    for file in sorted((ROOT / "packages/rlvet/src/rlvet" / folder).rglob("*.py"))
]
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
CHECKS = (*LOGS.checks(), *ADVANTAGES.checks(), *TOKENS.checks())


def test_each_kind_is_reported_by_a_check():
    """A kind that no check names in ``reports`` has no row on the page, and no finding may have it."""
    defined = {(path, name) for path in DOCTOR for name in defined_kinds(path)}
    codes = [kind.code for kind in KINDS]
    assert len(set(codes)) == len(codes)
    for path, name in sorted(defined):
        value = getattr(importlib.import_module(module_of(path)), name)
        require(
            [] if value in KINDS else [name],
            path.relative_to(ROOT).as_posix(),
            lambda name: f"    reports=({name},),",
            "the decorator of the check",
        )


def module_of(path):
    """Return the dotted name of a file of rlvet."""
    return ".".join(path.relative_to(ROOT / "packages/rlvet/src").with_suffix("").parts)


def test_each_check_reports_what_it_names():
    """A check's file, or one that it imports from, uses each of its kinds."""
    for check in CHECKS:
        path = ROOT / "packages/rlvet/src" / f"{check.function.__module__.replace('.', '/')}.py"
        names = {node.id for node in ast.walk(parse(path)) if isinstance(node, ast.Name)}
        module = importlib.import_module(check.function.__module__)
        used = [getattr(module, name) for name in names if hasattr(module, name)]
        assert [kind.code for kind in check.reports if kind not in used] == [], check.name


def test_the_names_of_checks_are_words_and_each_is_one():
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    assert all(" " in name for name in names)
    assert all(check.tested and check.explained and check.reports for check in CHECKS)


def test_a_check_without_a_place_is_refused():
    def of(name, after):
        return Check(name, after, "tested", "explained", (), lambda case: None)

    chain = [of("a b", ""), of("b c", "a b"), of("c d", "b c")]
    assert [check.name for check in in_order(chain[::-1])] == ["a b", "b c", "c d"]
    new = [of("z z", "a b"), of("y y", "a b")]
    assert [check.name for check in in_order([*chain, *new])] == ["a b", "y y", "z z", "b c", "c d"]
    with pytest.raises(LookupError, match="no check has this name: 'd e' after 'x y'"):
        in_order([*chain, of("d e", "x y")])
    with pytest.raises(LookupError, match="after 'd e'"):
        in_order([*chain, of("d e", "d e")])


def test_a_check_cannot_report_what_it_does_not_name():
    examined = LOGS.checks()[0]

    def reports_another(case):
        return Finding("ok", True, "").failed(PLATEAU, "a cause")

    registry = Registry("rlvet.checks.log")
    complete = registry.check("a b", after="", tested="c", explained="d", reports=tuple(examined.reports))
    with pytest.raises(AssertionError, match="'a b' reports plateau: add it to its reports"):
        complete(reports_another)(None)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_the_claim_of_a_passed_check_is_tested(check):
    """Each sentence of a passed check of a log is compared with the rows, or there is a reason why it cannot be."""
    if check not in LOGS.checks() or check.tested in NO_CLAIM:
        return
    require(
        [] if check.tested in CLAIMS else [check.tested],
        "tests/helpers/printed_sentences.py",
        lambda tested: f'    "{tested}": FUNCTION_THAT_RETURNS_TRUE_IF_THE_ROWS_CONTRADICT_IT,',
        "CLAIMS, or with a reason to NO_CLAIM",
    )


def test_claims_are_those_of_checks():
    tested = {check.tested for check in LOGS.checks()}
    assert CLAIMS.keys() | NO_CLAIM.keys() == tested
    assert not CLAIMS.keys() & NO_CLAIM.keys()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_each_kind_is_complete(kind):
    assert kind.severity in SEVERITIES
    assert all((kind.meaning, kind.condition, kind.remedy, kind.evidence, kind.source))
    assert bool(kind.scenarios) != bool(kind.no_scenario)
    if kind in OF_LOGS:
        assert {name for name in kind.evidence if " " not in name} <= {*QUANTITIES, EVALUATION}
    for setting in re.findall(r"{([^{}]+)}", kind.remedy):
        assert any(setting in names for names in SETTINGS.values()), setting


def test_the_page_is_made_from_the_kinds_and_the_checks():
    message = "run `python tests/findings_page.py` and commit docs/diagnose.md and data/first_lines.json"
    assert findings_page.COUNTS.read_text() == findings_page.first_lines_as_made(), message
    assert findings_page.PAGE.read_text() == findings_page.page_as_made(), message


@pytest.mark.parametrize("path", DOCTOR, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_each_check_is_registered(path):
    functions = [node for node in parse(path).body if isinstance(node, ast.FunctionDef)]
    require(
        [one.name for one in functions if one.name.startswith("check_") and not one.decorator_list],
        path.relative_to(ROOT).as_posix(),
        lambda name: (
            '@LOGS.check(\n    "NAME IN THE OUTPUT",\n    after="NAME OF THE CHECK BEFORE IT",\n'
            '    tested="PROPERTY",\n'
            '    explained="ROW OF THE PAGE",\n    reports=(KIND,),\n)'
        ),
        "the line before the function",
    )


@pytest.fixture(scope="module")
def texts():
    """Return the texts in the tests of checks."""
    files = [
        *(ROOT / "packages/rlvet/tests").glob("*/test_*_checks.py"),
        ROOT / "packages/rlvet/tests/checks/test_diagnose.py",
        ROOT / "tests/helpers/simulated_runs.py",
    ]
    return [text for path in files for text in texts_of(path)]


@pytest.mark.parametrize("code", CODES)
def test_each_finding_is_made_by_a_test(code, texts):
    """A test names the code itself, or begins a headline with it."""
    require(
        [] if any(re.match(rf"{code}(:|$)", text) for text in texts) else [code],
        "packages/rlvet/tests/checks/test_log_checks.py, or records/test_token_checks.py for a check of tokens,",
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


NEW_CHECK = """
from rlvet.checks.course import Case
from rlvet.checks.findings import Finding, Kind
from rlvet.checks.log.results import passed_check, undecided_check
from rlvet.checks.registry import LOGS

SLOW = Kind("slow", "look", "steps take long", "a step takes an hour", "use more GPUs", ("step_time",), "an example")


@LOGS.check(
    "time of a step",
    after="whether weights move",
    tested="steps take less than an hour",
    explained="steps take less than an hour",
    reports=(SLOW,),
)
def check_time(case: Case) -> Finding:
    times = case.course.series("step_time")
    if not times.values:
        return undecided_check("log the time of a step")
    finding = passed_check(times, max(times.values), "longest step (seconds)")
    return finding.failed(SLOW, "a step took an hour") if max(times.values) >= 3600 else finding
"""
USED = """
import findings_page
from rlvet.checks.log_checks import log_findings
from rlvet.records.catalogue import OF_LOGS

findings = log_findings([{"step": step, "reward": 0.5, "step_time": 4000.0} for step in range(20)])
print([finding.subject for finding in findings].index("time of a step"))
print(*[finding.code for finding in findings if finding.cause])
print([kind.code for kind in OF_LOGS].index("slow"))
page = findings_page.page_as_made()
print(page[page.index("#### `slow`") :].partition("\\n\\n#### ")[0])
print(*[line for line in page.splitlines() if "#slow)" in line], sep="\\n")
"""


@pytest.mark.slow
def test_a_new_finding_is_one_file(tmp_path):
    """It has its place, its finding, and its rows on the page, and no list names it."""
    source = shutil.copytree(ROOT / "packages/rlvet/src/rlvet", tmp_path / "rlvet")
    (source / "checks/log/time.py").write_text(NEW_CHECK)
    paths = os.pathsep.join(map(str, (tmp_path, ROOT / "tests")))
    run = subprocess.run(
        [sys.executable, "-c", USED], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths}
    )
    assert run.returncode == 0, run.stderr
    place, codes, kind, *rows = run.stdout.splitlines()
    assert (place, kind) == ("2", "2")
    assert "slow" in codes.split()
    assert rows[:8] == [
        "#### `slow`",
        "",
        "*look* · steps take long",
        "",
        "- **Do:** use more GPUs",
        "- **Measured:** a step takes an hour",
        "- **Read from:** `step_time`",
        "- **Source:** an example",
    ]
    assert rows[-1] == "| time of a step | steps take less than an hour | [`slow`](#slow) |"
