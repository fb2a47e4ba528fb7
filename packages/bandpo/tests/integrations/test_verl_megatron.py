"""verl's own code between Megatron and a policy loss, without Megatron: each micro-batch, and the gradient of all."""

import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from helpers.frameworks import importing, needs

needs("verl")

from integrations.test_verl import actor_config, batch
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.workers.utils.losses import ppo_loss

import bandpo
from bandpo.integrations.verl import BandPolicyLossConfig
from bandpo.integrations.verl import loss as bandpo_verl
from bandpo.integrations.verl.audit import SUMS

# verl's modules around Megatron's model, parallel groups and checkpoints, which the loss does not need.
OF_THE_MODEL = (
    "megatron",
    "verl.models.mcore",
    "verl.utils.checkpoint.megatron_checkpoint_manager",
    "verl.utils.dynamic_cp_scheduler",
    "verl.utils.megatron",
    "verl.utils.megatron_peft_utils",
    "verl.utils.megatron_utils",
)
with importing():
    import verl.workers.engine  # noqa: F401  (which passes over the engines whose packages are missing)
with importing(*OF_THE_MODEL):
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

ROWS, TOKENS = 6, 9
MICRO_BATCHES = (slice(0, 1), slice(1, 4), slice(4, 6))
"""Micro-batches of different sizes, as with ``use_dynamic_bsz``."""


@pytest.fixture
def tensors():
    return batch(3, (ROWS, TOKENS), spread=1.2)


def engine(per_token=False):
    """Return verl's Megatron engine without a model: its code from a model's log-probabilities to the loss."""
    unbuilt = object.__new__(MegatronEngineWithLMHead)
    settings = {"dynamic_context_parallel": False, "use_remove_padding": True, "context_parallel_size": 1}
    unbuilt.engine_config = SimpleNamespace(**settings)
    unbuilt.tf_config = SimpleNamespace(calculate_per_token_loss=True) if per_token else None
    unbuilt.get_data_parallel_group = lambda: None
    return unbuilt


def nested(rows):
    return torch.nested.as_nested_tensor([*rows], layout=torch.jagged)


def micro_batch(tensors, rows):
    """Return the rows of a mini-batch as verl's engines get them, with a prompt of two tokens each."""
    lengths = tensors["response_mask"].sum(-1).tolist()
    cut = {name: nested(tensor[i, : lengths[i]] for i in rows) for name, tensor in tensors.items()}
    data = TensorDict(
        {
            "input_ids": nested(torch.ones(lengths[i] + 2, dtype=torch.long) for i in rows),
            "loss_mask": nested(torch.ones(lengths[i] + 2, dtype=torch.long) for i in rows),
            "prompts": nested(torch.ones(2, dtype=torch.long) for _ in rows),
            "responses": nested(torch.ones(lengths[i], dtype=torch.long) for i in rows),
            "response_mask": cut["response_mask"].to(torch.long),
            "old_log_probs": cut["old_log_prob"],
            "advantages": cut["advantages"],
        },
        batch_size=[len(rows)],
    )
    counts = {"batch_num_tokens": sum(lengths), "global_batch_size": ROWS, "dp_size": 1}
    counts |= {
        "num_micro_batch": len(MICRO_BATCHES),
        "routed_num_tokens": torch.tensor(sum(lengths) + 2 * ROWS),
    }
    tensordict_utils.assign_non_tensor(data, **counts)
    return data


def model_output(log_prob, tensors, rows):
    """Return log-probabilities as a model returns them: each at the position before its token."""
    lengths = tensors["response_mask"].sum(-1).tolist()
    zero = torch.zeros(1, dtype=log_prob.dtype)
    return {"log_probs": torch.cat([torch.cat([zero, log_prob[i, : lengths[i]], zero]) for i in rows])}


def megatron_gradient(tensors, config, per_token=False):
    """Return the gradient of a mini-batch by verl's Megatron engine and Megatron's schedule, and all metrics."""
    log_prob = tensors["log_prob"].clone().requires_grad_()
    all_metrics = []
    total_tokens = 0
    for part in MICRO_BATCHES:
        rows = [*range(ROWS)[part]]
        data = micro_batch(tensors, rows)
        output = model_output(log_prob, tensors, rows)
        result = engine(per_token).postprocess_micro_batch_func(
            output, data, forward_only=False, loss_function=partial(ppo_loss, config)
        )
        # Megatron's schedule, `forward_step_calc_loss`: a loss is divided by the number of micro-batches. In its
        # per-token regime, `finalize_model_grads` divides the gradient of all by the number of tokens.
        if per_token:
            loss, tokens, logged = result
            total_tokens += int(tokens)
            loss.backward()
        else:
            loss, logged = result
            (loss / len(MICRO_BATCHES)).backward()
        all_metrics.append(logged["metrics"])
    gradient = log_prob.grad
    return gradient / total_tokens if per_token else gradient, all_metrics


@pytest.mark.parametrize("per_token", [False, True], ids=["by micro-batches", "by tokens"])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("method", ["FixedClip(0.2, 0.2)", "BandPO()", "Band(KL(), 0.05, max_ratio=10)"])
def test_the_gradient_of_a_mini_batch_is_the_methods(method, mode, per_token, tensors, capsys):
    settings = BandPolicyLossConfig(method=method, average="framework")
    config = actor_config(settings, loss_agg_mode=mode)
    gradient, all_metrics = megatron_gradient(tensors, config, per_token)

    leaf = tensors["log_prob"].clone().requires_grad_()
    mask = tensors["response_mask"]
    lengths = mask.sum(-1, keepdim=True)
    share = mask / mask.sum() if mode == "token-mean" else mask / lengths / ROWS
    loss, metrics = bandpo.policy_loss(
        leaf,
        tensors["old_log_prob"],
        tensors["advantages"],
        mask,
        method=bandpo_verl.loss_method(config),
        aggregation=lambda x: (x * share).sum(),
        layout=bandpo.Rows(),
    )
    loss.backward()
    assert metrics["clip_high"] > 0
    torch.testing.assert_close(gradient, leaf.grad)
    assert gradient.abs().sum() > 0
    # At the first micro-batch, the probe let verl's loss pass.
    assert (
        len(re.findall(r"^bandpo: the loss of verl .* has the gradient", capsys.readouterr().out, re.M)) == 1
    )
    counted = sum(metric[f"{SUMS}counted/0"].aggregate() for metric in all_metrics)
    assert counted == mask.sum()


@pytest.mark.parametrize("per_token", [False, True], ids=["by micro-batches", "by tokens"])
def test_the_probe_stops_a_gradient_that_is_not_the_methods(per_token, tensors, monkeypatch):
    config = actor_config(BandPolicyLossConfig(method="BandPO()"))

    loss_of = bandpo.Method.loss

    def wrong(self, batch, **named):
        value, metrics = loss_of(self, batch, **named)
        return value + 0.1 * batch.logp.square().mean(), metrics

    monkeypatch.setattr(bandpo.Method, "loss", wrong)
    with pytest.raises(
        RuntimeError,
        match=r"its gradient differs.*certify=warn to train on",
    ):
        megatron_gradient(tensors, config, per_token)
