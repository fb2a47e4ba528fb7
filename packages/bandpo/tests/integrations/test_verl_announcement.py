"""What a run of verl is: printed before Ray starts, and kept with each leg of the run."""

import json
import os
from copy import deepcopy
from importlib.metadata import version
from pathlib import Path

import pytest

from helpers.frameworks import needs

needs("verl")

from integrations.test_verl import begin, whole_config
from omegaconf import OmegaConf
from typer.testing import CliRunner
from verl.utils.tracking import Tracking

from bandpo.cli.app import app
from bandpo.integrations.legs import new_leg
from bandpo.integrations.verl.announcement import FILE
from bandpo.integrations.verl.driver import Driver
from rlvet import open_run
from rlvet.cli.app import app as rlvet_app
from rlvet.runs.configs import read_setup

LOSS = "actor_rollout_ref.actor.policy_loss."
BASE = [
    "actor_rollout_ref.actor.use_dynamic_bsz=true",
    "trainer.experiment_name=same",
    "trainer.default_local_dir=runs/x",
]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("VERL_FILE_LOGGER_PATH", "WANDB_DIR", "BANDPO_LEG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Driver, "prepare", lambda *_: None)  # whose hooks would outlast the test


def started(*overrides, target="BandPolicyLossConfig", step=None):
    """Do what verl's command and driver do with these settings, and write a checkpoint of that step."""
    config = whole_config(*BASE, *overrides, target=target)
    begin(config)
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
    leg = tmp_path / "runs/x/legs/0001"
    kept = json.loads((leg / FILE).read_text())
    assert kept["method"].startswith(method)
    assert kept["versions"]["verl"] == version("verl")
    log = leg / "metrics.jsonl"
    assert read_setup(log, []).method == kept["method"]
    with log.open("a") as lines:
        lines.write(json.dumps({"step": 1, "data": {"actor/entropy": 1.0, "actor/pg_clipfrac": 0.1}}))
    assert f"metrics.jsonl, 1 steps, verl, {method}" in CliRunner().invoke(
        app, ["audit", str(log)]
    ).output.replace("\n", "")


@pytest.mark.parametrize(
    "overrides",
    [
        [f"+{LOSS}method='Band(KL(), 0.1)'"],
        ["actor_rollout_ref.actor.optim.lr=5e-7"],
        ["trainer.nnodes=2"],
    ],
)
def test_a_run_in_a_folder_with_checkpoints_says_from_which_it_goes_on(overrides, capsys):
    """Check that only verl's own settings decide, whatever loss or settings the checkpoint has."""
    started(step=40)
    capsys.readouterr()
    started(*overrides)
    assert "runs/x goes on from runs/x/global_step_40" in capsys.readouterr().out
    started(*overrides, "trainer.resume_mode=disable")
    assert "runs/x starts at step 0" in capsys.readouterr().out
    started(*overrides, "trainer.resume_mode=resume_path", "trainer.resume_from_path=elsewhere/global_step_3")
    assert "runs/x goes on from elsewhere/global_step_3" in capsys.readouterr().out


def test_the_older_trainer_s_second_check_says_nothing_more(capsys):
    config = started("trainer.use_v1=false")
    capsys.readouterr()
    begin(deepcopy(config))
    assert "bandpo" not in capsys.readouterr().out


def logged(tracking, steps):
    for step in steps:
        metrics = {"critic/score/mean": 0.01 * step, "actor/entropy": 1.0, "actor/pg_loss": 0.1}
        tracking.log(metrics, step=step)
    tracking.finish()


def resumable(*overrides):
    """Return the settings of a run with verl's file logger, after their check."""
    config = whole_config(*BASE, "trainer.logger=[console,file]", *overrides, target="BandPolicyLossConfig")
    begin(config)
    return OmegaConf.to_container(config, resolve=True)


def test_a_resumed_run_keeps_the_log_of_each_leg_and_is_diagnosed_as_one(tmp_path, capsys):
    for steps in (range(1, 16), range(11, 31)):
        plain = resumable(f"+{LOSS}method='FixedClip(0.2, 0.28)'")
        logged(Tracking("project", "run", default_backend=["console", "file"], config=plain), steps)
    legs = tmp_path / "runs/x/legs"
    assert [leg.name for leg in sorted(legs.iterdir())] == ["0001", "0002"]
    assert (legs / "0001/metrics.jsonl").read_text().count("actor/entropy") == 15
    run = open_run(tmp_path / "runs/x")
    assert [row["step"] for row in run.rows] == list(range(1, 31))
    assert run.setup.framework == "verl"
    assert run.setup.method == "FixedClip(0.2, 0.28)"
    assert run.setup.updates == 4
    output = CliRunner().invoke(rlvet_app, ["diagnose", "runs/x"]).output
    assert "30 log steps" in output
    assert "steps 11 to 15 of leg 0001 were replaced" in output
    assert "VERL_FILE_LOGGER_PATH" not in os.environ


def test_a_launchers_leg_is_taken_once(tmp_path, monkeypatch):
    leg = new_leg(tmp_path / "runs/x")
    monkeypatch.setenv("BANDPO_LEG", str(leg))
    for steps in (range(1, 3), range(3, 5)):  # a driver that Ray has started again
        logged(Tracking("project", "run", default_backend=["file"], config=resumable()), steps)
    assert (leg / "metrics.jsonl").read_text().count("actor/entropy") == 2
    assert (tmp_path / "runs/x/legs/0002/metrics.jsonl").exists()


def test_a_file_of_the_user_that_verl_would_empty_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "mine.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(file))
    logged(Tracking("project", "run", default_backend=["file"], config=resumable()), range(1, 3))
    before = file.read_text()
    with pytest.raises(ValueError, match=r"VERL_FILE_LOGGER_PATH=.*mine.jsonl: verl would empty this file"):
        resumable()
    assert file.read_text() == before


def test_wandb_writes_into_the_leg(tmp_path, monkeypatch):
    places = []
    monkeypatch.setattr("wandb.init", lambda **_: places.append(os.environ["WANDB_DIR"]))
    monkeypatch.setattr("wandb.finish", lambda **_: None)
    Tracking("project", "run", default_backend=["wandb"], config=resumable()).finish()
    monkeypatch.setenv("WANDB_DIR", "/mine")
    Tracking("project", "run", default_backend=["wandb"], config=resumable()).finish()
    assert places == ["runs/x/legs/0001", "/mine"]
