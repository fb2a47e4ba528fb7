"""Every finding that the doctor can report has advice, a line in its page, a test and a run of the bench."""

import ast
import json
import re

import pytest

from helpers.missing import require
from pages import ROOT
from rlvet._severities import SEVERITIES
from rlvet.checks.findings import Finding

DOCTOR = sorted((ROOT / "packages/rlvet/src/rlvet/checks").glob("*.py"))
ADVICE = "packages/rlvet/src/rlvet/data/advice.json"
BENCH = "benchmarks/doctor/faults.py"
BENCH_OF_TOKENS = "benchmarks/doctor/token_faults.py"
BENCH_OF_ADVANTAGES = "benchmarks/doctor/advantage_faults.py"
LOG_BENCH = "benchmarks/doctor/log_scenarios.py"
PAGE = "docs/diagnose.md"


def parse(path):
    return ast.parse((ROOT / path).read_text())


def calls_of(tree, name):
    """Return the calls of a function or a method by its name."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if name in (getattr(call.func, "id", ""), getattr(call.func, "attr", ""))]


def listed_codes(tree):
    """Return the codes in annotations of the form ``code: Literal["a", "b"]`` in the classes of a file."""
    values = []
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "code":
            values += [value for value in ast.walk(node.annotation) if isinstance(value, ast.Constant)]
    return values


def reported_codes():
    """Return the codes that are passed to `Finding.failed`, in the order of the source.

    A function may pass one of its parameters. The codes are then the arguments of the calls of that function. It may
    pass the attribute ``code`` of a class of its file, of which the annotation lists the codes.
    """
    codes = []
    for path in DOCTOR:
        tree = parse(path)
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        for function in functions:
            parameters = [argument.arg for argument in function.args.args]
            for call in calls_of(function, "failed"):
                code = call.args[0]
                if isinstance(code, ast.Name) and code.id in parameters:
                    position = parameters.index(code.id)
                    values = [outer.args[position] for outer in calls_of(tree, function.name)]
                elif isinstance(code, ast.Attribute) and code.attr == "code":
                    values = listed_codes(tree)
                else:
                    values = [code]
                for value in values:
                    assert isinstance(value, ast.Constant), (
                        f"{path.name}, line {value.lineno}: write the code of a finding as a text, such as "
                        '"step-too-large", so that its advice and its tests can be checked'
                    )
                    codes.append(value.value)
    return list(dict.fromkeys(codes))


def texts_of(path):
    """Return the texts in a file of Python."""
    nodes = ast.walk(parse(path))
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


CODES = reported_codes()


ADVICE_OF_CODE = json.loads((ROOT / ADVICE).read_text())


@pytest.mark.parametrize("code", CODES)
def test_each_finding_has_advice(code):
    require(
        [code] if code not in ADVICE_OF_CODE else [],
        ADVICE,
        lambda code: f' "{code}": "WHAT TO CHANGE, AND WHICH SETTING",',
    )


def test_each_advice_is_of_a_finding():
    assert set(ADVICE_OF_CODE) <= set(CODES), f"{ADVICE} has advice for findings that no check reports"


@pytest.mark.parametrize("code", CODES)
def test_each_finding_has_a_line_in_the_page(code):
    lines = re.findall(r"^\| `([a-z0-9-]+)` \| [^|]+ \|$", (ROOT / PAGE).read_text(), re.M)
    require(
        [code] if code not in lines else [],
        PAGE,
        lambda code: f"| `{code}` | WHAT IT MEANS |",
        "the table of findings",
    )


@pytest.mark.parametrize("path", DOCTOR, ids=lambda path: path.name)
def test_each_check_is_called(path):
    tree = parse(path)
    functions = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    require(
        [name for name in functions if name.startswith("_check_") and name not in used],
        str(path.relative_to(ROOT)),
        lambda name: f"        {name}(course, setup),",
        "the list of log_findings or token_findings",
    )


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
def codes_of_benches():
    """Return the codes that a run of a benchmark has."""
    tree = parse(BENCH)
    expected = [call.args[0] for call in calls_of(tree, "Fault") if call.args]
    expected += [call.args[0] for call in calls_of(parse(BENCH_OF_TOKENS), "TokenFault") if call.args]
    expected += [call.args[0] for call in calls_of(parse(BENCH_OF_ADVANTAGES), "Fault") if call.args]
    expected += [call.args[0] for call in calls_of(parse(LOG_BENCH), "Scenario") if call.args]
    return {code for codes in expected for code in ast.literal_eval(codes)}


@pytest.mark.parametrize("code", CODES)
def test_each_finding_is_made_by_the_bench(code, codes_of_benches):
    require(
        [code] if code not in codes_of_benches | log_only_findings().keys() else [],
        BENCH,
        lambda code: (
            f'    "WHAT IS WRONG": Fault(("{code}",), SETTING=VALUE),  # in FAULTS, with a field of Fault; or\n'
            f'    "WHAT IS WRONG": Scenario(("{code}",), LOG),  # in {LOG_BENCH}, if only a log shows it; or\n'
            f'    "{code}": "WHY NO RUN OF THE BENCH CAN MAKE IT",  # in LOG_ONLY'
        ),
        "FAULTS or LOG_ONLY",
    )


def test_no_finding_of_a_bench_is_listed_as_impossible(codes_of_benches):
    twice = codes_of_benches & log_only_findings().keys()
    assert not twice, f"{BENCH}: LOG_ONLY names {', '.join(sorted(twice))}, which FAULTS makes"


def log_only_findings():
    """Return the findings that no run of the bench can make, with the reason; torch is not imported."""
    for node in parse(BENCH).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LOG_ONLY":
            return ast.literal_eval(node.value)
    pytest.fail(f"{BENCH} has no table LOG_ONLY", pytrace=False)


def test_a_finding_without_advice_is_refused_with_the_line_to_add():
    message = r'add to packages/rlvet/src/rlvet/data/advice.json the line "no-such-finding": "WHAT TO CHANGE'
    with pytest.raises(ValueError, match=message):
        Finding("ok", True, "the gradient stays small").failed("no-such-finding", "it grew a thousandfold")


@pytest.mark.parametrize("severity", SEVERITIES)
def test_a_fault_is_what_has_the_severity_of_one(severity):
    finding = Finding("ok", True, "the weights are current").failed(
        "stale", "they are old", severity=severity
    )
    assert finding.severity == severity
    assert finding.ok is (False if severity in ("stop", "fix") else None)


def test_the_severity_of_a_code_is_that_of_the_table():
    passed = Finding("ok", True, "a property")
    assert [passed.failed(code, "").severity for code in ("nan", "plateau", "clip-idle")] == [
        "stop",
        "look",
        "fix",
    ]
