"""An output can be read alone: its counts add up, its names are on the page, and its words agree with each other."""

import math
import os
import random
import re
import sys
from pathlib import Path

import pytest

from helpers.random_logs import random_rows
from helpers.simulated_runs import FAULTS, simulate
from pages import ROOT
from rlvet import diagnose
from rlvet._severities import MEANINGS, SEVERITIES
from rlvet.checks.diagnosis import Diagnosis
from rlvet.checks.log_checks import log_findings
from rlvet.errors import InvalidValue
from rlvet.records.catalogue import KINDS
from rlvet.runs.logs import Log

sys.path.insert(0, str(ROOT / "benchmarks/doctor"))

from log_scenarios import SCENARIOS, SHAPES, healthy

from selection import mostly_slow

LOGS = Path(os.environ.get("BANDPO_TEST_DATA", "missing")) / "logs"
LOG_FILES = sorted(path for path in LOGS.rglob("*") if path.is_file() and path.name != "README.md")
NEEDS_LOGS = pytest.mark.skipif(not LOG_FILES, reason="BANDPO_TEST_DATA has no logs")

PAGE = (ROOT / "docs/diagnose.md").read_text()


def diagnose_rows(rows):
    log = Log.of(rows)
    return Diagnosis(log_findings(log.rows), rows=log.rows, log=log)


def course(steps=100, **metrics):
    """Return a log whose reward rises, with some other metrics as functions of the part of the run that is over."""
    metrics = {"reward": lambda t: t} | metrics
    return [
        {"step": step} | {name: value(step / steps) for name, value in metrics.items()}
        for step in range(1, steps + 1)
    ]


def found(rows, code):
    """Return the one finding of a code."""
    (finding,) = [finding for finding in diagnose_rows(rows).findings if finding.code == code]
    return finding


# --- Counts and names ---

CHECKS_OF_A_LOG = 28

COUNTS = re.compile(
    r"^(\d+) of (\d+) checks passed(?: in [\d.]+% of the tokens)?"
    r"(?:, (\d+) undecided)?(?:, \d+ of \d+ keys not read)?; -v lists them$",
    re.M,
)


def check_counts(diagnosis):
    """Assert that all checks are accounted for in the printed numbers."""
    passed, total, undecided = COUNTS.search(str(diagnosis)).groups()
    assert int(passed) + int(undecided or 0) + len(diagnosis.findings) == int(total)
    return int(total)


@NEEDS_LOGS
@pytest.mark.parametrize("path", LOG_FILES, ids=lambda path: f"{path.parent.name}/{path.name}"[:40])
@pytest.mark.filterwarnings("ignore")
def test_the_counts_on_a_stored_log_add_up(path):
    try:
        diagnosis = diagnose(path)
    except (InvalidValue, OSError):
        pytest.skip("no log that can be read")
    if diagnosis.log.unjudged:
        pytest.skip("nothing is judged, as many rows were not read")
    assert check_counts(diagnosis) == CHECKS_OF_A_LOG


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_the_counts_on_random_logs_add_up(first):
    for seed in range(first, first + 50):
        assert check_counts(diagnose_rows(random_rows(seed))) == CHECKS_OF_A_LOG, seed


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_counts_on_a_simulated_fault_add_up(name):
    assert check_counts(diagnose_rows(SCENARIOS[name].rows(940))) == CHECKS_OF_A_LOG


@pytest.mark.parametrize("name", mostly_slow(["colder engine", "groups", "flat", "padding"], 2))
def test_the_counts_on_a_record_add_up(name, tmp_path):
    check_counts(diagnose(simulate(tmp_path / "faulty", **FAULTS[name][1])))
    check_counts(diagnose(simulate(tmp_path / "healthy")))


def names_on_the_page():
    table = PAGE.partition("| name in the output |")[2].partition("\n\n")[0]
    return re.findall(r"^\| ([^|]+) \|", table, re.M)


def test_each_name_of_a_check_is_explained_on_the_page(tmp_path):
    names = {finding.subject for finding in diagnose_rows(course()).tested}
    assert len(names) == CHECKS_OF_A_LOG
    names |= {finding.subject for finding in diagnose(simulate(tmp_path)).tested}
    assert {*names_on_the_page()} == names
    table = PAGE.partition("| name in the output |")[2].partition("\n\n")[0]
    assert {*re.findall(r"`([a-z-]+)`", table)} == {kind.code for kind in KINDS}
    # Read alone, none is a bare noun that could be anything.
    assert [name for name in names if len(name.split()) < 2] == []


# --- The levels in brackets ---


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_last_line_explains_the_levels_that_occur(name):
    diagnosis = diagnose_rows(SCENARIOS[name].rows(941))
    levels = [level for level in SEVERITIES if any(level == f.severity for f in diagnosis.findings)]
    last = str(diagnosis).splitlines()[-1]
    expected = "; ".join(f"{level}: {MEANINGS[level]}" for level in levels)
    assert last == (expected or last)
    assert expected or not any(meaning in str(diagnosis) for meaning in MEANINGS.values())


@pytest.mark.parametrize("level", SEVERITIES)
def test_the_words_for_a_level_are_those_of_the_page(level):
    (meaning,) = re.findall(rf"^\| `{level}` \| (.*) \|$", PAGE, re.M)
    assert meaning == MEANINGS[level]


# --- A cause before its consequence ---


def fallen(floor_from=41):
    """Return a log whose reward rises, falls and comes back, and falls to a floor for good."""
    rewards = [-10.0] * 8 + [0.1] * 8 + [0.7] * 8 + [-5.0] * 8 + [-0.39] * (floor_from - 33)
    rewards += [-5.0] * (120 - len(rewards))
    return [{"step": number, "reward": value} for number, value in enumerate(rewards, 1)]


@pytest.mark.parametrize("floor_from", [34, 36, 38, 41, 44])
def test_the_fall_to_a_floor_comes_before_the_floor(floor_from):
    diagnosis = diagnose_rows(fallen(floor_from))
    fall, flat = diagnosis.findings[:2]
    assert (fall.code, flat.code) == ("collapse", "reward-flat")
    # One row in twenty may differ, so that a short return does not end the floor. It does not end the fall either.
    assert fall.onset == 25
    assert flat.onset == (25 if floor_from < 37 else floor_from)
    # One moment, in the line `since step`.
    assert "step" not in fall.cause
    assert "above" not in fall.advice


@pytest.mark.parametrize("seed", range(60))
def test_a_fall_to_a_floor_has_the_onset_of_the_floor_at_the_latest(seed):
    draw = random.Random(f"floor {seed}")
    steps = draw.randint(110, 250)
    falls_at = draw.uniform(0.3, 0.6)
    floor_at = falls_at + draw.choice((0.0, 0.05, 0.1))
    floor = draw.choice((0.0, -1.0, -5.0))
    noise = draw.choice((0.0, 0.05))

    def reward(t):
        if t >= floor_at:
            return floor
        return (1.0 if t < falls_at else draw.uniform(floor, 1.0)) + draw.gauss(0, noise)

    findings = diagnose_rows(course(steps, reward=reward)).findings
    assert [finding.code for finding in findings[:2]] == ["collapse", "reward-flat"]
    assert findings[0].onset <= findings[1].onset


@pytest.mark.parametrize("name", ["reward falls", "gradient spikes, then a fall"])
def test_the_causes_above_a_fall_are_named_only_if_there_are_any(name):
    diagnosis = diagnose_rows(SCENARIOS[name].rows(942))
    codes = [finding.code for finding in diagnosis.findings]
    fall = found(SCENARIOS[name].rows(942), "collapse")
    assert ("above" in fall.advice) == (codes.index("collapse") > 0)


def test_a_checkpoint_from_before_the_onset_is_named_only_if_there_may_be_one():
    early = found(course(kl=lambda t: 0.001 if t < 0.06 else 2.0 + t), "kl-drift")
    late = found(course(kl=lambda t: 0.001 if t < 0.5 else 2.0 + t), "kl-drift")
    assert early.onset <= 10 < 40 < late.onset
    assert "checkpoint" not in early.advice
    assert late.advice.endswith(f"resume from a checkpoint before step {late.onset:.0f}")


# --- Words that say what was seen ---


def shares(level):
    return {"dead": lambda t: level + 0.02 * (round(100 * t) % 3)}


def test_groups_without_signal_are_explained_and_the_level_is_justified():
    level = found(course(reward=lambda t: 0.5 + 0.1 * (round(100 * t) % 2), **shares(0.7)), "no-signal")
    assert level.severity == "fix"
    assert re.match(
        r"72% of groups teach nothing in the (later half of the run|last \d+ log steps): all answers of such a group",
        level.cause,
    )
    assert "the reward does not surely rise" in level.cause
    rising = found(course(reward=lambda t: 0.3 + 0.2 * t, **shares(0.7)), "no-signal")
    assert rising.severity == "look"
    assert re.search(r"the reward still rises \(0\.\d+ → 0\.\d+, from", rising.cause)
    assert "drop such prompts" in level.advice


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (0.92, "nearly all answers are right: the prompts are probably too easy"),
        (0.04, "nearly no answer is right: the prompts are probably too hard"),
        (0.5, ""),
        (-0.5, ""),
        (3.0, ""),
    ],
)
def test_the_mean_reward_says_whether_prompts_are_too_easy_or_too_hard(reward, words):
    rows = course(reward=lambda t: reward + 0.01 * (round(100 * t) % 2), **shares(0.7))
    cause = found(rows, "no-signal").cause
    assert words in cause
    assert ("the prompts are probably too" in cause) == bool(words)


def noisy(steps, level, noise):
    """Return a log of a level reward with large noise of a period that no tenth averages out."""
    return course(steps, reward=lambda t: level + noise * ((round(steps * t) * 7919) % 101 - 50) / 50)


LARGE_NOISE = (0.57, 0.54, 0.52, 0.66, 0.82, 0.23, -0.2, 0.84, 0.46, 0.55)
"""Means of ten parts of a run in whose noise no trend can be seen."""


def test_a_plateau_is_undecided_if_the_reward_may_have_doubled_unseen():
    rewards = [mean + 0.3 * (-1) ** row for mean in LARGE_NOISE for row in range(6)]
    rows = [{"step": number, "reward": value} for number, value in enumerate(rewards, 1)]
    diagnosis = diagnose_rows(rows)
    assert [finding.code for finding in diagnosis.findings] == []
    reason = diagnosis.untested["the reward is not flat for half of the run"]
    expected = (
        r"too short or too noisy to tell: a line through it falls by [\d.-]+ ± [\d.]+ \(two standard errors\), beside "
        r"a mean of [\d.-]+"
    )
    assert re.fullmatch(expected, reason)
    # A reward that has risen to a level near 0 is measured by that rise.
    risen = [-0.44] * 6 + [-0.05] * 6 + [0.05 + 0.1 * (-1) ** row + 0.05 * (row % 7 - 3) for row in range(48)]
    rows = [{"step": number, "reward": value} for number, value in enumerate(risen, 1)]
    assert found(rows, "plateau").onset > 6
    # If the reward may have fallen, the noise is said, but the run is not called ok.
    cause = found(noisy(50, 0.1, 1.0), "plateau").cause
    assert "too short or too noisy to tell whether it rises: a line through it rises by " in cause
    assert re.search(r" rises by -?0\.\d+ ± 0\.\d+ \(two standard errors\)", cause)
    cause = found(noisy(400, 2.0, 0.1), "plateau").cause
    assert cause.startswith("mean reward 2")
    assert re.search(
        r" from step 1 to 400, the whole run; (a line through it rises by [\d.e-]+, |it rises )by at most [\d.]+ "
        r"\(two standard errors\)",
        cause,
    )
    assert cause.endswith(" (two standard errors)")


def test_the_number_of_values_behind_a_figure_is_the_number_that_it_uses():
    collapsed = found(
        course(300, reward=lambda t: 0.5, entropy=lambda t: max(0.01, 1 - 2 * t)), "entropy-collapse"
    )
    assert collapsed.n == 60
    rows = course(200, reward=lambda t: 0.5, length=lambda t: 1000.0 * max(0.05, 1 - 2 * t))
    assert found(rows, "length-collapse").n == 40
    rows = course(200, reward=lambda t: 0.5, length=lambda t: 100 + 900.0 * t)
    assert found(rows, "length-growth").n == 40
    drift = found(course(100, kl=lambda t: min(4.0, 40 * (t - 0.01))), "step-too-large")
    assert (drift.n, f"{drift.figure:.3g}") == (1, re.search(r"→ (\S+) in the first", drift.cause)[1])


def test_what_a_finding_concerns_is_said_in_log_steps_and_hours():
    text = str(diagnose_rows(course(cut=lambda t: 0.9)))
    assert "\n   since step 1; from there on: 100 of 100 log steps\n" in text
    assert "cost" not in text
    text = str(diagnose_rows(course(cut=lambda t: 0.9, step_time=lambda t: 36.0)))
    assert "\n   since step 1; from there on: 1 of 1 hours on each GPU\n" in text


def test_a_fall_of_the_reward_is_no_evidence_of_no_movement():
    def still(reward, **metrics):
        return course(200, reward=reward, **metrics)

    rate = {"learning_rate": lambda t: 2e-7}
    falls = still(lambda t: 0.9 - 0.2 * t + 0.1 * (round(200 * t) % 2), **rate)
    level = still(lambda t: 0.9 + 0.1 * (round(200 * t) % 2), **rate)
    assert "hardly-moves" not in [finding.code for finding in diagnose_rows(falls).findings]
    assert "→" not in found(level, "hardly-moves").cause
    near = still(lambda t: 0.9 - 0.2 * t + 0.1 * (round(200 * t) % 2), kl=lambda t: 0.001)
    assert "reward did not rise" in found(near, "hardly-moves").cause
    assert "→" not in found(near, "hardly-moves").cause


@pytest.mark.parametrize("shape", SHAPES)
def test_a_healthy_course_has_no_line_on_levels(shape):
    diagnosis = diagnose_rows(healthy(943, shape))
    check_counts(diagnosis)
    if not diagnosis.findings:
        assert COUNTS.search(str(diagnosis).splitlines()[-1])


# --- What rows contradict is not said ---


def undecided(rows):
    return diagnose_rows(rows).untested


def test_a_run_in_which_nothing_changes_does_not_pass_as_one_that_lives():
    rows = course(50, reward=lambda _: 0.0, grad_norm=lambda _: 0.0)
    diagnosis = diagnose_rows(rows)
    assert "metrics live to the last log step" not in diagnosis.passed
    assert (
        undecided(rows)["metrics live to the last log step"]
        == "one value in all log steps: reward, grad_norm"
    )
    assert "metrics live to the last log step" in diagnose_rows(course(50, grad_norm=lambda _: 0.5)).passed


def test_a_reward_that_lost_a_third_within_its_noise_does_not_pass_as_kept():
    draw = random.Random(3)
    wandering = [0.55, 0.3, 0.6, 0.35, 0.67, 0.4, 0.6, 0.3, 0.5, 0.43]
    rows = [
        {"step": step, "reward": wandering[(step - 1) // 20] + draw.gauss(0, 0.05)} for step in range(1, 201)
    ]
    check = "the reward does not collapse"
    assert check not in diagnose_rows(rows).passed
    assert "from the best tenth of the run to the last" in undecided(rows)[check]
    kept = [row | {"reward": 0.5 + draw.gauss(0, 0.05)} for row in rows]
    assert check in diagnose_rows(kept).passed


def test_some_other_rewards_at_the_end_are_not_called_equal():
    rows = course(60, reward=lambda t: 0.3 if t < 0.6 else 0.0)
    for row in rows:
        if row["step"] in (46, 60):
            row["reward"] = 0.05
        elif row["step"] < 40:
            row["reward"] += 0.01 * (row["step"] % 7)
    assert undecided(rows)["rewards differ"] == "the mean is 0 in 13 of the last 14 log steps, which are few"
    equal = [row | {"reward": 0.0 if row["step"] > 48 else row["step"] / 100} for row in rows]
    assert undecided(equal)["rewards differ"] == "the mean is 0 in 12 of the last 12 log steps, which are few"


def test_two_findings_on_one_reward_agree_on_its_course():
    draw = random.Random(5)
    rows = [
        {
            "step": step,
            "reward": 0.5 - step / 2000 + draw.gauss(0, 0.12),
            "frac_reward_zero_std": 0.8 + draw.gauss(0, 0.03),
        }
        for step in range(1, 201)
    ]
    signal, plateau = found(rows, "no-signal"), found(rows, "plateau")
    assert "does not surely rise" not in signal.cause
    assert "the reward does not rise (" in signal.cause or "the reward falls (" in signal.cause
    assert "where it falls" in plateau.cause
    assert "a longer run alone is no remedy" in plateau.advice
    assert "advantages are 0" not in signal.advice


def test_the_rewards_of_steps_at_the_cap_and_of_others_are_told():
    draw = random.Random(7)
    rows = []
    for step in range(1, 101):
        is_cut = step % 4 == 0
        reward = 0.1 if is_cut else 0.5
        length = 256.0 if is_cut else 235.0 + draw.random()
        rows.append({"step": step, "reward": reward + draw.gauss(0, 0.02), "completion_length": length})
    cause = found(rows, "truncated").cause
    assert "was cut off, with a mean reward of 0.106, and 0.501 in the others" in cause


def test_a_log_that_begins_in_the_middle_is_no_run():
    draw = random.Random(2)
    rows = [
        {"step": 800 + 5 * n, "reward": 0.6 + draw.gauss(0, 0.05), "frac_reward_zero_std": 0.8}
        for n in range(60)
    ]
    diagnosis = diagnose_rows(rows)
    text = str(diagnosis)
    assert "teach nothing in the later half of the log" in text
    assert "of the run, the reward" not in text
    # Of what the log shows from its first row on it is not known when it began.
    assert "in order" not in text
    assert "what is said to begin with its first row may have begun before" in text


def test_scores_on_other_prompts_and_a_log_without_a_verdict_are_told_with_their_values():
    rows = course(12, reward=lambda t: 0.6 - abs(t - 0.5), completion_length=lambda t: 300 - 200 * t)
    text = str(diagnose_rows(rows))
    assert (
        "\nnot judged, first → last log step (largest and smallest, if between): reward 0.183 → 0.1 (0.6 at step 6"
        in text
    )
    assert "; length 283 → 100" in text
    scored = course(60)
    scored[29]["eval_reward"] = 0.4
    scored[59]["eval_reward"] = 0.3
    assert "\nscore on other prompts, in 2 log steps: evaluation 0.4 → 0.3\n" in str(diagnose_rows(scored))


def test_the_number_of_rows_with_a_reward_is_told_where_it_is_not_that_of_all():
    rows = [{"step": step, "entropy": 1.0, "kl": 0.01} for step in range(1, 61)]
    for row in rows[::2]:
        row["reward"] = row["step"] / 100
    assert "in 60 log steps, 30 of them with a reward, from step 1 to 60" in str(diagnose_rows(rows))
    for row in rows:
        row["reward"] = row["step"] / 100
    assert "in 60 log steps, from step 1 to 60" in str(diagnose_rows(rows))


def test_answers_that_are_cut_off_within_the_first_steps_are_not_cut_off_from_the_start():
    shares = [0.25, 0.625, 0.625, 0.75, *[1.0] * 86]
    rows = [{"step": step, "reward": 0.5, "cut": share} for step, share in enumerate(shares, 1)]
    finding = found(rows, "truncated")
    assert finding.onset == 2
    assert "; it was 25% in the first log step, and 81% in the first tenth" in finding.cause
    rows[0]["cut"] = 0.75
    assert ", as from the start (86% in the first tenth)" in found(rows, "truncated").cause


def test_the_first_row_of_answers_that_no_longer_end_is_the_onset():
    """A row may be the mean of steps from before and after."""
    shares = [0.01] * 10 + [0.45] + [1.0] * 29
    rows = [{"step": 5 * row, "reward": 0.5, "cut": share} for row, share in enumerate(shares, 1)]
    finding = found(rows, "truncated")
    assert finding.onset == 55
    assert "it was 1% before step 55: they no longer end" in finding.cause
    assert "; then resume from a checkpoint before step 55" in finding.advice


def test_a_row_of_nan_at_the_end_does_not_pass_as_no_change_and_hides_no_single_steps():
    rows = course(grad_norm=lambda t: 1 + 0.2 * math.sin(70 * t))
    rows[59]["grad_norm"] = 900.0
    assert (
        "entropy, KL, answers, gradient and engine do not change suddenly in the last tenth of the run"
        in diagnose_rows(rows).passed
    )
    rows[-1]["grad_norm"] = math.nan
    diagnosis = diagnose_rows(rows)
    assert [one.code for one in diagnosis.findings] == ["nan"]
    tested = {one.tested: one for one in diagnosis.tested}
    late = tested[
        "entropy, KL, answers, gradient and engine do not change suddenly in the last tenth of the run"
    ]
    assert late.ok is None
    assert late.advice == "values are NaN or infinite, which another finding reports"
    assert "in single log steps: the gradient norm 900 at step 60" in str(diagnosis)


def test_a_constant_that_a_finding_tells_is_not_told_again():
    rows = course(cut=lambda t: 1.0, length=lambda t: 16.0, entropy=lambda t: 0.25)
    assert "one value in all 100 log steps, so check that it is measured: entropy 0.25\n" in str(
        diagnose_rows(rows)
    )
    rows = course(length=lambda t: 16.5)
    assert "so check that it is measured: length 16.5\n" in str(diagnose_rows(rows))


@pytest.mark.parametrize(("rate", "advice"), [(5e-3, "1e-6, or 1e-5 with LoRA"), (1e-5, "ten times smaller")])
def test_a_rate_that_is_logged_decides_whether_a_tenth_of_it_is_usual(rate, advice):
    rows = course(kl=lambda t: 4 * min(1, 20 * t), learning_rate=lambda t: rate, reward=lambda t: 0.5)
    finding = found(rows, "step-too-large")
    assert advice in finding.advice


def test_answers_of_which_none_ends_at_a_high_entropy_may_be_noise():
    rows = course(cut=lambda t: 1.0, entropy=lambda t: 3.5, reward=lambda t: 0.5)
    assert found(rows, "truncated").advice.startswith(
        "read some answers: none ever ended, and at an entropy of 3.5 nats per token they may be noise, as of a start"
    )
    rows[40]["cut"] = 0.75
    assert found(rows, "truncated").advice.startswith("allow longer answers")
    low = course(cut=lambda t: 1.0, entropy=lambda t: 0.5, reward=lambda t: 0.5)
    assert found(low, "truncated").advice.startswith("allow longer answers")


def test_the_best_part_of_a_fall_has_its_steps():
    rows = course(steps=100, reward=lambda t: 0.5 + (0.4 if 0.395 < t < 0.805 else 0.0))
    finding = found(rows, "collapse")
    match = re.fullmatch(
        r"mean reward of the last tenth of the run, where the best has the steps (\d+) to (\d+)",
        finding.measure,
    )
    assert [int(step) for step in match.groups()] == [41, 50]


def test_answers_that_grow_without_a_score_begin_where_they_are_three_times_as_long():
    rows = course(length=lambda t: 100 * (1 + 9 * t), reward=lambda t: 0.5 + 0.1 * math.sin(60 * t))
    finding = found(rows, "length-growth")
    assert finding.severity == "look"
    (first,) = [row["step"] for row in rows if row["step"] == finding.onset]
    assert 100 * (1 + 9 * first / 100) == pytest.approx(
        3 * sum(row["length"] for row in rows[:10]) / 10, rel=0.15
    )
