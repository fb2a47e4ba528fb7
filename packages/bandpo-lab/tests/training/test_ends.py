"""However a training ends early, it says why in one sentence, leaves a whole checkpoint, and does not exit with 0."""

import sys

import pytest

from helpers.frameworks import needs

needs("trl")

import torch

import bandpo_lab.cli
from bandpo.core.errors import BandpoError
from bandpo_lab.errors import FileProblem, InvalidValue, RunProblem
from bandpo_lab.training import train
from bandpo_lab.training.arguments import parse_arguments
from bandpo_lab.training.checkpoints import damage, saved_checkpoints
from bandpo_lab.training.train import RunTrainer, run_training

pytestmark = [
    pytest.mark.filterwarnings("ignore:no-signal"),
    pytest.mark.filterwarnings("ignore:reward-flat"),
]
SMALL = ["--per_device_train_batch_size=8", "--num_generations=4", "--steps_per_generation=2"]
SMALL += ["--num_iterations=1", "--max_steps=6", "--save_steps=2", "--logging_steps=1"]
SMALL += ["--max_completion_length=8", "--train_prompts=32", "--eval_prompts=0"]

REWARDS = """
calls = 0
no_function = None

def later(failure):
    def reward(completions, **_):
        global calls
        calls += 1
        if calls <= 1:
            return [float(i) for i in range(len(completions))]
        return failure(completions)
    reward.__name__ = "reward"
    return reward

def exits(_):
    raise SystemExit(0)

def fails(_):
    raise KeyError("answer\\nis missing")

raising = later(fails)
exiting = later(exits)
returning_none = later(lambda _: None)
returning_text = later(lambda completions: "x" * len(completions))
returning_few = later(lambda completions: [1.0])
returning_nan = later(lambda completions: [float("nan")] * len(completions))
returning_nones = later(lambda completions: [None] * len(completions))
"""


@pytest.fixture
def rewards(tmp_path, monkeypatch):
    """A module of reward functions that fail in the second batch, after the first checkpoint."""
    (tmp_path / "failing_rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("failing_rewards", None)


def small(folder, *more):
    return parse_arguments([*SMALL, "--output_dir", str(folder), *more])


def assert_checkpoint_is_whole(folder, step):
    assert [checkpoint.name for checkpoint in saved_checkpoints(folder)] == [f"checkpoint-{step}"]
    assert damage(saved_checkpoints(folder)[0]) is None


def assert_one_sentence(error):
    text = str(error)
    assert "\n" not in text
    assert len(text) < 500


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raising", r"the reward function failing_rewards.raising raised KeyError: 'answer\\nis missing'"),
        ("exiting", r"exiting ended the process \(SystemExit 0\)"),
        (
            "returning_none",
            r"returning_none returned None, and not one number for each of the 16 completions",
        ),
        ("returning_text", r"returning_text returned 'x+', and not one number"),
        ("returning_few", r"returning_few returned \[1.0\], and not one number for each of the 16"),
        ("returning_nan", r"every reward after step 2 is NaN or None"),
        ("returning_nones", r"every reward after step 2 is NaN or None"),
    ],
)
@pytest.mark.filterwarnings("ignore:All reward functions returned None")
def test_a_reward_function_that_fails_is_named(name, message, rewards):
    folder = rewards / "run"
    arguments = small(folder, "--reward_funcs", f"failing_rewards.{name}")
    with pytest.raises((RunProblem, BandpoError), match=message) as caught:
        run_training(arguments)
    assert_one_sentence(caught.value)
    assert_checkpoint_is_whole(folder, 2)
    assert "Traceback" in (folder / "error.log").read_text()


def test_a_reward_function_that_is_none_is_refused_before_the_training(rewards):
    with pytest.raises(
        InvalidValue, match=r"reward_funcs: 'failing_rewards\.no_function' is None, and no function"
    ):
        run_training(small(rewards / "run", "--reward_funcs", "failing_rewards.no_function"))


def test_the_command_ends_with_another_status_than_0(rewards, monkeypatch, capsys):
    words = ["train", *SMALL, "--output_dir", "run", "--reward_funcs", "failing_rewards.exiting"]
    monkeypatch.setattr(sys, "argv", ["bandpo-lab", *words])
    with pytest.raises(SystemExit) as ended:
        bandpo_lab.cli.main()
    assert ended.value.code == 2
    assert "error: the reward function failing_rewards.exiting ended the process" in capsys.readouterr().err


def fail_at(step, fail):
    """Return a method of the trainer that fails from a step on."""
    training_step = RunTrainer.training_step

    def failing(self, *arguments, **kwargs):
        if self.state.global_step >= step:
            fail(self)
        return training_step(self, *arguments, **kwargs)

    return failing


def exhaust_torch(_):
    torch.empty(10**15)


def exhaust_python(_):
    raise MemoryError


def exhaust_gpu(_):
    raise torch.OutOfMemoryError("a message of another version")


@pytest.mark.parametrize("exhaust", [exhaust_torch, exhaust_python, exhaust_gpu])
def test_exhausted_memory_is_said(exhaust, tmp_path, monkeypatch):
    monkeypatch.setattr(RunTrainer, "training_step", fail_at(3, exhaust))
    with pytest.raises(
        RunProblem, match=r"the memory is exhausted after step 3 .*; checkpoint-2 is whole"
    ) as caught:
        run_training(small(tmp_path))
    assert_one_sentence(caught.value)
    assert_checkpoint_is_whole(tmp_path, 2)


def spoil(trainer):
    with torch.no_grad():
        next(iter(trainer.model.parameters())).fill_(torch.nan)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (4, r"logp holds nan"),
        (5, r"probabilities are NaN or infinite after step 6, as the weight \S+ is"),
        (7, r"the weight \S+ is NaN or infinite after step 8, so checkpoint-8 is not written"),
    ],
    ids=("between the updates of a batch", "before a batch", "before a checkpoint"),
)
@pytest.mark.filterwarnings("ignore")
def test_weights_that_are_not_finite_replace_no_checkpoint(step, message, tmp_path, monkeypatch):
    training_step = RunTrainer.training_step

    def spoiling(self, *arguments, **kwargs):
        loss = training_step(self, *arguments, **kwargs)
        if self.state.global_step == step:
            spoil(self)
        return loss

    monkeypatch.setattr(RunTrainer, "training_step", spoiling)
    options = ["--max_steps=8", "--save_steps=4", "--watched=off"]
    with pytest.raises((RunProblem, InvalidValue, BandpoError), match=message) as caught:
        run_training(small(tmp_path, *options))
    assert_one_sentence(caught.value)
    assert_checkpoint_is_whole(tmp_path, 4)


FILES = ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth")


@pytest.mark.parametrize("name", FILES)
def test_a_disk_that_is_full_when_a_file_is_written_is_said(name, tmp_path, monkeypatch):
    """In the second checkpoint; /dev/full is a disk without room."""
    save = torch.save

    def onto_a_full_disk(content, file, *arguments, **kwargs):
        is_full = str(file).endswith(name) and "checkpoint-4" in str(file)
        return save(content, "/dev/full" if is_full else file, *arguments, **kwargs)

    monkeypatch.setattr(torch, "save", onto_a_full_disk)
    with pytest.raises(FileProblem, match=r"checkpoint-4 cannot be written: .*add --resume") as caught:
        run_training(small(tmp_path))
    assert_one_sentence(caught.value)
    assert_checkpoint_is_whole(tmp_path, 2)


def test_a_disk_that_is_full_when_the_tokenizer_is_written_is_said(tmp_path, monkeypatch):
    """Its library raises an Exception of no narrower type."""

    def onto_a_full_disk(*_, **__):
        raise Exception("No space left on device (os error 28)")

    monkeypatch.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", onto_a_full_disk)
    with pytest.raises(FileProblem, match=r"checkpoint-2 cannot be written: No space .*add --resume"):
        run_training(small(tmp_path))


def test_a_disk_that_is_full_when_the_model_is_written_is_said(tmp_path, monkeypatch):
    save = torch.save

    def onto_a_full_disk(content, file, *arguments, **kwargs):
        is_full = str(file).endswith("model/training_args.bin")
        return save(content, "/dev/full" if is_full else file, *arguments, **kwargs)

    monkeypatch.setattr(torch, "save", onto_a_full_disk)
    with pytest.raises(FileProblem, match=r"model cannot be written: .*add --resume"):
        run_training(small(tmp_path, "--max_steps=2"))
    assert_checkpoint_is_whole(tmp_path, 2)
    monkeypatch.undo()
    assert (train.run_training(small(tmp_path, "--max_steps=2", "--resume")).path / "report.html").is_file()
