"""One sentence for each way in which a training ends early: its memory, its weights or its reward functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bandpo.integrations.trl.training_faults import NOT_FINITE, first_parameter_not_finite
from bandpo_lab.errors import RunProblem, is_reported
from bandpo_lab.training.checkpoints import saved_checkpoints

if TYPE_CHECKING:
    from transformers import Trainer

OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "bad_alloc",
    "cannot allocate memory",
)
"""Parts of the error messages of torch if the memory is exhausted. On a GPU it raises an OutOfMemoryError, whatever the
message, and on a CPU a RuntimeError."""


@contextmanager
def naming_failures(trainer: Trainer, folder: Path) -> Generator[None, None, None]:
    """Name the step, the cause and the newest checkpoint in an error of memory or of the weights.

    Args:
        trainer: The trainer, which knows the step.
        folder: The run folder.

    Raises:
        RunProblem: The memory was exhausted, or the weights are NaN or infinite.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if is_reported(error):
            raise
        message = " ".join(str(error).split())
        is_memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
            part in message.lower() for part in OUT_OF_MEMORY
        )
        where = f"after step {trainer.state.global_step}"
        if is_memory:
            detail = message[:200] or type(error).__name__
            raise RunProblem(
                f"the memory is exhausted {where} ({detail}): use a smaller per_device_train_batch_size or "
                f"max_completion_length; {_advice(folder)}"
            ) from error
        if NOT_FINITE in message:
            name = first_parameter_not_finite(trainer.model)
            cause = f"as the weight {name} is" if name else "although all weights are finite"
            raise RunProblem(
                f"the policy's probabilities are NaN or infinite {where}, {cause}: use a smaller learning_rate or "
                f"max_grad_norm; {_advice(folder)}"
            ) from error
        raise


def _advice(folder: Path) -> str:
    checkpoints = saved_checkpoints(folder)
    if not checkpoints:
        return "there is no checkpoint yet, so choose another output_dir"
    return f"{checkpoints[0].name} is whole, and the run goes on from it with --resume if the settings stay the same"


def check_weights(trainer: Any, file: str) -> None:
    """Check that all weights are finite, so that they replace no others that are.

    All processes that train together call this, and raise the error together.

    Args:
        trainer: The trainer.
        file: The name of the checkpoint or the model that is about to be written, for the message.

    Raises:
        RunProblem: A weight is NaN or infinite on any process.
    """
    name = first_parameter_not_finite(trainer.model)
    flag = torch.tensor([float(name is not None)], device=trainer.accelerator.device)
    if trainer.accelerator.reduce(flag, "sum").item():
        raise RunProblem(
            f"the weight {name or 'of another process'} is NaN or infinite after step {trainer.state.global_step}, so "
            f"{file} is not written: use a smaller learning_rate or max_grad_norm; "
            f"{_advice(Path(trainer.args.output_dir))}"
        )


class GuardedReward:
    """A reward function whose errors and results without meaning raise one sentence with its name.

    It can be pickled if the function can, as TRL's asynchronous trainer calls it in another process.

    Args:
        name: The name, as the user wrote it.
        function: The reward function.

    >>> GuardedReward("mine", lambda completions, **_: None)(completions=["a"])
    Traceback (most recent call last):
        ...
    rlvet.errors.RunProblem: the reward function mine returned None, and not one number for each of the 1 completions
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._name = name
        # The name of `functools.wraps`, by which the signature of the function is found.
        self.__wrapped__ = function
        # TRL logs it.
        self.__name__: str = getattr(function, "__name__", name.rpartition(".")[2])
        self.__doc__ = function.__doc__

    def __call__(self, *arguments: Any, **columns: Any) -> Any:
        try:
            rewards = self.__wrapped__(*arguments, **columns)
        except SystemExit as error:
            raise RunProblem(
                f"the reward function {self._name} ended the process (SystemExit {error.code!r}); it must return "
                "rewards"
            ) from error
        except Exception as error:
            if is_reported(error):
                raise
            message = " ".join(str(error).split())
            raise RunProblem(
                f"the reward function {self._name} raised {type(error).__name__}: {message[:300]}"
            ) from error
        number = len(columns.get("completions", arguments[1] if len(arguments) > 1 else ()))
        if not _are_rewards(rewards, number):
            raise RunProblem(
                f"the reward function {self._name} returned {rewards!r:.80}, and not one number for each of the "
                f"{number} completions"
            )
        return rewards


def guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reward function as a `GuardedReward`; one that is asynchronous as it is, since TRL awaits it.

    Args:
        name: The name, as the user wrote it.
        function: The reward function.
    """
    return function if inspect.iscoroutinefunction(function) else GuardedReward(name, function)


def _are_rewards(rewards: Any, number: int) -> bool:
    """Return True if there is a number, or None, for each completion."""
    try:
        values = list(rewards)
        for value in values:
            if value is not None:
                float(value)
    except (TypeError, ValueError):
        return False
    return len(values) == number and not isinstance(rewards, str)
