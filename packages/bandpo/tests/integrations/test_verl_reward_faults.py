"""Faults of a reward function in a training with verl are said with the function, the number of answers and the step.

In a training with Ray they are tried in packages/bandpo-lab/tests/rehearsal/test_reward_faults.py.
"""

import asyncio
import math
import traceback
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from helpers.frameworks import needs

needs("verl")

import ray
from ray.exceptions import ActorDiedError, RayTaskError

from bandpo.core.errors import BandWarning, RunProblem
from bandpo.integrations.verl import rewards
from bandpo.integrations.verl.rewards import RewardWatch, take_faults, watch_scores

CONFIG = {"reward": {"custom_reward_function": {"path": "my_reward.py", "name": "grade"}}}
GRADE = "the reward function grade of my_reward.py"
EMPTY = "selected terminal groups with no materializable trajectories. Enable sync_refill_failed_groups"


def task_error(function):
    """Return the error with which Ray ends a call of a function that raises."""
    try:
        function()
    except Exception as error:
        return RayTaskError("compute_score", traceback.format_exc(), error).as_instanceof_cause()
    raise AssertionError


def raising():
    raise KeyError("answer")


def of_a_manager():
    """Score an answer with verl's manager and a function that returns a dictionary without a score."""
    from verl import DataProto
    from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager

    manager = object.__new__(NaiveRewardManager)
    manager.tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: "2")
    manager.compute_score = lambda **_: {"acc": 1.0}
    manager.is_async_reward_score = False
    manager.reward_router_address = None
    columns = {"data_source": "sums", "reward_model": {"ground_truth": "2"}, "extra_info": {}}
    data = DataProto.from_dict(
        {
            "responses": torch.ones(1, 2, dtype=torch.long),
            "attention_mask": torch.ones(1, 4, dtype=torch.long),
        },
        {name: np.array([value], dtype=object) for name, value in columns.items()},
    )

    async def score():
        manager.loop = asyncio.get_running_loop()
        await manager.run_single(data)

    asyncio.run(score())


def of_the_user():
    return {}["score"]


class AgentLoop:
    """An agent loop in this process, whose rewards are given."""

    def __init__(self, outcomes):
        self.outcomes = outcomes
        # What Ray gives each actor: a call of a function in its process.
        self.__ray_call__ = SimpleNamespace(remote=lambda function, *rest: function(self, *rest))

    async def _compute_score(self, outputs, kwargs):
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, float) and outcome < 0:
            await asyncio.sleep(-outcome)
        if isinstance(outcome, BaseException):
            raise outcome
        outputs[-1].reward_score = outcome

    async def answer(self, step, reward=None):
        output = SimpleNamespace(reward_score=reward)
        try:
            await self._compute_score([output], kwargs={"global_steps": step})
        except Exception as error:
            return error
        return output.reward_score


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    monkeypatch.setattr(ray, "get", lambda calls, timeout: calls)


class Trainer:
    """verl's trainer with one agent loop for each list of outcomes."""

    def __init__(self, *outcomes, handles=("worker",)):
        self.loops = [AgentLoop([*of_loop]) for of_loop in outcomes]
        self.agent_loop_manager = SimpleNamespace(agent_loop_workers=self.loops)
        self.handles = handles

    def get_reward_handles(self):
        return self.handles

    def generate(self, step=2):
        async def answers():
            tasks = [loop.answer(step) for loop in self.loops for _ in [*loop.outcomes]]
            return await asyncio.gather(*tasks)

        return asyncio.run(answers())


def said(watch, trainer, step=2):
    """Let a step generate and check, and return the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", BandWarning)
        with watch.watching(trainer):
            trainer.generate(step)
            watch.check()
    return [str(warning.message) for warning in caught]


def fail(watch, trainer, text):
    """Let a step generate and end with an error."""
    with watch.watching(trainer):
        trainer.generate()
        raise RuntimeError(text)


LATER = " (later ones of this kind are not printed)"
LEFT_OUT = "verl leaves them out"
FAULTS = {
    "raises": (task_error(raising), f"raised KeyError: 'answer' for 1 answer of step 2: {LEFT_OUT}"),
    "raises KeyError: 'score'": (
        task_error(of_the_user), f"raised KeyError: 'score' for 1 answer of step 2: {LEFT_OUT}"
    ),
    "no score": (
        lambda: task_error(of_a_manager),
        f"returned a dictionary without the entry 'score' for 1 answer of step 2: {LEFT_OUT}",
    ),
    "None": (None, "returned None in place of a number for 1 answer of step 2: verl cannot train on them"),
    "NaN": (math.nan, "returned nan for 1 answer of step 2: the advantages of their groups are not finite"),
    "infinite": (math.inf, "returned inf for 1 answer of step 2: the advantages of their groups are not finite"),
    "too large": (1e38, "returned 1e+38 for 1 answer of step 2: the advantages of their groups are not finite"),
    "a text": ("1.0", f"returned '1.0' in place of a number for 1 answer of step 2: {LEFT_OUT}"),
    "a list": ([1.0, 2.0], f"returned [1.0, 2.0] in place of a number for 1 answer of step 2: {LEFT_OUT}"),
    "a tensor": (torch.ones(2), f"returned tensor([1., 1.]) in place of a number for 1 answer of step 2: {LEFT_OUT}"),
    "ends the process": (
        ActorDiedError(),
        "ended its process (os._exit, or killed, as for want of memory) for 1 answer of step 2: verl leaves them out, "
        "starts no process in its place, and asks it for later answers too",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings(
    "ignore:Ray state API:DeprecationWarning"
)  # verl's, on importing its reward managers
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_said_once_with_the_step_and_the_number_of_answers(name):
    outcome, sentence = FAULTS[name]
    outcome = outcome() if callable(outcome) else outcome
    watch, trainer = RewardWatch(CONFIG, "warn"), Trainer([outcome, 1.0, 0.5])
    assert said(watch, trainer) == [f"{GRADE} {sentence}{LATER}"]
    trainer.loops[0].outcomes = [outcome]
    assert said(watch, trainer, step=3) == []


REWARDS = [0, 1, True, 0.5, np.float32(0.5), np.bool_(True), torch.tensor(1.0), torch.ones(1)]


def test_what_verl_takes_for_a_reward_is_none_of_them():
    assert said(RewardWatch(CONFIG, "warn"), Trainer(REWARDS)) == []


def test_the_faults_of_all_agent_loops_are_one_sentence():
    watch, trainer = (
        RewardWatch(CONFIG, "warn"),
        Trainer([task_error(raising)] * 3, [task_error(raising), 1.0]),
    )
    assert said(watch, trainer) == [
        f"{GRADE} raised KeyError: 'answer' for 4 answers of step 2: {LEFT_OUT}{LATER}"
    ]


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.filterwarnings("ignore:Ray state API:DeprecationWarning")
def test_a_fault_ends_a_run_that_is_to_stop_before_its_update(name):
    outcome, sentence = FAULTS[name]
    watch, trainer = RewardWatch(CONFIG, "stop"), Trainer([outcome() if callable(outcome) else outcome])
    with pytest.raises(RunProblem) as caught:
        said(watch, trainer)
    assert str(caught.value) == f"{GRADE} {sentence}"
    assert not hasattr(caught.value, "__notes__")


def test_the_error_of_a_step_without_answers_gets_the_cause():
    watch, trainer = RewardWatch(CONFIG, "warn"), Trainer([task_error(raising)] * 2)
    with pytest.raises(RuntimeError) as caught:
        fail(watch, trainer, EMPTY)
    assert str(caught.value) == EMPTY
    assert caught.value.__notes__ == [
        f"bandpo: {GRADE} raised KeyError: 'answer' for 2 answers of step 2: verl leaves them out; "
        "sync_refill_failed_groups=true would ask the same function again"
    ]


def test_an_error_of_another_step_gets_no_note():
    watch, trainer = RewardWatch(CONFIG, "warn"), Trainer([task_error(raising)])
    said(watch, trainer)
    with pytest.raises(RuntimeError) as caught:
        fail(watch, trainer, "disk full")
    assert not hasattr(caught.value, "__notes__")


def test_an_error_that_is_not_the_functions_is_not_counted():
    outcomes = [ValueError("of verl"), TimeoutError()]
    assert said(RewardWatch(CONFIG, "warn"), Trainer(outcomes)) == []


def test_a_reward_that_does_not_come_is_said_once_by_the_agent_loop(capfd, monkeypatch):
    monkeypatch.setattr(RewardWatch, "slow_after", 0.05)
    said(RewardWatch(CONFIG, "warn"), Trainer([-0.2, -0.2, 0.5]))
    assert capfd.readouterr().err.splitlines() == [
        f"bandpo: {GRADE} has not returned for 0.05 s at an answer of step 2; the training waits for it (later such "
        "waits are not printed)"
    ]


def test_rewards_that_the_loop_or_the_trainer_gives_are_not_watched():
    """An agent loop may have rewards of its own, and with a reward model on the same GPUs the trainer asks for them."""
    loop = AgentLoop([None])
    watch_scores(loop, GRADE, 300)
    assert asyncio.run(loop.answer(2, reward="own")) is None
    assert take_faults(loop) == []
    assert said(RewardWatch(CONFIG, "warn"), Trainer([None], handles=None)) == []


def test_an_agent_loop_that_has_died_does_not_hide_the_error_of_the_step(monkeypatch):
    watch, trainer = RewardWatch(CONFIG, "warn"), Trainer([1.0])
    said(watch, trainer)

    def get(calls, timeout):
        raise ActorDiedError

    monkeypatch.setattr(rewards.ray, "get", get)
    with pytest.raises(RuntimeError) as caught:
        fail(watch, trainer, "of the step")
    assert str(caught.value) == "of the step"
    assert not hasattr(caught.value, "__notes__")
