"""The gradient that TRL's loss gives each log-probability is `policy_loss`'s, for every method under every average."""

import pytest
import torch
from test_trl import make
from trl import GRPOTrainer

from bandpo import Batch, Rows
from bandpo.core.aggregation import aggregate
from bandpo.core.methods import METHODS
from bandpo.core.text import as_method
from bandpo.integrations.trl import BandGRPOConfig, BandGRPOTrainer
from bandpo.integrations.trl.config import AGGREGATIONS
from rlvet.runs.configs import TRL_CLIPS

pytestmark = pytest.mark.filterwarnings(
    "ignore::bandpo.core.errors.BandWarning", "ignore:You are using 'rollout_func'"
)

ROWS, COLUMNS = 6, 9

VARIATIONS = {
    "plain": {},
    "KL term": {"beta": 0.05},
    "importance weights": {"weights": True},
    "tools": {"tools": True},
    "advantages of tokens": {"token_advantages": True},
}


BY_TOKEN = ("importance weights", "advantages of tokens")
"""Variations in which tokens of a sequence have factors of their own."""


def batch(seed, *, weights=False, tools=False, token_advantages=False):
    """Return inputs of TRL's loss in float64.

    Lengths differ, a row has no token, an advantage is 0, and ratios are near and far.
    """
    random = torch.Generator().manual_seed(seed)

    def uniform(*shape):
        return torch.rand(*shape, generator=random, dtype=torch.float64)

    old = -4 * uniform(ROWS, COLUMNS) - 1e-3
    distance = (0.02, 0.5)[seed % 2]
    logp = old + distance * torch.randn(ROWS, COLUMNS, generator=random, dtype=torch.float64)
    logp = logp.clamp(max=-1e-4)
    lengths = torch.tensor([9, 7, 9, 1, 0, 5])
    mask = (torch.arange(COLUMNS) < lengths[:, None]).double()
    advantages = torch.tensor([1.2, -0.7, 0.0, -1.9, 0.4, 0.3], dtype=torch.float64)
    if token_advantages:
        advantages = advantages[:, None] + 0.1 * torch.randn(
            ROWS, COLUMNS, generator=random, dtype=torch.float64
        )
    inputs = {
        "prompt_ids": torch.zeros(ROWS, 2, dtype=torch.long),
        "prompt_mask": torch.ones(ROWS, 2, dtype=torch.long),
        "completion_ids": torch.zeros(ROWS, COLUMNS, dtype=torch.long),
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": old,
        "sampling_per_token_logps": old + 0.01 * uniform(ROWS, COLUMNS) - 0.02,
        "ref_per_token_logps": old - 0.1 * uniform(ROWS, COLUMNS),
        "importance_sampling_ratio": torch.where(mask > 0, 0.8 + 0.5 * uniform(ROWS, COLUMNS), 1.0)
        if weights
        else None,
        "num_items_in_batch": mask.sum(),
    }
    if tools:
        inputs["tool_mask"] = (uniform(ROWS, COLUMNS) > 0.3).double()
        inputs["num_items_in_batch"] = (mask * inputs["tool_mask"]).sum()
    inputs = {name: x for name, x in inputs.items() if x is not None}
    return logp, -logp.detach() + 0.2, inputs


def configure(trainer, config):
    """Put the method and the average of a config into a trainer."""
    trainer.args = config
    trainer.method = config.effective_method
    trainer.hooked = config.native_settings is None
    trainer.loss_type = config.loss_type
    trainer.importance_sampling_level = config.importance_sampling_level
    trainer.epsilon_low = config.epsilon
    trainer.epsilon_high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    trainer.beta = config.beta
    trainer.max_completion_length = config.max_completion_length
    trainer.current_gradient_accumulation_steps = 1


def gradient_in_trl(trainer, logp, entropy, inputs, monkeypatch):
    leaf = logp.clone().requires_grad_()
    monkeypatch.setattr(
        GRPOTrainer, "_get_per_token_logps_and_entropies", lambda *_, **__: (leaf, entropy, None)
    )
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = "importance_sampling_ratio" in inputs
    trainer.model.train()
    return torch.autograd.grad(trainer.compute_loss(trainer.model, inputs), leaf)[0]


def gradient_of_policy_loss(config, logp, entropy, inputs):
    leaf = logp.clone().requires_grad_()
    method = config.effective_method
    mask = inputs["completion_mask"] * inputs.get("tool_mask", 1.0)
    rollout = method.old_policy == "rollout"
    average = AGGREGATIONS.get(config.loss_type, config.loss_type)
    normalizer = config.max_completion_length if average == "dr_grpo" else None
    loss = (
        as_method(method)
        .loss(
            Batch.read(
                leaf,
                inputs["sampling_per_token_logps" if rollout else "old_per_token_logps"],
                inputs["advantages"],
                mask,
                entropy=entropy,
                weights=inputs.get("importance_sampling_ratio"),
                layout=Rows(),
            ),
            aggregation=average,
            normalizer=normalizer,
        )
        .loss
    )
    if config.beta:
        gap = inputs["ref_per_token_logps"] - leaf
        kl = gap.exp() - gap - 1
        loss = loss + config.beta * aggregate(kl, mask, average, normalizer=normalizer)
    return torch.autograd.grad(loss, leaf)[0]


@pytest.mark.parametrize("average", TRL_CLIPS)
@pytest.mark.parametrize("variation", VARIATIONS)
def test_gradients_are_those_of_policy_loss(variation, average, tmp_path, monkeypatch):
    """Of every method, on two batches.

    TRL's own losses are less exact: SAPO rounds its temperatures to float32. At the level of sequences they spread a
    factor of a token over its sequence, where `policy_loss` leaves it at the token; they are not compared there.
    """
    unwatched = {"certify": "off", "watched": "off", "audit_steps": 0}
    given = dict(VARIATIONS[variation])
    settings = {
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "max_completion_length": COLUMNS,
        "steps_per_generation": 1,
        "loss_type": average,
        "beta": given.pop("beta", 0.0),
        "use_bias_correction_kl": False,
    }
    # A config resets the state that a trainer shares with the process.
    configs = {
        name: BandGRPOConfig(str(tmp_path), method=f"{name}()", **settings | unwatched) for name in METHODS
    }
    trainer = make(
        BandGRPOTrainer,
        BandGRPOConfig,
        tmp_path,
        lambda prompts, trainer: None,
        method="BandPO()",
        **unwatched,
    )
    differences = {}
    not_zero = dict.fromkeys(METHODS, False)
    for name, config in configs.items():
        native = config.native_settings is not None
        if native and config.effective_method.level == "sequence" and variation in BY_TOKEN:
            not_zero[name] = True
            continue
        configure(trainer, config)
        for seed in range(2):
            logp, entropy, inputs = batch(seed, **given)
            found = gradient_in_trl(trainer, logp, entropy, inputs, monkeypatch)
            expected = gradient_of_policy_loss(config, logp, entropy, inputs)
            largest = float(expected.abs().max())
            not_zero[name] |= largest > 0
            if not largest:
                assert not found.any()
                continue
            difference = float((found - expected).abs().max()) / largest
            if not difference <= (1e-7 if native else 1e-12):
                differences[name, seed] = difference
        # What is put in for one loss is taken back.
        assert trainer.loss_type == config.loss_type
        assert not isinstance(trainer.epsilon_high, torch.Tensor)
    assert not differences
    assert all(not_zero.values())
