"""The checks of a log on courses of its metrics."""

import math
import os
import random
import re
import time
from pathlib import Path
from statistics import fmean

import pytest

from rlvet import diagnose
from rlvet.checks.course import Series, find_jump, find_spikes, fit_weights, onset
from rlvet.checks.diagnosis import Diagnosis
from rlvet.checks.log_checks import log_findings
from rlvet.runs.logs import Log
from rlvet.runs.setup import Setup, Value


def course(steps=40, **metrics):
    """Return the rows of a healthy run whose reward rises, with some metrics replaced.

    Args:
        steps: Log steps.
        **metrics: Functions of the part of the run that is over, from 0 to 1.
    """
    functions = {"reward": lambda t: t, "entropy": lambda t: 1.0, "grad_norm": lambda t: 0.3} | metrics
    return [
        {"step": float(step)} | {name: value(step / steps) for name, value in functions.items()}
        for step in range(1, steps + 1)
    ]


def findings(rows, **setup):
    """Return the findings that are said, in their order."""
    setup = Setup(**{"updates": 4} | setup)
    return Diagnosis(log_findings(rows, setup), setup).findings


def codes(rows, **setup):
    """Return the codes of the faults and remarks, in their order."""
    return [finding.code for finding in findings(rows, **setup)]


def test_a_healthy_run_has_no_findings():
    assert codes(course()) == []


@pytest.mark.parametrize(("name", "value"), [("learning_rate", 1e-10), ("grad_norm", 0.0)])
def test_no_step(name, value):
    rows = course(**{name: lambda t: value})
    assert codes(rows) == ["no-step"]


@pytest.mark.parametrize("spread", [{"reward_std": 0.4}, {"dead": 0.5}])
def test_a_gradient_of_0_in_few_rows_whose_rewards_differ(spread):
    rows = course(2, grad_norm=lambda t: 0.0, **{name: lambda t, x=x: x for name, x in spread.items()})
    assert codes(rows) == ["no-step"]


@pytest.mark.parametrize("spread", [{}, {"reward_std": 0.0}, {"dead": 1.0}])
def test_a_gradient_of_0_in_few_rows_that_may_be_right(spread):
    rows = course(2, grad_norm=lambda t: 0.0, **{name: lambda t, x=x: x for name, x in spread.items()})
    assert "no-step" not in codes(rows)


@pytest.mark.parametrize(("epoch", "expected"), [(0.01, ["reference-kl"]), (0.4, [])])
def test_few_rows_of_the_middle_of_a_run_say_nothing_of_its_start(epoch, expected):
    rows = course(4, kl=lambda t: 0.5, epoch=lambda t: epoch)
    assert codes(rows) == expected


def test_entropy_rise():
    (finding,) = findings(course(entropy=lambda t: 1 + 3 * t))
    assert finding.code == "entropy-rise"
    assert 17 <= finding.onset <= 20


def test_clip_idle():
    rows = course(clip_high=lambda t: 0.0, clip_low=lambda t: 0.0)
    assert codes(rows) == ["clip-idle"]


def test_the_reference_is_not_the_start():
    (finding,) = findings(course(kl=lambda t: 1.1))
    assert (finding.code, finding.severity, finding.onset) == ("reference-kl", "fix", 1)
    assert codes(course(kl=lambda t: 0.2 * t)) == []
    later = [row | {"step": 10 * row["step"]} for row in course(kl=lambda t: 0.3 * t)]
    assert codes(later) == []


def test_verls_mean_over_the_updates_of_the_first_step_is_not_the_start():
    rows = course(kl=lambda t: 0.15 + 0.3 * t)
    assert codes(rows, framework="verl", updates=4) == []
    assert codes(rows, framework="verl", updates=1) == ["reference-kl"]
    assert codes(course(kl=lambda t: 1.1), framework="verl", updates=4) == ["reference-kl"]


def test_step_too_large():
    rows = course(kl=lambda t: min(3.7, 30 * (t - 1 / 40)), learning_rate=lambda t: 5e-4)
    first = findings(rows)[0]
    assert first.code == "step-too-large"
    assert "in the first 3 log steps, at a learning rate of 0.0005" in first.cause


@pytest.mark.parametrize(
    ("reward", "severity"),
    [(lambda t: 0.2 + 0.6 * t, "fix"), (lambda t: 0.5, "stop"), (lambda t: 0.5 - 0.3 * t, "stop")],
)
def test_a_run_whose_reward_rises_after_a_step_that_was_too_large_need_not_end(reward, severity):
    first = findings(course(kl=lambda t: min(3.7, 30 * (t - 1 / 40)), reward=reward))[0]
    assert (first.code, first.severity) == ("step-too-large", severity)
    assert ("the reward rose after that" in first.cause) == (severity == "fix")


@pytest.mark.parametrize(("end", "severity"), [(3.0, "fix"), (1e6, "stop")])
def test_kl_drift(end, severity):
    (finding,) = findings(course(kl=lambda t: end * max(0.0, t - 0.4) ** 2 * 3))
    assert (finding.code, finding.severity) == ("kl-drift", severity)


def test_gradient_spikes_are_graver_before_a_fall():
    rows = course(80)
    for row in (20, 40, 60):
        rows[row]["grad_norm"] = 30.0
    (finding,) = findings(rows)
    assert (finding.code, finding.severity, finding.onset) == ("gradient-spikes", "look", 21)
    for row in rows[64:]:
        row["reward"] = 0.0
    assert codes(rows)[:2] == ["gradient-spikes", "collapse"]
    assert findings(rows)[0].severity == "fix"


@pytest.mark.parametrize(("early", "is_spike"), [(0.4, False), (0.05, True)])
def test_a_norm_that_is_usual_at_the_start_is_no_spike_among_groups_without_signal(early, is_spike):
    """Most norms are near 0 once groups have equal rewards; those of the others are as they were."""
    rows = course(120)
    for row in rows:
        has_signal = row["step"] < 40 or row["step"] % 20 == 0
        row["grad_norm"] = (early if row["step"] < 40 else 0.4) if has_signal else 0.004
    assert ("gradient-spikes" in codes(rows)) == is_spike


def test_clip_heavy():
    rows = course(clip=lambda t: 0.4)
    assert codes(rows) == ["clip-heavy"]
    assert codes(rows, level="sequence") == []
    assert findings(course(clip=lambda t: 0.25))[0].severity == "look"


def test_a_clip_of_nothing_is_not_heavy():
    """With one reward in all rows there is no gradient, and tokens of a policy that has not moved are not clipped."""
    clip = {"clip": lambda t: 1.0}
    assert "clip-heavy" not in codes(course(60, reward=lambda t: 0.0, **clip))
    assert "clip-heavy" not in codes(course(kl_old=lambda t: 1e-8, **clip))
    assert "clip-heavy" in codes(course(kl_old=lambda t: 0.02, **clip))


def test_data_change():
    rows = course(80, reward=lambda t: t - 0.4 * (t > 0.5), length=lambda t: 100.3 + 80.4 * (t > 0.5))
    (finding,) = findings(rows)
    assert (finding.code, finding.severity, finding.onset) == ("data-change", "look", 41)
    assert codes(course(80, length=lambda t: 100.3 + 80.4 * (t > 0.5))) == []


COMPONENTS = {"rewards/judge/mean": lambda t: 0.46, "rewards/other/mean": lambda t: t}


def test_component_constant():
    (finding,) = findings(course(**COMPONENTS))
    assert (finding.code, finding.severity) == ("component-constant", "look")
    assert finding.cause.startswith("judge is 0.46 in every one of 40 log steps")
    assert codes(course(**{"rewards/judge/mean": lambda t: 0.46})) == []


def test_a_format_reward_of_0_is_named_in_a_short_log():
    metrics = {"rewards/exact_format/mean": lambda t: 0.0, "rewards/other/mean": lambda t: t}
    (finding,) = findings(course(12, **metrics))
    assert (finding.code, finding.severity) == ("component-constant", "look")
    assert finding.cause.startswith("exact_format is 0 in every one of 12 log steps")
    assert codes(course(9, **metrics)) == []
    assert codes(course(12, **COMPONENTS)) == []


def test_format_rewards_of_other_names_are_components():
    metrics = {"train/format_reward": lambda t: 0.0, "train/accuracy_reward": lambda t: t}
    (finding,) = findings(course(40, **metrics))
    assert finding.cause.startswith(
        "format is 0 in every one of 40 log steps; means of the other components: accuracy"
    )


def test_component_dominates():
    def form(t):
        return min(1.0, 0.2 + 8 * t)

    metrics = {"rewards/form/mean": form, "rewards/right/mean": lambda t: 0.05 * t}
    rows = course(80, reward=lambda t: form(t) + 0.05 * t, **metrics)
    assert "component-dominates" in codes(rows)
    rows = course(80, reward=lambda t: form(t) + 2 * t, **metrics | {"rewards/right/mean": lambda t: 2 * t})
    assert codes(rows) == []


def test_a_component_near_its_maximum_that_varies_more_than_the_others_hides_none():
    """Of right answers and their form, the form is nearer to its maximum, and right answers are most of the reward."""
    draw = random.Random(3)
    rows = []
    for step in range(1, 101):
        right = min(1.0, max(0.0, 0.95 + draw.gauss(0, 0.03))) if step > 20 else step / 25
        form = 0.5 * min(1.0, 0.98 + draw.gauss(0, 0.005)) if step > 20 else step / 50
        rows.append(
            {
                "step": step,
                "reward": right + form,
                "rewards/right/mean": right,
                "rewards/form/mean": form,
                "kl": 0.001 * step,
            }
        )
    assert "component-dominates" not in codes(rows)


def test_reward_flat():
    first = findings(course(reward=lambda t: -5.0))[0]
    assert (first.code, first.severity, first.onset) == ("reward-flat", "stop", 1)
    assert codes(course(reward=lambda t: 1.0)) == ["plateau"]
    # A gradient of 0 is no other cause then.
    assert codes(course(reward=lambda t: 0.0, grad_norm=lambda t: 0.0)) == ["reward-flat"]


@pytest.mark.parametrize(
    ("cut", "severity"),
    [
        (lambda t: 0.9, "fix"),
        (lambda t: 0.01 + 0.5 * t**3, "fix"),
        (lambda t: 0.02 if t < 0.9 else 0.6, "fix"),
        (lambda t: 0.4, "look"),
        (lambda t: 0.7 if 0.3 < t < 0.42 else 0.05, "look"),
    ],
)
def test_truncated(cut, severity):
    (finding,) = findings(course(80, cut=cut))
    assert (finding.code, finding.severity) == ("truncated", severity)


def test_lengths_at_a_cap_show_that_answers_are_cut_off():
    (finding,) = findings(course(length=lambda t: 256.0 if t > 0.3 else 240.5))
    assert finding.code == "truncated"
    assert "exactly 256 in 28 of 40 log steps" in finding.cause
    assert codes(course(length=lambda t: 240.5 + t)) == []


def test_no_signal_is_a_fault_unless_the_prompts_are_solved():
    (hard, plateau) = findings(course(reward=lambda t: 0.03, dead=lambda t: 0.8, moved=lambda t: 0.1))[:2]
    assert (hard.code, hard.severity, plateau.code) == ("reward-flat", "stop", "no-signal")
    solved = findings(course(80, reward=lambda t: min(0.98, 3 * t), dead=lambda t: min(0.9, 2 * t)))[0]
    assert (solved.code, solved.severity) == ("no-signal", "look")
    assert "these prompts are solved" in solved.cause


def test_a_spread_of_exactly_0_is_no_signal():
    """TRL logs the standard deviation of rewards within groups; 0 means that all answers to each prompt are alike."""
    rows = course(100, reward=lambda t: 0.5 + 0.2 * math.sin(1e4 * t), reward_std=lambda t: 0.0)
    (found,) = (finding for finding in findings(rows) if finding.code == "no-signal")
    assert found.severity == "fix"
    assert "is 0 in 50 of 50 log steps of the later half" in found.cause
    some = course(100, reward_std=lambda t: 0.0 if round(100 * t) % 3 == 0 else 0.3)
    assert "no-signal" not in codes(some)


def test_prompts_are_called_solved_only_where_the_largest_reward_is_known():
    """The reward is flat at 0.13, and its largest value is not known. The prompts may be too hard from there on."""
    rows = course(40, reward=lambda t: min(0.13, 0.3 * t - 0.05), dead=lambda t: min(0.8, 2 * t))
    found = findings(rows)
    assert [(finding.code, finding.severity) for finding in found[:1]] == [("no-signal", "look")]
    assert "the reward is 0.13 at the end, near its best, so these prompts may be solved" in found[0].cause
    assert not any("are solved" in finding.cause for finding in found)


def test_right_answers_of_one_length_are_not_cut_off():
    """All answers of a sum have five tokens once they are right."""
    rows = course(60, reward=lambda t: min(0.998, 0.5 + 2 * t), length=lambda t: 5.0 if t > 0.25 else 4.6)
    assert "truncated" not in codes(rows)
    cut_off = course(60, reward=lambda t: 0.02, length=lambda t: 256.0 if t > 0.25 else 240.5)
    assert "truncated" in codes(cut_off)


def test_entropy_is_judged_before_the_prompts_change():
    """The reward rises while entropy falls, until other prompts come."""
    rows = course(
        160,
        reward=lambda t: 0.3 * math.sin(math.pi / 2 * min(1, t / 0.7)) if t < 0.75 else 0.07,
        length=lambda t: 400.0 if t < 0.75 else 140.0,
        entropy=lambda t: 0.44 * math.exp(-4 * t),
    )
    for row in rows:
        row["length"] += 2 * math.sin(1e4 * row["step"])
        row["reward"] += 0.005 * math.sin(2e4 * row["step"])
    found = codes(rows)
    assert "data-change" in found
    assert "entropy-collapse" not in found


def test_values_below_0_are_no_entropies():
    """Some loops log minus the entropy under a name that others use for the entropy."""
    assert codes(course(entropy=lambda t: -0.04 - 0.1 * t)) == []
    (found,) = (
        row for row in log_findings(course(entropy=lambda t: -0.04 - 0.1 * t)) if "entropy" in row.subject
    )
    assert (found.ok, found.advice) == (None, "the logged values are below 0, so they are no entropies")


def test_length_growth():
    rows = course(80, length=lambda t: 100 + 200 * t)
    assert codes(rows) == []
    for row in rows[::8]:
        row["evaluation"] = 0.3
    (finding,) = findings(rows)
    assert (finding.code, finding.severity) == ("length-growth", "fix")
    rising = [row | {"evaluation": row["reward"]} for row in rows]
    assert codes(rising) == []


def test_reward_hacked():
    rows = course(80)
    for row in rows[::8]:
        row["evaluation"] = 0.2 + 0.3 * min(row["step"], 30) / 30 - 0.004 * max(0, row["step"] - 30)
    (finding,) = findings(rows)
    assert finding.code == "reward-hacked"


def test_no_baseline():
    edges = {"reward_max": lambda t: 0.5 + t, "reward_min": lambda t: -0.2 - t}
    as_rewards = edges | {"advantage_max": edges["reward_max"], "advantage_min": edges["reward_min"]}
    assert codes(course(**as_rewards)) == ["no-baseline"]
    other = edges | {"advantage_max": lambda t: 1.9, "advantage_min": lambda t: -1.7}
    assert codes(course(**other)) == []
    # Rewards of ±1 have the mean 0 in a group of one of each, so that advantages equal them.
    one = {"reward_max": lambda t: 1.0, "reward_min": lambda t: -1.0}
    symmetric = one | {"advantage_max": lambda t: 1.0, "advantage_min": lambda t: -1.0}
    assert codes(course(**symmetric)) == []
    # A mean of 0 in every row, as where all rewards are 0, shows nothing.
    zero = {f"{name}_{side}": lambda t: 0.0 for name in ("reward", "advantage") for side in ("max", "min")}
    assert codes(course(**zero)) == []


def test_the_number_of_answers_is_named_beside_a_missing_baseline():
    edges = {"reward_max": lambda t: 0.5 + t, "reward_min": lambda t: -0.2 - t}
    rows = course(**edges | {"advantage_max": edges["reward_max"], "advantage_min": edges["reward_min"]})
    for size, text in (
        (1, "as each prompt has one answer"),
        (4, "though the settings name 4 answers to each"),
    ):
        values = {"group size": Value("rollout.n", size, "console.log")}
        assert text in findings(rows, framework="verl", values=values)[0].cause


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        (lambda row: 2, "; a step has 2 answers (its tokens"),
        (lambda row: 1, "; a step has 1 answer (its tokens"),
        (lambda row: 8 - row % 2, "; a step has 7 to 8 answers (its tokens"),
        (lambda row: 2.4, "How many answers a prompt has is not known: put the configuration beside the log"),
        (None, "How many answers a prompt has is not known: put the configuration beside the log"),
    ],
    ids=["two", "one", "different numbers", "no integer", "not logged"],
)
def test_the_number_of_answers_follows_from_tokens_and_mean_lengths(answers, words):
    """No key of verl has it. Without settings, this is all that is known of the groups."""
    edges = {"reward_max": lambda t: 0.5 + t, "reward_min": lambda t: -0.2 - t}
    same = {
        "advantage_max": edges["reward_max"],
        "advantage_min": edges["reward_min"],
        "length": lambda t: 18.0,
    }
    rows = course(**edges | same)
    if answers:
        for number, row in enumerate(rows):
            # A console prints three decimals.
            prompt = round(874.123456 + number / 7, 3)
            tokens = answers(number) * (prompt + 18)
            row |= {"prompt_length/mean": prompt, "perf/total_num_tokens": float(round(tokens))}
    finding = findings(rows)[0]
    assert finding.code == "no-baseline"
    assert words in finding.cause


def test_length_collapse():
    def length(t):
        return 53.4 if t < 0.3 else 2.6

    (finding, plateau) = findings(course(60, reward=lambda t: 0.3 + 0.01 * math.sin(300 * t), length=length))
    assert (finding.code, finding.severity, plateau.code) == ("length-collapse", "fix", "plateau")
    # A reward that rises may be one for short answers.
    assert codes(course(60, length=length)) == []


SHORT = "answers are not much shorter at the end, or the reward is higher"


def test_groups_that_a_fall_leaves_without_signal_come_after_it_and_are_not_too_hard():
    """Prompts that were solved are not too hard, though no answer is right at the end."""
    draw = random.Random(3)
    rows = []
    for step in range(1, 81):
        is_lost = step > 40
        reward = 0.02 * draw.random() if is_lost else 0.85 + 0.03 * draw.random()
        dead = 1.0 if is_lost else 0.6 + 0.2 * draw.random()
        length = 500 + 12 * draw.random() if is_lost else 240 + 20 * draw.random()
        rows.append({"step": step, "reward": reward, "dead": dead, "length": length})
    findings = log_findings(rows)
    told = [finding for finding in findings if finding.ok is False]
    assert [finding.code for finding in told] == ["collapse", "no-signal"]
    assert "nearly no answer is right any more: it was 0.8" in told[1].cause
    assert "too hard" not in told[1].cause
    assert told[1].advice.startswith("follow the advice on collapse first; then read one such group")
    (jump,) = [finding for finding in findings if finding.code == "data-change"]
    assert jump.cause.endswith("or the policy breaks: the reward falls from step 41 on")


def test_what_changed_as_a_fall_began_and_came_back_is_told():
    """Answers shrink to a few tokens as the reward is lost, and are long again at the end, without a reward."""
    draw = random.Random(8)
    rows = []
    for step in range(1, 81):
        is_lost = step > 20
        length = 4 if 20 < step <= 50 else 200
        reward = 0.02 * draw.random() if is_lost else 0.85 + 0.03 * draw.random()
        rows.append(
            {"step": step, "reward": reward, "completions/mean_length": length + draw.random(), "kl": 0.1}
        )
    (fall,) = [finding for finding in log_findings(rows) if finding.code == "collapse"]
    clause = (
        r"; as it began, completions/mean_length was 4\.\d+, where it was 20[01] in that best part and is 20[01] at "
        "the end$"
    )
    assert re.search(clause, fall.cause)


def test_a_jump_in_a_fall_is_no_change_of_prompts_and_what_follows_the_fall_leads_to_it():
    """The policy becomes random, so that lengths jump when most of the reward is gone already."""
    draw = random.Random(2)
    rows = []
    for step in range(1, 81):
        is_lost = step > 55
        reward = 0.85 if step <= 45 else 0.85 - 0.08 * (step - 45)
        rows.append(
            {
                "step": step,
                "reward": max(0.01 * draw.random(), reward + 0.02 * draw.random()),
                "length": 512.0 - draw.random() if is_lost else 250 + 20 * draw.random(),
                "entropy": 4 + draw.random() if is_lost else 0.15 + 0.02 * draw.random(),
            }
        )
    findings = log_findings(rows)
    told = {finding.code: finding for finding in findings if finding.cause}
    assert "data-change" not in told
    assert told["collapse"].onset < told["entropy-rise"].onset
    assert told["entropy-rise"].advice.startswith(
        "look at collapse first, which began before this passed its limit; lower "
    )


@pytest.mark.parametrize("steps", [8, 9, 10])
def test_of_a_few_steps_without_a_right_answer_the_prompts_are_too_hard(steps):
    rows = [{"step": step, "reward": 0.01 * (step % 2), "dead": 1.0} for step in range(1, steps + 1)]
    (signal,) = [finding for finding in log_findings(rows) if finding.code == "no-signal"]
    assert signal.cause.endswith("nearly no answer is right: the prompts are probably too hard")


@pytest.mark.parametrize("spread", [0.0, 0.1925])
def test_a_gradient_of_0_is_no_broken_graph_if_the_rewards_of_each_group_are_equal(spread):
    """Rewards may differ from prompt to prompt. All answers have the length of the cap."""
    rows = []
    for step in range(1, 15):
        reward = 0.1667 if step in (3, 9) else 0.0
        row = {"step": step, "reward": reward, "reward_std": spread if reward else 0.0, "length": 128.0}
        rows.append(row | {"grad_norm": 0.0, "learning_rate": 1e-4 * step, "kl": 0.0})
    told = [finding for finding in log_findings(rows) if finding.ok is False]
    codes = [finding.code for finding in told]
    assert ("no-step" in codes) == (spread > 0)
    assert codes[-2:] == ["truncated", "no-signal"]
    assert told[-2].cause.startswith("the mean length is 128 tokens, and exactly 128 in 14 of 14 log steps")
    assert told[-1].cause.endswith(
        "the prompts are probably too hard, or answers are cut off before their result"
    )


LONG = "answers are less than a quarter longer at the end, or better too"


@pytest.mark.parametrize(
    ("check", "ends", "rises", "passes"),
    [
        (SHORT, (100, 90), False, True),
        (SHORT, (100, 40), True, True),
        (SHORT, (100, 40), False, False),
        (LONG, (100, 115), False, True),
        (LONG, (100, 160), True, True),
        (LONG, (100, 160), False, False),
    ],
)
def test_a_length_that_changes_passes_only_if_the_reward_rises(check, ends, rises, passes):
    first, last = ends
    rows = course(
        60, reward=lambda t: 0.5 + (0.3 if rises else -0.01) * t, length=lambda t: first + (last - first) * t
    )
    results = {finding.tested: finding for finding in log_findings(Log.of(rows).rows)}
    assert results[check].ok is (True if passes else None)
    assert ("the reward did not rise" in results[check].advice) != passes


def test_each_check_that_decides_nothing_says_why():
    for rows in (
        course(5, reward=lambda t: 0.5),
        course(25, reward=lambda t: 0.5, length=lambda t: 50.0, kl=lambda t: 0.01),
        course(200, reward=lambda t: 0.5 + 0.01 * math.sin(300 * t)),
    ):
        undecided = [finding for finding in log_findings(Log.of(rows).rows) if finding.ok is None]
        assert undecided
        assert [finding.tested for finding in undecided if not finding.advice] == []


def test_a_collapse_comes_before_the_lost_signal_that_it_causes():
    """Answers of 2.6 tokens and an entropy of 0.04 come first, and the equal rewards of their groups after them."""
    metrics = {
        "reward": lambda t: 0.3 + 0.01 * math.sin(300 * t),
        "length": lambda t: 53.4 if t < 0.3 else 2.6,
        "entropy": lambda t: 0.53 if t < 0.3 else 0.01,
        "dead": lambda t: 0.2 if t < 0.35 else 0.9,
    }
    assert codes(course(60, **metrics)) == [
        "length-collapse",
        "entropy-collapse",
        "no-signal",
        "run-died",
        "plateau",
    ]
    later = metrics | {"length": lambda t: 53.4 if t < 0.8 else 2.6, "entropy": lambda t: 1.0}
    assert codes(course(60, **later))[:2] == ["no-signal", "length-collapse"]


def test_rewards_that_nearly_all_become_equal():
    flat = {"reward": lambda t: 4.9 + 0.1 * math.sin(300 * t)}
    rows = course(60, **flat, reward_std=lambda t: 0.45 * 0.93 ** (60 * t))
    (finding, plateau) = findings(rows)
    assert (finding.code, finding.severity, plateau.code) == ("no-signal", "fix", "plateau")
    assert "the standard deviation of rewards went 0.352 → 0.00699" in finding.cause
    hot = {"temperature": Value("temperature", 1e-4, "config.yaml")}
    assert "sampled at temperature 0.0001 are nearly identical" in findings(rows, values=hot)[0].cause
    assert codes(course(60, **flat, reward_std=lambda t: 0.45 - 0.3 * t)) == ["plateau"]


def test_updates_and_ratios_that_contradict_each_other():
    idle = {"clip_high": lambda t: 0.0, "clip_low": lambda t: 0.0, "kl_old": lambda t: 0.0}
    (finding,) = findings(course(**idle), updates=2)
    assert (finding.code, finding.severity) == ("on-policy", "look")
    assert "though the settings make 2 updates on each batch" in finding.cause
    (note,) = findings(course(**idle), updates=1)
    assert (note.code, note.severity) == ("on-policy", "note")
    moving = idle | {"kl_old": lambda t: 0.003}
    assert codes(course(**moving), updates=1) == []
    (note,) = findings(
        course(on_policy=lambda t: 1.0, **{"audit/on_policy": lambda t: 1.0}, **idle), updates=2
    )
    assert "every ratio is 1, though the settings make 2 updates" in note.cause


def test_a_kl_that_is_large_in_every_row_is_large():
    """Real values, of which 10 and 15 rows were a drift, 12 and 18 to 27 rows were well, and 30 rows a jump."""
    values = [34.652643, 16.916614, 1.440271, 1.301024, 16.240725, 2.068457, 1.603288, 4.164466, 4.858206]
    values += [3395.370618, 1006.709201, 2.94966] + [2.1, 1.9, 6.0, 1.4, 3.3, 2.2] * 6
    for count in range(8, 47):
        rows = [{"step": 10.0 * k, "reward": 0.1 * (k % 7), "kl": values[k]} for k in range(1, count + 1)]
        rows = [
            {"step": 10.0, "reward": 0.1, "kl": values[0]},
            *({**row, "step": row["step"] + 10} for row in rows),
        ]
        first = findings(rows[:count])[0]
        assert first.code in ("reference-kl", "kl-drift"), (count, first)
        assert first.ok is False


@pytest.mark.parametrize("rows", [8, 12, 20, 27, 40, 80])
def test_one_large_kl_of_the_estimator_is_no_drift(rows):
    """k3 has rare values that are a thousand times the others."""
    log = course(rows, kl=lambda t: 0.02)
    log[-1]["kl"] = 40.0
    assert "kl-drift" not in codes(log)
    passed = [finding.tested for finding in log_findings(log) if finding.ok]
    assert ("the policy stays near the reference" in passed) == (rows > 400)


def notes(rows):
    """Return the headline and the notes of a log, but for that on its simulated metrics which are always the same."""
    log = Log.of(rows)
    diagnosis = Diagnosis(log_findings(log.rows), rows=log.rows, log=log)
    told = [note for note in diagnosis.as_json()["notes"] if not note.startswith("one value in all")]
    return diagnosis.headline, told, diagnosis


def test_entropy_that_falls_in_learning_is_told_and_is_no_finding():
    rows = course(100, reward=lambda t: 0.05 + 0.75 * t, entropy=lambda t: 0.5 * math.exp(-3 * t))
    headline, told, diagnosis = notes(rows)
    assert headline.startswith("ok: nothing is wrong in what could be tested (")
    assert told == ["entropy fell by 93% while the reward rose from 0.091 to 0.77, as it does in learning"]
    assert diagnosis.as_text().count(told[0]) == diagnosis.as_markdown().count(told[0]) == 1
    assert diagnosis.healthy


@pytest.mark.parametrize(
    "metrics",
    [
        {"entropy": lambda t: 0.5 - 0.2 * t},
        {"entropy": lambda t: 0.0},
        {"entropy": lambda t: -0.04 - 0.1 * t},
        {"entropy": lambda t: 0.5 + 0.4 * t},
        {"entropy": lambda t: math.exp(-3 * t), "reward": lambda t: 0.4 + 0.01 * math.sin(300 * t)},
    ],
)
def test_entropy_that_falls_little_or_without_a_higher_reward_is_not_called_learning(metrics):
    assert "as it does in learning" not in notes(course(100, **metrics))[2].as_text()


def test_entropy_that_falls_in_learning_is_not_told_beside_a_finding_or_without_a_verdict():
    fall = {"entropy": lambda t: 0.5 * math.exp(-3 * t)}
    headline, told, _ = notes(course(100, **fall, **{"completions/clipped_ratio": lambda t: 0.9}))
    assert (headline.split(":")[0], told) == ("truncated", [])
    headline, told, _ = notes(course(8, **fall))
    assert headline.split(":")[0] == "no verdict"
    needed, values = told
    assert needed.startswith("a verdict needs a log of about 10 steps; 30 log steps")
    assert values.startswith(
        "not judged, first → last log step (largest and smallest, if between): reward 0.125 → 1"
    )


LOW = {"entropy": lambda t: 0.05, "reward": lambda t: 0.4 + 0.01 * math.sin(300 * t)}


@pytest.mark.parametrize(
    ("metrics", "is_said"),
    [
        ({}, True),
        ({"length": lambda t: 40.0}, True),
        ({"length": lambda t: 90.0}, True),
        # An answer of so many tokens has many courses, however few a token has.
        ({"length": lambda t: 2000.0}, False),
        ({"reward": lambda t: t}, False),
        ({"entropy": lambda t: 0.2}, False),
    ],
)
def test_low_entropy(metrics, is_said):
    assert ("low-entropy" in codes(course(**LOW | metrics))) == is_said


def test_low_entropy_is_that_of_an_answer_too():
    found = findings(course(**LOW, length=lambda t: 40.0 + math.sin(200 * t)))
    [cause] = [finding.cause for finding in found if finding.code == "low-entropy"]
    assert cause.startswith("entropy is 0.05 nats per token at the start, 2 in an answer of ")
    assert cause.endswith(" tokens: there is little to explore")


@pytest.mark.parametrize(
    "metrics", [{"kl": lambda t: 0.004 * t, "entropy": lambda t: 1.0}, {"learning_rate": lambda t: 2e-7}]
)
def test_hardly_moves(metrics):
    rows = course(200, reward=lambda t: 0.3 + 0.01 * math.sin(300 * t), **metrics)
    assert codes(rows) == ["hardly-moves", "plateau"]
    assert codes(course(200, **metrics)) == []


def test_a_kl_of_the_other_sign_is_no_small_one():
    """Loops of one's own log the mean of log π_ref − log π, which is below 0."""
    functions = {"reward": lambda t: 0.3 + 0.01 * math.sin(300 * t), "entropy": lambda t: 1.0}
    assert codes(course(200, kl=lambda t: 0.005 - 0.5 * t, **functions)) == ["plateau"]
    assert codes(course(200, kl=lambda t: 0.001 - 0.005 * t, **functions)) == ["hardly-moves", "plateau"]


@pytest.mark.parametrize("name", ["entropy", "length"])
def test_late_change(name):
    (finding,) = findings(course(80, **{name: lambda t: 1.0 if t < 0.9 else 1.9}))
    assert (finding.code, finding.severity, finding.onset) == ("late-change", "look", 73)


def test_engine_mismatch_and_stale():
    (finding,) = findings(course(mismatch=lambda t: 0.42 if t > 0.5 else 0.2, staleness=lambda t: 2.0))
    assert (finding.code, finding.or_else) == ("engine-mismatch", ("stale",))
    assert "data is 2 updates old" in finding.cause
    assert codes(course(importance_weight=lambda t: 0.1)) == ["engine-mismatch"]
    assert codes(course(mismatch=lambda t: 0.02, importance_weight=lambda t: 1.01)) == []
    assert codes(course(staleness=lambda t: 9.0)) == ["stale"]


def test_a_finding_says_what_it_has_cost():
    (finding,) = findings(course(kl=lambda t: 3 * t**3, step_time=lambda t: 360.0))
    assert finding.cost == f"{(41 - finding.onset) / 10:.2g} of 4 hours on each GPU"
    (finding,) = findings(course(kl=lambda t: 3 * t**3))
    assert finding.cost == f"{41 - finding.onset:.0f} of 40 log steps"


def test_faults_come_before_what_is_worth_a_look_and_a_plateau_last():
    rows = course(80, reward=lambda t: 0.3 + 0.02 * math.sin(300 * t), cut=lambda t: 0.9, **COMPONENTS)
    found = findings(rows)
    assert [finding.code for finding in found] == ["truncated", "component-constant", "plateau"]
    assert [finding.severity for finding in found] == ["fix", "look", "look"]


def test_advice_names_the_settings_of_the_framework():
    (finding,) = findings(course(kl=lambda t: 3 * t**3), framework="trl")
    assert "(learning_rate) or raise the weight of the KL term (beta)" in finding.advice
    (finding,) = findings(course(kl=lambda t: 3 * t**3), framework="a framework without a table")
    assert "learning rate or raise the weight" in finding.advice


def test_statistics():
    assert find_jump([float(t) for t in range(100)]) is None
    assert find_spikes([0.0, 1.0] * 20, 15.0) == []
    assert fit_weights([1.0, 2.0, 3.0], [[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]]) is None
    metric = Series(list(range(1, 101)), [0.0] * 50 + [1.0] * 50)
    assert onset(metric, lambda mean: mean > 0.5) == pytest.approx(51, abs=3)


def test_the_time_of_a_log_grows_with_its_rows():
    """With components of the reward and longer answers. A mean computed anew for each row would make it minutes."""
    components = {f"rewards/{k}/mean": lambda t, k=k: math.sin(1e4 * k * t) for k in (1, 2, 3)}
    rows = course(50_000, length=lambda t: 300 + 300 * t, kl=lambda t: 0.01 * t, **components)
    start = time.process_time()
    assert codes(rows) == []
    assert time.process_time() - start < 6


# --- Logs of other people on which an earlier version was wrong ---

WILD = Path(os.environ.get("BANDPO_TEST_DATA", "missing")) / "logs/wild"

WRONG_BEFORE = {
    "F1_kl34_ok_12rows.csv": ("kl-drift or reference-kl", "the policy stays near the reference"),
    "F1_kl2_near_reference_passed.jsonl": ("reference-kl", "the policy stays near the reference"),
    "F2_verl_group_of_one.log": ("no-baseline", "a baseline is subtracted from rewards"),
    "F8_mini_batch_assertion": ("no-baseline", "a baseline is subtracted from rewards"),
    "F10_slime_46pct_truncated_passed.txt": ("truncated", "most answers are finished"),
    "F12_reward_std_falls.jsonl": ("no-signal", "half of the groups or more carry signal"),
}
"""For each file the first code, and the property that does not hold."""


@pytest.mark.skipif(not WILD.is_dir(), reason="BANDPO_TEST_DATA has no logs/wild")
@pytest.mark.parametrize("name", WRONG_BEFORE)
def test_a_log_on_which_an_earlier_version_was_wrong(name):
    code, property_ = WRONG_BEFORE[name]
    diagnosis = diagnose(WILD / name)
    assert diagnosis.headline.startswith(code)
    assert property_ not in diagnosis.passed
    # A run that has trained is not told what stops runs before their first step.
    assert "stops with an assertion" not in diagnosis.as_text(verbose=True)
    for line in str(diagnosis).splitlines():
        assert not line.startswith(("passed", "undecided"))


def critic(**metrics):
    """Return a log of PPO whose critic learns, with some metrics replaced."""
    learning = {
        "explained_variance": lambda t: 0.6 - math.exp(-20 * t),
        "value_loss": lambda t: 0.1 + math.exp(-30 * t),
        "critic_grad_norm": lambda t: 4.0 + 20 * math.exp(-30 * t),
    }
    return course(60, **learning | metrics)


def test_a_critic_that_explains_nothing():
    (finding,) = findings(critic(explained_variance=lambda t: -0.2 + 0.1 * math.sin(90 * t)))
    assert (finding.code, finding.severity, finding.onset) == ("critic-no-fit", "look", 1)
    assert codes(critic()) == []
    assert codes(critic(explained_variance=lambda t: 0.2)) == []
    # Rewards that are all equal have no variance to explain.
    assert "critic-no-fit" not in codes(critic(explained_variance=lambda t: -9.0, reward=lambda t: 0.5))


@pytest.mark.parametrize("name", ["value_loss", "critic_grad_norm"])
def test_a_critic_that_diverges(name):
    (finding,) = findings(critic(**{name: lambda t: 5.0 * (1 + 140 * max(0.0, t - 0.5)) + math.sin(80 * t)}))
    assert (finding.code, finding.severity) == ("critic-diverges", "fix")
    assert 34 <= finding.onset <= 40
    assert finding.quantities == (name,)


def test_a_critic_that_is_worse_than_the_mean_diverges():
    (finding,) = findings(critic(explained_variance=lambda t: 0.4 if t < 0.4 else -5.0 + math.sin(80 * t)))
    assert (finding.code, finding.quantities) == ("critic-diverges", ("explained_variance",))
    assert "explained variance -5" in finding.cause


def test_one_large_loss_of_a_critic_is_none_that_diverges():
    rows = critic(value_loss=lambda t: 0.1 + 0.01 * math.sin(80 * t))
    rows[-2]["value_loss"] = 40.0
    assert codes(rows) == []


# --- What was said wrongly of logs by others ---


def findings_of(rows, setup=None):
    return {
        finding.code: finding for finding in log_findings(Log.of(rows).rows, setup) if finding.code != "ok"
    }


def noisy(steps=60, seed=1, **metrics):
    """Return rows with a flat, noisy reward and metrics that may be functions of the step."""
    draw = random.Random(seed)
    rows = []
    for step in range(1, steps + 1):
        row = {"step": step, "reward": 0.4 + 0.1 * draw.random(), "grad_norm": 0.3 + 0.1 * draw.random()}
        for key, value in metrics.items():
            row[key] = value(step) if callable(value) else value
        rows.append(row)
    return rows


def test_a_first_kl_of_more_than_another_model_has_is_a_drift():
    """At step 10 the KL is 35 and it was thousands later; 0.5 at step 10 may be of another reference."""

    def every_tenth(first, rest):
        rows = noisy(kl=lambda step: first if step == 1 else rest * (1 + step % 3 / 10))
        return findings_of([row | {"step": 10 * row["step"]} for row in rows])

    assert "kl-drift" in every_tenth(34.7, 20.0)
    assert "reference-kl" not in every_tenth(34.7, 20.0)
    assert "reference-kl" in every_tenth(0.5, 0.4)


@pytest.mark.parametrize(("band", "is_constant"), [(0.0, True), (0.004, True), (0.05, False)])
def test_a_component_within_a_narrow_band_is_constant(band, is_constant):
    draw = random.Random(2)
    rows = noisy()
    for row in rows:
        row["rewards/env/mean"] = 0.962 + band * draw.random()
        row["rewards/format/mean"] = draw.random()
    assert ("component-constant" in findings_of(rows)) is is_constant


@pytest.mark.parametrize(
    ("mean", "longest", "is_cut"), [(8300, 8592, True), (4000, 8592, False), (18, 19, False)]
)
def test_the_longest_answer_of_every_step_is_the_cap(mean, longest, is_cut):
    """AReaL logs no share of answers cut off. Short answers may all have one length."""
    draw = random.Random(3)
    rows = noisy(length=lambda step: mean * (1 - 0.01 * draw.random()), length_max=longest)
    log = Log.of(rows, names={"length": "length", "length_max": "length_max"})
    assert ("truncated" in {finding.code for finding in log_findings(log.rows)}) is is_cut


def test_the_share_is_of_whole_batches_if_trl_scales_by_the_batch():
    setup = Setup("trl", values={"reward scale": Value("scale_rewards", "batch", "run.py")})
    alive = noisy(frac_reward_zero_std=0.0)
    dead = noisy(frac_reward_zero_std=1.0)
    by_name = {finding.subject: finding for finding in log_findings(Log.of(alive).rows, setup)}
    assert by_name["groups with equal rewards"].ok is None
    finding = findings_of(dead, setup)["no-signal"]
    assert finding.cause.startswith("100% of batches teach nothing")


def test_a_loss_of_0_beside_a_gradient_that_lives_is_not_lost():
    """The loss is 0 where every ratio is 1; without a gradient norm, it is lost."""
    draw = random.Random(4)
    rows = noisy(loss=lambda step: 0.0 if step > 30 else draw.gauss(0, 0.01))
    assert "metric-lost" not in findings_of(rows)
    for row in rows:
        del row["grad_norm"]
    assert "metric-lost" in findings_of(rows)


@pytest.mark.parametrize(("first", "is_known"), [(0.001, True), (0.18, False)])
def test_the_first_kl_of_a_resumed_run_is_not_that_before_any_update(first, is_known):
    """Its steps begin at 1 again, and its epoch at 0.18."""
    rows = noisy(kl=lambda step: 0.2 if step == 1 else 0.1, epoch=lambda step: first + 0.001 * step)
    assert ("reference-kl" in findings_of(rows)) is is_known


@pytest.mark.parametrize(
    ("rewards", "onset", "cause"),
    [
        # Single other values do not cut the part in two.
        ([0.0] * 20 + [0.1] + [0.0] * 2 + [0.1] + [0.0] * 25, 1, "in 47 of all 49 log steps, from step 1 on"),
        # The part does not begin before the reward became constant.
        (
            [0.0, *(0.01 * k for k in range(1, 14))] + [0.0] * 400,
            15,
            "in every one of the last 400 log steps",
        ),
        (
            [0.2, 0.3] * 20 + [0.0] * 19 + [0.1] + [0.0] * 20,
            41,
            "in 39 of the last 40 log steps, from step 41 on",
        ),
    ],
)
def test_a_constant_reward_begins_where_it_became_constant(rewards, onset, cause):
    rows = [{"step": float(step), "reward": value} for step, value in enumerate(rewards, 1)]
    [found] = [finding for finding in findings(rows) if finding.code == "reward-flat"]
    assert found.onset == onset
    assert cause in found.cause


def test_norms_that_alternate_between_two_levels_have_no_spikes():
    """Large norms among small ones are spikes, unless there are many of their size around them."""
    alone = {20: 6.0, 45: 6.0, 70: 6.0}
    spikes = course(100, grad_norm=lambda t: alone.get(round(100 * t), 0.3))
    assert codes(spikes) == ["gradient-spikes"]
    beside = {row + distance: 4.0 for row in alone for distance in (-4, -2, 2)} | alone
    alternating = course(100, grad_norm=lambda t: beside.get(round(100 * t), 0.3))
    assert codes(alternating) == []


def test_a_kl_that_comes_back_for_a_time_is_large_since_it_first_was():
    spells = {"kl": lambda t: 1.5 if 0.2 < t <= 0.5 or t > 0.7 else 0.05 if t <= 0.2 else 0.5}
    [drift] = [finding for finding in findings(course(200, **spells)) if finding.code == "kl-drift"]
    assert 41 <= drift.onset <= 50


@pytest.mark.parametrize(
    ("reward", "rose"),
    [
        (lambda t: 0.84 + 0.09 * t, True),
        (lambda t: 0.84 + 0.02 * math.sin(300 * t), False),
        (lambda t: 8.4 + 0.2 * t, False),
    ],
)
def test_a_reward_near_its_best_rises_by_what_is_missing(reward, rose):
    fall = {"entropy": lambda t: 0.4 * math.exp(-3 * t)}
    assert ("entropy-collapse" in codes(course(200, reward=reward, **fall))) != rose


@pytest.mark.parametrize(("reward", "is_told"), [(lambda t: 0.4 + 0.4 * t, True), (lambda t: 0.4, False)])
def test_a_reward_that_rises_though_all_answers_are_cut_off_is_told(reward, is_told):
    [cut] = [f for f in findings(course(60, reward=reward, cut=lambda t: 1.0)) if f.code == "truncated"]
    assert ("the reward went 0.423 → 0.783 all the same" in cut.cause) == is_told


def test_no_length_of_finished_answers_is_lost_where_all_are_cut_off():
    rows = course(100, cut=lambda t: 1.0, length_finished=lambda t: 14.0 if 0.3 < t < 0.4 else 0.0)
    assert "metric-lost" not in codes(rows)


@pytest.mark.parametrize(("end", "is_told"), [(0.02, True), (0.5, False)])
def test_a_plateau_names_a_learning_rate_that_is_spent(end, is_told):
    rows = course(
        60,
        reward=lambda t: 0.4 + 0.01 * math.sin(300 * t),
        learning_rate=lambda t: 1e-6 * (1 + (end - 1) * t),
    )
    [plateau] = [finding for finding in findings(rows) if finding.code == "plateau"]
    assert ("the learning rate has fallen to 2e-8 at the end, from 9.84e-7" in plateau.cause) == is_told


def test_a_rise_before_the_later_half_does_not_show_that_it_rises_there():
    """A steep rise in which the change point lies, and then no rise."""
    level = course(200, reward=lambda t: min(0.36, 0.15 + 1.5 * t) + 0.02 * math.sin(3000 * t))
    for row in level[:100]:
        row["reward"] += 0.0001 * row["step"]
    of_reward = [
        one
        for one in log_findings(level, Setup())
        if one.tested == "the reward is not flat for half of the run"
    ]
    assert of_reward[0].ok is not True


@pytest.mark.parametrize(
    ("metrics", "is_told"),
    [
        ({"group_reward_all_zero_rate": lambda t: 0.59}, True),
        ({"group_reward_all_zero_rate": lambda t: 0.3}, False),
        ({"group_reward_all_zero_rate": lambda t: 5.0}, False),
        ({"solve_none": lambda t: 0.8}, True),
        ({"train/solved_none": lambda t: 0.8}, True),
        ({"all_zero_padding": lambda t: 0.8}, False),
        ({"group_reward_all_zero_rate": lambda t: 0.59, "dead": lambda t: 0.1}, False),
        ({"my_rate": lambda t: 0.8}, False),
    ],
)
def test_a_share_of_groups_without_a_right_answer_is_a_lower_bound_of_those_without_signal(metrics, is_told):
    found = [finding for finding in findings(course(60, **metrics)) if finding.code == "no-signal"]
    assert bool(found) == is_told
    if is_told:
        (key,) = metrics
        assert f"by {key}: no answer of such a group is right" in found[0].cause
        assert found[0].cause.startswith("at least ")
        assert found[0].onset == 1


@pytest.mark.parametrize(("reward", "is_told"), [(lambda t: 0.0, True), (lambda t: round(t, 2), False)])
def test_steps_without_any_spread_have_their_mean_reward(reward, is_told):
    rows = course(60, dead=lambda t: 1.0)
    for number, row in enumerate(rows):
        has_spread = number % 4 == 0
        row["dead"] = 0.5 if has_spread else 1.0
        row["reward"] = -0.2 - 0.001 * number if has_spread else reward(number / 60)
    (finding,) = [one for one in findings(rows) if one.code == "no-signal"]
    text = "in 45 of 60 log steps no group has any spread, with a mean reward of 0"
    assert (text in finding.cause) == is_told


def test_few_groups_without_a_right_answer_show_no_signal():
    """Those whose answers are all right have none either."""
    (check,) = [
        finding
        for finding in log_findings(Log.of(course(60, solve_none=lambda t: 0.1)).rows)
        if finding.tested == "half of the groups or more carry signal"
    ]
    assert check.ok is None


def test_a_share_of_cut_off_answers_that_fell_is_not_as_from_the_start():
    shares = {"cut": lambda t: 0.8 if t < 0.3 else 0.35}
    [cut] = [finding for finding in findings(course(100, **shares)) if finding.code == "truncated"]
    assert cut.cause.endswith("in the later half, down from 80% in the first tenth")


def test_a_fall_of_the_length_says_when_half_of_it_was_over_and_what_the_reward_was_between():
    draw = random.Random(4)
    rows = []
    for step in range(1, 31):
        length = 350 - 200 * min(1, step / 10) - 120 * max(0, (step - 10) / 20)
        reward = 0.6 if 6 <= step <= 15 else 0.35
        rows.append({"step": step, "length": length, "reward": reward + draw.gauss(0, 0.02)})
    (finding,) = [one for one in log_findings(rows) if one.code == "length-collapse"]
    middle = (fmean(row["length"] for row in rows[:3]) + fmean(row["length"] for row in rows[-3:])) / 2
    half = next(row["step"] for row in rows if row["length"] < middle)
    assert half < finding.onset
    assert f"the length had lost half of this by step {half}" in finding.cause
    best = max(fmean(row["reward"] for row in rows[first : first + 3]) for first in range(0, 30, 3))
    assert finding.cause.endswith(f"in the best tenth of the run, the reward was {best:.3g}")


@pytest.mark.parametrize("late", [0, 2])
def test_jumps_of_one_event_have_their_own_steps(late):
    draw = random.Random(late)
    rows = []
    for step in range(1, 101):
        length = (500 if step > 50 + late else 200) + draw.gauss(0, 5)
        reward = (0.1 if step > 50 else 0.8) + draw.gauss(0, 0.02)
        rows.append({"step": step, "length": length, "reward": reward})
    (finding,) = [one for one in log_findings(rows) if one.code == "data-change"]
    assert finding.onset == 51
    if late:
        pattern = r"at step 51, reward 0\.\d+ → 0\.\d+; at step 53, length \d+ → \d+, nearly at once"
    else:
        pattern = r"at step 51, reward 0\.\d+ → 0\.\d+, length \d+ → \d+, all at once"
    assert re.match(pattern, finding.cause)


def test_entropy_that_rises_begins_to_where_twice_its_start_is_passed():
    """It is a fault only above one nat more, at step 71, and the reward is lost before that."""
    draw = random.Random(2)
    rows = []
    for step in range(1, 101):
        entropy = 0.15 + 0.04 * max(0, step - 45) + draw.gauss(0, 0.005)
        reward = (0.8 if step < 62 else 0.1) + draw.gauss(0, 0.02)
        rows.append({"step": step, "entropy": entropy, "reward": reward})
    findings = [finding for finding in log_findings(rows) if finding.ok is False]
    assert [finding.code for finding in findings] == ["entropy-rise", "collapse"]
    assert 48 <= findings[0].onset <= 52
    assert all(finding.advice.endswith(f"before step {findings[0].onset:.0f}") for finding in findings)


def test_a_fall_that_is_not_sure_says_how_large_a_sure_one_is():
    rewards = [0.62, 0.48, 0.7, 0.55, 0.66, 0.4, 0.6, 0.35, 0.52, 0.3, 0.5, 0.33, 0.45, 0.3, 0.38]
    (check,) = [
        finding
        for finding in log_findings(
            [{"step": step, "reward": reward} for step, reward in enumerate(rewards, 1)]
        )
        if finding.tested == "the reward does not collapse"
    ]
    assert check.ok is None
    match = re.search(
        r"([\d.]+) → ([\d.]+) from the best of 5 parts of the run to the last, where a fall of ([\d.]+) would be sure",
        check.advice,
    )
    blocks = [fmean(rewards[first : first + 3]) for first in range(0, 15, 3)]
    assert float(match[1]) == pytest.approx(max(blocks), rel=0.01)
    assert float(match[2]) == pytest.approx(blocks[-1], rel=0.01)
    assert float(match[3]) > max(blocks) - blocks[-1]


@pytest.mark.parametrize("count", [16, 25])
def test_what_is_near_a_limit_is_told_of_a_run_without_a_finding(count):
    rows = [
        {"step": step, "reward": 0.6 - 0.002 * step, "length": 100.0 if step < 0.7 * count else 22.0}
        for step in range(1, count + 1)
    ]
    log = Log.of(rows)
    diagnosis = Diagnosis(log_findings(log.rows), rows=log.rows, log=log)
    (line,) = [line for line in diagnosis.remarks if line.startswith("near a limit")]
    assert line == "near a limit: the length has fallen to 22% while the reward did not rise, but not to 20%"
    assert line in str(diagnosis).splitlines()


def test_what_is_near_a_limit_is_not_told_beside_a_finding():
    rows = [{"step": step, "reward": float(step < 40), "length": 100.0 - step} for step in range(1, 71)]
    log = Log.of(rows)
    diagnosis = Diagnosis(log_findings(log.rows), rows=log.rows, log=log)
    assert "collapse" in [finding.code for finding in diagnosis.findings]
    assert diagnosis.near_limits == []


def test_rows_of_the_fall_are_none_of_what_was_before():
    """With four rows in a tenth, the best one has the first row of the fall."""
    rows = []
    for step in range(1, 41):
        is_lost = step >= 4
        rows.append(
            {
                "step": step,
                "reward": 0.0 if step > 4 else 0.9 - 0.7 * is_lost,
                "entropy": 3.0 if is_lost else 0.2,
            }
        )
    (finding,) = [one for one in log_findings(rows) if one.code == "collapse"]
    assert finding.onset == 4
    assert finding.cause.startswith(
        "reward 0.9 → 0, entropy 0.2 → 3, from the best tenth of the run before step 4 to the last"
    )


@pytest.mark.parametrize(
    ("kl", "rate", "found"),
    [
        (1.1, 3e-7, ["hardly-moves"]),
        (1.1, 1e-5, []),
        (0.001, 1e-5, ["hardly-moves"]),
        (None, 3e-7, ["hardly-moves"]),
    ],
)
def test_a_kl_that_was_large_from_the_start_shows_no_movement(kl, rate, found):
    draw = random.Random(3)
    rows = []
    for step in range(1, 161):
        row = {"step": step, "reward": 0.3 + draw.gauss(0, 0.05), "learning_rate": rate}
        rows.append(row if kl is None else row | {"kl": kl * (1 + draw.gauss(0, 0.05))})
    findings = log_findings(rows)
    assert [finding.code for finding in findings if finding.code == "hardly-moves"] == found
    (check,) = [finding for finding in findings if finding.tested == "the policy moves"]
    assert check.ok is None


def test_a_large_kl_that_changes_shows_movement():
    rows = [
        {"step": step, "reward": 0.3 + 0.01 * (step % 5), "learning_rate": 3e-7, "kl": 1.1 + step / 100}
        for step in range(1, 161)
    ]
    (check,) = [finding for finding in log_findings(rows) if finding.tested == "the policy moves"]
    assert check.ok


def test_a_part_without_lengths_at_the_cap_is_told():
    draw = random.Random(6)
    rows = []
    for step in range(1, 201):
        length = 256.0 if step % 5 == 0 and not 60 < step <= 130 else 225 + 20 * draw.random()
        rows.append({"step": step, "reward": 0.2 + 0.1 * draw.random(), "length": length})
    (finding,) = [one for one in log_findings(rows) if one.code == "truncated"]
    assert finding.onset == 5
    assert finding.cause.endswith("; none of them is from step 61 to 134")


def test_a_cap_that_is_reached_in_few_steps_is_told_where_nothing_is_decided():
    draw = random.Random(6)
    rows = []
    for step in range(1, 201):
        length = 256.0 if step % 20 == 0 else 205 + 20 * draw.random()
        rows.append({"step": step, "reward": 0.2 + 0.1 * draw.random(), "length": length})
    (check,) = [one for one in log_findings(rows) if one.tested == "most answers are finished"]
    assert check.ok is None
    assert check.advice.startswith(
        "the mean length is exactly 256 in 10 of 200 log steps, which may be the cap"
    )


def test_entropy_that_rose_before_it_was_lost_is_told():
    rows = []
    for step in range(1, 101):
        entropy = 0.4 if step <= 20 else 6.0 if step <= 50 else 0.001
        rows.append({"step": step, "reward": 0.3 + 0.01 * (step % 5), "entropy": entropy})
    (finding,) = [one for one in log_findings(rows) if one.code == "entropy-collapse"]
    assert finding.onset == 51
    assert finding.cause.partition(": the policy has stopped exploring")[0].endswith(
        ", after the entropy had risen to 6 (mean of a tenth of the run)"
    )


def test_a_value_that_repeats_after_a_fall_may_be_its_effect():
    draw = random.Random(9)
    rows = []
    for step in range(1, 101):
        reward = (0.8 if step < 40 else 0.1) + draw.gauss(0, 0.02)
        weight = 1.0 if step >= 60 else 0.9 + 0.05 * draw.random()
        rows.append({"step": step, "reward": reward, "importance_weight": weight})
    (finding,) = [one for one in log_findings(rows) if one.code == "metric-lost"]
    assert finding.onset == 60
    assert finding.advice.startswith("look at collapse first, which began before")


@pytest.mark.parametrize("place", [{"step": 800}, {"epoch": 0.8}])
def test_a_log_that_lacks_the_start_of_its_run_says_nothing_of_the_start(place):
    """Its first KL is that of a policy which has moved, and its reward may have risen before."""
    draw = random.Random(8)
    rows = []
    for number in range(1, 61):
        row = {"step": number + place.get("step", 0), "reward": 0.7 + draw.gauss(0, 0.05), "dead": 0.8}
        if "epoch" in place:
            row["epoch"] = place["epoch"] + number / 1000
        rows.append(row | {"kl": 0.35 * (1 + draw.gauss(0, 0.1))})
    log = Log.of(rows)
    findings = {finding.code: finding for finding in log_findings(log.rows) if finding.cause}
    assert "reference-kl" not in findings
    assert findings["no-signal"].severity == "look"
    assert "the whole log" in findings["plateau"].cause
    first = "epoch 0.801" if "epoch" in place else "step 801"
    diagnosis = Diagnosis(log_findings(log.rows), rows=log.rows, log=log)
    assert f"the log begins at {first}: the start of the run is missing" in str(diagnosis)
    whole = [{**row, "step": number} for number, row in enumerate(rows, 1)]
    for row in whole:
        row.pop("epoch", None)
    assert "reference-kl" in [finding.code for finding in log_findings(whole)]


def test_answers_that_were_cut_off_for_a_while_cost_that_while():
    draw = random.Random(5)
    rows = []
    for step in range(1, 101):
        share = 0.9 if 41 <= step <= 50 else 0.0
        rows.append(
            {"step": step, "reward": 0.5 + draw.gauss(0, 0.02), "cut": share, "length": 200.0 + step % 7}
        )
    (finding,) = [one for one in log_findings(rows) if one.code == "truncated"]
    assert (finding.onset, finding.cost) == (41, "10 of 100 log steps, up to step 50")
    # Of the steps in which most were cut off, and not of a tenth of the run.
    for row in rows[36:54]:
        row["cut"] = 0.9
    rows[38]["cut"] = 0.0
    (finding,) = [one for one in log_findings(rows) if one.code == "truncated"]
    assert (finding.onset, finding.cost) == (40, "15 of 100 log steps, up to step 54")
    assert "from step 40 to 54" in finding.cause
    assert finding.advice.startswith("see what an answer gains by ending")


def test_an_onset_stays_where_it_is_as_the_log_grows():
    """Values that are low from step 71 on come near the limit for some rows now and then."""
    draw = random.Random(32)
    steps = list(range(1, 201))
    values = []
    for step in steps:
        level = 0.97 if step < 71 else 0.86 if step % 40 in (0, 1, 2) else 0.7
        values.append(level + draw.gauss(0, 0.02))
    onsets = {
        onset(Series(steps[:length], values[:length]), lambda mean: mean < 0.8) for length in range(80, 201)
    }
    assert onsets <= {71, 72}


@pytest.mark.parametrize("falls", [False, True])
def test_answers_that_grow_while_the_reward_falls_may_be_paid_for_their_length(falls):
    draw = random.Random(5)
    rows = []
    for step in range(1, 16):
        late = max(0, step - 7) / 8
        reward = 0.65 - (0.25 * late if falls else 0) + draw.gauss(0, 0.01)
        rows.append({"step": step, "reward": reward, "cut": 0.1 + 0.5 * late, "length": 340 + 130 * late})
    (finding,) = [one for one in log_findings(rows) if one.code == "truncated"]
    assert finding.cause.endswith("; answers grow at the end, while the reward falls") == falls
    assert (
        finding.advice.startswith("see whether the reward pays for long answers; allow longer answers")
        == falls
    )


def test_the_best_tenth_before_a_fall_is_a_whole_tenth():
    """The fall begins within the best tenth."""
    draw = random.Random(11)
    rows = []
    for step in range(1, 101):
        reward = 0.05 if step > 66 else 0.9 if step > 60 else 0.3
        rows.append({"step": step, "reward": reward + draw.gauss(0, 0.01)})
    (finding,) = [one for one in log_findings(rows) if one.code == "collapse"]
    match = re.match(
        r"reward ([\d.]+) → [\d.]+, from the best tenth of the run before step (\d+)", finding.cause
    )
    assert match, finding.cause
    onset_row = int(match[2]) - 1
    rewards = [row["reward"] for row in rows[:onset_row]]
    assert float(match[1]) == pytest.approx(fmean(rewards[-10:]), abs=0.005)
