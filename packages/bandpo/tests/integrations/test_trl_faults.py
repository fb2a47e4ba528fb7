"""Faults of a training with TRL: what failed and after which step is said, and the run goes on from its checkpoint.

TRL, torch or Python raise the error of most of them. bandpo adds a note with what they do not say.
"""

import asyncio
import math
import os
import re
import time
import traceback
import warnings

import pytest
import torch

from helpers.frameworks import needs

needs("trl")

from test_trl import SETTINGS, varied_reward
from transformers import AutoTokenizer, TrainerCallback

from bandpo.core.errors import BandWarning, InvalidValue
from bandpo.integrations.trl import BandGRPOConfig, BandGRPOTrainer
from bandpo_lab.tasks import multiplication
from rlvet.records.record import read_record

SAVED = {
    "save_strategy": "steps",
    "save_steps": 4,
    "logging_strategy": "steps",
    "logging_steps": 1,
    "max_steps": 12,
}
"""A batch serves four steps, so that the second one is scored after step 4, at which a checkpoint was saved."""


def trainer_of(folder, reward=varied_reward, callbacks=(), rollout_func=None, **settings):
    path = multiplication.base_model_path()
    return BandGRPOTrainer(
        model=str(path),
        reward_funcs=reward,
        args=BandGRPOConfig(
            str(folder / "run"), **SETTINGS | SAVED | {"record": str(folder / "record")} | settings
        ),
        train_dataset=multiplication.dataset("train", 64),
        processing_class=AutoTokenizer.from_pretrained(path, padding_side="left"),
        callbacks=[*callbacks],
        **({} if rollout_func is None else {"rollout_func": rollout_func}),
    )


def after_one_batch(failure):
    """Return a reward function that fails in the second batch."""
    calls = []

    def graded(completions, **_):
        calls.append(None)
        return varied_reward(completions) if len(calls) == 1 else failure(completions)

    return graded


def asynchronous(function):
    async def graded(**columns):
        await asyncio.sleep(0)
        return function(**columns)

    return graded


FORMS = [
    pytest.param(lambda function: function, id="function"),
    pytest.param(asynchronous, id="coroutine", marks=pytest.mark.slow),
]


def raising(_):
    raise KeyError("answer")


def ending(_):
    raise SystemExit(0)


def text_of(error):
    """Return what Python prints about an error, without the lines of its traceback."""
    return "".join(traceback.format_exception_only(error))


def assert_goes_on(folder, **settings):
    """Resume from the checkpoint before the fault, and compare the end with that of an undisturbed run."""
    assert {batch.step for batch in read_record(folder / "record")} >= {0, 1, 2, 3}
    resumed = trainer_of(folder, **settings)
    resumed.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-4"))
    whole = trainer_of(folder / "whole", **settings)
    whole.train()
    weights = zip(resumed.model.parameters(), whole.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in weights)


RETURNED = {
    "None": (lambda _: None, TypeError, "None"),
    "a text": (lambda completions: "x" * len(completions), ValueError, "'x{16}'"),
    "texts": (lambda completions: ["1"] * len(completions), ValueError, r"\['1', .*"),
    "a number": (lambda _: 1.0, TypeError, "1.0"),
    "too few": (lambda _: [1.0], ValueError, r"\[1.0\]"),
}
"""What a reward function may return in place of rewards, the error of TRL or torch, and the value in our note."""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", RETURNED)
@pytest.mark.filterwarnings("ignore::bandpo.core.errors.BandWarning")
def test_what_is_no_reward_is_named(name, form, tmp_path):
    failure, kind, shown = RETURNED[name]
    trainer = trainer_of(tmp_path, form(after_one_batch(failure)))
    with pytest.raises(kind) as caught:
        trainer.train()
    pattern = (
        rf"^bandpo: the reward function graded returned {shown} after step 4, and not one number or None for each of "
        r"the 16 completions$"
    )
    (note,) = caught.value.__notes__
    assert re.search(pattern, note), note


@pytest.mark.parametrize("form", FORMS)
def test_an_error_of_a_reward_function_keeps_its_kind_and_the_run_goes_on(form, tmp_path):
    trainer = trainer_of(tmp_path, form(after_one_batch(raising)))
    functions = trainer.reward_funcs
    with pytest.raises(KeyError, match="answer") as caught:
        trainer.train()
    assert text_of(caught.value) == (
        "KeyError: 'answer'\nbandpo: the reward function graded raised this KeyError after step 4\n"
    )
    assert trainer.reward_funcs is functions
    assert_goes_on(tmp_path)


def test_a_reward_function_that_ends_the_process_is_named(tmp_path, capfd):
    with pytest.raises(SystemExit):
        trainer_of(tmp_path, after_one_batch(ending)).train()
    line = "bandpo: the reward function graded ended the process after step 4 (SystemExit 0); it must return its "
    assert f"{line}results" in capfd.readouterr().err.splitlines()


@pytest.mark.slow
def test_a_process_that_ends_at_once_loses_no_recorded_loss(tmp_path):
    """Nothing can be said then: os._exit runs no more of Python."""
    trainer = trainer_of(tmp_path, after_one_batch(lambda _: os._exit(3)))
    child = os.fork()
    if child == 0:
        trainer.train()
        os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert_goes_on(tmp_path)


def test_a_reward_function_that_does_not_return_is_named_once(tmp_path, capfd):
    def hanging(completions, **_):
        time.sleep(0.2)
        return varied_reward(completions)

    trainer = trainer_of(tmp_path, hanging, max_steps=8)
    trainer._user_functions.slow_after = 0.05
    trainer.train()
    lines = [line for line in capfd.readouterr().err.splitlines() if "has not returned" in line]
    assert lines == [
        "bandpo: the reward function hanging has not returned for 0.05 s after step 0; the training waits for it "
        "(later such waits are not printed)"
    ]


def test_an_interruption_is_no_fault_of_the_function(tmp_path, capfd):
    def interrupted(_):
        raise KeyboardInterrupt  # what Python makes of Ctrl-C; a job in the background ignores the signal

    with pytest.raises(KeyboardInterrupt) as caught:
        trainer_of(tmp_path, after_one_batch(interrupted)).train()
    assert not hasattr(caught.value, "__notes__")
    assert "graded" not in capfd.readouterr().err


UNUSABLE = {
    "None for all": (
        lambda completions: [None] * len(completions),
        "every reward after step 4 is NaN or None, so there is nothing to learn from: see the reward function graded",
    ),
    "NaN for all": (
        lambda completions: [math.nan] * len(completions),
        "every reward after step 4 is NaN or None, so there is nothing to learn from: see the reward function graded",
    ),
    "infinite": (
        lambda completions: [math.inf, *varied_reward(completions)[1:]],
        "the reward function graded returned inf for 1 of 16 answers after step 4",
    ),
    "too large": (
        lambda completions: [1e38, *varied_reward(completions)[1:]],
        "the reward function graded returned 1e+38 for 1 of 16 answers after step 4",
    ),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_rewards_from_which_nothing_can_be_learnt_are_announced_once(name, tmp_path):
    failure, message = UNUSABLE[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", BandWarning)
        trainer_of(tmp_path, after_one_batch(failure)).train()
    texts = [str(warning.message) for warning in caught]
    assert len([text for text in texts if text.startswith(message)]) == 1, texts


@pytest.mark.slow
@pytest.mark.parametrize("name", UNUSABLE)
def test_rewards_from_which_nothing_can_be_learnt_stop_a_watched_run(name, tmp_path):
    failure, message = UNUSABLE[name]
    with pytest.raises(RuntimeError, match=message.replace("+", r"\+")):
        trainer_of(tmp_path, after_one_batch(failure), watched="stop").train()


@pytest.mark.filterwarnings("ignore::bandpo.core.errors.BandWarning")
def test_a_part_without_rewards_is_said_once(tmp_path, capfd):
    def one_without(completions):
        return [math.nan, *varied_reward(completions)[1:]]

    trainer_of(tmp_path, after_one_batch(one_without)).train()
    lines = [line for line in capfd.readouterr().err.splitlines() if "no reward" in line]
    assert lines == [
        "bandpo: 1 of 16 answers after step 4 has no reward: graded returned NaN or None for it (later ones are not "
        "printed)"
    ]


class Spoiling(TrainerCallback):
    """Changes the weights after a step."""

    def __init__(self, change, step):
        self.change, self.step = change, step

    def on_step_end(self, args, state, control, model=None, **_):
        if state.global_step == self.step:
            with torch.no_grad():
                self.change(model)


def scale(factor):
    def change(model):
        for parameter in model.parameters():
            parameter.mul_(factor)

    return change


def spoil_one(value):
    def change(model):
        model.get_parameter("model.norm.weight")[0] = value

    return change


WEIGHTS = {
    "NaN": (5, spoil_one(math.nan), {}, "After step 5, the weight model.norm.weight is NaN or infinite"),
    "infinite": (5, spoil_one(math.inf), {}, "After step 5, the weight model.norm.weight is NaN or infinite"),
    "times 1e20": (
        5, scale(1e20), {}, r"After step 5, all weights are finite, the largest is \S+e\+20 in \S+, so the model "
        "overflows in float32",
    ),
    "float16": (
        3, scale(300.0), {"model_init_kwargs": {"dtype": "float16"}, "optim": "sgd", "learning_rate": 1e-6},
        "After step 3, all weights are finite, the "
        r"largest is \S+ in \S+, so the model overflows in float16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.filterwarnings("ignore")
def test_weights_that_give_no_probabilities_are_named(name, tmp_path):
    step, change, settings, message = WEIGHTS[name]
    trainer = trainer_of(tmp_path, callbacks=[Spoiling(change, step)], **settings)
    with pytest.raises(InvalidValue, match=f"^logp holds nan, .*{message}$"):
        trainer.train()
    if step > 4:
        assert_goes_on(tmp_path, **settings)


@pytest.mark.filterwarnings("ignore")
def test_weights_that_cannot_sample_are_named(tmp_path):
    """Between two batches torch refuses the probabilities."""
    trainer = trainer_of(tmp_path, callbacks=[Spoiling(spoil_one(math.nan), 8)])
    with pytest.raises(RuntimeError, match="probability tensor contains") as caught:
        trainer.train()
    assert "bandpo: after step 8, the weight model.norm.weight is NaN or infinite" in caught.value.__notes__


def rollout(empty):
    """Return a rollout function whose completions are empty in the second batch."""
    calls = []

    def answering(prompts, trainer):
        tokenizer = trainer.processing_class
        calls.append(None)
        ids = [tokenizer.convert_tokens_to_ids(list(f"|{k % 7}{k % 5}")) for k in range(len(prompts))]
        if len(calls) > 1:
            ids = [[] if empty(k) else row for k, row in enumerate(ids)]
        return {
            "prompt_ids": [tokenizer(prompt)["input_ids"] for prompt in prompts],
            "completion_ids": ids,
            "logprobs": [[math.log(0.5)] * len(row) for row in ids],
        }

    return answering


@pytest.mark.parametrize(
    ("empty", "count"), [(lambda _: True, "16 of 16"), (lambda k: k == 3, "1 of 16")], ids=["all", "one"]
)
@pytest.mark.filterwarnings("ignore::bandpo.core.errors.BandWarning")
def test_empty_completions_are_counted(empty, count, tmp_path):
    with pytest.raises(IndexError) as caught:
        trainer_of(tmp_path, rollout_func=rollout(empty)).train()
    (note,) = caught.value.__notes__
    assert note.startswith(
        f"bandpo: the rollout function answering returned no token for {count} completions after step 4, the first is"
    )


@pytest.mark.filterwarnings("ignore::bandpo.core.errors.BandWarning")
def test_a_disk_that_is_full_at_a_checkpoint_leaves_the_one_before(tmp_path, monkeypatch):
    save = torch.save

    def onto_a_full_disk(content, file, *arguments, **named):
        is_full = str(file).endswith("optimizer.pt") and "checkpoint-8" in str(file)
        return save(content, "/dev/full" if is_full else file, *arguments, **named)

    monkeypatch.setattr(torch, "save", onto_a_full_disk)
    with pytest.raises(RuntimeError) as caught:
        trainer_of(tmp_path).train()
    run = tmp_path / "run"
    assert caught.value.__notes__ == [
        f"bandpo: {run}/checkpoint-8 is incomplete, so remove it; resume_from_checkpoint='{run}/checkpoint-4' goes on "
        "from the one before"
    ]
    monkeypatch.undo()
    assert_goes_on(tmp_path)
