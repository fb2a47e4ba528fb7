"""What is printed about a run: its words, directions, numbers, headline and onsets are true of the rows."""

import json
import math
import os
import re
import sys
from pathlib import Path

import pytest

from helpers.random_logs import random_rows
from helpers.simulated_runs import FAULTS, simulate
from pages import ROOT
from rlvet import diagnose
from rlvet._numbers import format_number, format_share
from rlvet.checks.course import Course, Series, onset
from rlvet.checks.diagnosis import LONGEST_HEADLINE, Diagnosis
from rlvet.checks.findings import Finding
from rlvet.checks.log_checks import log_findings
from rlvet.errors import InvalidValue
from rlvet.records.catalogue import KINDS
from rlvet.runs.logs import Log

sys.path.insert(0, str(ROOT / "benchmarks/doctor"))

from log_scenarios import SCENARIOS, SHAPES, healthy, rough

from selection import mostly_slow

LOGS = Path(os.environ.get("BANDPO_TEST_DATA", "missing")) / "logs"
LOG_FILES = sorted(path for path in LOGS.rglob("*") if path.is_file() and path.name != "README.md")
NEEDS_LOGS = pytest.mark.skipif(not LOG_FILES, reason="BANDPO_TEST_DATA has no logs")

LARGE_EXPONENT = re.compile(r"\d[eE]\+")
"""Numbers such as ``1.7e+02``."""
PADDED_EXPONENT = re.compile(r"\d[eE][-+]0\d")
"""Numbers such as ``1e-06``. Settings are shown in this form, as Python writes them."""

AT_ITS_ONSET = {
    "truncated": lambda row, _: row["cut"] > 0.25 if "cut" in row else True,
    "no-signal": lambda row, course: (
        row["dead"] > 0.5 if "dead" in row else row["reward_std"] <= 0.1 * course.series("reward_std").first
    ),
    "length-collapse": lambda row, course: row["length"] < 0.2 * course.series("length").first,
    "no-baseline": lambda row, _: math.isclose(row["advantage_max"], row["reward_max"], rel_tol=1e-4),
    "sequence-weights": lambda row, _: not 0.8 <= row["importance_weight"] <= 1.25,
    "kl-drift": lambda row, _: row["kl"] > 1,
    "reference-kl": lambda row, _: row["kl"] > 0.1,
    "step-too-large": lambda row, course: row["kl"] >= max(1, 4 * course.series("kl").values[0]),
    "entropy-collapse": lambda row, course: row["entropy"] < 0.25 * course.series("entropy").first,
    "low-entropy": lambda row, _: row["entropy"] < 0.1,
    "entropy-rise": lambda row, course: row["entropy"] > 2 * course.series("entropy").first,
    "length-growth": lambda row, course: row["length"] >= 1.8 * course.series("length").first,
    "clip-heavy": lambda row, _: sum(row.get(name, 0) for name in ("clip", "clip_high", "clip_low")) > 0.2,
    "reward-flat": lambda row, course: course.series("reward").values[-8:].count(row["reward"]) > 4,
    "collapse": lambda row, course: row["reward"] < max(course.series("reward").values),
    "engine-mismatch": lambda row, _: (
        row.get("mismatch_kl", 0) > 0.05
        or row.get("mismatch", 0) > 0.1
        or row.get("mismatch_probs", 0) > 0.05
        or abs(math.log(row.get("importance_weight", 1))) > math.log(2)
    ),
}
"""For each finding on a level, its condition on the row of its onset. They are written from docs/diagnose.md."""


def check_lines(diagnosis):
    """Assert what holds for the output of every diagnosis."""
    text = diagnosis.as_text(verbose=True)
    own_text = text.partition("\nthe configuration:")[0]
    for line in [*text.splitlines(), *diagnosis.as_markdown().splitlines()]:
        assert not LARGE_EXPONENT.search(line), line
    for finding in diagnosis.findings:
        assert not PADDED_EXPONENT.search(f"{finding.cause} {finding.evidence} {finding.cost}"), finding

    # A note is no headline, and a healthy run is called healthy in the first line.
    if diagnosis.findings and not diagnosis.no_verdict:
        first = diagnosis.findings[0]
        if first.severity == "note":
            assert diagnosis.headline.startswith("ok: nothing is wrong"), diagnosis.headline
        else:
            assert diagnosis.headline.startswith(first.code), diagnosis.headline

    # Below a finding, the property of a correct run is not named, but what was measured.
    for finding in diagnosis.findings:
        if finding.figure is not None and finding.n:
            assert finding.measure, finding
            assert finding.evidence.startswith(f"{finding.measure}: ")
            assert f"   measured: {finding.evidence}\n" in own_text
        assert finding.tested not in finding.evidence
    assert "tested: " not in own_text

    # What is listed as not read is no quantity that was read.
    log = diagnosis.log
    not_read = re.search(r"^not read: (.*(?:\n- .*)*)$", own_text, re.M)
    if log is not None and not_read is not None:
        assert not set(re.split(r", |\n- ", not_read[1])) & log.read.keys(), not_read[1]


def check_onsets(diagnosis):
    """Assert that the row at each onset has the fault."""
    course = Course(diagnosis.rows)
    for finding in diagnosis.findings:
        condition = AT_ITS_ONSET.get(finding.code)
        if condition is None or finding.onset is None:
            continue
        rows = [row for row in diagnosis.rows if row["step"] == finding.onset]
        assert rows, finding
        assert any(condition(row, course) for row in rows), (finding, rows)


@NEEDS_LOGS
@pytest.mark.parametrize("path", LOG_FILES, ids=lambda path: f"{path.parent.name}/{path.name}"[:40])
@pytest.mark.filterwarnings("ignore")
def test_the_lines_on_a_stored_log_are_true(path):
    try:
        diagnosis = diagnose(path)
    except (InvalidValue, OSError):
        pytest.skip("no log that can be read")
    check_lines(diagnosis)
    check_onsets(diagnosis)


def diagnose_rows(rows):
    """Return the diagnosis of rows as if they were a log."""
    log = Log.of(rows)
    return Diagnosis(log_findings(log.rows), rows=log.rows, log=log)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_lines_on_a_simulated_fault_are_true(name, seed):
    diagnosis = diagnose_rows(SCENARIOS[name].rows(seed + 900))
    check_lines(diagnosis)
    check_onsets(diagnosis)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_lines_on_a_healthy_course_are_true(shape):
    for seed in range(900, 904):
        for rows in (healthy(seed, shape), rough(seed, shape)):
            diagnosis = diagnose_rows(rows)
            check_lines(diagnosis)
            check_onsets(diagnosis)


@pytest.mark.parametrize("fault", mostly_slow(FAULTS, 6))
def test_the_lines_on_a_faulty_record_are_true(fault, tmp_path):
    _, changes = FAULTS[fault] if isinstance(FAULTS[fault], tuple) else (None, FAULTS[fault])
    check_lines(diagnose(simulate(tmp_path, **changes)))


@pytest.mark.parametrize("seed", range(40))
def test_onsets_of_any_course_have_the_fault(seed):
    """Courses at random levels with random jumps and spikes."""
    import random

    draw = random.Random(seed)
    steps = draw.choice([10, 16, 30, 60, 200])

    def curve(low, high):
        before, after = draw.uniform(low, high), draw.uniform(low, high)
        turn, noise = draw.random(), draw.choice([0, 0.1, 0.5])
        return lambda t: min(high, max(low, (before if t < turn else after) * (1 + noise * draw.gauss(0, 1))))

    curves = {
        "reward": curve(0, 1),
        "completions/clipped_ratio": curve(0, 1),
        "frac_reward_zero_std": curve(0, 1),
        "entropy": curve(0.001, 2),
        "kl": curve(0, draw.choice([0.05, 3, 4000])),
        "completions/mean_length": curve(50, 2000),
        "clip_ratio/region_mean": curve(0, 0.5),
        "sampling/importance_sampling_ratio/mean": curve(0.1, 3),
    }
    rows = []
    for step in range(1, steps + 1):
        rows.append({"step": step} | {name: value(step / steps) for name, value in curves.items()})
    diagnosis = diagnose_rows(rows)
    check_lines(diagnosis)
    check_onsets(diagnosis)


def course(steps=40, **metrics):
    """Return a log whose reward rises, with some other metrics as functions of the part of the run that is over."""
    metrics = {"reward": lambda t: t} | metrics
    return [
        {"step": step} | {name.replace("__", "/"): value(step / steps) for name, value in metrics.items()}
        for step in range(1, steps + 1)
    ]


def test_nearly_all_is_not_all():
    diagnosis = diagnose_rows(course(completions__clipped_ratio=lambda t: 0.99 if t < 0.6 else 1.0))
    assert diagnosis.headline.startswith("truncated: 99.8% of answers are cut off")
    assert "share of answers cut off in the later half: 99.8%" in str(diagnosis)


def test_hours_have_no_exponent():
    diagnosis = diagnose_rows(course(kl=lambda t: 3 * t, step_time=lambda t: 15_000.0))
    assert re.search(r"since step \d+; from there on: 1\d\d of 167 hours on each GPU", str(diagnosis))
    diagnosis = diagnose_rows(course(kl=lambda t: 3 * t, step_time=lambda t: 15.0))
    assert "of 10 minutes on each GPU" in str(diagnosis)


@pytest.mark.parametrize(
    ("note", "metrics"),
    [("on-policy", {"clip_ratio__region_mean": lambda t: 0.0})],
)
def test_a_note_is_no_headline(note, metrics):
    diagnosis = diagnose_rows(course(**metrics))
    assert [finding.code for finding in diagnosis.findings] == [note]
    assert diagnosis.headline.startswith("ok: nothing is wrong in what could be tested (")
    assert f"1. {note} or clip-idle (note): " in str(diagnosis)


def test_the_key_of_a_quantity_that_was_read_is_not_listed_as_unread():
    rows = course(entropy=lambda t: 1.0, audit__entropy=lambda t: 1.0, mine=lambda t: t)
    diagnosis = diagnose_rows(rows)
    text = diagnosis.as_text(verbose=True)
    assert "not read: mine" in text
    assert "read from another key: entropy (audit/entropy)" in text
    assert "Read from another key: `entropy (audit/entropy)`" in diagnosis.as_markdown()
    # Nothing is lost for scripts.
    log = json.loads(json.dumps(diagnosis.as_json()))["log"]
    assert (log["unread"], log["replaced"]) == (["mine"], {"entropy": "audit/entropy"})


def test_the_first_row_above_a_limit_is_no_jump():
    values = [34.7, 16.9, 210.0, 3395.0, *([400.0] * 36)]
    rows = [row | {"kl": value} for row, value in zip(course(), values, strict=True)]
    text = diagnose_rows(rows).as_text(verbose=True)
    # The KL is large at the first step already, so its growth is not that of updates alone.
    assert "in the first 1 log steps" not in text
    assert "kl-drift: KL to the reference 34.7 → 400 nats per token" in text
    assert "34.7 → 34.7" not in text


def test_passed_checks_are_true_of_the_rows():
    large = diagnose_rows(course(kl=lambda t: 2.0))
    assert "the policy stays near the reference" not in large.passed
    assert "the first steps do not move the policy too far" not in large.passed
    constant = diagnose_rows(course(12, reward=lambda t: -5.0))
    assert "rewards differ" not in constant.passed
    few = diagnose_rows([{"step": 1, "reward": 0.5, "completions/clipped_ratio": 0.46}])
    assert few.headline == "truncated: 46% of answers are cut off"
    assert not [name for name in few.passed if "finished" in name or "jump" in name]


def test_an_onset_is_a_row_with_the_fault():
    # The mean of the last rows is below the limit again, though that of the later half is above it.
    metric = Series(list(range(1, 101)), [0.0] * 40 + [1.0] * 55 + [0.0] * 5)
    assert onset(metric, lambda mean: mean > 0.5) == pytest.approx(41, abs=2)
    assert onset(metric, lambda mean: mean > 2) is None
    # A mean above the limit before the values are.
    metric = Series(list(range(1, 41)), [0.0, 9.0] + [2.0] * 38)
    assert onset(metric, lambda mean: mean > 1) == 2


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (168.3, "168"),
        (3395, "3395"),
        (1e6, "1,000,000"),
        (5e-4, "0.0005"),
        (1e-6, "1e-6"),
        (0.0, "0"),
        (999.6, "1000"),
    ],
)
def test_numbers_are_as_people_write_them(value, text):
    assert format_number(value) == text
    assert format_number(-value) == (f"-{text}" if value else "-0")


@pytest.mark.parametrize(("share", "text"), [(0.9999, "99.99%"), (1.0, "100%"), (0.0, "0%"), (1e-4, "0.01%")])
def test_shares_of_all_and_nothing_are_exact(share, text):
    assert format_share(share) == text


# --- The evidence of a finding is on its side ---

EVIDENCE = {
    "kl-drift": lambda figure: figure > 1,
    "reference-kl": lambda figure: figure > 0.1,
    "clip-heavy": lambda figure: figure > 0.2,
    "no-signal": lambda figure: figure > 0.5 or figure < 0.1,
    "truncated": lambda figure: figure > 0.25,
    "entropy-collapse": lambda figure: figure < 0.25,
    "entropy-rise": lambda figure: figure > 2,
    "low-entropy": lambda figure: figure < 0.1,
    "length-collapse": lambda figure: figure < 0.2,
    "length-growth": lambda figure: figure >= 1.8,
    "stale": lambda figure: figure > 4,
    "step-too-large": lambda figure: figure >= 1,
    "hardly-moves": lambda figure: figure < 0.01,
    "reward-flat": lambda figure: figure >= 20,
    "component-constant": lambda figure: figure >= 20,
    "late-change": lambda figure: figure >= 1,
    "engine-mismatch": lambda figure: figure > 0.05 or figure < 0.5,
    "sequence-weights": lambda figure: not 0.8 <= figure <= 1.25,
}
"""For each code, what its figure shows if it is evidence for it, written from docs/diagnose.md."""


def check_evidence(diagnosis):
    for finding in diagnosis.findings:
        if finding.severity != "note":
            assert finding.evidence, finding
        if finding.code in EVIDENCE:
            assert EVIDENCE[finding.code](finding.figure), finding


@pytest.mark.parametrize("first", range(0, 600, 60))
def test_the_evidence_on_random_logs_is_on_the_side_of_the_finding(first):
    for seed in range(first, first + 60):
        check_evidence(diagnose_rows(random_rows(seed)))


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_evidence_on_a_simulated_fault_is_on_its_side(name):
    check_evidence(diagnose_rows(SCENARIOS[name].rows(931)))


# --- What is printed by default, and with --verbose ---

COUNTS = re.compile(
    r"(\d+) of (\d+) checks? passed(?: in [\d.]+% of the tokens)?"
    r"(?:, (\d+) undecided)?(?:, (\d+) of (\d+) keys not read)?; -v lists them"
)


def check_short_text(diagnosis):
    """Assert that the default text is the headline, what was read, the findings and one line of counts."""
    text = diagnosis.as_text()
    assert str(diagnosis) == text
    counts = [match for match in map(COUNTS.fullmatch, text.splitlines()) if match]
    assert len(counts) == 1, text
    passed, total, undecided, unread, keys = counts[0].groups()
    assert int(passed) == len(set(diagnosis.passed))
    assert int(total) == len({finding.tested for finding in diagnosis.tested})
    assert int(undecided or 0) == len(set(diagnosis.untested) - set(diagnosis.passed))
    assert int(unread or 0) == len(diagnosis.log.unread if diagnosis.log else ())
    if unread:
        assert int(keys) == diagnosis.log.keys_of_learning
    assert all(finding.subject for finding in diagnosis.tested)
    # The names of checks are no part of it.
    for line in text.splitlines():
        assert not line.startswith(("passed", "undecided", "read from another key"))
        if not diagnosis.no_verdict:
            assert not line.startswith("not read")


def check_long_text(diagnosis):
    """Assert that the text with --verbose names every check and every key."""
    text = diagnosis.as_text(verbose=True)
    for name in [*diagnosis.passed, *diagnosis.untested]:
        assert name in text
    for line in diagnosis.as_text().splitlines():
        # Keys that are not read are grouped there, and the first ones named here.
        is_other = line.startswith(("configuration: ", "not read: "))
        assert line in text or COUNTS.fullmatch(line) or is_other


@NEEDS_LOGS
@pytest.mark.parametrize("path", LOG_FILES, ids=lambda path: f"{path.parent.name}/{path.name}"[:40])
@pytest.mark.filterwarnings("ignore")
def test_the_text_on_a_stored_log_is_short_unless_asked(path):
    try:
        diagnosis = diagnose(path)
    except InvalidValue:
        pytest.skip("no log that can be read")
    check_short_text(diagnosis)
    check_long_text(diagnosis)
    # Without the findings, six lines: headline, what was read, counts, severities, and two empty lines.
    # A configuration has a line and an empty one, and if it has findings, a heading and five lines for each.
    without_findings = 6 + 2 * (diagnosis.configuration is not None)
    # Constant metrics of a made log have a line.
    without_findings += any(remark.startswith("one value in all") for remark in diagnosis.remarks)
    if not diagnosis.log.notes and not diagnosis.notes:
        lines_of_findings = sum(7 for _ in diagnosis.findings)
        if diagnosis.configuration is not None and diagnosis.configuration.findings:
            lines_of_findings += 1 + 5 * len(diagnosis.configuration.findings)
        assert len(diagnosis.as_text().splitlines()) <= without_findings + lines_of_findings


@pytest.mark.parametrize("shape", SHAPES)
def test_the_text_on_a_healthy_course_has_four_lines(shape):
    diagnosis = diagnose_rows(healthy(930, shape))
    check_short_text(diagnosis)
    check_long_text(diagnosis)


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_text_on_a_simulated_fault_is_short(name):
    diagnosis = diagnose_rows(SCENARIOS[name].rows(930))
    check_short_text(diagnosis)
    check_long_text(diagnosis)


@pytest.mark.parametrize("name", ["colder engine", "groups"])
def test_the_text_on_a_record_is_short(name, tmp_path):
    diagnosis = diagnose(simulate(tmp_path, **FAULTS[name][1]))
    check_short_text(diagnosis)
    check_long_text(diagnosis)


def test_without_a_reward_the_keys_are_listed_in_the_short_text_too():
    rows = [{"step": step, "my/return": 0.1 * step, "entropy": 1.0} for step in range(20)]
    diagnosis = diagnose_rows(rows)
    assert diagnosis.no_verdict
    assert "\nnot read: my/return" in str(diagnosis)


# --- The first line ---


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("clause", ["1.2345e-300 → 9.87654e300", "x" * 400, "the reward " * 40])
def test_the_first_line_is_short_whatever_the_cause(kind, clause):
    """Whatever the values of a cause are, and however many codes cannot be told from the finding."""
    cause = f"{clause}; {clause}, from step 1e15 on"
    # A note alone has no line of its own.
    finding = Finding("ok", True, "a property").failed(kind, cause, *KINDS[:2], severity="fix")
    first, *others = str(Diagnosis([finding])).splitlines()
    assert len(first) <= LONGEST_HEADLINE == 120
    assert first.startswith(kind.code)
    codes = " or ".join((kind.code, *finding.or_else))
    assert first.endswith(cause) or f"1. {codes} (fix): {cause}" in others


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_first_line_of_a_simulated_fault_is_short_and_is_not_repeated(name):
    rows = [
        {key: 1e30 * value if key == "kl" else value for key, value in row.items()}
        for row in SCENARIOS[name].rows(945)
    ]
    for log in (Log.of(SCENARIOS[name].rows(945)), Log.of(rows)):
        lines = str(Diagnosis(log_findings(log.rows), rows=log.rows, log=log)).splitlines()
        assert len(lines[0]) <= LONGEST_HEADLINE
        code, _, cause = lines[0].partition(": ")
        assert cause
        assert f"1. {code} (fix): {cause}" not in lines


def test_a_long_cause_is_complete_in_its_finding():
    finding = Finding("ok", True, "a property").failed(KINDS[0], "a cause; " * 40)
    lines = str(Diagnosis([finding])).splitlines()
    assert lines[0].endswith("a cause; a cause") or lines[0].endswith("a cause")
    assert lines[2] == f"1. {KINDS[0].code} ({KINDS[0].severity}): {'a cause; ' * 40}"


@pytest.mark.parametrize("number", [1, 12, 13, 60])
def test_with_v_every_key_that_was_not_read_is_named(number):
    keys = [f"{('actor/prefix', 'worker', 'alone')[index % 3]}_{index}" for index in range(number)]
    rows = [{"step": step, "reward": step / 20, **dict.fromkeys(keys, 1.0)} for step in range(20)]
    text = diagnose_rows(rows).as_text(verbose=True)
    listed = text[text.index("not read: ") :].partition("steps, counters and times")[0]
    assert sorted(re.findall(r"\w[\w/]*_\d+", listed)) == sorted(keys)
    assert " more" not in listed
    if number > 12:
        assert listed.startswith(f"not read: {number} keys\n- actor/prefix_0, actor/prefix_3, ")
