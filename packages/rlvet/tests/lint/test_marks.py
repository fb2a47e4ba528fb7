"""A framework is named only on a mark of its own."""

import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner

from rlvet.cli.app import app
from rlvet.errors import InvalidValue
from rlvet.lint.known import FRAMEWORKS
from rlvet.lint.readers import parse_configurations

ROLL = """
exp_name: qwen-rlvr
rollout_batch_size: 64
num_return_sequences_in_group: 8
prompt_length: 2048
response_length: 4096
ppo_epochs: 1
adv_estimator: reinforce
init_kl_coef: 0.2
pretrain: Qwen/Qwen2.5-7B
actor_train:
  training_args:
    learning_rate: 1.0e-6
    per_device_train_batch_size: 1
    gradient_accumulation_steps: 64
"""
MLX = """
model_name = "mlx_models/gemma-3-4b-it-4bit"
learning_rate = 1e-6
batch_size = 1
gradient_accumulation_steps = 1
num_generations = 4
lora_rank = 64
"""
MLX_GROUPS = """
model = "mlx-community/Qwen3-4B-4bit"
train_mode = "grpo"
batch_size = 2
group_size = 4
"""
SUPERVISED = """
[optim]
lr = 1e-3
[loss]
type = "cross_entropy"
"""
EASYR1 = (
    "python3 -m verl.trainer.main config=examples/config.yaml worker.actor.optim.lr=1e-6 "
    "worker.rollout.n=5 algorithm.adv_estimator=grpo"
)
DEEPSPEED_CHAT = (
    "deepspeed main.py --actor_learning_rate 9.65e-6 --critic_learning_rate 5e-6 --actor_lora_dim 128"
)
SLIME = "python train.py --n-samples-per-prompt 8 --rollout-batch-size 32 --eps-clip 0.2 --init-kl-coef 0.1"
NEMO_RL = "from nemo_rl.algorithms.grpo import GRPOConfig\nconfig = GRPOConfig(num_generations=1)\n"
AREAL = "from areal.api.cli_args import GRPOConfig\nconfig = GRPOConfig(gconfig=None, learning_rate=1)\n"
MLX_SCRIPT = "from mlx_tune import GRPOConfig\nargs = GRPOConfig(num_generations=1, learning_rate=1e-2)\n"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("train.toml", SUPERVISED),
        ("run.sh", DEEPSPEED_CHAT),
        ("train.py", "import tinker\nprint(tinker)\n"),
        ("config.yaml", "num_generations: 8\nnum_epochs: 3"),
        ("run.sh", "python train.py --num_generations 8 --clip_eps 0.2"),
    ],
)
def test_a_file_without_a_mark_is_unknown_and_the_answer_names_what_is_read(name, text, tmp_path):
    assert parse_configurations(text.encode(), name) == []
    file = tmp_path / name
    file.write_text(text)
    result = CliRunner().invoke(app, ["lint", str(file)])
    assert result.exit_code == 2
    assert "holds no configuration of TRL, verl, SkyRL, prime-rl, OpenRLHF" in result.stderr


OTHERS = [
    ("roll.yaml", ROLL, "ROLL"),
    ("roll.yaml", "actor_train: {model_args: {}}\nactor_infer: {}\nrollout_batch_size: 8\n", "ROLL"),
    ("mlx.toml", MLX, "an MLX program"),
    ("mlx.yaml", MLX.replace(" = ", ": "), "an MLX program"),
    ("mlx.toml", MLX + "per_device_train_batch_size = 1\n", "an MLX program"),
    ("mlx.toml", MLX_GROUPS, "an MLX program"),
    ("train.py", MLX_SCRIPT, "an MLX program"),
    ("run.sh", EASYR1, "EasyR1"),
    ("config.yaml", "data: {rollout_batch_size: 8}\nworker:\n  actor: {}\n", "EasyR1"),
    ("run.sh", SLIME, "slime"),
    ("run.sh", "cd /root/miles\npython train.py --n-samples-per-prompt 8 --num-rollout 3000", "miles"),
    ("train.py", NEMO_RL, "NeMo-RL"),
    ("grpo.yaml", "defaults: base.yaml\ngrpo:\n  num_prompts_per_step: 64\n", "NeMo-RL"),
    ("run.sh", "uv run examples/run_grpo.py grpo.num_generations_per_prompt=8", "NeMo-RL"),
    ("train.py", AREAL, "AReaL"),
    ("grpo.yaml", "rollout:\n  max_head_offpolicyness: 4\n", "AReaL"),
    ("run.sh", "swift rlhf --rlhf_type grpo --num_generations 8 --learning_rate 1e-6", "ms-swift"),
    ("run.sh", "NPROC_PER_NODE=4 \\\nswift rlhf \\\n  --rlhf_type grpo", "ms-swift"),
    ("run.sh", "megatron rlhf --rlhf_type grpo --num_generations 1", "ms-swift"),
    ("run.yaml", "rlhf_type: grpo\nnum_generations: 8\nuse_vllm: true\n", "ms-swift"),
    ("train.py", "import tinker\nfrom tinker_cookbook.rl import train\ngroup_size = 4\n", "Tinker"),
    ("run.sh", "python -m tinker_cookbook.recipes.math_rl.train group_size=16", "Tinker"),
]


@pytest.mark.parametrize(("name", "text", "title"), OTHERS)
def test_a_framework_that_is_not_read_is_named_with_what_to_run_instead(name, text, title, tmp_path):
    file = tmp_path / name
    file.write_text(text)
    result = CliRunner().invoke(app, ["lint", str(file)])
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert f"{file} is for {title}, which `rlvet lint` does not read: run `rlvet diagnose`" in result.stderr
    assert CliRunner().invoke(app, ["lint", "--ignore-other-files", str(file)]).exit_code == 0


def test_a_framework_that_is_read_is_not_refused_for_a_word(tmp_path):
    """Names of other frameworks in a comment or a path are no mark."""
    file = tmp_path / "run.sh"
    file.write_text(
        "# as in slime and miles/, --rlhf_type grpo\npython -m verl.trainer.main_ppo data.train_batch_size=256"
    )
    assert CliRunner().invoke(app, ["lint", str(file)]).exit_code == 0
    file.write_text("echo train the group_size in miles\n")
    assert "holds no configuration" in CliRunner().invoke(app, ["lint", str(file)]).stderr


@pytest.mark.parametrize(
    ("name", "text", "framework"),
    [
        ("config.yaml", "num_generations: 8\nper_device_train_batch_size: 4", "trl"),
        ("config.yaml", "num_generations: 8\nmax_completion_length: 256\nlearning_rate: 1e-6", "trl"),
        ("config.yaml", "importance_sampling_level: sequence", "trl"),
        ("run.sh", "trl grpo --num_generations 8 --learning_rate 1e-6", "trl"),
        ("train.py", "import trl\nargs = trl.GRPOConfig('out', num_generations=8)", "trl"),
        ("train.py", "from trl.trainer import GRPOConfig\nargs = GRPOConfig('out')", "trl"),
        ("train.py", "from trl import TrlParser\nfrom mine import GRPOConfig\nGRPOConfig('out')", "trl"),
        ("run.sh", "python3 -m verl.trainer.main_ppo data.train_batch_size=256", "verl"),
        ("run.sh", "python3 -m recipe.dapo.main_dapo actor_rollout_ref.rollout.n=8", "verl"),
        ("run.sh", "python -m openrlhf.cli.train_ppo_ray --n_samples_per_prompt 8", "openrlhf"),
        ("run.sh", "python train.py --actor_learning_rate 1e-6 --n_samples_per_prompt 8", "openrlhf"),
        ("run.sh", "uv run -m skyrl_train.entrypoints.main_base trainer.algorithm.eps_clip_low=0.2", "skyrl"),
        ("rl.toml", "[orchestrator]\nbatch_size = 64", "prime-rl"),
        ("orch.toml", "rollouts_per_example = 8\n[[env]]\nid = 'x'", "prime-rl"),
        ("orch.toml", "group_size = 8\n[[train.source]]\nname = 'x'", "prime-rl"),
    ],
)
def test_a_mark_of_its_own_names_the_framework(name, text, framework):
    (configuration,) = parse_configurations(text.encode(), name)
    assert configuration.framework == framework


def test_marks_of_two_frameworks_are_both_named(tmp_path):
    text = "actor_rollout_ref:\n  rollout:\n    n: 8\nimportance_sampling_level: token\n"
    with pytest.raises(
        InvalidValue, match=r"TRL \(importance_sampling_level\) and verl \(actor_rollout_ref.rollout.n\)"
    ):
        parse_configurations(text.encode(), "config.yaml")
    command = "run actor_rollout_ref.rollout.n=8 trainer.algorithm.eps_clip_low=0.2\n"
    file = tmp_path / "run.sh"
    file.write_text(command)
    result = CliRunner().invoke(app, ["lint", str(file)])
    assert result.exit_code == 2
    assert "verl (actor_rollout_ref.rollout.n) and SkyRL (trainer.algorithm.eps_clip_low)" in result.stderr


def test_every_framework_has_marks_of_its_own():
    """A mark of one framework, by itself, is a mark of no other."""
    for key, framework in FRAMEWORKS.items():
        assert framework.marks
        for mark in framework.marks:
            names = [pattern.replace("*", "x") for pattern in mark]
            matches = [other for other, one in FRAMEWORKS.items() if one.mark_in(names)]
            assert matches == [key], mark
