"""Findings know each other's onsets: the order in which a run broke, the checkpoint to go back to, and effects."""

import math
import random
import re

import pytest

from rlvet.checks.course import Series
from rlvet.checks.diagnosis import Diagnosis
from rlvet.checks.log.results import half_step
from rlvet.checks.log_checks import log_findings
from rlvet.checks.registry import LOGS
from rlvet.runs.logs import Log
from rlvet.runs.setup import Setup


def diagnose_rows(rows, setup=None):
    log = Log.of(rows)
    return Diagnosis(log_findings(log.rows, setup), setup or Setup(), log.rows, log=log)


def found(diagnosis, code):
    """Return the one finding of a code."""
    (finding,) = [finding for finding in diagnosis.findings if finding.code == code]
    return finding


def blown_up(norms=(12, 35, 60, 20), *, seed=7, breaks_at=41, steps=60, level=3.0):
    """Return a log that learns, until its gradient norm jumps and everything breaks.

    Args:
        norms: The gradient norms from there on.
        seed: The seed of the noise.
        breaks_at: The step of the first of them.
        steps: Log steps.
        level: The gradient norm after them.
    """
    draw = random.Random(seed)
    rows = []
    for step in range(1, steps + 1):
        since = step - breaks_at + 1
        row = {
            "step": step,
            "reward": 0.1 + 0.5 * min(1, step / 30) + draw.gauss(0, 0.02),
            "kl": 5e-4 * step,
            "entropy": 0.9 - 0.006 * step + draw.gauss(0, 0.02),
            "grad_norm": 0.4 + abs(draw.gauss(0, 0.08)),
        }
        if since > 0:
            row["reward"] = 0.55 * 0.6**since
            row["kl"] = 0.02 * 2.2 ** min(since, 8)
            row["entropy"] = 0.65 + 0.5 * min(since, 8) + draw.gauss(0, 0.05)
            row["grad_norm"] = norms[since - 1] if since <= len(norms) else level * draw.uniform(0.5, 1.0)
        rows.append(row)
    return rows


# --- The order in which a run broke ---


def test_the_order_of_onsets_is_told_once_in_each_output():
    diagnosis = diagnose_rows(blown_up())
    onsets = {finding.code: finding.onset for finding in diagnosis.findings}
    assert {"collapse", "entropy-rise", "kl-drift", "gradient-spikes"} <= onsets.keys()
    steps = [one["step"] for one in diagnosis.as_json()["order"]]
    assert steps == sorted(set(onsets.values()))
    assert {code: one["step"] for one in diagnosis.as_json()["order"] for code in one["codes"]} == onsets
    line = diagnosis.order_text
    assert line.startswith("in order: collapse and gradient-spikes from step 41, ")
    assert str(diagnosis).splitlines().count(line) == 1
    assert diagnosis.as_markdown().count(line) == 1


def test_findings_of_one_step_are_told_together():
    rows = [
        {"step": n, "reward": 0.5 if n < 31 else 0.0, "kl": 0.001 if n < 31 else 3.0} for n in range(1, 61)
    ]
    rows = [row | {"completions/clipped_ratio": 0.0 if row["step"] < 45 else 0.9} for row in rows]
    text = diagnose_rows(rows).order_text
    assert text == "in order: kl-drift, collapse and reward-flat from step 31, truncated from step 45"


@pytest.mark.parametrize("shape", ["healthy", "one finding", "one step"])
def test_without_two_onsets_there_is_no_order(shape):
    rows = [{"step": n, "reward": n / 60} for n in range(1, 61)]
    if shape != "healthy":
        rows = [row | {"kl": 0.001 if row["step"] < 31 else 3.0} for row in rows]
    if shape == "one step":
        rows = [row | {"reward": 0.5 if row["step"] < 31 else 0.0} for row in rows]
    diagnosis = diagnose_rows(rows)
    assert diagnosis.order_text == ""
    assert "in order" not in str(diagnosis) + diagnosis.as_markdown()
    assert len(diagnosis.as_json()["order"]) == (shape != "healthy")


# --- The checkpoint to go back to ---


@pytest.mark.parametrize("seed", range(6))
def test_each_advice_to_resume_names_the_first_onset_of_the_run(seed):
    diagnosis = diagnose_rows(blown_up(seed=seed))
    resumed = [finding for finding in diagnosis.findings if "resume" in finding.advice]
    assert {"collapse", "kl-drift", "entropy-rise"} <= {finding.code for finding in resumed}
    assert min(finding.onset for finding in diagnosis.findings) == 41
    assert all("resume from a checkpoint before step 41" in finding.advice for finding in resumed)


def test_no_checkpoint_is_named_if_the_run_was_broken_from_its_start():
    """Its later faults have earlier checkpoints, but those are of a broken policy."""
    rows = [
        {
            "step": n,
            "reward": 0.2 + 0.001 * (n % 7),
            "kl": [0.0, 0.0, 1.3, 3.2][n - 1] if n < 5 else 3.5,
            "entropy": 1.0 if n < 60 else 0.01,
        }
        for n in range(1, 101)
    ]
    diagnosis = diagnose_rows(rows)
    assert found(diagnosis, "entropy-collapse").onset >= 55
    assert not [finding.advice for finding in diagnosis.findings if "resume" in finding.advice]


def test_a_remark_is_no_reason_to_go_further_back():
    """A component that never changes does no harm to a checkpoint."""
    rows = [
        {
            "step": n,
            "reward": n / 60,
            "kl": 0.001 if n < 31 else 3.0,
            "rewards/a/mean": n / 60,
            "rewards/b/mean": 0.0,
        }
        for n in range(1, 61)
    ]
    diagnosis = diagnose_rows(rows)
    assert found(diagnosis, "component-constant").onset == 1
    assert found(diagnosis, "kl-drift").advice.endswith("resume from a checkpoint before step 31")


def test_lost_signal_is_no_reason_to_go_further_back():
    """Groups with equal rewards leave the weights as they are, so that a checkpoint from after it is as good."""
    rows = blown_up(level=0.8)
    for row in rows:
        row["dead"] = 0.2 if row["step"] < 25 else 0.9
    diagnosis = diagnose_rows(rows)
    assert found(diagnosis, "no-signal").onset < 30
    resumed = [finding.advice for finding in diagnosis.findings if "resume" in finding.advice]
    assert resumed
    assert all("before step 41" in advice for advice in resumed)


def test_advice_to_resume_is_given_for_damage_of_the_weights_only():
    kinds = LOGS.kinds()
    assert {kind.code for kind in kinds if kind.resume} <= {
        kind.code for kind in kinds if kind.is_in_the_weights
    }
    outside = {kind.code for kind in kinds if not kind.is_in_the_weights}
    assert {"no-signal", "truncated", "reward-flat", "no-step", "reference-kl", "weight-sync"} <= outside


# --- A slow fall of the reward ---


def falling(from_part, to_part, *, top=0.5, bottom=0.0, steps=200, noise=0.02, seed=1, **metrics):
    """Return a log whose reward rises a little, and falls from one part of the run to another."""
    draw = random.Random(f"falling {seed}")
    rows = []
    for step in range(1, steps + 1):
        part = step / steps
        fallen = min(1.0, max(0.0, (part - from_part) / (to_part - from_part)))
        reward = top - 0.05 * max(0.0, 0.2 - part) + (bottom - top) * fallen + draw.gauss(0, noise)
        rows.append({"step": step, "reward": reward} | {name: value(step) for name, value in metrics.items()})
    return rows


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("from_part", "to_part"), [(0.3, 0.9), (0.4, 0.6), (0.6, 0.8), (0.5, 1.0), (0.2, 1.0)]
)
@pytest.mark.parametrize("bottom", [0.0, 0.1])
def test_a_slow_fall_begins_where_the_reward_begins_to_fall(from_part, to_part, bottom, seed):
    rows = falling(from_part, to_part, bottom=bottom, seed=seed)
    fall = found(diagnose_rows(rows), "collapse")
    assert from_part - 0.1 < fall.onset / len(rows) < from_part + 0.25 * (to_part - from_part)
    assert f"resume from a checkpoint before step {fall.onset:.0f}" in fall.advice


@pytest.mark.parametrize("seed", range(8))
def test_a_fall_from_the_start_begins_near_it(seed):
    fall = found(diagnose_rows(falling(0.0, 0.9, seed=seed)), "collapse")
    assert fall.onset < 35
    # There is no checkpoint from before the first steps.
    assert ("resume" in fall.advice) == (fall.onset > 20)


@pytest.mark.parametrize("seed", range(8))
def test_other_advice_to_resume_leads_to_before_a_slow_fall_too(seed):
    rows = falling(0.4, 0.9, seed=seed, kl=lambda step: 0.01 if step < 170 else 3.0)
    diagnosis = diagnose_rows(rows)
    fall = found(diagnosis, "collapse")
    assert fall.onset < 105
    assert found(diagnosis, "kl-drift").advice.endswith(f"before step {fall.onset:.0f}")


@pytest.mark.parametrize(("lost_at", "codes"), [(40, ["step-too-large", "kl-drift", "nan"]), (1, ["nan"])])
def test_numbers_that_are_lost_after_large_steps_are_not_the_first_cause(lost_at, codes):
    rows = falling(0.9, 1.0, top=0.5, bottom=0.5, steps=50, kl=lambda step: 0.001 if step < 2 else 4.0)
    rows[lost_at - 1]["grad_norm"] = float("nan")
    found_codes = [finding.code for finding in diagnose_rows(rows).findings]
    assert found_codes[: len(codes)] == codes


def test_a_fault_before_the_fall_may_be_its_cause():
    rows = falling(0.4, 0.6, kl=lambda step: 0.01 if step < 60 else 3.0)
    diagnosis = diagnose_rows(rows)
    assert [finding.code for finding in diagnosis.findings] == ["kl-drift", "collapse"]
    assert found(diagnosis, "collapse").advice.startswith(
        "look at the faults above first, which may be its cause"
    )


def test_a_fault_after_the_fall_comes_after_it_and_is_not_called_its_cause():
    rows = falling(0.4, 0.6, kl=lambda step: 0.01 if step < 170 else 3.0)
    diagnosis = diagnose_rows(rows)
    assert [finding.code for finding in diagnosis.findings] == ["collapse", "kl-drift"]
    assert found(diagnosis, "collapse").advice.startswith(
        "no check found anything that passed its limit before it"
    )
    assert found(diagnosis, "kl-drift").advice.startswith(
        "look at collapse first, which began before this passed"
    )


@pytest.mark.parametrize(("rows_later", "first"), [(2, "kl-drift"), (10, "collapse")])
def test_a_fault_right_after_the_fall_is_not_called_later(rows_later, first):
    """The onset of a fall may be a row too early, and that of a fault is where it passed its limit."""
    rows = falling(0.5, 0.5001, kl=lambda step: 0.01 if step < 100 + rows_later else 3.0)
    diagnosis = diagnose_rows(rows)
    fall = found(diagnosis, "collapse")
    assert 98 <= fall.onset <= 101
    assert diagnosis.findings[0].code == first
    is_near = first == "kl-drift"
    assert ("which may be its cause" in fall.advice) == is_near
    assert ("which began before" in found(diagnosis, "kl-drift").advice) != is_near


def test_a_fault_after_a_partial_loss_is_told_before_it_and_not_called_its_cause():
    """A loss of less than half is worth a look, and faults are told before what is."""
    rows = falling(0.4, 0.6, bottom=0.3, kl=lambda step: 0.01 if step < 170 else 3.0)
    diagnosis = diagnose_rows(rows)
    assert [finding.code for finding in diagnosis.findings] == ["kl-drift", "collapse"]
    advice = found(diagnosis, "collapse").advice
    assert advice.startswith(
        "the faults above passed their limits only after it began; no check found anything that passed its limit "
        "before it"
    )


def test_a_remark_before_the_fall_is_no_lack_of_a_cause():
    rows = falling(0.4, 0.6, clip_fraction=lambda step: 0.6 if step > 20 else 0.01)
    diagnosis = diagnose_rows(rows)
    fall = found(diagnosis, "collapse")
    others = [finding for finding in diagnosis.findings if finding.code != "collapse"]
    assert others, "the log needs another finding"
    assert all(finding.onset is None or finding.onset <= fall.onset for finding in others)
    assert "no check found" not in fall.advice


def test_groups_of_right_answers_are_not_dated_with_those_of_a_lost_reward():
    rows = falling(0.4, 0.5, top=0.9, bottom=0.05, noise=0.01, dead=lambda step: 0.7 if step < 100 else 0.98)
    signal = found(diagnose_rows(rows), "no-signal")
    assert 90 <= signal.onset <= 105
    before = [row["reward"] for row in rows if row["step"] < signal.onset]
    said = re.search(
        r"most groups had equal rewards before too, with a mean reward of ([\d.]+)", signal.cause
    )
    assert float(said[1]) == pytest.approx(sum(before) / len(before), abs=0.02)


@pytest.mark.parametrize("seed", range(8))
def test_a_death_that_the_reward_falls_into_slowly_begins_with_the_fall(seed):
    draw = random.Random(f"slow death {seed}")
    late = [0.5, 0.4, 0.3, 0.2, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0]
    rewards = [0.6 + draw.gauss(0, 0.02) for _ in range(180)] + late
    diagnosis = diagnose_rows([{"step": n, "reward": value} for n, value in enumerate(rewards, 1)])
    died = found(diagnosis, "run-died")
    assert died.onset in (180, 181, 182)
    assert died.steps[0] == 186
    assert died.cause.endswith(f"from step 186 on; the reward falls from step {died.onset:.0f} on")
    assert died.advice.endswith(f"before step {died.onset:.0f}")


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("from_part", "bottom"), [(0.0, 0.3), (0.25, 0.35), (0.0, 0.35)])
def test_a_steady_fall_is_no_plateau(from_part, bottom, seed):
    diagnosis = diagnose_rows(falling(from_part, 1.0, bottom=bottom, seed=seed))
    (fall,) = diagnosis.findings
    assert (fall.code, fall.severity) == ("collapse", "look")
    assert re.search(
        r"from the best tenth of the run to the last: \d+% of it is lost, in a steady fall$", fall.cause
    )
    assert "rise" not in fall.cause
    assert fall.onset / 200 < from_part + 0.2


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("steps", [12, 15, 19, 24, 29])
@pytest.mark.parametrize(("bottom", "severity"), [(0.1, "stop"), (0.32, "look")])
def test_a_large_fall_shows_in_a_short_log(steps, bottom, severity, seed):
    fall = found(
        diagnose_rows(falling(0.5, 0.7, bottom=bottom, noise=0.01, seed=seed, steps=steps)), "collapse"
    )
    assert fall.severity == severity
    assert f"from the best of {steps // 3} parts of the run to the last" in fall.cause
    assert 0.4 < fall.onset / steps < 0.75
    assert f"resume from a checkpoint before step {fall.onset:.0f}" in fall.advice


@pytest.mark.parametrize("seed", range(8))
def test_a_third_of_the_reward_that_is_lost_at_the_end_is_worth_a_look(seed):
    fall = found(diagnose_rows(falling(0.7, 0.8, bottom=0.3, seed=seed)), "collapse")
    assert fall.severity == "look"
    assert "% of it is lost" in fall.cause
    assert 0.65 < fall.onset / 200 < 0.85


@pytest.mark.parametrize("steps", [12, 18, 24, 29])
def test_the_noise_of_a_short_log_is_no_fall(steps):
    falls = 0
    for seed in range(100):
        diagnosis = diagnose_rows(falling(0.0, 1.0, bottom=0.5, noise=0.1, seed=seed, steps=steps))
        falls += "collapse" in [finding.code for finding in diagnosis.findings]
    assert falls <= 1


def test_a_metric_with_two_names_is_told_once_beside_a_fall():
    rows = falling(0.5, 0.7, kl=lambda step: 0.01 if step < 100 else 0.5)
    for row in rows:
        row["actor/kl_loss"] = row["kl"]
    fall = found(diagnose_rows(rows), "collapse")
    assert fall.cause.count("0.01 → 0.5") == 1


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("bottom", [0.5, 0.47, 0.55])
def test_a_level_reward_or_a_small_change_is_no_fall(bottom, seed):
    diagnosis = diagnose_rows(falling(0.0, 1.0, bottom=bottom, noise=0.08, seed=seed))
    assert "collapse" not in [finding.code for finding in diagnosis.findings]


def test_lost_signal_beside_a_falling_reward_does_not_say_that_it_does_not_rise():
    rows = falling(0.0, 1.0, bottom=0.3, dead=lambda step: 0.7)
    cause = found(diagnose_rows(rows), "no-signal").cause
    assert "in the last two thirds of the run, the reward falls (0.4" in cause
    assert "rise" not in cause


# --- Answers that were cut off from the start ---


def noisy_shares(levels, seed):
    """Return shares of answers cut off in batches of eight answers, with a level for each tenth of the run."""
    draw = random.Random(f"shares {seed}")
    rows = []
    for step in range(1, 201):
        level = levels[(step - 1) // 20]
        share = sum(draw.random() < level for _ in range(8)) / 8
        rows.append({"step": step, "reward": step / 200, "cut": share})
    return rows


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    "levels", [[0.9, 0.7] + [0.6] * 8, [0.65] * 10, [0.8, 0.7, 0.6, 0.4, 0.7, 0.7, 0.7, 0.7, 0.6, 0.6]]
)
def test_answers_cut_off_from_the_start_are_said_to_be(levels, seed):
    truncated = found(diagnose_rows(noisy_shares(levels, seed)), "truncated")
    assert truncated.onset <= 8
    assert re.search(r", (as from the start|down from \d+% in the first tenth)", truncated.cause)


@pytest.mark.parametrize("seed", range(10))
def test_many_answers_cut_off_from_the_start_are_said_to_be(seed):
    truncated = found(diagnose_rows(noisy_shares([0.75] + [0.4] * 9, seed)), "truncated")
    assert truncated.onset <= 8
    assert re.search(r"in the later half, down from \d+% in the first tenth$", truncated.cause)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("since", [3, 5])
def test_answers_cut_off_later_are_not_said_to_be_from_the_start(since, seed):
    levels = [0.05] * since + [0.7] * (10 - since)
    truncated = found(diagnose_rows(noisy_shares(levels, seed)), "truncated")
    assert 20 * since - 3 <= truncated.onset <= 20 * since + 8
    assert "start" not in truncated.cause


# --- Gradients that jump right before a fault ---


@pytest.mark.parametrize("norms", [(12, 35, 60, 20), (9, 9, 9), (80, 80, 80, 80, 80, 80, 80)])
def test_gradients_that_jump_before_a_fault_are_told(norms):
    diagnosis = diagnose_rows(blown_up(norms, level=0.8))
    spikes = found(diagnosis, "gradient-spikes")
    assert (spikes.onset, spikes.severity) == (41, "look")
    last = 40 + len(norms)
    assert spikes.cause.startswith(f"from step 41 to {last} the gradient norm is {min(norms)}")
    assert "spikes of the gradient norm are few" not in diagnosis.passed
    assert spikes.figure == max(norms)
    assert spikes.steps == (41, last)


@pytest.mark.parametrize(
    ("norms", "breaks_at", "level"),
    [((12, 35), 41, 0.5), ((3, 3, 3, 3), 41, 1.0), ((*[0.4] * 8, 5, 5, 5), 41, 0.5)],
    ids=["two rows", "six times the usual", "after the fault"],
)
def test_other_gradients_are_not(norms, breaks_at, level):
    diagnosis = diagnose_rows(blown_up(norms, breaks_at=breaks_at, level=level))
    assert "collapse" in [finding.code for finding in diagnosis.findings]
    assert "gradient-spikes" not in [finding.code for finding in diagnosis.findings]


def test_a_jump_of_gradients_without_a_fault_is_not_told():
    rows = [{"step": n, "reward": n / 60, "grad_norm": 20.0 if 40 < n < 45 else 0.4} for n in range(1, 61)]
    assert [finding.code for finding in diagnose_rows(rows).findings] == []


# --- Answers that are cut off since another fault ---


def cut(share, **metrics):
    """Return a log with shares of answers cut off, and other metrics, as functions of the step."""
    metrics = {"completions/clipped_ratio": share, "reward": lambda n: n / 100} | metrics
    return [{"step": n} | {name: value(n) for name, value in metrics.items()} for n in range(1, 101)]


def test_answers_cut_off_since_another_fault_are_called_its_effect():
    rows = cut(lambda n: 0.01 if n < 33 else 1.0, kl=lambda n: 0.001 if n < 31 else 3.0)
    diagnosis = diagnose_rows(rows, Setup("trl"))
    truncated = found(diagnosis, "truncated")
    assert truncated.cause.endswith("; it was 1% before step 31: probably an effect of kl-drift")
    assert truncated.advice.startswith(
        "follow the advice on kl-drift first; if answers are still cut off then, allow"
    )
    assert "(max_completion_length)" in truncated.advice


def test_the_effect_is_listed_after_its_cause():
    rows = cut(
        lambda n: 0.0 if n < 33 else 1.0,
        reward=lambda n: min(0.6, n / 40) if n < 31 else 0.01 * (n % 3),
        entropy=lambda n: 0.5 if n < 31 else 4.0,
    )
    diagnosis = diagnose_rows(rows)
    codes = [finding.code for finding in diagnosis.findings]
    cause = found(diagnosis, "truncated").cause.rpartition("effect of ")[2]
    assert cause in ("collapse", "entropy-rise")
    assert codes.index("truncated") > codes.index(cause)


@pytest.mark.parametrize(
    ("share", "kl", "advice"),
    [
        (lambda n: 0.3 if n < 33 else 1.0, lambda n: 0.001 if n < 31 else 3.0, "allow longer answers"),
        (lambda n: min(1.0, n / 40), lambda n: 0.001 if n < 31 else 3.0, "allow longer answers"),
        (lambda n: 0.01 if n < 20 else 1.0, lambda n: 0.001 if n < 31 else 3.0, "see what an answer gains"),
        (lambda n: 0.01 if n < 33 else 1.0, lambda n: 0.001, "see what an answer gains"),
        (lambda n: 1.0, lambda n: 3.0, "allow longer answers"),
    ],
    ids=["many before", "more and more", "cut before the fault", "no other fault", "from the start"],
)
def test_other_answers_cut_off_are_a_fault_of_their_own(share, kl, advice):
    """Where nearly none was cut off before, the cap was long enough until answers no longer ended."""
    truncated = found(diagnose_rows(cut(share, kl=kl)), "truncated")
    assert "effect" not in truncated.cause
    assert truncated.advice.startswith(advice)
    assert ("they no longer end" in truncated.cause) == advice.startswith("see")


def test_answers_that_no_longer_end_in_the_last_tenth_are_told_from_a_short_cap():
    """Cut answers are no larger part of the later half than a third, as hardly any was cut off before."""
    draw = random.Random(5)
    rows = [
        {
            "step": 5 * n,
            "reward": 0.85 + draw.gauss(0, 0.03),
            "cut": 1.0 if n >= 35 else draw.uniform(0, 0.06),
        }
        for n in range(1, 41)
    ]
    truncated = found(diagnose_rows(rows), "truncated")
    assert truncated.cause.endswith("before step 175: they no longer end")
    assert truncated.advice.startswith("see what an answer gains by ending")
    assert truncated.advice.endswith("then resume from a checkpoint before step 175")


def test_a_norm_that_returns_to_an_earlier_level_has_not_jumped():
    """Every third block of ten log steps has norms like those as the fault begins, so the usual one is far below."""
    rows = blown_up(norms=(12, 35, 60, 20), breaks_at=81, steps=100)
    for row in rows[:80]:
        if row["step"] % 30 >= 20:
            row["grad_norm"] = 60.0
    assert "gradient-spikes" not in [finding.code for finding in diagnose_rows(rows).findings]
    unlike = blown_up(norms=(12, 35, 60, 20), breaks_at=81, steps=100)
    assert found(diagnose_rows(unlike), "gradient-spikes").onset == 81


# --- What is passed is true ---


def result_of(rows, subject):
    """Return the result of the check of a subject."""
    (finding,) = [finding for finding in log_findings(Log.of(rows).rows) if finding.subject == subject]
    return finding


@pytest.mark.parametrize(("reward_end", "passes"), [(0.2, None), (0.9, True)])
def test_entropy_that_falls_is_kept_only_if_the_reward_rises(reward_end, passes):
    draw = random.Random(3)
    rows = []
    for step in range(1, 61):
        part = step / 60
        reward = 0.5 + (reward_end - 0.5) * part + draw.gauss(0, 0.01)
        rows.append({"step": step, "reward": reward, "entropy": 0.9 - 0.6 * part, "grad_norm": 0.4})
    assert result_of(rows, "entropy of the policy").ok is passes


@pytest.mark.parametrize(("often", "passes"), [(3, None), (30, True)])
def test_a_policy_that_is_often_far_from_the_reference_is_not_said_to_stay_near(often, passes):
    rows = [
        {"step": step, "reward": 0.01 * step, "kl": 1.4 if step % often == 0 else 0.5, "grad_norm": 0.4}
        for step in range(1, 61)
    ]
    assert result_of(rows, "KL to the reference").ok is passes


def test_answers_that_are_cut_off_more_and_more_have_their_rewards_beside_them():
    rows = [
        {"step": step, "reward": 0.2 + 0.1 * (step > 54), "cut": 0.9 if step > 45 else 0.05, "grad_norm": 0.4}
        for step in range(1, 61)
    ]
    cause = found(diagnose_rows(rows), "truncated").cause
    assert "in the last tenth (mean reward 0.3), 5% in the first half (0.2)" in cause


def test_a_single_row_does_not_begin_a_lost_entropy_anew():
    rows = []
    for step in range(1, 41):
        entropy = 0.15 if step < 12 else 0.01
        rows.append(
            {"step": step, "reward": 0.8 + 0.01 * (step % 3), "entropy": 0.05 if step == 20 else entropy}
        )
    assert found(diagnose_rows(rows), "entropy-collapse").onset == 12


# --- A metric that changed before the fall, and passed its limit after it ---


def shrinking(*, half_at, fall_at=40, rows=80):
    """Return the rows of a reward that falls at a step, with answers that had lost half of their length at another."""
    draw = random.Random(2)
    length = {step: 400 / (1 + math.exp((step - half_at) / 4)) + 20 for step in range(1, rows + 1)}
    return [
        {
            "step": float(step),
            "reward": (0.6 if step < fall_at else 0.05) + draw.gauss(0, 0.02),
            "length": length[step] + draw.gauss(0, 2),
        }
        for step in range(1, rows + 1)
    ]


def test_a_metric_that_had_changed_before_the_fall_is_not_called_its_effect():
    diagnosis = diagnose_rows(shrinking(half_at=36))
    shorter, fall = found(diagnosis, "length-collapse"), found(diagnosis, "collapse")
    assert fall.onset < shorter.onset
    assert shorter.half_by == pytest.approx(36, abs=1)
    assert [finding.code for finding in diagnosis.findings[:2]] == ["length-collapse", "collapse"]
    assert "collapse first" not in shorter.advice
    assert fall.advice.startswith("look at the faults above first, which may be its cause")
    half = f"length-collapse from step {shorter.onset:.0f} (half of its change by step {shorter.half_by:.0f})"
    assert diagnosis.order_text == f"in order: {half}, collapse from step {fall.onset:.0f}"


def test_a_metric_that_changed_after_the_fall_is_called_later():
    diagnosis = diagnose_rows(shrinking(half_at=58))
    assert [finding.code for finding in diagnosis.findings[:2]] == ["collapse", "length-collapse"]
    assert (
        "collapse first, which began before this passed its limit"
        in found(diagnosis, "length-collapse").advice
    )


@pytest.mark.parametrize("metric", [[1.0] * 20, []])
def test_a_metric_that_did_not_change_has_no_half_of_a_change(metric):
    assert half_step(Series(range(len(metric)), metric)) == math.inf


@pytest.mark.parametrize("sign", [1, -1])
def test_the_half_of_a_change_is_that_of_the_means_of_its_ends(sign):
    values = [sign * value for value in [0.0] * 10 + [0.4, 0.6, 0.4, 0.7, 0.8] + [1.0] * 10]
    assert half_step(Series(range(25), values)) == 13
