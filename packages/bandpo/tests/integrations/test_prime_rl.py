"""prime-rl's custom losses: its own ``LossInputs``, its own import of the loss and its own sum over sequences.

It is not on the package index. Where neither an installed package nor a clone is here, a stand-in takes the place of
``LossInputs``; `FIELDS` says what it imitates, and is compared with prime-rl's own where that is here.
"""

import dataclasses
import importlib
from types import SimpleNamespace

import pytest
import torch

from bandpo import policy_loss
from bandpo.core.methods import METHODS
from bandpo.integrations.prime_rl import loss
from contract import Contract, dense_loss, make_batch
from helpers.frameworks import importing, is_here
from pages import framework_blocks

FIELDS = ["trainer_logprobs", "inference_logprobs", "ref_logprobs", "advantages", "loss_mask", "loss_weights"]
"""The fields of ``LossInputs``."""

REAL = is_here("prime_rl", "src", "packages/prime-rl-configs/src", clone="prime-rl")
if REAL:
    with importing(
        "pydantic_config",
        "wandb",
        "loguru",
        "tomli_w",
        "prime_rl.configs",
        "prime_rl.utils.logger",
        framework="prime_rl",
    ):
        from prime_rl.trainer.rl import loss as prime_rl

LossInputs = prime_rl.LossInputs if REAL else SimpleNamespace


def sequences(batch):
    """Return prime-rl's inputs of the loss: packed sequences, with padding and without a batch dimension."""
    for row in range(len(batch.logp)):
        yield LossInputs(
            trainer_logprobs=batch.logp[row],
            inference_logprobs=batch.logp_old[row],
            ref_logprobs=None,
            advantages=batch.advantages[row].expand_as(batch.logp[row]),
            loss_mask=batch.mask[row].bool(),
            loss_weights=None,
        )


class TestPrimeRL(Contract):
    any_method = True
    aggregation = "sum"

    def ours(self, batch, clip):
        return torch.stack([loss(inputs, method=clip).loss for inputs in sequences(batch)]).sum()

    def stock(self, batch, low, high):
        """Compute the loss in prime-rl's documentation: PPO's clip, summed over the mask."""
        return dense_loss(batch, torch.tensor(1 - low), torch.tensor(1 + high), "sum")

    def recorded(self, batch, folder):
        return [loss(inputs, record=folder) for inputs in sequences(batch)]

    def sequence_level(self, batch):
        inputs = next(sequences(batch))
        inputs.inference_logprobs = inputs.inference_logprobs.mean().reshape(1)
        loss(inputs)


def test_the_stand_in_imitates_prime_rls_own_inputs():
    if not REAL:
        pytest.skip("needs prime_rl, or a clone called prime-rl in $BANDPO_CLONES")
    assert [field.name for field in dataclasses.fields(prime_rl.LossInputs)] == FIELDS
    assert [field.name for field in dataclasses.fields(prime_rl.LossOutputs)] == ["loss", "metrics"]


OF_SEQUENCES = [name for name in sorted(METHODS) if not METHODS[name].method().whole_batch]
"""The published methods that a loss of one sequence can compute."""


@pytest.mark.parametrize("method", [*(f"{name}()" for name in OF_SEQUENCES), "Band(KL(), 0.05)"])
def test_prime_rls_own_sum_over_sequences_is_the_mean_over_tokens(method, monkeypatch):
    if not REAL:
        pytest.skip("needs prime_rl, or a clone called prime-rl in $BANDPO_CLONES")
    config = SimpleNamespace(import_path="bandpo.integrations.prime_rl.loss", kwargs={"method": method})
    monkeypatch.setattr(prime_rl, "CustomLossConfig", SimpleNamespace)
    batch = make_batch(27)
    lists = [list(x) for x in (batch.logp, batch.logp_old, batch.mask.bool())]
    total, metrics = prime_rl.compute_loss(
        trainer_logprobs=lists[0],
        inference_logprobs=lists[1],
        ref_logprobs=None,
        advantages=[a.expand(batch.mask.shape[1]) for a in batch.advantages],
        loss_mask=lists[2],
        rl_weights=None,
        ce_weights=None,
        ref_kl_weights=None,
        rl_loss_fn=prime_rl.setup_rl_loss_fn(config),
        rl_scale=int(batch.mask.sum()),
        ce_scale=1,
        ref_kl_scale=1,
    )
    tensors = (batch.logp, batch.logp_old, batch.advantages, batch.mask)
    TestPrimeRL().compare(batch, total, policy_loss(*tensors, method=method, aggregation="token-mean").loss)
    assert len(metrics["clip_high"]) == len(batch.mask)


@pytest.mark.parametrize("name", sorted({*METHODS} - {*OF_SEQUENCES}))
def test_a_method_of_a_whole_update_is_refused(name):
    with pytest.raises(ValueError, match=r"trainer\.loss\.kwargs\.method: .*needs all tokens of an update"):
        loss(next(sequences(make_batch())), method=f"{name}()")


def test_weights_multiply_and_the_penalty_is_prime_rls():
    batch = make_batch(5)
    inputs = next(sequences(batch))
    inputs.loss_weights = torch.rand_like(inputs.inference_logprobs)
    log_ratio = inputs.trainer_logprobs - inputs.inference_logprobs
    expected = inputs.loss_weights * (0.3 * log_ratio**2 - inputs.advantages * log_ratio.exp())
    torch.testing.assert_close(loss(inputs, method="Unclipped()", kl_tau=0.3).loss, expected.sum())


@pytest.mark.parametrize("method", ["GSPO()", "VESPO()"])
def test_rewards_of_steps_are_no_packed_row(method):
    """prime-rl gives a loss one sequence at a time, so advantages may change within it."""
    inputs = next(sequences(make_batch(5)))
    inputs.advantages = torch.where(torch.arange(len(inputs.advantages)) < 4, 1.0, -0.5)
    assert loss(inputs, method=method).loss.isfinite()


def test_a_sequence_without_counted_tokens_is_zero_and_has_the_same_metrics():
    batch = make_batch(6)
    inputs = next(sequences(batch))
    full = loss(inputs)
    inputs.loss_mask = torch.zeros_like(inputs.loss_mask)
    inputs.inference_logprobs = torch.full_like(inputs.inference_logprobs, torch.nan)
    empty = loss(inputs)
    assert empty.loss == 0
    assert empty.loss.requires_grad
    assert empty.metrics.keys() == full.metrics.keys()
    assert all(value.dim() == 0 for value in empty.metrics.values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "Bnd()"}, r"trainer\.loss\.kwargs\.method: .*did you mean Band"),
        ({"method": "SAP0()"}, r"trainer\.loss\.kwargs\.method: .*did you mean SAPO"),
        ({"method": "Method(Band(), DualClip(0.5))"}, r"trainer\.loss\.kwargs\.method: .*must be above 1"),
        ({"kl_tau": -1.0}, "kl_tau must be at least 0"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        loss(next(sequences(make_batch())), **settings)


def test_the_documented_configuration():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11")
    (block,) = framework_blocks("prime-rl")
    settings = tomllib.loads(block)["trainer"]["loss"]
    module, _, name = settings["import_path"].rpartition(".")
    custom = getattr(importlib.import_module(module), name)
    batch, kwargs = make_batch(16), settings["kwargs"]
    found = torch.stack([custom(inputs, **kwargs).loss for inputs in sequences(batch)]).sum()
    tensors = batch.logp, batch.logp_old, batch.advantages, batch.mask
    expected = policy_loss(*tensors, **kwargs, aggregation="sum").loss
    TestPrimeRL().compare(batch, found, expected)


def test_one_line_says_where_prime_rl_averages_in_another_way(caplog):
    for text in ("GRPO(0.17)", "DAPO()", "FixedClip()"):
        TestPrimeRL().ours(make_batch(8), text)
    (said,) = caplog.messages
    assert "GRPO(low=0.17, high=0.2) aggregates its loss by seq-mean-token-mean" in said
    assert "this framework replaces that with its own token-mean" in said
