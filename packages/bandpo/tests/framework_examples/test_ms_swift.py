"""The trainer's own loss, on trainers that were not constructed: that takes a model, which the loss never looks at."""

import importlib
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from bandpo.testing import check_record
from contract import Contract, make_batch, written
from helpers.frameworks import importing, needs
from rlvet.records.record import read_record

needs("swift")

with importing(framework="swift"):
    from swift.rl_core.data import GRPOBatch
    from swift.rlhf_trainers.arguments import GRPOConfig
    from swift.rlhf_trainers.grpo_trainer import GRPOTrainer
    from swift.trainers.trainer_factory import TrainerFactory

    from bandpo_ms_swift import BandGRPOTrainer


NAMED = TrainerFactory.TRAINER_MAPPING["grpo"]


def trainer(cls, **settings):
    settings = {"loss_type": "bnpo", "num_iterations": 2} | settings
    # A model's precision is no matter of the loss, and Liger is not installed.
    liger = settings.pop("use_liger_kernel", False)
    args = GRPOConfig(output_dir="unused", use_cpu=True, bf16=False, report_to="none", **settings)
    args.use_liger_kernel = liger
    made = object.__new__(cls)
    made.args, made.model = args, SimpleNamespace(training=True)
    made._prepare_algorithm_params()
    vars(made).update(
        accelerator=SimpleNamespace(num_processes=1, gather_for_metrics=lambda x: x),
        beta=0.0,
        compute_entropy=False,
        disable_rollout_importance_sampling=False,
        model_accepts_loss_kwargs=False,
        compute_loss_func=None,
        current_gradient_accumulation_steps=1,
        _has_teacher=False,
        chord_sft_iterator=None,
        state=SimpleNamespace(global_step=3),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    return made


def call(made, batch, monkeypatch, old=True, inputs=None, rollout=None):
    """Return the loss of a batch with given log-probabilities in place of a model's."""
    given = GRPOBatch(
        completion_mask=batch.mask.bool(),
        truncated_mask=torch.arange(len(batch.mask)) == 2,
        seq_lengths=batch.mask.sum(1),
        old_per_token_logps=batch.logp_old if old else None,
        rollout_per_token_logps=rollout,
        advantages=batch.advantages[:, None].expand_as(batch.logp),
        num_items_in_batch=batch.mask.sum(),
    )
    monkeypatch.setattr(
        GRPOTrainer, "_get_per_token_logps_and_entropies", lambda *_, **__: (batch.logp, None)
    )
    return made._compute_loss_and_metrics(None, inputs or {}, given)


class TestMsSwift(Contract):
    @pytest.fixture(autouse=True)
    def _environment(self, monkeypatch):
        self.patch = monkeypatch

    def ours(self, batch, clip):
        self.patch.setenv("BANDPO_METHOD", clip)
        return call(trainer(BandGRPOTrainer), batch, self.patch)[0]

    def stock(self, batch, low, high):
        return call(trainer(GRPOTrainer, epsilon=low, epsilon_high=high), batch, self.patch)[0]

    def recorded(self, batch, folder):
        self.patch.setenv("BANDPO_RECORD", folder)
        return call(trainer(BandGRPOTrainer), batch, self.patch)

    def sequence_level(self, batch):
        trainer(BandGRPOTrainer, importance_sampling_level="sequence")


def test_a_record_has_ids_prompts_cuts_and_the_place_in_training(monkeypatch, tmp_path):
    pytest.importorskip("pyarrow")
    monkeypatch.setenv("BANDPO_RECORD", str(tmp_path))
    batch = make_batch(27)
    prompts = torch.arange(len(batch.mask)) // 2
    ids = torch.arange(batch.mask.numel()).view(batch.mask.shape)
    inputs = {"input_ids": torch.cat([prompts[:, None], ids], 1)}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    settings = {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "num_generations": 2}
    made = trainer(BandGRPOTrainer, **settings, temperature=0.8)
    made._step, made.num_iterations = 11, 2
    call(made, batch, monkeypatch, inputs=inputs)
    loss = written(
        batch,
        tokens=ids,
        group=prompts,
        truncated=torch.arange(len(batch.mask)) == 2,
        step=3,
        generation=1,
        update=1,
    )
    check_record(tmp_path, [loss])
    (read,) = read_record(tmp_path)
    assert read.sampling["temperature"] == 0.8


def test_its_factory_names_this_trainer():
    module, _, name = NAMED.rpartition(".")
    assert getattr(importlib.import_module(module), name) is BandGRPOTrainer


def test_its_own_settings_come_back_after_each_loss(monkeypatch):
    made = trainer(BandGRPOTrainer)
    _, metrics = call(made, make_batch(18), monkeypatch)
    assert (made.epsilon_low, made.epsilon_high) == (0.2, 0.2)
    # Its metrics are of the method's bounds.
    assert 0 < metrics["clipping"]["region_clip_mean"] < 1


def test_without_old_log_probabilities_it_is_left_alone(monkeypatch):
    batch = make_batch(19)
    losses = [call(trainer(cls), batch, monkeypatch, old=False)[0] for cls in (BandGRPOTrainer, GRPOTrainer)]
    assert torch.equal(*losses)


SAMPLERS = "Method(FixedClip(0.2), old_policy='rollout')"


def test_a_run_in_which_every_ratio_is_one_is_refused(monkeypatch, capsys):
    once = {
        "num_iterations": 1,
        "steps_per_generation": 4,
        "gradient_accumulation_steps": 4,
        "num_generations": 2,
    }
    with pytest.raises(ValueError, match=r"every ratio is 1 .*: use --num_iterations 2"):
        trainer(BandGRPOTrainer, **once)
    for remedy in ({"num_iterations": 2}, {"steps_per_generation": 8}):
        trainer(BandGRPOTrainer, **once | remedy)
    trainer(GRPOTrainer, **once)
    capsys.readouterr()
    trainer(BandGRPOTrainer, **once | {"num_iterations": 2, "async_generate": True})
    assert "Training is asynchronous, and older weights sampled" in capsys.readouterr().out
    with pytest.raises(
        ValueError, match=r"every ratio is 1 .*: training is asynchronous, so write the method"
    ):
        trainer(BandGRPOTrainer, **once, async_generate=True)
    monkeypatch.setenv("BANDPO_METHOD", SAMPLERS)
    trainer(BandGRPOTrainer, **once, async_generate=True)
    assert "anchor      the sampler's log-probabilities" in capsys.readouterr().out
    monkeypatch.setenv("BANDPO_METHOD", "DAPO()")
    monkeypatch.setenv("BANDPO_ACCEPT_IDLE_CLIP", "1")
    trainer(BandGRPOTrainer, **once)


def test_the_ratio_refers_to_the_sampler_where_the_method_says_so(monkeypatch):
    batch = make_batch(22, spread=1.0)
    rollout = batch.logp_old - 0.3
    monkeypatch.setenv("BANDPO_METHOD", SAMPLERS)
    with pytest.raises(ValueError, match="the batch has none: use --use_vllm true"):
        call(trainer(BandGRPOTrainer), batch, monkeypatch)
    ours = call(trainer(BandGRPOTrainer), batch, monkeypatch, rollout=rollout)[0]
    monkeypatch.setenv("BANDPO_METHOD", "FixedClip(0.2)")
    batch.logp_old = rollout
    TestMsSwift().compare(batch, ours, call(trainer(BandGRPOTrainer), batch, monkeypatch)[0])


def test_a_record_has_the_ratio_cap_that_stands_beside_a_rule(monkeypatch, tmp_path):
    pytest.importorskip("pyarrow")
    monkeypatch.setenv("BANDPO_RECORD", str(tmp_path))
    monkeypatch.setenv("BANDPO_METHOD", "FixedClip(0.2)")
    call(trainer(BandGRPOTrainer, delta=3.0), make_batch(20), monkeypatch)
    (loss,) = read_record(tmp_path)
    assert "RatioCap(max_ratio=3.0" in loss.method


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_liger_kernel": True}, "^--use_liger_kernel=True: Liger would compute the loss"),
        ({"loss_type": "cispo"}, "^--loss_type=cispo: "),
        ({"loss_type": "fipo"}, "^--loss_type=fipo: "),
        ({"epsilon": 0.1}, "^--epsilon=0.1: it would have no effect"),
        ({"epsilon_high": 0.28}, "^--epsilon_high=0.28: it would have no effect"),
        ({"delta": 3.0}, "^--delta=3.0: the method and this setting"),
    ],
)
def test_settings_that_make_its_loss_another_one_are_refused(settings, message, monkeypatch):
    monkeypatch.setenv("BANDPO_METHOD", "DAPO()")
    with pytest.raises(ValueError, match=message):
        trainer(BandGRPOTrainer, **settings)


def test_a_method_that_is_more_than_bounds_is_refused(monkeypatch):
    monkeypatch.setenv("BANDPO_METHOD", "SAPO()")
    with pytest.raises(ValueError, match=r"^BANDPO_method: 'SAPO\(\)' is SigmoidGate"):
        trainer(BandGRPOTrainer)
