"""Tests of `bandpo.testing.assert_is`: losses by the formulas pass; changed losses fail, and the change is named."""

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from integrations.sabotages.plain import averaged, clamped, ppo_with, textbook
from test_methods import REFERENCES

import method_references as reference
from bandpo import DPPO, FixedClip, policy_loss
from bandpo.certificate.tokens import loss_batches
from bandpo.core.errors import InvalidType, InvalidValue
from bandpo.core.methods import METHODS
from bandpo.testing import assert_is

# --- what is the method -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_each_method_is_itself(name):
    method = METHODS[name].method()
    assert_is(lambda *tensors: policy_loss(*tensors, method=method).loss, method)


@pytest.mark.parametrize("name", METHODS)
def test_the_formula_of_a_paper_is_its_method(name):
    method, formula = REFERENCES[name]
    average = METHODS[name].method().aggregation
    assert_is(textbook(formula, average), method, dtype=torch.float64, max_log_ratio=10.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["PPO", "GRPO", "DAPO", "GSPO", "CISPO", "SAPO", "DPPO", "GPG", "SPO"])
def test_a_formula_passes_in_either_precision_at_any_ratio(name, dtype):
    method, formula = REFERENCES[name]
    assert_is(textbook(formula, METHODS[name].method().aggregation), method, dtype=dtype)


def test_weights_are_given_by_name_and_count():
    ppo = textbook(reference.ppo)
    assert_is(ppo, "PPO()", weights=True)
    with pytest.raises(AssertionError, match="importance weights left out"):
        assert_is(lambda *tensors, weights: ppo(*tensors), "PPO()", weights=True)


def test_a_method_of_the_rollout_is_compared_with_the_ratio_to_it():
    def of_rollout(logp, logp_old, advantages, mask, *, logp_rollout):
        return policy_loss(logp, logp_rollout, advantages, mask, method="DPPO()").loss

    def of_trainer(logp, logp_old, advantages, mask, *, logp_rollout):
        return policy_loss(logp, logp_old, advantages, mask, method="DPPO()").loss

    assert_is(of_rollout, DPPO(), rollout=True)
    with pytest.raises(AssertionError, match=re.escape("ratio to the trainer's old policy")):
        assert_is(of_trainer, DPPO(), rollout=True)
    with pytest.raises(AssertionError, match=re.escape("ratio to the rollout engine's policy")):
        assert_is(of_rollout, replace(DPPO(), old_policy="trainer"), rollout=True)


def test_advantages_of_tokens_differ_within_a_sequence():
    shapes = []

    def loss(logp, logp_old, advantages, mask):
        shapes.append(advantages.shape)
        return averaged(reference.ppo(logp, logp_old, advantages, mask), mask, "token-mean")

    assert_is(loss, "PPO()", token_advantages=True)
    assert {tuple(shape) for shape in shapes} == {(128, 40)}
    first = textbook(reference.ppo)
    with pytest.raises(AssertionError):
        assert_is(lambda p, q, a, mask: first(p, q, a[:, 0], mask), "PPO()", token_advantages=True)


def test_averages_of_trl_count_the_empty_sequence():
    def loss(logp, logp_old, advantages, mask):
        return reference.mean_of_sequence(
            reference.ppo(logp, logp_old, advantages[:, None], mask), mask
        ).mean()

    assert_is(loss, "GRPO()", aggregation="grpo")
    assert_is(loss, "FixedClip(0.2)", aggregation="grpo")
    with pytest.raises(AssertionError, match="Likely difference: empty sequences count in the mean"):
        assert_is(loss, "GRPO()")


def test_a_width_of_ones_own_is_the_normalizer():
    def loss(logp, logp_old, advantages, mask):
        values = reference.ppo(logp, logp_old, advantages[:, None], mask) * mask
        return values.sum() / 1000 / mask.any(1).sum()

    assert_is(loss, "FixedClip(0.2)", aggregation="seq-mean-token-sum-norm", normalizer=1000)
    with pytest.raises(AssertionError, match=r"0\.04 times as expected"):
        assert_is(loss, "FixedClip(0.2)", aggregation="seq-mean-token-sum-norm")


def test_a_loss_may_take_bfloat16_if_it_computes_in_float32():
    ppo = textbook(reference.ppo)

    def loss(*tensors):
        return ppo(*(one.float() for one in tensors))

    assert_is(loss, "PPO()", dtype=torch.bfloat16, tolerance=0.01)
    with pytest.raises(AssertionError):
        assert_is(ppo, "PPO()", dtype=torch.bfloat16, tolerance=0.01)


def test_the_batches_meet_every_case():
    for batch in loss_batches():
        counted, ratio = batch.mask > 0, (batch.logp - batch.logp_old).exp()
        positive = batch.advantages > 0
        if batch.name != "near":
            for sign in (positive, ~positive):
                assert (counted & sign & (ratio > 1.28)).sum() > 50
                assert (counted & sign & (ratio < 0.8)).sum() > 50
        assert 1 in batch.mask.sum(1)
        assert (batch.mask.sum(1) == 0).sum() == 1
        assert batch.logp.max() < 0


# --- what is not ------------------------------------------------------------------------------------------------------


def small_change(method, kind, change):
    """Return a loss of a method with a small relative change."""

    def loss(logp, logp_old, advantages, mask):
        factor, penalty = 1.0, 0.0
        if kind == "factor":
            factor += change
        elif kind == "advantages":
            advantages = advantages + change
        elif kind == "old policy":
            logp_old = logp_old - abs(change)
        elif kind == "mask":
            mask = mask.clone()
            # A sequence that has counted tokens, as all but one have.
            mask[mask[:, 0].nonzero()[int(abs(change) * 100)], 0] = 0
        elif kind == "penalty":
            penalty = change * (logp * mask).sum() / mask.sum()
        else:
            logp, logp_old = logp / (1 + change), logp_old / (1 + change)
        return factor * policy_loss(logp, logp_old, advantages, mask, method=method).loss + penalty

    return loss


CHANGES = {
    "name": st.sampled_from(["DAPO", "GRPO", "CISPO", "SAPO", "GSPO", "DPPO", "GMPO", "SPO"]),
    "kind": st.sampled_from(["factor", "advantages", "old policy", "mask", "penalty", "temperature"]),
    "change": st.floats(0.002, 0.5) | st.floats(-0.5, -0.002),
}


def check_a_small_change(name, kind, change):
    # A sequence that GSPO blocks has no gradient, whichever of its tokens count.
    assume(not (name == "GSPO" and kind == "mask"))
    method = METHODS[name].method()
    with pytest.raises(AssertionError, match=f"does not have the gradient of {name}"):
        assert_is(small_change(method, kind, change), method)


@pytest.mark.slow
@given(**CHANGES)
@example(name="SAPO", kind="temperature", change=0.002)
@settings(max_examples=4)
def test_a_small_change_of_any_method_is_caught(name, kind, change):
    """The changes are of 0.2 %, in each quantity of the loss."""
    check_a_small_change(name, kind, change)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)  # 5 minutes of a quiet core
@given(**CHANGES)
@settings(max_examples=300)
def test_small_changes_of_methods_are_caught(name, kind, change):
    check_a_small_change(name, kind, change)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_loss_of_each_token_is_refused():
    with pytest.raises(InvalidType, match=r"one number, got shape \(128, 40\)"):
        assert_is(lambda logp, *_: logp, "PPO()")
    with pytest.raises(InvalidType, match="one number, got float"):
        assert_is(lambda logp, *_: 1.0, "PPO()")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tolerance": 0}, "tolerance must be"),
        ({"max_log_ratio": -1}, "max_log_ratio must be"),
        ({"dtype": torch.int64}, "dtype must be floating-point, got torch.int64"),
        ({"aggregation": "mean"}, "unknown aggregation 'mean'"),
    ],
)
def test_a_wrong_option_is_refused_before_the_loss_is_called(options, message):
    def loss(*_):
        pytest.fail("was called")

    with pytest.raises(InvalidValue, match=message):
        assert_is(loss, "PPO()", **options)


def test_a_method_that_is_none_is_refused():
    with pytest.raises((InvalidType, InvalidValue)):
        assert_is(textbook(reference.ppo), "NoSuchMethod()")


def test_a_loss_that_clamps_passes_below_its_clamp():
    assert_is(ppo_with(clamped), "PPO()", max_log_ratio=10.0)
    assert_is(textbook(reference.ppo), FixedClip(0.2))
