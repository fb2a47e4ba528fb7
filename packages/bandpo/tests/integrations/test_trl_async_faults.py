"""Faults of a reward function in the process in which TRL's asynchronous trainer scores completions.

TRL's own loop scores a group, and its own worker raises the error in the trainer. bandpo adds which function it was.
"""

import asyncio
import pickle
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from helpers.frameworks import needs

needs("trl")
pytest.importorskip("aiohttp")
from accelerate.state import PartialState

worker = pytest.importorskip("trl.experimental.async_grpo.async_rollout_worker")

from bandpo.integrations.trl.training_faults import WorkersReward, for_worker

NUMBER = 4
"""The number of completions of a group."""


def graded(completions, **_):
    return [float(number) for number in range(len(completions))]


def raising(completions, **_):
    raise KeyError("answer")


async def raising_later(completions, **_):
    await asyncio.sleep(0)
    raise KeyError("answer")


def of_none(completions, **_):
    return None


def of_text(completions, **_):
    return "x" * len(completions)


def of_a_number(completions, **_):
    return 1.0


def of_too_few(completions, **_):
    return [1.0]


def slow(completions, **_):
    time.sleep(0.2)
    return graded(completions)


def without_scores(completions, **_):
    return [None] * len(completions)


class Graded:
    """A reward function that is an object."""

    def __call__(self, completions, **_):
        return graded(completions)


def scored(*functions):
    """Let TRL's loop score a group in its process, of which the functions are copies, and return the samples."""
    PartialState()  # as the process of TRL's worker does, for its logger
    loop = worker._AsyncRolloutLoop.__new__(worker._AsyncRolloutLoop)
    loop.reward_funcs = [pickle.loads(pickle.dumps(function)) for function in functions]  # noqa: S301 - our own
    loop.reward_func_names = [worker.get_callable_name(function) for function in functions]
    loop._env_reward_types = []
    sequences = [[worker.TrainingSequence([1, 2], [0, 1], [0.0, -0.5], "0")] for _ in range(NUMBER)]
    group = worker.RolloutGroup(
        prompts=[[{"role": "user", "content": "1+1"}]] * NUMBER,
        reward_kwargs={},
        completions=[[{"role": "assistant", "content": "2"}]] * NUMBER,
        completions_ids=[[2]] * NUMBER,
        completions_sequences=sequences,
        tool_call_counts=[0] * NUMBER,
        tool_failure_counts=[0] * NUMBER,
        model_version=0,
        group_id=0,
        env_rewards=[],
        rollout_rewards=[None] * NUMBER,
    )
    samples = []

    async def score(stop_event):
        samples.extend(await loop._score_group(group))

    loop._loop = asyncio.new_event_loop()
    loop._stop_event = None
    loop._run_loops = score
    loop._exception_info_queue = queue.Queue(maxsize=1)
    loop._failed_event = threading.Event()
    loop._tool_pool = ThreadPoolExecutor(1)
    try:
        loop.run()
    except Exception:
        raise_in_trainer(loop)
    return samples


def raise_in_trainer(loop):
    """Raise the error of the loop as TRL does in the trainer."""
    controller = worker.AsyncRolloutWorker.__new__(worker.AsyncRolloutWorker)
    controller._failed_event = loop._failed_event
    controller._exception_info_queue = loop._exception_info_queue
    controller.check_health(60)


@pytest.mark.parametrize("function", [graded, Graded()])
def test_rewards_are_those_of_the_function(function, capfd):
    samples = scored(for_worker(function))
    assert [sample.metrics["reward"] for sample in samples] == [0.0, 1.0, 2.0, 3.0]
    name = worker.get_callable_name(function)
    assert all(f"rewards/{name}" in sample.metrics for sample in samples)
    assert "bandpo" not in capfd.readouterr().err


@pytest.mark.parametrize("function", [raising, raising_later])
def test_a_function_that_raises_is_named_in_the_trainer(function):
    with pytest.raises(RuntimeError, match="child has failed") as caught:
        scored(for_worker(graded), for_worker(function))
    text = str(caught.value.__cause__)
    assert text.startswith("KeyError: 'answer'\n")
    note = f"bandpo: the reward function {function.__name__} raised this KeyError in TRL's rollout worker"
    assert note in text.splitlines()


RETURNED = {of_none: "None", of_text: "'xxxx'", of_a_number: "1.0", of_too_few: "[1.0]"}
"""What a function returns in place of rewards."""


@pytest.mark.parametrize("function", RETURNED)
def test_what_is_no_reward_is_named_before_trl_raises(function, capfd):
    with pytest.raises(RuntimeError, match="child has failed"):
        scored(for_worker(function))
    line = (
        f"bandpo: the reward function {function.__name__} returned {RETURNED[function]} in TRL's rollout worker, and "
        f"not one number or None for each of the {NUMBER} completions"
    )
    assert line in capfd.readouterr().err.splitlines()


def test_a_function_that_does_not_return_is_named(capfd):
    scored(WorkersReward(slow, slow_after=0.05))
    assert (
        "bandpo: the reward function slow has not returned for 0.05 s in TRL's rollout worker; the training waits for "
        "it (later such waits are not printed)"
    ) in capfd.readouterr().err.splitlines()


def test_answers_without_a_score_are_for_the_check_of_the_trainer(capfd):
    """TRL gives them no advantage, and the trainer announces them, which knows the step."""
    samples = scored(for_worker(without_scores))
    assert all(sample.metrics["reward"] != sample.metrics["reward"] for sample in samples)
    assert "bandpo" not in capfd.readouterr().err
