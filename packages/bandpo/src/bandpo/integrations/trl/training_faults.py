"""What is known of a fault that ends a training with TRL: the function of the user, the weight, or the checkpoint.

TRL and torch raise the error. What they do not say is added to it as a note, which Python prints below the traceback,
so the kind of the error and its text stay as they are.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from bandpo.core.errors import InvalidValue
from bandpo.integrations._rewards import LARGEST_REWARD, say, shown

if TYPE_CHECKING:
    from torch import Tensor

NOT_FINITE = "probability tensor contains"
"""A part of the error message of torch if it is to sample with a probability that is NaN or infinite."""


# Weights --------------------------------------------------------------------------------------------------------------


def first_parameter_not_finite(model: Any) -> str | None:
    """Return the name of the first parameter with a NaN or an infinite value on this process; None if there is none."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            if not torch.isfinite(local).all():
                return name
    return None


def describe_weights(model: Any) -> str:
    """Return whether a weight is NaN or infinite and, if none is, the largest one."""
    name = first_parameter_not_finite(model)
    if name is not None:
        return f"the weight {name} is NaN or infinite"
    sizes: dict[str, float] = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            if local.numel():
                sizes[name] = local.abs().max().item()
    largest = max(sizes, key=sizes.__getitem__)
    kinds = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()})
    return (
        f"all weights are finite, the largest is {sizes[largest]:.3g} in {largest}, so the model overflows in "
        f"{' and '.join(kinds)}"
    )


@contextmanager
def naming_weights(model: Any, logp: Tensor, step: int) -> Generator[None, None, None]:
    """Say in an error about log-probabilities that are not finite which weight is not, and after which step.

    Args:
        model: The model that computed them.
        logp: The log-probabilities of the loss.
        step: The number of optimiser steps so far.

    Raises:
        ValueError: the block raises one.
    """
    try:
        yield
    except InvalidValue as error:
        if torch.isfinite(logp).all():
            raise
        raise InvalidValue(f"{error}. After step {step}, {describe_weights(model)}") from error


# Rewards --------------------------------------------------------------------------------------------------------------


class UserFunctions:
    """The functions of the user that a training calls: which one failed, after which step, and which does not return.

    Args:
        slow_after: The time in seconds after which a line says that a function has not returned; once for each.
    """

    def __init__(self, slow_after: float = 300.0) -> None:
        self.slow_after = slow_after
        self._said: set[str] = set()
        self._notes: list[str] = []

    @property
    def notes(self) -> list[str]:
        """The notes on the functions that failed."""
        return self._notes

    @contextmanager
    def watching(self, trainer: Any) -> Generator[None, None, None]:
        """Name the function and the step in an error of the block, which generates and scores a batch.

        Args:
            trainer: A `GRPOTrainer`, whose functions are wrapped in the block.
        """
        when = f"after step {trainer.state.global_step}"
        self._notes = []
        before = trainer.reward_funcs, trainer.rollout_func
        trainer.reward_funcs = [
            function if isinstance(function, torch.nn.Module) else self.watched(function, name, when)
            for function, name in zip(before[0], trainer.reward_func_names, strict=True)
        ]
        if before[1] is not None:
            trainer.rollout_func = self._watched_rollout(before[1], when)
        try:
            yield
        except Exception as error:
            if NOT_FINITE in str(error):
                self._notes.append(f"{when}, {describe_weights(trainer.model)}")
            for note in self._notes:
                error.add_note(f"bandpo: {note}")
            raise
        finally:
            trainer.reward_funcs, trainer.rollout_func = before

    def watched(self, function: Callable[..., Any], name: str, when: str) -> Callable[..., Any]:
        """Return a reward function whose failures are noted.

        Args:
            function: The function.
            name: Its name.
            when: When or where it is called, such as ``after step 4``.
        """
        where = f"the reward function {name}"

        def check(rewards: Any, columns: Any) -> None:
            number = len(columns.get("completions", ()))
            if not _are_rewards(rewards, number):
                self._notes.append(
                    f"{where} returned {shown(rewards)} {when}, and not one number or None for each of "
                    f"the {number} completions"
                )

        if _is_async(function):

            async def awaited(*arguments: Any, **columns: Any) -> Any:
                with self._calling(where, when):
                    rewards = await function(*arguments, **columns)
                check(rewards, columns)
                return rewards

            return functools.update_wrapper(awaited, function)

        def called(*arguments: Any, **columns: Any) -> Any:
            with self._calling(where, when):
                rewards = function(*arguments, **columns)
            check(rewards, columns)
            return rewards

        return functools.update_wrapper(called, function)

    def _watched_rollout(self, function: Callable[..., Any], when: str) -> Callable[..., Any]:
        """Return a rollout function whose failures and empty completions are noted."""
        where = f"the rollout function {name_of(function)}"

        def watched(*arguments: Any, **named: Any) -> Any:
            with self._calling(where, when):
                rollout = function(*arguments, **named)
            completions = rollout.get("completion_ids", ()) if isinstance(rollout, dict) else ()
            empty = [index for index, ids in enumerate(completions) if not len(ids)]
            if empty:
                self._notes.append(
                    f"{where} returned no token for {len(empty)} of {len(completions)} completions {when}, "
                    f"the first is number {empty[0]}; a completion has at least the token that ends it"
                )
            return rollout

        return functools.update_wrapper(watched, function)

    @contextmanager
    def _calling(self, where: str, when: str) -> Generator[None, None, None]:
        """Say if a function ends the process or takes long, and note that it raises an error.

        Args:
            where: The kind and the name of the function.
            when: When or where it is called.
        """

        def is_slow() -> None:
            say(
                f"{where} has not returned for {self.slow_after:g} s {when}; the training waits for it "
                "(later such waits are not printed)"
            )
            self._said.add(where)

        timer = threading.Timer(self.slow_after, is_slow)
        timer.daemon = True
        if where not in self._said:
            timer.start()
        try:
            yield
        except SystemExit as end:
            say(f"{where} ended the process {when} (SystemExit {end.code!r}); it must return its results")
            raise
        except Exception as error:
            self._notes.append(f"{where} raised this {type(error).__name__} {when}")
            raise
        finally:
            timer.cancel()


class WorkersReward:
    """A reward function that TRL's asynchronous trainer calls in a process of its own, which names it if it fails.

    TRL raises the error of that process in the trainer, as a text with its traceback and notes. The object can be
    pickled if the function can.

    Args:
        function: The function, of which a call returns no coroutine.
        slow_after: The time in seconds after which a line says that it has not returned.
    """

    def __init__(self, function: Callable[..., Any], slow_after: float = 300.0) -> None:
        self.function = function
        self.slow_after = slow_after
        self.__name__ = name_of(function)

    def __call__(self, *arguments: Any, **columns: Any) -> Any:
        # Groups are scored at the same time, so each call has notes of its own.
        functions = UserFunctions(self.slow_after)
        with _saying(functions):
            return self._watched(functions)(*arguments, **columns)

    def _watched(self, functions: UserFunctions) -> Callable[..., Any]:
        return functions.watched(self.function, self.__name__, "in TRL's rollout worker")


class WorkersCoroutine(WorkersReward):
    """A `WorkersReward` of a function of which a call returns a coroutine."""

    async def __call__(self, *arguments: Any, **columns: Any) -> Any:
        functions = UserFunctions(self.slow_after)
        with _saying(functions):
            return await self._watched(functions)(*arguments, **columns)


@contextmanager
def _saying(functions: UserFunctions) -> Generator[None, None, None]:
    """Add what is known of a function to an error of the block, and print it if there is none yet."""
    try:
        yield
    except Exception as error:
        for note in functions.notes:
            error.add_note(f"bandpo: {note}")
        raise
    for note in functions.notes:
        say(note)


def for_worker(function: Callable[..., Any]) -> WorkersReward:
    """Return a reward function for TRL's worker process."""
    return WorkersCoroutine(function) if _is_async(function) else WorkersReward(function)


def _is_async(function: Callable[..., Any]) -> bool:
    """Return True if a call of a function returns a coroutine, as TRL decides it."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )


def name_of(function: Any) -> str:
    """Return the name of a reward function, as TRL logs it."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def _are_rewards(rewards: Any, number: int) -> bool:
    """Return True if there is a number, or None, for each completion."""
    if isinstance(rewards, str):
        return False
    try:
        values = [*rewards]
        for value in values:
            if isinstance(value, str):
                return False
            if value is not None:
                float(value)
    except (TypeError, ValueError):
        return False
    return len(values) == number


class Unusable(NamedTuple):
    """Rewards of a batch from which nothing can be learnt."""

    kind: str
    """``all`` if no answer has a reward, ``some`` if a part has none, ``large`` if one is infinite or too large."""
    text: str
    """A sentence that names the functions and the step."""


def unusable_rewards(rewards: Tensor, names: Sequence[str], step: int) -> Unusable | None:
    """Return what is wrong with the rewards of a batch; None if nothing is.

    Args:
        rewards: The rewards, (sequences, reward functions); NaN where a function gave none.
        names: The names of the reward functions.
        step: The number of optimiser steps so far.

    >>> unusable_rewards(torch.tensor([[0.0], [torch.nan]]), ["graded"], 4).text
    '1 of 2 answers after step 4 has no reward: graded returned NaN or None for it'
    """
    large = rewards.abs() > LARGEST_REWARD  # False for NaN
    if large.any():
        column = int(large.any(dim=0).int().argmax())
        values = rewards[:, column][large[:, column]]
        return Unusable(
            "large",
            f"the reward function {names[column]} returned {values[0].item():g} for {len(values)} of {len(rewards)} "
            f"answers after step {step}, so the mean or the deviation of their groups is not finite in float32",
        )
    unscored = int(rewards.isnan().all(dim=1).sum())
    functions = f"reward function {names[0]}" if len(names) == 1 else f"reward functions {', '.join(names)}"
    if unscored == len(rewards):
        return Unusable(
            "all",
            f"every reward after step {step} is NaN or None, so there is nothing to learn from: see the {functions}, "
            "and whether the columns that are read there are in the data",
        )
    if unscored:
        verb, them = ("has", "it") if unscored == 1 else ("have", "them")
        return Unusable(
            "some",
            f"{unscored} of {len(rewards)} answers after step {step} {verb} no reward: {', '.join(names)} returned "
            f"NaN or None for {them}",
        )
    return None


# Checkpoints ----------------------------------------------------------------------------------------------------------


@contextmanager
def naming_checkpoint(folder: Path, step: int) -> Generator[None, None, None]:
    """Say in an error of the block, which writes a checkpoint, that it is incomplete, and which one is not.

    Args:
        folder: The folder of the checkpoints.
        step: The number of optimiser steps so far.
    """
    checkpoint = folder / f"checkpoint-{step}"
    try:
        yield
    except Exception as error:
        if not checkpoint.is_dir() or (checkpoint / STATE).is_file():
            raise
        # transformers writes this file last.
        whole = [path.parent for path in folder.glob(f"checkpoint-*/{STATE}")]
        steps = [int(path.name.partition("-")[2]) for path in whole if path.name[11:].isdecimal()]
        remedy = "there is no checkpoint before it"
        if steps:
            remedy = f"resume_from_checkpoint={str(folder / f'checkpoint-{max(steps)}')!r} goes on from the one before"
        error.add_note(f"bandpo: {checkpoint} is incomplete, so remove it; {remedy}")
        raise


STATE = "trainer_state.json"
"""The file of a checkpoint that transformers writes last."""
