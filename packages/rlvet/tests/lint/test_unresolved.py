"""A check passes only if the settings that it needs are known; else the report says what is missing."""

import pickle
import zipfile
from argparse import Namespace

import pytest

from rlvet.lint.checks import lint_configurations, lint_run, lint_run_configuration
from rlvet.lint.known import FRAMEWORKS
from rlvet.lint.readers import parse_configurations
from rlvet.runs.configs import newest_configuration

VERL = "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo"
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"


def report(text, name="run.sh"):
    (configuration,) = parse_configurations(text.encode(), name)
    return lint_configurations([configuration], name)


def ids(findings):
    return {finding.id for finding in findings}


def count(framework):
    return len(FRAMEWORKS[framework].rules)


def test_a_setting_that_verl_does_not_have_leaves_the_defaults_open():
    # Search-R1 is a fork: its group size is n_agent, and n is 1 in every script.
    result = report(f"{VERL} {ROLLOUT}.n_agent=5 {ACTOR}.optim.lr=1e-6")
    assert ids(result.findings) == set()
    assert "group-of-one" in ids(result.unchecked)
    assert (
        "the defaults of the version or fork that has actor_rollout_ref.rollout.n_agent, which verl 0.9.1"
        in str(result)
    )
    # What the script itself sets is known, whatever the fork.
    result = report(
        f"{VERL} {ROLLOUT}.n_agent=5 {ROLLOUT}.n=1 data.train_batch_size=100 {ACTOR}.ppo_mini_batch_size=64"
    )
    assert "batch-does-not-divide" in ids(result.findings)
    # The plus sign adds a setting to verl's own.
    result = report(f"{VERL} +{ROLLOUT}.n_agent=5")
    assert "group-of-one" in ids(result.findings)


def test_an_early_version_of_verl_has_the_defaults_that_never_changed():
    early = f"{VERL} {ACTOR}.fsdp_config.grad_offload=False"
    # A group has had one answer by default in every version; the coefficient of the entropy was 0.001.
    assert "group-of-one" in ids(report(early).findings)
    result = report(early)
    assert "entropy-bonus" in ids(result.unchecked)
    assert (
        "entropy_coeff is not in the file, as of another version of verl, or another of its trainers"
        in str(result)
    )
    # A fork of that version may have another group.
    assert "group-of-one" in ids(report(f"{early} data.n_samples=4").unchecked)


def test_the_command_in_a_job_for_a_cluster_is_read():
    job = f"""
resources: {{accelerators: H100:8}}
num_nodes: 2
run: |
  set -e
  python3 -m verl.trainer.main_ppo \\
     algorithm.adv_estimator=grpo \\
     {ROLLOUT}.n=1
"""
    (finding,) = [finding for finding in report(job, "job.yaml").findings if finding.id == "group-of-one"]
    assert f"{ROLLOUT}.n=1" in job.splitlines()[finding.line - 1]


@pytest.mark.parametrize(
    ("program", "finding"),
    [
        ("verl.trainer.main_ppo", False),
        ("verl.experimental.fully_async_policy.fully_async_main", False),
        ("verl.experimental.one_step_off_policy.main_ppo", False),
    ],
)
def test_asynchronous_programs_of_verl_have_defaults_of_their_own(program, finding):
    text = f"python -m {program} {ROLLOUT}.n=8 data.train_batch_size=64"
    assert ("asynchronous-anchor" in ids(report(text).findings)) == finding
    text += " algorithm.rollout_correction.bypass_mode=False"
    if program != "verl.trainer.main_ppo":
        assert "asynchronous-anchor" in ids(report(text).findings)


def test_the_defaults_of_another_program_are_not_known():
    result = report(f"python -m examples.mine {ROLLOUT}.temperature=1.0 algorithm.adv_estimator=grpo")
    assert not result.findings
    assert "may come from the defaults of examples.mine" in str(result)
    assert result.passed < count("verl") / 2


@pytest.mark.parametrize("command", ["bash examples/gsm8k.sh", "./gsm8k.sh", "sh $ROOT/gsm8k.sh"])
def test_a_script_that_a_command_runs_has_settings_of_its_own(command):
    result = report(f"{command} trainer.algorithm.policy_loss_type=gspo trainer.algorithm.eps_clip_high=0.2")
    assert not result.findings
    assert "may come from the script" in str(result)


def test_rllm_keeps_the_defaults_of_verl_and_makes_its_own_batches():
    text = (
        "python -m examples.train rllm.workflow.use_workflow=True algorithm.adv_estimator=grpo "
        f"algorithm.kl_ctrl.kl_coef=0.001 {ACTOR}.use_kl_loss=False {ROLLOUT}.n=8 data.train_batch_size=100 "
        f"{ACTOR}.ppo_mini_batch_size=64"
    )
    result = report(text)
    assert ids(result.findings) == {"kl-without-switch"}
    assert "batch-does-not-divide" in ids(result.unchecked)


@pytest.mark.parametrize("framework", ["verl", "skyrl"])
def test_a_file_that_is_composed_with_others_is_not_complete(framework):
    text = {
        "verl": "actor_rollout_ref:\n  rollout:\n    temperature: 0.6\nalgorithm:\n  adv_estimator: grpo\n",
        "skyrl": "trainer:\n  algorithm:\n    advantage_estimator: grpo\n",
    }[framework]
    result = report(text, "config.yaml")
    assert not result.findings
    assert result.passed < count(framework) / 2
    assert "may come from the defaults of the program that reads this file" in str(result)
    assert "because the program that reads this file is not known: " in str(result)


@pytest.mark.parametrize(
    ("batch", "value"), [("", "128 by default"), ("batch_size = 100\n", "100")], ids=["the default", "set"]
)
def test_a_finding_names_the_value_that_is_set_or_the_default(batch, value):
    result = report(f"[orchestrator]\n{batch}group_size = 24\n", "rl.toml")
    (finding,) = [finding for finding in result.findings if finding.id == "batch-does-not-divide"]
    assert finding.happens.startswith(f"orchestrator.batch_size is {value}, which is no multiple of ")


def test_every_check_is_passed_found_or_named():
    for text in (
        VERL,
        f"{VERL} --config-name=mine",
        f"{VERL} {ROLLOUT}.mine=1",
        "python mine.py algorithm.rollout_correction.rollout_is=token",
    ):
        result = report(text)
        assert result.passed + len(result.findings) + len(result.unchecked) == count("verl")


def save(folder, **arguments):
    with zipfile.ZipFile(folder / "training_args.bin", "w") as file:
        file.writestr("training_args/data.pkl", pickle.dumps(Namespace(**arguments)))


def test_the_configuration_of_an_older_trl_is_checked_as_far_as_it_goes(tmp_path):
    # TRL 0.16: no importance_sampling_level, loss_type or vllm_importance_sampling_correction.
    old = {"scale_rewards": True, "num_generations": 2, "learning_rate": 1e-3, "beta": 0.04, "use_vllm": True}
    save(tmp_path, **old, top_p=0.9, top_k=50, per_device_train_batch_size=8, gradient_accumulation_steps=2)
    assert {"group-of-two", "learning-rate"} <= ids(lint_run(tmp_path))
    result = lint_run_configuration(newest_configuration(tmp_path).configuration)
    assert "truncated-sampling" in ids(result.unchecked)
    assert "loss_type is not in the file, as of another version of TRL, or another of its trainers" in str(
        result
    )
    assert result.passed < count("trl")


UNSLOTH = """
from unsloth import FastLanguageModel
from trl import GRPOConfig, GRPOTrainer
args = GRPOConfig(per_device_train_batch_size=1, gradient_accumulation_steps=1, num_generations={group})
"""


def test_unsloth_changes_the_defaults_of_trl():
    # Unsloth enlarges the batch to whole groups, where TRL would refuse it.
    result = report(UNSLOTH.format(group=8), "train.py")
    assert ids(result.findings) == set()
    assert "processes-must-divide" in ids(result.unchecked)
    assert "may come from Unsloth" in str(result)
    assert ids(report(UNSLOTH.format(group=2), "train.py").findings) == {"group-of-two"}
    result = report(UNSLOTH.format(group=8).replace("from unsloth import FastLanguageModel", ""), "train.py")
    assert ids(result.findings) == {"processes-must-divide"}


@pytest.mark.parametrize(
    ("launcher", "found"),
    [
        ("python", True),
        ("torchrun --nproc_per_node=8", False),
        ("torchrun --nproc_per_node=4 --nnodes=2", False),
        ("torchrun --nproc_per_node=3", True),
        ("accelerate launch --num_processes 8", False),
        ("accelerate launch --num_processes 2", True),
    ],
)
def test_the_number_of_processes_is_read_from_the_launcher(launcher, found):
    command = f"{launcher} train.py --num_generations 8 --per_device_train_batch_size 1"
    assert ("processes-must-divide" in ids(report(command).findings)) == found


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("from trl import GRPOConfig\nGRPOConfig('o', importance_sampling_level='sequence')\n", "train.py"),
        (
            f"{VERL} {ROLLOUT}.n=8 {ACTOR}.policy_loss.loss_mode=gspo data.train_batch_size=64 "
            f"{ACTOR}.ppo_mini_batch_size=64",
            "run.sh",
        ),
        (
            "python -m skyrl.train.entrypoints.main_base trainer.algorithm.policy_loss_type=gspo "
            "trainer.train_batch_size=64 trainer.policy_mini_batch_size=64",
            "run.sh",
        ),
    ],
)
def test_the_range_of_a_clip_that_has_no_effect_is_no_finding(text, name):
    assert "gspo-clip" not in ids(report(text, name).findings)


def test_the_settings_of_verl_contain_the_ones_that_rules_read():
    sections = FRAMEWORKS["verl"].sections
    for name in FRAMEWORKS["verl"].defaults:
        if name == "actor_rollout_ref.rollout.repetition_penalty":
            # A field of the class that verl's YAML lacks, so that a command adds it with a plus sign.
            continue
        section, _, setting = name.rpartition(".")
        assert section not in sections or setting in sections[section], name
