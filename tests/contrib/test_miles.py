"""miles needs Megatron: as in test_slime, its ``policy_loss_function`` is stood in for."""

import pytest
import torch
from test_slime import call, policy_loss_function

from bandpo_miles import policy_loss
from contract import Contract, make_batch
from stand_ins import stand_in


@pytest.fixture(autouse=True)
def _miles(monkeypatch):
    home = "miles.backends.training_utils.loss_hub.losses"
    stand_in(monkeypatch, home, policy_loss_function=policy_loss_function)


class TestMiles(Contract):
    def ours(self, batch, clip):
        return call(policy_loss, batch, clip=clip)[0]

    def stock(self, batch, low, high):
        return call(policy_loss_function, batch, eps_clip=low, eps_clip_high=high)[0]

    def sequence_level(self, batch):
        call(policy_loss, batch, advantage_estimator="gspo")


def test_the_anchor_follows_its_switch():
    batch = make_batch(15)
    trainer, sampler = (call(policy_loss, batch, use_rollout_logprobs=on)[0] for on in (False, True))
    assert not torch.equal(trainer, sampler)
