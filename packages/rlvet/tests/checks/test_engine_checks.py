"""Weights that the engine never received are told from precision and from old data, in any framework's log."""

import math
import random

import pytest

from helpers.sync_loop import Loop, train
from rlvet import diagnose
from rlvet.checks.diagnosis import Diagnosis
from rlvet.checks.log_checks import log_findings
from rlvet.runs.logs import Log
from rlvet.runs.setup import Setup, Value
from selection import mostly_slow


def findings(rows, setup=None):
    log = Log.of(rows)
    return Diagnosis(log_findings(log.rows, setup), rows=log.rows, log=log).findings


def codes(rows, setup=None):
    return [finding.code for finding in findings(rows, setup)]


def course(steps, key, distance, *, noise=0.15, seed=0, rate=lambda t: 1e-6, **others):
    """Return a log whose reward rises, with a distance of engine and trainer as a function of the elapsed share."""
    draw = random.Random(seed)
    rows = []
    for step in range(1, steps + 1):
        t = step / steps
        row = {"step": float(step), "reward": t, "learning_rate": rate(t)}
        row[key] = distance(t) * math.exp(noise * draw.gauss(0, 1))
        row |= {name.replace("__", "/"): function(t) for name, function in others.items()}
        rows.append(row)
    return rows


# verl-project/verl issue 7495: the KL grew 36-fold in two months, and stayed below the limit of 0.05.
VERL_7495 = course(
    200,
    "rollout_corr/kl",
    lambda t: 5e-4 + 0.0175 * t**1.5,
    rollout_corr__rollout_is_eff_sample_size=lambda t: 0.98 - 0.7 * t,
)

# huggingface/trl issue 5312: ten steps at a decaying learning rate; the last one has 0.81 and a mean weight of 3e-7.
TRL_5312 = course(
    10,
    "sampling/sampling_logp_difference/mean",
    lambda t: 0.015 + 0.95 * (t - 0.1) * (1.9 - t) / 1.6,
    rate=lambda t: 1.1e-5 * (1 - t) + 1e-6,
    sampling__importance_sampling_ratio__mean=lambda t: 10 ** (-7 * (t - 0.1)),
)

# radixark/miles pull requests 684 and 1727: adapters that never reach SGLang; LoRA moves probabilities slowly.
MILES_684 = course(
    60,
    "train/train_rollout_logprob_abs_diff",
    lambda t: 0.012 + 0.09 * t,
    rate=lambda t: 1e-5 * min(1, 10 * t),
)
MILES_1727 = course(
    24,
    "train/train_rollout_logprob_abs_diff",
    lambda t: 0.008 + 0.4 * t**1.2,
    **{"train__lr-pg_0": lambda t: 1e-5},
)


@pytest.mark.parametrize(
    "rows",
    [VERL_7495, TRL_5312, MILES_684, MILES_1727],
    ids=["verl 7495", "trl 5312", "miles 684", "miles 1727"],
)
def test_weights_that_were_never_synced(rows):
    first = findings(rows)[0]
    assert (first.code, first.severity, first.or_else) == ("weight-sync", "fix", ("engine-mismatch",))
    assert "never fell back" in first.cause
    assert "hash" in first.advice


def test_a_fall_of_the_effective_sample_size_is_mentioned():
    first = findings(VERL_7495)[0]
    assert "the effective sample size fell 0.943 → 0.313" in first.cause
    assert first.quantities == ("mismatch_kl", "effective_samples")
    # Its onset is early, when the distance first stays above twice its start.
    assert 10 <= first.onset <= 60


KEYS = ["rollout_corr/kl", "train/train_rollout_logprob_abs_diff", "training/rollout_probs_diff_mean"]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("seed", range(5))
def test_a_constant_distance_is_of_the_precision(key, seed):
    level = 10 ** random.Random(seed).uniform(-0.8, 0)
    said = codes(course(60, key, lambda t: level, noise=0.4, seed=seed))
    assert said[0] == "engine-mismatch"
    assert "weight-sync" not in said
    small = findings(course(60, key, lambda t: level / 200, noise=0.4, seed=seed))
    assert all(finding.severity == "look" for finding in small)


@pytest.mark.parametrize("lag", [2, 4, 8, 16])
def test_a_distance_that_is_bounded_by_the_lag_is_of_old_data(lag):
    steps = 60
    old = course(
        steps, "policy/rollout_train_logprobs_abs_diff_mean", lambda t: 0.005 + 0.01 * min(t * steps - 1, lag)
    )
    assert "weight-sync" not in codes(old)
    with_age = [row | {"async/staleness_mean": min(row["step"] - 1, lag)} for row in old]
    for rows in (with_age, with_age[:lag], with_age[: lag + 4]):
        assert "weight-sync" not in codes(rows)


@pytest.mark.parametrize("every", [5, 15, 30])
def test_a_distance_that_is_reset_is_of_rare_syncs(every):
    rows = course(60, "rollout_corr/kl", lambda t: 1e-4 * (1 + (t * 60 - 1) % every) ** 2, noise=0.0)
    assert "weight-sync" not in codes(rows)


def test_a_distance_that_grows_late_has_another_cause():
    rows = course(100, "rollout_corr/kl", lambda t: 1e-3 + 0.6 * max(0.0, t - 0.55))
    assert codes(rows)[0] == "engine-mismatch"


def test_growth_is_compared_with_the_learning_rate_that_was_spent():
    """The learning rate falls to 0, and the distance stays from there on, as that of weights that were never synced."""
    spent = lambda t: min(t, 0.4) - min(t, 0.4) ** 2 / 0.8  # noqa: E731
    rows = course(
        100, "rollout_corr/kl", lambda t: 5e-4 + 0.5 * spent(t), rate=lambda t: max(0.0, 1 - t / 0.4) * 1e-5
    )
    assert codes(rows)[0] == "weight-sync"
    constant = [row | {"learning_rate": 1e-5} for row in rows]
    assert codes(constant)[0] == "engine-mismatch"


LOOPS = {
    "synced": (Loop(0), False),
    "synced, bfloat16": (Loop(0, low_precision=True), False),
    "every second step": (Loop(0, sync_every=2), False),
    "every eighth step": (Loop(0, sync_every=8), False),
    "never": (Loop(0, sync_every=0), True),
    "never, bfloat16": (Loop(0, sync_every=0, low_precision=True), True),
    "never, small learning rate": (Loop(0, sync_every=0, learning_rate=2e-4), True),
    "never, learning rate falls": (Loop(0, sync_every=0, decay=True), True),
    "never, few steps": (Loop(0, sync_every=0, steps=12), True),
}
"""Runs of a real loop, and whether its sync is dropped."""


@pytest.mark.parametrize("name", mostly_slow(LOOPS, 2))
def test_a_dropped_sync_of_a_real_loop(name):
    loop, is_dropped = LOOPS[name]
    said = codes(train(loop))
    assert (said[:1] == ["weight-sync"]) == is_dropped, said


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 104))
@pytest.mark.parametrize("name", LOOPS)
def test_a_dropped_sync_of_a_real_loop_on_other_seeds(name, seed):
    loop, is_dropped = LOOPS[name]
    said = codes(train(loop._replace(seed=seed)))
    assert (said[:1] == ["weight-sync"]) == is_dropped, said


# --- Weights of sequences ---


def weights(mean, distance=None, steps=40):
    """Return a log with a mean importance weight, and with the distance of tokens if it is given."""
    rows = []
    for step in range(1, steps + 1):
        row = {"step": step, "reward": step / steps, "sampling/importance_sampling_ratio/mean": mean}
        if distance is not None:
            row["sampling/sampling_logp_difference/mean"] = distance
        rows.append(row)
    return rows


@pytest.mark.parametrize("mean", [2.9, 0.57, 0.4])
def test_weights_of_sequences_are_no_mismatch(mean):
    """huggingface/trl issues 4772 and 5814: tokens differ by 0.012, and the mean weight of a sequence is far from 1."""
    (finding,) = findings(weights(mean, 0.012))
    assert (finding.code, finding.severity) == ("sequence-weights", "look")
    assert f"the mean importance weight of a sequence is {mean}" in finding.cause
    assert "differ by 0.012 on average" in finding.cause
    level = Setup(
        "trl", values={"weight level": Value("vllm_importance_sampling_mode", "sequence_mask", "a")}
    )
    assert codes(weights(mean), level) == ["sequence-weights"]


@pytest.mark.parametrize(("rows_below", "is_sequence"), [(12, True), (3, False)])
def test_rows_that_tokens_cannot_explain_tell_that_weights_are_of_sequences(rows_below, is_sequence):
    """The mean weight of tokens is at least exp(-d); the last rows alone may be near 1."""
    rows = weights(0.98, 0.012)
    for row in rows[10 : 10 + rows_below]:
        row["sampling/importance_sampling_ratio/mean"] = 0.65
    (check,) = [
        one for one in log_findings(Log.of(rows).rows) if one.subject == "importance weights of sequences"
    ]
    assert check.ok is (True if is_sequence else None)


def test_weights_of_tokens_that_are_far_are_a_mismatch():
    assert codes(weights(2.9)) == ["engine-mismatch"]
    assert codes(weights(2.9, 0.7)) == ["engine-mismatch"]
    level = Setup(
        "trl", values={"weight level": Value("vllm_importance_sampling_mode", "token_truncate", "a")}
    )
    assert codes(weights(2.9, 0.012), level) == ["engine-mismatch"]


@pytest.mark.parametrize(("mean", "distance"), [(1.0, 0.012), (0.99, 0.012), (1.02, 0.04)])
def test_weights_near_1_are_right(mean, distance):
    assert codes(weights(mean, distance)) == []


def test_a_folder_of_a_run_that_was_never_synced(tmp_path):
    """The finding is the first line of what is printed, above a distance that is below its own limit."""
    import json

    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in VERL_7495))
    headline = diagnose(tmp_path).headline
    assert headline.startswith("weight-sync or engine-mismatch: KL between engine and trainer grew")
