"""Tests of `rollout_weights` against TRL and verl, padded and packed."""

import math

import pytest
import torch
from core.test_sequences import FORMS, pack, padded_batch

from bandpo import GRPO, policy_loss, rollout_weights
from helpers.frameworks import needs

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def tensors(seed=0, dtype=torch.float64):
    batch, inside = padded_batch(seed, dtype)
    return {"logp_old": batch["logp_old"], "logp_rollout": batch["logp"], "mask": batch["mask"]}, inside


def by_hand(logp_old, logp_rollout, mask, mode, lower, upper):
    log_ratio = (logp_old - logp_rollout) * mask
    if mode.startswith("sequence"):
        log_ratio = log_ratio.sum(-1, keepdim=True).expand_as(mask)
    ratio = log_ratio.exp()
    if mode.endswith("truncate"):
        return ratio.clamp(lower, upper)
    return torch.where((ratio < lower) | (ratio > upper), 0.0, ratio)


@pytest.mark.parametrize(("lower", "upper"), [(0.0, 2.0), (0.5, 1.5), (0.8, math.inf)])
@pytest.mark.parametrize("mode", MODES)
def test_by_hand(mode, lower, upper):
    batch, _ = tensors()
    found = rollout_weights(**batch, mode=mode, lower=lower, upper=upper)
    expected = by_hand(*batch.values(), mode, lower, upper)
    counted = batch["mask"] > 0
    torch.testing.assert_close(found[counted], expected[counted])
    assert (found[~counted] == 0).all()
    assert len(expected[counted].unique()) > 1


@pytest.mark.slow
@pytest.mark.parametrize(("threshold", "lower", "upper"), [("1.5", 0.0, 1.5), ("0.5_1.5", 0.5, 1.5)])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_they_are_verls(level, threshold, lower, upper):
    needs("verl")
    from verl.trainer.ppo import rollout_corr_helper as helper

    batch, _ = tensors(1)
    log_ratio = batch["logp_old"] - batch["logp_rollout"]
    expected, _ = helper.compute_rollout_correction_weights(log_ratio, batch["mask"], level, threshold)
    mode = f"{level}_mask" if "_" in threshold else f"{level}_truncate"
    torch.testing.assert_close(
        rollout_weights(**batch, mode=mode, lower=lower, upper=upper), expected.double()
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mode", MODES)
def test_packed_and_padded(mode, form):
    batch, inside = tensors(2)
    expected = rollout_weights(**batch, mode=mode)[inside]
    packed, where = pack(batch, inside, form)
    found = rollout_weights(**packed, **where, mode=mode)
    assert found.is_nested == (form == "jagged")
    assert found.shape == packed["logp_old"].shape
    found = found.values() if form == "jagged" else found
    found = found[where["layout"].segments >= 0] if form == "rows" else found
    torch.testing.assert_close(found.flatten(), expected)


def test_they_are_weights_of_the_loss():
    batch, _ = tensors(3)
    logp = batch["logp_old"].clone().requires_grad_()
    weights = rollout_weights(**batch, mode="token_mask", lower=0.8, upper=1.2)
    tensors_of_loss = (logp, batch["logp_old"], torch.ones(len(logp), dtype=torch.float64), batch["mask"])
    loss = policy_loss(*tensors_of_loss, method=GRPO(), weights=weights).loss
    (found,) = torch.autograd.grad(loss, logp)
    assert torch.equal(found != 0, weights != 0)


@pytest.mark.slow
def test_in_one_graph():
    batch, _ = tensors(4)
    compiled = torch.compile(rollout_weights, backend="eager", fullgraph=True)
    for mode in MODES:
        torch.testing.assert_close(compiled(**batch, mode=mode), rollout_weights(**batch, mode=mode))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "truncate"}, "mode must be 'token_truncate', 'token_mask', .* got 'truncate'"),
        ({"lower": 3.0}, "0 <= lower <= upper must hold, got 3.0 and 2.0"),
        ({"upper": math.nan}, "0 <= lower <= upper must hold"),
        ({"logp_rollout": torch.full((1, 2), math.nan)}, "logp_rollout holds nan"),
        ({"logp_rollout": torch.full((1, 3), -1.0)}, r"logp_rollout has shape \(1, 3\)"),
    ],
)
def test_what_cannot_be_is_refused(settings, message):
    logp = torch.full((1, 2), -1.0)
    with pytest.raises(ValueError, match=message):
        rollout_weights(**({"logp_old": logp, "logp_rollout": logp} | settings))
