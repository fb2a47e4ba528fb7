"""Where the metrics of two logs part."""

import json
import random
import re
from statistics import fmean

import pytest

from rlvet import diagnose
from rlvet.compare import diff
from rlvet.compare.keys import by_beginning, listed
from rlvet.compare.logs import FEWEST_STEPS, compare_logs, first_difference, metric_order, window_of
from rlvet.runs.logs import Log


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


def test_metrics_are_listed_in_the_order_of_their_steps():
    a = rows(1, reward=learns, kl=flat, mismatch_kl=flat)
    b = rows(
        2,
        reward=fails_after(20),
        kl=lambda step: 0.5 + (step >= 50),
        mismatch_kl=lambda step: 0.5 + 2 * (step >= 60),
    )
    comparison = compare_logs(a, b)
    assert [one.name for one in comparison.parted] == ["reward", "kl", "mismatch_kl"]
    assert [one.name for one in comparison.earliest] == ["reward"]


def written(tmp_path, *logs):
    """Return the paths of logs of JSON lines."""
    files = []
    for name, log in zip("ab", logs, strict=True):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("\n".join(map(json.dumps, log)))
        files.append(file)
    return files


def test_of_metrics_that_part_at_one_step_none_is_called_the_first_or_a_cause(tmp_path):
    a = rows(1, reward=learns, kl=flat, entropy=flat, length=flat)
    level = dict.fromkeys(("kl", "entropy"), lambda step: 2.0)
    difference = diff(*written(tmp_path, a, rows(2, reward=learns, length=flat, **level)))
    assert difference.headline == "2 of 4 shared metrics part beyond their noise, all by step 1 at the latest"
    title = "parted, at the latest at the step named, so that their order shows no cause (A | B, means of up to 10"
    assert title in str(difference)

    later = rows(2, reward=learns, length=lambda step: 0.5 + 2 * (step >= 50), **level)
    difference = diff(*written(tmp_path, a, later))
    assert (
        difference.headline
        == "3 of 4 shared metrics part beyond their noise, 2 of them by step 1 at the latest"
    )
    assert title in str(difference)

    apart = rows(2, reward=learns, entropy=lambda step: 2.0, kl=flat, length=lambda step: 0.5 + (step >= 50))
    difference = diff(*written(tmp_path, a, apart))
    assert (
        difference.headline
        == "2 of 4 shared metrics part beyond their noise, entropy by step 1 at the latest"
    )
    title = "parted, at the latest at the step named, so that their order shows no cause"
    assert f"\n{title} (A | B, means of up to 10 log steps from there on):\n" in str(difference)

    one = rows(2, reward=learns, entropy=lambda step: 2.0, kl=flat, length=flat)
    assert (
        "\nparted, at the latest at the step named (A | B, means of up to 10 log steps from there on):\n"
        in str(diff(*written(tmp_path, a, one)))
    )


def noisy(least, most):
    """Return values that go up and down by as much as their size, so that their noise hides a distance."""
    return [least if step % 2 else most for step in range(1, 41)]


def test_a_metric_without_a_value_in_common_is_told_in_the_headline_and_is_a_difference(tmp_path):
    a = [{"step": k, "reward": 0.0, "clip": 0.0, "entropy": 0.5} for k in range(1, 41)]
    b = [
        {"step": k, "reward": reward, "clip": reward / 100, "entropy": 0.5}
        for k, reward in enumerate(noisy(0.05, 0.95), 1)
    ]
    difference = diff(*written(tmp_path, a, b))
    assert not difference.logs.parted
    assert [one.name for one in difference.logs.apart] == ["reward", "clip"]
    assert [one.name for one in difference.logs.not_told_apart] == ["entropy"]
    assert difference.differs
    assert difference.headline == (
        "the reward is surely higher in B; 2 have no value in common: reward, clip; none of 3 shared metrics parts by "
        "the rule"
    )
    assert (
        "\n\nno value in common; no step from which the rule tells them apart (A | B, means at the end of the "
        "common steps):\n- reward 0 | 0.59\n- clip 0 | 0.0059\n\nnot told apart" in str(difference)
    )
    # A few values in common are told.
    b[7]["reward"] = b[9]["clip"] = 0.0
    difference = diff(*written(tmp_path, a, b))
    assert "; 2 have no value in common, but for 1 in 20 of each run: reward, clip; " in difference.headline
    # More are enough.
    for row in b[7:14]:
        row["reward"] = row["clip"] = 0.0
    difference = diff(*written(tmp_path, a, b))
    assert (difference.logs.apart, difference.differs) == ([], False)
    assert difference.headline == (
        "the reward is surely higher in B; no value in common from a step on: clip, reward; none of 3 shared metrics "
        "parts by the rule"
    )


def test_metrics_that_differ_before_any_update_are_told(tmp_path):
    chance = random.Random(3)
    logs = []
    for length in (16.0, 30.0):
        logs.append(
            [
                {
                    "step": step,
                    "reward": 0.5 + chance.gauss(0, 0.1),
                    "kl": 0.1 * (step - 1) * length / 16,
                    "completions/mean_length": length + chance.gauss(0, 0.5),
                }
                for step in range(1, 61)
            ]
        )
    text = str(diff(*written(tmp_path, *logs)))
    assert "\nlength differs at the first step, before any update of the weights" in text
    late = [[row | {"step": row["step"] + 100} for row in log] for log in logs]
    assert "before any update" not in str(diff(*written(tmp_path, *late)))


def test_keys_that_are_not_read_are_told_if_one_log_alone_has_them_or_their_values_differ(tmp_path):
    a = rows(1, reward=learns, entropy=flat, **{"my/weight": flat, "my/noise": flat})
    names = [f"actor/prefix_{name}" for name in ("loss", "ratio", "count", "mask")]
    b = rows(
        2,
        reward=learns,
        entropy=flat,
        **{"my/weight": lambda step: 3.0, "my/noise": flat, "my/seed": flat},
        **dict.fromkeys(names, flat),
    )
    difference = diff(*written(tmp_path, a, b))
    assert (difference.keys.only_a, difference.keys.only_b) == ([], ["my/seed", *names])
    assert [one.name for one in difference.keys.apart] == ["my/weight"]
    text = str(difference)
    assert "\nnot known to rlvet, and only B logs: 5 keys, actor/prefix_… (4), my/seed\n" in text
    assert "\nnot known to rlvet, and no value in common (1 of 2 such keys of both; A | B, means at" in text
    assert (
        "\nnot read, so that no step is searched at which they part: 2 of 4 keys of A, 7 of 9 keys of B; "
        "of both: my/weight, my/noise; rlvet diagnose -v lists them\n"
    ) in text
    assert [one.name for one in difference.keys.sure] == []
    louder = [{**row, "my/noise": row["my/noise"] + 0.06} for row in b]
    sure = diff(*written(tmp_path, a, louder))
    assert [one.name for one in sure.keys.sure] == ["my/noise"]
    assert "surely differ, each alone at 95 % (A | B): my/noise 0." in str(sure)
    # A key that is not known decides nothing.
    assert not difference.differs
    assert difference.as_json()["keys"]["unread"] == [2, 7]


def test_logs_of_which_all_keys_are_read_have_no_line_about_keys(tmp_path):
    a, b = (rows(seed, reward=learns, entropy=flat) for seed in (1, 2))
    text = str(diff(*written(tmp_path, a, b)))
    assert "not read" not in text
    assert "not known" not in text


def test_keys_of_two_frameworks_are_not_matched(tmp_path):
    trl = [{"step": k, "reward": 0.5, "frac_reward_zero_std": 0.1, "my_key": 1.0} for k in range(1, 31)]
    verl = [
        {"step": k, "critic/score/mean": 0.5, "actor/entropy": 0.2, "other_key": 1.0} for k in range(1, 31)
    ]
    keys = diff(*written(tmp_path, trl, verl)).keys
    assert (keys.only_a, keys.only_b, keys.unread) == ([], [], (1, 1))


def test_a_key_that_one_log_calls_otherwise_is_not_called_missing(tmp_path):
    """The key of B is read, and that of A is not, as it has no numbers."""
    a = [{**row, "kl": "none"} for row in rows(1, reward=learns)]
    keys = diff(*written(tmp_path, a, rows(2, reward=learns, kl=flat))).keys
    assert (keys.only_a, keys.only_b, keys.apart) == ([], [], [])


@pytest.mark.parametrize("number", [7, 60, 5000])
def test_a_list_of_keys_takes_a_line_or_two(number):
    keys = [f"layer.{index % 9}.attention_{index}/norm" for index in range(number)]
    names, numbers = by_beginning(keys)
    assert sum(numbers) == number
    text = listed(names, numbers)
    assert len(text) <= 130
    # Each key is in a beginning, named, or counted at the end.
    counts = map(int, re.findall(r"\d+(?=\)| more)", text))
    assert sum(counts) + len(set(text.split(", ")) & set(keys)) == number


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
    assert [one.name for one in comparison.not_told_apart] == ["reward"]


def test_logs_without_common_steps_are_compared_at_their_ends():
    first, second = rows(1, steps=40, reward=learns), rows(2, steps=40, reward=learns, entropy=flat)
    later = [row | {"step": row["step"] + 500} for row in second]
    comparison = compare_logs(first, later)
    assert comparison.reason == "A has the steps 1 to 40, B 501 to 540, and no metric has 8 common ones"
    assert comparison.ends == "each log"
    (reward,) = comparison.of_ends
    assert reward.a == pytest.approx(fmean(row["reward"] for row in first[-4:]))
    assert reward.starts[1] == pytest.approx(fmean(row["reward"] for row in second[:4]))
    assert comparison.only_b == ["entropy"]
    assert not comparison.differs
    with pytest.raises(ValueError, match="no metric is in both"):
        compare_logs(rows(1, reward=learns), rows(2, entropy=flat))


def test_the_means_of_few_common_steps_are_told(tmp_path):
    a, b = (rows(seed, steps=14, reward=learns, length=lambda step: 0.5 - step / 50) for seed in (1, 2))
    difference = diff(*written(tmp_path, a, b))
    assert difference.headline == "no shared metric has the 20 common steps that the rule needs"
    assert not difference.differs
    ends = [sum(row["length"] for row in part) / 4 for log in (a, b) for part in (log[:4], log[-4:])]
    length = "length {:.3g} → {:.3g} | {:.3g} → {:.3g}".format(*ends)
    title = "too few common steps for the rule (A | B, means of the first 4 → of the last 4 of them): "
    (line,) = [line for line in str(difference).split("\n") if line.startswith(title)]
    assert length in line


def test_one_metric_with_enough_steps_is_not_denied_by_others_with_few(tmp_path):
    logs = [rows(seed, steps=30, reward=learns, entropy=flat) for seed in (1, 2)]
    for row in logs[1]:
        # But for two rows, all values of one log are above those of the other.
        row["entropy"] = 2.0 if row["step"] < 3 else row["entropy"] + 0.4
        if row["step"] > 12:
            del row["reward"]
    difference = diff(*written(tmp_path, *logs))
    assert [one.name for one in difference.logs.few] == ["reward"]
    assert "no shared metric has the" not in difference.headline


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
    logs = []
    for end in (7e-5, 1.0):
        log = rows(1, reward=learns, kl=flat)
        for row in log:
            row["grad_norm"] = 60.0 * (row["step"] % 2) if row["step"] < 40 else end
        logs.append(log)
    difference = diff(*written(tmp_path, *logs))
    assert [(one.name, one.is_far) for one in difference.logs.not_told_apart] == [
        ("grad_norm", True),
        ("kl", False),
        ("reward", False),
    ]
    surely = r"means over the 100 common log steps surely differ \([\d.]+ \| [\d.]+\)"
    assert re.search(
        rf"\n- grad_norm \d+ → 7e-5 \| \d+ → 1: .*{surely}; 10 times apart or more at the end\n",
        str(difference),
    )


def test_what_diagnose_says_of_each_run_stands_below_its_path(tmp_path):
    files = written(tmp_path, *(rows(1, reward=reward, entropy=flat) for reward in (learns, fails_after(50))))
    difference = diff(*files)
    headlines = [diagnose(file).headline for file in files]
    assert headlines[0].startswith("ok: ")
    assert headlines[1].startswith("collapse: ")
    headlines[1] = f"stop, {headlines[1]}"
    assert list(difference.diagnoses) == headlines
    lines = str(difference).split("\n")
    assert [lines[lines.index(f"{name}: {file}") + 1] for name, file in zip("AB", files, strict=True)] == [
        f"   rlvet diagnose: {headline}" for headline in headlines
    ]
    assert (
        "parted, at the latest at the step named (A | B, means of up to 10 log steps from there on):" in lines
    )


def test_the_steps_that_only_one_log_has_are_told():
    whole = rows(1, reward=learns, kl=flat)
    assert compare_logs(whole, rows(2, reward=learns, kl=flat)).notes == []
    (note,) = compare_logs(whole[:60], whole).notes
    assert note == "the common steps end at 60; B goes on to 100, and its end is not compared"


def drifting(seed, level, steps=200, memory=0.6):
    """Return a log whose reward has noise that lasts for some steps."""
    chance = random.Random(seed)
    log, noise = [], 0.0
    for step in range(1, steps + 1):
        noise = memory * noise + chance.gauss(0, 0.1)
        log.append({"step": step, "reward": level + noise})
    return log


def test_the_reward_has_a_line_after_the_headline_with_its_means_and_interval(tmp_path):
    a, b = drifting(1, 0.7), drifting(2, 0.55)
    difference = diff(*written(tmp_path, a, b[:150]))
    line = str(difference).split("\n")[1]
    means = [sum(row["reward"] for row in log[:150]) / 150 for log in (a, b)]
    assert f"over all 150 of them, 1 to 150, {means[0]:.3g} | {means[1]:.3g}: A − B is" in line
    ends = [sum(row["reward"] for row in part) / 15 for log in (a, b) for part in (log[:15], log[135:150])]
    courses = "{:.3g} → {:.3g} | {:.3g} → {:.3g}".format(*ends)
    windows = "means of the first 15 → of the last 15 common log steps"
    assert line.startswith(f"reward {courses} (A | B, {windows}), and over all 150 of them, 1 to 150, ")
    assert "95 % interval" in line
    assert "surely higher in A" in line
    # The means are told there alone.
    assert "surely differ" not in str(difference)
    assert "\nnot told apart by the rule (" not in str(difference)
    output = difference.as_json()["logs"]["reward"]
    low, high = output["interval"]
    assert 0 < low < output["a"] - output["b"] < high
    assert not difference.differs

    swapped = diff(*written(tmp_path, b[:150], a))
    assert "surely higher in B" in str(swapped)
    assert swapped.as_json()["logs"]["reward"]["interval"] == pytest.approx([-high, -low])


def test_the_steps_in_which_metrics_that_meet_again_are_farthest_apart_are_told(tmp_path):
    """The rule allows one run to be ahead of the other, and so does not tell them apart."""
    a = rows(1, steps=100, reward=lambda step: 0.2 if 41 <= step <= 50 else 0.5, entropy=flat)
    b = rows(2, steps=100, reward=lambda step: 0.2 if 61 <= step <= 70 else 0.5, entropy=flat)
    difference = diff(*written(tmp_path, a, b))
    reward, entropy = (
        next(one for one in difference.logs.not_told_apart if one.name == name)
        for name in ("reward", "entropy")
    )
    assert reward.farthest.first in (40, 41, 42, 60, 61, 62)
    assert reward.farthest.last == reward.farthest.first + 9
    for log, mean in ((a, reward.farthest.a), (b, reward.farthest.b)):
        inside = [
            row["reward"] for row in log if reward.farthest.first <= row["step"] <= reward.farthest.last
        ]
        assert mean == pytest.approx(sum(inside) / 10)
    assert entropy.farthest is None
    assert re.search(
        r"\nnot told apart by the rule, but different otherwise \(.*:\n- reward ", str(difference)
    )
    assert f": {reward.farthest}\n" in str(difference)
    assert re.fullmatch(
        r"farthest apart from step \d+ to \d+, beyond the noise \(0\.\d+ \| 0\.\d+\)", str(reward.farthest)
    )
    assert not difference.differs


def test_a_reward_that_may_be_equal_is_not_called_higher(tmp_path):
    line = str(diff(*written(tmp_path, drifting(1, 0.5), drifting(2, 0.5)))).split("\n")[1]
    assert line.endswith("not sure which is higher")


def test_logs_that_are_equal_in_all_steps_are_told_so(tmp_path):
    same = drifting(1, 0.1)
    difference = diff(*written(tmp_path, same, same))
    assert difference.headline == "all values of 1 shared metric are equal in the common steps"
    assert "A − B is 0, 95 % interval 0 to 0, equal at each step" in str(difference)
    changed = [row | {"reward": row["reward"] + (row["step"] == 7) / 100} for row in same]
    assert "are equal" not in diff(*written(tmp_path, same, changed)).headline


def test_metrics_whose_means_surely_differ_stand_apart_from_the_others(tmp_path):
    """They do not part by the rule, which is for large differences."""
    logs = []
    for seed, level in ((1, 0.5), (2, 0.56)):
        log = drifting(seed, 0.5)
        chance = random.Random(seed)
        for row in log:
            row |= {"entropy": level + chance.gauss(0, 0.05), "kl": 0.5 + chance.gauss(0, 0.05)}
        logs.append(log)
    difference = diff(*written(tmp_path, *logs))
    means = {one.name: one.is_sure for one in difference.logs.not_told_apart}
    assert means == {"entropy": True, "kl": False, "reward": False}
    (different,) = re.findall(r"^- (.*surely differ.*)$", str(difference), re.M)
    levels = [sum(row["entropy"] for row in log) / len(log) for log in logs]
    assert different.startswith("entropy ")
    assert f"surely differ ({levels[0]:.3g} | {levels[1]:.3g})" in different
    assert "A and B have no configuration in or beside the log that is read" in str(difference)


def test_prompts_of_other_lengths_are_told_above_the_runs(tmp_path):
    logs = [rows(1, reward=learns), rows(2, reward=learns)]
    for log, length in zip(logs, (500, 130), strict=True):
        for row in log:
            row["prompt_length/mean"] = length
    difference = diff(*written(tmp_path, *logs))
    sentence = "the prompts differ, so that data or template do: prompt_length/mean 500 | 130 (A | B, means at the end)"
    assert str(difference).index(sentence) < str(difference).index("\nA: ")
    assert sentence in difference.as_json()["notes"]
    assert "the prompts differ" not in str(diff(*written(tmp_path, logs[0], logs[0])))


def test_shares_of_groups_and_of_whole_batches_are_not_compared(tmp_path):
    """TRL logs both under one name, by the scale of the rewards."""
    folders = []
    for name, scale in (("a", "group"), ("b", "batch")):
        folder = tmp_path / name
        folder.mkdir()
        log = [row | {"frac_reward_zero_std": 0.5, "reward_std": 0.2} for row in rows(1, reward=learns)]
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, log)))
        settings = {"importance_sampling_level": "token", "scale_rewards": scale}
        (folder / "config.yaml").write_text(json.dumps(settings))
        folders.append(folder)
    difference = diff(*folders)
    assert [one.name for one in difference.logs.not_told_apart] == ["reward"]
    assert "dead and reward_std are of groups in A and of whole batches in B" in str(difference)
    same = diff(folders[0], folders[0])
    assert {one.name for one in same.logs.not_told_apart} == {"dead", "reward_std", "reward"}


def test_learning_rates_that_part_in_warm_up_have_their_largest_values():
    logs = [
        [{"step": step, "reward": 0.5, "learning_rate": rate * min(1, step / 50)} for step in range(1, 101)]
        for rate in (5e-6, 2e-5)
    ]
    (parted,) = compare_logs(*logs).parted
    assert parted.a < 5e-6
    assert str(parted).endswith(", largest 5e-6 | 2e-5")


def test_a_reward_that_parts_or_is_apart_or_short_has_no_line_of_its_own():
    parts = compare_logs(rows(1, reward=learns, kl=flat), rows(2, reward=fails_after(50), kl=flat))
    assert "reward" in {one.name for one in parts.parted}
    assert parts.reward is None
    levels = [[{"step": k, "reward": level, "kl": 0.5} for k in range(40)] for level in (0.0, 0.5)]
    assert compare_logs(*levels).reward is None
    few = [
        row if row["step"] < 10 else {"step": row["step"], "kl": row["kl"]}
        for row in rows(1, reward=flat, kl=flat)
    ]
    assert compare_logs(few, rows(2, reward=flat, kl=flat)).reward is None


@pytest.mark.parametrize(("memory", "most"), [(0.0, 30), (0.6, 35), (0.8, 45)])
def test_the_interval_counts_noise_that_lasts(memory, most):
    """Of 400 pairs of equal rewards, 5 % have an interval without 0 by design. Independent steps would give 30 %."""
    wrong = 0
    for seed in range(400):
        logs = [drifting(2 * seed + part, 0.5, memory=memory) for part in (0, 1)]
        reward = compare_logs(*logs).reward
        wrong += reward is not None and bool(reward.higher)
    assert 8 <= wrong <= most


def with_epochs(log, steps, key="train/epoch", digits=None):
    for row in log:
        epoch = row["step"] / steps
        row[key] = int(epoch) if digits == 0 else epoch if digits is None else round(epoch, digits)
    return log


@pytest.mark.parametrize(("key", "digits"), [("train/epoch", None), ("epoch", 2), ("training/epoch", 0)])
def test_steps_an_epoch_that_differ_are_told(key, digits):
    a = with_epochs(rows(1, reward=learns), 10, key, digits)
    b = with_epochs(rows(2, reward=learns), 30, key, digits)
    comparison = compare_logs(a, b)
    assert comparison.notes == [
        "steps an epoch 10 | 30 (A | B): data sets or batches of other sizes, or other numbers of passes over a batch"
    ]
    assert compare_logs(a, with_epochs(rows(2, reward=learns), 10, key, digits)).notes == []


@pytest.mark.parametrize(
    "epochs",
    [
        pytest.param(lambda step: 0, id="none has ended"),
        pytest.param(lambda step: int(step > 50), id="one has begun"),
        pytest.param(lambda step: step / 1000, id="a tenth of one"),
        pytest.param(lambda step: step / 10 if step < 50 else 5 + (step - 50) / 40, id="its size changes"),
        pytest.param(lambda step: step % 10 / 10, id="counted anew"),
    ],
)
def test_steps_an_epoch_that_a_log_does_not_tell_are_not_guessed(epochs):
    a = with_epochs(rows(1, reward=learns), 10)
    b = [{**row, "train/epoch": epochs(row["step"])} for row in rows(2, reward=learns)]
    comparison = compare_logs(a, b)
    assert (comparison.steps_an_epoch, comparison.notes) == ((10.0, None), [])


def test_metrics_that_part_at_the_first_common_step_are_known_if_both_logs_begin_there():
    a, b = rows(1, reward=learns, entropy=flat), rows(2, reward=fails_after(50), entropy=lambda step: 2.0)
    assert compare_logs(a, b).from_start == ["entropy"]
    assert compare_logs(a, b[20:]).from_start == []


def test_rewards_of_other_components_are_not_comparable_and_shared_ones_are_compared():
    def rows(seed, **components):
        draw = random.Random(seed)
        noisy = {f"rewards/{name}/mean": value for name, value in components.items()}
        return [
            {"step": step, "reward": sum(noisy.values()) + draw.gauss(0, 0.01)}
            | {key: value + draw.gauss(0, 0.01) for key, value in noisy.items()}
            for step in range(1, 101)
        ]

    comparison = compare_logs(rows(1, bleu=0.1), rows(2, bleu=0.1, tests=0.5))
    assert comparison.components == (
        "the rewards are of other components, and not comparable: only B has tests"
    )
    assert "rewards/bleu/mean" in [one.name for one in comparison.not_told_apart]
    # A single component is the reward.
    assert compare_logs(rows(1, bleu=0.1), rows(2, bleu=0.1)).components == ""
    [alone] = compare_logs(rows(1, bleu=0.1), rows(2, bleu=0.1)).not_told_apart
    assert alone.name == "reward"


def test_a_metric_without_a_common_value_parts_at_the_first_step():
    draw = random.Random(3)
    low = [
        {"step": step, "reward": 0.5, "reward_std": 0.01 + draw.uniform(0, 0.005)} for step in range(1, 101)
    ]
    high = [row | {"reward_std": 0.03 + 0.002 * row["step"] + draw.uniform(0, 0.03)} for row in low]
    [parted] = [one for one in compare_logs(low, high).parted if one.name == "reward_std"]
    assert parted.step == 1


def test_rows_without_steps_are_compared_at_their_ends_with_those_that_have_some(tmp_path):
    draw = random.Random(5)
    rows = [{"loss": 0.1, "reward": round(draw.random(), 4), "kl": 0.01} for _ in range(40)]
    (tmp_path / "a.log").write_text("".join(f"{row}\n" for row in rows))
    (tmp_path / "b.log").write_text(
        "".join(f"{row | {'step': 5 * number}}\n" for number, row in enumerate(rows, 1))
    )
    difference = diff(tmp_path / "a.log", tmp_path / "b.log")
    assert (
        difference.headline == "the rows of A have no steps, so that only the ends of 2 metrics are compared"
    )
    ends = [sum(row["reward"] for row in part) / 4 for part in (rows[:4], rows[-4:])]
    text = " → ".join(f"{end:.3g}" for end in ends)
    title = "means of the first tenth → of the last tenth of each log (A | B)"
    assert f"\n{title}: kl 0.01 → 0.01 | 0.01 → 0.01, reward {text} | {text}\n" in str(difference)
    assert diff(tmp_path / "b.log", tmp_path / "a.log").headline.startswith("the rows of B have no steps")
    both = diff(tmp_path / "a.log", tmp_path / "a.log")
    assert "the rows of both logs have no steps: a step is the number of a row" in both.notes


def test_few_steps_without_a_value_in_common_are_told():
    a = rows(1, steps=14, reward=lambda step: 0.2, length=lambda step: 5.0)
    b = rows(2, steps=14, reward=lambda step: 0.25, length=lambda step: 9.0)
    comparison = compare_logs(a, b)
    assert [one.name for one in comparison.apart] == ["length"]
    assert comparison.short == ["reward"]
    assert comparison.differs
    few = compare_logs(a[:7], b[:12])
    assert few.reason == "A has the steps 1 to 7, B 1 to 12, and no metric has 8 common ones"
    assert few.ends == "the 7 common steps"
    (length,) = [metric for metric in few.of_ends if metric.name == "length"]
    assert length.starts == (a[0]["length"], b[0]["length"])
    assert (length.a, length.b) == (a[6]["length"], b[6]["length"])


def test_the_first_of_counted_rows_may_come_after_updates():
    a = rows(1, reward=lambda step: 0.2, entropy=lambda step: 5.0)
    b = rows(2, reward=lambda step: 0.2, entropy=lambda step: 9.0)
    assert compare_logs(a, b).before_updates == ["entropy"]
    assert compare_logs(a, b, are_steps_counted=True).before_updates == []


def test_a_metric_that_parts_has_its_first_step_on_that_side_and_its_end(tmp_path):
    def late(step):
        return 3.0 if 3 <= step <= 60 else 0.0

    a, b = rows(1, reward=learns, kl=flat), rows(2, reward=learns, kl=late)
    for row in b[:2]:
        row["kl"] = a[row["step"] - 1]["kl"] - 0.5
    (parted,) = [one for one in compare_logs(a, b).parted if one.name == "kl"]
    assert parted.step == 3
    assert parted.b > parted.a
    assert str(parted).endswith(", at the end {:.3g} | {:.3g}".format(*parted.ends))
    assert parted.ends[1] < 0.1


def test_equal_answers_with_other_rewards_at_the_first_step_are_told(tmp_path):
    a = rows(1, reward=learns, length=lambda step: 100.0 + step, entropy=flat)
    b = [
        row | {"reward": row["reward"] + 0.3 * (step % 2)}
        for step, row in enumerate(rows(2, reward=learns, length=lambda step: 100.0 + step, entropy=flat))
    ]
    b[0] |= {"length": a[0]["length"], "entropy": a[0]["entropy"], "reward": a[0]["reward"] - 0.01}
    said = str(diff(*written(tmp_path, a, b)))
    assert (
        "\nlength, entropy are equal in all digits at the first step, and the reward is not: the reward function"
        in said
    )
    b[0]["length"] = a[0]["length"] + 0.25
    for one, other in zip(a, b, strict=True):
        one["length_max"] = other["length_max"] = 2048.0 - one["step"] % 3
    assert "equal in all digits" not in str(diff(*written(tmp_path, a, b)))
    b[0] |= {"length": a[0]["length"], "reward": a[0]["reward"]}
    assert "equal in all digits" not in str(diff(*written(tmp_path, a, b)))


def test_a_gradient_that_differs_at_the_first_step_may_be_of_another_loss(tmp_path):
    a = rows(1, reward=learns, grad_norm=lambda step: 5.0)
    b = rows(2, reward=learns, grad_norm=lambda step: 9.0)
    said = str(diff(*written(tmp_path, a, b)))
    assert (
        "grad_norm differs at the first step, before any update of the weights, so that the loss, prompts"
        in said
    )


@pytest.mark.parametrize("every", [2, 5])
def test_a_log_with_a_row_every_few_steps_is_compared_at_its_rows(every):
    """The other log has fewer rows in all, as it is shorter."""
    a = [row for row in rows(1, steps=100 * every, reward=learns) if row["step"] % every == 0]
    b = rows(2, steps=70, reward=learns)
    comparison = compare_logs(a, b)
    common = [step for step in range(1, 71) if step % every == 0]
    if len(common) < FEWEST_STEPS:
        assert not comparison.not_told_apart
        (few,) = comparison.few
        assert few.name == "reward"
    else:
        (metric,) = comparison.not_told_apart
        of_a = [a[step // every - 1]["reward"] for step in common]
        of_b = [b[step - 1]["reward"] for step in common]
        assert (metric.whole.a, metric.whole.b) == pytest.approx((fmean(of_a), fmean(of_b)))


def test_an_unread_key_in_a_far_wider_range_is_told(tmp_path):
    draw = random.Random(4)
    logs = [
        [row | {"loss": scale * draw.gauss(0, 1)} for row in rows(seed, reward=learns)]
        for seed, scale in ((1, 0.01), (2, 1.0))
    ]
    said = str(diff(*written(tmp_path, *logs)))
    # What is printed is what was compared: without the two farthest values on each side.
    ordered = [sorted(row["loss"] for row in log) for log in logs]
    ranges = [f"{losses[2]:.3g} to {losses[-3]:.3g}" for losses in ordered]
    title = (
        "not known to rlvet, with values in ranges of which one is 10 times the other or more (A | B, without the 2 "
        "farthest values on each side)"
    )
    assert f"\n{title}: loss {' | '.join(ranges)}\n" in said


def test_values_at_the_last_of_a_few_common_steps_are_those_of_that_step(tmp_path):
    a, b = rows(1, reward=learns), rows(2, reward=learns)
    for log, steps in ((a, (10, 20, 40)), (b, (10, 30, 40, 50))):
        for row in log:
            if row["step"] in steps:
                row["eval_reward"] = row["step"] / 100 + (log is b)
    assert compare_logs(*(Log.of(log).rows for log in (a, b))).last_values == {
        "evaluation": "0.4 | 1.4 at step 40"
    }


def test_the_means_are_of_the_rows_in_which_both_logs_have_the_metric(tmp_path):
    """A log may lack the length of finished answers where none finished."""
    a, b = rows(1, reward=learns), rows(2, reward=learns)
    lacking = ({3, 4, 5, 40, 41}, {5, 6, 70})
    for log, steps, length in zip((a, b), lacking, (14, 60), strict=True):
        for row in log:
            if row["step"] not in steps:
                row["completions/mean_terminated_length"] = length + row["step"] % 7
    of_both = [row for row in range(100) if a[row]["step"] not in lacking[0] | lacking[1]]
    means = compare_logs(*(Log.of(log).rows for log in (a, b)))
    (parted,) = (one for one in means.parted if one.name == "length_finished")
    values = [[log[row]["completions/mean_terminated_length"] for row in of_both] for log in (a, b)]
    assert (parted.a, parted.b) == tuple(fmean(of_run[:9]) for of_run in values)


def test_metrics_of_fewer_steps_are_named(tmp_path):
    a, b = rows(1, reward=learns, entropy=flat), rows(2, reward=learns, entropy=flat)
    for row in a:
        if row["step"] % 5 == 0:
            del row["entropy"]
    said = str(diff(*written(tmp_path, a, b)))
    assert "\nof the 100 common log steps, both logs have a value in fewer: entropy in 80\n" in said
    assert "both logs have a value" not in str(diff(*written(tmp_path, b, b)))


def test_logs_of_other_intervals_are_compared_at_the_steps_of_the_rarer_one():
    often = [{"step": step, "reward": step / 100} for step in range(1, 101)]
    rarely = [{"step": step + 0.5, "reward": step / 100} for step in range(2, 100, 4)]
    (reward,) = compare_logs(often, rarely).not_told_apart
    assert reward.whole.steps == len(rarely)
    assert (reward.whole.a, reward.whole.b) == (pytest.approx(0.5), pytest.approx(0.5))


def test_a_metric_without_a_value_in_common_at_its_end_is_told(tmp_path):
    """Two lengths that swap often do not part by the rule, as one run may be ahead of the other."""

    def swings(level):
        return lambda step: 0.5 + 0.4 * (step % 9 < 5) if step < 85 else level

    a = rows(1, steps=100, reward=learns, length=swings(0.9))
    b = rows(2, steps=100, reward=learns, length=swings(0.2))
    difference = diff(*written(tmp_path, a, b))
    assert "length" not in {one.name for one in difference.logs.parted}
    (length,) = difference.logs.disjoint_at_end
    assert length.disjoint_end.first in (84, 85)
    ends = [fmean(row["length"] for row in log if row["step"] >= length.disjoint_end.first) for log in (a, b)]
    assert (length.disjoint_end.a, length.disjoint_end.b) == tuple(map(pytest.approx, ends))
    said = str(difference)
    assert re.search(rf"\n- length .*: {re.escape(str(length.disjoint_end))}", said)
    assert re.match(r"no value in common from step 8[45] on \(0\.\d+ \| 0\.\d+\)", str(length.disjoint_end))
    assert difference.headline.startswith(
        "no value in common from a step on: length; none of 2 shared metrics parts"
    )
    assert not difference.differs


def test_a_reward_with_hardly_a_value_in_common_has_the_line_with_its_interval(tmp_path):
    a, b = rows(1, reward=learns), rows(2, reward=learns)
    for row in b:
        row["reward"] = row["reward"] + 0.6 if row["step"] > 1 else -9.0
    difference = diff(*written(tmp_path, a, b))
    assert [one.name for one in difference.logs.apart] == ["reward"]
    assert re.search(r"\nreward .* 95 % interval .* surely higher in B", str(difference))
    assert difference.as_json()["logs"]["reward"]["steps"] == 100


def test_a_higher_reward_that_may_be_another_is_told_so_in_the_headline(tmp_path):
    a, b = (rows(seed, reward=flat, length=flat, entropy=flat) for seed in (1, 2))
    for row in b:
        row["reward"] += 0.06
    assert diff(*written(tmp_path, a, b)).headline.startswith("the reward is surely higher in B; ")
    b[0] |= {"length": a[0]["length"], "entropy": a[0]["entropy"]}
    said = diff(*written(tmp_path, a, b)).headline
    assert said.startswith("the reward is surely higher in B, though it may be another reward; ")
