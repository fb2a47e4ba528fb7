"""ROLL's own actor and loss, without its configurations and its models. It is not on the package index."""

import importlib
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
import yaml

from bandpo.testing import check_record
from contract import Contract, make_batch, written
from helpers.frameworks import importing, needs
from pages import framework_blocks

needs("roll", clone="ROLL")

PARTS = ("distributed", "models", "platforms", "configs", "pipeline.rlvr.rlvr_config", "pipeline.agentic")
UTILS = ("logging", "checkpoint_manager", "context_managers", "dynamic_batching", "kl_controller")
UTILS += ("offload_nccl", "offload_states")
with importing(
    *("codetiming", "ray", "tensordict", "tqdm"),
    *(f"roll.{part}" for part in PARTS),
    *(f"roll.utils.{part}" for part in UTILS),
    framework="roll",
):
    from roll.pipeline.rlvr.actor_worker import ActorWorker

    from bandpo_roll import BandActorWorker

DEFAULTS = {
    "pg_clip": 0.2,
    "use_pg_clip_range": False,
    "pg_clip_low": 0.2,
    "pg_clip_high": 0.2,
    "importance_sampling": "token",
    "dual_clip_loss": False,
    "loss_agg_mode": "seq-mean-token-mean",
    "use_kl_loss": False,
    "kl_loss_coef": 0.0,
    "entropy_loss_coef": 0.0,
    "rl_loss_coef": 1.0,
    "difficulty_loss_weight": False,
    "length_loss_weight": False,
    "rollout_batch_size": 64,
    "ppo_epochs": 1,
    "async_generation_ratio": 0,
    "actor_infer": SimpleNamespace(generating_args=SimpleNamespace(num_return_sequences=8)),
}
"""Of ROLL's settings, what the loss reads."""


def call(cls, batch, more=None, **settings):
    """Return the loss of tokens, after the first column that ROLL removes.

    Args:
        more: Further columns of the batch.
    """
    correction = SimpleNamespace(is_weight=SimpleNamespace(enabled=False))
    worker = object.__new__(cls)
    worker.pipeline_config = SimpleNamespace(
        **DEFAULTS | settings, enable_old_logprobs_recompute=True, train_infer_correction=correction
    )
    worker.worker_config = SimpleNamespace(
        training_args=SimpleNamespace(per_device_train_batch_size=2, gradient_accumulation_steps=32)
    )
    worker.rank_info = SimpleNamespace(dp_size=4)
    worker.strategy = SimpleNamespace(op_compute_log_probs=lambda **_: batch.logp)
    tokens, samples = {"response_mask": batch.mask.sum()}, {"response_mask": len(batch.mask)}
    tensors = {
        "response_mask": torch.nn.functional.pad(batch.mask, (1, 0)),
        "ref_log_probs": torch.zeros_like(batch.mask),
        "advantages": batch.advantages[:, None].expand_as(batch.mask),
        "old_log_probs": batch.logp_old,
        "train_infer_is_weight": torch.ones_like(batch.mask),
        "input_ids": None,
        **(more or {}),
    }
    data = SimpleNamespace(
        batch=tensors,
        meta_info={"global_step": 7, "batch_num_tokens": tokens, "global_valid_samples": samples},
        non_tensor_batch=defaultdict(list),
    )
    return worker.loss_func(data, None)[0]


class TestROLL(Contract):
    aggregation = "seq-mean-token-mean"
    takes_dual_clip = True

    @pytest.fixture(autouse=True)
    def _environment(self, monkeypatch):
        self.patch = monkeypatch

    def ours(self, batch, clip):
        self.patch.setenv("BANDPO_METHOD", clip)
        return call(BandActorWorker, batch, use_pg_clip_range=True)

    def stock(self, batch, low, high):
        return call(ActorWorker, batch, use_pg_clip_range=True, pg_clip_low=low, pg_clip_high=high)

    def recorded(self, batch, folder):
        self.patch.setenv("BANDPO_RECORD", folder)
        return call(BandActorWorker, batch, use_pg_clip_range=True)

    def sequence_level(self, batch):
        call(BandActorWorker, batch, use_pg_clip_range=True, importance_sampling="seq")


def test_a_record_has_scores_and_prompts(monkeypatch, tmp_path):
    pytest.importorskip("pyarrow")
    monkeypatch.setenv("BANDPO_RECORD", str(tmp_path))
    batch = make_batch(27)
    prompts = torch.arange(len(batch.mask)) // 2
    ids = torch.arange(batch.mask.numel()).view(batch.mask.shape)
    more = {
        "input_ids": torch.cat([prompts[:, None], ids], 1),
        "attention_mask": torch.nn.functional.pad(batch.mask, (1, 0), value=1),
        "infer_logprobs": batch.logp_old - 0.01,
        "scores": batch.advantages + 1,
    }
    generating_args = SimpleNamespace(temperature=0.9, top_p=0.99, top_k=100, num_return_sequences=8)
    settings = {"use_pg_clip_range": True, "actor_infer": SimpleNamespace(generating_args=generating_args)}
    call(BandActorWorker, batch, more, **settings)
    loss = written(
        batch,
        logp_rollout=batch.logp_old - 0.01,
        tokens=ids,
        group=prompts,
        reward=batch.advantages + 1,
        step=7,
        generation=7,
    )
    check_record(tmp_path, [loss], sampling={"temperature": 0.9, "top_p": 0.99, "top_k": 100})


SAMPLERS = "Method(FixedClip(0.2), old_policy='rollout')"


def test_the_ratio_refers_to_the_sampler_where_the_method_says_so(monkeypatch):
    batch = make_batch(22, spread=1.0)
    rollout = batch.logp_old - 0.3
    settings = {"use_pg_clip_range": True}
    monkeypatch.setenv("BANDPO_METHOD", SAMPLERS)
    with pytest.raises(
        ValueError, match=r"the batch has none: set actor_infer\.generating_args\.logprobs: 1"
    ):
        call(BandActorWorker, batch, **settings)
    ours = call(BandActorWorker, batch, {"infer_logprobs": rollout}, **settings)
    monkeypatch.setenv("BANDPO_METHOD", "FixedClip(0.2)")
    batch.logp_old = rollout
    TestROLL().compare(batch, ours, call(BandActorWorker, batch, **settings))


def test_a_run_in_which_every_ratio_is_one_is_refused(monkeypatch, capsys):
    batch = make_batch(23)
    settings = {"use_pg_clip_range": True, "rollout_batch_size": 32}
    monkeypatch.setenv("BANDPO_METHOD", "DAPO()")
    with pytest.raises(ValueError, match=r"every ratio is 1 .*: set ppo_epochs: 2"):
        call(BandActorWorker, batch, **settings)
    call(BandActorWorker, batch, **settings, ppo_epochs=2)
    with pytest.raises(
        ValueError, match=r"every ratio is 1 .*: training is asynchronous, so write the method"
    ):
        call(BandActorWorker, batch, **settings, async_generation_ratio=1)
    capsys.readouterr()
    call(BandActorWorker, batch, use_pg_clip_range=True, async_generation_ratio=1)
    assert "Training is asynchronous, and older weights sampled" in capsys.readouterr().out
    monkeypatch.setenv("BANDPO_ACCEPT_IDLE_CLIP", "1")
    call(BandActorWorker, batch, **settings)


def test_its_own_dual_clip_stands_beside_a_rule_alone(monkeypatch):
    monkeypatch.setenv("BANDPO_METHOD", "FixedClip(0.2)")
    batch = make_batch(21, spread=1.5)
    settings = {"use_pg_clip_range": True, "dual_clip_loss": True}
    ours, stock = (call(cls, batch, **settings) for cls in (BandActorWorker, ActorWorker))
    TestROLL().compare(batch, ours, stock)
    assert ours != call(BandActorWorker, batch, use_pg_clip_range=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "^use_pg_clip_range=False: ROLL would clip at pg_clip"),
        ({"use_pg_clip_range": True, "importance_sampling": "seq"}, "^importance_sampling=seq: "),
        ({"use_pg_clip_range": True, "pg_clip_high": 0.28}, "^pg_clip_high=0.28: it would have no effect"),
        ({"use_pg_clip_range": True, "dual_clip_loss": True}, "^dual_clip_loss=True: the method and this"),
    ],
)
def test_settings_that_make_its_loss_another_one_are_refused(settings, message, monkeypatch):
    monkeypatch.setenv("BANDPO_METHOD", "DAPO()")
    with pytest.raises(ValueError, match=message):
        call(BandActorWorker, make_batch(), **settings)


def test_the_documented_configuration(monkeypatch):
    settings = yaml.safe_load(framework_blocks("ROLL")[0])
    actor = settings.pop("actor_train")
    module, _, name = actor["worker_cls"].rpartition(".")
    monkeypatch.setenv("BANDPO_METHOD", actor["system_envs"]["BANDPO_METHOD"])
    loss = call(getattr(importlib.import_module(module), name), make_batch(29), **settings)
    assert loss == call(BandActorWorker, make_batch(29), use_pg_clip_range=True)
