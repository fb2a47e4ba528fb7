"""Advice to resume names a checkpoint that the output names as saved."""

import random

import pytest

from rlvet import diagnose
from rlvet.runs.checkpoints import saved_steps
from rlvet.runs.logs import read_log

TRANSFORMERS = "Saving model checkpoint to runs/a/checkpoint-{step}\n"
VERL = "\x1b[36m(WorkerDict pid=1)\x1b[0m Saving actor checkpoint to /root/runs/actor/global_step_{step}\n"


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        (TRANSFORMERS.format(step=100) + TRANSFORMERS.format(step=20), (20, 100)),
        ("tokenizer config file saved in runs/a/checkpoint-100/tokenizer_config.json\n" * 3, (100,)),
        (VERL.format(step=3), (3,)),
        ("[rank-0]: Saved model to /runs/verl/global_step_40/actor/model_world_size_8_rank_0.pt", (40,)),
        ("Resuming from checkpoint-100\nmodel.path=sft/global_step_105\n", ()),
        ("the model was saved\ncheckpoint-9 is there\n", ()),
        ("Saving model checkpoint to runs/a/checkpoint-final\n", ()),
        ("model saved in runs/checkpoint-3b\n", ()),
        ("", ()),
    ],
)
def test_only_what_is_said_to_be_saved_is_a_checkpoint(text, steps):
    assert saved_steps(text) == steps


def console(kept, *, with_steps=True, seed=7):
    """Return the output of a run of 100 steps whose reward falls from step 60 on, with checkpoints."""
    draw = random.Random(seed)
    lines = []
    for step in range(1, 101):
        reward = (0.6 if step < 60 else 0.05) + draw.gauss(0, 0.02)
        place = f"'step': {step}, " if with_steps else ""
        lines.append(f"{{{place}'loss': 0.1, 'reward': {reward:.4f}, 'kl': 0.01}}\n")
        if step in kept:
            lines.append(TRANSFORMERS.format(step=step))
    return "".join(lines)


@pytest.mark.parametrize(
    ("kept", "end"),
    [
        ((25, 50, 75), "before step 60: the output names one of step 50"),
        ((75, 100), "before step 60, or begin again: the first that the output names is of step 75"),
        ((), "before step 60"),
    ],
)
def test_advice_names_the_last_one_before_the_fall(kept, end, tmp_path):
    file = tmp_path / "train.log"
    file.write_text(console(kept))
    (fall,) = diagnose(file).findings
    assert fall.advice.endswith(f"resume from a checkpoint {end}")


def test_steps_of_checkpoints_are_not_compared_with_counted_rows(tmp_path):
    file = tmp_path / "train.log"
    file.write_text(console((25, 50), with_steps=False))
    log = read_log(file)
    assert log.are_steps_counted
    assert log.saved == ()


def test_checkpoints_of_one_of_two_runs_are_not_told_of_the_other(tmp_path):
    file = tmp_path / "train.log"
    file.write_text(console((25, 50)) + console((), seed=8))
    assert [read_log(file, run_name=name).saved for name in ("1", "2")] == [(), ()]
