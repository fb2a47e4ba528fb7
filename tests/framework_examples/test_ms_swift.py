"""ms-swift needs ModelScope. The parts of ``GRPOTrainer`` that the adapter meets are written out here: the settings
that it reads, the batch that its loss takes, PPO's clamp in between, and the mapping by which it finds its trainer."""

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch

from contract import Contract, make_batch
from stand_ins import stand_in


class GRPOTrainer:
    def __init__(self, loss_type="bnpo", importance_sampling_level="token", epsilon=0.2, epsilon_high=None):
        self.args = SimpleNamespace(**{k: v for k, v in locals().items() if k != "self"})
        self.model, self.state = SimpleNamespace(training=True), SimpleNamespace(global_step=3)
        self._prepare_algorithm_params()

    def _prepare_algorithm_params(self):
        self.loss_type = self.args.loss_type
        self.importance_sampling_level = self.args.importance_sampling_level
        self.epsilon_low = self.args.epsilon
        self.epsilon_high = self.args.epsilon if self.args.epsilon_high is None else self.args.epsilon_high

    def _get_per_token_logps_and_entropies(self, model, model_inputs, batch, compute_entropy=False):
        return model_inputs["logp"], None

    def _compute_loss_and_metrics(self, model, model_inputs, batch):
        logp, _ = self._get_per_token_logps_and_entropies(model, model_inputs, batch)
        old = logp.detach() if batch.old_per_token_logps is None else batch.old_per_token_logps
        mask = batch.completion_mask
        # ms-swift's own batches are padded with finite values; the contract pads with anything.
        ratio = (logp - old.masked_fill(mask == 0, 0.0)).masked_fill(mask == 0, 0.0).exp()
        clamped = torch.clamp(ratio, 1 - self.epsilon_low, 1 + self.epsilon_high)
        loss = -torch.min(ratio * batch.advantages, clamped * batch.advantages)
        low = ((ratio < 1 - self.epsilon_low) & (batch.advantages < 0)).float()
        return (loss * mask).sum() / mask.sum(), {"low_clip": (low * mask).sum() / mask.sum()}


@pytest.fixture(autouse=True)
def adapter(monkeypatch):
    stand_in(monkeypatch, "swift.rlhf_trainers", GRPOTrainer=GRPOTrainer)
    factory = SimpleNamespace(TRAINER_MAPPING={"grpo": "swift.rlhf_trainers.GRPOTrainer"})
    stand_in(monkeypatch, "swift.trainers.trainer_factory", TrainerFactory=factory)
    sys.modules.pop("bandpo_ms_swift", None)
    yield importlib.import_module("bandpo_ms_swift")
    sys.modules.pop("bandpo_ms_swift", None)


def call(trainer, batch, old=True):
    inputs = SimpleNamespace(
        old_per_token_logps=batch.logp_old if old else None,
        rollout_per_token_logps=None,
        completion_mask=batch.mask,
        advantages=batch.advantages[:, None].expand_as(batch.logp),
    )
    return trainer._compute_loss_and_metrics(None, {"logp": batch.logp}, inputs)


class TestMsSwift(Contract):
    @pytest.fixture(autouse=True)
    def _environment(self, adapter, monkeypatch):
        self.adapter, self.patch = adapter, monkeypatch

    def ours(self, batch, clip):
        self.patch.setenv("BANDPO_METHOD", clip)
        return call(self.adapter.BandGRPOTrainer(), batch)[0]

    def stock(self, batch, low, high):
        return call(GRPOTrainer(epsilon=low, epsilon_high=high), batch)[0]

    def recorded(self, batch, folder):
        self.patch.setenv("BANDPO_RECORD", folder)
        return call(self.adapter.BandGRPOTrainer(), batch)

    def sequence_level(self, batch):
        self.adapter.BandGRPOTrainer(importance_sampling_level="sequence")


def test_its_factory_finds_our_trainer(adapter):
    path = sys.modules["swift.trainers.trainer_factory"].TrainerFactory.TRAINER_MAPPING["grpo"]
    module, _, name = path.rpartition(".")
    assert getattr(importlib.import_module(module), name) is adapter.BandGRPOTrainer


def test_its_own_settings_come_back_after_each_loss(adapter):
    trainer = adapter.BandGRPOTrainer(epsilon=0.1)
    _, metrics = call(trainer, make_batch(18))
    assert (trainer.epsilon_low, trainer.epsilon_high) == (0.1, 0.1)
    assert 0 < metrics["low_clip"] < 1  # its metrics are of our bounds


def test_with_one_update_per_batch_it_is_left_alone(adapter):
    batch = make_batch(19)
    ours, stock = (call(made, batch, old=False)[0] for made in (adapter.BandGRPOTrainer(), GRPOTrainer()))
    assert torch.equal(ours, stock)


def test_what_it_cannot_do_is_refused_at_construction(adapter, monkeypatch):
    with pytest.raises(ValueError, match="--loss_type cispo does not clamp the ratio"):
        adapter.BandGRPOTrainer(loss_type="cispo")
    monkeypatch.setenv("BANDPO_METHOD", "SAPO()")
    with pytest.raises(ValueError, match=r"^BANDPO_method: 'SAPO\(\)' is SigmoidGate"):
        adapter.BandGRPOTrainer()
