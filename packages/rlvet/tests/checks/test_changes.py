"""A sentence with values before and after names the rows of both, and the values are those of these rows."""

import math
import random

import pytest

from helpers.printed_sentences import Columns, false_changes_of
from rlvet.checks.diagnosis import Diagnosis
from rlvet.checks.log_checks import log_findings
from rlvet.runs.logs import Log


def diagnose_rows(rows):
    log = Log.of(rows)
    return Diagnosis(log_findings(log.rows), rows=log.rows, log=log)


def course(steps=60, **metrics):
    """Return a log of metrics that are functions of the part of the run that is over."""
    return [
        {"step": step} | {name: value(step / steps) for name, value in metrics.items()}
        for step in range(1, steps + 1)
    ]


def cause_of(rows, code):
    (finding,) = [finding for finding in diagnose_rows(rows).findings if finding.code == code]
    return finding.cause


def converged(steps=48, seed=0):
    """Return a log whose reward rises and levels off while the entropy is lost."""
    draw = random.Random(seed)
    part = [1 / (1 + math.exp(-(step - steps / 4) / 2.5)) for step in range(steps)]
    return [
        {
            "step": step,
            "reward": 0.2 + 0.15 * x + draw.gauss(0, 0.02),
            "entropy": 0.8 * (1 - x) + 0.008,
            "grad_norm": 0.5,
        }
        for step, x in enumerate(part, 1)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_the_reward_is_of_the_rows_of_the_entropy(seed):
    rows = converged(seed=seed)
    cause = cause_of(rows, "entropy-collapse")
    first, last = (sum(row["reward"] for row in part) / 4 for part in (rows[:4], rows[-4:]))
    assert f"the reward went {first:.3g} → {last:.3g}, from the first tenth of the run to the last" in cause
    # The steps in which it did not rise are named, and no change stands beside them.
    assert cause.count("→") == 2
    assert "and from step " in cause


def test_a_reward_that_is_flat_from_the_start_has_no_step():
    flat = cause_of(course(reward=lambda t: 0.3, entropy=lambda t: max(0.01, 1 - 3 * t)), "entropy-collapse")
    assert "the policy has stopped exploring, and the reward did not rise" in flat


def test_before_a_change_of_the_prompts_the_tenths_are_those_of_the_rows_before_it():
    noise = random.Random(3)
    rows = course(
        120,
        reward=lambda t: (0.5 if t < 0.7 else 0.1) + noise.gauss(0, 0.005),
        length=lambda t: (200 if t < 0.7 else 900) + noise.gauss(0, 2),
        entropy=lambda t: max(0.01, 1 - 3 * t),
    )
    cause = cause_of(rows, "entropy-collapse")
    assert "from the first tenth of the log steps before step 84 to the last" in cause
    assert not [*false_changes_of(cause, Columns(rows))]


def test_two_kinds_of_rows_in_a_sentence_are_both_named():
    longer = course(
        200,
        reward=lambda t: 0.2 + 0.5 * t,
        length=lambda t: 100 + 400 * t,
        evaluation=lambda t: 0.5 + 0.01 * (round(100 * t) % 3),
    )
    cause = cause_of(longer, "length-growth")
    assert "tokens, from the first tenth of the run to the last, while the score on other prompts" in cause
    assert cause.endswith(", from the first third of the run to the last")


FALLS = "mean reward 0.5 from step 51 to 100, where it falls"
RISES = "in the last two thirds of the run, the reward still rises"
THIRDS = "from the first third of these steps to the last"


@pytest.mark.parametrize(
    ("sentence", "is_true"),
    [
        (
            "entropy 0.955 → 0.055, while the reward went 0.055 → 0.955, from the first tenth of the run to the last",
            True,
        ),
        ("entropy 0.955 → 0.055, while the reward went 0.055 → 0.955", False),
        (
            "entropy 0.955 → 0.055, while the reward went 0.17 → 0.84, from the first tenth of the run to the last",
            False,
        ),
        ("the reward went 0.17 → 0.84, from the first third of the run to the last", True),
        ("the reward went 0.17 → 0.84, from the first tenth of the run to the last", False),
        ("reward 0.955 → 0.955, from the best tenth of the run to the last", True),
        ("reward 0.9 → 0.955, from the best tenth of the run to the last", False),
        (
            f"{FALLS} (0.585 → 0.92, {THIRDS})",
            True,
        ),
        (
            f"{FALLS} (0.17 → 0.84, {THIRDS})",
            False,
        ),
        (
            f"{RISES} (0.445 → 0.895, {THIRDS})",
            True,
        ),
        (
            f"{RISES} (0.17 → 0.84, {THIRDS})",
            False,
        ),
        ("some_metric 3 → 4, from step 8 on", True),
        ("some_metric 3 → 4", False),
    ],
)
def test_the_reader_of_sentences_finds_rows_that_are_mixed_or_not_named(sentence, is_true):
    columns = Columns([{"step": n, "reward": n / 100, "entropy": 1.01 - n / 100} for n in range(1, 101)])
    assert (not [*false_changes_of(sentence, columns)]) == is_true
