"""The losses of frameworks, as functions of a batch: their own code, with log-probabilities in place of a model's.

Each function takes a framework's settings and leaves the rest at its defaults. Nothing here imports bandpo.
"""

from __future__ import annotations

import argparse
import sys
import typing
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Log-probabilities under the policy, the trainer's old one and the rollout engine's; all (batch, time)."""

    logp: Tensor
    old: Tensor
    rollout: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor | None = None


Loss = Callable[[Batch], Tensor]


def trl(**settings: Any) -> Loss:
    """The trainer's own loss method; ``kind=GMPO`` for its experimental one."""
    import trl
    from trl.experimental import gmpo

    kind = settings.pop("kind", "GRPO")
    module = gmpo if kind == "GMPO" else trl
    config, trainer = getattr(module, f"{kind}Config"), getattr(module, f"{kind}Trainer")
    args = config(output_dir="unused", use_cpu=True, bf16=False, report_to="none", **settings)

    def loss(batch: Batch) -> Tensor:
        made = object.__new__(trainer)
        vars(made).update(vars(args))
        vars(made).update(
            args=args,
            epsilon_low=args.epsilon,
            epsilon_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
            accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
            model=SimpleNamespace(training=True),
            aux_loss_enabled=False,
            use_vllm=batch.weights is not None,
            current_gradient_accumulation_steps=1,
            max_completion_length=batch.logp.shape[1],
            _entropy_bonus_enabled=False,
            _metrics=defaultdict(lambda: defaultdict(list)),
            _get_per_token_logps_and_entropies=lambda *_, **__: (
                batch.logp,
                torch.zeros_like(batch.logp),
                None,
            ),
        )
        ids = torch.zeros(batch.logp.shape, dtype=torch.long)
        inputs = {
            "prompt_ids": ids[:, :1],
            "prompt_mask": ids[:, :1],
            "completion_ids": ids,
            "completion_mask": batch.mask,
            "advantages": batch.advantages[:, 0],
            "old_per_token_logps": batch.old,
            "num_items_in_batch": batch.mask.sum(),
            "importance_sampling_ratio": batch.weights,
        }
        return trainer._compute_loss(made, None, inputs)

    return loss


def verl(loss_mode: str, **settings: Any) -> Loss:
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig, PolicyLossConfig

    own = PolicyLossConfig.__dataclass_fields__.keys() & settings.keys()
    policy_loss: dict[str, Any] = {"loss_mode": loss_mode} | {name: settings.pop(name) for name in own}
    if bypass := loss_mode == "bypass_mode":
        policy_loss["rollout_correction"] = RolloutCorrectionConfig.bypass_pg_token_icepop(**settings)
        settings = {}
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(**policy_loss),
        **settings,
    )
    return lambda batch: get_policy_loss_fn(loss_mode)(
        old_log_prob=batch.rollout if bypass else batch.old,
        log_prob=batch.logp,
        advantages=batch.advantages,
        response_mask=batch.mask,
        loss_agg_mode=config.loss_agg_mode,
        config=config,
        rollout_is_weights=batch.weights,
    )[0]


def skyrl(policy_loss_type: str, **settings: Any) -> Loss:
    if sys.version_info < (3, 12):
        # pydantic refuses typing.TypedDict below 3.12, which SkyRL declares for this reason; the rest runs on 3.11.
        from typing_extensions import TypedDict

        typing.TypedDict = TypedDict
    from skyrl.backends.skyrl_train.utils import ppo_utils
    from skyrl.train.config import AlgorithmConfig

    config = AlgorithmConfig(policy_loss_type=policy_loss_type)
    for key, value in settings.items():
        *section, name = key.split(".")
        setattr(getattr(config, section[0]) if section else config, name, value)

    def loss(batch: Batch) -> Tensor:
        if batch.weights is not None:
            config.off_policy_correction.tis_ratio_type = "token"
        scaled = ppo_utils.apply_loss_reduction_to_advantages_minibatch(
            batch.advantages, batch.mask, config.loss_reduction, len(batch.mask), batch.mask.shape[1]
        )
        function = ppo_utils.PolicyLossRegistry.get(policy_loss_type)
        return function(batch.logp, batch.old, scaled, config, batch.mask, batch.rollout)[0]

    return loss


def slime(**settings: Any) -> Loss:
    """The whole loss function, with the defaults of its arguments."""
    from megatron.core import mpu
    from slime.backends.megatron_utils import loss as module

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        mpu.initialize_model_parallel()
    module.get_log_probs_and_entropy = lambda logits, **_: (
        None,
        {"log_probs": list(logits), "entropy": list(torch.zeros_like(logits))},
    )
    defaults: dict[str, Any] = {
        "advantage_estimator": "grpo",
        "custom_tis_function_path": None,
        "entropy_coef": 0.0,
        "eps_clip": 0.2,
        "eps_clip_high": 0.2,
        "eps_clip_c": None,
        "loss_type": "policy_loss",
        "opsm_delta": 1e-4,
        "rollout_top_p": 1.0,
        "tis_clip": 2.0,
        "tis_clip_low": 0.0,
    }
    off = "allgather_cp calculate_per_token_loss get_mismatch_metrics recompute_loss_function use_kl_loss use_opsm"
    defaults |= dict.fromkeys((*off.split(), "use_rollout_logprobs"), False)

    def loss(batch: Batch) -> Tensor:
        args = argparse.Namespace(**defaults | settings, use_tis=batch.weights is not None)
        count, length = batch.mask.shape
        given = {
            "advantages": list(batch.advantages),
            "log_probs": list(batch.old),
            "rollout_log_probs": list(batch.rollout),
            "loss_masks": list(batch.mask),
            "rollout_mask_sums": list(batch.mask.sum(1)),
            "response_lengths": [length] * count,
            "total_lengths": [length] * count,
            "unconcat_tokens": None,
        }
        return module.loss_function(args, given, 1, count, batch.logp)[0]

    return loss


def prime_rl(type: str, **settings: Any) -> Loss:
    from prime_rl.configs.trainer import DefaultLossConfig, IPOLossConfig
    from prime_rl.trainer.rl.loss import compute_loss, setup_rl_loss_fn

    config = {"default": DefaultLossConfig, "ipo": IPOLossConfig}[type](**settings)
    return lambda batch: compute_loss(
        trainer_logprobs=list(batch.logp),
        inference_logprobs=list(batch.rollout),
        ref_logprobs=None,
        advantages=list(batch.advantages),
        loss_mask=list(batch.mask.bool()),
        rl_weights=None,
        ce_weights=None,
        ref_kl_weights=None,
        rl_loss_fn=setup_rl_loss_fn(config),
        rl_scale=int(batch.mask.sum()),
        ce_scale=1,
        ref_kl_scale=1,
    )[0]


def ms_swift(**settings: Any) -> Loss:
    """The trainer's own loss method."""
    from swift.rl_core.data import GRPOBatch
    from swift.rlhf_trainers.arguments import GRPOConfig
    from swift.rlhf_trainers.grpo_trainer import GRPOTrainer

    args = GRPOConfig(output_dir="unused", use_cpu=True, bf16=False, report_to="none", **settings)

    def loss(batch: Batch) -> Tensor:
        made = object.__new__(GRPOTrainer)
        made.args, made.model = args, SimpleNamespace(training=True)
        made._prepare_algorithm_params()
        if batch.weights is not None:
            made.rollout_importance_sampling_mode = "token_truncate"
        vars(made).update(
            accelerator=SimpleNamespace(num_processes=1, gather_for_metrics=lambda x: x),
            beta=0.0,
            compute_entropy=False,
            disable_rollout_importance_sampling=False,
            max_completion_length=batch.logp.shape[1],
            model_accepts_loss_kwargs=False,
            compute_loss_func=None,
            current_gradient_accumulation_steps=1,
            _has_teacher=False,
            chord_sft_iterator=None,
            _metrics=defaultdict(lambda: defaultdict(list)),
            _get_per_token_logps_and_entropies=lambda *_, **__: (batch.logp, None),
        )
        given = GRPOBatch(
            completion_mask=batch.mask.bool(),
            truncated_mask=torch.zeros(len(batch.mask), dtype=torch.bool),
            seq_lengths=batch.mask.sum(1),
            old_per_token_logps=batch.old,
            rollout_per_token_logps=batch.rollout,
            advantages=batch.advantages,
            num_items_in_batch=batch.mask.sum(),
        )
        return made._compute_loss_and_metrics(None, {}, given)[0]

    return loss
