"""A run's identity: said before Ray starts, kept beside the checkpoints, compared before verl resumes them."""

import json
import re
from copy import deepcopy
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs the extra bandpo[verl]")

from omegaconf import OmegaConf
from typer.testing import CliRunner
from verl.utils import config as verls_settings
from verl.utils.tracking import Tracking

from bandpo.audit.configs import setup_of
from bandpo.cli.app import app
from bandpo.integrations._verl_audit import Driver
from bandpo.integrations._verl_identity import FILE, settings_of
from integrations.test_verl import whole_config

LOSS = "actor_rollout_ref.actor.policy_loss."
STOCK = "verl.workers.config.PolicyLossConfig"
BASE = [
    "actor_rollout_ref.actor.use_dynamic_bsz=true",
    "trainer.experiment_name=same",
    "trainer.default_local_dir=runs/x",
]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "log.jsonl"))
    monkeypatch.setattr(Driver, "prepare", lambda *_: None)  # whose hooks would outlast the test


def started(*overrides, target="BandPolicyLossConfig", step=None):
    """What verl's command and its driver do with these settings; and a checkpoint of that step."""
    config = whole_config(*BASE, *overrides, target=target)
    verls_settings.validate_config(config, False, False)
    OmegaConf.resolve(config)
    plain = OmegaConf.to_container(config, resolve=True)
    Tracking("project", "run", default_backend=["file"], config=plain).finish()
    if step:
        folder = Path(config.trainer.default_local_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "latest_checkpointed_iteration.txt").write_text(str(step))
    return config


def test_a_run_says_what_it_is_keeps_it_and_its_log_knows_the_method(capsys, tmp_path):
    started(f"+{LOSS}method='FixedClip(0.2, 0.28)'", step=40)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("bandpo: ")]
    method = "Method(clip=FixedClip(low=0.2, high=0.28), objective=DualClip(max_ratio=3.0, "
    assert said[0].startswith(f"bandpo: loss        {method}")
    assert "0.8 to 1.28 at p = 0.5" in said[1]
    assert said[3] == "bandpo: updates     4 for each batch of 1024 × 1 responses"
    assert said[-1] == "bandpo: checkpoints runs/x starts at step 0"
    kept = json.loads((tmp_path / "runs/x" / FILE).read_text())
    assert kept["method"].startswith(method)
    log = tmp_path / "log.jsonl"
    assert str(setup_of(log, []).method) == kept["method"]
    with log.open("a") as lines:
        lines.write(json.dumps({"step": 1, "data": {"actor/entropy": 1.0, "actor/pg_clipfrac": 0.1}}))
    assert f"log.jsonl, 1 steps, verl, {method}" in CliRunner().invoke(
        app, ["audit", str(log)]
    ).output.replace("\n", "")


@pytest.mark.parametrize(
    ("target", "overrides", "message"),
    [
        (STOCK, [], r"loss .*Band.* → verl's vanilla"),
        ("BandPolicyLossConfig", [f"+{LOSS}method='Band(KL(), 0.1)'"], r"loss .*0\.05.* → .*0\.1,"),
        ("BandPolicyLossConfig", ["actor_rollout_ref.actor.optim.lr=5e-7"], r"optim\.lr 1e-06 → 5e-07"),
        ("BandPolicyLossConfig", ["trainer.nnodes=2"], r"trainer\.nnodes 1 → 2"),
        ("BandPolicyLossConfig", ["actor_rollout_ref.actor.clip_ratio_c=10"], r"clip_ratio_c 3\.0 → 10"),
    ],
)
def test_another_run_is_not_resumed_unless_its_checkpoint_is_named(target, overrides, message, capsys):
    started(step=40)
    with pytest.raises(ValueError, match=rf"runs/x/global_step_40 is another run's \(.*{message}"):
        started(*overrides, target=target)
    started(*overrides, "trainer.resume_mode=disable", target=target)
    if target != STOCK:
        named = ["trainer.resume_mode=resume_path", "trainer.resume_from_path=runs/x/global_step_40"]
        capsys.readouterr()
        started(*overrides, *named)
        assert "runs/x goes on from runs/x/global_step_40" in capsys.readouterr().out
        started(*overrides)  # whose folder it is now


def test_a_folder_is_its_run_s_before_the_first_checkpoint():
    started()
    started(f"+{LOSS}method='Band(KL(), 0.05, max_ratio=10)'")  # the same, in other words
    with pytest.raises(ValueError, match=r"runs/x is another run's .*optim\.lr.*delete this one"):
        started("actor_rollout_ref.actor.optim.lr=5e-7")


def test_checkpoints_that_nobody_knows_are_resumed_by_verl_s_own_losses_alone():
    """A baseline of stock verl, and then Band by two overrides with the same experiment_name."""
    started(target=STOCK, step=40)
    started(target=STOCK)
    with pytest.raises(
        ValueError, match=r"another run's \(runs/x/bandpo-run.json is not there to tell whose\).*resume_path"
    ):
        started()


SAME = [
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
    "actor_rollout_ref.actor.fsdp_config.param_offload=true",
    "actor_rollout_ref.rollout.max_num_seqs=64",
    "actor_rollout_ref.rollout.val_kwargs.n=4",
    "trainer.test_freq=7",
    "trainer.save_freq=1",
    "trainer.total_epochs=3",
    "trainer.val_before_train=false",
    "trainer.logger=[console]",
    "trainer.max_actor_ckpt_to_keep=1",
    "data.val_files=other.parquet",
    "+recipe.data=elsewhere",
    f"+{LOSS}audit=false",
    f"+{LOSS}record=tokens",
    f"+{LOSS}watched=off",
    f"+{LOSS}certify=warn",
    "+recipe.output=elsewhere",
    "+ray_kwargs.ray_init.num_gpus=4",
]


def test_memory_measuring_and_writing_are_no_other_run_and_its_folder_is_named(capsys):
    assert settings_of(whole_config(*BASE, *SAME), "") == settings_of(whole_config(*BASE), "")
    started(step=40)
    capsys.readouterr()
    started(*SAME, "trainer.default_local_dir=runs/y")
    said = capsys.readouterr().out
    found = re.search(r"runs/y starts at step 0; runs/x/global_step_40 is of .* \((.*)\); .* (\S+)", said)
    told = {word.split()[0] for word in found[1].split("; ")}  # and what follows from some of these
    assert {word.lstrip("+").partition("=")[0] for word in SAME[:-2]} < told
    assert "rollout.gpu_memory_utilization 0.5 → 0.4" in found[1]
    started(*SAME, found[2])
    assert "runs/x goes on from runs/x/global_step_40" in capsys.readouterr().out
    started("actor_rollout_ref.actor.optim.lr=5e-7", "trainer.default_local_dir=runs/z")
    assert "runs/z starts at step 0\n" in capsys.readouterr().out


def test_with_a_schedule_the_length_of_a_run_is_a_part_of_it():
    cosine = "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine"
    one, other = (settings_of(whole_config(*BASE, cosine, f"trainer.total_epochs={n}"), "") for n in (3, 4))
    assert one != other


def test_the_older_trainer_s_second_check_says_nothing_more(capsys):
    config = started("trainer.use_v1=false")
    capsys.readouterr()
    verls_settings.validate_config(deepcopy(config), False, False)
    assert "bandpo" not in capsys.readouterr().out
