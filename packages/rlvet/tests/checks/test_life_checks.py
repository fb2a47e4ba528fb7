"""A metric that stops, and a run that dies, are told with their step; healthy courses raise no alarm."""

import math
import random
import sys
import time

import pytest

from pages import ROOT
from rlvet.checks.course import Case, Course
from rlvet.checks.diagnosis import Diagnosis
from rlvet.checks.log.life import check_life, check_metrics
from rlvet.checks.log_checks import log_findings
from rlvet.runs.logs import Log
from rlvet.runs.setup import Setup, Value

sys.path.insert(0, str(ROOT / "benchmarks/doctor"))

from deaths import (
    CODES,
    GOOD_STEPS,
    NO_DEATH,
    OF_THE_REWARD,
    OF_TWO,
    ONSETS,
    OTHERS,
    STOPS,
    VITAL,
    course,
    died,
    healthy_alarms,
    is_called_ok,
    late_deaths,
    live_alarms,
    stopped,
    with_others,
)

CLEAR = {name: death for name, death in OF_TWO.items() if name != "reward and groups, with noise"}


def found(rows, code):
    """Return the findings of a log with a code."""
    return [finding for finding in log_findings(Log.of(rows).rows) if finding.code == code]


def many(steps):
    return pytest.param(steps, marks=[pytest.mark.slow] if steps > 300 else [])


@pytest.mark.parametrize("good", [many(steps) for steps in GOOD_STEPS])
@pytest.mark.parametrize("name", CLEAR)
def test_five_dead_rows_of_two_quantities_say_stop_with_their_step(name, good):
    seeds = range(5000, 5004 if good <= 2000 else 5002)
    told = late_deaths(OF_TWO[name], good, 5, seeds)
    assert told == (len(seeds),) * 4


@pytest.mark.parametrize("good", [many(steps) for steps in GOOD_STEPS])
@pytest.mark.parametrize("name", OF_THE_REWARD)
def test_ten_dead_rows_of_the_reward_say_stop_with_their_step(name, good):
    seeds = range(5000, 5004 if good <= 2000 else 5002)
    told = late_deaths(OF_THE_REWARD[name], good, 10, seeds)
    assert told == (len(seeds),) * 4


def test_few_dead_rows_of_the_reward_alone_are_no_reason_to_stop():
    rows, floor = course(5000, 300)
    (finding,) = found(died(rows, floor, OF_THE_REWARD["reward null"], 6), "run-died")
    assert (finding.severity, finding.onset) == ("fix", 301)
    assert found(died(rows, floor, OF_THE_REWARD["reward null"], 3), "run-died") == []
    (finding,) = found(died(rows, floor, OF_THE_REWARD["reward null"], 3), "metric-lost")
    assert finding.cause == "the reward is not logged from step 301 on"


def test_a_death_that_ended_is_told():
    rows, floor = course(5002, 300)
    rows = died(rows, floor, OF_TWO["everything"], 8)
    after = [row | {"step": 308 + number} for number, row in enumerate(course(5002, 300)[0][-60:], 1)]
    (finding,) = found([*rows, *after], "run-died")
    assert (finding.severity, finding.onset, finding.n) == ("look", 301, 8)
    assert "from step 301 to 308" in finding.cause


def test_a_death_that_ended_is_told_with_the_steps_that_it_took():
    rows, floor = course(5002, 300)
    rows = died(rows, floor, OF_TWO["everything"], 8)
    after = [row | {"step": 308 + number} for number, row in enumerate(course(5002, 300)[0][-60:], 1)]
    timed = [row | {"step_time": 36.0} for row in [*rows, *after]]
    (finding,) = found(timed, "run-died")
    assert finding.cost == "0.08 of 3.7 hours on each GPU, up to step 308"
    without_times = [{key: value for key, value in row.items() if key != "step_time"} for row in timed]
    (finding,) = found(without_times, "run-died")
    assert finding.cost == "8 of 368 log steps, up to step 308"


def test_values_that_few_answers_give_are_no_death_in_passing():
    """With eight answers to a step, a reward of 0 and a spread of 0.177 repeat by chance, as does the cap."""
    draw = random.Random(4)
    rows = []
    for step in range(1, 201):
        is_low = 20 <= step <= 24
        rows.append(
            {
                "step": step,
                "reward": 0.0 if is_low else draw.choice([0.125, 0.25, 0.375, 0.5]),
                "reward_std": 0.1768 if 17 <= step <= 25 else draw.choice([0.0, 0.1768, 0.3536]),
                "length": 256.0 if 20 <= step <= 25 or step % 6 == 0 else draw.uniform(200, 255),
            }
        )
    assert found(rows, "run-died") == []
    frozen = [
        row | ({"kl": 0.01} if 20 <= row["step"] <= 25 else {"kl": draw.uniform(0, 0.1)}) for row in rows
    ]
    assert found(frozen, "run-died")


@pytest.mark.parametrize("second", [0.0, 0.125])
def test_values_that_repeat_are_told_as_they_are(second):
    """A reward that repeats one value and then another one is not that value in each row."""
    draw = random.Random(4)
    rows = []
    for step in range(1, 101):
        is_dead = 40 <= step <= 52
        dead = {"reward": 0.0 if step < 47 else second, "length": 256.0, "kl": 0.01}
        live = {
            "reward": 0.4 + draw.uniform(0, 0.2),
            "length": draw.uniform(180, 240),
            "kl": draw.uniform(0.02, 0.1),
        }
        rows.append({"step": step, **(dead if is_dead else live)})
    (death,) = found(rows, "run-died")
    inside = [row["reward"] for row in rows if death.steps[0] <= row["step"] <= death.steps[1]]
    assert set(inside) == {0.0, second}
    assert ("the reward repeats 0, 0.125" in death.cause) == bool(second)


def test_rewards_of_0_as_in_most_steps_before_are_no_death_at_the_end():
    """Of prompts that are too hard, a few answers are right at first, and then none: the run learned nothing before."""
    draw = random.Random(6)
    rows = []
    for step in range(1, 101):
        is_right = step <= 76 and draw.random() < 0.15
        reward = 0.167 if is_right else 0.0
        rows.append(
            {"step": step, "reward": reward, "reward_std": 2 * reward, "length": draw.uniform(120, 128)}
        )
    assert found(rows, "run-died") == []


def test_a_loss_of_0_beside_a_gradient_that_lives_is_no_death():
    """The loss is 0 where every ratio is 1, whatever its gradient; here all answers are also cut off."""
    rows, _ = course(5003, 300)
    draw = random.Random(3)
    cut = [row | {"cut": 1.0, "loss": 0.0, "grad_norm": 0.3 + 0.1 * draw.random()} for row in rows[200:]]
    before = [row | {"cut": 0.2, "loss": draw.gauss(0, 0.01), "grad_norm": 0.3} for row in rows[:200]]
    assert found([*before, *cut], "run-died") == []


def test_a_run_whose_prompts_are_solved_is_not_dead():
    draw = random.Random(1)
    rows = []
    for step in range(1, 120):
        share = min(1.0, 0.2 + 0.016 * step)
        row = {
            "step": step,
            "reward": share,
            "frac_reward_zero_std": share**8,
            "entropy": 0.4 + 0.1 * draw.random(),
        }
        row["grad_norm"] = 0.0 if share == 1 else 0.3 + 0.1 * draw.random()
        rows.append(row)
    assert found(rows, "run-died") == []
    assert found(rows, "metric-lost") == []


CASES = [(key, way) for key in VITAL for way in STOPS if (key, way) not in NO_DEATH]


@pytest.mark.parametrize(("key", "way"), CASES)
def test_a_log_whose_reward_groups_loss_or_gradient_stop_is_not_called_ok(key, way):
    rows, _ = course(5004, 200)
    assert [onset for onset in ONSETS if is_called_ok(stopped(rows, key, way, onset))] == []


@pytest.mark.parametrize("seed", range(5000, 5008))
def test_each_quantity_of_the_grid_has_one_key(seed):
    rows = with_others(course(seed, 40)[0], seed)
    assert {*OTHERS} <= {*rows[0]}
    without = [{key: value for key, value in row.items() if key not in OTHERS} for row in rows]
    assert not {*Log.of(without).read} & {*OTHERS}


@pytest.mark.parametrize(("key", "way"), NO_DEATH)
def test_what_is_no_death_is_none(key, way):
    rows, _ = course(5004, 200)
    codes = [
        one.code for onset in ONSETS for one in log_findings(Log.of(stopped(rows, key, way, onset)).rows)
    ]
    assert not {*codes} & {*CODES}


@pytest.mark.parametrize("seed", range(5000, 5008))
def test_prefixes_of_a_healthy_course_are_alive(seed):
    assert healthy_alarms([seed], steps=200, every=17) == []


@pytest.mark.parametrize("seed", [5000, 5001])
def test_a_healthy_course_is_not_stopped_while_it_trains(seed):
    assert live_alarms(course(seed, 200)[0]) == []


def test_a_schedule_that_ends_in_0_is_no_death():
    rows, _ = course(5006, 200)
    for row in rows:
        row["learning_rate"] = round(1e-6 * (1 - row["step"] / 200), 7)
    assert rows[-1]["learning_rate"] == rows[-5]["learning_rate"] == 0
    assert not found(rows, "metric-lost")


def test_a_metric_that_is_logged_now_and_then_is_not_lost():
    rows, _ = course(5006, 200)
    for row in rows:
        if row["step"] % 20:
            del row["entropy"]
    assert not found(rows[:199], "metric-lost")
    (finding,) = found([*rows, *course(5006, 250)[0][200:]][:245], "nothing") or [None]
    assert finding is None


def test_rows_without_any_metric_are_rows_of_the_run():
    """A row of which every quantity is null is not left out, so that the end of the run is its last row."""
    rows, _ = course(5000, 100)
    rows += [{"step": step, **dict.fromkeys(("reward", "grad_norm", "loss"))} for step in range(101, 113)]
    (finding,) = found(rows, "run-died")
    assert (finding.severity, finding.onset) == ("stop", 101)


def test_too_few_rows_have_no_verdict():
    rows = [
        {"step": step, "reward": 0.3 + 0.01 * (step % 5), "loss": 0.01 * (step % 7)} for step in range(24)
    ]
    log = Log.of(rows)
    headline = Diagnosis(log_findings(log.rows), rows=log.rows, log=log).headline
    assert headline.startswith("no verdict: ")
    assert headline.endswith("checks are undecided, and 24 log steps have a reward: 30 are always enough")


def test_the_checks_of_a_long_log_are_fast():
    rows = Log.of(course(5001, 10_000)[0]).rows
    case = Case(Course(rows), Setup())
    for name in case.course.names:
        case.course.series(name)
    start = time.process_time()
    case.of(check_life)
    case.of(check_metrics)
    assert time.process_time() - start < 1.0


def test_a_death_within_the_first_rows_begins_where_its_values_do():
    """The first rows tell what is usual, and are not judged. The sentence has the median of the rows that it names."""
    rows = []
    for step in range(1, 61):
        is_dead = 9 <= step <= 40
        entropy = 1e-12 * (1 + step % 3) if is_dead else 0.8 + 0.01 * (step % 5)
        gradient = 1e-13 * (2 + step % 5) if is_dead else 0.5 + 0.02 * (step % 7)
        rows.append(
            {"step": step, "reward": 0.3 + 0.1 * (step % 3), "entropy": entropy, "grad_norm": gradient}
        )
    (finding,) = found(rows, "run-died")
    assert finding.onset == 9
    assert finding.cause.endswith("from step 9 to 40; after that they have other values again")
    assert "entropy" in finding.cause
    assert "→ 2e-12" in finding.cause
    assert "→ 4e-13" in finding.cause
    assert "resume" not in finding.advice


@pytest.mark.parametrize("seed", range(20))
def test_few_answers_that_repeat_their_values_for_some_rows_are_no_death(seed):
    """Of four answers to two prompts, most pairs get equal rewards, and in some steps all answers are cut off."""
    draw = random.Random(f"few answers {seed}")
    rows = []
    for step in range(1, 201):
        are_cut = 60 <= step < 68 or draw.random() < 0.05
        first = [draw.random() < 0.3 for _ in range(2)]
        second = [one != (draw.random() < (0.05 if are_cut else 0.4)) for one in first]
        spread = sum(one != other for one, other in zip(first, second, strict=True))
        length = 256.0 if are_cut else 226 + 29 * draw.random()
        reward = (sum(first) + sum(second)) / 4
        rows.append({"step": step, "reward": reward, "reward_std": 0.35 * spread, "length": length})
    assert found(rows, "run-died") == []


def test_a_death_of_the_loss_within_the_first_rows_is_told():
    rows = []
    for step in range(1, 61):
        is_dead = 13 <= step <= 40
        rows.append(
            {
                "step": step,
                "reward": 0.3 + 0.1 * (step % 3),
                "entropy": 0.5 + 0.01 * (step % 4),
                "grad_norm": 0.0 if is_dead else 0.5 + 0.02 * (step % 5),
                "train/loss": 0.0 if is_dead else 0.1 + 0.01 * (step % 7),
            }
        )
    (finding,) = found(Log.of(rows).rows, "run-died")
    assert finding.onset == 13
    assert "the loss is 0 in each row" in finding.cause


@pytest.mark.parametrize(("digits", "is_lost"), [(3, False), (6, True)])
def test_a_metric_that_is_logged_with_few_digits_repeats_without_being_lost(digits, is_lost):
    rows = []
    for step in range(1, 81):
        distance = 0.008 + (
            0.002 * math.sin(step) if step < 20 else 2e-4 * math.sin(step) if digits == 3 else 0.0
        )
        rows.append({"step": step, "reward": 0.3 + 0.01 * (step % 7), "mismatch": round(distance, digits)})
    assert [one.code for one in found(rows, "metric-lost")] == ["metric-lost"] * is_lost


@pytest.mark.parametrize(("scale", "unit"), [("batch", "batches"), ("group", "groups")])
def test_equal_rewards_are_those_of_batches_where_rewards_are_scaled_by_them(scale, unit):
    setup = Setup("trl", values={"reward scale": Value("scale_rewards", scale, "config.yaml")})
    rows = []
    for step in range(1, 61):
        is_dead = 30 <= step <= 42
        reward = 0.0 if is_dead else 0.4 + 0.1 * (step % 3)
        rows.append({"step": step, "reward": reward, "dead": 1.0 if is_dead else float(step % 5 == 0)})
    findings = log_findings(Log.of(rows).rows, setup)
    (death,) = [finding for finding in findings if finding.code == "run-died"]
    assert f"the share of {unit} with equal rewards" in death.cause
    assert death.cause.endswith("from step 30 to 42; after that they have other values again")
