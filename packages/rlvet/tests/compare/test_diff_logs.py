"""Where the metrics of two logs part."""

import json
import random

import pytest

from rlvet import diagnose
from rlvet.compare import diff
from rlvet.compare.logs import FEWEST_STEPS, compare_logs, first_difference, metric_order, window_of


def rows(seed, steps=100, **curves):
    """Return a log with noise: each curve is a function of the step."""
    chance = random.Random(seed)
    return [
        {"step": step, **{name: curve(step) + 0.05 * chance.gauss(0, 1) for name, curve in curves.items()}}
        for step in range(1, steps + 1)
    ]


def flat(step):
    return 0.5


def learns(step):
    return step / 200


def fails_after(first):
    return lambda step: learns(step) if step < first else learns(first) - 0.6


def parted(a, b):
    return {one.name: one.step for one in compare_logs(a, b).parted}


@pytest.mark.parametrize("first", [20, 50, 80])
@pytest.mark.parametrize("seed", range(4))
def test_a_fall_is_found_near_its_step(first, seed):
    a = rows(seed, reward=learns, entropy=flat)
    b = rows(seed + 100, reward=fails_after(first), entropy=flat)
    assert parted(a, b).keys() == {"reward"}
    assert abs(parted(a, b)["reward"] - first) <= window_of(100) // 2


def test_two_levels_part_at_the_first_step():
    a, b = rows(1, reward=learns, entropy=flat), rows(2, reward=learns, entropy=lambda step: 0.1)
    assert parted(a, b) == {"entropy": 1}


def test_runs_of_one_setting_do_not_part():
    """A hundred pairs of curves that learn, with an autocorrelated drift of their own."""
    alarms = 0
    for seed in range(100):
        logs = []
        for part in (0, 1):
            chance = random.Random(2 * seed + part)
            drift = 0.0
            log = []
            for step in range(80):
                drift = 0.95 * drift + 0.01 * chance.gauss(0, 1)
                log.append({"step": step, "reward": step / 160 + drift + 0.05 * chance.gauss(0, 1)})
            logs.append(log)
        alarms += bool(compare_logs(*logs).parted)
    assert alarms <= 5


def test_causes_are_listed_before_their_effects_whatever_parts_first():
    a = rows(1, reward=learns, kl=flat, mismatch_kl=flat)
    b = rows(
        2,
        reward=fails_after(20),
        kl=lambda step: 0.5 + (step >= 50),
        mismatch_kl=lambda step: 0.5 + 2 * (step >= 60),
    )
    comparison = compare_logs(a, b)
    assert [one.name for one in comparison.parted] == ["kl", "mismatch_kl", "reward"]
    assert comparison.first.name == "reward"


def test_the_order_has_every_quantity_but_time_and_memory_once():
    order = metric_order()
    assert len(order) == len(set(order))
    assert order[-2:] == ["reward", "evaluation"]
    assert not {"memory", "step_time"} & set(order)


def test_metrics_of_one_log_and_short_ones_are_named():
    a = rows(1, reward=learns, kl=flat)
    b = rows(2, reward=learns, cut=flat)
    for row in (*a, *b):
        if row["step"] < FEWEST_STEPS:
            row["entropy"] = 0.5
    comparison = compare_logs(a, b)
    assert (comparison.only_a, comparison.only_b) == (["kl"], ["cut"])
    assert comparison.short == ["entropy"]
    assert [one.name for one in comparison.alike] == ["reward"]


def test_logs_of_few_steps_are_refused():
    with pytest.raises(ValueError, match="have no metric with 20 common steps; both have reward"):
        compare_logs(rows(1, steps=10, reward=learns), rows(2, steps=10, reward=learns))
    with pytest.raises(ValueError, match="both have none"):
        compare_logs(rows(1, reward=learns), rows(2, entropy=flat))


def test_a_log_with_a_row_every_five_steps_is_compared_at_these():
    a = rows(1, steps=300, reward=learns, entropy=flat)
    b = [row for row in rows(2, steps=300, reward=learns, entropy=lambda step: 0.1) if row["step"] % 5 == 0]
    assert parted(a, b) == {"entropy": 5}
    assert parted(b, a) == {"entropy": 5}


def test_a_constant_that_differs_parts_and_one_that_is_equal_does_not():
    steps = list(range(40))
    assert first_difference("learning_rate", steps, [1e-6] * 40, [1e-6] * 40) is None
    assert first_difference("learning_rate", steps, [1e-6] * 40, [2e-6] * 40).step == 0


def test_the_second_log_gives_the_same_steps_in_the_other_order():
    a = rows(1, reward=learns, entropy=flat)
    b = rows(2, reward=fails_after(50), entropy=lambda step: 0.1)
    assert parted(a, b) == parted(b, a)


def test_a_metric_within_the_noise_whose_ends_are_far_apart_is_listed_apart(tmp_path):
    """A burst at the start makes the noise of a gradient norm large, and hides that one of them is lost at the end."""
    written = []
    for name, end in (("a", 7e-5), ("b", 1.0)):
        log = rows(1, reward=learns, kl=flat)
        for row in log:
            row["grad_norm"] = 60.0 * (row["step"] % 2) if row["step"] < 40 else end
        file = tmp_path / f"{name}.jsonl"
        file.write_text("\n".join(map(json.dumps, log)))
        written.append(file)
    difference = diff(*written)
    assert [(one.name, one.is_far) for one in difference.logs.alike] == [
        ("grad_norm", True),
        ("kl", False),
        ("reward", False),
    ]
    assert "\nnor these, though 10 times apart or more there: grad_norm 7e-5 | 1" in str(difference)


def test_what_diagnose_says_of_each_run_stands_below_its_path(tmp_path):
    written = []
    for name, reward in (("good", learns), ("bad", fails_after(50))):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("\n".join(map(json.dumps, rows(1, reward=reward, entropy=flat))))
        written.append(file)
    difference = diff(*written)
    headlines = [diagnose(file).headline for file in written]
    assert headlines[0].startswith("ok: ")
    assert headlines[1].startswith("collapse: ")
    assert list(difference.diagnoses) == headlines
    lines = str(difference).split("\n")
    assert [lines[lines.index(f"{name}: {file}") + 1] for name, file in zip("AB", written, strict=True)] == [
        f"   rlvet diagnose: {headline}" for headline in headlines
    ]
    assert "causes first, each with the means of up to 10 steps from there on (A | B):" in lines


def test_the_steps_that_only_one_log_has_are_told():
    whole = rows(1, reward=learns, kl=flat)
    assert compare_logs(whole, rows(2, reward=learns, kl=flat)).notes == []
    (note,) = compare_logs(whole[:60], whole).notes
    assert note == "the common steps end at 60; B goes on to 100, and its end is not compared"
