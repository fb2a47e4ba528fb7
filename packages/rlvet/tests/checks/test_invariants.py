"""Three invariants of the diagnosis of a log, on generated logs, simulated runs and stored logs.

1. No printed sentence is false of the raw rows. `helpers.printed_sentences` reads them, and shares no code with the
   checks.
2. Rows that go on as before, or one value far from the others, never turn a fault into "ok".
3. The order of keys, the names of another framework, the units of steps and unrelated metrics change nothing.
"""

import os
import random
import sys
import types
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest

from helpers.printed_sentences import violations
from helpers.random_logs import FRAMEWORK_KEYS, as_logged, canonical, random_rows, restricted, shuffled
from pages import ROOT
from rlvet import open_run
from rlvet.checks import registry
from rlvet.checks.diagnosis import Diagnosis
from rlvet.checks.log import clip, distance, reward, signal
from rlvet.checks.log import length as length_of_answers
from rlvet.checks.log_checks import log_findings
from rlvet.errors import InvalidValue
from rlvet.runs.logs import Log
from rlvet.runs.quantities import named_rows
from selection import mostly_slow

sys.path.insert(0, str(ROOT / "benchmarks/doctor"))

from log_scenarios import SCENARIOS, SHAPES, healthy, rough

LOGS = Path(os.environ.get("BANDPO_TEST_DATA", "missing")) / "logs"
LOG_FILES = sorted(path for path in LOGS.rglob("*") if path.is_file() and path.name != "README.md")
NEEDS_LOGS = pytest.mark.skipif(not LOG_FILES, reason="BANDPO_TEST_DATA has no logs")


def diagnose_rows(rows):
    log = Log.of(rows)
    return Diagnosis(log_findings(log.rows), rows=log.rows, log=log)


def false_sentences(rows):
    """Return the printed sentences on a log that its rows contradict."""
    diagnosis = diagnose_rows(rows)
    return violations(diagnosis.as_text(verbose=True), named_rows(canonical(rows)))


# --- 1. No printed sentence is false of the rows ---


@pytest.mark.parametrize("first", mostly_slow(range(0, 400, 40), 2))
def test_sentences_on_random_logs_are_true(first):
    for seed in range(first, first + 40):
        assert not false_sentences(random_rows(seed)), seed


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(10_000, 20_000, 500))
def test_sentences_on_ten_thousand_random_logs_are_true(first):
    found = {seed: false_sentences(random_rows(seed)) for seed in range(first, first + 500)}
    assert not {seed: sentences for seed, sentences in found.items() if sentences}


@pytest.mark.parametrize("name", SCENARIOS)
def test_sentences_on_a_simulated_fault_are_true(name):
    for seed in (910, 911):
        assert not false_sentences(SCENARIOS[name].rows(seed)), seed


@pytest.mark.parametrize("shape", SHAPES)
def test_sentences_on_a_healthy_course_are_true(shape):
    for seed in (910, 911):
        assert not false_sentences(healthy(seed, shape))
        assert not false_sentences(rough(seed, shape))


def rows_of(path):
    """Return the rows of a stored log; skip a file that is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return list(open_run(path).rows)
        except (InvalidValue, OSError):
            pytest.skip("no log that can be read")


def check_prefixes(rows, lengths):
    for length in lengths:
        prefix = rows[:length]
        diagnosis = Diagnosis(log_findings(prefix), rows=prefix, log=Log.of([]))
        assert not violations(diagnosis.as_text(verbose=True), prefix), length


@NEEDS_LOGS
@pytest.mark.parametrize("path", LOG_FILES, ids=lambda path: f"{path.parent.name}/{path.name}"[:40])
def test_sentences_on_some_prefixes_of_a_stored_log_are_true(path):
    rows = rows_of(path)
    check_prefixes(rows, sorted({*range(1, min(len(rows), 31), 3), *range(30, len(rows), 23), len(rows)}))


@NEEDS_LOGS
@pytest.mark.exhaustive
@pytest.mark.parametrize("path", LOG_FILES, ids=lambda path: f"{path.parent.name}/{path.name}"[:40])
def test_sentences_on_every_prefix_of_a_stored_log_are_true(path):
    rows = rows_of(path)
    check_prefixes(rows, range(1, len(rows) + 1))


# --- 2. More rows of the same, or one value, do not hide a fault ---


def lengths_at_which_a_fault_turns_to_ok(rows):
    """Return the number of rows of each prefix that is called ok, though the prefix one row shorter has a fault."""
    lengths = []
    had_fault = False
    for length in range(1, len(rows) + 1):
        prefix = rows[:length]
        diagnosis = Diagnosis(log_findings(prefix), rows=prefix, log=Log.of([]))
        if had_fault and diagnosis.headline.startswith("ok"):
            lengths.append(length)
        had_fault = not diagnosis.healthy
    return lengths


@NEEDS_LOGS
@pytest.mark.parametrize("path", LOG_FILES, ids=lambda path: f"{path.parent.name}/{path.name}"[:40])
def test_one_more_row_of_a_stored_log_turns_no_fault_into_ok(path):
    assert lengths_at_which_a_fault_turns_to_ok(rows_of(path)[:60]) == []


@NEEDS_LOGS
@pytest.mark.exhaustive
@pytest.mark.parametrize("path", LOG_FILES, ids=lambda path: f"{path.parent.name}/{path.name}"[:40])
def test_one_more_row_of_any_part_of_a_stored_log_turns_no_fault_into_ok(path):
    assert lengths_at_which_a_fault_turns_to_ok(rows_of(path)) == []


def hovering(values, repeats=4):
    """Return a log whose KL to the reference rises to the values and stays among them."""
    kl = [0.0, *(0.06 * number for number in range(1, 14)), *values * repeats]
    rewards = [0.3 + 0.01 * (number % 7) for number in range(len(kl))]
    return [
        {"step": number + 1, "kl": value, "reward": reward}
        for number, (value, reward) in enumerate(zip(kl, rewards, strict=True))
    ]


@pytest.mark.parametrize(
    "values", [[1.1, 1.3, 0.9, 0.95], [1.2, 1.2, 0.7, 0.7, 0.7], [0.9, 1.05, 1.05, 0.99]]
)
def test_a_kl_that_crosses_its_limit_again_and_again_is_not_called_ok_in_between(values):
    assert lengths_at_which_a_fault_turns_to_ok(hovering(values)) == []


@pytest.mark.parametrize("rows", range(12, 30))
def test_the_entropy_of_one_row_is_no_collapse(rows):
    entropies = [0.05 if number % 2 else 0.03 for number in range(rows - 1)] + [0.001]
    log = [{"step": number, "entropy": value, "reward": 0.5} for number, value in enumerate(entropies)]
    assert "entropy-collapse" not in [finding.code for finding in diagnose_rows(log).findings]


def continued(rows, count):
    """Return a log with more rows, which repeat its last ones."""
    last_rows = rows[-max(3, len(rows) // 5) :]
    width = rows[-1]["step"] - rows[-2]["step"]
    result = list(rows)
    for number in range(count):
        row = dict(last_rows[number % len(last_rows)])
        row["step"] = rows[-1]["step"] + width * (number + 1)
        result.append(row)
    return result


SHARES = (
    "evaluation",
    "eval/accuracy",
    "cut",
    "dead",
    "clip",
    "completions/clipped_ratio",
    "frac_reward_zero_std",
    "clip_ratio/region_mean",
)


def with_one_value(rows, seed):
    """Return a log in which one value is a thousand times larger, a thousandth or 0; shares stay below 1."""
    draw = random.Random(f"one value {seed}")
    rows = [dict(row) for row in rows]
    row = draw.choice(rows)
    name = draw.choice([name for name in row if name != "step"])
    value = row[name] * draw.choice((1000.0, 0.001, 0.0))
    row[name] = min(1.0, value) if name in SHARES else value
    return rows


ENDS_WITH_THE_ROWS = ("collapse", "gradient-spikes", "clip-heavy")
"""Codes of faults that compare two parts of a run, which more rows shift."""


def hidden(rows, change):
    """Return whether a change of a log turns its fault into "ok"."""
    diagnosis = diagnose_rows(rows)
    faults = [finding for finding in diagnosis.tested if finding.ok is False]
    if not faults or all(finding.code in ENDS_WITH_THE_ROWS for finding in faults):
        return False
    return diagnose_rows(change(rows)).headline.startswith("ok")


@pytest.mark.parametrize("first", mostly_slow(range(0, 300, 50), 2))
def test_more_rows_of_the_same_do_not_hide_a_fault(first):
    for seed in range(first, first + 50):
        rows = random_rows(seed, (10, 12, 15, 18, 24, 27, 30, 46, 60, 100))
        for count in (1, 2, 5, len(rows)):
            assert not hidden(rows, lambda rows, count=count: continued(rows, count)), (seed, count)


@pytest.mark.parametrize("first", mostly_slow(range(0, 300, 50), 2))
def test_one_value_does_not_hide_a_fault(first):
    for seed in range(first, first + 50):
        rows = random_rows(seed, (12, 18, 24, 30, 46, 60, 100))
        for number in range(3):
            assert not hidden(
                rows, lambda rows, number=number, seed=seed: with_one_value(rows, (seed, number))
            ), (
                seed,
                number,
            )


@pytest.mark.parametrize("name", SCENARIOS)
def test_one_value_does_not_hide_a_simulated_fault(name):
    rows = SCENARIOS[name].rows(912)
    if diagnose_rows(rows).healthy:
        return
    for number in range(8):
        changed = with_one_value(rows, number)
        assert not diagnose_rows(changed).headline.startswith("ok"), number
    for count in (1, 5):
        assert not diagnose_rows(continued(rows, count)).headline.startswith("ok"), count


def test_an_entropy_that_falls_in_each_of_five_rows_is_a_collapse():
    entropies = [0.79, 0.53, 0.37, 0.35, 0.09]
    log = [{"step": number, "entropy": value, "reward": 0.5} for number, value in enumerate(entropies)]
    assert "entropy-collapse" in [finding.code for finding in diagnose_rows(log).findings]


# --- 3. Names, orders and units ---


def said(rows):
    """Return what is said about a log: codes with their severities, and what passed."""
    diagnosis = diagnose_rows(rows)
    return [(finding.code, finding.severity) for finding in diagnosis.findings], diagnosis.passed


@pytest.mark.parametrize("framework", FRAMEWORK_KEYS)
@pytest.mark.parametrize("name", mostly_slow(SCENARIOS, 3))
def test_a_fault_is_the_same_in_the_names_of_each_framework(name, framework):
    """Of the quantities that the framework logs. Keys are shuffled, and other metrics are added."""
    rows = canonical(SCENARIOS[name].rows(913))
    expected = said(restricted(rows, framework))
    logged = shuffled(as_logged(rows, framework), seed=1)
    assert said(logged) == expected
    draw = random.Random(2)
    others = [
        row | {"my/metric": draw.gauss(0, 1), "loss/other": draw.random(), "gpu": 3.0} for row in logged
    ]
    assert said(others) == expected


@pytest.mark.parametrize("first", mostly_slow(range(0, 120, 40), 3))
def test_a_random_log_is_the_same_in_the_names_of_each_framework(first):
    for seed in range(first, first + 40):
        rows = random_rows(seed)
        for framework in FRAMEWORK_KEYS:
            expected = said(restricted(rows, framework))
            assert said(shuffled(as_logged(rows, framework), seed)) == expected, (seed, framework)


@pytest.mark.parametrize("seed", range(60))
def test_keys_in_another_order_change_nothing(seed):
    rows = random_rows(seed)
    assert (
        diagnose_rows(shuffled(rows, seed)).as_text(verbose=True).split("\nread ")[0]
        == diagnose_rows(rows).as_text(verbose=True).split("\nread ")[0]
    )


NEED_THE_FIRST_STEP = ("reference-kl", "hardly-moves")
"""Codes whose definition has a number of training steps: before the first, and after a hundred."""


@pytest.mark.parametrize("unit", [10.0, 64.0, 0.25])
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_unit_of_steps_changes_nothing(name, unit):
    rows = SCENARIOS[name].rows(914)
    scaled = [row | {"step": row["step"] * unit} for row in rows]
    codes = [code for code, _ in said(rows)[0] if code not in NEED_THE_FIRST_STEP]
    scaled_codes = [code for code, _ in said(scaled)[0] if code not in NEED_THE_FIRST_STEP]
    assert scaled_codes == codes or {*codes} ^ {*scaled_codes} <= {"kl-drift"}


# --- A check of a level that is made one of a change ---

MUTATIONS = {
    "KL at the end, relative to the first": (
        distance,
        "return max(end, late) > LARGE_KL",
        "return max(end, late) > LARGE_KL * max(1.0, 3 * abs(values[0]))",
        "if kl.last > LARGE_KL or rows_above > MANY_ABOVE * len(kl.values):",
        "if kl.last > LARGE_KL * max(1.0, 3 * abs(kl.values[0])):",
    ),
    "KL at the first step, relative to later ones": (
        distance,
        "if first <= REFERENCE_KL:",
        "if first <= max(REFERENCE_KL, 2 * median(kl.values)):",
    ),
    "KL of early steps, relative to the first": (
        distance,
        "if max(early) < EARLY_KL:",
        "if max(early) < max(EARLY_KL, GROWTH * early[0]):",
    ),
    "clip, relative to the first steps": (
        clip,
        "if share <= MOST:\n            return finding\n",
        "if True:\n            return finding\n",
        "    rewards = course.series",
        "    if share <= 10 * shares.first:\n        return finding\n    rewards = course.series",
    ),
    "groups without signal, relative to the first": (
        signal,
        "if max(mean, end, shares.last) > MOST:",
        "if max(mean, end, shares.last) > 2 * shares.first + MOST:",
    ),
    "length, not compared with the reward": (
        length_of_answers,
        "if growth < LITTLE_LONGER or ends_higher(reward):\n            return finding\n        of_reward",
        "return finding\n        of_reward",
    ),
    "constant rewards pass": (
        reward,
        "if equal_rows >= min(FEW_STEPS, len(reward.values)):",
        "if equal_rows > len(reward.values):",
    ),
}
"""For each mutation, its module, and texts in it, each before and after."""


@contextmanager
def mutated(module, *texts):
    """Replace texts of a module of checks, whose checks register themselves anew."""
    source = Path(module.__file__).read_text(encoding="utf-8")
    for old, new in zip(texts[::2], texts[1::2], strict=True):
        assert source.count(old) == 1, "the check was rewritten: write its mutation anew"
        source = source.replace(old, new)
    originals = registry.LOGS.checks()
    mutant = types.ModuleType(module.__name__)
    exec(compile(source, module.__file__, "exec"), mutant.__dict__)
    assert registry.LOGS.checks() != originals
    try:
        yield
    finally:
        for check in originals:
            registry.LOGS.add(check)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_check_of_a_level_that_becomes_one_of_a_change_is_found(name):
    with mutated(*MUTATIONS[name]):
        assert any(false_sentences(random_rows(seed, (12, 46, 60))) for seed in range(1500))
