"""Healthy runs stay silent: the probe finds no difference, and its line says what was compared."""

import itertools
import re
import warnings

import pytest

from helpers.frameworks import needs

needs("trl")

from test_trl import SETTINGS, varied_reward
from transformers import AutoTokenizer
from trl import GRPOConfig

import byte_model
from bandpo.integrations.trl import AuditedGRPOTrainer, BandGRPOConfig, BandGRPOTrainer
from bandpo_lab.tasks import multiplication

STOCK = [
    {"loss_type": "grpo"},
    {"loss_type": "bnpo"},
    {"loss_type": "dr_grpo"},
    {"loss_type": "dapo"},
    {"loss_type": "luspo"},
    {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    {"loss_type": "cispo", "epsilon_high": 1.03},
    {"loss_type": "cispo", "epsilon_high": 1.03, "importance_sampling_level": "sequence"},
    {"loss_type": "sapo"},
    {"loss_type": "sapo", "importance_sampling_level": "sequence"},
    {"loss_type": "vespo"},
    {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    {"loss_type": "grpo", "delta": 1.05},
]
METHODS = [
    {"method": f"{name}()"}
    for name in ("Band", "BandPO", "GSPO", "SAPO", "VESPO", "CISPO", "GMPO", "SPO", "KLCov", "MASPO")
]
VARIATIONS = [
    {},
    {"num_iterations": 1, "steps_per_generation": 1},
    {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "scale_rewards": "none"},
    {"beta": 0.05, "use_bias_correction_kl": True},
    {"beta": 0.05, "use_bias_correction_kl": False, "scale_rewards": "batch"},
    {"top_entropy_quantile": 0.5, "entropy_coef": 0.01},
    {"off_policy_mask_threshold": 1e-3, "mask_truncated_completions": False},
    {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 9.0},
    {"bf16": True, "gradient_checkpointing": False},
    {"temperature": 0.7, "multi_objective_aggregation": "normalize_then_sum", "beta": 0.02},
]
CASES = [
    pytest.param(
        {**loss, **variation, "seed": seed},
        marks=[] if number % 37 == 0 else [pytest.mark.exhaustive],
        id=f"{number}",
    )
    for number, (loss, variation, seed) in enumerate(itertools.product(STOCK + METHODS, VARIATIONS, (1, 2)))
    if not (loss.get("method") == "KLCov()" and variation.get("gradient_accumulation_steps", 1) > 1)
]
"""Losses, settings and seeds: 458 runs."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return byte_model.save(tmp_path_factory.mktemp("model"))


@pytest.mark.filterwarnings("ignore::bandpo.core.errors.BandWarning")  # twelve tokens at a high learning rate
@pytest.mark.parametrize("settings", CASES)
def test_a_healthy_run_is_silent(settings, folder, tmp_path, capsys):
    cls, config = (
        (BandGRPOTrainer, BandGRPOConfig) if "method" in settings else (AuditedGRPOTrainer, GRPOConfig)
    )
    if config is BandGRPOConfig and settings.get("num_iterations") == 1:
        settings = {**settings, "accept_idle_clip": True}
    short = {"max_steps": 6, "per_device_train_batch_size": 4, "learning_rate": 1e-3}
    trainer = cls(
        model=str(folder),
        reward_funcs=varied_reward,
        args=config(str(tmp_path), **SETTINGS | short | settings),
        train_dataset=multiplication.dataset("train", 32),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the loss of ")
        trainer.train()
    said = capsys.readouterr().err
    assert len(re.findall(r"bandpo: the loss with trl [\d.]+ has the gradient of ", said)) == 1
    assert "was not compared" not in said
