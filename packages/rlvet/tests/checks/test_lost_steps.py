"""A gradient that falls to 0 for good is told, and zeros that have a reason are not."""

import json
import random

import pytest

from rlvet import diagnose
from rlvet.checks.log_checks import log_findings
from rlvet.runs.setup import Setup, Value


def rows_of(steps=50, stops=20, places=None, **metrics):
    """Return the rows of a run whose gradient is 0 from a row on, while its rewards differ.

    Args:
        steps: Number of rows.
        stops: The first row without a gradient.
        places: The number of decimals of all values; None for all that they have.
        **metrics: Functions of the row, for further metrics or in place of these.
    """
    draw = random.Random(3)
    functions = {
        "reward": lambda row: 0.3 + 0.2 * draw.random(),
        "reward_std": lambda row: 0.2 + 0.1 * draw.random(),
        "kl": lambda row: 0.02 + 0.01 * draw.random(),
        "entropy": lambda row: 1 + 0.1 * draw.random(),
        "grad_norm": lambda row: 0.0 if row >= stops else 0.3 + 0.1 * draw.random(),
    } | metrics
    rows = []
    for row in range(steps):
        values = {name: function(row) for name, function in functions.items()}
        rounded = {
            name: value if places is None else round(value, places)
            for name, value in values.items()
            if value is not None
        }
        rows.append({"step": row + 1, **rounded})
    return rows


def by_check(rows, **setup):
    return {finding.tested: finding for finding in log_findings(rows, Setup(**setup))}


def movement(rows):
    return by_check(rows)["weights move"]


def test_a_gradient_of_0_for_good_is_a_fault_from_its_first_row_on(tmp_path):
    log = tmp_path / "metrics.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows_of()))
    diagnosis = diagnose(log)
    assert (
        diagnosis.headline
        == "no-step: grad_norm is 0 in the last 30 log steps, though rewards of a group differ"
    )
    finding, *others = diagnosis.findings
    assert {other.code for other in others} <= {"plateau"}
    assert (finding.code, finding.severity, finding.onset) == ("no-step", "stop", 21)
    assert finding.quantities == ("grad_norm",)


@pytest.mark.parametrize(
    "metrics",
    [
        {"reward_std": lambda row: None, "dead": lambda row: 0.4},
        {"dead": lambda row: 0.4},
        {"reward_std": lambda row: None},
        {"reward_std": lambda row: 0.3 if row % 2 else 0.0},
    ],
    ids=["share of groups", "both", "rewards alone", "in half of the rows"],
)
def test_what_shows_that_rewards_differ(metrics):
    finding = movement(rows_of(**metrics))
    assert finding.code == "no-step"
    assert finding.onset == 21


@pytest.mark.parametrize(
    "metrics",
    [
        {"reward_std": lambda row: 0.3 if row < 20 else 0.0},
        {"dead": lambda row: 0.4 if row < 20 else 1.0},
        {"reward_std": lambda row: None, "reward": lambda row: 0.4 if row < 20 else 1.0},
    ],
    ids=["spread", "share of groups", "solved"],
)
def test_a_gradient_of_0_where_all_rewards_are_equal_is_no_fault_and_no_movement(metrics):
    finding = movement(rows_of(**metrics))
    assert finding.ok is None
    assert finding.advice == "grad_norm is 0 in the last 30 log steps"


@pytest.mark.parametrize(
    ("steps", "gradient"),
    [
        (50, lambda row: 0.0 if row >= 45 else 0.3 + row / 1000),
        (51, lambda row: 0.0 if 20 <= row < 50 else 0.3 + row / 1000),
        (50, lambda row: 0.0 if row % 2 else 0.3 + row / 1000),
        (60, lambda row: 0.0 if row % 15 else 0.3 + row / 1000),
        (50, lambda row: None if row >= 20 else 0.3 + row / 1000),
        (50, lambda row: 0.3 * 0.7**row),
    ],
    ids=[
        "the last five rows",
        "it comes back",
        "every other row",
        "rows without an update",
        "it is not logged",
        "it falls",
    ],
)
def test_other_zeros_are_no_stop(steps, gradient):
    assert movement(rows_of(steps, grad_norm=gradient)).ok is True


def test_a_gradient_that_may_have_been_rounded_to_0_is_not_said_to_be_0():
    finding = movement(rows_of(places=3))
    assert (
        finding.cause
        == "grad_norm is 0, to 3 decimals, in the last 30 log steps, though rewards of a group differ"
    )
    assert (finding.code, finding.severity) == ("no-step", "fix")


def lost_signal(rows):
    return by_check(rows)["half of the groups or more carry signal"]


@pytest.mark.parametrize("value", [0.0, -1.0, 0.3])
@pytest.mark.parametrize("steps", [8, 12, 19])
def test_a_gradient_of_0_while_every_mean_reward_is_the_same_teaches_nothing(steps, value):
    """A log may have neither the share of groups with equal rewards nor the spread of rewards."""
    finding = lost_signal(rows_of(steps, 0, reward_std=lambda row: None, reward=lambda row: value))
    assert (finding.code, finding.severity, finding.onset) == ("no-signal", "fix", 1)
    assert finding.cause.startswith(
        f"the gradient is 0 in all {steps} log steps, and the mean reward is {value:g} in each: nothing is learned"
    )


def test_it_is_told_from_the_later_half_on():
    finding = lost_signal(
        rows_of(30, 13, reward_std=lambda row: None, reward=lambda row: 0.0 if row >= 13 else 0.1 + row / 100)
    )
    assert (finding.code, finding.severity, finding.onset) == ("no-signal", "fix", 14)
    assert finding.cause.startswith("the gradient is 0 in the last 17 log steps, and the mean reward is 0 in")


@pytest.mark.parametrize(
    "reward",
    [lambda row: 1.0, lambda row: 2.0 if row >= 12 else 0.1 * row],
    ids=["solved", "risen to its best"],
)
def test_at_the_best_reward_a_gradient_of_0_is_no_fault(reward):
    finding = lost_signal(rows_of(30, 12, reward_std=lambda row: None, reward=reward))
    assert (finding.code, finding.severity) == ("no-signal", "look")


@pytest.mark.parametrize(
    ("steps", "stops", "reward"),
    [
        (7, 0, lambda row: 0.0),
        (40, 0, lambda row: 0.1 * (row % 2)),
        (40, 30, lambda row: 0.0 if row >= 30 else 0.3),
        (40, 99, lambda row: 0.0),
    ],
    ids=["few rows", "rewards differ", "the last quarter", "a gradient"],
)
def test_what_is_no_lost_signal(steps, stops, reward):
    assert not lost_signal(rows_of(steps, stops, reward_std=lambda row: None, reward=reward)).cause


def test_a_reward_that_never_changes_is_told_once():
    findings = by_check(rows_of(40, 0, reward_std=lambda row: None, reward=lambda row: 0.0))
    assert findings["rewards differ"].code == "reward-flat"
    assert not findings["half of the groups or more carry signal"].cause


def test_a_gradient_of_0_whose_rewards_differ_is_told_once():
    rows = rows_of(40, 0, reward=lambda row: 0.0)
    assert movement(rows).code == "no-step"
    assert not lost_signal(rows).cause


def test_a_learning_rate_of_0_for_good_is_no_fault_and_no_movement():
    """The schedule is shorter than the run."""
    finding = movement(rows_of(stops=99, learning_rate=lambda row: max(0.0, 1e-6 * (1 - row / 30))))
    assert finding.ok is None
    assert finding.advice == "learning_rate is 0 in the last 20 log steps"


@pytest.mark.parametrize(
    "rate",
    [
        lambda row: 1e-6 * (1 - row / 49),
        lambda row: 1e-6 * max(0.0, 1 - row / 45),
        lambda row: 0.0 if row < 10 else 1e-6,
    ],
    ids=["its end", "five rows", "a warm-up"],
)
def test_a_learning_rate_that_ends_at_0_is_usual(rate):
    assert movement(rows_of(stops=99, learning_rate=rate)).ok is True


@pytest.mark.parametrize("name", ["clip", "clip_high", "clip_low", "kl_old", "cut", "dead", "mismatch_kl"])
def test_shares_that_fall_to_0_for_good_are_no_fault(name):
    draw = random.Random(5)
    rows = rows_of(stops=99, **{name: lambda row: 0.0 if row >= 20 else 0.05 + 0.05 * draw.random()})
    assert {finding.code for finding in log_findings(rows, Setup())} <= {"ok", "plateau"}


@pytest.mark.parametrize(("name", "code"), [("kl", "metric-lost"), ("entropy", "entropy-collapse")])
def test_what_is_never_0_by_itself_is_told_where_it_falls_to_0(name, code):
    draw = random.Random(5)
    rows = rows_of(stops=99, **{name: lambda row: 0.0 if row >= 20 else 0.5 + 0.5 * draw.random()})
    assert code in {finding.code for finding in log_findings(rows, Setup())}


# The share of groups with equal rewards, of which TRL with scale_rewards='batch' logs that of batches


def signal(shares, framework="trl", scale=None):
    values = {} if scale is None else {"reward scale": Value("scale_rewards", scale, "config.yaml")}
    if scale == "of an earlier version":
        values = {"learning rate": Value("learning_rate", 1e-6, "config.yaml")}
    rows = rows_of(stops=99, dead=lambda row: shares[row % len(shares)])
    return by_check(rows, framework=framework, values=values)["half of the groups or more carry signal"]


@pytest.mark.parametrize("shares", [[0.0], [0.0, 0.0, 0.0, 0.0, 1.0]], ids=["never", "some"])
def test_shares_of_0_or_1_do_not_show_that_groups_carry_signal_where_the_scale_is_not_known(shares):
    finding = signal(shares)
    assert finding.ok is None
    assert finding.advice.startswith("the share is 0 or 1 in each log step")
    assert signal(shares, scale="batch").ok is None


@pytest.mark.parametrize(
    ("shares", "framework", "scale"),
    [
        ([0.0, 0.25, 0.125], "trl", None),
        ([0.0] * 9 + [0.25], "trl", None),
        ([0.0], "trl", "group"),
        ([0.0], "trl", "none"),
        ([0.0], "trl", "of an earlier version"),
        ([0.0], "verl", None),
        ([0.0], None, None),
    ],
)
def test_shares_of_groups_show_that_they_carry_signal(shares, framework, scale):
    assert signal(shares, framework, scale).ok is True


def test_batches_without_spread_have_no_group_with_one():
    """So most of them are a fault under either meaning."""
    assert signal([0.0, 1.0, 1.0, 1.0]).code == "no-signal"


def pairs(share, *, steps=80, groups=4, spread=0.5**0.5, rewards=(0.0, 1.0), seed=8):
    """Return the rows of a log without a share, of groups of two answers of which a share have equal rewards."""
    draw = random.Random(seed)
    rows = []
    for step in range(1, steps + 1):
        unequal = [draw.random() > share for _ in range(groups)]
        means = [sum(rewards) / 2 if one else draw.choice(rewards) for one in unequal]
        reward_std = round(spread * sum(unequal) / groups, 4)
        rows.append({"step": step, "reward": sum(means) / groups, "reward_std": reward_std})
    return rows


@pytest.mark.parametrize(("share", "groups", "ok"), [(0.85, 4, False), (0.85, 7, False), (0.2, 4, True)])
def test_equal_pairs_are_counted_by_the_values_of_their_spread(share, groups, ok):
    rows = pairs(share, groups=groups)
    finding = by_check(rows)["half of the groups or more carry signal"]
    assert finding.ok is ok
    later = [1 - row["reward_std"] / 0.5**0.5 for row in rows[40:]]
    if ok:
        assert finding.figure == pytest.approx(sum(later) / 40, abs=0.001)
    else:
        assert "(of two answers each, by the values of reward_std) teach nothing" in finding.cause
        assert finding.quantities[0] == "reward_std"


@pytest.mark.parametrize(
    "rows",
    [
        pairs(0.85, spread=0.5),
        pairs(0.85, rewards=(0.0, 2.0)),
        pairs(0.85, steps=29),
        pairs(0.85, rewards=(-1.0, 1.0)),
    ],
    ids=["another spread", "other rewards", "a short log", "negative rewards"],
)
def test_values_of_other_spreads_tell_no_share(rows):
    assert "of two answers each" not in by_check(rows)["half of the groups or more carry signal"].cause


def test_a_share_near_the_limit_is_of_batches_where_rewards_are_scaled_by_them():
    finding = signal([0.0, 1.0], scale="batch")
    assert finding.ok is None
    assert finding.advice == "with scale_rewards='batch', the share is that of whole batches"


@pytest.mark.parametrize(("dead_of_five", "is_found"), [(4, True), (2, False)])
def test_advantages_that_are_all_0_in_most_log_steps_are_no_signal(dead_of_five, is_found):
    rows = []
    for step in range(1, 101):
        advantage = 0.0 if step % 5 < dead_of_five else 0.5 + step % 7 / 10
        rows.append(
            {
                "step": step,
                "reward": 0.7,
                "advantage_max": advantage,
                "advantage_min": -advantage,
                "kl": 0.01 * (step % 3),
            }
        )
    findings = {finding.code: finding for finding in log_findings(rows, Setup())}
    assert ("no-signal" in findings) is is_found
    if is_found:
        assert findings["no-signal"].cause.startswith(
            "all advantages are 0 in 40 of 50 log steps of the later half"
        )


def test_a_component_that_is_always_0_is_named_where_no_answer_is_right():
    rows = [
        {
            "step": step,
            "reward": 0.0,
            "dead": 1.0,
            "rewards/format/mean": 0.0,
            "rewards/answer/mean": 0.001 * (step % 2),
        }
        for step in range(1, 61)
    ]
    rows[30]["reward"] = 0.02
    (finding,) = [one for one in log_findings(rows, Setup()) if one.code == "no-signal"]
    assert finding.advice.startswith("see first why format is always 0; read one such group")


def test_two_gradients_of_49_do_not_show_that_weights_move():
    finding = movement(rows_of(49, grad_norm=lambda row: 0.3 if row in (20, 23) else 0.0))
    assert finding.ok is None
    assert finding.advice == "grad_norm is 0 in 47 of 49 log steps"


def test_a_reward_that_jumps_up_for_two_rows_is_no_change_of_data():
    rows = [
        {"step": step, "reward": 0.0078 * (step in (21, 24)), "length": 3300.0 - 150 * (step > 20) + step % 3}
        for step in range(1, 51)
    ]
    assert "data-change" not in {finding.code for finding in log_findings(rows, Setup())}
