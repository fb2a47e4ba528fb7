"""TRL's asynchronous trainer on a CPU, with the smallest settings that train on old data."""

import torch
from test_trl import varied_reward
from transformers import AutoModelForCausalLM, AutoTokenizer

from bandpo.integrations.trl import BandAsyncGRPOConfig, BandAsyncGRPOTrainer
from bandpo_lab.tasks import multiplication
from bandpo_lab.training.async_on_cpu import OldSampler

CPU = {"bf16": False, "use_cpu": True, "report_to": "none"}
SETTINGS = CPU | {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_steps": 6,
    "max_staleness": 4,
    "token_budget": 0,
    "learning_rate": 1e-3,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "disable_tqdm": True,
}
LAG = 2


def sampler(lag=LAG, path=None, reward=varied_reward, **settings):
    path = path or str(multiplication.base_model_path())
    return OldSampler(
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        AutoTokenizer.from_pretrained(path),
        multiplication.dataset("train", 64),
        reward,
        **{"lag": lag, "num_generations": 4, "prompts": 2, "max_new_tokens": 12} | settings,
    )


def make_async(
    folder, cls=BandAsyncGRPOTrainer, config=BandAsyncGRPOConfig, lag=LAG, callbacks=None, **settings
):
    """Return a trainer whose samples are ``lag`` versions old; train it within `trl_on_a_cpu`."""
    worker = sampler(lag)
    return cls(
        model=str(multiplication.base_model_path()),
        reward_funcs=varied_reward,
        args=config(str(folder), **SETTINGS | settings),
        train_dataset=multiplication.dataset("train", 64),
        callbacks=callbacks,
        rollout_worker=worker,
        weight_transfer=worker,
    )
