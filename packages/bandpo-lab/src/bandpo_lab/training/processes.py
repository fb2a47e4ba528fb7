"""Communication between the processes of one training, and detection of lost processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from bandpo_lab.errors import RunProblem, is_reported

if TYPE_CHECKING:
    from transformers import TrainingArguments

T = TypeVar("T")

COMMUNICATION_ERRORS = (
    "gloo",
    "nccl",
    "timed out waiting",
    "connection closed by peer",
    "connection reset by peer",
)
"""Parts of the error messages of a failed communication between processes."""
ANSWER_SECONDS = 10.0
"""The time for which a process with such an error waits for the answers of the others, in seconds."""


class Processes:
    """The processes of one training, as seen by one of them.

    Args:
        rank: The rank of this process.
        size: The number of processes.
        first_on_machine: True if this is the first process on its machine.
        timeout: The timeout of communication, in seconds.
    """

    def __init__(self, rank: int = 0, size: int = 1, first_on_machine: bool = True, timeout: float = 1800):
        self.rank = rank
        self.size = size
        self.first_on_machine = first_on_machine
        self.timeout = timeout

    @classmethod
    def of(cls, training: TrainingArguments) -> Processes:
        """Return the processes that transformers has set up for a training configuration."""
        return cls(
            training.process_index,
            training.world_size,
            first_on_machine=training.local_process_index == 0,
            timeout=training.ddp_timeout,
        )

    @property
    def main(self) -> bool:
        """True if this is the main process, which writes files."""
        return self.rank == 0

    def gather(self, compute: Callable[[], T]) -> list[T]:
        """Call a function on every process, and return the results of all processes on every process.

        Raises:
            ValueError: The function raised an error of bandpo or rlvet on this process or on another.
            RunProblem: The function raised another error on another process. The process itself raises that error.
        """
        value: T | None = None
        error: Exception | None = None
        try:
            value = compute()
        except Exception as own_error:
            error = own_error
        if self.size == 1:
            outcomes: list[Any] = [(value, error)]
        else:
            outcomes = [None] * self.size
            dist.all_gather_object(outcomes, (value, error and _picklable(error)))
        if error is not None:
            raise error
        for rank, (_, remote_error) in enumerate(outcomes):
            if isinstance(remote_error, BaseException) and is_reported(remote_error):
                raise remote_error
            if remote_error is not None:
                raise RunProblem(f"rank {rank} stopped with {remote_error}")
        return [value for value, _ in outcomes]

    def from_main(self, compute: Callable[[], T]) -> T:
        """Call a function on the main process, and return its result on every process.

        Raises:
            ValueError: The function raised an error of bandpo or rlvet.
            RunProblem: The function raised another error, and this is not the main process.
        """
        results = self.gather(lambda: compute() if self.main else None)
        return results[0]  # type: ignore[return-value]

    @contextmanager
    def naming_lost_processes(self) -> Generator[None, None, None]:
        """Name the processes that no longer answer if a communication in the block fails.

        Raises:
            RunProblem: A communication failed, and at least one other process does not answer.
        """
        try:
            yield
        except RuntimeError as error:
            message = " ".join(str(error).split())
            is_communication_error = any(text in message.lower() for text in COMMUNICATION_ERRORS)
            if self.size == 1 or not is_communication_error:
                raise
            silent = self._silent_ranks()
            if not silent:
                raise
            ranks = f"{'rank' if len(silent) == 1 else 'ranks'} {', '.join(map(str, silent))}"
            does = "does" if len(silent) == 1 else "do"
            raise RunProblem(
                f"{ranks} of {self.size} {does} not answer rank {self.rank} (ddp_timeout "
                f"is {self.timeout:g} s): it was stopped or killed, or is much slower. Add --resume to go on from "
                f"the last checkpoint. The exchange failed with: {message}"
            ) from error

    def _silent_ranks(self) -> list[int]:
        """Return the ranks that do not report an error to the store within `ANSWER_SECONDS`."""
        try:
            store = dist.distributed_c10d._get_default_store()
            store.set(f"bandpo/answers/{self.rank}", "here")
            silent = {rank for rank in range(self.size) if rank != self.rank}
            end = time.monotonic() + ANSWER_SECONDS
            while silent and time.monotonic() < end:
                silent = {rank for rank in silent if not store.check([f"bandpo/answers/{rank}"])}
                time.sleep(0.2)
            return sorted(silent)
        except RuntimeError:
            # The store does not answer; it is a part of rank 0, or of the launcher on its machine.
            return [0] if self.rank else []


def _picklable(error: Exception) -> Any:
    """Return an error in a form that other processes can receive: one of bandpo or rlvet as it is, others as text."""
    if is_reported(error):
        return type(error)(str(error))
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
