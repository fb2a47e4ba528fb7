"""Molt is not on the package index: the part of ``molt.models.loss`` that the adapter meets is written out here, its
registry and the interface of a surrogate, with a PPO surrogate of our own in it."""

import sys

import pytest
import torch

from bandpo_molt import install
from contract import Contract, make_batch
from stand_ins import stand_in


def ppo_policy_loss(
    ratio, advantages, log_probs, action_mask, *, clip_eps_low, clip_eps_high, dual_clip, **_
):
    inside, clamped = ratio * advantages, ratio.clamp(1 - clip_eps_low, 1 + clip_eps_high) * advantages
    loss = -torch.minimum(inside, clamped)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    clipped = (clamped < inside).float()
    return loss, (clipped * action_mask).sum() / action_mask.sum()


@pytest.fixture(autouse=True)
def molt(monkeypatch):
    losses = {"ppo_policy_loss": ppo_policy_loss, "POLICY_LOSSES": {"ppo": ppo_policy_loss}}
    module = stand_in(monkeypatch, "molt.models.loss", **losses)
    sys.modules["molt.models"].loss = module
    return module


def call(surrogate, batch, low=0.2, high=0.2, dual_clip=None):
    """As Molt's ``PolicyLoss.forward``: ratios and advantages 0 in padding, then a mean over tokens."""
    mask = batch.mask.bool()
    log_ratio = torch.nan_to_num(batch.logp - batch.logp_old).masked_fill(~mask, 0.0).clamp(-30, 30)
    advantages = batch.advantages[:, None].expand_as(batch.logp).masked_fill(~mask, 0.0)
    loss, clipped = surrogate(
        log_ratio.exp(), advantages, batch.logp, batch.mask,
        clip_eps_low=low, clip_eps_high=high, dual_clip=dual_clip, policy_log_ratio=log_ratio,
    )  # fmt: skip
    return (loss * batch.mask).sum() / batch.mask.sum(), clipped


class TestMolt(Contract):
    def ours(self, batch, clip):
        install(clip=clip)
        return call(sys.modules["molt.models.loss"].POLICY_LOSSES["ppo"], batch)[0]

    def stock(self, batch, low, high):
        return call(ppo_policy_loss, batch, low, high)[0]

    def sequence_level(self, batch):
        install(method="GSPO()")


def test_installed_twice_the_later_rule_holds(molt):
    batch = make_batch(16)
    install(clip="Band(KL(), 0.5)")
    install(method="DAPO()")
    assert torch.equal(call(molt.POLICY_LOSSES["ppo"], batch)[0], call(ppo_policy_loss, batch, 0.2, 0.28)[0])


def test_the_dual_clip_stays(molt):
    batch = make_batch(17, spread=2.0)
    install(clip="FixedClip(0.2, 0.2)")
    ours = call(molt.POLICY_LOSSES["ppo"], batch, dual_clip=2.0)
    torch.testing.assert_close(ours, call(ppo_policy_loss, batch, dual_clip=2.0))
    assert not torch.equal(ours[0], call(ppo_policy_loss, batch)[0])
