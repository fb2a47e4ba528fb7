"""Misspelt settings are found, and settings of the frameworks and of their users are not taken for misspelt ones."""

import os
import random
import string
from importlib import metadata
from pathlib import Path

import pytest
from test_lint_rules import CASES, read
from typer.testing import CliRunner

import known_settings
from rlvet.cli.app import app
from rlvet.lint.checks import lint_configurations, lint_text
from rlvet.lint.known import FRAMEWORKS
from rlvet.lint.names import Names, names_of, nearest
from rlvet.runs.files import load_table

MISSPELT = "misspelt-setting"


def meant(report):
    """Return the settings that misspelt ones were meant to be."""
    return [finding.fix for finding in report.findings if finding.id == MISSPELT]


@pytest.mark.parametrize(
    ("name", "text", "fixes"),
    [
        (
            "run.sh",
            "python3 -m verl.trainer.main_ppo data.train_batch_size=64 actor_rollout_ref.actor.clip_ratio_hgih=0.28",
            ["actor_rollout_ref.actor.clip_ratio_high"],
        ),
        (
            "run.sh",
            "python3 -m verl.trainer.main_ppo +actor_rollout_ref.actor.policy_los.method=x algorithm.gama=1",
            ["actor_rollout_ref.actor.policy_loss.method", "algorithm.gamma"],
        ),
        (
            "train.py",
            "from trl import GRPOConfig\nGRPOConfig('out', num_generation=8, learning_rte=1e-6)\n",
            ["num_generations", "learning_rate"],
        ),
        ("config.yaml", "importance_sampling_level: token\nepsilonhigh: 0.28\n", ["epsilon_high"]),
        ("run.sh", "trl grpo --num_generations 8 --model_name_or_pth x", ["model_name_or_path"]),
        (
            "run.sh",
            "python -m openrlhf.cli.train_ppo_ray --actor.adam.lr 1e-6 --vllm.num_engins 2",
            ["vllm.num_engines"],
        ),
        ("run.sh", "python -m openrlhf.cli.train_ppo_ray --n_sample_per_prompt 8", ["n_samples_per_prompt"]),
        (
            "run.sh",
            "python -m skyrl.train.entrypoints.main_base trainer.algorithm.eps_clip_hihg=0.3",
            ["trainer.algorithm.eps_clip_high"],
        ),
        (
            "config.yaml",
            "trainer:\n  algorithm:\n    advantage_estimatr: grpo\n",
            ["trainer.algorithm.advantage_estimator"],
        ),
        (
            "rl.toml",
            "[orchestrator]\nbatch_sze = 64\n[trainer.optim]\nlr = 1e-6\n",
            ["orchestrator.batch_size"],
        ),
        (
            "rl.toml",
            "[[orchestrator.train.source]]\ngruop_size = 8\n",
            ["orchestrator.train.source.group_size"],
        ),
        (
            "train.toml",
            "[optim]\nlr = 1e-6\nweight_deacy = 0.1\n[loss]\ntype = 'default'\n",
            ["trainer.optim.weight_decay"],
        ),
    ],
)
def test_a_misspelt_setting_is_one_fix_with_the_one_that_is_meant(name, text, fixes):
    report = lint_text(text.encode(), name)
    assert meant(report) == fixes
    found = [finding for finding in report.findings if finding.id == MISSPELT]
    assert {finding.severity for finding in found} == {"fix"}
    assert all(finding.title.endswith(f": did you mean {finding.fix}?") for finding in found)
    assert all(finding.line and finding.title.split(":")[0] in finding.settings for finding in found)


def test_a_misspelt_setting_does_not_hide_the_other_checks():
    """It is no sign of a fork with other defaults."""
    command = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8"
    with_typo = lint_text(f"{command} actor_rollout_ref.actor.clip_ratio_hgih=0.28".encode(), "run.sh")
    assert with_typo.passed == lint_text(command.encode(), "run.sh").passed


@pytest.mark.parametrize(
    "text",
    [
        "data.curriculum=easy trainer.owner=me my_project.option=1 reward.length_penalty=0.1",
        "+ray_kwargs.ray_init.num_gpus=1 actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space=4",
        "+actor_rollout_ref.model.override_config.rope_theta=1e6 hydra.run.dir=x rllm.agent.max_steps=3",
        "actor_rollout_ref.actor.policy_loss._target_=x actor_rollout_ref.actor.fsdp_config.grad_offload=true",
    ],
)
def test_settings_of_the_user_and_of_earlier_versions_are_not_misspelt(text):
    assert meant(lint_text(f"python3 -m verl.trainer.main_ppo {text}".encode(), "run.sh")) == []


def test_settings_of_earlier_versions_are_one_note():
    text = "from trl import GRPOConfig\nGRPOConfig('out', max_prompt_length=512, use_liger_kernel=True)\n"
    (finding,) = lint_text(text.encode(), "train.py").findings
    assert (finding.id, finding.severity, finding.line) == ("setting-of-earlier-versions", "note", 2)
    assert "max_prompt_length (last in TRL 0.27.2)" in finding.happens


@pytest.mark.parametrize("case", CASES, ids=[f"{case[0]}-{case[1]}-{i}" for i, case in enumerate(CASES)])
def test_no_setting_of_the_cases_of_rules_is_misspelt(case):
    for settings in case[2:]:
        _, configurations = read(case[0], settings)
        assert meant(lint_configurations(configurations, "file")) == []


def misspell(name, draw):
    """Return a name with one edit: a letter more, less or another, two swapped, or an underscore less."""
    place = draw.randrange(len(name))
    letter = draw.choice(string.ascii_lowercase)
    kind = draw.choice(("more", "less", "another", "swapped", "underscore"))
    if kind == "underscore" and "_" in name:
        place = draw.choice([index for index, one in enumerate(name) if one == "_"])
        return name[:place] + name[place + 1 :]
    if kind == "more":
        return name[:place] + letter + name[place:]
    if kind == "another":
        return name[:place] + letter + name[place + 1 :]
    if kind == "swapped":
        return name[:place] + name[place : place + 2][::-1] + name[place + 2 :]
    return name[:place] + name[place + 1 :]


@pytest.mark.parametrize("key", FRAMEWORKS)
def test_planted_misspellings_are_found(key):
    """At least 95 % of all settings, each with one edit; the others are short names, or other settings."""
    names = names_of(FRAMEWORKS[key])
    draw = random.Random(f"names of {key}")
    paths = [f"{group}.{one}".strip(".") for group, members in names.groups.items() for one in members]
    paths = sorted(path for path in paths if path not in names.groups and "*" not in path)
    planted = []
    for path in paths:
        group, _, name = path.rpartition(".")
        written = f"{group}.{misspell(name, draw)}".strip(".")
        if written != path:
            planted.append(path in names.meant(written))
    assert sum(planted) >= 0.95 * len(planted)


@pytest.mark.parametrize("key", FRAMEWORKS)
def test_no_setting_of_a_framework_is_misspelt(key):
    names = names_of(FRAMEWORKS[key])
    for group, members in names.groups.items():
        for name in members:
            assert names.meant(f"{group}.{name}".strip(".")) == []


def test_short_names_and_ties():
    assert nearest("lrr", ["lr"]) == ["lr"]
    assert nearest("rl", ["lr"]) == ["lr"]
    assert nearest("l", ["lr"]) == nearest("lt", ["lr"]) == nearest("k", ["n"]) == []
    assert nearest("top_q", ["top_k", "top_p", "min_p"]) == ["top_k", "top_p"]
    assert nearest("x" * 1000, ["x" * 999]) == []


def test_a_group_without_a_list_may_have_any_settings():
    names = Names({"": {"data", "reward"}, "data": {"seed"}})
    assert names.meant("reward.sed") == names.meant("data.seed.x") == []
    assert names.meant("data.0.sede") == ["data.seed"]
    assert names.meant("dat.sede") == ["data.seed"]


def test_each_framework_has_a_list():
    for framework in FRAMEWORKS.values():
        names = names_of(framework)
        assert sum(map(len, names.groups.values())) > 200
        assert names.version
        assert names.earlier


CLONES = {"openrlhf": "OpenRLHF", "skyrl": "SkyRL", "prime-rl": "prime-rl"}
READERS = {
    "openrlhf": known_settings.openrlhf_names,
    "skyrl": known_settings.skyrl_names,
    "prime-rl": known_settings.prime_rl_names,
}


def listed(key):
    """Return the settings of the newest version in the list of a framework."""
    table = load_table(f"known/{key.replace('-', '_')}")
    return {
        f"{group}.{one}".strip(".") for group, members in table["settings"].items() for one in members.split()
    }


@pytest.mark.slow
@pytest.mark.parametrize("key", CLONES)
def test_a_list_is_that_of_the_commit_that_it_names(key):
    clone = Path(os.environ.get("BANDPO_CLONES", "unset")) / CLONES[key]
    if not clone.is_dir():
        pytest.skip(f"needs a clone called {CLONES[key]} in $BANDPO_CLONES")
    tree = known_settings.commit(clone, load_table(f"known/{key.replace('-', '_')}")["commit"])
    assert listed(key) == READERS[key](tree)


def test_the_list_of_verl_is_that_of_the_installed_one():
    tree = installed("verl")
    assert listed("verl") == known_settings.verl_names(tree)


def test_the_list_of_trl_is_that_of_the_installed_one():
    tree, library = installed("trl"), installed("transformers")
    if not load_table("known/trl")["commit"].endswith(f"transformers {library.version}"):
        pytest.skip("another version of transformers is installed")
    assert listed("trl") == known_settings.trl_names(tree, library)


def installed(name):
    """Return the files of an installed framework, of the version whose settings are listed."""
    try:
        tree = known_settings.installed(name)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not installed")
    if name in FRAMEWORKS and tree.version != FRAMEWORKS[name].version:
        pytest.skip(f"another version of {name} is installed")
    return tree


@pytest.mark.parametrize(("options", "status"), [([], 2), (["--ignore-other-files"], 0)])
def test_a_file_of_which_nothing_can_be_checked_is_unjudged(options, status, tmp_path):
    file = tmp_path / "train.py"
    file.write_text("from trl import GRPOConfig\nargs = GRPOConfig(**load('settings.json'))\n")
    result = CliRunner().invoke(app, ["lint", str(file), *options])
    assert result.exit_code == status
    assert result.stdout.splitlines()[-1].startswith(
        f"{file}: TRL: unjudged, since nothing could be checked; "
    )
    file.write_text("from trl import GRPOConfig\nargs = GRPOConfig(beta=0.0)\n")
    assert CliRunner().invoke(app, ["lint", str(file)]).exit_code == 0


def test_the_exit_status_of_a_misspelt_setting(tmp_path):
    file = tmp_path / "run.sh"
    file.write_text("python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.clip_ratio_hgih=0.28\n")
    result = CliRunner().invoke(app, ["lint", str(file)])
    assert result.exit_code == 1
    title = "actor_rollout_ref.actor.clip_ratio_hgih: did you mean actor_rollout_ref.actor.clip_ratio_high?"
    assert result.stdout.startswith(f"{file}:1: fix: {title} [misspelt-setting]\n")
