"""The frameworks whose configurations are checked, with the marks that identify each, and the defaults."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlvet.runs.files import load_table


@dataclass(frozen=True)
class Framework:
    """The names and defaults of a framework's settings, as far as rules depend on them."""

    title: str
    """The name of the framework, as it is printed."""
    version: str
    """The version that the defaults are from."""
    defaults: Mapping[str, Any]
    """The default of each setting that a rule reads."""
    marks: tuple[tuple[str, ...], ...]
    """Setting names that no other framework has. Each entry lists names that must all occur, since some names are
    shared and only their combination is not. A name that ends with ``*`` is a prefix."""
    mark_among_own: str = ""
    """A setting name that identifies the framework only if all other names are in `defaults`. Other programs have this
    name too, but beside names of their own."""
    programs: tuple[str, ...] = ()
    """Beginnings of the modules that run the framework, as in ``python -m MODULE``."""
    older_names: Mapping[str, str] = field(default_factory=dict)
    """The newest name of each setting that had another name in earlier versions."""
    optional: frozenset[str] = frozenset()
    """Settings that the file of a run may lack: those that are no settings, and those that an earlier version had not,
    which behaved as with the default."""
    programs_of_settings: tuple[str, ...] = ()
    """Beginnings of the modules whose settings have `defaults`, apart from `program_defaults`. If this is empty, any
    program's have."""
    extensions: tuple[str, ...] = ()
    """Beginnings of the settings of programs that add settings to the framework's, and keep its defaults."""
    program_defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Defaults that differ from `defaults`, by the beginning of the module."""
    early_settings: frozenset[str] = frozenset()
    """Settings that early versions had, and the newest has not."""
    stable: frozenset[str] = frozenset()
    """Settings of `defaults` that have had the same default in every version."""
    sections: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """The names of all settings in some sections. Hydra refuses others, unless they begin with ``+``."""
    added: frozenset[str] = frozenset()
    """Settings that the adapter of bandpo adds. They change none of `defaults`."""

    def mark_in(self, names: Collection[str], program: str = "") -> str:
        """Return a mark of the framework, for messages; an empty text if there is none.

        Args:
            names: The dotted names of settings.
            program: The module or file that a command runs.

        >>> TRL.mark_in(["num_generations", "use_vllm"]), TRL.mark_in(["num_generations", "num_epochs"])
        ('num_generations, use_vllm', '')
        """
        for mark in self.marks:
            matches = [_first_match(pattern, names) for pattern in mark]
            if all(matches):
                return ", ".join(matches)
        if program.startswith(self.programs):
            return program
        if self.mark_among_own in names and all(
            name in self.defaults or name in self.added for name in names
        ):
            return self.mark_among_own
        return ""

    def defaults_of(self, program: str, names: Collection[str] = ()) -> Mapping[str, Any] | None:
        """Return the defaults of a program that differ from `defaults`; None if its defaults are not known.

        Args:
            program: The module or file that a command runs.
            names: The dotted names of the settings of the command.

        >>> VERL.defaults_of("verl.trainer.main_ppo"), VERL.defaults_of("mine.main_ppo")
        ({}, None)
        """
        for beginning, defaults in self.program_defaults.items():
            if program.startswith(beginning):
                return defaults
        known = not self.programs_of_settings or program.startswith(self.programs_of_settings)
        if not known and self.extensions:
            known = any(name.startswith(self.extensions) for name in names)
        return {} if known else None

    def unknown_setting(self, names: Collection[str]) -> str:
        """Return the first name that `sections` should have and does not; an empty text if there is none.

        >>> VERL.unknown_setting(["actor_rollout_ref.rollout.n", "actor_rollout_ref.rollout.n_agent"])
        'actor_rollout_ref.rollout.n_agent'
        """
        for name in names:
            section = name
            while "." in section:
                section, _, setting = section.rpartition(".")
                known = setting in HYDRA_NAMES or name in self.added
                if section in self.sections and setting not in self.sections[section] and not known:
                    return name
        return ""


HYDRA_NAMES = ("_target_", "_args_", "_convert_", "_partial_", "_recursive_")
"""Names that every section may have: hydra's own, such as the class that is constructed with the settings."""


def _first_match(pattern: str, names: Collection[str]) -> str:
    """Return the first name that a pattern of `Framework.marks` matches; an empty text if there is none."""
    if pattern.endswith("*"):
        return next((name for name in names if name.startswith(pattern[:-1])), "")
    return pattern if pattern in names else ""


def _each_with(name: str, *others: str) -> tuple[tuple[str, ...], ...]:
    """Return the marks that consist of one setting name and one of several others."""
    return tuple((name, other) for other in others)


TRL = Framework(
    title="TRL",
    version="1.16.0",
    defaults={
        "beta": 0.0,
        "delta": None,
        "epsilon": 0.2,
        "epsilon_high": None,
        "generation_batch_size": None,
        "generation_kwargs": None,
        "generation_kwargs.frequency_penalty": None,
        "generation_kwargs.presence_penalty": None,
        "generation_kwargs.repetition_penalty": None,
        "gradient_accumulation_steps": 1,
        "importance_sampling_level": "token",
        "learning_rate": 1e-6,
        "loss_type": "dapo",
        "min_p": None,
        "model_name_or_path": None,
        # Flags of torchrun and of accelerate, not of TRL.
        "nnodes": 1,
        "nproc_per_node": None,
        "num_processes": None,
        "num_generations": 8,
        "num_iterations": 1,
        "optim": "adamw_torch_fused",
        "per_device_train_batch_size": 8,
        "repetition_penalty": 1.0,
        "steps_per_generation": None,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "use_liger_kernel": False,
        "use_peft": False,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        # Not a setting of GRPOConfig: True if the script loads the model from a trained adapter.
        "model.adapter": False,
    },
    marks=(
        ("importance_sampling_level",),
        ("vllm_importance_sampling_*",),
        ("steps_per_generation",),
        ("generation_batch_size",),
        # Programs for MLX have num_generations too, but neither TRL's nor transformers' names of these.
        *_each_with(
            "num_generations",
            "max_completion_length",
            "model_name_or_path",
            "num_train_epochs",
            "per_device_train_batch_size",
            "use_vllm",
        ),
    ),
    mark_among_own="num_generations",
    programs=("trl grpo", "trl.scripts.grpo", "trl/scripts/grpo"),
    older_names={"use_liger_loss": "use_liger_kernel"},
    optional=frozenset(
        # The arguments of the script and its launcher, and settings without which TRL did as with their defaults.
        {
            "delta",
            "generation_batch_size",
            "generation_kwargs",
            "generation_kwargs.frequency_penalty",
            "generation_kwargs.presence_penalty",
            "generation_kwargs.repetition_penalty",
            "importance_sampling_level",
            "min_p",
            "model.adapter",
            "model_name_or_path",
            "nnodes",
            "nproc_per_node",
            "num_iterations",
            "num_processes",
            "optim",
            "repetition_penalty",
            "steps_per_generation",
            "use_liger_kernel",
            "use_peft",
        }
    ),
    stable=frozenset(
        {"gradient_accumulation_steps", "learning_rate", "num_generations", "per_device_train_batch_size"}
    ),
    added=frozenset(
        {
            "accept_idle_clip",
            "anchor",
            "audit_detail",
            "audit_steps",
            "certify",
            "method",
            "record",
            "watched",
        }
    ),
)

VERL = Framework(
    title="verl",
    version="0.9.1",
    defaults={
        "actor_rollout_ref.actor.clip_ratio": 0.2,
        "actor_rollout_ref.actor.clip_ratio_high": 0.2,
        "actor_rollout_ref.actor.clip_ratio_low": 0.2,
        "actor_rollout_ref.actor.entropy_coeff": 0,
        "actor_rollout_ref.actor.kl_loss_coef": 0.001,
        "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
        "actor_rollout_ref.actor.loss_scale_factor": None,
        "actor_rollout_ref.actor.optim.lr": 1e-6,
        "actor_rollout_ref.actor.optim.optimizer": "AdamW",
        "actor_rollout_ref.actor.policy_loss.loss_mode": "vanilla",
        "actor_rollout_ref.actor.ppo_epochs": 1,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
        "actor_rollout_ref.actor.strategy": "fsdp",
        "actor_rollout_ref.actor.use_dynamic_bsz": False,
        "actor_rollout_ref.actor.use_kl_loss": False,
        "actor_rollout_ref.model.lora.rank": 0,
        "actor_rollout_ref.model.lora_adapter_path": None,
        "actor_rollout_ref.model.lora_rank": 0,
        "actor_rollout_ref.model.path": None,
        "actor_rollout_ref.rollout.calculate_log_probs": True,
        "actor_rollout_ref.rollout.n": 1,
        "actor_rollout_ref.rollout.repetition_penalty": 1.0,
        "actor_rollout_ref.rollout.temperature": 1.0,
        "actor_rollout_ref.rollout.top_k": -1,
        "actor_rollout_ref.rollout.top_p": 1.0,
        "algorithm.adv_estimator": "gae",
        "algorithm.kl_ctrl.kl_coef": 0.001,
        "algorithm.norm_adv_by_std_in_grpo": True,
        "algorithm.rollout_correction.bypass_mode": False,
        "algorithm.rollout_correction.loss_type": "ppo_clip",
        "algorithm.rollout_correction.rollout_is": None,
        "algorithm.rollout_correction.rollout_rs": None,
        "algorithm.rollout_correction.rollout_rs_threshold": None,
        "algorithm.use_kl_in_reward": False,
        "async_training.use_rollout_log_probs": None,
        "data.train_batch_size": 1024,
        "data.val_batch_size": None,
        "distillation.enabled": False,
        # Not a setting: the module or script that a command runs.
        "program": "",
        "trainer.n_gpus_per_node": 8,
        "trainer.nnodes": 1,
        "trainer.use_v1": True,
        "trainer.v1.trainer_mode": "sync",
    },
    marks=(("actor_rollout_ref.*",), ("algorithm.rollout_correction.*",)),
    # Not verl.trainer.main, the program of EasyR1, which has other names.
    programs=("verl.trainer.main_ppo", "verl.experimental."),
    optional=frozenset(
        {
            "actor_rollout_ref.actor.optim.optimizer",
            "actor_rollout_ref.model.lora.rank",
            "actor_rollout_ref.model.lora_adapter_path",
            "actor_rollout_ref.model.lora_rank",
            "actor_rollout_ref.model.path",
            "actor_rollout_ref.rollout.repetition_penalty",
            "async_training.use_rollout_log_probs",
            "data.val_batch_size",
            "distillation.enabled",
            "program",
        }
    ),
    programs_of_settings=("verl.trainer.main_ppo", "recipe.dapo.main_dapo", "verl/trainer/main_ppo"),
    # rLLM composes verl's ppo_trainer.yaml, see rllm/trainer/config/agent_ppo_trainer.yaml.
    extensions=("rllm.",),
    program_defaults={
        "verl.experimental.fully_async_policy.": {"algorithm.rollout_correction.bypass_mode": True},
        "verl.experimental.one_step_off_policy.": {"algorithm.rollout_correction.bypass_mode": True},
    },
    early_settings=frozenset(
        {"actor_rollout_ref.actor.fsdp_config.grad_offload", "actor_rollout_ref.ref.fsdp_config.grad_offload"}
    ),
    stable=frozenset(
        # Compared with ppo_trainer.yaml of verl 0.1, as TinyZero and Logic-RL have it.
        {
            "actor_rollout_ref.actor.clip_ratio",
            "actor_rollout_ref.actor.optim.lr",
            "actor_rollout_ref.actor.optim.optimizer",
            "actor_rollout_ref.actor.ppo_epochs",
            "actor_rollout_ref.actor.ppo_mini_batch_size",
            "actor_rollout_ref.actor.strategy",
            "actor_rollout_ref.actor.use_dynamic_bsz",
            "actor_rollout_ref.model.lora.rank",
            "actor_rollout_ref.model.lora_adapter_path",
            "actor_rollout_ref.model.lora_rank",
            "actor_rollout_ref.model.path",
            "actor_rollout_ref.rollout.n",
            "actor_rollout_ref.rollout.temperature",
            "actor_rollout_ref.rollout.top_k",
            "actor_rollout_ref.rollout.top_p",
            "algorithm.adv_estimator",
            "data.train_batch_size",
            "distillation.enabled",
            "program",
            "trainer.n_gpus_per_node",
            "trainer.nnodes",
        }
    ),
    sections={section: frozenset(names.split()) for section, names in load_table("verl_settings").items()},
    added=frozenset(
        f"actor_rollout_ref.actor.policy_loss.{name}"
        for name in (
            "accept_idle_clip",
            "audit",
            "audit_detail",
            "audited",
            "average",
            "certify",
            "method",
            "record",
            "watched",
        )
    ),
)

SKYRL = Framework(
    title="SkyRL",
    version="0.3.0",
    defaults={
        "generator.n_samples_per_prompt": 5,
        "generator.sampling_params.additional_kwargs.frequency_penalty": None,
        "generator.sampling_params.additional_kwargs.presence_penalty": None,
        "generator.sampling_params.additional_kwargs.repetition_penalty": None,
        "generator.sampling_params.min_p": 0.0,
        "generator.sampling_params.repetition_penalty": 1.0,
        "generator.sampling_params.temperature": 1.0,
        "generator.sampling_params.top_k": -1,
        "generator.sampling_params.top_p": 1.0,
        "program": "",
        "trainer.algorithm.advantage_estimator": "grpo",
        "trainer.algorithm.cispo.cispo_anchor": "old",  # a setting of later versions
        "trainer.algorithm.entropy_loss_coef": 0.01,
        "trainer.algorithm.eps_clip_high": 0.2,
        "trainer.algorithm.eps_clip_low": 0.2,
        "trainer.algorithm.grpo_norm_by_std": True,
        "trainer.algorithm.loss_reduction": "token_mean",
        "trainer.algorithm.method": None,  # a setting of bandpo
        "trainer.algorithm.off_policy_correction.sequence_mask_metric": None,
        "trainer.algorithm.off_policy_correction.tis_ratio_type": None,
        "trainer.algorithm.policy_loss_type": "regular",
        "trainer.algorithm.use_entropy_loss": False,
        "trainer.algorithm.use_tis": False,
        "trainer.fully_async.enabled": False,
        "trainer.micro_train_batch_size_per_gpu": 1,
        "trainer.placement.policy_num_gpus_per_node": 1,
        "trainer.placement.policy_num_nodes": 1,
        "trainer.policy.model.lora.rank": 0,
        "trainer.policy.model.path": None,
        "trainer.policy.optimizer_config.lr": 1e-6,
        "trainer.policy.sequence_parallel_size": 1,
        "trainer.policy_mini_batch_size": 256,
        "trainer.strategy": "fsdp",
        "trainer.train_batch_size": 1024,
        "trainer.update_epochs_per_batch": 1,
    },
    marks=(
        ("trainer.algorithm.*",),
        ("trainer.policy.model.*",),
        ("trainer.policy.optimizer_config.*",),
        ("generator.n_samples_per_prompt",),
    ),
    programs=("skyrl.train.entrypoints.", "skyrl_train.entrypoints."),
)

PRIME_RL = Framework(
    title="prime-rl",
    version="0.8.0",
    defaults={
        "model.name": None,
        "orchestrator.algo.type": "grpo",
        "orchestrator.batch_size": None,
        "orchestrator.group_size": 1,
        "orchestrator.token_batch_size": None,
        # Not a setting: the smallest group size of the sources.
        "orchestrator.train.source.group_size": None,
        "orchestrator.train.sampling.extra_body.frequency_penalty": None,
        "orchestrator.train.sampling.extra_body.min_p": None,
        "orchestrator.train.sampling.extra_body.presence_penalty": None,
        "orchestrator.train.sampling.extra_body.repetition_penalty": None,
        "orchestrator.train.sampling.extra_body.top_k": None,
        "orchestrator.train.sampling.extra_body.top_p": None,
        "orchestrator.train.sampling.temperature": 1.0,
        "trainer.model.experimental.lora.rank": None,
        "trainer.model.lora.rank": None,
        "trainer.optim.lr": 1e-6,
        "trainer.optim.type": "adamw",
    },
    marks=(
        ("orchestrator.*",),
        # The files of the orchestrator alone and of the trainer alone have names without a prefix.
        ("rollouts_per_example",),
        *_each_with(
            "group_size",
            "train.source.*",
            "train.env.*",
            "train.sampling.*",
            "env.*",
            "sampling.*",
            "buffer.*",
        ),
        *_each_with(
            "optim.lr",
            "loss.adv_tau",
            "loss.dppo_mask_high",
            "loss.dppo_mask_low",
            "loss.kl_tau",
            "loss.ratio_type",
            "loss.token_mask_high",
            "loss.token_mask_low",
            "weight_broadcast.*",
        ),
    ),
    older_names={"orchestrator.rollouts_per_example": "orchestrator.group_size"},
)

OPENRLHF = Framework(
    title="OpenRLHF",
    version="0.11.0",
    defaults={
        "actor.adam.lr": 1e-6,
        "actor.entropy_coef": None,
        "actor.eps_clip": 0.2,
        "actor.eps_clip_low_high": None,
        "actor.model_name_or_path": None,
        "actor.num_gpus_per_node": 8,
        "actor.num_nodes": 1,
        "actor.optim": "adam",
        "actor.policy_loss_type": "ppo",
        "algo.advantage.estimator": "gae",
        "algo.advantage.is_correction_enable": False,
        "ds.lora.rank": 0,
        "ds.ring_attn_size": 1,
        "ds.tensor_parallel_size": 1,
        "rollout.batch_size": 1024,
        "rollout.n_samples_per_prompt": 1,
        "rollout.temperature": 1.0,
        "rollout.top_p": 1.0,
        "train.async_enable": False,
        "train.batch_size": 128,
        "train.dynamic_batch_enable": False,
        "train.max_epochs": 1,
        "train.micro_batch_size": 1,
    },
    marks=(
        ("algo.advantage.*",),
        ("algo.kl.*",),
        ("rollout.n_samples_per_prompt",),
        ("actor.adam.*",),
        # Names before 0.10.2. ROLL has init_kl_coef too, slime n_samples_per_prompt, DeepSpeed-Chat the actor's rate.
        ("enable_vllm_is_correction",),
        *_each_with(
            "actor_learning_rate", "advantage_estimator", "n_samples_per_prompt", "rollout_batch_size"
        ),
        *_each_with("micro_rollout_batch_size", "advantage_estimator", "actor_learning_rate", "init_kl_coef"),
    ),
    programs=("openrlhf.cli.train_ppo",),
    older_names={
        "actor_learning_rate": "actor.adam.lr",
        "actor_num_gpus_per_node": "actor.num_gpus_per_node",
        "actor_num_nodes": "actor.num_nodes",
        "advantage_estimator": "algo.advantage.estimator",
        "async_train": "train.async_enable",
        "entropy_loss_coef": "actor.entropy_coef",
        "enable_vllm_is_correction": "algo.advantage.is_correction_enable",
        "eps_clip": "actor.eps_clip",
        "eps_clip_low_high": "actor.eps_clip_low_high",
        "init_kl_coef": "algo.kl.init_coef",
        "lora_rank": "ds.lora.rank",
        "max_epochs": "train.max_epochs",
        "micro_train_batch_size": "train.micro_batch_size",
        "n_samples_per_prompt": "rollout.n_samples_per_prompt",
        "policy_loss_type": "actor.policy_loss_type",
        "pretrain": "actor.model_name_or_path",
        "ring_attn_size": "ds.ring_attn_size",
        "rollout_batch_size": "rollout.batch_size",
        "temperature": "rollout.temperature",
        "top_p": "rollout.top_p",
        "train_batch_size": "train.batch_size",
        "use_dynamic_batch": "train.dynamic_batch_enable",
    },
)

FRAMEWORKS: Mapping[str, Framework] = {
    "trl": TRL,
    "verl": VERL,
    "skyrl": SKYRL,
    "prime-rl": PRIME_RL,
    "openrlhf": OPENRLHF,
}
"""The frameworks, by their names in `rlvet.runs.Setup`."""
