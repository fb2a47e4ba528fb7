"""The authors' own settings: each as their scripts have it, and the table of where ours differ."""

import re
from pathlib import Path

import pytest

from helpers.frameworks import needs

needs("verl")

from omegaconf import OmegaConf
from omegaconf.errors import InterpolationToMissingValueError
from typer.testing import CliRunner

import variants
from bandpo_lab.cli.app import app
from bandpo_lab.cli.preflight import saving_settings
from bandpo_lab.cli.recipes import SHIPPED
from bandpo_lab.rehearsal.shrink import compose
from pages import ROOT
from variants import PAPER, Difference, as_table, differences

EXPERIMENT = ("+paper/model=qwen2.5-7b", "+paper/rule=band-tv", "+paper=authors")


def settings(*overrides: str, experiment=EXPERIMENT):
    return compose([*experiment, *overrides], PAPER.parent, "ppo_trainer")


def found(config, expected: dict) -> dict:
    return {key: OmegaConf.select(config, key) for key in expected}


def test_the_authors_settings_are_those_of_their_scripts():
    """As read from the 48 scripts of RLtraining/verl/baselinescripts; all those on mathematics agree in these."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    lengths = {"max_prompt_length": 1024, "max_response_length": 4096, "truncation": "error"}
    loss = {"policy_loss.method": "Band(TotalVariation(), 0.05, max_ratio=10)", "clip_ratio_c": 10.0}
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.001, "kl_loss_type": "low_var_kl", "entropy_coeff": 0}
    steps = {"ppo_mini_batch_size": 64, "optim.lr": 1e-6, "fsdp_config.param_offload": False}
    parts = {
        "data": {"train_batch_size": 256} | lengths,
        "algorithm": {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": True},
        actor: {"loss_agg_mode": "seq-mean-token-mean"} | loss | kl | steps,
        rollout: {"tensor_model_parallel_size": 1, "n": 16},
        f"{rollout}.val_kwargs": {"n": 32, "temperature": 1.0, "do_sample": True},
        "trainer": {"total_epochs": 10, "test_freq": 5, "save_freq": 10, "val_before_train": True},
    }
    expected = {f"{part}.{name}": value for part, of_it in parts.items() for name, value in of_it.items()}
    assert found(settings(), expected) == expected


@pytest.mark.parametrize("name", ["recommended", "authors"])
def test_the_check_of_a_node_reads_what_hydra_composes(name):
    trainer = settings(experiment=(*EXPERIMENT[:2], f"+paper={name}")).trainer
    assert saving_settings(name) == (trainer.save_freq, trainer.max_actor_ckpt_to_keep)


@pytest.mark.slow
def test_what_follows_for_their_dapo_baseline():
    """From its files; that their own settings are taken is tested in test_rehearse_recipes.py."""
    expected = {
        "algorithm.filter_groups.enable": True,
        "reward.reward_kwargs.max_resp_len": 4608,
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": 5632,
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": 5632,
    }
    assert found(settings("+paper/arm=dapo"), expected) == expected


@pytest.mark.slow
def test_their_task_of_programs_needs_a_server():
    config = settings("+paper/task=apps", "recipe.sandbox=http://sandbox:8080/run_code")
    assert config.reward.sandbox_fusion.url == "http://sandbox:8080/run_code"
    assert config.reward.custom_reward_function.path is None
    with pytest.raises(InterpolationToMissingValueError, match=r"recipe\.sandbox"):
        OmegaConf.to_container(settings("+paper/task=apps"), resolve=True)


@pytest.mark.slow
@pytest.mark.parametrize("extra", [(), ("+paper/arm=filter-groups",), ("+paper/arm=dapo",)])
def test_verl_accepts_them(extra):
    from bandpo_lab.rehearsal.preflight import validate

    experiment = ("+paper/model=qwen2.5-3b-instruct", "+paper/rule=clip-higher", "+paper=authors")
    check = validate(settings(*extra, experiment=experiment))
    assert check.ok, check.detail


@pytest.mark.slow
def test_the_table_names_the_models_and_the_rules(monkeypatch):
    some = {"model": ["qwen2.5-3b-instruct", "qwen2.5-7b"], "rule": ["band-kl", "band-tv"]}
    monkeypatch.setattr(variants, "names", lambda kind: some[kind])
    table = differences("authors", "recommended")
    rollout = "actor_rollout_ref.rollout"
    assert {
        d
        for d in table
        if d.key.endswith("policy_loss.method") or "clip" in d.key or d.key.startswith(f"{rollout}.t")
    } == {
        Difference(
            "actor_rollout_ref.actor.policy_loss.method",
            "Band(TotalVariation(), 0.05, max_ratio=10)",
            "Band(TotalVariation(), 0.15, max_ratio=10)",
            ("band-tv",),
        ),
        Difference(f"{rollout}.tensor_model_parallel_size", "1", "2", ("qwen2.5-7b",)),
    }
    assert Difference("trainer.save_freq", "10", "20") in table
    assert "| `trainer.save_freq` | `10` | `20` | everywhere |" in as_table("authors", "recommended", table)


@pytest.mark.slow
def test_the_page_has_the_commands_table():
    page = (ROOT / "research/reports/recipes.md").read_text()
    (printed,) = re.findall(r"^\| setting \| authors (?:\|.*\n)+", page, re.M)
    assert printed == as_table("authors", "recommended", differences("authors", "recommended")) + "\n"


def test_the_command_copies_unless_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments, folder in ([], "recipes"), (["mine"], "mine"), (["copy", "other"], "other"):
        assert CliRunner().invoke(app, ["recipes", *arguments]).output == f"{folder}/README.md\n"
        assert (Path(folder) / "paper/authors.yaml").exists()
    with pytest.raises(ValueError, match=r"'ours' is no variant .* authors, recommended"):
        differences("authors", "ours")


def test_the_text_beside_the_recipes_names_their_folders():
    text = (SHIPPED / "README.md").read_text(encoding="utf-8")
    folders = [path.name for path in SHIPPED.iterdir() if path.is_dir() and list(path.glob("**/*.yaml"))]
    assert [name for name in folders if f"| `{name}` |" not in text] == []
