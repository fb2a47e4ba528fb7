"""`bandpo.watch.Watch` in stock trainers of TRL and transformers."""

import json
import logging
import warnings

import pytest
import torch

from helpers.frameworks import needs

needs("trl")

from test_trl import SETTINGS, make, varied_reward
from transformers import AutoTokenizer, Trainer, TrainerCallback, TrainingArguments
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

import bandpo
from bandpo.core.errors import BandWarning
from bandpo.integrations.trl import AuditedGRPOTrainer, BandGRPOConfig, BandGRPOTrainer
from bandpo.watch.trainer_callback import STATE, setup_of_arguments
from bandpo_lab.tasks import multiplication
from processes import run_on_processes
from rlvet.runs.setup import Setup

LOGGED = {"logging_strategy": "steps", "logging_steps": 1, "per_device_train_batch_size": 8}


@pytest.fixture
def folder():
    return multiplication.base_model_path()


def trainer_of(
    folder,
    output,
    *callbacks,
    cls=GRPOTrainer,
    config=GRPOConfig,
    reward=varied_reward,
    evaluated=None,
    **settings,
):
    """Return a trainer of a tiny model whose log has a row for each step."""
    settings = (
        SETTINGS | LOGGED | {"steps_per_generation": 1, "num_iterations": 1, "max_steps": 24} | settings
    )
    return cls(
        model=str(folder),
        reward_funcs=reward,
        args=config(str(output), **settings),
        train_dataset=multiplication.dataset("train", 64),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
        callbacks=list(callbacks),
        eval_dataset=evaluated,
    )


def announced_by(trainer, **arguments):
    """Train, and return the warnings of faults."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", BandWarning)
        trainer.train(**arguments)
    return [str(warning.message) for warning in caught if warning.category is BandWarning]


def constant_reward(completions, **_):
    return [0.25] * len(completions)


def test_a_healthy_run_has_no_fault(folder, tmp_path):
    watch = bandpo.watch.Watch(every=2, stop_on="fix")
    trainer = trainer_of(folder, tmp_path, watch, learning_rate=1e-5)
    assert announced_by(trainer) == []
    assert trainer.state.global_step == 24
    assert not {"stop", "fix"} & set(watch.run_watch.announced.values())


def test_equal_rewards_are_announced_once_with_their_onset(folder, tmp_path):
    """After 500 answers, 8 a step, and not before."""
    steps = []

    class Steps(TrainerCallback):
        def on_log(self, args, state, control, **_):
            if "reward-flat" in watch.run_watch.announced:
                steps.append(state.global_step)

    watch = bandpo.watch.Watch(every=1)
    trainer = trainer_of(folder, tmp_path, watch, Steps(), reward=constant_reward, max_steps=70)
    texts = [text for text in announced_by(trainer) if text.startswith("reward-flat")]
    assert len(texts) == 1
    assert "the reward is 0.25 in every one of the last" in texts[0]
    assert "(stop, since step 1)" in texts[0]
    assert 63 <= steps[0] <= 67  # a log of 63 rows is checked when it has grown by a twentieth
    assert trainer.state.global_step == 70  # nothing stops without stop_on


def test_a_learning_rate_far_too_high(folder, tmp_path):
    watch = bandpo.watch.Watch(every=2)
    trainer = trainer_of(
        folder, tmp_path, watch, learning_rate=3.0, beta=0.1, max_steps=40, max_grad_norm=1e9
    )
    texts = announced_by(trainer)
    codes = [text.partition(":")[0] for text in texts]
    assert "step-too-large" in codes or "nan" in codes or "kl-drift" in codes
    assert len(codes) == len(set(codes))
    assert any("learning_rate" in text for text in texts)


@pytest.mark.parametrize("strategy", ["no", "steps"])
@pytest.mark.filterwarnings("ignore::bandpo.core.errors.BandWarning")
def test_stop_on_ends_the_run_with_a_checkpoint(strategy, folder, tmp_path, caplog):
    watch = bandpo.watch.Watch(every=2, stop_on="fix")
    trainer = trainer_of(
        folder,
        tmp_path,
        watch,
        learning_rate=3.0,
        beta=0.1,
        max_steps=60,
        max_grad_norm=1e9,
        save_strategy=strategy,
        save_steps=1000,
    )
    with caplog.at_level(logging.WARNING, "bandpo"):
        trainer.train()
    end = trainer.state.global_step
    assert 10 <= end < 60
    (line,) = [message for message in caplog.messages if "training ends" in message]
    assert f"training ends at step {end}" in line
    assert "as stop_on='fix' asks for, because of" in line
    saved = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    if strategy == "no":
        assert saved == []
        assert "no checkpoint is saved, as save_strategy='no'" in line
    else:
        assert saved == [f"checkpoint-{end}"]
        state = json.loads((tmp_path / saved[0] / "trainer_state.json").read_text())
        assert state["stateful_callbacks"][STATE]["attributes"].keys() == watch.run_watch.announced.keys()


class NaNs(TrainerCallback):
    """Puts a loss into the log that is not finite, as of the third step."""

    def on_log(self, args, state, control, **_):
        if state.global_step >= 3:
            state.log_history[-1]["loss"] = float("nan")


def test_a_resumed_run_announces_nothing_again(folder, tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 4, "learning_rate": 1e-5}
    first = trainer_of(folder, tmp_path, NaNs(), bandpo.watch.Watch(), max_steps=8, **settings)
    (text,) = announced_by(first)
    assert text.startswith("nan: ")
    assert "(stop, since step 3)" in text

    watch = bandpo.watch.Watch(every=1)
    again = trainer_of(folder, tmp_path, NaNs(), watch, max_steps=12, **settings)
    assert announced_by(again, resume_from_checkpoint=str(tmp_path / "checkpoint-8")) == []
    assert watch.run_watch.announced["nan"] == "stop"

    # A checkpoint from before the fault knows nothing of it.
    state = tmp_path / "checkpoint-8" / "trainer_state.json"
    content = json.loads(state.read_text())
    del content["stateful_callbacks"][STATE]
    state.write_text(json.dumps(content))
    unknown = trainer_of(folder, tmp_path, NaNs(), bandpo.watch.Watch(every=1), max_steps=12, **settings)
    (text,) = announced_by(unknown, resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert "(stop, since step 3)" in text  # the whole history is judged


def test_evaluations_and_the_last_summary_are_read_as_the_log_reader_reads_them(folder, tmp_path):
    watch = bandpo.watch.Watch(every=1, stop_on="fix")
    settings = {"max_steps": 12, "eval_strategy": "steps", "eval_steps": 4, "per_device_eval_batch_size": 8}
    evaluated = multiplication.dataset("train", 8)
    trainer = trainer_of(folder, tmp_path, watch, evaluated=evaluated, learning_rate=1e-5, **settings)
    assert announced_by(trainer) == []
    history = trainer.state.log_history
    assert any("eval_reward" in row for row in history)
    assert "train_runtime" in history[-1]


def test_another_trainer_of_trl(folder, tmp_path):
    watch = bandpo.watch.Watch(every=1)
    trainer = trainer_of(
        folder, tmp_path, watch, NaNs(), cls=RLOOTrainer, config=RLOOConfig, max_steps=6, learning_rate=1e-5
    )
    texts = announced_by(trainer)
    assert [text.partition(":")[0] for text in texts] == ["nan"]
    assert setup_of_arguments(trainer.args).framework == "trl"


def test_a_trainer_without_rewards_is_left_alone(tmp_path):
    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, row):
            return {"x": torch.ones(1), "labels": torch.zeros(1)}

    class Line(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.line = torch.nn.Linear(1, 1)

        def forward(self, x, labels):
            return {"loss": ((self.line(x) - labels) ** 2).mean()}

    args = TrainingArguments(
        str(tmp_path), use_cpu=True, report_to="none", logging_steps=1, max_steps=20, save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    assert setup_of_arguments(args) == Setup()
    trainer = Trainer(
        Line(), args, train_dataset=Rows(), callbacks=[bandpo.watch.Watch(every=1, stop_on="fix")]
    )
    assert announced_by(trainer) == []
    assert trainer.state.global_step == 20


def test_the_configuration_is_known(tmp_path):
    args = GRPOConfig(str(tmp_path), **SETTINGS | {"epsilon": 0.1, "epsilon_high": 0.3})
    assert str(setup_of_arguments(args)) == "trl, FixedClip(0.1, 0.3) per token, updates on each batch: 4"
    ours = BandGRPOConfig(str(tmp_path), method="GSPO()", **SETTINGS)
    assert setup_of_arguments(ours).method == ours.method


def test_an_audited_trainer_watches_by_the_same_callback(tmp_path):
    def watches(trainer):
        return [
            callback
            for callback in trainer.callback_handler.callbacks
            if isinstance(callback, bandpo.watch.Watch)
        ]

    trainer = make(BandGRPOTrainer, BandGRPOConfig, tmp_path)
    assert watches(trainer) == [trainer._watch]
    assert watches(make(BandGRPOTrainer, BandGRPOConfig, tmp_path, watched="off")) == []
    with pytest.raises(ValueError, match="watched must be 'warn', 'stop' or 'off', got 'scream'"):
        make(BandGRPOTrainer, BandGRPOConfig, tmp_path, watched="scream")

    class WithWatch(AuditedGRPOTrainer):
        def __init__(self, *arguments, **named):
            super().__init__(*arguments, callbacks=[watch], **named)

    watch = bandpo.watch.Watch(every=3)
    audited = make(WithWatch, GRPOConfig, tmp_path)
    assert watches(audited) == [watch] == [audited._watch]
    WithWatch.watched = "stop"
    with pytest.raises(
        ValueError, match=r"watched='stop' contradicts the bandpo\.watch\.Watch among the callbacks"
    ):
        make(WithWatch, GRPOConfig, tmp_path)


TWO_PROCESSES = """
import sys, warnings
from pathlib import Path
from test_trl_watch import NaNs, trainer_of
from bandpo_lab.tasks import multiplication
import bandpo
from bandpo.core.errors import BandWarning
folder = Path(sys.argv[1])
watch = bandpo.watch.Watch(every=1, stop_on="stop")
settings = {"learning_rate": 1e-5, "max_steps": 12, "save_strategy": "steps", "save_steps": 1000}
trainer = trainer_of(multiplication.base_model_path(), folder / "out", NaNs(), watch, **settings)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always", BandWarning)
    trainer.train()
texts = [str(w.message) for w in caught if w.category is BandWarning]
is_main = trainer.accelerator.process_index == 0
assert len(texts) == is_main, texts
assert trainer.state.global_step == 4, trainer.state.global_step
assert (folder / "out" / "checkpoint-4").is_dir()
"""


@pytest.mark.slow
def test_two_processes_end_together_and_one_speaks(tmp_path):
    run_on_processes(TWO_PROCESSES, tmp_path)
