"""Misspelt settings of verl are refused or named with the nearest one, and those of the user are accepted."""

import pytest

from helpers.frameworks import needs

needs("verl")

from integrations.test_verl import begin, whole_config

A, L, R = "actor_rollout_ref.actor.", "actor_rollout_ref.actor.policy_loss.", "actor_rollout_ref.rollout."
SIZES = [
    "data.train_batch_size=256",
    "algorithm.adv_estimator=grpo",
    f"{A}ppo_mini_batch_size=64",
    f"{A}ppo_micro_batch_size_per_gpu=8",
    f"{R}log_prob_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8",
]
# Per misspelt setting, the one that is meant.
MISSPELT = {
    f"{A}policy_los.method=x": f"{L}method",
    f"{L}methd=x": f"{L}method",
    f"{L}Method=x": f"{L}method",
    f"{L}certfy=warn": f"{L}certify",
    f"{L}audit_detial=true": f"{L}audit_detail",
    f"{L}averge=method": f"{L}average",
    f"{A}clip_ratio_hgh=0.3": f"{A}clip_ratio_high",
    f"{A}ppo_minibatch_size=64": f"{A}ppo_mini_batch_size",
    f"{A}use_kl_los=true": f"{A}use_kl_loss",
    f"{A}los_agg_mode=token-mean": f"{A}loss_agg_mode",
    f"{A}fsdp_config.param_offlaod=true": f"{A}fsdp_config.param_offload",
    f"{A}optim.lr_schedular_type=cosine": f"{A}optim.lr_scheduler_type",
    "actor_rollout_ref.actr.ppo_epochs=2": f"{A}ppo_epochs",
    f"{R}temprature=0.7": f"{R}temperature",
    f"{R}calculate_logprobs=true": f"{R}calculate_log_probs",
    "trainer.totl_epochs=3": "trainer.total_epochs",
    "trianer.save_freq=5": "trainer.save_freq",
    "data.max_respone_length=512": "data.max_response_length",
    "algorithm.rollout_correction.bypas_mode=true": "algorithm.rollout_correction.bypass_mode",
    "algorithm.filter_groups.enabled=true": "algorithm.filter_groups.enable",
}
USERS = (
    "data.curriculum=easy",
    "data.my_dataset.split=train",
    "trainer.run_note=first",
    "trainer.owner=me",
    "my_project.option=1",
    "my_project.reward.alpha=0.5",
    "experiment.seed=3",
    "reward.custom_reward_function.reward_kwargs.alpha=0.5",
    "reward.length_penalty=0.1",
    f"{R}engine_kwargs.vllm.swap_space=4",
    "actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    "actor_rollout_ref.model.override_config.rope_theta=1e6",
    f"{A}fsdp_config.mixed_precision.param_dtype=fp32",
    f"{A}optim.override_optimizer_config.fused=true",
    "ray_kwargs.ray_init.num_gpus=1",
    "ray_kwargs.ray_init.include_dashboard=false",
    "data.apply_chat_template_kwargs.enable_thinking=false",
    f"{L}method=DAPO()",
    f"{L}audit_detail=true",
    "rllm.algorithm.loss_agg_mode=token-mean",
)
# Written before the check, and first tried when it was done.
MORE_MISSPELT = {
    f"{L}recrod=x": f"{L}record",
    f"{L}watchd=off": f"{L}watched",
    f"{L}loss_mod=band": f"{L}loss_mode",
    "actor_rollout_ref.actor.plicy_loss.method=x": f"{L}method",
    f"{A}kl_loss_coeff=0.1": f"{A}kl_loss_coef",
    f"{A}entropy_coef=0.01": f"{A}entropy_coeff",
    f"{A}ppo_micro_batch_size_pergpu=4": f"{A}ppo_micro_batch_size_per_gpu",
    f"{A}loss_scale_facter=512": f"{A}loss_scale_factor",
    f"{A}optm.lr=1e-6": f"{A}optim.lr",
    f"{A}optim.lr_warmup_step=5": f"{A}optim.lr_warmup_steps",
    "actor_rolout_ref.actor.ppo_epochs=2": f"{A}ppo_epochs",
    f"{R}gpu_memory_utilisation=0.5": f"{R}gpu_memory_utilization",
    f"{R}tensor_model_paralel_size=2": f"{R}tensor_model_parallel_size",
    f"{R}val_kwarg.n=4": f"{R}val_kwargs.n",
    "actor_rollout_ref.model.lora_rnk=8": "actor_rollout_ref.model.lora_rank",
    "trainer.n_gpu_per_node=2": "trainer.n_gpus_per_node",
    "trainer.max_actor_ckpts_to_keep=2": "trainer.max_actor_ckpt_to_keep",
    "data.trian_files=x": "data.train_files",
    "algorithm.adv_estimater=grpo": "algorithm.adv_estimator",
    "algorithm.rolout_correction.rollout_is=token": "algorithm.rollout_correction.rollout_is",
}
MORE_USERS = (
    "data.mixing.weights=0.5",
    "data.language=en",
    "data.system_prompt=x",
    "trainer.tags=a",
    "trainer.slurm.partition=x",
    "trainer.notify_on_failure=true",
    "wandb.entity=me",
    "eval.n=4",
    "sweep.index=3",
    "recipe.name=mine",
    "reward.reward_kwargs.beta=2",
    "reward.judge.model=x",
    f"{R}engine_kwargs.sglang.mem_fraction_static=0.5",
    f"{R}engine_kwargs.vllm.disable_mm_preprocessor_cache=true",
    "actor_rollout_ref.model.override_config.num_hidden_layers=2",
    f"{A}fsdp_config.mixed_precision.reduce_dtype=fp32",
    f"{L}certify=warn",
    f"{L}average=framework",
    "trainer.v1.sampler.sampler_kwargs.alpha=1",
    "data.mm_processor_kwargs.max_pixels=100",
)


def started(override, capsys):
    """Return what the checks print, with one more setting."""
    name, _, value = override.partition("=")
    begin(whole_config(*SIZES, f"++{name}='{value}'" if "(" in value else f"++{override}"))
    return capsys.readouterr().out


@pytest.mark.parametrize("override", [*MISSPELT, *MORE_MISSPELT])
def test_a_misspelt_setting_is_refused_or_named_with_the_nearest(override, capsys):
    expected = (MISSPELT | MORE_MISSPELT)[override]
    written = override.partition("=")[0]
    try:
        said = started(override, capsys)
    except ValueError as error:
        said = str(error)
    # The second for a misspelt group, if the actor has a setting of the last name.
    sentences = (f"did you mean {expected}?", f"{written}: verl does not look there; write {expected}")
    lines = [line for line in said.splitlines() if written in line]
    assert any(sentence in line for line in lines for sentence in sentences), said[-400:]


@pytest.mark.parametrize("override", [*USERS, *MORE_USERS])
def test_a_setting_of_the_user_is_accepted(override, capsys):
    assert "did you mean" not in started(override, capsys)


def test_without_rlvet_a_misspelt_setting_is_listed(monkeypatch, capsys):
    monkeypatch.setattr("bandpo.integrations.verl.keys.has_rlvet", lambda: False)
    said = started("trainer.totl_epochs=3", capsys)
    assert "trainer.totl_epochs: verl has no settings of these names" in said
    assert "did you mean" not in said
