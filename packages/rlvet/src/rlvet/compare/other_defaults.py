"""The defaults of OpenRLHF and prime-rl that no rule of lint reads, from the source code of these versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OTHER_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    # openrlhf/cli/train_ppo_ray.py in commit 3c3be6234e0c
    "openrlhf": {
        "version": "0.11.0",
        "defaults": {
            "actor.adam.betas": [0.9, 0.95],
            "actor.adam.weight_decay": 0.0,
            "actor.dual_clip": None,
            "actor.lr_scheduler": "cosine_with_min_lr",
            "actor.lr_warmup_ratio": 0.03,
            "actor.max_norm": 1.0,
            "actor.min_lr_ratio": 0.1,
            "actor.muon.lr": 0.02,
            "algo.advantage.is_correction_threshold": [0.5, 5.0],
            "algo.advantage.is_correction_type": "tis",
            "algo.advantage.no_std_norm": False,
            "algo.dynamic_filtering_enable": False,
            "algo.dynamic_filtering_range": [0, 1],
            "algo.kl.estimator": "k1",
            "algo.kl.init_coef": 0.01,
            "algo.kl.use_loss": False,
            "data.prompt_dataset": None,
            "ds.lora.alpha": 16,
            "ds.lora.dropout": 0,
            "ds.param_dtype": "bf16",
            "rollout.max_new_tokens": None,
            "train.async_queue_size": 1,
            "train.num_episodes": 1,
        },
    },
    # packages/prime-rl-configs in commit 559b44772e47
    "prime-rl": {
        "version": "0.8.0",
        "defaults": {
            "trainer.loss.type": "default",
            "trainer.loss.dppo_mask_low": 0.2,
            "trainer.loss.dppo_mask_high": 0.2,
            "trainer.loss.adv_tau": 1.0,
            "trainer.loss.kl_tau": 1e-3,
            "trainer.optim.betas1": 0.9,
            "trainer.optim.betas2": 0.999,
            "trainer.optim.max_norm": 1.0,
            "trainer.optim.weight_decay": 0.01,
            "trainer.scheduler.type": "constant",
            "trainer.scheduler.warmup_steps": 10,
            "trainer.model.lora.alpha": 32.0,
            "trainer.model.lora.dropout": 0.0,
            "orchestrator.train.sampling.max_completion_tokens": None,
            "max_steps": None,
        },
    },
}
"""The defaults by framework, each with a version."""
