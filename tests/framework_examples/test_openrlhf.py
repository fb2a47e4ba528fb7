"""OpenRLHF's own loss, and the name by which its workers build it."""

import re

import pytest

from contract import Contract, make_batch
from helpers.frameworks import importing, needs
from pages import framework_blocks

needs("openrlhf")

with importing(
    *(
        "deepspeed",
        "flash_attn",
        "optree",
        "peft",
        "ray",
        "ring_flash_attn",
        "torchdata",
        "tqdm",
        "transformers",
    ),
    *("vllm", "wandb", "PIL"),
    *(
        f"openrlhf.{part}"
        for part in ("datasets", "models.actor", "models.model", "trainer.ppo_utils", "utils")
    ),
):
    import openrlhf.trainer.ray.ppo_actor as ppo_actor
    from openrlhf.models import PolicyLoss

    import bandpo_openrlhf
    from bandpo_openrlhf import BandPolicyLoss

BUILT_WITH = {
    "clip_eps_low": 0.2,
    "clip_eps_high": 0.2,
    "dual_clip": None,
    "token_level_loss": True,
    "policy_loss_type": "ppo",
    "is_correction_level": "off",
    "is_correction_mode": "mask",
    "is_correction_gating": "ratio",
    "is_correction_threshold": [0.5, 5.0],
}
"""What a worker gives, with the defaults of OpenRLHF's command line."""


def built(cls, **settings):
    return cls(**BUILT_WITH | settings)


def call(loss_fn, batch):
    advantages = batch.advantages[:, None].expand_as(batch.mask)
    return loss_fn(batch.logp, batch.logp_old, advantages, action_mask=batch.mask, rollout_log_probs=None)


class TestOpenRLHF(Contract):
    takes_dual_clip = True

    @pytest.fixture(autouse=True)
    def _environment(self, monkeypatch):
        self.patch = monkeypatch

    def ours(self, batch, clip):
        self.patch.setenv("BANDPO_METHOD", clip)
        return call(built(BandPolicyLoss), batch)[0]

    def stock(self, batch, low, high):
        return call(built(PolicyLoss, clip_eps_low=low, clip_eps_high=high), batch)[0]

    def sequence_level(self, batch):
        built(BandPolicyLoss, policy_loss_type="gspo")


def test_the_documented_hook_replaces_the_name_that_workers_build_it_by(monkeypatch):
    monkeypatch.setattr(ppo_actor, "PolicyLoss", PolicyLoss)
    hook = re.search(
        r'"worker_process_setup_hook": "bandpo_openrlhf\.(\w+)"', framework_blocks("openrlhf")[0]
    )
    getattr(bandpo_openrlhf, hook[1])()
    assert ppo_actor.PolicyLoss is BandPolicyLoss


def test_its_own_dual_clip_stands_beside_a_rule_alone(monkeypatch):
    monkeypatch.setenv("BANDPO_METHOD", "FixedClip(0.2)")
    batch = make_batch(21, spread=1.5)
    losses = [call(built(cls, dual_clip=1.5), batch)[0] for cls in (BandPolicyLoss, PolicyLoss)]
    TestOpenRLHF().compare(batch, *losses)
    assert losses[0] != call(built(BandPolicyLoss), batch)[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy_loss_type": "gspo"}, "^--actor.policy_loss_type=gspo: it makes one ratio of a sequence"),
        ({"clip_eps_high": 0.28}, r"^--actor.eps_clip_low_high=\(0.2, 0.28\): it would have no effect"),
        ({"dual_clip": 3.0}, "^--actor.dual_clip=3.0: the method and this setting"),
    ],
)
def test_settings_that_make_its_loss_another_one_are_refused(settings, message, monkeypatch):
    monkeypatch.setenv("BANDPO_METHOD", "DAPO()")
    with pytest.raises(ValueError, match=message):
        built(BandPolicyLoss, **settings)


def test_one_line_says_where_it_averages_in_another_way(monkeypatch, caplog):
    monkeypatch.setenv("BANDPO_METHOD", "GRPO(0.13)")
    built(BandPolicyLoss)
    assert "has the average seq-mean-token-mean; this framework's own, token-mean" in caplog.text
