"""What a launched run leaves in its folder: for each start a leg, with all that was printed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bandpo.integrations.legs import CONSOLE, new_leg
from bandpo_lab.cli.app import app
from helpers.frameworks import needs
from rlvet.runs.legs import legs_of

LAUNCH = """
import sys
from pathlib import Path
from bandpo_lab.cli.run import train_into
train_into(Path(sys.argv[1]), [sys.executable, "-c", sys.argv[2]])
"""


def launch(leg: Path, training: str) -> subprocess.Popen:
    command = [sys.executable, "-c", LAUNCH, str(leg), training]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def test_the_console_of_a_leg_has_what_was_printed_and_the_exit_status_is_the_trainings(tmp_path):
    leg = new_leg(tmp_path)
    training = "import sys; print('step:1 - x:2'); print('a warning', file=sys.stderr); sys.exit(7)"
    with launch(leg, training) as run:
        printed, _ = run.communicate(timeout=60)
    assert run.returncode == 7
    assert printed == "step:1 - x:2\na warning\n"
    assert (leg / CONSOLE).read_text() == "step:1 - x:2\na warning\n"


def test_a_signal_to_the_whole_group_reaches_the_training_and_its_last_words_are_kept(tmp_path):
    leg = new_leg(tmp_path)
    training = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('stopping'), sys.exit(3)))\n"
        "print('ready'); time.sleep(60)"
    )
    with launch(leg, training) as run:
        ends = time.monotonic() + 30
        while not (leg / CONSOLE).exists() or "ready" not in (leg / CONSOLE).read_text():
            assert time.monotonic() < ends
            time.sleep(0.05)
        os.killpg(run.pid, signal.SIGTERM)
        printed, _ = run.communicate(timeout=30)
    assert run.returncode == 3
    assert "stopping" in printed
    assert (leg / CONSOLE).read_text() == "ready\nstopping\n"


@pytest.fixture
def ready(tmp_path, monkeypatch):
    """Launches that find all they need, and what each would have become: its leg and its command."""
    needs("verl")
    started = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bandpo_lab.cli.run._check_ready", lambda _: None)
    monkeypatch.setattr(
        "bandpo_lab.cli.run.train_into", lambda *leg_and_command: started.append(leg_and_command)
    )
    return started


RECIPE = ["run", "verl", "--model", "qwen2.5-3b-instruct", "--method", "band-kl"]


def test_each_start_has_a_leg_in_the_folder_of_its_checkpoints_which_verls_driver_is_told(ready, tmp_path):
    for words in ([], [], ["trainer.experiment_name=lower-lr"]):
        found = CliRunner().invoke(app, [*RECIPE, *words])
        assert found.exception is None
        assert f"bandpo: leg {ready[-1][0]}\n" in found.output
    legs = [leg for leg, _ in ready]
    run = tmp_path / "runs/qwen2.5-3b-instruct-band-kl"
    assert legs == [run / "legs/0001", run / "legs/0002", tmp_path / "runs/lower-lr/legs/0001"]
    for leg, command in ready:
        assert f"BANDPO_LEG:{leg}" in command[-1]


def test_a_dry_run_makes_no_leg(ready, tmp_path):
    found = CliRunner().invoke(app, [*RECIPE, "--dry-run"])
    assert "verl.trainer.main_ppo" in found.output
    assert "BANDPO_LEG" not in found.output
    assert legs_of(tmp_path / "runs/qwen2.5-3b-instruct-band-kl") == []
    assert ready == []


def test_the_recipes_log_to_the_console_a_file_and_wandb(ready):
    from bandpo_lab.cli.recipes import SHIPPED
    from bandpo_lab.rehearsal.shrink import compose

    for settings in ("recommended", "authors"):
        words = ["+paper/model=qwen2.5-3b-instruct", "+paper/rule=band-kl", f"+paper={settings}"]
        assert list(compose(words, SHIPPED, "ppo_trainer").trainer.logger) == ["console", "file", "wandb"]
