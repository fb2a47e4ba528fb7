"""The losses of frameworks as functions of a batch. They run the frameworks' own code on given log-probabilities.

Each function takes settings of a framework and leaves all others at their defaults. Modules that are only needed for a
GPU or a service are replaced by mocks; no loss uses one. A loss that takes logits gets those of a vocabulary of two
tokens, of which the first one has the log-probability of the batch.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import os
import sys
import types
import typing
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor

from bandpo.certificate.tokens import LossBatch

Loss = Callable[[LossBatch], Tensor]


class _MockModule(types.ModuleType):
    """A module in which every attribute is a mock."""

    __path__: typing.ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


class _MockFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if any(fullname == name or fullname.startswith(f"{name}.") for name in self.names):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _MockModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def mock_modules(*names: str) -> None:
    """Replace modules by mocks, because they are not installed or need a GPU at import."""
    sys.meta_path.insert(0, _MockFinder(names))


def two_token_logits(logp: Tensor) -> Tensor:
    """Return logits of two tokens, (…, 2), of which the first one has these log-probabilities, (…).

    The derivative of the first token's log-probability by ``logp`` is 1.
    """
    return torch.stack([logp, torch.log(-torch.expm1(logp))], -1)


def trl(**settings: Any) -> Loss:
    """Return the loss of TRL's GRPOTrainer; with ``kind=GMPO`` that of its experimental GMPOTrainer."""
    import trl
    from trl.experimental import gmpo

    kind = settings.pop("kind", "GRPO")
    module = gmpo if kind == "GMPO" else trl
    config_class = getattr(module, f"{kind}Config")
    trainer_class = getattr(module, f"{kind}Trainer")
    args = config_class(output_dir="unused", use_cpu=True, bf16=False, report_to="none", **settings)

    def loss(batch: LossBatch) -> Tensor:
        # A trainer without its constructor, with only the attributes that the loss reads.
        trainer = object.__new__(trainer_class)
        vars(trainer).update(vars(args))
        vars(trainer).update(
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
            "old_per_token_logps": batch.logp_old,
            "num_items_in_batch": batch.mask.sum(),
            "importance_sampling_ratio": batch.weights,
        }
        return trainer_class._compute_loss(trainer, None, inputs)

    return loss


def verl(loss_mode: str, **settings: Any) -> Loss:
    """Return a registered policy loss of verl."""
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig, PolicyLossConfig

    names = PolicyLossConfig.__dataclass_fields__.keys() & settings.keys()
    policy_loss: dict[str, Any] = {"loss_mode": loss_mode} | {name: settings.pop(name) for name in names}
    bypass = loss_mode == "bypass_mode"
    if bypass:
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
        old_log_prob=batch.logp_rollout if bypass else batch.logp_old,
        log_prob=batch.logp,
        advantages=batch.advantages,
        response_mask=batch.mask,
        loss_agg_mode=config.loss_agg_mode,
        config=config,
        rollout_is_weights=batch.weights,
    )[0]


def skyrl(policy_loss_type: str, **settings: Any) -> Loss:
    """Return a registered policy loss of SkyRL, with its reduction."""
    if sys.version_info < (3, 12):
        # Below Python 3.12 pydantic rejects typing.TypedDict. This is the only reason why SkyRL requires 3.12.
        from typing_extensions import TypedDict

        typing.TypedDict = TypedDict
    from skyrl.backends.skyrl_train.utils import ppo_utils
    from skyrl.train.config import AlgorithmConfig

    config = AlgorithmConfig(policy_loss_type=policy_loss_type)
    for key, value in settings.items():
        *section, name = key.split(".")
        setattr(getattr(config, section[0]) if section else config, name, value)

    def loss(batch: LossBatch) -> Tensor:
        if batch.weights is not None:
            config.off_policy_correction.tis_ratio_type = "token"
        scaled = ppo_utils.apply_loss_reduction_to_advantages_minibatch(
            batch.advantages, batch.mask, config.loss_reduction, len(batch.mask), batch.mask.shape[1]
        )
        function = ppo_utils.PolicyLossRegistry.get(policy_loss_type)
        return function(batch.logp, batch.logp_old, scaled, config, batch.mask, batch.logp_rollout)[0]

    return loss


def slime(**settings: Any) -> Loss:
    """Return slime's loss function, with the defaults of its arguments."""
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

    def loss(batch: LossBatch) -> Tensor:
        args = argparse.Namespace(**defaults | settings, use_tis=batch.weights is not None)
        count, length = batch.mask.shape
        rollout = {
            "advantages": list(batch.advantages),
            "log_probs": list(batch.logp_old),
            "rollout_log_probs": list(batch.logp_rollout),
            "loss_masks": list(batch.mask),
            "rollout_mask_sums": list(batch.mask.sum(1)),
            "response_lengths": [length] * count,
            "total_lengths": [length] * count,
            "unconcat_tokens": None,
        }
        return module.loss_function(args, rollout, 1, count, batch.logp)[0]

    return loss


def prime_rl(type: str, **settings: Any) -> Loss:
    """Return a loss of prime-rl; ``type`` is ``default`` or ``ipo``."""
    from prime_rl.configs.trainer import DefaultLossConfig, IPOLossConfig
    from prime_rl.trainer.rl.loss import compute_loss, setup_rl_loss_fn

    config = {"default": DefaultLossConfig, "ipo": IPOLossConfig}[type](**settings)
    return lambda batch: compute_loss(
        trainer_logprobs=list(batch.logp),
        inference_logprobs=list(batch.logp_rollout),
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
    """Return the loss of ms-swift's GRPOTrainer."""
    from swift.rl_core.data import GRPOBatch
    from swift.rlhf_trainers.arguments import GRPOConfig
    from swift.rlhf_trainers.grpo_trainer import GRPOTrainer

    args = GRPOConfig(output_dir="unused", use_cpu=True, bf16=False, report_to="none", **settings)

    def loss(batch: LossBatch) -> Tensor:
        # A trainer without its constructor, with only the attributes that the loss reads.
        trainer = object.__new__(GRPOTrainer)
        trainer.args = args
        trainer.model = SimpleNamespace(training=True)
        trainer._prepare_algorithm_params()
        if batch.weights is not None:
            trainer.rollout_importance_sampling_mode = "token_truncate"
        vars(trainer).update(
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
        inputs = GRPOBatch(
            completion_mask=batch.mask.bool(),
            truncated_mask=torch.zeros(len(batch.mask), dtype=torch.bool),
            seq_lengths=batch.mask.sum(1),
            old_per_token_logps=batch.logp_old,
            rollout_per_token_logps=batch.logp_rollout,
            advantages=batch.advantages,
            num_items_in_batch=batch.mask.sum(),
        )
        return trainer._compute_loss_and_metrics(None, {}, inputs)[0]

    return loss


def liger(**settings: Any) -> Loss:
    """Return the loss that ms-swift uses with ``use_liger_kernel``. It is pure torch, without the Triton kernel."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    def loss(batch: LossBatch) -> Tensor:
        module = LigerFusedLinearGRPOLoss(
            beta=0.0,
            compiled=False,
            use_ref_model=False,
            max_completion_length=batch.logp.shape[1],
            **settings,
        )
        logits = two_token_logits(batch.logp)
        return module(
            logits,
            torch.eye(2, dtype=logits.dtype),
            torch.zeros(batch.mask.shape, dtype=torch.long),
            batch.mask,
            batch.advantages[:, 0],
            old_per_token_logps=batch.logp_old,
            vllm_is_ratio=batch.weights,
        )[0]

    return loss


def unsloth_zoo(**settings: Any) -> Loss:
    """Return the loss with which unsloth replaces TRL's."""
    os.environ["UNSLOTH_IS_PRESENT"] = "1"
    mock_modules("unsloth")
    from unsloth_zoo.rl_replacements import RL_REPLACEMENTS

    def loss(batch: LossBatch) -> Tensor:
        return RL_REPLACEMENTS["grpo_compute_loss"](
            ref=None,
            new=batch.logp,
            old=batch.logp_old,
            sampling_per_token_logps=None if batch.weights is None else batch.logp_rollout,
            input_ids=torch.zeros(batch.mask.shape, dtype=torch.long),
            mask=batch.mask,
            beta=0.0,
            advantages=batch.advantages[:, 0],
            max_completion_length=batch.logp.shape[1],
            num_items_in_batch=batch.mask.sum(),
            use_vllm=batch.weights is not None,
            vllm_importance_sampling_correction=batch.weights is not None,
            vllm_importance_sampling_mode="token_truncate",
            vllm_importance_sampling_clip_max=2.0,
            **settings,
        )[0]

    return loss


def openrlhf(**settings: Any) -> Loss:
    """Return OpenRLHF's `PolicyLoss`."""
    mock_modules("deepspeed", "flash_attn", "pylatexenc")
    from openrlhf.models.loss import PolicyLoss

    truncation = {
        "is_correction_level": "token",
        "is_correction_mode": "clip",
        "is_correction_threshold": (0.0, 2.0),
    }

    def loss(batch: LossBatch) -> Tensor:
        module = PolicyLoss(**settings, **({} if batch.weights is None else truncation))
        tensors = (batch.logp, batch.logp_old, batch.advantages, batch.mask)
        return module(*tensors, rollout_log_probs=batch.logp_rollout)[0]

    return loss


def areal(**settings: Any) -> Loss:
    """Return the loss function of AReaL's actor, with the defaults of its configuration."""
    services = (
        "aiofiles einops flask httpx lark numba openai orjson pybase64 swanlab tabulate tenacity tensorboardX trackio "
        "uvloop wandb werkzeug"
    )
    mock_modules(*services.split())
    from areal.api.cli_args import PPOActorConfig, RejectionSamplingConfig
    from areal.trainer.ppo.actor import grpo_loss_fn

    names = "c_clip eps_clip eps_clip_higher importance_sampling_level m2_threshold "
    names += "sapo_tau_neg sapo_tau_pos use_sapo_loss"
    fields = PPOActorConfig.__dataclass_fields__
    defaults = {name: fields[name].default for name in names.split()}

    def loss(batch: LossBatch) -> Tensor:
        weighted = batch.weights is not None
        truncation = RejectionSamplingConfig(level="token", action="clamp", metric="ratio", upper=2.0)
        return grpo_loss_fn(
            logprobs=batch.logp,
            entropy=torch.zeros_like(batch.logp),
            input_data={
                "logprobs": batch.logp_rollout if weighted else batch.logp_old,
                "prox_logp": batch.logp_old,
                "advantages": batch.advantages,
                "loss_mask": batch.mask.bool(),
            },
            rejection_sampling=truncation if weighted else None,
            **defaults | settings,
        )

    return loss


def torchtitan(loss: str, **settings: Any) -> Loss:
    """Return a loss of torchtitan's RL experiment. Its old policy is the generator's."""
    mock_modules(
        "spmd_types", "torchtitan.distributed.minimal_async_ep.kernels", "torchtitan.experiments.rl.models"
    )
    from torchtitan.experiments.rl import losses

    loss_class = getattr(losses, loss)
    loss_fn = loss_class(loss_class.Config(**settings))
    return lambda batch: loss_fn(
        two_token_logits(batch.logp),
        torch.zeros(batch.mask.shape, dtype=torch.long),
        float(batch.mask.sum()),
        generator_logprobs=batch.logp_old,
        advantages=batch.advantages,
        loss_mask=batch.mask.bool(),
    )[0]


def miles(**settings: Any) -> Loss:
    """Return miles' loss function, with the defaults of its arguments."""
    from miles.backends.training_utils import parallel
    from miles.backends.training_utils.loss import loss_function
    from miles.backends.training_utils.loss_hub import losses

    alone = parallel.GroupInfo(rank=0, size=1, group=None)
    groups = ("intra_dp", "intra_dp_cp", "cp", "tp", "pp", "ep", "etp", "indep_dp")
    parallel.set_parallel_state(parallel.ParallelState(**dict.fromkeys(groups, alone)))
    losses.get_log_probs_and_entropy = lambda logits, **_: {
        "log_probs": list(logits),
        "entropy": list(torch.zeros_like(logits)),
    }
    off = (
        "allgather_cp calculate_per_token_loss get_mismatch_metrics observe_training_entropy recompute_loss_function "
        "skip_actor_forward_only true_on_policy_mode use_dynamic_global_batch_size use_kl_loss use_opsm "
        "use_rollout_logprobs use_unbiased_kl"
    )
    absent = ("custom_pg_loss_reducer_function_path", "custom_tis_function_path", "eps_clip_c")
    defaults: dict[str, Any] = {
        **dict.fromkeys(off.split(), False),
        **dict.fromkeys(absent),
        "advantage_estimator": "grpo",
        "entropy_coef": 0.0,
        "eps_clip": 0.2,
        "eps_clip_high": 0.2,
        "loss_type": "policy_loss",
        "opsm_delta": 1e-4,
        "qkv_format": "thd",
        "tis_clip": 2.0,
        "tis_clip_low": 0.0,
    }

    def loss(batch: LossBatch) -> Tensor:
        count, length = batch.mask.shape
        args = argparse.Namespace(
            **defaults | settings, use_tis=batch.weights is not None, global_batch_size=count
        )
        tensors = {
            "advantages": list(batch.advantages),
            "log_probs": list(batch.logp_old),
            "rollout_log_probs": list(batch.logp_rollout),
            "loss_masks": list(batch.mask),
            "response_lengths": [length] * count,
            "total_lengths": [length] * count,
            "unconcat_tokens": None,
        }
        return loss_function(args, tensors, 1, batch.logp)[0]

    return loss


def nemo_rl(**settings: Any) -> Loss:
    """Return NeMo-RL's clipped loss, without its KL penalty, which is on by default."""
    mock_modules("fastapi", "hydra", "mlflow", "prometheus_client", "pynvml", "swanlab", "uvicorn")
    from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn

    def prepend_token(values: Tensor) -> Tensor:
        """Prepend a column of zeros for the first token, which has no log-probability."""
        return torch.nn.functional.pad(values, (1, 0))

    def loss(batch: LossBatch) -> Tensor:
        correction: dict[str, Any] = {}
        if batch.weights is not None:
            correction = {
                "use_importance_sampling_correction": True,
                "truncated_importance_sampling_type": "tis",
                "truncated_importance_sampling_ratio": 2.0,
            }
        config = ClippedPGLossConfig(reference_policy_kl_penalty=0.0, **correction, **settings)
        data = {
            "advantages": prepend_token(batch.advantages),
            "prev_logprobs": prepend_token(batch.logp_old),
            "generation_logprobs": prepend_token(batch.logp_rollout),
            "token_mask": prepend_token(batch.mask),
            "sample_mask": torch.ones(len(batch.mask)),
        }
        sequences = torch.tensor(float(len(batch.mask)))
        return ClippedPGLossFn(config)(batch.logp, data, sequences, batch.mask.sum())[0]

    return loss


def roll(worker: str = "ActorWorker", **settings: Any) -> Loss:
    """Return the loss of a worker of ROLL's RLVR pipeline, with the defaults of its configuration."""
    mock_modules("grpc", "imageio", "more_itertools", "opentelemetry", "pybase64", "transfer_queue")
    import dataclasses

    from roll.pipeline.rlvr import actor_pg_worker, actor_worker
    from roll.pipeline.rlvr.rlvr_config import RLVRConfig

    workers = {"ActorWorker": actor_worker.ActorWorker, "ActorPGWorker": actor_pg_worker.ActorPGWorker}
    worker_class = workers[worker]
    fields = {field.name: field.default for field in dataclasses.fields(RLVRConfig)}
    of_pipeline = {name: value for name, value in settings.items() if name in fields}
    of_actor = {name: value for name, value in settings.items() if name not in fields}

    def loss(batch: LossBatch) -> Tensor:
        # A worker without its constructor, with only the attributes that the loss reads.
        actor = object.__new__(worker_class)
        actor.pipeline_config = SimpleNamespace(
            **fields
            | of_pipeline
            | {
                "actor_train": SimpleNamespace(**of_actor),
                "enable_old_logprobs_recompute": True,
                "train_infer_correction": SimpleNamespace(
                    is_weight=SimpleNamespace(enabled=batch.weights is not None)
                ),
                "use_kl_loss": False,
            },
        )
        actor.strategy = SimpleNamespace(
            op_compute_log_probs=lambda **_: batch.logp,
            op_compute_entropy=lambda **_: torch.zeros_like(batch.logp),
        )
        actor._pg_config_cache = {}
        actor._logprobs_cache = {}
        for name in ("_pg_variant", "_topr_sample", "_cispo_config", "_kimi15_config"):
            setattr(actor, f"{name}_logged", True)
        samples = batch.mask.any(1).sum()
        data = SimpleNamespace(
            batch={
                "advantages": batch.advantages * batch.mask,  # as the pipeline computes them
                "input_ids": None,
                "old_log_probs": batch.logp_old,
                "ref_log_probs": batch.logp_old,
                "response_mask": torch.nn.functional.pad(batch.mask, (1, 0)),
                "scores": batch.advantages[:, 0],
                "train_infer_is_weight": batch.weights,
            },
            meta_info={
                "batch_num_tokens": {"response_mask": batch.mask.sum()},
                "global_valid_samples": {"response_mask": samples},
            },
            non_tensor_batch={},
        )
        return actor.loss_func(data, None)[0]

    return loss
