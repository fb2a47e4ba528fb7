"""What works where rlvet is not installed, and the one sentence of what does not."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

WITHOUT = """
import sys
sys.modules["rlvet"] = None
"""
"""The beginning of a script that cannot import rlvet."""
INSTALL = "in a clone of bandpo, pip install ./packages/rlvet"


def run_without_rlvet(script, *arguments, status=0):
    """Run a script in a process without rlvet, and return its output and its errors."""
    command = [sys.executable, "-c", WITHOUT + script, *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == status, run.stderr
    return run.stdout, run.stderr


@pytest.mark.parametrize(
    ("script", "user"),
    [
        ("from bandpo.watch import Watch", "bandpo.watch"),
        ("import bandpo.watch.run_watch", "bandpo.watch"),
        ("from bandpo.replay.record import replay_record", "bandpo.replay"),
        ("from bandpo.testing import check_record; check_record('nowhere', [])", "check_record"),
    ],
)
def test_what_needs_it_says_so(script, user):
    _, errors = run_without_rlvet(script, status=1)
    message = f"{user} needs rlvet: {INSTALL}"
    assert errors.splitlines()[-1] == f"bandpo.core.errors.MissingPackage: {message}"


COMMAND = """
from bandpo.cli import main
sys.argv[0] = "bandpo"
main()
"""


def test_the_audit_of_a_run_ends_in_one_line(tmp_path):
    output, errors = run_without_rlvet(COMMAND, "audit", tmp_path, status=2)
    assert output == ""
    assert errors == f"error: bandpo audit needs rlvet: {INSTALL}\n"


@pytest.mark.parametrize("arguments", [["bounds", "0.1"], ["--help"], ["audit", "--help"]])
def test_the_other_commands_work(arguments):
    output, errors = run_without_rlvet(COMMAND, *arguments)
    assert "rlvet:" not in output + errors
    assert output


def test_the_rest_of_bandpo_works(tmp_path):
    pytest.importorskip("pyarrow")
    output, _ = run_without_rlvet(
        """
import torch
import bandpo.integrations
from bandpo import policy_loss
from bandpo.audit import Audit, Recorder
from bandpo.testing import assert_is
logp = -torch.rand(2, 3) - 0.1
with Recorder(sys.argv[1], method="DAPO()") as recorder:
    recorder.add(logp=logp, logp_old=logp, advantages=torch.tensor([1.0, -1.0]))
print(policy_loss(logp, logp, torch.tensor([1.0, -1.0])).loss.isfinite().item())
""",
        tmp_path,
    )
    assert output == "True\n"
    assert len(list(tmp_path.glob("tokens-*"))) == 2


TRAIN = """
from bandpo.integrations.trl import BandGRPOConfig, BandGRPOTrainer
from datasets import load_from_disk
settings = {"max_steps": 1, "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 4}
settings |= {"steps_per_generation": 2, "use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no"}
for watched in ("off", "warn", "stop"):
    print(f"with {watched}", file=sys.stderr)
    trainer = BandGRPOTrainer(
        model=sys.argv[2],
        reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
        args=BandGRPOConfig(sys.argv[1], watched=watched, **settings),
        train_dataset=load_from_disk(sys.argv[3]),
    )
    trainer.train()
"""
"""A step of training on a CPU with each value of ``watched``; the last raises an error."""


@pytest.mark.skipif(find_spec("trl") is None, reason="needs the extra bandpo[trl]")
@pytest.mark.skipif(find_spec("bandpo_lab") is None, reason="its model is bandpo-lab's")
def test_a_training_with_trl_names_what_is_missing_in_one_line(tmp_path):
    from bandpo_lab.tasks import multiplication

    # The lab needs rlvet itself, so the process that trains takes its model and data as files.
    multiplication.dataset("train", 8).save_to_disk(tmp_path / "data")
    arguments = (tmp_path / "run", multiplication.base_model_path(), tmp_path / "data")
    _, errors = run_without_rlvet(TRAIN, *arguments, status=1)
    off, _, rest = errors.partition("with warn\n")
    warn, _, stop = rest.partition("with stop\n")
    missing = f"bandpo: the run is not checked while it trains, as rlvet is missing: {INSTALL}"
    assert [[line for line in part.splitlines() if "rlvet" in line] for part in (off, warn)] == [
        [],
        [missing],
    ]
    assert (
        stop.splitlines()[-1] == f"bandpo.core.errors.MissingPackage: watched='stop' needs rlvet: {INSTALL}"
    )


DRIVE = """
from bandpo.integrations.verl.audit import Driver
loss = {"_target_": "bandpo.integrations.verl.BandPolicyLossConfig", "watched": sys.argv[1]}
Driver().prepare({"actor_rollout_ref": {"actor": {"policy_loss": loss}}})
import bandpo.integrations.verl
"""


@pytest.mark.skipif(find_spec("verl") is None, reason="needs the extra bandpo[verl]")
@pytest.mark.parametrize("watched", ["warn", "off", "stop"])
def test_a_training_with_verl_names_what_is_missing_in_one_line(watched):
    output, errors = run_without_rlvet(DRIVE, watched, status=1 if watched == "stop" else 0)
    lines = [line for line in output.splitlines() if "rlvet" in line]
    if watched == "warn":
        assert lines == [f"bandpo: the run is not checked while it trains, as rlvet is missing: {INSTALL}"]
    else:
        assert lines == []
    if watched == "stop":
        assert errors.splitlines()[-1].endswith(f"watched=stop needs rlvet: {INSTALL}")
