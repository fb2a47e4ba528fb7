import sys
import typing

import pytest
import torch

from contract import Contract, make_batch

pytest.importorskip("skyrl", reason="needs skyrl, which needs Python 3.12")

if sys.version_info < (3, 12):
    # SkyRL declares 3.12 because pydantic refuses typing.TypedDict below it; the rest of it runs on 3.11.
    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict

from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry, ppo_policy_loss
from skyrl.train.config.config import AlgorithmConfig

from bandpo import policy_loss
from bandpo.integrations.skyrl import BandAlgorithmConfig, band, settings


def call(loss_fn, config, batch, rollout=None):
    """As SkyRL's worker does: three by position, the rest by name."""
    tensors = batch.logp, batch.logp_old, batch.advantages[:, None].expand_as(batch.mask)
    return loss_fn(*tensors, config=config, loss_mask=batch.mask, rollout_logprobs=rollout)


class TestSkyRL(Contract):
    any_method = True
    takes_bias = False
    aggregation = "sum"
    shows_clipped_value = False

    def ours(self, batch, clip):
        return call(band, BandAlgorithmConfig(method=clip), batch, rollout=batch.logp_old)[0]

    def stock(self, batch, low, high):
        return call(ppo_policy_loss, AlgorithmConfig(eps_clip_low=low, eps_clip_high=high), batch)[0]

    def recorded(self, batch, folder):
        return call(band, BandAlgorithmConfig(record=folder), batch)

    def sequence_level(self, batch):
        batch.logp_old = batch.logp_old.mean(1, keepdim=True)
        self.ours(batch, "Band(KL(), 0.05)")


def test_dual_clip_and_importance_correction_are_skyrls():
    batch = make_batch(14, spread=1.0)
    stock = AlgorithmConfig(policy_loss_type="dual_clip", clip_ratio_c=1.5)
    ours = BandAlgorithmConfig(method="Method(FixedClip(), DualClip(1.5))")
    for config in (stock, ours):
        config.off_policy_correction.tis_ratio_type = "token"
        config.off_policy_correction.token_tis_ratio_clip_high = 1.2
    rollout = batch.logp_old - 0.3 * torch.rand_like(batch.logp_old)
    expected, theirs = call(ppo_policy_loss, stock, batch, rollout)
    loss, metrics = call(band, ours, batch, rollout)
    torch.testing.assert_close(loss, expected)
    assert {name: metrics[name] for name in theirs} == pytest.approx(theirs, rel=1e-5)
    unweighted, _ = call(band, ours, batch)
    assert loss != unweighted


def test_the_command_line_reaches_the_loss_and_the_registry_takes_it():
    ours = "trainer.override_entrypoint=bandpo.integrations.skyrl"
    algorithm = settings([ours, "trainer.algorithm.method=FixedClip(0.1, 0.3)"]).trainer.algorithm
    assert (algorithm.policy_loss_type, algorithm.method) == ("band", "FixedClip(0.1, 0.3)")
    PolicyLossRegistry.register("band", band)
    assert PolicyLossRegistry.get("band") is band


def test_a_method_from_the_command_line_is_the_cores():
    algorithm = settings(["trainer.algorithm.method=GSPO(0.1, 0.2)"]).trainer.algorithm
    batch = make_batch(18, spread=1.5)
    loss, metrics = call(band, algorithm, batch)
    rest = (batch.logp_old, batch.advantages, batch.mask)
    expected = policy_loss(batch.logp, *rest, method="GSPO(0.1, 0.2)", aggregation="sum")
    TestSkyRL().compare(batch, loss, expected.loss)
    assert metrics["approx_kl"] == pytest.approx(expected.metrics["approx_kl"].item())


@pytest.mark.parametrize(("name", "near"), [("method=Bnd()", "Band"), ("method=SAP0()", "SAPO")])
def test_a_bad_setting_is_refused_before_training(name, near):
    with pytest.raises(ValueError, match=rf"trainer\.algorithm\.method: .*did you mean {near}"):
        settings([f"trainer.algorithm.{name}"])


@pytest.mark.parametrize("method", ["DPPO()", "IcePop()"])
def test_the_old_policy_is_the_samplers_where_the_method_says_so(method):
    batch, config = make_batch(15), BandAlgorithmConfig(method=method)
    with pytest.raises(ValueError, match=r"sampling_params\.logprobs=1"):
        call(band, config, batch)
    rollout = (batch.logp_old - 0.3).where(batch.mask > 0, 0.0)
    loss, _ = call(band, config, batch, rollout)
    tensors = (batch.logp, rollout, batch.advantages, batch.mask)
    torch.testing.assert_close(loss, policy_loss(*tensors, method=method, aggregation="sum").loss)


def test_a_method_brings_its_average_unless_the_user_sets_another(caplog):
    for text, reduction in (
        ("GRPO()", "sequence_mean"),
        ("DAPO()", "token_mean"),
        ("FixedClip()", "token_mean"),
    ):
        assert BandAlgorithmConfig(method=text).loss_reduction == reduction
    assert not caplog.records
    assert BandAlgorithmConfig(method="GRPO()", loss_reduction="prompt_mean").loss_reduction == "prompt_mean"
    assert "loss_reduction=prompt_mean averages in place of GRPO" in caplog.text
