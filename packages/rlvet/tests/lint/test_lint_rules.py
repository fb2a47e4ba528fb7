"""Every rule finds its fault in a configuration of its framework's own form, and is silent where it is mended."""

import ast
import json
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from helpers.missing import require
from rlvet._severities import SEVERITIES
from rlvet.lint.checks import lint_configurations, lint_findings, lint_run
from rlvet.lint.known import FRAMEWORKS
from rlvet.lint.readers import parse_configurations
from rlvet.runs.configuration import Configuration

TRL = """from trl import GRPOConfig, GRPOTrainer

args = GRPOConfig(
    "out",
    {settings},
)
trainer = GRPOTrainer(model="Qwen/Qwen2.5-7B", args=args, reward_funcs=len)
"""
VERL = """set -x
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct \\
    actor_rollout_ref.rollout.n=8 \\
    {settings} \\
    trainer.nnodes=1
"""
SKYRL = """uv run --isolated --extra fsdp -m {program} \\
  trainer.algorithm.advantage_estimator="grpo" \\
  trainer.policy.model.path="Qwen/Qwen2.5-7B-Instruct" \\
  {settings} \\
  trainer.logger="console"
"""
OPENRLHF = """python3 -m openrlhf.cli.train_ppo_ray \\
   --actor.model_name_or_path meta/Llama-8B \\
   --algo.advantage.estimator group_norm \\
   --rollout.n_samples_per_prompt 8 \\
   {settings} \\
   --ckpt.save_hf
"""
PRIME_RL = """seq_len = 2048

[model]
name = "Qwen/Qwen3-4B"

[orchestrator]
batch_size = 128
{settings}

[[orchestrator.train.source]]
name = "reverse-text"
"""


FILES = {
    "trl": ("train.py", TRL, ",\n    "),
    "verl": ("run.sh", VERL, " \\\n    "),
    "skyrl": ("run.sh", SKYRL, " \\\n  "),
    "prime-rl": ("rl.toml", PRIME_RL, "\n"),
    "openrlhf": ("run.sh", OPENRLHF, " \\\n   "),
}
"""The name and text of a file of each framework with a place for settings, and what separates them."""


def read(framework, settings, *, program="skyrl.train.entrypoints.main_base"):
    """Return the configurations of a script or file of the framework with some settings, one in a line each."""
    name, template, separator = FILES[framework]
    text = template.format(settings=separator.join(settings), program=program)
    configurations = parse_configurations(text.encode(), name)
    assert [one.framework for one in configurations] == [framework]
    return text, configurations


ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
ASYNC = "examples.train.async.main_async"
FULLY_ASYNC = "examples.train.fully_async.main_fully_async"

CASES = [
    # framework, rule, settings with the fault (the first is where it is shown), settings without it
    ("trl", "clip-cannot-act", ["epsilon_high=0.28"], ["epsilon_high=0.28", "num_iterations=2"]),
    (
        "trl",
        "clip-cannot-act",
        ["epsilon=0.1", "gradient_accumulation_steps=4", "steps_per_generation=4"],
        ["epsilon=0.1", "gradient_accumulation_steps=4", "steps_per_generation=8"],
    ),
    (
        "trl",
        "setting-without-effect",
        ["epsilon=0.3", "loss_type='sapo'"],
        ["epsilon=0.3", "num_iterations=2"],
    ),
    (
        "trl",
        "setting-without-effect",
        ["delta=2.0", "loss_type='cispo'"],
        ["epsilon=0.2", "loss_type='cispo'"],
    ),
    (
        "verl",
        "setting-without-effect",
        [
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum",
            "actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean",
        ],
        [
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum",
            "actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
        ],
    ),
    (
        "skyrl",
        "setting-without-effect",
        ["trainer.algorithm.eps_clip_high=0.28", "trainer.algorithm.policy_loss_type=sapo"],
        ["trainer.algorithm.eps_clip_high=0.28", "trainer.update_epochs_per_batch=2"],
    ),
    ("trl", "truncated-sampling", ["top_p=0.95", "use_vllm=True"], ["top_p=0.95"]),
    ("trl", "truncated-sampling", ["top_k=50", "use_vllm=True"], ["top_k=0", "use_vllm=True"]),
    (
        "trl",
        "truncated-sampling",
        ["min_p=0.05", "use_vllm=True"],
        ["min_p=0.05", "use_vllm=True", "vllm_importance_sampling_correction=False"],
    ),
    ("trl", "liger-drops-the-weight", ["use_liger_kernel=True", "use_vllm=True"], ["use_liger_kernel=True"]),
    ("trl", "liger-drops-the-weight", ["use_liger_loss=True", "use_vllm=True"], ["use_liger_loss=True"]),
    (
        "trl",
        "gspo-clip",
        ["importance_sampling_level='sequence'", "num_iterations=2"],
        ["importance_sampling_level='sequence'", "epsilon=3e-4", "epsilon_high=4e-4", "num_iterations=2"],
    ),
    (
        "trl",
        "batch-does-not-divide",
        ["generation_batch_size=20", "num_generations=8"],
        ["generation_batch_size=24", "num_generations=8"],
    ),
    (
        "trl",
        "batch-set-twice",
        ["generation_batch_size=16", "steps_per_generation=2"],
        ["steps_per_generation=2"],
    ),
    (
        "trl",
        "processes-must-divide",
        ["num_generations=16", "per_device_train_batch_size=4"],
        ["num_generations=16", "per_device_train_batch_size=4", "gradient_accumulation_steps=4"],
    ),
    ("trl", "group-of-one", ["num_generations=1"], ["num_generations=4"]),
    ("trl", "group-of-two", ["num_generations=2"], ["num_generations=4"]),
    ("trl", "negative-kl", ["beta=-0.01"], ["beta=0.01"]),
    (
        "trl",
        "mean-depends-on-micro-batch",
        ["loss_type='bnpo'", "gradient_accumulation_steps=4"],
        ["loss_type='dapo'", "gradient_accumulation_steps=4"],
    ),
    ("trl", "learning-rate", ["learning_rate=5e-4"], ["learning_rate=1e-6"]),
    (
        "verl",
        "clip-cannot-act",
        [f"{ACTOR}.clip_ratio_high=0.28", "data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=64"],
        [f"{ACTOR}.clip_ratio_high=0.28", "data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=32"],
    ),
    (
        "verl",
        "asynchronous-anchor",
        ["trainer.v1.trainer_mode=separate_async"],
        ["trainer.v1.trainer_mode=separate_async", f"{CORRECTION}.bypass_mode=True"],
    ),
    (
        "verl",
        "truncated-sampling",
        [f"{ROLLOUT}.top_p=0.9", f"{CORRECTION}.rollout_is=token"],
        [f"{ROLLOUT}.top_p=1.0", f"{CORRECTION}.rollout_is=token"],
    ),
    (
        "verl",
        "gspo-clip",
        [f"{ACTOR}.policy_loss.loss_mode=gspo"],
        [
            f"{ACTOR}.policy_loss.loss_mode=gspo",
            f"{ACTOR}.clip_ratio_low=3e-4",
            f"{ACTOR}.clip_ratio_high=4e-4",
        ],
    ),
    (
        "verl",
        "batch-does-not-divide",
        ["data.train_batch_size=100", f"{ACTOR}.ppo_mini_batch_size=64"],
        ["data.train_batch_size=128", f"{ACTOR}.ppo_mini_batch_size=64"],
    ),
    (
        "verl",
        "batch-does-not-divide-among-gpus",
        ["data.train_batch_size=4", f"{ROLLOUT}.n=3", f"{ACTOR}.ppo_mini_batch_size=4"],
        ["data.train_batch_size=8", f"{ROLLOUT}.n=3", f"{ACTOR}.ppo_mini_batch_size=4"],
    ),
    ("verl", "group-of-one", [f"{ROLLOUT}.n=1"], [f"{ROLLOUT}.n=1", "algorithm.adv_estimator=gae"]),
    (
        "verl",
        "group-of-two",
        [f"{ROLLOUT}.n=2"],
        [f"{ROLLOUT}.n=2", "algorithm.norm_adv_by_std_in_grpo=False"],
    ),
    (
        "verl",
        "lora-reference",
        ["actor_rollout_ref.model.lora_adapter_path=$HOME/sft", f"{ACTOR}.use_kl_loss=True"],
        ["actor_rollout_ref.model.lora_rank=32", f"{ACTOR}.use_kl_loss=True"],
    ),
    (
        "verl",
        "correction-without-probabilities",
        [
            f"{ROLLOUT}.calculate_log_probs=False",
            f"{CORRECTION}.rollout_rs=token_k1",
            f"{CORRECTION}.rollout_rs_threshold=2.0",
        ],
        [f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=2.0"],
    ),
    (
        "verl",
        "correction-in-bypass",
        [f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.rollout_is=sequence"],
        [f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.rollout_is=sequence", "trainer.use_v1=False"],
    ),
    (
        "verl",
        "rejection-without-threshold",
        [f"{CORRECTION}.rollout_rs=token_k1"],
        [f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=0.5_2.0"],
    ),
    (
        "verl",
        "mean-depends-on-micro-batch",
        [f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"],
        [f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", f"{ACTOR}.loss_scale_factor=1024"],
    ),
    (
        "verl",
        "learning-rate",
        [f"{ACTOR}.optim.lr=1e-4"],
        [f"{ACTOR}.optim.lr=1e-4", "actor_rollout_ref.model.lora_rank=32"],
    ),
    (
        "skyrl",
        "clip-cannot-act",
        [
            "trainer.algorithm.eps_clip_high=0.28",
            "trainer.train_batch_size=64",
            "trainer.policy_mini_batch_size=64",
        ],
        [
            "trainer.algorithm.eps_clip_high=0.28",
            "trainer.train_batch_size=64",
            "trainer.policy_mini_batch_size=32",
        ],
    ),
    (
        "skyrl",
        "asynchronous-anchor",
        ["trainer.fully_async.enabled=true"],
        ["trainer.fully_async.enabled=true", "trainer.algorithm.policy_loss_type=rollout_is"],
    ),
    (
        "skyrl",
        "truncated-sampling",
        [
            "generator.sampling_params.top_p=0.9",
            "trainer.algorithm.off_policy_correction.tis_ratio_type=token",
        ],
        ["trainer.algorithm.off_policy_correction.tis_ratio_type=token"],
    ),
    (
        "skyrl",
        "gspo-clip",
        ["trainer.algorithm.policy_loss_type=gspo"],
        [
            "trainer.algorithm.policy_loss_type=gspo",
            "trainer.algorithm.eps_clip_low=3e-4",
            "trainer.algorithm.eps_clip_high=4e-4",
        ],
    ),
    (
        "skyrl",
        "batch-does-not-divide",
        ["trainer.train_batch_size=100", "trainer.policy_mini_batch_size=64"],
        ["trainer.train_batch_size=128", "trainer.policy_mini_batch_size=64"],
    ),
    (
        "skyrl",
        "micro-batch-does-not-divide",
        ["trainer.micro_train_batch_size_per_gpu=7", "generator.n_samples_per_prompt=4"],
        ["trainer.micro_train_batch_size_per_gpu=8", "generator.n_samples_per_prompt=4"],
    ),
    ("skyrl", "group-of-one", ["generator.n_samples_per_prompt=1"], ["generator.n_samples_per_prompt=4"]),
    (
        "skyrl",
        "group-of-two",
        ["generator.n_samples_per_prompt=2"],
        ["generator.n_samples_per_prompt=2", "trainer.algorithm.grpo_norm_by_std=false"],
    ),
    (
        "skyrl",
        "mean-depends-on-micro-batch",
        ["trainer.algorithm.loss_reduction=token_mean_legacy"],
        ["trainer.algorithm.loss_reduction=token_mean"],
    ),
    (
        "skyrl",
        "learning-rate",
        ["trainer.policy.optimizer_config.lr=1.0e-4"],
        ["trainer.policy.optimizer_config.lr=1.0e-4", "trainer.policy.model.lora.rank=32"],
    ),
    ("prime-rl", "group-of-one", ["oversampling = 1"], ["group_size = 16"]),
    ("prime-rl", "group-of-one", ["oversampling = 1"], ["[orchestrator.algo]", "type = 'rae'"]),
    ("prime-rl", "batch-does-not-divide", ["group_size = 20"], ["group_size = 16"]),
    (
        "prime-rl",
        "truncated-sampling",
        ["[orchestrator.train.sampling.extra_body]", "top_p = 0.9"],
        ["[orchestrator.train.sampling]", "temperature = 0.9"],
    ),
    (
        "prime-rl",
        "learning-rate",
        ["[trainer.optim]", "lr = 1e-4"],
        ["[trainer.optim]", "lr = 1e-4", "[trainer.model.lora]", "rank = 8"],
    ),
    (
        "openrlhf",
        "clip-cannot-act",
        ["--actor.eps_clip_low_high 0.2 0.28", "--rollout.batch_size 128", "--train.batch_size 1024"],
        ["--actor.eps_clip_low_high 0.2 0.28", "--rollout.batch_size 128", "--train.batch_size 128"],
    ),
    (
        "openrlhf",
        "asynchronous-anchor",
        ["--train.async_enable"],
        ["--train.async_enable", "--algo.advantage.is_correction_enable"],
    ),
    (
        "openrlhf",
        "truncated-sampling",
        ["--rollout.top_p 0.9", "--algo.advantage.is_correction_enable"],
        ["--rollout.top_p 0.9"],
    ),
    (
        "openrlhf",
        "gspo-clip",
        ["--actor.policy_loss_type gspo"],
        ["--actor.policy_loss_type gspo", "--actor.eps_clip_low_high 3e-4 4e-4"],
    ),
    (
        "openrlhf",
        "batch-does-not-divide",
        ["--train.batch_size 100", "--train.micro_batch_size 4"],
        ["--train.batch_size 128", "--train.micro_batch_size 4"],
    ),
    (
        "openrlhf",
        "batch-larger-than-answers",
        ["--train.batch_size 1024", "--rollout.batch_size 64"],
        ["--train.batch_size 512", "--rollout.batch_size 64"],
    ),
    ("openrlhf", "group-of-one", ["--rollout.n_samples_per_prompt 1"], ["--rollout.n_samples_per_prompt 4"]),
    ("openrlhf", "group-of-two", ["--rollout.n_samples_per_prompt 2"], ["--rollout.n_samples_per_prompt 4"]),
    ("openrlhf", "learning-rate", ["--actor.adam.lr 1e-4"], ["--actor.adam.lr 1e-4", "--ds.lora.rank 32"]),
    # Rules by effect: how answers are sampled, and coefficients that have no effect or too much.
    ("trl", "greedy-sampling", ["temperature=0.0"], ["temperature=0.7"]),
    ("trl", "greedy-sampling", ["top_k=1"], ["top_k=0"]),
    ("trl", "temperature-near-zero", ["temperature=0.1"], ["temperature=0.6"]),
    ("trl", "sampling-penalty", ["repetition_penalty=1.1"], ["repetition_penalty=1.0"]),
    (
        "trl",
        "sampling-penalty",
        ["generation_kwargs={'presence_penalty': 1.5}"],
        ["generation_kwargs={'presence_penalty': 0.0}"],
    ),
    (
        "trl",
        "sampling-penalty",
        ["generation_kwargs=dict(frequency_penalty=0.5)"],
        ["generation_kwargs=dict(frequency_penalty=0)"],
    ),
    (
        "trl",
        "truncated-without-weight",
        ["top_p=0.9"],
        ["top_p=0.9", "use_vllm=True"],
    ),
    (
        "trl",
        "truncated-without-weight",
        ["generation_kwargs={'min_p': 0.05}"],
        ["generation_kwargs={'min_p': 0.0}"],
    ),
    (
        "trl",
        "truncated-without-weight",
        ["top_p=1.0", "generation_kwargs={'top_p': 0.9}"],
        ["top_p=0.9", "generation_kwargs={'top_p': 1.0}"],
    ),
    (
        "trl",
        "greedy-sampling",
        ["generation_kwargs={'top_k': 1}"],
        ["top_k=1", "generation_kwargs={'top_k': 0}"],
    ),
    (
        "trl",
        "sampling-penalty",
        ["generation_kwargs={'repetition_penalty': 1.2}"],
        ["repetition_penalty=1.2", "generation_kwargs={'repetition_penalty': None}"],
    ),
    (
        "trl",
        "engine-temperature",
        ["temperature=0.7", "generation_kwargs={'temperature': 0.8}"],
        ["temperature=0.7", "generation_kwargs={'temperature': 0.7}"],
    ),
    ("verl", "greedy-sampling", [f"{ROLLOUT}.temperature=0"], [f"{ROLLOUT}.temperature=1.0"]),
    ("verl", "greedy-sampling", [f"{ROLLOUT}.top_k=1"], [f"{ROLLOUT}.top_k=-1"]),
    ("verl", "temperature-near-zero", [f"{ROLLOUT}.temperature=0.2"], [f"{ROLLOUT}.temperature=0.6"]),
    (
        "verl",
        "temperature-near-zero",
        [f"{ROLLOUT}.temperature=0.05"],
        [f"{ROLLOUT}.temperature=0.05", f"{ROLLOUT}.n=1", "algorithm.adv_estimator=gae"],
    ),
    ("verl", "penalty-ignored", [f"+{ROLLOUT}.repetition_penalty=1.05"], [f"{ROLLOUT}.temperature=1.0"]),
    (
        "verl",
        "truncated-without-weight",
        [f"{ROLLOUT}.top_p=0.9"],
        [f"{ROLLOUT}.top_p=0.9", f"{CORRECTION}.rollout_is=token"],
    ),
    ("verl", "entropy-bonus", [f"{ACTOR}.entropy_coeff=0.1"], [f"{ACTOR}.entropy_coeff=0.001"]),
    (
        "verl",
        "negative-kl",
        [f"{ACTOR}.kl_loss_coef=-0.1", f"{ACTOR}.use_kl_loss=True"],
        [f"{ACTOR}.kl_loss_coef=-0.1", f"{ACTOR}.use_kl_loss=False"],
    ),
    ("verl", "kl-without-switch", ["algorithm.kl_ctrl.kl_coef=0.001"], ["algorithm.kl_ctrl.kl_coef=0.0"]),
    (
        "verl",
        "kl-without-switch",
        [f"{ACTOR}.kl_loss_coef=0.01"],
        [f"{ACTOR}.kl_loss_coef=0.01", f"{ACTOR}.use_kl_loss=True"],
    ),
    (
        "verl",
        "kl-without-switch",
        ["algorithm.kl_ctrl.kl_coef=0.01", f"{ACTOR}.use_kl_loss=False"],
        ["algorithm.kl_ctrl.kl_coef=0.01", "algorithm.use_kl_in_reward=True"],
    ),
    ("skyrl", "greedy-sampling", ["generator.sampling_params.temperature=0.0"], ["trainer.epochs=1"]),
    ("skyrl", "greedy-sampling", ["generator.sampling_params.top_k=1"], ["trainer.epochs=1"]),
    (
        "skyrl",
        "temperature-near-zero",
        ["generator.sampling_params.temperature=0.1"],
        ["generator.sampling_params.temperature=0.6"],
    ),
    (
        "skyrl",
        "sampling-penalty",
        ["generator.sampling_params.additional_kwargs.presence_penalty=1.5"],
        ["generator.sampling_params.additional_kwargs.presence_penalty=0.0"],
    ),
    (
        "skyrl",
        "penalty-ignored",
        ["generator.sampling_params.repetition_penalty=1.1"],
        ["generator.sampling_params.repetition_penalty=1.0"],
    ),
    (
        "skyrl",
        "truncated-without-weight",
        ["generator.sampling_params.top_p=0.95"],
        ["generator.sampling_params.top_p=1.0"],
    ),
    (
        "skyrl",
        "entropy-bonus",
        ["trainer.algorithm.entropy_loss_coef=0.1", "trainer.algorithm.use_entropy_loss=true"],
        ["trainer.algorithm.entropy_loss_coef=0.001", "trainer.algorithm.use_entropy_loss=true"],
    ),
    (
        "skyrl",
        "entropy-without-switch",
        ["trainer.algorithm.entropy_loss_coef=0.001"],
        ["trainer.algorithm.entropy_loss_coef=0.001", "trainer.algorithm.use_entropy_loss=true"],
    ),
    (
        "prime-rl",
        "greedy-sampling",
        ["group_size = 8", "[orchestrator.train.sampling]", "temperature = 0.0"],
        ["group_size = 8", "[orchestrator.train.sampling]", "temperature = 1.0"],
    ),
    (
        "prime-rl",
        "temperature-near-zero",
        ["group_size = 8", "[orchestrator.train.sampling]", "temperature = 0.1"],
        ["group_size = 8", "[orchestrator.train.sampling]", "temperature = 0.7"],
    ),
    (
        "prime-rl",
        "sampling-penalty",
        ["[orchestrator.train.sampling.extra_body]", "repetition_penalty = 1.05"],
        ["[orchestrator.train.sampling.extra_body]", "repetition_penalty = 1.0"],
    ),
    (
        "prime-rl",
        "sampling-penalty",
        ["[orchestrator.train.sampling.extra_body]", "frequency_penalty = 0.2"],
        ["[orchestrator.train.sampling.extra_body]", "frequency_penalty = 0.0"],
    ),
    ("openrlhf", "greedy-sampling", ["--rollout.temperature 0"], ["--rollout.temperature 1.0"]),
    ("openrlhf", "temperature-near-zero", ["--rollout.temperature 0.1"], ["--rollout.temperature 0.6"]),
    (
        "openrlhf",
        "truncated-without-weight",
        ["--rollout.top_p 0.9"],
        ["--rollout.top_p 0.9", "--algo.advantage.is_correction_enable"],
    ),
    ("openrlhf", "entropy-bonus", ["--actor.entropy_coef 0.1"], ["--actor.entropy_coef 0.001"]),
]


@pytest.mark.parametrize(
    ("framework", "rule", "faulty", "mended"),
    CASES,
    ids=[f"{case[0]}-{case[1]}-{i}" for i, case in enumerate(CASES)],
)
def test_a_fault_is_found_at_its_line_and_not_where_it_is_mended(framework, rule, faulty, mended):
    text, configurations = read(framework, faulty)
    report = lint_configurations(configurations, "file")
    (finding,) = [finding for finding in report.findings if finding.id == rule]
    assert finding.line is not None
    line = text.splitlines()[finding.line - 1]
    assert any(setting in line for setting in faulty) or framework == "prime-rl"
    assert "{" not in finding.happens + finding.fix
    assert finding.source

    _, configurations = read(framework, mended)
    report = lint_configurations(configurations, "file")
    assert rule not in [finding.id for finding in report.findings]
    assert rule not in [one.id for one in report.unchecked]


@pytest.mark.parametrize(
    ("framework", "rule", "faulty"),
    [case[:3] for case in CASES],
    ids=[f"{case[0]}-{case[1]}-{i}" for i, case in enumerate(CASES)],
)
def test_a_fault_that_may_be_set_elsewhere_never_passes(framework, rule, faulty):
    """Without one of the settings of a faulty configuration that is not complete, the check is not made."""
    _, (configuration, *_) = read(framework, faulty)
    (checked,) = [one for one in FRAMEWORKS[framework].rules if one.id == rule]
    for name in checked.reads.values():
        settings = {key: setting for key, setting in configuration.settings.items() if key != name}
        partial = replace(configuration, settings=settings, incomplete="another file")
        report = lint_configurations([partial], "file")
        known = {one.id for one in (*report.findings, *report.unchecked)}
        assert rule in known, name


def test_clip_ratio_has_an_effect_without_a_lower_or_upper_one_and_before_verl_0_3():
    actor = "actor_rollout_ref.actor."

    def judged(*settings):
        _, configurations = read("verl", [f"{actor}{setting}" for setting in settings])
        report = lint_configurations(configurations, "file")
        both = ([one.id for one in report.findings], [one.id for one in report.unchecked])
        return tuple("setting-without-effect" in ids for ids in both)

    assert judged("clip_ratio=0.3", "clip_ratio_high=0.28") == (True, False)
    assert judged("clip_ratio=0.3", "clip_ratio_high=null") == (False, False)
    assert judged("clip_ratio=0.3") == (False, True)
    assert judged("clip_ratio=0.2") == (False, False)


def test_only_settings_without_effect_are_named():
    _, configurations = read("trl", ["loss_type='cispo'", "epsilon=0.3", "epsilon_high=4.0", "delta=2.0"])
    (finding,) = [one for one in lint_findings(configurations[0]) if one.id == "setting-without-effect"]
    assert finding.settings == {"epsilon": 0.3, "delta": 2.0}
    assert finding.happens.endswith("loss_type is cispo, beside epsilon 0.3, delta 2.")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_configuration_of_which_nothing_is_known_passes_no_check(framework):
    report = lint_configurations([Configuration(framework, "file", {}, incomplete="another file")], "file")
    assert report.passed == 0


def test_one_step_asynchronous_training_of_skyrl_is_known_by_its_program():
    _, configurations = read("skyrl", ["trainer.epochs=1"], program=ASYNC)
    assert [one.id for one in lint_findings(configurations[0])] == ["asynchronous-anchor-one-step"]
    mended = ["trainer.algorithm.off_policy_correction.tis_ratio_type=token"]
    _, configurations = read("skyrl", mended, program=ASYNC)
    assert lint_findings(configurations[0]) == []
    _, configurations = read("skyrl", ["trainer.epochs=1"], program=FULLY_ASYNC)
    assert [one.id for one in lint_findings(configurations[0])] == ["asynchronous-anchor"]


def test_a_program_that_is_not_verls_may_make_its_batches_otherwise():
    settings = [
        f"{ACTOR}.clip_ratio_high=0.28",
        "data.train_batch_size=64",
        f"{ACTOR}.ppo_mini_batch_size=64",
    ]
    text, _ = read("verl", [*settings, f"{ROLLOUT}.n=1"])
    for program, judged in (("recipe.dapo.main_dapo", True), ("mine.main_ppo", False)):
        configurations = parse_configurations(
            text.replace("verl.trainer.main_ppo", program).encode(), "run.sh"
        )
        report = lint_configurations(configurations, "run.sh")
        names = {"clip-cannot-act", "group-of-one"}
        assert names & {finding.id for finding in report.findings} == (names if judged else set())
        assert names & {one.id for one in report.unchecked} == (set() if judged else names)


@pytest.mark.parametrize(
    ("command", "found"),
    [
        (f"verl.trainer.main_ppo {ROLLOUT}.n=8", True),
        (f"verl.trainer.main_ppo {ROLLOUT}.n=8 {ACTOR}.use_kl_loss=True", True),
        (f"verl.trainer.main_ppo {ROLLOUT}.n=1", False),
        (f"verl.trainer.main_ppo {ROLLOUT}.n=8 algorithm.adv_estimator=grpo", False),
        # Whoever configures a critic, or names the estimator, trains by PPO on purpose.
        (f"verl.trainer.main_ppo {ROLLOUT}.n=8 critic.optim.lr=1e-5", False),
        (f"verl.trainer.main_ppo {ROLLOUT}.n=8 algorithm.adv_estimator=gae", False),
        ("openrlhf.cli.train_ppo_ray --rollout.n_samples_per_prompt 8", True),
        ("openrlhf.cli.train_ppo_ray --n_samples_per_prompt 8 --init_kl_coef 0", True),
        ("openrlhf.cli.train_ppo_ray --rollout.n_samples_per_prompt 8 --critic.adam.lr 9e-6", False),
        ("openrlhf.cli.train_ppo_ray --n_samples_per_prompt 8 --critic_learning_rate 9e-6", False),
        ("openrlhf.cli.train_ppo_ray --n_samples_per_prompt 8 --advantage_estimator rloo", False),
    ],
)
def test_a_group_with_the_default_estimator_is_found_unless_a_critic_is_configured(command, found):
    (configuration,) = parse_configurations(f"python -m {command}".encode(), "run.sh")
    assert ("critic-and-group" in [finding.id for finding in lint_findings(configuration)]) == found


@pytest.mark.parametrize("coefficient", [-0.1, 0.1])
def test_the_sign_of_the_kl_term_is_not_judged_of_early_versions_which_subtract_it(coefficient):
    settings = f"{ACTOR}.kl_loss_coef={coefficient} {ACTOR}.use_kl_loss=True data.val_batch_size=128"
    (configuration,) = parse_configurations(f"python -m verl.trainer.main_ppo {settings}".encode(), "run.sh")
    report = lint_configurations([configuration], "run.sh")
    assert "negative-kl" in [rule.id for rule in report.unchecked]
    assert "negative-kl" not in [finding.id for finding in report.findings]


@pytest.mark.parametrize(
    ("settings", "judged"),
    [
        # Whoever sets the switch to False knows that the coefficient has no effect.
        ("algorithm.kl_ctrl.kl_coef=0.001 algorithm.use_kl_in_reward=False", "fine"),
        (f"{ACTOR}.kl_loss_coef=0.001 {ACTOR}.use_kl_loss=False", "fine"),
        (f"algorithm.kl_ctrl.kl_coef=0.001 {ACTOR}.use_kl_loss=True", "fine"),
        ("algorithm.kl_ctrl.kl_coef=0.001", "found"),
        # Versions before 0.3 had no switch.
        ("algorithm.kl_ctrl.kl_coef=0.001 data.val_batch_size=1312", "not checked"),
        (f"algorithm.kl_ctrl.kl_coef=0.001 data.val_batch_size=8 {ACTOR}.clip_ratio_high=0.28", "found"),
    ],
)
def test_a_coefficient_is_found_only_where_its_switch_was_forgotten(settings, judged):
    (configuration,) = parse_configurations(f"python -m verl.trainer.main_ppo {settings}".encode(), "run.sh")
    report = lint_configurations([configuration], "run.sh")
    assert ("kl-without-switch" in [finding.id for finding in report.findings]) == (judged == "found")
    assert ("kl-without-switch" in [rule.id for rule in report.unchecked]) == (judged == "not checked")


@pytest.mark.parametrize("program", ["verl.trainer.main_generation_server", "main_gkd"])
def test_programs_that_do_not_train_by_advantages_may_sample_as_they_like(program):
    command = (
        f"python -m {program} {ROLLOUT}.n=8 {ROLLOUT}.temperature=0 {ROLLOUT}.top_p=0.7 {ROLLOUT}.top_k=50"
    )
    (configuration,) = parse_configurations(command.encode(), "run.sh")
    assert lint_findings(configuration) == []


def test_a_penalty_that_is_ignored_is_not_called_one_that_is_applied():
    """verl 0.9.1 and SkyRL 0.3.0 have the setting, and do not pass it to the engine."""
    for framework, setting in (
        ("verl", f"{ROLLOUT}.repetition_penalty=1.1"),
        ("skyrl", "generator.sampling_params.repetition_penalty=1.1"),
    ):
        _, configurations = read(framework, [setting])
        found = {finding.id: finding.severity for finding in lint_findings(configurations[0])}
        assert found["penalty-ignored"] == "look"
        assert "sampling-penalty" not in found


def test_a_trained_adapter_is_known_by_how_the_model_is_made():
    script = """
from peft import PeftModel
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

base = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-7B")
model = PeftModel.from_pretrained(base, "sft-adapter", is_trainable=True)
args = GRPOConfig("out", beta=0.04)
GRPOTrainer(model=model, args=args, reward_funcs=len)
"""
    (configuration,) = parse_configurations(script.encode(), "train.py")
    (finding,) = lint_findings(configuration)
    assert (finding.id, finding.severity, finding.line) == ("lora-reference", "note", 7)
    mended = script.replace("beta=0.04", "beta=0.0")
    assert lint_findings(parse_configurations(mended.encode(), "train.py")[0]) == []


WITH_CASE = {(framework, rule) for framework, rule, *_ in CASES}
WITH_CASE |= {("verl", "critic-and-group"), ("openrlhf", "critic-and-group")}
WITH_CASE |= {("skyrl", "asynchronous-anchor-one-step"), ("trl", "lora-reference")}
RULES = [(framework, rule) for framework in FRAMEWORKS.values() for rule in framework.rules]
EACH_RULE = pytest.mark.parametrize(
    ("framework", "rule"), RULES, ids=[f"{framework.key}-{rule.id}" for framework, rule in RULES]
)


@EACH_RULE
def test_every_rule_has_a_case(framework, rule):
    first, *_ = rule.reads.values()
    require(
        [rule.id] if (framework.key, rule.id) not in WITH_CASE else [],
        "packages/rlvet/tests/lint/test_lint_rules.py",
        lambda name: f'    ("{framework.key}", "{name}", ["{first}=FAULTY"], ["{first}=MENDED"]),',
        "CASES",
    )


def test_every_case_is_of_a_rule():
    assert {(framework.key, rule.id) for framework, rule in RULES} >= WITH_CASE


@EACH_RULE
def test_a_rule_reads_known_settings(framework, rule):
    assert rule.severity in SEVERITIES
    require(
        [name for name in rule.reads.values() if name not in framework.defaults],
        f"packages/rlvet/src/rlvet/lint/known/{framework.key.replace('-', '_')}.py",
        lambda name: f'        "{name}": DEFAULT,',
        "defaults",
    )


def test_rules_are_named_once_and_read_all_settings_with_a_default():
    names = [(framework.key, rule.id) for framework, rule in RULES]
    assert len(set(names)) == len(names)
    for framework in FRAMEWORKS.values():
        read_settings = {name for rule in framework.rules for name in rule.reads.values()}
        assert read_settings == framework.defaults.keys(), "a default that no rule reads"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_defaults_of_a_framework_give_nothing_but_notes(framework):
    configuration = Configuration(framework, "file", {})
    assert [finding.id for finding in lint_findings(configuration) if finding.severity != "note"] == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("--n_samples_per_prompt 1 --advantage_estimator rloo --init_kl_coef 0", "group-of-one"),
        ("--async_train --init_kl_coef 0", "asynchronous-anchor"),
    ],
)
def test_openrlhf_of_earlier_versions_is_read_and_named_as_it_is_written(old, new):
    (configuration,) = parse_configurations(f"python -m openrlhf.cli.train_ppo_ray {old}".encode(), "run.sh")
    (finding,) = lint_findings(configuration)
    assert finding.id == new
    if new == "group-of-one":
        assert finding.fix == "--n_samples_per_prompt 8"


@pytest.mark.parametrize(
    ("name", "settings", "rules"),
    [
        ("config.yaml", {"importance_sampling_level": "token", "num_generations": 2}, ["group-of-two"]),
        ("config.yaml", {"importance_sampling_level": "token", "epsilon": 0.2, "num_generations": 8}, []),
        (
            "config.yaml",
            {
                "actor_rollout_ref": {"actor": {"optim": {"lr": "1e-3"}}, "rollout": {"n": 1}},
                "algorithm": {"adv_estimator": "grpo"},
            },
            ["group-of-one", "learning-rate"],
        ),
        ("trainer.json", {"loss": {"type": "default"}, "optim": {"lr": 1e-3}}, ["learning-rate"]),
        ("config.yaml", {"loss_fn": {"ratio_clip_min": 0.2}}, []),
        ("config.yaml", {"learning_rate": 1.0}, []),
    ],
)
def test_the_configuration_of_a_finished_run_is_checked(name, settings, rules, tmp_path):
    (tmp_path / name).write_text(json.dumps(settings))
    findings = lint_run(tmp_path)
    assert [finding.id for finding in findings] == rules
    assert all(finding.path == str(tmp_path / name) for finding in findings)
    (tmp_path / "metrics.jsonl").write_text("")
    assert lint_run(tmp_path / "metrics.jsonl") == findings


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.yaml", "importance_sampling_level: token\n\nnum_generations: 2\n"),
        # wandb's, and that of `bandpo-lab train`.
        ("config.yaml", "importance_sampling_level: {value: token}\nnum_generations:\n  value: 2\n"),
        ("config.yaml", "arguments:\n  importance_sampling_level: token\n  num_generations: 2\n"),
        # A setting that is merged, and one that replaces it.
        ("config.yaml", "importance_sampling_level: token\na: &a\n  num_generations: 2\n<<: *a\n"),
        (
            "config.yaml",
            "a: &a {num_generations: 8}\n<<: *a\nnum_generations: 2\nimportance_sampling_level: token\n",
        ),
        # A key that is set, and a table that it is in.
        ("trainer.toml", 'loss = { type = "default" }\n[optim]\nlr = 1e-3\n'),
        ("trainer.toml", 'loss = { type = "default" }\n\noptim = { lr = 1e-3 }\n'),
    ],
)
def test_a_finding_on_a_finished_run_names_its_line(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    assert [finding.line for finding in lint_run(tmp_path)] == [3]


def installed_file(package, path):
    """Return a file of a framework in the version whose defaults are listed, without importing the framework."""
    try:
        distribution = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    if distribution.version != FRAMEWORKS[package].version:
        pytest.skip(f"another version of {package} is installed")
    return Path(str(distribution.locate_file(path)))


def test_defaults_are_those_of_the_installed_trl():
    tree = ast.parse(installed_file("trl", "trl/trainer/grpo_config.py").read_text())
    installed = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call):
            keywords = {keyword.arg: keyword.value for keyword in node.value.keywords}
            if isinstance(keywords.get("default"), ast.Constant | ast.UnaryOp):
                installed[ast.unparse(node.target)] = ast.literal_eval(keywords["default"])
    listed = {name: value for name, value in FRAMEWORKS["trl"].defaults.items() if name in installed}
    assert len(listed) >= 16
    assert listed == {name: installed[name] for name in listed}


def test_defaults_are_those_of_the_installed_verl():
    file = installed_file("verl", "verl/trainer/config/_generated_ppo_trainer.yaml")
    (configuration,) = parse_configurations(file.read_bytes(), file.name)
    listed = dict(FRAMEWORKS["verl"].defaults)
    # What a command runs, a model that every run names, a setting of an earlier program, and one that a command adds.
    for name in (
        "program",
        "actor_rollout_ref.model.path",
        "actor_rollout_ref.rollout.repetition_penalty",
        "async_training.use_rollout_log_probs",
    ):
        del listed[name]
    assert listed == {name: configuration.settings[name].value for name in listed}
