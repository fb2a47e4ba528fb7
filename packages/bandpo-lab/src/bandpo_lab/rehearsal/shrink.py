"""Shrink a recipe so that it runs on two CPU cores, and refuse recipes that cannot be rehearsed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bandpo_lab.cluster.modes import SEARCH_PATH, ModeName, entry_point_of, has_separate_sampler, mode_of
from bandpo_lab.cluster.pip_arguments import VERL
from bandpo_lab.errors import InvalidValue, MissingPackage, error_about

PROMPT_TOKENS = 512
"""The longest prompt of a rehearsal, in tokens."""
RESPONSE_TOKENS = 64
"""The longest response, in tokens."""
PROMPTS = 4
"""The prompts of a batch."""
SAMPLES = 4
"""The largest number of responses to one prompt."""
MINI_BATCH = 2
"""The prompts of a mini-batch."""
_FP32 = "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"
UNTESTED = (
    "the import of verl in each process: one process imports it, and the others are forks",
    "TRL, which is hidden from verl: a node should not have it (recipes/gpu.txt does not)",
    "the share of right answers: the rehearsal plants them among the responses",
)
"""The parts of a real run that no rehearsal tests, whatever the recipe."""


@dataclass(frozen=True)
class Change:
    """A setting that the rehearsal replaces, with its value in the recipe."""

    key: str
    value: str
    reason: str
    not_covered: str
    """The part of the real run that the rehearsal does not test, since this setting is another one."""
    original: str = "unset"

    @property
    def override(self) -> str:
        """The override for hydra, which sets the key even if the recipe does not have it."""
        return f"++{self.key}={self.value}"


def compose(overrides: list[str], config_dir: Path | None, config_name: str) -> Any:
    """Return the full config of a recipe, as the program of verl composes it that has this main config.

    Args:
        overrides: The overrides, as on hydra's command line.
        config_dir: A folder with further config files, such as recipes.
        config_name: The name of verl's main config file, as in `bandpo_lab.cluster.modes`.

    Raises:
        ImportError: verl is not installed.
        ValueError: The config cannot be composed; hydra's message names the key.
    """
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        raise MissingPackage(f"this needs verl: in a clone of bandpo, with Python 3.12, pip install {VERL}")

    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from omegaconf import open_dict
    from omegaconf.errors import OmegaConfBaseException

    paths = [SEARCH_PATH] if config_dir is None else [SEARCH_PATH, f"file://{config_dir.resolve()}"]
    search_path = f"hydra.searchpath=[{','.join(paths)}]"
    folder = Path(spec.origin).parent / entry_point_of(config_name).config_folder
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(folder), version_base=None):
        try:
            config = hydra_compose(config_name, [*overrides, search_path], return_hydra_config=True)
        # hydra raises ValueError, without a name, for a group of config files that is null.
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            raise InvalidValue(f"the config cannot be composed: {error}{named_unset(overrides)}") from error
    # As in hydra's own main: bandpo's checks read the overrides of the command line from there.
    HydraConfig.instance().set_config(config)
    with open_dict(config):
        del config["hydra"]
        # As in the main function of the programs with this group of settings.
        if "rollout" in config:
            for name in ("nnodes", "n_gpus_per_node"):
                config.actor_rollout_ref.rollout[name] = config.rollout[name]
    return config


def unset(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that set a setting to null or delete it.

    >>> unset(["trainer.nnodes=2", "data.seed=null", "~critic"])
    ['data.seed=null', '~critic']
    """
    return [override for override in overrides if override.endswith("=null") or override.startswith("~")]


def named_unset(overrides: Sequence[str]) -> str:
    """Return the end of an error message that names the overrides of `unset`; empty if there are none.

    verl and hydra may fail over such a setting without naming it.
    """
    names = unset(overrides)
    return f" (of the command line: {', '.join(names)})" if names else ""


def refuse(config: Any) -> None:
    """Refuse a recipe with a central part that cannot run on a CPU.

    Raises:
        ValueError: The recipe has such a part; the message names it and the reason.
    """
    from omegaconf import OmegaConf

    from bandpo.integrations.verl.settings import in_bypass_mode

    actor = config.actor_rollout_ref.actor
    model = config.actor_rollout_ref.model
    rollout = config.actor_rollout_ref.rollout
    # A null rank is refused by the checks of the settings.
    lora_rank = max(model.lora_rank or 0, OmegaConf.select(config, "actor_rollout_ref.model.lora.rank") or 0)
    conditions = {
        "algorithm.adv_estimator=gae (a critic): verl's critic runs on FlashAttention only": (
            config.algorithm.adv_estimator == "gae" or bool(config.critic.enable)
        ),
        f"actor.strategy={actor.strategy}: only FSDP (as FSDP2) runs on a CPU": actor.strategy
        not in ("fsdp", "fsdp2"),
        "reward.reward_model.enable: a reward model needs an inference engine": config.reward.reward_model.enable,
        "LoRA: its weights reach the inference engine by a path of their own": lora_rank > 0,
        # These would change which log-probabilities the ratio refers to.
        "top_p or top_k under algorithm.rollout_correction.bypass_mode=true: the old log-probabilities are those of "
        "the tokens that remain, and the right answers of a rehearsal have others": (
            in_bypass_mode(config) and (rollout.top_p < 1 or rollout.top_k > 0)
        ),
    }
    reasons = [reason for reason, applies in conditions.items() if applies]
    if reasons:
        raise error_about(InvalidValue, reasons, title="this recipe cannot be rehearsed on a CPU")


def samples(config: Any) -> int:
    """Return the number of responses to one prompt; at least two, since a right one is planted in each group."""
    count = config.actor_rollout_ref.rollout.n
    return min(max(count, 2), SAMPLES) if isinstance(count, int) else SAMPLES


def changes(config: Any, folder: Path, steps: int) -> list[Change]:
    """Return every setting of a recipe that the rehearsal replaces, in groups of one reason each.

    Args:
        config: The recipe's composed config.
        folder: The folder of the rehearsal.
        steps: The number of training steps.
    """
    from omegaconf import OmegaConf

    changes = []
    for group in _replacements(config, folder, steps):
        for key, value in group.settings.items():
            original = OmegaConf.select(config, key, default="unset")
            is_null = original is None and value == "null"
            if str(original) != str(value) and not is_null:
                changes.append(Change(key, str(value), group.reason, group.not_covered, str(original)))
    return changes


def not_covered(changes: Sequence[Change]) -> list[str]:
    """Return the parts of the real run that a rehearsal with these changes does not test."""
    return [*dict.fromkeys(change.not_covered for change in changes), *UNTESTED]


@dataclass(frozen=True)
class _Replacement:
    """Settings of a rehearsal that replace those of the recipe for one reason."""

    reason: str
    not_covered: str
    settings: dict[str, Any]


def _replacements(config: Any, folder: Path, steps: int) -> list[_Replacement]:
    """Return the settings of a rehearsal, in groups.

    None of them may change which log-probabilities the ratio refers to: `refuse` refuses such recipes.
    """
    from omegaconf import OmegaConf

    settings = config.actor_rollout_ref
    mode = mode_of(config)
    is_separate = has_separate_sampler(mode)
    actor = "actor_rollout_ref.actor"
    ref = "actor_rollout_ref.ref"
    rollout = "actor_rollout_ref.rollout"
    micro_batch_sizes = (
        f"{actor}.ppo_micro_batch_size_per_gpu",
        f"{ref}.log_prob_micro_batch_size_per_gpu",
        f"{rollout}.log_prob_micro_batch_size_per_gpu",
    )
    return [
        _Replacement(
            "no GPU",
            "CUDA, FlashAttention, fused kernels, Liger, torch.compile",
            {
                "trainer.device": "cpu",
                f"{actor}.fsdp_config.use_torch_compile": False,
                f"{ref}.fsdp_config.use_torch_compile": False,
                "actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
                "actor_rollout_ref.model.use_fused_kernels": False,
                "actor_rollout_ref.model.use_liger": False,
            },
        ),
        _Replacement(
            "no GPU to off-load from",
            "FSDP1 and off-loading",
            {
                f"{actor}.strategy": "fsdp2",
                f"{actor}.fsdp_config.param_offload": False,
                f"{actor}.fsdp_config.optimizer_offload": False,
                f"{actor}.fsdp_config.offload_policy": False,
                f"{ref}.fsdp_config.param_offload": False,
                f"{ref}.fsdp_config.optimizer_offload": False,
                f"{ref}.fsdp_config.offload_policy": False,
            },
        ),
        _Replacement(
            "one process, and no FlashAttention, which verl needs to split a sequence",
            "several nodes and processes: sharding, sequence parallelism (Ulysses), an engine on several GPUs",
            {
                "trainer.nnodes": 1,
                "trainer.n_gpus_per_node": 1,
                f"{actor}.ulysses_sequence_parallel_size": 1,
                f"{actor}.fsdp_config.ulysses_sequence_parallel_size": 1,
                f"{ref}.ulysses_sequence_parallel_size": 1,
                f"{ref}.fsdp_config.ulysses_sequence_parallel_size": 1,
                f"{rollout}.tensor_model_parallel_size": 1,
                f"{rollout}.data_parallel_size": 1,
                f"{rollout}.pipeline_model_parallel_size": 1,
            },
        ),
        # verl wraps a forward-only model with pinned memory, which needs a GPU.
        _Replacement(
            "no GPU to pin memory for",
            "the reference model as verl wraps one that is never trained",
            {
                f"{ref}.fsdp_config.forward_only": False,
                f"{ref}.optim": "{_target_:verl.workers.config.FSDPOptimizerConfig,lr:0}",
            },
        ),
        _Replacement(
            "fp32, so that trainer and sampler agree to 1e-6",
            "bf16, and how far trainer and sampler are apart in it",
            {
                f"{actor}.fsdp_config.mixed_precision": _FP32,
                f"{ref}.fsdp_config.mixed_precision": _FP32,
            },
        ),
        _Replacement(
            "transformers in place of vLLM or SGLang",
            "vLLM and SGLang: transformers generates, with another weight sync, which interrupts no response",
            {
                f"{rollout}.name": "transformers",
                f"{rollout}.mode": "async",
                f"{rollout}.free_cache_engine": False,
            },
        ),
        _Replacement(
            "stand-in",
            "the model, its tokenizer and chat template unless it is a folder on this machine; most prompts",
            {
                "actor_rollout_ref.model.path": folder / "model",
                "data.train_files": folder / "train.parquet",
                "data.val_files": folder / "val.parquet",
            },
        ),
        _Replacement(
            "small",
            "the size: long prompts and responses, the number of responses, memory and speed",
            {
                "data.max_prompt_length": PROMPT_TOKENS,
                "data.max_response_length": RESPONSE_TOKENS,
                "data.train_max_samples": -1,
                "data.val_max_samples": -1,
                "data.val_batch_size": "null",
                f"{rollout}.n": samples(config),
                f"{rollout}.val_kwargs.n": min(settings.rollout.val_kwargs.n, 2),
                **_overlong_penalty(config),
                **{key: 2 for key in micro_batch_sizes if OmegaConf.select(config, key) is not None},
            },
        ),
        _Replacement(
            "small, with one update for each batch only if the recipe makes one",
            "the number of updates for each batch",
            _small_batch(config),
        ),
        *_old_data(config, steps),
        *_separate_sampler(config),
        _Replacement(
            "few processes",
            "several workers for agent loops, rewards and data",
            {
                f"{rollout}.agent.num_workers": 1,
                "reward.num_workers": 1,
                "data.dataloader_num_workers": 0,
                "data.filter_overlong_prompts_workers": 1,
                "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
            },
        ),
        _Replacement(
            "large steps, so that the rule clips and stale weights would show",
            "the learning rate and its warm-up, and whether the recipe learns anything",
            {
                f"{actor}.optim.lr": 1e-2,
                f"{actor}.optim.lr_warmup_steps": 0,
                f"{actor}.optim.lr_warmup_steps_ratio": 0.0,
            },
        ),
        _Replacement(
            "every stage within a few steps",
            "the length of the run, its schedule of validation and checkpoints, and from which checkpoint it resumes",
            {
                "trainer.total_training_steps": steps,
                "trainer.save_freq": steps,
                "trainer.test_freq": steps,
                "trainer.val_before_train": False,
                "trainer.val_only": False,
                "trainer.resume_mode": "auto",
            },
        ),
        _Replacement(
            "all output in one folder",
            "the recipe's folders, HDFS, and loggers other than console and file",
            {
                "trainer.default_local_dir": folder / "checkpoints",
                "trainer.default_hdfs_dir": "null",
                # The one-step-off trainer of verl 0.9.1 fails if this is set.
                **({} if mode == "one_step_off" else {"trainer.rollout_data_dir": folder / "rollouts"}),
                "trainer.logger": "[console,file]",
            },
        ),
        _Replacement(
            "a private Ray on this machine",
            "the Ray cluster",
            {
                "ray_kwargs.ray_init.address": "local",
                "ray_kwargs.ray_init.num_gpus": 2 if is_separate else 1,
                "ray_kwargs.ray_init.num_cpus": 40 if is_separate else 9,
                "ray_kwargs.ray_init.include_dashboard": False,
                "ray_kwargs.ray_init.object_store_memory": 300_000_000,
                "ray_kwargs.ray_init._temp_dir": folder / "ray",
            },
        ),
    ]


def _small_batch(config: Any) -> dict[str, int]:
    """Return the sizes of a batch and of a mini-batch; the fully asynchronous trainer has no batch."""
    mini_batch = "actor_rollout_ref.actor.ppo_mini_batch_size"
    if mode_of(config) == "fully_async":
        return {mini_batch: MINI_BATCH}
    return {
        "data.train_batch_size": PROMPTS,
        mini_batch: PROMPTS if makes_one_update(config) else MINI_BATCH,
    }


def _old_data(config: Any, steps: int) -> list[_Replacement]:
    """Return the settings of a trainer that trains on old data; none for a synchronous one."""
    mode = mode_of(config)
    updates = 1 if makes_one_update(config) else PROMPTS // MINI_BATCH
    settings: dict[ModeName, dict[str, Any]] = {
        "sync": {},
        "colocate_async": {"trainer.v1.colocate_async.num_warmup_batches": 1},
        "separate_async": {
            "trainer.v1.separate_async.num_warmup_batches": 1,
            "trainer.v1.separate_async.parameter_sync_step": updates,
        },
        "fully_async": {
            "async_training.staleness_threshold": 1,
            "async_training.require_batches": 1,
            "async_training.trigger_parameter_sync_step": updates,
            "rollout.total_rollout_steps": updates * MINI_BATCH * steps,
        },
        "one_step_off": {},
    }
    return [
        _Replacement(
            "data that is one version old within a few steps",
            "data that is older than one version",
            settings[mode],
        )
    ]


def _separate_sampler(config: Any) -> list[_Replacement]:
    """Return the settings of a sampler with processes of its own; none for a mode without."""
    mode = mode_of(config)
    if not has_separate_sampler(mode):
        return []
    rollout = "actor_rollout_ref.rollout"
    nodes = rollout if mode == "separate_async" else "rollout"
    return [
        _Replacement(
            "a sampler of one process, and no NCCL that would send it the weights",
            "NCCL, or another engine that sends the weights to the sampler: a file does",
            {
                f"{nodes}.nnodes": 1,
                f"{nodes}.n_gpus_per_node": 1,
                f"{rollout}.checkpoint_engine.backend": "file",
                f"{rollout}.checkpoint_engine.custom_backend_module": "bandpo_lab.rehearsal.transfer",
            },
        )
    ]


def makes_one_update(config: Any) -> bool:
    """Return True if the recipe makes one update for each batch, or for each version of the sampler's weights."""
    actor = config.actor_rollout_ref.actor
    if mode_of(config) == "fully_async":
        settings = config.async_training
        return actor.ppo_epochs * settings.require_batches * settings.trigger_parameter_sync_step == 1
    return actor.ppo_epochs == 1 and config.data.train_batch_size <= actor.ppo_mini_batch_size


def _overlong_penalty(config: Any) -> dict[str, int]:
    """Return the settings of DAPO's penalty for long responses, at the same share of the longest response."""
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
