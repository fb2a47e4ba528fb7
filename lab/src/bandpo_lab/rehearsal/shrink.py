"""A recipe made small enough for two CPU cores: what is changed, and what cannot be rehearsed at all."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bandpo.errors import InvalidValue, MissingPackage

PROMPT_TOKENS, RESPONSE_TOKENS = 512, 64
PROMPTS, SAMPLES, MINI_BATCH = 4, 4, 2
_FP32 = "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"


@dataclass(frozen=True)
class Change:
    """One setting that the rehearsal replaces."""

    key: str
    value: str
    why: str
    was: str = "unset"

    @property
    def override(self) -> str:
        """As hydra reads it: set the key whether or not the recipe has it."""
        return f"++{self.key}={self.value}"


def compose(overrides: list[str], config_dir: Path | None, config_name: str) -> Any:
    """The recipe's whole config, as `python -m verl.trainer.main_ppo` composes it.

    Raises:
        ImportError: verl is not installed.
        ValueError: It cannot be composed; hydra's message names the key at fault.
    """
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        raise MissingPackage(
            "this needs verl: in a clone of bandpo, with Python 3.12, "
            "pip install -c lab/src/bandpo_lab/recipes/gpu.txt '.[verl]' './lab[verl]'"
        )

    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from omegaconf import open_dict
    from omegaconf.errors import OmegaConfBaseException

    search_path = [] if config_dir is None else [f"hydra.searchpath=[file://{config_dir.resolve()}]"]
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(Path(spec.origin).parent / "trainer" / "config"), version_base=None):
        try:
            config = hydra_compose(config_name, [*overrides, *search_path], return_hydra_config=True)
        # ValueError: hydra's for a null group of files, without its name.
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            raise InvalidValue(f"the config cannot be composed: {error}{named_unset(overrides)}") from error
    # As hydra's own main does: bandpo's checks read there which settings the command line has.
    HydraConfig.instance().set_config(config)
    with open_dict(config):
        del config["hydra"]
    return config


def unset(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that set something to null or delete it.

    >>> unset(["trainer.nnodes=2", "data.seed=null", "~critic"])
    ['data.seed=null', '~critic']
    """
    return [word for word in overrides if word.endswith("=null") or word.startswith("~")]


def named_unset(overrides: Sequence[str]) -> str:
    """Return the end of a message that names these overrides, since verl and hydra may fail without naming them."""
    words = unset(overrides)
    return f" (of the command line: {', '.join(words)})" if words else ""


def refuse(config: Any) -> None:
    """Stops at a recipe whose core part would not be rehearsed.

    Raises:
        ValueError: with the part and the reason.
    """
    from omegaconf import OmegaConf

    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    reasons = {
        "algorithm.adv_estimator=gae (a critic): verl's critic runs on FlashAttention only": (
            config.algorithm.adv_estimator == "gae" or bool(config.critic.enable)
        ),
        f"actor.strategy={actor.strategy}: only FSDP (as FSDP2) runs on a CPU": actor.strategy
        not in ("fsdp", "fsdp2"),
        "reward.reward_model.enable: a reward model needs an inference engine": config.reward.reward_model.enable,
        "LoRA: its weights reach the inference engine by a path of their own": (
            # A null rank is refused with the settings.
            max(model.lora_rank or 0, OmegaConf.select(config, "actor_rollout_ref.model.lora.rank") or 0) > 0
        ),
    }
    found = [reason for reason, applies in reasons.items() if applies]
    if found:
        raise InvalidValue(f"this recipe cannot be rehearsed on a CPU: {'; '.join(found)}")


def samples(config: Any) -> int:
    """Responses to one prompt in the rehearsal: a right one is planted in each group, so two at least."""
    wanted = config.actor_rollout_ref.rollout.n
    return min(max(wanted, 2), SAMPLES) if isinstance(wanted, int) else SAMPLES


def changes(config: Any, folder: Path, steps: int) -> list[Change]:
    """Every setting of `config` that the rehearsal replaces, in groups with one reason each."""
    from omegaconf import OmegaConf

    actor, ref, rollout = (f"actor_rollout_ref.{part}" for part in ("actor", "ref", "rollout"))
    settings = config.actor_rollout_ref
    groups: dict[str, dict[str, Any]] = {
        "no GPU": {
            "trainer.device": "cpu",
            "trainer.nnodes": 1,
            "trainer.n_gpus_per_node": 1,
            f"{actor}.strategy": "fsdp2",
            f"{actor}.fsdp_config.use_torch_compile": False,
            f"{ref}.fsdp_config.use_torch_compile": False,
            "actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
            "actor_rollout_ref.model.use_fused_kernels": False,
            "actor_rollout_ref.model.use_liger": False,
            **{
                f"{part}.fsdp_config.{offload}": False
                for part in (actor, ref)
                for offload in ("param_offload", "optimizer_offload", "offload_policy")
            },
        },
        "one process, and no FlashAttention, which verl needs to split a sequence": {
            f"{part}.{engine}ulysses_sequence_parallel_size": 1
            for part in (actor, ref)
            for engine in ("", "fsdp_config.")
        },
        # verl wraps a forward-only model with pinned memory, which needs a GPU.
        "no GPU to pin memory for": {
            f"{ref}.fsdp_config.forward_only": False,
            f"{ref}.optim": "{_target_:verl.workers.config.FSDPOptimizerConfig,lr:0}",
        },
        "fp32, so that trainer and sampler agree to 1e-6": {
            f"{actor}.fsdp_config.mixed_precision": _FP32,
            f"{ref}.fsdp_config.mixed_precision": _FP32,
        },
        "transformers in place of vLLM or SGLang": {
            f"{rollout}.name": "transformers",
            f"{rollout}.mode": "async",
            f"{rollout}.free_cache_engine": False,
            **{f"{rollout}.{kind}_parallel_size": 1 for kind in ("tensor_model", "data", "pipeline_model")},
        },
        "stand-in": {
            "actor_rollout_ref.model.path": folder / "model",
            "data.train_files": folder / "train.parquet",
            "data.val_files": folder / "val.parquet",
        },
        "small": {
            "data.max_prompt_length": PROMPT_TOKENS,
            "data.max_response_length": RESPONSE_TOKENS,
            "data.train_batch_size": PROMPTS,
            "data.train_max_samples": -1,
            "data.val_max_samples": -1,
            "data.val_batch_size": "null",
            f"{rollout}.n": samples(config),
            f"{rollout}.val_kwargs.n": min(settings.rollout.val_kwargs.n, 2),
            **_overlong(config),
            **{
                key: 2
                for key in (
                    f"{actor}.ppo_micro_batch_size_per_gpu",
                    f"{ref}.log_prob_micro_batch_size_per_gpu",
                    f"{rollout}.log_prob_micro_batch_size_per_gpu",
                )
                if OmegaConf.select(config, key) is not None
            },
        },
        "few processes": {
            f"{rollout}.agent.num_workers": 1,
            "reward.num_workers": 1,
            "data.dataloader_num_workers": 0,
            "data.filter_overlong_prompts_workers": 1,
            "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        },
        "large steps, so that the rule clips and stale weights would show": {
            f"{actor}.ppo_mini_batch_size": MINI_BATCH,
            f"{actor}.optim.lr": 1e-2,
            f"{actor}.optim.lr_warmup_steps": 0,
            f"{actor}.optim.lr_warmup_steps_ratio": 0.0,
        },
        "every stage within a few steps": {
            "trainer.total_training_steps": steps,
            "trainer.save_freq": steps,
            "trainer.test_freq": steps,
            "trainer.val_before_train": False,
            "trainer.val_only": False,
            "trainer.resume_mode": "auto",
            "trainer.default_local_dir": folder / "checkpoints",
            "trainer.default_hdfs_dir": "null",
            "trainer.rollout_data_dir": folder / "rollouts",
            "trainer.logger": "[console,file]",
            "trainer.v1.trainer_mode": "sync",
        },
        "a private Ray on this machine": {
            "ray_kwargs.ray_init.address": "local",
            "ray_kwargs.ray_init.num_gpus": 1,
            "ray_kwargs.ray_init.num_cpus": 9,
            "ray_kwargs.ray_init.include_dashboard": False,
            "ray_kwargs.ray_init.object_store_memory": 300_000_000,
            "ray_kwargs.ray_init._temp_dir": folder / "ray",
        },
    }
    made = []
    for why, group in groups.items():
        for key, value in group.items():
            was = OmegaConf.select(config, key, default="unset")
            if str(was) != str(value) and not (was is None and value == "null"):
                made.append(Change(key, str(value), why, str(was)))
    return made


def _overlong(config: Any) -> dict[str, int]:
    """DAPO's penalty for long responses, at the same share of the response's length."""
    from omegaconf import OmegaConf

    key = "reward.reward_kwargs"
    buffer = OmegaConf.select(config, f"{key}.overlong_buffer_cfg.len")
    if buffer is None:
        return {}
    share = buffer / config.data.max_response_length
    return {
        f"{key}.max_resp_len": RESPONSE_TOKENS,
        f"{key}.overlong_buffer_cfg.len": max(1, round(share * RESPONSE_TOKENS)),
    }
