import math
import warnings

import pytest
import torch

from bandpo import KL, Audit, Band, FixedClip, TotalVariation, Unclipped
from bandpo.audit.watch import BandWarning, Watch, check_radius
from bandpo.divergences import PearsonChi2

HEALTHY = {"calls": 8.0, "on_policy": 0.125, "inert": 0.2, "log_ratio_abs": 0.02, "ratio_mean": 1.0}


def said(watch, *steps):
    """The texts of the warnings that these log steps cause: (changed metrics, entropy, reward)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for changed, entropy, reward in steps:
            watch(HEALTHY | changed, entropy=entropy, reward=reward)
    assert all(w.category is BandWarning for w in caught)
    return [str(w.message) for w in caught]


def test_ratio_identically_one_once():
    still = ({"on_policy": 1.0, "inert": 1.0}, 1.0, 0.1)
    (text,) = said(Watch(FixedClip(), framework="trl"), *[still] * 60)
    assert "exactly 1 in 208 losses in a row" in text
    assert text.endswith(
        "Use each batch for more than one optimiser step (num_iterations above 1, or steps_per_generation above "
        "gradient_accumulation_steps)"
    )
    (text,) = said(Watch(FixedClip()), *[still] * 60)
    assert text.endswith("more than one optimiser step")


def test_losses_before_the_first_update_have_ratio_one():
    """Of a batch's 16 losses the first 8 come before an update; a log step may hold these alone."""
    before, after = ({"on_policy": 1.0, "inert": 1.0}, 1.0, 0.1), ({}, 1.0, 0.1)
    assert said(Watch(FixedClip(), calls_per_batch=16), *[before, after] * 10) == []
    assert said(Watch(FixedClip(), calls_per_batch=16), *[before] * 2) == []
    (text,) = said(Watch(FixedClip(), calls_per_batch=16), *[before] * 3)
    assert "exactly 1 in 24 losses in a row" in text


def test_a_clip_that_never_acts():
    idle = ({"inert": 1.0}, 1.0, 0.1)
    assert said(Watch(Band()), *[idle] * 24, ({}, 1.0, 0.1), *[idle] * 24) == []  # never 200 in a row
    (text,) = said(Watch(Band()), *[idle] * 60)
    assert "no token was clipped in 200 losses in a row" in text
    assert "smaller radius" in text
    assert said(Watch(Unclipped()), *[idle] * 60) == []


LEARNS = [(0.77, 0.02), (0.42, 0.07), (0.12, 0.23), (0.09, 0.44), (0.06, 0.7), (0.02, 0.9), (0.017, 0.87)]
"""The embedded task's own course."""


@pytest.mark.parametrize(
    ("course", "text"),
    [
        (LEARNS, None),
        (
            [(1.0, 0.5), (0.3, 0.5), (0.09, 0.5), (0.01, 0.4)],
            "1 → 0.09 nats per token, while the reward went 0.5 → 0.5: the policy has stopped exploring, and "
            "nothing was earned. Try an entropy bonus, a smaller",
        ),
        ([(1.0, None), (0.05, None)], "1 → 0.05 nats per token: the policy has stopped exploring, and no"),
        ([(0.7, 0.1), (1.6, 0.1), (1.8, 0.1), (5.0, 0.1)], "0.7 → 1.8 nats per token"),
        ([(0.01, 0.1), (0.9, 0.1)], None),  # from almost none to some
    ],
)
def test_entropy_is_judged_by_its_course_and_the_rewards(course, text):
    texts = said(Watch(Band()), *(({}, entropy, reward) for entropy, reward in course))
    assert len(texts) == (text is not None)
    assert text is None or text in texts[0]


def test_entropy_falls_back_on_the_audits():
    watch = Watch(Band())
    watch(HEALTHY | {"entropy": 1.0})
    with pytest.warns(BandWarning, match="→ 0.01 nats"):
        watch(HEALTHY | {"entropy": 0.01})
    assert said(Watch(Band()), ({}, math.nan, 0.1), ({}, 1.0, 0.1)) == []


def test_another_temperature():
    watch = Watch(Band())
    watch.before_update({"ratio_mean": 1.001, "log_ratio_abs": 0.02})
    with pytest.warns(BandWarning, match=r"ratio is 1.4 and the mean \|log ratio\| is 0.35.*full vocabulary"):
        watch.before_update({"ratio_mean": 1.4, "log_ratio_abs": 0.35})


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (Band(TotalVariation(), 0.05), r"is 1/3 of what TotalVariation\(\) is usually given \(0.15\)"),
        (Band(KL(), 0.5), r"radius 0.5 is 10 times what KL\(\) is usually given \(0.05\)"),
        (Band(PearsonChi2(), 0.01), "is 1/10 of"),
    ],
)
def test_a_radius_out_of_scale(rule, text):
    with pytest.warns(BandWarning, match=text):
        check_radius(rule)
    for usual in (Band(), Band(KL(), 0.1), Band(TotalVariation(), 0.2), FixedClip()):
        check_radius(usual)


def test_ratios_that_overflow_are_warned_of():
    logp_old = torch.full((1, 2), -200.0)
    metrics = Audit.from_batch(torch.full((1, 2), -0.1), logp_old, torch.ones(1), clip=Band()).metrics()
    assert "ratio_mean" not in metrics
    with pytest.warns(BandWarning, match="before any update the mean ratio is inf"):
        Watch(Band()).before_update(metrics)
