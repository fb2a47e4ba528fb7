import copy
import sys
import typing
from dataclasses import asdict

import pytest
import torch

from contract import Contract, make_batch
from helpers.frameworks import needs

needs("skyrl")

if sys.version_info < (3, 12):
    # SkyRL declares 3.12 because pydantic refuses typing.TypedDict below it; the rest of it runs on 3.11.
    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict

from omegaconf import OmegaConf
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry, PolicyLossType, ppo_policy_loss
from skyrl.train.config.config import AlgorithmConfig

from bandpo import policy_loss
from bandpo.core.methods import METHODS
from bandpo.core.text import as_method
from bandpo.integrations import skyrl
from bandpo.integrations._adapt import has_bias
from bandpo.integrations.skyrl import (
    BandAlgorithmConfig,
    band,
    probe_loss,
    settings,
)
from rlvet.runs.configs import read_configuration


def call(loss_fn, config, batch, rollout=None):
    """As SkyRL's worker does: three by position, the rest by name."""
    tensors = batch.logp, batch.logp_old, batch.advantages[:, None].expand_as(batch.mask)
    return loss_fn(*tensors, config=config, loss_mask=batch.mask, rollout_logprobs=rollout)


class TestSkyRL(Contract):
    any_method = True
    takes_bias = False
    aggregation = "sum"

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
    assert "loss_reduction=prompt_mean replaces the loss aggregation of GRPO" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trainer.algorithm.eps_clip_high=0.28"], "eps_clip_high=0.28: it would have no effect"),
        (
            ["trainer.algorithm.clip_ratio_c=5.0"],
            "clip_ratio_c=5.0: it is a setting of SkyRL's loss dual_clip",
        ),
        (["trainer.algorithm.sapo.tau_pos=2.0"], "sapo.tau_pos=2.0: it is a setting of SkyRL's loss sapo"),
        (
            ["trainer.algorithm.policy_loss_type=regular", "trainer.algorithm.method=DAPO()"],
            "method=DAPO\\(\\): trainer.algorithm.policy_loss_type=regular is SkyRL's own loss",
        ),
        (
            ["trainer.algorithm.policy_loss_type=dppo", "trainer.algorithm.record=/tokens"],
            "record=/tokens: trainer.algorithm.policy_loss_type=dppo is SkyRL's own loss",
        ),
        (
            [
                "trainer.algorithm.method=DPPO()",
                "trainer.algorithm.off_policy_correction.tis_ratio_type=token",
            ],
            "off_policy_correction.tis_ratio_type=token: the ratio of DPPO",
        ),
        (
            ["trainer.algorithm.method=IcePop()", "trainer.algorithm.use_tis=true"],
            "use_tis=True: the ratio of IcePop",
        ),
        (
            ["trainer.fully_async.enabled=true", "trainer.algorithm.use_tis=true"],
            "use_tis=True: the ratio of Method",
        ),
    ],
)
def test_settings_that_make_its_loss_another_one_are_refused(arguments, message):
    with pytest.raises(ValueError, match=f"^trainer\\..*{message}"):
        settings(arguments)


def test_skyrls_own_losses_stay_as_they_are():
    algorithm = settings(
        ["trainer.algorithm.policy_loss_type=dual_clip", "trainer.algorithm.clip_ratio_c=5.0"]
    )
    assert algorithm.trainer.algorithm.loss_reduction == "token_mean"
    settings(["trainer.algorithm.method=DPPO()", "trainer.fully_async.enabled=true"])


ASYNCHRONOUS = "trainer.fully_async.enabled=true"


@pytest.mark.parametrize("name", sorted(METHODS))
def test_in_an_asynchronous_run_every_ratio_refers_to_the_sampler(name):
    method = METHODS[name].method()
    if method.whole_batch or has_bias(method):
        pytest.skip("refused in synchronous runs, too")
    algorithm = settings([f"trainer.algorithm.method={name}()", ASYNCHRONOUS]).trainer.algorithm
    batch = make_batch(29, (16, 40), spread=0.5)
    rollout = (batch.logp_old - 0.3 * torch.rand_like(batch.logp_old)).where(batch.mask > 0, 0.0)
    tensors = (batch.logp, rollout, batch.advantages, batch.mask)
    expected = policy_loss(*tensors, method=method, aggregation="sum").loss
    ours, _ = call(band, algorithm, batch, rollout)
    TestSkyRL().compare(batch, ours, expected)


def test_an_asynchronous_clip_is_skyrls_own_around_the_sampler():
    batch = make_batch(30, (16, 40), spread=0.5)
    rollout = (batch.logp_old - 0.3 * torch.rand_like(batch.logp_old)).where(batch.mask > 0, 0.0)
    algorithm = settings(["trainer.algorithm.method=FixedClip(0.2, 0.28)", ASYNCHRONOUS]).trainer.algorithm
    ours, _ = call(band, algorithm, batch, rollout)
    stock = AlgorithmConfig(eps_clip_low=0.2, eps_clip_high=0.28)
    around_sampler = copy.copy(batch)
    around_sampler.logp_old = rollout
    expected, _ = call(ppo_policy_loss, stock, around_sampler, rollout)
    TestSkyRL().compare(batch, ours, expected)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("generator.sampling_params.logprobs=null", r"logprobs=None: .*; set it to 1"),
        ("generator.sampling_params.top_p=0.9", r"top_p=0.9: .* a part of the vocabulary; leave it at 1.0"),
        ("generator.sampling_params.top_k=50", r"top_k=50: .*; leave it at -1"),
        ("generator.sampling_params.min_p=0.1", r"min_p=0.1: .*; leave it at 0.0"),
    ],
)
def test_an_asynchronous_run_needs_the_samplers_log_probabilities(argument, message):
    arguments = ["trainer.algorithm.method=BandAbove()", argument]
    settings(arguments)  # the trainer's log-probabilities are not concerned
    with pytest.raises(ValueError, match=f"^generator.sampling_params.{message}"):
        settings([*arguments, ASYNCHRONOUS])


def test_the_asynchronous_trainer_is_skyrls():
    trainer = pytest.importorskip("skyrl.train.fully_async_trainer", reason="needs SkyRL's trainer")
    assert hasattr(trainer, "FullyAsyncRayPPOTrainer")


LOSSES = [(loss_type, {}) for loss_type in PolicyLossType]
LOSSES += [
    (PolicyLossType.DPPO, {"dppo.dppo_type": "binary_kl", "dppo.delta_low": 0.03, "dppo.delta_high": 0.05}),
    (PolicyLossType.CISPO, {"cispo.cispo_eps_clip_low": 0.3, "cispo.cispo_eps_clip_high": 0.6}),
]
"""SkyRL's losses, with settings that change the method which they are."""


@pytest.mark.parametrize(("loss_type", "changed"), LOSSES, ids=str)
def test_a_run_with_one_of_skyrls_own_losses_is_read_as_the_method_that_it_is(loss_type, changed, tmp_path):
    """The gradient of each, against that of the method that its configuration is read as."""
    config = AlgorithmConfig(policy_loss_type=loss_type.value)
    for name, value in changed.items():
        section, _, key = name.partition(".")
        setattr(getattr(config, section), key, value)
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml({"trainer": {"algorithm": asdict(config)}}))
    text = read_configuration(tmp_path).method
    if loss_type in ("clip_cov", "cross_entropy"):
        assert text is None
        return
    batch = make_batch(28, (16, 40), spread=0.5)
    rollout = (batch.logp_old - 0.2 * torch.rand_like(batch.logp_old)).where(batch.mask > 0, 0.0)
    method = as_method(text)
    old = rollout if method.old_policy == "rollout" else batch.logp_old
    ours = policy_loss(batch.logp, old, batch.advantages, batch.mask, method=method, aggregation="sum").loss
    stock, _ = call(PolicyLossRegistry.get(loss_type), config, batch, rollout)
    gradient = TestSkyRL().compare(batch, stock, ours, value=False)
    assert (gradient != 0).any()


REDUCTIONS = ["token_mean", "sequence_mean", "seq_mean_token_sum_norm"]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("method", ["BandPO()", "SAPO()", "DPPO()", "FixedClip(0.2, 0.28)", "GSPO(0.1, 0.2)"])
def test_the_probe_passes_and_records_nothing(method, reduction, tmp_path):
    config = BandAlgorithmConfig(method=method, record=str(tmp_path))
    config.loss_reduction = reduction
    config.off_policy_correction.tis_ratio_type = None if method == "DPPO()" else "token"
    assert f"tokens beyond a bound), the average {reduction}" in probe_loss(config)
    assert not list(tmp_path.iterdir())


def test_the_probe_says_what_it_cannot_compare():
    config = BandAlgorithmConfig()
    config.loss_reduction = "prompt_mean"
    assert probe_loss(config) == "the loss was not compared, as bandpo has no average prompt_mean"


def test_a_clip_that_cannot_act_is_refused():
    words = ["trainer.train_batch_size=64", "trainer.policy_mini_batch_size=64"]
    with pytest.raises(
        ValueError, match=r"^trainer\.policy_mini_batch_size: there is one update for each batch"
    ):
        settings(words)
    settings([*words, "trainer.update_epochs_per_batch=2"])
    accepted = settings([*words, "trainer.algorithm.accept_idle_clip=true"])
    assert "never acts, as every ratio is 1" in skyrl.check_run(accepted)[1]
    assert (
        "the trainer's log-probabilities before the first update on a batch" in skyrl.check_run(accepted)[0]
    )
    asynchronous = skyrl.check_run(settings(["trainer.fully_async.enabled=true"]))
    assert asynchronous == ["anchor      the sampler's log-probabilities (trainer.fully_async.enabled=true)"]
    settings([*words, "trainer.algorithm.method=Unclipped()"])
    settings([*words, "trainer.algorithm.method=DPPO()"])
