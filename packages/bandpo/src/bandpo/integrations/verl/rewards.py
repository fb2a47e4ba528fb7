"""Faults of a reward function in a training with verl: what it did, for how many answers of which step.

verl's agent loops ask its reward workers for the reward of each answer. If that fails, verl prints a traceback for the
answer and goes on without it; if no answer is left, the trainer's error does not have the cause. So each agent loop
counts what failed, and the driver asks the loops in each step, before its update.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from bandpo._terminal import printable
from bandpo.core.errors import BandWarning, RunProblem
from bandpo.integrations._rewards import LARGEST_REWARD, say, shown

LEFT_OUT = "verl leaves them out"
MANAGERS = "/reward_loop/reward_manager/"
"""A part of the paths of verl's reward managers, which read the score of a dictionary that the function returned."""
REFILLS = "sync_refill_failed_groups"
"""The setting that verl's error names if no answer of a step has a reward."""


@dataclass
class Fault:
    """A fault of a reward function, for some answers of a step."""

    kind: str
    step: int
    deed: str
    consequence: str
    answers: int = 0


def fault_of_error(error: BaseException, step: int) -> Fault | None:
    """Return the fault of a reward function that ended with an error; None if the error is not the function's."""
    if isinstance(error, RayActorError):
        return Fault(
            "died",
            step,
            "ended its process (os._exit, or killed, as for want of memory)",
            f"{LEFT_OUT}, starts no process in its place, and asks it for later answers too",
        )
    if not isinstance(error, RayTaskError):
        return None
    cause = error.cause
    last_file = str(error).rpartition('File "')[2].partition('"')[0]
    if isinstance(cause, KeyError) and cause.args == ("score",) and MANAGERS in last_file:
        return Fault("dictionary", step, "returned a dictionary without the entry 'score'", LEFT_OUT)
    name = type(cause).__name__
    text = " ".join(str(cause).split())
    return Fault(name, step, f"raised {name}: {text if len(text) <= 200 else f'{text[:199]}…'}", LEFT_OUT)


def fault_of_reward(reward: Any, step: int) -> Fault | None:
    """Return the fault of a reward function that returned something; None if it is a reward.

    >>> fault_of_reward(0.5, 2)
    >>> fault_of_reward("right", 2).deed
    "returned 'right' in place of a number"
    """
    if reward is None:
        return Fault("none", step, "returned None in place of a number", "verl cannot train on them")
    no_number = Fault("type", step, f"returned {shown(reward)} in place of a number", LEFT_OUT)
    if isinstance(reward, str):
        return no_number
    try:
        number = float(reward)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError of a tensor with several elements
        return no_number
    if abs(number) <= LARGEST_REWARD:
        return None
    return Fault("size", step, f"returned {number:g}", "the advantages of their groups are not finite")


# In an agent loop -----------------------------------------------------------------------------------------------------


class ScoreWatch:
    """The faults of the rewards that an agent loop of verl asks for.

    Args:
        function: The name of the reward function.
        slow_after: The time in seconds after which a line says that a reward has not come; once.
    """

    def __init__(self, function: str, slow_after: float) -> None:
        self.function = function
        self.slow_after = slow_after
        self._has_said_slow = False
        self._faults: dict[tuple[str, int], Fault] = {}

    async def score(
        self,
        verls_method: Callable[..., Awaitable[None]],
        outputs: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Compute the reward of an answer as verl does, and count what fails.

        Args:
            verls_method: verl's ``AgentLoopWorker._compute_score``.
            outputs: The parts of the answer; the last one gets the reward.
            kwargs: The columns of the prompt.
        """
        if outputs[-1].reward_score is not None:  # of an agent loop with rewards of its own
            await verls_method(outputs, kwargs=kwargs)
            return
        step = int(kwargs.get("global_steps", 0))
        timer = asyncio.get_running_loop().call_later(self.slow_after, self._say_slow, step)
        try:
            await verls_method(outputs, kwargs=kwargs)
        except Exception as error:
            self._count(fault_of_error(error, step))
            raise
        finally:
            timer.cancel()
        self._count(fault_of_reward(outputs[-1].reward_score, step))

    def _count(self, fault: Fault | None) -> None:
        if fault is not None:
            self._faults.setdefault((fault.kind, fault.step), fault).answers += 1

    def _say_slow(self, step: int) -> None:
        if not self._has_said_slow:
            self._has_said_slow = True
            say(
                f"{self.function} has not returned for {self.slow_after:g} s at an answer of step {step}; the training "
                "waits for it (later such waits are not printed)"
            )

    def take(self) -> list[Fault]:
        """Return the faults since the last call."""
        faults = [*self._faults.values()]
        self._faults.clear()
        return faults


def watch_scores(worker: Any, function: str, slow_after: float) -> None:
    """Watch the rewards that an agent loop asks for; called in its process.

    Args:
        worker: verl's ``AgentLoopWorker``.
        function: As for `ScoreWatch`.
        slow_after: As for `ScoreWatch`.
    """
    verls_method = worker._compute_score
    watch = ScoreWatch(function, slow_after)

    async def compute_score(outputs: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        await watch.score(verls_method, outputs, kwargs)

    worker._compute_score = compute_score
    worker.bandpo_watch = watch


def take_faults(worker: Any) -> list[Fault]:
    """Return the faults of an agent loop since the last call; called in its process."""
    return worker.bandpo_watch.take()


# In the driver --------------------------------------------------------------------------------------------------------


class RewardWatch:
    """The driver's reports on the faults in its agent loops.

    Args:
        config: The run's config.
        reaction: ``warn`` to print each kind of fault once, or ``stop`` to end the run.
    """

    slow_after = 300.0
    """The time in seconds after which a line says that a reward has not come."""

    def __init__(self, config: Mapping[str, Any], reaction: str) -> None:
        self._function = function_of(config)
        self._reaction = reaction
        self._workers: Sequence[Any] = ()
        self._lines: list[str] = []
        self._printed: set[str] = set()

    @contextmanager
    def watching(self, trainer: Any) -> Generator[None, None, None]:
        """Add the faults of a step to an error of the block, which makes the step.

        Args:
            trainer: verl's ``PPOTrainer``.
        """
        self._lines = []
        workers = getattr(trainer.agent_loop_manager, "agent_loop_workers", ())
        # With a reward model beside the policy the trainer computes the rewards itself.
        if not self._workers and workers and trainer.get_reward_handles() is not None:
            self._workers = workers
            self._ask(watch_scores, self._function, self.slow_after)
        try:
            yield
        except Exception as error:
            self._take()
            advice = f"; {REFILLS}=true would ask the same function again" if REFILLS in str(error) else ""
            for line in self._lines:
                if line != str(error):
                    error.add_note(f"bandpo: {line}{advice}")
            raise

    def check(self) -> None:
        """Say which answers have no reward, before an update on the others.

        Raises:
            RunProblem: there is one, and the run is to stop then.
        """
        for fault in self._take():
            line = self._sentence(fault)
            if self._reaction == "stop":
                raise RunProblem(line)
            if fault.kind not in self._printed:
                self._printed.add(fault.kind)
                warnings.warn(f"{line} (later ones of this kind are not printed)", BandWarning, stacklevel=2)

    def _take(self) -> list[Fault]:
        """Return the faults since the last call, those of one kind and step as one."""
        faults: dict[tuple[str, int], Fault] = {}
        for fault in chain.from_iterable(self._ask(take_faults)):
            known = faults.setdefault((fault.kind, fault.step), fault)
            if known is not fault:
                known.answers += fault.answers
        self._lines += [self._sentence(fault) for fault in faults.values()]
        return [*faults.values()]

    def _sentence(self, fault: Fault) -> str:
        answers = "1 answer" if fault.answers == 1 else f"{fault.answers} answers"
        return printable(
            f"{self._function} {fault.deed} for {answers} of step {fault.step}: {fault.consequence}"
        )

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a function in the process of each agent loop that answers."""
        calls = [worker.__ray_call__.remote(function, *arguments) for worker in self._workers]
        try:
            return ray.get(calls, timeout=60)
        except RayError:  # the error of the step says that an agent loop has died
            return []


def function_of(config: Mapping[str, Any]) -> str:
    """Return the name of a run's reward function.

    >>> function_of({"reward": {"custom_reward_function": {"path": "my.py", "name": "grade"}}})
    'the reward function grade of my.py'
    >>> function_of({"reward": {"reward_manager": {"name": "dapo"}}})
    "verl's reward function (of the reward manager dapo)"
    """
    reward = config.get("reward") or {}
    function = reward.get("custom_reward_function") or {}
    if function.get("path"):
        return f"the reward function {function.get('name')} of {function['path']}"
    manager = (reward.get("reward_manager") or {}).get("name")
    return f"verl's reward function (of the reward manager {manager})"
