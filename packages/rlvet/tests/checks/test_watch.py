"""A log is judged while it grows."""

import json
import sys

import pytest

from pages import ROOT
from rlvet import diagnose
from rlvet.checks.watch import LogWatch
from rlvet.runs import Setup

sys.path.insert(0, str(ROOT / "benchmarks/doctor"))

from log_scenarios import SCENARIOS, healthy


def live(rows, every=10):
    """Return the codes of faults that were found while the log grew, and all that is found at the end."""
    watch = LogWatch(every)
    faults = {}
    for count in range(1, len(rows) + 1):
        if watch.is_due(rows[:count]):
            findings = watch.check(rows[:count], Setup())
            faults |= {finding.code: count for finding in findings if finding.ok is False}
    return faults, watch.check(rows, Setup(), at_the_end=True)


@pytest.mark.parametrize("shape", ["starts late", "falls and recovers", "line"])
@pytest.mark.parametrize("seed", [9100, 9101])
def test_a_healthy_course_is_no_fault_at_any_time(seed, shape):
    """Also where it begins with few groups that differ, or the reward dips."""
    assert live(healthy(seed, shape))[0] == {}


def test_the_end_is_judged_as_bandpo_diagnose_judges_it(tmp_path):
    rows = SCENARIOS["entropy rises without end"].rows(3)
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join(map(json.dumps, rows)))
    expected = [finding.code for finding in diagnose(log).findings]
    assert "entropy-rise" in expected
    assert [finding.code for finding in live(rows)[1]] == expected


def test_the_work_of_all_checks_grows_as_the_log():
    rows = [{"step": step, "reward": 0.5} for step in range(10_000)]
    watch = LogWatch(10)
    work = 0
    for count in range(1, len(rows) + 1):
        newest = rows[count - 1 : count]

        class Log(list):
            def __len__(self, count=count):
                return count

        if watch.is_due(Log(newest)):
            watch.start_after(count)
            work += count
    assert work < 25 * len(rows)


def test_nan_is_found_at_once_and_once():
    rows = [{"step": step, "reward": 0.5, "loss": 0.1} for step in range(8)]
    watch = LogWatch(10)
    assert not watch.is_due(rows)
    rows.append({"step": 8, "reward": 0.5, "loss": float("nan")})
    assert watch.is_due(rows)
    assert [finding.code for finding in watch.check(rows, Setup())] == ["nan"]
    rows.append({"step": 9, "reward": 0.5, "loss": float("nan")})
    assert not watch.is_due(rows)


def test_few_rows_are_not_judged():
    rows = [{"step": step, "reward": 0.5, "completions/clipped_ratio": 1.0} for step in range(9)]
    watch = LogWatch(1)
    assert watch.check(rows, Setup(), at_the_end=True) == []
    rows.append({"step": 9, "reward": 0.5, "completions/clipped_ratio": 1.0})
    assert "truncated" in [finding.code for finding in watch.check(rows, Setup("trl"))]
