"""What went wrong for a part of a run and away again is told, and a healthy course has no such part."""

import json
import random
import sys
from statistics import median

import pytest

from pages import ROOT
from rlvet import diagnose
from rlvet._numbers import format_number
from rlvet.checks.course import Course
from rlvet.checks.diagnosis import Diagnosis
from rlvet.checks.log_checks import log_findings
from rlvet.runs.logs import Log

sys.path.insert(0, str(ROOT / "benchmarks/doctor"))

from log_scenarios import SHAPES, healthy, rough

DIPS = ("falls and recovers", "dips first")
"""Shapes of healthy rewards that fall and rise again."""


OF_REWARD = "in passing, of the reward: it was "


def rows_of(steps=1000, first=300, last=500, **other):
    """Return the rows of a healthy run that has other values in some of its steps.

    Args:
        steps: Number of rows.
        first: The first step with other values.
        last: The last one.
        **other: For each such metric, the value in these steps.
    """
    draw = random.Random(5)
    usual = {
        "reward": 0.6,
        "entropy": 0.5,
        "kl": 0.05,
        "cut": 0.02,
        "grad_norm": 0.3,
        "length": 400.0,
        "dead": 0.3,
    }
    rows = []
    for step in range(1, steps + 1):
        values = usual | (other if first <= step <= last else {})
        noisy = {name: value * (1 + 0.1 * draw.uniform(-1, 1)) for name, value in values.items()}
        rows.append({"step": step, **noisy})
    return rows


def told(rows):
    log = Log.of(rows)
    return Diagnosis(log_findings(log.rows), rows=log.rows, log=log).in_passing


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("reward", 0.05, "reward 0.6"),
        ("entropy", 0.002, "entropy 0.5"),
        ("kl", 3.0, "KL to the reference 0.05"),
        ("cut", 0.9, "the share of answers cut off 0.02"),
        ("length", 20.0, "the mean length 4"),
        ("length", 4000.0, "the mean length 4"),
        ("dead", 1.0, "the share of groups with equal rewards 0.3"),
        ("grad_norm", 30.0, "the gradient norm 0.3"),
    ],
)
def test_a_part_with_other_values_is_told(name, value, words):
    rows = rows_of(**{name: value})
    findings = log_findings(Log.of(rows).rows)
    (line,) = told(rows) or [finding.cause for finding in findings if finding.code == "run-died"]
    assert "from step 300 to 500" in line
    assert words[:-1] in line


def test_it_stands_below_the_verdict_and_leaves_it(tmp_path):
    log = tmp_path / "metrics.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows_of(reward=0.2, cut=0.7, first=301)))
    diagnosis = diagnose(log)
    (line,) = diagnosis.in_passing
    assert line.startswith("in passing, from step 301 to 500: reward 0.6")
    assert "; the share of answers cut off 0.02" in line
    assert line.endswith(" (means of as many log steps before, in and after it)")
    assert diagnosis.healthy
    assert line in str(diagnosis).splitlines()
    assert line in diagnosis.as_json()["notes"]
    assert f"`{line}`" in diagnosis.as_markdown()


def test_a_part_that_a_finding_tells_with_its_end_is_not_repeated():
    rows = rows_of(reward=0.0, dead=1.0)
    codes = [finding.code for finding in log_findings(Log.of(rows).rows) if finding.cause]
    assert "run-died" in codes
    assert told(rows) == []


@pytest.mark.parametrize(
    "rows",
    [
        rows_of(first=300, last=1000, reward=0.2),
        rows_of(first=1, last=300, reward=0.2),
        rows_of(first=300, last=303, kl=3.0),
        rows_of(steps=2000, first=300, last=310, kl=3.0),
        rows_of(first=300, last=500, reward=0.45),
        rows_of(first=300, last=500, kl=0.4),
        rows_of(steps=29, first=15, last=22, reward=0.0),
    ],
    ids=[
        "to the end",
        "from the start",
        "few rows",
        "a small share",
        "a small fall",
        "a small KL",
        "a short log",
    ],
)
def test_what_is_no_such_part(rows):
    assert told(rows) == []


def test_metrics_that_are_0_or_1_in_each_row_are_compared_by_their_means():
    draw = random.Random(1)
    rows = [
        {"step": step, "reward": 0.5 + draw.gauss(0, 0.1), "dead": float(draw.random() < 0.5)}
        for step in range(600)
    ]
    assert told(rows) == []


def test_three_parts_are_told_and_the_number_of_the_others():
    rows = rows_of()
    for first in range(100, 1000, 150):
        for row in rows[first : first + 40]:
            row["kl"] = 4.0
    lines = told(rows)
    assert len(lines) == 4
    assert lines[-1] == "in passing, 3 more such parts of the run"


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape not in DIPS])
@pytest.mark.parametrize("course", [healthy, rough])
def test_prefixes_of_healthy_runs_have_none(course, shape):
    for seed in range(40, 60):
        rows = course(seed, shape)
        lines = told(rows[: random.Random(seed).randint(30, len(rows))])
        # A reward that wanders falls and comes back.
        assert [line for line in lines if not line.startswith(OF_REWARD)] == [], seed


def test_a_healthy_reward_hardly_ever_falls_and_comes_back_by_noise():
    lines = []
    for shape in SHAPES:
        if shape in DIPS:
            continue
        for seed in range(60):
            rows = healthy(seed, shape)
            lines += told(rows[: random.Random(seed).randint(30, len(rows))])
    assert len(lines) <= 0.034 * 60 * (len(SHAPES) - len(DIPS))


@pytest.mark.parametrize("shape", DIPS)
def test_a_dip_of_a_healthy_reward_is_told_as_one_of_the_reward(shape):
    lines = [line for seed in range(80) for line in told(healthy(seed, shape))]
    assert lines
    assert all(": reward " in line or line.startswith(OF_REWARD) for line in lines)


def test_rows_of_a_record_have_none():
    rows = [row for row in rows_of(kl=3.0) for _ in range(2)]
    assert Diagnosis([], rows=Course(rows).rows).in_passing == []


def in_single_steps(rows):
    """Return the line on single log steps, or an empty text."""
    log = Log.of(rows)
    remarks = Diagnosis(log_findings(log.rows), rows=log.rows, log=log).remarks
    return "".join(line for line in remarks if line.startswith("in single log steps"))


@pytest.mark.parametrize(
    "steps",
    [[], [300], [300, 700], [300, 301, 302, 303], [*range(300, 304), *range(310, 314), *range(320, 324)]],
)
def test_single_log_steps_far_above_usual_are_told(steps):
    rows = [rows_of(first=step, last=step, grad_norm=60.0, kl=4.0)[step - 1] for step in steps]
    spikes = {row["step"]: row for row in rows}
    rows = [spikes.get(row["step"], row) for row in rows_of(first=0, last=0)]
    line = in_single_steps(rows)
    for name, words in (("grad_norm", "the gradient norm"), ("kl", "KL to the reference")):
        largest = sorted(spikes.values(), key=lambda row: -row[name])[:3]
        told = [f"{row[name]:.3g} at step {row['step']}" for row in largest]
        if len(steps) > 3:
            told.append({4: "and 1 more such step of 1000", 12: "and 9 more such steps of 1000"}[len(steps)])
        values = sorted(row[name] for row in rows)
        usual, most = (format_number(value) for value in (median(values), values[900]))
        told_line = f"{words} {', '.join(told)}, where its median is {usual} and nine of ten are below {most}"
        assert (told_line in line) == bool(steps), line


def test_norms_of_steps_with_a_gradient_among_others_without_one_are_usual():
    """Of a run in which most groups have equal rewards, most norms are near 0."""
    rows = rows_of(first=0, last=0)
    for row in rows:
        row["grad_norm"] *= 1 if row["step"] % 4 == 0 else 0.003
    assert "the gradient norm" not in in_single_steps(rows)
    rows[500]["grad_norm"] = 3.0
    assert "the gradient norm 3 at step 501, where its median is 0.00" in in_single_steps(rows)


def test_metrics_that_left_their_values_at_other_steps_have_their_own():
    rows = rows_of(last=400, entropy=5.0)
    for row in rows:
        if 350 <= row["step"] <= 450:
            row["dead"] = 1.0
    (line,) = told(rows)
    assert "from step 300 to 400: entropy 0.5" in line
    assert "; from step 350 to 450: the share of groups with equal rewards 0.3" in line


def test_a_part_of_the_run_is_not_told_as_single_log_steps():
    assert in_single_steps(rows_of(first=300, last=304, grad_norm=60.0, kl=4.0)) == ""


def lost_and_recovered(rows=200, first=80, last=110, low=0.3, noise=0.1, seed=3):
    """Return the rows of a level reward that is lower in some steps, by less than half."""
    draw = random.Random(seed)
    return [
        {"step": float(step), "reward": (low if first <= step <= last else 0.6) + draw.gauss(0, noise)}
        for step in range(1, rows + 1)
    ]


def test_a_reward_that_rose_and_came_back_is_told_in_the_plateau_around_it():
    draw = random.Random(0)
    levels = [0.45, 0.5, 0.35, 0.42, 0.62, 0.6, 0.36, 0.5, 0.37, 0.5]
    rows = [
        {"step": step, "reward": levels[(step - 1) // 20] + draw.gauss(0, 0.12)} for step in range(1, 201)
    ]
    (plateau,) = [finding for finding in log_findings(Log.of(rows).rows) if finding.cause]
    assert plateau.code == "plateau"
    words = plateau.cause.partition("but not level: it was ")[2].split()
    first, last = float(words[3]), float(words[5].rstrip(","))
    assert 81 <= first < last <= 120
    inside = [row["reward"] for row in rows if first <= row["step"] <= last]
    assert float(words[0]) == pytest.approx(sum(inside) / len(inside), rel=0.01)
    assert "(means of 20 log steps each: the best, and the lowest before and after it)" in plateau.cause
    level = [row | {"reward": 0.4 + draw.gauss(0, 0.12)} for row in rows]
    assert "not level" not in "".join(one.cause for one in log_findings(Log.of(level).rows))


def test_a_reward_that_came_back_is_told_in_the_plateau_around_it():
    rows = lost_and_recovered()
    (plateau,) = [finding for finding in log_findings(Log.of(rows).rows) if finding.cause]
    assert plateau.code == "plateau"
    words = plateau.cause.partition("but not level: it was ")[2].split()
    first, last = float(words[3]), float(words[5].rstrip(","))
    assert 80 <= first < last <= 110
    inside = [row["reward"] for row in rows if first <= row["step"] <= last]
    assert len(inside) == 20
    assert float(words[0]) == pytest.approx(sum(inside) / len(inside), rel=0.01)
    assert not any(line.startswith(OF_REWARD) for line in told(rows))


def test_a_reward_that_came_back_in_a_rise_is_told_in_passing():
    rows = [
        {**row, "reward": row["reward"] + row["step"] / 150}
        for row in lost_and_recovered(first=100, last=140, low=0)
    ]
    assert [finding.code for finding in log_findings(Log.of(rows).rows) if finding.cause] == []
    (line,) = told(rows)
    assert line.startswith(OF_REWARD)


@pytest.mark.parametrize(
    "rows",
    [
        lost_and_recovered(low=0.5, noise=0.05),
        lost_and_recovered(noise=0.6),
        lost_and_recovered(last=200),
        lost_and_recovered(first=1),
        lost_and_recovered(rows=29, first=10, last=18),
    ],
    ids=["a small loss", "noise", "to the end", "from the start", "a short log"],
)
def test_a_reward_that_is_not_surely_lost_and_recovered(rows):
    assert not any("the lowest" in finding.cause for finding in log_findings(Log.of(rows).rows))
    assert told(rows) == []
