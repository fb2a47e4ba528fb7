"""rLLM's own registry of losses, and its own closure around one for Tinker and Fireworks, without their clients.

rLLM is not on the package index, and has the registry on a branch.
"""

from types import SimpleNamespace

import pytest
import yaml

from bandpo.core.text import as_method
from contract import Contract, make_batch
from helpers.frameworks import importing, needs
from pages import framework_blocks
from rlvet.records.record import read_record

needs("rllm", clone="rllm")

PARTS = ("advantage", "config", "performance", "rejection_sampling", "transform", "visualization")
with importing(
    *("omegaconf", "tinker"),
    *("rllm.utils", "rllm.types", "rllm.agents", "rllm.trainer.tinker.tinker_backend"),
    *(f"rllm.trainer.algorithms.{part}" for part in PARTS),
    framework="rllm",
):
    from rllm.trainer.algorithms.loss import resolve_loss
    from rllm.trainer.tinker.custom_loss import build_custom_loss


def config_of(average="token-mean", **loss_params):
    """Return rLLM's settings of a loss, with its defaults."""
    return SimpleNamespace(
        loss_plugins=["bandpo_rllm"],
        loss_fn=f"bandpo_{average.replace('-', '_')}",
        loss_params=loss_params,
        eps_clip=0.2,
        eps_clip_high=None,
        kl_beta=0.0,
        loss_agg_mode="token-mean",
    )


def call(batch, config):
    """Return the loss of a batch, one sequence after another, with given log-probabilities in place of a client's."""
    names = {"logprobs": batch.logp_old, "mask": batch.mask, "target_tokens": batch.mask.int()}
    names["advantages"] = batch.advantages[:, None].expand_as(batch.mask)
    data = [
        SimpleNamespace(
            model_input=None,
            loss_fn_inputs={name: SimpleNamespace(data=x[row].tolist()) for name, x in names.items()},
        )
        for row in range(len(batch.mask))
    ]
    stripped, loss_fn = build_custom_loss(resolve_loss(config), data)
    return loss_fn(stripped, list(batch.logp))[0]


class TestRLLM(Contract):
    any_method = True
    own_average = True
    # The level is the method's own here.
    test_sequence_level_ratios_are_refused = None

    def ours(self, batch, clip):
        return call(batch, config_of(as_method(clip).aggregation or "token-mean", method=clip))

    def stock(self, batch, low, high):
        config = config_of()
        config.loss_fn, config.eps_clip, config.eps_clip_high = "ppo_clip", low, high
        return call(batch, config)

    def recorded(self, batch, folder):
        return call(batch, config_of(record=folder))


def test_the_old_policy_is_the_samplers_where_the_method_says_so(tmp_path):
    pytest.importorskip("pyarrow")
    call(make_batch(3), config_of(method="DPPO()", record=str(tmp_path)))
    assert {loss.anchor for loss in read_record(tmp_path)} == {"rollout"}


def test_a_context_without_the_samplers_log_probabilities_is_refused():
    context = SimpleNamespace(params={"method": "DPPO()"}, logp_old=make_batch().logp_old, logp_rollout=None)
    with pytest.raises(ValueError, match="calculate_log_probs=true"):
        resolve_loss(config_of()).fn(context)


def test_rows_of_a_batch_are_one_loss():
    """On verl a loss gets (batch, time), and averages over it."""
    batch = make_batch(24)
    context = SimpleNamespace(
        params={"method": "GSPO(0.1, 0.2)"},
        logp_curr=batch.logp,
        logp_old=batch.logp_old,
        logp_rollout=batch.logp_old,
        advantages=batch.advantages[:, None].expand_as(batch.mask),
        action_mask=batch.mask,
        aggregate=lambda values, mask: ((values * mask).sum(1) / mask.sum(1)).mean(),
    )
    config = config_of("seq-mean-token-mean", method="GSPO(0.1, 0.2)")
    TestRLLM().compare(batch, resolve_loss(config).fn(context)[0], call(batch, config))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eps_clip_high": 0.28}, "^algorithm.eps_clip_high=0.28: it would have no effect"),
        ({"kl_beta": 0.01}, "^algorithm.kl_beta=0.01: rLLM adds no KL penalty"),
        (
            {"loss_params": {"method": "SAPO()"}},
            "^algorithm.loss_fn=bandpo_token_mean aggregates by token-mean",
        ),
        ({"loss_params": {"method": "Bnd()"}}, r"^algorithm.loss_params.method: .*did you mean Band"),
    ],
)
def test_settings_that_make_its_loss_another_one_are_refused(settings, message):
    config = config_of()
    vars(config).update(settings)
    with pytest.raises(ValueError, match=message):
        call(make_batch(), config)


def test_the_documented_configuration():
    config = config_of()
    vars(config).update(yaml.safe_load(framework_blocks("rLLM")[0])["algorithm"])
    batch = make_batch(29)
    assert call(batch, config) == TestRLLM().ours(batch, "BandAbove()")
