"""What becomes of each setting of TRL's GRPOConfig beside a method, and the page that says it.

`PYTHONPATH=scripts python packages/bandpo/tests/integrations/trl_settings.py` writes the table of docs/trl.md.
`test_trl_settings.py` tries each row, and asks for a line here where a newer TRL has a field that is in none of the
tables.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

PAGE = Path(__file__).parents[4] / "docs/trl.md"


@dataclass(frozen=True)
class Refused:
    """An error at construction, before work is lost."""

    settings: Mapping[str, Any]
    message: str
    """A regular expression for the error."""
    text: str


@dataclass(frozen=True)
class Announced:
    """A line at the start of training."""

    settings: Mapping[str, Any]
    message: str
    """Part of the line."""
    text: str


@dataclass(frozen=True)
class Honoured:
    """As in TRL: `FixedClip` trains bit for bit as the stock trainer does, under these settings."""

    settings: Mapping[str, Any]
    text: str = "as in TRL"


@dataclass(frozen=True)
class NotRun:
    """As in TRL by its code, which needs what the tests do not have."""

    text: str
    settings: Mapping[str, Any] = field(default_factory=dict)


NUMBER = "refused, but for the number that the method has; it is part of the method"
EPSILON = "refused, but for the number of a method with fixed bounds, such as FixedClip(0.2); it is part of the method"
ADAPTIVE = {
    "use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_coef_min": 0.001, "entropy_coef_max": 0.015,
    "entropy_coef_delta": 0.01, "entropy_target": 9.0,
}  # fmt: skip
SYNCED = {"beta": 0.05, "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
ENGINE = "vLLM's, which does not run in the tests; the loss has TRL's importance weights"

LOSS = {
    "epsilon": [Refused({"epsilon": 0.2}, "epsilon=0.2 would have no effect", EPSILON)],
    "epsilon_high": [Refused({"epsilon_high": 0.28}, "epsilon_high=0.28 would have no effect", EPSILON)],
    "delta": [
        Honoured({"delta": 1.01}, "beside a clip rule as in TRL"),
        Refused({"method": "GRPO()", "delta": 3.0}, "GRPO.* and delta=3.0", "refused beside a whole method"),
    ],
    "importance_sampling_level": [
        Honoured({"importance_sampling_level": "sequence"}, "beside a clip rule as in TRL"),
        Refused(
            {"method": "GSPO()", "importance_sampling_level": "token"},
            "importance_sampling_level='token'",
            "refused beside a whole method of another level",
        ),
    ],
    "loss_type": [
        *(Honoured({"loss_type": name}) for name in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo")),
        Refused({"loss_type": "sapo"}, r"method='SAPO\(\)'", "sapo refused; write method='SAPO()'"),
        Refused({"loss_type": "vespo"}, r"method='VESPO\(\)'", "vespo refused; write method='VESPO()'"),
        Announced(
            {"method": "DAPO()", "loss_type": "grpo"},
            "loss_type='grpo' replaces the loss aggregation of DAPO",
            "announced where it is another loss aggregation than the method's",
        ),
    ],
    **{
        f"sapo_temperature_{sign}": [
            Refused({f"sapo_temperature_{sign}": 2.0}, f"sapo_temperature_{sign}=2.0 would have no effect", NUMBER)
        ]
        for sign in ("pos", "neg")
    },
    **{
        f"vespo_{name}": [Refused({f"vespo_{name}": 1.5}, f"vespo_{name}=1.5 would have no effect", NUMBER)]
        for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")
    },
    "beta": [Honoured({"beta": 0.05})],
    "use_bias_correction_kl": [Honoured({"beta": 0.05, "use_bias_correction_kl": False})],
    "sync_ref_model": [Honoured(SYNCED)],
    "ref_model_sync_steps": [Honoured(SYNCED)],
    "ref_model_mixup_alpha": [Honoured(SYNCED)],
    "top_entropy_quantile": [Honoured({"top_entropy_quantile": 0.5})],
    "off_policy_mask_threshold": [Honoured({"off_policy_mask_threshold": 1e-5})],
    "entropy_coef": [Honoured({"entropy_coef": 0.01})],
    "use_adaptive_entropy": [Honoured(ADAPTIVE)],
    "entropy_coef_min": [Honoured(ADAPTIVE)],
    "entropy_coef_max": [Honoured(ADAPTIVE)],
    "entropy_coef_delta": [Honoured(ADAPTIVE)],
    "entropy_target": [Honoured(ADAPTIVE)],
    "router_aux_loss_coef": [NotRun("as in TRL; no mixture of experts is in the tests")],
    "mask_truncated_completions": [Honoured({"mask_truncated_completions": True})],
    "num_iterations": [Honoured({"num_iterations": 3})],
    "steps_per_generation": [Honoured({"steps_per_generation": 4})],
    "generation_batch_size": [Honoured({"steps_per_generation": None, "generation_batch_size": 32})],
    "gradient_accumulation_steps": [
        Honoured({"gradient_accumulation_steps": 2}),
        Refused(
            {"method": "BAPO()", "gradient_accumulation_steps": 2},
            "gradient_accumulation_steps=2: BAPO",
            "above 1 refused beside a method whose sums run over all of an update",
        ),
    ],
    "per_device_train_batch_size": [Honoured({"per_device_train_batch_size": 4})],
    "num_generations": [Honoured({"num_generations": 2})],
    "max_completion_length": [Honoured({"max_completion_length": 7, "loss_type": "dr_grpo"})],
    "scale_rewards": [Honoured({"scale_rewards": "none"}), Honoured({"scale_rewards": "batch"})],
    "reward_weights": [Honoured({"reward_weights": [2.0], "scale_rewards": "none"})],
    "multi_objective_aggregation": [Honoured({"multi_objective_aggregation": "normalize_then_sum"})],
    "temperature": [Honoured({"temperature": 0.7})],
    "top_p": [Announced({"top_p": 0.9}, "tokens are sampled with top_p=0.9", "announced")],
    "top_k": [Announced({"top_k": 50}, "tokens are sampled with top_k=50", "announced")],
    "min_p": [Announced({"min_p": 0.05}, "tokens are sampled with min_p=0.05", "announced")],
    "repetition_penalty": [
        Announced({"repetition_penalty": 1.1}, "sampled with repetition_penalty=1.1", "announced")
    ],
    "generation_kwargs": [
        Announced(
            {"generation_kwargs": {"temperature": 0.5}},
            "generation_kwargs samples at temperature=0.5",
            "what changes probabilities is announced",
        ),
        Honoured({"generation_kwargs": {"num_beams": 1}}, "the rest as in TRL"),
    ],
    "disable_dropout": [Honoured({"disable_dropout": True})],
    "cast_lm_head_to_fp32": [Honoured({"cast_lm_head_to_fp32": True, "bf16": True})],
    "bf16": [Honoured({"bf16": True})],
    "fp16": [NotRun("as in TRL; it needs a GPU")],
    **{
        f"{kind}_checkpointing{what}": [Honoured({f"{kind}_checkpointing{what}": value})]
        for kind in ("gradient", "activation")
        for what, value in (("", False), ("_kwargs", {"use_reentrant": True}))
    },
    "label_smoothing_factor": [Honoured({"label_smoothing_factor": 0.1}, "without effect, as in TRL")],
    "neftune_noise_alpha": [Honoured({"neftune_noise_alpha": 5.0})],
    "pad_to_multiple_of": [Honoured({"pad_to_multiple_of": 8})],
    "shuffle_dataset": [Honoured({"shuffle_dataset": False})],
    "seed": [Honoured({"seed": 7})],
    "use_liger_kernel": [NotRun("as in TRL 1.16; refused where TRL's own fused loss would replace the method")],
    "deepspeed": [NotRun("as in TRL; no gradient is compared, which a line says")],
    "fsdp": [NotRun("as in TRL")],
    "fsdp_config": [NotRun("as in TRL")],
    "torch_compile": [NotRun("as in TRL")],
    "auto_find_batch_size": [
        Refused({"auto_find_batch_size": True}, "auto_find_batch_size is not supported", "refused by TRL")
    ],
    "parallelism_config": [NotRun("as in TRL, which refuses to split sequences")],
    "average_tokens_across_devices": [Honoured({"average_tokens_across_devices": False}, "without effect, as in TRL")],
    "use_vllm": [NotRun(ENGINE)],
    "vllm_importance_sampling_correction": [
        NotRun(f"{ENGINE}; off, which a line says, beside a method whose ratio refers to the rollout")
    ],
    "vllm_importance_sampling_mode": [NotRun(ENGINE)],
    "vllm_importance_sampling_clip_max": [NotRun(ENGINE)],
    "vllm_importance_sampling_clip_min": [NotRun(ENGINE)],
    "vllm_importance_sampling_cap": [NotRun(ENGINE)],
}  # fmt: skip
"""Settings on which the loss depends."""

AROUND = frozenset(
    """
    accelerator_config adam_beta1 adam_beta2 adam_epsilon batch_eval_metrics bf16_full_eval cache_implementation
    chat_template_kwargs data_seed dataloader_drop_last dataloader_in_order dataloader_multiprocessing_context
    dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor
    ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout
    debug disable_tqdm do_eval do_predict do_train ds3_gather_for_generation enable_jit_checkpoint
    eval_accumulation_steps eval_delay eval_do_concat_batches eval_on_start eval_steps eval_strategy
    eval_use_gather_object fp16_full_eval full_determinism greater_is_better hub_always_push hub_model_id
    hub_private_repo hub_revision hub_strategy hub_token ignore_data_skip include_for_metrics
    include_num_input_tokens_seen label_names learning_rate length_column_name liger_kernel_config
    load_best_model_at_end local_rank log_completions log_completions_hub_repo log_level log_level_replica
    log_multimodal log_on_each_node log_unique_prompts logging_dir logging_first_step logging_nan_inf_filter
    logging_steps logging_strategy lr_scheduler_kwargs lr_scheduler_type max_grad_norm max_steps
    max_tool_calling_iterations metric_for_best_model model_init_kwargs num_completions_to_print
    num_generations_eval num_train_epochs optim optim_args optim_target_modules output_dir
    per_device_eval_batch_size prediction_loss_only project push_to_hub remove_unused_columns report_to
    restore_callback_states_from_checkpoint resume_from_checkpoint run_name save_on_each_node save_only_model
    save_steps save_strategy save_total_limit skip_memory_metrics tf32 torch_compile_backend torch_compile_mode
    torch_empty_cache_steps trackio_bucket_id trackio_space_id trackio_static_space_id train_sampling_strategy
    transformers_continuous_batching_config trust_remote_code use_cache use_cpu use_transformers_continuous_batching
    use_transformers_paged vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_group_port vllm_max_model_length
    vllm_mode vllm_model_impl vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout
    vllm_structured_outputs_regex vllm_tensor_parallel_size warmup_ratio warmup_steps weight_decay
    """.split()  # noqa: SIM905
)
"""Settings of the optimiser, of data, generation, logging, saving and machines, which act outside of the loss."""

ONLY_WITH = {
    "activation_checkpointing": ">=5.23",
    "activation_checkpointing_kwargs": ">=5.23",
    "dataloader_in_order": ">=5.15",
    "dataloader_multiprocessing_context": ">=5.15",
    "logging_dir": "<5.15",
    "warmup_ratio": "<5.15",
}
"""The versions of transformers that have a setting, where others that bandpo admits do not."""


def is_there(name: str, transformers: str) -> bool:
    """Return True if a version of transformers has a setting of the tables."""
    return SpecifierSet(ONLY_WITH.get(name, "")).contains(transformers, prereleases=True)


def _named(name: str) -> str:
    """Return a setting for the page, with the versions of transformers if not all have it."""
    return f"`{name}` (transformers {ONLY_WITH[name]})" if name in ONLY_WITH else f"`{name}`"


def table(version: str) -> list[str]:
    """Return the lines of the table, and of the list of settings outside of the loss."""
    rows = []
    for name, cases in LOSS.items():
        texts = list(dict.fromkeys(case.text for case in cases))
        rows.append(f"| {_named(name)} | {'; '.join(texts)} |")
    around = ", ".join(map(_named, sorted(AROUND)))
    return [
        *(f"TRL {version}:", "", "| setting | beside a method |", "|---|---|", *rows, ""),
        f"These act outside of the loss, as in TRL: {around}.",
    ]


if __name__ == "__main__":
    import trl

    from marked import write_between_marks

    write_between_marks(PAGE, "settings", table(trl.__version__))
