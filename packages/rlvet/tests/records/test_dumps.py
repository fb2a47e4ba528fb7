"""What frameworks and trackers write by themselves, written here as they do."""

import json

import pytest
import torch

from helpers.rlvet_alone import diagnosed_without_torch
from helpers.run_files import (
    batch,
    miles,
    nemo_rl,
    skyrl,
    slime,
    tensorboard,
    trackio,
    wandb,
)
from rlvet import RecordedRun, diagnose, open_run
from rlvet.runs import Setup
from rlvet.runs.files import read_pickle
from rlvet.runs.logs import read_log


@pytest.mark.parametrize("write", [nemo_rl, slime, miles, skyrl])
def test_a_framework_s_own_dump_is_diagnosed(write, tmp_path):
    for name, temperature in (("well", 1.0), ("cold", 0.7)):
        (tmp_path / name).mkdir()
        for step in range(8, 12):  # of which the last two come first by name
            write(tmp_path / name, step, batch(step, temperature))
    well, cold = diagnose(tmp_path / "well"), diagnose(tmp_path / "cold")
    assert well.healthy, well.headline
    assert "engine and trainer agree (KL, nats per token)" in well.passed
    assert "temperature" in (cold.findings[0].code, *cold.findings[0].or_else)  # of which entropies make one
    assert (cold.findings[0].code == "temperature") == (write in (slime, miles))
    assert "the effect of the clip" in well.untested


def test_without_torch_dumps_of_numbers_are_diagnosed_alike(tmp_path):
    """NeMo-RL's, and SkyRL's of numpy's arrays."""
    folders = []
    for write in (nemo_rl, skyrl):
        folders.append(tmp_path / write.__name__)
        folders[-1].mkdir()
        for step in range(4):
            write(folders[-1], step, batch(step, 0.7))
    for folder, without in zip(folders, diagnosed_without_torch(*folders), strict=True):
        diagnosis = diagnose(folder)
        assert without["findings"] == [
            [*json.loads(json.dumps(finding.as_json())).values()] for finding in diagnosis.tested
        ]
        assert without["coverage"] == diagnosis.coverage.as_json()


def test_the_framework_of_a_dump_is_known(tmp_path):
    for write, framework in ((nemo_rl, "nemo-rl"), (slime, "slime"), (skyrl, "skyrl")):
        folder = tmp_path / framework
        folder.mkdir()
        write(folder, 3, batch(3))
        run = open_run(folder)
        assert (type(run), run.record, len(run.dumps)) == (RecordedRun, None, 1)
        assert run.setup == Setup(framework)
        (loss,) = run.batches()
        assert (loss.step, loss.has_logp, loss.framework, loss.method) == (3, False, framework, None)


def test_a_foreign_file_is_named(tmp_path):
    torch.save({"model": {"weight": torch.ones(2)}}, tmp_path / "1.pt")
    with pytest.raises(ValueError, match=r"1\.pt lacks prev_logprobs or log_probs"):
        diagnose(tmp_path)
    with pytest.raises(ValueError, match="is no pickle, or a damaged one"):
        read_pickle(b"no")


def test_a_checkpoint_is_read_from_the_state_of_its_trainer(tmp_path):
    rows = [{"step": step, "reward": step / 100, "entropy": 1.0} for step in range(1, 41)]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "model_world_size_1_rank_0.pt", "data.pt"):
        torch.save({"state": {}}, tmp_path / name)
    assert len(open_run(tmp_path).rows) == 40


@pytest.mark.parametrize("write", [tensorboard, pytest.param(wandb, marks=pytest.mark.slow), trackio])
def test_a_tracker_s_file_is_a_log(write, tmp_path):
    write(tmp_path / "run")
    name = None
    if write is trackio:
        with pytest.raises(
            ValueError, match=r"holds 2 runs, which are not read as one.*--run-name: .*'project.db new'"
        ):
            read_log(tmp_path / "run")
        name = "project.db new"
    rows = read_log(tmp_path / "run", run_name=name).rows
    assert [row["step"] for row in rows] == list(range(1, 61))
    assert rows[9]["reward"] == pytest.approx(0.3)
    diagnosis = diagnose(open_run(tmp_path / "run", run_name=name))
    assert [f.code for f in diagnosis.findings] == ["nan", "reward-flat", "entropy-collapse"]
    assert "first step 50" in diagnosis.headline  # a mean over no answers may be NaN
