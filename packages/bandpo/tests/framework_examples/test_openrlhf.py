"""OpenRLHF's own loss, and the name by which its workers build it."""

import re
from types import SimpleNamespace

import pytest
import torch

from bandpo.testing import check_record
from contract import Contract, make_batch, written
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
    framework="openrlhf",
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


def call(loss_fn, batch, rollout=None):
    advantages = batch.advantages[:, None].expand_as(batch.mask)
    return loss_fn(batch.logp, batch.logp_old, advantages, action_mask=batch.mask, rollout_log_probs=rollout)


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

    def recorded(self, batch, folder):
        self.patch.setenv("BANDPO_RECORD", folder)
        return call(built(BandPolicyLoss), batch)

    def sequence_level(self, batch):
        built(BandPolicyLoss, policy_loss_type="gspo")


class Trainer:
    """OpenRLHF's trainer of the policy, with log-probabilities in place of a model: two updates of two losses."""

    args = SimpleNamespace(
        train=SimpleNamespace(dynamic_batch_enable=False, batch_size=128, max_epochs=1, async_enable=False),
        rollout=SimpleNamespace(temperature=0.7, top_p=0.9, batch_size=32, n_samples_per_prompt=8),
    )
    strategy = SimpleNamespace(accumulated_gradient=2)

    def __init__(self, batch):
        self.batch = batch
        self.actor_loss_fn = ppo_actor.PolicyLoss(**BUILT_WITH)

    def ppo_train(self, kl_ctl):
        for step in range(4):
            self.training_step(self.experience(), kl_ctl, step)

    def experience(self):
        rows, length = self.batch.mask.shape
        ids = torch.arange(rows * (length + 1)).view(rows, length + 1)
        ids[:, 0] = torch.arange(rows) // 2
        return SimpleNamespace(
            sequences=ids,
            attention_mask=torch.ones_like(ids),
            action_mask=self.batch.mask.bool(),
            rewards=self.batch.advantages[:, None] + 1,
            truncated=torch.arange(rows) == 2,
        )

    def training_step(self, experience, kl_ctl, step, loss_batch_info=None):
        advantages = self.batch.advantages[:, None].expand_as(self.batch.mask)
        rollout = self.batch.logp_old - 0.01
        tensors = (self.batch.logp, self.batch.logp_old, advantages)
        self.actor_loss_fn(*tensors, action_mask=experience.action_mask, rollout_log_probs=rollout)


def test_a_record_has_what_its_experience_says(monkeypatch, tmp_path):
    pytest.importorskip("pyarrow")
    assert {"ppo_train", "training_step"} <= vars(ppo_actor.ActorPPOTrainer).keys()
    monkeypatch.setattr(ppo_actor, "PolicyLoss", PolicyLoss)
    monkeypatch.setattr(ppo_actor, "ActorPPOTrainer", Trainer)
    for name in ("__init__", "ppo_train", "training_step"):
        monkeypatch.setattr(Trainer, name, vars(Trainer)[name])
    monkeypatch.setattr(bandpo_openrlhf, "PROGRESS", bandpo_openrlhf.Progress())
    monkeypatch.setenv("BANDPO_RECORD", str(tmp_path))
    monkeypatch.setenv("BANDPO_METHOD", "DAPO()")
    bandpo_openrlhf.patch()
    batch = make_batch(27)
    trainer = Trainer(batch)
    trainer.ppo_train(0.0)
    trainer.ppo_train(0.0)
    experience = trainer.experience()
    loss = written(
        batch,
        logp_rollout=batch.logp_old - 0.01,
        tokens=experience.sequences[:, 1:],
        group=experience.sequences[:, 0],
        reward=experience.rewards.flatten(),
        truncated=experience.truncated,
    )
    places = [(generation, step // 2) for generation in range(2) for step in range(4)]
    check_record(
        tmp_path,
        [loss | {"step": place[0], "generation": place[0], "update": place[1]} for place in places],
        sampling={"temperature": 0.7, "top_p": 0.9},
    )


def test_the_documented_hook_replaces_the_name_that_workers_build_it_by(monkeypatch):
    monkeypatch.setattr(ppo_actor, "PolicyLoss", PolicyLoss)
    for name in ("__init__", "ppo_train", "training_step"):
        monkeypatch.setattr(ppo_actor.ActorPPOTrainer, name, vars(ppo_actor.ActorPPOTrainer)[name])
    hook = re.search(
        r'"worker_process_setup_hook": "bandpo_openrlhf\.(\w+)"', framework_blocks("OpenRLHF")[0]
    )
    getattr(bandpo_openrlhf, hook[1])()
    assert ppo_actor.PolicyLoss is BandPolicyLoss


SAMPLERS = "Method(FixedClip(0.2), old_policy='rollout')"


def test_the_ratio_refers_to_the_sampler_where_the_method_says_so(monkeypatch):
    batch = make_batch(22, spread=1.0)
    rollout = (batch.logp_old - 0.3).where(batch.mask > 0, 0.0)
    monkeypatch.setenv("BANDPO_METHOD", SAMPLERS)
    with pytest.raises(ValueError, match=r"asks for none: use --algo.advantage.is_correction_level token"):
        built(BandPolicyLoss)
    correction = {"is_correction_level": "token", "is_correction_mode": "clip"}
    ours = call(built(BandPolicyLoss, **correction), batch, rollout)[0]
    # With the sampler's as the old ones, all of OpenRLHF's weights are 1.
    stock = built(PolicyLoss)
    advantages = batch.advantages[:, None].expand_as(batch.mask)
    expected = stock(batch.logp, rollout, advantages, action_mask=batch.mask, rollout_log_probs=rollout)[0]
    TestOpenRLHF().compare(batch, ours, expected)


def test_a_run_in_which_every_ratio_is_one_is_refused_when_a_worker_builds_its_trainer(monkeypatch, capsys):
    monkeypatch.setattr(ppo_actor, "PolicyLoss", PolicyLoss)
    monkeypatch.setattr(ppo_actor, "ActorPPOTrainer", Trainer)
    for name in ("__init__", "ppo_train", "training_step"):
        monkeypatch.setattr(Trainer, name, vars(Trainer)[name])
    monkeypatch.setenv("BANDPO_METHOD", "DAPO()")
    bandpo_openrlhf.patch()
    Trainer(make_batch(23))
    assert "anchor      the trainer's log-probabilities before" in capsys.readouterr().out
    monkeypatch.setattr(Trainer.args.train, "async_enable", True)
    Trainer(make_batch(23))
    said = capsys.readouterr().out
    assert "Training is asynchronous, and older weights sampled" in said
    assert "write the method as Method(..., old_policy='rollout')" in said
    monkeypatch.setattr(Trainer.args.train, "batch_size", 256)
    with pytest.raises(
        ValueError, match=r"every ratio is 1 .* training is asynchronous, so write the method"
    ):
        Trainer(make_batch(23))
    monkeypatch.setenv("BANDPO_ACCEPT_IDLE_CLIP", "1")
    Trainer(make_batch(23))


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
    assert (
        "aggregates its loss by seq-mean-token-mean; this framework replaces that with its own token-mean"
        in caplog.text
    )
